//! All ranks' recordings as one report: phases in a table.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};

use super::timeline::{Span, Timeline};
use super::{picture, trace};

/// What all ranks have recorded.
///
/// Printed it is a table: a phase a row, those within it below it and further in. Of each rank its runs of a phase are added up (the
/// most bytes at once is the largest); of all ranks the row has the **largest**, never a sum: a step is over when the slowest rank
/// is, and fits if the fullest one does. Each rank by itself is in a second table.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub(super) ranks: Vec<Timeline>,
}

/// One phase, over all ranks: of each number the largest that a rank has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PhaseStats {
    /// Its name and pass, `block backward`, or with its number, `block 3 backward`.
    pub name: String,
    /// The names of those around it, from the outside in.
    pub around: Vec<String>,
    /// How many times it was run.
    pub count: usize,
    /// How long all runs took.
    pub time: Duration,
    /// The most bytes in use at once.
    pub peak: u64,
    /// The most above what was in use when it began.
    pub peak_above: u64,
    /// Bytes in use when it was over, at the end of the run where that was most.
    pub in_use: u64,
    /// The most bytes reserved; `None` where that cannot be told.
    pub reserved: Option<u64>,
    /// Bytes that stayed when it was over, of the run that left most; negative where all runs freed.
    pub kept: i64,
    /// Bytes sent to other ranks.
    pub sent: u64,
    /// Bytes received from them.
    pub received: u64,
    /// Bytes copied, to the host or back.
    pub copied: u64,
}

impl PhaseStats {
    fn add(&mut self, span: &Span) {
        let kept = span.end.in_use as i64 - span.begin.in_use as i64;
        self.kept = if self.count == 0 { kept } else { self.kept.max(kept) };
        self.count += 1;
        self.time += span.duration;
        self.peak = self.peak.max(span.peak);
        self.peak_above = self.peak_above.max(span.peak.saturating_sub(span.begin.in_use));
        self.in_use = self.in_use.max(span.end.in_use);
        self.reserved = self.reserved.max(span.reserved);
        self.sent += span.sent;
        self.received += span.received;
        self.copied += span.copied;
    }

    fn largest(&mut self, other: &Self) {
        self.kept = if self.count == 0 { other.kept } else { self.kept.max(other.kept) };
        self.count = self.count.max(other.count);
        self.time = self.time.max(other.time);
        self.peak = self.peak.max(other.peak);
        self.peak_above = self.peak_above.max(other.peak_above);
        self.in_use = self.in_use.max(other.in_use);
        self.reserved = self.reserved.max(other.reserved);
        self.sent = self.sent.max(other.sent);
        self.received = self.received.max(other.received);
        self.copied = self.copied.max(other.copied);
    }
}

/// One rank, over all that it has recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStats {
    /// Which.
    pub rank: usize,
    /// The most bytes in use at once.
    pub peak: u64,
    /// The phase in which that was, and those around it, from the outside in; empty in none.
    pub phase: Vec<String>,
    /// Bytes in use at the end.
    pub in_use: u64,
    /// The most bytes reserved; `None` where that cannot be told.
    pub reserved: Option<u64>,
    /// Bytes sent to other ranks.
    pub sent: u64,
    /// Bytes received from them.
    pub received: u64,
}

impl RankStats {
    fn new(timeline: &Timeline) -> Self {
        let mut stats = Self { rank: timeline.rank, ..Self::default() };
        for sample in &timeline.samples {
            if sample.peak > stats.peak {
                stats.peak = sample.peak;
                let path = sample.phase.map(|phase| timeline.path(phase)).unwrap_or_default();
                stats.phase = path.into_iter().map(|phase| phase.label.clone()).collect();
            }
            stats.in_use = sample.memory.in_use;
            stats.reserved = stats.reserved.max(sample.memory.reserved);
        }
        // Those within are in the outermost ones.
        for span in timeline.spans.iter().filter(|span| span.depth == 0) {
            stats.sent += span.sent;
            stats.received += span.received;
        }
        stats
    }
}

