//! Sums and maxima of several ranks' values, in host memory.
//!
//! ```text
//! y = ((x_0 + x_1) + x_2) + ..        in rank order, so that every rank computes the same bits
//! ```
//!
//! Half precision is summed in `f32` and rounded once; integers wrap.

use burn::tensor::{Bytes, DType, TensorData};
use bytemuck::Pod;
use half::{bf16, f16};

use crate::{Error, Result};

use super::call::ReduceOp;
use super::parcel::{Parcel, Reading};

/// Whether values of this type can be reduced.
///
/// # Errors
///
/// [`Error::Invalid`] for booleans and quantized values.
pub(super) fn check(operation: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_bool() || matches!(dtype, DType::QFloat(_)) {
        return Err(Error::invalid(
            operation,
            format!("{} values have no sum and no maximum", dtype.name()),
            "convert them to integers or floats first",
        ));
    }
    Ok(())
}

/// The reduction of `parts`, in their order; all have the same shape and element type.
///
/// # Errors
///
/// [`Error::Invalid`] for booleans and quantized values, for no parts, or if a device cannot be read.
///
/// # Memory
///
/// One accumulator: the value's own size, or twice that in half precision.
///
/// ```
/// use burn::tensor::TensorData;
/// use burn_context_parallel::group::{Parcel, ReduceOp, reduce};
///
/// let parts = [[1i32, 5], [2, -5]].map(|x| Parcel::from_data(TensorData::from(x)));
/// assert_eq!(reduce(&parts, ReduceOp::Sum).unwrap(), TensorData::from([3i32, 0]));
/// assert_eq!(reduce(&parts, ReduceOp::Max).unwrap(), TensorData::from([2i32, 5]));
/// assert!(reduce(&[], ReduceOp::Max).is_err());
/// ```
pub fn reduce(parts: &[Parcel], op: ReduceOp) -> Result<TensorData> {
    let Some(first) = parts.first() else {
        return Err(Error::invalid("reduce", "there are no parts", "give at least one"));
    };
    let (shape, dtype) = (first.shape(), first.dtype());
    check("reduce", dtype)?;
    if let Some(other) = parts.iter().find(|part| part.shape() != shape || part.dtype() != dtype) {
        return Err(Error::invalid(
            "reduce",
            format!("{first:?} and {other:?} do not fit together"),
            "all parts must have the same shape and element type",
        ));
    }
    let parts = parts.iter().map(Parcel::read).collect::<Result<Vec<_>>>()?;
    macro_rules! int {
        ($type:ty) => {
            match op {
                ReduceOp::Sum => fold(&parts, |x: $type| x, <$type>::wrapping_add, |x| x),
                ReduceOp::Max => fold(&parts, |x: $type| x, Ord::max, |x| x),
            }
        };
    }
    macro_rules! float {
        ($type:ty, $widen:expr, $narrow:expr) => {
            match op {
                ReduceOp::Sum => fold(&parts, $widen, |a, b| a + b, $narrow),
                ReduceOp::Max => fold(
                    &parts,
                    $widen,
                    // NaN wins: a maximum that hides it would hide an overflow on one rank.
                    |a, b| if b > a || b.is_nan() { b } else { a },
                    $narrow,
                ),
            }
        };
    }
    let bytes = match dtype {
        DType::F64 => float!(f64, |x: f64| x, |x| x),
        DType::F32 | DType::Flex32 => float!(f32, |x: f32| x, |x| x),
        DType::F16 => float!(f16, f16::to_f32, f16::from_f32),
        DType::BF16 => float!(bf16, bf16::to_f32, bf16::from_f32),
        DType::I64 => int!(i64),
        DType::I32 => int!(i32),
        DType::I16 => int!(i16),
        DType::I8 => int!(i8),
        DType::U64 => int!(u64),
        DType::U32 => int!(u32),
        DType::U16 => int!(u16),
        DType::U8 => int!(u8),
        DType::Bool(_) | DType::QFloat(_) => unreachable!("refused above"),
    };
    Ok(TensorData::from_bytes(bytes, shape.to_vec(), dtype))
}

fn fold<E: Pod + Send + Sync, A: Copy>(
    parts: &[Reading],
    widen: impl Fn(E) -> A,
    join: impl Fn(A, A) -> A,
    narrow: impl Fn(A) -> E,
) -> Bytes {
    // Unaligned reads: a window of bytes need not start where the element type would.
    fn elements<E: Pod>(bytes: &[u8]) -> impl Iterator<Item = E> + '_ {
        bytes.chunks_exact(size_of::<E>()).map(bytemuck::pod_read_unaligned)
    }
    let mut sum: Vec<A> = elements(&parts[0]).map(&widen).collect();
    for part in &parts[1..] {
        for (sum, element) in sum.iter_mut().zip(elements(part)) {
            *sum = join(*sum, widen(element));
        }
    }
    Bytes::from_elems(sum.into_iter().map(narrow).collect::<Vec<E>>())
}

/// Flat pieces one behind the other, as a value of this shape.
pub(super) fn concat(pieces: &[Parcel], shape: &[usize], dtype: DType) -> Result<TensorData> {
    fn join<E: Pod + Send + Sync>(pieces: &[Reading], elements: usize) -> Bytes {
        // Typed, so that the storage has the alignment which the element type needs.
        let mut whole = vec![E::zeroed(); elements];
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut whole);
        for piece in pieces {
            let (head, tail) = rest.split_at_mut(piece.len());
            head.copy_from_slice(piece);
            rest = tail;
        }
        Bytes::from_elems(whole)
    }
    let elements = shape.iter().product();
    let pieces = pieces.iter().map(Parcel::read).collect::<Result<Vec<_>>>()?;
    let bytes = match dtype.size() {
        8 => join::<u64>(&pieces, elements),
        4 => join::<u32>(&pieces, elements),
        2 => join::<u16>(&pieces, elements),
        _ => join::<u8>(&pieces, elements),
    };
    Ok(TensorData::from_bytes(bytes, shape.to_vec(), dtype))
}
