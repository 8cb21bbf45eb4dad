//! What comes back is what left: with copies that are late, storage that is used again at once, views, all types and any order.

mod offload;

use std::sync::{Arc, Mutex};
use std::thread::spawn;

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_context_parallel::vjp::AnyTensor;
use burn_upipe::offload::{
    Arrival, CopyQueue, CopyThread, Departure, Offload, OffloadConfig, OffloadPolicy, Saved, Slot, Ticket,
};
use offload::{Late, bytes, disk, filled, on_disk, settled};
use rstest::rstest;

const MIB: usize = 1 << 20;

fn engine(config: OffloadConfig, late: bool) -> Offload {
    if late {
        Offload::with_queue(config, Late::new())
    } else {
        Offload::with_queue(config, CopyThread::new().unwrap())
    }
    .unwrap()
}

/// torchtune#1867, trl PR#7195, Megatron-LM#7398: a device buffer that is used again before its copy has ended, a copy back
/// that reads what is not yet there: a wrong gradient once in a while.
#[test]
fn late_copies_and_reused_buffers_change_nothing() {
    const TENSORS: usize = 64;
    let len = MIB / 4;
    let offload = engine(OffloadConfig::new().with_in_flight(3), true);
    let mut allocations = Vec::new();
    for repeat in 0..100 {
        let id = |layer: usize| (layer * 1000 + repeat) as f32;
        // One buffer for all of them, overwritten right after each has been saved: in place, if nobody else has a handle of it.
        let mut buffer = Some(filled(len, id(0)));
        let saved: Vec<Saved<1>> = (0..TENSORS)
            .map(|layer| {
                let x = buffer.take().unwrap();
                let saved = offload.save(x.clone()).unwrap();
                let ended = layer % 8 == 7;
                if ended {
                    settled(&offload);
                }
                let before = storage(&x);
                let x = x.slice_fill(0..len, id(layer + 1));
                // The copy has ended, and with it the engine's handle: what is away must not lie here any more.
                assert!(!ended || storage(&x) == before, "repeat {repeat}, layer {layer}");
                buffer = Some(x);
                saved
            })
            .collect();
        assert!(offload.stats().in_flight <= 3);
        for (layer, saved) in saved.into_iter().enumerate().rev() {
            let back = saved.take().unwrap();
            let data = back.into_data();
            assert!(data.as_slice::<f32>().unwrap().iter().all(|x| *x == id(layer)), "repeat {repeat}, layer {layer}");
        }
        let stats = offload.stats();
        assert_eq!((stats.saved, stats.host_bytes, stats.in_flight, stats.device_bytes), (0, 0, 0, 0));
        assert_eq!((stats.host_bytes_peak, stats.host_reserved), (TENSORS * MIB, TENSORS * MIB));
        assert!(stats.in_flight_peak <= 3, "{stats:?}");
        allocations.push(stats.allocations);
    }
    // PyTorch PR#186161: 3 ms for each block of pinned memory, in every step.
    assert!(allocations.iter().all(|count| *count == TENSORS), "{allocations:?}");
}

/// Where a tensor's elements lie.
fn storage(x: &Tensor<1>) -> usize {
    match x.clone().into_dispatch().kind {
        DispatchTensorKind::Flex(BackendTensor::Float(x)) => x.bytes().as_ptr() as usize,
        _ => panic!("not on the CPU"),
    }
}

/// Until its copy has ended a tensor's memory is its own: who overwrites it gets other memory.
#[test]
fn what_is_leaving_is_not_overwritten() {
    /// Copies that begin when they are let.
    #[derive(Debug)]
    struct Gate(Arc<CopyThread>, Arc<Mutex<()>>);
    impl CopyQueue for Gate {
        fn copy_out(&self, from: Arc<Departure>, to: Arc<Slot>) -> Ticket<()> {
            let ((ticket, promise), thread, gate) = (Ticket::new(), self.0.clone(), self.1.clone());
            spawn(move || {
                drop(gate.lock());
                promise.settle(thread.copy_out(from, to).take());
            });
            ticket
        }
        fn copy_in(&self, from: Arc<Slot>, to: Arrival) -> Ticket<AnyTensor> {
            self.0.copy_in(from, to)
        }
    }
    let gate = Arc::new(Mutex::new(()));
    let queue = Gate(Arc::new(CopyThread::new().unwrap()), gate.clone());
    let offload = Offload::with_queue(OffloadConfig::new(), queue).unwrap();
    let closed = gate.lock().unwrap();
    let x = filled(1000, 1.0);
    let saved = offload.save(x.clone()).unwrap();
    let before = storage(&x);
    let x = x.slice_fill(0..1000, 2.0);
    assert_ne!(storage(&x), before, "the copy has not begun");
    assert_eq!(offload.stats().in_flight, 1);
    drop(closed);
    settled(&offload);
    assert!(saved.take().unwrap().into_data().iter::<f32>().all(|x| x == 1.0));
}

