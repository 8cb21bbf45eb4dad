//! Collectives that move parts of a dim between ranks.

use burn::tensor::Tensor;

use crate::group::{ProcessGroup, ReduceOp};
use crate::vjp::{Inputs, custom_vjp};
use crate::{Error, OrRaise, Result};

/// Cuts `x` along `split` into `sizes` (one a rank), sends part r to rank r, and joins what arrives along `concat`.
///
/// The adjoint is the all-to-all with both dims exchanged.
///
/// # Shapes
///
/// [.., sum of sizes at `split`, ..] -> `sizes[my rank]` at `split` and the sum of all ranks' lengths at `concat`.
///
/// # Errors
///
/// [`Error::Invalid`] if `sizes` do not add up, are not one a rank, or the dims are equal or absent; [`Error::Group`] if the
/// collective fails, among other things because ranks' sizes differ.
///
/// # Communication
///
/// Each rank sends all of `x` but its own part.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::{Error, collective::all_to_all, group::launch};
///
/// let shapes = launch(2, |world| {
///     let x = Tensor::<2>::ones([3, 4], &Device::flex()); // my 3 tokens, all 4 heads
///     Ok::<_, Error>(all_to_all(x, 1, 0, &[2, 2], &world)?.dims()) // all 6 tokens, my 2 heads
/// })?;
/// assert_eq!(shapes, [[6, 2], [6, 2]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn all_to_all<const D: usize>(
    x: Tensor<D>,
    split: usize,
    concat: usize,
    sizes: &[usize],
    group: &ProcessGroup,
) -> Result<Tensor<D>> {
    const NAME: &str = "all_to_all";
    check_dims(NAME, &x, &[split, concat])?;
    if split == concat {
        return Err(Error::invalid(NAME, format!("dim {split} as both dims"), "split one dim, concatenate another"));
    }
    check_sizes(NAME, &x, split, sizes, group)?;
    let inputs = Inputs::new().input(&x);
    let sent: Vec<_> = sizes.to_vec();
    let (y, lengths) = exchange(x.inner(), split, concat, sizes, group)?;
    let group = group.clone();
    Ok(custom_vjp(inputs, y, move |dy: Tensor<D>| {
        let (dx, back) = exchange(dy, concat, split, &lengths, &group).or_raise();
        debug_assert_eq!(back, sent);
        vec![Some(dx.into_dispatch())]
    }))
}

/// The all-to-all itself, and each rank's length at `concat`.
fn exchange<const D: usize>(
    x: Tensor<D>,
    split: usize,
    concat: usize,
    sizes: &[usize],
    group: &ProcessGroup,
) -> Result<(Tensor<D>, Vec<usize>)> {
    let mine = sizes[group.rank()];
    let own = x.dims();
    let lengths = group.all_gather(length_payload(own[concat]))?.into_iter().map(payload_length).collect::<Vec<_>>();
    let mut start = 0;
    let parts = sizes
        .iter()
        .map(|size| {
            start += size;
            (*size > 0 && own[concat] > 0).then(|| x.clone().narrow(split, start - size, *size))
        })
        .collect();
    let expected: Vec<_> = lengths
        .iter()
        .map(|length| {
            let mut shape = own.to_vec();
            shape[split] = mine;
            shape[concat] = *length;
            (mine > 0 && *length > 0).then_some(shape)
        })
        .collect();
    let received: Vec<_> = group.at(&x.device()).all_to_all_uneven(parts, &expected)?.into_iter().flatten().collect();
    let y = if received.is_empty() {
        let mut shape = own;
        shape[split] = mine;
        shape[concat] = lengths.iter().sum();
        Tensor::zeros(shape, (&x.device(), x.dtype()))
    } else {
        Tensor::cat(received, concat)
    };
    Ok((y, lengths))
}

fn length_payload(length: usize) -> burn::tensor::TensorData {
    burn::tensor::TensorData::from([length as i64])
}

fn payload_length(data: burn::tensor::TensorData) -> usize {
    data.iter::<i64>().next().map_or(0, |length| length as usize)
}

/// Every rank's part, joined along `dim` in rank order; parts may differ in length. Adjoint: [`reduce_scatter`].
///
/// # Shapes
///
/// [.., n_r, ..] -> [.., sum of n_r, ..] with n_r at `dim`.
///
/// # Errors
///
/// [`Error::Invalid`] if there is no such dim; [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// Each rank sends its part to P - 1 ranks.
pub fn all_gather<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Result<Tensor<D>> {
    check_dims("all_gather", &x, &[dim])?;
    let inputs = Inputs::new().input(&x);
    let (y, sizes) = gather(x.inner(), dim, group)?;
    let group = group.clone();
    Ok(custom_vjp(inputs, y, move |dy: Tensor<D>| {
        vec![Some(scatter(dy, dim, &sizes, &group).or_raise().into_dispatch())]
    }))
}

