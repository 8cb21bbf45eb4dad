//! The operation that executes a schedule: forward, and backward with everything but x, the output and its lse made again.

use burn::tensor::Tensor;
use burn_context_parallel::attention::{
    HeadRun, HeadShape, SequenceContext, attend, attend_backward, gather_tokens, return_tokens, select_heads,
};
use burn_context_parallel::buffer::{accumulator, zeros};
use burn_context_parallel::flash::{self, FlashOptions};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::phase::{self, Pass};
use burn_context_parallel::sequence::SequenceLayout;
use burn_context_parallel::vjp::{InputGradients, Inputs, custom_vjp};
use burn_context_parallel::{Error, OrRaise, Result};

use super::held::{Held, Sums};
use super::source::write;
use super::{Schedule, Stage, StageSource};

/// Exact attention, one stage of the schedule after the other; tracked. It stays inside the context's documents, if there are any.
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
/// Per rank, `(P - 1)/P` of: q, k, v and out in forward; q, k, v, d_out, dq, dk, dv (the last two in f32) and 4 bytes a row and
/// head in backward. A key/value head goes once per direction to each rank that needs it: with G < P to several, so that k, v, dk and
/// dv count as often.
pub fn upipe<S: StageSource>(
    source: S,
    inputs: Inputs,
    schedule: &Schedule,
    options: &FlashOptions,
    context: &SequenceContext,
) -> Result<Tensor<4>> {
    let options = context.bound(options)?;
    upipe_cross(source, inputs, schedule, &options, context.group(), context.layout(), context.layout())
}

