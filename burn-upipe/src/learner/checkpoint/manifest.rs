//! What a checkpoint holds, and the checksums of all of it.
//!
//! ```text
//! {"format":"burn-upipe checkpoint","version":1,"blake3":"<of the manifest>","manifest":{..}}
//! ```
//!
//! Every byte of every file is covered: the frame above is compared letter by letter, the manifest has its digest in the frame,
//! and the manifest has the digests of each file's header and of each piece, which fill the file.

use std::fs;
use std::io::Read;
use std::path::Path;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{CheckpointError, Result, RunState, exact};

/// The version that this program writes, and the only one that it reads.
pub const FORMAT: u32 = 1;

/// The manifest's name in a checkpoint's folder.
pub const MANIFEST: &str = "manifest.json";

/// More than the manifest of a million pieces.
const LARGEST: u64 = 1 << 28;

const MAGIC: &str = "{\"format\":\"burn-upipe checkpoint\",\"version\":";
const DIGEST: &str = ",\"blake3\":\"";
const BODY: &str = "\",\"manifest\":";
const END: &str = "}\n";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    /// A [`RunState`], its floats as text.
    pub state: Value,
    /// By name, ascending.
    pub tensors: Vec<TensorEntry>,
    /// By rank.
    pub files: Vec<FileEntry>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorEntry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub name: String,
    /// In bytes, header and all pieces.
    pub size: u64,
    pub header: HeaderEntry,
    /// In the order of their bytes.
    pub pieces: Vec<PieceEntry>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeaderEntry {
    /// In bytes, with the eight that say how long it is.
    pub size: u64,
    pub blake3: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PieceEntry {
    pub tensor: String,
    /// First element, and the one after the last.
    pub range: [usize; 2],
    /// First byte in the file, and the one after the last.
    pub bytes: [u64; 2],
    pub blake3: String,
}

/// What one rank has written.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub file: FileEntry,
    pub tensors: Vec<TensorEntry>,
}

/// The name of a rank's file.
pub(super) fn file_name(rank: usize, ranks: usize) -> String {
    format!("rank-{rank:04}-of-{ranks:04}.safetensors")
}

impl Manifest {
    /// What all ranks have written, as one.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Invalid`] if pieces disagree about a tensor.
    pub fn gather(state: Value, reports: Vec<Report>) -> Result<Self> {
        let (mut tensors, mut files) = (Vec::new(), Vec::with_capacity(reports.len()));
        for report in reports {
            tensors.extend(report.tensors);
            files.push(report.file);
        }
        tensors.sort_by(|a: &TensorEntry, b| a.name.cmp(&b.name));
        tensors.dedup();
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let [one, other] = [&pair[0], &pair[1]].map(|entry| format!("{:?} {:?}", entry.dtype, entry.shape));
            return Err(CheckpointError::invalid(
                format!("`{}` is {one} in some pieces and {other} in others", pair[0].name),
                "give each piece the element type and the shape of the whole tensor",
            ));
        }
        Ok(Self { state, tensors, files })
    }

    /// As the file holds it.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let body = serde_json::to_vec(self).map_err(|error| {
            CheckpointError::invalid(
                format!("the manifest has no JSON: {error}"),
                "report this with the tensors' names",
            )
        })?;
        let mut bytes = frame(FORMAT, &body).into_bytes();
        bytes.extend(body);
        bytes.extend(END.as_bytes());
        Ok(bytes)
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Missing`], [`CheckpointError::Foreign`], [`CheckpointError::Corrupt`] or [`CheckpointError::Io`].
    ///
    /// # Memory
    ///
    /// The file, and what it says: never more than a small multiple of what is on disk.
    pub fn read(path: &Path) -> Result<Self> {
        let about = fs::metadata(path).map_err(CheckpointError::io_in_checkpoint("reading", path))?;
        let foreign = |what: String| CheckpointError::Foreign { file: path.to_owned(), what };
        // A pipe would be waited for.
        if !about.is_file() {
            return Err(foreign("it is no file".to_owned()));
        }
        if about.len() > LARGEST {
            return Err(foreign(format!("{} bytes are more than the {LARGEST} of the largest manifest", about.len())));
        }
        let file = fs::File::open(path).map_err(CheckpointError::io_in_checkpoint("opening", path))?;
        let mut bytes = Vec::with_capacity(about.len() as usize);
        file.take(LARGEST).read_to_end(&mut bytes).map_err(CheckpointError::io("reading", path))?;
        Self::from_bytes(path, &bytes)
    }

    /// As [`read`](Self::read), of what was read from `path`.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        let corrupt = |what: &str| CheckpointError::corrupt(path, what);
        let Some(rest) = bytes.strip_prefix(MAGIC.as_bytes()) else {
            if MAGIC.as_bytes().starts_with(bytes) {
                return Err(corrupt(&format!("it ends after {} bytes", bytes.len())));
            }
            return Err(CheckpointError::Foreign {
                file: path.to_owned(),
                what: "it does not begin as a manifest does".to_owned(),
            });
        };
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (version, rest) = rest.split_at(digits);
        if version != FORMAT.to_string().as_bytes() {
            let version = String::from_utf8_lossy(version);
            return Err(CheckpointError::Foreign {
                file: path.to_owned(),
                what: format!("its format is version `{version}`, and {FORMAT} is read here"),
            });
        }
        let frame_length = DIGEST.len() + 64 + BODY.len();
        let body = rest.get(frame_length..).and_then(|rest| rest.strip_suffix(END.as_bytes()));
        let body = body.ok_or_else(|| corrupt("it was cut short"))?;
        if bytes[..MAGIC.len() + digits + frame_length] != *frame(FORMAT, body).as_bytes() {
            return Err(corrupt("it is not what its checksum says"));
        }
        serde_json::from_slice(body).map_err(|error| corrupt(&format!("it makes no sense: {error}")))
    }

    /// The run's state.
    pub fn state(&self, path: &Path) -> Result<RunState> {
        let state = exact::decode(&self.state)
            .and_then(|state| serde_json::from_value(state).map_err(|error| error.to_string()));
        state.map_err(|what| CheckpointError::corrupt(path, format!("the run's state makes no sense: {what}")))
    }
}

/// What stands before the manifest's own bytes.
fn frame(version: u32, body: &[u8]) -> String {
    format!("{MAGIC}{version}{DIGEST}{}{BODY}", blake3::hash(body).to_hex())
}

/// A state as the manifest holds it.
///
/// # Errors
///
/// [`CheckpointError::Invalid`] if it could not be read back.
pub(super) fn state_to_json(state: &RunState) -> Result<Value> {
    let value = serde_json::to_value(state).map_err(|error| error.to_string());
    value.and_then(|value| exact::encode(&value)).map_err(|what| {
        CheckpointError::invalid(format!("the run's state cannot be saved: {what}"), "make it plainer JSON")
    })
}
