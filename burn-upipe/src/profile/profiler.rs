//! The listener: a `tracing` subscriber for one rank's threads.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_context_parallel::phase;
use tracing::dispatcher::{DefaultGuard, Dispatch, set_default};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

use super::heap;
use super::recorder::{Label, Recorder, Tagged};
use super::source::MemorySource;
use super::timeline::Timeline;

/// Records the [phases](burn_context_parallel::phase) of one rank.
///
/// It listens on the thread that [enters](Self::enter) it and on those that work for it; other ranks, and the rest of the
/// program, are not touched. From then on allocations are tagged with their phase ([`heap::alive_by_phase`]); times and memory are kept
/// only while it [records](Self::record).
///
/// ```
/// use burn_context_parallel::phase;
/// use burn_upipe::profile::heap::CountingAllocator;
/// use burn_upipe::profile::{Profiler, RankHeap, Report};
///
/// #[global_allocator]
/// static HEAP: CountingAllocator = CountingAllocator;
///
/// let profiler = Profiler::new(0, RankHeap::new(0));
/// {
///     let _on = profiler.enter();
///     profiler.record(true);
///     let _outer = phase::enter("outer", None);
///     let kept = vec![0u8; 1000];
///     {
///         let _inner = phase::enter("inner", None);
///         drop(vec![0u8; 500]);
///     }
///     drop(kept);
/// }
/// let report = Report::new([profiler.finish()]);
/// let phases: Vec<_> = report.phases().into_iter().map(|phase| (phase.name, phase.peak, phase.peak_above)).collect();
/// assert_eq!(phases, [("outer".to_owned(), 1500, 1500), ("inner".to_owned(), 1500, 500)]);
/// ```
///
/// # Memory
///
/// While it records, 150 bytes a phase that begins, and as many a moment; they are not counted for the rank. Otherwise what is open,
/// however long it listens.
#[derive(Clone)]
pub struct Profiler {
    listener: Arc<Listener>,
}

impl Profiler {
    /// Of a rank of the world, reading its memory from `source`.
    pub fn new(rank: usize, source: impl MemorySource + 'static) -> Self {
        let _unowned = heap::unowned();
        let recorder = Mutex::new(Recorder::new(rank, Box::new(source)));
        let listener = Listener { rank, recorder, spans: Mutex::default(), next: AtomicU64::new(1) };
        Self { listener: Arc::new(listener) }
    }

    /// Listens on this thread until the guard is dropped, and [owns](heap::own) what it allocates for the rank.
    pub fn enter(&self) -> Entered {
        let (listening, second) = {
            let _unowned = heap::unowned();
            self.listener.recorder().at_home();
            let dispatch = || Dispatch::new(Forward(self.listener.clone()));
            // While there is only one in a process, a thread without any that is first at a place has `tracing` pass that place over from
            // then on, on every thread (tracing issue 3611). With two all are asked.
            (set_default(&dispatch()), dispatch())
        };
        Entered { _owned: heap::own(self.listener.rank), _listening: listening, _second: second }
    }

    /// Begins to keep what happens, or stops. Phases that begin while nothing is kept are not in the report.
    pub fn record(&self, on: bool) {
        let _unowned = heap::unowned();
        self.listener.recorder().record(on);
    }

    /// What was recorded since the last time. Phases that are still open are left out.
    pub fn finish(&self) -> Timeline {
        let _unowned = heap::unowned();
        self.listener.recorder().finish()
    }
}

impl fmt::Debug for Profiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiler").field("rank", &self.listener.rank).finish_non_exhaustive()
    }
}

/// Ends [`Profiler::enter`], on the thread that has called it:
///
/// ```compile_fail,E0277
/// use burn_upipe::profile::{Profiler, ResidentSet};
///
/// let entered = Profiler::new(0, ResidentSet).enter();
/// std::thread::spawn(move || drop(entered));
/// ```
#[must_use = "it listens until this is dropped"]
pub struct Entered {
    _listening: DefaultGuard,
    _second: Dispatch,
    _owned: heap::Owned,
}

