//! One block on paper: what its forward pass allocates, what a tape keeps of it, and what its backward pass adds and frees.
//!
//! The order is that of the code: norm, attention, output projection, norm, feed-forward; and back.

use super::ledger::Ledger;
use super::setup::Attention;
use super::{PlanError, Setup};
use crate::checkpoint;
use crate::tiling::{FeedForwardBytes, norm_backward_bytes, norm_bytes};
use crate::upipe::{self, Schedule, head_norm_bytes};
use burn_context_parallel::attention::{HeadSplit, KernelBytes, UlyssesBytes};
use burn_context_parallel::sequence::rotary_bytes;

/// Hidden states: a block's input, the residual, and their gradients.
pub(super) const HIDDEN: &str = "hidden states";
/// Attention's input, q, k, v, its output, their exchange buffers and gradients.
pub(super) const ATTENTION: &str = "attention";
/// The feed-forward's input and intermediates.
pub(super) const MLP: &str = "feed-forward";
/// What norms need beside their results.
pub(super) const NORM: &str = "norms";
/// Gradients of parameters.
pub(super) const GRADIENTS: &str = "gradients";

/// How attention runs here.
#[derive(Clone, Debug)]
enum Scheme {
    /// Nothing is exchanged.
    Whole,
    /// Everything at once.
    Exchanged,
    /// Stage by stage.
    Staged(Schedule),
}

/// Bytes of a block's tensors on the rank that holds the most.
#[derive(Clone, Debug)]
pub(super) struct Block {
    scheme: Scheme,
    shape: (usize, usize, usize, usize),
    kernel: KernelBytes,
    copying: bool,
    /// Attention's output once more, tokens first, where nothing is exchanged.
    again: usize,
    /// [B, L, E].
    pub e: usize,
    /// Tensors of attention where nothing is exchanged, and of Ulysses.
    heads: UlyssesBytes,
    rotation: usize,
    /// Of norms on whole heads: kept, and what comes on top on the way back.
    head_norm: [usize; 2],
    feed_forward: FeedForwardBytes,
    /// What a norm takes on its way, and on its way back.
    norm: [usize; 2],
    norm_kept: bool,
    /// Gradients of weights: [E, H D], [E, G D].
    wq: usize,
    wk: usize,
    /// What stages sum, over the bytes of an element of x.
    sums: usize,
}

impl Block {
    pub fn new(setup: &Setup) -> Result<Self, PlanError> {
        let Setup { model, techniques, accounting, batch, seq_len, .. } = setup;
        let (batch, seq, local, size) = (*batch, *seq_len, setup.local(), accounting.compute);
        let ranks = setup.mesh.ulysses;
        let core = |error: burn_context_parallel::Error| PlanError::Core(error);
        let split = HeadSplit::new(model.heads, model.kv_heads, ranks).map_err(core)?;
        let scheme = match setup.attention() {
            Attention::Single if ranks > 1 => {
                return Err(PlanError::Invalid {
                    problem: format!("attention single on ulysses={ranks}"),
                    remedy: "use ulysses=1, or attention ulysses or upipe".to_owned(),
                });
            }
            Attention::UPipe { per_stage } => {
                let per_stage = per_stage.unwrap_or_else(|| Schedule::default_per_stage(model.heads, ranks));
                Scheme::Staged(Schedule::new(model.heads, model.kv_heads, ranks, per_stage).map_err(core)?)
            }
            Attention::Ulysses if ranks > 1 => Scheme::Exchanged,
            _ => Scheme::Whole,
        };
        let padded = local * ranks;
        let of_rank = |rank| UlyssesBytes::new(&split, rank, batch, padded, model.head_dim, size);
        // The rank with the most heads; where counts differ, ranks with most queries have most keys, too.
        let most = (0..ranks).max_by_key(|rank| of_rank(*rank).saved()).unwrap_or(0);
        let gradient = accounting.gradient.min(size);
        let matrix = |heads: usize| model.width * heads * model.head_dim * gradient;
        let e = checkpoint::saved_bytes(batch, local, model.width, size);
        let norm =
            [norm_bytes, norm_backward_bytes].map(|bytes| bytes(batch, local, techniques.norm_tile, model.width, size));
        Ok(Self {
            shape: (batch, padded.max(seq), model.head_dim, size),
            kernel: KernelBytes {
                scratch: scratch(setup, split.queries(most).len(), split.keys(most).len()),
                result: accounting.kernel_gradient,
                casts: accounting.casts_whole,
            },
            copying: accounting.copying,
            again: if accounting.output_twice { of_rank(most).q } else { 0 },
            e,
            heads: of_rank(most),
            head_norm: match (&scheme, model.qk_norm) {
                (Scheme::Staged(_), _) | (_, false) => [0; 2],
                _ => head_norm_bytes(batch, local, model.heads, model.kv_heads, model.head_dim, size),
            },
            rotation: rotary_bytes(batch, local, model.heads, model.head_dim, size),
            feed_forward: FeedForwardBytes::new(
                batch,
                local,
                techniques.mlp_tile,
                model.width,
                model.inner,
                size,
                gradient,
            )
            .with_widths(accounting.feed_forward)
            .with_casts(if accounting.casts_whole { size } else { 4 }),
            norm,
            norm_kept: techniques.norm_tile.is_none(),
            wq: matrix(model.heads),
            wk: matrix(model.kv_heads),
            sums: accounting.sums * e / size,
            scheme,
        })
    }

