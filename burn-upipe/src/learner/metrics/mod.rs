//! Metrics of a [`TokenOutput`]: of all ranks, weighted by what they are about.
//!
//! | metric | of a step | of an epoch |
//! |---|---|---|
//! | [`TokenLossMetric`] | the mean over the step's targets | the mean over all its targets, not the mean of means |
//! | [`TokenPerplexityMetric`] | exp(loss) | exp(loss of the epoch) |
//! | [`TokensPerSecondMetric`] | tokens / time | all tokens / all time |
//! | [`TokensSeenMetric`] | tokens since training began | |
//! | [`MemoryInUseMetric`], [`MemoryReservedMetric`] | MiB of the rank that has most | the largest of them |
//!
//! Register them as Burn's: `training.metrics((TokenLossMetric::new(), TokensPerSecondMetric::new(), ..))`.

mod gauge;
mod loss;
mod memory;
mod tokens;

pub use loss::{TokenLossInput, TokenLossMetric, TokenPerplexityMetric};
pub use memory::{MemoryInUseMetric, MemoryInput, MemoryReservedMetric};
pub use tokens::{TokensInput, TokensPerSecondMetric, TokensSeenMetric};

#[allow(unused_imports)] // named in the documentation
use super::TokenOutput;
