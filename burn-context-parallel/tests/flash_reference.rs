//! Outputs, log-sum-exps and gradients against PyTorch's, computed in float64 with every score materialised
//! (`tests/reference/make_attention.py` of the workspace).

mod common;

use burn::tensor::{Device, Tensor};
use burn_context_parallel::flash::{self, FlashOptions};
use common::{Case, close, device, difference, largest};
use rstest::rstest;

/// Outputs within 2e-5, gradients within 5e-5 of the largest magnitude, or within what f32 can know of a score: four
/// roundings of the largest one.
const OUTPUT: f64 = 2e-5;

fn gradient_tolerance(case: &Case, device: &Device) -> f64 {
    let (q, k) = (case.tensor::<4>("q", device), case.tensor::<4>("k", device));
    let [b, h, _, d] = q.dims();
    let [_, g, sk, _] = k.dims();
    let k = k.reshape([b, g, 1, sk, d]).expand([b, g, h / g, sk, d]).reshape([b, h, sk, d]);
    let scores = q.matmul(k.swap_dims(2, 3)) * case.options.resolved_scale(d);
    (4.0 * 2f64.powi(-24) * largest(&scores)).max(5e-5)
}

type Attention =
    fn(Tensor<4>, Tensor<4>, Tensor<4>, &FlashOptions) -> burn_context_parallel::Result<(Tensor<4>, Tensor<3>)>;

#[rstest]
fn agrees_with_pytorch(
    #[values(
        "full",
        "causal",
        "causal_gqa",
        "causal_mqa_d64",
        "causal_q_block",
        "causal_block_all_masked_rows",
        "scaled",
        "large_scores",
        "window",
        "documents",
        "softcap"
    )]
    name: &str,
    #[values(flash::flash_attention_with_lse, flash::reference::attention_with_lse)] attention: Attention,
) {
    let case = Case::read(name);
    let inner = device();
    let device = inner.clone().autodiff();
    let [q, k, v] = ["q", "k", "v"].map(|n| case.tensor::<4>(n, &device).require_grad());
    let (out, lse) = attention(q.clone(), k.clone(), v.clone(), &case.options).unwrap();
    close("out", &out, &case.tensor("out", &inner), OUTPUT);
    let wanted = case.tensor::<3>("lse", &inner);
    assert!(difference(&lse, &wanted) <= OUTPUT * largest(&wanted).max(1.0));

    let grads = (out * case.tensor("d_out", &device)).sum().backward();
    let tolerance = gradient_tolerance(&case, &inner);
    for (name, tensor) in [("dq", q), ("dk", k), ("dv", v)] {
        let grad = tensor.grad(&grads).unwrap();
        close(name, &grad, &case.tensor(name, &inner), tolerance);
    }
}

#[rstest]
fn untracked_pieces_agree_with_pytorch(
    #[values("causal_gqa", "causal_q_block", "causal_block_all_masked_rows", "window", "documents", "softcap")]
    name: &str,
) {
    let case = Case::read(name);
    let device = device();
    let [q, k, v, d_out] = ["q", "k", "v", "d_out"].map(|n| case.tensor::<4>(n, &device));
    let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), &case.options).unwrap();
    let delta = flash::delta(d_out.clone(), out);
    let tolerance = gradient_tolerance(&case, &device);
    let (dq, dk, dv) = flash::backward(q, k, v, d_out, lse, delta, &case.options).unwrap();
    for (name, grad) in [("dq", dq), ("dk", dk), ("dv", dv)] {
        close(name, &grad, &case.tensor(name, &device), tolerance);
    }
}
