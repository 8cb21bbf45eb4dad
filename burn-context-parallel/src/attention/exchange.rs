//! The exchange of Ulysses as a value: from "my tokens, all heads" to "all tokens, my heads", and back.

use burn::tensor::{DType, Device, Tensor};

use crate::buffer::accumulator;
use crate::group::ProcessGroup;
use crate::sequence::SequenceLayout;
use crate::{Error, Result};

/// Which of the local tensor's heads go to which rank.
///
/// A head may go to several ranks (key/value heads when G < P) or to none (an uneven stage). [`to_heads`](Self::to_heads)
/// and [`to_sequence`](Self::to_sequence) are each other's adjoints: what was sent to several ranks comes back as a sum.
/// If every head goes to one rank they are inverses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadExchange {
    heads: usize,
    to: Vec<Vec<usize>>,
}

/// What a rank knows of the heads it will get back, also if it holds none of them: a description, not a tensor, so that it
/// keeps nothing alive.
#[derive(Clone, Debug)]
pub struct HeadShape {
    batch: usize,
    dim: usize,
    dtype: DType,
    device: Device,
}

impl HeadShape {
    /// The description of `x` [B, L, heads, D].
    pub fn of(x: &Tensor<4>) -> Self {
        let [batch, _, _, dim] = x.dims();
        Self { batch, dim, dtype: x.dtype(), device: x.device() }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl HeadExchange {
    /// `to[r]`: the heads (indices below `heads`) that rank r receives, in the order in which it will hold them.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if an index is not below `heads`.
    pub fn new(heads: usize, to: Vec<Vec<usize>>) -> Result<Self> {
        if let Some(head) = to.iter().flatten().find(|head| **head >= heads) {
            return Err(Error::invalid("HeadExchange::new", format!("head {head} of {heads}"), "number heads from 0"));
        }
        Ok(Self { heads, to })
    }

    /// The heads that each rank receives.
    pub fn to(&self) -> &[Vec<usize>] {
        &self.to
    }

    /// All tokens of this rank's heads, from every rank's tokens of all heads; `None` if this rank gets no head.
    ///
    /// # Shapes
    ///
    /// [B, L, heads, D] -> [B, S, n, D], in the order of the sequence and without padding; without autodiff.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if shape, layout and group do not fit; [`Error::Group`] if the collective fails.
    ///
    /// # Communication
    ///
    /// Each rank sends `B L D * size` bytes per head that goes to another rank.
    pub fn to_heads(&self, x: Tensor<4>, group: &ProcessGroup, layout: &SequenceLayout) -> Result<Option<Tensor<4>>> {
        let shape = HeadShape::of(&x);
        self.expect_ranks("HeadExchange::to_heads", group)?;
        expect_layout("HeadExchange::to_heads", group, layout)?;
        let local = layout.local_len(group.rank());
        if x.dims()[1..3] != [local, self.heads] {
            return Err(Error::invalid(
                "HeadExchange::to_heads",
                format!("x of shape {:?} where this rank holds {local} tokens of {} heads", x.dims(), self.heads),
                "pass this rank's tokens of all heads, [B, L, heads, D]",
            ));
        }
        let parts = self.to.iter().map(|heads| (!heads.is_empty()).then(|| select_heads(&x, heads))).collect();
        drop(x);
        gather_tokens(parts, self.to[group.rank()].len(), &shape, group, layout)
    }

    /// The way back, and the adjoint: this rank's tokens of all heads. A head that several ranks hold is summed, in
    /// f32 (or f64), in rank order; one that no rank holds is zero.
    ///
    /// # Shapes
    ///
    /// [B, S, n, D] (`None` if this rank holds no head) -> [B, L, heads, D], zero at padding.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if shape, layout and group do not fit; [`Error::Group`] if the collective fails.
    ///
    /// # Communication
    ///
    /// Each rank sends `B (S - L) D * size` bytes per head that it holds.
    pub fn to_sequence(
        &self,
        y: Option<Tensor<4>>,
        like: &HeadShape,
        group: &ProcessGroup,
        layout: &SequenceLayout,
    ) -> Result<Tensor<4>> {
        self.expect_ranks("HeadExchange::to_sequence", group)?;
        let counts: Vec<usize> = self.to.iter().map(Vec::len).collect();
        let received = return_tokens(y, &counts, like, group, layout)?;
        if self.to.iter().flatten().copied().eq(0..self.heads) {
            let mut parts: Vec<_> = received.into_iter().flatten().collect();
            return Ok(if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) });
        }
        let exact = accumulator(like.dtype);
        let mut sums: Vec<Option<Tensor<4>>> = vec![None; self.heads];
        for (heads, part) in self.to.iter().zip(received) {
            let Some(part) = part else { continue };
            for (slot, head) in heads.iter().enumerate() {
                let one = part.clone().narrow(2, slot, 1);
                let sum = sums[*head].take();
                sums[*head] = Some(match sum {
                    Some(sum) => sum.cast(exact) + one.cast(exact),
                    None => one,
                });
            }
        }
        let local = layout.local_len(group.rank());
        let heads = sums
            .into_iter()
            .map(|sum| match sum {
                Some(sum) => sum.cast(like.dtype),
                None => Tensor::zeros([like.batch, local, 1, like.dim], (&like.device, like.dtype)),
            })
            .collect();
        Ok(Tensor::cat(heads, 2))
    }
}

