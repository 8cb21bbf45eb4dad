//! What a run is, beside its tensors.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where a run is: everything that a resumed one must have besides its tensors.
///
/// The parts that belong to others (a scheduler, random generators, the cursor in the data, scalars of an optimizer) are JSON, made by
/// whoever owns them. Floats in it come back bit for bit. JSON has no NaN and no infinity (`serde_json` makes `null` of them) and no
/// integers beyond 64 bits: write such a value as text, or its bits.
///
/// Ranks do not each have one. What differs between them, a random generator for instance, is a list or a map in here, by rank;
/// the first rank's state is saved.
///
/// ```
/// use burn_upipe::learner::checkpoint::RunState;
/// use serde_json::json;
///
/// let state = RunState {
///     step: 120,
///     tokens_seen: 7_864_320,
///     scheduler: json!({ "warmup": 20, "rate": 2.7e-4 }),
///     optimizer: json!({ "block.0.norm": { "time": 120 } }),
///     ..RunState::default()
/// };
/// assert_eq!(state.valid_tokens_seen, 0);
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// How many optimizer steps were taken.
    pub step: u64,
    /// The mesh that saved it, for people: tensors are loaded on any.
    pub mesh: String,
    /// Tokens that went through the model, padding included.
    pub tokens_seen: u64,
    /// Targets that counted.
    pub valid_tokens_seen: u64,
    /// The learning rate's schedule.
    pub scheduler: Value,
    /// Random generators.
    pub rng: Value,
    /// Where in the data the next batch begins.
    pub data: Value,
    /// The optimizer's scalars, by parameter.
    pub optimizer: Value,
    /// The resolved configuration, as TOML.
    pub config: String,
}
