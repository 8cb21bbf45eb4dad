//! Attention written out, every score in memory: the oracle, what O(S^2) costs, and the one place for dense masks and biases.

use burn::tensor::{Bool, Device, Tensor, TensorData};

use super::{FlashOptions, FlashShape, check};
use crate::{Error, Result};

/// Attention in plain tensor operations, with the options and the empty rows of [`flash_attention`](super::flash_attention).
///
/// On any device, differentiable by autodiff.
///
/// # Shapes
///
/// q `[B, H, Sq, D]`; k, v `[B, G, Sk, D]`; the output is as q.
///
/// # Errors
///
/// As [`flash_attention`](super::flash_attention), but any device is served.
///
/// # Memory
///
/// O(B H Sq Sk): about 3 such tensors of f32 forward, 5 with the backward pass; and k and v once per query head.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: &FlashOptions) -> Result<Tensor<4>> {
    Ok(attention_with_lse(q, k, v, options)?.0)
}

/// [`attention`], and the natural log-sum-exp of each row, `[B, H, Sq]`.
///
/// # Errors
///
/// As [`attention`].
pub fn attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    written_out("flash::reference::attention", q, k, v, None, None, options)
}

/// [`attention`] with what no kernel here takes: a dense mask (true is hidden, as in Burn), a bias added to the scores, or both.
///
/// A mask that is causal, a window or documents is better given by the options: then nothing of O(S^2) is needed.
///
/// # Shapes
///
/// mask and bias `[B | 1, H | 1, Sq | 1, Sk | 1]`; the rest as [`attention`]. Differentiable in the bias, too.
///
/// # Errors
///
/// As [`attention`], and [`Error::Invalid`] for a mask or bias of another shape.
///
/// # Memory
///
/// As [`attention`], and the mask and the bias spread over all heads.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::flash::{FlashOptions, reference};
///
/// let device = Device::flex();
/// let x = Tensor::<4>::ones([1, 2, 3, 4], &device);
/// let distance = Tensor::<4>::from_floats([[[[0.0, -1.0, -2.0], [-1.0, 0.0, -1.0], [-2.0, -1.0, 0.0]]]], &device);
/// let out = reference::dense_attention(x.clone(), x.clone(), x, None, Some(distance), &FlashOptions::causal())?;
/// assert_eq!(out.dims(), [1, 2, 3, 4]);
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
pub fn dense_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: &FlashOptions,
) -> Result<Tensor<4>> {
    Ok(written_out("flash::reference::dense_attention", q, k, v, mask, bias, options)?.0)
}

fn written_out(
    operation: &'static str,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    let shape = check::check_plain(operation, &q, &k, &v, options)?;
    let dims =
        mask.iter().map(|mask| ("the mask", mask.dims())).chain(bias.iter().map(|bias| ("the bias", bias.dims())));
    for (name, dims) in dims {
        fits(operation, name, dims, &shape)?;
    }
    let dtype = q.dtype();
    let compute = check::row_dtype(operation, dtype)?;
    let [b, h, sq, d] = shape.q();
    let (sk, device) = (shape.k_len, q.device());
    if b * h * sq * sk == 0 {
        let lse = Tensor::full(shape.rows(), f64::NEG_INFINITY, (&device, compute));
        return Ok((Tensor::zeros(shape.q(), (&device, dtype)), lse));
    }
    let whole = [b, h, sq, sk];
    let scores = if d == 0 {
        Tensor::zeros(whole, (&device, compute))
    } else {
        let k = spread(k, &shape, compute);
        q.cast(compute).matmul(k.swap_dims(2, 3)) * options.resolved_scale(d)
    };
    let scores = match options.softcap {
        // Burn divides gradients by a scalar in f32 in f64 graphs, too.
        Some(cap) => (scores * (1.0 / cap)).tanh() * cap,
        None => scores,
    };
    let scores = match bias {
        Some(bias) => scores + bias.cast(compute).expand(whole),
        None => scores,
    };
    let mut scores = scores.mask_fill(hidden(options, &shape, &device).expand(whole), f64::NEG_INFINITY);
    if let Some(mask) = mask {
        scores = scores.mask_fill(mask.expand(whole), f64::NEG_INFINITY);
    }

    // The shift cancels, so no gradient flows through it; an empty row is measured from 0.
    let largest = scores.clone().detach().max_dim(3);
    let empty = largest.clone().equal_elem(f64::NEG_INFINITY);
    let largest = largest.mask_fill(empty.clone(), 0.0);
    let weights = (scores - largest.clone()).exp();
    let sum = weights.clone().sum_dim(3).mask_fill(empty.clone(), 1.0);
    let out = if d == 0 {
        Tensor::zeros(shape.q(), (&device, compute))
    } else {
        weights.matmul(spread(v, &shape, compute)) / sum.clone()
    };
    let lse = (largest + sum.log()).mask_fill(empty, f64::NEG_INFINITY);
    Ok((out.cast(dtype), lse.reshape([b, h, sq])))
}

/// Keys or values once per query head.
fn spread(x: Tensor<4>, shape: &FlashShape, compute: burn::tensor::DType) -> Tensor<4> {
    let [b, g, sk, d] = shape.kv();
    let h = shape.q_heads;
    x.cast(compute).reshape([b, g, 1, sk, d]).expand([b, g, h / g, sk, d]).reshape([b, h, sk, d])
}

/// Which pairs the options hide, [B | 1, 1, Sq, Sk].
fn hidden(options: &FlashOptions, shape: &FlashShape, device: &Device) -> Tensor<4, Bool> {
    let rows = options.documents.iter().flat_map(|(q, k)| [q.rows(), k.rows()]);
    let rows = rows.chain(options.positions.iter().flat_map(|(q, k)| [q.rows(), k.rows()])).max().unwrap_or(1);
    let (sq, sk) = (shape.q_len, shape.k_len);
    let pairs = (0..rows).flat_map(|row| (0..sq).flat_map(move |i| (0..sk).map(move |j| (row, i, j))));
    let hidden: Vec<bool> = pairs.map(|(row, i, j)| !options.sees(row, i, j)).collect();
    Tensor::from_data(TensorData::new(hidden, [rows, 1, sq, sk]), &device.clone().inner())
}

fn fits(operation: &'static str, name: &str, dims: [usize; 4], shape: &FlashShape) -> Result<()> {
    let whole = [shape.batch, shape.q_heads, shape.q_len, shape.k_len];
    if dims.iter().zip(whole).all(|(dim, whole)| *dim == 1 || *dim == whole) {
        return Ok(());
    }
    Err(Error::invalid(
        operation,
        format!("{name} is {dims:?}"),
        format!("give {whole:?}, or 1 in place of any of these"),
    ))
}
