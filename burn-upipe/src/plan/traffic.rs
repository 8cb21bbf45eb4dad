//! What crosses between ranks in one step, to the byte: from the schedules, splits and layouts that execution follows.
//!
//! B batch, S sequence, L local sequence, P ranks of a sequence, H query heads, D head dimension.

use burn_context_parallel::attention::HeadSplit;
use burn_context_parallel::fsdp::{Placement, gather_bytes, reduce_bytes};
use burn_context_parallel::group::{Operation, all_reduce_bytes};
use burn_context_parallel::sequence::SequenceLayout;

use super::{Attention, ModelShape, PlanError, Setup};
use crate::upipe::Schedule;

/// Why ranks talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TrafficKind {
    /// Heads for tokens, and back.
    Attention,
    /// Whole weights from shards.
    Gather,
    /// Gradients onto shards.
    Reduce,
    /// Gradients of what is whole on every rank.
    Gradients,
    /// One norm of all gradients.
    Norm,
    /// One loss.
    Loss,
}

impl TrafficKind {
    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Gather => "gather weights",
            Self::Reduce => "reduce gradients",
            Self::Gradients => "sum gradients",
            Self::Norm => "norm",
            Self::Loss => "loss",
        }
    }
}

/// One kind's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindTraffic {
    /// Why.
    pub kind: TrafficKind,
    /// By which collective.
    pub operation: Operation,
    /// How often a rank calls it.
    pub calls: usize,
    /// Bytes that it sends.
    pub sent: usize,
}

/// What `rank` sends in one step of training: all micro-batches, gradients made those of the whole, their norm, the loss.
///
/// What is computed again is exchanged again: under checkpoints attention's forward exchanges happen twice, and a block's weights are
/// gathered twice.
///
/// # Errors
///
/// [`PlanError`] if the setup cannot run.
///
/// # Panics
///
/// If there is no such rank.
///
/// ```
/// use burn_upipe::plan::{Attention, Setup, TrafficKind, model, traffic};
///
/// // Ulysses sends 7/8 of q, k, v and out: (2 + 2/4) H D values a token, here in 2 bytes.
/// let mut setup = Setup::published(model("llama-3-8b")?, 1 << 20, 8);
/// setup.techniques.attention = Attention::Ulysses;
/// let attention = traffic(&setup, 0)?.into_iter().find(|part| part.kind == TrafficKind::Attention).unwrap();
/// let u = (1 << 17) * 4096 * 2 * 7 / 8;
/// // Forward, forward again, backward, where a number a row and head (4 bytes to 256) comes on top.
/// assert_eq!(attention.sent, 32 * (3 * (2 * u + u / 2) + u / 64));
/// assert_eq!(attention.calls, 32 * (4 + 4 + 5));
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn traffic(setup: &Setup, rank: usize) -> Result<Vec<KindTraffic>, PlanError> {
    setup.check()?;
    let ranks = setup.ranks();
    assert!(rank < ranks, "rank {rank} of {ranks}");
    let mut parts = Vec::new();
    let passes = setup.accumulate;
    if setup.mesh.ulysses > 1 {
        let one = attention(setup, rank % setup.mesh.ulysses)?;
        let all = passes * setup.model.layers;
        parts.push(KindTraffic {
            kind: TrafficKind::Attention,
            operation: Operation::AllToAllUneven,
            calls: all * one.calls,
            sent: all * one.sent,
        });
    }
    if ranks > 1 {
        if setup.techniques.fsdp {
            sharded(setup, rank, &mut parts)
        } else {
            whole(setup, rank, &mut parts)
        }
        parts.push(KindTraffic {
            kind: TrafficKind::Loss,
            operation: Operation::AllReduce,
            calls: 1,
            sent: all_reduce_bytes(1, size_of::<f64>(), ranks, rank),
        });
    }
    Ok(parts)
}

/// The traffic of the rank that sends the most, and of all ranks where that is another one in each kind.
pub(super) fn most(setup: &Setup) -> Result<Vec<KindTraffic>, PlanError> {
    // Whole heads first and padding last: the ends are where ranks differ.
    let mut most = traffic(setup, 0)?;
    let last = traffic(setup, setup.ranks() - 1)?;
    for (most, last) in most.iter_mut().zip(last) {
        most.sent = most.sent.max(last.sent);
    }
    Ok(most)
}

#[derive(Clone, Copy, Debug, Default)]
struct Calls {
    calls: usize,
    sent: usize,
}

/// What one head costs a rank: its own tokens to another rank, and all others' tokens back to them.
struct Heads {
    batch: usize,
    local: usize,
    others: usize,
}