struct Listener {
    rank: usize,
    recorder: Mutex<Recorder>,
    /// Spans that are held by somebody, with how many do.
    spans: Mutex<HashMap<u64, (Label, usize)>>,
    next: AtomicU64,
}

impl Listener {
    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spans(&self) -> MutexGuard<'_, HashMap<u64, (Label, usize)>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One subscriber a thread, all with the rank's listener.
struct Forward(Arc<Listener>);

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        target == phase::TARGET || ["burn_upipe", "burn_context_parallel"].iter().any(|ours| target.starts_with(ours))
    }

    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // Asked each time, so that threads without a profiler are not concerned.
        Interest::sometimes()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let _unowned = heap::unowned();
        let mut label = Label::default();
        span.record(&mut Fields(&mut label));
        if label.name.is_empty() {
            label.name = span.metadata().name().to_owned();
        }
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        self.0.spans().insert(id, (label, 1));
        Id::from_u64(id)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        let _unowned = heap::unowned();
        if let Some((label, _)) = self.0.spans().get_mut(&span.into_u64()) {
            values.record(&mut Fields(label));
        }
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let _unowned = heap::unowned();
        let mut moved = Moved::default();
        event.record(&mut moved);
        if moved != Moved::default() {
            self.0.recorder().moved(moved.sent, moved.received);
        }
    }

    fn enter(&self, span: &Id) {
        let before = Tagged { owner: heap::owner(), phase: heap::now() };
        let (phase, helps) = {
            let _unowned = heap::unowned();
            let label = self.0.spans().get(&span.into_u64()).map(|(label, _)| label.clone());
            let Some(label) = label else { return };
            let mut recorder = self.0.recorder();
            (recorder.begin(span.into_u64(), label, before), recorder.helps())
        };
        // Threads that work for a rank allocate for it, while they are in a phase.
        if helps {
            heap::set_owner(heap::Owner::rank(self.0.rank));
        }
        heap::set(phase);
    }

    fn exit(&self, span: &Id) {
        self.ends(|recorder| recorder.end(span.into_u64()));
    }

    fn clone_span(&self, span: &Id) -> Id {
        if let Some((_, holders)) = self.0.spans().get_mut(&span.into_u64()) {
            *holders += 1;
        }
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let closed = {
            let _unowned = heap::unowned();
            let mut spans = self.0.spans();
            let Some((_, holders)) = spans.get_mut(&span.into_u64()) else { return false };
            *holders -= 1;
            let closed = *holders == 0;
            if closed {
                spans.remove(&span.into_u64());
            }
            closed
        };
        if closed {
            self.ends(|recorder| recorder.leave(span.into_u64()));
        }
        closed
    }
}

impl Forward {
    /// Tags what this thread allocates as before a phase, if one has ended.
    fn ends(&self, end: impl FnOnce(&mut Recorder) -> Option<Tagged>) {
        let (before, helps) = {
            let _unowned = heap::unowned();
            let mut recorder = self.0.recorder();
            (end(&mut recorder), recorder.helps())
        };
        let Some(Tagged { owner, phase }) = before else { return };
        if helps {
            heap::set_owner(owner);
        }
        heap::set(phase);
    }
}

struct Fields<'a>(&'a mut Label);

impl Visit for Fields<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "index" => self.0.index = Some(value),
            "bytes" => self.0.bytes = value,
            _ => {}
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.record_u64(field, value.max(0) as u64);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "name" => self.0.name = value.to_owned(),
            "pass" => self.0.pass = Some(value.to_owned()),
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

#[derive(Default, PartialEq)]
struct Moved {
    sent: u64,
    received: u64,
}

impl Visit for Moved {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "sent" => self.sent = value,
            "received" => self.received = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}
