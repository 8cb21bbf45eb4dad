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

/// Makes the folder.
pub(crate) fn claim(out: &OutFolder) -> Result<PathBuf> {
    let fail = |path: &Path, error: std::io::Error| Error::Out {
        path: path.to_owned(),
        problem: error.to_string(),
        remedy: REMEDY,
    };
    match out {
        OutFolder::Given(path) => {
            check(path)?;
            fs::create_dir_all(path).map_err(|error| fail(path, error))?;
            Ok(path.clone())
        }
        OutFolder::NewUnder(parent) => {
            fs::create_dir_all(parent).map_err(|error| fail(parent, error))?;
            for number in 1.. {
                let path = parent.join(format!("{number:04}"));
                // Making it is the test: of two runs that start together, only one gets the number.
                match fs::create_dir(&path) {
                    Ok(()) => return Ok(path),
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(fail(&path, error)),
                }
            }
            unreachable!("some number is free")
        }
    }
}

/// Writes a text file.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, format!("{text}\n")).map_err(|source| Error::Write { path: path.to_owned(), source })
}
