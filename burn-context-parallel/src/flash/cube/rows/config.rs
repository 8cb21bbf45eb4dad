//! What a kernel of the family `rows` is compiled for.

use super::super::table::Labels;

/// One unit owns `lanes x vectors` rows, one a lane of a register, and meets the other side `step` rows at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct RowsConfig {
    /// D.
    pub dim: usize,
    /// Numbers of a register.
    pub lanes: usize,
    /// Registers across the rows that a unit owns.
    pub vectors: usize,
    /// Rows of the other side that are met at once.
    pub step: usize,
    /// Rows of the other side in a tile, of which the table knows the extremes; a multiple of `step`.
    pub tile: usize,
    /// Whether the dimensions of every row lie side by side.
    pub dense: bool,
    pub labels: Labels,
    /// Whether scores are bent.
    pub softcap: bool,
    /// Whether large scores are computed in two parts.
    pub exact: bool,
    /// Whether results are rounded to bf16 by their bits.
    pub by_bits: bool,
}

impl RowsConfig {
    /// Rows that a unit owns.
    pub fn own(&self) -> usize {
        self.lanes * self.vectors
    }
}