/// [`upipe()`] with queries that lie differently from keys and values.
///
/// # Errors
///
/// As [`upipe()`].
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
    options.expect_lengths("upipe", q_layout.len(), kv_layout.len())?;
    let split = schedule.split();
    if source.heads() != (split.heads(), split.kv_heads()) {
        return Err(Error::invalid(
            "upipe",
            format!(
                "a source of {:?} query and key/value heads, a schedule of {:?}",
                source.heads(),
                (split.heads(), split.kv_heads())
            ),
            "make the schedule for the source's heads",
        ));
    }
    let run = Run {
        schedule: schedule.clone(),
        options: options.clone(),
        group: group.about(options.digest()),
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

/// For each rank, its heads' part of this rank's tokens [B, L, n, D]; `None` where a rank has no head.
type Parts = Vec<Option<Tensor<4>>>;

impl Run {
    fn forward<S: StageSource>(&self, source: &S) -> Result<(Tensor<4>, Vec<Option<Tensor<3>>>)> {
        let mut held = Held::default();
        let mut out: Option<Tensor<4>> = None;
        let mut lses = Vec::with_capacity(self.schedule.stages().len());
        for (index, stage) in self.schedule.stages().iter().enumerate() {
            let _phase = phase::pass("stage", Some(index), Pass::Forward);
            let (q, shape) = self.gather_queries(stage, source)?;
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
            held.release(&stage.ranks[self.group.rank()]);
            let returned = self.return_queries(stage, part, &shape)?;
            for (rank, part) in stage.ranks.iter().zip(returned) {
                let Some(part) = part else { continue };
                let total = out.take().unwrap_or_else(|| {
                    let [batch, local, _, dim] = part.dims();
                    zeros([batch, local, self.schedule.split().heads(), dim], &part.device(), part.dtype())
                });
                out = Some(write(total, &rank.queries, &part));
            }
        }
        Ok((out.expect("a schedule has at least one head"), lses))
    }

    fn backward<S: StageSource>(
        &self,
        mut source: S,
        out: Tensor<4>,
        lses: Vec<Option<Tensor<3>>>,
        d_out: Tensor<4>,
    ) -> Result<InputGradients> {
        let mut held = Held::default();
        let mut sums = Sums::default();
        let rank = self.group.rank();
        for (index, (stage, lse)) in self.schedule.stages().iter().zip(lses).enumerate() {
            let _phase = phase::pass("stage", Some(index), Pass::Backward);
            let (q, shape) = self.gather_queries(stage, &source)?;
            self.arrive(stage, &source, &mut held)?;
            let delta = self.gather_delta(stage, &d_out, &out)?;
            let d_part = self.gather(stage, self.parts(stage, |heads| select_heads(&d_out, heads)), &shape)?;
            let mut dq = None;
            if let (Some(q), Some(d_part), Some(delta), Some(lse)) = (q, d_part, delta, lse) {
                let (k, v, runs) = self.keys_values(stage, &held);
                let exact = accumulator(q.dtype());
                let heads = self.needed(stage);
                let (stage_dq, dk, dv) = attend_backward(
                    q.swap_dims(1, 2).cast(exact),
                    k.cast(exact),
                    v.cast(exact),
                    d_part.swap_dims(1, 2).cast(exact),
                    lse,
                    delta,
                    &runs,
                    sums.take(&heads),
                    &self.options,
                )?;
                sums.add(&heads, dk, dv);
                dq = Some(stage_dq.swap_dims(1, 2).cast(shape.dtype()));
            }
            for (part, dq) in stage.ranks.iter().zip(self.return_queries(stage, dq, &shape)?) {
                if let Some(dq) = dq {
                    source.add_queries(&part.queries, dq);
                }
            }
            held.release(&stage.ranks[rank]);
            self.return_gradients(stage, &mut sums, &shape, &mut source)?;
        }
        Ok(source.into_gradients())
    }

    /// What each rank gets of this rank's tokens: a part per rank, made one by one. A rank's heads are neighbours, so that parts of
    /// weights and of whole tensors are views.
    fn parts(&self, stage: &Stage, make: impl Fn(&[usize]) -> Tensor<4>) -> Parts {
        stage.ranks.iter().map(|rank| (!rank.queries.is_empty()).then(|| make(&rank.queries))).collect()
    }

    fn gather(&self, stage: &Stage, parts: Parts, shape: &HeadShape) -> Result<Option<Tensor<4>>> {
        let mine = stage.ranks[self.group.rank()].queries.len();
        gather_tokens(parts, mine, shape, &self.group, &self.q_layout)
    }

    fn gather_queries<S: StageSource>(&self, stage: &Stage, source: &S) -> Result<(Option<Tensor<4>>, HeadShape)> {
        let parts = self.parts(stage, |heads| source.queries(heads));
        let shape = HeadShape::of(parts.iter().flatten().next().expect("a stage has at least one head"));
        Ok((self.gather(stage, parts, &shape)?, shape))
    }

    /// Row sums of d_out * out [B, n, S] of this rank's heads: D times less to send than `out`.
    fn gather_delta(&self, stage: &Stage, d_out: &Tensor<4>, out: &Tensor<4>) -> Result<Option<Tensor<3>>> {
        let parts = self.parts(stage, |heads| {
            let one = |x: &Tensor<4>| select_heads(x, heads).swap_dims(1, 2);
            flash::delta(one(d_out), one(out)).swap_dims(1, 2).unsqueeze_dim::<4>(3)
        });
        let shape = HeadShape::of(parts.iter().flatten().next().expect("a stage has at least one head"));
        let delta = self.gather(stage, parts, &shape)?;
        Ok(delta.map(|delta| delta.squeeze_dim::<3>(3).swap_dims(1, 2)))
    }

    fn return_queries(&self, stage: &Stage, mine: Option<Tensor<4>>, shape: &HeadShape) -> Result<Parts> {
        let counts: Vec<usize> = stage.ranks.iter().map(|rank| rank.queries.len()).collect();
        return_tokens(mine, &counts, shape, &self.group, &self.q_layout)
    }

    /// Brings the key/value heads that arrive; ranks that get the same ones get the same projection.
    fn arrive<S: StageSource>(&self, stage: &Stage, source: &S, held: &mut Held) -> Result<()> {
        if stage.ranks.iter().all(|rank| rank.arriving.is_empty()) {
            return Ok(());
        }
        let (mut keys, mut values): (Parts, Parts) = (Vec::new(), Vec::new());
        for (index, rank) in stage.ranks.iter().enumerate() {
            let same = stage.ranks[..index].iter().position(|earlier| earlier.arriving == rank.arriving);
            let (k, v) = match same {
                _ if rank.arriving.is_empty() => (None, None),
                Some(same) => (keys[same].clone(), values[same].clone()),
                None => {
                    let (k, v) = source.keys_values(&rank.arriving);
                    (Some(k), Some(v))
                }
            };
            keys.push(k);
            values.push(v);
        }
        let shape = HeadShape::of(keys.iter().flatten().next().expect("some rank gets a head"));
        let mine = &stage.ranks[self.group.rank()].arriving;
        let k = gather_tokens(keys, mine.len(), &shape, &self.group, &self.kv_layout)?;
        let v = gather_tokens(values, mine.len(), &shape, &self.group, &self.kv_layout)?;
        if let (Some(k), Some(v)) = (k, v) {
            held.insert(mine, k, v);
        }
        Ok(())
    }

    /// The key/value heads that this rank's queries of the stage read, [B, G, S, D], and how they read them.
    fn keys_values(&self, stage: &Stage, held: &Held) -> (Tensor<4>, Tensor<4>, Vec<HeadRun>) {
        let needed = self.needed(stage);
        let (k, v) = held.select(&needed);
        let runs = self.schedule.split().runs(&stage.ranks[self.group.rank()].queries, &needed);
        (k.swap_dims(1, 2), v.swap_dims(1, 2), runs)
    }

    /// The key/value heads of this rank's queries, in increasing order.
    fn needed(&self, stage: &Stage) -> Vec<usize> {
        let queries = &stage.ranks[self.group.rank()].queries;
        let mut needed: Vec<usize> = queries.iter().map(|head| self.schedule.split().kv_of(*head)).collect();
        needed.dedup();
        needed
    }

    /// Sends the gradients of leaving heads back to where their tokens are. What several ranks send for the same heads is
    /// summed there, in rank order.
    fn return_gradients<S: StageSource>(
        &self,
        stage: &Stage,
        sums: &mut Sums,
        shape: &HeadShape,
        source: &mut S,
    ) -> Result<()> {
        if stage.ranks.iter().all(|rank| rank.leaving.is_empty()) {
            return Ok(());
        }
        let counts: Vec<usize> = stage.ranks.iter().map(|rank| rank.leaving.len()).collect();
        let mine = &stage.ranks[self.group.rank()].leaving;
        // Sent as they are summed, in f32: rounded to a half type only when all ranks' shares are in.
        let exact = accumulator(shape.dtype());
        let outgoing = |grad: Tensor<4>| grad.swap_dims(1, 2).cast(exact);
        let (dk, dv) = sums.take(mine).map(|(dk, dv)| (outgoing(dk), outgoing(dv))).unzip();
        let dk = return_tokens(dk, &counts, shape, &self.group, &self.kv_layout)?;
        let dv = return_tokens(dv, &counts, shape, &self.group, &self.kv_layout)?;
        let mut totals: Vec<(&Vec<usize>, Tensor<4>, Tensor<4>)> = Vec::new();
        for (rank, pair) in stage.ranks.iter().zip(dk.into_iter().zip(dv)) {
            let (Some(dk), Some(dv)) = pair else { continue };
            match totals.iter().position(|(heads, ..)| **heads == rank.leaving) {
                Some(at) => {
                    let (heads, k, v) = totals.swap_remove(at);
                    totals.push((heads, k + dk, v + dv));
                }
                None => totals.push((&rank.leaving, dk, dv)),
            }
        }
        for (heads, dk, dv) in totals {
            source.add_keys_values(heads, dk.cast(shape.dtype()), dv.cast(shape.dtype()));
        }
        Ok(())
    }
}
