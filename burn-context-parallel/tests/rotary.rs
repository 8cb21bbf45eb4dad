//! Rotary frequencies are transformers' own under every scaling, and the module rotates by the positions it is given.

// The digits that PyTorch prints.
#![allow(clippy::excessive_precision)]

use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use burn_context_parallel::Error;
use burn_context_parallel::sequence::{
    RotaryEmbedding, RotaryEmbeddingConfig, RotaryFrequencies, RotaryScaling, apply_rotary, apply_rotary_adjoint,
};
use rstest::rstest;

fn yarn(factor: f64, original: usize) -> RotaryScaling {
    RotaryScaling::yarn(factor, original)
}

fn yarn_with(factor: f64, original: usize, change: impl FnOnce(&mut [Option<f64>; 3])) -> RotaryScaling {
    let mut given = [None; 3];
    change(&mut given);
    let [attention_factor, mscale, mscale_all_dim] = given;
    RotaryScaling::Yarn {
        factor,
        original_max_position_embeddings: original,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor,
        mscale,
        mscale_all_dim,
        truncate: true,
    }
}

/// Computed by transformers 5.24 (`ROPE_INIT_FUNCTIONS`) with PyTorch on a CPU.
#[rstest]
#[case::linear(12, 1e4, RotaryScaling::Linear { factor: 2.5 }, 1.0,
    &[0.400000006, 0.0861773789, 0.0185663532, 0.00399999972, 0.000861773733, 0.000185663579])]
#[case::llama3(16, 5e5,
    RotaryScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 }, 1.0,
    &[1.0, 0.193922758, 0.0376060307, 0.00729266508, 0.000524846022, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06])]
#[case::yarn(16, 1e4, yarn(4.0, 2048), 1.138629436111989,
    &[1.0, 0.316227764, 0.100000001, 0.025693506, 0.00624999963, 0.00138349656, 0.000250000012, 7.90569466e-05])]
#[case::yarn_untruncated_with_both_mscales(32, 1e6,
    RotaryScaling::Yarn { factor: 40.0, original_max_position_embeddings: 4096, beta_fast: 48.0, beta_slow: 2.0,
        attention_factor: None, mscale: Some(0.707), mscale_all_dim: Some(1.0), truncate: false }, 0.9210423553163399,
    &[1.0, 0.421696514, 0.177827939, 0.0749894157, 0.023423085, 0.00634486694, 0.00118593709, 5.92843462e-05,
      2.49999994e-05, 1.05424124e-05, 4.44569832e-06, 1.87473552e-06, 7.90569402e-07, 3.33380342e-07, 1.40585328e-07,
      5.92843428e-08])]
#[case::yarn_with_a_given_attention_factor(16, 150_000.0, yarn_with(1.0, 64, |given| given[0] = Some(0.75)), 0.75,
    &[1.0, 0.225418001, 0.0508132726, 0.0114542264, 0.00258198893, 0.000582026783, 0.000131199311, 2.95746868e-05])]
#[case::yarn_with_bounds_that_coincide(8, 1e4, yarn(16.0, 4), 1.2772588722239782,
    &[1.0, 0.00625000009, 0.000624999986, 6.2500003e-05])]
#[case::yarn_with_one_mscale_only(16, 1e4, yarn_with(7.0, 512, |given| given[1] = Some(0.5)), 1.1945910149055314,
    &[1.0, 0.248464659, 0.0571428575, 0.011293849, 0.00142857141, 0.000451753964, 0.000142857141, 4.51753949e-05])]
fn frequencies_are_transformers(
    #[case] head_dim: usize,
    #[case] theta: f64,
    #[case] scaling: RotaryScaling,
    #[case] factor: f64,
    #[case] expected: &[f32],
) {
    let frequencies = RotaryFrequencies::scaled(head_dim, theta, &scaling).unwrap();
    assert_eq!(frequencies.head_dim(), head_dim);
    assert!((frequencies.attention_factor() - factor).abs() < 1e-15, "{}", frequencies.attention_factor());
    for (i, (got, want)) in frequencies.values().iter().zip(expected).enumerate() {
        // Two units in the last place: powers of f32 are not correctly rounded anywhere.
        assert!((got - want).abs() <= 2.4e-7 * want, "pair {i}: {got:e}, not {want:e}");
    }
}

#[rstest]
#[case(RotaryScaling::Linear { factor: 0.0 }, "factor is 0")]
#[case(RotaryScaling::Linear { factor: f64::NAN }, "factor is NaN")]
#[case(RotaryScaling::Linear { factor: 1e300 }, "factor is ")]
#[case(
    RotaryScaling::Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_max_position_embeddings: 64 },
    "high_freq_factor 4"
)]
#[case(
    RotaryScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 0 },
    "original_max_position_embeddings is 0"
)]
#[case(yarn(-1.0, 64), "factor is -1")]
#[case(yarn(4.0, 0), "original_max_position_embeddings is 0")]
#[case(yarn_with(4.0, 64, |given| given[0] = Some(f64::INFINITY)), "attention_factor is inf")]
#[case(yarn_with(4.0, 64, |given| given[1] = Some(-1.0)), "mscale is ")]
fn a_scaling_of_no_sense_is_an_error(#[case] scaling: RotaryScaling, #[case] named: &str) {
    let error = RotaryFrequencies::scaled(8, 1e4, &scaling).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(named), "{error}");
}

