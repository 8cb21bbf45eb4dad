//! Many tokens, little memory: the parts of a training step that grow with the sequence, made small, as Burn modules.
//!
//! .
pub mod checkpoint;
pub mod profile;
pub mod tiling;
pub mod upipe;
mod recompute;
