//! The text: files, as bytes, cut into sequences.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use burn_context_parallel::Result as CoreResult;
use burn_context_parallel::sequence::Batch;

/// What is taken from folders; a file that is named is taken whatever it is called.
const EXTENSIONS: [&str; 22] = [
    "c", "cc", "cpp", "cu", "cuh", "go", "h", "hpp", "java", "js", "json", "kt", "md", "py", "rs", "sh", "swift",
    "toml", "ts", "txt", "yaml", "yml",
];

/// Folders that hold what tools made.
const SKIPPED: [&str; 4] = ["target", "runs", "node_modules", "__pycache__"];

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file or folder cannot be read.
    #[error("--data {}: {source}: give text files, or folders of them, that can be read", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// No file was found.
    #[error("--data {}: no text file in it: name files, or a folder with source or text files ({})", paths(.0), EXTENSIONS.join(" "))]
    Empty(Vec<PathBuf>),
    /// Not one sequence's worth.
    #[error(
        "{bytes} bytes of text are less than a sequence of {seq_len}: give more with --data, or --seq-len {bytes} or less"
    )]
    Short {
        /// What there is.
        bytes: usize,
        /// What is needed.
        seq_len: usize,
    },
}

/// A text of bytes, in the order of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Where it is from.
    pub files: Vec<PathBuf>,
    bytes: Vec<u8>,
    seq_len: usize,
}

impl Text {
    /// The text of files, and of all files with a known ending under folders; folders in alphabetical order.
    ///
    /// Hidden folders, build folders and links to folders are passed over.
    ///
    /// # Errors
    ///
    /// [`TextError`] if a path cannot be read, or all of them together hold less than `seq_len` bytes.
    pub fn read(paths: &[PathBuf], seq_len: usize) -> Result<Self, TextError> {
        Self::collect(paths, seq_len, &EXTENSIONS)
    }

    /// This repository's own Rust files.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn own_source(seq_len: usize) -> Result<Self, TextError> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        // Without the dots where possible: the path is shown.
        let root = root.canonicalize().unwrap_or(root);
        Self::collect(&[root], seq_len, &["rs"])
    }

    fn collect(paths: &[PathBuf], seq_len: usize, extensions: &[&str]) -> Result<Self, TextError> {
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
        let mut bytes = Vec::new();
        for file in &files {
            let text = fs::read(file).map_err(|source| TextError::Read { path: file.clone(), source })?;
            bytes.extend(text);
        }
        if bytes.len() < seq_len {
            return Err(TextError::Short { bytes: bytes.len(), seq_len });
        }
        Ok(Self { files, bytes, seq_len })
    }

    /// Its length in bytes, which are its tokens.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whole sequences in it; what is left at the end is not used.
    pub fn sequences(&self) -> usize {
        self.bytes.len() / self.seq_len
    }

    /// The sequence of a step (counted from 0): one after the other, then from the beginning again.
    ///
    /// # Errors
    ///
    /// None for a text made by [`read`](Self::read).
    pub fn batch(&self, step: usize) -> CoreResult<Batch> {
        let start = step % self.sequences() * self.seq_len;
        let ids = self.bytes[start..start + self.seq_len].iter().map(|byte| i64::from(*byte)).collect();
        Batch::from_rows(&[ids])
    }
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

fn paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    fn text(text: &Text) -> String {
        String::from_utf8(text.bytes.clone()).unwrap()
    }

    fn ids(text: &Text, step: usize) -> Vec<i64> {
        use burn::tensor::Device;
        use burn_context_parallel::sequence::SequenceLayout;
        let layout = SequenceLayout::contiguous(text.seq_len, 1).unwrap();
        text.batch(step).unwrap().shard(&layout, 0, &Device::flex()).unwrap().tokens.into_data().iter().collect()
    }

    #[test]
    fn a_folder_is_read_in_alphabetical_order_and_only_what_is_text() {
        let folder = folder(&[
            ("b.rs", "2"),
            ("a/z.py", "1"),
            ("c.md", "3"),
            ("weights.safetensors", "x"),
            ("noending", "x"),
            (".git/a.rs", "x"),
            ("target/a.rs", "x"),
        ]);
        assert_eq!(text(&Text::read(&[folder.path().to_owned()], 3).unwrap()), "123");
        let named = [folder.path().join("noending"), folder.path().join("a")];
        assert_eq!(
            text(&Text::read(&named, 2).unwrap()),
            "x1",
            "named files whatever their ending, in the order given"
        );
    }

    #[test]
    fn sequences_follow_each_other_and_begin_again() {
        let folder = folder(&[("a.txt", "abcd"), ("b.txt", "efg")]);
        let text = Text::read(&[folder.path().to_owned()], 3).unwrap();
        assert_eq!(text.sequences(), 2);
        let expected = ["abc", "def", "abc"].map(|row| row.bytes().map(i64::from).collect::<Vec<_>>());
        assert_eq!([0, 1, 2].map(|step| ids(&text, step)), expected);
    }

    #[test]
    fn every_byte_is_a_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        fs::write(&path, [0, 255, 128, b'\n', b'\r']).unwrap();
        assert_eq!(ids(&Text::read(&[path], 5).unwrap(), 0), [0, 255, 128, 10, 13]);
    }

    #[test]
    fn too_little_text_is_an_error_with_both_numbers() {
        let folder = folder(&[("a.txt", "abcd")]);
        let error = Text::read(&[folder.path().to_owned()], 5).unwrap_err().to_string();
        assert_eq!(
            error,
            "4 bytes of text are less than a sequence of 5: give more with --data, or --seq-len 4 or less"
        );
        assert_eq!(Text::read(&[folder.path().to_owned()], 4).unwrap().sequences(), 1);
    }

    #[test]
    fn this_repository_has_text_for_the_default_run() {
        let text = Text::own_source(4096).unwrap();
        assert!(text.files.iter().any(|file| file.ends_with("finetune/src/data.rs")));
        assert!(text.sequences() >= 40, "{}", text.sequences());
    }
}
