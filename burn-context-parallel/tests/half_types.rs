//! f16 and bf16: near what float64 makes of the same rounded inputs, and no farther from it than PyTorch's own bf16 is
//! (`tests/reference/make_half.py` of the workspace).

mod common;

use std::path::Path;

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, FlashOptions};
use common::attention::run_plain;
use common::{Case, device, largest, rounds_to, values};
use rstest::rstest;

/// How far PyTorch's bf16 is off: the root mean square over a tensor.
fn pytorch(case: &str, tensor: &str) -> f64 {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/half.json");
    let all: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    all[case][tensor].as_f64().unwrap()
}

/// out, dq, dk, dv in float64 by every score, of inputs that were rounded to `dtype`.
fn exact([q, k, v, d_out]: [Tensor<4>; 4], dtype: DType, options: &FlashOptions) -> [Tensor<4>; 4] {
    let device = Device::flex().autodiff();
    let rounded = |x: Tensor<4>| Tensor::from_inner(x.cast(dtype).cast(DType::F64)).to_device(&device);
    let [q, k, v] = [q, k, v].map(|x| rounded(x).require_grad());
    let out = flash::reference::attention(q.clone(), k.clone(), v.clone(), options).unwrap();
    let grads = (out.clone() * rounded(d_out)).sum().backward();
    [out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
}

/// By autodiff, with Burn's operations around.
fn trained([q, k, v, d_out]: [Tensor<4>; 4], options: &FlashOptions) -> [Tensor<4>; 4] {
    let [q, k, v] = [q, k, v].map(|x| x.autodiff().require_grad());
    let out = flash::flash_attention(q.clone(), k.clone(), v.clone(), options).unwrap();
    let grads = (out.clone() * Tensor::from_inner(d_out)).sum().backward();
    [out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
}

fn rms(a: &[f64], b: &[f64]) -> f64 {
    (a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>() / a.len() as f64).sqrt()
}

#[rstest]
fn as_near_as_pytorch(
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
    #[values(DType::BF16, DType::F16)] dtype: DType,
) {
    let inner = device();
    if !inner.supports_dtype(dtype) {
        return common::skipped("as_near_as_pytorch", &format!("this device has no {dtype:?}"));
    }
    let case = Case::read(name);
    let inputs = ["q", "k", "v", "d_out"].map(|name| case.tensor::<4>(name, &Device::flex()));
    let expected = exact(inputs.clone(), dtype, &case.options);

    let inputs = inputs.map(|x| Tensor::<4>::from_data(x.cast(dtype).into_data(), (&inner, dtype)));
    let found = if rounds_to(dtype) { trained(inputs, &case.options) } else { run_plain(inputs, &case.options).0 };
    for ((found, expected), what) in found.iter().zip(&expected).zip(["out", "dq", "dk", "dv"]) {
        assert_eq!(found.dtype(), dtype);
        let (a, b) = (values(found), values(expected));
        let (off, theirs) = (rms(&a, &b), pytorch(name, what));
        assert!(off <= 1.5 * theirs, "{name} {dtype:?} {what}: off by {off:e}, PyTorch's bf16 by {theirs:e}");
        // Scores of that case go up to some hundred.
        if name != "large_scores" {
            let most = a.iter().zip(&b).fold(0f64, |most, (a, b)| most.max((a - b).abs()));
            assert!(most <= 2e-2 * largest(expected), "{name} {dtype:?} {what}: off by {most:e}");
        }
    }
}