    /// Gradients of all matrices.
    pub fn weights(&self) -> usize {
        3 * self.feed_forward.weights() + 2 * self.wq + 2 * self.wk
    }

    /// From x, which stays the caller's, to y, which is [`HIDDEN`]; with a tape all that it keeps stays.
    pub fn forward(&self, ledger: &mut Ledger, tape: bool) {
        let Self { e, .. } = *self;
        self.norm_forward(ledger, ATTENTION, tape);
        self.attention_forward(ledger, tape);
        // The output projection over all tokens, in half types with both sides once more in f32.
        let size = self.shape.3;
        ledger.flash(HIDDEN, self.kernel.cast((self.heads.q + e) / size, size));
        // h: its result, to which x is added.
        ledger.take(HIDDEN, e);
        if !tape {
            ledger.free(ATTENTION, self.heads.q);
            if matches!(self.scheme, Scheme::Staged(_)) {
                ledger.free(ATTENTION, e);
            }
        }
        self.norm_forward(ledger, MLP, tape);
        if tape {
            ledger.take(MLP, self.feed_forward.saved());
            ledger.flash(MLP, self.feed_forward.cast());
        }
        // y is there when the last tile is, or when the products are.
        if self.feed_forward.saved() == 0 {
            ledger.take(HIDDEN, e);
            ledger.flash(MLP, self.feed_forward.forward());
        } else {
            let forward = if tape { 0 } else { self.feed_forward.forward() };
            ledger.take(MLP, forward);
            ledger.take(HIDDEN, e);
            ledger.free(MLP, forward);
        }
        if !tape {
            ledger.free(MLP, e);
            ledger.free(HIDDEN, e);
        }
    }

    fn norm_forward(&self, ledger: &mut Ledger, part: &'static str, tape: bool) {
        if self.norm_kept {
            ledger.take(NORM, self.norm[0]);
            ledger.take(part, self.e);
            if !tape {
                ledger.free(NORM, self.norm[0]);
            }
        } else {
            ledger.take(part, self.e);
            ledger.flash(NORM, self.norm[0]);
        }
    }

    fn attention_forward(&self, ledger: &mut Ledger, tape: bool) {
        let UlyssesBytes { q, k, rows, .. } = self.heads;
        let input = q + 2 * k;
        if !matches!(self.scheme, Scheme::Staged(_)) {
            ledger.flash(ATTENTION, input);
            if !tape {
                ledger.free(ATTENTION, self.e);
            }
            if tape {
                ledger.take(ATTENTION, self.head_norm[0]);
            }
            ledger.flash(ATTENTION, input + self.rotation.max(self.head_norm[1]));
        }
        match &self.scheme {
            Scheme::Whole => {
                ledger.flash(ATTENTION, input + q + rows + self.kernel.scratch[0]);
                ledger.take(ATTENTION, q + if tape { input + rows } else { 0 });
                ledger.take(ATTENTION, self.again);
                if !tape {
                    ledger.free(ATTENTION, self.again);
                }
            }
            Scheme::Exchanged => {
                ledger.flash(ATTENTION, self.heads.forward(&self.kernel, self.copying));
                ledger.take(ATTENTION, q + if tape { self.heads.saved() } else { 0 });
            }
            Scheme::Staged(schedule) => {
                let (batch, seq, dim, size) = self.shape;
                let stage = upipe::forward_bytes(schedule, batch, seq, dim, size) + self.kernel.scratch[0];
                // The output exists from the end of the first stage on.
                if schedule.stages().len() == 1 {
                    ledger.flash(ATTENTION, stage);
                    ledger.take(ATTENTION, q);
                } else {
                    ledger.take(ATTENTION, q);
                    ledger.flash(ATTENTION, stage + upipe::stage_bytes(schedule, batch, seq, dim, size) / 2);
                }
                if tape {
                    ledger.take(ATTENTION, upipe::saved_bytes(schedule, batch, seq));
                }
            }
        }
    }

    /// From dy, which is [`HIDDEN`], to dx, which replaces it; frees what the tape kept but x, and leaves the gradients of weights.
    pub fn backward(&self, ledger: &mut Ledger) {
        let Self { e, wq, wk, .. } = *self;
        let (q, feed_forward) = (self.heads.q, &self.feed_forward);
        ledger.free(MLP, feed_forward.saved());
        if feed_forward.saved() == 0 {
            ledger.take(HIDDEN, e);
            ledger.flash(MLP, feed_forward.backward());
        } else {
            ledger.flash(MLP, feed_forward.backward());
            ledger.take(HIDDEN, e);
        }
        ledger.take(GRADIENTS, 3 * feed_forward.weights());
        ledger.free(MLP, e);
        self.norm_backward(ledger);
        // h is used up.
        ledger.free(HIDDEN, e);
        // d_out, and what its weights' gradient reads.
        ledger.take(ATTENTION, q);
        ledger.flash(ATTENTION, q + wq);
        ledger.take(GRADIENTS, wq);
        self.attention_backward(ledger);
        ledger.take(GRADIENTS, wq + 2 * wk);
        self.norm_backward(ledger);
    }

