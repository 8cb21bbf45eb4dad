//! The backward kernel of the family `rows` for keys and values: a unit owns keys, and meets the queries that see them.

use cubecl::prelude::*;

use super::super::place;
use super::super::score::{bend, is_large, origin, probability, slope};
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
    let own = comptime!(config.own());
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
    tile::transpose::<E, N>(k, place::head(k, b, g), first, k_len, &mut keys, config);
    let mut values = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::transpose::<E, N>(v, place::head(v, b, g), first, k_len, &mut values, config);
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

    let begin = sight::first_query(table, first, labels);
    let end = sight::end_query(table, min(first + own, k_len), q_len, labels);
    let tile = comptime!(config.tile);
    for of_group in 0..group {
        let h = g * group + of_group;
        let q_base = place::head(q, b, h);
        let d_base = place::head(d_out, b, h);
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
                    let mut exact = Array::<Vector<f32, N>>::new(comptime!(step * vectors));
                    if comptime!(config.exact && !config.softcap) {
                        for c in 0..step {
                            let i = min(i0 + c, q_len - 1);
                            let row_lse = lse[place::row(lse, b, h, i)];
                            if is_large(row_lse) {
                                #[unroll]
                                for w in 0..vectors {
                                    let mut high = Vector::<f32, N>::new(0.0);
                                    let mut low = Vector::<f32, N>::new(0.0);
                                    let q_row = q_base + i * q.stride(2);
                                    tile::exactly::<E, N>(
                                        &keys, w, q, q_row, scale, scale_rest, zero, &mut high, &mut low, config,
                                    );
                                    exact[c * vectors + w] = (high - Vector::new(row_lse)) + low;
                                }
                            }
                        }
                    }
                    #[unroll]
                    for c in 0..step {
                        let i = min(i0 + c, q_len - 1);
                        let there = i0 + c < q_len;
                        let least = Vector::<i32, N>::new(sight::low(table, b, i, labels));
                        let limit =
                            Vector::<i32, N>::new(select(there, sight::high(table, b, i, k_len, labels), i32::new(-1)));
                        let d = Vector::<i32, N>::new(sight::q_document(table, b, i, labels));
                        let row_lse = origin(lse[place::row(lse, b, h, i)]);
                        let row_delta = delta[place::row(delta, b, h, i)];
                        let whole = Vector::<f32, N>::new(row_lse);
                        let large = is_large(row_lse);
                        #[unroll]
                        for w in 0..vectors {
                            let hidden = sight::hides::<N>(&ranks[w], &document[w], &least, &limit, &d, labels);
                            let mut s = scores[c * vectors + w] * Vector::new(scale);
                            if comptime!(config.softcap) {
                                s = bend::<N>(s, cap);
                            }
                            let mut less = s - whole;
                            if comptime!(config.exact && !config.softcap) {
                                less = select(large, exact[c * vectors + w], less);
                            }
                            let p = select_many(hidden, Vector::new(0.0f32), probability::<N>(less));
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
    let dk_base = place::head(&*dk, b, g);
    let dv_base = place::head(&*dv, b, g);
    tile::write::<O, N>(&dk_sums, &factor, dk, dk_base, first, k_len, onto, config);
    tile::write::<O, N>(&dv_sums, &one, dv, dv_base, first, k_len, onto, config);
}
