//! From a batch of token ids to one rank's shard.

use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use super::{Document, Documents, MAX_TOKENS, NO_DOCUMENT, PerToken, SequenceLayout, Shard};
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
    /// Those given. Without any they restart with each document, or are indices.
    positions: Option<PerToken>,
    documents: Option<Documents>,
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
        expect_ids(NAME, &tokens)?;
        let targets = shift(&tokens, len, None);
        Ok(Self { rows: rows.len(), len, tokens, targets, positions: None, documents: None })
    }

    /// Sequences of `len` tokens, each with documents one after the other: attention stays inside a document, positions restart with
    /// each, no target crosses a boundary. What is left of a sequence is padding, which belongs to no document and has no target.
    ///
    /// ```
    /// use burn_context_parallel::sequence::{Batch, Document, IGNORE_INDEX, SequenceLayout};
    ///
    /// let question = Document::with_labels(vec![7, 8, 9], vec![IGNORE_INDEX, 8, 9])?;
    /// let batch = Batch::packed(&[vec![Document::new(vec![5, 6]), question]], 6)?;
    /// let shard = batch.shard(&SequenceLayout::contiguous(6, 1)?, 0, &burn::tensor::Device::flex())?;
    /// assert_eq!(shard.positions_host()[..], [0, 1, 0, 1, 2, 0]);
    /// assert_eq!(shard.targets.into_data().iter::<i64>().collect::<Vec<_>>(), [6, -100, 8, 9, -100, -100]);
    ///
    /// let error = Batch::packed(&[vec![Document::new(vec![5, 6])]], 1).unwrap_err();
    /// assert!(error.to_string().contains("2 tokens in a sequence of 1"));
    /// # Ok::<(), burn_context_parallel::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no row or no token, more than [`MAX_TOKENS`] tokens, a row's documents are longer than `len`, or an
    /// id is negative.
    pub fn packed(rows: &[Vec<Document>], len: usize) -> Result<Self> {
        const NAME: &str = "Batch::packed";
        if rows.is_empty() || len == 0 {
            return Err(Error::invalid(
                NAME,
                format!("{} rows of {len} tokens", rows.len()),
                "give at least one row of at least one token",
            ));
        }
        // Before anything of that size is made.
        if rows.len().checked_mul(len).is_none_or(|size| size > MAX_TOKENS) {
            return Err(Error::invalid(
                NAME,
                format!("{} rows of {len} tokens", rows.len()),
                format!("use at most {MAX_TOKENS} tokens in all"),
            ));
        }
        let [mut tokens, mut labels, mut ids] = [0; 3].map(|_| Vec::new());
        for (index, row) in rows.iter().enumerate() {
            let total: usize = row.iter().map(|document| document.tokens().len()).sum();
            if total > len {
                return Err(Error::invalid(
                    NAME,
                    format!("row {index} has {total} tokens in a sequence of {len}"),
                    "put fewer documents into a row, or cut them",
                ));
            }
            for (id, document) in row.iter().enumerate() {
                expect_ids(NAME, document.tokens())?;
                tokens.extend_from_slice(document.tokens());
                labels.extend_from_slice(document.labels());
                ids.extend(std::iter::repeat_n(id as i64, document.tokens().len()));
            }
            let end = (index + 1) * len;
            tokens.resize(end, 0);
            labels.resize(end, IGNORE_INDEX);
            ids.resize(end, NO_DOCUMENT);
        }
        let ids: Vec<Vec<i64>> = ids.chunks(len).map(<[i64]>::to_vec).collect();
        let batch = Self {
            rows: rows.len(),
            len,
            targets: normal(labels.into_iter()),
            tokens,
            positions: None,
            documents: None,
        };
        batch.bounded(Documents::from_ids(PerToken::per_row(&ids)?))
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
        self.targets = shift(&labels, self.len, self.documents.as_ref());
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
        let labels = normal(labels.into_data().iter::<i64>());
        self.targets = shift(&labels, self.len, self.documents.as_ref());
        Ok(self)
    }

    /// Bounds attention by documents: positions restart with each of them, unless [given](Self::with_positions), and targets that
    /// cross a boundary go.
    ///
    /// Documents that a tokenizer or a loader gives as `cu_seqlens` or as a number per token; see [`packed`](Self::packed) for
    /// documents that are still apart.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the documents are not of as many tokens, or there are neither one nor B rows of them.
    pub fn with_documents(mut self, documents: Documents) -> Result<Self> {
        self.expect_per_token("Batch::with_documents", documents.ids())?;
        // Back to labels, which stand at their own tokens, and forward again inside the documents.
        self.targets = self.labels();
        self.bounded(documents)
    }

    /// Sets the positions from which rotary angles are computed, in place of indices or of positions that restart with each
    /// document. What a token attends to does not change.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the positions are not of as many tokens, or there are neither one nor B rows of them.
    pub fn with_positions(mut self, positions: PerToken) -> Result<Self> {
        self.expect_per_token("Batch::with_positions", &positions)?;
        self.positions = Some(positions);
        Ok(self)
    }

    /// `targets` holds labels: shifts them inside the documents.
    fn bounded(mut self, documents: Documents) -> Result<Self> {
        self.targets = shift(&self.targets, self.len, Some(&documents));
        self.documents = Some(documents);
        Ok(self)
    }

    /// The labels behind the targets: what a token was the target of stands at the token itself.
    fn labels(&self) -> Vec<i64> {
        let row =
            |row: &[i64]| std::iter::once(IGNORE_INDEX).chain(row[..row.len() - 1].iter().copied()).collect::<Vec<_>>();
        self.targets.chunks(self.len).flat_map(row).collect()
    }

    fn expect_per_token(&self, name: &'static str, values: &PerToken) -> Result<()> {
        if values.len() == self.len && (values.rows() == 1 || values.rows() == self.rows) {
            return Ok(());
        }
        Err(Error::invalid(
            name,
            format!("{} rows of {} values for {} rows of {} tokens", values.rows(), values.len(), self.rows, self.len),
            "give one value per token of the whole sequence, in one row or in a row per sequence; Documents::padded_to marks padding",
        ))
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
        let restarting = || self.documents.as_ref().map(Documents::positions);
        let positions = match &self.positions.clone().or_else(restarting) {
            Some(positions) => (0..self.rows).flat_map(|row| layout.cut_row(positions.row(row), rank, 0)).collect(),
            None => {
                let row: Vec<i64> = layout.indices(rank).map(|index| index as i64).collect();
                row.repeat(self.rows)
            }
        };
        Ok(Shard {
            tokens: tensor(cut(&self.tokens, 0)),
            positions: tensor(positions.clone()),
            valid: count(&targets),
            valid_total: self.valid(),
            targets: tensor(targets),
            positions_host: Arc::new(positions),
            layout: Arc::new(layout.clone()),
            documents: self.documents.clone(),
            rank,
        })
    }
}

