//! Weights and optimizer as named pieces of a checkpoint, and back: whole on every rank, or in shards.
//!
//! ```text
//! model/PATH             a parameter
//! optimizer/PATH/FIELD   a tensor of its optimizer state, of the parameter's shape
//! ```
//!
//! Every rank saves its shard; of what is whole on every rank, each saves an equal part. Names and shapes are those of the whole
//! parameters: what one mesh saved, any other loads.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{Optimizer, StateSource};
use burn::tensor::{Device, Tensor, TensorData};
use burn_context_parallel::Error as CoreError;
use burn_context_parallel::fsdp::{Fsdp, Placement, ShardedOptimizer};
use burn_context_parallel::group::ProcessGroup;
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Piece, Result};
use serde_json::{Map, Value};

/// How parameters lie on ranks.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    pub fsdp: Option<&'a Fsdp>,
    pub world: &'a ProcessGroup,
}

/// A parameter as a rank holds it.
struct Held {
    /// Of the whole parameter.
    shape: Vec<usize>,
    /// `None`: this rank holds all of it.
    shard: Option<Arc<Placement>>,
    /// What this rank saves, in elements of the whole; may be empty.
    saved: Range<usize>,
    /// The first element that this rank holds.
    first: usize,
}

impl Places<'_> {
    fn of<const D: usize>(&self, id: ParamId, base: &Tensor<D>) -> Held {
        let sharded = self.fsdp.and_then(|fsdp| Some((fsdp, fsdp.placement(id)?)));
        let Some((fsdp, placement)) = sharded else {
            let shape = base.dims().to_vec();
            let saved = Placement::new(&shape, self.world.size()).range(self.world.rank());
            return Held { shape, shard: None, saved, first: 0 };
        };
        let own = placement.range(fsdp.group().rank());
        // Replicas hold the same shards: one of them saves.
        let saved = if fsdp.replicas().rank() == 0 { own.clone() } else { own.start..own.start };
        Held { shape: placement.shape().to_vec(), shard: Some(placement), saved, first: own.start }
    }
}

fn weight_name(path: &str) -> String {
    format!("model/{path}")
}

fn state_name(path: &str, field: &str) -> String {
    format!("optimizer/{path}/{field}")
}

/// What this rank saves of a model and its optimizer, read when it is written; and the optimizer's scalars by parameter.
///
/// # Memory
///
/// One parameter's optimizer state at a time.
pub(crate) fn pieces<'a, M: Module, O: Optimizer>(
    model: &M,
    optimizer: &'a ShardedOptimizer<O>,
    places: Places<'a>,
) -> (Vec<Piece<'a>>, Value) {
    let mut export = Export { optimizer, places, walk: Walk::default(), pieces: Vec::new(), scalars: Map::new() };
    model.visit(&mut export);
    (export.pieces, Value::Object(export.scalars))
}

/// Where a walk over a module is, and what it has seen.
#[derive(Default)]
struct Walk {
    path: Vec<String>,
    seen: HashSet<ParamId>,
}

struct Export<'a, O: Optimizer> {
    optimizer: &'a ShardedOptimizer<O>,
    places: Places<'a>,
    walk: Walk,
    pieces: Vec<Piece<'a>>,
    scalars: Map<String, Value>,
}

impl<O: Optimizer> ModuleVisitor for Export<'_, O> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.walk.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.walk.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.walk.seen.insert(param.id) {
            return; // tied
        }
        let (id, path, base) = (param.id, self.walk.path.join("."), param.base().inner());
        let held = self.places.of(id, &base);
        let local = held.saved.start - held.first..held.saved.end - held.first;
        let nothing = local.is_empty() && held.shape.iter().all(|dim| *dim > 0);
        if !nothing {
            let (dtype, elements) = (base.dtype(), base.dims().iter().product::<usize>());
            let (range, local) = (held.saved.clone(), local.clone());
            let read = move || {
                let flat = base.reshape([elements]).narrow(0, local.start, local.len());
                Ok::<_, CoreError>(flat.into_data())
            };
            self.pieces.push(Piece::new(weight_name(&path), dtype, held.shape.clone(), range, read));
        }
        let Some(state) = self.optimizer.export::<D>(id) else { return };
        let scalars = state.scalars.iter().map(|(name, value)| (name.clone(), serde_json::json!(value)));
        self.scalars.insert(path.clone(), Value::Object(scalars.collect()));
        if nothing {
            return;
        }
        for (field, data) in state.tensors {
            let (optimizer, local) = (self.optimizer, local.clone());
            let (name, dtype) = (state_name(&path, &field), data.dtype());
            let read = move || {
                let state = optimizer.export::<D>(id).map(|state| state.tensors).unwrap_or_default();
                let data = state.into_iter().find(|(name, _)| *name == field).map(|(_, data)| data);
                data.and_then(|data| cut(&data, local)).ok_or_else(|| {
                    CoreError::invalid("a checkpoint", format!("{field} is not as large as its parameter"), "use AdamW")
                })
            };
            self.pieces.push(Piece::new(name, dtype, held.shape.clone(), held.saved.clone(), read));
        }
    }
}

/// Some elements of a flat row of them.
fn cut(data: &TensorData, range: Range<usize>) -> Option<TensorData> {
    let size = data.dtype().size();
    let bytes = data.as_bytes().get(range.start * size..range.end * size)?.to_vec();
    Some(TensorData::from_bytes_vec(bytes, [range.len()], data.dtype()))
}

