//! The output folder: one run each, never over another one's unless that is asked for.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use burn_context_parallel::group::ProcessGroup;
use burn_upipe::learner::checkpoint::Checkpoints;

use crate::error::{Error, Result};
use crate::plan::{OutFolder, Plan};
use crate::resume::{self, Begin};
use crate::tokens::COMPANIONS;
use crate::values::OnRun;

/// The plan for people; the first file of a run, by which one is known.
const PLAN: &str = "plan.txt";
/// The plan for `--config`.
const CONFIG: &str = "config.toml";
/// A line a step.
const METRICS: &str = "metrics.csv";
/// The loss curve.
const CURVE: &str = "loss.svg";
/// What an evaluation gave.
const EVALUATION: &str = "eval.json";
/// The trained weights; see [`weights`].
const MODEL: &str = "model";
/// Where a run can go on.
const CHECKPOINTS: &str = "checkpoints";

/// All that a run writes, what is known by it last: a removal that was cut short can be begun again.
const NAMES: [&str; 8] = [CHECKPOINTS, MODEL, EVALUATION, CURVE, METRICS, "save-now", CONFIG, PLAN];

/// What a run holds while it is at work, in the folder of checkpoints.
const LOCK: &str = ".lock";

/// How a file's name ends until all of it is written.
const PARTIAL: &str = ".partial";

const REMEDY: &str = "give a new or empty folder in a place that can be written";

/// Who may write to the folder, and where its run begins.
#[derive(Debug)]
pub(crate) struct Claimed {
    /// The folder.
    pub path: PathBuf,
    /// `None` for an evaluation.
    pub training: Option<Training>,
}

/// What a training goes on from, and where it is saved.
#[derive(Debug)]
pub(crate) struct Training {
    /// Locked for this run.
    pub checkpoints: Checkpoints,
    /// Where it begins.
    pub begin: Begin,
}

/// Where the trained weights go.
pub(crate) fn weights(out: &Path) -> PathBuf {
    out.join(MODEL)
}

/// Whether they are there.
pub(crate) fn weights_are_there(out: &Path) -> bool {
    weights(out).join("model.safetensors").is_file()
}

/// Checks that a folder can be this run's, without making it.
pub(crate) fn check(path: &Path, on_run: OnRun) -> Result<()> {
    let refuse = |problem: String, remedy: &'static str| Err(Error::Out { path: path.to_owned(), problem, remedy });
    let known = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
        Ok(_) => Found::of(path),
    };
    let found = match known {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            return refuse("a file, not a folder".to_owned(), REMEDY);
        }
        Err(error) => return refuse(error.to_string(), REMEDY),
    };
    match (found.begun, is_run(path), on_run) {
        (false, ..) | (true, true, OnRun::Resume) => Ok(()),
        (true, false, OnRun::Refuse) => refuse("the folder is not empty".to_owned(), REMEDY),
        (true, false, _) => refuse("the folder is not empty, and holds no run".to_owned(), REMEDY),
        (true, true, OnRun::Refuse) => refuse(
            "it holds a run".to_owned(),
            "add --resume to go on with it, --overwrite to begin it anew, or give another folder",
        ),
        (true, true, OnRun::Overwrite) => match found.foreign {
            None => Ok(()),
            Some(name) => refuse(
                format!("--overwrite would remove or leave {}, which no run has written", name.display()),
                "move it away, or give another folder",
            ),
        },
    }
}

/// Checks that what a run writes beside its folder can be written, before a run that is there is begun anew.
pub(crate) fn probe(plan: &Plan) -> Result<()> {
    let offload = plan.offload.as_ref().and_then(|offload| offload.folder.as_deref());
    if let (Some(folder), OutFolder::Given(out), OnRun::Overwrite) = (offload, &plan.out, plan.on_run) {
        let within = folder.canonicalize().ok().zip(out.canonicalize().ok());
        if within.is_some_and(|(folder, out)| folder.starts_with(out)) {
            let problem = format!("--offload-dir {} is within --out, which --overwrite empties", folder.display());
            return Err(Error::input(problem, "name a folder elsewhere"));
        }
    }
    let profile = plan.profile.as_ref().and_then(|profile| profile.folder.ancestors().find(|path| path.is_dir()));
    for (flag, folder) in [("--offload-dir", offload), ("--profile", profile)] {
        let Some(folder) = folder else { continue };
        // A relative path's last ancestor is the empty one.
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        if let Err(error) = tempfile::tempfile_in(folder) {
            let problem = format!("{flag}: {} cannot be written: {error}", folder.display());
            return Err(Error::input(problem, "name a folder in a place that can be written"));
        }
    }
    Ok(())
}

