//! One block on paper: what its forward pass allocates, what a tape keeps of it, and what its backward pass adds and frees.
//!
//! The order is that of the code: norm, attention, output projection, norm, feed-forward; and back.

use super::ledger::Ledger;
use super::setup::Attention;
use super::{PlanError, Setup};
use crate::checkpoint;
use crate::tiling::even_bytes;
use crate::upipe::{self, Schedule};
use burn_context_parallel::attention::HeadSplit;

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
    kernel: (usize, bool),
    copying: bool,
    /// [B, L, E].
    pub e: usize,
    /// [B, L, H, D], and one of k and v.
    q: usize,
    k: usize,
    /// This rank's heads over the whole sequence: q, and one of k and v.
    qg: usize,
    kg: usize,
    /// What an exchange of q has on its way to others.
    sent: usize,
    /// A row statistic of this rank's heads.
    rows: usize,
    /// Scratch of attention's threads.
    scratch: [usize; 2],
    /// [B, L, F].
    f: usize,
    /// A tile of the feed-forward, [B, n, F] and [B, n, E], and of a norm, [B, n, E]; `None` without tiles.
    mlp_tile: Option<(usize, usize)>,
    norm_tile: Option<usize>,
    /// Gradients of weights: [E, F], [E, H D], [E, G D].
    wf: usize,
    wq: usize,
    wk: usize,
    /// Bytes of an element of what stages sum, over those of an element.
    sums: usize,
}

