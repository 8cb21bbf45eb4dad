//! The next block's weights, fetched while the present one computes.
//!
//! A step does what the one before did. The order in which units are gathered is written down, and while one is in use the next one
//! of the step before is gathered by a thread of this rank, over a channel of its own. What comes is used if it
//! is what the next gather asks for, of the same optimizer step; else it is thrown away, on every rank alike, and
//! gathered as without prefetch.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use burn::backend::autodiff::NodeId;
use burn::module::{Module, ParamId};
use burn::tensor::Tensor;

use super::unit::{Entry, Unit, exchange};
use super::{Fsdp, Shared, lock};
use crate::group::ProcessGroup;
use crate::{Error, Result, phase};

type Parts = Vec<Vec<Tensor<1>>>;

/// A unit, of one optimizer step.
type Key = Vec<(ParamId, Option<NodeId>)>;

pub(super) struct Prefetch {
    channel: Option<ProcessGroup>,
    /// The shards of this step; empty outside.
    known: HashMap<ParamId, Entry>,
    last: Vec<Vec<ParamId>>,
    now: Vec<Vec<ParamId>>,
    running: Option<(Key, JoinHandle<Result<Parts>>)>,
}

impl Prefetch {
    pub(super) fn new(channel: Option<ProcessGroup>) -> Self {
        Self { channel, known: HashMap::new(), last: Vec::new(), now: Vec::new(), running: None }
    }

    /// Ends the step: shards that an optimizer will replace are let go.
    pub(super) fn end(&mut self) {
        self.known.clear();
        if !self.now.is_empty() {
            self.last = std::mem::take(&mut self.now);
        }
        self.discard();
    }

    /// Calls of a channel are matched in order, so one is over before the next begins.
    fn discard(&mut self) {
        if let Some((_, thread)) = self.running.take() {
            // Its error, if there is one, is the world's: the next collective has it.
            let _ = thread.join();
        }
    }

    fn start(&mut self, shared: &Arc<Shared>, at: usize) {
        let Some(channel) = self.channel.clone() else { return };
        let Some(ids) = self.last.get(at) else { return };
        let entries: Option<Vec<Entry>> = ids.iter().map(|id| self.known.get(id).cloned()).collect();
        let Some(entries) = entries else { return };
        let unit = Unit::from_entries(entries, shared);
        let (key, compute) = (key(&unit), shared.config.compute);
        let channel = channel.about(unit.digest(shared));
        // Without the handle of what is shared: a thread must not keep it alive.
        let fetch = std::thread::Builder::new().name("fsdp prefetch".into()).spawn({
            let outgoing = unit.outgoing(compute);
            phase::carried(move || exchange(&channel, outgoing))
        });
        match fetch {
            Ok(thread) => self.running = Some((key, thread)),
            // All ranks must agree on what is fetched ahead: then none of it.
            Err(error) => shared.group.fail(format!("no thread for fetching weights ahead: {error}")),
        }
    }
}

fn key(unit: &Unit) -> Key {
    unit.sharded().map(|(entry, ..)| (entry.id, entry.version)).collect()
}

impl Fsdp {
    /// Begins a step: from here to [`finish`](Self::finish), blocks are fetched ahead in the order of the step before. Optional; without
    /// it, or with [`prefetch`](super::FsdpConfig::prefetch) off, every block is gathered when it is due.
    ///
    /// # Communication
    ///
    /// Starts the first unit's all-gather.
    pub fn begin<M: Module>(&self, model: &M) {
        let mut prefetch = lock(&self.shared.prefetch);
        if prefetch.channel.is_none() {
            return;
        }
        prefetch.end();
        let unit = Unit::of(model);
        prefetch.known = unit.sharded().map(|(entry, ..)| (entry.id, entry.clone())).collect();
        prefetch.start(&self.shared, 0);
    }
}

impl Shared {
    /// What was fetched ahead for this unit, if it was; and starts on the next one.
    pub(super) fn prefetched(self: &Arc<Self>, unit: &Unit) -> Result<Option<Parts>> {
        let mut prefetch = lock(&self.prefetch);
        // Evaluation has no versions, and no step.
        if prefetch.known.is_empty() || unit.entries().iter().all(|entry| entry.version.is_none()) {
            return Ok(None);
        }
        let wanted = key(unit);
        let parts = match prefetch.running.take() {
            Some((key, thread)) if key == wanted => Some(thread.join().unwrap_or_else(|_| {
                Err(Error::invalid("Fsdp", "fetching weights ahead panicked", "this is a fault of the library"))
            })?),
            other => {
                prefetch.running = other;
                prefetch.discard();
                None
            }
        };
        let ids: Vec<ParamId> = wanted.into_iter().map(|(id, _)| id).collect();
        let at = prefetch.now.len();
        let as_before = prefetch.last.get(at) == Some(&ids);
        prefetch.now.push(ids);
        if as_before {
            prefetch.start(self, at + 1);
        }
        if parts.is_some() {
            self.counts.prefetched();
        }
        Ok(parts)
    }
}
