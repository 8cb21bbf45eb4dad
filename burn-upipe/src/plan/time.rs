//! How long a step takes: an estimate, with its assumptions named.
//!
//! L local sequence, E width, F feed-forward width, H query heads, G key/value heads, D head dimension, V vocabulary.

use super::traffic::{TrafficKind, most};
use super::walk::offloaded;
use super::{DeviceKind, Flops, KindTraffic, Machines, PlanError, Setup, StatePlace, flops};

/// What matrix products achieve of a GPU's dense peak in training steps like these. Fitted together with [`GPU_ATTENTION`], once, to the
/// published tokens/s of Ulysses and U-Pipe on 8 H100 (arXiv 2602.21196; Llama 3 8B, 128K to 5M tokens): it stands for everything that
/// grows with the first power of the sequence.
pub const GPU_MATMUL: f64 = 0.40;
/// What attention achieves of it: what grows with the sequence's square.
pub const GPU_ATTENTION: f64 = 0.65;
/// Seconds that a collective takes beside its bytes.
const LATENCY: f64 = 20e-6;
/// Bytes a second of a host's own memory, for an optimizer that runs there, all cores together.
const HOST_MEMORY_BANDWIDTH: f64 = 2e11;

/// Seconds of one step of the slowest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Matrix products and attention.
    pub compute: f64,
    /// Reading and writing device memory: weights, activations element by element, optimizer.
    pub memory: f64,
    /// Collectives that nothing hides.
    pub communication: f64,
    /// Copies between device and host or disk that computation does not hide.
    pub offload: f64,
    /// Gradients, weights and the optimizer's arithmetic, where its state is on the host.
    pub optimizer: f64,
}

impl StepTime {
    /// `max(compute, memory) + communication + offload + optimizer`.
    pub fn seconds(&self) -> f64 {
        self.compute.max(self.memory) + self.communication + self.offload + self.optimizer
    }
}

/// The time of one step.
///
/// # Errors
///
/// [`PlanError`] if the setup cannot run on so many devices.
///
/// ```
/// use burn_upipe::plan::{Machines, Setup, device, model, time};
///
/// let machines = Machines { hardware: device("h100-80g")?, count: 8 };
/// let time = |len| time(&Setup::published(model("llama-3-8b").unwrap(), len, 8), &machines);
/// // Twice the sequence, nearly four times the work.
/// assert!(time(1 << 21)?.seconds() > 3.5 * time(1 << 20)?.seconds());
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn time(setup: &Setup, machines: &Machines) -> Result<StepTime, PlanError> {
    Ok(of(setup, machines, &flops(setup)?, &most(setup)?))
}

pub(super) fn of(setup: &Setup, machines: &Machines, flops: &Flops, traffic: &[KindTraffic]) -> StepTime {
    let hardware = &machines.hardware;
    // Ranks that are threads share the cores and what feeds them.
    let ranks = if hardware.kind == DeviceKind::Cpu { machines.on_host() as f64 } else { 1.0 };
    let matmul = (flops.matmul + flops.matmul_again) / hardware.matmul_fraction;
    let attention = (flops.attention + flops.attention_again) / hardware.attention_fraction;
    let compute = ranks * (matmul + attention) / hardware.flops;
    let memory = ranks * device_bytes(setup) / hardware.memory_bandwidth;
    let busy = compute.max(memory);

    let mut time = StepTime { compute, memory, ..StepTime::default() };
    for part in traffic {
        let ranks = if part.kind == TrafficKind::Attention { setup.mesh.ulysses } else { setup.ranks() };
        let rate = if ranks > hardware.per_host { hardware.network } else { hardware.link };
        let seconds = part.sent as f64 / rate + part.calls as f64 * LATENCY;
        // Weights come while others are in use.
        let hidden = part.kind == TrafficKind::Gather && setup.techniques.prefetch;
        time.communication += if hidden { (seconds - busy).max(0.0) } else { seconds };
    }
    let sharing = machines.on_host() as f64;
    // Out in the forward pass, in again in the backward pass; a setup that cannot run takes nothing.
    let (host, disk) = offloaded(setup).unwrap_or_default();
    let to_disk = hardware.host_link.min(hardware.disk_bandwidth / sharing);
    let moving = 2.0 * setup.accumulate as f64 * (host as f64 / hardware.host_link + disk as f64 / to_disk);
    time.offload = if moving > 0.0 { (moving - busy).max(0.0) } else { 0.0 };
    if setup.techniques.optimizer == StatePlace::Host {
        let (shard, accounting) = (shard(setup) as f64, &setup.accounting);
        let moved = (accounting.gradient + accounting.weight) as f64;
        let touched = (accounting.gradient + 2 * (accounting.weight + accounting.optimizer)) as f64;
        time.optimizer = shard * (moved / hardware.host_link + touched * sharing / HOST_MEMORY_BANDWIDTH);
    }
    time
}

