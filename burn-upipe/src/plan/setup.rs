//! What is to run.

use burn_context_parallel::group::MeshShape;

use super::ModelShape;
use crate::tiling::FeedForwardWidths;
use crate::upipe::Schedule;

/// How attention runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// On one rank.
    Single,
    /// All heads at once, exchanged.
    Ulysses,
    /// Heads in stages of so many query heads over all ranks; `None` for one a rank.
    UPipe {
        /// U.
        per_stage: Option<usize>,
    },
}

/// Where optimizer state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePlace {
    /// Beside the weights.
    Device,
    /// In host memory.
    Host,
}

/// Where offloaded block inputs wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitingPlace {
    /// Host memory.
    Host,
    /// A file.
    Disk,
}

/// Offload of saved block inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadPlan {
    /// Where to.
    pub place: WaitingPlace,
    /// How many are on their way at once, K.
    pub in_flight: usize,
    /// Every how many checkpoints: 1 for all.
    pub every: usize,
    /// Bytes of saved inputs that stay on the device; the newest do.
    pub keep: usize,
    /// Bytes of host memory that a rank may use for them; `None` for as much as there is. Not with [`WaitingPlace::Disk`].
    pub host_budget: Option<usize>,
    /// Bytes on disk; `None` for as much as there is with [`WaitingPlace::Disk`], and for no disk else. What finds no room stays on the device.
    pub disk_budget: Option<usize>,
}

impl OffloadPlan {
    /// All block inputs, two in flight, without limits.
    pub fn to(place: WaitingPlace) -> Self {
        Self { place, in_flight: 2, every: 1, keep: 0, host_budget: None, disk_budget: None }
    }

    /// Where each of `count` inputs of `bytes` waits, in the order in which they are saved: `None` on the device. As
    /// [`Offload`](crate::offload::Offload) has it.
    pub fn places(&self, count: usize, bytes: usize) -> Vec<Option<WaitingPlace>> {
        let unlimited = |budget: Option<usize>| budget.unwrap_or(usize::MAX);
        let (mut host, mut disk) = match self.place {
            WaitingPlace::Host => (unlimited(self.host_budget), self.disk_budget.unwrap_or(0)),
            WaitingPlace::Disk => (0, unlimited(self.disk_budget)),
        };
        let kept = self.keep / bytes.max(1);
        let place = |at: usize| {
            let leaves = at.is_multiple_of(self.every.max(1)) && count - at > kept;
            let room = |left: &mut usize| left.checked_sub(bytes).map(|rest| *left = rest).is_some();
            match leaves {
                true if room(&mut host) => Some(WaitingPlace::Host),
                true if room(&mut disk) => Some(WaitingPlace::Disk),
                _ => None,
            }
        };
        (0..count).map(place).collect()
    }
}

/// What makes the step small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Techniques {
    /// How attention runs.
    pub attention: Attention,
    /// Blocks that are one checkpoint; `None` keeps every intermediate.
    pub checkpoint: Option<usize>,
    /// Tokens a tile of the feed-forward.
    pub mlp_tile: Option<usize>,
    /// Tokens a tile of the norms.
    pub norm_tile: Option<usize>,
    /// Tokens a tile of output layer and loss.
    pub loss_tile: Option<usize>,
    /// Where saved block inputs wait; `None` keeps them on the device.
    pub offload: Option<OffloadPlan>,
    /// Parameters, gradients and optimizer state in shards over all ranks.
    pub fsdp: bool,
    /// The next block's weights are gathered while one computes.
    pub prefetch: bool,
    /// Where the optimizer's state is.
    pub optimizer: StatePlace,
}

