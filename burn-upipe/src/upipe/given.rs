//! Stages that take slices of given q, k, v in place of projections.

use burn::tensor::Tensor;
use burn_context_parallel::attention::select_heads;
use burn_context_parallel::buffer::{accumulator, zeros};
use burn_context_parallel::vjp::{InputGradients, Inputs};

use super::StageSource;
use super::source::{add, write};

/// Whole q, k and v [B, L, heads, D] of this rank's tokens; a stage takes slices of them.
///
/// For checking the schedule and the operation against attention references, and for models whose q, k, v exist anyway.
#[derive(Clone, Debug)]
pub struct Given {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    dq: Option<Tensor<4>>,
    dkv: Option<(Tensor<4>, Tensor<4>)>,
}

impl Given {
    /// The source, and what [`upipe`](super::upipe()) differentiates with respect to: `q`, `k`, `v` [B, L, heads, D], tracked or not.
    pub fn new(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> (Self, Inputs) {
        let inputs = Inputs::new().input(&q).input(&k).input(&v);
        (Self { q: q.inner(), k: k.inner(), v: v.inner(), dq: None, dkv: None }, inputs)
    }
}

impl StageSource for Given {
    fn heads(&self) -> (usize, usize) {
        (self.q.dims()[2], self.k.dims()[2])
    }

    fn queries(&self, heads: &[usize]) -> Tensor<4> {
        select_heads(&self.q, heads)
    }

    fn keys_values(&self, heads: &[usize]) -> (Tensor<4>, Tensor<4>) {
        (select_heads(&self.k, heads), select_heads(&self.v, heads))
    }

    fn add_queries(&mut self, heads: &[usize], dq: Tensor<4>) {
        let total = self.dq.take().unwrap_or_else(|| zeros(self.q.dims(), &self.q.device(), self.q.dtype()));
        self.dq = Some(write(total, heads, &dq.cast(self.q.dtype())));
    }

    fn add_keys_values(&mut self, heads: &[usize], dk: Tensor<4>, dv: Tensor<4>) {
        let (k, v) = self.dkv.take().unwrap_or_else(|| {
            // A head's gradient may come from several ranks: summed in f32.
            let zeros = || zeros(self.k.dims(), &self.k.device(), accumulator(self.k.dtype()));
            (zeros(), zeros())
        });
        let dtype = accumulator(self.k.dtype());
        self.dkv = Some((add(k, heads, &dk.cast(dtype)), add(v, heads, &dv.cast(dtype))));
    }

    fn into_gradients(self) -> InputGradients {
        let dtype = self.k.dtype();
        let (dk, dv) = self.dkv.map(|(dk, dv)| (dk.cast(dtype), dv.cast(dtype))).unzip();
        [self.dq, dk, dv].map(|grad| grad.map(Tensor::into_dispatch)).into()
    }
}
