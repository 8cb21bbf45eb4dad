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
//!
//! Likewise an allocation belongs to the [`Phase`] in which it was made: [`alive_by_phase`] says what memory is full of. What to do
//! when it is, [`on_out_of_memory`] is told; [`limit`] makes it full early.

mod limit;
mod phases;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub use limit::{Armed, limit, on_out_of_memory};
pub use phases::{Alive, InPhase, MAX_PHASES, Phase, alive_by_phase, phase};
pub(crate) use phases::{now, set};

/// How many owners are told apart, 0 among them: nobody.
pub const OWNERS: usize = 65;

/// Bytes in use, and the most of them at once: since the last reset, and since the profiler last looked.
struct Count {
    in_use: AtomicUsize,
    peak: AtomicUsize,
    lately: AtomicUsize,
}

impl Count {
    const fn new() -> Self {
        Self { in_use: AtomicUsize::new(0), peak: AtomicUsize::new(0), lately: AtomicUsize::new(0) }
    }

    fn grow(&self, bytes: usize) {
        let now = self.in_use.fetch_add(bytes, Relaxed) + bytes;
        // Almost every allocation is below the peaks; a plain load keeps the cache line shared then.
        for peak in [&self.peak, &self.lately] {
            if now > peak.load(Relaxed) {
                peak.fetch_max(now, Relaxed);
            }
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

/// The system's allocator, counted. Each allocation is 16 bytes larger than asked for, which are not counted: they hold its owner and
/// its phase.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// The allocation with room for its owner in front, and how much room that is.
fn padded(layout: Layout) -> Option<(Layout, usize)> {
    let room = layout.align().max(16);
    let size = layout.size().checked_add(room)?;
    Some((Layout::from_size_align(size, room).ok()?, room))
}

/// Writes owner and phase in front of `base + room`, which it returns.
///
/// # Safety
///
/// `base` is null or the start of an allocation of more than `room` >= 16 bytes, aligned to it.
unsafe fn tag(base: *mut u8, room: usize, bytes: usize) -> *mut u8 {
    if base.is_null() {
        limit::failed(bytes);
        return base;
    }
    let (owner, phase) = (OWNER.get(), phases::current());
    TOTAL.grow(bytes);
    OWNED[owner].grow(bytes);
    phases::grow(phase, bytes);
    // SAFETY: within the room in front, and aligned, since `room` is a multiple of 16.
    unsafe {
        let pointer = base.add(room);
        pointer.sub(16).cast::<[usize; 2]>().write([owner, phase]);
        pointer
    }
}

/// Owner and phase of an allocation.
///
/// # Safety
///
/// `pointer` came from [`tag`].
unsafe fn tags(pointer: *mut u8) -> [usize; 2] {
    // SAFETY: written there by `tag`; the room in front is at least 16 bytes, two words or more.
    unsafe { pointer.sub(16).cast::<[usize; 2]>().read() }
}

// SAFETY: every call goes to the system's allocator with a larger layout made by `padded` alone, so that allocation and
// deallocation agree; what is handed out starts `room` bytes into it, aligned as asked for.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((whole, room)) = padded(layout) else { return std::ptr::null_mut() };
        let base = match limit::allows(layout.size()) {
            // SAFETY: `whole` is not empty.
            true => unsafe { System.alloc(whole) },
            false => std::ptr::null_mut(),
        };
        // SAFETY: null, or as `whole` has it.
        unsafe { tag(base, room, layout.size()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((whole, room)) = padded(layout) else { return std::ptr::null_mut() };
        let base = match limit::allows(layout.size()) {
            // SAFETY: `whole` is not empty.
            true => unsafe { System.alloc_zeroed(whole) },
            false => std::ptr::null_mut(),
        };
        // SAFETY: as above.
        unsafe { tag(base, room, layout.size()) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let (whole, room) = padded(layout).expect("it was allocated with this layout");
        // SAFETY: `pointer` came from `tag`, so its tags and the start of its allocation lie in front of it.
        unsafe {
            let [owner, phase] = tags(pointer);
            TOTAL.shrink(layout.size());
            OWNED[owner].shrink(layout.size());
            phases::shrink(phase, layout.size());
            System.dealloc(pointer.sub(room), whole);
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let (whole, room) = padded(layout).expect("it was allocated with this layout");
        // As large a one as `alloc` would take, no larger.
        let grown = Layout::from_size_align(size, layout.align()).ok().and_then(padded);
        let Some((grown, _)) = grown else { return std::ptr::null_mut() };
        // SAFETY: as in `dealloc`; the room in front moves along, and with it the tags.
        unsafe {
            let [owner, phase] = tags(pointer);
            let more = size > layout.size();
            // Old and new may be alive together while their contents are copied. The system makes smaller in place, but for what is
            // aligned beyond what it always does.
            let both = more || room > 16;
            if both {
                TOTAL.grow(size);
                OWNED[owner].grow(size);
            }
            let moved = match !more || limit::allows(0) {
                true => System.realloc(pointer.sub(room), whole, grown.size()),
                false => std::ptr::null_mut(),
            };
            let freed = match (both, moved.is_null()) {
                (true, true) => size,
                (true, false) => layout.size(),
                (false, true) => 0,
                (false, false) => layout.size() - size,
            };
            TOTAL.shrink(freed);
            OWNED[owner].shrink(freed);
            if moved.is_null() {
                limit::failed(size);
                return moved;
            }
            phases::grow(phase, size);
            phases::shrink(phase, layout.size());
            moved.add(room)
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
    Owned::new(Owner::rank(rank).0)
}

/// Whom a thread allocates for, to be handed to threads that work for it: [`inherit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(usize);

impl Owner {
    pub(crate) fn rank(rank: usize) -> Self {
        Self((rank + 1).min(OWNERS - 1))
    }
}

/// Whom this thread allocates for.
pub fn owner() -> Owner {
    Owner(OWNER.get())
}

/// Counts what this thread allocates from now on for `owner`, until the guard is dropped.
pub fn inherit(owner: Owner) -> Owned {
    Owned::new(owner.0)
}

/// Ends [`own`] and [`inherit`], on the thread that has called them:
///
/// ```compile_fail,E0277
/// let owned = burn_upipe::profile::heap::own(0);
/// std::thread::spawn(move || drop(owned));
/// ```
#[derive(Debug)]
#[must_use = "counting for the rank ends when this is dropped"]
pub struct Owned {
    before: usize,
    here: PhantomData<*const ()>,
}

impl Owned {
    fn new(owner: usize) -> Self {
        Self { before: OWNER.replace(owner), here: PhantomData }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        OWNER.set(self.before);
    }
}

/// Heap bytes alive now that `rank`'s threads have allocated.
pub fn in_use_by(rank: usize) -> usize {
    OWNED[Owner::rank(rank).0].in_use.load(Relaxed)
}

/// The most heap bytes alive at once that `rank`'s threads have allocated.
pub fn peak_by(rank: usize) -> usize {
    OWNED[Owner::rank(rank).0].peak.load(Relaxed)
}

/// The most heap bytes alive at once of `rank` since this was last asked for it. For one asker: the
/// [`Profiler`](super::Profiler). Resetting [`peak_by`] does not change it, nor the other way round.
pub fn take_peak_by(rank: usize) -> usize {
    let count = &OWNED[Owner::rank(rank).0];
    let peak = count.lately.swap(count.in_use.load(Relaxed), Relaxed);
    // Of what another thread of the rank has allocated in between.
    count.lately.fetch_max(count.in_use.load(Relaxed), Relaxed);
    peak
}

/// Nobody's allocations until the guard is dropped, in no phase: those of whoever measures.
pub(crate) fn unowned() -> (Owned, InPhase) {
    (Owned::new(0), phases::none())
}

/// Without a guard: whose this thread's allocations are.
pub(crate) fn set_owner(owner: Owner) {
    OWNER.set(owner.0);
}
