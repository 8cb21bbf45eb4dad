//! On the CubeCL device that this build was made for, everything around attention does what it does on Flex: collectives through host memory,
//! recomputation, tiles, offload, shards; with all ranks on one device, and with each on its own.
#![cfg(any(feature = "cpu", feature = "wgpu"))]

#[path = "../burn-upipe/tests/offload/mod.rs"]
mod offload;

use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_context_parallel::Result;
use burn_context_parallel::collective::{all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, shift};
use burn_context_parallel::fsdp::{Accumulation, FsdpConfig};
use burn_context_parallel::group::ProcessGroup;
use burn_upipe::offload::{Offload, OffloadConfig, OffloadPolicy, Place};
use burn_upipe::upipe::AttentionScheme;
use offload::{Late, disk};
use rstest::rstest;
use tests::{Step, device, on_ranks, other_device, values};

const LAYERS: usize = 3;

/// A step's setting.
#[derive(Clone, Debug)]
struct Case {
    step: Step,
    offload: Option<OffloadConfig>,
}

impl Case {
    fn plain(ranks: usize, attention: AttentionScheme) -> Self {
        Self { step: Step::plain(ranks, attention, LAYERS), offload: None }
    }

    fn all(ranks: usize, attention: AttentionScheme) -> Self {
        Self { step: Step::all(ranks, attention, LAYERS), offload: None }
    }

    fn offload(self, config: OffloadConfig) -> Self {
        Self { offload: Some(config.with_disk(disk(None))), ..self }
    }

    fn fsdp(mut self, config: FsdpConfig) -> Self {
        self.step.fsdp = Some(config);
        self
    }

    fn micro_batches(mut self, count: usize) -> Self {
        self.step.micro_batches = count;
        self
    }

    /// Each loss and gradient is Flex's within `tolerance` of its largest magnitude.
    fn agrees(&self, devices: &[Device], tolerance: f64) {
        let run = |devices: &[Device]| {
            let config = self.offload.clone();
            // Late copies: on a device with a queue of its own, what is read too early is what was there before.
            let engine = |config| Offload::with_queue(config, Late::new());
            self.step.run(devices, move || Ok(config.clone().map(engine).transpose()?))
        };
        let (found, expected) = (run(devices), run(&[Device::flex()]));
        assert!(expected[0].len() > 12, "{}", expected[0].len());
        for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.len(), expected.len());
            for ((name, found), (same, expected)) in found.iter().zip(expected) {
                assert_eq!((name, found.shape()), (same, expected.shape()));
                let pairs = || found.iter::<f64>().zip(expected.iter::<f64>());
                let largest = pairs().fold(0f64, |most, (_, b)| most.max(b.abs()));
                let off = pairs().fold(0f64, |most, (a, b)| most.max((a - b).abs()));
                assert!(pairs().all(|(a, _)| a.is_finite()), "rank {rank}, {name}: {found}");
                assert!(off <= tolerance * largest, "rank {rank}, {name}: off by {off:e} of {largest:e}, {self:?}");
            }
        }
    }
}

/// f32 throughout: sums are taken in another order, and exp is another one.
const F32: f64 = 1e-4;

fn upipe(heads_per_stage: Option<usize>) -> AttentionScheme {
    AttentionScheme::UPipe { heads_per_stage }
}

fn offload_config(place: Place) -> OffloadConfig {
    OffloadConfig::new().with_policy(OffloadPolicy::All).with_place(place)
}

#[rstest]
#[case::plain(Case::plain(1, AttentionScheme::Single))]
#[case::recomputed_and_tiled(Case::all(1, AttentionScheme::Single))]
#[case::ulysses(Case::plain(2, AttentionScheme::Ulysses))]
#[case::upipe(Case::all(3, upipe(None)))]
#[case::upipe_of_two_heads(Case::all(2, upipe(Some(2))))]
#[case::offload(Case::all(2, upipe(None)).offload(offload_config(Place::Host)))]
#[case::offload_to_disk(Case::all(2, AttentionScheme::Ulysses).offload(offload_config(Place::Disk)))]
#[case::shards(Case::plain(2, AttentionScheme::Ulysses).fsdp(FsdpConfig::new().with_prefetch(true)))]
#[case::everything(
    Case::all(2, upipe(Some(1)))
        .micro_batches(3)
        .offload(offload_config(Place::Host).with_in_flight(1))
        .fsdp(FsdpConfig::new().with_prefetch(false).with_accumulation(Accumulation::Once))
)]
fn techniques_give_what_they_give_on_flex(#[case] case: Case) {
    case.agrees(&[device()], F32);
}

