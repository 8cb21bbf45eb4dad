//! One rank's file: its pieces as a safetensors file.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};

use super::manifest::{FileEntry, HeaderEntry, PieceEntry, Report, TensorEntry};
use super::piece::{Piece, stored};
use super::{CheckpointError, Result};

/// What is hashed and written in one go: small enough to be in a cache for the second of both.
const CHUNK: usize = 1 << 18;

/// As the safetensors crate has it.
const LARGEST_HEADER: usize = 100_000_000;

/// Writes the file and waits until it is on disk.
///
/// # Errors
///
/// [`CheckpointError::Invalid`] for pieces that cannot be saved and values that are others than a piece says,
/// [`CheckpointError::Source`] for values that do not come, [`CheckpointError::Io`].
///
/// # Memory
///
/// One piece.
pub(super) fn write(folder: &Path, name: String, mut pieces: Vec<Piece<'_>>) -> Result<Report> {
    for piece in &pieces {
        piece.check()?;
    }
    let mut tensors: Vec<_> = pieces.iter().map(tensor).collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors.dedup();
    pieces.retain(|piece| !piece.range.is_empty());
    // Large elements first keeps all of them aligned.
    pieces.sort_by_key(|piece| Reverse(stored(piece.dtype)));

    let header = header(&pieces)?;
    let path = folder.join(&name);
    let io = |action| CheckpointError::io(action, &path);
    let file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(io("creating"))?;
    let mut file = BufWriter::with_capacity(CHUNK, file);
    file.write_all(&header).map_err(io("writing"))?;
    let mut at = header.len() as u64;
    let mut entries = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let (tensor, range) = (piece.name.clone(), [piece.range.start, piece.range.end]);
        let data = piece.read()?;
        let (start, blake3) = (at, copy(data.as_bytes(), &mut file).map_err(io("writing"))?);
        at += data.as_bytes().len() as u64;
        entries.push(PieceEntry { tensor, range, bytes: [start, at], blake3 });
    }
    let file = file.into_inner().map_err(|error| io("writing")(error.into_error()))?;
    file.sync_all().map_err(io("writing"))?;
    let header = HeaderEntry { size: header.len() as u64, blake3: blake3::hash(&header).to_hex().to_string() };
    Ok(Report { file: FileEntry { name, size: at, header, pieces: entries }, tensors })
}

fn tensor(piece: &Piece<'_>) -> TensorEntry {
    let dtype = stored(piece.dtype).expect("the piece was checked");
    TensorEntry { name: piece.name.clone(), dtype, shape: piece.shape.clone() }
}

/// The file up to its first value. A part of a tensor is called `name[first..last]` in it, where last is not part of it.
fn header(pieces: &[Piece<'_>]) -> Result<Vec<u8>> {
    let refuse = |what: String| CheckpointError::invalid(what, "save each element once, in fewer pieces");
    let (mut at, mut names) = (0, BTreeSet::new());
    let mut infos = Vec::with_capacity(pieces.len());
    for Piece { name, dtype, shape, range, .. } in pieces {
        let whole = Some(range.len()) == super::piece::elements(shape);
        let (name, shape) = match whole {
            true => (name.clone(), shape.clone()),
            false => (format!("{name}[{}..{}]", range.start, range.end), vec![range.len()]),
        };
        if !names.insert(name.clone()) {
            return Err(refuse(format!("`{name}` is saved twice by one rank")));
        }
        let end = range.len().checked_mul(dtype.size()).and_then(|bytes| bytes.checked_add(at));
        let end = end.ok_or_else(|| refuse("one rank's pieces are larger than any file".to_owned()))?;
        infos.push((
            name,
            TensorInfo { dtype: stored(*dtype).expect("the piece was checked"), shape, data_offsets: (at, end) },
        ));
        at = end;
    }
    let json = Metadata::new(None, infos).and_then(|header| Ok(serde_json::to_vec(&header)?));
    let mut json = json.map_err(|error| refuse(format!("there is no safetensors header for this rank: {error}")))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() > LARGEST_HEADER {
        return Err(refuse(format!("{} pieces need a header of {} bytes", pieces.len(), json.len())));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    Ok(bytes)
}

/// Writes all bytes, and says what their digest is.
fn copy(bytes: &[u8], to: &mut impl Write) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    for chunk in bytes.chunks(CHUNK) {
        hasher.update(chunk);
        to.write_all(chunk)?;
    }
    Ok(hasher.finalize().to_hex().to_string())
}
