//! The tracked operation in graphs: which outputs are used, which inputs are tracked.

mod common;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{FlashOps, FlashOptions, flash_attention, flash_attention_with_lse, reference};
use common::{close, random, values};
use rstest::rstest;

fn inputs(device: &Device) -> [Tensor<4>; 3] {
    [(4, 1), (2, 2), (2, 3)].map(|(heads, seed)| {
        let value = random([2, heads, 11, 8], seed, &Device::flex(), DType::F64);
        // From data, not `autodiff()`: leaves of this device, with its strategy.
        Tensor::from_data(value.into_data(), (device, DType::F64)).require_grad()
    })
}

fn devices() -> [Device; 2] {
    let device = Device::flex().autodiff();
    [device.clone(), device.gradient_checkpointing()]
}

/// A loss that uses the outputs as told.
fn loss(out: Tensor<4>, lse: Tensor<3>, uses: &str) -> Tensor<1> {
    let of_out = || (out.clone() * out.clone()).sum();
    // Used twice, as a z-loss would.
    let of_lse = || (lse.clone() * lse.clone()).sum() + lse.clone().sin().sum();
    match uses {
        "out" => of_out(),
        "lse" => of_lse(),
        _ => of_out() + of_lse(),
    }
}

#[rstest]
fn gradients_flow_through_either_output(#[values("out", "lse", "both")] uses: &str) {
    for device in devices() {
        let options = FlashOptions::causal();
        let grads = |flash: bool| {
            let [q, k, v] = inputs(&device);
            let attention = if flash { flash_attention_with_lse } else { reference::attention_with_lse };
            // Through another operation on either side: q is no leaf here, and `out` no root.
            let (out, lse) = attention(q.clone() * 2.0, k.clone(), v.clone(), &options).unwrap();
            let grads = loss(out, lse, uses).backward();
            [q, k, v].map(|t| t.grad(&grads))
        };
        let (got, wanted) = (grads(true), grads(false));
        for (name, (got, wanted)) in ["dq", "dk", "dv"].iter().zip(got.iter().zip(&wanted)) {
            match (got, wanted) {
                (Some(got), Some(wanted)) => close(name, got, wanted, 1e-12),
                // lse does not depend on v: plain attention knows that, here the gradient is zeros.
                (Some(got), None) => assert!(values(got).iter().all(|x| *x == 0.0), "{name}"),
                (got, wanted) => panic!("{name}: {got:?} for {wanted:?}"),
            }
        }
    }
}

#[rstest]
fn constants_get_no_gradient_and_disturb_none(#[values(0, 1, 2)] constant: usize) {
    let device = Device::flex().autodiff();
    let options = FlashOptions::causal();
    let all = inputs(&device);
    let [q, k, v] = all.clone();
    let grads = flash_attention(q, k, v, &options).unwrap().powi_scalar(2).sum().backward();
    let wanted = all.map(|t| t.grad(&grads).unwrap());

    // Without a graph, and on the autodiff device but not tracked.
    for plain in [true, false] {
        let mut some = inputs(&device);
        let value = some[constant].clone().inner();
        some[constant] = if plain { value } else { Tensor::from_inner(value) };
        let [q, k, v] = some.clone();
        let grads = flash_attention(q, k, v, &options).unwrap().powi_scalar(2).sum().backward();
        for (i, (tensor, wanted)) in some.iter().zip(&wanted).enumerate() {
            if i != constant {
                assert_eq!(values(&tensor.grad(&grads).unwrap()), values(wanted));
            }
        }
    }
}

#[test]
fn the_extension_operation_is_differentiable_itself() {
    let device = Device::flex().autodiff();
    let options = FlashOptions::causal();
    let [q, k, v] = inputs(&device);
    let (out, _) = Dispatch::flash_forward(
        q.clone().into_dispatch(),
        k.clone().into_dispatch(),
        v.clone().into_dispatch(),
        options.clone(),
    );
    let grads = Tensor::<4>::from_dispatch(out).powi_scalar(2).sum().backward();
    let got = q.grad(&grads).unwrap();

    let [q, k, v] = inputs(&device);
    let grads = flash_attention(q.clone(), k, v, &options).unwrap().powi_scalar(2).sum().backward();
    assert_eq!(values(&got), values(&q.grad(&grads).unwrap()));
}

#[test]
fn one_tensor_may_be_query_key_and_value() {
    let grad = |flash: bool| {
        let x = random([1, 2, 9, 8], 5, &Device::flex(), DType::F64).autodiff().require_grad();
        let attention = if flash { flash_attention } else { reference::attention };
        let out = attention(x.clone(), x.clone(), x.clone(), &FlashOptions::causal()).unwrap();
        x.grad(&out.powi_scalar(2).sum().backward()).unwrap()
    };
    close("dx", &grad(true), &grad(false), 1e-12);
}
