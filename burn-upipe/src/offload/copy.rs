//! One tensor's bytes, from a device to a slot and back, on the thread that calls.

use burn::backend::Dispatch;
#[cfg(feature = "flex")]
use burn::backend::DispatchTensorKind;
use burn::backend::TensorMetadata;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::tensor::kind::Kind;
use burn::tensor::{Bool, DType, Int, Shape, Tensor, TensorData};
use burn_context_parallel::vjp::AnyTensor;

use super::queue::Arrival;
use super::{OffloadError, Slot};

/// Whether a tensor's memory is ordinary memory of this process, which is copied into buffers of ours.
pub(super) fn is_on_cpu(tensor: &AnyTensor) -> bool {
    match &tensor.kind {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(_) => true,
        #[allow(unreachable_patterns)] // where it is the only backend
        _ => false,
    }
}

/// Copies all elements in order, whatever part of whose storage the tensor is.
///
/// # Memory
///
/// A tensor that is not contiguous is made so first.
pub(super) fn into_slot(tensor: &AnyTensor, slot: &Slot) -> Result<(), OffloadError> {
    match &tensor.kind {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(_) => flex::into_slot(tensor, slot),
        #[allow(unreachable_patterns)]
        _ => {
            let flat = Shape::from(vec![tensor.shape().num_elements()]);
            let flat = reshaped(tensor.clone(), flat);
            slot.put(match kind(flat.dtype()) {
                Kind::Float => Tensor::<1>::from_dispatch(flat).into_data(),
                Kind::Int => Tensor::<1, Int>::from_dispatch(flat).into_data(),
                Kind::Bool => Tensor::<1, Bool>::from_dispatch(flat).into_data(),
            })
        }
    }
}

fn kind(dtype: DType) -> Kind {
    match dtype {
        DType::Bool(_) => Kind::Bool,
        dtype if dtype.is_int() || dtype.is_uint() => Kind::Int,
        _ => Kind::Float,
    }
}

fn reshaped(tensor: AnyTensor, shape: Shape) -> AnyTensor {
    match kind(tensor.dtype()) {
        Kind::Float => Dispatch::float_reshape(tensor, shape),
        Kind::Int => Dispatch::int_reshape(tensor, shape),
        Kind::Bool => Dispatch::bool_reshape(tensor, shape),
    }
}

/// The tensor again, on storage of its own.
///
/// # Memory
///
/// To a device that is not a CPU: from disk a buffer of the tensor's bytes on the heap, until they are there.
pub(super) fn out_of_slot(slot: &Slot, to: &Arrival) -> Result<AnyTensor, OffloadError> {
    #[cfg(feature = "flex")]
    if to.device == burn::tensor::Device::flex() {
        return flex::out_of_slot(slot, to);
    }
    let data = match slot.take_given() {
        Some(data) => data,
        None => {
            let mut bytes = vec![0; slot.bytes()];
            slot.read(&mut bytes)?;
            TensorData::from_bytes_vec(bytes, [slot.bytes() / to.dtype.size()], to.dtype)
        }
    };
    let options = (&to.device, to.dtype);
    let flat = match kind(to.dtype) {
        Kind::Float => Tensor::<1>::from_data(data, options).into_dispatch(),
        Kind::Int => Tensor::<1, Int>::from_data(data, options).into_dispatch(),
        Kind::Bool => Tensor::<1, Bool>::from_data(data, options).into_dispatch(),
    };
    Ok(reshaped(flat, to.shape.clone()))
}

#[cfg(feature = "flex")]
mod flex {
    use super::*;
    use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor};
    use burn::tensor::Bytes;
    use burn_flex::FlexTensor;
    use bytemuck::{Pod, cast_slice_mut};

    pub fn into_slot(tensor: &AnyTensor, slot: &Slot) -> Result<(), OffloadError> {
        let DispatchTensorKind::Flex(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) = &tensor.kind
        else {
            return Err(OffloadError::copy(
                "copying a tensor from its device",
                slot.bytes(),
                "of its kind none can be",
            ));
        };
        let write = |tensor: &FlexTensor| {
            let start = tensor.layout().start_offset() * tensor.dtype().size();
            slot.write(&tensor.bytes()[start..start + slot.bytes()])
        };
        if tensor.is_contiguous() { write(tensor) } else { write(&tensor.to_contiguous()) }
    }

    pub fn out_of_slot(slot: &Slot, to: &Arrival) -> Result<AnyTensor, OffloadError> {
        // Aligned for its elements from the start: nobody copies it again.
        let bytes = match to.dtype.size() {
            1 => read::<u8>(slot),
            2 => read::<u16>(slot),
            4 => read::<u32>(slot),
            _ => read::<u64>(slot),
        }?;
        let tensor = FlexTensor::from_data(TensorData::from_bytes(bytes, to.shape.clone(), to.dtype));
        Ok(DispatchTensor {
            kind: DispatchTensorKind::Flex(match kind(to.dtype) {
                Kind::Float => BackendTensor::Float(tensor),
                Kind::Int => BackendTensor::Int(tensor),
                Kind::Bool => BackendTensor::Bool(tensor),
            }),
            autodiff: DispatchAutodiffContext::Disabled,
        })
    }

    fn read<E: Pod + Send + Sync>(slot: &Slot) -> Result<Bytes, OffloadError> {
        let mut elements = vec![E::zeroed(); slot.bytes() / size_of::<E>()];
        slot.read(cast_slice_mut(&mut elements))?;
        Ok(Bytes::from_elems(elements))
    }
}
