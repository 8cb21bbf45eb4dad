//! The loss without training.

use std::fmt;

use burn::module::Module;
use burn_context_parallel::group::Axis;
use serde::Serialize;

use crate::error::Result;
use crate::plan::Plan;
use crate::ranks::{computing, micro_batches, number, on_ranks, sum};
use crate::start::{Ready, Start};

/// What a model makes of a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean loss over all targets of all sequences, in nats.
    pub loss: f64,
    /// exp(loss).
    pub perplexity: f64,
    /// How many targets that are.
    pub valid_tokens: usize,
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loss {:.6}  perplexity {:.4}  valid tokens {}", self.loss, self.perplexity, self.valid_tokens)
    }
}

/// The loss over all of the plan's sequences, over its ranks. `report` is called by the first rank with the number of sequences done.
///
/// # Errors
///
/// [`Error::Device`](crate::Error::Device); [`Error::Launch`](crate::Error::Launch) with the error of the rank where it began.
///
/// # Memory
///
/// A rank: the weights (under FSDP its shards and one block's), and one block's intermediates for B sequences; nothing is kept for a
/// backward pass.
pub fn evaluate(plan: &Plan, start: Start, report: impl Fn(usize) + Send + Sync + 'static) -> Result<Evaluation> {
    let devices = plan.open()?;
    let start = match start {
        Start::Whole(model) => Start::Whole(Box::new(model.valid())),
        start => start,
    };
    on_ranks(plan, start, &devices.clone(), move |plan, Ready { model, holding, .. }, mesh| {
        let (world, sequence) = (mesh.world(), mesh.axis(Axis::Ulysses));
        let device = devices.of_rank(world.rank());
        let model = computing(plan, &model, &holding);
        let targets = plan.corpus.targets();
        let all: Vec<usize> = (0..plan.corpus.sequences()).collect();
        let mut loss = 0.0;
        let at_once = plan.batch.saturating_mul(plan.mesh.data);
        for (done, sequences) in all.chunks(at_once).enumerate() {
            for batch in micro_batches(plan, sequences, mesh)? {
                let shard = batch.shard(&plan.layout, sequence.rank(), device)?;
                // Each share in f32 over its own targets, their sum in f64.
                let own = batch.valid();
                loss += number(&model.loss_over(&shard, sequence, own)?.share) * (own as f64 / targets as f64);
            }
            if world.rank() == 0 {
                report(done.saturating_mul(at_once).saturating_add(sequences.len()));
            }
        }
        let loss = sum(loss, world)?;
        Ok(Evaluation { loss, perplexity: loss.exp(), valid_tokens: targets })
    })
}
