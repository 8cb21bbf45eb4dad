//! Flash attention for Burn's CPU backend.
//!
//! `forward` and `backward` hold the loops, `gemm` the product inside a tile, `real` the arithmetic of a register, `view`
//! how tensors are read in place, `wide` large scores, `work` who computes what, in which memory.

mod backward;
mod forward;
mod gemm;
mod real;
mod view;
mod wide;
mod work;

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Bytes, DType, bf16, f16};
use burn_flex::{FlexTensor, Layout};

use super::check::{check_primitive, check_primitives, row_dtype};
use super::mask::Mask;
use super::{FlashOps, FlashOptions, FlashShape};
use crate::OrRaise;
use real::Stored;
use view::View;

impl FlashOps for Flex {
    fn flash_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let inputs = [&q, &k, &v];
        let operation = "FlashOps::flash_forward";
        let (shape, dtype) = (check_primitives(operation, inputs, &options).or_raise(), q.dtype());
        let half = options.result_dtype(dtype) == dtype;
        match dtype {
            DType::F64 => forward_of::<f64, f64>(&shape, inputs, &options),
            DType::F16 if half => forward_of::<f16, f16>(&shape, inputs, &options),
            DType::F16 => forward_of::<f16, f32>(&shape, inputs, &options),
            DType::BF16 if half => forward_of::<bf16, bf16>(&shape, inputs, &options),
            DType::BF16 => forward_of::<bf16, f32>(&shape, inputs, &options),
            _ => forward_of::<f32, f32>(&shape, inputs, &options),
        }
    }

    fn flash_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        backward_checked("FlashOps::flash_backward", [&q, &k, &v, &d_out], [lse, delta], None, &options)
    }

    fn flash_backward_onto(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        dk: FloatTensor<Self>,
        dv: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let onto = Some([dk, dv]);
        backward_checked("FlashOps::flash_backward_onto", [&q, &k, &v, &d_out], [lse, delta], onto, &options)
    }
}

/// Both backward operations: `onto` holds dk and dv so far, if there are any.
fn backward_checked(
    operation: &'static str,
    inputs: [&FlexTensor; 4],
    [lse, delta]: [FlexTensor; 2],
    onto: Option<[FlexTensor; 2]>,
    options: &FlashOptions,
) -> (FlexTensor, FlexTensor, FlexTensor) {
    let [q, k, v, d_out] = inputs;
    let (shape, dtype) = (check_primitives(operation, [q, k, v], options).or_raise(), q.dtype());
    check_primitive(operation, "d_out", d_out, &shape.q(), dtype).or_raise();
    let rows = row_dtype(operation, dtype).or_raise();
    check_primitive(operation, "lse", &lse, &shape.rows(), rows).or_raise();
    check_primitive(operation, "delta", &delta, &shape.rows(), rows).or_raise();
    if let Some([dk, dv]) = &onto {
        let sums = options.result_dtype(dtype);
        check_primitive(operation, "dk", dk, &shape.kv(), sums).or_raise();
        check_primitive(operation, "dv", dv, &shape.kv(), sums).or_raise();
    }
    let (rows, half) = ([lse, delta], options.result_dtype(dtype) == dtype);
    match dtype {
        DType::F64 => backward_of::<f64, f64>(&shape, inputs, rows, onto, options),
        DType::F16 if half => backward_of::<f16, f16>(&shape, inputs, rows, onto, options),
        DType::F16 => backward_of::<f16, f32>(&shape, inputs, rows, onto, options),
        DType::BF16 if half => backward_of::<bf16, bf16>(&shape, inputs, rows, onto, options),
        DType::BF16 => backward_of::<bf16, f32>(&shape, inputs, rows, onto, options),
        _ => backward_of::<f32, f32>(&shape, inputs, rows, onto, options),
    }
}

