//! What is refused, refused as a value, with its numbers.

mod common;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, FlashOps, FlashOptions, flash_attention, reference};
use burn_context_parallel::{Error, catch};
use rstest::rstest;

fn ones(shape: [usize; 4]) -> Tensor<4> {
    Tensor::ones(shape, (&Device::flex(), DType::F32))
}

#[rstest]
#[case::heads([1, 4, 5, 8], [1, 3, 5, 8], [1, 3, 5, 8], "4 query heads cannot share 3 key/value heads evenly")]
#[case::no_kv_heads([1, 4, 5, 8], [1, 0, 5, 8], [1, 0, 5, 8], "4 query heads cannot share 0")]
#[case::batch([2, 4, 5, 8], [1, 4, 5, 8], [1, 4, 5, 8], "batch or head dimension of q and k differ")]
#[case::dimension([1, 4, 5, 8], [1, 4, 5, 16], [1, 4, 5, 16], "batch or head dimension of q and k differ")]
#[case::lengths([1, 4, 5, 8], [1, 4, 5, 8], [1, 4, 6, 8], "k and v differ")]
#[case::value_dimension([1, 4, 5, 8], [1, 4, 5, 8], [1, 4, 5, 4], "value head dimension of 4")]
fn shapes_that_do_not_fit(#[case] q: [usize; 4], #[case] k: [usize; 4], #[case] v: [usize; 4], #[case] message: &str) {
    let options = FlashOptions::causal();
    let errors = [
        flash_attention(ones(q), ones(k), ones(v), &options).unwrap_err(),
        flash::forward(ones(q), ones(k), ones(v), &options).unwrap_err(),
        reference::attention(ones(q), ones(k), ones(v), &options).unwrap_err(),
        // Below the checked interface the same error is raised.
        catch(|| {
            let [q, k, v] = [q, k, v].map(|shape| ones(shape).into_dispatch());
            Dispatch::flash_forward(q, k, v, options.clone())
        })
        .unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[rstest]
fn scales_that_are_not_finite(#[values(f64::NAN, f64::INFINITY, f64::NEG_INFINITY)] scale: f64) {
    let x = || ones([1, 1, 2, 4]);
    let options = FlashOptions::full().with_scale(scale);
    for attention in [flash_attention, reference::attention] {
        let error = attention(x(), x(), x(), &options).unwrap_err();
        assert!(error.to_string().contains("a scale that f32 holds"), "{error}");
    }
}

#[test]
fn mixed_element_types() {
    let x = || ones([1, 1, 2, 4]);
    let error = flash_attention(x(), x(), x().cast(DType::BF16), &FlashOptions::full()).unwrap_err();
    assert!(error.to_string().contains("q is F32 and v is BF16"), "{error}");
}

#[test]
fn mixed_checkpointing_strategies() {
    let on = |device: Device| Tensor::<4>::ones([1, 1, 2, 4], &device).require_grad();
    let plain = on(Device::flex().autodiff());
    let balanced = on(Device::flex().autodiff().gradient_checkpointing());
    let error = flash_attention(plain.clone(), balanced, plain, &FlashOptions::full()).unwrap_err();
    assert!(error.to_string().contains("different checkpointing strategies"), "{error}");
}

#[test]
fn tracked_tensors_where_gradients_would_be_lost() {
    let x = || ones([1, 1, 2, 4]);
    let tracked = || x().autodiff().require_grad();
    let options = FlashOptions::full();
    let error = flash::forward(x(), tracked(), x(), &options).unwrap_err();
    assert!(error.to_string().contains("k is on an autodiff device"), "{error}");

    let rows = || Tensor::<3>::ones([1, 1, 2], &Device::flex());
    let error = flash::backward(x(), x(), x(), tracked(), rows(), rows(), &options).unwrap_err();
    assert!(error.to_string().contains("d_out is on an autodiff device"), "{error}");
}

#[test]
fn statistics_of_other_shapes() {
    let x = || ones([1, 2, 3, 4]);
    let rows = |s| Tensor::<3>::ones([1, 2, s], &Device::flex());
    let options = FlashOptions::full();
    let error = flash::backward(x(), x(), x(), x(), rows(3), rows(4), &options).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }));
    assert!(error.to_string().contains("delta is [1, 2, 4]"), "{error}");
    let half = rows(3).cast(DType::F16);
    let error = flash::backward(x(), x(), x(), x(), half, rows(3), &options).unwrap_err();
    assert!(error.to_string().contains("lse is [1, 2, 3] of F16"), "{error}");
}
