//! Buffers that results are written into, and the type in which they are summed.

use burn::tensor::{DType, Device, Tensor};

/// The type in which partial results of `dtype` are summed: f64 stays, everything else is summed in f32.
pub fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Zeros of shape `dims`, allocated once.
///
/// `Tensor::zeros` on Flex fills one allocation and copies it into a better aligned one: twice the bytes, for a moment, just where
/// a large buffer begins. Filling with a value allocates aligned from the start.
pub fn zeros<const D: usize>(dims: [usize; D], device: &Device, dtype: DType) -> Tensor<D> {
    Tensor::full(dims, 0.0, (device, dtype))
}

/// A copy with storage of its own: a view keeps the whole alive, and what another rank sent may be that rank's memory.
pub fn own<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dims = x.dims();
    zeros(dims, &x.device(), x.dtype()).slice_assign(std::array::from_fn::<_, D, _>(|dim| 0..dims[dim]), x)
}
