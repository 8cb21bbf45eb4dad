//! The layout: which global indices each rank holds, in which order.

use std::fmt;
use std::ops::Range;

use burn::tensor::{Element, Tensor};

use crate::group::MAX_RANKS;
use crate::{Error, Result};

/// The most tokens of a sequence, and of all sequences of a batch together: 32 GiB of ids.
pub const MAX_TOKENS: usize = 1 << 32;

/// Which global indices `0..padded_len` each rank holds, in the order in which they lie in its shard.
///
/// Indices from [`len`](Self::len) on are padding. Every index belongs to exactly one rank; within a rank, segments are
/// increasing.
///
/// ```
/// use burn_context_parallel::sequence::SequenceLayout;
///
/// let layout = SequenceLayout::contiguous(10, 4)?;
/// assert_eq!(layout.local_len(0), 3);
/// assert_eq!(layout.padded_len(), 12);
/// assert_eq!(layout.to_string(), "10 tokens (+ 2 padding) on 4 ranks: [0..3] [3..6] [6..9] [9..12]");
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceLayout {
    len: usize,
    shards: Vec<Vec<Range<usize>>>,
}

/// A run of consecutive global indices that lies in one piece on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The rank that holds it.
    pub rank: usize,
    /// Its first global index.
    pub global: usize,
    /// Its first index in the rank's shard.
    pub local: usize,
    /// Its length, padding not counted.
    pub len: usize,
}

// A shard is a list of ranges; here it has one.
#[allow(clippy::single_range_in_vec_init)]
impl SequenceLayout {
    /// `len` tokens in order on `ranks` ranks, each `ceil(len / ranks)` long; what is missing at the end is padding.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `len` or `ranks` is zero, there are more than [`MAX_RANKS`] ranks, or more than [`MAX_TOKENS`] tokens.
    pub fn contiguous(len: usize, ranks: usize) -> Result<Self> {
        const NAME: &str = "SequenceLayout::contiguous";
        if len == 0 || ranks == 0 {
            return Err(Error::invalid(
                NAME,
                format!("{len} tokens on {ranks} ranks"),
                "give at least one token and one rank",
            ));
        }
        let local = len.div_ceil(ranks);
        if ranks > MAX_RANKS || len > MAX_TOKENS {
            return Err(Error::invalid(
                NAME,
                format!("{len} tokens on {ranks} ranks"),
                format!("use at most {MAX_TOKENS} tokens, and at most {MAX_RANKS} ranks"),
            ));
        }
        let shards = (0..ranks).map(|rank| vec![rank * local..(rank + 1) * local]).collect();
        Ok(Self { len, shards })
    }

    /// Consecutive parts of the given lengths, one a rank, without padding.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no rank or one without tokens, there are more than [`MAX_RANKS`] ranks, or more than
    /// [`MAX_TOKENS`] tokens.
    pub fn from_lengths(lengths: &[usize]) -> Result<Self> {
        if lengths.is_empty() || lengths.contains(&0) {
            return Err(Error::invalid(
                "SequenceLayout::from_lengths",
                format!("local lengths {lengths:?}"),
                "give every rank at least one token, or use SequenceLayout::contiguous, which pads",
            ));
        }
        let tokens = lengths.iter().fold(0usize, |sum, length| sum.saturating_add(*length));
        if lengths.len() > MAX_RANKS || tokens > MAX_TOKENS {
            return Err(Error::invalid(
                "SequenceLayout::from_lengths",
                format!("{tokens} tokens on {} ranks", lengths.len()),
                format!("use at most {MAX_TOKENS} tokens, and at most {MAX_RANKS} ranks"),
            ));
        }
        let mut start = 0;
        let shards = lengths
            .iter()
            .map(|length| {
                start += length;
                vec![start - length..start]
            })
            .collect();
        Ok(Self { len: start, shards })
    }

    /// Real tokens of the whole sequence, S.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tokens with padding: the sum of all local lengths.
    pub fn padded_len(&self) -> usize {
        (0..self.ranks()).map(|rank| self.local_len(rank)).sum()
    }

    /// How many ranks share the sequence, P.
    pub fn ranks(&self) -> usize {
        self.shards.len()
    }

