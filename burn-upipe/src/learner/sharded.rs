//! A model whose parameters a learner may divide between ranks.

use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut};

use burn::module::{
    Content, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer, MultiGradientsParams};
use burn::tensor::Device;
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use burn_context_parallel::fsdp::Fsdp;
use burn_context_parallel::{Error, OrRaise, Result};

const NAME: &str = "ContextParallelStrategy::with_fsdp";

/// The model of a learner that trains [`with_fsdp`](super::ContextParallelStrategy::with_fsdp): the model itself, and a way in.
///
/// A `Learner` gives nobody its model to change; the one door is the fork that each rank makes of it. This wrapper opens it: parameters
/// become shards there. Otherwise it is transparent: steps, parameter paths, records and what it prints are those of the model.
///
/// ```text
/// Learner::new(model, optimizer, rate)                ->  Learner::new(Sharded::new(model), optimizer, rate)
/// let model = training.launch(learner).model;         ->  let model = training.launch(learner).model.into_inner();
/// ```
#[derive(Clone)]
pub struct Sharded<M> {
    inner: M,
}

impl<M> Sharded<M> {
    /// The model, whole until ranks fork it.
    pub fn new(inner: M) -> Self {
        Self { inner }
    }

    /// The model.
    pub fn into_inner(self) -> M {
        self.inner
    }
}

thread_local! {
    static DOOR: RefCell<Option<Fsdp>> = const { RefCell::new(None) };
}

/// Runs `fork`, which forks a learner's model, with the door open.
pub(super) fn shard_while(fsdp: &Fsdp, fork: impl FnOnce()) -> Result<()> {
    struct Close;
    impl Drop for Close {
        fn drop(&mut self) {
            DOOR.take();
        }
    }
    DOOR.set(Some(fsdp.clone()));
    let close = Close;
    fork();
    if DOOR.take().is_some() {
        return Err(Error::invalid(
            NAME,
            "the learner's model is not Sharded, so that its parameters cannot be divided",
            "use Learner::new(Sharded::new(model), ..)",
        ));
    }
    drop(close);
    Ok(())
}

impl<M: Module> Module for Sharded<M> {
    fn fork(self, device: &Device) -> Self {
        let inner = match DOOR.take() {
            // Shards first: no rank's device ever holds the whole.
            Some(fsdp) => fsdp.shard(self.inner).or_raise(),
            None => self.inner,
        };
        Self { inner: inner.fork(device) }
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.inner.collect_devices(devices)
    }

    fn to_device(self, device: &Device) -> Self {
        Self { inner: self.inner.to_device(device) }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.inner.visit(visitor);
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        Self { inner: self.inner.map(mapper) }
    }

    fn train(self) -> Self {
        Self { inner: self.inner.train() }
    }

    fn valid(&self) -> Self {
        Self { inner: self.inner.valid() }
    }

    fn materialize(self) -> Self {
        Self { inner: self.inner.materialize() }
    }
}

impl<M: TrainStep + Module> TrainStep for Sharded<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: Self::Input) -> TrainOutput<Self::Output> {
        self.inner.step(item)
    }

    fn optimize(self, optim: &mut ModuleOptimizer, lr: ModuleLearningRate, grads: GradientsParams) -> Self
    where
        Self: Module + Sized,
    {
        Self { inner: self.inner.optimize(optim, lr, grads) }
    }

    fn optimize_multi(self, optim: &mut ModuleOptimizer, lr: ModuleLearningRate, grads: MultiGradientsParams) -> Self
    where
        Self: Module + Sized,
    {
        Self { inner: self.inner.optimize_multi(optim, lr, grads) }
    }
}

impl<M: InferenceStep> InferenceStep for Sharded<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: Self::Input) -> Self::Output {
        self.inner.step(item)
    }
}

impl<M> Deref for Sharded<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.inner
    }
}

impl<M> DerefMut for Sharded<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.inner
    }
}

impl<M: fmt::Debug> fmt::Debug for Sharded<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<M: fmt::Display> fmt::Display for Sharded<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<M: ModuleDisplayDefault> ModuleDisplayDefault for Sharded<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.inner.content(content)
    }

    fn num_params(&self) -> usize {
        self.inner.num_params()
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Sharded<M> {
    fn format(&self, settings: DisplaySettings) -> String {
        self.inner.format(settings)
    }
}
