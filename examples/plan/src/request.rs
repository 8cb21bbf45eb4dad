//! What the arguments mean: a setup, devices, and what a search may choose from.

use std::path::Path;

use burn_context_parallel::group::{MAX_RANKS, MeshShape};
use burn_upipe::plan::{
    Attention, AttentionChoice, Choices, Compute, DeviceKind, LOSS_TILE, MLP_TILE, Machines, ModelShape, NORM_TILE,
    OffloadPlan, Setup, StatePlace, Techniques, WaitingPlace, device, model,
};
use llama::LlamaConfig;

use crate::cli::Args;
use crate::error::{Error, Result};
use crate::this::this;
use crate::values::{Checkpoint, Mode, Place, Scheme, Switch, Tile, Waiting};

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
        let techniques = techniques(args, &machines);
        check_offload(args, mode, &techniques)?;
        let compute = args.dtype.map_or(machines.hardware.compute(), Compute::from);
        match (compute, machines.hardware.kind) {
            (Compute::F32, DeviceKind::Gpu) => notes.push(
                "matrix products in f32 run in TF32; what they achieve of it is what was fitted in bf16".to_owned(),
            ),
            (Compute::Bf16, DeviceKind::Cpu) => {
                notes.push("bf16 on a CPU saves memory and no time: weights and gradients stay f32".to_owned());
            }
            _ => {}
        }
        let mut setup = Setup {
            seq_len: args.seq_len.unwrap_or(1),
            batch: args.batch,
            accumulate: args.accumulate,
            mesh: mesh(args, machines.count),
            techniques,
            accounting: machines.accounting_in(compute),
            model,
        };
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
    // As names have slashes, too, only what is plainly a path is one though nothing is there.
    let plainly = path.is_absolute() || text.starts_with('.') || path.extension().is_some_and(|end| end == "json");
    if !path.exists() && !plainly {
        return Ok(model(text)?);
    }
    let is_file = path.is_file() || path.extension().is_some_and(|end| end == "json") && !path.is_dir();
    let file = if is_file { path.to_owned() } else { path.join("config.json") };
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
    let here = args.device.trim().eq_ignore_ascii_case("this");
    let mut hardware = if here { this(args.memory)? } else { device(&args.device)? };
    if let Some(precision) = args.dtype {
        hardware = hardware.computing_in(precision.into());
    }
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
    let count = args.devices.or(typed).unwrap_or(1).max(1);
    if count > MAX_RANKS {
        return Err(Error::input(format!("{count} ranks, one a device"), format!("use at most {MAX_RANKS}")));
    }
    Ok(Machines { hardware, count })
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

fn offload(args: &Args, waiting: Waiting, ranks: usize) -> Option<OffloadPlan> {
    let share = |bytes: Option<usize>| bytes.map(|bytes| bytes / ranks.max(1));
    let to = |place| {
        let usual = OffloadPlan::to(place);
        let in_flight = args.in_flight.unwrap_or(usual.in_flight);
        Some(OffloadPlan {
            in_flight,
            every: args.offload_every.unwrap_or(1),
            keep: share(args.offload_budget).unwrap_or(0),
            host_budget: share(args.offload_host_budget),
            disk_budget: share(args.offload_disk_budget),
            ..usual
        })
    };
    match waiting {
        Waiting::None => None,
        Waiting::Host => to(WaitingPlace::Host),
        Waiting::Disk => to(WaitingPlace::Disk),
    }
}

