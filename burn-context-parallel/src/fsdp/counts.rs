//! How often blocks were gathered and reduced.

use std::sync::atomic::{AtomicU64, Ordering};

/// What one rank has done since its [`Fsdp`](super::Fsdp) was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsdpCounts {
    /// Units gathered: blocks at once, other parameters one by one.
    pub gathers: u64,
    /// How many of these had been fetched while something else computed.
    pub prefetched: u64,
    /// Units whose gradients were summed over ranks.
    pub reduces: u64,
}

impl std::ops::Sub for FsdpCounts {
    type Output = Self;

    /// What happened between two readings.
    fn sub(self, before: Self) -> Self {
        Self {
            gathers: self.gathers - before.gathers,
            prefetched: self.prefetched - before.prefetched,
            reduces: self.reduces - before.reduces,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    gathers: AtomicU64,
    prefetched: AtomicU64,
    reduces: AtomicU64,
}

impl Counts {
    pub(super) fn gathered(&self) {
        self.gathers.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn prefetched(&self) {
        self.prefetched.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn reduced(&self) {
        self.reduces.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> FsdpCounts {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        FsdpCounts { gathers: read(&self.gathers), prefetched: read(&self.prefetched), reduces: read(&self.reduces) }
    }
}
