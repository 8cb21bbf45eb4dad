//! Large scores in f64: a score of 10^4 in f32 is off by some 10^-3, and so is the exponential of its difference to the largest one.
//!
//! Only tiles with such a row are computed a second time, only such rows are replaced, and only of f32 tensors: halves round their results more than that.
//! The backward pass subtracts the log-sum-exp in f64 likewise; that itself was rounded to f32, once.
//! What is stored stays f32: a row's running maximum is an f32 number, from which f64 scores are subtracted before they are rounded.

use pulp::Simd;

use super::gemm::{Matrix, gemm, load, store};
use super::real::{Real, Stored, in_place};
use super::view::View;
use super::work::{K_TILE, Q_TILE};

// A tile of either kind takes the place of keys.
const _: () = assert!(Q_TILE <= K_TILE);

/// Rows whose largest score is beyond this are computed in f64: below it, rounding a score changes no output by more than 10^-5 of the
/// largest value.
const FROM: f64 = 128.0;

/// Whether some row of scores, of which `max` holds the largest ones, is to be computed again.
#[inline(always)]
pub(super) fn needed<E: Stored>(max: &[E::Real]) -> bool {
    in_place::<E>() && size_of::<E>() == size_of::<f32>() && max.iter().any(|max| beyond(*max))
}

/// The log-sum-exp of a row whose scores the backward pass is to compute in f64. With a softcap none: a slope needs the score itself, and
/// gradients are allowed the rounding of scores.
#[inline(always)]
pub(super) fn wide_lse<E: Stored>(lse: E::Real, softcap: Option<f64>) -> Option<f64> {
    (softcap.is_none() && needed::<E>(&[lse])).then(|| lse.to_f64())
}

/// Row by row, and from what the row sees: another token's scores must not change a bit of this one's.
#[inline(always)]
fn beyond<R: Real>(max: R) -> bool {
    let max = max.to_f64().abs();
    max > FROM && max < f64::INFINITY
}

/// A tile of queries in f64, and room for its scores with a tile of keys and for their exponentials.
pub(super) struct Wide<R> {
    q_t: Vec<f64>,
    k: Vec<f64>,
    pub(super) scores: Vec<f64>,
    p: Vec<R>,
    width: usize,
    dim: usize,
}

impl<R: Real> Wide<R> {
    /// The queries `rows` from `first` on, scaled, in rows of `width`.
    pub(super) fn new<E: Stored<Real = R>>(
        q: &View<'_, E>,
        (b, head): (usize, usize),
        first: usize,
        rows: usize,
        scale: f64,
        width: usize,
    ) -> Self {
        let dim = q.dim();
        let mut q_t = vec![0.0; dim * width];
        let mut row = vec![R::ZERO; dim];
        for r in 0..rows {
            q.read(b, head, first + r, &mut row);
            for (e, x) in row.iter().enumerate() {
                q_t[e * width + r] = x.to_f64() * scale;
            }
        }
        let scores = vec![0.0; K_TILE * width];
        Self { q_t, k: vec![0.0; K_TILE * dim], p: vec![R::ZERO; scores.len()], scores, width, dim }
    }

    /// Fills [`scores`](Self::scores) with `s^T [keys, columns]`.
    #[inline(always)]
    pub(super) fn multiply<E: Stored<Real = R>, S: Simd>(
        &mut self,
        s: S,
        k: &View<'_, E>,
        (b, head): (usize, usize),
        start: usize,
        keys: usize,
        columns: usize,
    ) {
        let mut row = vec![R::ZERO; self.dim];
        for (j, to) in self.k.chunks_exact_mut(self.dim).take(keys).enumerate() {
            k.read(b, head, start + j, &mut row);
            to.iter_mut().zip(&row).for_each(|(to, x)| *to = x.to_f64());
        }
        let (k, q_t) = (Matrix::rows(&self.k, self.dim), Matrix::rows(&self.q_t, self.width));
        // SAFETY: k has K_TILE >= keys rows of D, q_t D rows of `width` >= columns, the scores K_TILE such rows.
        unsafe { gemm(s, [keys, columns, self.dim], k, q_t, self.scores.as_mut_ptr(), self.width, false) };
    }

