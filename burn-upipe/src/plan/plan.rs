//! The answer: what one setup takes on some devices, as a value that prints itself.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::traffic::most;
use super::{
    Budget, Bytes, Flops, Machines, Memory, PlanError, Seconds, Setup, StepTime, Tokens, flops, longest, memory, time,
};

/// What a setup runs into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The memory of a device.
    DeviceMemory,
    /// The memory of a host.
    HostMemory,
    /// The disk of a host.
    Disk,
    /// The time that a step may take.
    Time,
    /// None of them.
    None,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DeviceMemory => "device memory",
            Self::HostMemory => "host memory",
            Self::Disk => "disk",
            Self::Time => "time",
            Self::None => "none",
        })
    }
}

/// One phase of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Its name.
    pub name: &'static str,
    /// The most that it holds.
    pub bytes: usize,
    /// Of what.
    pub parts: BTreeMap<&'static str, usize>,
}

/// One kind of collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Collective {
    /// Why ranks talk.
    pub kind: &'static str,
    /// The operation.
    pub operation: &'static str,
    /// How often a step calls it.
    pub calls: usize,
    /// Bytes that a rank sends in a step.
    pub bytes: usize,
}

/// Operations of one rank in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlannedFlops {
    /// Matrix products.
    pub matmul: f64,
    /// Attention.
    pub attention: f64,
    /// Of both what is computed again, on top.
    pub again: f64,
    /// All.
    pub total: f64,
}

/// Where a step's time goes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlannedSeconds {
    /// If only computing took time.
    pub compute: f64,
    /// If only device memory took time. The larger of the two counts.
    pub memory: f64,
    /// Communication that nothing hides.
    pub communication: f64,
    /// Offload that nothing hides.
    pub offload: f64,
    /// The optimizer, where it is on the host.
    pub optimizer: f64,
}

/// What one step takes. Bytes are those of one rank, the one that holds the most.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Whether it is within all limits.
    pub fits: bool,
    /// What it runs into; if it fits, what a longer sequence would run into.
    pub binding_limit: Limit,
    /// The longest sequence within the limits, everything else as it is; 0 if there is none.
    pub max_seq_len: usize,
    /// Bytes of device memory where the step holds the most.
    pub device_bytes_peak: usize,
    /// Bytes that a rank has on its device.
    pub device_bytes_limit: usize,
    /// Bytes of host memory.
    pub host_bytes: usize,
    /// Bytes that a rank has in host memory.
    pub host_bytes_limit: usize,
    /// Bytes on disk.
    pub disk_bytes: usize,
    /// Bytes that a rank has on disk.
    pub disk_bytes_limit: usize,
    /// In which phase a step holds the most.
    pub peak_phase: &'static str,
    /// Of what, there: adds up to `device_bytes_peak`.
    pub parts: BTreeMap<&'static str, usize>,
    /// All phases, in order.
    pub phases: Vec<Phase>,
    /// What crosses between ranks.
    pub collectives: Vec<Collective>,
    /// What is computed.
    pub flops: PlannedFlops,
    /// Seconds of a step.
    pub seconds: f64,
    /// Where they go.
    pub seconds_by_part: PlannedSeconds,
    /// Tokens a second and device.
    pub tokens_per_second_per_device: f64,
    /// The model.
    pub model: String,
    /// Its parameters.
    pub parameters: usize,
    /// The device.
    pub device: String,
    /// How many.
    pub devices: usize,
    /// How they are divided.
    pub mesh: String,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Tokens of a rank.
    pub local_len: usize,
    /// Sequences side by side.
    pub batch: usize,
    /// Micro-batches a step.
    pub accumulate: usize,
    /// What is on.
    pub techniques: String,
    /// Query heads a stage.
    pub heads_per_stage: Option<usize>,
    /// What the time takes for granted.
    pub assumptions: Vec<String>,
}

