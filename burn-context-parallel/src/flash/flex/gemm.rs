//! The matrix product inside a tile: `c (+)= a b`, vectorised along the columns of `b` and `c`.
//!
//! Tiles are small and live in cache, so nothing is packed here: `a` is read one element at a time with any strides
//! (a transposed `a` costs nothing), rows of `b` and `c` are read by whole registers. The kernels choose for each product
//! the side that is contiguous already.

use pulp::{Simd, WithSimd};

use super::real::Real;

/// An operand: element `(i, j)` is at `pointer + i * row + j * column`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<R> {
    pub(super) pointer: *const R,
    pub(super) row: isize,
    pub(super) column: isize,
}

impl<R> Matrix<R> {
    /// A tile with `width` elements from row to row.
    pub(super) fn rows(tile: &[R], width: usize) -> Self {
        Self { pointer: tile.as_ptr(), row: width as isize, column: 1 }
    }

    pub(super) fn transposed(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }
}

/// `c [m, n] = a [m, k] b [k, n]`, or `c += a b` with `add`. `n` counts elements, and is a multiple of the lanes.
///
/// # Safety
///
/// Every element of the three matrices must be readable (of `c` writable), `b` and `c` must have unit column stride, and `c`
/// must overlap neither.
#[inline(always)]
pub(super) unsafe fn gemm<R: Real, S: Simd>(
    s: S,
    [m, n, k]: [usize; 3],
    a: Matrix<R>,
    b: Matrix<R>,
    c: *mut R,
    c_row: usize,
    add: bool,
) {
    debug_assert!(b.column == 1 && n.is_multiple_of(R::lanes::<S>()));
    // A function of its own for each instruction set: inlined, it would be most of every kernel, several times over.
    s.vectorize(Product { m, n, k, a, b, c, c_row, add });
}

/// What [`gemm`] was promised.
struct Product<R> {
    m: usize,
    n: usize,
    k: usize,
    a: Matrix<R>,
    b: Matrix<R>,
    c: *mut R,
    c_row: usize,
    add: bool,
}

impl<R: Real> WithSimd for Product<R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, s: S) {
        let vectors = self.n / R::lanes::<S>();
        let mut v = 0;
        // Registers hold an M x N block of `c`, one row of N registers of `b` and one element of `a`. With 32 registers
        // 6 x 4 + 4 + 1 fit, with 16 (AVX2, NEON) 6 x 2 + 2 + 1; narrow matrices take more rows, so that enough
        // independent sums are under way to hide the latency of a multiply-add.
        // SAFETY: the columns are within n, the rest was promised to `gemm`, which alone builds this.
        unsafe {
            if S::REGISTER_COUNT >= 32 {
                while v + 4 <= vectors {
                    self.columns::<S, 6, 4>(s, v);
                    v += 4;
                }
                while v + 2 <= vectors {
                    self.columns::<S, 12, 2>(s, v);
                    v += 2;
                }
            } else {
                while v + 2 <= vectors {
                    self.columns::<S, 6, 2>(s, v);
                    v += 2;
                }
            }
            while v < vectors {
                self.columns::<S, 12, 1>(s, v);
                v += 1;
            }
        }
    }
}

impl<R: Real> Product<R> {
    /// N registers of columns from the `v`th on, all rows.
    ///
    /// # Safety
    ///
    /// As [`gemm`], and the columns must exist.
    #[inline(always)]
    unsafe fn columns<S: Simd, const M: usize, const N: usize>(&self, s: S, v: usize) {
        let mut i = 0;
        // SAFETY: i + (rows of the block) <= m.
        unsafe {
            while i + M <= self.m {
                self.block::<S, M, N>(s, i, v);
                i += M;
            }
            if M > 6 && i + 6 <= self.m {
                self.block::<S, 6, N>(s, i, v);
                i += 6;
            }
            if i + 4 <= self.m {
                self.block::<S, 4, N>(s, i, v);
                i += 4;
            }
            while i < self.m {
                self.block::<S, 1, N>(s, i, v);
                i += 1;
            }
        }
    }

    /// The block of M rows from `i` and N registers from `v`.
    ///
    /// # Safety
    ///
    /// As [`gemm`], and the rows and columns must exist.
    #[inline(always)]
    unsafe fn block<S: Simd, const M: usize, const N: usize>(&self, s: S, i: usize, v: usize) {
        let lanes = R::lanes::<S>();
        // SAFETY: within the matrices by the caller's promise; loads and stores are unaligned ones.
        unsafe {
            let a = self.a.pointer.offset(i as isize * self.a.row);
            let b = self.b.pointer.add(v * lanes);
            let c = self.c.add(i * self.c_row + v * lanes);
            let mut sums = [[R::splat(s, R::ZERO); N]; M];
            if self.add {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = load(c.add(r * self.c_row + j * lanes));
                    }
                }
            }
            for p in 0..self.k as isize {
                let a = a.offset(p * self.a.column);
                let b = b.offset(p * self.b.row);
                let mut row = [R::splat(s, R::ZERO); N];
                for (j, register) in row.iter_mut().enumerate() {
                    *register = load(b.add(j * lanes));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = R::splat(s, *a.offset(r as isize * self.a.row));
                    for (sum, register) in sums.iter_mut().zip(row) {
                        *sum = R::mul_add(s, x, register, *sum);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    store(c.add(r * self.c_row + j * lanes), *sum);
                }
            }
        }
    }
}

/// # Safety
///
/// A whole register must be readable at `from`.
#[inline(always)]
pub(super) unsafe fn load<R, L: bytemuck::Pod>(from: *const R) -> L {
    // SAFETY: the caller's promise; any bits are an `L`.
    unsafe { from.cast::<L>().read_unaligned() }
}

/// # Safety
///
/// A whole register must be writable at `to`.
#[inline(always)]
pub(super) unsafe fn store<R, L: bytemuck::Pod>(to: *mut R, lanes: L) {
    // SAFETY: the caller's promise.
    unsafe { to.cast::<L>().write_unaligned(lanes) }
}
