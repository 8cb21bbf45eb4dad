//! A block is gathered once for its forward and once for its backward pass, and reduced once, however techniques are combined; the bytes
//! are those that the formulas state.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::fsdp::{Accumulation, Fsdp, FsdpConfig, FsdpCounts, gather_bytes, reduce_bytes};
use burn_context_parallel::group::{Operation, ProcessGroup};
use burn_context_parallel::sequence::Batch;
use llama::{AttentionScheme, Llama, LlamaConfig, ParallelConfig};
use rstest::rstest;
use tests::on_ranks;

const LAYERS: u64 = 3;
const RANKS: usize = 2;

fn config() -> LlamaConfig {
    LlamaConfig::new(23, 16, 20, LAYERS as usize, 4, 2)
}

fn none() -> ParallelConfig {
    ParallelConfig { attention: AttentionScheme::Ulysses, ..ParallelConfig::none() }
}

fn checkpointed() -> ParallelConfig {
    ParallelConfig { checkpoint: true, ..none() }
}

/// Counts of each of three steps, and bytes sent in all-gathers and reduce-scatters of the last one.
fn steps(parallel: ParallelConfig, fsdp: FsdpConfig, micro_batches: usize) -> (Vec<FsdpCounts>, u64, u64) {
    let runs = on_ranks(RANKS, move |world| {
        let device = Device::flex().autodiff();
        let fsdp = Fsdp::over(&world, fsdp.clone())?;
        let mut model = fsdp.shard(Llama::init(&config(), &parallel, &device).unwrap())?;
        let mut optimizer = SgdConfig::new().init();
        let (mut counts, mut traffic) = (Vec::new(), None);
        for _ in 0..3 {
            world.barrier()?;
            world.reset_traffic();
            let before = fsdp.counts();
            fsdp.begin(&model);
            let mut sums = GradientsAccumulator::new();
            for micro in 0..micro_batches {
                let batch = Batch::from_rows(&[(0..8).map(|i| (i * 5 + micro as i64) % 23).collect()])?;
                let shard = device.context_parallel(&world).shard(&batch)?;
                let share = model.loss_over(&shard, &world, 7 * micro_batches).unwrap().share;
                sums.accumulate(&model, GradientsParams::from_grads(share.backward(), &model));
            }
            let grads = fsdp.finish(sums.grads(), &model)?;
            model = optimizer.step(0.1, model, grads);
            counts.push(fsdp.counts() - before);
            traffic = Some(world.traffic());
        }
        let traffic = traffic.expect("three steps");
        Ok((counts, traffic.of(Operation::AllGather).sent, traffic.of(Operation::ReduceScatter).sent))
    });
    assert_eq!(runs[0].0, runs[1].0, "ranks");
    runs.into_iter().next().unwrap()
}

/// Elements of the sharded parameters: of the table, of a block with its number of them, and of the output layer.
fn elements() -> (usize, (usize, usize), usize) {
    struct Matrices(usize, usize);
    impl ModuleVisitor for Matrices {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if D == 2 {
                self.0 += param.lazy_shape().num_elements();
                self.1 += 1;
            }
        }
    }
    let model = Llama::init(&config(), &none(), &Device::flex()).unwrap();
    let mut block = Matrices(0, 0);
    model.layers[0].visit(&mut block);
    (23 * 16, (block.0, block.1), 16 * 23)
}

#[rstest]
fn checkpointed_blocks_are_gathered_twice_and_reduced_once(
    #[values(1, 3)] micro_batches: u64,
    #[values(false, true)] prefetch: bool,
    #[values(None, Some(2))] tile: Option<usize>,
) {
    let parallel = ParallelConfig { mlp_tile: tile, norm_tile: tile, loss_tile: tile, ..checkpointed() };
    let config = FsdpConfig::new().with_prefetch(prefetch);
    let (steps, gathered, reduced) = steps(parallel, config, micro_batches as usize);
    // The table once, for its backward step needs ids only; blocks twice, and the output layer where it is a block, under tiles.
    let of_head = if tile.is_some() { 2 } else { 1 };
    let gathers = micro_batches * (1 + 2 * LAYERS + of_head);
    let reduces = micro_batches * (1 + LAYERS + 1);
    for (step, counts) in steps.iter().enumerate() {
        // The first step learns the order.
        let prefetched = if prefetch && step > 0 { gathers } else { 0 };
        assert_eq!(*counts, FsdpCounts { gathers, prefetched, reduces }, "step {step}");
    }
    let (table, (block, parameters), head) = elements();
    let layers = LAYERS as usize;
    let bytes = gather_bytes(table, RANKS, 4)
        + 2 * layers * gather_bytes(block, RANKS, 4)
        + of_head as usize * gather_bytes(head, RANKS, 4);
    assert_eq!(gathered, micro_batches * bytes as u64);
    let bytes = reduce_bytes(table, 1, RANKS, 4)
        + layers * reduce_bytes(block, parameters, RANKS, 4)
        + reduce_bytes(head, 1, RANKS, 4);
    assert_eq!(reduced, micro_batches * bytes as u64);
}

