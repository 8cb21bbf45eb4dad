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

/// Bytes by part, in the order in which parts first came.
type Parts = Vec<(&'static str, usize)>;

/// What is alive, and the most of it in each phase. A search keeps a hundred thousand of these: an entry costs some nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    alive: Parts,
    total: usize,
    phases: Vec<Entry>,
}

/// A phase where it holds the most.
#[derive(Debug)]
struct Entry {
    name: &'static str,
    total: usize,
    parts: Parts,
}

impl Ledger {
    /// Goes on in a phase; one that was there before is gone on with.
    pub fn phase(&mut self, name: &'static str) {
        let at = self.phases.iter().position(|phase| phase.name == name);
        let phase = at.map_or_else(|| Entry { name, total: 0, parts: Vec::new() }, |at| self.phases.remove(at));
        self.phases.push(phase);
        self.note();
    }

    /// Allocates.
    pub fn take(&mut self, part: &'static str, bytes: usize) {
        *self.part(part) += bytes;
        self.total += bytes;
        self.note();
    }

    /// Frees.
    pub fn free(&mut self, part: &'static str, bytes: usize) {
        let alive = self.part(part);
        *alive = alive.checked_sub(bytes).expect("a walk frees what it took");
        self.total -= bytes;
    }

    /// Allocated and freed at once.
    pub fn flash(&mut self, part: &'static str, bytes: usize) {
        self.take(part, bytes);
        self.free(part, bytes);
    }

    pub fn into_phases(self) -> Vec<PhaseBytes> {
        let there = |parts: Parts| parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        self.phases.into_iter().map(|phase| PhaseBytes { name: phase.name, parts: there(phase.parts) }).collect()
    }

    fn part(&mut self, part: &'static str) -> &mut usize {
        let at = self.alive.iter().position(|(name, _)| *name == part).unwrap_or_else(|| {
            self.alive.push((part, 0));
            self.alive.len() - 1
        });
        &mut self.alive[at].1
    }

    fn note(&mut self) {
        if let Some(phase) = self.phases.last_mut()
            && self.total >= phase.total
        {
            phase.total = self.total;
            phase.parts.clone_from(&self.alive);
        }
    }
}
