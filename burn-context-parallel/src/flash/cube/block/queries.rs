//! The backward kernel of the family `block` for queries: a cube owns queries, and meets the keys that they see.

use cubecl::prelude::*;

use super::super::place;
use super::super::score::{is_large, origin, probability, slope};
use super::super::sight;
use super::config::BlockConfig;
use super::tile;

/// dq of `own` queries a cube; cubes are counted over sequences, heads and blocks of queries.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(in super::super) fn block_queries<E: Float, O: Float, N: Size>(
    q: &Tensor<Vector<E, N>>,
    k: &Tensor<Vector<E, N>>,
    v: &Tensor<Vector<E, N>>,
    d_out: &Tensor<Vector<E, N>>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    table: &[i32],
    dq: &mut Tensor<Vector<O, N>>,
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
    let d_rows = tile::rows::<E, N>(d_out, b, h);
    let k_rows = tile::rows::<E, N>(k, b, g);
    let v_rows = tile::rows::<E, N>(v, b, g);

    let mut stage = Shared::<[Vector<f32, N>]>::new_slice(comptime!(config.stage()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(own * step));

    let mut sums = Array::<Vector<f32, N>>::new(comptime!(m * share));
    #[unroll]
    for i in 0..comptime!(m * share) {
        sums[i] = Vector::new(0.0);
    }
    let mut whole = Array::<f32>::new(m);
    let mut deltas = Array::<f32>::new(m);
    let mut least = Array::<i32>::new(m);
    let mut limit = Array::<i32>::new(m);
    let mut document = Array::<i32>::new(m);
    #[unroll]
    for r in 0..m {
        let i = min(first + y * m + r, q_len - 1);
        least[r] = sight::low(table, b, i, labels);
        limit[r] = sight::high(table, b, i, k_len, labels);
        document[r] = sight::q_document(table, b, i, labels);
        whole[r] = origin(lse[place::row(lse, b, h, i)]);
        deltas[r] = delta[place::row(delta, b, h, i)];
    }

    let begin = sight::first_key(table, first, labels);
    let end = sight::end_key(table, min(first + own, q_len), k_len, labels);
    for t in begin / step..end.div_ceil(step) {
        if sight::meet(table, b, block, t, labels) {
            let j0 = t * step;
            let scores = tile::multiply::<E, N>(q, &q_rows, first, k, &k_rows, j0, &mut stage, zero, config);
            let products = tile::multiply::<E, N>(d_out, &d_rows, first, v, &v_rows, j0, &mut stage, zero, config);
            tile::differences::<E, N>(
                q,
                &q_rows,
                first,
                k,
                &k_rows,
                j0,
                &whole,
                true,
                &mut weights,
                scale,
                scale_rest,
                zero,
                config,
            );
            #[unroll]
            for r in 0..m {
                let large = is_large(whole[r]);
                #[unroll]
                for c in 0..n {
                    let j = j0 + x + c * side;
                    let rank = sight::rank(table, b, j, k_len, labels);
                    let of_key = sight::k_document(table, b, j, k_len, labels);
                    let seen = sight::sees(rank, of_key, least[r], limit[r], document[r], labels);
                    let s = tile::score(scores[r * n + c], scale, cap, config);
                    let mut less = s - whole[r];
                    let at = (y * m + r) * step + x + c * side;
                    if comptime!(config.is_exact()) {
                        if large {
                            less = weights[at];
                        }
                    }
                    let p = select(seen, probability::<Const<1>>(Vector::new(less)).extract(0usize), f32::new(0.0));
                    let mut ds = p * (products[r * n + c] - deltas[r]);
                    if comptime!(config.softcap) {
                        ds *= slope::<Const<1>>(Vector::new(s), cap).extract(0usize);
                    }
                    weights[at] = ds;
                }
            }
            tile::accumulate::<E, N>(&mut sums, &weights, k, &k_rows, j0, &mut stage, config);
        }
    }

    let mut factor = Array::<f32>::new(m);
    #[unroll]
    for r in 0..m {
        factor[r] = scale;
    }
    tile::write::<O, N>(&sums, &factor, dq, b, h, first, false, config);
}
