//! Fully sharded data parallelism: weights, gradients and optimizer state of any module in shards over ranks.
//!
//! ```text
//! at rest      each rank: 1 / P of every matrix, of its gradient and of its optimizer state
//! forward      gather a block's weights -> compute -> free them
//! backward     gather them again -> compute -> free them; reduce the block's gradients onto the shards
//! step         the optimizer sees shards only
//! ```
//!
//! [`Fsdp::shard`] keeps a module's type: its parameters become shards, and whoever asks one for its value gets the whole. A block
//! is a module under `Checkpointed` (or any other wrapper of `burn-upipe` that recomputes): its parameters are gathered at once, freed
//! after its forward pass, and gathered again for its recomputation. Burn's tape keeps weights with the intermediates
//! that need them; so a parameter used outside such a block is gathered by itself, and lives until its backward step.
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::{Device, Tensor};
//! use burn_context_parallel::fsdp::{Fsdp, FsdpConfig};
//! use burn_context_parallel::group::launch;
//!
//! let weights = launch(4, |world| {
//!     let device = Device::flex().autodiff();
//!     let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
//!     // The first rank's weights count, and no other rank ever holds all of them.
//!     let mut model: Linear = fsdp.shard(LinearConfig::new(6, 5).init(&device))?;
//!     assert_eq!(model.weight.base().dims(), [1, 8]); // 30 elements in 4 shards
//!     assert_eq!(model.weight.val().dims(), [6, 5]);
//!
//!     let mut optimizer = AdamWConfig::new().init();
//!     for _step in 0..2 {
//!         // Each rank its own data; losses are parts of one mean, so that gradients are summed and not averaged.
//!         let x = Tensor::<2>::full([2, 6], world.rank() as f32, &device);
//!         let loss = model.forward(x).powf_scalar(2.0).mean() / 4;
//!         let grads = GradientsParams::from_grads(loss.backward(), &model);
//!         let grads = fsdp.finish(grads, &model)?;
//!         let (grads, _norm) = fsdp.clip_grad_norm(grads, &model, 1.0)?;
//!         model = optimizer.step(1e-3, model, grads);
//!     }
//!     Ok::<_, burn_context_parallel::Error>(fsdp.gather(&model)?.weight.val().into_data())
//! })?;
//! assert_eq!(weights[0], weights[3]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What stays whole
//!
//! Vectors (norms, biases), and matrices below [`FsdpConfig::whole_below`] elements: modules look at their shapes, and they are small.
//! [`Fsdp::finish`] sums their gradients.
//!
//! # Limits
//!
//! - Optimizers must work element by element (Adam, AdamW, SGD, Lion, ..): a shard has lost its shape. Muon and Adafactor do not.
//! - All ranks must run the same blocks in the same order, forward and backward; else each of them gets an error.
//! - A parameter that carries LoRA is sharded beneath it, and may then be used inside a block only. Attach LoRA first.
//! - A parameter used in several places is one `Param` that they read. Two `Param`s of one id (a cloned layer) are two parameters here, as
//!   they are to Burn's optimizers.
//! - A module's record has its shards; `Fsdp::gather` makes it whole first.
//!
//! # References
//!
//! arXiv 2304.11277 (FSDP), 1910.02054 (ZeRO).

mod counts;
mod embedding;
mod finish;
mod gather;
mod optimizer;
mod placement;
mod prefetch;
mod shard;
mod unit;
mod whole;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::ParamId;
use burn::tensor::{DType, Tensor};

pub use counts::FsdpCounts;
pub use embedding::embedding;
pub use gather::Gather;
pub use optimizer::{ShardedOptimizer, StatePlace};
pub use placement::{
    Placement, accumulation_bytes, backward_bytes, forward_bytes, gather_bytes, gathered_bytes, reduce_bytes,
    reduction_bytes, shard_bytes, state_bytes,
};
pub use unit::Unit;
pub use whole::whole_shapes;

use crate::buffer::accumulator;
use crate::group::{Axis, Mesh, ProcessGroup};
use crate::{Error, Result};

