//! Models: a Hugging Face folder with inputs, logits, loss, gradients and the first steps of training.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_context_parallel::sequence::Batch;
use llama::{AttentionScheme, Llama, ParallelConfig, adamw, named_gradients};

use crate::file::Reference;
use crate::report::{Measure, Trouble};
use crate::{Plan, Scheme};

/// The loss may differ by this part of itself.
const LOSS: f64 = 1e-5;
/// Logits and gradients, by this part of their largest magnitude.
const TENSOR: f64 = 2e-5;
/// The losses of the first steps.
const CURVE: f64 = 1e-3;
/// Of AdamW, as the reference has it.
const LEARNING_RATE: f64 = 1e-2;

/// What a rank found; the same on all of them.
struct Found {
    logits: TensorData,
    losses: Vec<f64>,
    gradients: BTreeMap<String, TensorData>,
}

/// Runs the model in `folder`.
pub fn run(folder: &Path, plan: &Plan) -> Result<Vec<Measure>, Trouble> {
    let reference = Reference::read(&folder.join("reference.safetensors"))?;
    let batch = batch(&reference)?;
    let wanted: BTreeMap<String, TensorData> = reference
        .names()
        .filter_map(|name| Some((name, name.strip_prefix("grad.")?)))
        .map(|(name, parameter)| Ok((parameter.to_owned(), any(&reference, name)?)))
        .collect::<Result<_, Trouble>>()?;
    let (logits, loss) = (reference.get::<3>("logits")?, reference.get::<0>("loss")?);
    let curve = reference.get::<1>("loss_curve")?;
    if curve.num_elements() == 0 {
        return Err(Trouble::Failed("loss_curve is empty: make the reference again".into()));
    }

    let device = Device::flex().autodiff();
    let (model, _) = llama::load(folder, &parallel(plan), &device).map_err(|error| Trouble::from_error(&error))?;
    let steps = curve.num_elements();
    // A module can be sent to another thread, but not shared: each rank takes a clone, and forks leaves of its own.
    let model = Arc::new(Mutex::new(model));
    let found = launch(plan.ranks, move |world| {
        let model = model.lock().unwrap_or_else(|poison| poison.into_inner()).clone();
        on_rank(model, &batch, steps, &world)
    })
    .map_err(|error| Trouble::from_error(&error))?;
    let found = found.into_iter().next().ok_or_else(|| Trouble::Failed("no rank answered".into()))?;

    let names: BTreeSet<_> = found.gradients.keys().collect();
    let expected: BTreeSet<_> = wanted.keys().collect();
    if let Some(name) = names.symmetric_difference(&expected).next() {
        return Err(Trouble::Failed(format!(
            "the model has {} gradients, the reference {}: {name} is in one of them only",
            names.len(),
            expected.len()
        )));
    }
    let mut measures = vec![
        Measure::new("model.loss", "loss", &scalar(found.losses[0]), &loss, LOSS),
        Measure::new("model.logits", "logits", &found.logits, &logits, TENSOR),
    ];
    for (name, got) in &found.gradients {
        measures.push(Measure::new("model.gradient", format!("grad.{name}"), got, &wanted[name], TENSOR));
    }
    for (step, (got, want)) in found.losses.iter().zip(curve.iter::<f64>()).enumerate() {
        measures.push(Measure::new(
            "model.loss_curve",
            format!("loss of step {step}"),
            &scalar(*got),
            &scalar(want),
            CURVE,
        ));
    }
    Ok(measures)
}

fn parallel(plan: &Plan) -> ParallelConfig {
    ParallelConfig {
        attention: match plan.scheme {
            Scheme::Single => AttentionScheme::Single,
            Scheme::Ulysses => AttentionScheme::Ulysses,
            Scheme::Upipe => AttentionScheme::UPipe { heads_per_stage: plan.heads_per_stage },
        },
        checkpoint: plan.checkpoint,
        mlp_tile: plan.tile,
        norm_tile: plan.tile,
        loss_tile: plan.tile,
    }
}

/// Logits, then training as the reference did it.
fn on_rank(model: Llama, batch: &Batch, steps: usize, world: &ProcessGroup) -> llama::Result<Found> {
    let device = Device::flex().autodiff();
    let mut model = model.fork(&device);
    let cp = device.context_parallel(world);
    let shard = cp.shard(batch)?;
    let evaluated = model.valid();
    let logits = cp.scope(&shard, || evaluated.logits(shard.tokens.clone()));
    let logits = cp.unshard(shard.layout(), logits, 1)?.into_data();

    let mut optimizer = adamw(0.0);
    let (mut losses, mut gradients) = (Vec::new(), BTreeMap::new());
    for step in 0..steps {
        let loss = model.loss(&shard, world)?;
        losses.push(f64::from(loss.mean.clone().inner().into_scalar::<f32>()));
        let grads = GradientsParams::from_grads(loss.mean.backward(), &model);
        let grads = sum_gradients(grads, &model, world)?;
        if step == 0 {
            gradients = named_gradients(&model, &grads);
        }
        model = optimizer.step(LEARNING_RATE, model, grads);
    }
    Ok(Found { logits, losses, gradients })
}

fn batch(reference: &Reference) -> Result<Batch, Trouble> {
    const KNOWN: [&str; 6] = ["input_ids", "position_ids", "labels", "logits", "loss", "loss_curve"];
    if let Some(name) = reference.names().find(|name| !KNOWN.contains(name) && !name.starts_with("grad.")) {
        return Err(Trouble::Unsupported(format!("{name} in the reference: use inputs, positions and labels only")));
    }
    let device = Device::flex();
    let ids = reference.get::<2>("input_ids")?;
    let labels = reference.get::<2>("labels")?;
    let len = ids.shape()[1];
    if reference.names().any(|name| name == "position_ids") {
        let positions = reference.get::<2>("position_ids")?;
        let counted = positions.shape() == ids.shape()
            && positions.iter::<i64>().enumerate().all(|(index, position)| position == (index % len) as i64);
        if !counted {
            return Err(Trouble::Unsupported("position_ids that do not count from 0 in every row".into()));
        }
    }
    let int = |data: TensorData| Tensor::<2, Int>::from_data(data, &device);
    Batch::new(int(ids)).and_then(|batch| batch.with_labels(int(labels))).map_err(|error| Trouble::from_error(&error))
}

fn scalar(value: f64) -> TensorData {
    TensorData::new(vec![value], [0; 0])
}

/// A parameter's gradient: a matrix or a vector.
fn any(reference: &Reference, name: &str) -> Result<TensorData, Trouble> {
    reference.get::<2>(name).or_else(|_| reference.get::<1>(name))
}
