//! What is alive while a step is walked through on paper.

use std::collections::BTreeMap;

/// One phase where it holds the most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseBytes {
    /// `forward`, `loss`, `backward`, `optimizer`, ...
    pub name: &'static str,
    /// What is alive at its peak, by part.
    pub parts: BTreeMap<&'static str, usize>,
}

impl PhaseBytes {
    /// Bytes at its peak.
    pub fn total(&self) -> usize {
        self.parts.values().sum()
    }
}

/// Bytes of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// In the order in which a step goes through them.
    pub phases: Vec<PhaseBytes>,
    /// In host memory: offloaded inputs, and optimizer state where it is there.
    pub host: usize,
    /// On disk.
    pub disk: usize,
}

impl Memory {
    /// The phase that holds the most.
    pub fn peak(&self) -> Option<&PhaseBytes> {
        self.phases.iter().max_by_key(|phase| phase.total())
    }
}

/// What is alive, and the most of it in each phase.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    alive: BTreeMap<&'static str, usize>,
    phases: Vec<PhaseBytes>,
}

impl Ledger {
    /// Goes on in a phase; one that was there before is gone on with.
    pub fn phase(&mut self, name: &'static str) {
        match self.phases.iter().position(|phase| phase.name == name) {
            Some(at) => {
                let phase = self.phases.remove(at);
                self.phases.push(phase);
            }
            None => self.phases.push(PhaseBytes { name, parts: BTreeMap::new() }),
        }
        self.note();
    }

    /// Allocates.
    pub fn take(&mut self, part: &'static str, bytes: usize) {
        *self.alive.entry(part).or_default() += bytes;
        self.note();
    }

    /// Frees.
    pub fn free(&mut self, part: &'static str, bytes: usize) {
        let alive = self.alive.entry(part).or_default();
        *alive = alive.checked_sub(bytes).expect("a walk frees what it took");
    }

    /// Allocated and freed at once.
    pub fn flash(&mut self, part: &'static str, bytes: usize) {
        self.take(part, bytes);
        self.free(part, bytes);
    }

    pub fn into_phases(self) -> Vec<PhaseBytes> {
        self.phases
    }

    fn note(&mut self) {
        let now: usize = self.alive.values().sum();
        if let Some(phase) = self.phases.last_mut()
            && now >= phase.total()
        {
            phase.parts =
                self.alive.iter().filter(|(_, bytes)| **bytes > 0).map(|(part, bytes)| (*part, *bytes)).collect();
        }
    }
}
