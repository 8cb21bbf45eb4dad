//! Where rows lie in a tensor `[B, H, S, D]` of any strides, in kernels: in `usize`, which is as wide as the launch says.

use cubecl::prelude::*;

/// Where the rows of head `h` of sequence `b` begin.
#[cube]
pub(super) fn head<E: CubePrimitive>(tensor: &Tensor<E>, b: usize, h: usize) -> usize {
    b * tensor.stride(0) + h * tensor.stride(1)
}

/// Where row `i` of head `h` of sequence `b` begins.
#[cube]
pub(super) fn row<E: CubePrimitive>(tensor: &Tensor<E>, b: usize, h: usize, i: usize) -> usize {
    head(tensor, b, h) + i * tensor.stride(2)
}
