//! What can go wrong, and with which exit status the program ends.

use std::io;
use std::path::PathBuf;

use burn_context_parallel::group::LaunchError;
use burn_upipe::learner::checkpoint::CheckpointError;
use burn_upipe::plan::PlanError;
use llama::{DeviceError, LlamaError};

use crate::cli::one_line;
use crate::files::TextError;
use crate::resume::Difference;
use crate::train::Halt;

/// Any failure of a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What was typed.
    #[error("{}", one_line(&.0.to_string()))]
    Usage(Box<clap::Error>),
    /// What the file of `--config` says.
    #[error("--config {}{}: {problem}: {remedy}", path.display(), line.map(|line| format!(":{line}")).unwrap_or_default())]
    Config {
        /// Which file.
        path: PathBuf,
        /// Counted from 1, where it is known.
        line: Option<usize>,
        /// What, with its numbers.
        problem: String,
        /// What to write.
        remedy: String,
    },
    /// Arguments that do not go together, or do not fit the model.
    #[error("{problem}: {remedy}")]
    Input {
        /// What, with its numbers.
        problem: String,
        /// What to type.
        remedy: String,
    },
    /// The device cannot be had.
    #[error("--device: {0}")]
    Device(#[from] DeviceError),
    /// The planner does not know such a step.
    #[error("the planner: {0}")]
    Planner(#[from] PlanError),
    /// A model whose vocabulary has no place for every byte.
    #[error(
        "--model {}: a vocabulary of {vocab_size} has no room for bytes: use a model with at least 256 token ids, or leave out \
         --tokens bytes",
        folder.display()
    )]
    NotByteLevel {
        /// The model.
        folder: PathBuf,
        /// Its vocabulary.
        vocab_size: usize,
    },
    /// The model's tokenizer cannot be had, or refuses.
    #[error("{}: {problem}: {remedy}", path.display())]
    Tokenizer {
        /// Which file.
        path: PathBuf,
        /// Why.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// There is no chat template for conversations, or it is none.
    #[error("{}: {problem}: {remedy}", path.display())]
    Template {
        /// Which file.
        path: PathBuf,
        /// Why.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The text cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model cannot be built or loaded.
    #[error(transparent)]
    Model(LlamaError),
    /// The output folder cannot be had.
    #[error("--out {}: {problem}: {remedy}", path.display())]
    Out {
        /// Which folder.
        path: PathBuf,
        /// Why not.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Checkpoints that cannot be used.
    #[error("--out: {0}")]
    Checkpoint(CheckpointError),
    /// A run that cannot go on as asked.
    #[error("--resume: {}: {problem}: {remedy}", path.display())]
    Resume {
        /// Its folder.
        path: PathBuf,
        /// Why not, with the numbers.
        problem: String,
        /// What to type.
        remedy: String,
    },
    /// A run that would not be the same one if it went on.
    #[error(
        "--resume: {}: {}: leave what changes the result as it was (--config {} has it all), or start anew with --overwrite",
        path.display(),
        differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        path.join("config.toml").display()
    )]
    Differs {
        /// Its folder.
        path: PathBuf,
        /// What is not as it was.
        differences: Vec<Difference>,
    },
    /// A file could not be written.
    #[error("{}: {source}: make room on the disk, and check who may write there", path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Standard output could not be written to; the run itself came to its end.
    #[error("standard output: {0}: the run is complete, what it said is not: see its folder")]
    Say(io::Error),
    /// The weights could not be saved.
    #[error("weights not saved: {0}")]
    Save(LlamaError),
    /// The last checkpoint could not be saved.
    #[error("checkpoint not saved: {0}: make room on the disk, then --resume goes on from the last one that was")]
    NotSaved(CheckpointError),
    /// Signals cannot be heard.
    #[error("signals: {0}: the system does not let this program handle SIGINT and SIGTERM")]
    Signals(io::Error),
    /// A rank failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// An evaluation that gives no number.
    #[error("--eval: the loss is {0}, not a number: check the model, or use --dtype f32")]
    NoLoss(f64),
    /// Loss or gradients are not numbers any more.
    #[error("{halt}: {}: {}", match (saved, halt.kept) {
        (Some(folder), Some(0)) => format!("the initial weights are in {}", folder.display()),
        (Some(folder), Some(step)) => format!("the last good weights, those after step {step}, are in {}", folder.display()),
        _ => "there were no good weights to keep".to_owned(),
    }, match halt {
        Halt { step: 1, broken: None, .. } => "no step was taken yet: check the model, or use --dtype f32",
        _ => "lower --lr, or set --clip",
    })]
    Diverged {
        /// Where and how.
        halt: Halt,
        /// Where the last good weights are.
        saved: Option<PathBuf>,
    },
}

impl Error {
    /// An [`Error::Input`].
    pub(crate) fn input(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Input { problem: problem.into(), remedy: remedy.into() }
    }

    /// 2 if the request cannot be served, 1 if serving it failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_)
            | Self::Config { .. }
            | Self::Input { .. }
            | Self::Device(_)
            | Self::Planner(_)
            | Self::NotByteLevel { .. }
            | Self::Tokenizer { .. }
            | Self::Template { .. }
            | Self::Text(_)
            | Self::Model(_)
            | Self::Out { .. }
            | Self::Checkpoint(_)
            | Self::Resume { .. }
            | Self::Differs { .. } => 2,
            Self::Write { .. }
            | Self::Say(_)
            | Self::Save(_)
            | Self::NotSaved(_)
            | Self::Signals(_)
            | Self::Launch(_)
            | Self::NoLoss(_)
            | Self::Diverged { .. } => 1,
        }
    }
}

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
