//! A counting allocator that a program may install: the exact number of heap bytes alive, and their peak, in all and per owner.
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
//!
//! Ranks that are threads share one heap, and their peaks need not fall together: how high the heap's own peak is
//! depends on who runs when. A thread that is [owned](own) by a rank has its allocations counted for that rank, until they are
//! freed, by whomever: the sum of the ranks' peaks is what as many devices would have needed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// How many owners are told apart, 0 among them: nobody.
pub const OWNERS: usize = 65;

/// Bytes in use, and the most of them at once.
struct Count {
    in_use: AtomicUsize,
    peak: AtomicUsize,
}

impl Count {
    const fn new() -> Self {
        Self { in_use: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    fn grow(&self, bytes: usize) {
        let now = self.in_use.fetch_add(bytes, Relaxed) + bytes;
        // Almost every allocation is below the peak; a plain load keeps the cache line shared then.
        if now > self.peak.load(Relaxed) {
            self.peak.fetch_max(now, Relaxed);
        }
    }

    fn shrink(&self, bytes: usize) {
        self.in_use.fetch_sub(bytes, Relaxed);
    }
}

// A process has one global allocator, and these are its counts.
static TOTAL: Count = Count::new();
static OWNED: [Count; OWNERS] = [const { Count::new() }; OWNERS];

thread_local! {
    // Const and without destructor: reading it allocates nothing, which an allocator must not do.
    static OWNER: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counted. Each allocation is 16 bytes larger than asked for, which are not counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// The allocation with room for its owner in front, and how much room that is.
fn padded(layout: Layout) -> Option<(Layout, usize)> {
    let room = layout.align().max(16);
    let size = layout.size().checked_add(room)?;
    Some((Layout::from_size_align(size, room).ok()?, room))
}

/// Writes the owner in front of `base + room`, which it returns.
///
/// # Safety
///
/// `base` is null or the start of an allocation of more than `room` >= 16 bytes, aligned to it.
unsafe fn tag(base: *mut u8, room: usize, bytes: usize) -> *mut u8 {
    if base.is_null() {
        return base;
    }
    let owner = OWNER.get();
    TOTAL.grow(bytes);
    OWNED[owner].grow(bytes);
    // SAFETY: within the room in front, and aligned, since `room` is a multiple of 16.
    unsafe {
        let pointer = base.add(room);
        pointer.sub(16).cast::<usize>().write(owner);
        pointer
    }
}

// SAFETY: every call goes to the system's allocator with a larger layout made by `padded` alone, so that allocation and
// deallocation agree; what is handed out starts `room` bytes into it, aligned as asked for.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((whole, room)) = padded(layout) else { return std::ptr::null_mut() };
        // SAFETY: `whole` is not empty.
        unsafe { tag(System.alloc(whole), room, layout.size()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((whole, room)) = padded(layout) else { return std::ptr::null_mut() };
        // SAFETY: as above.
        unsafe { tag(System.alloc_zeroed(whole), room, layout.size()) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let (whole, room) = padded(layout).expect("it was allocated with this layout");
        // SAFETY: `pointer` came from `tag`, so its owner and the start of its allocation lie in front of it.
        unsafe {
            let owner = pointer.sub(16).cast::<usize>().read();
            TOTAL.shrink(layout.size());
            OWNED[owner].shrink(layout.size());
            System.dealloc(pointer.sub(room), whole);
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let (whole, room) = padded(layout).expect("it was allocated with this layout");
        let Some(grown) = size.checked_add(room) else { return std::ptr::null_mut() };
        // SAFETY: as in `dealloc`; the room in front moves along, and with it the owner.
        unsafe {
            let owner = pointer.sub(16).cast::<usize>().read();
            // Old and new may be alive together while their contents are copied.
            TOTAL.grow(size);
            OWNED[owner].grow(size);
            let moved = System.realloc(pointer.sub(room), whole, grown);
            let freed = if moved.is_null() { size } else { layout.size() };
            TOTAL.shrink(freed);
            OWNED[owner].shrink(freed);
            if moved.is_null() { moved } else { moved.add(room) }
        }
    }
}

/// Heap bytes alive now; 0 if [`CountingAllocator`] is not installed.
pub fn in_use() -> usize {
    TOTAL.in_use.load(Relaxed)
}

/// The most heap bytes alive at once since the start or the last [`reset_peak`].
pub fn peak() -> usize {
    TOTAL.peak.load(Relaxed)
}

/// Starts new peaks, in all and of every owner, from what is alive now.
pub fn reset_peak() {
    for count in std::iter::once(&TOTAL).chain(&OWNED) {
        count.peak.store(count.in_use.load(Relaxed), Relaxed);
    }
}

/// Runs `f`; its result, and the most bytes that were alive above those at the start. Whatever other threads allocate
/// meanwhile counts as well.
pub fn peak_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = in_use();
    reset_peak();
    let result = f();
    (result, peak().saturating_sub(before))
}

/// Counts what this thread allocates from now on for `rank` as well, until the guard is dropped. Threads that it starts
/// are their own; ranks from `OWNERS - 1` on share the last count.
pub fn own(rank: usize) -> Owned {
    Owned(OWNER.replace((rank + 1).min(OWNERS - 1)))
}

/// Whom a thread allocates for, to be handed to threads that work for it: [`inherit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(usize);

/// Whom this thread allocates for.
pub fn owner() -> Owner {
    Owner(OWNER.get())
}

/// Counts what this thread allocates from now on for `owner`, until the guard is dropped.
pub fn inherit(owner: Owner) -> Owned {
    Owned(OWNER.replace(owner.0))
}

/// Ends [`own`] and [`inherit`].
#[derive(Debug)]
#[must_use = "counting for the rank ends when this is dropped"]
pub struct Owned(usize);

impl Drop for Owned {
    fn drop(&mut self) {
        OWNER.set(self.0);
    }
}

/// Heap bytes alive now that `rank`'s threads have allocated.
pub fn in_use_by(rank: usize) -> usize {
    OWNED[(rank + 1).min(OWNERS - 1)].in_use.load(Relaxed)
}

/// The most heap bytes alive at once that `rank`'s threads have allocated.
pub fn peak_by(rank: usize) -> usize {
    OWNED[(rank + 1).min(OWNERS - 1)].peak.load(Relaxed)
}
