//! Ulysses: one all-to-all turns "my tokens, all heads" into "all tokens, my heads"; attention is then local.
//!
//! ```text
//! q [B, L, H, D] --all-to-all--> [B, S, H/P, D] --flash--> [B, S, H/P, D] --all-to-all--> out [B, L, H, D]
//! ```

use burn::tensor::Tensor;

use super::{HeadExchange, HeadShape, HeadSplit, attend, attend_backward};
use crate::flash::{self, FlashOptions};
use crate::group::ProcessGroup;
use crate::sequence::SequenceLayout;
use crate::vjp::{Inputs, custom_vjp};
use crate::{Error, OrRaise, Result};

const NAME: &str = "ulysses";

/// The exchanges of one Ulysses attention: a pure value.
#[derive(Clone, Debug)]
struct Scheme {
    split: HeadSplit,
    q: HeadExchange,
    kv: HeadExchange,
}

impl Scheme {
    fn new(heads: usize, kv_heads: usize, ranks: usize) -> Result<Self> {
        let split = HeadSplit::new(heads, kv_heads, ranks)?;
        let q = HeadExchange::new(heads, (0..ranks).map(|r| split.queries(r).collect()).collect())?;
        let kv = HeadExchange::new(kv_heads, (0..ranks).map(|r| split.keys(r).collect()).collect())?;
        Ok(Self { split, q, kv })
    }
}

