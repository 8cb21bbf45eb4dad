//! How much this rank has said and heard.

use std::fmt;
use std::sync::Mutex;
use std::sync::PoisonError;

use super::call::Operation;
use crate::phase;

/// What one operation has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// How many times this rank called it.
    pub calls: u64,
    /// Bytes that left this rank for another.
    pub sent: u64,
    /// Bytes that came to this rank from another.
    pub received: u64,
}

/// What every operation has moved: a value, printed as a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    counts: [Count; Operation::ALL.len()],
}

impl Traffic {
    /// One operation's part.
    pub fn of(&self, operation: Operation) -> Count {
        self.counts[operation as usize]
    }

    /// The sum over all operations.
    pub fn total(&self) -> Count {
        self.counts.iter().fold(Count::default(), |total, count| Count {
            calls: total.calls + count.calls,
            sent: total.sent + count.sent,
            received: total.received + count.received,
        })
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, count: Count| {
            write!(f, "{name:<18}{:>8}{:>16}{:>16}", count.calls, count.sent, count.received)
        };
        writeln!(f, "{:<18}{:>8}{:>16}{:>16}", "operation", "calls", "bytes sent", "bytes received")?;
        for operation in Operation::ALL {
            let count = self.of(operation);
            if count != Count::default() {
                row(f, operation.name(), count)?;
                writeln!(f)?;
            }
        }
        row(f, "total", self.total())
    }
}

/// One rank's running [`Traffic`], shared by all groups made from its world.
#[derive(Debug, Default)]
pub struct Counters(Mutex<Traffic>);

impl Counters {
    /// Counts a call.
    pub fn called(&self, operation: Operation) {
        self.with(|traffic| traffic.counts[operation as usize].calls += 1);
    }

    /// Counts bytes that crossed between ranks.
    pub fn moved(&self, operation: Operation, sent: u64, received: u64) {
        self.with(|traffic| {
            let count = &mut traffic.counts[operation as usize];
            count.sent += sent;
            count.received += received;
        });
        phase::moved(sent, received);
    }

    /// What was counted so far.
    pub fn read(&self) -> Traffic {
        self.with(|traffic| traffic.clone())
    }

    /// Starts again from zero.
    pub fn reset(&self) {
        self.with(|traffic| *traffic = Traffic::default());
    }

    fn with<T>(&self, f: impl FnOnce(&mut Traffic) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