#[rstest]
fn any_policy_place_and_order_gives_the_same_bits(
    #[values(
        OffloadPolicy::None,
        OffloadPolicy::All,
        OffloadPolicy::Every(1),
        OffloadPolicy::Every(3),
        OffloadPolicy::Budget(0),
        OffloadPolicy::Budget(4096 * 3 + 1)
    )]
    policy: OffloadPolicy,
    #[values(false, true)] to_disk: bool,
    #[values(1, 2, 5)] in_flight: usize,
    #[values(false, true)] late: bool,
) {
    let config = OffloadConfig::new().with_policy(policy).with_in_flight(in_flight);
    let offload = engine(if to_disk { on_disk(config, None) } else { config }, late);
    let holds = |i: usize, x: Tensor<1>| {
        assert!(x.into_data().as_slice::<f32>().unwrap().iter().all(|x| *x == i as f32), "tensor {i}, {policy:?}");
    };
    let save = |n: usize| (0..n).map(|i| offload.save(filled(1024, i as f32)).unwrap()).collect::<Vec<Saved<1>>>();
    // Backwards, as a backward pass does.
    let mut saved = save(12);
    while let Some(last) = saved.pop() {
        holds(saved.len(), last.get().unwrap());
        assert!(offload.stats().in_flight <= in_flight);
        holds(saved.len(), last.take().unwrap());
    }
    // Forwards, and across.
    for stride in [1, 5, 7] {
        let mut saved: Vec<_> = save(12).into_iter().map(Some).collect();
        for i in (0..12).map(|i| i * stride % 12) {
            holds(i, saved[i].take().unwrap().take().unwrap());
        }
    }
    // Twice, others in between, all held at once.
    let saved = save(7);
    let all: Vec<_> = saved.iter().map(|saved| saved.get().unwrap()).collect();
    saved.iter().enumerate().for_each(|(i, saved)| holds(i, saved.get().unwrap()));
    all.into_iter().enumerate().for_each(|(i, x)| holds(i, x));
    drop(saved);
    let stats = offload.stats();
    assert_eq!((stats.saved, stats.host_bytes, stats.disk_bytes, stats.device_bytes, stats.in_flight), (0, 0, 0, 0, 0));
    let on_disk = stats.disk_bytes_peak > 0;
    assert_eq!(on_disk, to_disk && policy != OffloadPolicy::None);
}

/// Two views of one storage, a transposed one, and the whole: copied as what they are, and not as what they lie in.
#[rstest]
fn views_come_back(#[values(false, true)] to_disk: bool) {
    let config = OffloadConfig::new();
    let offload = engine(if to_disk { on_disk(config, None) } else { config }, false);
    let data = TensorData::new((0..600).map(|i| i as f32).collect::<Vec<_>>(), [2, 30, 10]);
    let whole = Tensor::<3>::from_data(data, &Device::flex());
    let views = [
        whole.clone().narrow(1, 0, 15),
        whole.clone().narrow(1, 15, 15),
        whole.clone().narrow(0, 1, 1),
        whole.clone().swap_dims(1, 2),
        whole.clone().slice([0..1, 3..9, 2..4]),
        whole.clone(),
    ];
    let expected: Vec<_> = views.iter().map(|view| view.to_data()).collect();
    let saved: Vec<_> = views.into_iter().map(|view| offload.save(view).unwrap()).collect();
    drop(whole);
    let elements: usize = expected.iter().map(TensorData::num_elements).sum();
    let stats = offload.stats();
    assert_eq!(stats.host_bytes as u64 + stats.disk_bytes, 4 * elements as u64, "nothing beside the views");
    for (saved, expected) in saved.into_iter().zip(expected) {
        assert_eq!(saved.take().unwrap().into_data(), expected);
    }
}