/// Exact attention over a sequence that lies on the ranks of `group`; tracked.
///
/// Any head counts: with G < P a key/value head goes to every rank that needs it and its gradients are summed on the way
/// back; with H < P some ranks only send and receive. Queries may lie differently from keys (`q_layout`, `kv_layout`). Documents and
/// positions in the options are those of the whole sequence, the same on every rank.
///
/// # Shapes
///
/// `q`: [B, H, L, D]; `k`, `v`: [B, G, L', D], L and L' this rank's lengths in the layouts -> [B, H, L, D].
///
/// # Errors
///
/// [`Error::Invalid`] if shapes, layouts and group do not fit each other; [`Error::Group`] if the collective fails. Errors of
/// the backward pass are [raised](crate::raise).
///
/// # Memory
///
/// [`ulysses_bytes`](super::ulysses_bytes) are kept for the backward pass; [`UlyssesBytes`](super::UlyssesBytes) has the peaks.
///
/// # Communication
///
/// Per rank `(P - 1)/P` of q, k, v and out in forward; of d_out, dq, dk, dv and 4 bytes a row and head in backward. With G < P
/// a key/value head goes to several ranks, and counts as often.
///
/// # References
///
/// DeepSpeed-Ulysses, arXiv 2309.14509.
pub fn ulysses(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashOptions,
    group: &ProcessGroup,
    q_layout: &SequenceLayout,
    kv_layout: &SequenceLayout,
) -> Result<Tensor<4>> {
    check(&q, &k, &v, group, q_layout, kv_layout)?;
    // Before any exchange: a rank without heads would find nothing wrong, and wait.
    options.check_lengths(NAME, q.dims()[0], q_layout.len(), kv_layout.len())?;
    if group.size() == 1 && q_layout.padded_len() == q_layout.len() && kv_layout.padded_len() == kv_layout.len() {
        return flash::flash_attention(q, k, v, options);
    }
    let scheme = Scheme::new(q.dims()[1], k.dims()[1], group.size())?;
    let group = &group.about(options.digest());
    let inputs = Inputs::new().input(&q).input(&k).input(&v);

    // From here on in the order of exchanges: [B, tokens, heads, D], without autodiff.
    let q = q.inner().swap_dims(1, 2);
    let k = k.inner().swap_dims(1, 2);
    let v = v.inner().swap_dims(1, 2);
    let like = HeadShape::of(&q);
    let held = (
        scheme.q.to_heads(q, group, q_layout)?,
        scheme.kv.to_heads(k, group, kv_layout)?,
        scheme.kv.to_heads(v, group, kv_layout)?,
    );
    let mine = match held {
        (Some(q), Some(k), Some(v)) => {
            let (q, k, v) = (q.swap_dims(1, 2), k.swap_dims(1, 2), v.swap_dims(1, 2));
            let runs = runs(&scheme.split, group.rank());
            let (out, lse) = attend(q.clone(), k.clone(), v.clone(), &runs, options)?;
            Some((q, k, v, out, lse))
        }
        _ => None,
    };
    let (held, out) = match mine {
        Some((q, k, v, out, lse)) => (Some((q, k, v, lse)), Some(out.swap_dims(1, 2))),
        None => (None, None),
    };
    let out = scheme.q.to_sequence(out, &like, group, q_layout)?.swap_dims(1, 2);

    let (saved_out, options) = (out.clone(), options.clone());
    let (group, q_layout, kv_layout) = (group.clone(), q_layout.clone(), kv_layout.clone());
    Ok(custom_vjp(inputs, out, move |d_out: Tensor<4>| {
        // Row sums of d_out * out here, before the exchange: D times less to send than `out` itself.
        let delta = flash::delta(d_out.clone(), saved_out);
        let delta = delta.swap_dims(1, 2).unsqueeze_dim::<4>(3);
        let delta = scheme.q.to_heads(delta, &group, &q_layout).or_raise();
        let d_out = d_out.swap_dims(1, 2);
        let d_out = scheme.q.to_heads(d_out, &group, &q_layout).or_raise();
        let grads = match (held, d_out, delta) {
            (Some((q, k, v, lse)), Some(d_out), Some(delta)) => {
                let delta = delta.squeeze_dim::<3>(3).swap_dims(1, 2);
                let runs = runs(&scheme.split, group.rank());
                let d_out = d_out.swap_dims(1, 2);
                let (dq, dk, dv) = attend_backward(q, k, v, d_out, lse, delta, &runs, None, &options).or_raise();
                [dq, dk, dv].map(|grad| Some(grad.swap_dims(1, 2)))
            }
            _ => [None, None, None],
        };
        let [dq, dk, dv] = grads;
        let back = |grad, exchange: &HeadExchange, layout| {
            let grad = exchange.to_sequence(grad, &like, &group, layout).or_raise();
            Some(grad.swap_dims(1, 2).into_dispatch())
        };
        vec![back(dq, &scheme.q, &q_layout), back(dk, &scheme.kv, &kv_layout), back(dv, &scheme.kv, &kv_layout)]
    }))
}

fn runs(split: &HeadSplit, rank: usize) -> Vec<super::HeadRun> {
    let queries: Vec<_> = split.queries(rank).collect();
    let held: Vec<_> = split.keys(rank).collect();
    split.runs(&queries, &held)
}

fn check(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    group: &ProcessGroup,
    q_layout: &SequenceLayout,
    kv_layout: &SequenceLayout,
) -> Result<()> {
    let ([bq, _, lq, dq], [bk, _, lk, dk]) = (q.dims(), k.dims());
    if k.dims() != v.dims() || bq != bk || dq != dk {
        return Err(Error::invalid(
            NAME,
            format!("q {:?}, k {:?}, v {:?}", q.dims(), k.dims(), v.dims()),
            "q is [B, H, L, D], k and v are [B, G, L', D]",
        ));
    }
    for (name, layout, len) in [("q", q_layout, lq), ("k and v", kv_layout, lk)] {
        if layout.ranks() != group.size() || layout.local_len(group.rank()) != len {
            return Err(Error::invalid(
                NAME,
                format!("{name} of {len} tokens on rank {} of {}; the layout is {layout}", group.rank(), group.size()),
                "pass each rank's own part of the sequence and the layout that it was cut with",
            ));
        }
    }
    HeadSplit::new(q.dims()[1], k.dims()[1], group.size()).map(drop)
}