/// Elements of parameters that a rank keeps.
fn shard(setup: &Setup) -> usize {
    let ranks = if setup.techniques.fsdp { setup.ranks() } else { 1 };
    setup.model.parameters().div_ceil(ranks)
}

/// Bytes of device memory that are read and written: a forward pass touches each block's x some ten times, q, k, v and the
/// feed-forward's inner values a few times each; a backward pass twice as much; weights once a pass, the optimizer's state once a step.
fn device_bytes(setup: &Setup) -> f64 {
    let (model, techniques, accounting) = (&setup.model, &setup.techniques, &setup.accounting);
    let token = 10 * model.width + 4 * (model.heads + 2 * model.kv_heads) * model.head_dim + 5 * model.inner;
    let tokens = setup.batch as f64 * setup.accumulate as f64 * setup.local() as f64;
    let forward = tokens * token as f64 * accounting.compute as f64 * model.layers as f64;
    let passes = if techniques.checkpoint.is_some() { 4.0 } else { 3.0 };
    let logits = tokens * model.vocab as f64 * 4.0 * if techniques.loss_tile.is_some() { 6.0 } else { 5.0 };
    let weights = setup.accumulate as f64 * passes * (model.parameters() * accounting.compute) as f64;
    let states = if techniques.optimizer == StatePlace::Device {
        2.0 * (shard(setup) * (accounting.weight + accounting.gradient + accounting.optimizer)) as f64
    } else {
        0.0
    };
    passes * forward + logits + weights + states
}

/// What an estimate takes for granted, in words.
pub(super) fn assumptions(machines: &Machines) -> Vec<String> {
    let hardware = &machines.hardware;
    let percent = |fraction: f64| format!("{:.0} %", 100.0 * fraction);
    let memory = match hardware.kind {
        DeviceKind::Cpu => "memory is that of Burn's Flex backend, whose ranks are threads",
        _ => {
            "memory is as in published runs on GPUs: exchanges are copied, attention keeps its scratch on the chip, silu keeps one tensor; \
             driver, communicators and gaps are a guess"
        }
    };
    vec![
        memory.to_owned(),
        format!(
            "matrix products achieve {} and attention {} of {:.1} TFLOP/s{}",
            percent(hardware.matmul_fraction),
            percent(hardware.attention_fraction),
            hardware.flops / 1e12,
            if hardware.kind == DeviceKind::Gpu { ", fitted once to published steps on H100" } else { ", a guess" }
        ),
        format!("device memory moves {:.2} GB/s", hardware.memory_bandwidth / 1e9),
        format!(
            "ranks of one host send {:.2} GB/s, those of others {:.2} GB/s, and a collective takes {:.0} us beside its bytes",
            hardware.link / 1e9,
            hardware.network / 1e9,
            LATENCY * 1e6
        ),
        format!(
            "device and host exchange {:.2} GB/s, a host's disk {:.2} GB/s for all of its ranks",
            hardware.host_link / 1e9,
            hardware.disk_bandwidth / 1e9
        ),
        "prefetched weights and offloaded inputs move while others compute; attention's exchanges, sums and the loss do not".to_owned(),
        "attention is causal over the whole sequence: windows and documents are not taken off".to_owned(),
    ]
}
