//! Attention across ranks: every rank holds part of the sequence, and the result is that of one device.
//!
//! - [`ContextParallel`]: what `device.context_parallel(&group)` gives; it cuts batches and opens scopes.
//! - [`SequenceContext`]: the sequence at hand: group, layout, positions, documents. The one ambient value of this crate.
//! - [`attention`]: the drop-in for `burn::tensor::module::attention`; [`attention_with`] takes windows and more.
//! - [`FlashMultiHeadAttention`]: a module that takes over the parameters of `burn::nn`'s `MultiHeadAttention`.
//! - [`ulysses`]: the scheme that trades sequence for heads with one all-to-all each way.
//! - [`HeadSplit`], [`HeadExchange`]: which heads go where, as values.
//!
//! # Not only text
//!
//! Nothing here is causal unless it is asked to be. A film: two clips, whose frames (tokens, here) lie on two ranks. In the first layer a
//! frame sees two frames before and two after it, at a cost of O(S window); in the second its whole clip.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_context_parallel::attention::{ContextParallelDevice, FlashMhaInput, FlashMultiHeadAttentionConfig};
//! use burn_context_parallel::group::launch;
//! use burn_context_parallel::sequence::{Batch, Documents};
//!
//! let device = Device::flex();
//! let config = FlashMultiHeadAttentionConfig::new(16, 4);
//! let near = config.clone().with_window(Some(3)).with_lookahead(Some(2)).init(&device)?;
//! let clip = config.init(&device)?;
//! let frames = Tensor::<3>::random([1, 50, 16], Distribution::Default, &device);
//! // Weights are drawn when they are first used: now, so that every rank's copy has the same.
//! let alone = near.forward(FlashMhaInput::self_attn(frames.clone().narrow(1, 30, 20)));
//! let alone = clip.forward(FlashMhaInput::self_attn(alone));
//!
//! let shards = launch(2, move |world| {
//!     // Frames are embedded by a network of your own: the batch says how the sequence lies and which clips it has.
//!     let batch = Batch::from_rows(&[vec![0; 50]])?.with_documents(Documents::from_lengths(&[30, 20])?)?;
//!     let cp = Device::flex().context_parallel(&world);
//!     let shard = cp.shard(&batch)?;
//!     let mine = shard.layout().cut(&frames, 1, world.rank());
//!     let out = cp.scope(&shard, || {
//!         let x = near.forward(FlashMhaInput::self_attn(mine));
//!         clip.forward(FlashMhaInput::self_attn(x))
//!     });
//!     cp.unshard(shard.layout(), out, 1).map(Tensor::into_data)
//! })?;
//! // The second clip knows nothing of the first, nor of the ranks.
//! let film = Tensor::<3>::from_data(shards[0].clone(), &device);
//! film.narrow(1, 30, 20).into_data().assert_approx_eq::<f32>(&alone.into_data(), Default::default());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bytes;
mod context_parallel;
mod drop_in;
mod exchange;
mod heads;
mod multi_head;
mod scope;
mod ulysses;

pub use bytes::{KernelBytes, UlyssesBytes, ulysses_bytes};
pub use context_parallel::{ContextParallel, ContextParallelDevice};
pub use drop_in::{attention, attention_with, try_attention};
pub use exchange::{HeadExchange, HeadShape, gather_tokens, head_ranges, return_tokens, select_heads};
pub use heads::{HeadRun, HeadSplit, attend, attend_backward};
pub use multi_head::{FlashMhaInput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig};
pub use scope::{SequenceContext, current, scope};
pub use ulysses::ulysses;
