//! A tensor `[B, heads, S, D]` as it lies in memory, and how tiles of it reach the kernels.

use burn_flex::FlexTensor;

use super::gemm::Matrix;
use super::real::{Real, Stored, in_place};

/// A tensor read through its strides, in place.
#[derive(Clone, Copy)]
pub(super) struct View<'a, E> {
    storage: &'a [E],
    start: isize,
    dims: [usize; 4],
    strides: [isize; 4],
}

impl<'a, E: Stored> View<'a, E> {
    /// # Panics
    ///
    /// If the tensor is not of `E`, not of four dimensions, or reaches beyond its storage; Burn builds no such tensor
    /// behind the checks that precede this.
    pub(super) fn new(tensor: &'a FlexTensor) -> Self {
        let layout = tensor.layout();
        let dims: [usize; 4] = layout.shape().dims();
        let strides: [isize; 4] = layout.strides().try_into().expect("one stride per dimension");
        let storage = tensor.storage::<E>();
        let start = layout.start_offset() as isize;
        if dims.iter().all(|&n| n > 0) {
            // What makes every pointer below valid: the lowest and the highest element are in the storage.
            let reach = |keep: fn(isize) -> bool| -> isize {
                dims.iter().zip(strides).filter(|(_, s)| keep(*s)).map(|(&n, s)| (n as isize - 1) * s).sum()
            };
            let (low, high) = (start + reach(|s| s < 0), start + reach(|s| s > 0));
            assert!(low >= 0 && (high as usize) < storage.len(), "a tensor reaches beyond its storage");
        }
        Self { storage, start, dims, strides }
    }

    fn pointer(&self, b: usize, head: usize, i: usize) -> *const E {
        debug_assert!(b < self.dims[0] && head < self.dims[1] && i < self.dims[2]);
        let [sb, sh, si, _] = self.strides;
        // In isize: the product of an index and a stride of a tensor that fits in memory does not overflow.
        let offset = self.start + b as isize * sb + head as isize * sh + i as isize * si;
        // SAFETY: `new` checked the extremes.
        unsafe { self.storage.as_ptr().offset(offset) }
    }

    /// D.
    pub(super) fn dim(&self) -> usize {
        self.dims[3]
    }

    /// One row, converted.
    pub(super) fn read(&self, b: usize, head: usize, i: usize, to: &mut [E::Real]) {
        let (row, d, stride) = (self.pointer(b, head, i), self.dims[3], self.strides[3]);
        if stride == 1 || d == 1 {
            // SAFETY: `new` checked the extremes, and the row is contiguous.
            E::widen_row(unsafe { std::slice::from_raw_parts(row, d) }, &mut to[..d]);
        } else {
            for (e, to) in to[..d].iter_mut().enumerate() {
                // SAFETY: `new` checked the extremes.
                *to = unsafe { *row.offset(e as isize * stride) }.widen();
            }
        }
    }

    /// `rows` rows from `first` on as a tile of whole registers: the tensor itself where its rows can be read by registers
    /// (the compute type, unit stride, D a multiple of a cache line), else a converted copy in `copy`, padded with its zeros.
    pub(super) fn tile(
        &self,
        (b, head): (usize, usize),
        first: usize,
        rows: usize,
        copy: &mut [E::Real],
    ) -> Matrix<E::Real> {
        let d = self.dims[3];
        if self.direct() {
            let pointer = self.pointer(b, head, first).cast();
            return Matrix { pointer, row: self.strides[2], column: 1 };
        }
        let width = d.next_multiple_of(E::Real::PAD);
        for (r, to) in copy.chunks_exact_mut(width).take(rows).enumerate() {
            self.read(b, head, first + r, to);
        }
        Matrix::rows(copy, width)
    }

    fn direct(&self) -> bool {
        in_place::<E>() && self.strides[3] == 1 && self.dims[3].is_multiple_of(E::Real::PAD)
    }

    /// `rows` rows from `first` on, transposed and scaled, as `[D, width]`; columns beyond `rows` are zero.
    pub(super) fn transpose(
        &self,
        (b, head): (usize, usize),
        first: usize,
        rows: usize,
        scale: E::Real,
        width: usize,
        to: &mut [E::Real],
    ) {
        let (d, stride) = (self.dims[3], self.strides[3]);
        for column in to.chunks_exact_mut(width).take(d) {
            column[rows..].fill(E::Real::ZERO);
        }
        for r in 0..rows {
            let row = self.pointer(b, head, first + r);
            for e in 0..d {
                // SAFETY: `new` checked the extremes.
                to[e * width + r] = unsafe { *row.offset(e as isize * stride) }.widen().times(scale);
            }
        }
    }
}