impl Heads {
    /// To heads: `away` heads go to other ranks.
    fn out(&self, away: usize, dim: usize, size: usize) -> Calls {
        Calls { calls: 1, sent: self.batch * self.local * away * dim * size }
    }

    /// To tokens: `mine` heads are held here.
    fn back(&self, mine: usize, dim: usize, size: usize) -> Calls {
        Calls { calls: 1, sent: self.batch * self.others * mine * dim * size }
    }
}

impl std::ops::AddAssign for Calls {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.sent += other.sent;
    }
}

/// One block's attention in one micro-batch: forward, forward again if a checkpoint asks for it, backward.
fn attention(setup: &Setup, rank: usize) -> Result<Calls, PlanError> {
    let ranks = setup.mesh.ulysses;
    let layout = SequenceLayout::contiguous(setup.seq_len, ranks)?;
    let local = layout.local_len(rank);
    let heads = Heads { batch: setup.batch, local, others: layout.padded_len() - local };
    let (model, size) = (&setup.model, setup.accounting.compute);
    let (forward, backward) = match setup.attention() {
        Attention::Single => Default::default(),
        Attention::Ulysses => {
            let split = HeadSplit::new(model.heads, model.kv_heads, ranks)?;
            ulysses(&split, rank, &heads, model.head_dim, size)
        }
        Attention::UPipe { per_stage } => {
            let per_stage = per_stage.unwrap_or_else(|| Schedule::default_per_stage(model.heads, ranks));
            let schedule = Schedule::new(model.heads, model.kv_heads, ranks, per_stage)?;
            upipe(&schedule, rank, &heads, model.head_dim, size)
        }
    };
    let mut all = forward;
    if setup.techniques.checkpoint.is_some() {
        all += forward;
    }
    all += backward;
    Ok(all)
}

/// Sums, and what is exchanged to make them, are in f32 at least.
fn exact(size: usize) -> usize {
    size.max(4)
}

fn ulysses(split: &HeadSplit, rank: usize, heads: &Heads, dim: usize, size: usize) -> (Calls, Calls) {
    let (mine, mine_kv) = (split.queries(rank).len(), split.keys(rank).len());
    let away = split.heads() - mine;
    let away_kv = (0..split.ranks()).map(|rank| split.keys(rank).len()).sum::<usize>() - mine_kv;
    let (mut forward, mut backward) = (Calls::default(), Calls::default());
    forward += heads.out(away, dim, size); // q
    forward += heads.out(away_kv, dim, size); // k
    forward += heads.out(away_kv, dim, size); // v
    forward += heads.back(mine, dim, size); // out
    backward += heads.out(away, 1, exact(size)); // delta
    backward += heads.out(away, dim, size); // d_out
    backward += heads.back(mine, dim, size); // dq
    backward += heads.back(mine_kv, dim, size); // dk
    backward += heads.back(mine_kv, dim, size); // dv
    (forward, backward)
}

fn upipe(schedule: &Schedule, rank: usize, heads: &Heads, dim: usize, size: usize) -> (Calls, Calls) {
    let (mut forward, mut backward) = (Calls::default(), Calls::default());
    for stage in schedule.stages() {
        let me = &stage.ranks[rank];
        let count = |of: &dyn Fn(&crate::upipe::RankStage) -> usize| stage.ranks.iter().map(of).sum::<usize>();
        let away = count(&|rank| rank.queries.len()) - me.queries.len();
        let (arriving, leaving) = (count(&|rank| rank.arriving.len()), count(&|rank| rank.leaving.len()));
        forward += heads.out(away, dim, size); // q
        backward += heads.out(away, dim, size);
        if arriving > 0 {
            for _ in ["k", "v"] {
                forward += heads.out(arriving - me.arriving.len(), dim, size);
                backward += heads.out(arriving - me.arriving.len(), dim, size);
            }
        }
        forward += heads.back(me.queries.len(), dim, size); // out
        backward += heads.out(away, 1, exact(size)); // delta
        backward += heads.out(away, dim, size); // d_out
        backward += heads.back(me.queries.len(), dim, size); // dq
        if leaving > 0 {
            for _ in ["dk", "dv"] {
                backward += heads.back(me.leaving.len(), dim, exact(size));
            }
        }
    }
    (forward, backward)
}

/// A module whose weights are gathered at once.
struct Unit {
    matrices: Vec<usize>,
    /// How often in one micro-batch.
    gathers: usize,
}

/// Elements of one block's matrices: q, k, v, out; gate, up, down.
fn matrices(model: &ModelShape) -> ([usize; 4], [usize; 3]) {
    let q = model.width * model.heads * model.head_dim;
    let kv = model.width * model.kv_heads * model.head_dim;
    ([q, kv, kv, q], [model.width * model.inner; 3])
}

