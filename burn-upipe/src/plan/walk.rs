//! One step on paper: embedding, blocks, loss; back through them; and the optimizer.

use burn_context_parallel::fsdp;

use super::block::{Block, GRADIENTS, HIDDEN, MLP, NORM};
use super::ledger::Ledger;
use super::setup::{OffloadPlan, StatePlace, WaitingPlace};
use super::{Memory, PlanError, Setup};
use crate::tiling::even_bytes;

/// Weights that a rank keeps.
const WEIGHTS: &str = "weights";
/// Optimizer state that a rank keeps.
const OPTIMIZER: &str = "optimizer state";
/// Block inputs that wait for the backward pass on the device.
const SAVED: &str = "saved inputs";
/// Block inputs on their way from and to the device.
const IN_FLIGHT: &str = "offload in flight";
/// Weights of the block at work, whole, and their gradients before they are reduced.
const GATHERED: &str = "gathered weights";
/// Logits and what comes of them.
const LOSS: &str = "loss";
/// Tokens, targets and rotary tables.
const TOKENS: &str = "tokens";
/// What allocator and communicator need beside.
pub(super) const OVERHEAD: &str = "allocator and communicator";

/// Bytes of the rank that holds the most, by phase and part.
///
/// # Errors
///
/// [`PlanError`] if the setup cannot run.
pub fn memory(setup: &Setup) -> Result<Memory, PlanError> {
    setup.check()?;
    let walk = Walk::new(setup)?;
    let mut ledger = Ledger::default();
    walk.step(&mut ledger);
    let mut memory = Memory { phases: ledger.into_phases(), ..Memory::default() };
    let (host, disk) = walk.waiting();
    memory.host = host;
    memory.disk = disk;
    if setup.techniques.optimizer == StatePlace::Host {
        memory.host += walk.kept(setup.accounting.optimizer);
    }
    for phase in &mut memory.phases {
        let states = [WEIGHTS, OPTIMIZER, GRADIENTS].map(|part| phase.parts.get(part).copied().unwrap_or(0));
        let moving = phase.total() - states.iter().sum::<usize>();
        let overhead = setup.accounting.overhead + moving / 100 * setup.accounting.fragmentation;
        if overhead > 0 {
            phase.parts.insert(OVERHEAD, overhead);
        }
    }
    Ok(memory)
}

struct Walk<'a> {
    setup: &'a Setup,
    block: Block,
    /// On which parameters are sharded.
    ranks: usize,
    /// Blocks of each checkpoint; without checkpoints each block is one that is never made again.
    segments: Vec<usize>,
    /// Whose saved inputs leave the device.
    leaving: Vec<bool>,
    /// Bytes of those that are on their way at once.
    in_flight: usize,
}

impl<'a> Walk<'a> {
    fn new(setup: &'a Setup) -> Result<Self, PlanError> {
        let Setup { model, techniques, .. } = setup;
        let block = Block::new(setup)?;
        let each = techniques.checkpoint.unwrap_or(1).max(1);
        let segments: Vec<usize> =
            (0..model.layers.div_ceil(each)).map(|at| each.min(model.layers - at * each)).collect();
        let offload = techniques.offload.filter(|_| techniques.checkpoint.is_some());
        let leaves = |at: usize, offload: &OffloadPlan| {
            let stays = segments.len() - at - 1 < offload.keep / block.e.max(1);
            at.is_multiple_of(offload.every.max(1)) && !stays
        };
        let leaving: Vec<bool> =
            (0..segments.len()).map(|at| offload.as_ref().is_some_and(|offload| leaves(at, offload))).collect();
        let away = leaving.iter().filter(|leaves| **leaves).count();
        let in_flight = techniques.offload.map_or(0, |offload| offload.in_flight.min(away.saturating_sub(1)) * block.e);
        let ranks = if techniques.fsdp { setup.ranks() } else { 1 };
        Ok(Self { setup, block, ranks, segments, leaving, in_flight })
    }

