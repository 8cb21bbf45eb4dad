//! What all kernels of the family `rows` do: whole rows of one side lie across the lanes of registers, transposed once; rows of the
//! other side are read where they lie, and each of their numbers is one operand for all lanes. No sum goes across a register.
//!
//! `[D, vectors]` registers of a unit's own rows are in an array, dimension by dimension.

use cubecl::prelude::*;

use super::super::score::{LARGE, add_product, narrow, scaled};
use super::super::sight;
use super::config::RowsConfig;

/// From dimension to dimension: 1 is known when a kernel is built, so that nothing is multiplied.
#[cube]
fn tile_column(stride: usize, #[comptime] config: RowsConfig) -> usize {
    if comptime!(config.dense) { 1usize.runtime() } else { stride }
}

/// Fills `to [D, vectors]` with rows from `first` on; rows beyond the last are the last.
#[cube]
pub(super) fn transpose<E: Float, N: Size>(
    from: &Tensor<E>,
    base: usize,
    first: usize,
    rows: usize,
    to: &mut Array<Vector<f32, N>>,
    #[comptime] config: RowsConfig,
) {
    let vectors = comptime!(config.vectors);
    let row = from.stride(2);
    let column = tile_column(from.stride(3), config);
    for e in 0..config.dim {
        #[unroll]
        for w in 0..vectors {
            let mut x = Vector::<f32, N>::new(0.0);
            #[unroll]
            for lane in 0..N::value() {
                let at = base + min(first + w * N::value() + lane, rows - 1) * row;
                x.insert(lane, f32::cast_from(from[at + e * column]));
            }
            to[e * vectors + w] = x;
        }
    }
}

/// Fills `[D, vectors]` with zeros.
#[cube]
pub(super) fn clear<N: Size>(sums: &mut Array<Vector<f32, N>>, #[comptime] config: RowsConfig) {
    for e in 0..comptime!(config.dim * config.vectors) {
        sums[e] = Vector::new(0.0);
    }
}

/// Fills the ranks that a unit's own queries, from `first` on, see, `least .. limit`, and their documents; those beyond the last are the last.
#[cube]
pub(super) fn bounds<N: Size>(
    table: &[i32],
    b: usize,
    first: usize,
    q_len: usize,
    k_len: usize,
    least: &mut Array<Vector<i32, N>>,
    limit: &mut Array<Vector<i32, N>>,
    document: &mut Array<Vector<i32, N>>,
    #[comptime] config: RowsConfig,
) {
    let labels = comptime!(config.labels);
    #[unroll]
    for w in 0..comptime!(config.vectors) {
        let mut some_low = Vector::<i32, N>::new(0);
        let mut some_high = Vector::<i32, N>::new(0);
        let mut some_document = Vector::<i32, N>::new(0);
        #[unroll]
        for lane in 0..N::value() {
            let i = min(first + w * N::value() + lane, q_len - 1);
            some_low.insert(lane, sight::low(table, b, i, labels));
            some_high.insert(lane, sight::high(table, b, i, k_len, labels));
            some_document.insert(lane, sight::q_document(table, b, i, labels));
        }
        least[w] = some_low;
        limit[w] = some_high;
        document[w] = some_document;
    }
}

/// Where `step` rows from `first` on begin; rows beyond the last are the last.
#[cube]
pub(in super::super) fn starts<E: Float>(
    tensor: &Tensor<E>,
    base: usize,
    first: usize,
    rows: usize,
    #[comptime] config: RowsConfig,
) -> Array<usize> {
    let mut at = Array::<usize>::new(config.step);
    #[unroll]
    for c in 0..config.step {
        at[c] = base + min(first + c, rows - 1) * tensor.stride(2);
    }
    at
}

/// `sums[c, vectors] += own . tensor[c]` for each of `step` rows.
#[cube]
pub(super) fn multiply<E: Float, N: Size>(
    own: &Array<Vector<f32, N>>,
    tensor: &Tensor<E>,
    at: &Array<usize>,
    #[comptime] config: RowsConfig,
) -> Array<Vector<f32, N>> {
    let vectors = comptime!(config.vectors);
    let column = tile_column(tensor.stride(3), config);
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(config.step * config.vectors));
    #[unroll]
    for i in 0..comptime!(config.step * config.vectors) {
        sums[i] = Vector::new(0.0);
    }
    for e in 0..config.dim {
        #[unroll]
        for c in 0..config.step {
            let x = Vector::<f32, N>::new(f32::cast_from(tensor[at[c] + e * column]));
            #[unroll]
            for w in 0..vectors {
                sums[c * vectors + w] = fma(own[e * vectors + w], x, sums[c * vectors + w]);
            }
        }
    }
    sums
}