/// Nothing in a backward pass; one sum a parameter at the end, however many micro-batches there were.
#[rstest]
fn reduced_once_each_parameter_is_summed_at_the_end(#[values(1, 3)] micro_batches: u64) {
    let config = FsdpConfig::new().with_accumulation(Accumulation::Once);
    let (steps, _, reduced) = steps(checkpointed(), config, micro_batches as usize);
    let (table, (block, parameters), head) = elements();
    for counts in steps {
        assert_eq!(counts.gathers, micro_batches * (1 + 2 * LAYERS + 1));
        assert_eq!(counts.reduces, 2 + LAYERS * parameters as u64);
    }
    let elements = table + head + LAYERS as usize * block;
    // All parameters here are even: shards have no padding, so that parts add up.
    assert_eq!(reduced, reduce_bytes(elements, 2 + LAYERS as usize * parameters, RANKS, 4) as u64);
}

/// Without recomputation the tape keeps what was gathered: each parameter once, by itself.
#[test]
fn without_recomputation_each_parameter_is_gathered_once() {
    let (steps, ..) = steps(none(), FsdpConfig::new(), 1);
    let (_, (_, parameters), _) = elements();
    for counts in steps {
        assert_eq!(counts.gathers, 1 + LAYERS * parameters as u64 + 1);
        assert_eq!(counts.reduces, 1 + LAYERS * parameters as u64 + 1);
    }
}

/// Liger-Kernel#893 and others: replicas with sequences of different lengths have different numbers of tiles, and still reduce a block once.
#[test]
fn tiles_do_not_reduce() {
    let counts = on_ranks(2, |world| {
        let (device, alone) = (Device::flex().autodiff(), ProcessGroup::single());
        let parallel = ParallelConfig { mlp_tile: Some(2), norm_tile: Some(3), loss_tile: Some(2), ..checkpointed() };
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let model = fsdp.shard(Llama::init(&config(), &parallel, &device).unwrap())?;
        let batch = Batch::from_rows(&[(0..[5, 14][world.rank()]).collect()])?;
        let shard = device.context_parallel(&alone).shard(&batch)?;
        let share = model.loss_over(&shard, &alone, 4 + 13).unwrap().share;
        let grads = GradientsParams::from_grads(share.backward(), &model);
        fsdp.finish(grads, &model)?;
        Ok(fsdp.counts())
    });
    let expected = FsdpCounts { gathers: 1 + 2 * LAYERS + 2, prefetched: 0, reduces: 1 + LAYERS + 1 };
    assert_eq!(counts, [expected; 2]);
}

/// On one rank nothing is sent.
#[test]
fn one_rank_sends_nothing() {
    let group = ProcessGroup::single();
    let device = Device::flex().autodiff();
    let fsdp = Fsdp::over(&group, FsdpConfig::new()).unwrap();
    let model = fsdp.shard(Llama::init(&config(), &checkpointed(), &device).unwrap()).unwrap();
    let batch = Batch::from_rows(&[(0..8).collect()]).unwrap();
    let shard = device.context_parallel(&group).shard(&batch).unwrap();
    let loss = model.loss(&shard, &group).unwrap();
    let grads = fsdp.finish(GradientsParams::from_grads(loss.mean.backward(), &model), &model).unwrap();
    assert!(!grads.is_empty());
    assert_eq!(group.traffic().total().sent, 0);
}
