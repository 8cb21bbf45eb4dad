//! What one rank has recorded: a value, without a clock or a device.

use std::time::{Duration, Instant};

use super::source::Memory;

/// One rank's recording.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The rank.
    pub rank: usize,
    /// Where its memory was read from.
    pub source: &'static str,
    /// When the rank's clock was zero.
    pub(crate) origin: Instant,
    /// What was recorded from when to when.
    pub windows: Vec<(Duration, Duration)>,
    /// All phases that there were, each after the one around it.
    pub phases: Vec<Phase>,
    /// Names of what memory is told apart by, for [`Sample::alive`].
    pub groups: Vec<String>,
    /// Phases that have ended, in the order of their ends.
    pub spans: Vec<Span>,
    /// What memory was from one begin or end of a phase to the next, in order.
    pub samples: Vec<Sample>,
}

impl Timeline {
    /// How long was recorded.
    pub fn wall(&self) -> Duration {
        self.windows.iter().map(|(begin, end)| end.saturating_sub(*begin)).sum()
    }

    /// A phase and those around it, from the outside in.
    pub fn path(&self, phase: usize) -> Vec<&Phase> {
        let mut path: Vec<&Phase> =
            std::iter::successors(Some(phase), |phase| self.phases[*phase].around).map(|at| &self.phases[at]).collect();
        path.reverse();
        path
    }
}

/// A phase, wherever it is run: all spans of it are in one place of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    /// The one around it.
    pub around: Option<usize>,
    /// Its name and pass: `block backward`.
    pub kind: String,
    /// Which one.
    pub index: Option<u64>,
    /// Its name, number and pass: `block 3 backward`.
    pub label: String,
    /// What its memory counts for, in [`Timeline::groups`].
    pub group: usize,
}

/// One run of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which one, in [`Timeline::phases`].
    pub phase: usize,
    /// 0: the rank's own thread.
    pub thread: usize,
    /// How many phases are around it.
    pub depth: usize,
    /// When it began.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// Memory when it began.
    pub begin: Memory,
    /// Memory when it ended.
    pub end: Memory,
    /// The most in use at once.
    pub peak: u64,
    /// The most reserved; `None` where that cannot be told.
    pub reserved: Option<u64>,
    /// Bytes sent to other ranks, phases within included.
    pub sent: u64,
    /// Bytes received from them.
    pub received: u64,
    /// Bytes copied, to the host or back.
    pub copied: u64,
}

/// Memory from one moment to another, between which no phase began or ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// From when.
    pub from: Duration,
    /// To when.
    pub to: Duration,
    /// The phase that the rank's own thread was in.
    pub phase: Option<usize>,
    /// The most in use at once.
    pub peak: u64,
    /// At its end.
    pub memory: Memory,
    /// At its end, by the phase in which it was allocated, in [`Timeline::groups`]; empty without the counting allocator.
    pub alive: Vec<u64>,
}