fn forward_of<E: Stored, O: Stored<Real = E::Real>>(
    shape: &FlashShape,
    inputs: [&FlexTensor; 3],
    options: &FlashOptions,
) -> (FlexTensor, FlexTensor) {
    let mut out = zeros::<O>(&shape.q());
    let mut lse = zeros::<E::Real>(&shape.rows());
    forward::forward(shape, inputs.map(View::<E>::new), options, &mut out, &mut lse);
    (tensor(out, &shape.q()), tensor(lse, &shape.rows()))
}

fn backward_of<E: Stored, O: Stored<Real = E::Real>>(
    shape: &FlashShape,
    inputs: [&FlexTensor; 4],
    rows: [FlexTensor; 2],
    onto: Option<[FlexTensor; 2]>,
    options: &FlashOptions,
) -> (FlexTensor, FlexTensor, FlexTensor) {
    // Row statistics are D times smaller than the rest: copied if they aren't contiguous.
    let [lse, delta] = &rows.map(|t| if t.as_slice::<E::Real>().is_some() { t } else { t.to_contiguous() });
    let slice = |t| FlexTensor::as_slice::<E::Real>(t).expect("contiguous, and of the checked type");
    let [q, k, v, d_out] = inputs.map(View::<E>::new);
    let mask = &Mask::new(options, [shape.q_len, shape.k_len], [work::Q_TILE, work::K_TILE]);
    let inputs = backward::Inputs { shape, q, k, v, d_out, lse: slice(lse), delta: slice(delta), options, mask };
    let mut dq = zeros::<O>(&shape.q());
    let [mut dk, mut dv] = match onto {
        // Written in place where nobody else holds them: `storage_mut` copies what is shared.
        Some(sums) => sums.map(own),
        None => [0; 2].map(|_| tensor(zeros::<O>(&shape.kv()), &shape.kv())),
    };
    if !dq.is_empty() && elements(&shape.kv()) > 0 {
        backward::queries(inputs, &mut dq);
        backward::keys(inputs, dk.storage_mut::<O>(), dv.storage_mut::<O>());
    }
    (tensor(dq, &shape.q()), dk, dv)
}

/// The tensor as the whole of its storage, which a kernel can write as a slice.
fn own(tensor: FlexTensor) -> FlexTensor {
    let whole = elements(tensor.layout().shape().as_slice()) * tensor.dtype().size();
    let dense = tensor.is_contiguous() && tensor.layout().start_offset() == 0;
    if dense && tensor.bytes().len() == whole { tensor } else { tensor.to_contiguous() }
}

fn zeros<E: Stored>(shape: &[usize]) -> Vec<E> {
    bytemuck::zeroed_vec(elements(shape))
}

fn tensor<E: Stored>(values: Vec<E>, shape: &[usize]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape.to_vec().into()), E::DTYPE)
}

/// Bytes that [`forward_of`] holds at most at once, above its inputs.
pub(super) fn forward_bytes(shape: &FlashShape, dtype: DType, threads: usize) -> usize {
    let real = real_bytes(dtype);
    let tiles = shape.batch * shape.q_heads * shape.q_len.div_ceil(work::Q_TILE);
    elements(&shape.q()) * dtype.size()
        + elements(&shape.rows()) * real
        + forward::task_bytes(shape)
        + work::workers(tiles, threads) * forward::scratch_bytes(shape.head_dim, real)
}

/// Bytes that [`backward_of`] holds at most at once, above its inputs.
pub(super) fn backward_bytes(shape: &FlashShape, dtype: DType, threads: usize) -> usize {
    let real = real_bytes(dtype);
    let [first, second] = backward::scratch_bytes(shape.head_dim, real);
    let queries = shape.batch * shape.q_heads * shape.q_len.div_ceil(work::Q_TILE);
    let keys = shape.batch * shape.kv_heads * shape.k_len.div_ceil(work::K_TILE);
    let scratch = (work::workers(queries, threads) * first).max(work::workers(keys, threads) * second);
    (elements(&shape.q()) + 2 * elements(&shape.kv())) * dtype.size() + backward::task_bytes(shape) + scratch
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}

fn real_bytes(dtype: DType) -> usize {
    if dtype == DType::F64 { 8 } else { 4 }
}