/// What is in a folder.
struct Found {
    /// More than what a run leaves that died before its plan was written: a lock, and half a file.
    begun: bool,
    /// Something that no run writes, relative to the folder.
    foreign: Option<PathBuf>,
}

impl Found {
    fn of(out: &Path) -> io::Result<Self> {
        let mut found = Self { begun: false, foreign: None };
        for entry in fs::read_dir(out)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let (path, partial) = (entry.path(), name.ends_with(PARTIAL));
            let folder = fs::metadata(&path).is_ok_and(|found| found.is_dir());
            let foreign = match name.as_str() {
                CHECKPOINTS if folder => stranger(&path, |name| name == LOCK || is_step(name), is_in_step)?,
                MODEL if folder => stranger(&path, is_in_model, |_| false)?,
                name => {
                    let known = NAMES.contains(&name.strip_suffix(PARTIAL).unwrap_or(name)) && !folder;
                    (!known).then(|| path.clone())
                }
            };
            let lock = name == CHECKPOINTS && folder && holds_only_a_lock(&path)?;
            found.begun |= foreign.is_some() || !(partial || lock);
            if found.foreign.is_none() {
                found.foreign = foreign.map(|path| path.strip_prefix(out).unwrap_or(&path).to_owned());
            }
        }
        Ok(found)
    }
}

/// What is in `folder` and no run has written there: its own entries by name, and those of the folders among them.
fn stranger(folder: &Path, known: impl Fn(&str) -> bool, within: impl Fn(&str) -> bool) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        let name = entry.file_name().to_string_lossy().into_owned();
        if !known(&name) || kind.is_dir() != is_step(&name) {
            return Ok(Some(path));
        }
        if kind.is_dir() {
            for entry in fs::read_dir(&path)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() || !within(&entry.file_name().to_string_lossy()) {
                    return Ok(Some(entry.path()));
                }
            }
        }
    }
    Ok(None)
}

fn holds_only_a_lock(checkpoints: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(checkpoints)? {
        if entry?.file_name() != LOCK {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A checkpoint's folder, also one that is being written or removed.
fn is_step(name: &str) -> bool {
    name.strip_prefix('.').unwrap_or(name).starts_with("step-")
}

fn is_in_step(name: &str) -> bool {
    name == "manifest.json" || (name.starts_with("rank-") && name.ends_with(".safetensors"))
}

fn is_in_model(name: &str) -> bool {
    // The last two are files before they have their names.
    let written = ["config.json", "model.safetensors"];
    written.contains(&name)
        || COMPANIONS.contains(&name)
        || written.iter().any(|written| name.strip_prefix('.').is_some_and(|name| name.starts_with(written)))
}

/// Whether a run was begun there.
fn is_run(path: &Path) -> bool {
    // As plans begin; of other people's plans few do.
    fs::read_to_string(path.join(PLAN)).is_ok_and(|plan| plan.starts_with("model  "))
}

/// That nothing of these is in a folder that is overwritten.
pub(crate) fn expect_apart<'a>(
    out: &Path,
    inputs: impl IntoIterator<Item = (&'static str, &'a PathBuf)>,
) -> Result<()> {
    let Ok(whole) = out.canonicalize() else { return Ok(()) };
    for (name, input) in inputs {
        if input.canonicalize().is_ok_and(|input| input.starts_with(&whole)) {
            return Err(Error::input(
                format!("{name} {} with --overwrite of {}", input.display(), out.display()),
                "what is read would be removed: give another --out, or copy it first",
            ));
        }
    }
    Ok(())
}

/// Whether there is a checkpoint to go on from, as far as names tell.
pub(crate) fn may_resume(plan: &Plan) -> Result<bool> {
    match &plan.out {
        OutFolder::Given(path) if plan.on_run == OnRun::Resume => {
            let saved = Checkpoints::new(path.join(CHECKPOINTS), None).list().map_err(Error::Checkpoint)?;
            Ok(!saved.is_empty())
        }
        _ => Ok(false),
    }
}

/// Takes the folder, with the plan in it: what cannot be written to is known before the run. Of a run that is there, and another one
/// than the plan's, nothing is changed.
pub(crate) fn claim(plan: &Plan) -> Result<Option<Claimed>> {
    let (path, made) = match &plan.out {
        OutFolder::Nowhere => return Ok(None),
        OutFolder::Given(path) => {
            check(path, plan.on_run)?;
            (path.clone(), make(path).map_err(|error| refused(path, &error))?)
        }
        OutFolder::NewUnder(parent) => {
            fs::create_dir_all(parent).map_err(|error| refused(parent, &error))?;
            (number(parent).map_err(|error| refused(parent, &error))?, true)
        }
    };
    let checkpoints = Checkpoints::new(path.join(CHECKPOINTS), Some(plan.keep));
    // Before anything is looked at or removed: another run may be at work here.
    if !plan.eval || is_run(&path) {
        checkpoints.claim(&ProcessGroup::single()).map_err(Error::Checkpoint).inspect_err(|_| {
            // It is empty, or somebody else's by now.
            let _ = made && fs::remove_dir(&path).is_ok();
        })?;
        // Another run may have come and gone since the first look.
        check(&path, plan.on_run)?;
    }
    let begun = begin(plan, &path, checkpoints);
    if made && begun.is_err() {
        // Leaves nothing behind; if that fails, the first error is the one to tell.
        let _ = fs::remove_dir_all(&path);
    }
    begun.map(|training| Some(Claimed { path, training }))
}

/// Makes a folder and what it lies in; whether it was not there. Making it is the test: of two runs only one makes it.
fn make(path: &Path) -> io::Result<bool> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent)?;
    }
    match fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(false),
        Err(error) => Err(error),
    }
}

