//! The forward kernel: one task per batch, query head and tile of queries.
//!
//! Scores are held transposed, `s^T [keys, queries]`: queries along the registers. Then the softmax runs down columns
//! without a sum across a register, the queries are transposed once per task, and keys and values are read where they
//! lie: both products have the side that needs whole rows already in whole rows.
//!
//! ```text
//! for each tile of keys that some query of the tile sees:
//!     s^T  = k (scale q)^T             bent by the softcap, hidden ones -inf
//!     m'   = max(m, max over keys)     the running maximum of each query
//!     p^T  = exp(s^T - m')
//!     l    = l exp(m - m') + sum over keys of p^T
//!     o    = o exp(m - m') + p v
//! out = o / l,  lse = m + log(l)
//! ```

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::gemm::{Matrix, gemm, load, store};
use super::real::{LINE, Real, Stored};
use super::view::View;
use super::wide::{Wide, needed};
use super::work::{K_TILE, Q_TILE, Scratch, run, score_row};
use crate::flash::mask::{Cover, Mask};
use crate::flash::{FlashOptions, FlashShape};

/// One tile of queries, and where its results go.
struct Task<'a, O: Stored> {
    b: usize,
    head: usize,
    first: usize,
    out: &'a mut [O],
    lse: &'a mut [O::Real],
}

/// Bytes of one worker's scratch.
pub(super) fn scratch_bytes(head_dim: usize, element: usize) -> usize {
    let pad = LINE / element;
    let (q, d) = (score_row(Q_TILE, pad), head_dim.next_multiple_of(pad));
    element * (head_dim * q + K_TILE * q + Q_TILE * d + 5 * q + 2 * K_TILE * d)
}

/// Bytes of the list of tasks.
pub(super) fn task_bytes(shape: &FlashShape) -> usize {
    size_of::<Task<'_, f32>>() * shape.batch * shape.q_heads * shape.q_len.div_ceil(Q_TILE)
}

/// Fills `out [B, H, Sq, D]` and `lse [B, H, Sq]`, which start as zeros.
pub(super) fn forward<E: Stored, O: Stored<Real = E::Real>>(
    shape: &FlashShape,
    [q, k, v]: [View<'_, E>; 3],
    options: &FlashOptions,
    out: &mut [O],
    lse: &mut [E::Real],
) {
    let &FlashShape { q_heads, q_len, k_len, head_dim: d, .. } = shape;
    if lse.is_empty() {
        return;
    }
    if d == 0 || k_len == 0 {
        // Without dimensions every score is 0; without keys there is none.
        for (i, lse) in lse.iter_mut().enumerate() {
            let (b, i) = (i / (q_heads * q_len), i % q_len);
            let seen = (0..k_len).filter(|j| options.sees(b, i, *j)).count();
            *lse = E::Real::from_f64((seen as f64).ln());
        }
        return;
    }
    let mut tasks = Vec::with_capacity(lse.len() / q_len * q_len.div_ceil(Q_TILE));
    for (bh, (out, lse)) in out.chunks_mut(q_len * d).zip(lse.chunks_mut(q_len)).enumerate() {
        let (b, head) = (bh / q_heads, bh % q_heads);
        let tiles = out.chunks_mut(Q_TILE * d).zip(lse.chunks_mut(Q_TILE)).enumerate();
        tasks.extend(tiles.map(|(t, (out, lse))| Task { b, head, first: t * Q_TILE, out, lse }));
    }
    // The latest queries see most keys: they go first.
    tasks.sort_unstable_by_key(|task| std::cmp::Reverse((task.first, task.b, task.head)));
    let scale = E::Real::from_f64(options.resolved_scale(d));
    let mask = &Mask::new(options, [q_len, k_len], [Q_TILE, K_TILE]);
    run(tasks, scratch_bytes(d, size_of::<E::Real>()), |task, scratch| {
        Arch::new().dispatch(Tile { shape, q, k, v, scale, options, mask, task, scratch });
    });
}

struct Tile<'a, 'b, E: Stored, O: Stored> {
    shape: &'a FlashShape,
    q: View<'a, E>,
    k: View<'a, E>,
    v: View<'a, E>,
    scale: E::Real,
    options: &'a FlashOptions,
    mask: &'a Mask<'a>,
    task: Task<'b, O>,
    scratch: &'a mut Scratch,
}

impl<E: Stored, O: Stored<Real = E::Real>> WithSimd for Tile<'_, '_, E, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, s: S) {
        let Self { shape, q, k: k_view, v, scale, options, mask, task, scratch } = self;
        let Task { b, head, first, out, lse } = task;
        let d = shape.head_dim;
        let pad = E::Real::PAD;
        let (width, padded) = (score_row(Q_TILE, pad), d.next_multiple_of(pad));
        let mut parts = scratch.parts::<E::Real>();
        let q_t = parts.take(d * width);
        let scores = parts.take(K_TILE * width);
        let sums = parts.take(Q_TILE * padded);
        let [max, total, shrink, max_before, total_before] = [0; 5].map(|_| parts.take(width));
        let [k_copy, v_copy] = [0; 2].map(|_| parts.take(K_TILE * padded));

