//! Attention across ranks: every rank holds part of the sequence, and the result is that of one device.
//!
//! - [`ContextParallel`]: what `device.context_parallel(&group)` gives; it cuts batches and opens scopes.
//! - [`SequenceContext`]: the sequence at hand: group, layout, positions, documents. The one ambient value of this crate.
//! - [`attention`]: the drop-in for `burn::tensor::module::attention`; [`attention_with`] takes windows and more.
//! - [`ulysses`]: the scheme that trades sequence for heads with one all-to-all each way.
//! - [`HeadSplit`], [`HeadExchange`]: which heads go where, as values.

mod context_parallel;
mod drop_in;
mod exchange;
mod heads;
mod scope;
mod ulysses;

pub use context_parallel::{ContextParallel, ContextParallelDevice};
pub use drop_in::{attention, attention_with, try_attention};
pub use exchange::{HeadExchange, HeadShape, gather_tokens, head_ranges, return_tokens, select_heads};
pub use heads::{HeadRun, HeadSplit, attend, attend_backward};
pub use scope::{SequenceContext, current, scope};
pub use ulysses::{ulysses, ulysses_bytes};
