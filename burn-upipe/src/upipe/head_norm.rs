//! Norms of single heads, with their gradients by hand: U-Pipe makes them again stage by stage.
//!
//! B batch, L local sequence, D head dimension.

use burn::nn::RmsNorm;
use burn::tensor::Tensor;
use burn_context_parallel::buffer::accumulator;
use burn_context_parallel::vjp::{Inputs, custom_vjp};

/// Root mean square norm over the D elements of each head, as Qwen3 has it on queries and keys before they are rotated.
///
/// ```text
/// r = 1 / sqrt(mean(y^2) + epsilon),  z = gamma * y r
/// ```
///
/// Computed in f32 (f64 beside f64); in half types rounded before gamma, as transformers does.
#[derive(Clone, Debug)]
pub struct HeadNorm {
    /// `[D]`.
    pub gamma: Tensor<1>,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl HeadNorm {
    /// Of a module's parameters.
    pub(super) fn of(norm: &RmsNorm) -> Self {
        Self { gamma: norm.gamma.val(), epsilon: norm.epsilon }
    }

    /// Every head of `y` [B, L, heads, D] normed; tracked. Keeps `y` and gamma for the backward pass.
    pub(super) fn apply(self, y: Tensor<4>) -> Tensor<4> {
        let inputs = Inputs::new().input(&y).input(&self.gamma);
        let wants_gamma = self.gamma.is_tracked();
        let dtype = self.gamma.dtype();
        let norm = self.inner();
        let y = y.inner();
        let z = norm.forward(y.clone());
        custom_vjp(inputs, z, move |dz: Tensor<4>| {
            let (dy, d_gamma) = norm.backward(y, dz, wants_gamma);
            vec![Some(dy.into_dispatch()), d_gamma.map(|grad| grad.cast(dtype).into_dispatch())]
        })
    }

    pub(super) fn inner(self) -> Self {
        Self { gamma: self.gamma.inner(), epsilon: self.epsilon }
    }

    /// z of y, both [B, L, heads, D], without autodiff.
    pub(super) fn forward(&self, y: Tensor<4>) -> Tensor<4> {
        let dtype = y.dtype();
        let y = y.cast(accumulator(dtype));
        let r = self.inverse(&y);
        (y * r).cast(dtype) * self.gamma.clone().unsqueeze()
    }

    /// dy of y and dz; gamma's gradient [D], in the accumulator's type, if it is wanted.
    ///
    /// ```text
    /// n = y r,  dn = gamma dz,  dy = r (dn - n mean(dn n)),  dgamma = sum_{B, L, heads} dz n
    /// ```
    pub(super) fn backward(&self, y: Tensor<4>, dz: Tensor<4>, wants_gamma: bool) -> (Tensor<4>, Option<Tensor<1>>) {
        let dtype = y.dtype();
        let exact = accumulator(dtype);
        let (y, dz) = (y.cast(exact), dz.cast(exact));
        let r = self.inverse(&y);
        let n = y * r.clone();
        let d_gamma = wants_gamma.then(|| {
            let [batch, local, heads, dim] = n.dims();
            (n.clone() * dz.clone()).reshape([batch * local * heads, dim]).sum_dim(0).squeeze_dim::<1>(0)
        });
        let dn = dz * self.gamma.clone().cast(exact).unsqueeze();
        let along = (dn.clone() * n.clone()).mean_dim(3);
        (((dn - n * along) * r).cast(dtype), d_gamma)
    }

    /// r of y, [B, L, heads, 1].
    fn inverse(&self, y: &Tensor<4>) -> Tensor<4> {
        (y.clone().square().mean_dim(3) + self.epsilon).sqrt().recip()
    }
}

/// Bytes of norms on q and k [B, L, heads, D], where they are whole: what is kept for the backward pass, and what comes on top in it.
///
/// ```text
/// B L (H + G) D size, and B L H D max(size, 4)
/// ```
pub fn head_norm_bytes(
    batch: usize,
    local: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    size: usize,
) -> [usize; 2] {
    [batch * local * (heads + kv_heads) * dim * size, batch * local * heads * dim * size.max(4)]
}
