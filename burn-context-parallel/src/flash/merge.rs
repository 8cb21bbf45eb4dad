//! The online-softmax merge of two partial results.

use burn::tensor::{DType, Tensor};

/// Joins attention over two disjoint sets of keys into attention over both.
///
/// ```text
/// lse = log(exp(lse_a) + exp(lse_b))
/// out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
/// ```
///
/// Computed in f32 (f64 of f64) from the larger of the two, so that no exponential overflows; a side that saw no key
/// (lse -inf) leaves the other as it is, bit for bit. The result is in that type too: rounding a running result to bf16 at
/// every hop of a ring loses accuracy with the number of ranks.
///
/// # Shapes
///
/// `out_a`, `out_b` `[B, H, S, D]`; `lse_a`, `lse_b` `[B, H, S]`; the same for the result.
///
/// # Panics
///
/// If the shapes or devices of both sides differ, or a log-sum-exp is not one number a row.
///
/// # References
///
/// Online normalizer calculation for softmax, arXiv 1805.02867.
pub fn merge(out_a: Tensor<4>, lse_a: Tensor<3>, out_b: Tensor<4>, lse_b: Tensor<3>) -> (Tensor<4>, Tensor<3>) {
    assert_eq!(out_a.dims(), out_b.dims(), "flash::merge: both sides must have the same shape");
    let [b, h, s, _] = out_a.dims();
    assert_eq!([lse_a.dims(), lse_b.dims()], [[b, h, s]; 2], "flash::merge: a log-sum-exp is one number a row");
    let dtype = if out_a.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let [lse_a, lse_b] = [lse_a, lse_b].map(|t| t.cast(dtype));
    let [out_a, out_b] = [out_a, out_b].map(|t| t.cast(dtype));
    let largest = lse_a.clone().max_pair(lse_b.clone());
    // -inf - -inf is not a number: rows empty on both sides are measured from 0.
    let largest = largest.clone().mask_fill(largest.equal_elem(f64::NEG_INFINITY), 0.0);
    let weight_a = (lse_a - largest.clone()).exp();
    let weight_b = (lse_b - largest.clone()).exp();
    let sum = weight_a.clone() + weight_b.clone();
    let lse = largest + sum.clone().log();
    let divisor = sum.clone().mask_fill(sum.equal_elem(0.0), 1.0);
    let [a, b] = [weight_a / divisor.clone(), weight_b / divisor].map(|w| w.unsqueeze_dim::<4>(3));
    (out_a * a + out_b * b, lse)
}
