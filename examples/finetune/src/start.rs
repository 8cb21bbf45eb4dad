//! Where weights come from, and how each rank gets its own.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::Error as CoreError;
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig, whole_shapes};
use burn_context_parallel::group::{Axis, Mesh};
use burn_upipe::learner::checkpoint::Checkpoint;
use burn_upipe::learner::training::Holding;
use llama::device::Runtime;
use llama::{DeviceChoice, Devices, FolderWeights, Llama, LlamaError, LoadReport, load_as, not_finite};

use crate::error::{Error, Result};
use crate::plan::{ModelSource, Plan};
use crate::ranks::RankResult;
use crate::values::Precision;

/// What every rank starts from.
#[derive(Clone, Debug)]
pub enum Start {
    /// These weights, copied to every rank.
    Whole(Box<Llama>),
    /// The plan's source, straight into shards: no rank ever holds all of it.
    Shards,
    /// Those of a checkpoint, and what else it has.
    Checkpoint(Box<Checkpoint>),
}

/// The beginning of a plan: it depends on the seed or the folder, not on ranks. With what loading a folder did.
///
/// # Errors
///
/// [`Error::Device`]; [`Error::Model`], also for weights that are not finite.
///
/// # Memory
///
/// The model; under FSDP one parameter.
pub fn initial(plan: &Plan) -> Result<(Start, Option<LoadReport>)> {
    let devices = plan.open()?.autodiff();
    let device = devices.of_rank(0);
    match (&plan.model, plan.fsdp) {
        (ModelSource::Scratch, true) => Ok((Start::Shards, None)),
        (ModelSource::Scratch, false) => {
            let drawing = drawing(plan).map_or_else(|| device.clone(), Device::autodiff);
            drawing.seed(plan.seed);
            let model = Llama::init(&plan.config, &plan.parallel, &drawing).map_err(Error::Model)?;
            Ok((Start::Whole(Box::new(model)), None))
        }
        (ModelSource::Folder(folder), true) => {
            // All of it is read once before anything is written; ranks read it again.
            let (mut weights, report) = FolderWeights::open(folder, DType::F32, device).map_err(Error::Model)?;
            let model = Llama::undrawn(&plan.config, &plan.parallel, device).map_err(Error::Model)?;
            for (path, shape) in whole_shapes(&model) {
                let value = weights.read(&path, &shape).map_err(Error::Model)?;
                if !value.iter::<f32>().all(f32::is_finite) {
                    return Err(infinite(folder, &llama::hf_name(&path)));
                }
            }
            Ok((Start::Shards, Some(report)))
        }
        (ModelSource::Folder(folder), false) => {
            // f32 whatever the file has: these are the weights that the optimizer changes.
            let (model, report) = load_as(folder, &plan.parallel, device, DType::F32).map_err(Error::Model)?;
            match not_finite(&model) {
                Some(name) => Err(infinite(folder, &name)),
                None => Ok((Start::Whole(Box::new(model)), Some(report))),
            }
        }
    }
}

/// Where weights from scratch are drawn, if not on the device that trains: on Flex, whose numbers they then are, whatever the device.
fn drawing(plan: &Plan) -> Option<Device> {
    let here = plan.device.runtime().is_heap() || !Runtime::Flex.is_compiled_in();
    (!here).then(|| DeviceChoice::FLEX.open().ok()).flatten()
}

fn infinite(folder: &std::path::Path, name: &str) -> Error {
    let problem = format!("{name} has values that are not finite numbers");
    Error::Model(LlamaError::Weights { path: folder.to_owned(), problem })
}

/// A rank's model.
pub(crate) struct Ready {
    pub model: Llama,
    /// Whether its parameters are shards.
    pub holding: Holding,
    /// Where its values, and those of its optimizer, are to be taken from.
    pub checkpoint: Option<Box<Checkpoint>>,
}

