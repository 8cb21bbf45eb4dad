//! Which heads each rank attends with, and attention over heads that share keys unevenly.
//!
//! H query heads, G key/value heads, P ranks; query head h reads key/value head h / (H / G).

use std::fmt;
use std::ops::Range;

use burn::tensor::Tensor;

use crate::buffer::zeros;
use crate::flash::{self, FlashOptions};
use crate::group::MAX_RANKS;
use crate::{Error, Result};

/// Query heads in consecutive parts, one a rank, as even as they can be; and the key/value heads that each part reads.
///
/// Any counts work: with G < P several ranks read the same key/value head, with H < P some ranks hold no head.
///
/// ```
/// use burn_context_parallel::attention::HeadSplit;
///
/// let split = HeadSplit::new(9, 3, 2)?;
/// assert_eq!(split.to_string(), "9/3 heads on 2 ranks: q 0..5 kv 0..2, q 5..9 kv 1..3");
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadSplit {
    heads: usize,
    kv_heads: usize,
    ranks: usize,
}

/// Neighbouring query heads that read one key/value head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRun {
    /// Index of the key/value head among those held.
    pub kv: usize,
    /// How many query heads.
    pub queries: usize,
}

impl HeadSplit {
    /// The split of `heads` query and `kv_heads` key/value heads over `ranks`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a count is zero, `kv_heads` does not divide `heads`, or there are more than [`MAX_RANKS`] ranks.
    pub fn new(heads: usize, kv_heads: usize, ranks: usize) -> Result<Self> {
        if heads == 0 || kv_heads == 0 || ranks == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::invalid(
                "HeadSplit::new",
                format!("{heads} query heads, {kv_heads} key/value heads, {ranks} ranks"),
                "each key/value head must serve the same number of query heads: make heads a multiple of kv_heads, none zero",
            ));
        }
        if ranks > MAX_RANKS {
            return Err(Error::invalid("HeadSplit::new", format!("{ranks} ranks"), format!("use at most {MAX_RANKS}")));
        }
        Ok(Self { heads, kv_heads, ranks })
    }

    /// Query heads, H.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Key/value heads, G.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Ranks, P.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The key/value head that query head `head` reads.
    pub fn kv_of(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// The query heads of `rank`; empty where there are fewer heads than ranks.
    pub fn queries(&self, rank: usize) -> Range<usize> {
        let (each, more) = (self.heads / self.ranks, self.heads % self.ranks);
        let start = rank * each + rank.min(more);
        start..start + each + usize::from(rank < more)
    }

    /// The key/value heads that `rank`'s query heads read.
    pub fn keys(&self, rank: usize) -> Range<usize> {
        let queries = self.queries(rank);
        if queries.is_empty() {
            return 0..0;
        }
        self.kv_of(queries.start)..self.kv_of(queries.end - 1) + 1
    }

    /// How `queries` (in increasing order) read from the key/value heads `held`.
    ///
    /// # Panics
    ///
    /// If a head's key/value head is not held.
    pub fn runs(&self, queries: &[usize], held: &[usize]) -> Vec<HeadRun> {
        let mut runs: Vec<HeadRun> = Vec::new();
        for head in queries {
            let kv = held
                .iter()
                .position(|kv| *kv == self.kv_of(*head))
                .expect("a rank holds the key/value heads of its query heads");
            match runs.last_mut() {
                Some(run) if run.kv == kv => run.queries += 1,
                _ => runs.push(HeadRun { kv, queries: 1 }),
            }
        }
        runs
    }
}

impl fmt::Display for HeadSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} heads on {} ranks:", self.heads, self.kv_heads, self.ranks)?;
        for rank in 0..self.ranks {
            let comma = if rank > 0 { "," } else { "" };
            write!(f, "{comma} q {:?} kv {:?}", self.queries(rank), self.keys(rank))?;
        }
        Ok(())
    }
}

/// Whether `runs` is what the flash operation calls grouped-query attention: each of the `kv_heads` in turn, equally often.
fn uniform(runs: &[HeadRun], kv_heads: usize) -> bool {
    runs.len() == kv_heads && runs.iter().enumerate().all(|(i, run)| run.kv == i && run.queries == runs[0].queries)
}

/// Attention of query heads that read key/value heads in `runs`: one flash call if the runs are uniform, else one a run.
///
/// # Shapes
///
/// `q`: [B, H, Sq, D]; `k`, `v`: [B, G, Sk, D] -> out [B, H, Sq, D], lse [B, H, Sq]; without autodiff.
///
/// # Errors
///
/// As [`flash::forward`].
pub fn attend(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    runs: &[HeadRun],
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<3>)> {
    if uniform(runs, k.dims()[1]) {
        return flash::forward(q, k, v, options);
    }
    let (mut outs, mut lses, mut start) = (Vec::new(), Vec::new(), 0);
    for run in runs {
        let (out, lse) = flash::forward(
            q.clone().narrow(1, start, run.queries),
            k.clone().narrow(1, run.kv, 1),
            v.clone().narrow(1, run.kv, 1),
            options,
        )?;
        outs.push(out);
        lses.push(lse);
        start += run.queries;
    }
    Ok((Tensor::cat(outs, 1), Tensor::cat(lses, 1)))
}

/// The gradients of [`attend`]: `delta` is [`flash::delta`]; the answers are dq, dk, dv. With `sums`, dk and dv are added to
/// them.
///
/// # Errors
///
/// As [`flash::backward_onto`].
#[allow(clippy::too_many_arguments)] // the operation's own inputs
pub fn attend_backward(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    d_out: Tensor<4>,
    lse: Tensor<3>,
    delta: Tensor<3>,
    runs: &[HeadRun],
    sums: Option<(Tensor<4>, Tensor<4>)>,
    options: &FlashOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>)> {
    if uniform(runs, k.dims()[1]) {
        return flash::backward_onto(q, k, v, d_out, lse, delta, sums, options);
    }
    let (mut dqs, mut start) = (Vec::new(), 0);
    let (mut dk, mut dv) = sums.unwrap_or_else(|| {
        let zeros = |x: &Tensor<4>| zeros(x.dims(), &x.device(), x.dtype());
        (zeros(&k), zeros(&v))
    });
    for run in runs {
        let (dq_run, dk_run, dv_run) = flash::backward(
            q.clone().narrow(1, start, run.queries),
            k.clone().narrow(1, run.kv, 1),
            v.clone().narrow(1, run.kv, 1),
            d_out.clone().narrow(1, start, run.queries),
            lse.clone().narrow(1, start, run.queries),
            delta.clone().narrow(1, start, run.queries),
            options,
        )?;
        dqs.push(dq_run);
        dk = add_heads(dk, dk_run, run.kv);
        dv = add_heads(dv, dv_run, run.kv);
        start += run.queries;
    }
    Ok((Tensor::cat(dqs, 1), dk, dv))
}

/// Adds `part` to the heads of `total` [B, heads, S, D] from `start` on.
fn add_heads(total: Tensor<4>, part: Tensor<4>, start: usize) -> Tensor<4> {
    let [b, n, s, d] = part.dims();
    let ranges = [0..b, start..start + n, 0..s, 0..d];
    let sum = total.clone().slice(ranges.clone()) + part;
    total.slice_assign(ranges, sum)
}
