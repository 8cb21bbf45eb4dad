//! What is planned is what is used: peaks of real steps, counted by the allocator, beside those of the plan.
//!
//! The counting allocator sees every thread, so this file is one test.

// The table, for --nocapture.
#![allow(clippy::print_stdout)]

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig, ShardedOptimizer, StatePlace};
use burn_context_parallel::group::{MeshShape, ProcessGroup};
use burn_context_parallel::phase;
use burn_context_parallel::sequence::Batch;
use burn_upipe::offload::{Offload, OffloadConfig, OffloadPolicy};
use burn_upipe::plan::{Accounting, Attention, ModelShape, OffloadPlan, Setup, Techniques, WaitingPlace, memory};
use burn_upipe::profile::heap::{self, CountingAllocator};
use burn_upipe::profile::{Profiler, RankHeap};
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig};
use tests::on_ranks;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

/// The phases of the profiler, those that are around all others, beside the plan's.
const PHASES: [(&str, &[&str]); 6] = [
    ("embedding", &["embedding forward"]),
    ("forward", &["block forward"]),
    ("loss", &["norm forward", "loss forward"]),
    ("loss backward", &["loss backward", "norm backward"]),
    ("backward", &["block backward"]),
    ("optimizer", &["gradient sum", "optimizer"]),
];

fn model(width: usize, inner: usize, layers: usize, heads: (usize, usize, usize), vocab: usize) -> ModelShape {
    ModelShape {
        name: "small".to_owned(),
        vocab,
        width,
        inner,
        layers,
        heads: heads.0,
        kv_heads: heads.1,
        head_dim: heads.2,
        tied: false,
        qkv_bias: false,
        qk_norm: false,
    }
}

/// Peaks of each rank, phase by phase, in the second step: the first one takes workspaces and makes the optimizer's state.
fn measure(setup: &Setup) -> Vec<[usize; PHASES.len()]> {
    let setup = setup.clone();
    on_ranks(setup.ranks(), move |world: ProcessGroup| {
        let profiler = Profiler::new(world.rank(), RankHeap::new(world.rank()));
        let listening = profiler.enter();
        // The matrix product's workspace, a second-level cache large, is taken when a product first reads a view: before anything is
        // counted. Small, or it would be another thread's.
        let small = Tensor::<2>::ones([64, 128], &Device::flex());
        drop(small.clone().narrow(1, 0, 64).matmul(small.narrow(1, 64, 64)));
        let before = heap::in_use_by(world.rank());
        let Setup { model: shape, techniques, seq_len, batch, .. } = &setup;
        let device = Device::flex().autodiff();
        let config = LlamaConfig {
            head_dim: shape.head_dim,
            tie_word_embeddings: shape.tied,
            ..LlamaConfig::new(shape.vocab, shape.width, shape.inner, shape.layers, shape.heads, shape.kv_heads)
        };
        let parallel = ParallelConfig {
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
        };
        let fsdp = techniques.fsdp.then(|| Fsdp::over(&world, FsdpConfig::new().with_prefetch(techniques.prefetch)));
        let fsdp = fsdp.transpose()?;
        let mut model = match &fsdp {
            Some(fsdp) => fsdp.shard(Llama::undrawn(&config, &parallel, &device).expect("a model"))?,
            None => Llama::init(&config, &parallel, &device).expect("a model"),
        };
        let engine = techniques.offload.map(|plan| {
            let config =
                OffloadConfig::new().with_in_flight(plan.in_flight).with_policy(match (plan.every, plan.keep) {
                    (every, 0) => OffloadPolicy::Every(every),
                    (_, keep) => OffloadPolicy::Budget(keep),
                });
            Offload::new(config.with_host_budget(None)).expect("an engine")
        });
        if let Some(engine) = &engine {
            model = model.offload(engine);
        }
        let mut optimizer = ShardedOptimizer::new(AdamWConfig::new().build(), StatePlace::Device);
        let ids = |row: usize| (0..*seq_len).map(|at| ((at * at + row) % shape.vocab) as i64).collect();
        let rows: Vec<Vec<i64>> = (0..*batch).map(ids).collect();
        let rows = Batch::from_rows(&rows)?;
        for step in 0..2 {
            profiler.record(step == 1);
            let shard = device.context_parallel(&world).shard(&rows)?;
            if let Some(fsdp) = &fsdp {
                fsdp.begin(&model);
            }
            let loss = model.loss(&shard, &world).expect("a loss").mean;
            let grads = {
                // What has no end of its own ends with this.
                let _phase = phase::enter("pass", None);
                GradientsParams::from_grads(loss.backward(), &model)
            };
            let grads = {
                let _phase = phase::enter("gradient sum", None);
                match &fsdp {
                    Some(fsdp) => fsdp.finish(grads, &model)?,
                    None => sum_gradients(grads, &model, &world)?,
                }
            };
            let _phase = phase::enter("optimizer", None);
            model = optimizer.step(1e-3, model, grads);
        }
        let timeline = profiler.finish();
        drop((model, optimizer));
        world.barrier()?;
        drop(listening);
        let peak = |kinds: &[&str]| {
            let mine = timeline.spans.iter().filter(|span| {
                let path = timeline.path(span.phase);
                let mut path = path.iter().map(|phase| &*phase.kind).filter(|kind| *kind != "pass");
                span.thread == 0 && path.next().is_some_and(|kind| kinds.contains(&kind)) && path.next().is_none()
            });
            let most = mine.map(|span| span.peak as usize).max();
            most.unwrap_or_else(|| panic!("no phase {kinds:?}")).saturating_sub(before)
        };
        Ok(PHASES.map(|(_, kinds)| peak(kinds)))
    })
}

