//! Kernels in shared memory and two-dimensional blocks of registers, without operations across a plane: for graphics cards of any kind.
#![allow(
    clippy::collapsible_if,
    reason = "the outer condition is one of the compiler of the kernel, the inner one is the kernel's"
)]

mod config;
mod forward;
mod keys;
mod queries;
mod tile;

pub(super) use config::BlockConfig;
pub(super) use forward::block_forward;
pub(super) use keys::block_keys;
pub(super) use queries::block_queries;
#[cfg(all(test, feature = "cpu"))]
pub(super) use tile::{row_at, rows};
