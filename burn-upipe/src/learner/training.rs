//! A model and its optimizer as a checkpoint's pieces, and back: sharded or not, on the mesh that saved them or on another.
//!
//! ```text
//! model/PATH                the parameter at a module path
//! optimizer/PATH/FIELD      its optimizer state, in the parameter's shape: moments
//! RunState::optimizer       scalars of that state: { PATH: { FIELD: number } }
//! ```
//!
//! Everything is named by path and counted in elements of whole tensors, so that nothing depends on who held what.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::rc::Rc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, Optimizer, StateSource};
use burn::tensor::{Tensor, TensorData};
use burn_context_parallel::collective::{clip_grad_norm, sum_gradients};
use burn_context_parallel::fsdp::{Fsdp, ShardedOptimizer};
use burn_context_parallel::group::ProcessGroup;
use serde_json::{Map, Value};

use super::checkpoint::{Checkpoint, CheckpointError, Piece, Result};

/// Who holds what of a model: all ranks all of it, or shards.
#[derive(Clone, Debug)]
pub enum Holding {
    /// Every rank of the group holds the same whole model.
    Whole(ProcessGroup),
    /// As FSDP has placed it.
    Sharded(Fsdp),
}

/// This rank's part of a parameter.
struct Part {
    /// The whole parameter's shape.
    shape: Vec<usize>,
    /// Which of its elements this rank holds.
    range: Range<usize>,
    /// Whether this rank is the one that saves them.
    saves: bool,
}

impl Holding {
    /// All ranks that share the model.
    pub fn world(&self) -> &ProcessGroup {
        match self {
            Self::Whole(group) => group,
            Self::Sharded(fsdp) => fsdp.world(),
        }
    }

    /// Before a forward pass: [`Fsdp::begin`].
    pub fn begin<M: Module>(&self, model: &M) {
        if let Self::Sharded(fsdp) = self {
            fsdp.begin(model);
        }
    }

    /// After the last backward pass of a step: the gradients of all ranks, summed.
    ///
    /// # Errors
    ///
    /// [`Error::Group`](burn_context_parallel::Error::Group) if a collective fails.
    ///
    /// # Communication
    ///
    /// [`sum_gradients`] or [`Fsdp::finish`].
    pub fn sum<M: Module>(&self, grads: GradientsParams, model: &M) -> burn_context_parallel::Result<GradientsParams> {
        match self {
            Self::Whole(group) => sum_gradients(grads, model, group),
            Self::Sharded(fsdp) => fsdp.finish(grads, model),
        }
    }

    /// Summed gradients, scaled to a norm of at most `max_norm`, and their norm before.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](burn_context_parallel::Error::Invalid) if `max_norm` is not a positive number;
    /// [`Error::Group`](burn_context_parallel::Error::Group) if a collective fails.
    ///
    /// # Communication
    ///
    /// [`clip_grad_norm`] or [`Fsdp::clip_grad_norm`].
    pub fn clip<M: Module>(
        &self,
        grads: GradientsParams,
        model: &M,
        max_norm: f64,
    ) -> burn_context_parallel::Result<(GradientsParams, f64)> {
        match self {
            Self::Whole(group) => clip_grad_norm(grads, model, max_norm, group),
            Self::Sharded(fsdp) => fsdp.clip_grad_norm(grads, model, max_norm),
        }
    }

    fn part(&self, id: ParamId, shape: &[usize], index: usize) -> Part {
        let elements = shape.iter().product::<usize>();
        let whole =
            |rank: usize, size: usize| Part { shape: shape.to_vec(), range: 0..elements, saves: index % size == rank };
        match self {
            // By turns, so that all ranks write.
            Self::Whole(group) => whole(group.rank(), group.size()),
            Self::Sharded(fsdp) => match fsdp.placement(id) {
                None => whole(fsdp.world().rank(), fsdp.world().size()),
                Some(placement) => Part {
                    shape: placement.shape().to_vec(),
                    range: placement.range(fsdp.group().rank()),
                    saves: fsdp.replicas().rank() == 0,
                },
            },
        }
    }
}