/// The files that [`Report::write`] makes.
pub const FILES: [&str; 3] = ["profile.txt", "trace.json", "memory.html"];

impl Report {
    /// Of so many ranks; those of one step, or of the same steps.
    pub fn new(ranks: impl IntoIterator<Item = Timeline>) -> Self {
        let mut ranks: Vec<Timeline> = ranks.into_iter().collect();
        ranks.sort_by_key(|timeline| timeline.rank);
        Self { ranks }
    }

    /// What each rank has recorded, by rank.
    pub fn ranks(&self) -> &[Timeline] {
        &self.ranks
    }

    /// Every rank by itself.
    pub fn rank_stats(&self) -> Vec<RankStats> {
        self.ranks.iter().map(RankStats::new).collect()
    }

    /// The [phases](Self::phases) of one rank alone; none if it is not there.
    pub fn phases_of(&self, rank: usize) -> Vec<PhaseStats> {
        Self::new(self.ranks.iter().filter(|timeline| timeline.rank == rank).cloned()).phases()
    }

    /// How long the rank that took longest was recorded.
    pub fn wall(&self) -> Duration {
        self.ranks.iter().map(Timeline::wall).max().unwrap_or_default()
    }

    /// Every phase, numbers left out (all blocks are one), each followed by those within it, in the order in which they first ran.
    pub fn phases(&self) -> Vec<PhaseStats> {
        let mut order: Vec<Vec<String>> = Vec::new();
        let stats = self.collect(|timeline, phase| {
            let path: Vec<String> = timeline.path(phase).into_iter().map(|phase| phase.kind.clone()).collect();
            Some(path)
        });
        // Phases are known in the order of their begins; a tree's order is that of its paths' first appearances, level by level.
        for timeline in &self.ranks {
            for phase in 0..timeline.phases.len() {
                let path: Vec<String> = timeline.path(phase).into_iter().map(|phase| phase.kind.clone()).collect();
                if stats.contains_key(&path) && !order.contains(&path) {
                    let same = |known: &[String]| known.iter().zip(&path).take_while(|(a, b)| a == b).count();
                    // After the last one that shares most of the way.
                    let most = order.iter().map(|known| same(known)).max().unwrap_or(0);
                    let at = match most {
                        0 => order.len(),
                        most => order.iter().rposition(|known| same(known) == most).map_or(order.len(), |at| at + 1),
                    };
                    order.insert(at, path);
                }
            }
        }
        named(stats, order)
    }

    /// Every phase that has a number, by name and number, wherever it ran: `block 3 backward`.
    pub fn numbered(&self) -> Vec<PhaseStats> {
        let stats = self.collect(|timeline, phase| {
            let phase = &timeline.phases[phase];
            phase.index.map(|_| vec![phase.label.clone()])
        });
        let mut order: Vec<(String, u64, Vec<String>)> = Vec::new();
        for phase in self.ranks.iter().flat_map(|timeline| &timeline.phases) {
            let path = vec![phase.label.clone()];
            if let Some(index) = phase.index
                && stats.contains_key(&path)
                && !order.iter().any(|(.., known)| *known == path)
            {
                order.push((phase.kind.clone(), index, path));
            }
        }
        let kinds: Vec<String> = order.iter().map(|(kind, ..)| kind.clone()).collect();
        order.sort_by_key(|(kind, index, _)| (kinds.iter().position(|known| known == kind), *index));
        named(stats, order.into_iter().map(|(.., path)| path).collect())
    }

    fn collect(&self, key: impl Fn(&Timeline, usize) -> Option<Vec<String>>) -> HashMap<Vec<String>, PhaseStats> {
        let mut largest: HashMap<Vec<String>, PhaseStats> = HashMap::new();
        for timeline in &self.ranks {
            let keys: Vec<_> = (0..timeline.phases.len()).map(|phase| key(timeline, phase)).collect();
            let mut own: HashMap<&[String], PhaseStats> = HashMap::new();
            for span in &timeline.spans {
                if let Some(key) = &keys[span.phase] {
                    own.entry(key).or_default().add(span);
                }
            }
            for (key, stats) in own {
                largest.entry(key.to_vec()).or_default().largest(&stats);
            }
        }
        largest
    }