fn count(targets: &[i64]) -> usize {
    targets.iter().filter(|target| **target != IGNORE_INDEX).count()
}

/// Labels with one sign for "no target".
fn normal(labels: impl Iterator<Item = i64>) -> Vec<i64> {
    labels.map(|label| if label < 0 { IGNORE_INDEX } else { label }).collect()
}

fn expect_ids(name: &'static str, tokens: &[i64]) -> Result<()> {
    match tokens.iter().find(|id| **id < 0) {
        Some(id) => Err(Error::invalid(name, format!("token id {id}"), "token ids start at 0")),
        None => Ok(()),
    }
}

/// Each token's target is the label of the token after it, if that is of the same document.
fn shift(labels: &[i64], len: usize, documents: Option<&Documents>) -> Vec<i64> {
    let mut targets = Vec::with_capacity(labels.len());
    for (index, row) in labels.chunks(len).enumerate() {
        targets.extend_from_slice(&row[1..]);
        targets.push(IGNORE_INDEX);
        if let Some(documents) = documents {
            let ids = documents.row(index);
            for (target, pair) in targets[index * len..].iter_mut().zip(ids.windows(2)) {
                if pair[0] != pair[1] || pair[0] < 0 {
                    *target = IGNORE_INDEX;
                }
            }
        }
    }
    targets
}

fn to_rows(tokens: Tensor<2, Int>) -> Vec<Vec<i64>> {
    let [rows, len] = tokens.dims();
    let values: Vec<i64> = tokens.into_data().iter::<i64>().collect();
    if len == 0 { vec![Vec::new(); rows] } else { values.chunks(len).map(<[i64]>::to_vec).collect() }
}
