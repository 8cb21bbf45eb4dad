//! Collectives that sum over ranks or copy from one.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::group::{ProcessGroup, ReduceOp};
use crate::vjp::{Inputs, custom_vjp};
use crate::{Error, OrRaise, Result};

/// The sum of `x` over ranks, on every rank. Adjoint: itself.
///
/// # Errors
///
/// [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// Up to 32 KiB each rank sends `x` to P - 1 ranks; above, 2 (P - 1)/P of `x`. Sums are in f32 for half types, in rank order, so
/// that every rank has the same bits.
pub fn all_reduce<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Result<Tensor<D>> {
    let inputs = Inputs::new().input(&x);
    let y = group.all_reduce(x.inner(), ReduceOp::Sum)?;
    let group = group.clone();
    Ok(custom_vjp(inputs, y, move |dy: Tensor<D>| {
        vec![Some(group.all_reduce(dy, ReduceOp::Sum).or_raise().into_dispatch())]
    }))
}

/// The root's `x`, on every rank; other ranks' `x` gives only the shape. Adjoint: [`reduce`] onto the root.
///
/// # Errors
///
/// [`Error::Invalid`] if there is no such root; [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// The root sends `x` to P - 1 ranks.
pub fn broadcast<const D: usize>(x: Tensor<D>, root: usize, group: &ProcessGroup) -> Result<Tensor<D>> {
    check_root("broadcast", root, group)?;
    let inputs = Inputs::new().input(&x);
    let y = copy(x.inner(), root, group)?;
    let group = group.clone();
    Ok(custom_vjp(inputs, y, move |dy: Tensor<D>| vec![Some(sum_onto(dy, root, &group).or_raise().into_dispatch())]))
}

/// The sum of `x` over ranks on the root, zeros elsewhere. Adjoint: [`broadcast`] from the root.
///
/// # Errors
///
/// [`Error::Invalid`] if there is no such root; [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// As [`all_reduce`].
pub fn reduce<const D: usize>(x: Tensor<D>, root: usize, group: &ProcessGroup) -> Result<Tensor<D>> {
    check_root("reduce", root, group)?;
    let inputs = Inputs::new().input(&x);
    let y = sum_onto(x.inner(), root, group)?;
    let group = group.clone();
    Ok(custom_vjp(inputs, y, move |dy: Tensor<D>| vec![Some(copy(dy, root, &group).or_raise().into_dispatch())]))
}

fn copy<const D: usize>(x: Tensor<D>, root: usize, group: &ProcessGroup) -> Result<Tensor<D>> {
    group.at(&x.device()).broadcast((group.rank() == root).then_some(x), root)
}

fn sum_onto<const D: usize>(x: Tensor<D>, root: usize, group: &ProcessGroup) -> Result<Tensor<D>> {
    let zeros = (group.rank() != root).then(|| x.zeros_like());
    let sum = group.all_reduce(x, ReduceOp::Sum)?;
    Ok(zeros.unwrap_or(sum))
}

fn check_root(name: &'static str, root: usize, group: &ProcessGroup) -> Result<()> {
    if root < group.size() {
        return Ok(());
    }
    Err(Error::invalid(name, format!("root {root} in a group of {} ranks", group.size()), "name a rank of the group"))
}

/// Sums every trainable parameter's gradient over the ranks of `group`: what each rank's `backward()` gave is its own part.
///
/// A parameter that got a gradient on some ranks only (a rank without targets, say) counts as zero elsewhere. The loss has
/// been divided by the number of targets of all ranks already; nothing is divided here.
///
/// # Errors
///
/// [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// One all-reduce a parameter, of its size.
pub fn sum_gradients<M: Module>(grads: GradientsParams, module: &M, group: &ProcessGroup) -> Result<GradientsParams> {
    if group.size() == 1 {
        return Ok(grads);
    }
    struct Sum<'a> {
        grads: GradientsParams,
        group: &'a ProcessGroup,
        // A tied parameter is visited once per place that uses it.
        done: HashSet<ParamId>,
        error: Option<Error>,
    }
    impl ModuleVisitor for Sum<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let base = param.base();
            if self.error.is_some() || !base.is_require_grad() || !self.done.insert(param.id) {
                return;
            }
            let grad = self.grads.remove::<D>(param.id).unwrap_or_else(|| base.inner().zeros_like());
            match self.group.all_reduce(grad, ReduceOp::Sum) {
                Ok(sum) => self.grads.register(param.id, sum),
                Err(error) => self.error = Some(error),
            }
        }
    }
    let mut sum = Sum { grads, group, done: HashSet::new(), error: None };
    module.visit(&mut sum);
    match sum.error {
        None => Ok(sum.grads),
        Some(error) => Err(error),
    }
}
