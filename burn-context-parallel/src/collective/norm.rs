//! Clipping by the norm of all gradients together.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};

use crate::group::ProcessGroup;
use crate::{Error, Result};

/// Scales all gradients by one factor so that their norm is at most `max_norm`, and gives the norm before.
///
/// ```text
/// norm = sqrt(sum_p |g_p|^2),  g_p *= min(1, max_norm / (norm + 1e-6))
/// ```
///
/// Gradients are already summed over ranks ([`sum_gradients`](super::sum_gradients)), hence the same on each; the
/// factor is that of the group's first rank, so that ranks cannot drift apart. The squares are taken relative to each
/// gradient's largest element and added up in f64: gradients of 1e30 do not overflow, those of 1e-30 do not vanish. If the norm
/// is not finite, gradients stay as they are: skip the step. Of gradients in shards see
/// [`Fsdp::clip_grad_norm`](crate::fsdp::Fsdp::clip_grad_norm).
///
/// # Errors
///
/// [`Error::Invalid`] if `max_norm` is not a positive number; [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// 8 bytes from the first rank to each other.
pub fn clip_grad_norm<M: Module>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
    group: &ProcessGroup,
) -> Result<(GradientsParams, f64)> {
    check(max_norm)?;
    let mut norm = squares(&grads, module, |_| true).sqrt();
    if group.size() > 1 {
        let mine = (group.rank() == 0).then(|| TensorData::from([norm]));
        norm = group.broadcast(mine, 0)?.iter::<f64>().next().unwrap_or(norm);
    }
    Ok(scaled(grads, module, max_norm, norm))
}

pub(crate) fn check(max_norm: f64) -> Result<()> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::invalid(
            "clip_grad_norm",
            format!("max_norm {max_norm}"),
            "use a positive number, infinity for no clipping",
        ));
    }
    Ok(())
}

/// Gradients of that norm, clipped.
pub(crate) fn scaled<M: Module>(
    grads: GradientsParams,
    module: &M,
    max_norm: f64,
    norm: f64,
) -> (GradientsParams, f64) {
    if !norm.is_finite() || norm <= max_norm {
        return (grads, norm);
    }
    let mut scale = Scale { grads, factor: (max_norm / (norm + 1e-6)).min(1.0), seen: HashSet::new() };
    module.visit(&mut scale);
    (scale.grads, norm)
}

/// The sum of squares of the gradients of those parameters that count.
pub(crate) fn squares<M: Module>(grads: &GradientsParams, module: &M, counts: impl Fn(ParamId) -> bool) -> f64 {
    let mut squares = Squares { grads, counts, sum: 0.0, seen: HashSet::new() };
    module.visit(&mut squares);
    squares.sum
}

struct Squares<'a, F> {
    grads: &'a GradientsParams,
    counts: F,
    sum: f64,
    seen: HashSet<ParamId>,
}

impl<F: Fn(ParamId) -> bool> ModuleVisitor for Squares<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) || !(self.counts)(param.id) {
            return; // tied, or another rank's
        }
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.sum += square(grad);
        }
    }
}

/// How many squares are added up in f32.
const ROW: usize = 4096;

/// The sum of squares: rows on the device, their sum in f64 on the host.
fn square<const D: usize>(grad: Tensor<D>) -> f64 {
    let grad = if grad.dtype() == DType::F64 { grad } else { grad.cast(DType::F32) };
    let elements = grad.dims().iter().product::<usize>();
    let width = grad.dims()[D - 1];
    if elements == 0 {
        return 0.0;
    }
    if width > ROW {
        // A shard is one row, however long.
        let grad = grad.reshape([elements]);
        let rows = elements / ROW * ROW;
        let tail = if rows < elements { square(grad.clone().narrow(0, rows, elements - rows)) } else { 0.0 };
        return tail + square(grad.narrow(0, 0, rows).reshape([rows / ROW, ROW]));
    }
    let grad = grad.reshape([elements / width, width]);
    let first = |x: Tensor<1>| x.into_data().iter::<f64>().next().unwrap_or(0.0);
    let largest = first(grad.clone().abs().max());
    if largest == 0.0 || !largest.is_finite() {
        return largest * largest;
    }
    // Relative to the largest element first: its square may be too large or too small for f32.
    let relative = (grad / largest).square().sum_dim(1).into_data().iter::<f64>().sum::<f64>();
    relative * largest * largest
}

struct Scale {
    grads: GradientsParams,
    factor: f64,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad * self.factor);
        }
    }
}
