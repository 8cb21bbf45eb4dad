//! Where a stage's heads come from, and where their gradients go.

use burn::tensor::Tensor;
use burn_context_parallel::vjp::InputGradients;

/// Gives a stage its heads and takes their gradients; all tensors without autodiff, [B, L, heads, D].
///
/// A source is cloned when it is saved for the backward pass: what it holds is what the operation saves.
pub trait StageSource: Clone + Send + 'static {
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

/// Neighbouring heads as one range: (first, how many, index in `heads`).
pub(super) fn runs(heads: &[usize]) -> Vec<(usize, usize, usize)> {
    let mut runs: Vec<(usize, usize, usize)> = Vec::new();
    for (index, head) in heads.iter().enumerate() {
        match runs.last_mut() {
            Some((start, len, _)) if *start + *len == *head => *len += 1,
            _ => runs.push((*head, 1, index)),
        }
    }
    runs
}

/// The heads (dim 2) of `x`, in the given order; a view where they are neighbours.
pub(super) fn select(x: &Tensor<4>, heads: &[usize]) -> Tensor<4> {
    let mut parts: Vec<_> =
        runs(heads).into_iter().map(|(start, len, _)| x.clone().narrow(2, start, len)).collect();
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) }
}

/// Writes `part`'s heads to where they belong in `total` (dim 2); in place where `total` is not shared.
pub(super) fn write(total: Tensor<4>, heads: &[usize], part: &Tensor<4>) -> Tensor<4> {
    let [b, l, _, d] = part.dims();
    runs(heads).into_iter().fold(total, |total, (start, len, index)| {
        total.slice_assign([0..b, 0..l, start..start + len, 0..d], part.clone().narrow(2, index, len))
    })
}

/// Adds `part`'s heads to where they belong in `total` (dim 2); in place where `total` is not shared.
pub(super) fn add(total: Tensor<4>, heads: &[usize], part: &Tensor<4>) -> Tensor<4> {
    let sum = select(&total, heads) + part.clone();
    write(total, heads, &sum)
}
