//! `device.context_parallel(&group)`: the value that cuts batches and opens scopes.

use std::sync::Arc;

use burn::tensor::kind::Basic;
use burn::tensor::{Device, Tensor};

use super::scope::{self, SequenceContext};
use crate::group::ProcessGroup;
use crate::sequence::{Batch, SequenceLayout, Shard};
use crate::{Error, OrRaise, Result};

/// A device, and the group that shares a sequence with it.
///
/// ```
/// use burn::prelude::*;
/// use burn::tensor::ops::AttentionModuleOptions;
/// use burn_context_parallel::attention::{ContextParallelDevice, attention};
/// use burn_context_parallel::group::launch;
/// use burn_context_parallel::sequence::Batch;
///
/// let batch = Batch::from_rows(&[(0..10).collect()])?;
/// launch(2, move |world| {
///     let cp = Device::flex().context_parallel(&world);
///     let shard = cp.shard(&batch)?;
///     assert_eq!(shard.tokens.dims(), [1, 5]);
///     let q = shard.tokens.clone().float().reshape([1, 1, 5, 1]);
///     let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
///     // Five tokens went in here, and each of them has seen all that came before it, on both ranks.
///     let out = cp.scope(&shard, || attention(q.clone(), q.clone(), q, None, None, options));
///     assert_eq!(out.dims(), [1, 1, 5, 1]);
///     Ok::<_, burn_context_parallel::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ContextParallel {
    device: Device,
    group: ProcessGroup,
}

/// Adds [`context_parallel`](Self::context_parallel) to Burn's device, named after `device.autodiff()`.
pub trait ContextParallelDevice {
    /// This device as one rank's of `group`.
    fn context_parallel(&self, group: &ProcessGroup) -> ContextParallel;
}

impl ContextParallelDevice for Device {
    fn context_parallel(&self, group: &ProcessGroup) -> ContextParallel {
        ContextParallel { device: self.clone(), group: group.clone() }
    }
}

impl ContextParallel {
    /// The ranks that share the sequence.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// This rank's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// This rank's part of `batch`, in the contiguous layout.
    ///
    /// # Errors
    ///
    /// None for a batch that could be made; the signature leaves room for layouts that refuse a length.
    pub fn shard(&self, batch: &Batch) -> Result<Shard> {
        let layout = SequenceLayout::contiguous(batch.len(), self.group.size())?;
        batch.shard(&layout, self.group.rank(), &self.device)
    }

    /// Runs `f` with `shard`'s sequence as the one at hand: [`attention`](super::attention()) in it runs across the ranks.
    ///
    /// # Panics
    ///
    /// [Raises](crate::raise) if the shard was cut for another group.
    pub fn scope<R>(&self, shard: &Shard, f: impl FnOnce() -> R) -> R {
        let context = SequenceContext::new(&self.group, shard).or_raise();
        scope::scope(Some(context), f)
    }

    /// The whole sequence from all ranks' shards [.., L, ..] -> [.., S, ..], without padding; for looking at, not for training.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the part does not fit the layout, or ranks' parts each other; [`Error::Group`] if the collective fails;
    /// an autodiff tensor is refused.
    ///
    /// # Communication
    ///
    /// Every rank receives the other ranks' shards.
    pub fn unshard<const D: usize, K: Basic>(
        &self,
        layout: &Arc<SequenceLayout>,
        part: Tensor<D, K>,
        dim: usize,
    ) -> Result<Tensor<D, K>>
    where
        Tensor<D, K>: crate::group::Payload,
    {
        let (rank, dims) = (self.group.rank(), part.dims());
        if layout.ranks() != self.group.size() || dim >= D || dims[dim] != layout.local_len(rank) {
            return Err(Error::invalid(
                "ContextParallel::unshard",
                format!(
                    "a part of shape {dims:?} at dim {dim} on rank {rank} of {}; the layout is {layout}",
                    self.group.size()
                ),
                "pass the rank's own part, the dim of its tokens, and the layout that it was cut with",
            ));
        }
        let parts = self.group.all_gather_uneven(part)?;
        let others = |part: &Tensor<D, K>| (0..D).all(|d| d == dim || part.dims()[d] == dims[d]);
        if let Some(other) = parts.iter().position(|part| !others(part)) {
            return Err(Error::invalid(
                "ContextParallel::unshard",
                format!("rank {other} gave shape {:?}, this rank {dims:?}", parts[other].dims()),
                "all dims but that of the tokens must be equal on all ranks",
            ));
        }
        Ok(layout.assemble(&parts, dim))
    }
}