fn begin(plan: &Plan, path: &Path, checkpoints: Checkpoints) -> Result<Option<Training>> {
    let alone = ProcessGroup::single();
    if plan.on_run == OnRun::Overwrite {
        empty(path)?;
    }
    let latest = match plan.on_run {
        OnRun::Resume => checkpoints.latest(&alone).map_err(Error::Checkpoint)?,
        _ => None,
    };
    let begin = latest.map_or(Ok(Begin::First), |checkpoint| resume::begin(plan, checkpoint, path))?;
    if !matches!(begin, Begin::Finished) {
        write(&path.join(PLAN), &plan.to_string()).map_err(|error| match error {
            Error::Write { source, .. } => refused(path, &source),
            other => other,
        })?;
    }
    if plan.eval {
        // Nothing is saved. Where other checkpoints are, or none, the folder stays as it is.
        drop(checkpoints);
        let folder = path.join(CHECKPOINTS);
        let _ = fs::remove_file(folder.join(LOCK));
        let _ = fs::remove_dir(folder);
        return Ok(None);
    }
    Ok(Some(Training { checkpoints, begin }))
}

fn refused(path: &Path, error: &io::Error) -> Error {
    Error::Out { path: path.to_owned(), problem: error.to_string(), remedy: REMEDY }
}

/// Removes what a run wrote, but for the lock that this one holds.
fn empty(out: &Path) -> Result<()> {
    for name in NAMES.iter().flat_map(|name| [format!("{name}{PARTIAL}"), (*name).to_owned()]) {
        let path = out.join(&name);
        // Through a link to a larger disk, in which the lock lies, too.
        let found = if name == CHECKPOINTS { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
        let removed = match found {
            Err(error) => Err(error),
            Ok(found) if found.is_dir() => remove_in(&path, name == CHECKPOINTS),
            Ok(_) => fs::remove_file(&path),
        };
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::Out {
                    path,
                    problem: error.to_string(),
                    remedy: "let it be removed, or give another folder",
                });
            }
            _ => {}
        }
    }
    Ok(())
}

fn remove_in(folder: &Path, locked: bool) -> io::Result<()> {
    if !locked {
        return fs::remove_dir_all(folder);
    }
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false if entry.file_name() == LOCK => {}
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// A new folder with the first free number.
fn number(parent: &Path) -> io::Result<PathBuf> {
    for number in 1u32.. {
        let path = parent.join(format!("{number:04}"));
        // Making it is the test: of two runs that start together, only one gets the number.
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

/// Writes a text file, whole or not at all.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    let mut scratch = path.as_os_str().to_owned();
    scratch.push(PARTIAL);
    fs::write(&scratch, text)
        .and_then(|()| fs::rename(&scratch, path))
        .map_err(|source| Error::Write { path: path.to_owned(), source })
}
