//! What memory was really used.

pub mod heap;
