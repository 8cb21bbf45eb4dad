//! .
mod error;
pub mod flash;
pub mod group;
pub mod vjp;
pub use error::{Error, OrRaise, Result, catch, raise};