#[test]
fn yarn_needs_a_base_above_one() {
    let error = RotaryFrequencies::scaled(8, 1.0, &yarn(4.0, 64)).unwrap_err().to_string();
    assert!(error.contains("theta 1"), "{error}");
}

fn module(scaling: RotaryScaling) -> RotaryEmbedding {
    RotaryEmbeddingConfig::new(6).with_scaling(scaling).init().unwrap()
}

fn positions(rows: &[[i64; 3]], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(rows.concat(), [rows.len(), 3]), device)
}

#[test]
fn every_pair_turns_by_its_positions_angle_times_the_attention_factor() {
    let device = Device::flex();
    let rotary = module(yarn(4.0, 64));
    let factor = rotary.frequencies().attention_factor();
    assert!(factor > 1.1);
    let x = Tensor::<4>::random([2, 3, 2, 6], Distribution::Default, (&device, DType::F64));
    let rows = [[0, 5, 5_000_000], [-3, 1, 7]];
    let y = rotary.forward(x.clone(), positions(&rows, &device));
    let value = |x: &Tensor<4>, at: [usize; 4]| {
        let [b, l, h, d] = at;
        x.clone().slice([b..b + 1, l..l + 1, h..h + 1, d..d + 1]).into_scalar::<f64>()
    };
    for (b, row) in rows.iter().enumerate() {
        for (l, position) in row.iter().enumerate() {
            for (h, i) in [(0, 0), (1, 1), (1, 2)] {
                let (sin, cos) = (*position as f64 * f64::from(rotary.frequencies().values()[i])).sin_cos();
                let (first, second) = (value(&x, [b, l, h, i]), value(&x, [b, l, h, i + 3]));
                let expected = [factor * (first * cos - second * sin), factor * (second * cos + first * sin)];
                let got = [value(&y, [b, l, h, i]), value(&y, [b, l, h, i + 3])];
                assert!((got[0] - expected[0]).abs() + (got[1] - expected[1]).abs() < 1e-12, "{got:?} {expected:?}");
            }
        }
    }
}

/// With an attention factor the adjoint is no longer the inverse.
#[test]
fn the_gradient_is_the_adjoint_of_the_scaled_rotation() {
    let plain = Device::flex();
    let rotary = module(yarn(16.0, 64));
    let random = || Tensor::<4>::random([2, 3, 2, 6], Distribution::Default, (&plain, DType::F64));
    let (x, dy) = (random(), random());
    let dot = |a: Tensor<4>, b: Tensor<4>| (a * b).sum().into_scalar::<f64>();
    let rows = [[4, 9, 2]];

    let table = rotary.frequencies().table(&rows[0], 1, DType::F64, &plain);
    let (y, dx) = (apply_rotary(x.clone(), &table), apply_rotary_adjoint(dy.clone(), &table));
    let (forward, backward) = (dot(y, dy.clone()), dot(x.clone(), dx.clone()));
    assert!((forward - backward).abs() < 1e-12 * forward.abs().max(1.0), "{forward} {backward}");

    // One row of positions for both rows of x, on any kind of device.
    for device in [plain.clone(), plain.clone().autodiff(), plain.clone().autodiff().gradient_checkpointing()] {
        let leaf = Tensor::from_data(x.to_data(), (&plain.clone().autodiff(), DType::F64)).require_grad();
        let y = rotary.forward(leaf.clone(), positions(&rows, &device));
        let grads = (y * Tensor::from_inner(dy.clone())).sum().backward();
        assert_eq!(leaf.grad(&grads).unwrap().into_data(), dx.clone().into_data());
    }
}

#[test]
fn half_types_are_rotated_in_their_own_type() {
    let device = Device::flex();
    let x = Tensor::<4>::random([1, 3, 2, 6], Distribution::Default, (&device, DType::F32));
    let exact = module(RotaryScaling::Default).forward(x.clone(), positions(&[[1, 2, 3]], &device));
    for (dtype, tolerance) in [(DType::BF16, 2.0 / 256.0), (DType::F16, 2.0 / 2048.0)] {
        let y = module(RotaryScaling::Default).forward(x.clone().cast(dtype), positions(&[[1, 2, 3]], &device));
        assert_eq!(y.dtype(), dtype);
        let worst = (y.cast(DType::F32) - exact.clone()).abs().max().into_scalar::<f32>();
        assert!(worst < 2.0 * tolerance, "{dtype:?}: {worst}");
    }
}

#[test]
fn what_does_not_fit_is_an_error_with_both_shapes() {
    let device = Device::flex();
    let rotary = module(RotaryScaling::Default);
    let x = |dims| Tensor::<4>::zeros(dims, &device);
    let three = || positions(&[[0, 1, 2]], &device);
    let error = |x, positions| rotary.try_forward(x, positions).unwrap_err().to_string();
    assert!(error(x([1, 3, 2, 8]), three()).contains("heads of 8 dimensions, frequencies for 6"));
    assert!(error(x([1, 4, 2, 6]), three()).contains("[1, 3] for x of shape [1, 4, 2, 6]"));
    assert!(error(x([3, 3, 2, 6]), positions(&[[0, 1, 2], [0, 1, 2]], &device)).contains("[2, 3]"));
    assert!(RotaryEmbeddingConfig::new(7).init().is_err());
}
