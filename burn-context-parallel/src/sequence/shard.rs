//! What a rank holds of a batch, and what a batch may be packed from.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};

use super::{Documents, SequenceLayout};
use crate::{Error, Result};

/// Token ids that attend only to each other, and which of them are to be predicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    tokens: Vec<i64>,
    labels: Vec<i64>,
}

impl Document {
    /// A document of which every token but the first is a target.
    pub fn new(tokens: Vec<i64>) -> Self {
        Self { labels: tokens.clone(), tokens }
    }

    /// A document with labels that are *not* shifted: at each token its own id, or [`IGNORE_INDEX`](super::IGNORE_INDEX) (any negative number) where it
    /// is no target.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there are not as many labels as tokens.
    pub fn with_labels(tokens: Vec<i64>, labels: Vec<i64>) -> Result<Self> {
        if tokens.len() != labels.len() {
            return Err(Error::invalid(
                "Document::with_labels",
                format!("{} labels for {} tokens", labels.len(), tokens.len()),
                "give every token a label, -100 where it is no target",
            ));
        }
        Ok(Self { tokens, labels })
    }

    /// Its token ids.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// Its labels, not shifted.
    pub fn labels(&self) -> &[i64] {
        &self.labels
    }
}

/// One rank's part of a [`Batch`](super::Batch), ready for a model.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Token ids [B, L]; padding has id 0.
    pub tokens: Tensor<2, Int>,
    /// Positions [B, L]: in the whole sequence, or in the token's document.
    pub positions: Tensor<2, Int>,
    /// Targets [B, L], already shifted; [`IGNORE_INDEX`](super::IGNORE_INDEX) where there is none.
    pub targets: Tensor<2, Int>,
    /// How many targets this shard has.
    pub valid: usize,
    /// How many targets all shards of this batch have together.
    pub valid_total: usize,
    pub(super) positions_host: Arc<Vec<i64>>,
    pub(super) layout: Arc<SequenceLayout>,
    pub(super) documents: Option<Documents>,
    pub(super) rank: usize,
}

impl Shard {
    /// How the sequence lies on the ranks.
    pub fn layout(&self) -> &Arc<SequenceLayout> {
        &self.layout
    }

    /// The documents of the whole sequence, if attention is bounded by any.
    pub fn documents(&self) -> Option<&Documents> {
        self.documents.as_ref()
    }

    /// Whose part this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// [`positions`](Self::positions) on the host, row by row.
    pub fn positions_host(&self) -> &Arc<Vec<i64>> {
        &self.positions_host
    }
}
