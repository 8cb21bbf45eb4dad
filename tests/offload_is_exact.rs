//! Offload changes where tensors wait, and not one bit of what comes out: gradients with any policy, place and number in flight are
//! those without, in every scheme, over ranks, shards, micro-batches and types.

#[path = "../burn-upipe/tests/offload/mod.rs"]
mod offload;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, TensorData};
use burn_context_parallel::Result;
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::fsdp::{Accumulation, Fsdp, FsdpConfig};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::Batch;
use burn_upipe::offload::{Disk, Offload, OffloadConfig, OffloadPolicy, Place, saved_bytes};
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig, named_gradients, precision};
use offload::Late;
use rstest::rstest;
use tests::on_ranks;

const LAYERS: usize = 5;
const WIDTH: usize = 16;
const TOKENS: usize = 26;

fn batch(seed: i64) -> Batch {
    Batch::from_rows(&[(0..TOKENS as i64).map(|i| (i * 7 + seed) % 32).collect()]).expect("a batch")
}

/// A step's setting, without offload.
#[derive(Clone, Debug)]
struct Case {
    ranks: usize,
    parallel: ParallelConfig,
    fsdp: Option<FsdpConfig>,
    dtype: DType,
    micro_batches: usize,
    /// Copies end late, and not in order.
    late: bool,
}

impl Case {
    fn new(ranks: usize, attention: AttentionScheme) -> Self {
        let tiles =
            ParallelConfig { mlp_tile: Some(5), norm_tile: Some(4), loss_tile: Some(3), ..ParallelConfig::all() };
        let parallel = ParallelConfig { attention, ..tiles };
        Self { ranks, parallel, fsdp: None, dtype: DType::F32, micro_batches: 1, late: false }
    }

    /// All ranks' losses and gradients, bit by bit.
    fn step(&self, offload: Option<OffloadConfig>) -> Vec<Vec<(String, TensorData)>> {
        let case = self.clone();
        on_ranks(self.ranks, move |world| case.on_rank(&world, offload.clone()))
    }

    fn on_rank(&self, world: &ProcessGroup, offload: Option<OffloadConfig>) -> Result<Vec<(String, TensorData)>> {
        let device = Device::flex().autodiff();
        let config = LlamaConfig::new(32, WIDTH, 24, LAYERS, 4, 2);
        let model = tests::filled(Llama::init(&config, &self.parallel, &device).expect("a model"), 3, DType::F32, 0.3);
        let mut model = model.fork(&device);
        let fsdp = self.fsdp.clone().map(|config| Fsdp::over(world, config)).transpose()?;
        if let Some(fsdp) = &fsdp {
            model = fsdp.shard(model)?;
        }
        let engine = |config| if self.late { Offload::with_queue(config, Late::new()) } else { Offload::new(config) };
        let engine = offload.map(engine).transpose()?;
        if let Some(engine) = &engine {
            model = model.offload(engine);
        }
        let compute = if fsdp.is_some() { model.clone() } else { precision::compute(&model, self.dtype) };
        let cp = device.context_parallel(world);
        let mut found = Vec::new();
        if let Some(fsdp) = &fsdp {
            fsdp.begin(&model);
        }
        for micro in 0..self.micro_batches {
            let loss = compute.loss(&cp.shard(&batch(micro as i64))?, world).expect("a loss");
            found.push((format!("loss {micro}"), loss.mean.clone().inner().into_data()));
            if let Some(engine) = &engine {
                let stats = engine.stats();
                let checkpoints = LAYERS.div_ceil(self.parallel.blocks_per_checkpoint);
                assert_eq!(stats.saved, checkpoints, "{stats:?}");
                let size = if fsdp.is_some() { 4 } else { self.dtype.size() };
                let bytes = saved_bytes(checkpoints, 1, TOKENS.div_ceil(self.ranks), WIDTH, size);
                let all = stats.device_bytes + stats.host_bytes + stats.disk_bytes as usize;
                assert_eq!(all, bytes, "{stats:?}");
            }
            let grads = GradientsParams::from_grads(loss.mean.backward(), &compute);
            let grads = match &fsdp {
                Some(fsdp) if micro + 1 == self.micro_batches => fsdp.finish(grads, &model)?,
                _ => grads,
            };
            found.extend(named_gradients(&model, &grads));
        }
        if let Some(engine) = &engine {
            let stats = engine.stats();
            assert_eq!((stats.saved, stats.host_bytes, stats.disk_bytes, stats.in_flight), (0, 0, 0, 0), "{stats:?}");
            assert!(stats.in_flight_peak <= engine.config().in_flight, "{stats:?}");
        }
        Ok(found)
    }

    fn is_the_same_with(&self, offload: OffloadConfig) {
        let (plain, offloaded) = (self.step(None), self.step(Some(offload.clone())));
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
    let mut case = Case { late: true, micro_batches: 10, ..Case::new(2, AttentionScheme::default()) };
    case.parallel.blocks_per_checkpoint = blocks_per_checkpoint;
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
    let mut case = Case { fsdp, dtype, micro_batches, ..Case::new(2, AttentionScheme::default()) };
    case.parallel.blocks_per_checkpoint = blocks_per_checkpoint;
    case.is_the_same_with(OffloadConfig::new());
}

/// Plain blocks without tiles; and what several blocks a checkpoint give is what single ones give.
#[rstest]
fn groups_of_blocks_are_the_blocks(#[values(2, 3, 5)] blocks: usize, #[values(false, true)] fsdp: bool) {
    let plain = Case {
        parallel: ParallelConfig { checkpoint: true, ..ParallelConfig::none() },
        fsdp: fsdp.then(FsdpConfig::new),
        ..Case::new(1, AttentionScheme::Single)
    };
    let mut grouped = plain.clone();
    grouped.parallel.blocks_per_checkpoint = blocks;
    for (a, b) in plain.step(None)[0].iter().zip(&grouped.step(None)[0]) {
        assert!(a == b, "{}: {blocks} blocks a checkpoint differ", a.0);
    }
}
