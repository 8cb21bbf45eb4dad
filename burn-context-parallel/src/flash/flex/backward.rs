//! The backward kernels: probabilities are computed again from the log-sum-exp, tile by tile.
//!
//! ```text
//! p  = exp(scale q k^T - lse)            ds = p (d_out v^T - delta)
//! with a softcap  s = cap tanh(scale q k^T / cap), p = exp(s - lse), ds = p (d_out v^T - delta) (1 - (s / cap)^2)
//! dq = scale ds k                        dk = scale ds^T q            dv = p^T d_out
//! ```
//!
//! Two passes, each the owner of what it writes: one task per tile of queries for dq, one per tile of keys for dk and dv
//! (which sum over the query heads that share them). Scores are computed in both: 7 products in place of 5, for results
//! that no thread count changes, without a buffer per thread or an atomic addition.

use pulp::{Arch, Simd, WithSimd};

use super::forward::{bend, hide, tiles};
use super::gemm::{Matrix, gemm, load, store};
use super::real::{LINE, Real, Stored};
use super::view::View;
use super::wide::{Wide, wide_lse};
use super::work::{K_TILE, Q_TILE, Scratch, run, score_row};
use crate::flash::mask::{Cover, Mask};
use crate::flash::{FlashOptions, FlashShape};

/// What both passes read.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a, E: Stored> {
    pub(super) shape: &'a FlashShape,
    pub(super) q: View<'a, E>,
    pub(super) k: View<'a, E>,
    pub(super) v: View<'a, E>,
    pub(super) d_out: View<'a, E>,
    /// `[B, H, Sq]`, contiguous.
    pub(super) lse: &'a [E::Real],
    /// `[B, H, Sq]`, contiguous.
    pub(super) delta: &'a [E::Real],
    pub(super) options: &'a FlashOptions,
    pub(super) mask: &'a Mask<'a>,
}

impl<E: Stored> Inputs<'_, E> {
    fn cap(&self) -> Option<E::Real> {
        self.options.softcap.map(E::Real::from_f64)
    }

    /// What the square of a bent score is multiplied by: `1 / cap^2`.
    #[inline(always)]
    fn bent<S: Simd>(&self, s: S) -> Option<<E::Real as Real>::Lanes<S>> {
        self.options.softcap.map(|cap| E::Real::splat(s, E::Real::from_f64(1.0 / (cap * cap))))
    }

    fn wide(&self, x: &View<'_, E>, at: (usize, usize), first: usize, rows: usize, width: usize) -> Wide<E::Real> {
        Wide::new(x, at, first, rows, self.options.resolved_scale(self.shape.head_dim), width)
    }

    fn scale(&self) -> E::Real {
        E::Real::from_f64(self.options.resolved_scale(self.shape.head_dim))
    }

    /// Rows of lse and delta of one head.
    fn statistics(&self, b: usize, head: usize, first: usize, rows: usize) -> [&[E::Real]; 2] {
        let at = (b * self.shape.q_heads + head) * self.shape.q_len + first;
        [&self.lse[at..at + rows], &self.delta[at..at + rows]]
    }
}

/// What to subtract from scores so that a row without keys gets `exp(s - inf) = 0` and not infinity.
#[inline(always)]
fn origin<R: Real>(lse: R) -> R {
    if lse == R::NEG_INFINITY { R::INFINITY } else { lse }
}

/// Bytes of one worker's scratch in the first and in the second pass.
pub(super) fn scratch_bytes(head_dim: usize, element: usize) -> [usize; 2] {
    let pad = LINE / element;
    let d = head_dim.next_multiple_of(pad);
    let pass = |own: usize, other: usize, results: usize| {
        let row = score_row(own, pad);
        element * (2 * head_dim * row + 2 * other * row + results * own * d + 2 * other * d)
    };
    [pass(Q_TILE, K_TILE, 1) + element * 2 * score_row(Q_TILE, pad), pass(K_TILE, Q_TILE, 2)]
}

/// Bytes of the longer of the two lists of tasks.
pub(super) fn task_bytes(shape: &FlashShape) -> usize {
    let queries = shape.q_heads * shape.q_len.div_ceil(Q_TILE);
    let keys = shape.kv_heads * shape.k_len.div_ceil(K_TILE);
    shape.batch * (queries * size_of::<QueryTask<'_, f32>>()).max(keys * size_of::<KeyTask<'_, f32>>())
}

struct QueryTask<'a, E> {
    b: usize,
    head: usize,
    first: usize,
    dq: &'a mut [E],
}

