//! What a profile says is what happened: peaks to the byte, bytes as the group counts them, every block in both directions; and
//! listening changes nothing.
//!
//! Each test owns ranks of its own, since the allocator's counts are the process's.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::Error;
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig};
use burn_context_parallel::group::{Axis, Mesh, MeshShape, Operation, ProcessGroup, ReduceOp, Traffic, launch};
use burn_context_parallel::phase;
use burn_context_parallel::sequence::Batch;
use burn_upipe::offload::{Offload, OffloadConfig, saved_bytes};
use burn_upipe::profile::heap::{self, CountingAllocator};
use burn_upipe::profile::{Memory, MemorySource, PhaseStats, Profiler, RankHeap, Report, ResidentSet, Span, Timeline};
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig};
use tests::filled;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

fn hold(bytes: usize) -> Vec<u8> {
    std::hint::black_box(vec![1; bytes])
}

/// Runs `f` under a profiler of a rank that nothing else uses.
fn recorded<T>(rank: usize, f: impl FnOnce() -> T) -> (Report, T) {
    let profiler = Profiler::new(rank, RankHeap::new(rank));
    let result = {
        let _on = profiler.enter();
        profiler.record(true);
        f()
    };
    (Report::new([profiler.finish()]), result)
}

fn named<'a>(phases: &'a [PhaseStats], name: &str) -> &'a PhaseStats {
    phases.iter().find(|phase| phase.name == name).unwrap_or_else(|| panic!("no {name} in {phases:#?}"))
}

#[test]
fn peaks_of_nested_phases_are_exact() {
    let (report, kept) = recorded(30, || {
        let _outer = phase::enter("outer", None);
        let begin = hold(1000);
        for size in [5000, 100] {
            let _inner = phase::enter("inner", None);
            let _leaf = phase::enter("leaf", None);
            drop(hold(size));
        }
        let kept = {
            let _keeping = phase::enter("keeping", None);
            drop(hold(300));
            hold(200)
        };
        drop(begin);
        drop(hold(4000));
        kept
    });
    let phases = report.phases();
    // (name, runs, peak, peak above its begin, kept)
    let found: Vec<_> =
        phases.iter().map(|p| (&*p.name, p.count, p.peak as usize, p.peak_above as usize, p.kept)).collect();
    assert_eq!(
        found,
        [
            ("outer", 1, 6000, 6000, 200),
            ("inner", 2, 6000, 5000, 0),
            ("leaf", 2, 6000, 5000, 0),
            ("keeping", 1, 1300, 300, 200),
        ]
    );
    assert_eq!(phases[2].around, ["outer", "inner"]);
    assert_eq!(report.ranks()[0].samples.iter().map(|sample| sample.peak).max(), Some(6000));
    drop(kept);
}

/// Memory as it is told: so much in use, and 1000 more reserved.
struct Told(Arc<AtomicU64>);

impl MemorySource for Told {
    fn name(&self) -> &'static str {
        "told"
    }

    fn read(&mut self) -> Memory {
        let in_use = self.0.load(Ordering::Relaxed);
        Memory { in_use, reserved: Some(in_use + 1000) }
    }

    fn take_peak(&mut self) -> Option<u64> {
        None
    }
}

/// Memory at the begin of `outer`, in `inner`, and at the end.
fn told(rank: usize, [outer, inner, after]: [u64; 3]) -> Timeline {
    let memory = Arc::new(AtomicU64::new(outer));
    let profiler = Profiler::new(rank, Told(memory.clone()));
    let _on = profiler.enter();
    profiler.record(true);
    {
        let _outer = phase::enter("outer", None);
        memory.store(inner, Ordering::Relaxed);
        drop(phase::enter("inner", Some(7)));
        memory.store(after, Ordering::Relaxed);
    }
    profiler.finish()
}

