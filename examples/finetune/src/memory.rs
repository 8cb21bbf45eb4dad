//! What a step will take by the planner, and what it took by the allocator's count: of the rank that holds the most.

use std::thread;

use burn::tensor::Device;
use burn_upipe::offload::{OffloadPolicy, Place};
use burn_upipe::plan::{
    self, Accounting, Attention, Bytes, PlanError, Setup, StatePlace, Techniques, WaitingPlace, memory,
};
use burn_upipe::profile::heap;
use burn_upipe::upipe::AttentionScheme;
use gemm_common::cache::CACHE_INFO;
use llama::Devices;
use llama::device::Runtime;

use crate::deal::rounds;
use crate::offload::{OffloadPlan, Waited};
use crate::plan::Plan;
use crate::values::Precision;

/// Tokens from which matrix products run on several threads.
const WORKERS: usize = 512;

/// The plan as the planner reads it.
pub(crate) fn setup(plan: &Plan) -> Setup {
    let (config, parallel) = (&plan.config, &plan.parallel);
    let model = config.shape("");
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut accounting = Accounting::flex(threads);
    // Of this machine: from half a mebibyte to two, much beside a small model.
    accounting.overhead = CACHE_INFO[1].cache_bytes;
    // Alone a rank has all of the heap for its own, and with it what the workers of long matrix products keep.
    if plan.ranks == 1 && plan.seq_len * plan.batch >= WORKERS {
        accounting.overhead *= 1 + threads;
    }
    // The last good weights.
    accounting.copies = 4;
    if plan.precision == Precision::Bf16 {
        accounting.compute = 2;
    }
    let micro_batches = rounds(plan.order.per_step, plan.mesh.data, plan.batch);
    Setup {
        seq_len: plan.seq_len,
        batch: plan.batch.min(plan.order.per_step.div_ceil(plan.mesh.data)),
        accumulate: micro_batches,
        mesh: plan.mesh,
        techniques: Techniques {
            attention: match parallel.attention {
                AttentionScheme::Single => Attention::Single,
                AttentionScheme::Ulysses => Attention::Ulysses,
                AttentionScheme::UPipe { heads_per_stage } => Attention::UPipe { per_stage: heads_per_stage },
            },
            checkpoint: parallel.checkpoint.then_some(parallel.blocks_per_checkpoint),
            mlp_tile: parallel.mlp_tile,
            norm_tile: parallel.norm_tile,
            loss_tile: parallel.loss_tile,
            offload: plan.offload.as_ref().map(|offload| offloaded(offload, plan.ranks)),
            fsdp: plan.fsdp,
            prefetch: plan.fsdp,
            optimizer: StatePlace::Device,
        },
        accounting,
        model,
    }
}

fn offloaded(offload: &OffloadPlan, ranks: usize) -> plan::OffloadPlan {
    let (every, keep) = match offload.policy {
        OffloadPolicy::None => (1, usize::MAX),
        OffloadPolicy::All => (1, 0),
        OffloadPolicy::Every(every) => (every, 0),
        OffloadPolicy::Budget(bytes) => (1, bytes / ranks),
    };
    let place = match offload.place {
        Place::Host => WaitingPlace::Host,
        Place::Disk => WaitingPlace::Disk,
    };
    let share = |bytes: usize| bytes / ranks;
    plan::OffloadPlan {
        in_flight: offload.in_flight,
        every,
        keep,
        host_budget: offload.host_budget.map(share).filter(|_| place == WaitingPlace::Host),
        disk_budget: match (place, offload.disk_budget) {
            (_, Some(bytes)) => Some(share(bytes as usize)),
            // A folder without a limit.
            (WaitingPlace::Host, None) => offload.folder.is_some().then_some(usize::MAX),
            (WaitingPlace::Disk, None) => None,
        },
        place,
    }
}

/// Bytes at the peak of a step on the rank that holds the most, and the phase in which it is.
pub(crate) fn planned(plan: &Plan) -> Result<(usize, &'static str), PlanError> {
    let planned = memory(&setup(plan))?;
    let peak = planned.peak().expect("a step has phases");
    Ok((peak.total(), peak.name))
}

/// For people.
pub(crate) fn line(plan: &Plan) -> String {
    // The planner knows Flex's kernels and its heap; what other runtimes need beside tensors nobody has counted.
    let on = match plan.device.runtime().is_heap() {
        true => "",
        false => "; as it is on flex, the pools of this device are not planned",
    };
    match planned(plan) {
        Ok((bytes, phase)) => {
            format!("{} planned for a rank at the peak of a step, in its {phase} phase{on}", Bytes(bytes))
        }
        Err(error) => format!("not planned: {error}"),
    }
}