    /// The trace for Perfetto and `chrome://tracing`: a process a rank, phases as complete events, memory as counters.
    pub fn trace(&self) -> serde_json::Value {
        trace::json(self)
    }

    /// One HTML page that needs nothing else: memory over time, of every rank, coloured by phase.
    pub fn html(&self) -> String {
        picture::page(self)
    }

    /// Writes [`FILES`] into a folder, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// The system's, with the file that could not be written.
    pub fn write(&self, folder: &Path) -> Result<(), (PathBuf, io::Error)> {
        std::fs::create_dir_all(folder).map_err(|error| (folder.to_owned(), error))?;
        for (name, text) in FILES.into_iter().zip([self.to_string(), format!("{}\n", self.trace()), self.html()]) {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(|error| (path, error))?;
        }
        Ok(())
    }
}

fn named(mut stats: HashMap<Vec<String>, PhaseStats>, order: Vec<Vec<String>>) -> Vec<PhaseStats> {
    let named = order.into_iter().filter_map(|mut path| {
        let mut stats = stats.remove(&path)?;
        stats.name = path.pop()?;
        stats.around = path;
        Some(stats)
    });
    named.collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wall = self.wall();
        writeln!(
            f,
            "{} ranks, {:.3} s recorded; of each number the largest of all ranks",
            self.ranks.len(),
            wall.as_secs_f64()
        )?;
        if let Some(timeline) = self.ranks.first() {
            writeln!(f, "memory: {}", timeline.source)?;
        }
        writeln!(f, "\n{}\n", table("phase", &self.phases(), wall))?;
        if !self.ranks.is_empty() {
            writeln!(f, "{}\n", ranks(&self.rank_stats()))?;
        }
        let numbered: Vec<_> = self.numbered().into_iter().filter(|stats| !stats.name.starts_with("step")).collect();
        if !numbered.is_empty() {
            writeln!(f, "{}", table("by number", &numbered, wall))?;
        }
        Ok(())
    }
}

fn table(title: &str, phases: &[PhaseStats], wall: Duration) -> Table {
    let copies = phases.iter().any(|stats| stats.copied > 0);
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let mut header =
        vec![title, "runs", "time", "share", "peak", "peak above", "at end", "kept", "reserved", "sent", "received"];
    header.extend(copies.then_some("copied"));
    table.set_header(&header);
    for stats in phases {
        let share = 100.0 * stats.time.as_secs_f64() / wall.as_secs_f64().max(f64::MIN_POSITIVE);
        let mut row = vec![
            format!("{}{}", "  ".repeat(stats.around.len()), stats.name),
            stats.count.to_string(),
            format!("{:.3} s", stats.time.as_secs_f64()),
            format!("{share:.1} %"),
            bytes(stats.peak),
            bytes(stats.peak_above),
            bytes(stats.in_use),
            signed(stats.kept),
            stats.reserved.map_or_else(|| "?".to_owned(), bytes),
            bytes(stats.sent),
            bytes(stats.received),
        ];
        row.extend(copies.then(|| bytes(stats.copied)));
        table.add_row(row);
    }
    numbers_right(&mut table, 1..header.len());
    table
}

fn ranks(ranks: &[RankStats]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["rank", "peak", "at end", "reserved", "sent", "received", "where its peak was"]);
    for stats in ranks {
        table.add_row([
            stats.rank.to_string(),
            bytes(stats.peak),
            bytes(stats.in_use),
            stats.reserved.map_or_else(|| "?".to_owned(), bytes),
            bytes(stats.sent),
            bytes(stats.received),
            if stats.phase.is_empty() { "no phase".to_owned() } else { stats.phase.join(" / ") },
        ]);
    }
    numbers_right(&mut table, 1..6);
    table
}

fn numbers_right(table: &mut Table, columns: Range<usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// For people.
pub(super) fn bytes(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        1..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

fn signed(number: i64) -> String {
    let sign = if number < 0 { "-" } else { "" };
    format!("{sign}{}", bytes(number.unsigned_abs()))
}
