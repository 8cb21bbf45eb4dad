//! Weights, gradients and optimizer state: whole on every rank, or in shards.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use burn::train::{Learner, LearnerModel};
use burn_context_parallel::Result;
use burn_context_parallel::collective::{clip_grad_norm, sum_gradients};
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig};

use super::place::Place;
use crate::learner::sharded::shard_while;

/// How a rank holds the model.
pub(super) enum States {
    Whole,
    Sharded(Fsdp),
}

impl States {
    /// Makes the learner's model this rank's own: new leaves, on its device.
    pub fn prepare<M: LearnerModel>(
        place: &Place,
        fsdp: Option<&FsdpConfig>,
        learner: &mut Learner<M>,
    ) -> Result<Self> {
        match fsdp {
            None => {
                learner.fork(place.device());
                Ok(Self::Whole)
            }
            Some(config) => {
                let fsdp = Fsdp::over(place.world(), config.clone())?;
                shard_while(&fsdp, || learner.fork(place.device()))?;
                Ok(Self::Sharded(fsdp))
            }
        }
    }

    /// Before a forward pass.
    pub fn begin<M: Module>(&self, model: &M) {
        if let Self::Sharded(fsdp) = self {
            fsdp.begin(model);
        }
    }

    /// After the last backward pass of a step: gradients of the whole, and clipped.
    pub fn finish<M: Module>(
        &self,
        grads: GradientsParams,
        model: &M,
        max_norm: Option<f64>,
        place: &Place,
    ) -> Result<GradientsParams> {
        let grads = match self {
            Self::Whole => sum_gradients(grads, model, place.world())?,
            Self::Sharded(fsdp) => fsdp.finish(grads, model)?,
        };
        let Some(max_norm) = max_norm else { return Ok(grads) };
        let (grads, norm) = match self {
            Self::Whole => clip_grad_norm(grads, model, max_norm, place.world())?,
            Self::Sharded(fsdp) => fsdp.clip_grad_norm(grads, model, max_norm)?,
        };
        log::debug!("norm of gradients: {norm}");
        Ok(grads)
    }

    /// The model with whole parameters, on the first rank at least; every rank calls it.
    pub fn whole<M: Module>(&self, model: M) -> Result<M> {
        let Self::Sharded(fsdp) = self else { return Ok(model) };
        let whole = fsdp.gather(&model)?;
        if fsdp.config().compute.is_none() {
            return Ok(whole);
        }
        // Gathered are the values that were computed with, which are coarser than those that were trained.
        let mut values = HashMap::new();
        fsdp.each_whole(&model, |path, value| {
            values.insert(path.to_owned(), value);
            Ok(())
        })?;
        Ok(whole.map(&mut Exact { values, path: Vec::new() }))
    }
}

/// Replaces parameters by path.
struct Exact {
    values: HashMap<String, TensorData>,
    path: Vec<String>,
}

impl ModuleMapper for Exact {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.values.remove(&self.path.join(".")) else { return param };
        param.map(|old| {
            let (trains, dtype) = (old.is_require_grad(), value.dtype());
            Tensor::from_data(value, (&old.device(), dtype)).set_require_grad(trains)
        })
    }
}
