//! The forward kernel of the family `block`: a cube owns queries, and meets the keys that they see.

use cubecl::prelude::*;

use super::super::place;
use super::super::score::{FLOOR, HIDDEN, is_large};
use super::super::sight;
use super::config::BlockConfig;
use super::tile;

/// `out` and `lse` of `own` queries a cube; cubes are counted over sequences, heads and blocks of queries.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(in super::super) fn block_forward<E: Float, O: Float, N: Size>(
    q: &Tensor<Vector<E, N>>,
    k: &Tensor<Vector<E, N>>,
    v: &Tensor<Vector<E, N>>,
    table: &[i32],
    out: &mut Tensor<Vector<O, N>>,
    lse: &mut Tensor<f32>,
    scale: f32,
    scale_rest: f32,
    cap: f32,
    zero: u32,
    #[comptime] config: BlockConfig,
    #[define(E, O)] _dtypes: [ElemType; 2],
) {
    let m = comptime!(config.m());
    let n = comptime!(config.n());
    let side = comptime!(config.side);
    let share = comptime!(config.share());
    let own = comptime!(config.own);
    let step = comptime!(config.step);
    let labels = comptime!(config.labels);
    let heads = q.shape(1);
    let q_len = q.shape(2);
    let k_len = k.shape(2);
    let blocks = q_len.div_ceil(own);
    let head_at = CUBE_POS / blocks;
    if head_at >= q.shape(0) * heads {
        terminate!();
    }
    let block = CUBE_POS % blocks;
    let first = block * own;
    let b = head_at / heads;
    let h = head_at % heads;
    let g = h / (heads / k.shape(1));
    let x = UNIT_POS as usize % side;
    let y = UNIT_POS as usize / side;
    let q_rows = tile::rows::<E, N>(q, b, h);
    let k_rows = tile::rows::<E, N>(k, b, g);
    let v_rows = tile::rows::<E, N>(v, b, g);

    let mut stage = Shared::<[Vector<f32, N>]>::new_slice(comptime!(config.stage()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(own * step));
    let mut statistic = Shared::<[f32]>::new_slice(comptime!(own * side));

    let mut sums = Array::<Vector<f32, N>>::new(comptime!(m * share));
    #[unroll]
    for i in 0..comptime!(m * share) {
        sums[i] = Vector::new(0.0);
    }
    let mut largest = Array::<f32>::new(m);
    let mut total = Array::<f32>::new(m);
    let mut least = Array::<i32>::new(m);
    let mut limit = Array::<i32>::new(m);
    let mut document = Array::<i32>::new(m);
    #[unroll]
    for r in 0..m {
        let i = min(first + y * m + r, q_len - 1);
        least[r] = sight::low(table, b, i, labels);
        limit[r] = sight::high(table, b, i, k_len, labels);
        document[r] = sight::q_document(table, b, i, labels);
        largest[r] = f32::new(HIDDEN);
        total[r] = f32::new(0.0);
    }

    let begin = sight::first_key(table, first, labels);
    let end = sight::end_key(table, min(first + own, q_len), k_len, labels);
    for t in begin / step..end.div_ceil(step) {
        if sight::meet(table, b, block, t, labels) {
            let j0 = t * step;
            let mut scores = tile::multiply::<E, N>(q, &q_rows, first, k, &k_rows, j0, &mut stage, zero, config);
            #[unroll]
            for r in 0..m {
                let mut most = f32::new(HIDDEN);
                #[unroll]
                for c in 0..n {
                    let j = j0 + x + c * side;
                    let rank = sight::rank(table, b, j, k_len, labels);
                    let of_key = sight::k_document(table, b, j, k_len, labels);
                    let seen = sight::sees(rank, of_key, least[r], limit[r], document[r], labels);
                    let mut s = tile::score(scores[r * n + c], scale, cap, config);
                    s = select(seen, s, f32::new(HIDDEN));
                    scores[r * n + c] = s;
                    most = max(most, s);
                }
                statistic[(y * m + r) * side + x] = most;
            }
            sync_cube();
            let mut fade = Array::<f32>::new(m);
            #[unroll]
            for r in 0..m {
                let mut most = largest[r];
                for i in 0..side {
                    most = max(most, statistic[(y * m + r) * side + i]);
                }
                fade[r] = (largest[r] - most).exp();
                largest[r] = most;
            }
            tile::differences::<E, N>(
                q,
                &q_rows,
                first,
                k,
                &k_rows,
                j0,
                &largest,
                true,
                &mut weights,
                scale,
                scale_rest,
                zero,
                config,
            );
            #[unroll]
            for r in 0..m {
                let mut sum = f32::new(0.0);
                #[unroll]
                for c in 0..n {
                    let s = scores[r * n + c];
                    let at = (y * m + r) * step + x + c * side;
                    let mut difference = s - largest[r];
                    if comptime!(config.is_exact()) {
                        if is_large(largest[r]) {
                            difference = weights[at];
                        }
                    }
                    // What is NaN is not hidden.
                    let p = select(s <= f32::new(FLOOR), f32::new(0.0), difference.exp());
                    weights[at] = p;
                    sum += p;
                }
                total[r] = total[r] * fade[r] + sum;
                #[unroll]
                for e in 0..share {
                    sums[r * share + e] *= Vector::new(fade[r]);
                }
            }
            tile::accumulate::<E, N>(&mut sums, &weights, v, &v_rows, j0, &mut stage, config);
        }
    }

    // Each unit has summed over its own keys.
    sync_cube();
    #[unroll]
    for r in 0..m {
        statistic[(y * m + r) * side + x] = total[r];
    }
    sync_cube();
    let mut factor = Array::<f32>::new(m);
    #[unroll]
    for r in 0..m {
        let mut sum = f32::new(0.0);
        // Not unrolled: an assembler that reads all of it ahead spills.
        for i in 0..side + zero as usize {
            sum += statistic[(y * m + r) * side + i];
        }
        let seen = sum > f32::new(0.0);
        factor[r] = select(seen, f32::new(1.0) / select(seen, sum, f32::new(1.0)), f32::new(0.0));
        let i = first + y * m + r;
        if x == 0usize && i < q_len {
            // The logarithm of 0 is minus infinity on every device, where a constant is not.
            let at = place::row(&*lse, b, h, i);
            lse[at] = largest[r] + sum.ln();
        }
    }
    tile::write::<O, N>(&sums, &factor, out, b, h, first, false, config);
}
