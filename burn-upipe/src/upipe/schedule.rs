//! The stage schedule: which query and key/value heads each rank holds at each stage, and what is exchanged.

use std::fmt;

use burn_context_parallel::attention::HeadSplit;
use burn_context_parallel::{Error, Result};

/// The most query heads of a [`Schedule`].
pub const MAX_HEADS: usize = 1 << 14;

/// The most entries of a [`Schedule`], stages times ranks.
pub const MAX_ENTRIES: usize = 1 << 20;

/// Every stage of one U-Pipe attention: a pure value, the same on all ranks.
///
/// Each rank owns consecutive query heads, as in Ulysses ([`HeadSplit`]), and walks them in order. A stage takes U heads: the
/// next one of every rank in turn, until U are taken. So the key/value heads that a rank needs come in increasing order: each
/// arrives once, stays while its query heads are served, and leaves (as gradients, in backward) once. With U a multiple
/// of P all ranks have equal work in a stage; any other U from 1 to H works, too.
///
/// ```
/// use burn_upipe::upipe::Schedule;
///
/// let schedule = Schedule::new(8, 2, 2, 4)?;
/// assert_eq!(schedule.to_string(), "\
/// 8/2 heads, 2 ranks, 4 heads a stage, 2 stages
/// stage 0 | rank 0: q 0 1 kv 0 (+0) | rank 1: q 4 5 kv 1 (+1)
/// stage 1 | rank 0: q 2 3 kv 0 (-0) | rank 1: q 6 7 kv 1 (-1)
/// ");
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    split: HeadSplit,
    per_stage: usize,
    stages: Vec<Stage>,
    widest: (usize, usize, usize),
}

/// What every rank does in one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// One entry a rank.
    pub ranks: Vec<RankStage>,
}

/// One rank's part of a stage. Heads are numbered globally, each list is increasing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankStage {
    /// Query heads that it attends with.
    pub queries: Vec<usize>,
    /// Key/value heads that it holds during the stage.
    pub held: Vec<usize>,
    /// Those of them that arrive at its start.
    pub arriving: Vec<usize>,
    /// Those of them that it needs no more: their gradients leave at its end.
    pub leaving: Vec<usize>,
}

impl Schedule {
    /// The schedule of `heads` query and `kv_heads` key/value heads over `ranks`, `per_stage` query heads (over all ranks) a
    /// stage.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `per_stage` is not in `1..=heads`, the counts do not fit ([`HeadSplit::new`]), or they are beyond
    /// [`MAX_HEADS`] or [`MAX_ENTRIES`].
    ///
    /// # Memory
    ///
    /// About 100 bytes an entry.
    pub fn new(heads: usize, kv_heads: usize, ranks: usize, per_stage: usize) -> Result<Self> {
        let split = HeadSplit::new(heads, kv_heads, ranks)?;
        if per_stage == 0 || per_stage > heads {
            return Err(Error::invalid(
                "Schedule::new",
                format!("{per_stage} heads a stage of {heads} query heads"),
                format!("use 1 to {heads}; a multiple of the ranks ({ranks}) keeps all of them equally busy"),
            ));
        }
        let entries = heads.div_ceil(per_stage).saturating_mul(ranks);
        if heads > MAX_HEADS || entries > MAX_ENTRIES {
            return Err(Error::invalid(
                "Schedule::new",
                format!("{heads} heads, {per_stage} a stage, on {ranks} ranks"),
                format!(
                    "use at most {MAX_HEADS} heads, and more of them a stage: stages times ranks are at most {MAX_ENTRIES}"
                ),
            ));
        }
        let longest = split.queries(0).len(); // rank 0 is never shorter than another
        let turns: Vec<(usize, usize)> = (0..longest)
            .flat_map(|turn| {
                let split = &split;
                (0..ranks).filter_map(move |rank| split.queries(rank).nth(turn).map(|head| (rank, head)))
            })
            .collect();
        let mut stages: Vec<Stage> = turns
            .chunks(per_stage)
            .map(|taken| {
                let mut stage = Stage { ranks: vec![RankStage::default(); ranks] };
                for (rank, head) in taken {
                    stage.ranks[*rank].queries.push(*head);
                }
                stage
            })
            .collect();
        for rank in 0..ranks {
            for kv in split.keys(rank) {
                let serves = |stage: &Stage| stage.ranks[rank].queries.iter().any(|head| split.kv_of(*head) == kv);
                let first = stages.iter().position(serves).expect("a rank's keys are those of its queries");
                let last = stages.iter().rposition(serves).expect("found from the front");
                stages[first].ranks[rank].arriving.push(kv);
                stages[last].ranks[rank].leaving.push(kv);
                for stage in &mut stages[first..=last] {
                    stage.ranks[rank].held.push(kv);
                }
            }
        }
        let all = || stages.iter().flat_map(|stage| &stage.ranks);
        let most = |count: &dyn Fn(&RankStage) -> usize| all().map(count).max().unwrap_or(0);
        let widest =
            (most(&|rank| rank.queries.len()), most(&|rank| rank.held.len()), most(&|rank| rank.arriving.len()));
        Ok(Self { split, per_stage, stages, widest })
    }

    /// The most heads that any rank has at once: (query heads of a stage, key/value heads held, those that arrive together).
    pub(super) fn widest(&self) -> (usize, usize, usize) {
        self.widest
    }

    /// The default number of query heads a stage: one a rank, so that the buffers are as small as they get with all ranks busy.
    pub fn default_per_stage(heads: usize, ranks: usize) -> usize {
        ranks.clamp(1, heads.max(1))
    }

    /// Whether the default is a single stage of all heads, which saves nothing and exchanges twice: Ulysses runs in its place.
    pub fn is_single_by_default(heads: usize, ranks: usize) -> bool {
        Self::default_per_stage(heads, ranks) >= heads
    }

    /// How heads are split over ranks.
    pub fn split(&self) -> &HeadSplit {
        &self.split
    }

    /// Query heads a stage over all ranks, U.
    pub fn per_stage(&self) -> usize {
        self.per_stage
    }

    /// The stages, in order.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }
}

impl Stage {
    /// All query heads of the stage, rank by rank: the order in which they are projected.
    pub fn queries(&self) -> Vec<usize> {
        self.ranks.iter().flat_map(|rank| rank.queries.iter().copied()).collect()
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}/{} heads, {} ranks, {} heads a stage, {} stages",
            self.split.heads(),
            self.split.kv_heads(),
            self.split.ranks(),
            self.per_stage,
            self.stages.len()
        )?;
        for (index, stage) in self.stages.iter().enumerate() {
            write!(f, "stage {index}")?;
            for (rank, part) in stage.ranks.iter().enumerate() {
                write!(f, " | rank {rank}: q{} kv{}", Heads("", &part.queries), Heads("", &part.held))?;
                let moves = format!("{}{}", Heads("+", &part.arriving), Heads("-", &part.leaving));
                if !moves.is_empty() {
                    write!(f, " ({})", moves.trim_start())?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

struct Heads<'a>(&'static str, &'a [usize]);

impl fmt::Display for Heads<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.iter().try_for_each(|head| write!(f, " {}{head}", self.0))
    }
}
