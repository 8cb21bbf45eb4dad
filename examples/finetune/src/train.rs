//! The training loop: every rank runs it, each on its own part of its replica's sequences.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamW, GradientsAccumulator, GradientsParams};
use burn::tensor::Device;
use burn_context_parallel::fsdp::{ShardedOptimizer, StatePlace};
use burn_context_parallel::group::{Axis, Mesh};
use burn_context_parallel::phase;
use burn_upipe::learner::checkpoint::CheckpointError;
use burn_upipe::learner::stop::Decision;
use burn_upipe::learner::training::{Holding, restore};
use burn_upipe::offload::{Offload, OffloadConfig};
use burn_upipe::profile::heap;
use llama::{Devices, Llama, adamw_rule, precision};

use crate::error::{Error, Result};
use crate::memory;
use crate::metrics::StepMetrics;
use crate::offload::{Waited, Waiting};
use crate::plan::Plan;
use crate::profile::{Profiling, RankProfile};
use crate::ranks::{RankResult, computing, micro_batches, number, on_ranks, sum};
use crate::saving::{Done, Saving};
use crate::start::{Ready, Start};
use crate::weights::{agree, broken, save};

/// Why training stopped before its last step.
#[derive(Clone, Debug, PartialEq)]
pub struct Halt {
    /// The step, counted from 1, that was not taken, or that broke the weights.
    pub step: usize,
    /// Its loss.
    pub loss: f64,
    /// Its gradients' norm.
    pub grad_norm: f64,
    /// The first weight that is not finite after the last step; `None` if it was loss or norm that are not.
    pub broken: Option<String>,
    /// After how many steps the weights were as they are kept; 0 for the initial ones, `None` if none are.
    pub kept: Option<usize>,
}

impl fmt::Display for Halt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, loss, grad_norm, .. } = self;
        match &self.broken {
            None => write!(f, "step {step}: loss {loss}, grad norm {grad_norm}: not a number to train on"),
            Some(name) => write!(f, "step {step}: {name} is not finite after it (loss {loss}, grad norm {grad_norm})"),
        }
    }
}

/// What happens in a training.
#[derive(Debug)]
pub enum Event {
    /// A step was taken.
    Step(StepMetrics),
    /// A checkpoint is on disk.
    Saved {
        /// After this step.
        step: usize,
        /// Where.
        path: PathBuf,
    },
    /// A checkpoint is not; training goes on.
    NotSaved {
        /// After this step.
        step: usize,
        /// Why not.
        error: String,
    },
}