/// What is saved of a model and its optimizer.
#[derive(Debug)]
pub struct Parts<'a> {
    /// This rank's pieces, which read their values when they are written.
    pub pieces: Vec<Piece<'a>>,
    /// The scalars of the optimizer's state by path, for [`RunState::optimizer`](super::checkpoint::RunState::optimizer): numbers of
    /// steps, among others. The same on every rank.
    pub scalars: Value,
}

/// What this rank saves of a model and its optimizer. Every rank makes its own.
///
/// A tied parameter is saved once, under its first path.
///
/// # Memory
///
/// Handles only; a piece's values are in host memory while it is written, and those of the same parameter's optimizer state.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamWConfig, GradientsParams};
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::fsdp::{ShardedOptimizer, StatePlace};
/// use burn_context_parallel::group::ProcessGroup;
/// use burn_upipe::learner::checkpoint::{Checkpoints, RunState};
/// use burn_upipe::learner::training::{Holding, parts, restore};
///
/// # let folder = std::env::temp_dir().join(format!("burn-upipe-training-{}", std::process::id()));
/// let (world, device) = (ProcessGroup::single(), Device::flex().autodiff());
/// let holding = Holding::Whole(world.clone());
/// let rule = AdamWConfig::new().build();
/// let mut optimizer = ShardedOptimizer::new(rule.clone(), StatePlace::Device);
/// let model = LinearConfig::new(2, 3).init(&device);
/// let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum();
/// let model = optimizer.step(1e-2, model.clone(), GradientsParams::from_grads(loss.backward(), &model));
///
/// let checkpoints = Checkpoints::new(&folder, None);
/// let parts = parts(&model, &optimizer, &holding);
/// let state = RunState { step: 1, optimizer: parts.scalars, ..RunState::default() };
/// checkpoints.save(&world, parts.pieces, &state)?;
///
/// let mut again = ShardedOptimizer::new(rule, StatePlace::Device);
/// let checkpoint = checkpoints.latest(&world)?.expect("just saved");
/// let loaded: Linear = restore(LinearConfig::new(2, 3).init(&device), &mut again, &holding, &checkpoint)?;
/// assert_eq!(loaded.weight.val().into_data(), model.weight.val().into_data());
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn parts<'a, M: Module, O: Optimizer>(
    model: &M,
    optimizer: &'a ShardedOptimizer<O>,
    holding: &Holding,
) -> Parts<'a> {
    let mut collect = Collect { walk: Walk::default(), holding, optimizer, pieces: Vec::new(), scalars: Map::new() };
    model.visit(&mut collect);
    Parts { pieces: collect.pieces, scalars: Value::Object(collect.scalars) }
}

/// `model` and `optimizer` as they were saved, whoever held what then. Every rank calls it with a model of the same shape, laid out
/// as `holding` says; trainability stays the model's.
///
/// # Errors
///
/// [`CheckpointError::NoSuchTensor`] and [`CheckpointError::Mismatch`] for another model's checkpoint, also if it has tensors that the
/// model has not; those of [`Checkpoint::read`]. `optimizer` may be half restored then.
///
/// # Memory
///
/// What the rank holds, and one parameter's part more.
pub fn restore<M: Module, O: Optimizer>(
    model: M,
    optimizer: &mut ShardedOptimizer<O>,
    holding: &Holding,
    checkpoint: &Checkpoint,
) -> Result<M> {
    let fields = fields(checkpoint);
    optimizer.clear();
    let mut restore = Restore { walk: Walk::default(), holding, optimizer, checkpoint, fields, used: 0, error: None };
    let model = model.map(&mut restore);
    let Restore { error, used, walk, .. } = restore;
    if let Some(error) = error {
        return Err(error);
    }
    if used < checkpoint.names().len() {
        let known = |name: &&str| {
            let path = name
                .strip_prefix("model/")
                .or_else(|| name.strip_prefix("optimizer/")?.rsplit_once('/').map(|(path, _)| path));
            path.is_some_and(|path| walk.seen.values().any(|(known, _)| known == path))
        };
        let extra = checkpoint.names().find(|name| !known(name)).unwrap_or_default().to_owned();
        return Err(CheckpointError::Mismatch {
            name: extra,
            expected: "not a parameter".into(),
            found: "a tensor".into(),
        });
    }
    Ok(model)
}

