//! The backward kernel of the family `rows` for keys and values: a unit owns keys, and meets the queries that see them.

use cubecl::prelude::*;

use super::super::score::{LARGE, bend, slope};
use super::super::sight;
use super::config::RowsConfig;
use super::tile;

/// dk and dv of `lanes x vectors` keys a unit; units are counted over sequences, key/value heads and blocks of keys. The query heads that
/// share a key/value head are met one after the other, so that sums have one order.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(in super::super) fn rows_keys<E: Float, O: Float, N: Size>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    d_out: &Tensor<E>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    table: &[i32],
    dk: &mut Tensor<O>,
    dv: &mut Tensor<O>,
    scale: f32,
    scale_rest: f32,
    cap: f32,
    zero: u32,
    #[comptime] onto: bool,
    #[comptime] config: RowsConfig,
    #[define(E, O)] _dtypes: [ElemType; 2],
) {
    let vectors = comptime!(config.vectors);
    let step = comptime!(config.step);
    let labels = comptime!(config.labels);
    let own = comptime!(config.vectors * N::value());
    let kv_heads = k.shape(1);
    let q_len = q.shape(2);
    let k_len = k.shape(2);
    let group = q.shape(1) / kv_heads;
    let blocks = k_len.div_ceil(own);
    let head_at = ABSOLUTE_POS / blocks;
    if head_at >= k.shape(0) * kv_heads {
        terminate!();
    }
    let block = ABSOLUTE_POS % blocks;
    let first = block * own;
    let b = head_at / kv_heads;
    let g = head_at % kv_heads;

    let mut keys = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::transpose::<E, N>(k, b * k.stride(0) + g * k.stride(1), first, k_len, &mut keys, config);
    let mut values = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::transpose::<E, N>(v, b * v.stride(0) + g * v.stride(1), first, k_len, &mut values, config);
    let mut dk_sums = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::clear::<N>(&mut dk_sums, config);
    let mut dv_sums = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::clear::<N>(&mut dv_sums, config);

    let mut ranks = Array::<Vector<i32, N>>::new(vectors);
    let mut document = Array::<Vector<i32, N>>::new(vectors);
    let mut one = Array::<Vector<f32, N>>::new(vectors);
    let mut factor = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for w in 0..vectors {
        let mut some_rank = Vector::<i32, N>::new(0);
        let mut some_document = Vector::<i32, N>::new(0);
        #[unroll]
        for lane in 0..N::value() {
            let j = first + w * N::value() + lane;
            some_rank.insert(lane, sight::rank(table, b, j, k_len, labels));
            some_document.insert(lane, sight::k_document(table, b, j, k_len, labels));
        }
        ranks[w] = some_rank;
        document[w] = some_document;
        one[w] = Vector::new(1.0);
        factor[w] = Vector::new(scale);
    }

    let begin = sight::first_query(table, first, q_len, labels);
    let end = sight::end_query(table, min(first + own, k_len), q_len, labels);
    let tile = comptime!(config.tile);
    for of_group in 0..group {
        let h = g * group + of_group;
        let q_base = b * q.stride(0) + h * q.stride(1);
        let d_base = b * d_out.stride(0) + h * d_out.stride(1);
        for t in begin / tile..end.div_ceil(tile) {
            if sight::meet(table, b, t, block, labels) {
                let from = max(t * tile, begin) / step;
                let to = min(t * tile + tile, end).div_ceil(step);
                for at in from..to {
                    let i0 = at * step;
                    let q_at = tile::starts::<E>(q, q_base, i0, q_len, config);
                    let d_at = tile::starts::<E>(d_out, d_base, i0, q_len, config);
                    let mut scores = tile::multiply::<E, N>(&keys, q, &q_at, config);
                    let mut products = tile::multiply::<E, N>(&values, d_out, &d_at, config);
                    #[unroll]
                    for c in 0..step {
                        let i = min(i0 + c, q_len - 1);
                        let there = i0 + c < q_len;
                        let least = Vector::<i32, N>::new(sight::low(table, b, i, labels));
                        let limit =
                            Vector::<i32, N>::new(select(there, sight::high(table, b, i, k_len, labels), i32::new(-1)));
                        let d = Vector::<i32, N>::new(sight::q_document(table, b, i, labels));
                        let row_lse = lse[b * lse.stride(0) + h * lse.stride(1) + i * lse.stride(2)];
                        let row_delta = delta[b * delta.stride(0) + h * delta.stride(1) + i * delta.stride(2)];
                        let whole = Vector::<f32, N>::new(row_lse);
                        #[unroll]
                        for w in 0..vectors {
                            let mut outside = ranks[w].less_than(&least).or(ranks[w].greater_equal(&limit));
                            if comptime!(labels.documents) {
                                outside = outside.or(d.not_equal(&document[w]));
                            }
                            let mut s = scores[c * vectors + w] * Vector::new(scale);
                            if comptime!(config.softcap) {
                                s = bend::<N>(s, cap);
                            }
                            let mut less = s - whole;
                            if comptime!(config.exact && !config.softcap) {
                                let size = row_lse.abs();
                                if size > f32::new(LARGE) && size < f32::new(1e29) {
                                    let mut some_high = Vector::<f32, N>::new(0.0);
                                    let mut some_low = Vector::<f32, N>::new(0.0);
                                    tile::exactly::<E, N>(
                                        &keys,
                                        w,
                                        q,
                                        q_at[c],
                                        scale,
                                        scale_rest,
                                        zero,
                                        &mut some_high,
                                        &mut some_low,
                                        config,
                                    );
                                    less = (some_high - whole) + some_low;
                                }
                            }
                            // No probability is beyond 1 but by rounding: what overflows is hidden.
                            let p = select_many(outside, Vector::new(0.0f32), min(less, Vector::new(1.0f32)).exp());
                            let mut ds = p * (products[c * vectors + w] - Vector::new(row_delta));
                            if comptime!(config.softcap) {
                                ds *= slope::<N>(s, cap);
                            }
                            scores[c * vectors + w] = ds;
                            products[c * vectors + w] = p;
                        }
                    }
                    tile::accumulate::<E, N>(&mut dk_sums, &scores, q, &q_at, &one, false, config);
                    tile::accumulate::<E, N>(&mut dv_sums, &products, d_out, &d_at, &one, false, config);
                }
            }
        }
    }
    tile::write::<O, N>(&dk_sums, &factor, dk, b * dk.stride(0) + g * dk.stride(1), first, k_len, onto, config);
    tile::write::<O, N>(&dv_sums, &one, dv, b * dv.stride(0) + g * dv.stride(1), first, k_len, onto, config);
}
