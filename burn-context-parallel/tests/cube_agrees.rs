//! On the device that this build was made for, attention is what it is on a Flex device, whose results are held against float64 and
//! PyTorch elsewhere.
//!
//! Kernels are built anew for each head dimension and kind of mask: those are few here, sizes and masks are drawn.
#![cfg(feature = "cube")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, Blueprint, FlashOptions};
use burn_context_parallel::sequence::{Documents, PerToken};
use common::{close, device, difference, random, values};
use rstest::rstest;

/// Reproducible numbers below `limit`.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Sizes: batch, query heads, key/value heads, queries, keys.
fn sizes(draw: &mut Draw) -> [usize; 5] {
    let kv_heads = 1 + draw.below(3);
    [1 + draw.below(2), kv_heads * (1 + draw.below(3)), kv_heads, 1 + draw.below(200), 1 + draw.below(200)]
}

fn options(
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

fn inputs([batch, heads, kv_heads, sq, sk]: [usize; 5], dim: usize, seed: u64) -> [Tensor<4>; 4] {
    let flex = Device::flex();
    let q = [batch, heads, sq, dim];
    let kv = [batch, kv_heads, sk, dim];
    [q, kv, kv, q]
        .into_iter()
        .zip(seed..)
        .map(|(shape, seed)| random(shape, seed, &flex, DType::F32))
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

fn there<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    Tensor::from_data(tensor.to_data(), (&device(), tensor.dtype()))
}

/// out, dq, dk, dv, and lse of one device; the gradient of lse is that of out's first column.
fn run([q, k, v, d_out]: [Tensor<4>; 4], options: &FlashOptions) -> ([Tensor<4>; 4], Tensor<3>) {
    let [q, k, v] = [q, k, v].map(|t| t.autodiff().require_grad());
    let (out, lse) = flash::flash_attention_with_lse(q.clone(), k.clone(), v.clone(), options).unwrap();
    let [b, h, s, _] = d_out.dims();
    let d_lse = d_out.clone().narrow(3, 0, 1).reshape([b, h, s]);
    let seen = lse.clone().inner().equal_elem(f64::NEG_INFINITY);
    let finite = lse.clone().mask_fill(Tensor::from_inner(seen), 0.0);
    let sum = (out.clone() * Tensor::from_inner(d_out)).sum() + (finite * Tensor::from_inner(d_lse)).sum();
    let grads = sum.backward();
    let [dq, dk, dv] = [q, k, v].map(|t| t.grad(&grads).unwrap());
    ([out.inner(), dq, dk, dv], lse.inner())
}

/// Within f32's rounding of both sides.
#[track_caller]
fn agree(case: &str, got: ([Tensor<4>; 4], Tensor<3>), wanted: ([Tensor<4>; 4], Tensor<3>), tolerance: f64) {
    for (name, (got, wanted)) in ["out", "dq", "dk", "dv"].into_iter().zip(got.0.iter().zip(&wanted.0)) {
        let most = common::largest(wanted).max(1e-2);
        let off = difference(got, wanted);
        assert!(off <= tolerance * most, "{case}: {name} off by {off:.3e} of {most:.3e}");
    }
    let off = difference(&got.1, &wanted.1);
    assert!(off <= tolerance * common::largest(&wanted.1).max(1.0), "{case}: lse off by {off:.3e}");
}

#[rstest]
fn any_mask_of_any_size(
    #[values(8, 33, 64)] dim: usize,
    #[values((false, false), (true, false), (false, true), (true, true))] (documents, positions): (bool, bool),
    #[values(false, true)] softcap: bool,
) {
    let mut draw =
        Draw(dim as u64 + 1000 * u64::from(documents) + 2000 * u64::from(positions) + 4000 * u64::from(softcap));
    for turn in 0..8 {
        let sizes = sizes(&mut draw);
        let options = options(&mut draw, sizes, documents, positions, softcap);
        let inputs = inputs(sizes, dim, 10 * turn);
        let got = run(inputs.each_ref().map(there), &options);
        agree(&format!("{sizes:?} {dim} {options:?}"), got, run(inputs, &options), 2e-5);
    }
}

/// Scores of which rounding alone would show are computed in two parts.
#[rstest]
fn scores_to_ten_thousand(#[values(16, 64)] dim: usize, #[values(40.0, 1000.0)] gain: f64) {
    let sizes = [1, 2, 1, 90, 90];
    let [q, k, v, d_out] = inputs(sizes, dim, 3);
    let options = FlashOptions::causal();
    let inputs = [q * gain, k, v, d_out];
    let got = run(inputs.each_ref().map(there), &options);
    let wanted = run(inputs, &options);
    close("out", &got.0[0], &wanted.0[0], 2e-5);
    // The log-sum-exp is rounded once, to f32; gradients carry that.
    let tolerance = (4.0 * 2f64.powi(-24) * common::largest(&wanted.1)).max(5e-5);
    for (name, i) in [("dq", 1), ("dk", 2), ("dv", 3)] {
        close(name, &got.0[i], &wanted.0[i], tolerance);
    }
}

#[rstest]
fn half_types_are_rounded_once(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(false, true)] f32_results: bool,
) {
    if !device().supports_dtype(dtype) {
        println!("skipped: the device has no {dtype:?}");
        return;
    }
    let unit = if dtype == DType::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let inputs = inputs([2, 4, 2, 70, 90], 24, 9).map(|t| t.cast(dtype));
    let wide = inputs.each_ref().map(|t| t.clone().cast(DType::F32));
    let options = FlashOptions::causal().with_offsets(20, 0);
    let (out, lse) = flash::forward(wide[0].clone(), wide[1].clone(), wide[2].clone(), &options).unwrap();
    let delta = flash::delta(wide[3].clone(), out.clone());
    let [q, k, v, d_out] = wide;
    let (dq, dk, dv) = flash::backward(q, k, v, d_out, lse.clone(), delta.clone(), &options).unwrap();

    let mine = if f32_results { options.with_f32_results() } else { options };
    let [q, k, v, d_out] = inputs.each_ref().map(there);
    let (got, got_lse) = flash::forward(q.clone(), k.clone(), v.clone(), &mine).unwrap();
    let [lse, delta] = [lse, delta].map(|t| there(&t));
    let got_gradients = flash::backward(q, k, v, d_out, lse.clone(), delta, &mine).unwrap();
    let tolerance = if f32_results { 2e-5 } else { unit };
    let result = if f32_results { DType::F32 } else { dtype };
    let all = [
        ("out", &got, &out),
        ("dq", &got_gradients.0, &dq),
        ("dk", &got_gradients.1, &dk),
        ("dv", &got_gradients.2, &dv),
    ];
    for (name, got, wanted) in all {
        assert_eq!(got.dtype(), result, "{name}");
        close(name, &got.clone().cast(DType::F32), wanted, tolerance);
    }
    close("lse", &got_lse, &lse, 2e-5);
}