impl HeadExchange {
    fn expect_ranks(&self, name: &'static str, group: &ProcessGroup) -> Result<()> {
        if self.to.len() == group.size() {
            return Ok(());
        }
        Err(Error::invalid(
            name,
            format!("an exchange for {} ranks in a group of {}", self.to.len(), group.size()),
            "list the heads of every rank of the group, none for a rank that gets none",
        ))
    }
}

fn expect_layout(name: &'static str, group: &ProcessGroup, layout: &SequenceLayout) -> Result<()> {
    if layout.ranks() == group.size() {
        return Ok(());
    }
    Err(Error::invalid(
        name,
        format!("a layout for {} ranks in a group of {}", layout.ranks(), group.size()),
        "make the layout for the group's size",
    ))
}

/// All tokens of this rank's `mine` heads, from what every rank sends of its own tokens: `parts[r]` [B, L, n_r, D] goes to
/// rank r, `None` where that rank gets no head. The exchange itself, for schedules that make parts one by one.
///
/// # Shapes
///
/// -> [B, S, mine, D] in the order of the sequence, without padding; `None` if `mine` is 0.
///
/// # Errors
///
/// [`Error::Invalid`] if the layout is for another number of ranks; [`Error::Group`] if the collective fails, or ranks disagree on
/// who gets what.
pub fn gather_tokens(
    parts: Vec<Option<Tensor<4>>>,
    mine: usize,
    shape: &HeadShape,
    group: &ProcessGroup,
    layout: &SequenceLayout,
) -> Result<Option<Tensor<4>>> {
    expect_layout("gather_tokens", group, layout)?;
    let expected: Vec<_> = (0..group.size())
        .map(|rank| (mine > 0).then(|| vec![shape.batch, layout.local_len(rank), mine, shape.dim]))
        .collect();
    let received = group.at(&shape.device).all_to_all_uneven(parts, &expected)?;
    if mine == 0 {
        return Ok(None);
    }
    let received: Vec<_> = received.into_iter().flatten().collect();
    Ok(Some(layout.assemble(&received, 1)))
}

