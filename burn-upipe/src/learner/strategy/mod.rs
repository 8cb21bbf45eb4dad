//! burn-train's training strategy for one sequence on many ranks.
//!
//! ```text
//! main thread        rank 0                          rank 1 ..
//! fit ── launch ──┬─ reads the loader, one round ──> takes its items          a round: the items of one optimizer step
//!                 ├─ agree: go on, end, stop ──────> agree
//!                 ├─ cut, step in the scope          cut, step in the scope   attention crosses ranks in both directions
//!                 ├─ sum gradients, optimizer        sum gradients, optimizer
//!                 └─ metrics, renderer, checkpoints
//! ```

mod feed;
mod fit;
mod place;
mod rank;
mod states;

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use burn::train::{InferenceStep, LearnerModel, TrainStep, TrainingStrategy};
use burn_context_parallel::fsdp::FsdpConfig;
use burn_context_parallel::group::{LaunchConfig, MAX_RANKS, MeshShape};
use burn_context_parallel::{Error, Result};

pub use place::Place;

use super::{RankOutput, SequenceInput};

const NAME: &str = "ContextParallelStrategy";

/// Trains a `Learner`'s model on a mesh of ranks: each sequence is shared by the ranks of a replica, replicas have different items.
///
/// A model that trains on one device trains here, if its step takes a [`SequenceInput`] ([`SequenceBatch`](super::SequenceBatch)), its
/// loss is `batch.loss(logits)`, its output a [`RankOutput`] ([`TokenOutput`](super::TokenOutput)), and its attention one of ours
/// ([`attention`](burn_context_parallel::attention::attention()), or a module that calls it).
///
/// # What a step is
///
/// An optimizer step takes a round of items from the one loader: item i goes to replica i mod `data`, and with
/// `grads_accumulation(n)` a replica takes n of them, one after the other. The loss is the mean over all valid targets of the round,
/// whoever holds them; gradients are summed over all ranks, which then hold the same weights, bit by bit. Learning rate and metrics
/// advance once a round. The last round of an epoch may be smaller: replicas without an item repeat another's without its targets, so that
/// every rank makes every step.
///
/// # Stops and errors
///
/// Every round begins with an agreement: an interruption, early stopping, or a loader's error ends all ranks at the same step. An
/// error or a panic on one rank ends the others' collectives, and arrives as `LearningResult::error`
/// ([`TrainingError::Workers`](burn::train::TrainingError::Workers), with the rank as the device). The model in the result is then that of
/// the last whole step.
///
/// # Memory
///
/// Each rank has its weights, gradients and optimizer state, whole ([`with_fsdp`](Self::with_fsdp): 1 / P of them), and activations
/// of S / P tokens.
///
/// # Communication
///
/// A step: that of attention, one all-reduce of every gradient, and 8 bytes to each rank for the agreement;
/// [`TokenOutput`](super::TokenOutput) adds 48.
///
/// ```
/// use std::sync::Arc;
///
/// use burn::data::dataloader::DataLoader;
/// use burn::train::{InferenceStep, Learner, LearnerModel, LearningResult, SupervisedTraining, TrainStep};
/// use burn_context_parallel::group::MeshShape;
/// use burn_upipe::learner::{ContextParallelStrategy, SequenceBatch, TokenOutput};
///
/// fn train<M>(learner: Learner<M>, data: Arc<dyn DataLoader<SequenceBatch>>) -> burn_context_parallel::Result<LearningResult<M>>
/// where
///     M: LearnerModel,
///     M: TrainStep<Input = SequenceBatch, Output = TokenOutput>,
///     M: InferenceStep<Input = SequenceBatch, Output = TokenOutput>,
/// {
///     // Four ranks share each sequence; two such replicas.
///     let strategy = ContextParallelStrategy::new(MeshShape { data: 2, ulysses: 4, ..Default::default() })?;
///     let training = SupervisedTraining::new("run", data.clone(), data);
///     Ok(training.with_training_strategy(strategy.into()).num_epochs(3).launch(learner))
/// }
/// ```
#[derive(Clone, Debug)]
pub struct ContextParallelStrategy {
    shape: MeshShape,
    launch: LaunchConfig,
    devices: Vec<Device>,
    fsdp: Option<FsdpConfig>,
    max_norm: Option<f64>,
}