#[rstest]
fn views_are_read_in_place(#[values(8, 64)] dim: usize) {
    let [q, k, v, d_out] = inputs([2, 4, 2, 75, 75], dim, 5);
    let options = FlashOptions::causal();
    let wanted = run([q.clone(), k.clone(), v.clone(), d_out.clone()], &options);
    // Tokens first in memory, heads of a wider tensor, and dimensions that do not lie side by side.
    let tokens_first = |t: &Tensor<4>| there(&t.clone().swap_dims(1, 2)).swap_dims(1, 2);
    let wider = there(&Tensor::cat(vec![k.clone(), v.clone()], 1)).narrow(1, 0, 2);
    let turned = there(&v.clone().swap_dims(2, 3)).swap_dims(2, 3);
    agree("views", run([tokens_first(&q), wider, turned, tokens_first(&d_out)], &options), wanted, 2e-5);
}

#[test]
fn a_hundred_runs_give_the_same_bits() {
    let inputs = inputs([1, 4, 2, 130, 130], 64, 7).each_ref().map(there);
    let options = FlashOptions::causal().with_window(100);
    let bits = |(tensors, lse): ([Tensor<4>; 4], Tensor<3>)| {
        let mut bytes: Vec<Vec<u8>> = tensors.into_iter().map(|t| t.into_data().as_bytes().to_vec()).collect();
        bytes.push(lse.into_data().as_bytes().to_vec());
        bytes
    };
    let first = bits(run(inputs.clone(), &options));
    for turn in 0..100 {
        assert!(bits(run(inputs.clone(), &options)) == first, "run {turn}");
    }
}

