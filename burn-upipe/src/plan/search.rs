//! The longest sequence that fits, and the fastest setup for a given one.

use burn_context_parallel::group::MeshShape;
use burn_context_parallel::sequence::MAX_TOKENS;

use super::plan::{exceeded, late};
use super::published::{LOSS_TILE, MLP_TILE, NORM_TILE};
use super::{
    Attention, Limit, Machines, OffloadPlan, PlanError, Setup, StatePlace, Techniques, WaitingPlace, memory, time,
};

/// Where a sequence cannot grow further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Longest {
    /// Tokens, a multiple of the ranks that share them; 0 if no sequence fits.
    pub seq_len: usize,
    /// What the next one runs into.
    pub limit: Limit,
}

/// What `setup` runs into, if anything.
///
/// # Errors
///
/// As [`memory`].
pub fn limit(setup: &Setup, machines: &Machines, seconds: Option<f64>) -> Result<Option<Limit>, PlanError> {
    if let Some(limit) = exceeded(&memory(setup)?, &machines.budget()) {
        return Ok(Some(limit));
    }
    match seconds {
        Some(_) => Ok(late(&time(setup, machines)?, seconds)),
        None => Ok(None),
    }
}

/// The longest sequence of `setup` that fits, and if `seconds` says so in no longer a step. A multiple of the ranks that share it: the
/// next one does not fit.
///
/// # Errors
///
/// [`PlanError`] if the setup cannot run at all.
///
/// ```
/// use burn_upipe::plan::{Limit, Machines, Setup, device, longest, model};
///
/// let machines = Machines { hardware: device("h100-80g")?, count: 8 };
/// let setup = Setup::published(model("llama-3-8b")?, 1, 8);
/// let alone = longest(&setup, &machines, None)?;
/// assert_eq!(alone.limit, Limit::DeviceMemory);
/// // An hour a step is a limit, too.
/// let hour = longest(&setup, &machines, Some(60.0))?;
/// assert!(hour.seq_len < alone.seq_len && hour.limit == Limit::Time);
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn longest(setup: &Setup, machines: &Machines, seconds: Option<f64>) -> Result<Longest, PlanError> {
    let step = setup.mesh.ulysses.max(1);
    let with = |steps: usize| Setup { seq_len: steps * step, ..setup.clone() };
    with(1).check_on(machines)?;
    let at = |steps: usize| limit(&with(steps), machines, seconds);
    if let Some(limit) = at(1)? {
        return Ok(Longest { seq_len: 0, limit });
    }
    // `fits` does; `not` does not, because of `binding`, or is beyond what can be counted.
    let (mut fits, mut not, mut binding) = (1, MAX_TOKENS / step + 1, Limit::None);
    while not - fits > 1 {
        // Doubling first: what is asked about stays near what there is.
        let middle = if binding == Limit::None && fits * 2 < not { fits * 2 } else { fits + (not - fits) / 2 };
        match with(middle).check().map_err(drop).and_then(|()| at(middle).map_err(drop)) {
            Ok(None) => fits = middle,
            Ok(Some(limit)) => (not, binding) = (middle, limit),
            Err(()) => not = middle,
        }
    }
    Ok(Longest { seq_len: fits * step, limit: binding })
}

/// What a search may choose from; a list of one holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Choices {
    /// Meshes.
    pub mesh: Vec<MeshShape>,
    /// Ways to attend; `None` for all that a mesh has: U-Pipe with one head a rank and stage, two, four, ...
    pub attention: Option<Vec<Attention>>,
    /// Blocks a checkpoint.
    pub checkpoint: Vec<Option<usize>>,
    /// Tiles of the feed-forward.
    pub mlp_tile: Vec<Option<usize>>,
    /// Tiles of the norms.
    pub norm_tile: Vec<Option<usize>>,
    /// Tiles of the loss.
    pub loss_tile: Vec<Option<usize>>,
    /// Where block inputs wait.
    pub offload: Vec<Option<OffloadPlan>>,
    /// Shards, or not.
    pub fsdp: Vec<bool>,
    /// Where the optimizer is.
    pub optimizer: Vec<StatePlace>,
}

impl Choices {
    /// All there are on so many devices.
    pub fn all(devices: usize) -> Self {
        let waiting = |place| Some(OffloadPlan::to(place));
        Self {
            mesh: (1..=devices)
                .filter(|ulysses| devices.is_multiple_of(*ulysses))
                .map(|ulysses| MeshShape { data: devices / ulysses, ulysses, ..MeshShape::default() })
                .collect(),
            attention: None,
            checkpoint: vec![None, Some(1)],
            mlp_tile: vec![None, Some(MLP_TILE)],
            norm_tile: vec![None, Some(NORM_TILE)],
            loss_tile: vec![None, Some(LOSS_TILE)],
            offload: vec![None, waiting(WaitingPlace::Host), waiting(WaitingPlace::Disk)],
            fsdp: vec![false, true],
            optimizer: vec![StatePlace::Device, StatePlace::Host],
        }
    }

