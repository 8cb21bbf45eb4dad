//! What a run of days needs beside its mathematics: to be saved, to be ended politely, and to go on where it was.
//!
//! | | |
//! |---|---|
//! | [`checkpoint`] | step-level checkpoints on disk: written by all ranks, whole or not there, loaded on another mesh |
//! | [`training`] | a model and its optimizer as a checkpoint's pieces, and back |
//! | [`stop`] | whether the run shall save or end, agreed by all ranks |
//!
//! With the feature `train`, a strategy for burn-train's `SupervisedTraining` (`ContextParallelStrategy`): a model's `TrainStep` takes a
//! `SequenceBatch` and trains on a mesh of ranks, with metrics over all of them.

#[cfg(feature = "train")]
mod batch;
pub mod checkpoint;
#[cfg(feature = "train")]
pub mod metrics;
#[cfg(feature = "train")]
mod output;
#[cfg(feature = "train")]
mod sharded;
pub mod stop;
#[cfg(feature = "train")]
mod strategy;
pub mod training;

#[cfg(feature = "train")]
pub use batch::{SequenceBatch, SequenceInput};
#[cfg(feature = "train")]
pub use output::{MemoryUse, RankOutput, StepReport, TokenOutput};
#[cfg(feature = "train")]
pub use sharded::Sharded;
#[cfg(feature = "train")]
pub use strategy::{ContextParallelStrategy, Place, SequenceModel};
