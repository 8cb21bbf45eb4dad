//! What a CubeCL device can do.

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use cubecl::client::Client;
use cubecl::ir::AddressType;

use super::super::blueprint::{Blueprint, DeviceLimits};
use super::super::{FlashOptions, FlashShape};
use crate::{Error, Result};

/// What kernels must fit in on a CubeCL device.
pub fn device_limits(device: &CubeDevice) -> DeviceLimits {
    limits(&device.client())
}

pub(super) fn limits(client: &Client) -> DeviceLimits {
    let properties = client.properties();
    let hardware = &properties.hardware;
    DeviceLimits {
        plane: hardware.plane_size_max as usize,
        units: hardware.max_units_per_cube as usize,
        vector: (hardware.load_width as usize / 32).min(hardware.max_vector_size),
        shared_bytes: hardware.max_shared_memory_size,
        bindings: hardware.max_bindings as usize,
        wide_addresses: properties.supports_address(AddressType::U64),
    }
}

/// What a tensor's device cannot do for an attention, found before anything is started or deferred.
pub(in super::super) fn check_tensor(
    operation: &'static str,
    name: &'static str,
    tensor: &DispatchTensor,
    options: &FlashOptions,
) -> Result<()> {
    let (dtype, shape) = (tensor.dtype(), tensor.shape());
    if dtype == DType::F64 {
        let problem = format!("{name} is f64 on a CubeCL device, whose kernels compute in f32");
        return Err(Error::unsupported(operation, problem, "cast to f32, or use a Flex device"));
    }
    let Some(limits) = device(tensor).map(|device| device_limits(&device)) else { return Ok(()) };
    let elements = shape.num_elements();
    if elements > i32::MAX as usize && !limits.wide_addresses {
        let problem = format!("{name} has {elements} elements, the device addresses {} at most", i32::MAX);
        return Err(Error::unsupported(operation, problem, "spread the heads or the sequence over more ranks"));
    }
    if let Some(dim) = shape.as_slice().get(3) {
        blueprint(&limits, *dim, options)?;
    }
    Ok(())
}

/// The blueprint for a device and a head dimension: forced or chosen, and checked where there is something to start.
pub(super) fn blueprint(limits: &DeviceLimits, dim: usize, options: &FlashOptions) -> Result<Blueprint> {
    let blueprint = options.blueprint.unwrap_or_else(|| Blueprint::choose(limits, dim));
    if dim > 0 {
        blueprint.check(limits, dim)?;
    }
    Ok(blueprint)
}

/// The blueprint of the kernels for queries, and so many keys, if their device has them.
pub(in super::super) fn blueprint_for(
    q: &DispatchTensor,
    shape: &FlashShape,
    options: &FlashOptions,
) -> Result<Option<Blueprint>> {
    let Some(device) = device(q) else { return Ok(None) };
    let blueprint = blueprint(&device_limits(&device), shape.head_dim, options)?;
    #[cfg(feature = "autotune")]
    let blueprint = super::tune::tuned(blueprint, &device, shape, q.dtype(), options);
    Ok(Some(blueprint))
}

/// A tensor's device, if that is one of CubeCL's.
fn device(tensor: &DispatchTensor) -> Option<CubeDevice> {
    let kind = match &tensor.kind {
        DispatchTensorKind::Autodiff(inner) => inner,
        kind => kind,
    };
    let DispatchTensorKind::Cube(tensor) = kind else { return None };
    match tensor {
        BackendTensor::Float(tensor) => Some(TensorMetadata::device(tensor)),
        BackendTensor::Autodiff(tensor) => Some(TensorMetadata::device(tensor)),
        _ => None,
    }
}
