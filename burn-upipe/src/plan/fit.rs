//! The fastest setup that fits a sequence.

use burn_context_parallel::group::{MAX_RANKS, MeshShape};

use super::plan::{exceeded, late};
use super::published::{LOSS_TILE, MLP_TILE, NORM_TILE};
use super::{
    Attention, Machines, Memory, OffloadPlan, PlanError, Setup, StatePlace, Techniques, WaitingPlace, limit, memory,
    time,
};

/// Which ways to attend a search may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionChoice {
    /// All heads at once, and all of [`Staged`](Self::Staged).
    Any,
    /// U-Pipe, with every number of heads a stage that keeps all ranks equally busy: multiples of the ranks, up to all heads.
    Staged,
    /// This one.
    Held(Attention),
}

/// What a search may choose from; a list of one holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Choices {
    /// Meshes.
    pub mesh: Vec<MeshShape>,
    /// Ways to attend.
    pub attention: AttentionChoice,
    /// Blocks a checkpoint.
    pub checkpoint: Vec<Option<usize>>,
    /// Tiles of the feed-forward.
    pub mlp_tile: Vec<Option<usize>>,
    /// Tiles of the norms.
    pub norm_tile: Vec<Option<usize>>,
    /// Tiles of the loss.
    pub loss_tile: Vec<Option<usize>>,
    /// Where block inputs wait, and how many of them.
    pub offload: Vec<Option<OffloadPlan>>,
    /// Shards, or not.
    pub fsdp: Vec<bool>,
    /// Under shards: whether the next block's weights are gathered ahead.
    pub prefetch: Vec<bool>,
    /// Where the optimizer is.
    pub optimizer: Vec<StatePlace>,
}

/// Of the inputs that checkpoints keep, one in so many leaves.
const EVERY: [usize; 3] = [1, 2, 4];

impl Choices {
    /// All there are on so many devices: every mesh; checkpoints of 1, 2 and 4 blocks, or none; tiles of 512, 2048 and 8192 tokens, or
    /// none; every input of a checkpoint, every second or fourth to host or disk, or none; shards or none, and the optimizer on device or host.
    pub fn all(devices: usize) -> Self {
        let tiles = || [None, Some(LOSS_TILE), Some(MLP_TILE), Some(NORM_TILE)].to_vec();
        let usual = Techniques::all().offload;
        let waiting = |place| EVERY.map(|every| usual.map(|usual| OffloadPlan { place, every, ..usual }));
        let mut offload = vec![None];
        offload.extend(waiting(WaitingPlace::Host));
        offload.extend(waiting(WaitingPlace::Disk));
        Self {
            mesh: (1..=devices.min(MAX_RANKS))
                .filter(|ulysses| devices.is_multiple_of(*ulysses))
                .map(|ulysses| MeshShape { data: devices / ulysses, ulysses, ..MeshShape::default() })
                .collect(),
            attention: AttentionChoice::Any,
            checkpoint: vec![None, Some(1), Some(2), Some(4)],
            mlp_tile: tiles(),
            norm_tile: tiles(),
            loss_tile: tiles(),
            offload,
            fsdp: vec![true, false],
            prefetch: vec![true, false],
            optimizer: vec![StatePlace::Device, StatePlace::Host],
        }
    }

    /// The ways to attend that a mesh has; of those in stages the smallest first.
    fn attention(&self, mesh: MeshShape, heads: usize) -> Vec<Attention> {
        let ranks = mesh.ulysses.max(1);
        // A single stage exchanges everything at once, as without stages: only for who wants stages.
        let most = if self.attention == AttentionChoice::Any { heads.saturating_sub(1) } else { heads };
        let stages = (1..=most / ranks).map(|each| Attention::UPipe { per_stage: Some(ranks * each) });
        let whole = if ranks == 1 { Attention::Single } else { Attention::Ulysses };
        match self.attention {
            AttentionChoice::Held(attention) => vec![attention],
            AttentionChoice::Any => std::iter::once(whole).chain(stages).collect(),
            // Where ranks outnumber heads, one stage has all of them.
            AttentionChoice::Staged if most < ranks => vec![Attention::UPipe { per_stage: Some(heads) }],
            AttentionChoice::Staged => stages.collect(),
        }
    }