fn gather<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Result<(Tensor<D>, Vec<usize>)> {
    let own = x.dims();
    let parts = group.all_gather_uneven(x)?;
    let others = |dims: [usize; D]| (0..D).all(|d| d == dim || dims[d] == own[d]);
    if let Some(rank) = parts.iter().position(|part| !others(part.dims())) {
        return Err(Error::invalid(
            "all_gather",
            format!("rank {rank} gave shape {:?}, this rank {own:?}, to be joined along dim {dim}", parts[rank].dims()),
            "all dims but the joined one must be equal on all ranks",
        ));
    }
    let sizes = parts.iter().map(|part| part.dims()[dim]).collect();
    Ok((Tensor::cat(parts, dim), sizes))
}

/// Sums `x` over ranks and leaves each rank its part along `dim`, `sizes[r]` long. Adjoint: [`all_gather`].
///
/// # Shapes
///
/// [.., sum of sizes, ..] -> [.., `sizes[my rank]`, ..].
///
/// # Errors
///
/// [`Error::Invalid`] if `sizes` do not add up or are not one a rank; [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// Each rank sends all of `x` but its own part. Sums are in f32 for half types, in rank order.
pub fn reduce_scatter<const D: usize>(
    x: Tensor<D>,
    dim: usize,
    sizes: &[usize],
    group: &ProcessGroup,
) -> Result<Tensor<D>> {
    const NAME: &str = "reduce_scatter";
    check_dims(NAME, &x, &[dim])?;
    check_sizes(NAME, &x, dim, sizes, group)?;
    let inputs = Inputs::new().input(&x);
    let y = scatter(x.inner(), dim, sizes, group)?;
    let group = group.clone();
    Ok(custom_vjp(inputs, y, move |dy: Tensor<D>| vec![Some(gather(dy, dim, &group).or_raise().0.into_dispatch())]))
}

fn scatter<const D: usize>(x: Tensor<D>, dim: usize, sizes: &[usize], group: &ProcessGroup) -> Result<Tensor<D>> {
    let mut start = 0;
    let parts = sizes
        .iter()
        .map(|size| {
            start += size;
            cut(&x, dim, start - size, *size)
        })
        .collect();
    group.reduce_scatter(parts, ReduceOp::Sum)
}

/// `narrow`, which refuses a length of zero.
fn cut<const D: usize>(x: &Tensor<D>, dim: usize, start: usize, len: usize) -> Tensor<D> {
    if len > 0 {
        return x.clone().narrow(dim, start, len);
    }
    let mut dims = x.dims();
    dims[dim] = 0;
    Tensor::zeros(dims, (&x.device(), x.dtype()))
}

/// Passes `x` round the ring: to rank + `by`, and gives what rank - `by` sent. Adjoint: the shift back.
///
/// # Errors
///
/// [`Error::Group`] if the collective fails.
///
/// # Communication
///
/// Each rank sends `x` once.
pub fn shift<const D: usize>(x: Tensor<D>, by: isize, group: &ProcessGroup) -> Result<Tensor<D>> {
    let inputs = Inputs::new().input(&x);
    let y = group.shift(x.inner(), by)?;
    let group = group.clone();
    Ok(custom_vjp(inputs, y, move |dy: Tensor<D>| vec![Some(group.shift(dy, -by).or_raise().into_dispatch())]))
}

fn check_dims<const D: usize>(name: &'static str, x: &Tensor<D>, dims: &[usize]) -> Result<()> {
    match dims.iter().find(|dim| **dim >= D) {
        None => Ok(()),
        Some(dim) => Err(Error::invalid(
            name,
            format!("dim {dim} of a tensor of shape {:?}", x.dims()),
            format!("use a dim below {D}"),
        )),
    }
}

fn check_sizes<const D: usize>(
    name: &'static str,
    x: &Tensor<D>,
    dim: usize,
    sizes: &[usize],
    group: &ProcessGroup,
) -> Result<()> {
    if sizes.len() == group.size() && sizes.iter().sum::<usize>() == x.dims()[dim] {
        return Ok(());
    }
    Err(Error::invalid(
        name,
        format!("sizes {sizes:?} for {} elements at dim {dim} and {} ranks", x.dims()[dim], group.size()),
        "give one size per rank; they add up to the dim",
    ))
}
