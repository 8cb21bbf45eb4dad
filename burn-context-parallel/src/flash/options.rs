//! What to attend to, and how scores are scaled.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;

use super::Blueprint;
use crate::sequence::{Documents, PerToken};
use crate::{Error, Result};

/// The options of one attention.
///
/// With p the positions of queries and keys (offset + index, or given [per token](Self::with_positions)), query `i` sees key `j`
/// if and only if all of these hold:
///
/// ```text
/// causal      p_j <= p_i
/// window W    p_i - p_j < W                       itself and the W - 1 positions before it
/// lookahead A p_j - p_i <= A
/// documents   d_i = d_j, and d_i is a document
/// ```
///
/// Scores are `s = scale q . k`, then with a softcap `cap tanh(s / cap)`.
///
/// ```
/// use burn_context_parallel::flash::FlashOptions;
/// use burn_context_parallel::sequence::Documents;
///
/// // Queries 1024.. of a sequence against its keys 0..
/// let options = FlashOptions::causal().with_offsets(1024, 0);
/// assert!(options.sees(0, 0, 1024) && !options.sees(0, 0, 1025));
/// assert_eq!(options.resolved_scale(64), 0.125);
///
/// // Frames of a film, each seeing three before and after it; two films in one sequence.
/// let films = Documents::from_lengths(&[100, 50])?;
/// let options = FlashOptions::full().with_window(4).with_lookahead(3).with_documents(films);
/// assert!(options.sees(0, 98, 99) && !options.sees(0, 98, 100) && !options.sees(0, 50, 46));
/// # Ok::<(), burn_context_parallel::Error>(())
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
    /// How many positions a query looks back on, its own included.
    pub window: Option<usize>,
    /// How many positions a query looks ahead.
    pub lookahead: Option<usize>,
    /// The largest score.
    pub softcap: Option<f64>,
    /// The documents of queries and of keys.
    pub documents: Option<(Documents, Documents)>,
    /// The positions of queries and of keys, in place of offsets.
    pub positions: Option<(PerToken, PerToken)>,
    /// Whether outputs and gradients of half types are given in f32.
    pub f32_results: bool,
    /// How kernels on a CubeCL device are built; `None` chooses.
    pub blueprint: Option<Blueprint>,
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

    /// A query sees no key `window` or more positions before it (`sliding_window` in Hugging Face's configurations): time is
    /// O(S window).
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// A query sees no key more than `lookahead` positions after it; 0 is causal.
    pub fn with_lookahead(mut self, lookahead: usize) -> Self {
        self.lookahead = Some(lookahead);
        self
    }

    /// Bends scores to stay below `cap`: `cap tanh(s / cap)`.
    pub fn with_softcap(mut self, cap: f64) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// The documents of a sequence that attends to itself. Across ranks, those of the whole sequence.
    pub fn with_documents(self, documents: Documents) -> Self {
        self.with_cross_documents(documents.clone(), documents)
    }

    /// The documents of the queries and of the keys, which share numbers.
    pub fn with_cross_documents(mut self, queries: Documents, keys: Documents) -> Self {
        self.documents = Some((queries, keys));
        self
    }

    /// The position of every query and of every key, in place of offsets. Across ranks, those of the whole sequence.
    pub fn with_positions(mut self, queries: PerToken, keys: PerToken) -> Self {
        self.positions = Some((queries, keys));
        self
    }

    /// Gives outputs and gradients of f16 and bf16 inputs as they were summed, in f32: for schedules that sum them further. Not on a tape, where
    /// gradients have the type of what they belong to.
    pub fn with_f32_results(mut self) -> Self {
        self.f32_results = true;
        self
    }

    /// Forces how kernels on a CubeCL device are built. On others it is refused.
    pub fn with_blueprint(mut self, blueprint: Blueprint) -> Self {
        self.blueprint = Some(blueprint);
        self
    }

    /// The type of outputs and gradients of inputs of `dtype`.
    pub(crate) fn result_dtype(&self, dtype: DType) -> DType {
        if self.f32_results && dtype.size() < 4 { DType::F32 } else { dtype }
    }

    /// Whether query `i` of the block sees key `j` of the block, in one sequence of the batch.
    ///
    /// # Panics
    ///
    /// If there are positions or documents, but none for such a token.
    pub fn sees(&self, sequence: usize, i: usize, j: usize) -> bool {
        // In i128: no pair of offsets overflows.
        let (p_i, p_j) = match &self.positions {
            Some((q, k)) => (i128::from(q.row(sequence)[i]), i128::from(k.row(sequence)[j])),
            None => (i as i128 + i128::from(self.q_offset), j as i128 + i128::from(self.k_offset)),
        };
        let same = |(q, k): &(Documents, Documents)| {
            let (d_i, d_j) = (q.row(sequence)[i], k.row(sequence)[j]);
            d_i == d_j && d_i >= 0
        };
        self.ahead().is_none_or(|ahead| p_j - p_i <= ahead)
            && self.behind().is_none_or(|behind| p_i - p_j <= behind)
            && self.documents.as_ref().is_none_or(same)
    }

    /// A number that differs where options do: ranks that attend together compare it, since heads under different masks would be a wrong
    /// result and no error.
    pub fn digest(&self) -> u64 {
        // Named one by one, so that a new option is not forgotten; ranks may have different kernels.
        let Self {
            causal,
            scale,
            q_offset,
            k_offset,
            window,
            lookahead,
            softcap,
            documents,
            positions,
            f32_results,
            ..
        } = self;
        let documents = documents.as_ref().map(|(q, k)| (q.ids().digest(), k.ids().digest()));
        let positions = positions.as_ref().map(|(q, k)| (q.digest(), k.digest()));
        let mut hasher = DefaultHasher::new();
        (causal, scale.map(f64::to_bits), q_offset, k_offset, window, lookahead).hash(&mut hasher);
        (softcap.map(f64::to_bits), documents, positions, f32_results).hash(&mut hasher);
        hasher.finish()
    }

    /// How far a query looks ahead, if there is a limit.
    pub(crate) fn ahead(&self) -> Option<i128> {
        if self.causal { Some(0) } else { self.lookahead.map(|ahead| ahead as i128) }
    }

    /// How far a query looks back, if there is a limit.
    pub(crate) fn behind(&self) -> Option<i128> {
        self.window.map(|window| window as i128 - 1)
    }

    /// The scale in use for a head dimension.
    pub fn resolved_scale(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim.max(1) as f64).sqrt())
    }

    /// What is wrong with the options by themselves.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        let wrong = |problem: String, remedy: &str| Err(Error::invalid(operation, problem, remedy));
        if let Some(scale) = self.scale.filter(|scale| !(*scale as f32).is_finite()) {
            return wrong(format!("the scale is {scale}"), "give a scale that f32 holds, or None for 1 / sqrt(D)");
        }
        if let Some(cap) = self.softcap.filter(|cap| !((*cap as f32).is_normal() && *cap > 0.0)) {
            let remedy = "give a positive number of f32's range (1.2e-38 to 3.4e38), or None for no softcap";
            return wrong(format!("the softcap is {cap}"), remedy);
        }
        if self.window == Some(0) {
            return wrong("a window of 0 positions".to_owned(), "a window of 1 sees the query's own position");
        }
        if self.positions.is_some() && (self.q_offset, self.k_offset) != (0, 0) {
            return wrong(
                format!("offsets {} and {} beside positions per token", self.q_offset, self.k_offset),
                "add the offsets to the positions",
            );
        }
        Ok(())
    }

    /// What is wrong with the options for sequences of `q_len` queries and `k_len` keys: for schedules, which check before they
    /// communicate.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a scale or softcap that is no number, an empty window, documents or positions of another length.
    pub fn expect_lengths(&self, operation: &'static str, q_len: usize, k_len: usize) -> Result<()> {
        let documents = self.documents.iter().flat_map(|(q, k)| [q.rows(), k.rows()]);
        let positions = self.positions.iter().flat_map(|(q, k)| [q.rows(), k.rows()]);
        let batch = documents.chain(positions).max().unwrap_or(1);
        self.check_lengths(operation, batch, q_len, k_len)
    }

    /// What is wrong with the options for a batch of `batch` sequences of `q_len` queries and `k_len` keys.
    pub(crate) fn check_lengths(
        &self,
        operation: &'static str,
        batch: usize,
        q_len: usize,
        k_len: usize,
    ) -> Result<()> {
        self.check(operation)?;
        let documents = self.documents.as_ref().map(|(q, k)| ("documents", q.ids(), k.ids()));
        let positions = self.positions.as_ref().map(|(q, k)| ("positions", q, k));
        for (name, q, k) in documents.into_iter().chain(positions) {
            for (side, given, len) in [("queries", q, q_len), ("keys", k, k_len)] {
                if given.len() != len || given.rows() != 1 && given.rows() != batch {
                    return Err(Error::invalid(
                        operation,
                        format!(
                            "{name} of {} rows of {} tokens for {batch} sequences of {len} {side}",
                            given.rows(),
                            given.len()
                        ),
                        "give one value per token of the whole sequence, in one row for all sequences or in a row for each; \
                         Documents::padded_to marks padding",
                    ));
                }
            }
        }
        Ok(())
    }
}