impl ContextParallelStrategy {
    /// On a mesh of that shape, on the device of the learner's model.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a degree is 0, or there are more ranks than [can be launched](MAX_RANKS); [`Error::Unsupported`] for a
    /// ring.
    ///
    /// ```
    /// use burn_context_parallel::group::MeshShape;
    /// use burn_upipe::learner::ContextParallelStrategy;
    ///
    /// assert!(ContextParallelStrategy::new(MeshShape { data: 2, ulysses: 4, ..Default::default() }).is_ok());
    /// let ring = ContextParallelStrategy::new(MeshShape { ring: 2, ulysses: 4, ..Default::default() });
    /// assert!(ring.unwrap_err().to_string().contains("use ulysses=8"));
    /// ```
    pub fn new(shape: MeshShape) -> Result<Self> {
        let ranks = shape.ranks().unwrap_or(usize::MAX);
        shape.check(ranks)?;
        if ranks > MAX_RANKS {
            return Err(Error::invalid(NAME, format!("{shape} is {ranks} ranks"), format!("use at most {MAX_RANKS}")));
        }
        if shape.ring > 1 {
            return Err(Error::unsupported(
                NAME,
                format!("a ring of {}", shape.ring),
                format!("use ulysses={} and no ring", shape.ring * shape.ulysses),
            ));
        }
        Ok(Self { shape, launch: LaunchConfig::new(ranks), devices: Vec::new(), fsdp: None, max_norm: None })
    }

    /// Trains on `device`, all ranks alike, instead of on that of the learner's model.
    pub fn with_device(self, device: Device) -> Self {
        Self { devices: vec![device], ..self }
    }

    /// Trains each rank on a device of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there are not as many devices as ranks.
    pub fn with_devices(self, devices: Vec<Device>) -> Result<Self> {
        if devices.len() != self.launch.ranks {
            return Err(Error::invalid(
                NAME,
                format!("{} devices for the {} ranks of {}", devices.len(), self.launch.ranks, self.shape),
                "give one device for every rank; one may come several times",
            ));
        }
        Ok(Self { devices, ..self })
    }

    /// Starts ranks with other limits: timeout, grace, stack. The number of ranks stays that of the mesh.
    pub fn with_launch(self, limits: LaunchConfig) -> Self {
        Self { launch: LaunchConfig { ranks: self.launch.ranks, ..limits }, ..self }
    }

    /// Divides weights, gradients and optimizer state between all ranks. The learner's model must be
    /// [`Sharded`](super::Sharded).
    ///
    /// Training begins with the whole model in memory once, and validates on shards. The model in the result is whole, on the first rank's
    /// device; after an error it is the first rank's shards, since a failed world gathers nothing. burn-train's checkpointers, which
    /// want everything on one rank, are refused. A limit of the optimizer on each gradient's norm would see shards: use
    /// [`with_max_norm`](Self::with_max_norm).
    pub fn with_fsdp(self, config: FsdpConfig) -> Self {
        Self { fsdp: Some(config), ..self }
    }

    /// Scales each step's gradients, all parameters together, to a norm of at most `max_norm`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if it is not a positive number.
    pub fn with_max_norm(self, max_norm: f64) -> Result<Self> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            return Err(Error::invalid(NAME, format!("max_norm {max_norm}"), "use a positive number"));
        }
        Ok(Self { max_norm: Some(max_norm), ..self })
    }

    /// The mesh's shape.
    pub fn shape(&self) -> MeshShape {
        self.shape
    }

    fn device<M: Module>(&self, rank: usize, model: &M) -> Device {
        let device = match &self.devices[..] {
            [] => model.devices().into_iter().next().unwrap_or_default(),
            [device] => device.clone(),
            devices => devices[rank].clone(),
        };
        if device.is_autodiff() { device } else { device.autodiff() }
    }
}

/// A learner's model that trains on a mesh. Implemented by all that fit.
pub trait SequenceModel:
    LearnerModel
    + TrainStep<Input: SequenceInput, Output: RankOutput>
    + InferenceStep<Input: SequenceInput, Output: RankOutput>
{
}

impl<M> SequenceModel for M where
    M: LearnerModel
        + TrainStep<Input: SequenceInput, Output: RankOutput>
        + InferenceStep<Input: SequenceInput, Output: RankOutput>
{
}

impl<M: SequenceModel> From<ContextParallelStrategy> for TrainingStrategy<M> {
    fn from(strategy: ContextParallelStrategy) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}
