//! What the backward kernels subtract: `delta = rowsum(d_out out)`, less the gradient of the log-sum-exp.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::check::check_primitive;
use super::launch::{address, cubes};
use super::place;
use crate::{Error, Result};

/// A unit a row, counted over sequences, heads and queries.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(super) fn row_delta<E: Float, O: Float>(
    d_out: &Tensor<E>,
    out: &Tensor<O>,
    d_lse: &Tensor<f32>,
    delta: &mut Tensor<f32>,
    #[comptime] less: bool,
    #[define(E, O)] _dtypes: [ElemType; 2],
) {
    let heads = out.shape(1);
    let len = out.shape(2);
    let dim = out.shape(3);
    let head_at = ABSOLUTE_POS / len;
    if head_at >= out.shape(0) * heads {
        terminate!();
    }
    let i = ABSOLUTE_POS % len;
    let b = head_at / heads;
    let h = head_at % heads;
    let d_at = place::row(d_out, b, h, i);
    let o_at = place::row(out, b, h, i);
    let mut sum = f32::new(0.0);
    for e in 0..dim {
        let d = f32::cast_from(d_out[d_at + e * d_out.stride(3)]);
        sum = fma(d, f32::cast_from(out[o_at + e * out.stride(3)]), sum);
    }
    if comptime!(less) {
        sum -= d_lse[place::row(d_lse, b, h, i)];
    }
    let at = place::row(&*delta, b, h, i);
    delta[at] = sum;
}

/// `rowsum(d_out out)`, less `d_lse`.
pub(super) fn delta(
    operation: &'static str,
    d_out: CubeTensor,
    out: CubeTensor,
    d_lse: Option<CubeTensor>,
) -> Result<CubeTensor> {
    let client = out.client.clone();
    let shape = out.shape();
    if [d_out.dtype(), out.dtype()].contains(&DType::F64) {
        let problem = "f64 on a CubeCL device, whose kernels compute in f32";
        return Err(Error::unsupported(operation, problem, "cast to f32, or use a Flex device"));
    }
    check_primitive(operation, "d_out", &d_out, &shape, d_out.dtype())?;
    if let Some(d_lse) = &d_lse {
        check_primitive(operation, "d_lse", d_lse, &shape[..3], DType::F32)?;
    }
    let rows = Shape::from([shape[0], shape[1], shape[2]]);
    if shape.num_elements() == 0 {
        return Ok(zeros_client(client, out.device.clone(), rows, DType::F32));
    }
    let delta = empty_device_contiguous_dtype(client.clone(), out.device.clone(), rows.clone(), DType::F32);
    let each = (client.properties().hardware.max_units_per_cube as usize).min(64);
    let (count, dim) = (cubes(rows.num_elements().div_ceil(each)), CubeDim::new_1d(each as u32));
    let dtypes = [d_out.dtype(), out.dtype()].map(dtype_to_elem_type);
    let less = d_lse.is_some();
    let address = address([&d_out, &out]);
    // SAFETY: the kernel reads and writes only inside the shapes of its tensors. Without `less` it reads nothing of d_lse.
    unsafe {
        row_delta::launch_unchecked(
            &client,
            count,
            dim,
            address,
            d_out.into_tensor_arg(),
            out.into_tensor_arg(),
            d_lse.unwrap_or_else(|| delta.clone()).into_tensor_arg(),
            delta.clone().into_tensor_arg(),
            less,
            dtypes,
        );
    }
    Ok(delta)
}