/// Plans one step of `setup`. `seconds` is the most that it may take.
///
/// # Errors
///
/// [`PlanError`] if the setup cannot run, or not on so many devices. That it does not fit is an answer, and no error.
///
/// ```
/// use burn_upipe::plan::{Limit, Machines, Setup, device, model, plan};
///
/// let machines = Machines { hardware: device("rtx4090-24g")?, count: 1 };
/// let setup = Setup::published(model("llama-3-70b")?, 1 << 20, 1);
/// let plan = plan(&setup, &machines, None)?;
/// assert!(!plan.fits);
/// assert_eq!(plan.binding_limit, Limit::DeviceMemory);
/// assert!(plan.to_string().contains("does not fit"));
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn plan(setup: &Setup, machines: &Machines, seconds: Option<f64>) -> Result<Plan, PlanError> {
    setup.check_on(machines)?;
    let budget = machines.budget();
    let (memory, flops, traffic) = (memory(setup)?, flops(setup)?, most(setup)?);
    let step = time::of(setup, machines, &flops, &traffic);
    let exceeded = exceeded(&memory, &budget).or_else(|| late(&step, seconds));
    let longest = longest(setup, machines, seconds)?;
    let peak = memory.peak();
    let sequences = setup.batch * setup.accumulate * setup.mesh.data;
    Ok(Plan {
        fits: exceeded.is_none(),
        binding_limit: exceeded.unwrap_or(longest.limit),
        max_seq_len: longest.seq_len,
        device_bytes_peak: peak.map_or(0, |phase| phase.total()),
        device_bytes_limit: budget.device,
        host_bytes: memory.host,
        host_bytes_limit: budget.host,
        disk_bytes: memory.disk,
        disk_bytes_limit: budget.disk,
        peak_phase: peak.map_or("", |phase| phase.name),
        parts: peak.map(|phase| phase.parts.clone()).unwrap_or_default(),
        phases: memory
            .phases
            .iter()
            .map(|phase| Phase { name: phase.name, bytes: phase.total(), parts: phase.parts.clone() })
            .collect(),
        collectives: traffic
            .iter()
            .map(|part| Collective {
                kind: part.kind.name(),
                operation: part.operation.name(),
                calls: part.calls,
                bytes: part.sent,
            })
            .collect(),
        flops: planned(&flops),
        seconds: step.seconds(),
        seconds_by_part: PlannedSeconds {
            compute: step.compute,
            memory: step.memory,
            communication: step.communication,
            offload: step.offload,
            optimizer: step.optimizer,
        },
        tokens_per_second_per_device: (setup.seq_len * sequences) as f64 / step.seconds() / setup.ranks() as f64,
        model: setup.model.name.clone(),
        parameters: setup.model.parameters(),
        device: machines.hardware.name.clone(),
        devices: machines.count,
        mesh: format!("data={},ulysses={}", setup.mesh.data, setup.mesh.ulysses),
        seq_len: setup.seq_len,
        local_len: setup.local(),
        batch: setup.batch,
        accumulate: setup.accumulate,
        techniques: setup.techniques.to_string(),
        heads_per_stage: setup.per_stage(),
        assumptions: time::assumptions(machines),
    })
}

fn planned(flops: &Flops) -> PlannedFlops {
    PlannedFlops {
        matmul: flops.matmul,
        attention: flops.attention,
        again: flops.matmul_again + flops.attention_again,
        total: flops.total(),
    }
}

/// Which memory is not enough, the device's first.
pub(super) fn exceeded(memory: &Memory, budget: &Budget) -> Option<Limit> {
    let device = memory.peak().map_or(0, |phase| phase.total());
    if device > budget.device {
        Some(Limit::DeviceMemory)
    } else if memory.host > if budget.shared { budget.device - device } else { budget.host } {
        Some(Limit::HostMemory)
    } else if memory.disk > budget.disk {
        Some(Limit::Disk)
    } else {
        None
    }
}

/// Whether a step takes too long.
pub(super) fn late(step: &StepTime, seconds: Option<f64>) -> Option<Limit> {
    seconds.filter(|seconds| step.seconds() > *seconds).map(|_| Limit::Time)
}