/// How an implementation counts: what differs between a CPU that computes in f32 and published runs on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accounting {
    /// Bytes of an element of weights as they are kept.
    pub weight: usize,
    /// Bytes of an element of further weights that are kept: those of the step before, say.
    pub copies: usize,
    /// Bytes of an element of gradients.
    pub gradient: usize,
    /// Bytes of optimizer state an element, master weights included.
    pub optimizer: usize,
    /// Bytes of an element that is computed with: 2, 4 or 8.
    pub compute: usize,
    /// Whether attention's backward pass casts half types to f32 as a whole (Flex) or in the kernel.
    pub casts_whole: bool,
    /// Bytes of an element of attention's gradients as the kernel gives them.
    pub kernel_gradient: usize,
    /// Bytes of an element of what U-Pipe sums over its stages.
    pub sums: usize,
    /// Whether what an exchange has sent, and attention's output, stay until its backward pass is through: a transport that copies.
    pub copying: bool,
    /// Whether attention on one rank has its output once more, tokens first.
    pub output_twice: bool,
    /// How the feed-forward is computed.
    pub feed_forward: FeedForwardWidths,
    /// Whether pinned host memory comes in powers of two, as PyTorch's allocator gives it.
    pub pinned_powers_of_two: bool,
    /// Whether gradients leave for the host as they are made, where the optimizer's state is there.
    pub gradients_leave: bool,
    /// Threads of one rank, each with its scratch.
    pub threads: usize,
    /// Bytes that the allocator and the communicator need beside what is asked of them: a part of its own.
    pub overhead: usize,
    /// What the allocator loses of what changes in a step, in percent: part of the overhead.
    pub fragmentation: usize,
}

impl Accounting {
    /// f32 on Flex ranks that are threads of one process. The overhead is the matrix product's workspace: one second-level cache, taken by
    /// each rank's thread when a product first reads a view, and kept. 2 MiB, as large processors have; others set `overhead`.
    pub fn flex(threads: usize) -> Self {
        Self {
            weight: 4,
            copies: 0,
            gradient: 4,
            optimizer: 8,
            compute: 4,
            casts_whole: true,
            kernel_gradient: 4,
            sums: 4,
            copying: false,
            output_twice: true,
            feed_forward: FeedForwardWidths::BURN,
            pinned_powers_of_two: false,
            gradients_leave: false,
            threads,
            overhead: 2 << 20,
            fragmentation: 0,
        }
    }

    /// bf16 weights and gradients on GPUs with f32 masters, 16 bytes a parameter in all, as published runs had it: kernels whose gradients are f32, sums
    /// over stages in bf16, a transport that copies, attention that has tokens first,
    /// a silu that keeps its input only.
    pub fn published(overhead: usize, fragmentation: usize) -> Self {
        Self {
            weight: 2,
            copies: 0,
            gradient: 2,
            optimizer: 12,
            compute: 2,
            casts_whole: false,
            kernel_gradient: 4,
            sums: 2,
            copying: true,
            output_twice: false,
            feed_forward: FeedForwardWidths::TORCH,
            pinned_powers_of_two: false,
            gradients_leave: true,
            threads: 0,
            overhead,
            fragmentation,
        }
    }
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The model.
    pub model: ModelShape,
    /// Tokens of a sequence, S.
    pub seq_len: usize,
    /// Sequences a replica and micro-batch, B.
    pub batch: usize,
    /// Micro-batches a step.
    pub accumulate: usize,
    /// Ranks.
    pub mesh: MeshShape,
    /// What makes it small.
    pub techniques: Techniques,
    /// How to count.
    pub accounting: Accounting,
}

/// What cannot be planned, and why.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Numbers that do not fit each other.
    #[error("{problem}: {remedy}")]
    Invalid {
        /// What does not fit, with its numbers.
        problem: String,
        /// What to change.
        remedy: String,
    },
    /// What the code itself refuses.
    #[error(transparent)]
    Core(burn_context_parallel::Error),
    /// Meaningful, and not built.
    #[error("{what} is not built yet: {remedy}")]
    NotBuilt {
        /// What was asked for.
        what: String,
        /// What works in its place.
        remedy: String,
    },
}

impl Setup {
    /// Tokens of the longest shard, L.
    pub fn local(&self) -> usize {
        self.seq_len.div_ceil(self.mesh.ulysses.max(1))
    }

    /// How attention runs in fact: U-Pipe that would be a single stage by default runs as Ulysses, or on one rank.
    pub fn attention(&self) -> Attention {
        match self.techniques.attention {
            Attention::UPipe { per_stage: None }
                if Schedule::is_single_by_default(self.model.heads, self.mesh.ulysses) =>
            {
                if self.mesh.ulysses > 1 {
                    Attention::Ulysses
                } else {
                    Attention::Single
                }
            }
            attention => attention,
        }
    }

    /// All ranks.
    pub fn ranks(&self) -> usize {
        self.mesh.data * self.mesh.ulysses * self.mesh.ring
    }
}