    /// Tokens that `rank` holds, padding included, L.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn local_len(&self, rank: usize) -> usize {
        self.shards[rank].iter().map(Range::len).sum()
    }

    /// The global indices of `rank`'s shard, in order; those from [`len`](Self::len) on are padding.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn indices(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.shards[rank].iter().cloned().flatten()
    }

    /// Where the real tokens lie, in the order of the sequence: the one description from which shards are
    /// assembled and cut.
    pub fn pieces(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (rank, segments) in self.shards.iter().enumerate() {
            let mut local = 0;
            for segment in segments {
                let end = segment.end.min(self.len);
                if segment.start < end {
                    pieces.push(Piece { rank, global: segment.start, local, len: end - segment.start });
                }
                local += segment.len();
            }
        }
        pieces.sort_by_key(|piece| piece.global);
        pieces
    }

    /// The whole sequence from all shards' tensors, in order and without padding: the inverse of [`cut`](Self::cut).
    ///
    /// # Shapes
    ///
    /// `parts[r]`: [.., L_r, ..] with L_r at `dim` -> [.., S, ..].
    ///
    /// # Panics
    ///
    /// If the number of parts or their length at `dim` is not the layout's.
    pub fn assemble<const D: usize, K: burn::tensor::kind::Basic>(
        &self,
        parts: &[Tensor<D, K>],
        dim: usize,
    ) -> Tensor<D, K> {
        assert_eq!(parts.len(), self.ranks(), "one part per rank");
        let mut pieces: Vec<_> =
            self.pieces().iter().map(|piece| parts[piece.rank].clone().narrow(dim, piece.local, piece.len)).collect();
        if pieces.len() == 1 { pieces.remove(0) } else { Tensor::cat(pieces, dim) }
    }

    /// `rank`'s part of a whole-sequence tensor, with zeros where its shard is padding.
    ///
    /// # Shapes
    ///
    /// [.., S, ..] with S at `dim` -> [.., L, ..].
    ///
    /// # Panics
    ///
    /// If the length at `dim` is not S, or there is no such rank.
    pub fn cut<const D: usize, K: burn::tensor::kind::Numeric>(
        &self,
        whole: &Tensor<D, K>,
        dim: usize,
        rank: usize,
    ) -> Tensor<D, K> {
        let dims = whole.dims();
        assert_eq!(dims[dim], self.len, "the whole sequence has {} tokens", self.len);
        let mut pieces = Vec::new();
        for segment in &self.shards[rank] {
            let end = segment.end.min(self.len).max(segment.start);
            if segment.start < end {
                pieces.push(whole.clone().narrow(dim, segment.start, end - segment.start));
            }
            if end < segment.end {
                let mut padding = dims;
                padding[dim] = segment.end - end;
                pieces.push(Tensor::zeros(padding, (&whole.device(), whole.dtype())));
            }
        }
        if pieces.len() == 1 { pieces.remove(0) } else { Tensor::cat(pieces, dim) }
    }

    /// `rank`'s part of one row of host data, with `padding` where its shard is padding.
    ///
    /// # Panics
    ///
    /// If `row` does not hold S elements, or there is no such rank.
    pub fn cut_row<E: Element>(&self, row: &[E], rank: usize, padding: E) -> Vec<E> {
        assert_eq!(row.len(), self.len, "the whole sequence has {} tokens", self.len);
        self.indices(rank).map(|index| row.get(index).copied().unwrap_or(padding)).collect()
    }
}

impl fmt::Display for SequenceLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.len)?;
        let padding = self.padded_len() - self.len;
        if padding > 0 {
            write!(f, " (+ {padding} padding)")?;
        }
        write!(f, " on {} ranks:", self.ranks())?;
        for segments in &self.shards {
            write!(f, " [")?;
            for (i, segment) in segments.iter().enumerate() {
                write!(f, "{}{}..{}", if i > 0 { " " } else { "" }, segment.start, segment.end)?;
            }
            write!(f, "]")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_nobody_can_count_are_errors() {
        for (len, ranks) in [(0, 1), (1, 0), (usize::MAX, 2), (2, usize::MAX)] {
            assert!(SequenceLayout::contiguous(len, ranks).is_err(), "{len} tokens on {ranks} ranks");
        }
        for lengths in [&[][..], &[1, 0], &[usize::MAX, 2]] {
            assert!(SequenceLayout::from_lengths(lengths).is_err(), "{lengths:?}");
        }
    }
}
