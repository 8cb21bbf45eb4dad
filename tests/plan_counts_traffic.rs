//! What a plan says that ranks send is what they send: every collective of a step of training, its calls and its bytes, on every rank.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, TensorData};
use burn_context_parallel::collective::{clip_grad_norm, sum_gradients};
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig};
use burn_context_parallel::group::{Axis, Mesh, MeshShape, Operation, ReduceOp, Traffic};
use burn_context_parallel::sequence::{Batch, SequenceLayout};
use burn_upipe::plan::{Accounting, Attention, Setup, Techniques, traffic};
use llama::{AttentionScheme, Family, Llama, LlamaConfig, ParallelConfig};
use tests::on_ranks;

/// One step as finetune takes it; what crossed is that of the second, by when prefetch knows the order.
fn counted(setup: &Setup, config: &LlamaConfig) -> Vec<Traffic> {
    let (setup, config) = (setup.clone(), config.clone());
    on_ranks(setup.ranks(), move |world| {
        let device = Device::flex().autodiff();
        let mesh = Mesh::new(&world, setup.mesh)?;
        let model = Llama::init(&config, &parallel(&setup.techniques), &device).unwrap().fork(&device);
        let fsdp_config = FsdpConfig::new().with_prefetch(setup.techniques.prefetch);
        let fsdp = setup.techniques.fsdp.then(|| Fsdp::over(&world, fsdp_config)).transpose()?;
        let model = match &fsdp {
            Some(fsdp) => fsdp.shard(model)?,
            None => model,
        };
        let layout = SequenceLayout::contiguous(setup.seq_len, setup.mesh.ulysses)?;
        let sequence = mesh.axis(Axis::Ulysses);
        let mut counts = Traffic::default();
        for _ in 0..2 {
            world.barrier()?;
            world.reset_traffic();
            if let Some(fsdp) = &fsdp {
                fsdp.begin(&model);
            }
            let mut sums = GradientsAccumulator::new();
            for micro in 0..setup.accumulate {
                let row = |row: usize| (0..setup.seq_len).map(|i| ((i * 5 + row + micro) % 23) as i64).collect();
                let batch = Batch::from_rows(&(0..setup.batch).map(row).collect::<Vec<Vec<i64>>>())?;
                let shard = batch.shard(&layout, sequence.rank(), &device)?;
                let share = model.loss_over(&shard, sequence, 1000).unwrap().share;
                sums.accumulate(&model, GradientsParams::from_grads(share.backward(), &model));
            }
            let grads = sums.grads();
            if world.size() > 1 {
                world.all_reduce(TensorData::from([1.0f64]), ReduceOp::Sum)?; // the loss
            }
            match &fsdp {
                Some(fsdp) => {
                    let grads = fsdp.finish(grads, &model)?;
                    fsdp.clip_grad_norm(grads, &model, 1.0)?;
                }
                None => {
                    let grads = sum_gradients(grads, &model, &world)?;
                    clip_grad_norm(grads, &model, 1.0, &world)?;
                }
            }
            counts = world.traffic();
        }
        Ok(counts)
    })
}

fn parallel(techniques: &Techniques) -> ParallelConfig {
    ParallelConfig {
        attention: match techniques.attention {
            Attention::Single => AttentionScheme::Single,
            Attention::Ulysses => AttentionScheme::Ulysses,
            Attention::UPipe { per_stage } => AttentionScheme::UPipe { heads_per_stage: per_stage },
        },
        checkpoint: techniques.checkpoint.is_some(),
        blocks_per_checkpoint: techniques.checkpoint.unwrap_or(1),
        mlp_tile: techniques.mlp_tile,
        norm_tile: techniques.norm_tile,
        loss_tile: techniques.loss_tile,
    }
}

fn agree(setup: &Setup, config: &LlamaConfig) {
    for (rank, counted) in counted(setup, config).into_iter().enumerate() {
        let mut planned: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for part in traffic(setup, rank).unwrap() {
            let sum = planned.entry(part.operation.name()).or_default();
            *sum = (sum.0 + part.calls as u64, sum.1 + part.sent as u64);
        }
        for operation in Operation::ALL.into_iter().filter(|operation| *operation != Operation::Barrier) {
            let found = counted.of(operation);
            let planned = planned.get(operation.name()).copied().unwrap_or_default();
            assert_eq!((found.calls, found.sent), planned, "{} of rank {rank}: {setup:?}", operation.name());
        }
    }
}

