//! Exact attention in O(S) memory, forward and backward.
//!
//! ```text
//! s_ij = scale q_i . k_j          where i sees j (see FlashOptions), else -inf
//! lse_i = log sum_j exp(s_ij)     out_i = sum_j exp(s_ij - lse_i) v_j
//! ```
//!
//! No row of scores is ever whole in memory: the forward pass keeps a running maximum and sum per query, the backward pass
//! computes the scores again. A query that sees no key has output 0, log-sum-exp -inf and gradients 0.
//!
//! | call | for |
//! |---|---|
//! | [`flash_attention`], [`flash_attention_with_lse`] | models: differentiable |
//! | [`forward`], [`backward`], [`delta`], [`merge`] | schedules with a backward pass of their own: rings, U-Pipe |
//! | [`FlashOps`] | backends that bring kernels |
//! | [`reference`](mod@reference) | tests, and devices without kernels: every score in memory |
//!
//! Sizes in this module: B batch, H query heads, G key/value heads, Sq queries, Sk keys, D head dimension. Grouped-query
//! attention is native: query head `h` reads key/value head `h / (H / G)`, nothing is copied per head.
//!
//! A mask costs what it leaves: tiles of scores (on Flex devices 96 x 96) that it empties are not visited (of documents and positions, the least and the largest of each tile are compared), so that a window takes O(S window) and
//! documents the sum of their squares. What options cannot say, a dense mask or a bias, is [`reference::dense_attention`]'s, in O(S^2).
//!
//! On CubeCL devices the kernels are compiled for the device when they are first used, from one source: a family for processors, in registers, and one for
//! graphics cards, in shared memory. [`Blueprint`] says how they are cut; the [default](Blueprint::choose) follows from what the device is, with the
//! feature `autotune` the fastest of those that give the same bits is taken, found once a process (with Burn's feature `persistence`, CubeCL
//! keeps on disk what it tuned).
//!
//! Element types: f32 (scores beyond 128 with 20 bits and more beyond it, in f64 or in two parts, since their rounding would show; on CubeCL devices not those that a softcap beyond 128 bends); f16 and bf16 computed in f32 and rounded once; f64 computed in f64, for checking, on Flex devices only. Results are
//! the same bits from run to run and on any number of threads.
//!
//! Not built, and refused: a value head dimension other than D; on CubeCL devices head dimensions beyond 256.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_context_parallel::flash::{FlashOptions, flash_attention};
//!
//! let device = Device::flex().autodiff();
//! let random = |heads| Tensor::<4>::random([1, heads, 128, 16], Distribution::Default, &device).require_grad();
//! let (q, k, v) = (random(4), random(2), random(2));
//! let out = flash_attention(q, k.clone(), v, &FlashOptions::causal())?;
//! let grads = out.sum().backward();
//! assert_eq!(k.grad(&grads).unwrap().dims(), [1, 2, 128, 16]);
//! # Ok::<(), burn_context_parallel::Error>(())
//! ```
//!
//! # References
//!
//! FlashAttention-2, arXiv 2307.08691; grouped-query attention, arXiv 2305.13245.

mod blueprint;
mod check;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "flex")]
mod mask;
mod merge;
mod ops;
mod options;
pub mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use crate::Result;

pub use blueprint::{Blueprint, DeviceLimits, Family, Tiles};
pub use check::FlashShape;
#[cfg(feature = "cube")]
pub use cube::{device_backward_bytes, device_forward_bytes, device_limits};
pub use merge::merge;
pub use ops::FlashOps;
pub use options::FlashOptions;

/// Attention, differentiable in q, k and v.
///
/// # Shapes
///
/// q `[B, H, Sq, D]`; k, v `[B, G, Sk, D]` with G dividing H; the output is as q. Views (from `swap_dims`, `narrow`) are read
/// in place.
///
/// # Errors
///
/// [`Invalid`](crate::Error::Invalid): shapes that do not fit, H not a multiple of G, a scale that is not finite, mixed
/// element types, devices or autodiff strategies. [`Unsupported`](crate::Error::Unsupported): a device without kernels, a
/// value head dimension other than D, element types that are not f32, f16, bf16 or f64; on CubeCL devices f64, D beyond 256, 2^30 tokens or
/// more, more elements than the device addresses, and a forced blueprint that it cannot have.
///
/// # Memory
///
/// Kept for the backward pass: q, k, v (shared with the caller, not copied), the output, and one f32 per query and head.
/// On the way: `forward_bytes`, and in the backward pass `backward_bytes`; on CubeCL devices `device_forward_bytes` and
/// `device_backward_bytes`.
///
/// # References
///
/// arXiv 2307.08691.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::flash::{FlashOptions, flash_attention};
///
/// let device = Device::flex();
/// let q = Tensor::<4>::ones([1, 4, 2, 8], &device);
/// let v = Tensor::<1>::from_floats([1.0, 3.0], &device).reshape([1, 1, 2, 1]).expand([1, 1, 2, 8]);
/// let k = Tensor::<4>::ones([1, 1, 2, 8], &device);
/// let out = flash_attention(q.clone(), k.clone(), v, &FlashOptions::causal())?;
/// assert_eq!(out.slice([0..1, 3..4, 0..2, 7..8]).into_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0]);
///
/// let five_heads = Tensor::<4>::ones([1, 3, 2, 8], &device);
/// let error = flash_attention(q, five_heads.clone(), five_heads, &FlashOptions::causal()).unwrap_err();
/// assert!(error.to_string().contains("4 query heads cannot share 3 key/value heads"));
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
pub fn flash_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: &FlashOptions) -> Result<Tensor<4>> {
    Ok(run("flash_attention", q, k, v, options)?.0)
}

