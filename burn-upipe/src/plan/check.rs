//! Whether a setup can run at all: before anything is computed from its numbers.
//!
//! H query heads, G key/value heads, U query heads a stage, P ranks of a sequence.

use burn_context_parallel::Error;
use burn_context_parallel::attention::HeadSplit;
use burn_context_parallel::group::MAX_RANKS;
use burn_context_parallel::sequence::MAX_TOKENS;

use super::{Attention, PlanError, Setup, WaitingPlace};
use crate::upipe::Schedule;

/// Bytes are counted in numbers of 64 bits; what a model of so many elements takes must fit.
const COUNTABLE: u128 = 1 << 60;
/// A plan walks through every block: more of them are no model, and would take for ever.
const MAX_LAYERS: usize = 100_000;
const MAX_THREADS: usize = 1 << 16;
/// Bytes of an element, of all that is counted: what is bounded by it, is bounded with a margin.
const MAX_ELEMENT: usize = 16;

impl PlanError {
    /// A [`PlanError::Invalid`].
    pub fn invalid(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Invalid { problem: problem.into(), remedy: remedy.into() }
    }
}

impl From<Error> for PlanError {
    fn from(error: Error) -> Self {
        Self::Core(error)
    }
}

impl Setup {
    /// Whether all numbers fit each other, and all that they ask for is built.
    ///
    /// # Errors
    ///
    /// [`PlanError::Invalid`] with the numbers; [`PlanError::NotBuilt`] for a ring.
    ///
    /// ```
    /// use burn_upipe::plan::{Attention, Setup, model};
    ///
    /// let setup = Setup::published(model("llama-3-8b")?, 1 << 20, 8);
    /// assert!(setup.check().is_ok());
    ///
    /// let mut wrong = setup.clone();
    /// wrong.techniques.attention = Attention::UPipe { per_stage: Some(33) };
    /// let error = wrong.check().unwrap_err().to_string();
    /// assert!(error.contains("33 heads a stage of 32 query heads"), "{error}");
    ///
    /// let mut ring = setup;
    /// ring.mesh.ring = 2;
    /// assert!(ring.check().unwrap_err().to_string().starts_with("ring=2 is not built yet"));
    /// # Ok::<(), burn_upipe::plan::PlanError>(())
    /// ```
    pub fn check(&self) -> Result<(), PlanError> {
        self.check_counts()?;
        self.check_mesh()?;
        self.check_attention()?;
        self.check_techniques()?;
        self.check_accounting()?;
        self.check_size()
    }

    fn check_counts(&self) -> Result<(), PlanError> {
        let m = &self.model;
        for (name, count) in [
            ("vocabulary", m.vocab),
            ("width", m.width),
            ("feed-forward width", m.inner),
            ("number of blocks", m.layers),
            ("number of query heads", m.heads),
            ("number of key/value heads", m.kv_heads),
            ("head dimension", m.head_dim),
            ("sequence length", self.seq_len),
            ("batch", self.batch),
            ("number of micro-batches", self.accumulate),
        ] {
            if count == 0 {
                return Err(PlanError::invalid(format!("a {name} of 0"), "use a whole number from 1"));
            }
        }
        if m.layers > MAX_LAYERS {
            return Err(PlanError::invalid(
                format!("a model of {} blocks", m.layers),
                format!("use at most {MAX_LAYERS}"),
            ));
        }
        if self.seq_len > MAX_TOKENS {
            return Err(PlanError::invalid(
                format!("a sequence of {} tokens", self.seq_len),
                format!("use at most {MAX_TOKENS}"),
            ));
        }
        Ok(())
    }

    fn check_mesh(&self) -> Result<(), PlanError> {
        let mesh = self.mesh;
        if mesh.ring > 1 {
            return Err(PlanError::NotBuilt {
                what: format!("ring={}", mesh.ring),
                remedy: format!("use ring=1 and ulysses={}", mesh.ring.saturating_mul(mesh.ulysses)),
            });
        }
        // Says which axis leaves no rank, or that they cannot be counted.
        let ranks = mesh.ranks().unwrap_or(0);
        mesh.check(ranks)?;
        if ranks > MAX_RANKS {
            return Err(PlanError::invalid(
                format!("mesh: {mesh} needs {ranks} ranks"),
                format!("use at most {MAX_RANKS}"),
            ));
        }
        if mesh.ulysses > self.seq_len {
            return Err(PlanError::invalid(
                format!("{} tokens on ulysses={} ranks", self.seq_len, mesh.ulysses),
                format!("give every rank a token: use ulysses={} at most", self.seq_len),
            ));
        }
        Ok(())
    }

    fn check_attention(&self) -> Result<(), PlanError> {
        let (heads, kv_heads, ranks) = (self.model.heads, self.model.kv_heads, self.mesh.ulysses);
        HeadSplit::new(heads, kv_heads, ranks)?;
        match self.techniques.attention {
            Attention::Single if ranks > 1 => Err(PlanError::invalid(
                format!("attention on a single rank where {ranks} share a sequence (ulysses={ranks})"),
                "use attention ulysses or upipe, or ulysses=1",
            )),
            Attention::UPipe { per_stage: Some(per_stage) } => {
                Ok(Schedule::new(heads, kv_heads, ranks, per_stage).map(drop)?)
            }
            _ => Ok(()),
        }
    }