/// The way back: this rank's tokens of every rank's heads, `counts[r]` of them from rank r.
///
/// # Shapes
///
/// `y`: [B, S, n, D], `None` if this rank holds no head -> `[B, L, counts[r], D]` from each rank that holds some, zero at padding.
///
/// # Errors
///
/// [`Error::Invalid`] if shape, layout and group do not fit; [`Error::Group`] if the collective fails, or ranks disagree on who
/// holds what.
pub fn return_tokens(
    y: Option<Tensor<4>>,
    counts: &[usize],
    shape: &HeadShape,
    group: &ProcessGroup,
    layout: &SequenceLayout,
) -> Result<Vec<Option<Tensor<4>>>> {
    expect_layout("return_tokens", group, layout)?;
    if let Some(y) = y.as_ref().filter(|y| y.dims()[1] != layout.len()) {
        return Err(Error::invalid(
            "return_tokens",
            format!("y of shape {:?} for a sequence of {} tokens", y.dims(), layout.len()),
            "pass all tokens of this rank's heads, [B, S, n, D]",
        ));
    }
    let parts = (0..group.size()).map(|rank| y.as_ref().map(|y| layout.cut(y, 1, rank))).collect();
    drop(y);
    let local = layout.local_len(group.rank());
    let expected: Vec<_> =
        counts.iter().map(|count| (*count > 0).then(|| vec![shape.batch, local, *count, shape.dim])).collect();
    group.at(&shape.device).all_to_all_uneven(parts, &expected)
}

/// Neighbouring heads as one range: (first, how many, index in `heads`).
pub fn head_ranges(heads: &[usize]) -> Vec<(usize, usize, usize)> {
    let mut ranges: Vec<(usize, usize, usize)> = Vec::new();
    for (index, head) in heads.iter().enumerate() {
        match ranges.last_mut() {
            Some((start, len, _)) if *start + *len == *head => *len += 1,
            _ => ranges.push((*head, 1, index)),
        }
    }
    ranges
}

/// These heads of `x` [B, L, heads, D] in the given order; a view where they are neighbours.
///
/// # Panics
///
/// If `heads` is empty, or a head is not there.
pub fn select_heads(x: &Tensor<4>, heads: &[usize]) -> Tensor<4> {
    let mut parts: Vec<_> =
        head_ranges(heads).into_iter().map(|(start, len, _)| x.clone().narrow(2, start, len)).collect();
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn ones(dims: [usize; 4]) -> Tensor<4> {
        Tensor::ones(dims, &Device::flex())
    }

    #[rstest]
    #[case::no_rank(2, vec![], [1, 4, 2, 3], 1)]
    #[case::one_rank_too_many(2, vec![vec![0], vec![1]], [1, 4, 2, 3], 1)]
    #[case::more_heads_than_x_has(3, vec![vec![0, 2]], [1, 4, 2, 3], 1)]
    #[case::not_the_shard(2, vec![vec![0, 1]], [1, 3, 2, 3], 1)]
    #[case::a_layout_for_others(2, vec![vec![0, 1]], [1, 2, 2, 3], 2)]
    fn what_does_not_fit_is_an_error(
        #[case] heads: usize,
        #[case] to: Vec<Vec<usize>>,
        #[case] dims: [usize; 4],
        #[case] ranks: usize,
    ) {
        let (group, layout) = (ProcessGroup::single(), SequenceLayout::contiguous(4, ranks).unwrap());
        let exchange = HeadExchange::new(heads, to).unwrap();
        assert!(matches!(exchange.to_heads(ones(dims), &group, &layout), Err(Error::Invalid { .. })));
    }

    #[test]
    fn a_part_of_the_sequence_is_not_sent_back_as_the_whole() {
        let (group, layout) = (ProcessGroup::single(), SequenceLayout::contiguous(4, 1).unwrap());
        let exchange = HeadExchange::new(2, vec![vec![0, 1]]).unwrap();
        let x = ones([1, 3, 2, 3]);
        let error = exchange.to_sequence(Some(x.clone()), &HeadShape::of(&x), &group, &layout).unwrap_err();
        assert!(error.to_string().contains("[1, 3, 2, 3] for a sequence of 4 tokens"), "{error}");
    }
}
