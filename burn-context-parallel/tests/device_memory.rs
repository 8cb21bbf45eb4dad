//! On a CubeCL device attention holds what its formulas say, which is O(S): by the reports of the device's pools. One test in a binary of its
//! own, since pools are the process's.
#![cfg(feature = "cube")]
#![allow(clippy::print_stdout, reason = "the figures, for whoever runs it with --nocapture")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, FlashOptions, FlashShape, device_backward_bytes, device_forward_bytes};
use burn_context_parallel::sequence::Documents;
use common::attention::untuned;
use common::{device, random, skipped};

/// In use, and reserved.
fn held(device: &Device) -> [usize; 2] {
    device.sync().unwrap();
    let usage = device.memory_pool_usage().expect("a device with pools");
    [usage.bytes_in_use as usize, usage.bytes_reserved as usize]
}

/// By how much both grow while `f` runs, with its results, and with so many bytes that are held meanwhile, as something temporary would be.
fn growth<R>(device: &Device, temporary: usize, f: impl FnOnce() -> R) -> (R, [usize; 2]) {
    device.sync().unwrap();
    device.memory_cleanup();
    let before = held(device);
    let result = {
        let _held = (temporary > 0).then(|| Tensor::<1>::zeros([temporary / 4], device));
        f()
    };
    let after = held(device);
    (result, [0, 1].map(|i| after[i].saturating_sub(before[i])))
}

/// The growths of forward and of backward.
fn passes(
    device: &Device,
    [q, k, v, d_out]: &[Tensor<4>; 4],
    options: &FlashOptions,
    temporary: usize,
) -> [[usize; 2]; 2] {
    let [q, k, v, d_out] = [q, k, v, d_out].map(Tensor::clone);
    let ((out, lse), forward) =
        growth(device, temporary, || flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap());
    let delta = flash::delta(d_out.clone(), out);
    let (_grads, backward) =
        growth(device, temporary, || flash::backward(q, k, v, d_out, lse, delta, options).unwrap());
    [forward, backward]
}

#[test]
fn memory_is_as_stated() {
    let device = device();
    for (s, d) in [(256, 64), (1024, 64), (4096, 64), (4096, 33)] {
        expect_as_stated(&device, s, d);
    }
    // So long that an input is more than pools have to spare, and with few scores.
    for (lens, d) in [([8, 1 << 17], 64), ([1 << 17, 8], 64), ([8, 1 << 17], 65), ([1 << 17, 8], 65)] {
        expect_views_read_in_place(&device, lens, d);
    }
}

fn to(device: &Device, shape: [usize; 4], seed: u64) -> Tensor<4> {
    Tensor::from_data(random(shape, seed, &Device::flex(), DType::F32).into_data(), device)
}

fn expect_as_stated(device: &Device, s: usize, d: usize) {
    let (h, g) = (4, 2);
    let shape = FlashShape { batch: 1, q_heads: h, kv_heads: g, q_len: s, k_len: s, head_dim: d };
    let inputs = [[1, h, s, d], [1, g, s, d], [1, g, s, d], [1, h, s, d]].map(|shape| to(device, shape, 1));
    for documents in [false, true] {
        let mut options = FlashOptions::causal();
        if documents {
            options = options.with_documents(Documents::from_cu_seqlens(&[0, s / 3, s]).unwrap());
        }
        // Tuning takes its time, and cleans the pools up, which would hide what was held: it is left to the short one.
        if s == 256 {
            passes(device, &inputs, &options, 0);
        } else {
            options = untuned(options, &inputs[0]);
        }
        let stated =
            [device_forward_bytes(&shape, DType::F32, &options), device_backward_bytes(&shape, DType::F32, &options)];
        let [forward, backward] = passes(device, &inputs, &options, 0);
        expect("forward", s, forward, stated[0], 4 * h * s * (d + 1));
        expect("backward", s, backward, stated[1], 4 * s * d * (h + 2 * g));
        if s == 4096 {
            let scores = 4 * s * s;
            for ([_, reserved], stated) in passes(device, &inputs, &options, scores).into_iter().zip(stated) {
                assert!(reserved > most_reserved(stated), "scores of a head are not seen in {reserved} bytes");
            }
        }
    }
}

/// Tokens first in memory, as projections leave them; part of a longer cache; heads beside others': the pools grow no more than of tensors
/// that lie plain, where a copy would have been seen.
fn expect_views_read_in_place(device: &Device, [sq, sk]: [usize; 2], d: usize) {
    let h = 2;
    let ones = |shape: [usize; 4]| Tensor::<4>::ones(shape, device);
    let plain = [sq, sk, sk, sq].map(|s| ones([1, h, s, d]));
    let views = [
        ones([1, sq, h, d]).swap_dims(1, 2),
        ones([1, h, sk + 9, d]).narrow(2, 5, sk),
        ones([1, sk, h + 1, d]).swap_dims(1, 2).narrow(1, 1, h),
        ones([1, sq, h + 1, d]).narrow(2, 1, h).swap_dims(1, 2),
    ];
    let options = untuned(FlashOptions::full(), &plain[0]);
    let reserved = |inputs, temporary| passes(device, inputs, &options, temporary).map(|[_, reserved]| reserved);
    let (allowed, found) = (reserved(&plain, 0), reserved(&views, 0));
    let copied = reserved(&views, 4 * h * sq.max(sk) * d);
    println!(
        "{sq} queries, {sk} keys, D {d}: {allowed:?} bytes reserved of plain tensors, {found:?} of views, {copied:?} with a copy"
    );
    for i in [0, 1] {
        assert!(found[i] <= allowed[i], "D {d}: {} bytes reserved of views, {} of plain tensors", found[i], allowed[i]);
        if copied[i] <= allowed[i] {
            skipped("memory_is_as_stated", "the pools of this device are too coarse for copies to be seen");
        }
    }
}

/// `results` are what remains; tables may, too, until the device has let go of them.
fn expect(what: &str, s: usize, [used, reserved]: [usize; 2], stated: usize, results: usize) {
    println!("{what} at S {s}: {used} bytes in use, {reserved} reserved; stated {stated}");
    assert!(used + 4096 >= results.min(stated) - 2 * 4 * 4 * s, "{what} at S {s}: {used} for results of {results}");
    // Buffers are rounded up to the alignment.
    assert!(used <= stated + 4096, "{what} at S {s}: {used} bytes in use, stated are {stated}");
    assert!(reserved <= most_reserved(stated), "{what} at S {s}: {reserved} bytes reserved, stated are {stated}");
}

/// Pools grow by pages of some MiB. Scores of 4096 tokens would be 64 MiB a head.
fn most_reserved(stated: usize) -> usize {
    2 * stated + (16 << 20)
}