#[rstest]
fn every_float_type_comes_back(#[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType) {
    for config in [OffloadConfig::new(), on_disk(OffloadConfig::new(), None)] {
        let offload = engine(config, false);
        let x =
            Tensor::<2>::from_data([[1.5, -2.25, f32::NAN], [f32::INFINITY, -0.0, 1e-3]], &Device::flex()).cast(dtype);
        let expected = bytes(x.clone());
        let back = offload.save(x).unwrap().take().unwrap();
        assert_eq!((back.dtype(), back.dims()), (dtype, [2, 3]));
        assert_eq!(bytes(back), expected);
    }
}

#[test]
fn whole_numbers_and_masks_come_back() {
    for config in [OffloadConfig::new(), on_disk(OffloadConfig::new(), None)] {
        let offload = engine(config.with_in_flight(1), false);
        let ids = Tensor::<2, Int>::from_ints([[1, -2, i32::MAX], [0, 7, i32::MIN]], &Device::flex());
        let mask = ids.clone().transpose().greater_elem(0);
        for dtype in [DType::I64, DType::I32, DType::I16, DType::U8] {
            let ids = Tensor::<2, Int>::from_ints([[1, 2, 3], [4, 5, 120]], &Device::flex()).cast(dtype);
            let saved = offload.save(ids.clone()).unwrap();
            settled(&offload);
            assert_eq!(offload.stats().device_bytes, 0);
            let back = saved.take().unwrap();
            assert_eq!((back.dtype(), back.into_data()), (dtype, ids.into_data()));
        }
        let (saved, of_mask): (Saved<2, Int>, Saved<2, Bool>) =
            (offload.save(ids.clone()).unwrap(), offload.save(mask.clone()).unwrap());
        settled(&offload);
        let (ids_back, mask_back) = (saved.take().unwrap(), of_mask.take().unwrap());
        assert!((ids_back.clone() + 1).equal(ids.clone() + 1).all().into_scalar::<bool>());
        assert_eq!((ids_back.into_data(), mask_back.into_data()), (ids.into_data(), mask.into_data()));
        let stats = offload.stats();
        assert_eq!((stats.saved, stats.host_bytes, stats.disk_bytes), (0, 0, 0));
    }
}

#[test]
fn nothing_and_a_graph() {
    let offload = engine(OffloadConfig::new(), false);
    let empty = offload.save(Tensor::<2>::empty([0, 4], &Device::flex())).unwrap();
    assert_eq!(offload.stats().kept_on_device, 0, "it needs no room");
    assert_eq!(empty.take().unwrap().dims(), [0, 4]);
    let tracked = Tensor::<1>::ones([4], &Device::flex().autodiff()).require_grad();
    let error = offload.save(tracked).unwrap_err().to_string();
    assert!(error.contains("[4] with autodiff") && error.contains(".inner()"), "{error}");
    assert_eq!(offload.stats().saved, 0);
}

/// The first of every k-th of what is saved at that moment; in the next step again.
#[test]
fn policies_choose_as_they_say() {
    let leaves = |policy, count: usize| {
        let config = OffloadConfig::new().with_policy(policy).with_disk(disk(None));
        let offload = engine(config, false);
        let mut steps = Vec::new();
        for _ in 0..2 {
            let mut left = Vec::new();
            let mut saved = Vec::new();
            for i in 0..count {
                // Each of another size, so that sums tell which.
                saved.push(offload.save(filled(1 << i, 0.0)).unwrap());
                left.push(offload.stats().host_bytes / 4);
            }
            assert_eq!(offload.stats().device_bytes / 4 + left[count - 1], (1 << count) - 1);
            steps.push(left);
        }
        assert_eq!(steps[0], steps[1]);
        steps.remove(0)
    };
    assert_eq!(leaves(OffloadPolicy::None, 4), [0, 0, 0, 0]);
    assert_eq!(leaves(OffloadPolicy::All, 4), [1, 3, 7, 15]);
    assert_eq!(leaves(OffloadPolicy::Every(2), 4), [1, 1, 5, 5]);
    assert_eq!(leaves(OffloadPolicy::Every(3), 5), [1, 1, 1, 9, 9]);
    // 4-byte elements: 12 of them may stay. 1 + 2 + 4 fit; with 8 there are 15, and the oldest go until 12 are left.
    assert_eq!(leaves(OffloadPolicy::Budget(48), 4), [0, 0, 0, 3]);
    assert_eq!(leaves(OffloadPolicy::Budget(47), 4), [0, 0, 0, 7]);
    assert_eq!(leaves(OffloadPolicy::Budget(0), 3), [1, 3, 7]);
}
