//! The operation that executes a schedule: forward, and backward with everything but x, the output and its lse made again.

use burn::tensor::{DType, Tensor};
use burn_context_parallel::attention::{HeadExchange, HeadRun, HeadShape, SequenceContext, attend, attend_backward};
use burn_context_parallel::buffer::zeros;
use burn_context_parallel::flash::{self, FlashOptions};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::SequenceLayout;
use burn_context_parallel::vjp::{InputGradients, Inputs, custom_vjp};
use burn_context_parallel::{Error, OrRaise, Result};

use super::source::{select, write};
use super::{Schedule, Stage, StageSource};

/// Exact attention, one stage of the schedule after the other; tracked.
///
/// Saved for the backward pass: the source (the block's input), the output and its log-sum-exp. q, k and v are never whole.
///
/// # Shapes
///
/// The source's heads are [B, L, heads, D] -> [B, L, H, D].
///
/// # Errors
///
/// [`Error::Invalid`] if the schedule is for another number of ranks than the context's group; [`Error::Group`] if a collective
/// fails. Errors of the backward pass are [raised](burn_context_parallel::raise).
///
/// # Memory
///
/// [`saved_bytes`](super::saved_bytes) kept, [`forward_bytes`](super::forward_bytes) and
/// [`backward_bytes`](super::backward_bytes) at the peaks.
///
/// # Communication
///
/// Per rank, `(P - 1)/P` of: q, k, v and out in forward; q, k, v, d_out, dq, dk, dv and 4 bytes a row in backward. A key/value head
/// goes once per direction to each rank that needs it.
pub fn upipe<S: StageSource>(
    source: S,
    inputs: Inputs,
    schedule: &Schedule,
    options: &FlashOptions,
    context: &SequenceContext,
) -> Result<Tensor<4>> {
    upipe_cross(source, inputs, schedule, options, context.group(), context.layout(), context.layout())
}

/// [`upipe`] with queries that lie differently from keys and values.
///
/// # Errors
///
/// As [`upipe`].
pub fn upipe_cross<S: StageSource>(
    source: S,
    inputs: Inputs,
    schedule: &Schedule,
    options: &FlashOptions,
    group: &ProcessGroup,
    q_layout: &SequenceLayout,
    kv_layout: &SequenceLayout,
) -> Result<Tensor<4>> {
    for ranks in [schedule.split().ranks(), q_layout.ranks(), kv_layout.ranks()] {
        if ranks != group.size() {
            return Err(Error::invalid(
                "upipe",
                format!("a schedule or layout for {ranks} ranks in a group of {}", group.size()),
                "make both for the group's size",
            ));
        }
    }
    let run = Run {
        schedule: schedule.clone(),
        options: options.clone(),
        group: group.clone(),
        q_layout: q_layout.clone(),
        kv_layout: kv_layout.clone(),
    };
    let (out, lses) = run.forward(&source)?;
    let saved = out.clone();
    Ok(custom_vjp(inputs, out, move |d_out: Tensor<4>| run.backward(source, saved, lses, d_out).or_raise()))
}

struct Run {
    schedule: Schedule,
    options: FlashOptions,
    group: ProcessGroup,
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
}

/// Key/value heads that arrived together, over the whole sequence: [B, S, heads, D] each.
struct Bundle {
    heads: Vec<usize>,
    k: Tensor<4>,
    v: Tensor<4>,
}

impl Run {
    fn forward<S: StageSource>(&self, source: &S) -> Result<(Tensor<4>, Vec<Option<Tensor<3>>>)> {
        let mut held: Vec<Bundle> = Vec::new();
        let mut out: Option<Tensor<4>> = None;
        let mut lses = Vec::with_capacity(self.schedule.stages().len());
        for stage in self.schedule.stages() {
            let q = source.queries(&stage.queries());
            let [batch, local, _, dim] = q.dims();
            let like = HeadShape::of(&q);
            let exchange = self.query_exchange(stage)?;
            let q = exchange.to_heads(q, &self.group, &self.q_layout)?;
            self.arrive(stage, source, &mut held)?;
            let (part, lse) = match q {
                Some(q) => {
                    let (k, v, runs) = self.keys_values(stage, &held);
                    let (out, lse) = attend(q.swap_dims(1, 2), k, v, &runs, &self.options)?;
                    (Some(out.swap_dims(1, 2)), Some(lse))
                }
                None => (None, None),
            };
            lses.push(lse);
            self.leave(stage, &mut held);
            let part = exchange.to_sequence(part, &like, &self.group, &self.q_layout)?;
            let heads = self.schedule.split().heads();
            let total = out.take().unwrap_or_else(|| {
                zeros([batch, local, heads, dim], &part.device(), part.dtype())
            });
            out = Some(write(total, &stage.queries(), &part));
        }
        Ok((out.expect("a schedule has at least one stage"), lses))
    }

