//! The backward kernel of the family `block` for keys and values: a cube owns keys, and meets the queries that see them.

use cubecl::prelude::*;

use super::super::place;
use super::super::score::{is_large, origin, probability, slope};
use super::super::sight;
use super::config::BlockConfig;
use super::tile;

/// dk and dv of `own` keys a cube; cubes are counted over sequences, key/value heads and blocks of keys. The query heads that share a key/value
/// head are met one after the other, so that sums have one order.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(in super::super) fn block_keys<E: Float, O: Float, N: Size>(
    q: &Tensor<Vector<E, N>>,
    k: &Tensor<Vector<E, N>>,
    v: &Tensor<Vector<E, N>>,
    d_out: &Tensor<Vector<E, N>>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    table: &[i32],
    dk: &mut Tensor<Vector<O, N>>,
    dv: &mut Tensor<Vector<O, N>>,
    scale: f32,
    scale_rest: f32,
    cap: f32,
    zero: u32,
    #[comptime] onto: bool,
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
    let kv_heads = k.shape(1);
    let q_len = q.shape(2);
    let k_len = k.shape(2);
    let group = q.shape(1) / kv_heads;
    let blocks = k_len.div_ceil(own);
    let head_at = CUBE_POS / blocks;
    if head_at >= k.shape(0) * kv_heads {
        terminate!();
    }
    let block = CUBE_POS % blocks;
    let first = block * own;
    let b = head_at / kv_heads;
    let g = head_at % kv_heads;
    let x = UNIT_POS as usize % side;
    let y = UNIT_POS as usize / side;
    let k_rows = tile::rows::<E, N>(k, b, g);
    let v_rows = tile::rows::<E, N>(v, b, g);

    let mut stage = Shared::<[Vector<f32, N>]>::new_slice(comptime!(config.stage()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(own * step));

    let mut dk_sums = Array::<Vector<f32, N>>::new(comptime!(m * share));
    let mut dv_sums = Array::<Vector<f32, N>>::new(comptime!(m * share));
    #[unroll]
    for i in 0..comptime!(m * share) {
        dk_sums[i] = Vector::new(0.0);
        dv_sums[i] = Vector::new(0.0);
    }
    let mut ranks = Array::<i32>::new(m);
    let mut document = Array::<i32>::new(m);
    #[unroll]
    for r in 0..m {
        let j = first + y * m + r;
        ranks[r] = sight::rank(table, b, j, k_len, labels);
        document[r] = sight::k_document(table, b, j, k_len, labels);
    }

    let begin = sight::first_query(table, first, labels);
    let end = sight::end_query(table, min(first + own, k_len), q_len, labels);
    for of_group in 0..group {
        let h = g * group + of_group;
        let q_rows = tile::rows::<E, N>(q, b, h);
        let d_rows = tile::rows::<E, N>(d_out, b, h);
        for t in begin / step..end.div_ceil(step) {
            if sight::meet(table, b, t, block, labels) {
                let i0 = t * step;
                let scores = tile::multiply::<E, N>(k, &k_rows, first, q, &q_rows, i0, &mut stage, zero, config);
                let products = tile::multiply::<E, N>(v, &v_rows, first, d_out, &d_rows, i0, &mut stage, zero, config);
                let mut wholes = Array::<f32>::new(n);
                #[unroll]
                for c in 0..n {
                    let i = min(i0 + x + c * side, q_len - 1);
                    wholes[c] = origin(lse[place::row(lse, b, h, i)]);
                }
                tile::differences::<E, N>(
                    k,
                    &k_rows,
                    first,
                    q,
                    &q_rows,
                    i0,
                    &wholes,
                    false,
                    &mut weights,
                    scale,
                    scale_rest,
                    zero,
                    config,
                );
                let mut slopes = Array::<f32>::new(comptime!(m * n));
                #[unroll]
                for c in 0..n {
                    let asked = i0 + x + c * side;
                    let i = min(asked, q_len - 1);
                    let least = sight::low(table, b, i, labels);
                    let limit = select(asked < q_len, sight::high(table, b, i, k_len, labels), i32::new(-1));
                    let asking = sight::q_document(table, b, i, labels);
                    let row_delta = delta[place::row(delta, b, h, i)];
                    let large = is_large(wholes[c]);
                    #[unroll]
                    for r in 0..m {
                        let seen = sight::sees(ranks[r], document[r], least, limit, asking, labels);
                        let s = tile::score(scores[r * n + c], scale, cap, config);
                        let mut less = s - wholes[c];
                        let at = (y * m + r) * step + x + c * side;
                        if comptime!(config.is_exact()) {
                            if large {
                                less = weights[at];
                            }
                        }
                        let p = select(seen, probability::<Const<1>>(Vector::new(less)).extract(0usize), f32::new(0.0));
                        let mut ds = p * (products[r * n + c] - row_delta);
                        if comptime!(config.softcap) {
                            ds *= slope::<Const<1>>(Vector::new(s), cap).extract(0usize);
                        }
                        weights[at] = p;
                        slopes[r * n + c] = ds;
                    }
                }
                tile::accumulate::<E, N>(&mut dv_sums, &weights, d_out, &d_rows, i0, &mut stage, config);
                // Until all have read the probabilities.
                sync_cube();
                #[unroll]
                for r in 0..m {
                    #[unroll]
                    for c in 0..n {
                        weights[(y * m + r) * step + x + c * side] = slopes[r * n + c];
                    }
                }
                tile::accumulate::<E, N>(&mut dk_sums, &weights, q, &q_rows, i0, &mut stage, config);
            }
        }
    }

    let mut factor = Array::<f32>::new(m);
    let mut one = Array::<f32>::new(m);
    #[unroll]
    for r in 0..m {
        factor[r] = scale;
        one[r] = f32::new(1.0);
    }
    tile::write::<O, N>(&dk_sums, &factor, dk, b, g, first, onto, config);
    tile::write::<O, N>(&dv_sums, &one, dv, b, g, first, onto, config);
}
