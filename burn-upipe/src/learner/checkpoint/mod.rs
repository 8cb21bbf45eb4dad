//! Step-level checkpoints: what a run is, on disk, whole or not there.
//!
//! A checkpoint is a set of named tensors in flat [`Piece`]s, and a [`RunState`]. It knows nothing of models, optimizers and how they
//! are sharded: who saves makes pieces of what each rank holds, who loads asks for any [range](Checkpoint::read) of any tensor.
//! So a run saved on one mesh goes on on another.
//!
//! ```
//! use burn::tensor::TensorData;
//! use burn_context_parallel::group::launch;
//! use burn_upipe::learner::checkpoint::{CheckpointError, Checkpoints, Piece, RunState};
//!
//! # let out = std::env::temp_dir().join(format!("burn-upipe-doc-{}", std::process::id()));
//! # let folder = out.clone();
//! // Two ranks hold three elements each of a 2 x 3 matrix.
//! launch(2, move |world| {
//!     let (rank, checkpoints) = (world.rank(), Checkpoints::new(&folder, None));
//!     assert!(checkpoints.latest(&world)?.is_none());
//!     let row = TensorData::from([rank as f32, 1.0, 2.0]);
//!     let pieces = [Piece::part("weight", [2, 3], 3 * rank..3 * (rank + 1), row)];
//!     checkpoints.save(&world, pieces, &RunState { step: 120, ..RunState::default() })?;
//!     Ok::<_, CheckpointError>(())
//! })?;
//!
//! # let folder = out.clone();
//! // Three ranks go on with two elements each.
//! let shards = launch(3, move |world| {
//!     let latest = Checkpoints::new(&folder, None).latest(&world)?.expect("it was saved");
//!     assert_eq!((latest.step(), latest.shape("weight")?), (120, [2, 3].as_slice()));
//!     latest.read("weight", 2 * world.rank()..2 * (world.rank() + 1))
//! })?;
//! assert_eq!(shards[1], TensorData::from([2f32, 1.0]));
//! # std::fs::remove_dir_all(out)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # On disk
//!
//! ```text
//! checkpoints/
//!   step-0000000120/
//!     manifest.json                       state, tensors, files, pieces, and the checksum of every byte
//!     rank-0000-of-0002.safetensors       what rank 0 holds
//!     rank-0001-of-0002.safetensors
//! ```
//!
//! All of it is written into a hidden folder, each rank its own file, and waited for until it is on disk; then the folder gets its
//! name. A crash before that leaves nothing to be seen, a crash after it a whole checkpoint.
//!
//! Every rank sees one folder: on several machines that is a shared file system.

mod agree;
mod error;
mod exact;
mod index;
mod keep;
mod manifest;
mod piece;
mod read;
mod save;
mod state;
mod write;

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn_context_parallel::group::ProcessGroup;

pub use error::{CheckpointError, Result};
pub use keep::Saved;
pub use manifest::{FORMAT, MANIFEST};
pub use piece::Piece;
pub use read::Checkpoint;
pub use state::RunState;

/// The checkpoints of a run: a folder, and how many of them are kept. Each rank has its own value.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: Option<NonZeroUsize>,
    /// Held by the first rank from its first save, or [`Checkpoints::claim`], on.
    lock: Mutex<Option<File>>,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which need not exist yet; `keep` of them are kept, or all.
    pub fn new(folder: impl Into<PathBuf>, keep: Option<NonZeroUsize>) -> Self {
        Self { folder: folder.into(), keep, lock: Mutex::new(None) }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What is there, the newest first, as far as names tell.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be listed; that it is not there is no error.
    pub fn list(&self) -> Result<Vec<Saved>> {
        keep::list(&self.folder)
    }

    /// Takes the folder for this run until this value is dropped; makes it if need be. [`save`](Self::save) does so as well: a run that
    /// claims at its start does not find out later. Every rank calls it; the first one holds the lock.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`] if another run has it, [`CheckpointError::Io`]; [`CheckpointError::Rank`] with these on other
    /// ranks; [`CheckpointError::Group`].
    ///
    /// # Communication
    ///
    /// A byte to every rank.
    pub fn claim(&self, group: &ProcessGroup) -> Result<()> {
        agree::together(group, if group.rank() == 0 { self.hold() } else { Ok(()) })
    }

    /// The newest whole checkpoint: all of it is read and compared with its checksums, each rank its share of the files. Those that
    /// are not whole are passed over, and logged. `None` if there is none at all. Every rank calls it, and gets the same.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoneWhole`] if there are checkpoints, but no whole one; [`CheckpointError::Io`] if the folder cannot be
    /// listed; [`CheckpointError::Rank`] with that on other ranks; [`CheckpointError::Group`].
    ///
    /// # Memory
    ///
    /// As [`Checkpoint::open`], and 256 KiB.
    ///
    /// # Communication
    ///
    /// The folders' names, and a byte for each that is tried, to every rank.
    pub fn latest(&self, group: &ProcessGroup) -> Result<Option<Checkpoint>> {
        let first = group.rank() == 0;
        let names = if first { self.list().map(Some) } else { Ok(None) };
        let names = agree::together(group, names)?.map(|saved| {
            saved.into_iter().map(|saved| keep::name(saved.step, saved.replay)).collect::<Vec<_>>().join("\n")
        });
        let names = agree::first_says(group, names)?;
        let mut problems = Vec::new();
        for name in names.lines() {
            let path = self.folder.join(name);
            let opened = self.open_share(&path, name, group);
            let problem = agree::first_problem(group, opened.as_ref().err().map(ToString::to_string))?;
            match (opened, problem) {
                (Ok(checkpoint), None) => return Ok(Some(checkpoint)),
                (_, problem) => {
                    let problem = problem.map(|(_, problem)| problem).unwrap_or_default();
                    if first {
                        log::warn!("passed over {}: {problem}", path.display());
                    }
                    problems.push((path, problem));
                }
            }
        }
        if problems.is_empty() {
            return Ok(None);
        }
        Err(CheckpointError::NoneWhole { folder: self.folder.clone(), problems })
    }

    /// Opens a checkpoint, and compares this rank's share of its files with their checksums.
    fn open_share(&self, path: &Path, name: &str, group: &ProcessGroup) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open(path)?;
        if keep::parse(name).is_none_or(|(step, _)| step != checkpoint.step()) {
            let what = format!("the folder was renamed: its state is of step {}", checkpoint.step());
            return Err(CheckpointError::corrupt(path, what));
        }
        (group.rank()..checkpoint.ranks()).step_by(group.size()).try_for_each(|file| checkpoint.verify_file(file))?;
        Ok(checkpoint)
    }

    /// Makes the folder and takes the lock, unless this value has it.
    fn hold(&self) -> Result<()> {
        // A panic while it was held leaves it either taken or not.
        let mut lock = self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if lock.is_none() {
            std::fs::create_dir_all(&self.folder).map_err(CheckpointError::io("creating", &self.folder))?;
            *lock = Some(keep::lock(&self.folder)?);
        }
        Ok(())
    }
}
