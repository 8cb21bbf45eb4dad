//! How a checkpoint is written: by all ranks, and as one.
//!
//! ```text
//! first rank    lock, remove what dead runs left, make the hidden folder       -- all agree --
//! every rank    its file, on disk                                              -- all agree --
//! first rank    manifest, on disk; the folder gets its name                    -- all agree --
//! first rank    removes what is not kept
//! ```
//!
//! At each agreement a rank that failed makes all fail, and the hidden folder is removed.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use burn_context_parallel::group::ProcessGroup;
use serde_json::Value;

use super::agree::{first_says, to_first, together};
use super::index::Index;
use super::manifest::{MANIFEST, Manifest, Report, file_name, state_to_json};
use super::{CheckpointError, Checkpoints, Piece, Result, RunState, keep, write};

impl Checkpoints {
    /// Writes a checkpoint of the step in `state`, and returns its folder when it is on disk, whole. Every rank of the run calls it, with
    /// its pieces (possibly none) and the state, of which the first rank's is saved. Then older ones are removed, if only some are kept.
    ///
    /// A step that is there already (a resumed run comes to it again) is saved beside it and then takes its place; at every moment one of
    /// them is whole.
    ///
    /// # Errors
    ///
    /// On a rank that fails its own error: [`CheckpointError::Invalid`] for pieces that do not fit together or a state that cannot be
    /// saved, [`CheckpointError::Source`] for values that do not come, [`CheckpointError::Locked`], [`CheckpointError::Io`]. On the
    /// others [`CheckpointError::Rank`]. Nothing that was there before has changed, nothing half written is left, and the group goes
    /// on. [`CheckpointError::Group`] if the group broke.
    ///
    /// # Memory
    ///
    /// One piece's values, and what describes all pieces: about 200 bytes a piece on its rank, of all ranks on the first one.
    ///
    /// # Communication
    ///
    /// About 200 bytes a piece from each rank to the first, and some bytes to every rank.
    pub fn save<'a>(
        &self,
        group: &ProcessGroup,
        pieces: impl IntoIterator<Item = Piece<'a>>,
        state: &RunState,
    ) -> Result<PathBuf> {
        let first = group.rank() == 0;
        let begun = if first { self.begin(state).map(Some) } else { Ok(None) };
        let (name, json) = together(group, begun)?.unzip();
        let name = first_says(group, name)?;
        let partial = keep::partial(&self.folder, &name);

        let saved = self.write_all(group, &partial, &name, pieces, state, json);
        if let Err(error) = &saved {
            if first {
                // What stays is removed by the next save.
                match fs::remove_dir_all(&partial) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        log::warn!("{} was not removed: {error}", partial.display());
                    }
                    _ => {}
                }
            }
            if !matches!(error, CheckpointError::Group(_)) {
                // Whoever looks at the folder now finds it as it was.
                group.barrier()?;
            }
        }
        saved?;
        if let (true, Some(just)) = (first, keep::parse(&name)) {
            keep::prune(&self.folder, just, self.keep.map(usize::from));
        }
        Ok(self.folder.join(name))
    }

    /// The name of the new folder, and the state as it will be saved; the hidden folder is there then.
    fn begin(&self, state: &RunState) -> Result<(String, Value)> {
        let json = state_to_json(state)?;
        self.hold()?;
        keep::clean(&self.folder)?;
        let before = self.list()?.into_iter().find(|saved| saved.step == state.step);
        let replay = before.map_or(Ok(0), |saved| {
            let next = saved.replay.checked_add(1);
            next.ok_or_else(|| {
                CheckpointError::invalid(format!("{} is the last replay", saved.path.display()), "rename it")
            })
        })?;
        let name = keep::name(state.step, replay);
        let partial = keep::partial(&self.folder, &name);
        fs::create_dir(&partial).map_err(CheckpointError::io("creating", &partial))?;
        Ok((name, json))
    }

    fn write_all<'a>(
        &self,
        group: &ProcessGroup,
        partial: &Path,
        name: &str,
        pieces: impl IntoIterator<Item = Piece<'a>>,
        state: &RunState,
        json: Option<Value>,
    ) -> Result<()> {
        let report = agreed_step(name, state).and_then(|()| {
            let pieces = pieces.into_iter().collect();
            let report = write::write(partial, file_name(group.rank(), group.size()), pieces)?;
            serde_json::to_vec(&report).map_err(|error| internal("a report", &error))
        });
        let report = together(group, report)?;
        let reports = to_first(group, report)?;
        let committed = json.map_or(Ok(()), |state| self.commit(partial, name, state, &reports));
        together(group, committed)
    }

    /// Writes the manifest, and gives the folder its name.
    fn commit(&self, partial: &Path, name: &str, state: Value, reports: &[Vec<u8>]) -> Result<()> {
        let reports = reports.iter().map(|report| serde_json::from_slice(report));
        let reports: Vec<Report> = reports.collect::<Result<_, _>>().map_err(|error| internal("a report", &error))?;
        let manifest = Manifest::gather(state, reports)?;
        Index::new(&manifest).map_err(|what| {
            CheckpointError::invalid(
                format!("the pieces of all ranks do not make whole tensors: {what}"),
                "have each element saved by exactly one rank",
            )
        })?;
        let (path, bytes) = (partial.join(MANIFEST), manifest.to_bytes()?);
        // What is read back must be what was meant, whatever is in the state.
        if Manifest::from_bytes(&path, &bytes)? != manifest {
            return Err(internal("the manifest", &"it reads back as another one"));
        }
        let io = |action| CheckpointError::io(action, &path);
        let mut file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(io("creating"))?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(io("writing"))?;
        keep::sync(partial)?;
        let named = self.folder.join(name);
        fs::rename(partial, &named).map_err(CheckpointError::io("naming", &named))?;
        keep::sync(&self.folder)
    }
}

fn agreed_step(name: &str, state: &RunState) -> Result<()> {
    match keep::parse(name) {
        Some((step, _)) if step == state.step => Ok(()),
        _ => Err(CheckpointError::invalid(
            format!("this rank saves step {}, and the first one {name}", state.step),
            "save the same step on every rank",
        )),
    }
}

fn internal(what: &str, error: &dyn std::fmt::Display) -> CheckpointError {
    CheckpointError::invalid(format!("{what} cannot be read back: {error}"), "report this with the tensors' names")
}
