//! Why a checkpoint could not be written or read.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong with a checkpoint: the file, what is wrong with it, the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// It is not there.
    #[error("{} is missing: {remedy}", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// What to do.
        remedy: String,
    },

    /// It was written as a checkpoint, and is not what was written.
    #[error("{} is damaged: {what}: {remedy}", file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// What differs.
        what: String,
        /// What to do.
        remedy: String,
    },

    /// It is no checkpoint of this program, or one of another version.
    #[error("{} is not a checkpoint that can be read here: {what}", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
        /// What it is in place of one.
        what: String,
    },

    /// Another program, or another handle of this one, writes to the folder.
    #[error("{} is locked: another run writes its checkpoints there: wait for it to end, or use another folder", file.display())]
    Locked {
        /// The lock.
        file: PathBuf,
    },

    /// The system refused.
    #[error("{action} {} failed: {source}", path.display())]
    Io {
        /// What was done.
        action: &'static str,
        /// With which file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// A tensor in the checkpoint is another one than the program has.
    #[error(
        "`{name}` is {found} in the checkpoint, and {expected} here: load it into the model that it was saved from"
    )]
    Mismatch {
        /// The tensor.
        name: String,
        /// Element type and shape in the program.
        expected: String,
        /// Element type and shape in the checkpoint.
        found: String,
    },

    /// A tensor is not in the checkpoint.
    #[error("`{name}` is not in the checkpoint: {hint}")]
    NoSuchTensor {
        /// The tensor.
        name: String,
        /// What is in it.
        hint: String,
    },

    /// What was to be saved, or asked for, does not fit together.
    #[error("{what}: {remedy}")]
    Invalid {
        /// What does not fit, with its numbers.
        what: String,
        /// What to change.
        remedy: String,
    },

    /// There are checkpoints, but none of them is whole.
    #[error("none of the {} checkpoints in {} is whole: {}: restore one from a copy, or start anew in another folder",
        problems.len(), folder.display(), Listed(problems))]
    NoneWhole {
        /// Where they are.
        folder: PathBuf,
        /// Each of them, the newest first, and what is wrong with it.
        problems: Vec<(PathBuf, String)>,
    },

    /// A tensor could not be brought to host memory.
    #[error("`{name}` could not be read from its device: {source}")]
    Source {
        /// The tensor.
        name: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// Another rank failed; this one has nothing to report itself.
    #[error("rank {rank}: {problem}")]
    Rank {
        /// That rank, in the group that saves or loads.
        rank: usize,
        /// Its error.
        problem: String,
    },

    /// The group broke.
    #[error(transparent)]
    Group(#[from] burn_context_parallel::Error),
}

/// The result of everything about checkpoints that can fail.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// How another checkpoint is used in place of one that is damaged.
const REMEDY: &str = "use an older checkpoint, or restore this one from a copy";

impl CheckpointError {
    pub(super) fn corrupt(file: &Path, what: impl Into<String>) -> Self {
        Self::Corrupt { file: file.to_owned(), what: what.into(), remedy: REMEDY.to_owned() }
    }

    pub(super) fn invalid(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), remedy: remedy.into() }
    }

    /// An error of the system, for `map_err`.
    pub(super) fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// As [`io`](Self::io), for what a checkpoint should hold: what is not there is missing.
    pub(super) fn io_in_checkpoint<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path: path.to_owned(), remedy: REMEDY.to_owned() },
            _ => Self::Io { action, path: path.to_owned(), source },
        }
    }
}

struct Listed<'a>(&'a [(PathBuf, String)]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (_, problem)) in self.0.iter().enumerate() {
            // A problem names its file.
            write!(f, "{}{problem}", if i > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}
