//! What a step will take, before it runs: bytes by part and phase, as formulas without a device and without a tensor.
//!
//! A [`Setup`] says what is to run: a model's shape, ranks, a sequence, techniques. [`memory`] walks through one step of it on
//! paper and keeps a ledger: what is allocated, what is freed, and what is alive where the step holds the most. Stages, tiles and gathered
//! weights are the `*_bytes` functions beside the code that allocates them. [`traffic`] counts what crosses between ranks, [`flops`] what is computed, and
//! [`time`](time()) makes seconds of them for some [`Machines`].
//!
//! | question | |
//! |---|---|
//! | what does this take, and does it fit? | [`plan`] |
//! | how long may the sequence be? | [`longest`] |
//! | what is the fastest that fits? | [`fit`] |
//! | what is each technique worth? | [`ladder`] |
//!
//! ```
//! use burn_upipe::plan::{Machines, Setup, device, model, plan};
//!
//! let machines = Machines { hardware: device("h100-80g")?, count: 8 };
//! let setup = Setup::published(model("llama-3-8b")?, 1 << 20, 8);
//! let plan = plan(&setup, &machines, None)?;
//! assert!(plan.fits);
//! assert_eq!(plan.parts.values().sum::<usize>(), plan.device_bytes_peak);
//! println!("{plan}");
//! # Ok::<(), burn_upipe::plan::PlanError>(())
//! ```
//!
//! # Limits
//!
//! - A decoder of the Llama kind, with every block alike; causal attention over the whole sequence.
//! - Times are estimates: they name what they take for granted, and are no better than that.
//! - On GPUs it counts as published runs did ([`Accounting::published`]): bf16 with f32 masters on the optimizer's side, a transport that copies,
//!   attention kernels that keep nothing on the device, PyTorch's silu. Burn's own silu keeps one tensor more where the feed-forward is not tiled.
//!   What drivers, communicators and gaps take is a round guess, and a part of its own.
//! - No ring.

mod block;
mod check;
mod describe;
mod fit;
mod flops;
mod hardware;
mod ladder;
mod ledger;
mod model;
mod models;
#[allow(clippy::module_inception)] // the value of that name
mod plan;
mod published;
mod search;
mod setup;
pub mod time;
mod traffic;
mod walk;

pub use describe::{Bytes, Seconds, Tokens};
pub use fit::{AttentionChoice, Choices, Fit, fit};
pub use flops::{Flops, flops};
pub use hardware::{Budget, Compute, DEVICES, DeviceKind, Hardware, Machines, device};
pub use ladder::{Rung, ladder};
pub use ledger::{Memory, PhaseBytes};
pub use model::ModelShape;
pub use models::{MODELS, model};
pub use plan::{Collective, Limit, Phase, Plan, PlannedFlops, PlannedSeconds, plan};
pub use published::{LOSS_TILE, MLP_TILE, NORM_TILE};
pub use search::{Longest, limit, longest};
pub use setup::{Accounting, Attention, OffloadPlan, PlanError, Setup, StatePlace, Techniques, WaitingPlace};
pub use time::{StepTime, time};
pub use traffic::{KindTraffic, TrafficKind, traffic};
pub use walk::memory;