    /// All else, with the smallest of the tiles: of two sizes the larger one takes no less, and no other time.
    fn techniques(&self) -> Vec<Techniques> {
        fn each<T: Copy>(all: Vec<Techniques>, values: &[T], set: impl Fn(&mut Techniques, T)) -> Vec<Techniques> {
            let with = |base: &Techniques, value| {
                let mut techniques = *base;
                set(&mut techniques, value);
                techniques
            };
            all.iter().flat_map(|base| values.iter().map(|value| with(base, *value)).collect::<Vec<_>>()).collect()
        }
        let mut all = vec![Techniques::none()];
        all = each(all, &self.fsdp, |techniques, fsdp| techniques.fsdp = fsdp);
        all = each(all, &self.prefetch, |techniques, prefetch| techniques.prefetch = prefetch);
        // Without shards nothing is gathered, ahead or not.
        all.retain(|techniques| techniques.fsdp || Some(&techniques.prefetch) == self.prefetch.first());
        all = each(all, &self.optimizer, |techniques, optimizer| techniques.optimizer = optimizer);
        all = each(all, &self.checkpoint, |techniques, checkpoint| techniques.checkpoint = checkpoint);
        all = each(all, &self.offload, |techniques, offload| techniques.offload = offload);
        // What no checkpoint keeps does not wait.
        all.retain(|techniques| techniques.checkpoint.is_some() || techniques.offload.is_none());
        all = each(all, &smallest(&self.mlp_tile), |techniques, tile| techniques.mlp_tile = tile);
        all = each(all, &smallest(&self.norm_tile), |techniques, tile| techniques.norm_tile = tile);
        each(all, &smallest(&self.loss_tile), |techniques, tile| techniques.loss_tile = tile)
    }

    /// `found` with tiles as large as fit, the feed-forward's first, then the loss': small products are slow, though no estimate here says so.
    fn with_large_tiles(&self, found: Setup, machines: &Machines) -> Result<Setup, PlanError> {
        let held = found.techniques;
        for mlp_tile in largest_first(&self.mlp_tile, held.mlp_tile) {
            for loss_tile in largest_first(&self.loss_tile, held.loss_tile) {
                for norm_tile in largest_first(&self.norm_tile, held.norm_tile) {
                    let techniques = Techniques { mlp_tile, norm_tile, loss_tile, ..held };
                    let setup = Setup { techniques, ..found.clone() };
                    if limit(&setup, machines, None)?.is_none() {
                        return Ok(setup);
                    }
                }
            }
        }
        Ok(found)
    }
}

/// None if it is there, and the smallest size.
fn smallest(tiles: &[Option<usize>]) -> Vec<Option<usize>> {
    let none = tiles.iter().find(|tile| tile.is_none()).copied();
    let some = tiles.iter().flatten().min().map(|tile| Some(*tile));
    none.into_iter().chain(some).collect()
}

fn largest_first(tiles: &[Option<usize>], found: Option<usize>) -> Vec<Option<usize>> {
    let mut sizes: Vec<Option<usize>> =
        tiles.iter().filter(|tile| tile.is_some() == found.is_some()).copied().collect();
    sizes.sort_unstable_by(|one, other| other.cmp(one));
    sizes
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The fastest that fits. If none does: the fastest within all memory, where time is the limit; otherwise the one that needs the least
    /// device memory.
    pub setup: Setup,
    /// How many fit. Setups that differ in the sizes of tiles only are one.
    pub fitting: usize,
    /// Of how many that can run.
    pub tried: usize,
}

/// Seconds that differ by less are the same: an estimate is no better.
const SAME: f64 = 1.001;

/// One that fits.
struct Fitting {
    /// Its place among all.
    at: usize,
    /// Of a step, over the sequences that are trained on side by side.
    seconds: f64,
    peak: usize,
    setup: Setup,
}

/// What was found so far.
#[derive(Default)]
struct Found {
    fitting: Vec<Fitting>,
    /// Of those that would fit if time were no limit the fastest.
    late: Option<Fitting>,
    /// Of those that do not fit the smallest.
    least: Option<(usize, Setup)>,
    tried: usize,
}

