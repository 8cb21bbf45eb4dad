//! # Many tokens, little memory
//!
//! The parts of a training step that grow with the sequence, made small, as Burn modules around the layers of an ordinary model:
//!
//! | module | what grows | what it does instead |
//! |---|---|---|
//! | [`upipe`] | q, k, v and their exchange buffers, each as large as all heads | walks over the heads in stages and reuses the buffers |
//! | [`checkpoint`] | every intermediate of every block | keeps a block's input and computes the block again |
//! | [`offload`] | what checkpoints keep, an input a block | lets it wait in host memory or on disk |
//! | [`tiling`] | feed-forward, norms, and logits as wide as the vocabulary | takes a tile of tokens at a time |
//! | [`plan`] | | says what a step will take, and what fits, before it runs |
//! | [`profile`] | | records where time and memory went, by phase; counts the bytes that were really used |
//! | [`learner`] | | saves a run by step, whole or not at all, and loads it on another mesh |
//!
//! Each is optional, and all of them compose: any subset gives the loss and the gradients of one device without them, within
//! rounding. The ranks, and the sequence that lies on them, are those of [`burn_context_parallel`].
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Embedding, EmbeddingConfig, LinearConfig};
//! use burn::tensor::Device;
//! use burn_context_parallel::attention::ContextParallelDevice;
//! use burn_context_parallel::group::launch;
//! use burn_context_parallel::sequence::{Batch, Shard};
//! use burn_upipe::checkpoint::Checkpointed;
//! use burn_upipe::tiling::{TiledLinearCrossEntropy, TokenLoss};
//! use burn_upipe::upipe::{UPipeAttention, UPipeAttentionConfig};
//!
//! #[derive(Module, Debug)]
//! struct Tiny {
//!     embed: Embedding,
//!     attention: Checkpointed<UPipeAttention>,
//!     head: TiledLinearCrossEntropy,
//! }
//!
//! impl Tiny {
//!     fn loss(&self, shard: &Shard) -> burn_context_parallel::Result<TokenLoss> {
//!         let x = self.embed.forward(shard.tokens.clone());
//!         let x = x.clone() + self.attention.forward(x, |attention, x| attention.forward(x));
//!         self.head.forward(x, shard.targets.clone(), None)
//!     }
//! }
//!
//! let device = Device::flex().autodiff();
//! let model = Tiny {
//!     embed: EmbeddingConfig::new(50, 16).init(&device),
//!     // Width 16; four query heads of 4 that share two key/value heads.
//!     attention: Checkpointed::new(UPipeAttentionConfig::new(16, 4, 2, 4).init(&device)?),
//!     // Logits exist for two tokens at a time.
//!     head: TiledLinearCrossEntropy::new(LinearConfig::new(16, 50).init(&device), Some(2)),
//! };
//! // Weights are drawn when they are first used: now, so that every rank's copy has the same.
//! let model = model.fork(&device);
//! let batch = Batch::from_rows(&[(0..12).collect()])?;
//!
//! let losses = move |ranks: usize| {
//!     let (model, batch, device) = (model.clone(), batch.clone(), device.clone());
//!     launch(ranks, move |world| {
//!         // A rank owns its leaves.
//!         let model = model.clone().fork(&device);
//!         let cp = device.context_parallel(&world);
//!         let shard = cp.shard(&batch)?;
//!         let loss = cp.scope(&shard, || model.loss(&shard))?;
//!         let grads = loss.mean.backward();
//!         assert!(model.embed.weight.val().grad(&grads).is_some());
//!         Ok::<_, burn_context_parallel::Error>(loss.mean.into_scalar::<f32>())
//!     })
//! };
//! let (alone, shared) = (losses(1)?[0], losses(2)?[1]);
//! assert!((alone - shared).abs() < 1e-5 * alone);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! How they nest, from the outside in; the reason for the order is that whatever recomputes must find inside it all that it is to
//! compute again, exchanges included:
//!
//! ```text
//! rank ── scope: group, layout, positions
//!          └─ block ── Checkpointed            kept: its input
//!              ├─ norm ── TiledNorm            a tile of tokens at a time
//!              ├─ attention ── UPipeAttention
//!              │    stage 0   project U heads, all-to-all, flash, all-to-all back
//!              │    stage 1   the same buffers, the next U heads
//!              │    ...
//!              └─ feed-forward ── TiledMlp     a tile of tokens at a time
//!          └─ loss ── TiledLinearCrossEntropy  logits of a tile at a time
//! ```
//!
//! # Limits
//!
//! - Flex only, Burn's CPU backend, as [`burn_context_parallel`].
//! - What is computed twice must give the same twice: dropout inside a checkpointed block or a tile is refused.
//! - Weights, gradients and optimizer state are whole on every rank, unless they are
//!   [sharded](burn_context_parallel::fsdp).
//! - U-Pipe's stages run one after the other: no overlap of exchange and computation.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `flex` (default) | Burn's CPU backend |
//! | `cuda`, `wgpu`, `vulkan`, `metal`, `rocm`, `cpu`, `train` | handed on to [`burn_context_parallel`] |
//!
//! # References
//!
//! U-Pipe, arXiv 2602.21196; DeepSpeed-Ulysses, arXiv 2309.14509; ALST, arXiv 2506.13996; recomputation, arXiv 1604.06174 and
//! 2205.05198.

pub mod checkpoint;
pub mod learner;
pub mod offload;
pub mod plan;
pub mod profile;
mod recompute;
pub mod tiling;
pub mod upipe;
