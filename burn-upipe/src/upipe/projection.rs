//! Stages that project their heads from the block's input.

use burn::tensor::Tensor;
use burn_context_parallel::attention::head_ranges;
use burn_context_parallel::buffer::{accumulator, zeros};
use burn_context_parallel::sequence::{RotaryTable, apply_rotary, apply_rotary_adjoint};
use burn_context_parallel::vjp::{InputGradients, Inputs};

use super::{HeadNorm, StageSource};

/// Query, key and value projections as Burn's `Linear` holds them: [E, heads * D], and biases [heads * D].
#[derive(Clone, Debug)]
pub struct ProjectionWeights {
    /// [E, H * D].
    pub q: Tensor<2>,
    /// [E, G * D].
    pub k: Tensor<2>,
    /// [E, G * D].
    pub v: Tensor<2>,
    /// Of q [H * D], k [G * D] and v [G * D], each if there is one.
    pub biases: [Option<Tensor<1>>; 3],
    /// Of each head of q and of k, each if there is one.
    pub norms: [Option<HeadNorm>; 2],
}

/// The block's input `x` [B, L, E], and weights: a stage's heads are projected from it, normed, rotated, and forgotten.
///
/// ```text
/// q_h = rotary(norm(x Wq[:, h D .. (h + 1) D] + bq))
/// ```
///
/// In the backward pass heads with a norm are projected once more, for the norm's gradient.
#[derive(Clone, Debug)]
pub struct Projection {
    x: Tensor<2>,
    rows: usize,
    dim: usize,
    weights: ProjectionWeights,
    rotary: Option<RotaryTable>,
    wanted: Wanted,
    gradients: Gradients,
}

/// Which gradients anybody asks for: those of frozen weights are not computed.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    x: bool,
    weights: [bool; 3],
    biases: [bool; 3],
    norms: [bool; 2],
}

impl Wanted {
    /// Whether anything behind a norm is wanted, itself included.
    fn behind(&self, which: Which) -> bool {
        let at = which as usize;
        self.x || self.weights[at] || self.biases[at] || self.norms.get(at).is_some_and(|wanted| *wanted)
    }
}

/// What has been summed so far.
#[derive(Clone, Debug, Default)]
struct Gradients {
    x: Option<Tensor<2>>,
    weights: [Option<Tensor<2>>; 3],
    biases: [Option<Tensor<2>>; 3],
    norms: [Option<Tensor<1>>; 2],
}

impl Projection {
    /// The source, and what [`upipe`](super::upipe()) differentiates with respect to: `x` [B, L, E] and the weights, tracked or not.
    pub fn new(x: Tensor<3>, weights: ProjectionWeights, dim: usize, rotary: Option<RotaryTable>) -> (Self, Inputs) {
        let mut inputs = Inputs::new().input(&x).input(&weights.q).input(&weights.k).input(&weights.v);
        for bias in weights.biases.iter().flatten() {
            inputs = inputs.input(bias);
        }
        for norm in weights.norms.iter().flatten() {
            inputs = inputs.input(&norm.gamma);
        }
        let wanted = Wanted {
            x: x.is_tracked(),
            weights: [&weights.q, &weights.k, &weights.v].map(Tensor::is_tracked),
            biases: weights.biases.each_ref().map(|bias| bias.as_ref().is_some_and(Tensor::is_tracked)),
            norms: weights.norms.each_ref().map(|norm| norm.as_ref().is_some_and(|norm| norm.gamma.is_tracked())),
        };
        let [rows, local, width] = x.dims();
        let weights = ProjectionWeights {
            q: weights.q.inner(),
            k: weights.k.inner(),
            v: weights.v.inner(),
            biases: weights.biases.map(|bias| bias.map(Tensor::inner)),
            norms: weights.norms.map(|norm| norm.map(HeadNorm::inner)),
        };
        let x = x.inner().reshape([rows * local, width]);
        (Self { x, rows, dim, weights, rotary, wanted, gradients: Gradients::default() }, inputs)
    }

    fn project(&self, which: Which, heads: &[usize]) -> Tensor<4> {
        let (weight, bias) = self.parts(which);
        let mut y = self.x.clone().matmul(columns(weight, heads, self.dim));
        if let Some(bias) = bias {
            y = y + columns(&bias.clone().unsqueeze_dim(0), heads, self.dim);
        }
        let local = y.dims()[0] / self.rows;
        y.reshape([self.rows, local, heads.len(), self.dim])
    }

    /// A projection as attention reads it: normed and rotated.
    fn prepare(&self, which: Which, heads: &[usize]) -> Tensor<4> {
        let mut y = self.project(which, heads);
        if let Some(norm) = self.norm(which) {
            y = norm.forward(y);
        }
        match &self.rotary {
            Some(table) => apply_rotary(y, table),
            None => y,
        }
    }

    /// From the gradient of [`prepare`](Self::prepare) to that of the projection; adds what it gives to the norm.
    fn unprepare(&mut self, which: Which, heads: &[usize], mut dy: Tensor<4>) -> Tensor<4> {
        if let Some(table) = &self.rotary {
            dy = apply_rotary_adjoint(dy, table);
        }
        let Some(norm) = self.norm(which) else { return dy };
        if !self.wanted.behind(which) {
            return dy; // nobody asks for what comes of it
        }
        let wanted = self.wanted.norms[which as usize];
        let (dy, d_gamma) = norm.backward(self.project(which, heads), dy, wanted);
        if let Some(d_gamma) = d_gamma {
            let slot = &mut self.gradients.norms[which as usize];
            *slot = Some(match slot.take() {
                Some(total) => total + d_gamma,
                None => d_gamma,
            });
        }
        dy
    }

