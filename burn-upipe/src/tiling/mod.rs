//! Work that is done token by token, done a tile of tokens at a time: its intermediates are as large as a tile, not as
//! the sequence.
//!
//! - [`TiledMlp`], [`TiledNorm`]: y = f(x), tile by tile.
//! - [`TiledLinearCrossEntropy`], [`tiled_cross_entropy`], [`tiled_cross_entropy_over`]: the output layer and the loss; logits are
//!   never whole.
//!
//! Tiles are recomputed in the backward pass by the same mechanism as a checkpointed block. Choose them as large as memory
//! allows: small tiles cost speed.
//!
//! # References
//!
//! ALST, arXiv 2506.13996.

mod bytes;
mod cross_entropy;
mod tokens;

pub use bytes::{CrossEntropyBytes, FeedForwardBytes, FeedForwardWidths, norm_backward_bytes, norm_bytes};
pub use cross_entropy::{LossShare, TiledLinearCrossEntropy, TokenLoss, tiled_cross_entropy, tiled_cross_entropy_over};
pub use tokens::{TiledMlp, TiledNorm, even_bytes, tile_bytes, tiles};