/// Adds to dq `[B, H, Sq, D]`. No dimension is 0.
pub(super) fn queries<E: Stored, O: Stored<Real = E::Real>>(inputs: Inputs<'_, E>, dq: &mut [O]) {
    let &FlashShape { q_heads, q_len, head_dim: d, .. } = inputs.shape;
    let mut tasks = Vec::with_capacity(dq.len() / (q_len * d) * q_len.div_ceil(Q_TILE));
    for (bh, dq) in dq.chunks_mut(q_len * d).enumerate() {
        let (b, head) = (bh / q_heads, bh % q_heads);
        let tiles = dq.chunks_mut(Q_TILE * d).enumerate();
        tasks.extend(tiles.map(|(t, dq)| QueryTask { b, head, first: t * Q_TILE, dq }));
    }
    tasks.sort_unstable_by_key(|task| std::cmp::Reverse((task.first, task.b, task.head)));
    run(tasks, scratch_bytes(d, size_of::<E::Real>())[0], |task, scratch| {
        Arch::new().dispatch(QueryTile { inputs, task, scratch });
    });
}

struct QueryTile<'a, 'b, E: Stored, O> {
    inputs: Inputs<'a, E>,
    task: QueryTask<'b, O>,
    scratch: &'a mut Scratch,
}

impl<E: Stored, O: Stored<Real = E::Real>> WithSimd for QueryTile<'_, '_, E, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, s: S) {
        let Self { inputs, task: QueryTask { b, head, first, dq }, scratch } = self;
        let Inputs { shape, mask, .. } = inputs;
        let (cap, bent) = (inputs.cap(), inputs.bent(s));
        let d = shape.head_dim;
        let pad = E::Real::PAD;
        let (width, padded) = (score_row(Q_TILE, pad), d.next_multiple_of(pad));
        let mut parts = scratch.parts::<E::Real>();
        let [q_t, d_out_t] = [0; 2].map(|_| parts.take(d * width));
        let [scores, d_scores] = [0; 2].map(|_| parts.take(K_TILE * width));
        let sums = parts.take(Q_TILE * padded);
        let [lse, delta] = [0; 2].map(|_| parts.take(width));
        let [k_copy, v_copy] = [0; 2].map(|_| parts.take(K_TILE * padded));

        let rows = dq.len() / d;
        let columns = rows.next_multiple_of(E::Real::lanes::<S>());
        inputs.q.transpose((b, head), first, rows, inputs.scale(), width, q_t);
        inputs.d_out.transpose((b, head), first, rows, E::Real::from_f64(1.0), width, d_out_t);
        sums.fill(E::Real::ZERO);
        // Columns beyond the last query come out as exp(0 - inf) = 0.
        lse.fill(E::Real::INFINITY);
        delta.fill(E::Real::ZERO);
        let [from_lse, from_delta] = inputs.statistics(b, head, first, rows);
        let own: Vec<_> = from_lse.iter().map(|lse| wide_lse::<E>(*lse, inputs.options.softcap)).collect();
        let mut wide = own.iter().any(Option::is_some).then(|| inputs.wide(&inputs.q, (b, head), first, rows, width));
        for ((to, from), own) in lse.iter_mut().zip(from_lse).zip(&own) {
            *to = if own.is_some() { E::Real::ZERO } else { origin(*from) };
        }
        delta[..rows].copy_from_slice(from_delta);

