//! An optimizer that steps what a rank holds, and keeps its state where there is room.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::{GradientsParams, LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

/// Where the optimizer's state is between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StatePlace {
    /// On the parameters' device.
    #[default]
    Device,
    /// In host memory: a parameter's state goes to the device for its own step, and comes back. Two more moves of 2 N / P elements a
    /// step for AdamW, and no device memory but for one parameter's state.
    Host,
}

/// Steps every parameter of a module that has a gradient, sharded or not, with any of Burn's optimizers.
///
/// As `ModuleOptimizer`, with a choice of where state waits, and with states that can be taken and given parameter by
/// parameter, so that a checkpoint never exists twice in memory. It has no clipping of its own: see
/// [`Fsdp::clip_grad_norm`](super::Fsdp::clip_grad_norm).
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{AdamWConfig, GradientsParams};
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::fsdp::{ShardedOptimizer, StatePlace};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 2).init(&device);
/// let mut optimizer = ShardedOptimizer::new(AdamWConfig::new().build(), StatePlace::Host);
/// let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum();
/// let grads = GradientsParams::from_grads(loss.backward(), &model);
/// let model = optimizer.step(1e-2, model, grads);
/// assert!(optimizer.export::<2>(model.weight.id).is_some());
/// ```
pub struct ShardedOptimizer<O: Optimizer> {
    optimizer: O,
    place: StatePlace,
    states: HashMap<ParamId, State>,
}

enum State {
    /// `O::State<D>` of the parameter's D.
    Device(Box<dyn Any + Send + Sync>),
    Host(StateSink),
}

impl<O: Optimizer> fmt::Debug for ShardedOptimizer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedOptimizer").field("place", &self.place).field("states", &self.states.len()).finish()
    }
}

impl<O: Optimizer> ShardedOptimizer<O> {
    /// No state yet.
    pub fn new(optimizer: O, place: StatePlace) -> Self {
        Self { optimizer, place, states: HashMap::new() }
    }

    /// Steps the parameters that have a gradient; others, and their states, stay as they are.
    ///
    /// # Memory
    ///
    /// A parameter and its state exist twice while it is stepped.
    pub fn step<M: Module>(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        module.map(&mut Step { optimizer: self, lr, grads })
    }

    /// The state of a parameter of D dims in host memory, named by field; `None` if it has none.
    ///
    /// # Panics
    ///
    /// If the parameter has another number of dims.
    pub fn export<const D: usize>(&self, id: ParamId) -> Option<StateSink> {
        match self.states.get(&id)? {
            State::Device(state) => Some(flatten(state.downcast_ref::<O::State<D>>().expect(DIMS))),
            State::Host(sink) => Some(copy(sink)),
        }
    }

    /// Gives a parameter of D dims its state back. Whether the fields made a state: if not, nothing has changed.
    pub fn import<const D: usize>(&mut self, id: ParamId, source: StateSource, device: &Device) -> bool {
        let mut source = source;
        let device = device.clone().inner();
        let Some(state) = O::State::<D>::state_unflatten("", &mut source, &device) else { return false };
        let state = self.put::<D>(state);
        self.states.insert(id, state);
        true
    }

    /// Forgets all states.
    pub fn clear(&mut self) {
        self.states.clear();
    }

    fn put<const D: usize>(&self, state: O::State<D>) -> State {
        match self.place {
            StatePlace::Device => State::Device(Box::new(state)),
            StatePlace::Host => State::Host(flatten(&state)),
        }
    }

    fn take<const D: usize>(&mut self, id: ParamId, device: &Device) -> Option<O::State<D>> {
        match self.states.remove(&id)? {
            State::Device(state) => {
                let state = state.downcast::<O::State<D>>().unwrap_or_else(|_| panic!("{DIMS}"));
                Some(O::to_device(*state, device))
            }
            State::Host(sink) => {
                let mut source = StateSource::new(sink.scalars.into_iter().collect());
                for (name, data) in sink.tensors {
                    source.insert_tensor(name, data);
                }
                O::State::<D>::state_unflatten("", &mut source, device)
            }
        }
    }
}

const DIMS: &str = "a parameter keeps its number of dims";

fn flatten<S: RecordState>(state: &S) -> StateSink {
    let mut sink = StateSink::default();
    state.state_flatten("", &mut sink);
    sink
}

fn copy(sink: &StateSink) -> StateSink {
    StateSink { tensors: sink.tensors.clone(), scalars: sink.scalars.clone() }
}

struct Step<'a, O: Optimizer> {
    optimizer: &'a mut ShardedOptimizer<O>,
    lr: LearningRate,
    grads: GradientsParams,
}

impl<O: Optimizer> ModuleMapper for Step<'_, O> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        let Some(grad) = self.grads.remove::<D>(id) else { return param };
        param.map(|value| {
            let (trains, strategy) = (value.is_require_grad(), value.gradient_checkpointing_strategy());
            let autodiff = value.is_autodiff();
            let value = value.inner();
            let state = self.optimizer.take::<D>(id, &value.device());
            let (value, state) = self.optimizer.optimizer.step(self.lr, value, grad, state);
            if let Some(state) = state {
                let state = self.optimizer.put::<D>(state);
                self.optimizer.states.insert(id, state);
            }
            if !autodiff {
                return value;
            }
            let mut value = Tensor::from_inner(value);
            if let Some(strategy) = strategy {
                value = value.with_gradient_checkpointing_strategy(strategy);
            }
            value.set_require_grad(trains)
        })
    }
}
