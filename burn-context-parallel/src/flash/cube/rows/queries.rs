//! The backward kernel of the family `rows` for queries: a unit owns queries, and meets the keys that they see.

use cubecl::prelude::*;

use super::super::place;
use super::super::score::{bend, origin, probability, slope};
use super::super::sight;
use super::config::RowsConfig;
use super::tile;

/// dq of `lanes x vectors` queries a unit; units are counted over sequences, heads and blocks of queries.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(in super::super) fn rows_queries<E: Float, O: Float, N: Size>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    d_out: &Tensor<E>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    table: &[i32],
    dq: &mut Tensor<O>,
    scale: f32,
    scale_rest: f32,
    cap: f32,
    zero: u32,
    #[comptime] config: RowsConfig,
    #[define(E, O)] _dtypes: [ElemType; 2],
) {
    let vectors = comptime!(config.vectors);
    let step = comptime!(config.step);
    let labels = comptime!(config.labels);
    let own = comptime!(config.own());
    let heads = q.shape(1);
    let q_len = q.shape(2);
    let k_len = k.shape(2);
    let blocks = q_len.div_ceil(own);
    let head_at = ABSOLUTE_POS / blocks;
    if head_at >= q.shape(0) * heads {
        terminate!();
    }
    let block = ABSOLUTE_POS % blocks;
    let first = block * own;
    let b = head_at / heads;
    let h = head_at % heads;
    let g = h / (heads / k.shape(1));
    let k_base = place::head(k, b, g);
    let v_base = place::head(v, b, g);

    let mut queries = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::transpose::<E, N>(q, place::head(q, b, h), first, q_len, &mut queries, config);
    let mut given = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::transpose::<E, N>(d_out, place::head(d_out, b, h), first, q_len, &mut given, config);
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::clear::<N>(&mut sums, config);

    let mut least = Array::<Vector<i32, N>>::new(vectors);
    let mut limit = Array::<Vector<i32, N>>::new(vectors);
    let mut document = Array::<Vector<i32, N>>::new(vectors);
    tile::bounds::<N>(table, b, first, q_len, k_len, &mut least, &mut limit, &mut document, config);
    let mut whole = Array::<Vector<f32, N>>::new(vectors);
    let mut deltas = Array::<Vector<f32, N>>::new(vectors);
    let mut large = Array::<Vector<bool, N>>::new(vectors);
    let mut some_large = Array::<bool>::new(vectors);
    #[unroll]
    for w in 0..vectors {
        let mut some_lse = Vector::<f32, N>::new(0.0);
        let mut some_delta = Vector::<f32, N>::new(0.0);
        #[unroll]
        for lane in 0..N::value() {
            let i = min(first + w * N::value() + lane, q_len - 1);
            some_lse.insert(lane, origin(lse[place::row(lse, b, h, i)]));
            some_delta.insert(lane, delta[place::row(delta, b, h, i)]);
        }
        whole[w] = some_lse;
        deltas[w] = some_delta;
        large[w] = tile::large::<N>(some_lse);
        some_large[w] = tile::some_large::<N>(some_lse);
    }

    let begin = sight::first_key(table, first, labels);
    let end = sight::end_key(table, min(first + own, q_len), k_len, labels);
    let tile = comptime!(config.tile);
    for t in begin / tile..end.div_ceil(tile) {
        if sight::meet(table, b, block, t, labels) {
            let from = max(t * tile, begin) / step;
            let to = min(t * tile + tile, end).div_ceil(step);
            for at in from..to {
                let j0 = at * step;
                let k_at = tile::starts::<E>(k, k_base, j0, k_len, config);
                let v_at = tile::starts::<E>(v, v_base, j0, k_len, config);
                let mut scores = tile::multiply::<E, N>(&queries, k, &k_at, config);
                let products = tile::multiply::<E, N>(&given, v, &v_at, config);
                let mut exact = Array::<Vector<f32, N>>::new(comptime!(step * vectors));
                if comptime!(config.exact && !config.softcap) {
                    #[unroll]
                    for w in 0..vectors {
                        if some_large[w] {
                            for c in 0..step {
                                let mut high = Vector::<f32, N>::new(0.0);
                                let mut low = Vector::<f32, N>::new(0.0);
                                let k_row = k_base + min(j0 + c, k_len - 1) * k.stride(2);
                                tile::exactly::<E, N>(
                                    &queries, w, k, k_row, scale, scale_rest, zero, &mut high, &mut low, config,
                                );
                                exact[c * vectors + w] = (high - whole[w]) + low;
                            }
                        }
                    }
                }
                #[unroll]
                for c in 0..step {
                    let r = Vector::<i32, N>::new(sight::rank(table, b, j0 + c, k_len, labels));
                    let d = Vector::<i32, N>::new(sight::k_document(table, b, j0 + c, k_len, labels));
                    #[unroll]
                    for w in 0..vectors {
                        let hidden = sight::hides::<N>(&r, &d, &least[w], &limit[w], &document[w], labels);
                        let mut s = scores[c * vectors + w] * Vector::new(scale);
                        if comptime!(config.softcap) {
                            s = bend::<N>(s, cap);
                        }
                        let mut less = s - whole[w];
                        if comptime!(config.exact && !config.softcap) {
                            less = select_many(large[w], exact[c * vectors + w], less);
                        }
                        let p = select_many(hidden, Vector::new(0.0f32), probability::<N>(less));
                        let mut ds = p * (products[c * vectors + w] - deltas[w]);
                        if comptime!(config.softcap) {
                            ds *= slope::<N>(s, cap);
                        }
                        scores[c * vectors + w] = ds;
                    }
                }
                tile::accumulate::<E, N>(&mut sums, &scores, k, &k_at, &whole, false, config);
            }
        }
    }

    let mut factor = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for w in 0..vectors {
        factor[w] = Vector::new(scale);
    }
    let base = place::head(&*dq, b, h);
    tile::write::<O, N>(&sums, &factor, dq, base, first, q_len, false, config);
}
