//! The folder of checkpoints: which there are, which are kept, and who may write.
//!
//! ```text
//! checkpoints/
//!   .lock                             held by the run that writes
//!   .step-0000000130.partial/         being written, or left by a run that died: removed by the next save
//!   .step-0000000100.removed/         being removed, likewise
//!   step-0000000110/
//!   step-0000000120/                  of the run before it died
//!   step-0000000120-1/                of the run that went on from 110 and came here again
//! ```
//!
//! A folder gets its name only when it is whole, and loses it before anything in it is deleted.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::{Checkpoint, CheckpointError, Result};

/// A checkpoint's folder, as its name tells; whether it is whole shows when it is opened.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Saved {
    /// The optimizer step.
    pub step: u64,
    /// How often this step was saved before: a resumed run comes to steps again.
    pub replay: u64,
    /// The folder.
    pub path: PathBuf,
}

/// The folder's name.
pub(super) fn name(step: u64, replay: u64) -> String {
    match replay {
        0 => format!("step-{step:010}"),
        replay => format!("step-{step:010}-{replay}"),
    }
}

/// What a folder's name tells; only names that [`name`] gives.
pub(super) fn parse(text: &str) -> Option<(u64, u64)> {
    let rest = text.strip_prefix("step-")?;
    let (step, replay) = rest.split_once('-').unwrap_or((rest, "0"));
    let parsed = (step.parse().ok()?, replay.parse().ok()?);
    (name(parsed.0, parsed.1) == text).then_some(parsed)
}

/// All of them, the newest first.
pub(super) fn list(folder: &Path) -> Result<Vec<Saved>> {
    let mut found = Vec::new();
    for_each_name(folder, |text| {
        if let Some((step, replay)) = parse(text) {
            found.push(Saved { step, replay, path: folder.join(text) });
        }
    })?;
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

fn for_each_name(folder: &Path, mut each: impl FnMut(&str)) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(CheckpointError::io("listing", folder))?,
    };
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io("listing", folder))?;
        // Names of ours are ASCII.
        if let Some(name) = entry.file_name().to_str() {
            each(name);
        }
    }
    Ok(())
}

/// Takes the folder for this run, until the file is dropped.
///
/// # Errors
///
/// [`CheckpointError::Locked`], [`CheckpointError::Io`].
pub(super) fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(".lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(CheckpointError::io("creating", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(CheckpointError::Locked { file: path }),
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
            log::warn!("{}: this file system has no locks: see to it that no other run writes here", folder.display());
            Ok(file)
        }
        Err(TryLockError::Error(source)) => Err(CheckpointError::Io { action: "locking", path, source }),
    }
}

/// Removes what runs that died have left half written or half removed. Only for who holds the lock.
pub(super) fn clean(folder: &Path) -> Result<()> {
    let mut left = Vec::new();
    for_each_name(folder, |name| {
        let ours = name.strip_prefix('.').and_then(|name| name.strip_suffix(PARTIAL).or(name.strip_suffix(REMOVED)));
        if ours.is_some_and(|name| parse(name).is_some()) {
            left.push(folder.join(name));
        }
    })?;
    for path in left {
        log::info!("removing {}, which a run that died has left", path.display());
        fs::remove_dir_all(&path).map_err(CheckpointError::io("removing", &path))?;
    }
    Ok(())
}

const PARTIAL: &str = ".partial";
const REMOVED: &str = ".removed";

/// Where a checkpoint is written.
pub(super) fn partial(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!(".{name}{PARTIAL}"))
}

/// Removes the checkpoints that are not kept: others of the step that was just saved, and what is older than the `keep` newest whole
/// ones. Never the one just saved. What does not work is logged: the checkpoint itself is safe.
pub(super) fn prune(folder: &Path, just: (u64, u64), keep: Option<usize>) {
    let saved = match list(folder) {
        Ok(saved) => saved,
        Err(error) => return log::warn!("older checkpoints were not removed: {error}"),
    };
    let mut whole = 0;
    for Saved { step, replay, path } in saved {
        let superseded = step == just.0 && replay < just.1;
        let enough = keep.is_some_and(|keep| whole >= keep);
        if (step, replay) == just {
            whole += 1;
        } else if superseded || enough {
            if let Err(error) = remove(folder, &path) {
                log::warn!("an older checkpoint was not removed: {error}");
            }
        } else if keep.is_some() {
            whole += usize::from(Checkpoint::open(path).is_ok());
        }
    }
}

/// Takes the name away first: at no moment is half a checkpoint to be seen.
fn remove(folder: &Path, path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = folder.join(format!(".{name}{REMOVED}"));
    fs::rename(path, &hidden).map_err(CheckpointError::io("removing", path))?;
    sync(folder)?;
    fs::remove_dir_all(&hidden).map_err(CheckpointError::io("removing", &hidden))
}

/// Waits until the names in a folder are on disk.
pub(super) fn sync(folder: &Path) -> Result<()> {
    // Elsewhere a folder cannot be opened, and the system does without.
    if cfg!(unix) {
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(CheckpointError::io("writing", folder))?;
    }
    Ok(())
}
