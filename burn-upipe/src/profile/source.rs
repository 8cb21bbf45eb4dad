//! Where a rank's memory can be read from.

use burn::tensor::Device;

use super::heap;

/// What a rank holds at one moment, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// In use.
    pub in_use: u64,
    /// What the system has given for it, used or not; `None` where that cannot be told.
    pub reserved: Option<u64>,
}

/// Where a rank's memory can be read from. It is asked at the begin and the end of every phase.
pub trait MemorySource: Send {
    /// What it is, for the report.
    fn name(&self) -> &'static str;

    /// What there is now.
    fn read(&mut self) -> Memory;

    /// The most in use at once since this was last called; `None` if nobody counts, then the peak of a phase is the largest of what was
    /// [read](Self::read) in it.
    fn take_peak(&mut self) -> Option<u64>;
}

/// The rank's part of the heap, exact, peaks included: where programs install [`heap::CountingAllocator`] and tensors are heap memory.
/// Reserved is the resident set of the whole process.
#[derive(Clone, Copy, Debug)]
pub struct RankHeap {
    rank: usize,
}

impl RankHeap {
    /// That of `rank`; the profiler makes its threads [own](heap::own) what they allocate.
    pub fn new(rank: usize) -> Self {
        Self { rank }
    }
}

impl MemorySource for RankHeap {
    fn name(&self) -> &'static str {
        "heap of the rank; reserved: resident set of the process"
    }

    fn read(&mut self) -> Memory {
        Memory { in_use: heap::in_use_by(self.rank) as u64, reserved: resident() }
    }

    fn take_peak(&mut self) -> Option<u64> {
        Some(heap::take_peak_by(self.rank) as u64)
    }
}

/// The memory pools of a device that has some: those of CubeCL's runtimes.
///
/// They do not count their peak, so that of a phase is the largest of what was read in it: at its begin, at its end, and at every begin and
/// end of a phase within. What came and went between two of them is not in it; more phases see more. What is reserved is what the pools have
/// taken from the device; they keep what is freed, so the largest that it has been is the most that a device must have. Ranks that
/// share a device share its pools.
///
/// Reading waits until the device has done its work, so that times of phases are those of the work in them, and a profiled step takes
/// longer than others.
#[derive(Clone, Debug)]
pub struct DevicePools {
    device: Device,
}

impl DevicePools {
    /// Those of `device`; `None` if it has none, as Flex: see [`RankHeap`].
    pub fn new(device: &Device) -> Option<Self> {
        device.memory_pool_usage().map(|_| Self { device: device.clone() })
    }
}

impl MemorySource for DevicePools {
    fn name(&self) -> &'static str {
        "memory pools of the device"
    }

    fn read(&mut self) -> Memory {
        // What is fused but not submitted is not in the pools yet. A device that fails says so at the next operation.
        let _ = self.device.sync();
        let usage = self.device.memory_pool_usage();
        usage.map_or_else(Memory::default, |usage| Memory {
            in_use: usage.bytes_in_use,
            reserved: Some(usage.bytes_reserved),
        })
    }

    fn take_peak(&mut self) -> Option<u64> {
        None
    }
}

/// The resident set of the process, of all its ranks together: where nothing better is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResidentSet;

impl MemorySource for ResidentSet {
    fn name(&self) -> &'static str {
        "resident set of the process; reserved: its address space"
    }

    fn read(&mut self) -> Memory {
        memory_stats::memory_stats().map_or_else(Memory::default, |stats| Memory {
            in_use: stats.physical_mem as u64,
            reserved: Some(stats.virtual_mem as u64),
        })
    }

    fn take_peak(&mut self) -> Option<u64> {
        None
    }
}

/// Bytes of the process that are in physical memory; `None` where the system does not tell.
pub fn resident() -> Option<u64> {
    memory_stats::memory_stats().map(|stats| stats.physical_mem as u64)
}
