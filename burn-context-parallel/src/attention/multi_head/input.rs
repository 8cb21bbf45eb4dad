//! What attends to what, and which keys are padding.

use burn::tensor::{Bool, Int, Tensor};

use super::NAME;
use crate::group::ProcessGroup;
use crate::sequence::{Documents, SequenceLayout};
use crate::{Error, Result};

/// What attends to what, as Burn's `MhaInput`.
#[derive(Clone, Debug)]
pub struct FlashMhaInput {
    pub(super) query: Tensor<3>,
    pub(super) key: Tensor<3>,
    pub(super) value: Tensor<3>,
    pub(super) mask_pad: Option<Tensor<2, Bool>>,
    pub(super) mask_attn: Option<Tensor<3, Bool>>,
    pub(super) documents: Option<(Documents, Documents)>,
}

impl FlashMhaInput {
    /// A sequence [B, S, E] that attends to itself.
    pub fn self_attn(x: Tensor<3>) -> Self {
        Self::new(x.clone(), x.clone(), x)
    }

    /// Queries [B, Sq, E] that attend to keys and values [B, Sk, E].
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self { query, key, value, mask_pad: None, mask_attn: None, documents: None }
    }

    /// Hides keys that are padding: [B, Sk], true is hidden. Across ranks each gives the mask of its own keys.
    ///
    /// A query that sees no key at all has attention 0 (and the output's bias); Burn gives it the mean of all values.
    pub fn mask_pad(mut self, mask: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask);
        self
    }

    /// Hides pairs: [B, Sq, Sk], true is hidden. Taken by [`forward_dense`](super::FlashMultiHeadAttention::forward_dense) only.
    pub fn mask_attn(mut self, mask: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask);
        self
    }

    /// Bounds attention by documents, which queries and keys share by their numbers; across ranks, those of the whole sequences.
    ///
    /// In a scope a sequence's documents come with its batch.
    pub fn documents(mut self, queries: Documents, keys: Documents) -> Self {
        self.documents = Some((queries, keys));
        self
    }
}

/// The mask of the whole sequence from each rank's part of it.
pub(super) fn gathered(
    mask: Tensor<2, Bool>,
    batch: usize,
    group: &ProcessGroup,
    layout: &SequenceLayout,
) -> Result<Vec<Vec<i64>>> {
    let len = mask.dims()[1];
    if layout.ranks() != group.size() || layout.local_len(group.rank()) != len {
        return Err(Error::invalid(
            NAME,
            format!("a mask of {len} keys on rank {} of {}; the layout is {layout}", group.rank(), group.size()),
            "pass each rank's own part of the mask",
        ));
    }
    let parts = group.all_gather_uneven(mask.inner().int())?;
    if let Some(part) = parts.iter().map(Tensor::dims).find(|dims| dims[0] != batch) {
        return Err(Error::invalid(
            NAME,
            format!("a mask of shape {part:?} beside one of {batch} rows"),
            "use one batch",
        ));
    }
    Ok(rows(layout.assemble(&parts, 1), batch))
}

pub(super) fn rows(mask: Tensor<2, Int>, batch: usize) -> Vec<Vec<i64>> {
    let values: Vec<i64> = mask.into_data().iter::<i64>().collect();
    values.chunks((values.len() / batch).max(1)).map(<[i64]>::to_vec).collect()
}
