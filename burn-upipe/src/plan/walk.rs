//! One step on paper.

use super::ledger::Ledger;
use super::setup::StatePlace;
use super::{Memory, PlanError, Setup};

/// Bytes of the rank that holds the most, by phase and part.
///
/// # Errors
///
/// [`PlanError`] if the setup cannot run.
pub fn memory(setup: &Setup) -> Result<Memory, PlanError> {
    let Setup { model, accounting, techniques, .. } = setup;
    let ranks = if techniques.fsdp { setup.ranks() } else { 1 };
    let shard = model.parameters().div_ceil(ranks);
    let mut ledger = Ledger::default();
    ledger.phase("forward");
    ledger.take("weights", shard * accounting.weight);
    if techniques.optimizer == StatePlace::Device {
        ledger.take("optimizer", shard * accounting.optimizer);
    }
    let u = setup.batch * setup.local() * model.width * accounting.compute;
    ledger.take("saved inputs", model.layers * u);
    ledger.flash("attention", 8 * u);
    ledger.phase("loss");
    ledger.phase("backward");
    ledger.take("gradients", shard * accounting.gradient);
    ledger.flash("attention", 11 * u);
    ledger.free("saved inputs", model.layers * u);
    ledger.phase("optimizer");
    Ok(Memory { phases: ledger.into_phases(), host: 0, disk: 0 })
}