#[test]
fn the_table_has_what_is_in_use_at_the_end_and_reserved_and_every_rank() {
    let report = Report::new([told(42, [10, 5, 20]), told(41, [10, 300, 15])]);
    let found = |phases: Vec<PhaseStats>| -> Vec<(String, u64, u64, Option<u64>)> {
        phases.into_iter().map(|p| (p.name, p.peak, p.in_use, p.reserved)).collect()
    };
    // The largest of the ranks, number by number.
    assert_eq!(found(report.phases()), [("outer".into(), 300, 20, Some(1300)), ("inner".into(), 300, 300, Some(1300))]);
    assert_eq!(found(report.phases_of(42)), [("outer".into(), 20, 20, Some(1020)), ("inner".into(), 5, 5, Some(1005))]);
    assert_eq!(report.phases_of(40), []);
    let ranks: Vec<_> = report
        .rank_stats()
        .into_iter()
        .map(|rank| (rank.rank, rank.peak, rank.phase.join("/"), rank.in_use, rank.reserved))
        .collect();
    assert_eq!(ranks, [(41, 300, "outer".to_owned(), 15, Some(1300)), (42, 20, "outer".to_owned(), 20, Some(1020)),]);
    let text = report.to_string();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let row = |first: &str| rows.iter().find(|row| row.first() == Some(&first)).unwrap_or_else(|| panic!("{text}"));
    let header = "phase runs time share peak peak above at end kept reserved sent received";
    assert_eq!(row("phase").join(" "), header);
    // Behind runs, time and share.
    assert_eq!(row("outer")[6..].join(" "), "300 B 290 B 20 B 10 B 1.3 KiB 0 0");
    assert_eq!(row("41").join(" "), "41 300 B 15 B 1.3 KiB 0 0 outer");
    assert_eq!(row("42").join(" "), "42 20 B 20 B 1020 B 0 0 outer");
}

#[test]
fn steps_that_are_not_recorded_leave_nothing() {
    let profiler = Profiler::new(36, RankHeap::new(36));
    let _on = profiler.enter();
    let step = |number| {
        let _step = phase::enter("step", Some(number));
        let _block = phase::pass("block", Some(number), phase::Pass::Forward);
        hold(100)
    };
    let held: Vec<_> = (0..1000).map(step).collect();
    // What they hold is told apart all the same.
    let mut alive = heap::alive_by_phase().into_iter();
    assert!(alive.any(|alive| (alive.rank, alive.phase, alive.bytes) == (Some(36), "block forward", 100_000)));
    drop(held);
    let run = phase::enter("run", None);
    drop(step(1000));
    profiler.record(true);
    drop(step(1001));
    profiler.record(false);
    drop(step(1002));
    let timeline = profiler.finish();
    let paths = |timeline: &Timeline| -> Vec<String> {
        let path = |at| timeline.path(at).into_iter().map(|phase| &*phase.label).collect::<Vec<_>>().join("/");
        (0..timeline.phases.len()).map(path).collect()
    };
    assert_eq!(paths(&timeline), ["run", "run/step 1001", "run/step 1001/block 1001 forward"]);
    assert_eq!(timeline.spans.len(), 2);
    // Left open by the recording, over for the thread.
    drop(run);
    assert_eq!(heap::Phase::current(), None);
}

#[test]
fn backward_phases_with_nothing_around_them_end() {
    let profiler = Profiler::new(37, RankHeap::new(37));
    let _on = profiler.enter();
    let device = Device::flex().autodiff();
    let step = || {
        profiler.record(true);
        let weight = Tensor::<1>::from_floats([3.0], &device).require_grad();
        let frozen = Tensor::<1>::from_floats([2.0], &device);
        let y = phase::after("begin", None, || weight.clone() * 1);
        let y = phase::around("block", Some(0), y, |y| phase::around("inner", None, y, |y| y.clone() * y));
        let z = phase::around("frozen", None, frozen, |x| x * weight.clone());
        let _ = (y + z).backward();
        assert_eq!(heap::Phase::current(), None);
        let timeline = profiler.finish();
        let depth = timeline.spans.iter().map(|span| span.depth).max();
        (timeline.phases.len(), timeline.spans.len(), depth)
    };
    // Four phases in two directions, `inner` within `block`.
    assert_eq!([step(), step(), step()], [(8, 8, Some(1)); 3]);
}