        let rows = lse.len();
        let columns = rows.next_multiple_of(E::Real::lanes::<S>());
        q.transpose((b, head), first, rows, scale, width, q_t);
        sums.fill(E::Real::ZERO);
        max.fill(E::Real::NEG_INFINITY);
        total.fill(E::Real::ZERO);

        let group = (b, head / shape.group());
        let queries = first..first + rows;
        let mut wide: Option<Wide<E::Real>> = None;
        for tile in tiles(mask.keys(&queries), K_TILE) {
            let cover = mask.cover(b, &queries, &tile);
            if cover == Cover::Empty {
                continue;
            }
            let (start, keys) = (tile.start, tile.len());
            let (k, v) = (k_view.tile(group, start, keys, k_copy), v.tile(group, start, keys, v_copy));
            let (q_t, p_t) = (Matrix::rows(q_t, width), scores.as_mut_ptr());
            // SAFETY: the tile of keys has `keys` rows of D, q_t D rows of `width` >= columns, scores K_TILE such rows.
            unsafe { gemm(s, [keys, columns, d], k, q_t, p_t, width, false) };
            if let Some(cap) = options.softcap {
                bend(s, scores, width, columns, keys, E::Real::from_f64(cap));
            }
            if cover == Cover::Part {
                hide(mask, b, scores, width, columns, &queries, &tile);
            }
            max_before.copy_from_slice(max);
            total_before.copy_from_slice(total);
            softmax(s, scores, width, columns, keys, [max, total, shrink]);
            if needed::<E>(&max[..rows]) {
                let make = || Wide::new(&q, (b, head), first, rows, options.resolved_scale(d), width);
                let wide = wide.get_or_insert_with(make);
                wide.multiply(s, &k_view, group, start, keys, columns);
                if let Some(cap) = options.softcap {
                    bend(s, &mut wide.scores, width, columns, keys, cap);
                }
                if cover == Cover::Part {
                    hide(mask, b, &mut wide.scores, width, columns, &queries, &tile);
                }
                wide.softmax(s, scores, columns, keys, [max_before, total_before], [max, total, shrink]);
            }
            for (row, shrink) in sums.chunks_exact_mut(padded).zip(&shrink[..rows]) {
                // Seldom after the first tiles: the maximum of a row settles.
                if *shrink != E::Real::from_f64(1.0) {
                    row.iter_mut().for_each(|x| *x = x.times(*shrink));
                }
            }
            let p = Matrix::rows(scores, width).transposed();
            // SAFETY: p has at least `rows` rows of `keys`; the tile of values `keys` rows of whole registers, as sums has.
            unsafe { gemm(s, [rows, padded, keys], p, v, sums.as_mut_ptr(), padded, true) };
        }

