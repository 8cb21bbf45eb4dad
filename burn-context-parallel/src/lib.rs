//! # One sequence, many ranks
//!
//! Train a transformer on a sequence that is too long for one device, from an ordinary [Burn](burn) program. The sequence is cut
//! into shards, one a rank; attention, the only part of a transformer in which tokens meet, runs across the ranks and is exact.
//!
//! [`attention::attention`] has the signature of `burn::tensor::module::attention`. A model that calls it is single-device code:
//! inside a scope it attends over the whole sequence, outside it is flash attention on one device.
//!
//! ```
//! use burn::tensor::ops::AttentionModuleOptions;
//! use burn::tensor::{Device, Int, Tensor};
//! use burn_context_parallel::attention::{ContextParallelDevice, attention};
//! use burn_context_parallel::group::launch;
//! use burn_context_parallel::sequence::Batch;
//!
//! // A model of one layer: [B, L] token ids -> [B, 2 heads, L, 1].
//! fn model(tokens: Tensor<2, Int>) -> Tensor<4> {
//!     let [batch, len] = tokens.dims();
//!     let x = (tokens.float() / 10).reshape([batch, 1, len, 1]).repeat_dim(1, 2);
//!     let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
//!     attention(x.clone(), x.clone(), x, None, None, options)
//! }
//!
//! let batch = Batch::from_rows(&[(0..10).collect()])?;
//! let tokens = Tensor::from_ints([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]], &Device::flex());
//! let one_device = model(tokens).into_data();
//!
//! let shards = launch(2, move |world| {
//!     let cp = Device::flex().context_parallel(&world);
//!     let shard = cp.shard(&batch)?; // five tokens
//!     let out = cp.scope(&shard, || model(shard.tokens.clone()));
//!     assert_eq!(out.dims(), [1, 2, 5, 1]);
//!     cp.unshard(shard.layout(), out, 2).map(Tensor::into_data)
//! })?;
//! shards[0].assert_approx_eq::<f32>(&one_device, Default::default());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```text
//!            rank 0                 rank 1                 rank 2
//!       tokens 0 .. L          tokens L .. 2L         tokens 2L .. 3L       sequence:   Batch, SequenceLayout, Shard
//!             |                      |                      |
//!       embed, project         embed, project         embed, project        your model, on one device
//!             |                      |                      |
//!             +-------- all-to-all, heads for tokens -------+               group:      ProcessGroup on a Transport
//!             |                      |                      |               collective: the same, differentiable
//!      flash, some heads      flash, some heads      flash, some heads      flash:      exact, O(S) memory
//!             |                      |                      |
//!             +-------- all-to-all, tokens for heads -------+               attention:  Ulysses, the drop-in, the scope
//!             |                      |                      |
//!       rest of the block      rest of the block      rest of the block     your model
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`attention`] | attention across ranks: [`ContextParallel`](attention::ContextParallel), the drop-in, a module in place of Burn's, Ulysses |
//! | [`sequence`] | how a sequence lies on ranks: layouts, positions, shifted targets, documents, padding |
//! | [`group`] | ranks and their collectives, on plain data and tensors; errors in place of hangs |
//! | [`collective`] | collectives as differentiable operations, each beside its adjoint |
//! | [`flash`] | exact attention in O(S) memory, forward and backward |
//! | [`fsdp`] | weights, gradients and optimizer state in shards over ranks |
//! | [`phase`] | what a rank is doing, for whoever records where time and memory go |
//! | [`vjp`], [`buffer`] | for those who write operations with a backward pass of their own |
//!
//! # Gradients
//!
//! The loss is the mean over all targets of all ranks. Each rank's backward pass gives the gradients of its own targets;
//! [`collective::sum_gradients`] makes them those of the whole. Positions travel with tokens and targets are shifted before the
//! sequence is cut, so that no rank guesses either.
//!
//! # Errors
//!
//! [`Error`] says what, the numbers, and the remedy. A rank that fails ends its world: every other rank gets an error that names the
//! rank, the operation and the cause ([`group::GroupError`]). Where Burn's signatures have no room for an error (a module's
//! forward, a backward step) it is [raised](raise), and arrives as a value at [`catch`] or [`group::launch`].
//!
//! # Limits
//!
//! - Kernels for Flex only, Burn's CPU backend. With the features of other devices the crate compiles; attention there is refused.
//! - Ranks are threads of one process. Another transport is an implementation of [`group::Transport`].
//! - One scheme, Ulysses: no ring, no zig-zag layout.
//! - Masks are causal, windows and documents. A dense mask or a bias takes memory that grows with S^2: on one device, and by name
//!   ([`flash::reference::dense_attention`]). Dropout on attention weights is refused.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `flex` (default) | Burn's CPU backend, and the kernels for it |
//! | `cuda`, `wgpu`, `vulkan`, `metal`, `rocm`, `cpu` | Burn's other devices, as Burn names them: compiled, not yet with kernels |
//! | `train` | `burn::train` |
//! | `cube` | set by the devices above; not meant to be chosen alone |

// Without a backend to compute on, what is left only has to compile.
#![cfg_attr(not(feature = "flex"), allow(unused))]

mod error;

pub mod attention;
pub mod buffer;
pub mod collective;
pub mod flash;
pub mod fsdp;
pub mod group;
pub mod phase;
pub mod sequence;
pub mod vjp;

pub use error::{Error, Foreign, OrRaise, Result, catch, raise};
