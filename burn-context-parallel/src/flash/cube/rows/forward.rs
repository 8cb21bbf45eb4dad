//! The forward kernel of the family `rows`: a unit owns queries, and meets the keys that they see.

use cubecl::prelude::*;

use super::super::place;
use super::super::score::{HIDDEN, bend};
use super::super::sight;
use super::config::RowsConfig;
use super::tile;

/// `out` and `lse` of `lanes x vectors` queries a unit; units are counted over sequences, heads and blocks of queries.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(in super::super) fn rows_forward<E: Float, O: Float, N: Size>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    table: &[i32],
    out: &mut Tensor<O>,
    lse: &mut Tensor<f32>,
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
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(config.dim * vectors));
    tile::clear::<N>(&mut sums, config);

    let mut least = Array::<Vector<i32, N>>::new(vectors);
    let mut limit = Array::<Vector<i32, N>>::new(vectors);
    let mut document = Array::<Vector<i32, N>>::new(vectors);
    tile::bounds::<N>(table, b, first, q_len, k_len, &mut least, &mut limit, &mut document, config);
    let mut largest = Array::<Vector<f32, N>>::new(vectors);
    let mut total = Array::<Vector<f32, N>>::new(vectors);
    let mut fade = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for w in 0..vectors {
        largest[w] = Vector::new(HIDDEN);
        total[w] = Vector::new(0.0);
    }

    let begin = sight::first_key(table, first, labels);
    let end = sight::end_key(table, min(first + own, q_len), k_len, labels);
    let tile = comptime!(config.tile);
    for t in begin / tile..end.div_ceil(tile) {
        if sight::meet(table, b, block, t, labels) {
            // Steps start at multiples, whoever asks: the order of a row's sums must not depend on its neighbours.
            let from = max(t * tile, begin) / step;
            let to = min(t * tile + tile, end).div_ceil(step);
            for at in from..to {
                let j0 = at * step;
                let k_at = tile::starts::<E>(k, k_base, j0, k_len, config);
                let v_at = tile::starts::<E>(v, v_base, j0, k_len, config);
                let mut scores = tile::multiply::<E, N>(&queries, k, &k_at, config);
                let mut hidden = Array::<Vector<bool, N>>::new(comptime!(step * vectors));
                #[unroll]
                for c in 0..step {
                    let r = Vector::<i32, N>::new(sight::rank(table, b, j0 + c, k_len, labels));
                    let d = Vector::<i32, N>::new(sight::k_document(table, b, j0 + c, k_len, labels));
                    #[unroll]
                    for w in 0..vectors {
                        hidden[c * vectors + w] = sight::hides::<N>(&r, &d, &least[w], &limit[w], &document[w], labels);
                    }
                }
                let mut after = Array::<Vector<f32, N>>::new(vectors);
                #[unroll]
                for w in 0..vectors {
                    let mut most = largest[w];
                    #[unroll]
                    for c in 0..step {
                        let mut s = scores[c * vectors + w] * Vector::new(scale);
                        if comptime!(config.softcap) {
                            s = bend::<N>(s, cap);
                        }
                        s = select_many(hidden[c * vectors + w], Vector::new(HIDDEN), s);
                        scores[c * vectors + w] = s;
                        most = max(most, s);
                    }
                    after[w] = most;
                    #[unroll]
                    for c in 0..step {
                        scores[c * vectors + w] -= most;
                    }
                }
                if comptime!(config.exact) {
                    #[unroll]
                    for w in 0..vectors {
                        if tile::some_large::<N>(after[w]) {
                            // Row by row: another row's scores must not change a bit of this one's.
                            let large = tile::large::<N>(after[w]);
                            let mut exact = Array::<Vector<f32, N>>::new(step);
                            for c in 0..step {
                                let mut some_high = Vector::<f32, N>::new(0.0);
                                let mut some_low = Vector::<f32, N>::new(0.0);
                                let k_row = k_base + min(j0 + c, k_len - 1) * k.stride(2);
                                tile::exactly::<E, N>(
                                    &queries,
                                    w,
                                    k,
                                    k_row,
                                    scale,
                                    scale_rest,
                                    zero,
                                    &mut some_high,
                                    &mut some_low,
                                    config,
                                );
                                if comptime!(config.softcap) {
                                    some_high = bend::<N>(some_high, cap);
                                    some_low = Vector::new(0.0);
                                }
                                // What it is measured from need not be the largest one, only near: it cancels.
                                exact[c] = (some_high - after[w]) + some_low;
                            }
                            #[unroll]
                            for c in 0..step {
                                scores[c * vectors + w] = select_many(large, exact[c], scores[c * vectors + w]);
                            }
                        }
                    }
                }
                #[unroll]
                for w in 0..vectors {
                    let less = (largest[w] - after[w]).exp();
                    let mut sum = total[w] * less;
                    #[unroll]
                    for c in 0..step {
                        let p = select_many(hidden[c * vectors + w], Vector::new(0.0), scores[c * vectors + w].exp());
                        scores[c * vectors + w] = p;
                        sum += p;
                    }
                    largest[w] = after[w];
                    total[w] = sum;
                    fade[w] = less;
                }
                tile::accumulate::<E, N>(&mut sums, &scores, v, &v_at, &fade, true, config);
            }
        }
    }

    let mut factor = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for w in 0..vectors {
        let seen = total[w].greater_than(&Vector::new(0.0f32));
        let divisor = select_many(seen, total[w], Vector::new(1.0f32));
        factor[w] = select_many(seen, Vector::new(1.0f32) / divisor, Vector::new(0.0f32));
        #[unroll]
        for lane in 0..N::value() {
            let i = first + w * N::value() + lane;
            if i < q_len {
                let at = place::row(&*lse, b, h, i);
                // The logarithm of 0 is minus infinity on every device, where a constant is not.
                lse[at] = largest[w].extract(lane) + total[w].extract(lane).ln();
            }
        }
    }
    let base = place::head(&*out, b, h);
    tile::write::<O, N>(&sums, &factor, out, base, first, q_len, false, config);
}
