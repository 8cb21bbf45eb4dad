//! What a step gives to metrics, and how ranks' parts become one.

use std::time::Duration;

use burn::backend::ExecutionError;
use burn::tensor::{Tensor, TensorData, TensorReadError};
use burn::train::ItemLazy;
use burn_context_parallel::group::ReduceOp;
use burn_context_parallel::{Error, Result};

use super::strategy::Place;
use crate::profile::heap;

/// A step's output of which every rank has a part: it is summed before metrics see it, on the first rank.
///
/// [`TokenOutput`] is one. An output that holds more implements this, for whatever its metrics take.
pub trait RankOutput: Sized {
    /// One output of the whole step, from this rank's of each micro-batch (at least one). Every rank calls it at the same place, so
    /// collectives over `report.place().world()` are allowed.
    ///
    /// # Errors
    ///
    /// Any error ends training on all ranks.
    fn over_ranks(parts: Vec<Self>, report: &StepReport<'_>) -> Result<Self>;
}

/// For models whose steps are not measured.
impl RankOutput for () {
    fn over_ranks(_: Vec<Self>, _: &StepReport<'_>) -> Result<Self> {
        Ok(())
    }
}

/// Where and how long a step ran, before its parts are summed.
#[derive(Clone, Copy, Debug)]
pub struct StepReport<'a> {
    place: &'a Place,
    elapsed: Duration,
}

impl<'a> StepReport<'a> {
    pub(super) fn new(place: &'a Place, elapsed: Duration) -> Self {
        Self { place, elapsed }
    }

    /// This rank's place.
    pub fn place(&self) -> &'a Place {
        self.place
    }

    /// The time since the step before, loading included; in an epoch's first step, since its begin.
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }
}

/// Bytes of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use.
    pub in_use: u64,
    /// Bytes that the device's pools hold, used or not; on a heap, the most that were in use so far.
    pub reserved: u64,
}

impl MemoryUse {
    /// What is known of this rank's memory now: of its device's pools, or of the heap, if the program installs
    /// [`heap::CountingAllocator`]; `None` otherwise.
    pub fn of(place: &Place) -> Option<Self> {
        if let Some(pools) = place.device().clone().inner().memory_pool_usage() {
            return Some(Self { in_use: pools.bytes_in_use, reserved: pools.bytes_reserved });
        }
        let rank = place.world().rank();
        let (in_use, reserved) = (heap::in_use_by(rank) as u64, heap::peak_by(rank) as u64);
        (heap::in_use() > 0).then_some(Self { in_use, reserved })
    }
}

/// Loss, tokens, time and memory of a step: of one rank's part as [`SequenceBatch::output`](super::SequenceBatch::output) makes it,
/// then of the whole.
#[derive(Clone, Debug)]
pub struct TokenOutput {
    loss: Loss,
    /// Targets that count.
    pub valid: usize,
    /// Tokens that were worked on, without padding.
    pub tokens: usize,
    /// How long the step took; `None` where nobody measured it.
    pub elapsed: Option<Duration>,
    /// The memory of the rank that uses the most; `None` where it is not known.
    pub memory: Option<MemoryUse>,
}

impl TokenOutput {
    /// The output of a part: its share of the step's mean loss, its targets, its tokens.
    pub fn new(loss: Tensor<1>, valid: usize, tokens: usize) -> Self {
        Self { loss: Loss::Share(Box::new(loss.inner())), valid, tokens, elapsed: None, memory: None }
    }

    /// The loss: the mean over all targets of the step, once ranks' parts are one.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn loss(&self) -> Result<f64, TensorReadError> {
        self.loss.read()
    }

    pub(super) fn lazy_loss(&self) -> Loss {
        self.loss.clone()
    }
}

/// A loss that is on the device still, or one that ranks have made together.
#[derive(Clone, Debug)]
pub(super) enum Loss {
    Share(Box<Tensor<1>>),
    Mean(f64),
}

impl Loss {
    pub fn read(&self) -> Result<f64, TensorReadError> {
        match self {
            Self::Share(share) => share.as_ref().clone().try_into_scalar::<f64>(),
            Self::Mean(mean) => Ok(*mean),
        }
    }
}

impl ItemLazy for TokenOutput {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl RankOutput for TokenOutput {
    /// Sums losses and counts; takes the longest time, and the memory of the rank that uses the most.
    ///
    /// Communication: 48 bytes to each rank.
    fn over_ranks(parts: Vec<Self>, report: &StepReport<'_>) -> Result<Self> {
        let unread = |error| Error::invalid("TokenOutput", format!("{error}"), "the device has failed: start again");
        let mut sums = [0.0; 3];
        for part in &parts {
            sums[0] += part.loss().map_err(unread)?;
            sums[1] += part.valid as f64;
            sums[2] += part.tokens as f64;
        }
        let memory = MemoryUse::of(report.place());
        let known = memory.map_or(-1.0, |memory| memory.in_use as f64);
        let most = [report.elapsed().as_secs_f64(), known, memory.unwrap_or_default().reserved as f64];
        let world = report.place().world();
        let read = |data: TensorData| data.iter::<f64>().collect::<Vec<_>>();
        let sums = read(world.all_reduce(TensorData::from(sums), ReduceOp::Sum)?);
        let most = read(world.all_reduce(TensorData::from(most), ReduceOp::Max)?);
        let memory = (most[1] >= 0.0).then(|| MemoryUse { in_use: most[1] as u64, reserved: most[2] as u64 });
        Ok(Self {
            loss: Loss::Mean(sums[0]),
            valid: sums[1] as usize,
            tokens: sums[2] as usize,
            elapsed: Some(Duration::from_secs_f64(most[0])),
            memory,
        })
    }
}
