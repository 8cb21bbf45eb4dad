//! What all kernels of the family `block` do: products of two tiles of rows, and sums of rows with weights, through shared memory.

use cubecl::prelude::*;

use super::super::place;
use super::super::score::{add_product, bend, is_large, narrow, scaled};
use super::config::BlockConfig;

/// Where a tensor's rows of one head lie: in vectors.
#[derive(CubeType, Clone, Copy)]
pub(in super::super) struct Rows {
    base: usize,
    row: usize,
    column: usize,
    len: usize,
}

/// The rows of head `h` of sequence `b`.
#[cube]
pub(in super::super) fn rows<E: Float, N: Size>(tensor: &Tensor<Vector<E, N>>, b: usize, h: usize) -> Rows {
    let n = N::value();
    Rows {
        base: place::head(tensor, b, h) / n,
        row: tensor.stride(2) / n,
        column: tensor.stride(3),
        len: tensor.shape(2),
    }
}

/// Brings `count` rows from `first` on, `width` vectors of each from `from` on, to `stage[at..]`, rows `pitch` apart. What lies beyond a row is
/// 0, rows beyond the last are the last.
#[cube]
fn bring<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    rows: &Rows,
    first: usize,
    from: usize,
    stage: &mut Shared<[Vector<f32, N>]>,
    #[comptime] at: usize,
    #[comptime] count: usize,
    #[comptime] width: usize,
    #[comptime] pitch: usize,
    #[comptime] config: BlockConfig,
) {
    let all = comptime!(count * width);
    let units = comptime!(config.units());
    let whole = comptime!(config.width());
    let turns = comptime!(all.div_ceil(units));
    for turn in 0..turns {
        let u = UNIT_POS as usize + turn * units;
        if u < all {
            let r = u / width;
            let e = u % width;
            let i = min(first + r, rows.len - 1);
            let there = from + e < whole;
            let column = select(there, from + e, 0usize);
            let x: Vector<f32, N> = Vector::cast_from(tensor[rows.base + i * rows.row + column * rows.column]);
            stage[at + r * pitch + e] = select(there, x, Vector::new(0.0));
        }
    }
}

/// The products of this unit's own rows with its rows of the other side: `m x n`. `zero` is 0 at run time.
#[cube]
pub(super) fn multiply<E: Float, N: Size>(
    own: &Tensor<Vector<E, N>>,
    own_rows: &Rows,
    own_first: usize,
    other: &Tensor<Vector<E, N>>,
    other_rows: &Rows,
    other_first: usize,
    stage: &mut Shared<[Vector<f32, N>]>,
    zero: u32,
    #[comptime] config: BlockConfig,
) -> Array<f32> {
    let m = comptime!(config.m());
    let n = comptime!(config.n());
    let side = comptime!(config.side);
    let pitch = comptime!(config.slab_row());
    let second = comptime!(config.own * config.slab_row());
    let x = UNIT_POS as usize % side;
    let y = UNIT_POS as usize / side;
    // Numbers and not vectors: four times as many sums are more than a unit has registers for.
    let mut sums = Array::<f32>::new(comptime!(m * n));
    #[unroll]
    for i in 0..comptime!(m * n) {
        sums[i] = f32::new(0.0);
    }
    for s in 0..comptime!(config.slabs()) {
        let from = s * comptime!(config.slab());
        sync_cube();
        bring::<E, N>(own, own_rows, own_first, from, stage, 0usize, config.own, config.slab(), pitch, config);
        bring::<E, N>(other, other_rows, other_first, from, stage, second, config.step, config.slab(), pitch, config);
        sync_cube();
        // Not unrolled, or compilers read all of it ahead, into more registers than there are.
        for e in 0..comptime!(config.slab()) + zero as usize {
            let mut mine = Array::<Vector<f32, N>>::new(m);
            #[unroll]
            for r in 0..m {
                mine[r] = stage[(y * m + r) * pitch + e];
            }
            #[unroll]
            for c in 0..n {
                let theirs = stage[second + (x + c * side) * pitch + e];
                #[unroll]
                for lane in 0..N::value() {
                    #[unroll]
                    for r in 0..m {
                        sums[r * n + c] = fma(mine[r].extract(lane), theirs.extract(lane), sums[r * n + c]);
                    }
                }
            }
        }
    }
    sums
}

/// `sums [m, share] += weights [own, step] rows [step, D]`. The weights are in shared memory, written before this is called.
#[cube]
pub(super) fn accumulate<E: Float, N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    weights: &Shared<[f32]>,
    tensor: &Tensor<Vector<E, N>>,
    rows: &Rows,
    first: usize,
    stage: &mut Shared<[Vector<f32, N>]>,
    #[comptime] config: BlockConfig,
) {
    let m = comptime!(config.m());
    let side = comptime!(config.side);
    let share = comptime!(config.share());
    let pitch = comptime!(config.sum_row());
    let count = comptime!(config.sum_rows());
    let x = UNIT_POS as usize % side;
    let y = UNIT_POS as usize / side;
    for chunk in 0..comptime!(config.step / config.sum_rows()) {
        sync_cube();
        bring::<E, N>(tensor, rows, first + chunk * count, 0usize, stage, 0usize, count, pitch, pitch, config);
        sync_cube();
        for j in 0..count {
            let mut row = Array::<Vector<f32, N>>::new(share);
            #[unroll]
            for e in 0..share {
                row[e] = stage[j * pitch + x + e * side];
            }
            #[unroll]
            for r in 0..m {
                let weight = Vector::<f32, N>::new(weights[(y * m + r) * config.step + chunk * count + j]);
                #[unroll]
                for e in 0..share {
                    sums[r * share + e] = fma(weight, row[e], sums[r * share + e]);
                }
            }
        }
    }
}

