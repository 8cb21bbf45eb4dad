//! What the arguments mean: a setup, devices, and what a search may choose from.

use std::path::Path;

use burn_context_parallel::group::MeshShape;
use burn_upipe::plan::{
    Attention, Choices, DeviceKind, LOSS_TILE, MLP_TILE, Machines, ModelShape, NORM_TILE, OffloadPlan, Setup,
    StatePlace, Techniques, WaitingPlace, device, model,
};
use llama::LlamaConfig;

use crate::cli::Args;
use crate::error::{Error, Result};
use crate::this::this;
use crate::values::{Checkpoint, Mode, Place, Precision, Scheme, Switch, Tile, Waiting};

/// A question, ready to be answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Which one.
    pub mode: Mode,
    /// What is to run. Its length is 1 where none was typed.
    pub setup: Setup,
    /// On what.
    pub machines: Machines,
    /// What a search may choose from: what was typed is held.
    pub choices: Choices,
    /// The length that was typed.
    pub seq_len: Option<usize>,
    /// The most seconds of a step.
    pub seconds: Option<f64>,
    /// What the plan leaves out, in words.
    pub notes: Vec<String>,
}

impl Request {
    /// Resolves what was typed. Reads the configuration of a model that is a path, and asks this machine what it has if it is the device.
    ///
    /// # Errors
    ///
    /// [`Error::Input`], [`Error::Model`], [`Error::Plan`].
    pub fn new(args: &Args) -> Result<Self> {
        let mode = args.mode();
        let mut notes = Vec::new();
        let model = shape(&args.model, &mut notes)?;
        if args.seq_len.is_none() && matches!(mode, Mode::Plan | Mode::Fit) {
            return Err(Error::input(
                "no --seq-len",
                "type the tokens of a sequence (--seq-len 1M), or ask for the longest: max",
            ));
        }
        if args.svg.is_some() && mode != Mode::Ladder {
            return Err(Error::input("--svg without a ladder", "ask for ladder, or leave out --svg"));
        }
        if args.heads_per_stage.is_some() && args.attention.is_some_and(|scheme| scheme != Scheme::Upipe) {
            return Err(Error::input("--heads-per-stage without stages", "use --attention upipe, or leave it out"));
        }
        let machines = machines(args)?;
        let mut setup = Setup {
            seq_len: args.seq_len.unwrap_or(1),
            batch: args.batch,
            accumulate: args.accumulate,
            mesh: mesh(args, machines.count),
            techniques: techniques(args, machines.hardware.kind),
            accounting: machines.accounting(),
            ..Setup::published(model, 1, 1)
        };
        match args.dtype {
            Some(Precision::Bf16) => setup.accounting.compute = 2,
            Some(Precision::F32) => setup.accounting.compute = 4,
            None => {}
        }
        if let Some(overhead) = args.overhead {
            setup.accounting.overhead = overhead;
        }
        let choices = choices(args, &machines, &setup);
        let seconds = args.hours_per_step.map(|hours| 3600.0 * hours);
        Ok(Self { mode, setup, machines, choices, seq_len: args.seq_len, seconds, notes })
    }
}

/// A model by name, or by its configuration.
fn shape(text: &str, notes: &mut Vec<String>) -> Result<ModelShape> {
    let path = Path::new(text);
    if !path.exists() && path.extension().is_none_or(|extension| extension != "json") {
        return Ok(model(text)?);
    }
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let config = LlamaConfig::read(&file)?;
    if let Some(window) = config.sliding_window {
        notes.push(format!(
            "the model's window of {window} tokens is ignored: attention over the whole sequence takes at least as much"
        ));
    }
    let folder = file.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    Ok(config.shape(&folder.unwrap_or_else(|| config.family.to_string())))
}

fn machines(args: &Args) -> Result<Machines> {
    let mut hardware =
        if args.device.eq_ignore_ascii_case("this") { this(args.memory)? } else { device(&args.device)? };
    let giga = |rate: &mut f64, given: Option<f64>| {
        if let Some(given) = given {
            *rate = 1e9 * given;
        }
    };
    giga(&mut hardware.flops, args.tflops.map(|tera| 1e3 * tera));
    giga(&mut hardware.memory_bandwidth, args.memory_bandwidth);
    giga(&mut hardware.link, args.link);
    giga(&mut hardware.network, args.network);
    giga(&mut hardware.host_link, args.host_link);
    giga(&mut hardware.disk_bandwidth, args.disk_bandwidth);
    let set = |field: &mut usize, given: Option<usize>| *field = given.unwrap_or(*field);
    set(&mut hardware.memory, args.memory);
    set(&mut hardware.disk, args.disk);
    set(&mut hardware.per_host, args.devices_per_host);
    hardware.matmul_fraction = args.matmul_fraction.unwrap_or(hardware.matmul_fraction);
    hardware.attention_fraction = args.attention_fraction.unwrap_or(hardware.attention_fraction);
    match args.host_memory {
        Some(_) if hardware.kind != DeviceKind::Gpu => {
            return Err(Error::input(
                format!("--host-memory of {}, whose memory is the host's", hardware.name),
                "use --memory",
            ));
        }
        given => set(&mut hardware.host_memory, given),
    }
    let typed = args.mesh.and_then(|mesh| mesh.ranks());
    Ok(Machines { hardware, count: args.devices.or(typed).unwrap_or(1).max(1) })
}