impl Found {
    fn note(
        &mut self,
        setup: Setup,
        memory: &Memory,
        machines: &Machines,
        seconds: Option<f64>,
    ) -> Result<(), PlanError> {
        let at = self.tried;
        self.tried += 1;
        let peak = memory.peak().map_or(0, |phase| phase.total());
        if exceeded(memory, &machines.budget()).is_some() {
            if self.least.as_ref().is_none_or(|(least, _)| peak < *least) {
                self.least = Some((peak, setup));
            }
            return Ok(());
        }
        let step = time(&setup, machines)?;
        // A step's own time is its limit; the sequences of replicas share it.
        let one = Fitting { at, seconds: step.seconds() / setup.mesh.data as f64, peak, setup };
        if late(&step, seconds).is_none() {
            self.fitting.push(one);
        } else if self.late.as_ref().is_none_or(|late| one.seconds < late.seconds) {
            self.late = Some(one);
        }
        Ok(())
    }
}

/// The fastest of all combinations that fit `base`'s sequence length: most tokens a second over all devices. Of equally fast ones
/// (within a thousandth) the one with the fewest techniques, of those one that gathers ahead, of those the one that needs the least device
/// memory with the smallest tiles; its own tiles are as large as fit.
///
/// # Errors
///
/// [`PlanError`] if none of them can run at all.
///
/// ```
/// use burn_upipe::plan::{Choices, Machines, Setup, device, fit, limit, model};
///
/// let machines = Machines { hardware: device("h100-80g")?, count: 8 };
/// let setup = Setup::published(model("llama-3-8b")?, 1 << 18, 8);
/// let held = Choices { checkpoint: vec![Some(1)], ..Choices::all(8) };
/// let found = fit(&setup, &machines, &held, None)?;
/// assert!(found.fitting > 0 && limit(&found.setup, &machines, None)?.is_none());
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn fit(base: &Setup, machines: &Machines, choices: &Choices, seconds: Option<f64>) -> Result<Fit, PlanError> {
    let (mut found, all) = (Found::default(), choices.techniques());
    for mesh in choices.mesh.iter().filter(|mesh| mesh.check(machines.count).is_ok()) {
        let ways = choices.attention(*mesh, base.model.heads);
        for techniques in &all {
            // One rank has nothing to share out.
            if techniques.fsdp && mesh.ranks() == Some(1) && choices.fsdp.contains(&false) {
                continue;
            }
            // One head a rank and stage, the first of those with several stages, takes the least of them: where it is too much, all are.
            let mut too_much = None;
            for attention in &ways {
                let staged =
                    matches!(attention, Attention::UPipe { per_stage: Some(some) } if *some < base.model.heads);
                if staged && too_much == Some(true) {
                    found.tried += 1;
                    continue;
                }
                let techniques = Techniques { attention: *attention, ..*techniques };
                let setup = Setup { mesh: *mesh, techniques, ..base.clone() };
                // Some do not go together.
                let Ok(memory) = memory(&setup) else { continue };
                if staged && too_much.is_none() {
                    too_much = Some(exceeded(&memory, &machines.budget()).is_some());
                }
                found.note(setup, &memory, machines, seconds)?;
            }
        }
    }
    let Found { fitting, late, least, tried } = found;
    let fastest = fitting.iter().map(|found| found.seconds).fold(f64::INFINITY, f64::min);
    let count = fitting.len();
    let best = fitting
        .into_iter()
        .filter(|found| found.seconds <= SAME * fastest)
        .min_by_key(|Fitting { at, peak, setup, .. }| {
            (setup.techniques.count(), !setup.techniques.prefetch, *peak, *at)
        })
        .map(|found| found.setup);
    let fastest = best.or(late.map(|late| late.setup));
    match (fastest, least) {
        (Some(setup), _) => Ok(Fit { setup: choices.with_large_tiles(setup, machines)?, fitting: count, tried }),
        (None, Some((_, setup))) => Ok(Fit { setup, fitting: 0, tried }),
        (None, None) => {
            // What is wrong with the first is wrong with all.
            base.check_on(machines)?;
            Err(PlanError::invalid("no combination of these can run", "hold fewer of them"))
        }
    }
}
