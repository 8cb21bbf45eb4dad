//! The numbers that kernels compute in (f32, f64) and the ones that tensors hold (also f16, bf16).

use burn::tensor::{DType, Element, bf16, f16};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use pulp::Simd;

/// Bytes to which scratch rows are padded: one cache line, and one register of the widest instruction set.
pub(super) const LINE: usize = 64;

/// A type to compute in, `Lanes` of them at a time.
pub(super) trait Real: Stored<Real = Self> + PartialOrd {
    /// One register.
    type Lanes<S: Simd>: Pod;

    const ZERO: Self;
    const NEG_INFINITY: Self;
    const INFINITY: Self;
    /// Elements in a [`LINE`]: a multiple of the lanes of every instruction set.
    const PAD: usize = LINE / size_of::<Self>();

    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn ln(self) -> Self;
    fn times(self, other: Self) -> Self;
    fn plus(self, other: Self) -> Self;
    fn reciprocal(self) -> Self;

    fn lanes<S: Simd>() -> usize {
        size_of::<Self::Lanes<S>>() / size_of::<Self>()
    }
    fn splat<S: Simd>(s: S, x: Self) -> Self::Lanes<S>;
    fn add<S: Simd>(s: S, a: Self::Lanes<S>, b: Self::Lanes<S>) -> Self::Lanes<S>;
    fn sub<S: Simd>(s: S, a: Self::Lanes<S>, b: Self::Lanes<S>) -> Self::Lanes<S>;
    fn mul<S: Simd>(s: S, a: Self::Lanes<S>, b: Self::Lanes<S>) -> Self::Lanes<S>;
    /// `a b + c`
    fn mul_add<S: Simd>(s: S, a: Self::Lanes<S>, b: Self::Lanes<S>, c: Self::Lanes<S>) -> Self::Lanes<S>;
    fn max<S: Simd>(s: S, a: Self::Lanes<S>, b: Self::Lanes<S>) -> Self::Lanes<S>;
    /// `instead` wherever `a` is `value`.
    fn replace<S: Simd>(s: S, a: Self::Lanes<S>, value: Self, instead: Self) -> Self::Lanes<S>;
    /// tanh(x) to about one unit in the last place.
    fn tanh<S: Simd>(s: S, x: Self::Lanes<S>) -> Self::Lanes<S>;
    /// e^x to about one unit in the last place, exactly 1 at 0, exactly 0 where the result would be subnormal.
    fn exp<S: Simd>(s: S, x: Self::Lanes<S>) -> Self::Lanes<S>;
}

macro_rules! arithmetic {
    ($real:ty, $lanes:ident, $splat:ident, $add:ident, $sub:ident, $mul:ident, $mul_add:ident, $max:ident, $equal:ident,
     $select:ident) => {
        type Lanes<S: Simd> = S::$lanes;

        const ZERO: Self = 0.0;
        const NEG_INFINITY: Self = <$real>::NEG_INFINITY;
        const INFINITY: Self = <$real>::INFINITY;

        #[inline(always)]
        fn from_f64(x: f64) -> Self {
            x as $real
        }
        #[inline(always)]
        fn to_f64(self) -> f64 {
            f64::from(self)
        }
        #[inline(always)]
        fn ln(self) -> Self {
            self.ln()
        }
        #[inline(always)]
        fn times(self, other: Self) -> Self {
            self * other
        }
        #[inline(always)]
        fn plus(self, other: Self) -> Self {
            self + other
        }
        #[inline(always)]
        fn reciprocal(self) -> Self {
            1.0 / self
        }
        #[inline(always)]
        fn splat<S: Simd>(s: S, x: Self) -> S::$lanes {
            s.$splat(x)
        }
        #[inline(always)]
        fn add<S: Simd>(s: S, a: S::$lanes, b: S::$lanes) -> S::$lanes {
            s.$add(a, b)
        }
        #[inline(always)]
        fn sub<S: Simd>(s: S, a: S::$lanes, b: S::$lanes) -> S::$lanes {
            s.$sub(a, b)
        }
        #[inline(always)]
        fn mul<S: Simd>(s: S, a: S::$lanes, b: S::$lanes) -> S::$lanes {
            s.$mul(a, b)
        }
        #[inline(always)]
        fn mul_add<S: Simd>(s: S, a: S::$lanes, b: S::$lanes, c: S::$lanes) -> S::$lanes {
            s.$mul_add(a, b, c)
        }
        #[inline(always)]
        fn max<S: Simd>(s: S, a: S::$lanes, b: S::$lanes) -> S::$lanes {
            s.$max(a, b)
        }
        #[inline(always)]
        fn replace<S: Simd>(s: S, a: S::$lanes, value: Self, instead: Self) -> S::$lanes {
            s.$select(s.$equal(a, s.$splat(value)), s.$splat(instead), a)
        }
    };
}

impl Real for f32 {
    arithmetic!(f32, f32s, splat_f32s, add_f32s, sub_f32s, mul_f32s, mul_add_e_f32s, max_f32s, equal_f32s, select_f32s);

