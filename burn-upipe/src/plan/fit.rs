//! The fastest setup that fits a sequence.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::thread;

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

    /// Each mesh with each way to attend that it has.
    fn attention(&self, heads: usize) -> Vec<(MeshShape, Attention)> {
        let of = |mesh: MeshShape| {
            let ranks = mesh.ulysses.max(1);
            // A single stage exchanges everything at once, as without stages: only for who wants stages.
            let most = if self.attention == AttentionChoice::Any { heads.saturating_sub(1) } else { heads };
            let stages = (1..=most / ranks).map(move |each| Attention::UPipe { per_stage: Some(ranks * each) });
            let whole = if ranks == 1 { Attention::Single } else { Attention::Ulysses };
            match self.attention {
                AttentionChoice::Held(attention) => vec![attention],
                AttentionChoice::Any => std::iter::once(whole).chain(stages).collect(),
                // Where ranks outnumber heads, one stage has all of them.
                AttentionChoice::Staged if most < ranks => vec![Attention::UPipe { per_stage: Some(heads) }],
                AttentionChoice::Staged => stages.collect(),
            }
        };
        self.mesh.iter().flat_map(|mesh| of(*mesh).into_iter().map(|attention| (*mesh, attention))).collect()
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
    fn with_large_tiles(&self, found: Setup, machines: &Machines, seconds: Option<f64>) -> Result<Setup, PlanError> {
        let held = found.techniques;
        for mlp_tile in largest_first(&self.mlp_tile, held.mlp_tile) {
            for loss_tile in largest_first(&self.loss_tile, held.loss_tile) {
                for norm_tile in largest_first(&self.norm_tile, held.norm_tile) {
                    let techniques = Techniques { mlp_tile, norm_tile, loss_tile, ..held };
                    let setup = Setup { techniques, ..found.clone() };
                    if limit(&setup, machines, seconds)?.is_none() {
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
    /// The fastest that fits; if none does, the one that needs the least device memory.
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

/// What was found in a part of all combinations.
#[derive(Default)]
struct Found {
    fitting: Vec<Fitting>,
    /// Of those that do not fit the smallest: bytes, place and setup.
    least: Option<(usize, usize, Setup)>,
    tried: usize,
}

impl Found {
    fn and(mut self, other: Self) -> Self {
        self.fitting.extend(other.fitting);
        self.tried += other.tried;
        let least = self.least.into_iter().chain(other.least).min_by_key(|(peak, at, _)| (*peak, *at));
        Self { least, ..self }
    }
}

/// Every `step`th of the ways to attend, from the `first` on, with everything else.
struct Search<'a> {
    base: &'a Setup,
    machines: &'a Machines,
    seconds: Option<f64>,
    attention: Vec<(MeshShape, Attention)>,
    techniques: Vec<Techniques>,
    /// Whether there may be no shards, too.
    whole: bool,
}

impl Search<'_> {
    fn part(&self, first: usize, step: usize) -> Result<Found, PlanError> {
        let (budget, mut found) = (self.machines.budget(), Found::default());
        // What of a mesh's states alone is too much, fits with nothing else.
        let mut states: HashMap<(usize, bool, bool), usize> = HashMap::new();
        for (place, (mesh, attention)) in self.attention.iter().enumerate().skip(first).step_by(step) {
            if mesh.check(self.machines.count).is_err() {
                continue;
            }
            for (at, techniques) in self.techniques.iter().enumerate() {
                let at = place * self.techniques.len() + at;
                let techniques = Techniques { attention: *attention, ..*techniques };
                let setup = Setup { mesh: *mesh, techniques, ..self.base.clone() };
                // One rank has nothing to share out.
                if techniques.fsdp && self.whole && setup.ranks() == 1 {
                    continue;
                }
                let key = (mesh.ulysses, techniques.fsdp, techniques.optimizer == StatePlace::Host);
                let known = states.get(&key).copied().unwrap_or(0);
                if known > budget.device && found.least.as_ref().is_some_and(|(least, ..)| known >= *least) {
                    found.tried += usize::from(setup.check().is_ok());
                    continue;
                }
                // Some do not go together.
                let Ok(memory) = memory(&setup) else { continue };
                found.tried += 1;
                states.entry(key).or_insert_with(|| states_of(&memory));
                let peak = memory.peak().map_or(0, |phase| phase.total());
                if exceeded(&memory, &budget).is_none() {
                    let step = time(&setup, self.machines)?;
                    if late(&step, self.seconds).is_none() {
                        let seconds = step.seconds() / mesh.data as f64;
                        found.fitting.push(Fitting { at, seconds, peak, setup });
                        continue;
                    }
                }
                if found.least.as_ref().is_none_or(|(least, ..)| peak < *least) {
                    found.least = Some((peak, at, setup));
                }
            }
        }
        Ok(found)
    }

    /// All of them, on all cores; the order does not matter.
    fn all(&self) -> Result<Found, PlanError> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let step = cores.min(self.attention.len()).max(1);
        thread::scope(|scope| {
            let parts: Vec<_> = (0..step).map(|first| scope.spawn(move || self.part(first, step))).collect();
            let ended = parts.into_iter().map(|part| part.join().unwrap_or_else(|panic| resume_unwind(panic)));
            ended.reduce(|one, other| Ok(one?.and(other?))).unwrap_or_else(|| Ok(Found::default()))
        })
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
/// use burn_upipe::plan::{Attention, Choices, Machines, Setup, device, fit, limit, model};
///
/// let machines = Machines { hardware: device("h100-80g")?, count: 8 };
/// let setup = Setup::published(model("llama-3-8b")?, 1 << 18, 8);
/// let held = Choices { checkpoint: vec![Some(1)], ..Choices::all(8) };
/// let found = fit(&setup, &machines, &held, None)?;
/// assert!(found.fitting > 0 && limit(&found.setup, &machines, None)?.is_none());
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn fit(base: &Setup, machines: &Machines, choices: &Choices, seconds: Option<f64>) -> Result<Fit, PlanError> {
    let search = Search {
        base,
        machines,
        seconds,
        attention: choices.attention(base.model.heads),
        techniques: choices.techniques(),
        whole: choices.fsdp.contains(&false),
    };
    let Found { fitting, least, tried } = search.all()?;
    let fastest = fitting.iter().map(|found| found.seconds).fold(f64::INFINITY, f64::min);
    let count = fitting.len();
    let best = fitting
        .into_iter()
        .filter(|found| found.seconds <= SAME * fastest)
        .min_by_key(|Fitting { at, peak, setup, .. }| {
            (setup.techniques.count(), !setup.techniques.prefetch, *peak, *at)
        })
        .map(|found| found.setup);
    match (best, least) {
        (Some(setup), _) => {
            Ok(Fit { setup: choices.with_large_tiles(setup, machines, seconds)?, fitting: count, tried })
        }
        (None, Some((.., setup))) => Ok(Fit { setup, fitting: 0, tried }),
        (None, None) => {
            // What is wrong with the first is wrong with all.
            base.check_on(machines)?;
            Err(PlanError::invalid("no combination of these can run", "hold fewer of them"))
        }
    }
}

/// Bytes of weights and optimizer state, which are there in every phase.
fn states_of(memory: &Memory) -> usize {
    let first = memory.phases.first();
    let part = |name| first.and_then(|phase| phase.parts.get(name)).copied().unwrap_or(0);
    part("weights") + part("optimizer state")
}
