//! The output folder: one run each, never over another one's.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::plan::OutFolder;

const REMEDY: &str = "give a new or empty folder in a place that can be written";

/// Checks that a folder can be this run's, without making it.
pub(crate) fn check(path: &Path) -> Result<()> {
    let refuse = |problem: String| Err(Error::Out { path: path.to_owned(), problem, remedy: REMEDY });
    match fs::read_dir(path) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => refuse("the folder is not empty".to_owned()),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => refuse("a file, not a folder".to_owned()),
        Err(error) => refuse(error.to_string()),
    }
}

/// Makes the folder, with the first file in it: what cannot be written to is known before the run.
pub(crate) fn claim(out: &OutFolder, name: &str, text: &str) -> Result<Option<PathBuf>> {
    let fail = |path: &Path, error: std::io::Error| Error::Out {
        path: path.to_owned(),
        problem: error.to_string(),
        remedy: REMEDY,
    };
    let (path, made) = match out {
        OutFolder::Nowhere => return Ok(None),
        OutFolder::Given(path) => {
            check(path)?;
            let made = !path.exists();
            fs::create_dir_all(path).map_err(|error| fail(path, error))?;
            (path.clone(), made)
        }
        OutFolder::NewUnder(parent) => {
            fs::create_dir_all(parent).map_err(|error| fail(parent, error))?;
            (number(parent).map_err(|error| fail(parent, error))?, true)
        }
    };
    if let Err(error) = fs::write(path.join(name), text) {
        // Leaves nothing behind; if that fails too, the first error is the one to tell.
        let _ = fs::remove_file(path.join(name));
        if made {
            let _ = fs::remove_dir(&path);
        }
        return Err(fail(&path, error));
    }
    Ok(Some(path))
}

/// A new folder with the first free number.
fn number(parent: &Path) -> std::io::Result<PathBuf> {
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

/// Writes a text file.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|source| Error::Write { path: path.to_owned(), source })
}
