//! One step on paper: embedding, blocks, loss; back through them; and the optimizer.

use burn_context_parallel::fsdp;

use super::block::{Block, GRADIENTS, HIDDEN, NORM};
use super::ledger::Ledger;
use super::setup::{StatePlace, WaitingPlace};
use super::{Memory, PlanError, Setup};
use crate::offload;
use crate::tiling::CrossEntropyBytes;

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
    let one = if setup.accounting.pinned_powers_of_two { walk.block.e.next_power_of_two() } else { walk.block.e };
    memory.host = walk.waiting(WaitingPlace::Host) * one;
    memory.disk = walk.waiting(WaitingPlace::Disk) * walk.block.e;
    if setup.techniques.optimizer == StatePlace::Host {
        memory.host += walk.kept(setup.accounting.optimizer);
    }
    if walk.gradients_leave() {
        memory.host += walk.kept(setup.accounting.gradient);
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
    /// Where their saved inputs wait; `None` on the device.
    waiting: Vec<Option<WaitingPlace>>,
}

/// Bytes of one micro-batch's block inputs in host memory and on disk.
pub(super) fn offloaded(setup: &Setup) -> Result<(usize, usize), PlanError> {
    let walk = Walk::new(setup)?;
    Ok((walk.waiting(WaitingPlace::Host) * walk.block.e, walk.waiting(WaitingPlace::Disk) * walk.block.e))
}

impl<'a> Walk<'a> {
    fn new(setup: &'a Setup) -> Result<Self, PlanError> {
        let Setup { model, techniques, .. } = setup;
        let block = Block::new(setup)?;
        let each = techniques.checkpoint.unwrap_or(1).max(1);
        let segments: Vec<usize> =
            (0..model.layers.div_ceil(each)).map(|at| each.min(model.layers - at * each)).collect();
        let waiting = match techniques.offload.filter(|_| techniques.checkpoint.is_some()) {
            Some(offload) => offload.places(segments.len(), block.e),
            None => vec![None; segments.len()],
        };
        let ranks = if techniques.fsdp { setup.ranks() } else { 1 };
        Ok(Self { setup, block, ranks, segments, waiting })
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
        // In half types rounded ones beside those that are trained; under FSDP they are rounded as they are gathered.
        let rounded = if accounting.compute < accounting.weight && !techniques.fsdp { accounting.compute } else { 0 };
        ledger.take(WEIGHTS, self.kept(accounting.weight + accounting.copies + rounded));
        if techniques.optimizer == StatePlace::Device {
            ledger.take(OPTIMIZER, self.kept(accounting.optimizer));
        }
        if self.setup.accumulate > 1 && !self.gradients_leave() {
            ledger.take(GRADIENTS, self.kept(accounting.gradient));
        }
        ledger.take(TOKENS, batch * self.setup.local() * (3 * 8 + model.head_dim * accounting.compute));
        let next = self.next_of(0);
        self.gather(ledger, model.table(), next);
        ledger.take(HIDDEN, self.block.e);
        self.let_go(ledger, model.table(), next);

        ledger.phase("forward");
        self.forward(ledger);
        self.loss(ledger);
        ledger.phase("backward");
        self.backward(ledger);
        ledger.phase("embedding backward");
        let size = accounting.compute;
        // Without checkpoints the last block's gradients are reduced one by one, and whole until then.
        let late = if techniques.checkpoint.is_none() { self.gathered(model.block_matrices()) } else { 0 };
        // Shards sum it in f32.
        let exact = if self.ranks > 1 && size < 4 { self.block.e / size * 4 } else { 0 };
        let read = self.read_by_others(model.block_matrices()) + late + exact;
        ledger.take(GATHERED, read);
        let table = model.table() * accounting.gradient.min(size);
        if self.ranks > 1 {
            ledger.flash(GRADIENTS, table + fsdp::reduction_bytes(model.table(), size));
        }
        // Zeros, and what is added to them; a tied one to what the output layer's was.
        ledger.flash(GRADIENTS, 2 * table);
        ledger.free(GATHERED, read);
        ledger.free(HIDDEN, self.block.e);
        if !model.tied {
            self.keep(ledger, table, model.table());
        }
        if self.setup.accumulate > 1 && !self.gradients_leave() {
            // Those of all micro-batches are one now.
            ledger.free(GRADIENTS, self.kept(accounting.gradient));
        }
        ledger.phase("optimizer");
        ledger.flash(GATHERED, self.read_by_others(model.table()));
        let largest = model.table().max(model.width * model.inner).div_ceil(self.ranks);
        ledger.flash(OPTIMIZER, largest * accounting.gradient);
    }