/// Attention and the log-sum-exp of its scores, both differentiable.
///
/// # Shapes
///
/// As [`flash_attention`]; the log-sum-exp (natural, f32; f64 beside f64) is `[B, H, Sq]`.
///
/// # Errors
///
/// As [`flash_attention`].
///
/// # Memory
///
/// As [`flash_attention`].
pub fn flash_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    run("flash_attention_with_lse", q, k, v, options)
}

/// The forward kernel alone: the output and the log-sum-exp, off the tape.
///
/// For schedules that bring their own backward pass, such as a ring that meets one block of keys after the other and
/// [`merge`]s.
///
/// # Shapes
///
/// As [`flash_attention_with_lse`].
///
/// # Errors
///
/// As [`flash_attention`], and if an input is on an autodiff device, where its gradient would be lost silently.
///
/// # Memory
///
/// `forward_bytes`.
pub fn forward(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: &FlashOptions) -> Result<(Tensor<4>, Tensor<3>)> {
    for (name, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
        check::check_untracked("flash::forward", name, tensor)?;
    }
    run("flash::forward", q, k, v, options)
}

/// How the kernels of an attention of `q` and `k` are cut: as the options force it, or chosen for the device; None on devices without
/// such kernels (Flex).
///
/// With the feature `autotune`, once such an attention has run: the tiles that were found to be the fastest.
///
/// # Errors
///
/// As [`flash_attention`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::flash::{FlashOptions, blueprint_for};
///
/// let q = Tensor::<4>::ones([1, 4, 2, 8], &Device::flex());
/// assert_eq!(blueprint_for(&q, &q, &FlashOptions::causal())?, None);
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
pub fn blueprint_for(q: &Tensor<4>, k: &Tensor<4>, options: &FlashOptions) -> Result<Option<Blueprint>> {
    let shape = check::check_inputs("flash::blueprint_for", q, k, k, options)?;
    #[cfg(feature = "cube")]
    {
        cube::blueprint_for(&q.clone().into_dispatch(), &shape, options)
    }
    #[cfg(not(feature = "cube"))]
    {
        let _ = shape;
        Ok(None)
    }
}

fn run(
    operation: &'static str,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    check::check_inputs(operation, &q, &k, &v, options)?;
    let (out, lse) = Dispatch::flash_forward(q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), options.clone());
    Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
}

/// The backward kernel alone: the gradients of q, k and v, off the tape.
///
/// ```text
/// p = exp(scale q k^T - lse)      ds = p (d_out v^T - delta)
/// dq = scale ds k                 dk = scale ds^T q               dv = p^T d_out
/// ```
///
/// `lse` and `delta` are those of the whole softmax. Over a part of the keys, pass the merged log-sum-exp and the [`delta`]
/// of the merged output, not the part's own: the results are then that part's share of dq, and its dk and dv.
///
/// # Shapes
///
/// q, d_out, dq `[B, H, Sq, D]`; k, v, dk, dv `[B, G, Sk, D]`; lse, delta `[B, H, Sq]` in f32 (f64 beside f64).
///
/// # Errors
///
/// As [`forward`], also for d_out, lse and delta.
///
/// # Memory
///
/// `backward_bytes`.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_context_parallel::flash::{self, FlashOptions};
///
/// let x = Tensor::<4>::random([1, 2, 10, 8], Distribution::Default, &Device::flex());
/// let options = FlashOptions::causal();
/// let (out, lse) = flash::forward(x.clone(), x.clone(), x.clone(), &options)?;
/// let d_out = Tensor::ones_like(&out);
/// let delta = flash::delta(d_out.clone(), out);
/// let (dq, _, _) = flash::backward(x.clone(), x.clone(), x, d_out, lse, delta, &options)?;
/// assert_eq!(dq.dims(), [1, 2, 10, 8]);
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
pub fn backward(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    d_out: Tensor<4>,
    lse: Tensor<3>,
    delta: Tensor<3>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>)> {
    backward_onto(q, k, v, d_out, lse, delta, None, options)
}

