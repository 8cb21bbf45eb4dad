//! What a step will take, before it runs: bytes by part and phase, as formulas without a device and without a tensor.
//!
//! A [`Setup`] says what is to run: a model's shape, ranks, a sequence, techniques. [`memory`] walks through one step of it on
//! paper and keeps a ledger: what is allocated, what is freed, and what is alive where the step holds the most. Every amount is one of the
//! `*_bytes` functions beside the code that allocates it.

mod block;
mod ledger;
mod model;
mod setup;
mod walk;

pub use ledger::{Memory, PhaseBytes};
pub use model::ModelShape;
pub use setup::{Accounting, Attention, OffloadPlan, PlanError, Setup, StatePlace, Techniques, WaitingPlace};
pub use walk::memory;
