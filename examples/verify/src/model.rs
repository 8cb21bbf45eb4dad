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
use burn_context_parallel::sequence::{Batch, Documents, PerToken};
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
    let batch = batch(&reference, plan.devices.of_rank(0))?;
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

    let devices = plan.devices.clone().autodiff();
    let (model, _) =
        llama::load(folder, &parallel(plan), devices.of_rank(0)).map_err(|error| Trouble::from_error(&error))?;
    let steps = curve.num_elements();
    // A module can be sent to another thread, but not shared: each rank takes a clone, and forks leaves of its own.
    let model = Arc::new(Mutex::new(model));
    let found = launch(plan.ranks, move |world| {
        let model = model.lock().unwrap_or_else(|poison| poison.into_inner()).clone();
        on_rank(model, &batch, steps, &world, devices.of_rank(world.rank()))
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
    // Where attention has one key for each query, gradients of q and k are exactly 0 in the reference and the rounding of terms that cancel
    // here: such tensors, and no others, are measured against the largest gradient.
    let largest = |data: &TensorData| data.iter::<f64>().fold(0.0, |max: f64, value| max.max(value.abs()));
    let all = wanted.values().map(largest).fold(0.0, f64::max);
    for (name, got) in &found.gradients {
        let floor = if largest(&wanted[name]) == 0.0 { all } else { 0.0 };
        measures.push(Measure::above(floor, "model.gradient", format!("grad.{name}"), got, &wanted[name], TENSOR));
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
        blocks_per_checkpoint: 1,
        mlp_tile: plan.tile,
        norm_tile: plan.tile,
        loss_tile: plan.tile,
    }
}

/// Logits, then training as the reference did it.
fn on_rank(model: Llama, batch: &Batch, steps: usize, world: &ProcessGroup, device: &Device) -> llama::Result<Found> {
    let mut model = model.fork(device);
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

fn batch(reference: &Reference, device: &Device) -> Result<Batch, Trouble> {
    const KNOWN: [&str; 6] = ["input_ids", "position_ids", "labels", "logits", "loss", "loss_curve"];
    if let Some(name) = reference.names().find(|name| !KNOWN.contains(name) && !name.starts_with("grad.")) {
        return Err(Trouble::Unsupported(format!("{name} in the reference: use inputs, positions and labels only")));
    }
    let ids = reference.get::<2>("input_ids")?;
    let labels = reference.get::<2>("labels")?;
    let positions = match reference.names().any(|name| name == "position_ids") {
        true => Some(reference.get::<2>("position_ids")?),
        false => None,
    };
    if let Some(other) = positions.as_ref().map(|positions| positions.shape()).filter(|shape| **shape != *ids.shape()) {
        return Err(Trouble::Failed(format!(
            "position_ids of {other:?} for {:?} ids: make the file again",
            ids.shape()
        )));
    }
    let int = |data: TensorData| Tensor::<2, Int>::from_data(data, device);
    let packed = positions.map(|positions| packed(&positions)).transpose()?;
    let crossing = packed.as_ref().is_some_and(|(_, documents)| crosses(documents, &labels));
    if crossing {
        return Err(Trouble::Unsupported(
            "a label at a document's first token, which would be predicted from another".into(),
        ));
    }
    let batch = Batch::new(int(ids)).and_then(|batch| batch.with_labels(int(labels)));
    let batch = match packed {
        None => batch,
        Some((positions, documents)) => {
            batch.and_then(|batch| batch.with_positions(positions)?.with_documents(documents))
        }
    };
    batch.map_err(|error| Trouble::from_error(&error))
}

/// Positions, and what transformers takes them to say without an attention mask: where they don't go on by one, another document
/// begins.
fn packed(positions: &TensorData) -> Result<(PerToken, Documents), Trouble> {
    let values: Vec<i64> = positions.iter::<i64>().collect();
    let rows: Vec<Vec<i64>> = values.chunks(positions.shape()[1].max(1)).map(<[i64]>::to_vec).collect();
    let ids = rows.iter().map(|row| {
        let mut id = 0;
        let later = row.windows(2).map(|pair| {
            id += i64::from(pair[1] != pair[0].wrapping_add(1));
            id
        });
        std::iter::once(0).chain(later).collect()
    });
    let ids: Vec<Vec<i64>> = ids.collect();
    let failed = |error| Trouble::from_error(&error);
    Ok((PerToken::per_row(&rows).map_err(failed)?, Documents::from_ids(PerToken::per_row(&ids).map_err(failed)?)))
}

/// Whether some label stands where a document begins behind another one.
fn crosses(documents: &Documents, labels: &TensorData) -> bool {
    let labels: Vec<i64> = labels.iter::<i64>().collect();
    let len = documents.len();
    labels.chunks(len.max(1)).enumerate().any(|(row, labels)| {
        let ids = documents.row(row);
        (1..len.min(labels.len())).any(|i| ids[i] != ids[i - 1] && labels[i] >= 0)
    })
}

fn scalar(value: f64) -> TensorData {
    TensorData::new(vec![value], [0; 0])
}

/// A parameter's gradient: a matrix or a vector.
fn any(reference: &Reference, name: &str) -> Result<TensorData, Trouble> {
    reference.get::<2>(name).or_else(|_| reference.get::<1>(name))
}
