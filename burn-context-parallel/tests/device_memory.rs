//! On a CubeCL device attention holds what its formulas say, which is O(S): by the reports of the device's pools. One test in a binary of its
//! own, since pools are the process's.
#![cfg(feature = "cube")]
#![allow(clippy::print_stdout, reason = "the figures, for whoever runs it with --nocapture")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, FlashOptions, FlashShape, device_backward_bytes, device_forward_bytes};
use burn_context_parallel::sequence::Documents;
use common::{device, random};

/// In use, and reserved.
fn held(device: &Device) -> [usize; 2] {
    device.sync().unwrap();
    let usage = device.memory_pool_usage().expect("a device with pools");
    [usage.bytes_in_use as usize, usage.bytes_reserved as usize]
}

/// By how much both grow while `f` runs, with its results.
fn growth<R>(device: &Device, f: impl FnOnce() -> R) -> (R, [usize; 2]) {
    device.sync().unwrap();
    device.memory_cleanup();
    let before = held(device);
    let result = f();
    let after = held(device);
    (result, [0, 1].map(|i| after[i].saturating_sub(before[i])))
}

#[test]
fn memory_is_as_stated() {
    let device = device();
    let (h, g, d) = (4, 2, 64);
    for s in [256, 1024, 4096] {
        let shape = FlashShape { batch: 1, q_heads: h, kv_heads: g, q_len: s, k_len: s, head_dim: d };
        let to = |x: Tensor<4>| Tensor::<4>::from_data(x.into_data(), &device);
        let [q, d_out] = [1, 2].map(|seed| to(random([1, h, s, d], seed, &Device::flex(), DType::F32)));
        let [k, v] = [3, 4].map(|seed| to(random([1, g, s, d], seed, &Device::flex(), DType::F32)));
        for documents in [false, true] {
            let mut options = FlashOptions::causal();
            if documents {
                options = options.with_documents(Documents::from_cu_seqlens(&[0, s / 3, s]).unwrap());
            }
            let ((out, lse), forward) =
                growth(&device, || flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap());
            let stated = device_forward_bytes(&shape, DType::F32, &options);
            expect("forward", s, forward, stated, 4 * h * s * (d + 1));
            let delta = flash::delta(d_out.clone(), out);
            let inputs = [&q, &k, &v, &d_out].map(Tensor::clone);
            let (grads, backward) = growth(&device, || {
                let [q, k, v, d_out] = inputs;
                flash::backward(q, k, v, d_out, lse, delta, &options).unwrap()
            });
            let stated = device_backward_bytes(&shape, DType::F32, &options);
            expect("backward", s, backward, stated, 4 * s * d * (h + 2 * g));
            drop(grads);
        }
    }
}

/// `results` are what remains; tables may, too, until the device has let go of them.
fn expect(what: &str, s: usize, [used, reserved]: [usize; 2], stated: usize, results: usize) {
    println!("{what} at S {s}: {used} bytes in use, {reserved} reserved; stated {stated}");
    assert!(used + 4096 >= results.min(stated) - 2 * 4 * 4 * s, "{what} at S {s}: {used} for results of {results}");
    // Buffers are rounded up to the alignment, and pools grow by pages of some MiB. Scores of 4096 tokens would be 256 MiB.
    assert!(used <= stated + 4096, "{what} at S {s}: {used} bytes in use, stated are {stated}");
    assert!(reserved <= 2 * stated + (16 << 20), "{what} at S {s}: {reserved} bytes reserved, stated are {stated}");
}
