//! The arithmetic of scores that all kernels share.

use cubecl::prelude::*;

/// Stands for minus infinity where that is not to be computed with: devices may compile as if there were none.
pub(super) const HIDDEN: f32 = -1e30;
/// What is below stands for it.
pub(super) const FLOOR: f32 = -1e29;
/// Scores beyond this are computed in two parts: below it, rounding a score changes no output by more than 10^-5 of the largest value.
pub(super) const LARGE: f32 = 128.0;

/// What stands for plus infinity where scores are measured from it: nothing is left of any of them.
const ABOVE_ALL: f32 = 3e38;

/// The log-sum-exp that a backward pass measures a row's scores from. That of a row which sees nothing is minus infinity, and no
/// probability is to come of it.
#[cube]
pub(super) fn origin(lse: f32) -> f32 {
    select(lse < f32::new(-ABOVE_ALL), f32::new(ABOVE_ALL), lse)
}

/// The probability of a score less its row's log-sum-exp: beyond 1 by rounding at most, and none where the difference is none.
#[cube]
pub(super) fn probability<N: Size>(less: Vector<f32, N>) -> Vector<f32, N> {
    let most = Vector::<f32, N>::new(1.0f32);
    // Not the smaller of both: that of NaN and 1 is 1.
    select_many(less.greater_than(&most), most, less).exp()
}

/// `cap tanh(s / cap)`.
#[cube]
pub(super) fn bend<N: Size>(score: Vector<f32, N>, cap: f32) -> Vector<f32, N> {
    Vector::new(cap) * (score / Vector::new(cap)).tanh()
}

/// The slope of [`bend`] where it gave `bent`.
#[cube]
pub(super) fn slope<N: Size>(bent: Vector<f32, N>, cap: f32) -> Vector<f32, N> {
    let part = bent / Vector::new(cap);
    Vector::new(1.0f32) - part * part
}

/// A number that is `x`, and of which a compiler does not know that it is: sums whose rounding errors are computed must not be
/// rearranged. `zero` is 0 at run time.
#[cube]
pub(super) fn opaque<N: Size>(x: Vector<f32, N>, zero: u32) -> Vector<f32, N> {
    Vector::<f32, N>::reinterpret(Vector::<u32, N>::reinterpret(x) ^ Vector::new(zero))
}

/// The leading 12 bits of `x`: products of two such numbers are exact.
#[cube]
pub(super) fn leading<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    Vector::<f32, N>::reinterpret(Vector::<u32, N>::reinterpret(x) & Vector::new(0xffff_f000u32))
}

/// Adds `a b` to the sum of two parts `(high, low)`, which knows 20 bits more than f32.
#[cube]
pub(super) fn add_product<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    high: &mut Vector<f32, N>,
    low: &mut Vector<f32, N>,
    zero: u32,
) {
    let a_lead = leading(a);
    let b_lead = leading(b);
    let a_rest = a - a_lead;
    let b_rest = b - b_lead;
    let product = a_lead * b_lead;
    let before = *high;
    let sum = opaque(before + product, zero);
    let part = opaque(sum - before, zero);
    let lost = opaque(before - opaque(sum - part, zero), zero) + opaque(product - part, zero);
    *high = sum;
    *low += lost + (a_lead * b_rest + a_rest * b_lead) + a_rest * b_rest;
}

/// `(high, low)` times `scale + scale_rest`, as a number and what it lacks.
#[cube]
pub(super) fn scaled<N: Size>(
    high: &mut Vector<f32, N>,
    low: &mut Vector<f32, N>,
    scale: f32,
    scale_rest: f32,
    zero: u32,
) {
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut rest = Vector::<f32, N>::new(0.0);
    add_product(*high, Vector::new(scale), &mut sum, &mut rest, zero);
    let rest = rest + *low * Vector::new(scale) + *high * Vector::new(scale_rest);
    let whole = opaque(sum + rest, zero);
    *low = rest - opaque(whole - sum, zero);
    *high = whole;
}

/// Whether a number is large, and does not stand for infinity.
#[cube]
pub(super) fn is_large(x: f32) -> bool {
    let size = x.abs();
    size > f32::new(LARGE) && size < f32::new(1e29)
}

/// `x` as results have it: rounded to the nearest, to the even one of two.
#[cube]
pub(super) fn narrow<O: Float, N: Size>(x: Vector<f32, N>, #[comptime] by_bits: bool) -> Vector<O, N> {
    if comptime!(by_bits) {
        let bits = Vector::<u32, N>::reinterpret(x);
        let half = Vector::<u32, N>::new(16u32);
        let upper = bits >> half;
        let odd = upper & Vector::new(1u32);
        let rounded = (bits + Vector::new(0x7fffu32) + odd) >> half;
        // Of NaN rounding could make infinity: it has a bit set that is none of that one's.
        let size = bits & Vector::new(0x7fff_ffffu32);
        let nan = size.greater_than(&Vector::new(0x7f80_0000u32));
        let kept = select_many(nan, upper | Vector::new(0x40u32), rounded);
        Vector::<O, N>::reinterpret(Vector::<u16, N>::cast_from(kept))
    } else {
        Vector::cast_from(x)
    }
}
