//! Compares attention and models with PyTorch's results, case by case.
//!
//! ```text
//! cargo run --release -p verify -- FOLDER [--ranks N] [--heads-per-stage U] [--attention single|ulysses|upipe] [--checkpoint] [--tile N]
//!     [--device flex|cpu|wgpu|vulkan|cuda:N|rocm:N|metal]
//! ```
//!
//! FOLDER is searched for attention cases (a safetensors file whose metadata has `options`) and models (a folder with
//! `config.json`, `model.safetensors` and `reference.safetensors`). One line a case; the last line of the output is a JSON object.
//!
//! Exit status: 0 if there was a case and all passed, 1 if one did not, 2 if the request makes no sense.

mod attention;
mod file;
mod find;
mod model;
mod report;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use llama::{DeviceError, DeviceList, Devices};

use find::{Kind, find};
use report::{Report, Trouble};

/// Checks this build against reference results.
#[derive(Parser, Clone, Debug)]
#[command(name = "verify")]
struct Args {
    /// Searched, with all folders in it, for reference cases.
    folder: PathBuf,
    /// Ranks that share each sequence (threads); `single` ignores it. Default: 4.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Option<u16>,
    /// Query heads (over all ranks) a stage, under `upipe`. Default: one a rank.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    heads_per_stage: Option<u32>,
    /// How attention runs.
    #[arg(long, value_enum, default_value_t = Scheme::Upipe)]
    attention: Scheme,
    /// Recompute the models' blocks in the backward pass.
    #[arg(long)]
    checkpoint: bool,
    /// Tokens a tile of the models' feed-forward, norms and loss. Default: no tiles.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    tile: Option<u32>,
    /// Where it runs, as this program was built: flex, cpu, wgpu, vulkan, cuda:N, rocm:N, metal. All ranks share one device;
    /// several (cuda:0,cuda:1) are dealt out to ranks in turn.
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceList,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    Single,
    Ulysses,
    Upipe,
}

/// What the arguments mean.
#[derive(Clone, Debug)]
struct Plan {
    scheme: Scheme,
    ranks: usize,
    heads_per_stage: Option<usize>,
    checkpoint: bool,
    tile: Option<usize>,
    devices: Devices,
}

impl Plan {
    /// Starts the devices.
    fn new(args: &Args) -> Result<Self, clap::Error> {
        if args.heads_per_stage.is_some() && args.attention != Scheme::Upipe {
            return Err(Args::command().error(
                ErrorKind::ArgumentConflict,
                "--heads-per-stage is for --attention upipe: leave one of them out",
            ));
        }
        let ranks = match args.attention {
            Scheme::Single => 1,
            Scheme::Ulysses | Scheme::Upipe => args.ranks.map_or(4, usize::from),
        };
        let refuse = |error: DeviceError| Args::command().error(ErrorKind::InvalidValue, format!("--device: {error}"));
        if args.device.count() > ranks {
            return Err(Args::command().error(
                ErrorKind::InvalidValue,
                format!("--device {} for {ranks} ranks: use at most as many devices as ranks", args.device),
            ));
        }
        Ok(Self {
            scheme: args.attention,
            ranks,
            heads_per_stage: args.heads_per_stage.map(|heads| heads as usize),
            checkpoint: args.checkpoint,
            tile: args.tile.map(|tile| tile as usize),
            devices: args.device.open().map_err(refuse)?,
        })
    }

    /// The plan with the reason for each derived value.
    fn describe(&self) -> String {
        let scheme = format!("{:?}", self.scheme).to_lowercase();
        let ranks = match self.ranks {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        let stage = match (self.scheme, self.heads_per_stage) {
            (Scheme::Upipe, Some(heads)) => format!(", {heads} heads a stage"),
            (Scheme::Upipe, None) => ", one head a rank and stage".to_owned(),
            _ => String::new(),
        };
        let lse = match self.scheme {
            Scheme::Single => "",
            _ => "; the log-sum-exp stays inside the operation and is compared under single only",
        };
        let checkpoint = if self.checkpoint { "models' blocks recomputed" } else { "no checkpoints" };
        let tile = self.tile.map_or_else(|| "no tiles".to_owned(), |tile| format!("models' tiles of {tile} tokens"));
        let device = self.devices.list();
        format!("attention {scheme} on {ranks}{stage}, {checkpoint}, {tile}, on {device}{lse}")
    }
}

fn main() -> ExitCode {
    let (args, plan) = match Args::try_parse().and_then(|args| Plan::new(&args).map(|plan| (args, plan))) {
        Ok(request) => request,
        // Help and version.
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => {
            complain(&one_line(&error.to_string()));
            return ExitCode::from(2);
        }
    };
    let cases = match find(&args.folder) {
        Ok(cases) => cases,
        Err(error) => {
            complain(&format!("error: {}: {error}: give a readable folder of reference cases", args.folder.display()));
            return ExitCode::from(2);
        }
    };
    if cases.is_empty() {
        complain(&format!(
            "error: {}: no reference case found: give a folder with attention cases (*.safetensors with \"options\") or models \
             (config.json and reference.safetensors)",
            args.folder.display()
        ));
    }
    let mut report = Report::default();
    // A closed pipe ends the program: nobody is left to tell.
    let written = (|| -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", plan.describe())?;
        for case in &cases {
            let result = match &case.kind {
                Kind::Attention => attention::run(&case.path, &plan),
                Kind::Model => model::run(&case.path, &plan),
                Kind::Damaged(problem) => Err(Trouble::Failed(problem.clone())),
            };
            writeln!(out, "{}", report.add(case, result))?;
        }
        writeln!(out, "{}", report.json())
    })();
    match (written, cases.is_empty(), report.all_passed()) {
        (Err(_), ..) => ExitCode::FAILURE,
        (_, true, _) => ExitCode::from(2),
        (_, _, true) => ExitCode::SUCCESS,
        (_, _, false) => ExitCode::FAILURE,
    }
}

/// Clap's message with fault and remedy in one line.
fn one_line(message: &str) -> String {
    let told =
        message.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let told: Vec<&str> = told.filter(|line| !line.is_empty()).collect();
    format!("{}: see --help", told.join(": ").trim_end_matches('.'))
}

fn complain(message: &str) {
    // Nothing is left to do if stderr is closed.
    let _ = writeln!(io::stderr(), "{message}");
}
