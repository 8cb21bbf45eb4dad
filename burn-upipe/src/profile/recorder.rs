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

/// A phase that has begun.
struct Open {
    span: u64,
    phase: usize,
    /// The thread's allocations before it were of this one.
    before: heap::Phase,
    /// `None` if it began while nothing was recorded.
    record: Option<Span>,
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
    tags: Vec<heap::Phase>,
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
            tags: Vec::new(),
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

    /// Whether this thread is in no phase.
    pub fn is_outside(&self) -> bool {
        let thread = std::thread::current().id();
        self.threads.iter().all(|(id, stack)| *id != thread || stack.is_empty())
    }

    pub fn record(&mut self, on: bool) {
        match (self.recording, on) {
            (None, true) => {
                // What was before is nobody's peak.
                let _ = self.source.take_peak();
                self.last = self.origin.elapsed();
                self.recording = Some(self.last);
            }
            (Some(begin), false) => {
                self.look();
                self.recording = None;
                self.windows.push((begin, self.last));
            }
            _ => {}
        }
    }

    /// A phase begins on this thread; what the thread's allocations are tagged with now.
    pub fn begin(&mut self, span: u64, label: &Label, before: heap::Phase) -> heap::Phase {
        let memory = self.look();
        let thread = self.thread();
        let around = self.threads[thread].1.last().map(|open| open.phase);
        let phase = self.phase(around, label);
        let depth = self.threads[thread].1.len();
        let record = memory.map(|memory| Span {
            phase,
            thread,
            depth,
            start: self.last,
            duration: Duration::ZERO,
            begin: memory,
            end: memory,
            peak: memory.in_use,
            sent: 0,
            received: 0,
            copied: label.bytes,
        });
        self.threads[thread].1.push(Open { span, phase, before, record });
        self.tags[phase]
    }

    /// A phase ends, and with it those within that have not; what the thread's allocations were tagged with before.
    pub fn end(&mut self, span: u64) -> Option<heap::Phase> {
        let thread = self.thread();
        let at = self.threads[thread].1.iter().rposition(|open| open.span == span)?;
        let memory = self.look();
        let now = self.last;
        let mut tag = None;
        while self.threads[thread].1.len() > at {
            let open = self.threads[thread].1.pop()?;
            tag = Some(open.before);
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
        tag
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
        for (_, stack) in &mut self.threads {
            stack.clear();
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
            }
        }
        let mut alive: Vec<u64> =
            self.groups.iter().map(|(_, tags)| tags.iter().map(|tag| tag.in_use() as u64).sum()).collect();
        if alive.iter().all(|bytes| *bytes == 0) {
            alive.clear();
        }
        let phase = self.threads[0].1.last().map(|open| open.phase);
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

    fn phase(&mut self, around: Option<usize>, label: &Label) -> usize {
        let key = (around, label.label());
        if let Some(phase) = self.known.get(&key) {
            return *phase;
        }
        let kind = label.kind();
        let mut kinds = vec![kind.clone()];
        let mut at = around;
        while let Some(phase) = at {
            kinds.insert(0, self.phases[phase].kind.clone());
            at = self.phases[phase].around;
        }
        let (tag, group) = self.tag(&kinds);
        self.phases.push(Phase { around, kind, index: label.index, label: key.1.clone(), group });
        self.tags.push(tag);
        self.known.insert(key, self.phases.len() - 1);
        self.phases.len() - 1
    }

    fn tag(&mut self, kinds: &[String]) -> (heap::Phase, usize) {
        let kinds = inside(kinds);
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
pub(super) fn inside(kinds: &[String]) -> &[String] {
    match kinds {
        [first, rest @ ..] if first == "step" && !rest.is_empty() => inside(rest),
        [first, rest @ ..] if first == "backward" && !rest.is_empty() => inside(rest),
        kinds => kinds,
    }
}

/// What a path counts for where only few can be told apart.
fn group(kinds: &[String]) -> &str {
    let special = kinds.iter().find(|kind| ["recompute", "offload"].contains(&kind.as_str()));
    match special.or(kinds.first()) {
        // Of a helper, or between the others.
        Some(kind) if Operation::ALL.iter().any(|operation| operation.name() == kind) => "collectives",
        kind => kind.map_or("", String::as_str),
    }
}
