//! Settings that others have measured with.

use burn_context_parallel::group::MeshShape;

use super::{Attention, Machines, ModelShape, OffloadPlan, Setup, StatePlace, Techniques, WaitingPlace, device};

impl Techniques {
    /// Nothing: every intermediate is kept.
    pub const fn none() -> Self {
        Self {
            attention: Attention::Single,
            checkpoint: None,
            mlp_tile: None,
            norm_tile: None,
            loss_tile: None,
            offload: None,
            fsdp: false,
            prefetch: true,
            optimizer: StatePlace::Device,
        }
    }

    /// Everything but the optimizer's state in host memory: as U-Pipe was published (arXiv 2602.21196).
    pub fn all() -> Self {
        Self {
            attention: Attention::UPipe { per_stage: None },
            checkpoint: Some(1),
            mlp_tile: Some(MLP_TILE),
            norm_tile: Some(NORM_TILE),
            loss_tile: Some(LOSS_TILE),
            offload: Some(OffloadPlan::to(WaitingPlace::Host)),
            fsdp: true,
            ..Self::none()
        }
    }
}

/// Tokens of a tile where nobody says: large enough for efficient products, small beside a sequence that needs tiles.
pub const MLP_TILE: usize = 2048;
/// Norms have no products, and their tiles are cheap.
pub const NORM_TILE: usize = 8192;
/// A tile of logits is as wide as the vocabulary.
pub const LOSS_TILE: usize = 512;

impl Setup {
    /// One sequence over so many H100 with everything on ([`Techniques::all`]).
    pub fn published(model: ModelShape, seq_len: usize, ranks: usize) -> Self {
        let hardware = device("h100-80g").expect("a name of the list");
        Self {
            model,
            seq_len,
            batch: 1,
            accumulate: 1,
            mesh: MeshShape { ulysses: ranks, ..MeshShape::default() },
            techniques: Techniques::all(),
            accounting: Machines { hardware, count: ranks }.accounting(),
        }
    }
}
