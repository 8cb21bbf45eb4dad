//! What to attend to, and how scores are scaled.

use crate::{Error, Result};

/// The options of one attention.
///
/// Query `i` sees key `j` if and only if `!causal || j + k_offset <= i + q_offset`. The offsets are the positions of the
/// first query and the first key in the whole sequence, so that a block of queries can meet a block of keys.
///
/// ```
/// use burn_context_parallel::flash::FlashOptions;
///
/// // Queries 1024.. of a sequence against its keys 0..
/// let options = FlashOptions::causal().with_offsets(1024, 0);
/// assert!(options.sees(0, 1024) && !options.sees(0, 1025));
/// assert_eq!(options.resolved_scale(64), 0.125);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct FlashOptions {
    /// Whether a query is kept from seeing keys at later positions.
    pub causal: bool,
    /// What `q k^T` is multiplied by; `None` is `1 / sqrt(D)`.
    pub scale: Option<f64>,
    /// Position of the first query.
    pub q_offset: i64,
    /// Position of the first key.
    pub k_offset: i64,
}

impl FlashOptions {
    /// Each query sees the keys at its own and at earlier positions.
    pub fn causal() -> Self {
        Self { causal: true, ..Self::default() }
    }

    /// Each query sees every key.
    pub fn full() -> Self {
        Self::default()
    }

    /// Multiplies `q k^T` by `scale` in place of `1 / sqrt(D)`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// The positions of the first query and of the first key.
    pub fn with_offsets(mut self, q_offset: i64, k_offset: i64) -> Self {
        self.q_offset = q_offset;
        self.k_offset = k_offset;
        self
    }

    /// Whether query `i` of the block sees key `j` of the block.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        // In i128: no pair of offsets overflows.
        !self.causal || j as i128 + i128::from(self.k_offset) <= i as i128 + i128::from(self.q_offset)
    }

    /// The scale in use for a head dimension.
    pub fn resolved_scale(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim.max(1) as f64).sqrt())
    }

    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        match self.scale {
            Some(scale) if !scale.is_finite() => Err(Error::invalid(
                operation,
                format!("the scale is {scale}"),
                "give a finite scale, or None for 1 / sqrt(D)",
            )),
            _ => Ok(()),
        }
    }

    /// How many keys query `i` sees: the first so many.
    #[cfg(feature = "flex")]
    pub(crate) fn visible(&self, i: usize, k_len: usize) -> usize {
        if !self.causal {
            return k_len;
        }
        let last = i as i128 + i128::from(self.q_offset) - i128::from(self.k_offset);
        (last + 1).clamp(0, k_len as i128) as usize
    }

    /// The first query that sees key `j`, or the number of queries.
    #[cfg(feature = "flex")]
    pub(crate) fn first_query(&self, j: usize, q_len: usize) -> usize {
        if !self.causal {
            return 0;
        }
        let first = j as i128 + i128::from(self.k_offset) - i128::from(self.q_offset);
        first.clamp(0, q_len as i128) as usize
    }
}
