//! What a rank's phases do to its record: a stack of open phases for each of its threads, and a look at memory at every begin and end.

use std::collections::HashMap;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use burn_context_parallel::group::Operation;

use super::heap;
use super::source::{Memory, MemorySource};
use super::timeline::{Phase, Sample, Span, Timeline};

/// A phase's name as its span has it.
#[derive(Clone, Debug, Default)]
pub(super) struct Label {
    pub name: String,
    pub index: Option<u64>,
    pub pass: Option<String>,
    pub bytes: u64,
}

impl Label {
    fn kind(&self) -> String {
        self.with(String::new())
    }

    fn label(&self) -> String {
        self.with(self.index.map_or_else(String::new, |index| format!(" {index}")))
    }

    fn with(&self, index: String) -> String {
        let pass = self.pass.as_ref().map_or_else(String::new, |pass| format!(" {pass}"));
        format!("{}{index}{pass}", self.name)
    }
}

/// What a thread's allocations are tagged with.
#[derive(Clone, Copy)]
pub(super) struct Tagged {
    pub owner: heap::Owner,
    pub phase: heap::Phase,
}

/// A phase that has begun.
struct Open {
    span: u64,
    label: Label,
    kind: String,
    /// Where it is in the tree; `None` while nothing is recorded: trees of steps that nobody wants would only grow.
    phase: Option<usize>,
    /// The thread's allocations before it.
    before: Tagged,
    /// `None` if it began while nothing was recorded.
    record: Option<Span>,
    /// Nobody is left who could end it.
    left: bool,
}

pub(super) struct Recorder {
    rank: usize,
    source: Box<dyn MemorySource>,
    origin: Instant,
    recording: Option<Duration>,
    windows: Vec<(Duration, Duration)>,
    phases: Vec<Phase>,
    /// Phases by the one around them and their label.
    known: HashMap<(Option<usize>, String), usize>,
    /// How allocations are tagged: by the kinds of the phases around, so that there are not as many as blocks.
    kinds: HashMap<String, (heap::Phase, usize)>,
    groups: Vec<(String, Vec<heap::Phase>)>,
    threads: Vec<(ThreadId, Vec<Open>)>,
    spans: Vec<Span>,
    samples: Vec<Sample>,
    last: Duration,
}

impl Recorder {
    /// The first thread is the one that calls this.
    pub fn new(rank: usize, source: Box<dyn MemorySource>) -> Self {
        Self {
            rank,
            source,
            origin: Instant::now(),
            recording: None,
            windows: Vec::new(),
            phases: Vec::new(),
            known: HashMap::new(),
            kinds: HashMap::new(),
            groups: Vec::new(),
            threads: vec![(std::thread::current().id(), Vec::new())],
            spans: Vec::new(),
            samples: Vec::new(),
            last: Duration::ZERO,
        }
    }

    /// This thread is the rank's own.
    pub fn at_home(&mut self) {
        self.threads[0].0 = std::thread::current().id();
    }

    /// Whether this thread is another one.
    pub fn helps(&self) -> bool {
        self.threads[0].0 != std::thread::current().id()
    }

    pub fn record(&mut self, on: bool) {
        match (self.recording, on) {
            (None, true) => {
                // What was before is nobody's peak.
                let _ = self.source.take_peak();
                self.last = self.origin.elapsed();
                self.recording = Some(self.last);
                // What is open is around what comes.
                for thread in 0..self.threads.len() {
                    let mut around = None;
                    for at in 0..self.threads[thread].1.len() {
                        around = Some(self.place(thread, at, around));
                    }
                }
            }
            (Some(begin), false) => {
                self.look();
                self.recording = None;
                self.windows.push((begin, self.last));
            }
            _ => {}
        }
    }

    /// A phase begins on this thread, whose allocations were tagged as `before`; the phase that they are tagged with now.
    pub fn begin(&mut self, span: u64, label: Label, before: Tagged) -> heap::Phase {
        let before = self.end_left().unwrap_or(before);
        let memory = self.look();
        let thread = self.thread();
        let stack = &mut self.threads[thread].1;
        let depth = stack.len();
        let around = stack.last().and_then(|open| open.phase);
        let (kind, copied) = (label.kind(), label.bytes);
        stack.push(Open { span, label, kind, phase: None, before, record: None, left: false });
        if let Some(memory) = memory {
            let phase = self.place(thread, depth, around);
            self.threads[thread].1[depth].record = Some(Span {
                phase,
                thread,
                depth,
                start: self.last,
                duration: Duration::ZERO,
                begin: memory,
                end: memory,
                peak: memory.in_use,
                reserved: memory.reserved,
                sent: 0,
                received: 0,
                copied,
            });
        }
        self.tag(thread, depth).0
    }

    /// A phase ends, and with it those within that have not; what the thread's allocations were tagged with before.
    pub fn end(&mut self, span: u64) -> Option<Tagged> {
        let thread = self.thread();
        let at = self.threads[thread].1.iter().rposition(|open| open.span == span)?;
        let memory = self.look();
        let now = self.last;
        let mut before = None;
        while self.threads[thread].1.len() > at {
            let open = self.threads[thread].1.pop()?;
            before = Some(open.before);
            let (Some(mut record), Some(memory)) = (open.record, memory) else { continue };
            record.duration = now - record.start;
            record.end = memory;
            record.peak = record.peak.max(memory.in_use);
            if let Some(Open { record: Some(around), .. }) = self.threads[thread].1.last_mut() {
                around.sent += record.sent;
                around.received += record.received;
                around.copied += record.copied;
            }
            self.spans.push(record);
        }
        before
    }