/// [`backward`], with dk and dv added to `sums` of earlier calls, in place where nobody else holds them: for schedules that
/// meet one key/value head, or block of keys, several times.
///
/// # Shapes
///
/// As [`backward`]; `sums` are dk and dv `[B, G, Sk, D]` so far.
///
/// # Errors
///
/// As [`backward`], also for `sums`.
///
/// # Memory
///
/// `backward_bytes`, less dk and dv if `sums` are given.
#[allow(clippy::too_many_arguments)] // the operation's own inputs
pub fn backward_onto(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    d_out: Tensor<4>,
    lse: Tensor<3>,
    delta: Tensor<3>,
    sums: Option<(Tensor<4>, Tensor<4>)>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>)> {
    let operation = "flash::backward";
    for (name, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
        check::check_untracked(operation, name, tensor)?;
    }
    let shape = check::check_inputs(operation, &q, &k, &v, options)?;
    let rows = check::row_dtype(operation, q.dtype())?;
    check::check_beside(operation, &q, ("d_out", &d_out), shape.q(), q.dtype())?;
    check::check_beside(operation, &q, ("lse", &lse), shape.rows(), rows)?;
    check::check_beside(operation, &q, ("delta", &delta), shape.rows(), rows)?;
    if let Some((dk, dv)) = &sums {
        let dtype = options.result_dtype(q.dtype());
        check::check_beside(operation, &q, ("dk so far", dk), shape.kv(), dtype)?;
        check::check_beside(operation, &q, ("dv so far", dv), shape.kv(), dtype)?;
    }
    let [q, k, v, d_out] = [q, k, v, d_out].map(Tensor::into_dispatch);
    let [lse, delta] = [lse, delta].map(Tensor::into_dispatch);
    let options = options.clone();
    let (dq, dk, dv) = match sums {
        None => Dispatch::flash_backward(q, k, v, d_out, lse, delta, options),
        Some((dk, dv)) => {
            let (dk, dv) = (dk.into_dispatch(), dv.into_dispatch());
            Dispatch::flash_backward_onto(q, k, v, d_out, lse, delta, dk, dv, options)
        }
    };
    Ok((Tensor::from_dispatch(dq), Tensor::from_dispatch(dk), Tensor::from_dispatch(dv)))
}

/// `delta_i = d_out_i . out_i`, what [`backward`] subtracts; with a gradient of the log-sum-exp, pass
/// `delta(d_out, out) - d_lse`.
///
/// # Shapes
///
/// d_out, out `[B, H, S, D]`; the result `[B, H, S]` in f32 (f64 of f64).
///
/// # Panics
///
/// If the shapes or devices differ, and of f64 on CubeCL devices.
///
/// # Memory
///
/// One f32 tensor of the size of `out` on the way (two beside f16 and bf16).
pub fn delta(d_out: Tensor<4>, out: Tensor<4>) -> Tensor<3> {
    assert_eq!(d_out.dims(), out.dims(), "flash::delta: d_out and out must have the same shape");
    assert_eq!(d_out.device().inner(), out.device().inner(), "flash::delta: d_out and out must be on one device");
    Tensor::from_dispatch(Dispatch::flash_delta(d_out.into_dispatch(), out.into_dispatch()))
}

/// Bytes that [`forward`] holds at most at once above its inputs, the results among them, on a Flex device with so
/// many threads.
///
/// ```text
/// out + lse + threads x (tiles of queries, scores, keys, values and sums) + 64 bytes or so per tile of queries
/// ```
///
/// Linear in Sq; without Sk. Rows with scores beyond 128, which are computed in f64, take another `8 (112 D + 96 D + 144 * 112)` bytes a thread.
/// Documents and positions take another 16 bytes per tile and row of them. f16 and bf16 inputs are converted tile by tile, not as a whole.
///
/// ```
/// use burn::tensor::DType;
/// use burn_context_parallel::flash::{FlashShape, forward_bytes};
///
/// let shape = |s| FlashShape { batch: 1, q_heads: 8, kv_heads: 8, q_len: s, k_len: s, head_dim: 64 };
/// let bytes = |s| forward_bytes(&shape(s), DType::F32, 2);
/// assert!(bytes(1 << 20) <= 2 * bytes(1 << 19));
/// ```
#[cfg(feature = "flex")]
pub fn forward_bytes(shape: &FlashShape, dtype: DType, threads: usize) -> usize {
    flex::forward_bytes(shape, dtype, threads)
}

/// Bytes that [`backward`] holds at most at once above its inputs, the results among them, on a Flex device with so
/// many threads.
///
/// ```text
/// dq + dk + dv + threads x (tiles of queries, scores, keys, values and sums) + 64 bytes or so per tile
/// ```
///
/// Lse and delta are taken to be contiguous.
#[cfg(feature = "flex")]
pub fn backward_bytes(shape: &FlashShape, dtype: DType, threads: usize) -> usize {
    flex::backward_bytes(shape, dtype, threads)
}
