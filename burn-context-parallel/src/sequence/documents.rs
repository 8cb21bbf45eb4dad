//! Which document a token belongs to, and which position it has: what masks are made of, as values.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::MAX_TOKENS;
use crate::{Error, Result};

/// The document of a token that belongs to none, such as padding: it sees nothing, and nothing sees it.
pub const NO_DOCUMENT: i64 = -1;

/// One integer a token: one row that all sequences of a batch share, or a row for each of them. A clone is a handle.
///
/// ```
/// use burn_context_parallel::sequence::PerToken;
///
/// let positions = PerToken::shared(vec![0, 1, 2, 0, 1]);
/// assert_eq!((positions.rows(), positions.len()), (1, 5));
/// assert_eq!(positions.row(7), [0, 1, 2, 0, 1]);
/// assert!(PerToken::per_row(&[vec![0, 1], vec![0]]).is_err());
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerToken {
    rows: usize,
    values: Arc<[i64]>,
    digest: u64,
}

impl PerToken {
    fn new(rows: usize, values: Arc<[i64]>) -> Self {
        // The same in every process: its keys are fixed.
        let mut hasher = DefaultHasher::new();
        (rows, &values).hash(&mut hasher);
        Self { rows, digest: hasher.finish(), values }
    }

    /// A number that differs where the values do, for ranks to compare.
    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    /// The same for every sequence of a batch.
    pub fn shared(values: Vec<i64>) -> Self {
        Self::new(1, values.into())
    }

    /// One row per sequence of a batch.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no row, or rows differ in length.
    pub fn per_row(rows: &[Vec<i64>]) -> Result<Self> {
        const NAME: &str = "PerToken::per_row";
        let Some(first) = rows.first() else {
            return Err(Error::invalid(NAME, "no row", "give one row per sequence of the batch"));
        };
        if let Some((index, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != first.len()) {
            return Err(Error::invalid(
                NAME,
                format!("row {index} has {} tokens, row 0 has {}", row.len(), first.len()),
                "give every token of every sequence a value",
            ));
        }
        Ok(Self::new(rows.len(), rows.concat().into()))
    }

    /// How many rows there are; 1 fits any batch.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens of a row.
    pub fn len(&self) -> usize {
        self.values.len() / self.rows
    }

    /// Whether a row has no tokens.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The values of one sequence of a batch.
    ///
    /// # Panics
    ///
    /// If there are several rows, but none for this sequence.
    pub fn row(&self, sequence: usize) -> &[i64] {
        let row = if self.rows == 1 { 0 } else { sequence };
        let len = self.len();
        &self.values[row * len..(row + 1) * len]
    }

    /// The same rows, cut or extended to `len` tokens; new ones get `value`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if all rows together would have more than [`MAX_TOKENS`] values.
    pub fn resized(&self, len: usize, value: i64) -> Result<Self> {
        if len == self.len() {
            return Ok(self.clone());
        }
        if len.checked_mul(self.rows).is_none_or(|all| all > MAX_TOKENS) {
            return Err(Error::invalid(
                "PerToken::resized",
                format!("{} rows of {len} tokens", self.rows),
                format!("use at most {MAX_TOKENS} tokens"),
            ));
        }
        let row = |row: usize| self.row(row).iter().copied().chain(std::iter::repeat(value)).take(len);
        Ok(Self::new(self.rows, (0..self.rows).flat_map(row).collect()))
    }
}

/// The documents packed into a sequence: attention never crosses their boundaries.
///
/// Any number names a document, a negative one ([`NO_DOCUMENT`]) none. A document's tokens need not be neighbours.
///
/// ```
/// use burn_context_parallel::sequence::Documents;
///
/// let documents = Documents::from_cu_seqlens(&[0, 3, 8])?;
/// assert_eq!(documents.row(0), [0, 0, 0, 1, 1, 1, 1, 1]);
/// assert_eq!(documents.positions().row(0), [0, 1, 2, 0, 1, 2, 3, 4]);
/// assert_eq!(documents.padded_to(9)?.row(0).last(), Some(&-1));
/// assert!(Documents::from_cu_seqlens(&[0, 8, 3]).is_err());
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documents(PerToken);

impl Documents {
    /// Documents of these lengths, one after the other, in every sequence of a batch.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if they have more than [`MAX_TOKENS`] tokens, or more than there is memory for.
    pub fn from_lengths(lengths: &[usize]) -> Result<Self> {
        const NAME: &str = "Documents::from_lengths";
        let total = lengths.iter().fold(0usize, |sum, len| sum.saturating_add(*len));
        let mut ids = Vec::new();
        if total > MAX_TOKENS || ids.try_reserve_exact(total).is_err() {
            return Err(Error::invalid(
                NAME,
                format!("{total} tokens"),
                format!("use at most {MAX_TOKENS}, 8 bytes each"),
            ));
        }
        ids.extend(lengths.iter().enumerate().flat_map(|(id, len)| std::iter::repeat_n(id as i64, *len)));
        Ok(Self(PerToken::shared(ids)))
    }