/// What training gives.
#[derive(Debug, Default)]
pub struct Trained {
    /// Steps behind the run.
    pub steps: usize,
    /// Whether it was asked to stop before its last one.
    pub stopped: bool,
    /// Why it stopped by itself.
    pub halt: Option<Halt>,
    /// Where the weights are, of a run that is over: those after the last step, or if training halted, the last ones whose loss and
    /// gradients were finite, or else the initial ones.
    pub weights: Option<Result<PathBuf>>,
    /// The most bytes that one rank held in a step; `None` if nothing counts.
    pub memory: Option<usize>,
    /// The most block inputs that waited elsewhere; `None` without offload.
    pub waited: Option<Waited>,
    /// Of the steps that were profiled the most bytes by the planner's phases, on the rank that held most.
    pub phases: Vec<(&'static str, usize)>,
    /// The last checkpoint, unless training halted.
    pub checkpoint: Option<std::result::Result<PathBuf, CheckpointError>>,
}

/// Trains over the plan's ranks from `start`, saving as the plan and `saving` say. `report` is called by the first rank.
///
/// # Errors
///
/// [`Error::Device`]; [`Error::Launch`] with the error of the rank where it began; that of `report` is among those.
///
/// # Memory
///
/// A rank: weights, gradients and two moments, or under FSDP its shards of them and a block's weights; with several micro-batches a step
/// one more copy of the gradients; in bf16 the weights once more at half their size; the first rank one more copy of the weights, the
/// last good ones (under FSDP each of its shards).
pub fn train(
    plan: &Plan,
    start: Start,
    saving: Saving,
    report: impl FnMut(Event) -> Result<()> + Send + 'static,
) -> Result<Trained> {
    let devices = plan.open()?.autodiff();
    let (report, saving) = (Mutex::new(report), Arc::new(saving));
    let profiling = plan.profile.as_ref().map(Profiling::begin).transpose()?;
    let ranks = profiling.clone();
    let waited = Arc::new(Mutex::new(Waited::default()));
    let most = waited.clone();
    let offload = plan.offload.as_ref().map(|offload| offload.of_ranks(plan.ranks, &saving.out));
    let trained = on_ranks(plan, start, &devices.clone(), move |plan, ready, mesh| {
        let report = |event| (report.lock().unwrap_or_else(PoisonError::into_inner))(event);
        let rank = mesh.world().rank();
        let device = devices.of_rank(rank);
        let profile = ranks.as_ref().map(|ranks| ranks.rank(rank, device));
        let (holding, profile, offload) = (ready.holding.clone(), profile.as_ref(), offload.as_ref());
        Rank { plan, mesh, saving: &saving, devices: &devices, device, holding, profile, offload, waited: &most }
            .train(ready, report)
    });
    let failure = trained.as_ref().err().map(|error| error as &(dyn std::error::Error + 'static));
    let written = profiling.map_or(Ok(Vec::new()), |profiling| profiling.end(failure));
    let trained = trained?;
    let waited = *waited.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Trained { waited: plan.offload.as_ref().map(|_| waited), phases: written?, ..trained })
}

/// One rank of a training.
struct Rank<'a> {
    plan: &'a Plan,
    mesh: &'a Mesh,
    saving: &'a Saving,
    devices: &'a Devices,
    device: &'a Device,
    holding: Holding,
    profile: Option<&'a RankProfile>,
    offload: Option<&'a OffloadConfig>,
    waited: &'a Arc<Mutex<Waited>>,
}

impl Rank<'_> {
    fn train(&self, ready: Ready, report: impl Fn(Event) -> Result<()>) -> RankResult<Trained> {
        let Self { plan, mesh, .. } = *self;
        let first = mesh.world().rank() == 0;
        let mut model = ready.model;
        // On the rank's own thread: what it allocates is the rank's.
        let _waiting = match self.offload {
            Some(offload) => {
                let engine = Offload::new(offload.clone()).map_err(burn_context_parallel::Error::from)?;
                model = model.offload(&engine);
                Some(Waiting { engine, most: self.waited.clone() })
            }
            None => None,
        };
        let mut optimizer = ShardedOptimizer::new(adamw_rule(plan.weight_decay as f32), StatePlace::Device);
        let mut done = Done::default();
        if let Some(checkpoint) = &ready.checkpoint {
            model = restore(model, &mut optimizer, &self.holding, checkpoint)?;
            let state = checkpoint.state();
            done = Done {
                steps: state.step as usize,
                tokens: state.tokens_seen,
                targets: state.valid_tokens_seen,
                weights: false,
            };
        }
        // With the number of steps behind them. A model is not copied by this: its tensors are shared until a step makes new ones.
        let keeps = first || matches!(self.holding, Holding::Sharded(_));
        let mut good = keeps.then(|| (done.steps, model.valid()));
        let mut last = (f64::NAN, f64::NAN);
        let mut memory = None;
        while done.steps < plan.steps {
            let started = Instant::now();
            if first {
                heap::reset_peak();
            }
            let step = done.steps;
            self.profile.inspect(|profile| profile.step(Some(step + 1)));
            let phase_of_step = phase::enter("step", Some(step + 1));
            let sequences = plan.order.step(step);
            let (value, grads) = self.gradients(&model, &sequences)?;
            let grads = {
                let _phase = phase::enter("gradient sum", None);
                self.holding.sum(grads, &model)?
            };
            let (grads, grad_norm) = {
                let _phase = phase::enter("clip", None);
                self.holding.clip(grads, &model, plan.clip.unwrap_or(f64::INFINITY))?
            };

            // Loss and norm are the same bits on every rank, so all take the same way here.
            last = (value, grad_norm);
            if !value.is_finite() || !grad_norm.is_finite() {
                return self.halted(good, step + 1, last, None);
            }
            if keeps {
                good = Some((step, model.valid()));
            }
            let lr = plan.rate.at(step);
            model = {
                let _phase = phase::enter("optimizer", None);
                optimizer.step(lr, model, grads)
            };
            drop(phase_of_step);
            let tokens = sequences.len() * plan.seq_len;
            done.steps += 1;
            done.tokens += tokens as u64;
            done.targets += plan.corpus.targets_of(&sequences) as u64;
            if first {
                memory = memory.max(memory::counted(plan.ranks, self.devices));
                report(Event::Step(StepMetrics {
                    step: step + 1,
                    loss: value,
                    grad_norm,
                    lr,
                    tokens_per_s: tokens as f64 / started.elapsed().as_secs_f64(),
                    peak_bytes: memory::peak(self.devices),
                }))?;
            }
            if done.steps == plan.steps {
                break; // what is due now is saved below
            }
            let decision = self.saving.decide(plan, done.steps, mesh)?;
            if decision == Decision::Continue {
                continue;
            }
            if let Some(name) = broken(&model, &self.holding)? {
                return self.halted(good, done.steps, last, Some(name));
            }
            let saved = self.checkpoint(&model, &optimizer, done, &report)?;
            if decision == Decision::SaveAndStop {
                return Ok(Trained {
                    steps: done.steps,
                    stopped: true,
                    memory,
                    checkpoint: Some(saved),
                    ..Trained::default()
                });
            }
        }
        self.profile.inspect(|profile| profile.step(None));
        // No loss speaks for what the last step made.
        if let Some(name) = broken(&model, &self.holding)? {
            return self.halted(good, done.steps, last, Some(name));
        }
        drop(good);
        let weights = save(&model.valid(), plan, &self.saving.out, &self.holding)?;
        done.weights = weights.as_ref().is_some_and(Result::is_ok);
        let checkpoint = self.checkpoint(&model, &optimizer, done, &report)?;
        Ok(Trained { steps: done.steps, weights, memory, checkpoint: Some(checkpoint), ..Trained::default() })
    }

