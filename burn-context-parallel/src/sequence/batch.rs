//! From a batch of token ids to one rank's shard.

use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use super::SequenceLayout;
use crate::{Error, Result};

/// The target of a token that has none.
pub const IGNORE_INDEX: i64 = -100;

/// Whole sequences of token ids, with a target for every token: the *next* token, where that one counts for the loss.
///
/// The shift by one happens here, over the whole sequence; a shard's last token has its target although the next token
/// lies on another rank. The last token of the sequence has none: S tokens give S - 1 targets.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_context_parallel::sequence::{Batch, SequenceLayout};
///
/// let batch = Batch::from_rows(&[vec![5, 6, 7, 8, 9]])?;
/// let layout = SequenceLayout::contiguous(5, 2)?;
/// let shard = batch.shard(&layout, 1, &Device::flex())?;
/// // A device's integers may be 32 bits wide.
/// let ids = |x: Tensor<2, Int>| x.into_data().iter::<i64>().collect::<Vec<_>>();
/// assert_eq!(ids(shard.tokens), [8, 9, 0]);
/// assert_eq!(ids(shard.positions), [3, 4, 5]);
/// assert_eq!(ids(shard.targets), [9, -100, -100]);
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
///
/// A shard has no `shard`:
/// ```compile_fail
/// # use burn_context_parallel::sequence::{Batch, SequenceLayout};
/// # let layout = SequenceLayout::contiguous(4, 2).unwrap();
/// # let device = burn::tensor::Device::flex();
/// let shard = Batch::from_rows(&[vec![1, 2, 3, 4]]).unwrap().shard(&layout, 0, &device).unwrap();
/// shard.shard(&layout, 0, &device);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    rows: usize,
    len: usize,
    tokens: Vec<i64>,
    targets: Vec<i64>,
}

/// One rank's part of a [`Batch`], ready for a model.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Token ids [B, L]; padding has id 0.
    pub tokens: Tensor<2, Int>,
    /// Global positions [B, L].
    pub positions: Tensor<2, Int>,
    /// Targets [B, L], already shifted; [`IGNORE_INDEX`] where there is none.
    pub targets: Tensor<2, Int>,
    /// How many targets this shard has.
    pub valid: usize,
    /// How many targets all shards of this batch have together.
    pub valid_total: usize,
    positions_host: Arc<Vec<i64>>,
    layout: Arc<SequenceLayout>,
    rank: usize,
}

