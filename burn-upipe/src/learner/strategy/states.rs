//! Weights, gradients and optimizer state: whole on every rank, or in shards.

use burn::module::Module;
use burn::train::{Learner, LearnerModel};
use burn_context_parallel::Result;
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig};

use super::place::Place;
use crate::learner::sharded::shard_while;
use crate::learner::training::Holding;

/// Makes the learner's model this rank's own: new leaves, on its device, whole or in shards.
pub(super) fn prepare<M: LearnerModel>(
    place: &Place,
    fsdp: Option<&FsdpConfig>,
    learner: &mut Learner<M>,
) -> Result<Holding> {
    let Some(config) = fsdp else {
        learner.fork(place.device());
        return Ok(Holding::Whole(place.world().clone()));
    };
    let fsdp = Fsdp::over(place.world(), config.clone())?;
    shard_while(&fsdp, || learner.fork(place.device()))?;
    Ok(Holding::Sharded(fsdp))
}

/// The model with whole parameters as they were trained; every rank calls it.
pub(super) fn whole<M: Module>(holding: &Holding, model: M) -> Result<M> {
    match holding {
        Holding::Whole(_) => Ok(model),
        Holding::Sharded(fsdp) => fsdp.gather_exact(&model),
    }
}
