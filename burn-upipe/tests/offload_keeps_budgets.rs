//! Budgets of host memory and disk are kept to the byte, and a full one costs memory of the device, never a step.

mod offload;

use burn_upipe::offload::{Offload, OffloadConfig, OffloadPolicy, Saved, host_budget, host_budget_of};
use offload::{disk, filled, on_disk};
use rstest::rstest;

/// Elements of a tensor.
const LEN: usize = 1000;
const BYTES: usize = 4 * LEN;

fn save(offload: &Offload, count: usize) -> Vec<Saved<1>> {
    (0..count).map(|i| offload.save(filled(LEN, i as f32)).unwrap()).collect()
}

fn take(saved: Vec<Saved<1>>) {
    for (i, saved) in saved.into_iter().enumerate().rev() {
        assert!(saved.take().unwrap().into_data().iter::<f32>().all(|x| x == i as f32), "tensor {i}");
    }
}

/// unsloth-zoo#1257: a crash when pinned memory was used up.
#[rstest]
#[case(0, 0)]
#[case(BYTES - 1, 0)]
#[case(4 * BYTES, 4)]
#[case(4 * BYTES + BYTES - 1, 4)]
#[case(8 * BYTES, 8)]
#[case(usize::MAX, 8)]
fn without_a_disk_the_rest_stays_on_the_device(#[case] budget: usize, #[case] away: usize) {
    let offload = Offload::new(OffloadConfig::new().with_host_budget(Some(budget))).unwrap();
    for step in 1..4 {
        let saved = save(&offload, 8);
        let stats = offload.stats();
        assert_eq!((stats.host_bytes, stats.device_bytes), (away * BYTES, (8 - away) * BYTES), "step {step}");
        assert_eq!(stats.kept_on_device, step * (8 - away));
        assert!(stats.host_reserved <= budget);
        take(saved);
        assert_eq!(offload.stats().allocations, away, "taken once, used again");
    }
}

#[rstest]
#[case(0, 8)]
#[case(4 * BYTES, 4)]
#[case(9 * BYTES, 0)]
fn with_a_disk_the_rest_goes_there(#[case] budget: usize, #[case] on_disk: usize) {
    let config = OffloadConfig::new().with_host_budget(Some(budget)).with_disk(disk(None));
    let offload = Offload::new(config).unwrap();
    let saved = save(&offload, 8);
    let stats = offload.stats();
    assert_eq!((stats.host_bytes, stats.disk_bytes), ((8 - on_disk) * BYTES, (on_disk * BYTES) as u64));
    assert_eq!((stats.device_bytes, stats.kept_on_device), (0, 0));
    take(saved);
    assert_eq!((offload.stats().host_bytes, offload.stats().disk_bytes), (0, 0));
}

#[rstest]
#[case(0, 0)]
#[case(BYTES - 1, 0)]
#[case(4 * BYTES, 4)]
#[case(5 * BYTES - 1, 4)]
fn the_disk_has_a_budget_of_its_own(#[case] budget: usize, #[case] away: usize) {
    let offload = Offload::new(on_disk(OffloadConfig::new(), Some(budget as u64))).unwrap();
    for _ in 0..3 {
        let saved = save(&offload, 8);
        let stats = offload.stats();
        assert_eq!((stats.disk_bytes, stats.device_bytes), ((away * BYTES) as u64, (8 - away) * BYTES));
        assert!(stats.disk_bytes_peak <= budget as u64);
        take(saved);
    }
    // Both full: two in host memory, two on disk, the rest stays.
    let config = OffloadConfig::new().with_host_budget(Some(2 * BYTES)).with_disk(disk(Some(2 * BYTES as u64 + 1)));
    let offload = Offload::new(config).unwrap();
    let saved = save(&offload, 5);
    let stats = offload.stats();
    assert_eq!((stats.host_bytes, stats.disk_bytes, stats.device_bytes), (2 * BYTES, 2 * BYTES as u64, BYTES));
    take(saved);
}

/// A budget of the device with too little room elsewhere: what finds none is asked again later, and nothing is lost.
#[test]
fn a_device_budget_meets_a_full_host() {
    let config = OffloadConfig::new().with_policy(OffloadPolicy::Budget(2 * BYTES)).with_host_budget(Some(3 * BYTES));
    let offload = Offload::new(config).unwrap();
    let saved = save(&offload, 8);
    let stats = offload.stats();
    assert_eq!((stats.host_bytes, stats.device_bytes), (3 * BYTES, 5 * BYTES));
    take(saved);
    let saved = save(&offload, 5);
    assert_eq!((offload.stats().host_bytes, offload.stats().device_bytes), (3 * BYTES, 2 * BYTES));
    take(saved);
}

/// What finds no room does not keep here what would, and what is empty needs none.
#[test]
fn a_misfit_is_passed_over() {
    let config = OffloadConfig::new().with_policy(OffloadPolicy::Budget(0)).with_host_budget(Some(BYTES / 2));
    let offload = Offload::new(config).unwrap();
    let lengths = [0, LEN, LEN / 10, 0, LEN, LEN / 10, LEN / 10];
    let saved: Vec<_> =
        lengths.iter().enumerate().map(|(i, len)| offload.save(filled(*len, i as f32)).unwrap()).collect();
    let stats = offload.stats();
    assert_eq!((stats.host_bytes, stats.device_bytes), (3 * BYTES / 10, 2 * BYTES), "{stats:?}");
    assert_eq!(stats.kept_on_device, 2, "each counts once, however often it was tried");
    take(saved);
    assert_eq!(offload.stats().host_bytes, 0);
}

/// Batches as they come, without a budget: lengths do not add up.
#[test]
fn steps_of_many_lengths_take_what_the_longest_needs() {
    let offload = Offload::new(OffloadConfig::new()).unwrap();
    for len in (1000..1032).chain([1000, 1000]) {
        take((0..8).map(|i| offload.save(filled(len, i as f32)).unwrap()).collect());
        let stats = offload.stats();
        assert!(stats.host_reserved <= stats.host_bytes_peak, "{len}: {stats:?}");
    }
    let before = offload.stats().allocations;
    take((0..8).map(|i| offload.save(filled(1000, i as f32)).unwrap()).collect());
    assert_eq!(offload.stats().allocations, before);
}

/// Steps of other lengths: buffers of the last one make room where the budget asks for it.
#[test]
fn other_sizes_find_room() {
    let offload = Offload::new(OffloadConfig::new().with_host_budget(Some(6 * BYTES))).unwrap();
    for (len, count) in [(LEN, 6), (3 * LEN, 2), (LEN / 2, 12), (LEN, 6)] {
        let saved: Vec<_> = (0..count).map(|i| offload.save(filled(len, i as f32)).unwrap()).collect();
        let stats = offload.stats();
        assert_eq!((stats.host_bytes, stats.device_bytes), (6 * BYTES, 0), "{count} of {len}");
        assert!(stats.host_reserved <= 6 * BYTES);
        take(saved);
    }
    offload.trim();
    assert_eq!(offload.stats().host_reserved, 0);
}

/// sglang PR#36562: a budget of the machine, in a container with less.
#[test]
fn a_budget_is_what_is_left_of_both_limits() {
    let gib = |n: u64| n << 30;
    assert_eq!(host_budget_of(Some((gib(8), gib(2))), gib(4)), 4 << 30);
    assert_eq!(host_budget_of(Some((gib(8), gib(7))), gib(4)), 1 << 30);
    assert_eq!(host_budget_of(Some((gib(8), gib(8) + 1)), gib(4)), 0);
    assert_eq!(host_budget_of(None, 0), 0);
    assert!(host_budget() > 0);
}
