//! What a CubeCL device can do.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
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

/// What a tensor's device cannot do for an attention, found before any kernel is built.
pub(in super::super) fn check_tensor(
    operation: &'static str,
    name: &'static str,
    dtype: DType,
    elements: usize,
    client: &Client,
) -> Result<()> {
    if dtype == DType::F64 {
        let problem = format!("{name} is f64 on a CubeCL device, whose kernels compute in f32");
        return Err(Error::unsupported(operation, problem, "cast to f32, or use a Flex device"));
    }
    if elements > i32::MAX as usize && !limits(client).wide_addresses {
        let problem = format!("{name} has {elements} elements, the device addresses {} at most", i32::MAX);
        return Err(Error::unsupported(operation, problem, "spread the heads or the sequence over more ranks"));
    }
    Ok(())
}

/// The blueprint of one attention: forced or chosen, and checked.
pub(super) fn blueprint(shape: &FlashShape, q: &CubeTensor, options: &FlashOptions) -> Result<Blueprint> {
    let limits = limits(&q.client);
    check_tensor("flash attention", "q", q.dtype(), q.shape().num_elements(), &q.client)?;
    let blueprint = options.blueprint.unwrap_or_else(|| Blueprint::choose(&limits, shape.head_dim));
    blueprint.check(&limits, shape.head_dim)?;
    Ok(blueprint)
}
