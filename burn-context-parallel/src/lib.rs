//! One sequence, many ranks: train a transformer on a sequence that is too long for one device.
//!
//! .
mod error;
pub mod attention;
pub mod buffer;
pub mod collective;
pub mod flash;
pub mod group;
pub mod sequence;
pub mod vjp;
pub use error::{Error, OrRaise, Result, catch, raise};
