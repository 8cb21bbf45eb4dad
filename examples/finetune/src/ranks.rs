//! Over ranks: what training and evaluation have in common.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::tensor::{Tensor, TensorData};
use burn_context_parallel::Result as CoreResult;
use burn_context_parallel::group::{LaunchConfig, Mesh, ProcessGroup, ReduceOp, launch};
use burn_context_parallel::sequence::Batch;
use burn_upipe::learner::training::Holding;
use burn_upipe::profile::heap;
use llama::{Devices, Llama, precision};

use crate::deal::deal;
use crate::error::Result;
use crate::plan::Plan;
use crate::start::{Ready, Start};

/// What a rank may end with.
pub(crate) type RankResult<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A long sequence on few cores may well take minutes between two collectives; a rank that fails is noticed at once anyway.
const TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// Runs `rank` on every rank with a model of its own on its device, and gives what the first one gives.
pub(crate) fn on_ranks<T: Send + 'static>(
    plan: &Plan,
    start: Start,
    devices: &Devices,
    rank: impl Fn(&Plan, Ready, &Mesh) -> RankResult<T> + Send + Sync + 'static,
) -> Result<T> {
    // What is not made in a phase of a rank.
    let weights = plan.profile.as_ref().map(|_| heap::Phase::new(None, "weights"));
    let copies = {
        let _weights = weights.map(heap::phase);
        start.copies(plan.ranks, devices)
    };
    let start = match start {
        Start::Whole(model) => {
            // Each rank has its own by now: without this the first weights would stay for the length of the run.
            drop(model);
            Start::Shards
        }
        start => start,
    };
    let shared = Arc::new((plan.clone(), Mutex::new(copies), start, devices.clone()));
    let config = LaunchConfig::new(plan.ranks).with_timeout(TIMEOUT);
    let results = launch(config, move |world| {
        let (plan, copies, start, devices) = &*shared;
        // What this rank allocates is counted as its own.
        let _owned = heap::own(world.rank());
        let mesh = Mesh::new(&world, plan.mesh)?;
        // The one that was made on this rank's device.
        let copy = copies.lock().unwrap_or_else(PoisonError::into_inner).get_mut(world.rank()).and_then(Option::take);
        let ready = {
            let _weights = weights.map(|weights| (heap::phase(weights), heap::own(world.rank())));
            start.on_rank(plan, copy, &mesh, devices.of_rank(world.rank()))?
        };
        rank(plan, ready, &mesh)
    })?;
    Ok(results.into_iter().next().expect("at least one rank"))
}

/// This rank's replica's part of some sequences as micro-batches of at most B rows; every replica has as many.
pub(crate) fn micro_batches(plan: &Plan, sequences: &[usize], mesh: &Mesh) -> CoreResult<Vec<Batch>> {
    let dealt = deal(sequences, mesh.coordinates().data, plan.mesh.data, plan.batch);
    dealt.iter().map(|rows| plan.corpus.batch(rows)).collect()
}

/// The model that computes. Rounded anew for each step: what an update adds gathers in f32, however small it is. Under FSDP whole
/// weights are rounded as they are gathered.
pub(crate) fn computing(plan: &Plan, model: &Llama, holding: &Holding) -> Llama {
    match holding {
        Holding::Sharded(_) => model.clone(),
        Holding::Whole(_) => precision::compute(model, plan.precision.dtype()),
    }
}

/// The sum of a number over ranks, the same bits on each.
pub(crate) fn sum(value: f64, world: &ProcessGroup) -> CoreResult<f64> {
    if world.size() == 1 {
        return Ok(value);
    }
    let sum = world.all_reduce(TensorData::from([value]), ReduceOp::Sum)?;
    Ok(sum.iter::<f64>().next().unwrap_or(f64::NAN))
}

/// The value of a tensor of one element.
pub(crate) fn number(x: &Tensor<1>) -> f64 {
    x.clone().inner().into_data().iter::<f64>().next().unwrap_or(f64::NAN)
}
