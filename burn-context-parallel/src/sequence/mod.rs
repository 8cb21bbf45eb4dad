//! How one sequence lies on ranks: who holds which tokens, and what travels with them.
//!
//! A [`Batch`] is a whole sequence; a [`Shard`] is one rank's part of it. They are different types, so that a shard cannot
//! be sharded again. What a shard needs from its neighbours is put into it *before* the cut: targets are shifted, positions
//! are global, padding is marked. Nothing later infers a position from an index.
//!
//! A [`SequenceLayout`] is a list of index ranges per rank. The contiguous layout is one such list; a zig-zag is another
//! value of the same type, and nothing that consumes a layout knows which it is.
//!
//! Several [`Document`]s may be packed into one sequence ([`Batch::packed`], [`Batch::with_documents`]): [`Documents`] of the whole
//! sequence then travel with every shard, and attention stays inside them, whatever the ranks' boundaries.

mod batch;
mod documents;
mod layout;
mod rotary;
mod rotary_embedding;
mod scaling;
mod shard;

pub use batch::{Batch, IGNORE_INDEX};
pub use documents::{Documents, NO_DOCUMENT, PerToken};
pub use layout::{MAX_TOKENS, Piece, SequenceLayout};
pub use rotary::{MAX_HEAD_DIM, RotaryFrequencies, RotaryTable, apply_rotary, apply_rotary_adjoint, rotary_bytes};
pub use rotary_embedding::{RotaryEmbedding, RotaryEmbeddingConfig};
pub use scaling::RotaryScaling;
pub use shard::{Document, Shard};