impl Block {
    pub fn new(setup: &Setup) -> Result<Self, PlanError> {
        let Setup { model, techniques, accounting, batch, seq_len, .. } = setup;
        let (batch, seq, local, size) = (*batch, *seq_len, setup.local(), accounting.compute);
        let ranks = setup.mesh.ulysses;
        let core = |error: burn_context_parallel::Error| PlanError::Core(error);
        let split = HeadSplit::new(model.heads, model.kv_heads, ranks).map_err(core)?;
        let most = |count: &dyn Fn(usize) -> usize| (0..ranks).map(count).max().unwrap_or(0);
        let (h, g) = (most(&|rank| split.queries(rank).len()), most(&|rank| split.keys(rank).len()));
        let scheme = match techniques.attention {
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
        let heads = |count: usize, tokens: usize| batch * tokens * count * model.head_dim * size;
        let padded = local * ranks;
        let staged = matches!(scheme, Scheme::Staged(_));
        let scratch = scratch(setup, h, g);
        let e = checkpoint::saved_bytes(batch, local, model.width, size);
        let row = |width: usize, tile: usize| even_bytes(batch, local, tile, width, size);
        Ok(Self {
            shape: (batch, padded.max(seq), model.head_dim, size),
            kernel: (accounting.kernel_gradient, accounting.casts_whole && size < 4),
            copying: accounting.copying,
            e,
            q: heads(model.heads, local),
            k: heads(model.kv_heads, local),
            qg: heads(h, padded),
            kg: heads(g, padded),
            sent: if ranks > 1 { heads(model.heads, local) / ranks * (ranks - 1) } else { 0 },
            rows: if staged { upipe_rows(&scheme, batch, seq) } else { 4 * batch * padded * h },
            scratch,
            f: batch * local * model.inner * size,
            mlp_tile: techniques.mlp_tile.map(|tile| (row(model.inner, tile), row(model.width, tile))),
            norm_tile: techniques.norm_tile.map(|tile| row(model.width, tile)),
            wf: model.width * model.inner * accounting.gradient.min(size),
            wq: model.width * model.heads * model.head_dim * accounting.gradient.min(size),
            wk: model.width * model.kv_heads * model.head_dim * accounting.gradient.min(size),
            sums: accounting.sums * e / size,
            scheme,
        })
    }

    /// Gradients of all matrices.
    pub fn weights(&self) -> usize {
        3 * self.wf + 2 * self.wq + 2 * self.wk
    }

    /// From x, which stays the caller's, to y, which is [`HIDDEN`]; with a tape all that it keeps stays.
    pub fn forward(&self, ledger: &mut Ledger, tape: bool) {
        let Self { e, q, f, .. } = *self;
        self.norm_forward(ledger, ATTENTION, tape);
        self.attention_forward(ledger, tape);
        // h: the output projection's result, to which x is added.
        ledger.take(HIDDEN, e);
        if !tape {
            ledger.free(ATTENTION, q);
            if matches!(self.scheme, Scheme::Staged(_)) {
                ledger.free(ATTENTION, e);
            }
        }
        self.norm_forward(ledger, MLP, tape);
        match self.mlp_tile {
            None => {
                ledger.take(MLP, if tape { 5 * f } else { 3 * f });
                ledger.take(HIDDEN, e);
                if !tape {
                    ledger.free(MLP, 3 * f);
                }
            }
            Some((inner, width)) => {
                ledger.take(HIDDEN, e);
                ledger.flash(MLP, 3 * inner + width);
            }
        }
        if !tape {
            ledger.free(MLP, e);
            ledger.free(HIDDEN, e);
        }
    }

    fn norm_forward(&self, ledger: &mut Ledger, part: &'static str, tape: bool) {
        match self.norm_tile {
            Some(tile) => {
                ledger.take(part, self.e);
                ledger.flash(NORM, 3 * tile);
            }
            None => {
                ledger.take(NORM, self.e);
                ledger.take(part, self.e);
                if !tape {
                    ledger.free(NORM, self.e);
                }
            }
        }
    }

    fn attention_forward(&self, ledger: &mut Ledger, tape: bool) {
        let Self { e, q, k, qg, kg, sent, rows, .. } = *self;
        let mut take = |bytes| ledger.take(ATTENTION, bytes);
        match &self.scheme {
            Scheme::Whole => {
                take(q + 2 * k);
                if !tape {
                    ledger.free(ATTENTION, e);
                }
                // Rotation: the rotated heads, and halves on their way.
                ledger.flash(ATTENTION, 3 * q / 2);
                ledger.take(ATTENTION, q + rows);
                ledger.flash(ATTENTION, self.scratch[0]);
                // The output once more, tokens first.
                if !tape {
                    ledger.free(ATTENTION, q + 2 * k + rows);
                    ledger.flash(ATTENTION, q);
                } else {
                    ledger.take(ATTENTION, q);
                }
            }
            Scheme::Exchanged => {
                take(q + 2 * k);
                if !tape {
                    ledger.free(ATTENTION, e);
                }
                ledger.flash(ATTENTION, 3 * q / 2);
                ledger.take(ATTENTION, qg + 2 * kg);
                ledger.flash(ATTENTION, sent);
                if !tape && !self.copying {
                    ledger.free(ATTENTION, q + 2 * k);
                }
                ledger.take(ATTENTION, qg + rows);
                ledger.flash(ATTENTION, self.scratch[0]);
                ledger.take(ATTENTION, q);
                ledger.flash(ATTENTION, 2 * sent);
                // The output as it was gathered, and what was sent.
                ledger.free(ATTENTION, qg);
                if tape || self.copying {
                    ledger.free(ATTENTION, q + 2 * k);
                }
                if !tape {
                    ledger.free(ATTENTION, qg + 2 * kg + rows);
                }
            }
            Scheme::Staged(schedule) => {
                let (batch, seq, dim, size) = self.shape;
                let stage = upipe::forward_bytes(schedule, batch, seq, dim, size) + self.scratch[0];
                // The output exists from the end of the first stage on.
                if schedule.stages().len() == 1 {
                    ledger.flash(ATTENTION, stage);
                    ledger.take(ATTENTION, q);
                } else {
                    take(q);
                    ledger.flash(ATTENTION, stage + upipe::stage_bytes(schedule, batch, seq, dim, size) / 2);
                }
                if tape {
                    ledger.take(ATTENTION, rows);
                }
            }
        }
    }

    /// From dy, which is [`HIDDEN`], to dx, which replaces it; frees what the tape kept but x, and leaves the gradients of weights.
    pub fn backward(&self, ledger: &mut Ledger) {
        let Self { e, q, f, wf, wq, wk, .. } = *self;
        match self.mlp_tile {
            None => {
                ledger.flash(MLP, 2 * f);
                ledger.free(MLP, 4 * f);
                ledger.take(GRADIENTS, 2 * wf);
                ledger.flash(MLP, 3 * e + wf);
                ledger.take(GRADIENTS, wf);
                ledger.free(MLP, f);
                ledger.take(HIDDEN, e);
            }
            Some((inner, width)) => {
                ledger.take(HIDDEN, e);
                ledger.flash(MLP, (6 * inner + 5 * wf).max(inner + 7 * wf) + 3 * width);
                ledger.take(GRADIENTS, 3 * wf);
            }
        }
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
        match self.norm_tile {
            Some(tile) => ledger.flash(NORM, self.e + 3 * tile),
            None => {
                ledger.flash(NORM, 2 * self.e);
                ledger.free(NORM, self.e);
            }
        }
        ledger.free(HIDDEN, self.e);
    }

    /// From d_out to the gradient of attention's input, [`HIDDEN`].
    fn attention_backward(&self, ledger: &mut Ledger) {
        let Self { e, q, k, qg, kg, sent, rows, wq, wk, .. } = *self;
        let size = self.shape.3;
        let (result, casts) = self.kernel;
        let results = |bytes: usize| bytes / size * result;
        let cast = |bytes: usize| if casts { bytes / size * 4 } else { 0 };
        match &self.scheme {
            Scheme::Whole => {
                // out' of the output projection.
                ledger.free(ATTENTION, q);
                let gradients = results(q + 2 * k);
                ledger.take(ATTENTION, gradients);
                ledger.flash(ATTENTION, rows + self.scratch[1] + cast(2 * q + 2 * k));
                ledger.free(ATTENTION, q + 2 * k + q + rows + q);
                ledger.flash(ATTENTION, 3 * q / 2);
                self.project_backward(ledger);
                ledger.free(ATTENTION, gradients + e);
            }
            Scheme::Exchanged => {
                ledger.take(ATTENTION, qg + rows);
                ledger.flash(ATTENTION, sent);
                if !self.copying {
                    ledger.free(ATTENTION, 2 * q); // out, d_out
                }
                // Kernels on GPUs sum dk and dv in f32 only where query heads share them.
                let alone = !self.kernel.1 && kg == qg;
                let gradients = results(qg) + if alone { 2 * kg } else { results(2 * kg) };
                ledger.take(ATTENTION, gradients);
                ledger.flash(ATTENTION, self.scratch[1] + cast(2 * qg + 2 * kg));
                ledger.take(ATTENTION, q + 2 * k);
                ledger.flash(ATTENTION, sent);
                ledger.free(ATTENTION, gradients + qg + rows + qg + 2 * kg + rows);
                if self.copying {
                    ledger.free(ATTENTION, 2 * q);
                }
                ledger.flash(ATTENTION, 3 * q / 2);
                self.project_backward(ledger);
                ledger.free(ATTENTION, q + 2 * k + e);
            }
            Scheme::Staged(schedule) => {
                let (batch, seq, dim, size) = self.shape;
                ledger.take(ATTENTION, self.sums);
                let stage = upipe::backward_bytes_of(schedule, batch, seq, dim, size, result, casts);
                let heads = upipe::stage_bytes(schedule, batch, seq, dim, size);
                ledger.take(ATTENTION, wq + 2 * wk);
                ledger.flash(ATTENTION, stage - rows + rows / schedule.stages().len() + self.scratch[1]);
                ledger.flash(ATTENTION, stage.saturating_sub(2 * heads) + 2 * heads.min(e));
                ledger.free(ATTENTION, wq + 2 * wk + self.sums + rows + 2 * q + e);
                ledger.take(HIDDEN, e);
            }
        }
    }

    /// From dq, dk, dv to the gradient of attention's input: sums, and its own copy for the weights' gradients.
    fn project_backward(&self, ledger: &mut Ledger) {
        ledger.take(HIDDEN, self.e);
        ledger.flash(HIDDEN, 2 * self.e + self.wq);
    }
}

fn upipe_rows(scheme: &Scheme, batch: usize, seq: usize) -> usize {
    match scheme {
        Scheme::Staged(schedule) => upipe::saved_bytes(schedule, batch, seq),
        _ => 0,
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
