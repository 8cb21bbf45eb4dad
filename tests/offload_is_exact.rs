//! Offload changes where tensors wait, and not one bit of what comes out: gradients with any policy, place and number in flight are
//! those without, in every scheme, over ranks, shards, micro-batches and types.

#[path = "../burn-upipe/tests/offload/mod.rs"]
mod offload;

use burn::tensor::{DType, Device};
use burn_context_parallel::fsdp::{Accumulation, FsdpConfig};
use burn_upipe::offload::{Disk, Offload, OffloadConfig, OffloadPolicy, Place};
use burn_upipe::upipe::AttentionScheme;
use llama::ParallelConfig;
use offload::Late;
use rstest::rstest;
use tests::{Named, Step};

/// A step's setting.
#[derive(Clone, Debug)]
struct Case {
    step: Step,
    /// Copies end late, and not in order.
    late: bool,
}

impl Case {
    fn new(ranks: usize, attention: AttentionScheme) -> Self {
        Self { step: Step::all(ranks, attention, 5), late: false }
    }

    /// All ranks' losses and gradients, bit by bit.
    fn run(&self, offload: Option<OffloadConfig>) -> Vec<Named> {
        let late = self.late;
        let engine = move |config| if late { Offload::with_queue(config, Late::new()) } else { Offload::new(config) };
        self.step.run(&[Device::flex()], move || Ok(offload.clone().map(engine).transpose()?))
    }

    fn is_the_same_with(&self, offload: OffloadConfig) {
        let (plain, offloaded) = (self.run(None), self.run(Some(offload.clone())));
        assert!(plain[0].len() > 20, "{}", plain[0].len());
        for (rank, (plain, offloaded)) in plain.iter().zip(&offloaded).enumerate() {
            assert_eq!(plain.len(), offloaded.len());
            for ((name, a), (_, b)) in plain.iter().zip(offloaded) {
                assert!(a.as_bytes() == b.as_bytes(), "rank {rank}, {name}: bits differ, {self:?}, {offload:?}");
            }
        }
    }
}

fn disk(budget: Option<u64>) -> Option<Disk> {
    Some(Disk { folder: std::env::temp_dir(), budget })
}

#[rstest]
fn gradients_are_the_same_bits(
    #[values(
        (1, AttentionScheme::Single),
        (2, AttentionScheme::Ulysses),
        (3, AttentionScheme::UPipe { heads_per_stage: None }),
        (2, AttentionScheme::UPipe { heads_per_stage: Some(1) })
    )]
    (ranks, scheme): (usize, AttentionScheme),
    #[values(OffloadPolicy::All, OffloadPolicy::Every(2), OffloadPolicy::Budget(2000), OffloadPolicy::None)]
    policy: OffloadPolicy,
    #[values(Place::Host, Place::Disk)] place: Place,
    #[values(1, 2, 4)] in_flight: usize,
) {
    let config = OffloadConfig::new().with_policy(policy).with_place(place).with_in_flight(in_flight);
    Case::new(ranks, scheme).is_the_same_with(config.with_disk(disk(None)));
}

/// A copy that is not waited for where it must be is a wrong gradient once in a while (torchtune#1867): many steps, with copies that are
/// late, each by another time.
#[rstest]
fn late_copies_change_nothing(#[values(1, 2, 4)] in_flight: usize, #[values(1, 2)] blocks_per_checkpoint: usize) {
    let mut case = Case { late: true, ..Case::new(2, AttentionScheme::default()) };
    case.step.micro_batches = 10;
    case.step.parallel.blocks_per_checkpoint = blocks_per_checkpoint;
    for place in [Place::Host, Place::Disk] {
        case.is_the_same_with(OffloadConfig::new().with_in_flight(in_flight).with_place(place).with_disk(disk(None)));
    }
}

/// None, half of the inputs, with and without a disk that takes the rest, or a part of it.
#[rstest]
fn budgets_change_nothing(
    #[values(0, 2500)] host: usize,
    #[values(None, Some(None), Some(Some(1000)))] on_disk: Option<Option<u64>>,
) {
    let config = OffloadConfig::new().with_host_budget(Some(host)).with_disk(on_disk.and_then(disk));
    Case::new(2, AttentionScheme::default()).is_the_same_with(config);
}

#[rstest]
fn shards_groups_types_and_micro_batches_too(
    #[values(1, 2, 5)] blocks_per_checkpoint: usize,
    #[values(1, 3)] micro_batches: usize,
    #[values(
        (None, DType::F32),
        (None, DType::BF16),
        (Some(FsdpConfig::new().with_prefetch(true)), DType::F32),
        (Some(FsdpConfig::new().with_prefetch(false).with_accumulation(Accumulation::Once)), DType::F32)
    )]
    (fsdp, dtype): (Option<FsdpConfig>, DType),
) {
    let mut case = Case::new(2, AttentionScheme::default());
    case.step = Step { fsdp, dtype, micro_batches, ..case.step };
    case.step.parallel.blocks_per_checkpoint = blocks_per_checkpoint;
    case.is_the_same_with(OffloadConfig::new());
}

/// Plain blocks without tiles; and what several blocks a checkpoint give is what single ones give.
#[rstest]
fn groups_of_blocks_are_the_blocks(#[values(2, 3, 5)] blocks: usize, #[values(false, true)] fsdp: bool) {
    let plain = Step {
        parallel: ParallelConfig { checkpoint: true, ..ParallelConfig::none() },
        fsdp: fsdp.then(FsdpConfig::new),
        ..Step::plain(1, AttentionScheme::Single, 5)
    };
    let mut grouped = plain.clone();
    grouped.parallel.blocks_per_checkpoint = blocks;
    let run = |step: &Step| step.run(&[Device::flex()], || Ok(None));
    for (a, b) in run(&plain)[0].iter().zip(&run(&grouped)[0]) {
        assert!(a == b, "{}: {blocks} blocks a checkpoint differ", a.0);
    }
}
