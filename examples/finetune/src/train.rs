//! The training loop: every rank runs it, each on its own part of its replica's sequences.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{DType, Device};
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::group::{Axis, Mesh};
use burn_upipe::profile::heap;
use llama::{Llama, LlamaError, LoadReport, adamw, clip_grad_norm, load_as, not_finite, precision};

use crate::error::{Error, Result};
use crate::metrics::StepMetrics;
use crate::plan::{ModelSource, Plan};
use crate::ranks::{RankResult, micro_batches, number, on_ranks, sum};

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

/// What training gives.
#[derive(Debug)]
pub struct Trained {
    /// The last good weights, off the tape: those after the last step, or if training halted, the last ones whose loss and
    /// gradients were finite, or else the initial ones.
    pub model: Option<Llama>,
    /// Why it stopped early.
    pub halt: Option<Halt>,
}

/// The model that every rank starts from, on one device: it depends on the seed or the folder, not on ranks. With what loading a
/// folder did.
///
/// # Errors
///
/// [`Error::Model`], also for weights that are not finite.
pub fn initial_model(plan: &Plan) -> Result<(Llama, Option<LoadReport>)> {
    let device = Device::flex().autodiff();
    match &plan.model {
        ModelSource::Scratch => {
            device.seed(plan.seed);
            Ok((Llama::init(&plan.config, &plan.parallel, &device).map_err(Error::Model)?, None))
        }
        ModelSource::Folder(folder) => {
            // f32 whatever the file has: these are the weights that the optimizer changes.
            let (model, report) = load_as(folder, &plan.parallel, &device, DType::F32).map_err(Error::Model)?;
            if let Some(name) = not_finite(&model) {
                let problem = format!("{name} has values that are not finite numbers");
                return Err(Error::Model(LlamaError::Weights { path: folder.clone(), problem }));
            }
            Ok((model, Some(report)))
        }
    }
}

/// Trains over the plan's ranks. `report` is called once a step, by the first rank.
///
/// # Errors
///
/// [`Error::Launch`] with the error of the rank where it began; that of `report` is among those.
///
/// # Memory
///
/// A rank: weights, gradients and two moments; with several micro-batches a step one more copy of the gradients; in bf16 the
/// weights once more at half their size; the first rank one more copy of the weights, the last good ones.
pub fn train(
    plan: &Plan,
    model: Llama,
    report: impl FnMut(StepMetrics) -> Result<()> + Send + 'static,
) -> Result<Trained> {
    let device = Device::flex().autodiff();
    let report = Mutex::new(report);
    on_ranks(plan, model, &device.clone(), move |plan, model, mesh| {
        rank(plan, model, mesh, &device, |step| (report.lock().unwrap_or_else(PoisonError::into_inner))(step))
    })
}

/// One rank's training; on the first one with a result.
fn rank(
    plan: &Plan,
    mut model: Llama,
    mesh: &Mesh,
    device: &Device,
    report: impl Fn(StepMetrics) -> Result<()>,
) -> RankResult<Trained> {
    let world = mesh.world();
    let first = world.rank() == 0;
    let mut optimizer = adamw(plan.weight_decay as f32);
    // With the number of steps behind them. A model is not copied by this: its tensors are shared until a step makes new ones.
    let mut good = first.then(|| (0, model.valid()));
    let mut last = (f64::NAN, f64::NAN);
    for step in 0..plan.steps {
        let started = Instant::now();
        if first {
            heap::reset_peak();
        }
        let sequences = plan.order.step(step);
        let (value, grads) = gradients(plan, &model, &sequences, mesh, device)?;
        let grads = sum_gradients(grads, &model, world)?;
        let (grads, grad_norm) = clip_grad_norm(grads, &model, plan.clip.unwrap_or(f64::INFINITY), world)?;

        // Loss and norm are the same bits on every rank, so all take the same way here.
        if !value.is_finite() || !grad_norm.is_finite() {
            return Ok(halted(good, step + 1, (value, grad_norm), None));
        }
        if first {
            good = Some((step, model.valid()));
        }
        last = (value, grad_norm);
        let lr = plan.rate.at(step);
        model = optimizer.step(lr, model, grads);
        if first {
            report(StepMetrics {
                step: step + 1,
                loss: value,
                grad_norm,
                lr,
                tokens_per_s: (sequences.len() * plan.seq_len) as f64 / started.elapsed().as_secs_f64(),
                peak_bytes: heap::peak(),
            })?;
        }
    }
    if !first {
        return Ok(Trained { model: None, halt: None });
    }
    // No loss speaks for what the last step made.
    let model = model.valid();
    match not_finite(&model) {
        None => Ok(Trained { model: Some(model), halt: None }),
        broken => Ok(halted(good, plan.steps, last, broken)),
    }
}

fn halted(good: Option<(usize, Llama)>, step: usize, (loss, grad_norm): (f64, f64), broken: Option<String>) -> Trained {
    // A weight that no token of a step uses does not show in its loss.
    let good = good.filter(|(_, model)| not_finite(model).is_none());
    let kept = good.as_ref().map(|(steps, _)| *steps);
    Trained { model: good.map(|(_, model)| model), halt: Some(Halt { step, loss, grad_norm, broken, kept }) }
}

/// The loss of a step, one mean over the targets of all its micro-batches and ranks, and this rank's part of its gradients.
fn gradients(
    plan: &Plan,
    model: &Llama,
    sequences: &[usize],
    mesh: &Mesh,
    device: &Device,
) -> RankResult<(f64, GradientsParams)> {
    let targets = plan.corpus.targets_of(sequences);
    let sequence = mesh.axis(Axis::Ulysses);
    // Rounded anew each step: what an update adds gathers in f32, however small it is.
    let compute = precision::compute(model, plan.precision.dtype());
    let mut accumulated = GradientsAccumulator::new();
    let mut value = 0.0;
    for batch in micro_batches(plan, sequences, mesh)? {
        let shard = batch.shard(&plan.layout, sequence.rank(), device)?;
        let share = compute.loss_over(&shard, sequence, targets)?.share;
        value += number(&share);
        let grads = GradientsParams::from_grads(share.backward(), &compute);
        accumulated.accumulate(model, precision::to_f32(grads, model));
    }
    Ok((sum(value, mesh.world())?, accumulated.grads()))
}
