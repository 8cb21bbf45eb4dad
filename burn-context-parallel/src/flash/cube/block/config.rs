//! What a kernel of the family `block` is compiled for.

use super::super::super::blueprint::{SLAB, Tiles, block_side, slab_row, stage, sum_row};
use super::super::table::Labels;

/// A cube of `side x side` units owns `own` rows, and meets the other side `step` rows at a time. Unit `(x, y)` has `m` of the own rows, from
/// `m y` on, and every `side`th of the others, from `x` on: `m n` scores; of sums it has every `side`th vector of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct BlockConfig {
    /// D.
    pub dim: usize,
    /// Numbers of a vector, along D.
    pub vector: usize,
    pub own: usize,
    pub step: usize,
    pub side: usize,
    pub labels: Labels,
    /// Whether scores are bent.
    pub softcap: bool,
    /// Whether large scores are computed in two parts.
    pub exact: bool,
    /// Whether results are rounded to bf16 by their bits.
    pub by_bits: bool,
}

impl BlockConfig {
    pub fn new(dim: usize, tiles: &Tiles, labels: Labels, softcap: bool, exact: bool, by_bits: bool) -> Self {
        let &Tiles { vector, own, step, units } = tiles;
        Self { dim, vector, own, step, side: block_side(units), labels, softcap, exact, by_bits }
    }

    /// Whether large scores are computed in two parts here: not those that are bent, which are not large unless the cap is.
    pub fn is_exact(&self) -> bool {
        self.exact && !self.softcap
    }

    /// Own rows of a unit.
    pub fn m(&self) -> usize {
        self.own / self.side
    }

    /// Rows of the other side that a unit has scores with.
    pub fn n(&self) -> usize {
        self.step / self.side
    }

    pub fn units(&self) -> usize {
        self.side * self.side
    }

    /// Vectors of a row.
    pub fn width(&self) -> usize {
        self.dim.div_ceil(self.vector)
    }

    /// Vectors of a row in a slab, which is as wide as shared memory has room for.
    pub fn slab(&self) -> usize {
        SLAB / self.vector
    }

    /// Slabs of a row.
    pub fn slabs(&self) -> usize {
        self.width().div_ceil(self.slab())
    }

    /// Vectors from row to row of a slab: one more than it has, so that rows begin in different banks.
    pub fn slab_row(&self) -> usize {
        slab_row(self.vector)
    }

    /// Vectors in shared memory.
    pub fn stage(&self) -> usize {
        stage(self.vector, self.own + self.step)
    }

    /// Vectors of a sum's row that a unit has.
    pub fn share(&self) -> usize {
        self.width().div_ceil(self.side)
    }

    /// Vectors from row to row while sums are taken.
    pub fn sum_row(&self) -> usize {
        sum_row(self.vector, self.side, self.dim)
    }

    /// Rows that are in shared memory at once while sums are taken: a power of two, no more than a step.
    pub fn sum_rows(&self) -> usize {
        let most = (self.stage() / self.sum_row()).min(self.step);
        let power = 1 << most.ilog2();
        // Of a step that is no power of two, too, whole chunks.
        (1..=power).rev().find(|rows| self.step.is_multiple_of(*rows)).unwrap_or(1)
    }
}