    /// Each combination that can run, as `base` otherwise.
    fn setups<'a>(&'a self, base: &'a Setup) -> impl Iterator<Item = Setup> + 'a {
        let heads = base.model.heads;
        let attention = move |mesh: MeshShape| match &self.attention {
            Some(held) => held.clone(),
            None if mesh.ulysses == 1 => {
                let stages = (0..).map(|power| 1 << power).take_while(|per_stage| *per_stage < heads);
                std::iter::once(Attention::Single)
                    .chain(stages.map(|per_stage| Attention::UPipe { per_stage: Some(per_stage) }))
                    .collect()
            }
            None => {
                let ranks = mesh.ulysses;
                let stages = (0..).map(|power| ranks << power).take_while(|per_stage| *per_stage < heads);
                std::iter::once(Attention::Ulysses)
                    .chain(stages.map(|per_stage| Attention::UPipe { per_stage: Some(per_stage) }))
                    .collect::<Vec<_>>()
            }
        };
        let places = move |mesh: MeshShape| attention(mesh).into_iter().map(move |attention| (mesh, attention));
        let all = self.mesh.iter().copied().flat_map(places);
        all.flat_map(|(mesh, attention)| self.techniques(attention).map(move |techniques| (mesh, techniques)))
            .filter_map(|(mesh, techniques)| {
                let setup = Setup { mesh, techniques, ..base.clone() };
                setup.check().is_ok().then_some(setup)
            })
    }

    fn techniques(&self, attention: Attention) -> impl Iterator<Item = Techniques> + '_ {
        let base = Techniques { attention, ..Techniques::none() };
        // The innermost varies fastest.
        let mut all = vec![base];
        fn each<T: Copy>(all: &mut Vec<Techniques>, values: &[T], set: impl Fn(Techniques, T) -> Techniques) {
            *all =
                all.iter().flat_map(|base| values.iter().map(|value| set(*base, *value)).collect::<Vec<_>>()).collect();
        }
        each(&mut all, &self.checkpoint, |base, checkpoint| Techniques { checkpoint, ..base });
        each(&mut all, &self.offload, |base, offload| Techniques { offload, ..base });
        each(&mut all, &self.mlp_tile, |base, mlp_tile| Techniques { mlp_tile, ..base });
        each(&mut all, &self.norm_tile, |base, norm_tile| Techniques { norm_tile, ..base });
        each(&mut all, &self.loss_tile, |base, loss_tile| Techniques { loss_tile, ..base });
        each(&mut all, &self.fsdp, |base, fsdp| Techniques { fsdp, ..base });
        each(&mut all, &self.optimizer, |base, optimizer| Techniques { optimizer, ..base });
        all.into_iter()
    }
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The fastest that fits; if none does, the one that needs the least device memory.
    pub setup: Setup,
    /// How many fit.
    pub fitting: usize,
    /// Of how many that can run.
    pub tried: usize,
}

/// Seconds that differ by less are the same: an estimate is no better.
const SAME: f64 = 1.001;

/// The fastest of all combinations that fit `base`'s sequence length: most tokens a second over all devices. Of equally fast ones
/// (within a thousandth) the one with the fewest techniques, of those the one that needs the least device memory.
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
/// let found = fit(&setup, &machines, &Choices::all(8), None)?;
/// assert!(found.fitting > 0 && limit(&found.setup, &machines, None)?.is_none());
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn fit(base: &Setup, machines: &Machines, choices: &Choices, seconds: Option<f64>) -> Result<Fit, PlanError> {
    let budget = machines.budget();
    let (mut fitting, mut tried) = (Vec::new(), 0);
    let mut smallest: Option<(usize, Setup)> = None;
    for setup in choices.setups(base) {
        setup.check_on(machines)?;
        tried += 1;
        let memory = memory(&setup)?;
        let peak = memory.peak().map_or(0, |phase| phase.total());
        let within = exceeded(&memory, &budget).is_none();
        if within {
            let step = time(&setup, machines)?;
            if late(&step, seconds).is_none() {
                fitting.push((step.seconds() / setup.mesh.data as f64, setup.techniques.count(), peak, setup));
                continue;
            }
        }
        if smallest.as_ref().is_none_or(|(least, _)| peak < *least) {
            smallest = Some((peak, setup));
        }
    }
    let fastest = fitting.iter().map(|(seconds, ..)| *seconds).fold(f64::INFINITY, f64::min);
    let count = fitting.len();
    let best = fitting
        .into_iter()
        .filter(|(seconds, ..)| *seconds <= SAME * fastest)
        .min_by_key(|(_, techniques, peak, _)| (*techniques, *peak))
        .map(|(.., setup)| setup);
    match best.or(smallest.map(|(_, setup)| setup)) {
        Some(setup) => Ok(Fit { setup, fitting: count, tried }),
        None => {
            // What is wrong with the first is wrong with all.
            base.check_on(machines)?;
            Err(PlanError::invalid("no combination of these can run", "hold fewer of them"))
        }
    }
}
