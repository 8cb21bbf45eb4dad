//! Where a stage's heads come from, and where their gradients go.

use burn::tensor::Tensor;
use burn_context_parallel::attention::{head_ranges, select_heads};
use burn_context_parallel::vjp::InputGradients;

/// Gives a stage its heads and takes their gradients; all tensors without autodiff, [B, L, heads, D].
///
/// A source is kept for the backward pass: what it holds is what the operation saves.
pub trait StageSource: Send + 'static {
    /// How many query and key/value heads there are.
    fn heads(&self) -> (usize, usize);

    /// These query heads of this rank's tokens.
    fn queries(&self, heads: &[usize]) -> Tensor<4>;

    /// These key and value heads of this rank's tokens.
    fn keys_values(&self, heads: &[usize]) -> (Tensor<4>, Tensor<4>);

    /// Takes the gradient of [`queries`](Self::queries); every head comes once.
    fn add_queries(&mut self, heads: &[usize], dq: Tensor<4>);

    /// Takes a gradient of [`keys_values`](Self::keys_values); a head comes once per stage in which some rank lets it go.
    fn add_keys_values(&mut self, heads: &[usize], dk: Tensor<4>, dv: Tensor<4>);

    /// The gradients of the operation's inputs, in their order.
    fn into_gradients(self) -> InputGradients;
}

/// Writes `part`'s heads to where they belong in `total` (dim 2); in place where `total` is not shared.
pub(super) fn write(total: Tensor<4>, heads: &[usize], part: &Tensor<4>) -> Tensor<4> {
    let [b, l, _, d] = part.dims();
    head_ranges(heads).into_iter().fold(total, |total, (start, len, index)| {
        total.slice_assign([0..b, 0..l, start..start + len, 0..d], part.clone().narrow(2, index, len))
    })
}

/// Adds `part`'s heads to where they belong in `total` (dim 2); in place where `total` is not shared.
pub(super) fn add(total: Tensor<4>, heads: &[usize], part: &Tensor<4>) -> Tensor<4> {
    let sum = select_heads(&total, heads) + part.clone();
    write(total, heads, &sum)
}