    /// Bytes that a rank keeps of all parameters, with so many an element. Vectors are whole everywhere.
    fn kept(&self, size: usize) -> usize {
        let model = &self.setup.model;
        let matrices =
            [model.table(), model.head()].into_iter().chain((0..model.layers).map(|_| model.block_matrices()));
        let vectors = model.width + model.layers * model.block_vectors();
        fsdp::shard_bytes(matrices, self.ranks, size) + vectors * size
    }

    fn step(&self, ledger: &mut Ledger) {
        let Setup { model, techniques, accounting, batch, .. } = self.setup;
        ledger.phase("embedding");
        ledger.take(WEIGHTS, self.kept(accounting.weight));
        if techniques.optimizer == StatePlace::Device {
            ledger.take(OPTIMIZER, self.kept(accounting.optimizer));
        }
        if self.setup.accumulate > 1 && !self.gradients_leave() {
            ledger.take(GRADIENTS, self.kept(accounting.gradient));
        }
        ledger.take(TOKENS, batch * self.setup.local() * (3 * 8 + model.head_dim * accounting.compute));
        self.gather(ledger, model.table());
        ledger.take(HIDDEN, self.block.e);
        self.let_go(ledger, model.table());

        ledger.phase("forward");
        self.forward(ledger);
        self.loss(ledger);
        ledger.phase("backward");
        self.backward(ledger);
        ledger.phase("embedding backward");
        let table = model.table() * accounting.gradient.min(accounting.compute);
        ledger.flash(GRADIENTS, if self.ranks > 1 || model.tied { 2 * table } else { table });
        ledger.free(HIDDEN, self.block.e);
        if self.ranks == 1 && !model.tied && !self.gradients_leave() {
            ledger.take(GRADIENTS, table);
        }
        ledger.phase("optimizer");
        if self.ranks > 1 {
            // The table's gradient is whole until it is reduced.
            ledger.flash(GRADIENTS, table + table / self.ranks);
        }
        let largest = model.table().max(model.width * model.inner).div_ceil(self.ranks);
        ledger.flash(OPTIMIZER, largest * accounting.gradient);
    }

    /// A block's weights, whole; under FSDP.
    fn gather(&self, ledger: &mut Ledger, elements: usize) {
        ledger.take(GATHERED, self.gathered(elements));
    }

    fn let_go(&self, ledger: &mut Ledger, elements: usize) {
        ledger.free(GATHERED, self.gathered(elements));
    }

    fn gathered(&self, elements: usize) -> usize {
        let Setup { accounting, techniques, .. } = self.setup;
        if self.ranks == 1 {
            return 0;
        }
        fsdp::forward_bytes(elements, self.ranks, accounting.compute, techniques.prefetch)
    }

    /// Whether gradients are on the device only until they are reduced.
    fn gradients_leave(&self) -> bool {
        self.setup.accounting.gradients_leave && self.setup.techniques.optimizer == StatePlace::Host
    }

    /// Bytes of saved inputs in host memory and on disk.
    fn waiting(&self) -> (usize, usize) {
        let bytes = self.leaving.iter().filter(|leaves| **leaves).count() * self.block.e;
        match self.setup.techniques.offload.map(|offload| offload.place) {
            Some(WaitingPlace::Host) => (bytes, 0),
            Some(WaitingPlace::Disk) => (0, bytes),
            None => (0, 0),
        }
    }

    fn forward(&self, ledger: &mut Ledger) {
        let Block { e, .. } = self.block;
        let (tape, elements) = (self.setup.techniques.checkpoint.is_none(), self.setup.model.block_matrices());
        // One of those on their way is x itself.
        let in_flight = self.in_flight.saturating_sub(e);
        ledger.take(IN_FLIGHT, in_flight);
        for (blocks, leaves) in self.segments.iter().zip(&self.leaving) {
            for block in 0..*blocks {
                self.gather(ledger, elements);
                self.block.forward(ledger, tape);
                self.let_go(ledger, elements);
                if tape {
                    continue; // x is kept by the tape, among hidden states
                }
                // x: saved, on its way, or of a block within a checkpoint and done with.
                ledger.free(HIDDEN, e);
                if block == 0 && !leaves {
                    ledger.take(SAVED, e);
                }
            }
        }
        ledger.free(IN_FLIGHT, in_flight);
    }

