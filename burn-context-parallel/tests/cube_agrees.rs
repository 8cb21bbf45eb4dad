//! On the device that this build was made for, attention is what it is on a Flex device, whose results are held against float64 and
//! PyTorch elsewhere.
//!
//! Kernels are built anew for each head dimension and kind of mask: those are few here, sizes and masks are drawn.
#![cfg(feature = "cube")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, Blueprint, FlashOptions};
use burn_context_parallel::sequence::{Documents, PerToken};
use common::attention::{
    Draw, Results, agree, bits, inputs, options, run, run_plain, sizes, there, to, unequal, untuned,
};
use common::{close, device, rounds_to, values};
use rstest::rstest;

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

/// Not tuned: kernels of large heads take their time to be built. Beyond 128, a unit owns fewer rows.
#[rstest]
fn any_mask_of_large_heads(
    #[values(80, 128, 192, 256)] dim: usize,
    #[values((false, true), (true, false))] (labels, softcap): (bool, bool),
) {
    let mut draw = Draw(dim as u64 + 5000 * u64::from(labels));
    for turn in 0..4 {
        let sizes = sizes(&mut draw);
        let options = options(&mut draw, sizes, labels, labels, softcap);
        let inputs = inputs(sizes, dim, 10 * turn);
        let there = inputs.each_ref().map(there);
        let got = run(there.clone(), &untuned(options.clone(), &there[0]));
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
fn half_types_are_rounded_once(#[values(DType::F16, DType::BF16)] dtype: DType, #[values(24, 128)] dim: usize) {
    if !device().supports_dtype(dtype) {
        return common::skipped("half_types_are_rounded_once", &format!("this device has no {dtype:?}"));
    }
    let inputs = inputs([2, 4, 2, 70, 90], dim, 9).map(|t| t.cast(dtype));
    let options = FlashOptions::causal().with_offsets(20, 0);
    let [q, k, v, d_out] = inputs.each_ref().map(|t| t.clone().cast(DType::F32));
    let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap();
    let delta = flash::delta(d_out.clone(), out.clone());
    let (dq, dk, dv) = flash::backward(q, k, v, d_out, lse.clone(), delta.clone(), &options).unwrap();

    let [q, k, v, d_out] = inputs.each_ref().map(there);
    let options = if dim > 64 { untuned(options, &q) } else { options };
    let run = |options: &FlashOptions| {
        let [q, k, v, d_out] = [&q, &k, &v, &d_out].map(Clone::clone);
        let (out, got_lse) = flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap();
        close("lse", &got_lse, &lse, 2e-5);
        let (dq, dk, dv) = flash::backward(q, k, v, d_out, there(&lse), there(&delta), options).unwrap();
        [out, dq, dk, dv]
    };
    let (rounded, wide) = (run(&options), run(&options.clone().with_f32_results()));
    for (name, ((rounded, wide), wanted)) in
        ["out", "dq", "dk", "dv"].into_iter().zip(rounded.iter().zip(&wide).zip([out, dq, dk, dv]))
    {
        close(name, wide, &wanted, 2e-5);
        assert_eq!((rounded.dtype(), wide.dtype()), (dtype, DType::F32), "{name}");
        // To the nearest: as everywhere else.
        assert_eq!(rounded.to_data(), to(wide, &Device::flex()).cast(dtype).into_data(), "{name}");
    }
}

#[rstest]
fn half_types_keep_what_is_no_number(#[values(DType::F16, DType::BF16)] dtype: DType) {
    if !device().supports_dtype(dtype) {
        return common::skipped("half_types_keep_what_is_no_number", &format!("this device has no {dtype:?}"));
    }
    let [q, k, v, d_out] = inputs([1, 1, 1, 20, 20], 24, 3).map(|t| t.cast(dtype));
    // Of the last key: the last query alone sees it. One with all bits, which rounding would make zero.
    let mut data = v.into_data().convert::<f32>();
    data.as_mut_slice::<f32>().unwrap()[19 * 24] = f32::from_bits(0x7fff_ffff);
    let v = Tensor::<4>::from_data(data, (&Device::flex(), dtype));
    let options = FlashOptions::causal();
    let (wanted, _) = run_plain([&q, &k, &v, &d_out].map(|t| t.clone().cast(DType::F32)), &options);
    let (got, _) = run_plain([&q, &k, &v, &d_out].map(there), &untuned(options, &there(&q)));
    let nan = |t: &Tensor<4>| values(t).iter().map(|x| x.is_nan()).collect::<Vec<_>>();
    assert!(nan(&wanted[0]).contains(&true) && nan(&wanted[0]).contains(&false));
    for (got, wanted) in got.iter().zip(&wanted) {
        assert_eq!(nan(got), nan(wanted));
    }
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

/// Tuned once, elsewhere by the tiles that are tried first: of tuned ones, too, each has the same bits.
#[rstest]
#[case::tuned(64, DType::F32, false, true)]
#[case::labels(64, DType::F32, true, false)]
#[case::large_heads(128, DType::F32, false, false)]
#[case::f16(64, DType::F16, true, false)]
#[case::bf16(64, DType::BF16, false, false)]
fn a_hundred_runs_give_the_same_bits(
    #[case] dim: usize,
    #[case] dtype: DType,
    #[case] labels: bool,
    #[case] tuned: bool,
) {
    if !device().supports_dtype(dtype) {
        return common::skipped("a_hundred_runs_give_the_same_bits", &format!("this device has no {dtype:?}"));
    }
    let inputs = inputs([1, 2, 1, 100, 100], dim, 7).map(|t| t.cast(dtype));
    let wide = inputs.each_ref().map(|t| t.clone().cast(DType::F32));
    let inputs = inputs.each_ref().map(there);
    let mut options = FlashOptions::causal().with_window(80);
    if labels {
        let positions = PerToken::shared((0..100).map(|i| i / 2).collect());
        options = options
            .with_documents(Documents::from_lengths(&[40, 60]).unwrap())
            .with_positions(positions.clone(), positions);
    }
    let run: fn([Tensor<4>; 4], &FlashOptions) -> Results = if rounds_to(dtype) { run } else { run_plain };
    let wanted = run(wide, &options);
    let options = if tuned { options } else { untuned(options, &inputs[0]) };
    let results = run(inputs.clone(), &options);
    let tolerance = if dtype == DType::F32 { 2e-5 } else { 2e-2 };
    agree("the first run", results.clone(), wanted, tolerance);
    let first = bits(results);
    for turn in 0..100 {
        assert_eq!(unequal(&bits(run(inputs.clone(), &options)), &first), [""; 0], "run {turn}");
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

/// As a ring meets them: with the log-sum-exp and delta of all keys, parts of gradients add up, too.
#[rstest]
fn parts_of_the_keys_merge_into_all(#[values(1, 40, 64, 89)] cut: usize, #[values(false, true)] labels: bool) {
    let all = inputs([2, 4, 2, 70, 90], 8, 61);
    let keys = PerToken::shared((0..90).map(|j| j / 2).collect());
    let of_keys = |from: usize, len: usize| {
        let part = PerToken::shared(keys.row(0)[from..from + len].to_vec());
        let causal = FlashOptions::causal().with_window(60);
        if labels {
            let queries = PerToken::shared((0..70).map(|i| i - 10).collect());
            let documents = |tokens: &PerToken| {
                Documents::from_ids(PerToken::shared(tokens.row(0).iter().map(|at| at.max(&0) / 25).collect()))
            };
            causal.with_cross_documents(documents(&queries), documents(&part)).with_positions(queries, part)
        } else {
            causal.with_offsets(20, from as i64)
        }
    };
    let wanted = run(all.clone(), &of_keys(0, 90));
    let [q, k, v, d_out] = all.each_ref().map(there);
    let parts = [(0, cut), (cut, 90 - cut)].map(|(from, len)| {
        (k.clone().narrow(2, from, len), v.clone().narrow(2, from, len), untuned(of_keys(from, len), &q))
    });
    let [(a, a_lse), (b, b_lse)] =
        parts.each_ref().map(|(k, v, options)| flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap());
    let (out, lse) = flash::merge(a, a_lse, b, b_lse);
    // The gradient of lse, where there is one.
    let d_lse = d_out.clone().narrow(3, 0, 1).reshape(lse.dims());
    let d_lse = d_lse.mask_fill(lse.clone().equal_elem(f64::NEG_INFINITY), 0.0);
    let delta = flash::delta(d_out.clone(), out.clone()) - d_lse;
    let [a, b] = parts.map(|(k, v, options)| {
        flash::backward(q.clone(), k, v, d_out.clone(), lse.clone(), delta.clone(), &options).unwrap()
    });
    let whole = |a, b| Tensor::cat(vec![a, b], 2);
    agree(&format!("cut at {cut}"), ([out, a.0 + b.0, whole(a.1, b.1), whole(a.2, b.2)], lse), wanted, 2e-5);
}

#[rstest]
#[case::everything_earlier(FlashOptions::causal().with_offsets(i64::MAX, i64::MIN), FlashOptions::full())]
#[case::everything_later(
    FlashOptions::causal().with_offsets(i64::MIN, i64::MAX), FlashOptions::causal().with_offsets(0, 1000)
)]
#[case::far_along(FlashOptions::causal().with_offsets(i64::MAX, i64::MAX), FlashOptions::causal())]
#[case::window_of_all(FlashOptions::causal().with_window(usize::MAX), FlashOptions::causal())]
#[case::lookahead_of_all(FlashOptions::full().with_lookahead(usize::MAX), FlashOptions::full())]
#[case::positions_at_both_ends(
    FlashOptions::causal().with_positions(counted(i64::MAX - 99), counted(i64::MIN)),
    FlashOptions::full().with_positions(counted(0), counted(0))
)]
fn no_number_overflows(#[case] options: FlashOptions, #[case] same_as: FlashOptions) {
    let inputs = inputs([1, 1, 1, 100, 100], 8, 63).each_ref().map(there);
    let [got, wanted] = [options, same_as].map(|options| bits(run(inputs.clone(), &untuned(options, &inputs[0]))));
    assert_eq!(unequal(&got, &wanted), [""; 0]);
}

/// A hundred positions.
fn counted(from: i64) -> PerToken {
    PerToken::shared((0..100).map(|i| from + i).collect())
}

#[test]
fn what_is_on_another_device_is_refused() {
    if device() == Device::flex() {
        return common::skipped("what_is_on_another_device_is_refused", "there is one device here");
    }
    let x = || there(&inputs([1; 5], 8, 1)[0]);
    let rows = |device| Tensor::<3>::ones([1, 1, 1], device);
    let (here, elsewhere, options) = (device(), Device::flex(), FlashOptions::full());
    let backward =
        |d_out, lse, delta| flash::backward(x(), x(), x(), d_out, lse, delta, &options).unwrap_err().to_string();
    assert!(backward(inputs([1; 5], 8, 1)[0].clone(), rows(&here), rows(&here)).contains("move d_out to q's device"));
    assert!(backward(x(), rows(&elsewhere), rows(&here)).contains("move lse to q's device"));
    assert!(backward(x(), rows(&here), rows(&elsewhere)).contains("move delta to q's device"));
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
    } else {
        common::skipped("what_a_device_cannot_is_refused_with_its_numbers", "this device has no f64");
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
