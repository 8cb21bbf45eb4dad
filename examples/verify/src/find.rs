//! Which reference cases a folder holds.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::file;

/// One case.
pub struct Case {
    /// The file, or the model's folder.
    pub path: PathBuf,
    /// What is shown: the path below the folder that was given.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// What a case is.
pub enum Kind {
    /// An attention case.
    Attention,
    /// A model with its results.
    Model,
    /// A file that should be read, and cannot be: it fails, or a damaged case would pass unseen.
    Damaged(String),
}

/// All cases in `folder` and the folders in it, by name.
pub fn find(folder: &Path) -> io::Result<Vec<Case>> {
    let mut cases = Vec::new();
    visit(folder, &mut HashSet::new(), &mut cases)?;
    for case in &mut cases {
        let name = case.path.strip_prefix(folder).unwrap_or(&case.path).display().to_string();
        case.name = if name.is_empty() { case.path.display().to_string() } else { name };
    }
    cases.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(cases)
}

fn visit(folder: &Path, seen: &mut HashSet<PathBuf>, cases: &mut Vec<Case>) -> io::Result<()> {
    // Links may lead in a circle.
    if !seen.insert(folder.canonicalize()?) {
        return Ok(());
    }
    let is_configured = folder.join("config.json").is_file();
    if is_configured && folder.join("reference.safetensors").is_file() {
        cases.push(Case { path: folder.to_owned(), name: String::new(), kind: Kind::Model });
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            visit(&path, seen, cases)?;
            continue;
        }
        // A model folder's safetensors are the model's.
        if is_configured || path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        // Reading from a pipe may never end.
        let metadata = match path.is_file() {
            true => file::metadata(&path),
            false => Err("not a file: remove it, or put the case in its place".into()),
        };
        let kind = match metadata {
            Ok(metadata) if metadata.contains_key("options") => Kind::Attention,
            Ok(_) => continue,
            Err(problem) => Kind::Damaged(problem),
        };
        cases.push(Case { path, name: String::new(), kind });
    }
    Ok(())
}
