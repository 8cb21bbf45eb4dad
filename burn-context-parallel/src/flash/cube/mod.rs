//! Flash attention for CubeCL devices: one source, compiled for each of them when it is first used.
//!
//! `table` is the mask as numbers, `sight` reads it in kernels, `place` says where rows lie, `score` is the arithmetic that all kernels
//! share, `rows` and `block` are the two families of kernels, `delta` their prepass, `launch` starts them, `memory` is what they hold, `fused` puts them among
//! deferred operations.
//!
//! Keys and values are read where they lie, one head for a whole group of query heads. The kernels that own queries read them `queries / own`
//! times for each query head: a tile that mixed the heads of a group would own fewer positions, and read them as often.

mod block;
mod delta;
mod device;
mod fused;
mod launch;
mod memory;
mod place;
mod rows;
mod score;
mod sight;
mod table;
#[cfg(feature = "autotune")]
mod tune;

#[cfg(all(test, feature = "cpu"))]
mod far;
#[cfg(all(test, feature = "offline-cuda"))]
mod offline;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::untile;
use burn_cubecl::tensor::CubeTensor;

use super::check::{check_primitive, check_primitives};
use super::{FlashOps, FlashOptions};
use crate::OrRaise;

pub use device::device_limits;
pub(super) use device::{blueprint_for, check_tensor};
use launch::Launch;
pub use memory::{device_backward_bytes, device_forward_bytes};
pub(super) use table::expect_lengths;

impl FlashOps for CubeBackend {
    fn flash_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let operation = "FlashOps::flash_forward";
        let [q, k, v] = [q, k, v].map(rows_of);
        let shape = check_primitives(operation, [&q, &k, &v], &options).or_raise();
        Launch::new(operation, shape, &q, options).or_raise().forward(q, k, v)
    }

    fn flash_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        backward("FlashOps::flash_backward", [q, k, v, d_out], [lse, delta], None, &options)
    }

    fn flash_backward_onto(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        dk: FloatTensor<Self>,
        dv: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let onto = Some([dk, dv].map(rows_of));
        backward("FlashOps::flash_backward_onto", [q, k, v, d_out], [lse, delta], onto, &options)
    }

    fn flash_delta(d_out: FloatTensor<Self>, out: FloatTensor<Self>) -> FloatTensor<Self> {
        delta::delta("FlashOps::flash_delta", rows_of(d_out), rows_of(out), None).or_raise()
    }

    fn flash_delta_less(
        d_out: FloatTensor<Self>,
        out: FloatTensor<Self>,
        d_lse: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let d_lse = Some(rows_of(d_lse));
        delta::delta("FlashOps::flash_delta_less", rows_of(d_out), rows_of(out), d_lse).or_raise()
    }
}

/// The tensor with plain strides.
fn rows_of(tensor: CubeTensor) -> CubeTensor {
    if tensor.meta.is_tiled() { untile(tensor) } else { tensor }
}

fn backward(
    operation: &'static str,
    inputs: [CubeTensor; 4],
    statistics: [CubeTensor; 2],
    onto: Option<[CubeTensor; 2]>,
    options: &FlashOptions,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let [q, k, v, d_out] = inputs.map(rows_of);
    let [lse, delta] = statistics.map(rows_of);
    let shape = check_primitives(operation, [&q, &k, &v], options).or_raise();
    let dtype = q.dtype();
    check_primitive(operation, "d_out", &d_out, &shape.q(), dtype).or_raise();
    check_primitive(operation, "lse", &lse, &shape.rows(), DType::F32).or_raise();
    check_primitive(operation, "delta", &delta, &shape.rows(), DType::F32).or_raise();
    let sums = options.result_dtype(dtype);
    for (name, tensor) in ["dk", "dv"].into_iter().zip(onto.iter().flatten()) {
        check_primitive(operation, name, tensor, &shape.kv(), sums).or_raise();
    }
    Launch::new(operation, shape, &q, options.clone()).or_raise().backward([q, k, v, d_out], [lse, delta], onto)
}
