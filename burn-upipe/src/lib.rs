//! .
pub mod checkpoint;
pub mod tiling;
pub mod upipe;
mod recompute;
