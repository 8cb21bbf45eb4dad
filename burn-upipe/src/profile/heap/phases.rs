//! In which phase an allocation was made, and how much of each is alive.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// How many phases a process can tell apart, 0 among them: none. What is made after them shares the last one.
pub const MAX_PHASES: usize = 4096;

// A process has one global allocator, and these are its counts.
static ALIVE: [AtomicUsize; MAX_PHASES] = [const { AtomicUsize::new(0) }; MAX_PHASES];
static NAMES: [OnceLock<Name>; MAX_PHASES] = [const { OnceLock::new() }; MAX_PHASES];
static NEXT: AtomicUsize = AtomicUsize::new(1);

struct Name {
    rank: Option<usize>,
    name: Box<str>,
}

thread_local! {
    // As `OWNER`.
    static PHASE: Cell<usize> = const { Cell::new(0) };
}

/// Something that allocations can be told apart by: what was going on when they were made.
///
/// A process can make [`MAX_PHASES`], for good: make them once, not in every step.
///
/// ```
/// use burn_upipe::profile::heap::{self, CountingAllocator, Phase};
///
/// #[global_allocator]
/// static HEAP: CountingAllocator = CountingAllocator;
///
/// let reading = Phase::new(None, "reading");
/// let kept = {
///     let _reading = heap::phase(reading);
///     vec![7u8; 1000]
/// };
/// assert_eq!(reading.in_use(), 1000);
/// assert!(heap::alive_by_phase().iter().any(|alive| alive.phase == "reading" && alive.bytes == 1000));
/// drop(kept);
/// assert_eq!(reading.in_use(), 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Phase(usize);

impl Phase {
    /// A new phase, of a rank or of the process.
    pub fn new(rank: Option<usize>, name: &str) -> Self {
        let id = NEXT.fetch_add(1, Relaxed);
        if id >= MAX_PHASES - 1 {
            NEXT.store(MAX_PHASES - 1, Relaxed);
            NAMES[MAX_PHASES - 1].get_or_init(|| Name { rank: None, name: "further phases".into() });
            return Self(MAX_PHASES - 1);
        }
        NAMES[id].get_or_init(|| Name { rank, name: name.into() });
        Self(id)
    }

    /// The phase of this thread; `None` in none.
    pub fn current() -> Option<Self> {
        Some(Self(PHASE.get())).filter(|phase| phase.0 > 0)
    }

    /// Whose it is.
    pub fn rank(self) -> Option<usize> {
        NAMES[self.0].get().and_then(|name| name.rank)
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        NAMES[self.0].get().map_or("no phase", |name| &name.name)
    }

    /// Bytes alive now that were allocated in it, by whichever thread.
    pub fn in_use(self) -> usize {
        ALIVE[self.0].load(Relaxed)
    }
}

/// What this thread allocates from now on is of that phase, until the guard is dropped.
pub fn phase(phase: Phase) -> InPhase {
    InPhase::new(phase.0)
}

pub(crate) fn none() -> InPhase {
    InPhase::new(0)
}

/// Without a guard: the phase of this thread.
pub(crate) fn now() -> Phase {
    Phase(PHASE.get())
}

pub(crate) fn set(phase: Phase) {
    PHASE.set(phase.0);
}

/// Ends [`phase`], on the thread that has called it:
///
/// ```compile_fail,E0277
/// use burn_upipe::profile::heap::{self, Phase};
///
/// let phase = heap::phase(Phase::new(None, "reading"));
/// std::thread::spawn(move || drop(phase));
/// ```
#[derive(Debug)]
#[must_use = "the phase ends when this is dropped"]
pub struct InPhase {
    before: usize,
    here: PhantomData<*const ()>,
}

impl InPhase {
    fn new(phase: usize) -> Self {
        Self { before: PHASE.replace(phase), here: PhantomData }
    }
}

impl Drop for InPhase {
    fn drop(&mut self) {
        PHASE.set(self.before);
    }
}

/// What is alive of one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alive {
    /// Whose.
    pub rank: Option<usize>,
    /// When it was allocated.
    pub phase: &'static str,
    /// How much.
    pub bytes: usize,
}

/// The bytes that are alive now by the phase in which they were allocated, the most first; what was allocated in none is called
/// "no phase". Locks nothing, so that it can be asked when memory is out.
pub fn alive_by_phase() -> Vec<Alive> {
    let mut rest = super::in_use();
    let mut alive = Vec::with_capacity(64);
    for (bytes, name) in ALIVE.iter().zip(&NAMES).skip(1) {
        let (bytes, Some(name)) = (bytes.load(Relaxed), name.get()) else { continue };
        if bytes > 0 {
            rest = rest.saturating_sub(bytes);
            alive.push(Alive { rank: name.rank, phase: &name.name, bytes });
        }
    }
    if rest > 0 {
        alive.push(Alive { rank: None, phase: "no phase", bytes: rest });
    }
    alive.sort_by_key(|alive| std::cmp::Reverse(alive.bytes));
    alive
}

pub(super) fn current() -> usize {
    PHASE.get()
}

pub(super) fn grow(phase: usize, bytes: usize) {
    if phase > 0 {
        ALIVE[phase].fetch_add(bytes, Relaxed);
    }
}

pub(super) fn shrink(phase: usize, bytes: usize) {
    if phase > 0 {
        ALIVE[phase].fetch_sub(bytes, Relaxed);
    }
}
