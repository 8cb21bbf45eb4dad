//! A rank holds its part of the model states and one block. One test in a binary of its own: the allocator counts all that runs.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_context_parallel::fsdp::{
    Fsdp, FsdpConfig, ShardedOptimizer, StatePlace, backward_bytes, forward_bytes, state_bytes,
};
use burn_context_parallel::group::ProcessGroup;
use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::learner::checkpoint::{Checkpoints, RunState};
use burn_upipe::learner::training::{Holding, Parts, parts, restore};
use burn_upipe::profile::heap::{self, CountingAllocator};
use tests::on_ranks;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const BLOCKS: usize = 8;
const WIDTH: usize = 192;
const INNER: usize = 256;

#[derive(Module, Debug)]
struct Block {
    up: Linear,
    down: Linear,
}

impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(self.up.forward(x).tanh())
    }
}

#[derive(Module, Debug)]
struct Model {
    blocks: Vec<Checkpointed<Block>>,
}

/// Nothing drawn yet. Bias-free: whole vectors are not the matter here.
fn lazy() -> Model {
    let device = Device::flex().autodiff();
    let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&device);
    let block = || Checkpointed::new(Block { up: linear(WIDTH, INNER), down: linear(INNER, WIDTH) });
    Model { blocks: (0..BLOCKS).map(|_| block()).collect() }
}

fn loss(model: &Model, rank: usize) -> Tensor<1> {
    let x = Tensor::<2>::full([1, WIDTH], 0.1 + rank as f32, &Device::flex().autodiff());
    model.blocks.iter().fold(x, |x, block| block.forward(x, |block, x| block.forward(x))).mean()
}

/// The most that a rank held: while its shards were made, and in two steps.
struct Peaks {
    creating: usize,
    training: usize,
    /// Between steps: weights and optimizer state.
    resting: usize,
    /// From a checkpoint: shards made, and filled.
    loading: usize,
}

fn rank(world: &ProcessGroup, config: FsdpConfig) -> burn_context_parallel::Result<Peaks> {
    let (me, owner) = (world.rank(), heap::own(world.rank()));
    let fsdp = Fsdp::over(world, config)?;
    // All ranks rest while one starts new peaks.
    let rest = || -> burn_context_parallel::Result<usize> {
        world.barrier()?;
        let in_use = heap::in_use_by(me);
        world.barrier()?;
        if me == 0 {
            heap::reset_peak();
        }
        world.barrier()?;
        Ok(in_use)
    };
    let before = rest()?;
    let mut model = fsdp.shard(lazy())?;
    let creating = heap::peak_by(me) - before;
    let mut optimizer = ShardedOptimizer::new(AdamWConfig::new().build(), StatePlace::Device);
    let step = |model: Model, optimizer: &mut ShardedOptimizer<_>| {
        fsdp.begin(&model);
        let grads = GradientsParams::from_grads(loss(&model, me).backward(), &model);
        let grads = fsdp.finish(grads, &model)?;
        let (grads, _) = fsdp.clip_grad_norm(grads, &model, 1.0)?;
        Ok::<_, burn_context_parallel::Error>(optimizer.step(1e-3, model, grads))
    };
    model = step(model, &mut optimizer)?;
    let resting = rest()? - before;
    model = step(model, &mut optimizer)?;
    let training = heap::peak_by(me) - before;
    let folder = std::env::temp_dir().join(format!("burn-upipe-fsdp-memory-{}", std::process::id()));
    let (checkpoints, holding) = (Checkpoints::new(&folder, None), Holding::Sharded(fsdp.clone()));
    let Parts { pieces, scalars } = parts(&model, &optimizer, &holding);
    let state = RunState { optimizer: scalars, ..RunState::default() };
    checkpoints.save(world, pieces, &state).expect("saved");
    drop((model, optimizer));

    let before = rest()?;
    let mut optimizer = ShardedOptimizer::new(AdamWConfig::new().build(), StatePlace::Device);
    let checkpoint = checkpoints.latest(world).expect("whole").expect("saved");
    let model = restore(fsdp.shard(lazy())?, &mut optimizer, &holding, &checkpoint).expect("loaded");
    let loading = heap::peak_by(me) - before;
    rest()?;
    drop((model, optimizer, checkpoint, checkpoints));
    world.barrier()?;
    if me == 0 {
        std::fs::remove_dir_all(folder).expect("it was made here");
    }
    drop(owner);
    Ok(Peaks { creating, training, resting, loading })
}

#[test]
fn memory_is_as_stated() {
    let block = 2 * WIDTH * INNER;
    let weights = BLOCKS * block;
    // Weights, gradients, two moments.
    let states = state_bytes(std::iter::repeat_n(WIDTH * INNER, 2 * BLOCKS), 1, 4, 2);
    assert_eq!(states, 16 * weights);
    for ranks in [1, 2, 4] {
        for prefetch in [false, true] {
            let peaks = on_ranks(ranks, move |world| rank(&world, FsdpConfig::new().with_prefetch(prefetch)));
            let worst = |of: fn(&Peaks) -> usize| peaks.iter().map(of).max().expect("ranks");
            let [creating, training, resting, loading] =
                [worst(|p| p.creating), worst(|p| p.training), worst(|p| p.resting), worst(|p| p.loading)];
            println!(
                "{ranks} ranks, prefetch {prefetch}: creating {creating}, resting {resting}, training {training}, loading {loading}, whole states {states}"
            );
            // 1/P of all states and one block's, + 5 %.
            let bound = states / ranks + 16 * block;
            assert!(training * 100 <= bound * 105, "{ranks} ranks: {training} bytes, allowed are {bound} + 5 %");
            // Loading: that, and one tensor.
            let bound = bound + 4 * WIDTH * INNER;
            assert!(loading * 100 <= bound * 105, "{ranks} ranks: loaded with {loading} bytes, allowed are {bound}");
            // What is stated: shards, and the larger of the passes.
            let stated = state_bytes(std::iter::repeat_n(WIDTH * INNER, 2 * BLOCKS), ranks, 4, 2)
                + backward_bytes(block, ranks, 4, prefetch).max(forward_bytes(block, ranks, 4, prefetch));
            assert!(training * 100 <= stated * 105, "{ranks} ranks: {training} bytes, stated are {stated}");
            // At rest weights and moments, no gradients.
            let shards = 12 * weights / ranks;
            assert!(resting * 100 <= shards * 105, "{ranks} ranks at rest: {resting} bytes of {shards}");
            assert!(resting * 105 >= shards * 100, "the allocator counts: {resting} bytes of {shards}");
            // Its shards; on the first rank one whole parameter, its parts for all ranks, and one of them on its way.
            let created = 4 * weights / ranks + 4 * WIDTH * INNER * (2 * ranks + 1) / ranks;
            assert!(creating * 100 <= created * 105, "{ranks} ranks created with {creating} bytes, allowed {created}");
        }
    }
}
