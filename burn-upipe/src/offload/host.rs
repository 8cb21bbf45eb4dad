//! Host memory in which tensors wait: maps of exactly the bytes asked for, used again by size.
//!
//! ```text
//! reserved <= max(what was used at once so far, what is used with this buffer)        and at most the budget
//! ```
//!
//! A buffer is made only where none of its size is free, and free ones of other sizes go for it: steps of many lengths take what the
//! longest of them needs, and not the sum over all lengths.
//!
//! Anonymous maps and not the heap: no power of two is taken for a little more than half of it, what is let go returns to the
//! system at once, and an allocator that counts a CPU device's memory does not count what has left that device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

/// A rank's host memory.
#[derive(Debug)]
pub(super) struct HostPool {
    budget: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Largest last.
    free: Vec<MmapMut>,
    counts: HostCounts,
}

/// What a pool has, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostCounts {
    /// Of tensors.
    pub used: usize,
    pub peak: usize,
    /// Of all buffers, free ones among them.
    pub reserved: usize,
    /// How often the system was asked for memory; what is only counted asks for none.
    pub allocations: usize,
}

/// A part of the pool; it returns there when it is dropped.
#[derive(Debug)]
pub(super) struct HostBuffer {
    pool: Arc<HostPool>,
    bytes: usize,
    /// `None`: only counted, the backend's own pinned memory holds the data.
    map: Option<MmapMut>,
}

impl HostPool {
    pub fn new(budget: Option<usize>) -> Arc<Self> {
        Arc::new(Self { budget: budget.unwrap_or(usize::MAX), state: Mutex::default() })
    }

    pub fn counts(&self) -> HostCounts {
        self.lock().counts
    }

    /// Room for `bytes`; `None` if the budget, or the system, has no more. `mapped`: with memory, and not only counted.
    pub fn reserve(self: &Arc<Self>, bytes: usize, mapped: bool) -> Option<HostBuffer> {
        let mut state = self.lock();
        if bytes > self.budget.saturating_sub(state.counts.used) {
            return None;
        }
        let map = match state.free.iter().position(|map| mapped && map.len() == bytes) {
            Some(at) => Some(state.free.remove(at)),
            None => {
                let needed = state.counts.peak.max(state.counts.used.saturating_add(bytes)).min(self.budget);
                // Others' buffers make room, the largest first.
                while state.counts.reserved.saturating_add(bytes) > needed {
                    let released = state.free.pop()?.len();
                    state.counts.reserved -= released;
                }
                let map = if mapped { Some(self.map(bytes, &mut state)?) } else { None };
                state.counts.reserved += bytes;
                map
            }
        };
        state.counts.used += bytes;
        state.counts.peak = state.counts.peak.max(state.counts.used);
        Some(HostBuffer { pool: self.clone(), bytes, map })
    }

    fn map(&self, bytes: usize, state: &mut State) -> Option<MmapMut> {
        let map = MmapMut::map_anon(bytes)
            .inspect_err(|error| {
                log::warn!("offload: no host memory for {bytes} bytes, as if the budget were used up: {error}")
            })
            .ok()?;
        state.counts.allocations += 1;
        Some(map)
    }

    /// Returns free buffers to the system.
    pub fn trim(&self) {
        let mut state = self.lock();
        let released: usize = state.free.drain(..).map(|map| map.len()).sum();
        state.counts.reserved -= released;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostBuffer {
    /// Its memory; `None` if it is only counted.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.map.as_deref_mut()
    }

    pub fn bytes(&self) -> Option<&[u8]> {
        self.map.as_deref()
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.counts.used -= self.bytes;
        match self.map.take() {
            Some(map) => {
                let at = state.free.partition_point(|free| free.len() <= map.len());
                state.free.insert(at, map);
            }
            None => state.counts.reserved -= self.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PyTorch's pinned pool rounded such sizes up to the next power of two: twice the memory of the plan.
    #[test]
    fn sizes_are_not_rounded_up() {
        let pool = HostPool::new(None);
        for exponent in [12, 20, 24] {
            let asked = (1 << exponent) + 4096;
            let before = pool.counts().reserved;
            let blocks: Vec<_> = (0..5).map(|_| pool.reserve(asked, true).unwrap()).collect();
            let reserved = pool.counts().reserved - before;
            assert!(reserved * 100 <= 5 * asked * 105, "{reserved} bytes for 5 x {asked}");
            assert!(blocks.iter().all(|block| block.bytes().unwrap().len() == asked));
        }
    }

    #[test]
    fn buffers_are_used_again() {
        let pool = HostPool::new(None);
        for _ in 0..3 {
            let blocks: Vec<_> = [64, 128, 64].map(|bytes| pool.reserve(bytes, true)).into_iter().collect();
            assert_eq!((pool.counts().used, blocks.len()), (256, 3));
        }
        assert_eq!(pool.counts(), HostCounts { used: 0, peak: 256, reserved: 256, allocations: 3 });
        pool.trim();
        assert_eq!(pool.counts().reserved, 0);
    }

    /// Batches as they come: each step's tensors have another length.
    #[test]
    fn steps_of_many_lengths_take_what_the_longest_needs() {
        let pool = HostPool::new(None);
        for length in (1000..1032).chain((1000..1032).rev()) {
            let step: Vec<_> = (0..8).map(|_| pool.reserve(length, true).unwrap()).collect();
            let counts = pool.counts();
            assert!(counts.reserved <= counts.peak, "{counts:?}");
            drop(step);
            assert!(pool.counts().reserved <= 8 * 1031, "{:?}", pool.counts());
        }
        // One length only: what is there is used.
        let before = pool.counts().allocations;
        for _ in 0..3 {
            drop((0..8).map(|_| pool.reserve(1000, true).unwrap()).collect::<Vec<_>>());
        }
        assert_eq!(pool.counts().allocations, before, "{:?}", pool.counts());
    }

    #[test]
    fn the_budget_is_kept_to_the_byte() {
        let pool = HostPool::new(Some(300));
        let (a, b) = (pool.reserve(100, true), pool.reserve(200, true));
        assert!(a.is_some() && b.is_some());
        assert!(pool.reserve(1, true).is_none() && pool.reserve(1, false).is_none());
        drop(b);
        // Of another size: the free one makes room.
        let c = pool.reserve(199, true);
        assert!(c.is_some() && pool.reserve(2, true).is_none() && pool.reserve(1, false).is_some());
        assert_eq!(pool.counts().reserved, 299);
        drop((a, c));
        assert!(pool.reserve(301, true).is_none());
        assert!(HostPool::new(Some(0)).reserve(1, true).is_none());
    }
}