fn setup(config: &LlamaConfig, mesh: (usize, usize), seq_len: usize, techniques: Techniques) -> Setup {
    Setup {
        model: config.shape("small"),
        seq_len,
        batch: 1,
        accumulate: 1,
        mesh: MeshShape { data: mesh.0, ulysses: mesh.1, ..MeshShape::default() },
        techniques,
        accounting: Accounting::flex(1),
    }
}

fn llama(heads: usize, kv_heads: usize) -> LlamaConfig {
    LlamaConfig { head_dim: 4, ..LlamaConfig::new(23, 12, 20, 3, heads, kv_heads) }
}

const UPIPE: Attention = Attention::UPipe { per_stage: None };

/// Head counts that the ranks divide and that they do not, fewer key/value heads than ranks, padding.
#[test]
fn every_scheme_with_any_heads() {
    for (heads, kv_heads) in [(4, 2), (6, 3), (5, 1), (2, 2)] {
        for ranks in [1, 2, 3, 4] {
            let stages = [None, Some(1), Some(heads - 1), Some(heads)];
            let upipe = stages.map(|per_stage| Attention::UPipe { per_stage });
            for attention in upipe.into_iter().chain([Attention::Ulysses]) {
                for checkpoint in [None, Some(1)] {
                    let techniques = Techniques { attention, checkpoint, ..Techniques::none() };
                    let config = llama(heads, kv_heads);
                    agree(&setup(&config, (1, ranks), 10, techniques), &config);
                }
            }
        }
    }
}

/// Shards: with checkpoints and without, tiled and not, tables shared and not, with norms on heads and biases.
#[test]
fn shards_with_every_technique() {
    let families = [
        llama(4, 2),
        LlamaConfig { tie_word_embeddings: true, ..llama(4, 2) },
        LlamaConfig { family: Family::Qwen3, ..llama(4, 2) },
        LlamaConfig { family: Family::Qwen2, ..llama(4, 2) },
    ];
    for config in families {
        for mesh in [(1, 2), (2, 2), (3, 1)] {
            for checkpoint in [None, Some(1)] {
                for (mlp_tile, norm_tile, loss_tile) in [
                    (None, None, None),
                    (Some(3), None, None),
                    (None, Some(3), None),
                    (None, None, Some(3)),
                    (Some(2), Some(3), Some(4)),
                ] {
                    for fsdp in [true, false] {
                        let attention = if mesh.1 == 1 { Attention::Single } else { UPIPE };
                        let base = Techniques { attention, checkpoint, fsdp, ..Techniques::none() };
                        let techniques = Techniques { mlp_tile, norm_tile, loss_tile, ..base };
                        agree(&setup(&config, mesh, 12, techniques), &config);
                    }
                }
            }
        }
    }
}

/// Blocks of one checkpoint are gathered and reduced one by one.
#[test]
fn several_blocks_a_checkpoint() {
    let config = llama(4, 2);
    for blocks in [2, 3] {
        for (fsdp, prefetch) in [(false, false), (true, false), (true, true)] {
            let techniques =
                Techniques { attention: UPIPE, checkpoint: Some(blocks), fsdp, prefetch, ..Techniques::none() };
            agree(&setup(&config, (2, 2), 9, techniques), &config);
        }
    }
}

/// Micro-batches are exchanged one by one, gradients of what is whole once; prefetch moves nothing more.
#[test]
fn micro_batches_and_rows() {
    let config = llama(4, 2);
    for (batch, accumulate) in [(2, 1), (1, 3), (2, 2)] {
        for (fsdp, prefetch) in [(false, false), (true, false), (true, true)] {
            let techniques = Techniques { attention: UPIPE, checkpoint: Some(1), fsdp, prefetch, ..Techniques::none() };
            agree(&Setup { batch, accumulate, ..setup(&config, (2, 2), 9, techniques) }, &config);
        }
    }
}

/// Above 32 KiB an all-reduce takes two steps and sends less.
#[test]
fn large_gradients() {
    let config = LlamaConfig { head_dim: 16, ..LlamaConfig::new(67, 130, 150, 1, 2, 1) };
    for ranks in [2, 3] {
        let techniques = Techniques { attention: UPIPE, ..Techniques::none() };
        agree(&setup(&config, (1, ranks), 8, techniques), &config);
    }
}