    /// Forward, and back: what the loss keeps is used up first.
    fn loss(&self, ledger: &mut Ledger) {
        ledger.phase("loss");
        let Setup { model, techniques, accounting, batch, .. } = self.setup;
        let (e, local) = (self.block.e, self.setup.local());
        let exact = accounting.compute.max(4);
        let table = model.table() * accounting.gradient.min(accounting.compute);
        self.gather(ledger, model.table());
        // The norm: x is kept, and its result.
        ledger.take(LOSS, e);
        if techniques.norm_tile.is_none() {
            ledger.take(NORM, e);
        }
        match techniques.loss_tile {
            None => {
                let logits = batch * local * model.vocab * exact;
                ledger.take(LOSS, logits);
                ledger.flash(LOSS, logits);
                ledger.phase("loss backward");
                ledger.flash(LOSS, 2 * logits);
                ledger.flash(LOSS, 2 * e + table);
                ledger.free(LOSS, logits);
            }
            Some(tile) => {
                let logits = even_bytes(*batch, local, tile, model.vocab, exact);
                let width = even_bytes(*batch, local, tile, model.width, accounting.compute);
                ledger.flash(LOSS, 2 * logits + width);
                ledger.phase("loss backward");
                ledger.take(LOSS, e);
                ledger.flash(LOSS, (table + 3 * logits).max(3 * table + logits) + 4 * width);
                ledger.free(LOSS, e);
            }
        }
        if self.ranks == 1 && !self.gradients_leave() {
            ledger.take(GRADIENTS, table);
        }
        self.let_go(ledger, model.table());
        // d of the norm's result.
        ledger.take(HIDDEN, e);
        ledger.free(LOSS, e);
        // x is used up, and its gradient in its place.
        self.block.norm_backward(ledger);
    }

    fn backward(&self, ledger: &mut Ledger) {
        let Block { e, .. } = self.block;
        let (techniques, elements) = (&self.setup.techniques, self.setup.model.block_matrices());
        let tape = techniques.checkpoint.is_none();
        for (at, (blocks, offloaded)) in self.segments.iter().zip(&self.leaving).enumerate().rev() {
            if !tape {
                let ahead = self.in_flight.min(at * e);
                // What was saved is x now.
                if !offloaded {
                    ledger.free(SAVED, e);
                }
                ledger.take(HIDDEN, e);
                let ahead = if *offloaded { ahead.saturating_sub(e) } else { ahead };
                ledger.take(IN_FLIGHT, ahead);
                for _ in 0..*blocks {
                    self.gather(ledger, elements);
                }
                for _ in 0..*blocks {
                    self.block.forward(ledger, true);
                }
                // y of the last one is nobody's.
                ledger.free(HIDDEN, e);
                for _ in 0..*blocks {
                    self.one_back(ledger);
                    self.let_go(ledger, elements);
                }
                ledger.free(IN_FLIGHT, ahead);
            } else {
                self.gather(ledger, elements);
                self.one_back(ledger);
                self.let_go(ledger, elements);
            }
        }
    }

    /// One block's backward pass, after which its x is gone, and its gradients are where they stay.
    fn one_back(&self, ledger: &mut Ledger) {
        let (block, elements, accounting) = (&self.block, self.setup.model.block_matrices(), &self.setup.accounting);
        block.backward(ledger);
        if self.ranks > 1 {
            // Reduced: a copy on its way, and the shard that stays.
            let on_its_way = elements * accounting.compute.max(4);
            ledger.flash(MLP, on_its_way);
            ledger.free(GRADIENTS, block.weights());
            if self.setup.accumulate == 1 && !self.gradients_leave() {
                ledger.take(GRADIENTS, elements.div_ceil(self.ranks) * accounting.gradient);
            }
        } else if self.gradients_leave() {
            ledger.free(GRADIENTS, block.weights());
        }
        ledger.free(HIDDEN, block.e);
    }
}