#[test]
fn a_phase_that_is_given_up_elsewhere_ends_with_the_next_one() {
    let (report, ()) = recorded(38, || {
        let span = tracing::trace_span!(target: phase::TARGET, "lost");
        span.with_subscriber(|(id, listener)| listener.enter(id));
        thread::spawn(move || drop(span)).join().unwrap();
        let _next = phase::enter("next", None);
    });
    let found: Vec<_> = report.phases().into_iter().map(|phase| (phase.name, phase.around.len())).collect();
    assert_eq!(found, [("lost".to_owned(), 0), ("next".to_owned(), 0)]);
    assert_eq!(heap::Phase::current(), None);
}

#[test]
fn a_helper_goes_on_for_whom_it_worked_before() {
    let (_, held) = recorded(39, || {
        let work = phase::carried(|| {
            let _mine = heap::own(40);
            {
                let _helping = phase::enter("helping", None);
                drop(hold(100));
            }
            let (before, held) = (heap::in_use_by(40), hold(5000));
            (heap::in_use_by(40) - before, held)
        });
        thread::spawn(work).join().unwrap()
    });
    assert_eq!(held.0, 5000);
}

#[test]
fn what_shrinks_in_place_is_not_there_twice() {
    let _owned = heap::own(43);
    let mut bytes = hold(1 << 20);
    bytes.truncate(1 << 19);
    let before = heap::in_use_by(43);
    heap::take_peak_by(43);
    bytes.shrink_to_fit();
    assert_eq!((heap::in_use_by(43), heap::take_peak_by(43)), (before - (1 << 19), before));
    // Grown ones may be.
    bytes.reserve_exact(1 << 20);
    assert!(heap::take_peak_by(43) > before + (1 << 19));
}

#[test]
fn what_always_holds_something_lies_below_what_comes_and_goes() {
    let profiler = Profiler::new(44, RankHeap::new(44));
    let _on = profiler.enter();
    let phase = |name, bytes| {
        let _phase = phase::enter(name, None);
        hold(bytes)
    };
    drop(phase("passing", 100));
    let lasting = phase("lasting", 1000);
    profiler.record(true);
    drop(phase("passing", 5000));
    let page = Report::new([profiler.finish()]).html();
    let place = |what: &str| page.find(what).unwrap_or_else(|| panic!("no {what} in {page}"));
    // The legend, and the stack from the foot up; that one came first does not matter.
    assert!(place("</span>lasting</li>") < place("</span>passing</li>"));
    assert!(place("<title>lasting: at most 1000 B</title>") < place("<title>passing: at most 4.9 KiB</title>"));
    drop(lasting);
}

#[test]
fn what_helpers_of_a_rank_allocate_is_in_the_phase_that_waits_for_them() {
    let (report, ()) = recorded(31, || {
        let _outer = phase::enter("outer", None);
        let work = phase::carried(|| {
            let _helping = phase::enter("helping", None);
            drop(hold(7000));
        });
        thread::spawn(work).join().unwrap();
    });
    let phases = report.phases();
    assert_eq!(named(&phases, "helping").peak_above, 7000);
    assert!(named(&phases, "outer").peak_above >= 7000, "{phases:?}");
    let threads: Vec<_> = report.ranks()[0].spans.iter().map(|span| span.thread).collect();
    assert_eq!(threads, [1, 0]);
}