    fn check_techniques(&self) -> Result<(), PlanError> {
        let techniques = &self.techniques;
        for (name, tile) in
            [("feed-forward", techniques.mlp_tile), ("norm", techniques.norm_tile), ("loss", techniques.loss_tile)]
        {
            if tile == Some(0) {
                return Err(PlanError::invalid(format!("a {name} tile of 0 tokens"), "use at least 1, or no tiles"));
            }
        }
        let layers = self.model.layers;
        if let Some(blocks) = techniques.checkpoint.filter(|blocks| *blocks == 0 || *blocks > layers) {
            return Err(PlanError::invalid(
                format!("a checkpoint of {blocks} blocks in a model of {layers}"),
                format!("use 1 to {layers}"),
            ));
        }
        if let Some(offload) = techniques.offload {
            let place = match offload.place {
                WaitingPlace::Host => "host",
                WaitingPlace::Disk => "disk",
            };
            if techniques.checkpoint.is_none() {
                return Err(PlanError::invalid(
                    format!("offload to the {place} of block inputs that no checkpoint keeps"),
                    "use checkpoints, or no offload",
                ));
            }
            if offload.in_flight == 0 || offload.every == 0 {
                return Err(PlanError::invalid(
                    format!("offload of every {} blocks with {} in flight", offload.every, offload.in_flight),
                    "use at least 1 of both",
                ));
            }
        }
        Ok(())
    }

    fn check_accounting(&self) -> Result<(), PlanError> {
        let accounting = &self.accounting;
        if ![2, 4, 8].contains(&accounting.compute) {
            return Err(PlanError::invalid(
                format!("elements of {} bytes that are computed with", accounting.compute),
                "use 2, 4 or 8",
            ));
        }
        for (name, count, most) in [
            ("bytes of an element of the weights", accounting.weight, MAX_ELEMENT),
            ("bytes of an element of the gradients", accounting.gradient, MAX_ELEMENT),
            ("bytes of optimizer state an element", accounting.optimizer, MAX_ELEMENT),
            ("bytes of an element of a kernel's gradients", accounting.kernel_gradient, MAX_ELEMENT),
            ("bytes of an element of sums", accounting.sums, MAX_ELEMENT),
            ("threads of a rank", accounting.threads, MAX_THREADS),
            ("percent lost by the allocator", accounting.fragmentation, 100),
        ] {
            if count > most {
                return Err(PlanError::invalid(format!("{count} {name}"), format!("use at most {most}")));
            }
        }
        Ok(())
    }

    /// In 128 bits, before anything is multiplied in fewer.
    fn check_size(&self) -> Result<(), PlanError> {
        let wide = |count: usize| count as u128;
        let m = &self.model;
        let head_width = (wide(m.heads) + 2 * wide(m.kv_heads)).saturating_mul(wide(m.head_dim));
        let block = wide(m.width)
            .saturating_mul(head_width.saturating_mul(2).saturating_add(3 * wide(m.inner)).saturating_add(2))
            .saturating_add(head_width);
        let parameters =
            block.saturating_mul(wide(m.layers)).saturating_add(wide(m.vocab).saturating_mul(2 * wide(m.width)));
        let passes = wide(self.batch).saturating_mul(wide(self.accumulate));
        let tokens = wide(self.local()).saturating_mul(passes);
        let token = (16 * wide(m.width) + 8 * wide(m.inner))
            .saturating_add(head_width.saturating_mul(8))
            .saturating_mul(wide(m.layers))
            .saturating_add(4 * wide(m.vocab));
        // Of heads that ranks do not divide a rank has more than its part.
        let per_rank = wide(m.heads.div_ceil(self.mesh.ulysses)).saturating_mul(3 * wide(m.head_dim));
        let exchanged =
            wide(self.seq_len).saturating_mul(passes).saturating_mul(wide(m.layers)).saturating_mul(per_rank);
        let scores = wide(self.seq_len).saturating_mul(8 * wide(m.heads));
        for bytes in [
            parameters.saturating_mul(64),
            // Gathered and reduced in every micro-batch.
            parameters.saturating_mul(wide(self.accumulate)).saturating_mul(32),
            tokens.saturating_mul(token).saturating_mul(8),
            exchanged.saturating_mul(64),
            tokens.saturating_mul(scores),
        ] {
            if bytes >= COUNTABLE {
                return Err(PlanError::invalid(
                    format!(
                        "{} tokens x {} sequences of a model of {} blocks, width {} and vocabulary {} are more bytes than can be counted",
                        self.seq_len,
                        self.batch.saturating_mul(self.accumulate),
                        m.layers,
                        m.width,
                        m.vocab
                    ),
                    "use smaller numbers",
                ));
            }
        }
        if wide(self.accounting.overhead) >= COUNTABLE {
            return Err(PlanError::invalid(
                format!("an overhead of {} bytes", self.accounting.overhead),
                "use what an allocator and a communicator take",
            ));
        }
        Ok(())
    }
}
