//! Attention takes O(S) memory, and exactly what its formulas say. One test in a binary of its own, for the allocator counts
//! everything that runs: no other test may begin or end, and free what it held, meanwhile.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{self, FlashOptions, FlashShape, backward_bytes, forward_bytes, reference};
use common::random;

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: usize) {
    let now = NOW.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(now, Relaxed);
}

type Formula = fn(&FlashShape, DType, usize) -> usize;

/// What `f` held at most above what was there before.
fn peak<R>(f: impl FnOnce() -> R) -> (R, usize) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = f();
    (result, PEAK.load(Relaxed) - before)
}

fn shape(s: usize) -> FlashShape {
    FlashShape { batch: 1, q_heads: 4, kv_heads: 2, q_len: s, k_len: s, head_dim: 32 }
}

/// Peaks of the forward and of the backward kernel.
fn kernels(s: usize, dtype: DType) -> (usize, usize) {
    let device = Device::flex();
    let FlashShape { batch: b, q_heads: h, kv_heads: g, head_dim: d, .. } = shape(s);
    let [q, d_out] = [1, 2].map(|seed| random([b, h, s, d], seed, &device, dtype));
    let [k, v] = [3, 4].map(|seed| random([b, g, s, d], seed, &device, dtype));
    let options = FlashOptions::causal();
    let ((out, lse), forward) = peak(|| flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap());
    let delta = flash::delta(d_out.clone(), out);
    let (_, backward) = peak(|| flash::backward(q, k, v, d_out, lse, delta, &options).unwrap());
    (forward, backward)
}

#[test]
fn memory_is_as_stated() {
    // Both live to the end: threads that end free what they held.
    let pools = [1, 3].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        for pool in &pools {
            kernels_hold_what_the_formulas_say(dtype, pool);
        }
    }
    doubling_the_sequence_at_most_doubles_the_peak();
}

fn kernels_hold_what_the_formulas_say(dtype: DType, pool: &rayon::ThreadPool) {
    let threads = pool.current_num_threads();
    // The thread pool allocates on first use.
    pool.install(|| kernels(256, dtype));
    for s in [500, 1024, 4096] {
        let (forward, backward) = pool.install(|| kernels(s, dtype));
        let formulas: [Formula; 2] = [forward_bytes, backward_bytes];
        for (i, (counted, formula)) in [forward, backward].into_iter().zip(formulas).enumerate() {
            let what = ["forward", "backward"][i];
            // A few KiB of bookkeeping above. Below: on a busy machine one worker may empty the queue before another
            // starts, so that only one's scratch is certain to be seen; with one thread the formula is met on both sides.
            let (one, all) = (formula(&shape(s), dtype, 1), formula(&shape(s), dtype, threads));
            assert!(
                (0.97 * one as f64..=1.03 * all as f64).contains(&(counted as f64)),
                "{what}, {dtype:?}, {threads} threads, S = {s}: counted {counted}, formula {one} to {all}"
            );
        }
    }
}

/// The differentiable operation with its backward pass, written either way.
fn step(s: usize, flash: bool) -> usize {
    let device = Device::flex().autodiff();
    let FlashShape { batch: b, q_heads: h, kv_heads: g, head_dim: d, .. } = shape(s);
    let leaf =
        |heads, seed| random([b, heads, s, d], seed, &device.clone().inner(), DType::F32).autodiff().require_grad();
    let (q, k, v): (Tensor<4>, Tensor<4>, Tensor<4>) = (leaf(h, 1), leaf(g, 2), leaf(g, 3));
    let attention = if flash { flash::flash_attention } else { reference::attention };
    peak(|| attention(q, k, v, &FlashOptions::causal()).unwrap().sum().backward()).1
}

fn doubling_the_sequence_at_most_doubles_the_peak() {
    step(256, true);
    let (short, long) = (step(2048, true), step(4096, true));
    assert!(long as f64 <= 2.0 * short as f64 * 1.05, "{short} bytes became {long}");

    // Guards: the allocator counts the results at least, and does see what O(S^2) is.
    let results = |s: usize| 4 * s * 32 * (2 * 4 + 2 * 2);
    assert!(short >= results(2048) && long >= results(4096), "counted only {short} and {long} bytes");
    let (short, long) = (step(512, false), step(1024, false));
    assert!(long as f64 >= 3.0 * short as f64, "plain attention: {short} bytes became {long}");
}