/// When gradients of several micro-batches are summed over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accumulation {
    /// In each backward pass: only shards of gradients are ever kept.
    #[default]
    Each,
    /// Once a step, in [`Fsdp::finish`]: whole gradients wait in f32 ([`accumulation_bytes`]), for 1 / n of the communication of n
    /// micro-batches.
    Once,
}

/// How to shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsdpConfig {
    /// The type that weights are gathered and used in; `None` is their own. Shards, sums of gradients and optimizer state stay in the
    /// parameters' own type: bf16 here with f32 parameters is mixed precision.
    pub compute: Option<DType>,
    /// When gradients are summed over ranks.
    pub accumulation: Accumulation,
    /// Whether the next block is gathered while the present one computes ([`Fsdp::begin`] starts it), at the price of that block's
    /// weights.
    pub prefetch: bool,
    /// Parameters with fewer elements stay whole on every rank.
    pub whole_below: usize,
}

impl FsdpConfig {
    /// Weights in their own type, sums in each backward pass, with prefetch, every matrix sharded.
    pub fn new() -> Self {
        Self { compute: None, accumulation: Accumulation::Each, prefetch: true, whole_below: 0 }
    }

    /// Sets [`compute`](Self::compute).
    pub fn with_compute(self, dtype: DType) -> Self {
        Self { compute: Some(dtype), ..self }
    }

    /// Sets [`accumulation`](Self::accumulation).
    pub fn with_accumulation(self, accumulation: Accumulation) -> Self {
        Self { accumulation, ..self }
    }

    /// Sets [`prefetch`](Self::prefetch).
    pub fn with_prefetch(self, prefetch: bool) -> Self {
        Self { prefetch, ..self }
    }

    /// Sets [`whole_below`](Self::whole_below).
    pub fn with_whole_below(self, elements: usize) -> Self {
        Self { whole_below: elements, ..self }
    }
}

impl Default for FsdpConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// One rank's handle of a sharding; clones are the same.
#[derive(Clone, Debug)]
pub struct Fsdp {
    shared: Arc<Shared>,
}

