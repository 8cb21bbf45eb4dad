//! Several blocks as one checkpoint: only the first one's input is kept, the others' intermediates exist for a whole group.
//!
//! ```text
//! forward:   y_1 = f(m_1, x), .., y_k = f(m_k, y_{k-1})       no tape; kept: x
//! backward:  y_1 .. y_k again, each on a tape of its own      one forward pass more, as with single blocks
//!            k .. 1: pulled back, block by block              a block's tape, weights and gradients go before the next one's
//! ```
//!
//! Blocks are gathered one by one, if they are sharded, in both passes: as often as single checkpoints.
//!
//! In a profile each block is a phase of its own, `block` i: once in forward; in backward twice, when it is computed again (with
//! `recompute` within), and when it is pulled back.

use burn::backend::TensorMetadata;
use burn::module::Module;
use burn::tensor::{DType, Tensor};
use burn_context_parallel::fsdp::Unit;
use burn_context_parallel::phase::{self, Pass};
use burn_context_parallel::vjp::{InputGradients, pullback};
use burn_context_parallel::{OrRaise, raise};

use crate::offload::Offload;
use crate::recompute::{Total, Waiting, Witness, captured, leaves, two_passes};

const NAME: &str = "checkpoint::forward_group";

/// `f` of one block after the other, as one checkpoint: `x` is kept, by `offload` if there is one, and nothing else. `first` is the
/// number of the first block, for who [listens](burn_context_parallel::phase).
///
/// As for [`Checkpointed::forward`](super::Checkpointed::forward), of which this is the form for several blocks: `f` runs again in
/// the backward pass, and may capture tensors without autodiff only.
///
/// # Panics
///
/// As [`Checkpointed::forward`](super::Checkpointed::forward), and [`Offloaded::forward`](crate::offload::Offloaded::forward).
///
/// # Memory
///
/// [`saved_bytes`](super::saved_bytes) for the whole group. The backward pass adds the intermediates of all its blocks, and, if they are
/// sharded, their whole weights; both go block by block. A group of all blocks keeps one input, and saves nothing of the
/// intermediates.
///
/// # Communication
///
/// The blocks' forward collectives once more; with sharded blocks a gather each in forward, a gather and a reduction each in
/// backward.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_upipe::checkpoint::forward_group;
///
/// let device = Device::flex().autodiff();
/// let blocks: Vec<Linear> = (0..3).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
/// let x = Tensor::<2>::ones([5, 4], &device).require_grad();
/// let y = forward_group(&blocks, 0, None, x.clone(), |linear: &Linear, x| linear.forward(x).tanh());
/// let grads = y.sum().backward();
/// assert!(x.grad(&grads).is_some());
/// assert!(blocks.iter().all(|block| block.weight.val().grad(&grads).is_some()));
/// ```
pub fn forward_group<'a, M, F, const D: usize>(
    blocks: impl IntoIterator<Item = &'a M>,
    first: usize,
    offload: Option<&Offload>,
    x: Tensor<D>,
    f: F,
) -> Tensor<D>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<D>) -> Tensor<D> + Send + 'static,
{
    let blocks: Vec<&M> = blocks.into_iter().collect();
    let of_blocks: Vec<_> = blocks.iter().map(|block| leaves(NAME, *block)).collect();
    if blocks.is_empty() {
        return x;
    }
    let units: Vec<Unit> = blocks.iter().map(|block| Unit::of(*block)).collect();
    let block_phase = move |at: usize, pass| phase::pass("block", Some(first + at), pass);
    if !x.is_autodiff() && !of_blocks.iter().flatten().any(|leaf| leaf.autodiff) {
        return blocks.iter().zip(&units).enumerate().fold(x, |x, (at, (block, unit))| {
            let _phase = block_phase(at, Pass::Forward);
            f(&unit.gather(*block).or_raise(), x)
        });
    }
    let dtypes = of_blocks.iter().map(|leaves| leaves.iter().map(|leaf| leaf.tensor.dtype()).collect::<Vec<DType>>());
    let shards = blocks.into_iter().zip(units).zip(dtypes);
    let shards = shards.map(|((block, unit), dtypes)| (block.clone().valid(), unit, dtypes)).collect();
    let forward = move |(shards, f): &Parts<M, F>, x: Tensor<D>, tracked: bool| {
        let mut y = x;
        for (at, (block, unit, _)) in shards.iter().enumerate() {
            let _phase = block_phase(at, Pass::Forward);
            y = f(&unit.gather(block).or_raise(), y);
            if y.is_autodiff() {
                raise(captured(NAME));
            }
        }
        let witness = tracked.then(|| Witness::of(&y));
        (y, witness)
    };
    let backward = move |(shards, f): Parts<M, F>, saved: Waiting<D>, dy: Tensor<D>| {
        let mut x: Option<Tensor<D>> = None;
        let mut tapes = Vec::with_capacity(shards.len());
        for (at, (block, unit, dtypes)) in shards.into_iter().enumerate() {
            let _phase = block_phase(at, Pass::Backward);
            let input = x.take().unwrap_or_else(|| saved.kept.get().or_raise());
            let module = unit.gather(&block).or_raise().train();
            let from = input.autodiff().require_grad();
            let to = {
                let _phase = phase::enter("recompute", None);
                f(&module, from.clone())
            };
            x = Some(to.clone().inner());
            tapes.push((module, unit, dtypes, from, to));
        }
        drop(x);
        if let Some((.., y)) = tapes.last() {
            saved.witness.check(NAME, y);
        }
        let mut dy = Some(dy);
        let mut parameters: Vec<InputGradients> = Vec::with_capacity(tapes.len());
        while let Some((module, unit, dtypes, from, to)) = tapes.pop() {
            let _phase = block_phase(tapes.len(), Pass::Backward);
            let mut total = Total::default();
            // Without a gradient nothing before it has one; sharded blocks reduce all the same, as on other ranks.
            if let Some(of_output) = dy.take() {
                let mut gradients = pullback(to, of_output);
                dy = from.grad_remove(&mut gradients);
                total.add_parameters(&module, &mut gradients);
            }
            drop((module, from));
            parameters.push(total.into_parameters(&dtypes, &unit));
        }
        drop(saved);
        std::iter::once(dy.map(Tensor::into_dispatch)).chain(parameters.into_iter().rev().flatten()).collect()
    };
    two_passes(of_blocks.into_iter().flatten().collect(), x, offload, (shards, f), forward, backward)
}

/// Each block as it is held, with the types of its parameters; and what is computed with it.
type Parts<M, F> = (Vec<(M, Unit, Vec<DType>)>, F);
