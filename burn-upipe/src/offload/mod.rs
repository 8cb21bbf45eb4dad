//! Saved activations wait outside the device: in host memory, or on disk.
//!
//! ```text
//!           forward                         backward
//! device    block i          block i+1      block i+1         block i
//!             │ x_i out                       │ x_i in, ahead     │ x_i-1 in, ahead
//! host        └──────► x_i  x_i+1 ────────────┘                   ▼
//! device    0 bytes of saved inputs beyond K tensors in flight
//! ```
//!
//! [`Offloaded`] wraps a [checkpointed](crate::checkpoint) block: what the checkpoint keeps, its input, leaves after forward and is
//! back before its backward. [`Offload::save`] does so with any tensor. Copies run beside the computation ([`CopyQueue`]); values
//! come back with the same bits, so the gradients are the same with any policy, place and K.
//!
//! What finds no room (budgets, no disk) stays on the device: the step is the same, and needs more of the device. A copy that fails
//! is an [`OffloadError`], in forward or backward, on this rank, and ends the world as any other error of a rank.
//!
//! # Memory
//!
//! ```text
//! device:  min(K, layers) B L E * size          in flight
//! host:    layers B L E * size                  of it, what fits the budget; the rest on disk, or on the device
//! ```
//!
//! [`saved_bytes`], [`in_flight_bytes`]. Host buffers are taken once, in the first step, and used again; where lengths change, those of
//! one length make room for those of the next.
//!
//! # What is tested where
//!
//! Bits, bytes, order and errors are tested on CPU devices, with copy queues that are late and that fail. On CubeCL's devices (CUDA, Metal,
//! Vulkan ..) the same code reads into memory that the backend gives, pinned where it pins, and no test here has run it: that nothing
//! is rounded up, and nothing allocated after the first step, holds there as far as CubeCL's own pool has it so; and what comes back from
//! disk passes through memory that is not pinned.
//!
//! # References
//!
//! ALST, arXiv 2506.13996 (offload of checkpoints); 1604.06174.

mod budget;
mod config;
mod copy;
mod disk;
mod engine;
mod error;
mod group;
mod host;
mod module;
mod queue;
mod saved;
mod slot;
mod state;
mod stats;
mod ticket;

pub use budget::{host_budget, host_budget_of};
pub use config::{Disk, OffloadConfig, OffloadPolicy, Place};
pub use engine::Offload;
pub use error::{DiskAction, OffloadError};
pub use module::Offloaded;
pub use queue::{Arrival, CopyQueue, CopyThread, Departure};
pub use saved::Saved;
pub(crate) use saved::{Kept, OrGiveUp};
pub use slot::Slot;
pub use stats::OffloadStats;
pub use ticket::{Promise, Ticket};

/// Bytes outside the device under [`OffloadPolicy::All`]: the inputs [B, L, E] of all checkpoints.
pub fn saved_bytes(checkpoints: usize, batch: usize, local: usize, width: usize, size: usize) -> usize {
    checkpoints * crate::checkpoint::saved_bytes(batch, local, width, size)
}

/// Bytes on the device because of offload: at most `in_flight` inputs [B, L, E].
pub fn in_flight_bytes(
    in_flight: usize,
    checkpoints: usize,
    batch: usize,
    local: usize,
    width: usize,
    size: usize,
) -> usize {
    in_flight.min(checkpoints) * crate::checkpoint::saved_bytes(batch, local, width, size)
}