    /// Saves, and says so. An error is the world's end only if the world has failed.
    fn checkpoint(
        &self,
        model: &Llama,
        optimizer: &ShardedOptimizer<AdamW>,
        done: Done,
        report: &impl Fn(Event) -> Result<()>,
    ) -> RankResult<std::result::Result<PathBuf, CheckpointError>> {
        let saved = self.saving.save(self.plan, model, optimizer, &self.holding, self.mesh, done);
        if let Err(CheckpointError::Group(error)) = saved {
            return Err(error.into());
        }
        if self.mesh.world().rank() == 0 {
            let step = done.steps;
            report(match &saved {
                Ok(path) => Event::Saved { step, path: path.clone() },
                Err(error) => Event::NotSaved { step, error: error.to_string() },
            })?;
            if saved.is_ok()
                && self.saving.save_now().requested()
                && let Err(error) = self.saving.save_now().served()
            {
                let path = self.saving.save_now().path().to_owned();
                return Err(Box::new(Error::Write { path, source: error }));
            }
        }
        Ok(saved)
    }

    fn halted(
        &self,
        good: Option<(usize, Llama)>,
        step: usize,
        (loss, grad_norm): (f64, f64),
        name: Option<String>,
    ) -> RankResult<Trained> {
        // A weight that no token of a step uses does not show in its loss. Ranks that keep nothing ask along.
        let found = match &good {
            Some((_, model)) => broken(model, &self.holding)?,
            None => agree(None, self.mesh.world())?,
        };
        let good = good.filter(|_| found.is_none());
        let kept = good.as_ref().map(|(steps, _)| *steps);
        let weights = match &good {
            Some((_, model)) => save(model, self.plan, &self.saving.out, &self.holding)?,
            None => None,
        };
        let halt = Some(Halt { step, loss, grad_norm, broken: name, kept });
        Ok(Trained { steps: step - 1, halt, weights, ..Trained::default() })
    }

    /// The loss of a step, one mean over the targets of all its micro-batches and ranks, and this rank's part of its gradients.
    fn gradients(&self, model: &Llama, sequences: &[usize]) -> RankResult<(f64, GradientsParams)> {
        let Self { plan, mesh, device, .. } = self;
        let targets = plan.corpus.targets_of(sequences);
        let sequence = mesh.axis(Axis::Ulysses);
        self.holding.begin(model);
        let compute = computing(plan, model, &self.holding);
        let mut accumulated = GradientsAccumulator::new();
        let mut value = 0.0;
        for batch in micro_batches(plan, sequences, mesh)? {
            let shard = {
                let _phase = phase::enter("data", None);
                batch.shard(&plan.layout, sequence.rank(), device)?
            };
            let share = compute.loss_over(&shard, sequence, targets)?.share;
            value += number(&share);
            let grads = {
                let _phase = phase::enter("backward", None);
                GradientsParams::from_grads(share.backward(), &compute)
            };
            accumulated.accumulate(model, precision::to_f32(grads, model));
        }
        Ok((sum(value, mesh.world())?, accumulated.grads()))
    }
}