/// Names parameters by path, each once.
#[derive(Default)]
struct Walk {
    path: Vec<String>,
    seen: HashMap<ParamId, (String, usize)>,
}

impl Walk {
    /// The path and the number of a parameter that has not come before.
    fn next(&mut self, id: ParamId) -> Option<(String, usize)> {
        if self.seen.contains_key(&id) {
            return None; // tied
        }
        let named = (self.path.join("."), self.seen.len());
        self.seen.insert(id, named.clone());
        Some(named)
    }
}

struct Collect<'a, 'b, O: Optimizer> {
    walk: Walk,
    holding: &'b Holding,
    optimizer: &'a ShardedOptimizer<O>,
    pieces: Vec<Piece<'a>>,
    scalars: Map<String, Value>,
}

impl<O: Optimizer> ModuleVisitor for Collect<'_, '_, O> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.walk.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.walk.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((path, index)) = self.walk.next(param.id) else { return };
        let (id, value) = (param.id, param.base().inner());
        let (held, dtype) = (value.dims().to_vec(), value.dtype());
        let Part { shape, range, saves } = self.holding.part(id, &held, index);
        let state = self.optimizer.export::<D>(id);
        if let Some(state) = &state {
            let scalars = state.scalars.iter();
            let scalars = scalars
                .map(|(name, scalar)| (name.clone(), serde_json::to_value(scalar).unwrap_or(Value::Null)))
                .collect();
            self.scalars.insert(path.clone(), Value::Object(scalars));
        }
        if !saves {
            return;
        }
        let len = range.len();
        if len > 0 {
            let name = format!("model/{path}");
            self.pieces.push(Piece::new(name, dtype, shape.clone(), range.clone(), move || {
                Ok::<_, CheckpointError>(first(value.into_data(), len))
            }));
        }
        // Looked at now, and taken when the first of them is written: all moments at once would be too much to keep.
        let (optimizer, taken) = (self.optimizer, Rc::new(RefCell::new(None)));
        for (field, data) in state.map(|state| state.tensors).unwrap_or_default() {
            let (dtype, form) = (data.dtype(), data.shape().to_vec());
            // In the parameter's shape it lies as the parameter does.
            let (shape, range) = if form == held {
                (shape.clone(), range.clone())
            } else {
                let elements = form.iter().product();
                (form, if range.start == 0 { 0..elements } else { 0..0 })
            };
            if range.is_empty() {
                continue;
            }
            let (name, len, taken) = (format!("optimizer/{path}/{field}"), range.len(), taken.clone());
            self.pieces.push(Piece::new(name, dtype, shape, range, move || {
                let mut taken = taken.borrow_mut();
                let fields: &mut Vec<(String, TensorData)> =
                    taken.get_or_insert_with(|| optimizer.export::<D>(id).map_or_else(Vec::new, |state| state.tensors));
                let at = fields.iter().position(|(name, _)| *name == field);
                let data = at.map(|at| first(fields.swap_remove(at).1, len));
                data.ok_or_else(|| CheckpointError::Invalid {
                    what: format!("the optimizer's `{field}` has gone"),
                    remedy: "this is a fault of the library".into(),
                })
            }));
        }
    }
}

/// The first elements: without padding.
fn first(data: TensorData, len: usize) -> TensorData {
    if data.num_elements() == len {
        return data;
    }
    let (bytes, _, dtype) = data.into_parts();
    let bytes = bytes[..len * dtype.size()].to_vec();
    TensorData::from_bytes_vec(bytes, [len], dtype)
}

/// Of every path the fields of its optimizer state.
fn fields(checkpoint: &Checkpoint) -> BTreeMap<String, Vec<String>> {
    let mut fields: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in checkpoint.names() {
        if let Some((path, field)) = name.strip_prefix("optimizer/").and_then(|name| name.rsplit_once('/')) {
            fields.entry(path.to_owned()).or_default().push(field.to_owned());
        }
    }
    fields
}

