//! Sizes of nothing: on the device that this build was made for, attention of them is what it is on a Flex device, or is refused with the same
//! words.
#![cfg(feature = "cube")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, FlashOptions};
use common::attention::{Results, run};
use common::{device, random, values};
use rstest::rstest;

fn inputs(q: [usize; 4], kv: [usize; 4], device: &Device) -> [Tensor<4>; 4] {
    let mut seeds = 31..;
    [q, kv, kv, q]
        .map(|shape| random(shape, seeds.next().unwrap(), &Device::flex(), DType::F32))
        .map(|t| Tensor::from_data(t.into_data(), (device, DType::F32)))
}

/// Forward, delta and backward by hand, onto sums if asked for.
fn by_hand([q, k, v, d_out]: [Tensor<4>; 4], onto: bool, options: &FlashOptions) -> Result<Results, String> {
    let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), options).map_err(|error| error.to_string())?;
    let delta = flash::delta(d_out.clone(), out.clone());
    let sums = onto.then(|| (k.clone(), v.clone()));
    let (dq, dk, dv) =
        flash::backward_onto(q, k, v, d_out, lse.clone(), delta, sums, options).map_err(|error| error.to_string())?;
    Ok(([out, dq, dk, dv], lse))
}

fn same(got: Results, wanted: Results) {
    for (name, (got, wanted)) in ["out", "dq", "dk", "dv"].into_iter().zip(got.0.iter().zip(&wanted.0)) {
        assert_eq!((got.dims(), values(got)), (wanted.dims(), values(wanted)), "{name}");
    }
    assert_eq!((got.1.dims(), values(&got.1)), (wanted.1.dims(), values(&wanted.1)), "lse");
}

#[rstest]
#[case::no_keys([2, 4, 3, 8], [2, 2, 0, 8])]
#[case::no_queries([2, 4, 0, 8], [2, 2, 3, 8])]
#[case::neither([2, 4, 0, 8], [2, 2, 0, 8])]
#[case::no_batch([0, 4, 3, 8], [0, 2, 3, 8])]
#[case::no_heads([2, 0, 3, 8], [2, 0, 3, 8])]
#[case::no_query_heads([2, 0, 3, 8], [2, 2, 3, 8])]
#[case::no_key_heads([2, 4, 3, 8], [2, 0, 3, 8])]
#[case::no_dimensions([2, 4, 3, 0], [2, 2, 5, 0])]
#[case::nothing_at_all([0, 0, 0, 0], [0, 0, 0, 0])]
fn nothing_is_what_it_is_on_flex(#[case] q: [usize; 4], #[case] kv: [usize; 4], #[values(false, true)] onto: bool) {
    let options = FlashOptions::causal().with_offsets(1, 0);
    let wanted = by_hand(inputs(q, kv, &Device::flex()), onto, &options);
    match (by_hand(inputs(q, kv, &device()), onto, &options), wanted) {
        (Ok(got), Ok(wanted)) => {
            same(got, wanted);
            // What `run` weighs log-sum-exps with is the first dimension.
            if q[3] > 0 {
                same(run(inputs(q, kv, &device()), &options), run(inputs(q, kv, &Device::flex()), &options));
            }
        }
        (got, wanted) => assert_eq!(got.map(|_| ()), wanted.map(|_| ())),
    }
}

/// Of tokens that are there.
#[rstest]
#[case::window_before_all_keys(FlashOptions::causal().with_window(2).with_offsets(50, 0))]
#[case::keys_later(FlashOptions::causal().with_offsets(0, 50))]
fn nothing_seen_is_what_it_is_on_flex(#[case] options: FlashOptions) {
    let (q, kv) = ([1, 2, 3, 8], [1, 1, 4, 8]);
    same(run(inputs(q, kv, &device()), &options), run(inputs(q, kv, &Device::flex()), &options));
    let [got, wanted] = [device(), Device::flex()].map(|device| by_hand(inputs(q, kv, &device), true, &options));
    same(got.unwrap(), wanted.unwrap());
}

#[rstest]
#[case::one_of_each([1, 1, 1, 1], [1, 1, 1, 1])]
#[case::one_query([1, 2, 1, 8], [1, 1, 70, 8])]
#[case::one_key([1, 2, 70, 8], [1, 1, 1, 8])]
#[case::one_dimension([1, 2, 70, 1], [1, 1, 70, 1])]
fn one_of_something_is_what_it_is_on_flex(#[case] q: [usize; 4], #[case] kv: [usize; 4]) {
    let options = FlashOptions::causal().with_offsets(1, 0);
    let [got, wanted] = [device(), Device::flex()].map(|device| run(inputs(q, kv, &device), &options));
    common::attention::agree("one", got, wanted, 2e-5);
}