/// What a rank's sharded parameters have in common.
struct Shared {
    /// The ranks among which parameters are divided.
    group: ProcessGroup,
    /// The ranks that hold the same shards.
    replicas: ProcessGroup,
    /// Both.
    world: ProcessGroup,
    /// Which shard each rank of the world holds.
    shard_of: Vec<usize>,
    config: FsdpConfig,
    counts: counts::Counts,
    /// With their number, in the order in which they were sharded: the same on all ranks, as ids are not.
    placements: Mutex<HashMap<ParamId, (Arc<Placement>, u64)>>,
    /// Whole gradients that wait for the end of the step.
    deferred: Mutex<HashMap<ParamId, Tensor<1>>>,
    prefetch: Mutex<prefetch::Prefetch>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fsdp")
            .field("group", &self.group)
            .field("replicas", &self.replicas)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Fsdp {
    /// Shards over some axes of a mesh; ranks that differ on the others hold the same shards. Every rank of the mesh makes the same.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the computing type is no float; [`Error::Unsupported`] with prefetch on a transport of one channel;
    /// [`Error::Group`] if ranks disagree.
    ///
    /// # Communication
    ///
    /// 8 bytes from every rank to every other.
    ///
    /// ```
    /// use burn_context_parallel::fsdp::{Fsdp, FsdpConfig};
    /// use burn_context_parallel::group::{Axis, Mesh, MeshShape, launch};
    ///
    /// launch(4, |world| {
    ///     let mesh = Mesh::new(&world, MeshShape { data: 2, ulysses: 2, ..MeshShape::default() })?;
    ///     // Four shards; or two, held twice.
    ///     let all = Fsdp::new(&mesh, &[Axis::Data, Axis::Ulysses], FsdpConfig::new())?;
    ///     let half = Fsdp::new(&mesh, &[Axis::Ulysses], FsdpConfig::new())?;
    ///     assert_eq!((all.group().size(), half.group().size()), (4, 2));
    ///     Ok::<_, burn_context_parallel::Error>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(mesh: &Mesh, axes: &[Axis], config: FsdpConfig) -> Result<Self> {
        let others: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| !axes.contains(axis)).collect();
        Self::build(mesh.over(axes)?, mesh.over(&others)?, mesh.world().clone(), config)
    }

    /// Shards over all ranks of a group.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    ///
    /// # Communication
    ///
    /// As [`new`](Self::new).
    pub fn over(group: &ProcessGroup, config: FsdpConfig) -> Result<Self> {
        let alone = group.subgroup(&[group.rank()])?;
        Self::build(group.clone(), alone, group.clone(), config)
    }

    fn build(group: ProcessGroup, replicas: ProcessGroup, world: ProcessGroup, config: FsdpConfig) -> Result<Self> {
        if let Some(dtype) = config.compute.filter(|dtype| !dtype.is_float()) {
            return Err(Error::invalid("Fsdp", format!("{dtype:?} to compute in"), "use a float type: BF16, F16, F32"));
        }
        // A channel of this handle's own. All ranks count their calls alike, so the next number is the same on all.
        let number = group.transport().begin() as u32;
        let channel = if config.prefetch && group.size() > 1 {
            Some(group.channel(number.wrapping_add(1).max(1))?)
        } else {
            None
        };
        let mine = burn::tensor::TensorData::from([group.rank() as i64]);
        let ranks = world.all_gather(mine)?;
        let shard_of = ranks.iter().filter_map(|rank| rank.iter::<i64>().next()).map(|rank| rank as usize).collect();
        Ok(Self {
            shared: Arc::new(Shared {
                group,
                replicas,
                world,
                shard_of,
                config,
                counts: counts::Counts::default(),
                placements: Mutex::default(),
                deferred: Mutex::default(),
                prefetch: Mutex::new(prefetch::Prefetch::new(channel)),
            }),
        })
    }

    /// The ranks among which parameters are divided.
    pub fn group(&self) -> &ProcessGroup {
        &self.shared.group
    }

    /// The ranks that hold the same shards as this one.
    pub fn replicas(&self) -> &ProcessGroup {
        &self.shared.replicas
    }

    /// All ranks that share the model.
    pub fn world(&self) -> &ProcessGroup {
        &self.shared.world
    }

    /// How it shards.
    pub fn config(&self) -> &FsdpConfig {
        &self.shared.config
    }

    /// How a parameter lies on the ranks of [`group`](Self::group); `None` if it is whole on every one.
    pub fn placement(&self, id: ParamId) -> Option<Arc<Placement>> {
        self.shared.placement(id)
    }

    /// What was gathered and reduced so far, on this rank.
    pub fn counts(&self) -> FsdpCounts {
        self.shared.counts.read()
    }
}

impl Shared {
    fn placement(&self, id: ParamId) -> Option<Arc<Placement>> {
        lock(&self.placements).get(&id).map(|(placement, _)| placement.clone())
    }

    fn place(&self, id: ParamId, placement: Arc<Placement>) {
        let mut placements = lock(&self.placements);
        let number = placements.len() as u64;
        placements.insert(id, (placement, number));
    }

    /// What all ranks must gather at the same moment.
    fn digest(&self, ids: impl Iterator<Item = ParamId>) -> u64 {
        let placements = lock(&self.placements);
        // FNV-1a over the parameters' numbers.
        ids.filter_map(|id| placements.get(&id))
            .fold(0xcbf2_9ce4_8422_2325, |digest, (_, number)| (digest ^ (number + 1)).wrapping_mul(0x0100_0000_01b3))
    }

    fn add_deferred(&self, id: ParamId, gradient: Tensor<1>) {
        let exact = accumulator(gradient.dtype());
        let gradient = gradient.cast(exact);
        let mut deferred = lock(&self.deferred);
        let sum = match deferred.remove(&id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        deferred.insert(id, sum);
    }
}

/// Nothing under these locks leaves them half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