impl Setup {
    /// [`check`](Self::check), and whether the mesh takes all devices.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check); [`PlanError::Invalid`] with the whole equation if the degrees do not multiply to the devices.
    pub fn check_on(&self, machines: &Machines) -> Result<(), PlanError> {
        self.check()?;
        Ok(self.mesh.check(machines.count)?)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} ({:.2} G parameters) on {} x {}, {}",
            self.model,
            self.parameters as f64 / 1e9,
            self.devices,
            self.device,
            self.mesh
        )?;
        writeln!(
            f,
            "{} tokens, {} a rank, batch {} x accumulate {}",
            self.seq_len, self.local_len, self.batch, self.accumulate
        )?;
        let stages = self.heads_per_stage.map(|heads| format!("; {heads} heads a stage")).unwrap_or_default();
        writeln!(f, "{}{stages}\n", self.techniques)?;

        let verdict = if self.fits { "fits" } else { "does not fit" };
        let because = match (self.fits, self.binding_limit) {
            (true, Limit::None) => "nothing here ends a longer sequence".to_owned(),
            (true, limit) => format!("a longer sequence than {} would run into {limit}", Tokens(self.max_seq_len)),
            (false, limit) if self.max_seq_len == 0 => format!("{limit}: no sequence does"),
            (false, limit) => {
                format!("{limit}: the longest that does is {} ({})", Tokens(self.max_seq_len), self.max_seq_len)
            }
        };
        writeln!(f, "{verdict}: {because}\n")?;

        writeln!(f, "{:<16}{:>12}{:>12}", "bytes a rank", "needed", "there")?;
        let rows = [
            ("device", self.device_bytes_peak, self.device_bytes_limit),
            ("host", self.host_bytes, self.host_bytes_limit),
            ("disk", self.disk_bytes, self.disk_bytes_limit),
        ];
        for (name, needed, there) in rows {
            writeln!(f, "{name:<16}{:>12}{:>12}", Bytes(needed), Bytes(there))?;
        }
        self.fmt_phases(f)?;
        if !self.collectives.is_empty() {
            writeln!(f, "\n{:<20}{:<18}{:>8}{:>14}", "a rank sends", "", "calls", "")?;
            for part in &self.collectives {
                writeln!(f, "{:<20}{:<18}{:>8}{:>14}", part.kind, part.operation, part.calls, Bytes(part.bytes))?;
            }
        }
        writeln!(
            f,
            "\na rank computes {:.3e} operations: matrix products {:.3e}, attention {:.3e}, of both once more {:.3e}",
            self.flops.total, self.flops.matmul, self.flops.attention, self.flops.again
        )?;
        let part = &self.seconds_by_part;
        writeln!(
            f,
            "a step takes about {}, {:.1} tokens/s a device: max(compute {}, memory {}) + communication {} + offload {} + \
             optimizer {}, if",
            Seconds(self.seconds),
            self.tokens_per_second_per_device,
            Seconds(part.compute),
            Seconds(part.memory),
            Seconds(part.communication),
            Seconds(part.offload),
            Seconds(part.optimizer)
        )?;
        self.assumptions.iter().try_for_each(|assumption| writeln!(f, "- {assumption}"))
    }
}

impl Plan {
    /// Parts in rows, phases in columns, each where it holds the most.
    fn fmt_phases(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<&str> = self.phases.iter().flat_map(|phase| phase.parts.keys().copied()).collect();
        names.sort_unstable();
        names.dedup();
        let first = names.iter().map(|name| name.len()).max().unwrap_or(0).max("on the device".len()) + 2;
        write!(f, "\n{:<first$}", "on the device")?;
        let width = |phase: &Phase| phase.name.len().max(11) + 2;
        for phase in &self.phases {
            let mark = if phase.name == self.peak_phase { "*" } else { "" };
            write!(f, "{:>width$}", format!("{}{mark}", phase.name), width = width(phase))?;
        }
        for name in names {
            write!(f, "\n{name:<first$}")?;
            for phase in &self.phases {
                let bytes = phase.parts.get(name).map(|bytes| Bytes(*bytes).to_string()).unwrap_or_default();
                write!(f, "{bytes:>width$}", width = width(phase))?;
            }
        }
        write!(f, "\n{:<first$}", "all")?;
        self.phases
            .iter()
            .try_for_each(|phase| write!(f, "{:>width$}", Bytes(phase.bytes).to_string(), width = width(phase)))?;
        writeln!(f)
    }
}