fn mesh(args: &Args, count: usize) -> MeshShape {
    args.mesh.unwrap_or(match args.attention {
        Some(Scheme::Single) => MeshShape { data: count, ..MeshShape::default() },
        _ => MeshShape { ulysses: count, ..MeshShape::default() },
    })
}

fn attention(args: &Args, scheme: Scheme) -> Attention {
    match scheme {
        Scheme::Single => Attention::Single,
        Scheme::Ulysses => Attention::Ulysses,
        Scheme::Upipe => Attention::UPipe { per_stage: args.heads_per_stage },
    }
}

fn offload(args: &Args, waiting: Waiting) -> Option<OffloadPlan> {
    let to = |place| {
        Some(OffloadPlan { in_flight: args.in_flight, every: args.offload_every, ..OffloadPlan::to(place) })
    };
    match waiting {
        Waiting::None => None,
        Waiting::Host => to(WaitingPlace::Host),
        Waiting::Disk => to(WaitingPlace::Disk),
    }
}

fn place(place: Place) -> StatePlace {
    match place {
        Place::Device => StatePlace::Device,
        Place::Host => StatePlace::Host,
    }
}

/// All of them, but for what was typed.
fn techniques(args: &Args, kind: DeviceKind) -> Techniques {
    let checkpoint = args.checkpoint.map_or(Some(1), |checkpoint| checkpoint.0);
    // To where the device's memory is nothing is gained; without checkpoints nothing waits.
    let waiting = if kind == DeviceKind::Gpu && checkpoint.is_some() { Waiting::Host } else { Waiting::None };
    let tile = |tile: Option<Tile>, usual| tile.unwrap_or(Tile::On).or(usual);
    let on = |switch: Option<Switch>| switch.unwrap_or(Switch::On) == Switch::On;
    Techniques {
        attention: attention(args, args.attention.unwrap_or(Scheme::Upipe)),
        checkpoint,
        mlp_tile: tile(args.mlp_tile, MLP_TILE),
        norm_tile: tile(args.norm_tile, NORM_TILE),
        loss_tile: tile(args.loss_tile, LOSS_TILE),
        offload: offload(args, args.offload.unwrap_or(waiting)),
        fsdp: on(args.fsdp),
        prefetch: on(args.prefetch),
        optimizer: place(args.optimizer.unwrap_or(Place::Device)),
    }
}

/// Everything, but for what was typed.
fn choices(args: &Args, machines: &Machines, setup: &Setup) -> Choices {
    let mut choices = Choices::all(machines.count);
    let typed = &setup.techniques;
    if args.mesh.is_some() {
        choices.mesh = vec![setup.mesh];
    }
    if args.attention.is_some() || args.heads_per_stage.is_some() {
        choices.attention = match args.attention {
            // Any number of heads.
            Some(Scheme::Upipe) if args.heads_per_stage.is_none() => Some(
                (0..)
                    .map(|power| 1 << power)
                    .take_while(|heads| *heads <= setup.model.heads)
                    .map(|heads| Attention::UPipe { per_stage: Some(heads) })
                    .collect(),
            ),
            _ => Some(vec![typed.attention]),
        };
    }
    if let Some(Checkpoint(checkpoint)) = args.checkpoint {
        choices.checkpoint = vec![checkpoint];
    }
    if args.mlp_tile.is_some() {
        choices.mlp_tile = vec![typed.mlp_tile];
    }
    if args.norm_tile.is_some() {
        choices.norm_tile = vec![typed.norm_tile];
    }
    if args.loss_tile.is_some() {
        choices.loss_tile = vec![typed.loss_tile];
    }
    if args.offload.is_some() {
        choices.offload = vec![typed.offload];
    } else if machines.hardware.kind != DeviceKind::Gpu {
        choices.offload = vec![None, offload(args, Waiting::Disk)];
    }
    if args.fsdp.is_some() {
        choices.fsdp = vec![typed.fsdp];
    }
    if args.optimizer.is_some() {
        choices.optimizer = vec![typed.optimizer];
    } else if machines.hardware.kind != DeviceKind::Gpu {
        choices.optimizer = vec![StatePlace::Device];
    }
    choices
}