    /// A unit's weights, whole, and under prefetch those of the unit of `next` elements that is on its way; under FSDP.
    fn gather(&self, ledger: &mut Ledger, elements: usize, next: usize) {
        ledger.take(GATHERED, self.gathered(elements) + self.prefetched(next));
    }

    fn let_go(&self, ledger: &mut Ledger, elements: usize, next: usize) {
        ledger.free(GATHERED, self.gathered(elements) + self.prefetched(next));
    }

    fn gathered(&self, elements: usize) -> usize {
        if self.ranks == 1 { 0 } else { fsdp::gathered_bytes(elements, self.setup.accounting.compute) }
    }

    fn prefetched(&self, elements: usize) -> usize {
        if self.setup.techniques.prefetch { self.gathered(elements) } else { 0 }
    }

    /// Parts of the last reduction that the slowest of the others has not read yet; under FSDP.
    fn read_by_others(&self, elements: usize) -> usize {
        elements * self.setup.accounting.compute.max(4) / self.ranks * (self.ranks - 1)
    }

    /// Elements that are gathered at once for a block. Without checkpoints only tiles are blocks.
    fn unit(&self) -> usize {
        let Setup { model, techniques, .. } = self.setup;
        match (techniques.checkpoint, techniques.mlp_tile) {
            (None, Some(_)) => 3 * model.width * model.inner,
            _ => model.block_matrices(),
        }
    }

    /// Whether gradients are on the device only until they are reduced.
    fn gradients_leave(&self) -> bool {
        self.setup.accounting.gradients_leave && self.setup.techniques.optimizer == StatePlace::Host
    }

    /// How many saved inputs wait there.
    fn waiting(&self, place: WaitingPlace) -> usize {
        self.waiting.iter().filter(|waits| **waits == Some(place)).count()
    }

    /// Bytes that are on the device because of offload beside the x at work, with so many that are away.
    fn in_flight(&self, in_flight: usize, away: usize) -> usize {
        let Setup { model, accounting, batch, .. } = self.setup;
        let bytes = |count: usize| {
            offload::in_flight_bytes(in_flight, count, *batch, self.setup.local(), model.width, accounting.compute)
        };
        bytes(away + 1).saturating_sub(bytes(1))
    }

    /// Elements of the unit that is gathered after the block `at` on the way forward.
    fn next_of(&self, at: usize) -> usize {
        let model = &self.setup.model;
        if at + 1 < model.layers { self.unit() } else { model.table() }
    }

    fn forward(&self, ledger: &mut Ledger) {
        let Block { e, .. } = self.block;
        let (tape, elements) = (self.setup.techniques.checkpoint.is_none(), self.unit());
        // A block takes longer than the copy of its input: one is on its way out, if that is not the x at work.
        let limit = self.setup.techniques.offload.map_or(0, |offload| offload.in_flight.min(2));
        let in_flight = self.in_flight(limit, self.waiting.iter().flatten().count().saturating_sub(2));
        ledger.take(IN_FLIGHT, in_flight);
        let mut at = 0;
        for (blocks, waits) in self.segments.iter().zip(&self.waiting) {
            for block in 0..*blocks {
                let next = self.next_of(at);
                self.gather(ledger, elements, next);
                self.block.forward(ledger, tape);
                self.let_go(ledger, elements, next);
                at += 1;
                if tape {
                    // x is kept by the tape, among hidden states, and the weights as they were gathered.
                    ledger.take(GATHERED, self.taped());
                    continue;
                }
                // x: saved, on its way, or of a block within a checkpoint and done with.
                ledger.free(HIDDEN, e);
                if block == 0 && waits.is_none() {
                    ledger.take(SAVED, e);
                }
            }
        }
        ledger.free(IN_FLIGHT, in_flight);
    }

    /// Whole weights of a block that a tape keeps until its backward pass; under FSDP. Those in tiles it does not.
    fn taped(&self) -> usize {
        let all = self.setup.model.block_matrices();
        let elements = if self.unit() < all { all - self.unit() } else { all };
        if self.ranks == 1 { 0 } else { elements * self.setup.accounting.compute }
    }