/// The planner's phases beside the profiler's: of those, the ones that nothing but a step is around.
pub(crate) const PHASES: [(&str, &[&str]); 7] = [
    ("embedding", &["embedding forward"]),
    ("forward", &["block forward"]),
    ("loss", &["norm forward", "loss forward"]),
    ("loss backward", &["loss backward", "norm backward"]),
    ("backward", &["block backward"]),
    ("embedding backward", &["embedding backward"]),
    ("optimizer", &["gradient sum", "clip", "optimizer"]),
];

/// [`PHASES`] by what was planned and what was counted, for people.
pub(crate) fn by_phase(plan: &Plan, counted: &[(&'static str, usize)]) -> String {
    let planned = match memory(&setup(plan)) {
        Ok(memory) => memory.phases,
        Err(error) => return format!("\nphases are not planned: {error}"),
    };
    let mut text = format!("\n{:<20}{:>12}{:>12}", "memory by phase", "counted", "planned");
    for (name, counted) in counted {
        let Some(planned) = planned.iter().find(|phase| phase.name == *name).map(|phase| phase.total()) else {
            continue;
        };
        text += &format!("\n{name:<20}{:>12}{:>12}{}", Bytes(*counted), Bytes(planned), off(planned, *counted));
    }
    text
}

/// What of block inputs was planned to wait, and what has waited, for people.
pub(crate) fn waited(plan: &Plan, waited: Waited) -> String {
    let (host, disk) = match memory(&setup(plan)) {
        Ok(memory) => (memory.host, memory.disk),
        Err(error) => return format!("what waits is not planned: {error}"),
    };
    let one = |counted: usize, planned: usize| {
        format!("{} counted, {} planned{}", Bytes(counted), Bytes(planned), off(planned, counted))
    };
    format!(
        "block inputs of a rank that waited: in host memory {}; on disk {}",
        one(waited.host, host),
        one(waited.disk, disk)
    )
}

/// By how much a plan is off.
fn off(planned: usize, counted: usize) -> String {
    match counted {
        0 => String::new(),
        counted => format!(" ({:+.1} %)", 100.0 * (planned as f64 / counted as f64 - 1.0)),
    }
}

/// What was planned beside what was counted, for people.
pub(crate) fn beside(plan: &Plan, counted: usize) -> String {
    if !plan.device.runtime().is_heap() {
        let (device, bytes) = (&plan.device, Bytes(counted));
        return format!(
            "\nmemory of {device}: its pools hold {bytes} for all ranks, in use or kept for reuse; to be compared with no plan"
        );
    }
    let planned = match planned(plan) {
        Ok((bytes, _)) => format!("{} planned{}", Bytes(bytes), off(bytes, counted)),
        Err(error) => format!("not planned: {error}"),
    };
    // The optimizer's state, and weights that a rank has made itself.
    let early = if plan.steps < 3 { "; what is planned is there from the third step on" } else { "" };
    format!("\nmemory of a rank at its peak: {} counted, {planned}{early}", Bytes(counted))
}

/// The most that one rank held since the last [`heap::reset_peak`]; of devices with pools what all ranks' pools hold now. `None` if nothing
/// counts.
pub(crate) fn counted(ranks: usize, devices: &Devices) -> Option<usize> {
    if !devices.list().runtime().is_heap() {
        return pools(devices);
    }
    // A rank's first weights were made before it was there, so that alone all of the heap is its own.
    let most = if ranks == 1 { heap::peak() } else { (0..ranks).map(heap::peak_by).max().unwrap_or(0) };
    (most > 0).then_some(most)
}

/// The most of the heap since the last [`heap::reset_peak`], or what the devices' pools hold now; 0 if nothing counts.
pub(crate) fn peak(devices: &Devices) -> usize {
    match devices.list().runtime().is_heap() {
        true => heap::peak(),
        false => pools(devices).unwrap_or(0),
    }
}

/// What the pools of all devices hold: no peak is counted there, but pools keep what was needed once.
fn pools(devices: &Devices) -> Option<usize> {
    let held = |device: &Device| {
        let usage = device.clone().inner().memory_pool_usage();
        usage.map(|usage| usage.bytes_reserved as usize)
    };
    devices.all().iter().map(held).sum()
}

/// What the number of a step is called.
pub(crate) fn name(runtime: Runtime) -> &'static str {
    if runtime.is_heap() { "peak" } else { "reserved" }
}