#[test]
fn allocations_are_told_apart_by_the_phase_that_made_them() {
    let alive = |name: &str| {
        heap::alive_by_phase().into_iter().find(|alive| alive.rank == Some(32) && alive.phase == name).map(|a| a.bytes)
    };
    let (_, (outer, inner)) = recorded(32, || {
        let _outer = phase::enter("outer", None);
        let outer = hold(1000);
        let inner = {
            let _inner = phase::pass("inner", Some(3), phase::Pass::Backward);
            hold(2000)
        };
        let outer = [outer, hold(10)];
        (outer, inner)
    });
    // Freed elsewhere and later, or grown: still of where they were made.
    assert_eq!((alive("outer"), alive("outer / inner backward")), (Some(1010), Some(2000)));
    let inner = thread::spawn(move || {
        let mut inner = inner;
        inner.resize(3000, 0);
        inner
    })
    .join()
    .unwrap();
    assert!(alive("outer / inner backward") >= Some(3000));
    drop((outer, inner));
    assert_eq!((alive("outer"), alive("outer / inner backward")), (None, None));
}

#[test]
fn phases_around_tensors_last_from_gradient_to_gradient() {
    let (report, grad) = recorded(35, || {
        let device = Device::flex().autodiff();
        let x = Tensor::<1>::from_floats([3.0], &device).require_grad();
        let y = phase::after("begin", None, || x.clone() * 1);
        let y = phase::around("block", Some(0), y, |y| y.clone() * y);
        let y = phase::around("block", Some(1), y, |y| phase::around("inner", None, y, |y| y * 5));
        let _backward = phase::enter("backward", None);
        x.grad(&y.backward()).unwrap().into_scalar::<f32>()
    });
    assert_eq!(grad, 30.0);
    let timeline = &report.ranks()[0];
    let path =
        |phase: usize| timeline.path(phase).iter().map(|phase| phase.label.clone()).collect::<Vec<_>>().join("/");
    let ends: Vec<_> = timeline.spans.iter().map(|span| path(span.phase)).collect();
    assert_eq!(
        ends,
        [
            "begin forward",
            "block 0 forward",
            "block 1 forward/inner forward",
            "block 1 forward",
            "backward/block 1 backward/inner backward",
            "backward/block 1 backward",
            "backward/block 0 backward",
            // It has no end of its own.
            "backward/begin backward",
            "backward",
        ]
    );
}

/// Bytes and calls of each collective, as the profile has them.
fn collectives(timeline: &Timeline) -> HashMap<&str, (u64, u64, u64)> {
    let mut found: HashMap<&str, (u64, u64, u64)> = HashMap::new();
    for span in &timeline.spans {
        let kind = &*timeline.phases[span.phase].kind;
        if Operation::ALL.iter().any(|operation| operation.name() == kind) {
            let count = found.entry(kind).or_default();
            *count = (count.0 + 1, count.1 + span.sent, count.2 + span.received);
        }
    }
    found
}

fn assert_traffic(timeline: &Timeline, traffic: &Traffic) {
    let found = collectives(timeline);
    for operation in Operation::ALL {
        let count = traffic.of(operation);
        let (calls, sent, received) = found.get(operation.name()).copied().unwrap_or_default();
        assert_eq!((calls, sent, received), (count.calls, count.sent, count.received), "{operation}");
    }
}

#[test]
fn bytes_of_collectives_are_those_that_the_group_counts() {
    let ranks = launch(3, |world: ProcessGroup| {
        let me = world.rank();
        let profiler = Profiler::new(me, ResidentSet);
        let _on = profiler.enter();
        profiler.record(true);
        let value = |n: usize| TensorData::new(vec![1f32; n], [n]);
        {
            let _step = phase::enter("step", Some(1));
            world.all_to_all(vec![value(5); 3])?;
            world.all_gather(value(7))?;
            world.all_gather_uneven(value(1 + me))?;
            world.reduce_scatter(vec![value(2); 3], ReduceOp::Sum)?;
            world.all_reduce(value(1), ReduceOp::Sum)?;
            world.all_reduce(value(30_000), ReduceOp::Sum)?;
            world.broadcast((me == 2).then(|| value(10)), 2)?;
            world.shift(value(6), 1)?;
            world.barrier()?;
        }
        Ok::<_, Error>((profiler.finish(), world.traffic()))
    })
    .unwrap();
    for (timeline, traffic) in &ranks {
        assert_traffic(timeline, traffic);
        let step = timeline.spans.iter().find(|span| span.depth == 0).unwrap();
        assert_eq!((step.sent, step.received), (traffic.total().sent, traffic.total().received));
    }
    // Of the table: the largest rank's, not the sum.
    let largest = ranks.iter().map(|(_, traffic)| traffic.total().sent).max();
    let report = Report::new(ranks.into_iter().map(|(timeline, _)| timeline));
    assert_eq!(Some(named(&report.phases(), "step").sent), largest);
}

