//! What a step saves is told apart from what somebody has named, and from what no step will ask for.

mod offload;

use std::sync::atomic::Ordering::SeqCst;

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use burn_upipe::checkpoint::forward_group;
use burn_upipe::offload::{Offload, OffloadConfig, OffloadPolicy};
use offload::{Counting, Net, filled, host, is_empty, settled};
use rstest::rstest;

/// An input of a block.
const INPUT: usize = 16 * 8 * 4;

/// Or they would stay on the device for good where the backend's memory holds them, one of K each.
#[rstest]
fn a_step_fetches_nothing_that_was_named(#[values(1, 2, 4)] in_flight: usize, #[values(1, 5)] named: usize) {
    let queue = Counting::new();
    let back = queue.back.clone();
    let offload = Offload::with_queue(OffloadConfig::new().with_in_flight(in_flight), queue).unwrap();
    let names: Vec<_> = (0..named).map(|i| offload.save(filled(64, i as f32)).unwrap()).collect();
    let net = Net::new(8, &Device::flex().autodiff()).with(&offload);
    for _ in 0..3 {
        let loss = net.loss(None);
        settled(&offload);
        let before = back.load(SeqCst);
        drop(loss.backward());
        assert_eq!(back.load(SeqCst) - before, 8, "one copy back for each block");
        let stats = offload.stats();
        assert_eq!((stats.in_flight, stats.saved, stats.host_bytes), (0, named, named * 64 * 4), "{stats:?}");
    }
    for (i, name) in names.into_iter().enumerate().rev() {
        assert!(name.take().unwrap().into_data().iter::<f32>().all(|x| x == i as f32));
    }
    is_empty(&offload);
}

#[test]
fn every_kth_counts_blocks_and_names_apart() {
    let config = OffloadConfig::new().with_policy(OffloadPolicy::Every(2));
    let offload = Offload::new(config).unwrap();
    let names = [0, 1, 2].map(|i| offload.save(filled(64, i as f32)).unwrap());
    assert_eq!(offload.stats().host_bytes, 2 * 64 * 4, "the first and the third");
    let net = Net::new(3, &Device::flex().autodiff()).with(&offload);
    for _ in 0..2 {
        let loss = net.loss(None);
        assert_eq!(offload.stats().host_bytes, 2 * 64 * 4 + 2 * INPUT, "blocks 0 and 2, not 1");
        drop(loss.backward());
    }
    drop(names);
    is_empty(&offload);
}

/// An evaluation of a frozen model: nothing is copied, and nothing is read to be compared later.
#[test]
fn a_forward_pass_without_gradients_keeps_nothing() {
    let device = Device::flex().autodiff();
    let net = Net::new(4, &device);
    let expected = net.loss(None).inner().into_data();
    let offload = host();
    let frozen = net.clone().no_grad().with(&offload);
    let loss = frozen.loss(None);
    assert!(loss.is_autodiff() && !loss.is_tracked());
    assert_eq!(loss.inner().into_data(), expected);
    let blocks: Vec<&Linear> = frozen.blocks.iter().map(|block| &block.inner.inner).collect();
    let x = Tensor::<2>::ones([16, 8], &device);
    let y = forward_group(blocks.clone(), 0, Some(&offload), x.clone(), |linear, x| linear.forward(x).tanh());
    assert!(y.is_autodiff() && !y.is_tracked());
    assert_eq!(y.sum().inner().into_data(), expected);
    let stats = offload.stats();
    assert_eq!((stats.saved, stats.host_bytes_peak, stats.in_flight_peak, stats.allocations), (0, 0, 0, 0));
    // With an input that has a gradient it has a backward pass.
    let y = forward_group(blocks, 0, Some(&offload), x.require_grad(), |linear, x| linear.forward(x).tanh());
    assert!(y.is_tracked());
    assert_eq!(offload.stats().host_bytes, INPUT);
    drop(y.sum().backward());
    is_empty(&offload);
}
