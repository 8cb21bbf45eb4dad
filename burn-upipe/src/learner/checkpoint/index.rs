//! A manifest that was checked: where the elements of each tensor are.
//!
//! What a manifest says is not believed: names are those that this program gives, sizes are multiplied with care, pieces fill their
//! files and their tensors exactly. So what is read later can be asked for without more checks than the digests.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::DType;

use super::manifest::{FileEntry, Manifest, PieceEntry, TensorEntry, file_name};
use super::piece::{elements, loaded};

#[derive(Debug, Clone)]
pub(super) struct Index {
    pub tensors: BTreeMap<String, Tensor>,
    pub files: Vec<File>,
}

#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub elements: usize,
    /// By their elements, without gaps: the file, and the piece in it.
    pub pieces: Vec<(usize, usize)>,
}

#[derive(Debug, Clone)]
pub(super) struct File {
    pub name: String,
    pub size: u64,
    /// The header's bytes and digest, then those of each piece.
    pub header: (Range<u64>, String),
    pub pieces: Vec<Located>,
}

#[derive(Debug, Clone)]
pub(super) struct Located {
    pub tensor: String,
    pub range: Range<usize>,
    pub bytes: Range<u64>,
    pub blake3: String,
}

impl Index {
    /// # Errors
    ///
    /// What in the manifest cannot be.
    pub fn new(manifest: &Manifest) -> Result<Self, String> {
        let mut tensors = tensors(&manifest.tensors)?;
        let ranks = manifest.files.len();
        if ranks == 0 {
            return Err("it lists no files".to_owned());
        }
        let mut files = Vec::with_capacity(ranks);
        for (rank, entry) in manifest.files.iter().enumerate() {
            let expected = file_name(rank, ranks);
            if entry.name != expected {
                return Err(format!("file {rank} of {ranks} is called {:?}, not {expected}", entry.name));
            }
            files.push(file(entry, &mut tensors, rank)?);
        }
        for (name, tensor) in &mut tensors {
            let range = |&(file, piece): &(usize, usize)| {
                let file: &File = &files[file];
                file.pieces[piece].range.clone()
            };
            tensor.pieces.sort_by_key(|piece| range(piece).start);
            let mut end = 0;
            for piece in &tensor.pieces {
                let Range { start, end: next } = range(piece);
                if start != end {
                    let (what, from, to) =
                        if start > end { ("missing", end, start) } else { ("there twice", start, end.min(next)) };
                    return Err(format!("elements {from}..{to} of `{name}` are {what}"));
                }
                end = next;
            }
            if end != tensor.elements {
                return Err(format!("elements {end}..{} of `{name}` are missing", tensor.elements));
            }
        }
        Ok(Self { tensors, files })
    }
}

fn tensors(entries: &[TensorEntry]) -> Result<BTreeMap<String, Tensor>, String> {
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].name >= pair[1].name) {
        return Err(format!(
            "`{}` is listed before `{}`: names are sorted, and each is there once",
            pair[0].name, pair[1].name
        ));
    }
    let tensor = |entry: &TensorEntry| {
        let TensorEntry { name, dtype, shape } = entry;
        let dtype = loaded(*dtype).ok_or_else(|| format!("`{name}` is {dtype:?}, which is not saved here"))?;
        let elements = elements(shape).filter(|elements| elements.checked_mul(dtype.size()).is_some());
        let elements = elements.ok_or_else(|| format!("`{name}` has the shape {shape:?}, which no memory holds"))?;
        Ok((name.clone(), Tensor { dtype, shape: shape.clone(), elements, pieces: Vec::new() }))
    };
    entries.iter().map(tensor).collect()
}

/// Checks that header and pieces fill the file, and notes with each tensor which of its pieces are here.
fn file(entry: &FileEntry, tensors: &mut BTreeMap<String, Tensor>, number: usize) -> Result<File, String> {
    let FileEntry { name, size, header, pieces: entries } = entry;
    if header.size < 8 || header.size > *size {
        return Err(format!("{name} has a header of {} in {size} bytes", header.size));
    }
    let mut end = header.size;
    let mut pieces = Vec::with_capacity(entries.len());
    for (i, PieceEntry { tensor, range: [first, last], bytes: [from, to], blake3 }) in entries.iter().enumerate() {
        let Some(Tensor { dtype, elements, pieces: of_tensor, .. }) = tensors.get_mut(tensor) else {
            return Err(format!("{name} holds `{tensor}`, which is not listed"));
        };
        if first >= last || last > elements {
            return Err(format!("{name} holds the elements {first}..{last} of the {elements} of `{tensor}`"));
        }
        // Fits: it is at most the tensor's own size.
        let length = ((last - first) * dtype.size()) as u64;
        if *from != end || from.checked_add(length) != Some(*to) || to > size {
            return Err(format!(
                "{name} has the elements {first}..{last} of `{tensor}` in its bytes {from}..{to}: {length} bytes from {end} on are theirs"
            ));
        }
        end = *to;
        of_tensor.push((number, i));
        pieces.push(Located {
            tensor: tensor.clone(),
            range: *first..*last,
            bytes: *from..*to,
            blake3: blake3.clone(),
        });
    }
    if end != *size {
        return Err(format!("nothing is said of the bytes {end}..{size} of {name}"));
    }
    Ok(File { name: name.clone(), size: *size, header: (0..header.size, header.blake3.clone()), pieces })
}
