//! What can go wrong when tensors leave a device and come back.

use std::io;
use std::path::{Path, PathBuf};

use burn_context_parallel::Error;

/// A failure of an offload. A full budget is none: what finds no room stays on the device.
///
/// In a block's forward or backward pass it is [raised](burn_context_parallel::raise); whoever
/// [catches](burn_context_parallel::catch) it finds it with
/// [`Error::downcast_ref`](burn_context_parallel::Error::downcast_ref).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// A setting or an argument that makes no sense.
    #[error("offload: {problem}: {remedy}")]
    Invalid {
        /// What, with its numbers.
        problem: String,
        /// What to change.
        remedy: &'static str,
    },
    /// The file cannot be made, written or read.
    #[error("offload: {action} {bytes} bytes at byte {at} of a file in {}: {problem}: {remedy}", folder.display())]
    Disk {
        /// What failed.
        action: DiskAction,
        /// The folder; the file in it has no name.
        folder: PathBuf,
        /// Where in the file.
        at: u64,
        /// How many bytes.
        bytes: usize,
        /// The system's kind of error.
        kind: io::ErrorKind,
        /// The system's words.
        problem: String,
        /// What to change.
        remedy: &'static str,
    },
    /// A backward pass of a step that was [given up](super::Offload::give_up).
    #[error("offload: the tensor was given up with its step: run the step again, forward first")]
    GivenUp,
    /// A copy between device and slot did not come to its end.
    #[error("offload: {action}, {bytes} bytes: {problem}: the tensor is lost, run the step again")]
    Copy {
        /// Which way.
        action: &'static str,
        /// How many bytes.
        bytes: usize,
        /// Why.
        problem: String,
    },
}

/// What was done to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskAction {
    /// It was made.
    Creating,
    /// A tensor was written.
    Writing,
    /// A tensor was read.
    Reading,
}

impl std::fmt::Display for DiskAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Creating => "creating",
            Self::Writing => "writing",
            Self::Reading => "reading",
        })
    }
}

impl OffloadError {
    pub(super) fn disk(action: DiskAction, folder: &Path, at: u64, bytes: usize, error: &io::Error) -> Self {
        let remedy = match (error.kind(), action) {
            (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge, _) => {
                "free space there, lower the disk budget, or name another folder"
            }
            (_, DiskAction::Reading) => "look at the disk; the tensor is lost, run the step again",
            _ => "name a folder that exists and that can be written to",
        };
        let (folder, problem) = (folder.to_owned(), error.to_string());
        Self::Disk { action, folder, at, bytes, kind: error.kind(), problem, remedy }
    }

    pub(super) fn copy(action: &'static str, bytes: usize, problem: impl Into<String>) -> Self {
        Self::Copy { action, bytes, problem: problem.into() }
    }
}

impl From<OffloadError> for Error {
    fn from(error: OffloadError) -> Self {
        Self::foreign(error)
    }
}
