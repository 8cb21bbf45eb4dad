//! Buffers that results are written into.

use burn::tensor::{DType, Device, Tensor};

/// Zeros of shape `dims`, allocated once.
///
/// `Tensor::zeros` on Flex fills one allocation and copies it into a better aligned one: twice the bytes, for a moment, just where
/// a large buffer begins. Filling with a value allocates aligned from the start.
pub fn zeros<const D: usize>(dims: [usize; D], device: &Device, dtype: DType) -> Tensor<D> {
    Tensor::full(dims, 0.0, (device, dtype))
}
