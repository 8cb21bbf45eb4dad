//! Which part of a parameter a rank holds, and how many bytes that takes: values, without a tensor.
//!
//! N elements of a parameter, P ranks, c elements of a shard.

use std::ops::Range;

/// How one parameter lies on the ranks: flat, in equal shards, the last ones padded with zeros.
///
/// ```text
/// c = ceil(N / P),  rank r holds elements r c .. min((r + 1) c, N)
/// ```
///
/// Equal shards make one collective of a whole block possible, and padding is harmless: its gradient is zero, so that
/// elementwise optimizers leave it at zero.
///
/// ```
/// use burn_context_parallel::fsdp::Placement;
///
/// let placement = Placement::new(&[3, 7], 4);
/// assert_eq!(placement.shard_len(), 6);
/// assert_eq!(placement.range(1), 6..12);
/// assert_eq!(placement.range(3), 18..21); // and three zeros
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    shape: Vec<usize>,
    elements: usize,
    ranks: usize,
}

impl Placement {
    /// A parameter of this shape on so many ranks.
    pub fn new(shape: &[usize], ranks: usize) -> Self {
        Self { shape: shape.to_vec(), elements: shape.iter().product(), ranks: ranks.max(1) }
    }

    /// The whole parameter's shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The whole parameter's shape as an array.
    ///
    /// # Panics
    ///
    /// If the parameter has another number of dims.
    pub(super) fn dims<const D: usize>(&self) -> [usize; D] {
        self.shape[..].try_into().expect("a parameter keeps its number of dims")
    }

    /// The whole parameter's elements, N.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements of every rank's shard, padding included.
    pub fn shard_len(&self) -> usize {
        self.elements.div_ceil(self.ranks)
    }

    /// The elements of the whole that a rank holds, row-major; without padding, so it may be empty.
    pub fn range(&self, rank: usize) -> Range<usize> {
        let len = self.shard_len();
        (rank * len).min(self.elements)..((rank + 1) * len).min(self.elements)
    }

    /// The shard's shape in as many dims as the parameter has: `[1, .., 1, c]`.
    pub fn shard_shape<const D: usize>(&self) -> [usize; D] {
        std::array::from_fn(|dim| if dim + 1 == D { self.shard_len() } else { 1 })
    }

    /// Whether a parameter is worth sharding: tables and matrices are. Vectors (norms, biases) and what has fewer elements than
    /// `whole_below` stay whole on every rank.
    pub fn shards(shape: &[usize], ranks: usize, whole_below: usize) -> bool {
        let elements: usize = shape.iter().product();
        shape.len() > 1 && elements >= ranks.max(2) && elements >= whole_below
    }
}

/// Bytes of the model states that a rank keeps: weights, gradients and `moments` numbers of optimizer state per element, of size
/// `size` each, for parameters of `elements` each.
pub fn state_bytes(elements: impl IntoIterator<Item = usize>, ranks: usize, size: usize, moments: usize) -> usize {
    (2 + moments) * shard_bytes(elements, ranks, size)
}

/// Bytes of a rank's shards of parameters of `elements` each, with `size` bytes an element: weights, gradients or moments.
pub fn shard_bytes(elements: impl IntoIterator<Item = usize>, ranks: usize, size: usize) -> usize {
    elements.into_iter().map(|elements| elements.div_ceil(ranks.max(1)) * size).sum()
}

/// Bytes that exist beside the shards while a block of `elements` runs forward: its weights in `compute` bytes an element, this
/// rank's part of the exchange, and as much again for the next block under prefetch.
pub fn forward_bytes(elements: usize, ranks: usize, compute: usize, prefetch: bool) -> usize {
    let part = elements.div_ceil(ranks.max(1)) * compute;
    (gathered_bytes(elements, compute) + part) * if prefetch { 2 } else { 1 }
}

/// Bytes of a block's weights of `elements` once they are gathered: [`forward_bytes`] without what the exchange itself takes.
pub fn gathered_bytes(elements: usize, compute: usize) -> usize {
    elements * compute
}

/// As [`forward_bytes`], in the backward pass: the block's gradients in `compute` bytes an element and [`reduction_bytes`] come on top.
pub fn backward_bytes(elements: usize, ranks: usize, compute: usize, prefetch: bool) -> usize {
    forward_bytes(elements, ranks, compute, prefetch) + elements * compute + reduction_bytes(elements, compute)
}

/// Bytes that the reduction of a block's gradients takes beside these: the parts for all ranks in f32 (f64 stays), and gradients of half types
/// in f32.
///
/// ```text
/// elements * (2 max(compute, 4) - compute)
/// ```
pub fn reduction_bytes(elements: usize, compute: usize) -> usize {
    elements * (2 * compute.max(4) - compute)
}

/// Bytes that `Accumulation::Once` keeps between micro-batches: whole gradients in f32 (f64 stays) of all `elements` that train.
pub fn accumulation_bytes(elements: usize, size: usize) -> usize {
    elements * size.max(4)
}

/// Bytes that a rank sends (and receives) to gather a block of `elements` once, in `compute` bytes an element.
pub fn gather_bytes(elements: usize, ranks: usize, compute: usize) -> usize {
    (ranks.max(1) - 1) * elements.div_ceil(ranks.max(1)) * compute
}

/// Bytes that a rank sends (and receives) to reduce the gradients of a block of `elements` in `parameters` parameters once: in f32
/// (f64 stays), with one number a parameter that says whether anybody had a gradient.
pub fn reduce_bytes(elements: usize, parameters: usize, ranks: usize, size: usize) -> usize {
    (ranks.max(1) - 1) * (elements.div_ceil(ranks.max(1)) + parameters) * size.max(4)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Shards are consecutive, cover every element once, and none is longer than the shard.
        #[test]
        fn shards_make_the_whole(shape in prop::collection::vec(1usize..9, 1..4), ranks in 1usize..12) {
            let placement = Placement::new(&shape, ranks);
            let mut end = 0;
            for rank in 0..ranks {
                let range = placement.range(rank);
                prop_assert_eq!(range.start, end.min(placement.elements()));
                prop_assert!(range.len() <= placement.shard_len());
                end = range.end;
            }
            prop_assert_eq!(end, placement.elements());
        }
    }
}