/// Nothing that is typed is without effect.
fn check_offload(args: &Args, mode: Mode, techniques: &Techniques) -> Result<()> {
    let budgets = [
        ("--offload-budget", args.offload_budget),
        ("--offload-host-budget", args.offload_host_budget),
        ("--offload-disk-budget", args.offload_disk_budget),
    ];
    let typed = [("--offload-every", args.offload_every), ("--in-flight", args.in_flight)];
    let Some((name, number)) = typed.into_iter().chain(budgets).find_map(|(name, number)| Some((name, number?))) else {
        return Ok(());
    };
    let budget = budgets.iter().find_map(|(name, bytes)| bytes.is_some().then_some(*name));
    if let (Some(_), Some(_)) = (args.offload_every, args.offload_budget) {
        return Err(Error::input("--offload-every and --offload-budget together", "leave one of them out"));
    }
    if let (Some(OffloadPlan { place: WaitingPlace::Disk, .. }), Some(_)) =
        (techniques.offload, args.offload_host_budget)
    {
        let remedy = "leave it out, or use --offload host with --offload-disk-budget: what does not fit goes there";
        return Err(Error::input("--offload-host-budget with --offload disk", remedy));
    }
    if let (Mode::Fit, None, Some(budget)) = (mode, args.offload, budget) {
        let remedy = "say which with --offload host or disk: a search looks at offload without budgets";
        return Err(Error::input(format!("{budget} where the place is searched"), remedy));
    }
    // A search may still find a place for them.
    let searched = mode == Mode::Fit && args.offload.is_none() && techniques.checkpoint.is_some();
    if techniques.offload.is_some() || searched {
        return Ok(());
    }
    let remedy = "leave it out, or use --offload host or disk";
    Err(Error::input(format!("{name} {number} where nothing is offloaded"), remedy))
}

fn place(place: Place) -> StatePlace {
    match place {
        Place::Device => StatePlace::Device,
        Place::Host => StatePlace::Host,
    }
}

/// All of them, but for what was typed.
fn techniques(args: &Args, machines: &Machines) -> Techniques {
    let checkpoint = args.checkpoint.map_or(Some(1), |checkpoint| checkpoint.0);
    // To where the device's memory is nothing is gained; without checkpoints nothing waits.
    let waiting =
        if machines.hardware.kind == DeviceKind::Gpu && checkpoint.is_some() { Waiting::Host } else { Waiting::None };
    let tile = |tile: Option<Tile>, usual| tile.unwrap_or(Tile::On).or(usual);
    let on = |switch: Option<Switch>| switch.unwrap_or(Switch::On) == Switch::On;
    Techniques {
        attention: attention(args, args.attention.unwrap_or(Scheme::Upipe)),
        checkpoint,
        mlp_tile: tile(args.mlp_tile, MLP_TILE),
        norm_tile: tile(args.norm_tile, NORM_TILE),
        loss_tile: tile(args.loss_tile, LOSS_TILE),
        offload: offload(args, args.offload.unwrap_or(waiting), machines.count),
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
    choices.attention = match (args.attention, args.heads_per_stage) {
        (None, None) => AttentionChoice::Any,
        (Some(Scheme::Upipe), None) => AttentionChoice::Staged,
        _ => AttentionChoice::Held(typed.attention),
    };
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
    let on_gpu = machines.hardware.kind == DeviceKind::Gpu;
    choices.offload.retain(|choice| match (choice, args.offload) {
        (None, None) => args.offload_every.is_none() && args.in_flight.is_none(),
        (None, Some(waiting)) => waiting == Waiting::None,
        // To where the device's memory is nothing is gained.
        (Some(plan), None) => on_gpu || plan.place == WaitingPlace::Disk,
        (Some(plan), Some(_)) => Some(plan.place) == typed.offload.map(|typed| typed.place),
    });
    for plan in choices.offload.iter_mut().flatten() {
        if let (Some(typed), true) = (typed.offload, args.offload.is_some()) {
            let OffloadPlan { keep, host_budget, disk_budget, .. } = typed;
            // What stays is one policy, every how many another.
            let every = if keep > 0 { 1 } else { plan.every };
            *plan = OffloadPlan { every, keep, host_budget, disk_budget, ..*plan };
        }
        plan.every = args.offload_every.unwrap_or(plan.every);
        plan.in_flight = args.in_flight.unwrap_or(plan.in_flight);
    }
    choices.offload.dedup();
    if args.fsdp.is_some() {
        choices.fsdp = vec![typed.fsdp];
    }
    if args.optimizer.is_some() {
        choices.optimizer = vec![typed.optimizer];
    } else if !on_gpu {
        choices.optimizer = vec![StatePlace::Device];
    }
    if args.prefetch.is_some() {
        choices.prefetch = vec![typed.prefetch];
    }
    choices
}