struct Outcome {
    timeline: Option<Timeline>,
    traffic: Traffic,
    bits: Vec<u8>,
    /// Bytes that left the device in the steps.
    left: usize,
}

/// What a step does beside its computation.
#[derive(Clone, Copy, Debug, Default)]
struct Setting {
    /// How many blocks; `None` is no checkpoint.
    checkpoint: Option<usize>,
    fsdp: bool,
    offload: bool,
}

const BLOCKS: usize = 3;

/// The bits of all gradients.
struct Bits<'a> {
    grads: &'a GradientsParams,
    bits: &'a mut Vec<u8>,
}

impl ModuleVisitor for Bits<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.bits.extend_from_slice(grad.into_data().as_bytes());
        }
    }
}

/// Two steps' losses and gradients of a real model on two ranks.
fn step(setting: Setting, profiled: bool) -> Vec<Outcome> {
    launch(2, move |world: ProcessGroup| {
        let Setting { checkpoint, fsdp, offload } = setting;
        let me = world.rank();
        let device = Device::flex().autodiff();
        let config = LlamaConfig::new(32, 16, 24, BLOCKS, 4, 2);
        let parallel = ParallelConfig {
            attention: AttentionScheme::UPipe { heads_per_stage: Some(2) },
            checkpoint: checkpoint.is_some(),
            blocks_per_checkpoint: checkpoint.unwrap_or(1),
            mlp_tile: Some(3),
            norm_tile: None,
            loss_tile: Some(3),
        };
        let mesh = Mesh::new(&world, MeshShape { ulysses: 2, ..MeshShape::default() })?;
        let model = filled(Llama::undrawn(&config, &parallel, &device)?, 7, DType::F32, 0.4);
        let fsdp = match fsdp {
            true => Some(Fsdp::new(&mesh, &Axis::ALL, FsdpConfig::new())?),
            false => None,
        };
        let model = match &fsdp {
            Some(fsdp) => fsdp.shard(model)?,
            None => model.fork(&device),
        };
        let engine = offload.then(|| Offload::new(OffloadConfig::new())).transpose()?;
        let model = match &engine {
            Some(engine) => model.offload(engine),
            None => model,
        };
        let mut left = 0;
        let profiler = profiled.then(|| Profiler::new(me, RankHeap::new(me)));
        let _on = profiler.as_ref().map(|profiler| {
            profiler.record(true);
            profiler.enter()
        });
        world.reset_traffic();
        let batch = Batch::from_rows(&[(0..13).map(|i| (i * 5 + 3) % 32).collect()])?;
        let shard = device.context_parallel(mesh.axis(Axis::Ulysses)).shard(&batch)?;
        let mut bits = Vec::new();
        for number in 1..=2 {
            let _step = phase::enter("step", Some(number));
            if let Some(fsdp) = &fsdp {
                fsdp.begin(&model);
            }
            let loss = model.loss(&shard, mesh.axis(Axis::Ulysses))?.mean;
            bits.extend_from_slice(loss.clone().inner().into_data().as_bytes());
            if let Some(engine) = &engine {
                // All have left, so that all come back.
                while engine.stats().in_flight > 0 {
                    thread::yield_now();
                }
                left += engine.stats().host_bytes;
            }
            let grads = {
                let _backward = phase::enter("backward", None);
                GradientsParams::from_grads(loss.backward(), &model)
            };
            let grads = match &fsdp {
                Some(fsdp) => fsdp.finish(grads, &model)?,
                None => sum_gradients(grads, &model, &world)?,
            };
            let mut all = Bits { grads: &grads, bits: &mut bits };
            model.visit(&mut all);
        }
        drop(fsdp);
        let timeline = profiler.map(|profiler| profiler.finish());
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Outcome { timeline, traffic: world.traffic(), bits, left })
    })
    .unwrap()
}