    /// Documents between these boundaries, as variable-length kernels take them: the first is 0, the last the length of the
    /// sequence.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the boundaries do not start at 0, fall, or go beyond [`MAX_TOKENS`].
    pub fn from_cu_seqlens(boundaries: &[usize]) -> Result<Self> {
        const NAME: &str = "Documents::from_cu_seqlens";
        if boundaries.first() != Some(&0) {
            return Err(Error::invalid(
                NAME,
                format!("the boundaries begin with {:?}", boundaries.first()),
                "begin with 0: boundaries are counted over the whole sequence, not over a shard",
            ));
        }
        if let Some(pair) = boundaries.windows(2).find(|pair| pair[0] > pair[1]) {
            return Err(Error::invalid(
                NAME,
                format!("boundary {} follows {}", pair[1], pair[0]),
                "give the running sum of the documents' lengths",
            ));
        }
        let lengths: Vec<usize> = boundaries.windows(2).map(|pair| pair[1] - pair[0]).collect();
        Self::from_lengths(&lengths)
    }

    /// One document number per token.
    pub fn from_ids(ids: PerToken) -> Self {
        Self(ids)
    }

    /// The numbers, for whoever needs the tokens' rows.
    pub fn ids(&self) -> &PerToken {
        &self.0
    }

    /// How many rows there are; 1 fits any batch.
    pub fn rows(&self) -> usize {
        self.0.rows()
    }

    /// Tokens of a row.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether a row has no tokens.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The document of each token of one sequence of a batch.
    ///
    /// # Panics
    ///
    /// If there are several rows, but none for this sequence.
    pub fn row(&self, sequence: usize) -> &[i64] {
        self.0.row(sequence)
    }

    /// The same documents in sequences of `len` tokens; tokens beyond them belong to none.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `len` is beyond [`MAX_TOKENS`].
    pub fn padded_to(&self, len: usize) -> Result<Self> {
        Ok(Self(self.0.resized(len, NO_DOCUMENT)?))
    }

    /// Positions that restart in each document: how many tokens of the same document come before. Outside documents 0.
    pub fn positions(&self) -> PerToken {
        let rows = (0..self.rows()).map(|row| {
            let mut next = HashMap::<i64, i64>::new();
            let position = |id: &i64| {
                if *id < 0 {
                    return 0;
                }
                let next = next.entry(*id).or_default();
                *next += 1;
                *next - 1
            };
            self.row(row).iter().map(position).collect::<Vec<_>>()
        });
        PerToken::new(self.rows(), rows.collect::<Vec<_>>().concat().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_may_come_back_and_counts_on() {
        let documents = Documents::from_ids(PerToken::shared(vec![4, 4, -1, 2, 4]));
        assert_eq!(documents.positions().row(0), [0, 1, 0, 0, 2]);
    }

    #[test]
    fn empty_documents_take_no_tokens() {
        let documents = Documents::from_cu_seqlens(&[0, 2, 2, 3]).unwrap();
        assert_eq!(documents.row(0), [0, 0, 2]);
    }

    #[test]
    fn boundaries_of_a_shard_are_refused() {
        for boundaries in [&[][..], &[1024, 3072], &[0, 4, 3]] {
            assert!(Documents::from_cu_seqlens(boundaries).is_err(), "{boundaries:?}");
        }
    }
}
