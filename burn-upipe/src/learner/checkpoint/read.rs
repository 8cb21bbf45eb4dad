//! A checkpoint that lies on disk.

use std::collections::TryReserveError;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::{Bytes, DType, TensorData};
use bytemuck::NoUninit;

use super::index::{Index, Tensor};
use super::manifest::{MANIFEST, Manifest};
use super::{CheckpointError, Result, RunState};

/// What is read and hashed in one go.
const CHUNK: usize = 1 << 18;

/// A whole checkpoint: its manifest was read and checked, and its files are there. Values are read when they are asked for, and
/// checked then.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    state: RunState,
    index: Index,
}

impl Checkpoint {
    /// The checkpoint in this folder, `.../step-0000000120`. Reads the manifest, and looks at the size of each file.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Missing`], [`CheckpointError::Foreign`] or [`CheckpointError::Corrupt`] if it is not whole,
    /// [`CheckpointError::Io`] if the system does not let it be read.
    ///
    /// # Memory
    ///
    /// A small multiple of the manifest: about 200 bytes a piece.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = path.join(MANIFEST);
        let manifest = Manifest::read(&file)?;
        let state = manifest.state(&file)?;
        let index = Index::new(&manifest).map_err(|what| CheckpointError::corrupt(&file, what))?;
        let checkpoint = Self { path, state, index };
        for file in &checkpoint.index.files {
            checkpoint.check_size(&checkpoint.path.join(&file.name), file.size)?;
        }
        Ok(checkpoint)
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The optimizer step after which it was saved.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// What else the run was.
    pub fn state(&self) -> &RunState {
        &self.state
    }

    /// How many ranks saved it.
    pub fn ranks(&self) -> usize {
        self.index.files.len()
    }

    /// The tensors' names, ascending.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.index.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.index.tensors.contains_key(name)
    }

    /// The shape of the whole tensor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoSuchTensor`].
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.tensor(name)?.shape)
    }

    /// The tensor's element type.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoSuchTensor`].
    pub fn dtype(&self, name: &str) -> Result<DType> {
        Ok(self.tensor(name)?.dtype)
    }

    /// That there is a tensor of this name, element type and shape.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoSuchTensor`], [`CheckpointError::Mismatch`].
    pub fn expect(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<()> {
        let tensor = self.tensor(name)?;
        if tensor.dtype == dtype && tensor.shape == shape {
            return Ok(());
        }
        Err(CheckpointError::Mismatch {
            name: name.to_owned(),
            expected: format!("{} {shape:?}", dtype.name()),
            found: format!("{} {:?}", tensor.dtype.name(), tensor.shape),
        })
    }

    /// The elements `range` of a tensor, counted in row-major order over the whole of it, as one row. It does not matter how
    /// the tensor was cut when it was saved.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoSuchTensor`]; [`CheckpointError::Invalid`] for elements that do not exist; [`CheckpointError::Corrupt`],
    /// [`CheckpointError::Missing`] or [`CheckpointError::Io`] for a piece with some of these elements that is not what was saved.
    ///
    /// # Memory
    ///
    /// The result, and 256 KiB. Every piece that has some of these elements is read whole, for its checksum.
    pub fn read(&self, name: &str, range: Range<usize>) -> Result<TensorData> {
        let tensor = self.tensor(name)?;
        if range.start > range.end || range.end > tensor.elements {
            return Err(CheckpointError::invalid(
                format!("elements {range:?} of `{name}` do not exist, which has {}", tensor.elements),
                "count elements of the whole tensor in row-major order",
            ));
        }
        let bytes = self.assemble(tensor, &range)?;
        Ok(TensorData::from_bytes(bytes, [range.len()], tensor.dtype))
    }

    /// A whole tensor, in its shape.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    ///
    /// # Memory
    ///
    /// As [`read`](Self::read).
    pub fn read_whole(&self, name: &str) -> Result<TensorData> {
        let tensor = self.tensor(name)?;
        let bytes = self.assemble(tensor, &(0..tensor.elements))?;
        Ok(TensorData::from_bytes(bytes, tensor.shape.clone(), tensor.dtype))
    }

    /// Reads everything, and compares it with the checksums.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Corrupt`], [`CheckpointError::Missing`] or [`CheckpointError::Io`] for the first file that is not what
    /// was saved.
    ///
    /// # Memory
    ///
    /// 256 KiB.
    pub fn verify(&self) -> Result<()> {
        (0..self.ranks()).try_for_each(|file| self.verify_file(file))
    }

    pub(super) fn verify_file(&self, file: usize) -> Result<()> {
        let file = &self.index.files[file];
        let path = self.path.join(&file.name);
        let mut open = self.open_file(&path, file.size)?;
        let pieces = file
            .pieces
            .iter()
            .map(|piece| (&piece.bytes, &piece.blake3, format!("elements {:?} of `{}`", piece.range, piece.tensor)));
        for (bytes, blake3, what) in
            std::iter::once((&file.header.0, &file.header.1, "header".to_owned())).chain(pieces)
        {
            hashed(&mut open, &path, bytes, blake3, &what, |_, _| ())?;
        }
        Ok(())
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.index.tensors.get(name).ok_or_else(|| {
            let last = name.rsplit('.').next().unwrap_or(name);
            let alike: Vec<_> = self.names().filter(|other| other.rsplit('.').next() == Some(last)).take(3).collect();
            let hint = match alike.is_empty() {
                true => format!(
                    "it has {} tensors, the first are {:?}",
                    self.names().len(),
                    self.names().take(3).collect::<Vec<_>>()
                ),
                false => format!("it has {alike:?}"),
            };
            CheckpointError::NoSuchTensor { name: name.to_owned(), hint }
        })
    }

    /// The bytes of some elements.
    fn assemble(&self, tensor: &Tensor, range: &Range<usize>) -> Result<Bytes> {
        let size = tensor.dtype.size();
        // The files were as large as the manifest says when they were opened, so this is no more than what lies on disk.
        let mut bytes = zeros(range.len(), size).map_err(|error| {
            CheckpointError::invalid(
                format!("{} elements of {} do not fit into memory: {error}", range.len(), tensor.dtype.name()),
                "read a shorter range",
            )
        })?;
        // Pieces are in order and without gaps: those that end before the range come first.
        let first = tensor
            .pieces
            .partition_point(|&(file, piece)| self.index.files[file].pieces[piece].range.end <= range.start);
        for &(file, piece) in &tensor.pieces[first..] {
            let file = &self.index.files[file];
            let piece = &file.pieces[piece];
            if piece.range.start >= range.end {
                break;
            }
            let path = self.path.join(&file.name);
            let mut open = self.open_file(&path, file.size)?;
            let what = format!("elements {:?} of `{}`", piece.range, piece.tensor);
            // Where the piece begins and ends as seen from the answer, in bytes.
            let wanted = range.start * size..range.end * size;
            let start = piece.range.start * size;
            hashed(&mut open, &path, &piece.bytes, &piece.blake3, &what, |at, chunk| {
                let at = start + at;
                let (from, to) = (at.max(wanted.start), (at + chunk.len()).min(wanted.end));
                if from < to {
                    bytes[from - wanted.start..to - wanted.start].copy_from_slice(&chunk[from - at..to - at]);
                }
            })?;
        }
        Ok(bytes)
    }

    fn open_file(&self, path: &Path, size: u64) -> Result<File> {
        self.check_size(path, size)?;
        File::open(path).map_err(CheckpointError::io_in_checkpoint("opening", path))
    }

    fn check_size(&self, path: &Path, size: u64) -> Result<()> {
        let about = fs::metadata(path).map_err(CheckpointError::io_in_checkpoint("reading", path))?;
        // A pipe would be waited for.
        if !about.is_file() {
            return Err(CheckpointError::Foreign { file: path.to_owned(), what: "it is no file".to_owned() });
        }
        if about.len() != size {
            return Err(CheckpointError::corrupt(path, format!("it has {} bytes of {size}", about.len())));
        }
        Ok(())
    }
}