    /// From the gradient of a norm's result and that of the residual, both [`HIDDEN`], to their sum.
    pub fn norm_backward(&self, ledger: &mut Ledger) {
        ledger.flash(NORM, self.norm[1]);
        if self.norm_kept {
            ledger.free(NORM, self.norm[0]);
        }
        ledger.free(HIDDEN, self.e);
    }

    /// From d_out to the gradient of attention's input, [`HIDDEN`].
    fn attention_backward(&self, ledger: &mut Ledger) {
        let Self { e, wq, wk, kernel, .. } = *self;
        let UlyssesBytes { q, k, rows, .. } = self.heads;
        let size = self.shape.3;
        match &self.scheme {
            Scheme::Whole => {
                // out' of the output projection, and out.
                ledger.free(ATTENTION, self.again + q);
                let gradients = kernel.results((q + 2 * k) / size);
                ledger.take(ATTENTION, gradients);
                ledger.flash(ATTENTION, rows + kernel.scratch[1] + kernel.cast((2 * q + 2 * k) / size, size));
                ledger.free(ATTENTION, q + 2 * k + rows + q);
                ledger.flash(ATTENTION, self.rotation);
                self.head_norm_backward(ledger);
                self.project_backward(ledger);
                ledger.free(ATTENTION, gradients + e);
            }
            Scheme::Exchanged => {
                ledger.free(ATTENTION, self.heads.saved() + 2 * q); // with out and d_out
                ledger.flash(ATTENTION, self.heads.backward(&kernel, self.copying));
                ledger.take(ATTENTION, q + 2 * k);
                ledger.flash(ATTENTION, self.rotation);
                self.head_norm_backward(ledger);
                self.project_backward(ledger);
                ledger.free(ATTENTION, q + 2 * k + e);
            }
            Scheme::Staged(schedule) => {
                let (batch, seq, dim, size) = self.shape;
                let rows = upipe::saved_bytes(schedule, batch, seq);
                ledger.take(ATTENTION, self.sums);
                let stage =
                    upipe::backward_bytes_of(schedule, batch, seq, dim, size, kernel.result, kernel.casts && size < 4);
                let heads = upipe::stage_bytes(schedule, batch, seq, dim, size);
                ledger.take(ATTENTION, wq + 2 * wk);
                ledger.flash(ATTENTION, stage - rows + rows / schedule.stages().len() + kernel.scratch[1]);
                ledger.flash(ATTENTION, stage.saturating_sub(2 * heads) + 2 * heads.min(e));
                ledger.free(ATTENTION, wq + 2 * wk + self.sums + rows + 2 * q + e);
                ledger.take(HIDDEN, e);
            }
        }
    }

    fn head_norm_backward(&self, ledger: &mut Ledger) {
        ledger.flash(ATTENTION, self.head_norm[1]);
        ledger.free(ATTENTION, self.head_norm[0]);
    }

    /// From dq, dk, dv to the gradient of attention's input: sums, and its own copy for the weights' gradients.
    fn project_backward(&self, ledger: &mut Ledger) {
        ledger.take(HIDDEN, self.e);
        ledger.flash(HIDDEN, 2 * self.e + self.wq);
    }
}

/// Of Flex's kernels; those of GPUs have theirs on the chip.
#[cfg(feature = "flex")]
fn scratch(setup: &Setup, heads: usize, kv_heads: usize) -> [usize; 2] {
    use burn::tensor::DType;
    use burn_context_parallel::flash::{FlashShape, backward_bytes, forward_bytes};
    let Setup { model, accounting, batch, seq_len, .. } = setup;
    if accounting.threads == 0 {
        return [0; 2];
    }
    let shape = FlashShape {
        batch: *batch,
        q_heads: heads,
        kv_heads,
        q_len: *seq_len,
        k_len: *seq_len,
        head_dim: model.head_dim,
    };
    let dtype = if accounting.compute == 8 { DType::F64 } else { DType::F32 };
    // Beyond results, of which the walk keeps count.
    let results = |forward: bool| {
        let (q, k) = (shape.batch * heads * shape.q_len, shape.batch * kv_heads * shape.k_len);
        if forward { q * model.head_dim + q } else { (q + 2 * k) * model.head_dim }
    };
    let size = if accounting.compute == 8 { 8 } else { 4 };
    [
        forward_bytes(&shape, dtype, accounting.threads).saturating_sub(results(true) * size),
        backward_bytes(&shape, dtype, accounting.threads).saturating_sub(results(false) * size),
    ]
}

#[cfg(not(feature = "flex"))]
fn scratch(_: &Setup, _: usize, _: usize) -> [usize; 2] {
    [0; 2]
}
