//! What can go wrong, as one type.

use std::io;
use std::path::PathBuf;

use burn_upipe::plan::PlanError;
use llama::LlamaError;

/// Any failure of this program. Each is one line: what, the numbers, the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The command line.
    #[error("{}", one_line(&.0.to_string()))]
    Usage(Box<clap::Error>),
    /// What was typed does not go together.
    #[error("{problem}: {remedy}")]
    Input {
        /// What, with its numbers.
        problem: String,
        /// What to type.
        remedy: String,
    },
    /// The model's configuration.
    #[error("--model: {0}")]
    Model(#[from] LlamaError),
    /// A setup that cannot run.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The picture could not be written.
    #[error("--svg {}: {source}: make room on the disk, and check who may write there", path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Standard output could not be written to.
    #[error("standard output: {0}: the answer is lost: ask again")]
    Say(io::Error),
}

impl Error {
    pub(crate) fn input(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Input { problem: problem.into(), remedy: remedy.into() }
    }

    /// As JSON: `error` and `exit_status`.
    pub fn object(&self) -> String {
        let object = serde_json::json!({ "error": self.to_string(), "exit_status": self.exit_code() });
        format!("{object:#}")
    }

    /// 2 if the request makes no sense, 1 if the answer could not be given.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Input { .. } | Self::Model(_) | Self::Plan(_) => 2,
            Self::Write { .. } | Self::Say(_) => 1,
        }
    }
}

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Clap spreads fault and remedy over several lines.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let mut parts: Vec<&str> = lines.filter(|line| !line.is_empty() && !line.starts_with("For more")).collect();
    if parts.len() < 2 && !parts.iter().any(|part| part.contains(": give ")) {
        parts.push("see --help");
    }
    parts.join(" ").trim_start_matches("error: ").to_owned()
}