/// A product as a score: scaled, and bent if scores are.
#[cube]
pub(super) fn score(product: f32, scale: f32, cap: f32, #[comptime] config: BlockConfig) -> f32 {
    let s = product * scale;
    if comptime!(config.softcap) { bend::<Const<1>>(Vector::new(s), cap).extract(0usize) } else { s }
}

/// Scores less their `origins`, of own rows or of the other side's, where these are large and scores are as they were computed: in two
/// parts, from memory, into the place of the weights. Rare, and so one loop that is compiled once.
#[cube]
pub(super) fn differences<E: Float, N: Size>(
    own: &Tensor<Vector<E, N>>,
    own_rows: &Rows,
    own_first: usize,
    other: &Tensor<Vector<E, N>>,
    other_rows: &Rows,
    other_first: usize,
    origins: &Array<f32>,
    #[comptime] of_own: bool,
    weights: &mut Shared<[f32]>,
    scale: f32,
    scale_rest: f32,
    zero: u32,
    #[comptime] config: BlockConfig,
) {
    let m = comptime!(config.m());
    let n = comptime!(config.n());
    let side = comptime!(config.side);
    let count = comptime!(if of_own { config.m() } else { config.n() });
    let x = UNIT_POS as usize % side;
    let y = UNIT_POS as usize / side;
    if comptime!(config.is_exact()) {
        if some_large(origins, count) {
            for at in 0..comptime!(config.m() * config.n()) {
                let r = at / n;
                let c = at % n;
                let which = if comptime!(of_own) { r } else { c };
                let mut origin = f32::new(0.0);
                #[unroll]
                for i in 0..count {
                    origin = select(which == i, origins[i], origin);
                }
                if is_large(origin) {
                    let own_at = row_at(own_rows, min(own_first + y * m + r, own_rows.len - 1));
                    let other_at = row_at(other_rows, min(other_first + x + c * side, other_rows.len - 1));
                    let mut high = Vector::<f32, Const<1>>::new(0.0);
                    let mut low = Vector::<f32, Const<1>>::new(0.0);
                    for e in 0..comptime!(config.width()) {
                        let a: Vector<f32, N> = Vector::cast_from(own[own_at + e * own_rows.column]);
                        let b: Vector<f32, N> = Vector::cast_from(other[other_at + e * other_rows.column]);
                        #[unroll]
                        for lane in 0..N::value() {
                            let a_lane = Vector::<f32, Const<1>>::new(a.extract(lane));
                            let b_lane = Vector::<f32, Const<1>>::new(b.extract(lane));
                            add_product::<Const<1>>(a_lane, b_lane, &mut high, &mut low, zero);
                        }
                    }
                    scaled::<Const<1>>(&mut high, &mut low, scale, scale_rest, zero);
                    weights[(y * m + r) * config.step + x + c * side] =
                        (high.extract(0usize) - origin) + low.extract(0usize);
                }
            }
        }
    }
}

/// Whether one of so many numbers is [large](is_large).
#[cube]
fn some_large(numbers: &Array<f32>, #[comptime] count: usize) -> bool {
    let mut some = false.runtime();
    #[unroll]
    for i in 0..count {
        some = some || is_large(numbers[i]);
    }
    some
}

/// Where row `i` begins.
#[cube]
pub(in super::super) fn row_at(rows: &Rows, i: usize) -> usize {
    rows.base + i * rows.row
}

/// Writes `factor sums` to the own rows from `first` on that there are, added to what is there if `onto`.
#[cube]
pub(super) fn write<O: Float, N: Size>(
    sums: &Array<Vector<f32, N>>,
    factor: &Array<f32>,
    to: &mut Tensor<Vector<O, N>>,
    b: usize,
    h: usize,
    first: usize,
    #[comptime] onto: bool,
    #[comptime] config: BlockConfig,
) {
    let m = comptime!(config.m());
    let side = comptime!(config.side);
    let share = comptime!(config.share());
    let whole = comptime!(config.width());
    let x = UNIT_POS as usize % side;
    let y = UNIT_POS as usize / side;
    let n = N::value();
    let base = place::head(&*to, b, h) / n;
    let row = to.stride(2) / n;
    let apart = to.stride(3);
    let len = to.shape(2);
    #[unroll]
    for r in 0..m {
        let i = first + y * m + r;
        #[unroll]
        for e in 0..share {
            let column = x + e * side;
            if i < len && column < whole {
                let at = base + i * row + column * apart;
                let mut value = sums[r * share + e] * Vector::new(factor[r]);
                if comptime!(onto) {
                    value += Vector::cast_from(to[at]);
                }
                to[at] = narrow::<O, N>(value, config.by_bits);
            }
        }
    }
}