    fn backward<S: StageSource>(
        &self,
        mut source: S,
        out: Tensor<4>,
        lses: Vec<Option<Tensor<3>>>,
        d_out: Tensor<4>,
    ) -> Result<InputGradients> {
        let mut held: Vec<Bundle> = Vec::new();
        // Gradients of held key/value heads, [B, S, 1, D] in f32 (or f64), until their last query head is through.
        let mut sums: Vec<(usize, Tensor<4>, Tensor<4>)> = Vec::new();
        let mut d_out = Some(d_out);
        let last = self.schedule.stages().len() - 1;
        for (index, (stage, lse)) in self.schedule.stages().iter().zip(lses).enumerate() {
            let heads = stage.queries();
            let exchange = self.query_exchange(stage)?;
            let d_part = select(d_out.as_ref().expect("kept until the last stage"), &heads);
            // Row sums of d_out * out before the exchange: D times less to send than `out`.
            let delta = flash::delta(d_part.clone().swap_dims(1, 2), select(&out, &heads).swap_dims(1, 2));
            let delta = delta.swap_dims(1, 2).unsqueeze_dim::<4>(3);
            let like = HeadShape::of(&d_part);
            if index == last {
                d_out = None;
            }
            let delta = exchange.to_heads(delta, &self.group, &self.q_layout)?;
            let d_part = exchange.to_heads(d_part, &self.group, &self.q_layout)?;
            let q = exchange.to_heads(source.queries(&heads), &self.group, &self.q_layout)?;
            self.arrive(stage, &source, &mut held)?;
            let mut dq = None;
            if let (Some(q), Some(d_part), Some(delta), Some(lse)) = (q, d_part, delta, lse) {
                let (k, v, runs) = self.keys_values(stage, &held);
                let exact = accumulator(q.dtype());
                let (stage_dq, dk, dv) = attend_backward(
                    q.swap_dims(1, 2).cast(exact),
                    k.cast(exact),
                    v.cast(exact),
                    d_part.swap_dims(1, 2).cast(exact),
                    lse,
                    delta.squeeze_dim::<3>(3).swap_dims(1, 2),
                    &runs,
                    &self.options,
                )?;
                dq = Some(stage_dq.swap_dims(1, 2).cast(like.dtype()));
                self.sum(stage, &mut sums, dk, dv);
            }
            let dq = exchange.to_sequence(dq, &like, &self.group, &self.q_layout)?;
            source.add_queries(&heads, dq);
            self.leave(stage, &mut held);
            self.return_gradients(stage, &mut sums, &like, &mut source)?;
        }
        Ok(source.into_gradients())
    }

    /// The stage's query heads, as projected rank by rank, go to their ranks.
    fn query_exchange(&self, stage: &Stage) -> Result<HeadExchange> {
        let mut start = 0;
        let to: Vec<Vec<usize>> = stage
            .ranks
            .iter()
            .map(|rank| {
                start += rank.queries.len();
                (start - rank.queries.len()..start).collect()
            })
            .collect();
        HeadExchange::new(start, to)
    }