/// Elements of the vectors, which no rank shares out: norms and biases, each a parameter.
fn vectors(model: &ModelShape) -> Vec<usize> {
    let mut block = vec![model.width, model.width];
    if model.qkv_bias {
        block.extend([model.heads, model.kv_heads, model.kv_heads].map(|heads| heads * model.head_dim));
    }
    if model.qk_norm {
        block.extend([model.head_dim; 2]);
    }
    let mut all = block.repeat(model.layers);
    all.push(model.width);
    all
}

/// What is gathered together: what is recomputed as a whole, and all else matrix by matrix.
fn units(setup: &Setup) -> Vec<Unit> {
    let (model, techniques) = (&setup.model, &setup.techniques);
    let one = |elements: usize| Unit { matrices: vec![elements], gathers: 1 };
    let (attention, mlp) = matrices(model);
    let block: Vec<usize> = attention.into_iter().chain(mlp).collect();
    let mut units = vec![one(model.table())];
    match techniques.checkpoint {
        // Several of one checkpoint are gathered one by one all the same.
        Some(_) => units.extend((0..model.layers).map(|_| Unit { matrices: block.clone(), gathers: 2 })),
        None => {
            for _ in 0..model.layers {
                units.extend(attention.map(one));
                match techniques.mlp_tile {
                    Some(_) => units.push(Unit { matrices: mlp.to_vec(), gathers: 2 }),
                    None => units.extend(mlp.map(one)),
                }
            }
        }
    }
    // The output layer, or the table in its place.
    units.push(Unit { matrices: vec![model.table()], gathers: if techniques.loss_tile.is_some() { 2 } else { 1 } });
    units
}

/// Under FSDP over all ranks.
fn sharded(setup: &Setup, rank: usize, parts: &mut Vec<KindTraffic>) {
    let (ranks, accounting) = (setup.ranks(), &setup.accounting);
    // What has fewer elements than ranks stays whole.
    let shards = |elements: &usize| Placement::shards(&[1, *elements], ranks, 0);
    let (mut gather, mut reduce) = (Calls::default(), Calls::default());
    for unit in units(setup) {
        let sharded = || unit.matrices.iter().filter(|elements| shards(elements));
        if sharded().next().is_none() {
            continue;
        }
        gather.calls += unit.gathers;
        gather.sent += unit.gathers * sharded().map(|n| gather_bytes(*n, ranks, accounting.compute)).sum::<usize>();
        reduce.calls += 1;
        reduce.sent += sharded().map(|n| reduce_bytes(*n, 1, ranks, accounting.compute)).sum::<usize>();
    }
    let passes = setup.accumulate;
    let vectors = vectors(&setup.model);
    let norms = vectors.iter().sum::<usize>() + vectors.len();
    parts.extend([
        KindTraffic {
            kind: TrafficKind::Gather,
            operation: Operation::AllGather,
            calls: passes * gather.calls,
            sent: passes * gather.sent,
        },
        KindTraffic {
            kind: TrafficKind::Reduce,
            operation: Operation::ReduceScatter,
            calls: passes * reduce.calls,
            sent: passes * reduce.sent,
        },
        KindTraffic {
            kind: TrafficKind::Gradients,
            operation: Operation::AllReduce,
            calls: 1,
            sent: all_reduce_bytes(norms, exact(accounting.gradient), ranks, rank),
        },
        KindTraffic {
            kind: TrafficKind::Norm,
            operation: Operation::AllReduce,
            calls: 1,
            sent: all_reduce_bytes(1, size_of::<f64>(), ranks, rank),
        },
    ]);
}

/// With the whole model on every rank: one sum a parameter.
fn whole(setup: &Setup, rank: usize, parts: &mut Vec<KindTraffic>) {
    let (model, ranks) = (&setup.model, setup.ranks());
    let (attention, mlp) = matrices(model);
    let mut parameters: Vec<usize> = attention.into_iter().chain(mlp).collect::<Vec<_>>().repeat(model.layers);
    parameters.extend(vectors(model));
    parameters.push(model.table());
    parameters.extend(Some(model.head()).filter(|head| *head > 0));
    parts.extend([
        KindTraffic {
            kind: TrafficKind::Gradients,
            operation: Operation::AllReduce,
            calls: parameters.len(),
            sent: parameters.iter().map(|n| all_reduce_bytes(*n, setup.accounting.gradient, ranks, rank)).sum(),
        },
        KindTraffic {
            kind: TrafficKind::Norm,
            operation: Operation::Broadcast,
            calls: 1,
            sent: if rank == 0 { (ranks - 1) * size_of::<f64>() } else { 0 },
        },
    ]);
}
