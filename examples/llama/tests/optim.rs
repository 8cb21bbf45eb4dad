//! The gradient norm is one number over all parameters, finite wherever it is representable.

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::group::ProcessGroup;
use llama::{adamw, clip_grad_norm};
use rstest::rstest;

#[derive(Module, Debug)]
struct Two {
    a: Param<Tensor<2>>,
    b: Param<Tensor<1>>,
}

fn module(device: &Device) -> Two {
    Two {
        a: Param::initialized(ParamId::new(), Tensor::zeros([2, 2], device)),
        b: Param::initialized(ParamId::new(), Tensor::zeros([3], device)),
    }
}

fn grads(module: &Two, a: [[f32; 2]; 2], b: [f32; 3]) -> GradientsParams {
    let device = Device::flex();
    let mut grads = GradientsParams::new();
    grads.register(module.a.id, Tensor::<2>::from_floats(a, &device));
    grads.register(module.b.id, Tensor::<1>::from_floats(b, &device));
    grads
}

#[rstest]
#[case(100.0, 1.0)] // below the limit: untouched
#[case(7.0, 1.0)] // at the limit: untouched
#[case(3.5, 0.5)]
#[case(f64::INFINITY, 1.0)]
fn gradients_are_scaled_by_one_factor(#[case] max_norm: f64, #[case] factor: f64) {
    let module = module(&Device::flex());
    // 1 + 4 + 4 + 16 + 16 + 4 + 4 = 49
    let grads = grads(&module, [[1.0, -2.0], [2.0, 4.0]], [-4.0, 2.0, 2.0]);
    let (grads, norm) = clip_grad_norm(grads, &module, max_norm, &ProcessGroup::single()).unwrap();
    assert!((norm - 7.0).abs() < 1e-6, "{norm}");
    let a: Vec<f64> = grads.get::<2>(module.a.id).unwrap().into_data().iter::<f64>().collect();
    let b: Vec<f64> = grads.get::<1>(module.b.id).unwrap().into_data().iter::<f64>().collect();
    for (got, want) in a.iter().chain(&b).zip([1.0, -2.0, 2.0, 4.0, -4.0, 2.0, 2.0]) {
        assert!((got - want * factor).abs() < 1e-5, "{got} {want}");
    }
}

#[rstest]
#[case(1e25)]
#[case(1e-25)]
fn squares_outside_the_range_of_f32_count(#[case] size: f32) {
    let module = module(&Device::flex());
    let grads = grads(&module, [[size, size], [size, size]], [0.0; 3]);
    let (_, norm) = clip_grad_norm(grads, &module, 1e30, &ProcessGroup::single()).unwrap();
    assert!((norm / f64::from(size) - 2.0).abs() < 1e-5, "{norm}");
}

#[test]
fn a_million_large_gradients_do_not_overflow() {
    #[derive(Module, Debug)]
    struct One {
        a: Param<Tensor<2>>,
    }
    let device = Device::flex();
    let module = One { a: Param::initialized(ParamId::new(), Tensor::zeros([1000, 1000], &device)) };
    let mut grads = GradientsParams::new();
    grads.register(module.a.id, Tensor::<2>::full([1000, 1000], 1e18, &device));
    let (grads, norm) = clip_grad_norm(grads, &module, 1.0, &ProcessGroup::single()).unwrap();
    assert!((norm / 1e21 - 1.0).abs() < 1e-5, "{norm}");
    let clipped = grads.get::<2>(module.a.id).unwrap().square().sum().into_scalar::<f32>();
    assert!((clipped - 1.0).abs() < 1e-3, "{clipped}");
}

#[rstest]
#[case(f32::NAN)]
#[case(f32::INFINITY)]
fn a_norm_that_is_not_finite_is_told_and_changes_nothing(#[case] bad: f32) {
    let module = module(&Device::flex());
    let grads = grads(&module, [[1.0, bad], [2.0, 4.0]], [-4.0, 2.0, 2.0]);
    let (grads, norm) = clip_grad_norm(grads, &module, 1.0, &ProcessGroup::single()).unwrap();
    assert!(!norm.is_finite());
    let b: Vec<f32> = grads.get::<1>(module.b.id).unwrap().into_data().iter::<f32>().collect();
    assert_eq!(b, [-4.0, 2.0, 2.0]);
}

#[rstest]
fn a_limit_that_is_no_positive_number_is_an_error(#[values(0.0, -1.0, f64::NAN)] max_norm: f64) {
    let module = module(&Device::flex());
    let grads = grads(&module, [[1.0; 2]; 2], [1.0; 3]);
    let error = clip_grad_norm(grads, &module, max_norm, &ProcessGroup::single()).unwrap_err();
    assert!(error.to_string().contains("max_norm"), "{error}");
}

/// PyTorch: p (1 - lr wd) - lr m / (sqrt(v) + eps); after one step m / sqrt(v) is the sign of the gradient.
#[test]
fn adamw_decays_weights_apart_from_the_gradient() {
    let device = Device::flex().autodiff();
    let mut module = module(&device);
    module.b = Param::initialized(ParamId::new(), Tensor::<1>::from_floats([1.0, -2.0, 3.0], &device).require_grad());
    let grads = grads(&module, [[0.0; 2]; 2], [0.5, -0.25, 1e-3]);
    let module = adamw(0.1).step(0.01, module, grads);
    let b: Vec<f32> = module.b.val().into_data().iter::<f32>().collect();
    for (got, want) in b.iter().zip([0.999 - 0.01, -1.998 + 0.01, 2.997 - 0.01]) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
}