    /// Nobody is left who could end a phase. It ends with the one around it; if there is none, at once, or, if another thread began it,
    /// when that one is here again. What this thread's allocations were tagged with before, if it ends.
    pub fn leave(&mut self, span: u64) -> Option<Tagged> {
        let stacks = self.threads.iter_mut().flat_map(|(_, stack)| stack);
        stacks.filter(|open| open.span == span).for_each(|open| open.left = true);
        self.end_left()
    }

    fn end_left(&mut self) -> Option<Tagged> {
        let thread = self.thread();
        let span = self.threads[thread].1.first().filter(|open| open.left)?.span;
        self.end(span)
    }

    /// Bytes that crossed between ranks, in the phase that this thread is in.
    pub fn moved(&mut self, sent: u64, received: u64) {
        let thread = self.thread();
        if let Some(Open { record: Some(record), .. }) = self.threads[thread].1.last_mut() {
            record.sent += sent;
            record.received += received;
        }
    }

    pub fn finish(&mut self) -> Timeline {
        self.record(false);
        // What is open still ends, and has its allocations tagged as before then.
        for open in self.threads.iter_mut().flat_map(|(_, stack)| stack) {
            open.record = None;
        }
        Timeline {
            rank: self.rank,
            source: self.source.name(),
            origin: self.origin,
            windows: std::mem::take(&mut self.windows),
            phases: self.phases.clone(),
            groups: self.groups.iter().map(|(name, _)| name.clone()).collect(),
            spans: std::mem::take(&mut self.spans),
            samples: std::mem::take(&mut self.samples),
        }
    }

    /// Memory now. What it was since the last look belongs to every phase that is open, on all threads: they share the rank's memory.
    fn look(&mut self) -> Option<Memory> {
        self.recording?;
        let peak = self.source.take_peak();
        let memory = self.source.read();
        let now = self.origin.elapsed();
        let peak = peak.unwrap_or(0).max(memory.in_use);
        for open in self.threads.iter_mut().flat_map(|(_, stack)| stack) {
            if let Some(record) = &mut open.record {
                record.peak = record.peak.max(peak);
                record.reserved = record.reserved.max(memory.reserved);
            }
        }
        let mut alive: Vec<u64> =
            self.groups.iter().map(|(_, tags)| tags.iter().map(|tag| tag.in_use() as u64).sum()).collect();
        if alive.iter().all(|bytes| *bytes == 0) {
            alive.clear();
        }
        let phase = self.threads[0].1.last().and_then(|open| open.phase);
        self.samples.push(Sample { from: self.last, to: now, phase, peak, memory, alive });
        self.last = now;
        Some(memory)
    }

    fn thread(&mut self) -> usize {
        let id = std::thread::current().id();
        let known = self.threads.iter().position(|(thread, _)| *thread == id);
        // A thread that has ended leaves an empty stack, which the next one takes.
        let free = || self.threads.iter().skip(1).position(|(_, stack)| stack.is_empty()).map(|at| at + 1);
        match known.or_else(free) {
            Some(at) => {
                self.threads[at].0 = id;
                at
            }
            None => {
                self.threads.push((id, Vec::new()));
                self.threads.len() - 1
            }
        }
    }

    /// The place in the tree of a phase that is open.
    fn place(&mut self, thread: usize, at: usize, around: Option<usize>) -> usize {
        let (_, group) = self.tag(thread, at);
        let open = &mut self.threads[thread].1[at];
        let label = open.label.label();
        let next = self.phases.len();
        let phase = *self.known.entry((around, label.clone())).or_insert(next);
        if phase == next {
            let (kind, index) = (open.kind.clone(), open.label.index);
            self.phases.push(Phase { around, kind, index, label, group });
        }
        open.phase = Some(phase);
        phase
    }

    /// How allocations in a phase that is open are tagged, and the group of that tag.
    fn tag(&mut self, thread: usize, at: usize) -> (heap::Phase, usize) {
        let kinds: Vec<&str> = self.threads[thread].1[..=at].iter().map(|open| &*open.kind).collect();
        let kinds = inside(&kinds);
        let path = kinds.join(" / ");
        if let Some(known) = self.kinds.get(&path) {
            return *known;
        }
        let tag = heap::Phase::new(Some(self.rank), &path);
        let name = group(kinds);
        let at = self.groups.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            self.groups.push((name.to_owned(), Vec::new()));
            self.groups.len() - 1
        });
        self.groups[at].1.push(tag);
        self.kinds.insert(path, (tag, at));
        (tag, at)
    }
}

/// A path without what is around everything.
fn inside<'a, 'k>(kinds: &'a [&'k str]) -> &'a [&'k str] {
    match kinds {
        ["step" | "backward", rest @ ..] if !rest.is_empty() => inside(rest),
        kinds => kinds,
    }
}

/// What a path counts for where only few can be told apart.
fn group<'k>(kinds: &[&'k str]) -> &'k str {
    let special = kinds.iter().find(|kind| ["recompute", "offload"].contains(kind));
    match special.or(kinds.first()) {
        // Of a helper, or between the others.
        Some(kind) if Operation::ALL.iter().any(|operation| operation.name() == *kind) => "collectives",
        kind => kind.copied().unwrap_or_default(),
    }
}