        let group = (b, head / shape.group());
        let queries = first..first + rows;
        for tile in tiles(mask.keys(&queries), K_TILE) {
            let cover = mask.cover(b, &queries, &tile);
            if cover == Cover::Empty {
                continue;
            }
            let (start, keys) = (tile.start, tile.len());
            let k = inputs.k.tile(group, start, keys, k_copy);
            let v = inputs.v.tile(group, start, keys, v_copy);
            let (q_t, d_out_t) = (Matrix::rows(q_t, width), Matrix::rows(d_out_t, width));
            // SAFETY: both tiles have `keys` rows of D; the transposed ones D rows of `width` >= columns; both results
            // K_TILE such rows.
            unsafe {
                gemm(s, [keys, columns, d], k, q_t, scores.as_mut_ptr(), width, false);
                gemm(s, [keys, columns, d], v, d_out_t, d_scores.as_mut_ptr(), width, false);
            }
            if let Some(cap) = cap {
                bend(s, scores, width, columns, keys, cap);
            }
            if let Some(wide) = &mut wide {
                wide.multiply(s, &inputs.k, group, start, keys, columns);
                wide.replace_columns(scores, keys, &own);
            }
            if cover == Cover::Part {
                hide(mask, b, scores, width, columns, &queries, &tile);
            }
            assert!(keys * width <= scores.len().min(d_scores.len()));
            for c in (0..columns).step_by(E::Real::lanes::<S>()) {
                // SAFETY: c + lanes <= columns <= width, and rows up to `keys` by the assert.
                unsafe {
                    let lse = load(lse.as_ptr().add(c));
                    let delta = load(delta.as_ptr().add(c));
                    for j in 0..keys {
                        let at = scores.as_mut_ptr().add(j * width + c);
                        let dp = load(d_scores.as_ptr().add(j * width + c));
                        store(at, score_gradient::<E::Real, S>(s, load(at), dp, lse, delta, bent).1);
                    }
                }
            }
            let ds = Matrix::rows(scores, width).transposed();
            // SAFETY: ds has at least `rows` rows of `keys`; the tile of keys `keys` rows of whole registers, as sums has.
            unsafe { gemm(s, [rows, padded, keys], ds, k, sums.as_mut_ptr(), padded, true) };
        }
        write(sums, padded, inputs.scale(), d, dq);
    }
}

/// `(p, ds)` of one register of scores.
#[inline(always)]
fn score_gradient<R: Real, S: Simd>(
    s: S,
    score: R::Lanes<S>,
    dp: R::Lanes<S>,
    lse: R::Lanes<S>,
    delta: R::Lanes<S>,
    bent: Option<R::Lanes<S>>,
) -> (R::Lanes<S>, R::Lanes<S>) {
    let p = R::exp(s, R::sub(s, score, lse));
    let ds = R::mul(s, p, R::sub(s, dp, delta));
    let Some(bent) = bent else { return (p, ds) };
    // Hidden scores are -inf: their slope is 0, not 1 - inf.
    let slope = R::sub(s, R::splat(s, R::from_f64(1.0)), R::mul(s, R::mul(s, score, score), bent));
    (p, R::mul(s, ds, R::max(s, slope, R::splat(s, R::ZERO))))
}

/// Scaled sums, added to a result.
#[inline(always)]
fn write<E: Stored>(sums: &mut [E::Real], padded: usize, scale: E::Real, d: usize, to: &mut [E]) {
    for (to, row) in to.chunks_exact_mut(d).zip(sums.chunks_exact_mut(padded)) {
        row.iter_mut().for_each(|x| *x = x.times(scale));
        E::add_row(&row[..d], to);
    }
}

struct KeyTask<'a, E> {
    b: usize,
    group: usize,
    first: usize,
    dk: &'a mut [E],
    dv: &'a mut [E],
}

/// Adds to dk and dv `[B, G, Sk, D]`. No dimension is 0.
pub(super) fn keys<E: Stored, O: Stored<Real = E::Real>>(inputs: Inputs<'_, E>, dk: &mut [O], dv: &mut [O]) {
    let &FlashShape { kv_heads, k_len, head_dim: d, .. } = inputs.shape;
    let mut tasks = Vec::with_capacity(dk.len() / (k_len * d) * k_len.div_ceil(K_TILE));
    for (bg, (dk, dv)) in dk.chunks_mut(k_len * d).zip(dv.chunks_mut(k_len * d)).enumerate() {
        let (b, group) = (bg / kv_heads, bg % kv_heads);
        let tiles = dk.chunks_mut(K_TILE * d).zip(dv.chunks_mut(K_TILE * d)).enumerate();
        tasks.extend(tiles.map(|(t, (dk, dv))| KeyTask { b, group, first: t * K_TILE, dk, dv }));
    }
    // The earliest keys are seen by most queries: they go first.
    tasks.sort_unstable_by_key(|task| (task.first, task.b, task.group));
    run(tasks, scratch_bytes(d, size_of::<E::Real>())[1], |task, scratch| {
        Arch::new().dispatch(KeyTile { inputs, task, scratch });
    });
}

struct KeyTile<'a, 'b, E: Stored, O> {
    inputs: Inputs<'a, E>,
    task: KeyTask<'b, O>,
    scratch: &'a mut Scratch,
}