fn grid() -> Vec<(String, Setup)> {
    let off = Techniques { prefetch: false, ..Techniques::none() };
    let on = Techniques { checkpoint: Some(1), mlp_tile: Some(128), norm_tile: Some(256), loss_tile: Some(64), ..off };
    let offload = OffloadPlan { place: WaitingPlace::Host, in_flight: 2, every: 1, keep: 0 };
    let upipe = |per_stage| Attention::UPipe { per_stage };
    let mut cases = Vec::new();
    let shapes = [
        ("even", model(128, 352, 4, (8, 2, 16), 256)),
        ("wide ff", model(128, 704, 4, (8, 8, 16), 256)),
        ("wide heads", model(96, 128, 6, (8, 4, 32), 500)),
        ("large vocabulary", model(64, 128, 3, (4, 2, 16), 4000)),
    ];
    for (shape_name, shape) in &shapes {
        for (ranks, seq_len, batch) in [(1, 1536, 1), (1, 600, 2), (2, 2000, 1), (4, 3072, 1)] {
            for (attention_name, attention) in [
                ("single", Attention::Single),
                ("ulysses", Attention::Ulysses),
                ("upipe", upipe(None)),
                ("upipe all", upipe(Some(shape.heads))),
            ] {
                if (attention == Attention::Single && ranks > 1) || (attention == Attention::Ulysses && ranks == 1) {
                    continue;
                }
                for (name, techniques) in [
                    ("nothing", off),
                    ("checkpoint", Techniques { checkpoint: Some(1), ..off }),
                    ("tiles", Techniques { checkpoint: None, ..on }),
                    ("all", on),
                    ("all, two a checkpoint", Techniques { checkpoint: Some(2), ..on }),
                    ("all, offload", Techniques { offload: Some(offload), ..on }),
                    ("all, offload every 2nd", Techniques { offload: Some(OffloadPlan { every: 2, ..offload }), ..on }),
                    ("all, fsdp", Techniques { fsdp: true, ..on }),
                ] {
                    if techniques.fsdp && ranks == 1 {
                        continue;
                    }
                    let setup = Setup {
                        model: shape.clone(),
                        seq_len,
                        batch,
                        accumulate: 1,
                        mesh: MeshShape { ulysses: ranks, ..MeshShape::default() },
                        techniques: Techniques { attention, ..techniques },
                        accounting: Accounting { overhead: 0, ..Accounting::flex(2) },
                    };
                    cases.push((
                        format!("{shape_name}, P={ranks} S={seq_len} B={batch}, {attention_name}, {name}"),
                        setup,
                    ));
                }
            }
        }
    }
    cases
}

/// One of six cases, another one of each setting.
#[test]
fn plans_are_within_a_tenth_of_what_is_counted() {
    let cases = grid().into_iter().enumerate().filter(|(at, _)| (at + at / 6) % 6 == 0);
    hold(cases.map(|(_, case)| case));
}

/// All of them: a quarter of an hour.
#[test]
#[ignore = "the whole grid takes a quarter of an hour: --ignored"]
fn all_plans_are_within_a_tenth_of_what_is_counted() {
    hold(grid());
}

fn hold(cases: impl IntoIterator<Item = (String, Setup)>) {
    let (_, peak) = heap::peak_of(|| std::hint::black_box(vec![1u8; 1 << 20]));
    assert!(peak >= 1 << 20, "the counting allocator is not installed");
    let mut errors = Vec::new();
    for (name, setup) in cases {
        let planned = memory(&setup).unwrap_or_else(|error| panic!("{name}: {error}"));
        let planned: Vec<usize> = PHASES
            .iter()
            .map(|(phase, _)| {
                planned.phases.iter().find(|planned| planned.name == *phase).map_or(0, |phase| phase.total())
            })
            .collect();
        // What a slow receiver still holds of others is a matter of chance: of several ranks the nearest of three runs counts.
        let runs = (0..if setup.ranks() > 1 { 3 } else { 1 }).map(|_| {
            let ranks = measure(&setup);
            // Of the rank that holds the most.
            let counted: Vec<usize> =
                (0..PHASES.len()).map(|at| ranks.iter().map(|peaks| peaks[at]).max().unwrap_or(0)).collect();
            let errors: Vec<f64> =
                planned.iter().zip(&counted).map(|(plan, counted)| *plan as f64 / *counted as f64 - 1.0).collect();
            (errors.iter().fold(0f64, |worst, error| worst.max(error.abs())), counted, errors)
        });
        let mut best: Option<(f64, Vec<usize>, Vec<f64>)> = None;
        let mut line = format!("{name:58}");
        for run in runs {
            let enough = run.0 <= 0.1;
            if best.as_ref().is_none_or(|(worst, ..)| run.0 < *worst) {
                best = Some(run);
            }
            if enough {
                break;
            }
        }
        let (_, counted, found) = best.expect("one run at least");
        for (at, (phase, _)) in PHASES.iter().enumerate() {
            let (plan, counted, error) = (planned[at], counted[at], found[at]);
            line += &format!(" {phase} {:.2}/{:.2} {:+.1}%", plan as f64 / 1e6, counted as f64 / 1e6, 100.0 * error);
            errors.push((error, format!("{name}: {phase}")));
        }
        println!("{line}");
    }
    let worst = errors.iter().max_by(|a, b| a.0.abs().total_cmp(&b.0.abs())).expect("cases");
    let mean = errors.iter().map(|(error, _)| error.abs()).sum::<f64>() / errors.len() as f64;
    println!("{} peaks: mean {:.1} %, worst {:+.1} % ({})", errors.len(), 100.0 * mean, 100.0 * worst.0, worst.1);
    assert!(worst.0.abs() <= 0.1, "{}: {:+.1} %", worst.1, 100.0 * worst.0);
}
