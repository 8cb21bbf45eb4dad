//! At the ends of what numbers and layouts may be, attention on the device that this build was made for is what it is on a Flex device: with its
//! own kernels, and with the smallest of either family.
#![cfg(feature = "cube")]

mod common;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::flash::{self, Family, FlashOptions, FlashShape, device_forward_bytes};
use burn_context_parallel::sequence::Documents;
use common::attention::{agree, inputs, there};
use common::{device, values};
use rstest::rstest;

/// Of one head dimension: q, k, v, as rows of one head.
fn columns(sides: &[Vec<f32>; 3], device: &Device) -> [Tensor<4>; 3] {
    sides
        .each_ref()
        .map(|rows| Tensor::from_data(TensorData::new(rows.clone(), [1, 1, rows.len(), 1]), (device, DType::F32)))
}

/// out, dq, dk, dv of a gradient of ones, and lse, by hand.
fn by_hand([q, k, v]: [Tensor<4>; 3], options: &FlashOptions) -> [(&'static str, Vec<f64>); 5] {
    let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap();
    let ones = Tensor::ones_like(&out);
    let delta = flash::delta(ones.clone(), out.clone());
    let (dq, dk, dv) = flash::backward(q, k, v, ones, lse.clone(), delta, options).unwrap();
    let lse = ("lse", values(&lse));
    let [out, dq, dk, dv] = [("out", out), ("dq", dq), ("dk", dk), ("dv", dv)].map(|(name, t)| (name, values(&t)));
    [out, dq, dk, dv, lse]
}

/// The device's own kernels, and small ones of both families: whether a device would choose them or not, they compute the same.
fn forms() -> [Option<&'static str>; 3] {
    [None, Some("rows:4x2v4u1"), Some("block:16x16v1u16")]
}

fn with(form: Option<&str>) -> Option<FlashOptions> {
    let Some(form) = form else { return Some(FlashOptions::full()) };
    let options = FlashOptions::full().with_blueprint(form.parse().unwrap());
    let like = Tensor::<4>::ones([1, 1, 1, 1], &device());
    // Sixteen units are more than some processors have: one then, which owns as much.
    match flash::blueprint_for(&like, &like, &options) {
        Ok(_) => Some(options),
        Err(_) => Some(FlashOptions::full().with_blueprint("block:16x16v1u1".parse().unwrap())),
    }
}

#[rstest]
#[case::a_query_is_nan([vec![f32::NAN, 1.0], vec![1.0, 2.0], vec![3.0, 4.0]])]
#[case::a_key_is_nan([vec![1.0, 2.0], vec![f32::NAN, 2.0], vec![3.0, 4.0]])]
#[case::a_key_is_infinite([vec![1.0, 2.0], vec![f32::INFINITY, 2.0], vec![3.0, 4.0]])]
#[case::a_key_is_beyond_all([vec![1.0, 1.0], vec![f32::NEG_INFINITY, 2.0], vec![3.0, 4.0]])]
#[case::a_value_is_nan([vec![1.0, 2.0], vec![1.0, 2.0], vec![f32::NAN, 4.0]])]
#[case::a_score_is_infinite([vec![1e20], vec![-1e20], vec![3.0]])]
#[case::a_score_stands_for_infinity([vec![1e16], vec![-1e15], vec![3.0]])]
fn what_is_no_number_is_none_where_it_is_on_flex(#[case] sides: [Vec<f32>; 3], #[values(0, 1, 2)] form: usize) {
    let Some(options) = with(forms()[form]) else { return };
    let wanted = by_hand(columns(&sides, &Device::flex()), &FlashOptions::full());
    let got = by_hand(columns(&sides, &device()), &options);
    for ((name, got), (_, wanted)) in got.iter().zip(&wanted) {
        for (g, w) in got.iter().zip(wanted) {
            let same = g == w || (g - w).abs() <= 1e-5 * w.abs() || !g.is_finite() && !w.is_finite();
            assert!(same, "{name} {got:?}, on Flex {wanted:?}");
        }
    }
}

/// Sums that others still hold, or that lie the other way round in memory.
#[rstest]
fn sums_may_lie_as_they_like(#[values(0, 1, 2)] form: usize, #[values(false, true)] shared: bool) {
    let Some(options) = with(forms()[form]) else { return };
    let sizes = [2, 4, 2, 9, 7];
    let dim = 12;
    let all = inputs(sizes, dim, 5);
    let base = inputs([2, 2, 2, dim, dim], 7, 6);
    let run = |[q, k, v, d_out]: [Tensor<4>; 4], sums: [Tensor<4>; 2], options: &FlashOptions| {
        let [dk, dv] = sums.map(|sum| sum.swap_dims(2, 3));
        let held = shared.then(|| (dk.clone(), dv.clone()));
        let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap();
        let delta = flash::delta(d_out.clone(), out.clone());
        let (dq, dk, dv) = flash::backward_onto(q, k, v, d_out, lse.clone(), delta, Some((dk, dv)), options).unwrap();
        if let Some((dk, dv)) = held {
            assert_eq!([values(&dk), values(&dv)], [0, 1].map(|i| values(&base[i].clone().swap_dims(2, 3))));
        }
        ([out, dq, dk, dv], lse)
    };
    let sums = [base[0].clone(), base[1].clone()];
    // A sum of its own, which lies as what it was computed from.
    let own = |sum: &Tensor<4>| if shared { there(sum) } else { there(sum) * 1.0 };
    let got = run(all.each_ref().map(there), sums.each_ref().map(own), &options);
    agree("sums", got, run(all, sums, &FlashOptions::full()), 2e-5);
}

/// Before anything is started: a sequence whose tokens kernels cannot count, of which 4 bytes are in memory.
#[test]
fn too_many_tokens_are_an_error() {
    let device = device();
    if device == Device::flex() {
        return;
    }
    let q = Tensor::<4>::ones([1, 1, 1, 1], &device);
    let k = q.clone().expand([1, 1, 1 << 30, 1]);
    let error = flash::flash_attention(q.clone(), k.clone(), k.clone(), &FlashOptions::full()).unwrap_err().to_string();
    assert!(error.contains("1073741824 keys") && error.contains("more ranks"), "{error}");
    assert!(flash::blueprint_for(&q, &k, &FlashOptions::full()).is_err());
}

/// The table of a mask is counted for tiles as small as they are forced to be.
#[test]
fn small_tiles_have_a_larger_table() {
    let shape = FlashShape { batch: 1, q_heads: 1, kv_heads: 1, q_len: 4096, k_len: 4096, head_dim: 8 };
    let options = FlashOptions::causal().with_documents(Documents::from_cu_seqlens(&[0, 1000, 4096]).unwrap());
    let bytes = |options: &FlashOptions| device_forward_bytes(&shape, DType::F32, options) - 4 * 4096 * 9;
    assert_eq!(bytes(&options), 64 + 4 * 8192 + 16 * 1024);
    let forced = options.with_blueprint("rows:1x4v1u1".parse().unwrap());
    assert_eq!(forced.blueprint.unwrap().family, Family::Rows);
    assert_eq!(bytes(&forced), 64 + 4 * 8192 + 16 * 8192);
}