impl<E: Stored, O: Stored<Real = E::Real>> WithSimd for KeyTile<'_, '_, E, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, s: S) {
        let Self { inputs, task: KeyTask { b, group, first, dk, dv }, scratch } = self;
        let Inputs { shape, mask, .. } = inputs;
        let (cap, bent) = (inputs.cap(), inputs.bent(s));
        let d = shape.head_dim;
        let pad = E::Real::PAD;
        let (width, padded) = (score_row(K_TILE, pad), d.next_multiple_of(pad));
        let mut parts = scratch.parts::<E::Real>();
        let [k_t, v_t] = [0; 2].map(|_| parts.take(d * width));
        let [scores, d_scores] = [0; 2].map(|_| parts.take(Q_TILE * width));
        let [k_sums, v_sums] = [0; 2].map(|_| parts.take(K_TILE * padded));
        let [q_copy, d_out_copy] = [0; 2].map(|_| parts.take(Q_TILE * padded));

        let rows = dk.len() / d;
        let columns = rows.next_multiple_of(E::Real::lanes::<S>());
        inputs.k.transpose((b, group), first, rows, inputs.scale(), width, k_t);
        inputs.v.transpose((b, group), first, rows, E::Real::from_f64(1.0), width, v_t);
        k_sums.fill(E::Real::ZERO);
        v_sums.fill(E::Real::ZERO);

        let keys = first..first + rows;
        let mut wide = None;
        for head in group * shape.group()..(group + 1) * shape.group() {
            for tile in tiles(mask.queries(&keys), Q_TILE) {
                let cover = mask.cover(b, &tile, &keys);
                if cover == Cover::Empty {
                    continue;
                }
                let (start, queries) = (tile.start, tile.len());
                let q = inputs.q.tile((b, head), start, queries, q_copy);
                let d_out = inputs.d_out.tile((b, head), start, queries, d_out_copy);
                let (k_t, v_t) = (Matrix::rows(k_t, width), Matrix::rows(v_t, width));
                // SAFETY: both tiles have `queries` rows of D; the transposed ones D rows of `width` >= columns; both
                // results Q_TILE such rows.
                unsafe {
                    gemm(s, [queries, columns, d], q, k_t, scores.as_mut_ptr(), width, false);
                    gemm(s, [queries, columns, d], d_out, v_t, d_scores.as_mut_ptr(), width, false);
                }
                if let Some(cap) = cap {
                    bend(s, scores, width, columns, queries, cap);
                }
                let [lse, delta] = inputs.statistics(b, head, start, queries);
                let own = |lse: E::Real| wide_lse::<E>(lse, inputs.options.softcap);
                if lse.iter().any(|lse| own(*lse).is_some()) {
                    let wide = wide.get_or_insert_with(|| inputs.wide(&inputs.k, (b, group), first, rows, width));
                    wide.multiply(s, &inputs.q, (b, head), start, queries, columns);
                }
                let tile = scores.chunks_exact_mut(width).zip(d_scores.chunks_exact_mut(width));
                for (i, (scores, d_scores)) in tile.take(queries).enumerate() {
                    let own = own(lse[i]);
                    if let (Some(own), Some(wide)) = (own, &wide) {
                        wide.replace_row(i, &mut scores[..columns], own);
                    }
                    if cover == Cover::Part {
                        mask.hide_keys(b, start + i, &keys, &mut scores[..columns], E::Real::NEG_INFINITY);
                    }
                    let lse = if own.is_some() { E::Real::ZERO } else { origin(lse[i]) };
                    let lse = E::Real::splat(s, lse);
                    let delta = E::Real::splat(s, delta[i]);
                    for c in (0..columns).step_by(E::Real::lanes::<S>()) {
                        // SAFETY: c + lanes <= columns <= width, the length of both rows.
                        unsafe {
                            let (p_at, ds_at) = (scores.as_mut_ptr().add(c), d_scores.as_mut_ptr().add(c));
                            let (p, ds) = score_gradient::<E::Real, S>(s, load(p_at), load(ds_at), lse, delta, bent);
                            store(p_at, p);
                            store(ds_at, ds);
                        }
                    }
                }
                let (p, ds) = (Matrix::rows(scores, width), Matrix::rows(d_scores, width));
                // SAFETY: p and ds have `queries` rows of at least `rows`; both tiles `queries` rows of whole registers, as
                // both sums have.
                unsafe {
                    let size = [rows, padded, queries];
                    gemm(s, size, p.transposed(), d_out, v_sums.as_mut_ptr(), padded, true);
                    gemm(s, size, ds.transposed(), q, k_sums.as_mut_ptr(), padded, true);
                }
            }
        }
        write(k_sums, padded, inputs.scale(), d, dk);
        write(v_sums, padded, E::Real::from_f64(1.0), d, dv);
    }
}
