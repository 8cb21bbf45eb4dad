//! A module whose checkpoints leave the device.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_context_parallel::{Error, raise};

use super::Offload;
use crate::checkpoint::Checkpointed;

/// A checkpointed module whose kept input waits outside the device.
///
/// Without an [`Offload`] it is exactly the inner module. Clones share the engine: give each rank's copy the rank's own
/// ([`with`](Self::with)), on that rank.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_upipe::checkpoint::Checkpointed;
/// use burn_upipe::offload::{Offload, OffloadConfig, Offloaded};
///
/// let device = Device::flex().autodiff();
/// let offload = Offload::new(OffloadConfig::new())?;
/// let linear = Checkpointed::new(LinearConfig::new(4, 4).init(&device));
/// let block = Offloaded::new(linear).with(Some(&offload));
/// let x = Tensor::<2>::ones([3, 4], &device).require_grad();
/// let y = block.forward(x.clone(), |linear: &Linear, x| linear.forward(x).tanh());
/// assert_eq!(offload.stats().host_bytes, 3 * 4 * 4);
/// let grads = y.sum().backward();
/// assert!(x.grad(&grads).is_some());
/// assert_eq!(offload.stats().host_bytes, 0);
/// # Ok::<(), burn_upipe::offload::OffloadError>(())
/// ```
#[derive(Module, Debug)]
pub struct Offloaded<M> {
    /// The module itself.
    pub inner: M,
    #[module(skip)]
    offload: Option<Offload>,
}

impl<M> Offloaded<M> {
    /// Wraps `inner`; nothing is offloaded yet.
    pub fn new(inner: M) -> Self {
        Self { inner, offload: None }
    }

    /// The engine that keeps its inputs, or none.
    pub fn with(mut self, offload: Option<&Offload>) -> Self {
        self.offload = offload.cloned();
        self
    }

    /// The engine that keeps its inputs.
    pub fn offload(&self) -> Option<&Offload> {
        self.offload.as_ref()
    }
}

impl<M: Module + 'static> Offloaded<Checkpointed<M>> {
    /// [`Checkpointed::forward`], with `x` kept by the engine.
    ///
    /// The copy begins at once and runs beside the forward pass; the device's memory is free when the caller does not hold `x` any
    /// more, either.
    ///
    /// # Panics
    ///
    /// As [`Checkpointed::forward`], and [raises](burn_context_parallel::raise) an [`OffloadError`](super::OffloadError), in forward or
    /// in backward. A forward pass that fails [gives up](Offload::give_up) what blocks have saved with this engine. An engine beside a checkpoint that is switched off is refused: nothing of it could leave.
    ///
    /// # Memory
    ///
    /// [`saved_bytes`](super::saved_bytes) of one layer outside the device; on it [`in_flight_bytes`](super::in_flight_bytes) for all
    /// layers together.
    ///
    /// # Communication
    ///
    /// That of [`Checkpointed::forward`].
    pub fn forward<const D: usize, const E: usize, F>(&self, x: Tensor<D>, f: F) -> Tensor<E>
    where
        F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + 'static,
    {
        if self.offload.is_some() && !self.inner.is_enabled() {
            raise(Error::invalid(
                "Offloaded::forward",
                "an engine, and checkpointing is off: the block keeps all of its intermediates",
                "switch checkpointing on, or offload off",
            ));
        }
        self.inner.forward_kept(x, self.offload.as_ref(), f)
    }
}