impl Batch {
    /// Rows of token ids of equal length; every token but the first of a row is a target.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no token, rows differ in length, or an id is negative.
    pub fn from_rows(rows: &[Vec<i64>]) -> Result<Self> {
        const NAME: &str = "Batch::from_rows";
        let len = rows.first().map_or(0, Vec::len);
        if len == 0 {
            return Err(Error::invalid(NAME, "no tokens", "give at least one row of at least one token"));
        }
        if let Some((index, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != len) {
            return Err(Error::invalid(
                NAME,
                format!("row {index} has {} tokens, row 0 has {len}", row.len()),
                "make all rows equally long, or run them as batches of their own",
            ));
        }
        let tokens: Vec<i64> = rows.concat();
        if let Some(id) = tokens.iter().find(|id| **id < 0) {
            return Err(Error::invalid(NAME, format!("token id {id}"), "token ids start at 0"));
        }
        let targets = shift(&tokens, len);
        Ok(Self { rows: rows.len(), len, tokens, targets })
    }

    /// Token ids [B, S] from a tensor.
    ///
    /// # Errors
    ///
    /// As [`from_rows`](Self::from_rows).
    pub fn new(tokens: Tensor<2, Int>) -> Result<Self> {
        Self::from_rows(&to_rows(tokens))
    }

    /// Counts only those tokens as targets whose mask [B, S] is true.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the mask's shape is not the tokens'.
    pub fn with_loss_mask(mut self, mask: Tensor<2, Bool>) -> Result<Self> {
        self.expect_dims("Batch::with_loss_mask", mask.dims())?;
        let mask: Vec<bool> = mask.into_data().iter::<bool>().collect();
        let labels: Vec<i64> =
            self.tokens.iter().zip(mask).map(|(token, counts)| if counts { *token } else { IGNORE_INDEX }).collect();
        self.targets = shift(&labels, self.len);
        Ok(self)
    }

    /// Takes targets from labels [B, S] that are *not* shifted, as transformers has them: the label of a token stands at
    /// the token itself, [`IGNORE_INDEX`] (or any negative number) where it does not count.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the labels' shape is not the tokens'.
    pub fn with_labels(mut self, labels: Tensor<2, Int>) -> Result<Self> {
        self.expect_dims("Batch::with_labels", labels.dims())?;
        let labels: Vec<i64> =
            labels.into_data().iter::<i64>().map(|label| if label < 0 { IGNORE_INDEX } else { label }).collect();
        self.targets = shift(&labels, self.len);
        Ok(self)
    }

    fn expect_dims(&self, name: &'static str, dims: [usize; 2]) -> Result<()> {
        if dims == [self.rows, self.len] {
            return Ok(());
        }
        Err(Error::invalid(
            name,
            format!("shape {dims:?} beside tokens of shape {:?}", [self.rows, self.len]),
            "give one value per token",
        ))
    }

    /// Sequences side by side, B.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens of a sequence, S.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many targets count for the loss.
    pub fn valid(&self) -> usize {
        count(&self.targets)
    }

    /// `rank`'s part under `layout`, on `device`. Every rank holds the whole batch of ids and takes its own part: no
    /// communication.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the layout is for another length or has no such rank.
    pub fn shard(&self, layout: &SequenceLayout, rank: usize, device: &Device) -> Result<Shard> {
        const NAME: &str = "Batch::shard";
        if layout.len() != self.len {
            return Err(Error::invalid(
                NAME,
                format!("a layout of {} tokens for sequences of {}", layout.len(), self.len),
                "make the layout from Batch::len",
            ));
        }
        if rank >= layout.ranks() {
            return Err(Error::invalid(
                NAME,
                format!("rank {rank} in a layout of {} ranks", layout.ranks()),
                "make the layout for the group that shares the sequence",
            ));
        }
        let cut = |values: &[i64], padding: i64| -> Vec<i64> {
            values.chunks(self.len).flat_map(|row| layout.cut_row(row, rank, padding)).collect()
        };
        let shape = [self.rows, layout.local_len(rank)];
        let tensor = |values: Vec<i64>| Tensor::<2, Int>::from_data(TensorData::new(values, shape), device);
        let targets = cut(&self.targets, IGNORE_INDEX);
        let row: Vec<i64> = layout.indices(rank).map(|index| index as i64).collect();
        let positions = row.repeat(self.rows);
        Ok(Shard {
            tokens: tensor(cut(&self.tokens, 0)),
            positions: tensor(positions.clone()),
            valid: count(&targets),
            valid_total: self.valid(),
            targets: tensor(targets),
            positions_host: Arc::new(positions),
            layout: Arc::new(layout.clone()),
            rank,
        })
    }
}

impl Shard {
    /// How the sequence lies on the ranks.
    pub fn layout(&self) -> &Arc<SequenceLayout> {
        &self.layout
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

fn count(targets: &[i64]) -> usize {
    targets.iter().filter(|target| **target != IGNORE_INDEX).count()
}

/// Each token's target is the label of the token after it.
fn shift(labels: &[i64], len: usize) -> Vec<i64> {
    labels.chunks(len).flat_map(|row| row[1..].iter().copied().chain([IGNORE_INDEX])).collect()
}

fn to_rows(tokens: Tensor<2, Int>) -> Vec<Vec<i64>> {
    let [rows, len] = tokens.dims();
    let values: Vec<i64> = tokens.into_data().iter::<i64>().collect();
    if len == 0 { vec![Vec::new(); rows] } else { values.chunks(len).map(<[i64]>::to_vec).collect() }
}
