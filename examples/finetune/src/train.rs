//! The training loop: every rank runs it, each on its own part of the sequence.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::group::{LaunchConfig, ProcessGroup, launch};
use burn_upipe::profile::heap;
use llama::{Llama, adamw, clip_grad_norm, load};

use crate::error::{Error, Result};
use crate::metrics::StepMetrics;
use crate::plan::{ModelSource, Plan};

/// A long sequence on few cores may well take minutes between two collectives; a rank that fails is noticed at once anyway.
const TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// Why training stopped before its last step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Halt {
    /// The step, counted from 1, that was not taken.
    pub step: usize,
    /// Its loss.
    pub loss: f64,
    /// Its gradients' norm.
    pub grad_norm: f64,
}

impl fmt::Display for Halt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: loss {}, grad norm {}: not a number to train on", self.step, self.loss, self.grad_norm)
    }
}

/// What training gives.
#[derive(Debug)]
pub struct Trained {
    /// The last good weights, off the tape: those after the last step, or if training halted, the last ones whose loss was
    /// finite. `None` if there were none.
    pub model: Option<Llama>,
    /// Why it stopped early.
    pub halt: Option<Halt>,
}

/// The model that every rank starts from, on one device: it depends on the seed or the folder, not on ranks.
///
/// # Errors
///
/// [`Error::Model`].
pub fn initial_model(plan: &Plan) -> Result<Llama> {
    let device = Device::flex().autodiff();
    match &plan.model {
        ModelSource::Scratch => {
            device.seed(plan.seed);
            Llama::init(&plan.config, &plan.parallel, &device).map_err(Error::Model)
        }
        ModelSource::Folder(folder) => {
            load(folder, &plan.parallel, &device).map(|(model, _)| model).map_err(Error::Model)
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
/// A rank: weights, gradients and two moments; the first rank one more copy of the weights, the last good ones.
pub fn train(
    plan: &Plan,
    model: Llama,
    report: impl FnMut(StepMetrics) -> Result<()> + Send + 'static,
) -> Result<Trained> {
    let device = Device::flex().autodiff();
    // Forked here, one by one: ranks may share memory, never the leaves of a graph.
    let models: Vec<Llama> = (0..plan.ranks).map(|_| model.clone().fork(&device)).collect();
    drop(model);
    let shared = Arc::new((plan.clone(), Mutex::new(models), Mutex::new(report)));
    let config = LaunchConfig::new(plan.ranks).with_timeout(TIMEOUT);
    let ranks = launch(config, move |world| {
        let (plan, models, report) = &*shared;
        let model = models.lock().unwrap_or_else(PoisonError::into_inner).pop().expect("one a rank");
        rank(plan, model, &world, &device, |step| (report.lock().unwrap_or_else(PoisonError::into_inner))(step))
    })?;
    Ok(ranks.into_iter().next().expect("at least one rank"))
}

/// One rank's training; on the first one with a result.
fn rank(
    plan: &Plan,
    mut model: Llama,
    world: &ProcessGroup,
    device: &Device,
    report: impl Fn(StepMetrics) -> Result<()>,
) -> std::result::Result<Trained, Box<dyn std::error::Error + Send + Sync>> {
    let first = world.rank() == 0;
    let mut optimizer = adamw(plan.weight_decay as f32);
    let mut good: Option<Llama> = None;
    for step in 0..plan.steps {
        let started = Instant::now();
        if first {
            heap::reset_peak();
        }
        let shard = plan.text.batch(step)?.shard(&plan.layout, world.rank(), device)?;
        let loss = model.loss(&shard, world)?.mean;
        let value = number(&loss);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = sum_gradients(grads, &model, world)?;
        let (grads, grad_norm) = clip_grad_norm(grads, &model, plan.clip.unwrap_or(f64::INFINITY), world)?;

        // Loss and norm are the same bits on every rank, so all take the same way here.
        if first && value.is_finite() {
            good = Some(model.valid());
        }
        if !value.is_finite() || !grad_norm.is_finite() {
            let halt = Halt { step: step + 1, loss: value, grad_norm };
            return Ok(Trained { model: good, halt: Some(halt) });
        }
        model = optimizer.step(plan.lr, model, grads);
        if first {
            report(StepMetrics {
                step: step + 1,
                loss: value,
                grad_norm,
                lr: plan.lr,
                tokens_per_s: plan.seq_len as f64 / started.elapsed().as_secs_f64(),
                peak_bytes: heap::peak(),
            })?;
        }
    }
    Ok(Trained { model: first.then(|| model.valid()), halt: None })
}

fn number(x: &Tensor<1>) -> f64 {
    x.clone().inner().into_data().iter::<f64>().next().unwrap_or(f64::NAN)
}