    #[inline(always)]
    fn exp<S: Simd>(s: S, x: S::f32s) -> S::f32s {
        // e^x = 2^n 2^f with n = round(x log2(e)) and |f| <= 1/2. Adding 1.5 2^23 rounds to an integer, which then lies in
        // the lowest bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        // 2^f = 1 + f (c0 + c1 f + ..), interpolated at Chebyshev nodes: relative error below 1e-8.
        const C: [f32; 6] =
            [std::f32::consts::LN_2, 0.240_226_5, 0.055_503_57, 0.009_618_082, 0.001_339_086_3, 0.000_154_531_63];
        let log2e = s.splat_f32s(std::f32::consts::LOG2_E);
        let round = s.splat_f32s(ROUND);
        let shifted = s.mul_add_e_f32s(x, log2e, round);
        let n = s.sub_f32s(shifted, round);
        let f = s.mul_add_e_f32s(x, log2e, s.neg_f32s(n));
        let mut p = s.splat_f32s(C[5]);
        for c in [C[4], C[3], C[2], C[1], C[0], 1.0] {
            p = s.mul_add_e_f32s(p, f, s.splat_f32s(c));
        }
        let n = s.wrapping_dyn_shl_u32s(s.transmute_u32s_f32s(shifted), s.splat_u32s(23));
        let scaled = s.transmute_f32s_u32s(s.add_u32s(s.transmute_u32s_f32s(p), n));
        // 2^-126 is the smallest normal number. A comparison with NaN is false, so NaN passes through; so does what
        // overflows, which no softmax produces.
        let tiny = s.less_than_f32s(x, s.splat_f32s(-87.3));
        let scaled = s.select_f32s(tiny, s.splat_f32s(0.0), scaled);
        let huge = s.greater_than_f32s(x, s.splat_f32s(88.0));
        s.select_f32s(huge, s.splat_f32s(f32::INFINITY), scaled)
    }

    #[inline(always)]
    fn tanh<S: Simd>(s: S, x: S::f32s) -> S::f32s {
        // x + x^3 (c0 + c1 x^2 + ..) up to 0.625 (Cephes' coefficients), since 1 - 2 / (e^2x + 1) loses the digits of small results.
        const C: [f32; 5] = [-0.333_332_8, 0.133_314_42, -0.053_739_715, 0.020_639_088, -0.005_704_988_7];
        let (one, two) = (s.splat_f32s(1.0), s.splat_f32s(2.0));
        let size = s.abs_f32s(x);
        let square = s.mul_f32s(x, x);
        let mut p = s.splat_f32s(C[4]);
        for c in [C[3], C[2], C[1], C[0]] {
            p = s.mul_add_e_f32s(p, square, s.splat_f32s(c));
        }
        let small = s.mul_add_e_f32s(s.mul_f32s(p, square), x, x);
        let grown = <Self as Real>::exp(s, s.mul_f32s(two, size));
        let large = s.sub_f32s(one, s.div_f32s(two, s.add_f32s(grown, one)));
        let large = s.select_f32s(s.less_than_f32s(x, s.splat_f32s(0.0)), s.neg_f32s(large), large);
        s.select_f32s(s.less_than_f32s(size, s.splat_f32s(0.625)), small, large)
    }
}

impl Real for f64 {
    arithmetic!(f64, f64s, splat_f64s, add_f64s, sub_f64s, mul_f64s, mul_add_e_f64s, max_f64s, equal_f64s, select_f64s);

    /// One lane at a time: f64 is for checking, not for training.
    #[inline(always)]
    fn exp<S: Simd>(_: S, mut x: S::f64s) -> S::f64s {
        for lane in bytemuck::cast_slice_mut::<S::f64s, f64>(std::slice::from_mut(&mut x)) {
            *lane = lane.exp();
        }
        x
    }

    #[inline(always)]
    fn tanh<S: Simd>(_: S, mut x: S::f64s) -> S::f64s {
        for lane in bytemuck::cast_slice_mut::<S::f64s, f64>(std::slice::from_mut(&mut x)) {
            *lane = lane.tanh();
        }
        x
    }
}

/// What a tensor holds.
pub(super) trait Stored: Pod + Element + Send + Sync {
    /// What it is computed in.
    type Real: Real;
    const DTYPE: DType;

    fn widen(self) -> Self::Real;
    fn narrow(x: Self::Real) -> Self;

    fn widen_row(from: &[Self], to: &mut [Self::Real]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
    }

    fn narrow_row(from: &[Self::Real], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::narrow(*from);
        }
    }

    /// Adds to what is there; to zeros, exactly [`narrow_row`](Self::narrow_row).
    fn add_row(from: &[Self::Real], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::narrow(to.widen().plus(*from));
        }
    }
}

macro_rules! stored_itself {
    ($real:ty, $dtype:expr) => {
        impl Stored for $real {
            type Real = $real;
            const DTYPE: DType = $dtype;

            #[inline(always)]
            fn widen(self) -> $real {
                self
            }
            #[inline(always)]
            fn narrow(x: $real) -> $real {
                x
            }
        }
    };
}
stored_itself!(f32, DType::F32);
stored_itself!(f64, DType::F64);

macro_rules! stored_half {
    ($half:ty, $dtype:expr) => {
        impl Stored for $half {
            type Real = f32;
            const DTYPE: DType = $dtype;

            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(x: f32) -> $half {
                <$half>::from_f32(x)
            }
            // A slice at a time: the processor's own conversion, where it has one.
            fn widen_row(from: &[$half], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }
            fn narrow_row(from: &[f32], to: &mut [$half]) {
                to.convert_from_f32_slice(from);
            }
        }
    };
}
stored_half!(f16, DType::F16);
stored_half!(bf16, DType::BF16);

/// Whether `E` is its own compute type, so that its rows can be read in place.
pub(super) fn in_place<E: Stored>() -> bool {
    std::any::TypeId::of::<E>() == std::any::TypeId::of::<E::Real>()
}
