//! What can go wrong with a model folder: every message names the file and what to do.

use std::path::{Path, PathBuf};

use crate::load::LoadReport;

/// Any failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LlamaError {
    /// A file could not be read or written.
    #[error("{}: {source}: {remedy}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },

    /// A configuration that describes no model.
    #[error("{}: {problem}: {remedy}", path.display())]
    Config {
        /// Which file.
        path: PathBuf,
        /// What is wrong, with its numbers.
        problem: String,
        /// What to do.
        remedy: String,
    },

    /// A model that exists, but is not built here (yet).
    #[error("{}: {what} is not supported: {remedy}", path.display())]
    Unsupported {
        /// Which file asks for it.
        path: PathBuf,
        /// What it asks for.
        what: String,
        /// What works in its place.
        remedy: String,
    },

    /// A weights file that is no safetensors file.
    #[error("{}: {problem}: download or save it again", path.display())]
    Weights {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },

    /// Weights that are not those of the configured model.
    #[error(
        "{}: the weights do not fit config.json: {report}: use the config.json that was saved with these weights, or download \
         both again",
        path.display()
    )]
    Mismatch {
        /// Which file.
        path: PathBuf,
        /// Which weights, one by one.
        report: Box<LoadReport>,
    },

    /// Attention, tiling or a collective refused.
    #[error(transparent)]
    Core(#[from] burn_context_parallel::Error),
}

impl LlamaError {
    pub(crate) fn file(path: &Path, source: std::io::Error, remedy: &'static str) -> Self {
        Self::File { path: path.to_owned(), source, remedy }
    }

    pub(crate) fn config(path: &Path, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Config { path: path.to_owned(), problem: problem.into(), remedy: remedy.into() }
    }

    pub(crate) fn unsupported(path: &Path, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_owned(), what: what.into(), remedy: remedy.into() }
    }

    /// Whether the request is meaningful, but not built (yet).
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported { .. } | Self::Core(burn_context_parallel::Error::Unsupported { .. }))
    }
}

/// The result of everything here that can fail.
pub type Result<T, E = LlamaError> = std::result::Result<T, E>;