        for (i, (out, row)) in out.chunks_exact_mut(d).zip(sums.chunks_exact_mut(padded)).enumerate() {
            if total[i] == E::Real::ZERO {
                lse[i] = E::Real::NEG_INFINITY; // sees no key; its sums are zeros
            } else {
                lse[i] = max[i].plus(total[i].ln());
                let weight = total[i].reciprocal();
                row.iter_mut().for_each(|x| *x = x.times(weight));
            }
            O::narrow_row(&row[..d], out);
        }
    }
}

/// The tiles that hold `range`, the first from a multiple of their size on.
pub(super) fn tiles(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let first = range.start / size * size;
    (first..range.end).step_by(size).map(move |start| start..(start + size).min(range.end))
}

/// Scores below a cap: `cap tanh(s / cap)`.
#[inline(always)]
pub(super) fn bend<R: Real, S: Simd>(s: S, scores: &mut [R], width: usize, columns: usize, rows: usize, cap: R) {
    let (inverse, cap) = (R::splat(s, cap.reciprocal()), R::splat(s, cap));
    for row in scores.chunks_exact_mut(width).take(rows) {
        for at in (0..columns).step_by(R::lanes::<S>()) {
            assert!(at + R::lanes::<S>() <= row.len());
            // SAFETY: by the assert.
            unsafe {
                let at = row.as_mut_ptr().add(at);
                store(at, R::mul(s, cap, R::tanh(s, R::mul(s, load(at), inverse))));
            }
        }
    }
}

/// Overwrites the scores `s^T [keys, queries]` of hidden pairs with -inf.
#[inline(always)]
pub(super) fn hide<R: Real>(
    mask: &Mask<'_>,
    sequence: usize,
    scores: &mut [R],
    width: usize,
    columns: usize,
    queries: &Range<usize>,
    keys: &Range<usize>,
) {
    for (j, row) in keys.clone().zip(scores.chunks_exact_mut(width)) {
        mask.hide_queries(sequence, j, queries, &mut row[..columns], R::NEG_INFINITY);
    }
}

/// `s^T` becomes `exp(s^T - m')`; updates the maximum and the total, and tells by how much older sums shrink.
#[inline(always)]
fn softmax<R: Real, S: Simd>(
    s: S,
    scores: &mut [R],
    width: usize,
    columns: usize,
    keys: usize,
    [max, total, shrink]: [&mut [R]; 3],
) {
    let lanes = R::lanes::<S>();
    assert!(keys * width <= scores.len() && columns <= width);
    assert!(columns <= max.len() && columns <= total.len() && columns <= shrink.len());
    for c in (0..columns).step_by(lanes) {
        // SAFETY: c + lanes <= columns, which the asserts hold against every slice.
        unsafe {
            let column = scores.as_mut_ptr().add(c);
            let before: R::Lanes<S> = load(max.as_ptr().add(c));
            // Four chains, because each maximum waits for the one before.
            let mut most = [before; 4];
            let mut j = 0;
            while j + 4 <= keys {
                for (i, most) in most.iter_mut().enumerate() {
                    *most = R::max(s, *most, load(column.add((j + i) * width)));
                }
                j += 4;
            }
            for j in j..keys {
                most[0] = R::max(s, most[0], load(column.add(j * width)));
            }
            let after = R::max(s, R::max(s, most[0], most[1]), R::max(s, most[2], most[3]));
            // -inf - -inf is not a number: where nothing is seen yet, measure from 0.
            let origin = R::replace(s, after, R::NEG_INFINITY, R::ZERO);
            let fade = R::exp(s, R::sub(s, before, origin));
            let mut sum = R::mul(s, load(total.as_ptr().add(c)), fade);
            for j in 0..keys {
                let at = column.add(j * width);
                let p = R::exp(s, R::sub(s, load(at), origin));
                sum = R::add(s, sum, p);
                store(at, p);
            }
            store(max.as_mut_ptr().add(c), after);
            store(total.as_mut_ptr().add(c), sum);
            store(shrink.as_mut_ptr().add(c), fade);
        }
    }
}
