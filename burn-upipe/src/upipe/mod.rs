//! U-Pipe: Ulysses attention walked head group by head group, reusing its buffers.
//!
//! Ulysses keeps the whole q, k, v, their exchange buffers and the output alive while it attends. U-Pipe projects, exchanges
//! and attends with only U query heads at a time:
//!
//! ```text
//! for each stage of the schedule:
//!     q_s = rotary(norm(x Wq[:, heads of the stage]))      [B, L, U, D]
//!     k_s, v_s = ... only the key/value heads that arrive
//!     all-to-all                                           [B, S, heads of my rank, D]
//!     o_s = flash(q_s, held k, held v)
//!     all-to-all back, into the output where the heads belong
//! ```
//!
//! - [`Schedule`]: which heads each rank holds at each stage, as a printable value.
//! - [`StageSource`]: where a stage's heads come from: [`Projection`] of the block's input, or [`Given`] tensors.
//! - [`upipe`]: the one tracked operation that executes a schedule, forward and backward.
//! - [`UPipeAttention`]: the module, which also runs as plain Ulysses or on one device.
//!
//! # References
//!
//! U-Pipe, arXiv 2602.21196; DeepSpeed-Ulysses, arXiv 2309.14509.

mod bytes;
mod execute;
mod given;
mod head_norm;
mod held;
mod module;
mod projection;
mod schedule;
mod source;

pub use bytes::{backward_bytes, backward_bytes_of, forward_bytes, saved_bytes, stage_bytes};
pub use execute::{upipe, upipe_cross};
pub use given::Given;
pub use head_norm::{HeadNorm, head_norm_bytes};
pub use module::{AttentionScheme, UPipeAttention, UPipeAttentionConfig};
pub use projection::{Projection, ProjectionWeights};
pub use schedule::{MAX_ENTRIES, MAX_HEADS, RankStage, Schedule, Stage};
pub use source::StageSource;
