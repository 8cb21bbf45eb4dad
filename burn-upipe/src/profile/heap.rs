//! A counting allocator that a program may install: the exact number of heap bytes alive, and their peak.
//!
//! On a CPU device tensors are ordinary heap memory, so this counts them all, of every rank in the process. A library never
//! installs an allocator; a program does:
//!
//! ```
//! use burn_upipe::profile::heap::{self, CountingAllocator};
//!
//! #[global_allocator]
//! static HEAP: CountingAllocator = CountingAllocator;
//!
//! let (sum, peak) = heap::peak_of(|| vec![1u8; 1 << 20].iter().map(|byte| u64::from(*byte)).sum::<u64>());
//! assert_eq!(sum, 1 << 20);
//! assert!(peak >= 1 << 20 && peak < (1 << 20) + 4096);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

// A process has one global allocator, and this is its count.
static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn grow(bytes: usize) {
    let now = IN_USE.fetch_add(bytes, Relaxed) + bytes;
    // Almost every allocation is below the peak; a plain load keeps the cache line shared then.
    if now > PEAK.load(Relaxed) {
        PEAK.fetch_max(now, Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator with the same arguments; counting touches no memory of the caller.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Old and new may be alive together while their contents are copied.
        grow(size);
        // SAFETY: as above.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        IN_USE.fetch_sub(if moved.is_null() { size } else { layout.size() }, Relaxed);
        moved
    }
}

/// Heap bytes alive now; 0 if [`CountingAllocator`] is not installed.
pub fn in_use() -> usize {
    IN_USE.load(Relaxed)
}

/// The most heap bytes alive at once since the start or the last [`reset_peak`].
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// Starts a new peak from what is alive now.
pub fn reset_peak() {
    PEAK.store(in_use(), Relaxed);
}

/// Runs `f`; its result, and the most bytes that were alive above those at the start. Whatever other threads allocate
/// meanwhile counts as well.
pub fn peak_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = in_use();
    reset_peak();
    let result = f();
    (result, peak().saturating_sub(before))
}