/// `model`, of whatever values, with the weights of a checkpoint; in shards if `places` has them. A model that is not drawn stays so
/// until its values come.
///
/// # Errors
///
/// [`CheckpointError`] if a parameter is not in the checkpoint or of another shape there, or the checkpoint has one that the model has
/// not.
///
/// # Memory
///
/// What the rank holds, and one whole parameter.
pub(crate) fn load_model<M: Module>(checkpoint: &Checkpoint, model: M, places: Places<'_>) -> Result<M> {
    let mut used = 0;
    let mut whole = |path: &str, shape: &[usize], dtype| {
        let name = weight_name(path);
        checkpoint.expect(&name, dtype, shape)?;
        used += 1;
        checkpoint.read_whole(&name)
    };
    let model = match places.fsdp {
        Some(fsdp) => fsdp.shard_from(model, |path, shape| {
            let dtype = burn::tensor::DType::F32;
            let read = whole(path, shape, dtype).map(Some);
            read.map_err(|error| CoreError::invalid("a checkpoint", error.to_string(), "resume the run that saved it"))
        })?,
        None => {
            let mut load = Load { whole: &mut whole, path: Vec::new(), seen: HashSet::new(), error: None };
            let model = model.map(&mut load);
            load.error.map_or(Ok(model), Err)?
        }
    };
    let there = checkpoint.names().filter(|name| name.starts_with("model/")).count();
    if there != used {
        return Err(CheckpointError::Invalid {
            what: format!("the checkpoint has {there} weights, the model {used}"),
            remedy: "resume the run that saved it".into(),
        });
    }
    Ok(model)
}

struct Load<F> {
    whole: F,
    path: Vec<String>,
    seen: HashSet<ParamId>,
    error: Option<CheckpointError>,
}

impl<F: FnMut(&str, &[usize], burn::tensor::DType) -> Result<TensorData>> ModuleMapper for Load<F> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() || !self.seen.insert(param.id) {
            return param;
        }
        let (id, device, shape) = (param.id, param.lazy_device(), param.lazy_shape().to_vec());
        match (self.whole)(&self.path.join("."), &shape, burn::tensor::DType::F32) {
            Ok(data) => {
                let dtype = data.dtype();
                let value = Tensor::<D>::from_data(data, (&device, dtype));
                // As loading does it: a parameter that is not drawn stays undrawn.
                param.load_mapper(|value| value).transform_for_load(value, id)
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

/// Gives `optimizer` the states that a checkpoint has for the parameters of `model`.
///
/// # Errors
///
/// [`CheckpointError`] if a state is another optimizer's, or of another shape.
///
/// # Memory
///
/// The states, and one parameter's once more.
pub(crate) fn load_optimizer<M: Module, O: Optimizer>(
    checkpoint: &Checkpoint,
    model: &M,
    optimizer: &mut ShardedOptimizer<O>,
    places: Places<'_>,
    device: &Device,
) -> Result<()> {
    let mut fields: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in checkpoint.names() {
        if let Some((path, field)) = name.strip_prefix("optimizer/").and_then(|name| name.split_once('/')) {
            fields.entry(path).or_default().push(field);
        }
    }
    let mut import = Import { checkpoint, fields, optimizer, places, device, walk: Walk::default(), error: None };
    model.visit(&mut import);
    import.error.map_or(Ok(()), Err)
}

struct Import<'a, O: Optimizer> {
    checkpoint: &'a Checkpoint,
    /// Of every parameter.
    fields: BTreeMap<&'a str, Vec<&'a str>>,
    optimizer: &'a mut ShardedOptimizer<O>,
    places: Places<'a>,
    device: &'a Device,
    walk: Walk,
    error: Option<CheckpointError>,
}

impl<O: Optimizer> ModuleVisitor for Import<'_, O> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.walk.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.walk.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() || !self.walk.seen.insert(param.id) {
            return;
        }
        if let Err(error) = self.one::<D>(param) {
            self.error = Some(error);
        }
    }
}

impl<O: Optimizer> Import<'_, O> {
    fn one<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<()> {
        let path = self.walk.path.join(".");
        // A parameter that never had a gradient has no state.
        let Some(scalars) = self.checkpoint.state().optimizer.get(&path) else { return Ok(()) };
        let other = |what: String| CheckpointError::Invalid {
            what: format!("the optimizer state of `{path}` {what}"),
            remedy: "resume the run that saved it".to_owned(),
        };
        let scalars = scalars.as_object().cloned().unwrap_or_default().into_iter();
        let scalars = scalars
            .map(|(name, value)| Ok((name, serde_json::from_value(value)?)))
            .collect::<std::result::Result<_, serde_json::Error>>();
        let mut source =
            StateSource::new(scalars.map_err(|error| other(format!("has a scalar that is none: {error}")))?);
        let base = param.base().inner();
        let held = self.places.of(param.id, &base);
        for field in self.fields.get(&*path).into_iter().flatten() {
            let name = state_name(&path, field);
            self.checkpoint.expect(&name, base.dtype(), &held.shape)?;
            let data = match &held.shard {
                None => self.checkpoint.read_whole(&name)?,
                Some(placement) => {
                    let own = held.first..held.first + placement.shard_len().min(placement.elements() - held.first);
                    let data = self.checkpoint.read(&name, own)?;
                    let mut bytes = data.as_bytes().to_vec();
                    // A shard's padding.
                    bytes.resize(placement.shard_len() * data.dtype().size(), 0);
                    TensorData::from_bytes_vec(bytes, base.dims().to_vec(), data.dtype())
                }
            };
            source.insert_tensor((*field).to_owned(), data);
        }
        match self.optimizer.import::<D>(param.id, source, self.device) {
            true => Ok(()),
            false => Err(other("is not one of AdamW".to_owned())),
        }
    }
}