    /// Forward, and back: what the loss keeps is used up first.
    fn loss(&self, ledger: &mut Ledger) {
        ledger.phase("loss");
        let Setup { model, techniques, accounting, batch, .. } = self.setup;
        let (e, local, size) = (self.block.e, self.setup.local(), accounting.compute);
        let gradient = accounting.gradient.min(size);
        let loss =
            CrossEntropyBytes::new(*batch, local, techniques.loss_tile, model.vocab, model.width, size, gradient);
        let next = self.unit();
        self.gather(ledger, model.table(), next);
        // The norm: x is kept, and its result.
        ledger.take(LOSS, e);
        if techniques.norm_tile.is_none() {
            ledger.take(NORM, e);
        }
        ledger.flash(LOSS, loss.forward());
        ledger.take(LOSS, loss.saved());
        ledger.phase("loss backward");
        ledger.free(LOSS, loss.saved());
        if techniques.loss_tile.is_some() {
            ledger.take(LOSS, e);
        }
        ledger.flash(LOSS, loss.backward());
        if techniques.loss_tile.is_some() {
            ledger.free(LOSS, e);
        }
        if self.ranks > 1 {
            ledger.flash(GRADIENTS, loss.weights() + fsdp::reduction_bytes(model.table(), size));
        }
        self.keep(ledger, loss.weights(), model.table());
        self.let_go(ledger, model.table(), next);
        // d of the norm's result.
        ledger.take(HIDDEN, e);
        ledger.free(LOSS, e);
        // x is used up, and its gradient in its place.
        self.block.norm_backward(ledger);
    }

    /// Gradients of `elements` that stay, of which `whole` bytes were made: whole on every rank, or reduced, or gone to the host.
    fn keep(&self, ledger: &mut Ledger, whole: usize, elements: usize) {
        if self.gradients_leave() {
            return;
        }
        let shard = || fsdp::shard_bytes([elements], self.ranks, self.setup.accounting.gradient);
        ledger.take(GRADIENTS, if self.ranks == 1 { whole } else { shard() });
    }

    fn backward(&self, ledger: &mut Ledger) {
        let Block { e, .. } = self.block;
        let (techniques, elements) = (&self.setup.techniques, self.unit());
        let tape = techniques.checkpoint.is_none();
        let limit = techniques.offload.map_or(0, |offload| offload.in_flight);
        let mut below = self.waiting.iter().flatten().count();
        for (at, (blocks, waits)) in self.segments.iter().zip(&self.waiting).enumerate().rev() {
            // Of the block before; the first one's is the last gather.
            let next = if at > 0 { elements } else { 0 };
            if tape {
                let tiles = elements < self.setup.model.block_matrices();
                let again = if tiles { self.gathered(elements) + self.prefetched(next) } else { 0 };
                ledger.take(GATHERED, again);
                self.one_back(ledger);
                ledger.free(GATHERED, again);
                continue;
            }
            // What was saved is x now.
            if waits.is_some() {
                below -= 1;
            } else {
                ledger.free(SAVED, e);
            }
            ledger.take(HIDDEN, e);
            let ahead = self.in_flight(limit, below);
            ledger.take(IN_FLIGHT, ahead);
            for _ in 0..*blocks {
                ledger.take(GATHERED, self.gathered(elements));
            }
            ledger.take(GATHERED, self.prefetched(next));
            for _ in 0..*blocks {
                self.block.forward(ledger, true);
            }
            // y of the last one is nobody's.
            ledger.free(HIDDEN, e);
            for _ in 0..*blocks {
                self.one_back(ledger);
                ledger.free(GATHERED, self.gathered(elements));
            }
            ledger.free(GATHERED, self.prefetched(next));
            ledger.free(IN_FLIGHT, ahead);
        }
    }

    /// One block's backward pass, after which its x is gone, and its gradients are where they stay.
    fn one_back(&self, ledger: &mut Ledger) {
        let (block, elements) = (&self.block, self.setup.model.block_matrices());
        block.backward(ledger);
        if self.ranks > 1 {
            ledger.flash(GRADIENTS, fsdp::reduction_bytes(elements, self.setup.accounting.compute));
        }
        ledger.free(GRADIENTS, block.weights());
        self.keep(ledger, block.weights(), elements);
        if self.setup.techniques.checkpoint.is_none() {
            ledger.free(GATHERED, self.taped());
        }
        ledger.free(HIDDEN, block.e);
    }
}