    fn norm(&self, which: Which) -> Option<&HeadNorm> {
        self.weights.norms.get(which as usize).and_then(Option::as_ref)
    }

    /// Adds what one projection's gradient `dy` [B, L, heads, D] gives to x, its weight and its bias.
    fn pull(&mut self, which: Which, heads: &[usize], dy: Tensor<4>) {
        let dy = dy.reshape([self.x.dims()[0], heads.len() * self.dim]);
        let (weight, _) = self.parts(which);
        let slice = columns(weight, heads, self.dim);
        let weight_dims = weight.dims();
        let sum = |x: &Tensor<2>, dims| zeros(dims, &x.device(), accumulator(x.dtype()));

        if self.wanted.weights[which as usize] {
            let d_slice = self.x.clone().transpose().matmul(dy.clone());
            let slot = &mut self.gradients.weights[which as usize];
            let total = slot.take().unwrap_or_else(|| sum(&self.x, weight_dims));
            *slot = Some(add_columns(total, heads, self.dim, d_slice));
        }
        if self.wanted.biases[which as usize] {
            let slot = &mut self.gradients.biases[which as usize];
            let total = slot.take().unwrap_or_else(|| sum(&self.x, [1, weight_dims[1]]));
            *slot = Some(add_columns(total, heads, self.dim, dy.clone().sum_dim(0)));
        }
        if self.wanted.x {
            let total = self.gradients.x.take().unwrap_or_else(|| sum(&self.x, self.x.dims()));
            self.gradients.x = Some(add_product(total, dy, slice.transpose()));
        }
    }

    fn parts(&self, which: Which) -> (&Tensor<2>, Option<&Tensor<1>>) {
        let weight = match which {
            Which::Q => &self.weights.q,
            Which::K => &self.weights.k,
            Which::V => &self.weights.v,
        };
        (weight, self.weights.biases[which as usize].as_ref())
    }
}

#[derive(Clone, Copy, Debug)]
enum Which {
    Q = 0,
    K = 1,
    V = 2,
}

impl StageSource for Projection {
    fn heads(&self) -> (usize, usize) {
        (self.weights.q.dims()[1] / self.dim, self.weights.k.dims()[1] / self.dim)
    }

    fn queries(&self, heads: &[usize]) -> Tensor<4> {
        self.prepare(Which::Q, heads)
    }

    fn keys_values(&self, heads: &[usize]) -> (Tensor<4>, Tensor<4>) {
        (self.prepare(Which::K, heads), self.project(Which::V, heads))
    }

    fn add_queries(&mut self, heads: &[usize], dq: Tensor<4>) {
        let dq = self.unprepare(Which::Q, heads, dq);
        self.pull(Which::Q, heads, dq);
    }

    fn add_keys_values(&mut self, heads: &[usize], dk: Tensor<4>, dv: Tensor<4>) {
        let dk = self.unprepare(Which::K, heads, dk);
        self.pull(Which::K, heads, dk);
        self.pull(Which::V, heads, dv);
    }

    fn into_gradients(self) -> InputGradients {
        let Gradients { x, weights, biases, norms } = self.gradients;
        let [_, width] = self.x.dims();
        let dtype = self.x.dtype();
        let x = x.map(|x| {
            let local = x.dims()[0] / self.rows;
            x.cast(dtype).reshape([self.rows, local, width]).into_dispatch()
        });
        let mut gradients = vec![x];
        gradients.extend(weights.map(|grad| grad.map(|grad| grad.cast(dtype).into_dispatch())));
        for (bias, grad) in self.weights.biases.iter().zip(biases) {
            if bias.is_some() {
                gradients.push(grad.map(|grad| grad.cast(dtype).squeeze_dim::<1>(0).into_dispatch()));
            }
        }
        for (norm, grad) in self.weights.norms.iter().zip(norms) {
            if norm.is_some() {
                gradients.push(grad.map(|grad| grad.cast(dtype).into_dispatch()));
            }
        }
        gradients
    }
}

/// The columns of these heads; a view where they are neighbours.
fn columns(weight: &Tensor<2>, heads: &[usize], dim: usize) -> Tensor<2> {
    let mut parts: Vec<_> = head_ranges(heads)
        .into_iter()
        .map(|(start, len, _)| weight.clone().narrow(1, start * dim, len * dim))
        .collect();
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 1) }
}

/// Adds `part` to the columns of these heads; in place where `total` is not shared.
fn add_columns(total: Tensor<2>, heads: &[usize], dim: usize, part: Tensor<2>) -> Tensor<2> {
    let rows = total.dims()[0];
    head_ranges(heads).into_iter().fold(total, |total, (start, len, index)| {
        let range = [0..rows, start * dim..(start + len) * dim];
        let part = part.clone().narrow(1, index * dim, len * dim).cast(total.dtype());
        let sum = total.clone().slice(range.clone()) + part;
        total.slice_assign(range, sum)
    })
}

/// `total + a b`, a few rows at a time, so that the product never exists as a whole beside `total`.
///
/// # Memory
///
/// About two slices of `total` as large as `a`.
fn add_product(mut total: Tensor<2>, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let [rows, width] = total.dims();
    let tile = (rows * a.dims()[1]).div_ceil(width).clamp(1, rows.max(1));
    let mut start = 0;
    while start < rows {
        let len = tile.min(rows - start);
        let range = [start..start + len, 0..width];
        let part = a.clone().narrow(0, start, len).matmul(b.clone()).cast(total.dtype());
        let sum = total.clone().slice(range.clone()) + part;
        total = total.slice_assign(range, sum);
        start += len;
    }
    total
}
