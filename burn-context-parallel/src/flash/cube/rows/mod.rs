//! Kernels in registers and vectors, without shared memory: for devices whose units have nobody beside them, such as processors.

mod config;
mod forward;
mod keys;
mod queries;
mod tile;

pub(super) use config::RowsConfig;
pub(super) use forward::rows_forward;
pub(super) use keys::rows_keys;
pub(super) use queries::rows_queries;
#[cfg(all(test, feature = "cpu"))]
pub(super) use tile::starts;