#[test]
fn a_real_step_has_every_block_in_both_directions_and_is_the_same_as_without() {
    let settings = [
        Setting { checkpoint: Some(1), ..Setting::default() },
        Setting::default(),
        Setting { checkpoint: Some(1), fsdp: true, ..Setting::default() },
        Setting { checkpoint: Some(2), offload: true, ..Setting::default() },
        Setting { checkpoint: Some(BLOCKS), fsdp: true, ..Setting::default() },
        Setting { checkpoint: Some(1), fsdp: true, offload: true },
    ];
    for setting in settings {
        let plain = step(setting, false);
        for (plain, again) in plain.iter().zip(step(setting, false)) {
            let differs = plain.bits.iter().zip(&again.bits).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{setting:?}: not the same twice, of {}", plain.bits.len());
        }
        let profiled = step(setting, true);
        for (plain, profiled) in plain.iter().zip(&profiled) {
            assert!(!plain.bits.is_empty());
            let differs = plain.bits.iter().zip(&profiled.bits).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{setting:?}: other bits, of {}", plain.bits.len());
            assert_eq!(plain.bits.len(), profiled.bits.len());
            assert_eq!(plain.traffic, profiled.traffic);
            assert_traffic(profiled.timeline.as_ref().unwrap(), &profiled.traffic);
            assert_copies(profiled.timeline.as_ref().unwrap(), setting, profiled.left);
        }
        let report = Report::new(profiled.into_iter().filter_map(|outcome| outcome.timeline));
        let numbered = report.numbered();
        for block in 0..BLOCKS {
            // In a group a block is computed again first, and pulled back when those behind it have been.
            let in_group = setting.checkpoint.is_some_and(|blocks| blocks > 1 && block / blocks * blocks + 1 < BLOCKS);
            assert_eq!(named(&numbered, &format!("block {block} forward")).count, 2, "{report}");
            let backward = if in_group { 4 } else { 2 };
            assert_eq!(named(&numbered, &format!("block {block} backward")).count, backward, "{report}");
        }
        for stage in 0..2 {
            for pass in ["forward", "backward"] {
                // Again in each backward pass, where blocks are recomputed.
                let again = if setting.checkpoint.is_some() && pass == "forward" { 2 } else { 1 };
                assert_eq!(named(&numbered, &format!("stage {stage} {pass}")).count, 2 * BLOCKS * again);
            }
        }
        let phases = report.phases();
        for name in
            ["embedding forward", "embedding backward", "loss forward", "loss backward", "mlp backward", "recompute"]
        {
            assert!(named(&phases, name).count > 0);
        }
        let recomputed = phases.iter().find(|phase| {
            phase.around.last().is_some_and(|last| last == "block backward") && phase.name == "recompute"
        });
        let expected = setting.checkpoint.map(|_| 2 * BLOCKS);
        assert_eq!(recomputed.map(|phase| phase.count), expected, "{report}");
        for timeline in report.ranks() {
            let within: f64 = timeline
                .spans
                .iter()
                .filter(|span| span.depth == 0 && span.thread == 0)
                .map(|span| span.duration.as_secs_f64())
                .sum();
            assert!(within > 0.0 && within <= timeline.wall().as_secs_f64());
            // Phases within one are not longer than it.
            for span in &timeline.spans {
                let inner: f64 = timeline
                    .spans
                    .iter()
                    .filter(|inner| {
                        inner.thread == span.thread
                            && inner.depth == span.depth + 1
                            && inner.start >= span.start
                            && inner.start + inner.duration <= span.start + span.duration
                    })
                    .map(|inner| inner.duration.as_secs_f64())
                    .sum();
                assert!(inner <= span.duration.as_secs_f64() + 1e-9);
            }
        }
        trace_is_whole(&report);
        page_stands_alone(&report);
    }
}