/// Rounded weights, activations and gradients: both round, after sums of another order.
#[rstest]
fn bf16_too() {
    let mut case = Case::all(2, upipe(None)).offload(offload_config(Place::Host));
    case.step.dtype = DType::BF16;
    if tests::rounds_to(DType::BF16) {
        case.agrees(&[device()], 3e-2);
    } else {
        tests::skipped("bf16_too", "this device has no bf16");
    }
}

/// Each rank on a device of its own, which another runtime may run.
#[rstest]
#[case(Case::plain(2, AttentionScheme::Ulysses))]
#[case(Case::all(3, upipe(None)).offload(offload_config(Place::Host)))]
#[case(Case::all(2, upipe(Some(2))).fsdp(FsdpConfig::new()))]
fn ranks_have_devices_of_their_own(#[case] case: Case) {
    let devices = [device(), other_device()];
    assert_ne!(devices[0], devices[1]);
    case.agrees(&devices, F32);
}

fn apply(name: &str, x: Tensor<2>, group: &ProcessGroup) -> Result<Tensor<2>> {
    let (rows, last) = (x.dims()[0], group.size() - 1);
    let mut sizes = vec![0; group.size()];
    (sizes[0], sizes[last]) = (rows - 1, 1 + sizes[last]);
    match name {
        "all_to_all" => all_to_all(x, 0, 1, &sizes, group),
        "all_gather" => all_gather(x, 1, group),
        "reduce_scatter" => reduce_scatter(x, 0, &sizes, group),
        "all_reduce" => all_reduce(x, group),
        "broadcast" => broadcast(x, last, group),
        _ => shift(x, 1, group),
    }
}

/// They add in the order of ranks, wherever tensors lie; and of a view they send what it shows.
#[rstest]
fn collectives_give_the_same_bits(
    #[values("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "shift")] name: &'static str,
    #[values(2, 3)] ranks: usize,
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    if !tests::rounds_to(dtype) {
        return tests::skipped("collectives_give_the_same_bits", &format!("this device has no {dtype:?}"));
    }
    let on = |devices: Vec<Device>| {
        on_ranks(ranks, move |world| {
            let device = devices[world.rank() % devices.len()].clone().autodiff();
            let x = tests::tensor::<2>(&values(world.rank() as u64 + 1, &[7, 9]), dtype, &device).require_grad();
            let view = x.clone().swap_dims(0, 1).narrow(0, 2, 5).narrow(1, 1, 4);
            let y = apply(name, view, &world)?;
            let weights = tests::tensor::<2>(&values(world.rank() as u64 + 9, &y.dims()), dtype, &device);
            let grads = (y.clone() * weights).sum().backward();
            Ok([y.inner().into_data(), x.grad(&grads).expect("a gradient").into_data()])
        })
    };
    let expected = on(vec![Device::flex()]);
    assert_eq!(on(vec![device()]), expected);
    assert_eq!(on(vec![device(), other_device()]), expected);
}

/// A buffer that is used again before its copy has ended, a copy back that reads what is not yet there.
#[rstest]
fn what_was_offloaded_comes_back(#[values(Place::Host, Place::Disk)] place: Place) {
    const SAVED: usize = 12;
    let config = offload_config(place).with_in_flight(3).with_disk(disk(None));
    let offload = Offload::with_queue(config, Late::new()).unwrap();
    let device = device();
    for repeat in 0..20 {
        let number = |n: usize| (repeat * 100 + n) as f32;
        let mut buffer = Tensor::<2>::full([300, 70], number(0), &device);
        let saved: Vec<_> = (0..SAVED)
            .map(|n| {
                let saved = offload.save(buffer.clone().swap_dims(0, 1)).unwrap();
                // In place, once nobody else holds it.
                buffer = buffer.clone() * 0.0 + number(n + 1);
                saved
            })
            .collect();
        for (n, saved) in saved.into_iter().enumerate().rev() {
            let back = saved.take().unwrap();
            assert_eq!((back.dims(), back.device()), ([70, 300], device.clone()));
            assert!(back.into_data().iter::<f32>().all(|x| x == number(n)), "repeat {repeat}, number {n}");
        }
    }
    let whole = Tensor::<1, Int>::arange(-3..40, &device).reshape([43]);
    let mask: Tensor<1, Bool> = whole.clone().greater_elem(5);
    let (a, b) = (offload.save(whole.clone()).unwrap(), offload.save(mask.clone()).unwrap());
    assert_eq!(b.take().unwrap().into_data(), mask.into_data());
    assert_eq!(a.take().unwrap().into_data(), whole.into_data());
}