impl Start {
    /// A model for each of so many ranks, where they are copies: ranks may share memory, never the leaves of a graph. Made one by one,
    /// before the ranks start, each on its rank's device.
    pub(crate) fn copies(&self, ranks: usize, devices: &Devices) -> Vec<Option<Llama>> {
        let copy = |model: &Llama, rank| Some(model.clone().fork(devices.of_rank(rank)));
        match self {
            Self::Whole(model) => (0..ranks).map(|rank| copy(model, rank)).collect(),
            _ => Vec::new(),
        }
    }

    /// This rank's model. Every rank calls it.
    pub(crate) fn on_rank(&self, plan: &Plan, copy: Option<Llama>, mesh: &Mesh, device: &Device) -> RankResult<Ready> {
        let holding = match plan.fsdp {
            true => Holding::Sharded(Fsdp::new(mesh, &Axis::ALL, fsdp_config(plan.precision))?),
            false => Holding::Whole(mesh.world().clone()),
        };
        let undrawn = || Llama::undrawn(&plan.config, &plan.parallel, device);
        let checkpoint = match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint.clone()),
            _ => None,
        };
        let model = match (&holding, copy) {
            (Holding::Sharded(fsdp), Some(copy)) => fsdp.shard(copy)?,
            // Whatever is drawn here gives way to what was saved.
            (Holding::Sharded(fsdp), None) if checkpoint.is_some() => fsdp.shard(undrawn()?)?,
            (Holding::Sharded(fsdp), None) => sharded(plan, undrawn()?, fsdp, device)?,
            (Holding::Whole(_), Some(copy)) => copy,
            (Holding::Whole(_), None) if checkpoint.is_some() => undrawn()?,
            (Holding::Whole(_), None) => {
                return Err(CoreError::invalid("finetune", "shards without FSDP", "start from whole weights").into());
            }
        };
        Ok(Ready { model, holding, checkpoint })
    }
}

fn sharded(plan: &Plan, model: Llama, fsdp: &Fsdp, device: &Device) -> RankResult<Llama> {
    match &plan.model {
        ModelSource::Scratch => {
            // Only the first rank draws.
            let first = fsdp.world().rank() == 0;
            let Some(drawing) = drawing(plan) else {
                if first {
                    device.seed(plan.seed);
                }
                return Ok(fsdp.shard(model)?);
            };
            let mut drawn = None;
            if first {
                drawing.seed(plan.seed);
                drawn = Some(Drawn { model: Llama::undrawn(&plan.config, &plan.parallel, &drawing)? });
            }
            let world = fsdp.world().at(device);
            Ok(fsdp.shard_from(model, |path, _| {
                Ok(Some(world.broadcast(drawn.as_ref().map(|drawn| drawn.at(path)), 0)?))
            })?)
        }
        ModelSource::Folder(folder) => {
            let (mut weights, _) = FolderWeights::open(folder, DType::F32, device)?;
            let damaged = |error: LlamaError| {
                CoreError::invalid("a model folder", error.to_string(), "leave it as it is while it is read")
            };
            Ok(fsdp.shard_from(model, |path, shape| weights.read(path, shape).map(Some).map_err(damaged))?)
        }
    }
}

/// The model on the device that draws; each parameter is drawn when it is asked for, in the order of those that ask.
struct Drawn {
    model: Llama,
}

impl Drawn {
    /// The value at a module path.
    fn at(&self, path: &str) -> TensorData {
        struct Find<'a> {
            wanted: &'a str,
            path: Vec<String>,
            found: Option<TensorData>,
        }
        impl ModuleVisitor for Find<'_> {
            fn enter_module(&mut self, name: &str, _: &str) {
                self.path.push(name.to_owned());
            }

            fn exit_module(&mut self, _: &str, _: &str) {
                self.path.pop();
            }

            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if self.path.join(".") == self.wanted {
                    self.found = Some(param.base().inner().into_data());
                }
            }
        }
        let mut find = Find { wanted: path, path: Vec::new(), found: None };
        self.model.visit(&mut find);
        find.found.expect("the same model, on another device")
    }
}

fn fsdp_config(precision: Precision) -> FsdpConfig {
    match precision {
        Precision::F32 => FsdpConfig::new(),
        other => FsdpConfig::new().with_compute(other.dtype()),
    }
}
