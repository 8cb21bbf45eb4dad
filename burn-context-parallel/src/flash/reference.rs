//! Attention written out, every score in memory: the oracle, and what O(S^2) costs.

use burn::tensor::{Bool, Tensor, TensorData};

use super::{FlashOptions, check};
use crate::Result;

/// Attention in plain tensor operations, with the options and the empty rows of [`flash_attention`](super::flash_attention).
///
/// On any device, differentiable by autodiff.
///
/// # Shapes
///
/// q `[B, H, Sq, D]`; k, v `[B, G, Sk, D]`; the output is as q.
///
/// # Errors
///
/// As [`flash_attention`](super::flash_attention), but any device is served.
///
/// # Memory
///
/// O(B H Sq Sk): about 3 such tensors of f32 forward, 5 with the backward pass; and k and v once per query head.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: &FlashOptions) -> Result<Tensor<4>> {
    Ok(attention_with_lse(q, k, v, options)?.0)
}

/// [`attention`], and the natural log-sum-exp of each row, `[B, H, Sq]`.
///
/// # Errors
///
/// As [`attention`].
pub fn attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    let operation = "flash::reference::attention";
    options.check(operation)?;
    let shape = check::check_plain(operation, &q, &k, &v)?;
    let dtype = q.dtype();
    let compute = check::row_dtype(operation, dtype)?;
    let [b, h, sq, d] = shape.q();
    let (g, sk, device) = (shape.kv_heads, shape.k_len, q.device());
    if b * h * sq * sk * d == 0 {
        let lse = if d == 0 && sk > 0 { 0.0 } else { f64::NEG_INFINITY };
        let out = Tensor::zeros(shape.q(), (&device, dtype));
        return Ok((out, Tensor::full(shape.rows(), lse, (&device, compute))));
    }
    let spread =
        |t: Tensor<4>| t.cast(compute).reshape([b, g, 1, sk, d]).expand([b, g, h / g, sk, d]).reshape([b, h, sk, d]);
    let (k, v) = (spread(k), spread(v));
    let scores = q.cast(compute).matmul(k.swap_dims(2, 3)) * options.resolved_scale(d);
    let hidden: Vec<bool> =
        (0..sq).flat_map(|i| (0..sk).map(move |j| (i, j))).map(|(i, j)| !options.sees(i, j)).collect();
    let hidden = Tensor::<2, Bool>::from_data(TensorData::new(hidden, [sq, sk]), &device.clone().inner());
    let hidden: Tensor<4, Bool> = hidden.unsqueeze::<4>().expand([b, h, sq, sk]);
    let scores = scores.mask_fill(hidden, f64::NEG_INFINITY);

    // The shift cancels, so no gradient flows through it; an empty row is measured from 0.
    let largest = scores.clone().detach().max_dim(3);
    let empty = largest.clone().equal_elem(f64::NEG_INFINITY);
    let largest = largest.mask_fill(empty.clone(), 0.0);
    let weights = (scores - largest.clone()).exp();
    let sum = weights.clone().sum_dim(3).mask_fill(empty.clone(), 1.0);
    let out = weights.matmul(v) / sum.clone();
    let lse = (largest + sum.log()).mask_fill(empty, f64::NEG_INFINITY);
    Ok((out.cast(dtype), lse.reshape([b, h, sq])))
}
