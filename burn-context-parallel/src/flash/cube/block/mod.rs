//! Kernels in shared memory and two-dimensional blocks of registers, without operations across a plane: for graphics cards of any kind.

mod config;
mod forward;
mod keys;
mod queries;
mod tile;

pub(super) use config::BlockConfig;
pub(super) use forward::block_forward;
pub(super) use keys::block_keys;
pub(super) use queries::block_queries;
