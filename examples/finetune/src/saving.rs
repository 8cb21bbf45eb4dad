//! When a run is saved, and what beside its tensors.

use std::path::PathBuf;

use burn::optim::Optimizer;
use burn_context_parallel::fsdp::ShardedOptimizer;
use burn_context_parallel::group::Mesh;
use burn_upipe::learner::checkpoint::{CheckpointError, Checkpoints, RunState};
use burn_upipe::learner::stop::{Decision, SaveNow, Stop};
use burn_upipe::learner::training::{Holding, Parts, parts};
use llama::Llama;
use serde_json::json;

use crate::config;
use crate::plan::Plan;
use crate::resume;
use crate::values::word;

/// Where a training is saved, and who may ask for it.
#[derive(Debug)]
pub struct Saving {
    /// The output folder.
    pub out: PathBuf,
    /// Its checkpoints.
    pub checkpoints: Checkpoints,
    /// Asks for the end.
    pub stop: Stop,
}

/// What a run has behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    pub steps: usize,
    pub tokens: u64,
    pub targets: u64,
    /// Whether its weights are in their folder.
    pub weights: bool,
}

impl Saving {
    /// What to do after a step, the same on every rank.
    pub(crate) fn decide(&self, plan: &Plan, done: usize, mesh: &Mesh) -> burn_context_parallel::Result<Decision> {
        let due = plan.save_every.is_some_and(|every| done.is_multiple_of(every));
        let wanted = match mesh.world().rank() {
            0 => Decision::wanted(&self.stop, &self.save_now()),
            _ => Decision::Continue,
        };
        wanted.max(if due { Decision::Save } else { Decision::Continue }).agree(mesh.world())
    }

    pub(crate) fn save_now(&self) -> SaveNow {
        SaveNow::in_folder(&self.out)
    }

    /// A checkpoint. Every rank calls it.
    pub(crate) fn save<O: Optimizer>(
        &self,
        plan: &Plan,
        model: &Llama,
        optimizer: &ShardedOptimizer<O>,
        holding: &Holding,
        mesh: &Mesh,
        done: Done,
    ) -> Result<PathBuf, CheckpointError> {
        let order = &plan.order;
        let Parts { pieces, scalars } = parts(model, optimizer, holding);
        let state = RunState {
            step: done.steps as u64,
            mesh: plan.mesh.to_string(),
            tokens_seen: done.tokens,
            valid_tokens_seen: done.targets,
            // All three follow from the step: rates and sequences are functions of it, and numbers are drawn before the first one.
            scheduler: json!({ "kind": word(plan.rate.kind), "steps": plan.rate.steps, "next": plan.rate.at(done.steps) }),
            rng: json!({ "seed": plan.seed }),
            data: json!({
                "epoch": done.steps / order.steps_per_epoch(),
                "sequence": done.steps % order.steps_per_epoch() * order.per_step,
                "text": resume::text(plan),
                "model": plan.config.to_json(),
                "weights_saved": done.weights,
            }),
            optimizer: scalars,
            config: config::resolved(plan),
        };
        self.checkpoints.save(mesh.world(), pieces, &state)
    }
}