struct Restore<'a, O: Optimizer> {
    walk: Walk,
    holding: &'a Holding,
    optimizer: &'a mut ShardedOptimizer<O>,
    checkpoint: &'a Checkpoint,
    fields: BTreeMap<String, Vec<String>>,
    /// How many tensors of the checkpoint have been asked for.
    used: usize,
    error: Option<CheckpointError>,
}

impl<O: Optimizer> ModuleMapper for Restore<'_, O> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.walk.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.walk.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let base = param.base();
        match self.read(param.id, &base) {
            Ok(data) => {
                let (device, dtype, trains) = (base.device(), base.dtype(), base.is_require_grad());
                drop(base);
                param.map(|old| {
                    drop(old);
                    let value = Tensor::<D>::from_data(data, (&device, dtype));
                    if trains { value.require_grad() } else { value }
                })
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

impl<O: Optimizer> Restore<'_, O> {
    /// What this rank holds of a parameter; its optimizer state goes to the optimizer.
    fn read<const D: usize>(&mut self, id: ParamId, base: &Tensor<D>) -> Result<TensorData> {
        let first = self.walk.next(id);
        let tied = first.is_none();
        // A tied parameter is saved under its first path, and need not share a tensor with it here.
        let (path, index) = first.or_else(|| self.walk.seen.get(&id).cloned()).expect("it has come before");
        let held = base.dims().to_vec();
        let part = self.holding.part(id, &held, index);
        let name = format!("model/{path}");
        self.checkpoint.expect(&name, base.dtype(), &part.shape)?;
        let value = padded(self.checkpoint.read(&name, part.range.clone())?, &held);
        if tied {
            return Ok(value);
        }
        self.used += 1;

        let scalars = self.checkpoint.state().optimizer.get(&path);
        let fields = self.fields.remove(&path).unwrap_or_default();
        if fields.is_empty() && scalars.is_none() {
            return Ok(value); // it was never stepped
        }
        let scalars = scalars.cloned().unwrap_or_else(|| Value::Object(Map::new()));
        let mut names = fields.clone();
        names.extend(scalars.as_object().into_iter().flat_map(Map::keys).cloned());
        let scalars = serde_json::from_value(scalars).map_err(|error| CheckpointError::Invalid {
            what: format!("the optimizer's scalars of `{path}` are none: {error}"),
            remedy: "load it with the optimizer that it was saved from".into(),
        })?;
        let mut source = StateSource::new(scalars);
        for field in fields {
            let name = format!("optimizer/{path}/{field}");
            let data = if self.checkpoint.shape(&name)? == part.shape {
                padded(self.checkpoint.read(&name, part.range.clone())?, &held)
            } else {
                self.checkpoint.read_whole(&name)?
            };
            self.used += 1;
            source.insert_tensor(field, data);
        }
        // A state with optional parts is made of any fields: what it took must be all that there was.
        let imported = self.optimizer.import::<D>(id, source, &base.device());
        let mut taken: Vec<String> = self.optimizer.export::<D>(id).map_or_else(Vec::new, |state| {
            let scalars = state.scalars.into_iter().map(|(name, _)| name);
            state.tensors.into_iter().map(|(name, _)| name).chain(scalars).collect()
        });
        taken.sort();
        names.sort();
        if !imported || taken != names {
            return Err(CheckpointError::Mismatch {
                name: format!("optimizer/{path}"),
                expected: "the state of this optimizer".into(),
                found: "that of another one".into(),
            });
        }
        Ok(value)
    }
}

/// In the shape of what a rank holds, with its padding.
fn padded(data: TensorData, held: &[usize]) -> TensorData {
    let (bytes, _, dtype) = data.into_parts();
    let wanted = held.iter().product::<usize>() * dtype.size();
    if bytes.len() == wanted {
        return TensorData::from_bytes(bytes, held.to_vec(), dtype);
    }
    let mut padded = bytes.to_vec();
    padded.resize(wanted, 0);
    TensorData::from_bytes_vec(padded, held.to_vec(), dtype)
}