/// Elements of `size` bytes, aligned to it. (Burn copies what it is given as bytes alone.)
fn zeros(elements: usize, size: usize) -> Result<Bytes, TryReserveError> {
    fn of<E: NoUninit + Default + Send + Sync>(elements: usize) -> Result<Bytes, TryReserveError> {
        let mut zeros = Vec::new();
        zeros.try_reserve_exact(elements)?;
        zeros.resize(elements, E::default());
        Ok(Bytes::from_elems(zeros))
    }
    match size {
        1 => of::<u8>(elements),
        2 => of::<u16>(elements),
        4 => of::<u32>(elements),
        _ => of::<u64>(elements * (size / 8)),
    }
}

/// Reads `bytes` of the file, hands them on chunk by chunk, and compares their digest at the end.
fn hashed(
    file: &mut File,
    path: &Path,
    bytes: &Range<u64>,
    blake3: &str,
    what: &str,
    mut chunk: impl FnMut(usize, &[u8]),
) -> Result<()> {
    file.seek(SeekFrom::Start(bytes.start)).map_err(CheckpointError::io("reading", path))?;
    let (mut hasher, mut at) = (blake3::Hasher::new(), 0);
    let mut left = bytes.end - bytes.start;
    let mut buffer = vec![0; left.min(CHUNK as u64) as usize];
    while left > 0 {
        let part = &mut buffer[..left.min(CHUNK as u64) as usize];
        file.read_exact(part).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => CheckpointError::corrupt(path, format!("it ends within {what}")),
            _ => CheckpointError::io("reading", path)(error),
        })?;
        hasher.update(part);
        chunk(at, part);
        at += part.len();
        left -= part.len() as u64;
    }
    if hasher.finalize().to_hex().as_str() != blake3 {
        return Err(CheckpointError::corrupt(path, format!("{what} are not what their checksum says")));
    }
    Ok(())
}
