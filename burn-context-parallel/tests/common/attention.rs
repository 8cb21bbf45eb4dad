//! Attention as the tests of CubeCL devices run it: drawn sizes and masks, all that comes out, and how near or equal it is.

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, FlashOptions};
use burn_context_parallel::sequence::{Documents, PerToken};

use super::{difference, largest, random};

/// out, dq, dk and dv, and lse.
pub type Results = ([Tensor<4>; 4], Tensor<3>);

/// Reproducible numbers below `limit`.
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Sizes: batch, query heads, key/value heads, queries, keys.
pub fn sizes(draw: &mut Draw) -> [usize; 5] {
    let kv_heads = 1 + draw.below(3);
    [1 + draw.below(2), kv_heads * (1 + draw.below(3)), kv_heads, 1 + draw.below(200), 1 + draw.below(200)]
}

pub fn options(
    draw: &mut Draw,
    [batch, _, _, sq, sk]: [usize; 5],
    documents: bool,
    positions: bool,
    softcap: bool,
) -> FlashOptions {
    let mut options = if draw.below(2) == 0 { FlashOptions::full() } else { FlashOptions::causal() };
    if draw.below(2) == 0 {
        options = options.with_window(1 + draw.below(90));
    }
    if draw.below(3) == 0 {
        options = options.with_lookahead(draw.below(50));
    }
    if draw.below(2) == 0 {
        options = options.with_scale(draw.below(300) as f64 / 100.0 - 1.5);
    }
    if softcap {
        options = options.with_softcap(0.5 + draw.below(200) as f64 / 10.0);
    }
    let rows = if draw.below(2) == 0 { 1 } else { batch };
    let mut labels = |len: usize, limit: usize, least: i64| {
        let rows: Vec<Vec<i64>> =
            (0..rows).map(|_| (0..len).map(|i| (i * limit / 250 + draw.below(3)) as i64 + least).collect()).collect();
        PerToken::per_row(&rows).unwrap()
    };
    if positions {
        // Beyond 32 bits: only their order counts.
        options = options.with_positions(labels(sq, 250, -(1 << 40)), labels(sk, 250, -(1 << 40)));
    } else {
        options = options.with_offsets(labels(1, 1, 5).row(0)[0] * 20 - 100, 0);
    }
    if documents {
        let ids = |tokens: PerToken| Documents::from_ids(tokens);
        options = options.with_cross_documents(ids(labels(sq, 6, -1)), ids(labels(sk, 6, -1)));
    }
    options
}

/// q, k, v and d_out on a Flex device.
pub fn inputs([batch, heads, kv_heads, sq, sk]: [usize; 5], dim: usize, seed: u64) -> [Tensor<4>; 4] {
    let (q, kv) = ([batch, heads, sq, dim], [batch, kv_heads, sk, dim]);
    let mut seeds = seed..;
    [q, kv, kv, q].map(|shape| random(shape, seeds.next().unwrap(), &Device::flex(), DType::F32))
}

pub fn there<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    to(tensor, &super::device())
}

pub fn to<const D: usize>(tensor: &Tensor<D>, device: &Device) -> Tensor<D> {
    Tensor::from_data(tensor.to_data(), (device, tensor.dtype()))
}

/// The tiles that are tried first, and no others, where few kernels should be built.
pub fn untuned(options: FlashOptions, like: &Tensor<4>) -> FlashOptions {
    match flash::blueprint_for(like, like, &FlashOptions::full()).unwrap() {
        Some(blueprint) => options.with_blueprint(blueprint),
        None => options,
    }
}

/// out, dq, dk, dv, and lse of one device; the gradient of lse is that of out's first column.
pub fn run([q, k, v, d_out]: [Tensor<4>; 4], options: &FlashOptions) -> Results {
    let [q, k, v] = [q, k, v].map(|t| t.autodiff().require_grad());
    let (out, lse) = flash::flash_attention_with_lse(q.clone(), k.clone(), v.clone(), options).unwrap();
    let [b, h, s, _] = d_out.dims();
    let d_out = d_out.cast(lse.dtype());
    let d_lse = d_out.clone().narrow(3, 0, 1).reshape([b, h, s]);
    let unseen = lse.clone().inner().equal_elem(f64::NEG_INFINITY);
    let finite = lse.clone().mask_fill(Tensor::from_inner(unseen), 0.0);
    let sum =
        (out.clone().cast(lse.dtype()) * Tensor::from_inner(d_out)).sum() + (finite * Tensor::from_inner(d_lse)).sum();
    let grads = sum.backward();
    let [dq, dk, dv] = [q, k, v].map(|t| t.grad(&grads).unwrap());
    ([out.inner(), dq, dk, dv], lse.inner())
}

/// The same by the kernels alone, and without a gradient of lse: half types are rounded by nothing else.
pub fn run_plain([q, k, v, d_out]: [Tensor<4>; 4], options: &FlashOptions) -> Results {
    let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap();
    let delta = flash::delta(d_out.clone(), out.clone());
    let (dq, dk, dv) = flash::backward(q, k, v, d_out, lse.clone(), delta, options).unwrap();
    ([out, dq, dk, dv], lse)
}

/// Within f32's rounding of both sides.
#[track_caller]
pub fn agree(case: &str, got: Results, wanted: Results, tolerance: f64) {
    for (name, (got, wanted)) in ["out", "dq", "dk", "dv"].into_iter().zip(got.0.iter().zip(&wanted.0)) {
        let most = largest(wanted).max(1e-2);
        let off = difference(got, wanted);
        assert!(off <= tolerance * most, "{case}: {name} off by {off:.3e} of {most:.3e}");
    }
    let off = difference(&got.1, &wanted.1);
    assert!(off <= tolerance * largest(&wanted.1).max(1.0), "{case}: lse off by {off:.3e}");
}

/// The results' own bytes.
pub fn bits((tensors, lse): Results) -> Vec<(&'static str, Vec<u8>)> {
    let bytes = tensors.into_iter().map(Tensor::into_data).chain([lse.into_data()]).map(|d| d.as_bytes().to_vec());
    ["out", "dq", "dk", "dv", "lse"].into_iter().zip(bytes).collect()
}

/// Which results differ, as a list to be compared with nothing: bytes themselves would fill the screen.
pub fn unequal(a: &[(&'static str, Vec<u8>)], b: &[(&'static str, Vec<u8>)]) -> Vec<&'static str> {
    a.iter().zip(b).filter(|(a, b)| a != b).map(|(a, _)| a.0).collect()
}