#[test]
fn the_future_changes_no_bit() {
    let [q, k, v, _] = inputs([1, 2, 1, 150, 150], 8, 13).each_ref().map(there);
    let options = FlashOptions::causal();
    let (out, _) = flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap();
    for last in [1, 17, 63, 64, 65, 149] {
        let tail = |t: &Tensor<4>| {
            let [b, h, s, d] = t.dims();
            Tensor::cat(vec![t.clone().narrow(2, 0, last), Tensor::full([b, h, s - last, d], 300.0, &device())], 2)
        };
        let (other, _) = flash::forward(q.clone(), tail(&k), tail(&v), &options).unwrap();
        let rows = |t: &Tensor<4>| values(&t.clone().narrow(2, 0, last));
        assert!(rows(&out) == rows(&other), "{last}");
    }
}

#[test]
fn sums_go_on_where_they_were() {
    let inputs = inputs([1, 4, 2, 60, 80], 16, 17).each_ref().map(there);
    let options = FlashOptions::full();
    let [q, k, v, d_out] = inputs;
    let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap();
    let delta = flash::delta(d_out.clone(), out);
    let once = || {
        flash::backward(q.clone(), k.clone(), v.clone(), d_out.clone(), lse.clone(), delta.clone(), &options).unwrap()
    };
    let (_, dk, dv) = once();
    let held = dk.clone();
    let sums = Some((dk.clone(), dv.clone()));
    let (_, dk2, dv2) = flash::backward_onto(
        q.clone(),
        k.clone(),
        v.clone(),
        d_out.clone(),
        lse.clone(),
        delta.clone(),
        sums,
        &options,
    )
    .unwrap();
    close("dk", &dk2, &(dk * 2.0), 1e-6);
    close("dv", &dv2, &(dv * 2.0), 1e-6);
    assert!(values(&held) == values(&once().1), "what somebody holds is not written");
}

#[test]
fn nothing_is_attended_to_without_keys_or_queries() {
    let options = FlashOptions::full();
    let ones = |shape: [usize; 4]| Tensor::<4>::ones(shape, &device());
    let (out, lse) = flash::forward(ones([1, 2, 3, 8]), ones([1, 1, 0, 8]), ones([1, 1, 0, 8]), &options).unwrap();
    assert!(values(&out).iter().all(|x| *x == 0.0) && values(&lse).iter().all(|x| *x == f64::NEG_INFINITY));
    let (out, _) = flash::forward(ones([1, 2, 0, 8]), ones([1, 1, 3, 8]), ones([1, 1, 3, 8]), &options).unwrap();
    assert_eq!(out.dims(), [1, 2, 0, 8]);
}

#[test]
fn what_a_device_cannot_is_refused_with_its_numbers() {
    let refused = |dtype: DType, dim: usize, options: &FlashOptions| {
        let x = Tensor::<4>::from_data(
            Tensor::<4>::ones([1, 1, 2, dim], &Device::flex()).into_data().convert_dtype(dtype),
            (&device(), dtype),
        );
        flash::flash_attention(x.clone(), x.clone(), x, options).unwrap_err().to_string()
    };
    let full = FlashOptions::full();
    if device().supports_dtype(DType::F64) {
        assert!(refused(DType::F64, 8, &full).contains("f64 on a CubeCL device"));
    }
    assert!(refused(DType::F32, 300, &full).contains("head dimension of 300"));
    let mut blueprint = flash_blueprint(64);
    blueprint.forward.units = 0;
    assert!(refused(DType::F32, 64, &full.clone().with_blueprint(blueprint)).contains("at least one row and unit"));
    let x = Tensor::<4>::ones([1, 1, 2, 64], &Device::flex());
    let error = flash::flash_attention(x.clone(), x.clone(), x, &full.with_blueprint(flash_blueprint(64))).unwrap_err();
    assert!(error.to_string().contains("on a Flex device"));
}

/// The blueprint of a processor, which is printed.
fn flash_blueprint(dim: usize) -> Blueprint {
    let limits = flash::DeviceLimits {
        plane: 1,
        units: 2,
        vector: 8,
        shared_bytes: 32 << 10,
        bindings: 64,
        wide_addresses: true,
    };
    let blueprint = Blueprint::choose(&limits, dim);
    assert_eq!(blueprint.to_string(), "rows:32x4v8u2");
    blueprint
}
