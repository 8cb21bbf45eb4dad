//! What the backward kernels subtract: `delta = rowsum(d_out out)`, less the gradient of the log-sum-exp.

use cubecl::prelude::*;

use super::place;

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
