//! When memory is out: somebody is told before the process ends. And a limit, to be out of it early.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::TOTAL;

/// What is kept free for the report, in bytes.
const RESERVE: usize = 1 << 20;
/// How long other threads wait for the report before their own failure ends the process.
const PATIENCE: Duration = Duration::from_secs(30);

static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Nobody allocates or frees while holding it: whoever reports can wait for it.
static HOOKS: Mutex<Hooks> = Mutex::new(Hooks { made: 0, armed: None });
/// Changed with [`HOOKS`] held only, but for ARMED to RUNNING. RUNNING is ended by whoever reports.
static STATE: AtomicU8 = AtomicU8::new(IDLE);

const IDLE: u8 = 0;
const ARMED: u8 = 1;
const RUNNING: u8 = 2;

struct Hooks {
    /// How many there were, so that a guard knows its own.
    made: u64,
    armed: Option<Hook>,
}

struct Hook {
    number: u64,
    report: Box<dyn FnOnce(usize) + Send>,
    reserve: Vec<u8>,
}

fn hooks() -> MutexGuard<'static, Hooks> {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// Whether this thread is the one that reports.
    static REPORTS: Cell<bool> = const { Cell::new(false) };
}

/// Lets allocations fail, as if memory were out, that would bring the heap above so many bytes; `None` lifts the limit. Without
/// [`CountingAllocator`](super::CountingAllocator) it does nothing.
///
/// Threads that allocate at the same moment can pass it together by what they ask for.
pub fn limit(bytes: Option<usize>) {
    LIMIT.store(bytes.unwrap_or(usize::MAX), Ordering::Relaxed);
}

/// Calls `report` with the size of the allocation that failed, once, before the process ends.
///
/// An allocation that cannot be served ends a Rust program at once, without unwinding. With
/// [`CountingAllocator`](super::CountingAllocator) installed, `report` runs before that, on the thread whose allocation it was; others
/// that fail meanwhile wait for it. 1 MiB is kept free for it until then. It may allocate, read
/// [`alive_by_phase`](super::alive_by_phase) and write files; it must not take locks that the failing thread may hold (those of standard
/// output among them). A panic in it is caught. One report at a time: a second one replaces the first, whose guard then ends nothing.
/// What is armed while another report runs is told of what fails after that.
///
/// A program that can do without an allocation (`Vec::try_reserve`) goes on after the report. A system that overcommits, or a
/// control group, kills without asking the allocator; then nobody is told.
pub fn on_out_of_memory(report: impl FnOnce(usize) + Send + 'static) -> Armed {
    // Written to, or the system would not have given it yet.
    let (report, reserve) = (Box::new(report), vec![1; RESERVE]);
    let mut hooks = hooks();
    hooks.made += 1;
    let number = hooks.made;
    let before = hooks.armed.replace(Hook { number, report, reserve });
    // A report that runs goes on, and sees to it at its end.
    let _ = STATE.compare_exchange(IDLE, ARMED, Ordering::AcqRel, Ordering::Acquire);
    drop(hooks);
    drop(before);
    Armed(number)
}

/// Ends [`on_out_of_memory`]: nobody is told any more, unless another report has taken its place.
#[derive(Debug)]
#[must_use = "nobody is told once this is dropped"]
pub struct Armed(u64);

impl Drop for Armed {
    fn drop(&mut self) {
        let mut hooks = hooks();
        let own = hooks.armed.take_if(|hook| hook.number == self.0);
        if own.is_some() {
            let _ = STATE.compare_exchange(ARMED, IDLE, Ordering::AcqRel, Ordering::Acquire);
        }
        drop(hooks);
        drop(own);
    }
}

/// Whether so many more bytes are within the limit.
pub(super) fn allows(bytes: usize) -> bool {
    let limit = LIMIT.load(Ordering::Relaxed);
    limit == usize::MAX || TOTAL.in_use.load(Ordering::Relaxed).saturating_add(bytes) <= limit || REPORTS.get()
}

/// Tells whoever wants to know. Does not unwind, and comes back.
#[cold]
pub(super) fn failed(bytes: usize) {
    if REPORTS.get() {
        return;
    }
    match STATE.compare_exchange(ARMED, RUNNING, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            REPORTS.set(true);
            let hook = hooks().armed.take();
            if let Some(Hook { report, reserve, .. }) = hook {
                drop(reserve);
                let _ = catch_unwind(AssertUnwindSafe(|| report(bytes)));
            }
            REPORTS.set(false);
            let hooks = hooks();
            // Another report may have been armed meanwhile.
            STATE.store(if hooks.armed.is_some() { ARMED } else { IDLE }, Ordering::Release);
        }
        Err(RUNNING) => {
            let begin = Instant::now();
            while STATE.load(Ordering::Acquire) == RUNNING && begin.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Err(_) => {}
    }
}