/// Every byte that was saved is copied twice, out and back, each in a phase `offload` of the thread that copies; nothing else is.
fn assert_copies(timeline: &Timeline, setting: Setting, left: usize) {
    let offload = timeline.spans.iter().filter(|span| timeline.phases[span.phase].kind == "offload");
    let (copies, waits): (Vec<&Span>, Vec<&Span>) = offload.partition(|span| span.copied > 0);
    let copied: u64 = copies.iter().map(|span| span.copied).sum();
    assert_eq!(copied, 2 * left as u64, "{setting:?}");
    assert!(copies.iter().all(|span| span.thread > 0 && span.depth == 0), "{setting:?}");
    assert!(waits.iter().all(|span| span.thread == 0), "{setting:?}");
    let Some(blocks) = setting.checkpoint.filter(|_| setting.offload) else {
        assert_eq!((left, copies.len() + waits.len()), (0, 0), "{setting:?}");
        return;
    };
    // [1, 7, 16] of each checkpoint, in both steps.
    let checkpoints = BLOCKS.div_ceil(blocks);
    assert_eq!((left, copies.len()), (2 * saved_bytes(checkpoints, 1, 7, 16, 4), 2 * 2 * checkpoints));
}

/// Complete events nest on each thread, and every span of the profile is one.
fn trace_is_whole(report: &Report) {
    let text = report.trace().to_string();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let number = |event: &serde_json::Value, name: &str| event[name].as_f64().unwrap();
    let mut open: HashMap<(u64, u64), Vec<f64>> = HashMap::new();
    let mut complete = 0;
    for event in events.iter().filter(|event| event["ph"] == "X") {
        complete += 1;
        let (begin, end) = (number(event, "ts"), number(event, "ts") + number(event, "dur"));
        let stack = open.entry((event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap())).or_default();
        while stack.last().is_some_and(|around| *around <= begin) {
            stack.pop();
        }
        // In microseconds with nanoseconds behind the point: as exact as a clock.
        assert!(stack.last().is_none_or(|around| end <= around + 1e-3), "{event} reaches out of what is around it");
        stack.push(end);
    }
    assert_eq!(complete, report.ranks().iter().map(|timeline| timeline.spans.len()).sum::<usize>());
    for rank in report.ranks() {
        let of_rank =
            |event: &&serde_json::Value| event["pid"] == rank.rank && event["ph"] == "C" && event["name"] == "memory";
        let counters: Vec<_> = events.iter().filter(of_rank).collect();
        assert_eq!(counters.len(), rank.samples.len());
        assert!(counters.iter().all(|event| event["args"]["in use"].is_u64() && event["args"]["reserved"].is_u64()));
        assert!(counters.windows(2).all(|pair| number(pair[0], "ts") <= number(pair[1], "ts")));
    }
}

/// Nothing is loaded from anywhere, and all that is opened is closed.
fn page_stands_alone(report: &Report) {
    let page = report.html();
    for loads in ["http:", "https:", "src=", "href=", "@import", "url(", "<script"] {
        assert!(!page.contains(loads), "{loads}");
    }
    assert!(page.contains("prefers-color-scheme: dark"));
    for tag in ["svg", "path", "title", "rect", "ul", "li", "span", "body", "html", "text", "style"] {
        let opened = page.matches(&format!("<{tag} ")).count() + page.matches(&format!("<{tag}>")).count();
        let selfclosed = if tag == "path" || tag == "rect" {
            page.split(&format!("<{tag} "))
                .skip(1)
                .filter(|rest| rest.split('>').next().unwrap().ends_with('/'))
                .count()
        } else {
            0
        };
        assert_eq!(opened - selfclosed, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    for timeline in report.ranks() {
        assert!(page.contains(&format!("<h2>rank {}: peak", timeline.rank)));
        for group in timeline.groups.iter().filter(|group| !["step", "backward"].contains(&group.as_str())) {
            assert!(page.contains(&format!("</span>{group}</li>")), "{group}");
        }
    }
}
