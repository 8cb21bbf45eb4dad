//! Which files are text, and their text.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What is taken from folders; a file that is named is taken whatever it is called.
const EXTENSIONS: [&str; 23] = [
    "c", "cc", "cpp", "cu", "cuh", "go", "h", "hpp", "java", "js", "json", "jsonl", "kt", "md", "py", "rs", "sh",
    "swift", "toml", "ts", "txt", "yaml", "yml",
];

/// Folders that hold what tools made.
const SKIPPED: [&str; 4] = ["target", "runs", "node_modules", "__pycache__"];

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file or folder cannot be read.
    #[error("{}: {source}: give text files, or folders of them, that can be read", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A pipe, a device, a socket: its end may never come.
    #[error("{}: neither a file nor a folder: write what it gives to a file first", .0.display())]
    Special(PathBuf),
    /// Not text.
    #[error("{}: {problem}: give text in UTF-8", path.display())]
    Binary {
        /// Which file.
        path: PathBuf,
        /// What shows it.
        problem: String,
    },
    /// No file was found.
    #[error("--data {}: no text file in it: name files, or a folder with source or text files ({})", list(.0), EXTENSIONS.join(" "))]
    Empty(Vec<PathBuf>),
    /// A line of a JSONL file that is no document.
    #[error("{}:{line}: {problem}: {remedy}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
        /// What to write.
        remedy: String,
    },
    /// Not one sequence's worth.
    #[error(
        "{tokens} tokens of text are less than a sequence of {seq_len}{}: give more with --data{}",
        of(files),
        if *tokens > 1 { format!(", or --seq-len {tokens} or less") } else { String::new() }
    )]
    Short {
        /// Where the text is from.
        files: Vec<PathBuf>,
        /// What there is.
        tokens: usize,
        /// What is needed.
        seq_len: usize,
    },
}

impl TextError {
    /// What is wrong, where whoever asks for the file names it and knows the remedy.
    pub(crate) fn problem(&self) -> String {
        match self {
            Self::Read { source, .. } => source.to_string(),
            Self::Special(_) => "neither a file nor a folder".to_owned(),
            Self::Binary { problem, .. } => problem.clone(),
            other => other.to_string(),
        }
    }
}

/// The text of one file, which must be one.
///
/// # Errors
///
/// [`TextError`] if it cannot be read, is a pipe or a device, or not UTF-8, or has a zero byte in it.
pub(crate) fn read_text(path: &Path) -> Result<String, TextError> {
    let fail = |source| TextError::Read { path: path.to_owned(), source };
    // Opening a pipe waits for whoever writes to it, reading /dev/zero never ends.
    let kind = fs::metadata(path).map_err(fail)?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        return Err(TextError::Special(path.to_owned()));
    }
    let bytes = fs::read(path).map_err(fail)?;
    let binary = |problem| TextError::Binary { path: path.to_owned(), problem };
    if let Some(at) = bytes.iter().position(|byte| *byte == 0) {
        return Err(binary(format!("a zero byte at {at}, as in binary files")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
        binary(format!("not UTF-8 from byte {at}, in line {line}"))
    })
}

/// The named files, and all files with a known ending under the named folders, those in alphabetical order.
///
/// Hidden folders, build folders and links to folders are passed over.
///
/// # Errors
///
/// [`TextError`] if a path cannot be read, or there is none.
pub(crate) fn find(paths: &[PathBuf]) -> Result<Vec<PathBuf>, TextError> {
    collect(paths, &EXTENSIONS)
}

/// This repository's own Rust files.
///
/// # Errors
///
/// As [`find`].
pub(crate) fn own_source() -> Result<Vec<PathBuf>, TextError> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // Without the dots where possible: the path is shown.
    let root = root.canonicalize().unwrap_or(root);
    collect(&[root], &["rs"])
}

fn collect(paths: &[PathBuf], extensions: &[&str]) -> Result<Vec<PathBuf>, TextError> {
    let mut files = Vec::new();
    for path in paths {
        let metadata = fs::metadata(path).map_err(|source| TextError::Read { path: path.clone(), source })?;
        if metadata.is_dir() {
            walk(path, extensions, &mut files)?;
        } else {
            files.push(path.clone());
        }
    }
    if files.is_empty() {
        return Err(TextError::Empty(paths.to_vec()));
    }
    Ok(files)
}

fn walk(folder: &Path, extensions: &[&str], files: &mut Vec<PathBuf>) -> Result<(), TextError> {
    let fail = |source| TextError::Read { path: folder.to_owned(), source };
    let mut entries = fs::read_dir(folder).map_err(fail)?.collect::<io::Result<Vec<_>>>().map_err(fail)?;
    // The order of a folder is the file system's; the text must not depend on it.
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        // Links to folders are not followed: they may lead in circles.
        if entry.file_type().map_err(fail)?.is_dir() {
            if !name.starts_with('.') && !SKIPPED.contains(&&*name) {
                walk(&path, extensions, files)?;
            }
        } else if path.is_file() && path.extension().is_some_and(|found| extensions.iter().any(|known| found == *known))
        {
            files.push(path);
        }
    }
    Ok(())
}

/// The first few.
fn of(files: &[PathBuf]) -> String {
    const SHOWN: usize = 3;
    let more = files.len().saturating_sub(SHOWN);
    match files {
        [] => String::new(),
        _ if more > 0 => format!(" ({} and {more} more)", list(&files[..SHOWN])),
        _ => format!(" ({})", list(files)),
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_folder_is_read_in_alphabetical_order_and_only_what_is_text() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.rs", "a/z.py", "c.md", "d.jsonl", "weights.safetensors", "noending", ".git/a.rs", "target/a.rs"]
        {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        let path = |name: &str| folder.path().join(name);
        let found = find(&[folder.path().to_owned()]).unwrap();
        assert_eq!(found, ["a/z.py", "b.rs", "c.md", "d.jsonl"].map(path));
        // Named files whatever their ending, in the order given.
        assert_eq!(find(&[path("noending"), path("a")]).unwrap(), ["noending", "a/z.py"].map(path));
    }

    #[rstest]
    #[case(b"gr\xfcn", "not UTF-8 from byte 2, in line 1: ")]
    #[case(b"a\nb\n\xfc\n", "not UTF-8 from byte 4, in line 3: ")]
    #[case(b"\x7fELF\0\0", "a zero byte at 4")]
    fn what_is_no_text_is_refused_with_the_place(#[case] bytes: &[u8], #[case] expected: &str) {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let error = read_text(file.path()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("give text in UTF-8"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn devices_are_not_read() {
        assert!(matches!(read_text(Path::new("/dev/zero")), Err(TextError::Special(_))));
    }

    #[test]
    fn this_repository_has_text() {
        assert!(own_source().unwrap().iter().any(|file| file.ends_with("finetune/src/files.rs")));
    }
}
