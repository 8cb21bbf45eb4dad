//! Block-level activation checkpointing: a block keeps its input, and is computed again when its gradient is due.
//!
//! ```text
//! kept per block:  B L E * size        (instead of every intermediate of the block)
//! price:           one more forward pass of the block, collectives included
//! ```
//!
//! # References
//!
//! arXiv 1604.06174, 2205.05198.

mod group;

use burn::module::Module;
use burn::tensor::Tensor;

use crate::offload::Offload;
use crate::recompute::{Join, recompute};

pub use group::forward_group;

/// A module whose intermediates are not kept: `forward` keeps its input only.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_upipe::checkpoint::Checkpointed;
///
/// let device = Device::flex().autodiff();
/// let block = Checkpointed::new(LinearConfig::new(4, 4).init(&device));
/// let x = Tensor::<2>::ones([3, 4], &device).require_grad();
/// let y = block.forward(x.clone(), |linear: &Linear, x| linear.forward(x).tanh());
/// let grads = y.sum().backward();
/// assert!(x.grad(&grads).is_some());
/// assert!(block.inner.weight.val().grad(&grads).is_some());
/// ```
#[derive(Module, Debug)]
pub struct Checkpointed<M> {
    /// The module itself.
    pub inner: M,
    #[module(skip)]
    enabled: bool,
}

impl<M: Module + 'static> Checkpointed<M> {
    /// Checkpoints `inner`.
    pub fn new(inner: M) -> Self {
        Self { inner, enabled: true }
    }

    /// Switches checkpointing off (`false`) or on: the result is the same.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Whether it is on.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// `f(inner, x)`, with nothing kept for the backward pass but `x`.
    ///
    /// `f` runs again in the backward pass. It may capture tensors without autodiff only. The sequence scope in which this is
    /// called is entered again for the recomputation.
    ///
    /// # Panics
    ///
    /// [Raises](burn_context_parallel::raise) an [`Error::Invalid`](burn_context_parallel::Error::Invalid) in the backward pass if the
    /// recomputation does not reproduce the result: dropout and other randomness inside a checkpointed block are refused, because
    /// the gradient would be that of another mask. Note that dropout is inactive in the block's first pass.
    ///
    /// # Memory
    ///
    /// [`saved_bytes`] are kept; the backward pass adds one block's intermediates.
    ///
    /// # Communication
    ///
    /// The block's forward collectives once more.
    pub fn forward<const D: usize, const E: usize, F>(&self, x: Tensor<D>, f: F) -> Tensor<E>
    where
        F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + 'static,
    {
        self.forward_kept(x, None, f)
    }

    /// [`forward`](Self::forward), with `x` kept by an engine.
    pub(crate) fn forward_kept<const D: usize, const E: usize, F>(
        &self,
        x: Tensor<D>,
        offload: Option<&Offload>,
        f: F,
    ) -> Tensor<E>
    where
        F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + 'static,
    {
        if !self.enabled {
            return f(&self.inner, x);
        }
        // One tile along a dim that does not exist: the whole.
        recompute("Checkpointed::forward", &self.inner, x, offload, D.max(E), vec![1], Join::Concat, move |m, x, _| {
            f(m, x)
        })
    }
}

/// Bytes that a checkpointed block keeps: its input [B, L, E].
pub fn saved_bytes(batch: usize, local: usize, width: usize, size: usize) -> usize {
    batch * local * width * size
}