    /// Where each rank finds `lists`' heads among `heads`.
    fn kv_exchange<'a>(heads: &[usize], lists: impl Iterator<Item = &'a Vec<usize>>) -> Result<HeadExchange> {
        let index = |head: &usize| heads.binary_search(head).expect("made from these lists");
        HeadExchange::new(heads.len(), lists.map(|list| list.iter().map(index).collect()).collect())
    }

    fn arrive<S: StageSource>(&self, stage: &Stage, source: &S, held: &mut Vec<Bundle>) -> Result<()> {
        let heads = stage.arriving();
        if heads.is_empty() {
            return Ok(());
        }
        let exchange = Self::kv_exchange(&heads, stage.ranks.iter().map(|rank| &rank.arriving))?;
        let (k, v) = source.keys_values(&heads);
        let k = exchange.to_heads(k, &self.group, &self.kv_layout)?;
        let v = exchange.to_heads(v, &self.group, &self.kv_layout)?;
        if let (Some(k), Some(v)) = (k, v) {
            let heads = stage.ranks[self.group.rank()].arriving.clone();
            held.push(Bundle { heads, k, v });
        }
        Ok(())
    }

    /// Frees what arrived together once all of it is through.
    fn leave(&self, stage: &Stage, held: &mut Vec<Bundle>) {
        let mine = &stage.ranks[self.group.rank()];
        let stays = |head: &usize| mine.held.contains(head) && !mine.leaving.contains(head);
        held.retain(|bundle| bundle.heads.iter().any(stays));
    }

    /// The key/value heads that this rank's queries of the stage read, [B, G, S, D], and how they read them.
    fn keys_values(
        &self,
        stage: &Stage,
        held: &[Bundle],
    ) -> (Tensor<4>, Tensor<4>, Vec<HeadRun>) {
        let needed = self.needed(stage);
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for bundle in held {
            let wanted: Vec<usize> = (0..bundle.heads.len())
                .filter(|index| needed.contains(&bundle.heads[*index]))
                .collect();
            if !wanted.is_empty() {
                k.push(select(&bundle.k, &wanted));
                v.push(select(&bundle.v, &wanted));
            }
        }
        let queries = &stage.ranks[self.group.rank()].queries;
        (join(k).swap_dims(1, 2), join(v).swap_dims(1, 2), self.schedule.split().runs(queries, &needed))
    }

    /// The key/value heads of this rank's queries, in increasing order.
    fn needed(&self, stage: &Stage) -> Vec<usize> {
        let queries = &stage.ranks[self.group.rank()].queries;
        let mut needed: Vec<usize> = queries.iter().map(|head| self.schedule.split().kv_of(*head)).collect();
        needed.dedup();
        needed
    }

    fn sum(&self, stage: &Stage, sums: &mut Vec<(usize, Tensor<4>, Tensor<4>)>, dk: Tensor<4>, dv: Tensor<4>) {
        for (index, head) in self.needed(stage).into_iter().enumerate() {
            let one = |grad: &Tensor<4>| grad.clone().narrow(1, index, 1).swap_dims(1, 2);
            let (dk, dv) = (one(&dk), one(&dv));
            match sums.iter().position(|(known, ..)| *known == head) {
                Some(at) => {
                    let (_, k, v) = sums.swap_remove(at);
                    sums.push((head, k + dk, v + dv));
                }
                None => sums.push((head, dk, dv)),
            }
        }
    }

    /// Sends the gradients of leaving heads back to where their tokens are.
    fn return_gradients<S: StageSource>(
        &self,
        stage: &Stage,
        sums: &mut Vec<(usize, Tensor<4>, Tensor<4>)>,
        like: &HeadShape,
        source: &mut S,
    ) -> Result<()> {
        let heads = stage.leaving();
        if heads.is_empty() {
            return Ok(());
        }
        let exchange = Self::kv_exchange(&heads, stage.ranks.iter().map(|rank| &rank.leaving))?;
        let (mut dk, mut dv) = (Vec::new(), Vec::new());
        for head in &stage.ranks[self.group.rank()].leaving {
            let at = sums.iter().position(|(known, ..)| known == head).expect("summed before it leaves");
            let (_, k, v) = sums.swap_remove(at);
            dk.push(k.cast(like.dtype()));
            dv.push(v.cast(like.dtype()));
        }
        let join = |parts: Vec<Tensor<4>>| (!parts.is_empty()).then(|| join(parts));
        let dk = exchange.to_sequence(join(dk), like, &self.group, &self.kv_layout)?;
        let dv = exchange.to_sequence(join(dv), like, &self.group, &self.kv_layout)?;
        source.add_keys_values(&heads, dk, dv);
        Ok(())
    }
}

/// One tensor of all heads; `cat` would copy a single one.
fn join(mut parts: Vec<Tensor<4>>) -> Tensor<4> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) }
}

/// The type in which gradients are summed.
pub(super) fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