/// `sums = fade sums + weights^T tensor` for `step` rows of `tensor`.
#[cube]
pub(super) fn accumulate<E: Float, N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    weights: &Array<Vector<f32, N>>,
    tensor: &Tensor<E>,
    at: &Array<usize>,
    fade: &Array<Vector<f32, N>>,
    #[comptime] fades: bool,
    #[comptime] config: RowsConfig,
) {
    let vectors = comptime!(config.vectors);
    let column = tile_column(tensor.stride(3), config);
    for e in 0..config.dim {
        let mut x = Array::<Vector<f32, N>>::new(config.step);
        #[unroll]
        for c in 0..config.step {
            x[c] = Vector::new(f32::cast_from(tensor[at[c] + e * column]));
        }
        #[unroll]
        for w in 0..vectors {
            let mut sum = sums[e * vectors + w];
            if comptime!(fades) {
                sum *= fade[w];
            }
            #[unroll]
            for c in 0..config.step {
                sum = fma(weights[c * vectors + w], x[c], sum);
            }
            sums[e * vectors + w] = sum;
        }
    }
}

/// Whether some number of `x` is large, and which; one that stands for infinity is not.
#[cube]
pub(super) fn some_large<N: Size>(x: Vector<f32, N>) -> bool {
    let size = x.abs();
    let mut farthest = f32::new(0.0);
    #[unroll]
    for lane in 0..N::value() {
        let one = size.extract(lane);
        farthest = max(farthest, select(one < f32::new(1e29), one, f32::new(0.0)));
    }
    farthest > f32::new(LARGE)
}

/// Which numbers of `x` are large.
#[cube]
pub(super) fn large<N: Size>(x: Vector<f32, N>) -> Vector<bool, N> {
    let size = x.abs();
    size.greater_than(&Vector::new(LARGE)).vec_and(size.less_than(&Vector::new(1e29f32)))
}

/// `scale own . row` of the rows that lie at `own` and `row`, as a number and what it lacks: not from registers, since it is rare.
#[cube]
pub(super) fn exactly<E: Float, N: Size>(
    own: &Array<Vector<f32, N>>,
    #[comptime] w: usize,
    tensor: &Tensor<E>,
    at: usize,
    scale: f32,
    scale_rest: f32,
    zero: u32,
    high: &mut Vector<f32, N>,
    low: &mut Vector<f32, N>,
    #[comptime] config: RowsConfig,
) {
    let column = tile_column(tensor.stride(3), config);
    *high = Vector::new(0.0);
    *low = Vector::new(0.0);
    for e in 0..config.dim {
        let x = Vector::<f32, N>::new(f32::cast_from(tensor[at + e * column]));
        add_product(own[e * config.vectors + w], x, high, low, zero);
    }
    scaled(high, low, scale, scale_rest, zero);
}

/// Writes `factor sums`, turned back, to the rows from `first` on that there are.
#[cube]
pub(super) fn write<O: Float, N: Size>(
    sums: &Array<Vector<f32, N>>,
    factor: &Array<Vector<f32, N>>,
    to: &mut Tensor<O>,
    base: usize,
    first: usize,
    rows: usize,
    #[comptime] onto: bool,
    #[comptime] config: RowsConfig,
) {
    let vectors = comptime!(config.vectors);
    let row = to.stride(2);
    let column = to.stride(3);
    for e in 0..config.dim {
        #[unroll]
        for w in 0..vectors {
            let x = sums[e * vectors + w] * factor[w];
            #[unroll]
            for lane in 0..N::value() {
                let i = first + w * N::value() + lane;
                if i < rows {
                    let at = base + i * row + e * column;
                    let mut value = x.extract(lane);
                    if comptime!(onto) {
                        value += f32::cast_from(to[at]);
                    }
                    to[at] = narrow::<O, Const<1>>(Vector::new(value), config.by_bits).extract(0usize);
                }
            }
        }
    }
}
