//! Exact attention in O(S) memory.

mod check;
#[cfg(feature = "flex")]
mod flex;
mod merge;
mod ops;
mod options;
pub mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use crate::Result;

pub use check::FlashShape;
pub use merge::merge;
pub use ops::FlashOps;
pub use options::FlashOptions;

/// Attention.
pub fn flash_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<Tensor<4>> {
    Ok(run("flash_attention", q, k, v, options)?.0)
}

/// Attention and its log-sum-exp, both differentiable.
pub fn flash_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    run("flash_attention_with_lse", q, k, v, options)
}

/// The forward kernel alone, for schedules that bring their own backward pass.
pub fn forward(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    for (name, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
        check::check_untracked("flash::forward", name, tensor)?;
    }
    run("flash::forward", q, k, v, options)
}

fn run(
    operation: &'static str,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    check::check_inputs(operation, &q, &k, &v, options)?;
    let (out, lse) = Dispatch::flash_forward(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        options.clone(),
    );
    Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
}

/// The backward kernel alone, for schedules that bring their own backward pass.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    d_out: Tensor<4>,
    lse: Tensor<3>,
    delta: Tensor<3>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>)> {
    let operation = "flash::backward";
    for (name, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
        check::check_untracked(operation, name, tensor)?;
    }
    let shape = check::check_inputs(operation, &q, &k, &v, options)?;
    let rows = check::row_dtype(operation, q.dtype())?;
    check::check_beside(operation, "d_out", &d_out, shape.q(), q.dtype())?;
    check::check_beside(operation, "lse", &lse, shape.rows(), rows)?;
    check::check_beside(operation, "delta", &delta, shape.rows(), rows)?;
    let (dq, dk, dv) = Dispatch::flash_backward(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        d_out.into_dispatch(),
        lse.into_dispatch(),
        delta.into_dispatch(),
        options.clone(),
    );
    Ok((Tensor::from_dispatch(dq), Tensor::from_dispatch(dk), Tensor::from_dispatch(dv)))
}

/// `rowsum(d_out * out)` in f32 (f64 of f64): `[B, H, S, D]` to `[B, H, S]`.
pub fn delta(d_out: Tensor<4>, out: Tensor<4>) -> Tensor<3> {
    let dtype = if out.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let [b, h, s, d] = out.dims();
    if b * h * s * d == 0 {
        return Tensor::zeros([b, h, s], (&out.device(), dtype));
    }
    (d_out.cast(dtype) * out.cast(dtype)).sum_dim(3).reshape([b, h, s])
}