    /// Replaces the scores of columns that have an `lse` by `s - lse`: differences, which f32 holds.
    pub(super) fn replace_columns(&self, scores: &mut [R], keys: usize, lse: &[Option<f64>]) {
        for (from, to) in self.scores.chunks_exact(self.width).zip(scores.chunks_exact_mut(self.width)).take(keys) {
            for ((from, to), lse) in from.iter().zip(to).zip(lse) {
                if let Some(lse) = lse {
                    *to = R::from_f64(*from - lse);
                }
            }
        }
    }

    /// Replaces row `i` of the scores by `s - lse`.
    pub(super) fn replace_row(&self, i: usize, scores: &mut [R], lse: f64) {
        for (from, to) in self.scores[i * self.width..].iter().zip(scores) {
            *to = R::from_f64(*from - lse);
        }
    }

    /// Replaces what the f32 softmax made of rows beyond the limit: exponentials in `scores`, and each row's maximum, total and shrinking.
    /// `before` holds maxima and totals before this tile.
    #[inline(always)]
    pub(super) fn softmax<S: Simd>(
        &mut self,
        s: S,
        scores: &mut [R],
        columns: usize,
        keys: usize,
        [max_before, total_before]: [&[R]; 2],
        [max, total, shrink]: [&mut [R]; 3],
    ) {
        let width = self.width;
        assert!(keys * width <= scores.len().min(self.p.len()) && columns <= width && columns <= total_before.len());
        let mut most = vec![f64::NEG_INFINITY; columns];
        for row in self.scores.chunks_exact(width).take(keys) {
            most.iter_mut().zip(row).for_each(|(most, x)| *most = most.max(*x));
        }
        // An f32 number near the maximum does: it cancels, whatever it is.
        let after: Vec<R> = (0..columns)
            .map(|c| if R::from_f64(most[c]) > max_before[c] { R::from_f64(most[c]) } else { max_before[c] })
            .collect();
        let origins: Vec<f64> = after.iter().map(|x| if *x == R::NEG_INFINITY { 0.0 } else { x.to_f64() }).collect();
        let mut fade = vec![R::ZERO; columns];
        let mut sums = vec![R::ZERO; columns];
        for c in 0..columns {
            fade[c] = R::from_f64((max_before[c].to_f64() - origins[c]).exp());
            sums[c] = total_before[c].times(fade[c]);
        }
        for (from, to) in self.scores.chunks_exact(width).zip(self.p.chunks_exact_mut(width)).take(keys) {
            for ((from, to), origin) in from.iter().zip(to).zip(&origins) {
                *to = R::from_f64(*from - origin);
            }
        }
        for c in (0..columns).step_by(R::lanes::<S>()) {
            // SAFETY: c + lanes <= columns <= width, and rows up to `keys`, by the assert; `sums` has `columns` elements.
            unsafe {
                let mut sum = load(sums.as_ptr().add(c));
                for j in 0..keys {
                    let at = self.p.as_mut_ptr().add(j * width + c);
                    let p = R::exp(s, load(at));
                    sum = R::add(s, sum, p);
                    store(at, p);
                }
                store(sums.as_mut_ptr().add(c), sum);
            }
        }
        let own: Vec<bool> = max[..columns].iter().map(|max| beyond(*max)).collect();
        for (from, to) in self.p.chunks_exact(width).zip(scores.chunks_exact_mut(width)).take(keys) {
            for ((from, to), own) in from.iter().zip(to).zip(&own) {
                *to = if *own { *from } else { *to };
            }
        }
        for c in (0..columns).filter(|c| own[*c]) {
            (max[c], total[c], shrink[c]) = (after[c], sums[c], fade[c]);
        }
    }
}
