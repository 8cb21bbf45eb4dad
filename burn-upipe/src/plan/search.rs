//! The longest sequence that fits.

use burn_context_parallel::sequence::MAX_TOKENS;

use super::plan::{exceeded, late};
use super::{Limit, Machines, PlanError, Setup, memory, time};

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
