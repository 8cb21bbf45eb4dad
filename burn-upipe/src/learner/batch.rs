//! What a step is given: an item of the loader, cut for a rank.
//!
//! B sequences side by side, S tokens each, L of them on this rank, V vocabulary.

use std::ops::Deref;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_context_parallel::attention::SequenceContext;
use burn_context_parallel::sequence::{Batch, IGNORE_INDEX, SequenceLayout, Shard};
use burn_context_parallel::{OrRaise, Result};

use super::output::TokenOutput;
use super::strategy::Place;
use crate::tiling::tiled_cross_entropy_over;

/// An item of a data loader that ranks can share.
///
/// [`SequenceBatch`] is one; an input that holds more beside it hands these calls on to it.
pub trait SequenceInput: Clone + Send + 'static {
    /// How many targets the whole item has.
    fn valid(&self) -> usize;

    /// The same work without any target: for a replica that has no item left in the last step of an epoch. All ranks make the same
    /// number of steps, and this one adds zero.
    fn without_targets(self) -> Self;

    /// This rank's part. `total` is how many targets everything has that the step learns from: all items of all replicas and
    /// micro-batches; the loss is divided by it.
    ///
    /// # Errors
    ///
    /// If the item cannot be cut: this ends training on all ranks.
    fn shard(self, place: &Place, total: usize) -> Result<Self>;

    /// The sequence that attention works on while the step runs; asked of what [`shard`](Self::shard) gave.
    ///
    /// # Errors
    ///
    /// If the part was cut for other ranks.
    fn context(&self, place: &Place) -> Result<SequenceContext>;
}

/// A batch of sequences, or one rank's part of it, with the loss: what a batcher makes and a model's step takes.
///
/// It reads like a [`Shard`]: `batch.tokens`, `batch.positions` and `batch.targets` (already shifted) are tensors [B, L]. As a batcher makes it, it is
/// the whole on one device, and a model that takes it trains under Burn's own strategies as well.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::sequence::Batch;
/// use burn_upipe::learner::SequenceBatch;
///
/// let device = Device::flex();
/// let batch = SequenceBatch::new(Batch::from_rows(&[vec![4, 1, 2, 3]])?, &device)?;
/// assert_eq!((batch.tokens.dims(), batch.total()), ([1, 4], 3));
/// // Four tokens have three successors, and logits that know nothing about a vocabulary of 5 cost ln 5.
/// let loss = batch.loss(Tensor::zeros([1, 4, 5], &device));
/// assert!((loss.into_scalar::<f32>() - 5f32.ln()).abs() < 1e-6);
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SequenceBatch {
    whole: Arc<Batch>,
    shard: Shard,
    total: usize,
    counts: bool,
}

impl SequenceBatch {
    /// The whole batch on one device.
    ///
    /// # Errors
    ///
    /// None for a batch that could be made; the signature leaves room for layouts that refuse a length.
    pub fn new(batch: Batch, device: &Device) -> Result<Self> {
        let layout = SequenceLayout::contiguous(batch.len(), 1)?;
        let shard = batch.shard(&layout, 0, device)?;
        Ok(Self { total: batch.valid(), whole: Arc::new(batch), shard, counts: true })
    }

    /// What the loss is divided by: the targets of all ranks, replicas and micro-batches of the step.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The tokens at hand that are no padding, B L at most.
    pub fn tokens_at_hand(&self) -> usize {
        if !self.counts {
            return 0;
        }
        let layout = self.shard.layout();
        self.whole.rows() * layout.indices(self.shard.rank()).filter(|index| *index < layout.len()).count()
    }

    /// This rank's share of the one mean over all targets of the step.
    ///
    /// ```text
    /// share = sum_i (logsumexp(z_i) - z_i[t_i]) / total
    /// ```
    ///
    /// Shares of all ranks and micro-batches sum to the mean, and their gradients to its gradient. It is divided here and not after
    /// `backward`, since gradients cross ranks inside attention. Without targets it is 0. For logits that are too large to exist, call
    /// [`TiledLinearCrossEntropy::forward_over`](crate::tiling::TiledLinearCrossEntropy::forward_over) with `batch.targets` and [`total`](Self::total).
    ///
    /// # Shapes
    ///
    /// `logits`: [B, L, V] -> `[1]`.
    ///
    /// # Panics
    ///
    /// [Raises](burn_context_parallel::raise) if the logits are not of these tokens, or a target is not below V.
    pub fn loss(&self, logits: Tensor<3>) -> Tensor<1> {
        let targets = self.shard.targets.clone();
        let loss = tiled_cross_entropy_over(&Logits {}, logits, targets, None, self.total, |_, logits| logits);
        loss.or_raise().share
    }

    /// What metrics are made from; `loss` as [`loss`](Self::loss) gave it, or another share of the step's mean.
    pub fn output(&self, loss: Tensor<1>) -> TokenOutput {
        TokenOutput::new(loss, self.shard.valid, self.tokens_at_hand())
    }
}

/// The output layer of someone who has logits already.
#[derive(Module, Debug)]
struct Logits {}

impl Deref for SequenceBatch {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        &self.shard
    }
}

/// Positions with 0 at padding, which lies beyond the sequence: a table of positions has as many rows as a sequence has tokens.
fn without_padding(shard: &Shard) -> Tensor<2, Int> {
    let layout = shard.layout();
    let is_padding: Vec<bool> = layout.indices(shard.rank()).map(|index| index >= layout.len()).collect();
    if !is_padding.contains(&true) {
        return shard.positions.clone();
    }
    let positions = shard.positions_host().iter().zip(is_padding.iter().cycle());
    let positions: Vec<i64> = positions.map(|(position, padding)| if *padding { 0 } else { *position }).collect();
    Tensor::from_data(TensorData::new(positions, shard.positions.dims()), &shard.positions.device())
}

impl SequenceInput for SequenceBatch {
    fn valid(&self) -> usize {
        if self.counts { self.whole.valid() } else { 0 }
    }

    fn without_targets(mut self) -> Self {
        self.counts = false;
        self
    }

    fn shard(self, place: &Place, total: usize) -> Result<Self> {
        let layout = SequenceLayout::contiguous(self.whole.len(), place.sequence().size())?;
        let mut shard = self.whole.shard(&layout, place.sequence().rank(), place.device())?;
        if !self.counts {
            shard.targets = shard.targets.full_like(IGNORE_INDEX);
            (shard.valid, shard.valid_total) = (0, 0);
        }
        shard.positions = without_padding(&shard);
        Ok(Self { shard, total, ..self })
    }

    fn context(&self, place: &Place) -> Result<SequenceContext> {
        SequenceContext::new(place.sequence(), &self.shard)
    }
}
