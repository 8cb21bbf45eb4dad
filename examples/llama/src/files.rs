//! Files of a model folder: none is opened before it is known to be one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::error::{LlamaError, Result};

/// Longer headers are refused by the format's own library.
const LONGEST_HEADER: u64 = 100_000_000;

/// The text of a file.
pub(crate) fn read_text(path: &Path, remedy: &'static str) -> Result<String> {
    check(path, remedy)?;
    fs::read_to_string(path).map_err(|error| LlamaError::file(path, error, remedy))
}

/// Opening a pipe waits for whoever writes to it, and reading a device may never end.
fn check(path: &Path, remedy: &'static str) -> Result<()> {
    let fail = |error| LlamaError::file(path, error, remedy);
    match fs::metadata(path).map_err(fail)?.is_file() {
        true => Ok(()),
        false => Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "a folder, a pipe or a device, not a file"))),
    }
}

/// What the header of a safetensors file says.
///
/// ```
/// use burn::tensor::Device;
/// use llama::{Llama, LlamaConfig, ParallelConfig, SafetensorsHeader};
///
/// let folder = std::env::temp_dir().join("llama-header");
/// Llama::init(&LlamaConfig::new(32, 16, 40, 1, 4, 2), &ParallelConfig::none(), &Device::flex())?.save(&folder)?;
/// let header = SafetensorsHeader::read(&folder.join("model.safetensors"))?;
/// assert!(header.tensors.contains("model.norm.weight"));
/// assert_eq!(header.metadata["format"], "pt");
/// assert!(SafetensorsHeader::read(&folder.join("config.json")).is_err());
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), llama::LlamaError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SafetensorsHeader {
    /// The names of the tensors.
    pub tensors: BTreeSet<String>,
    /// What else whoever wrote the file noted.
    pub metadata: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Fields {
    #[serde(rename = "__metadata__")]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    tensors: BTreeMap<String, IgnoredAny>,
}

impl SafetensorsHeader {
    /// Reads the header alone.
    ///
    /// # Errors
    ///
    /// [`LlamaError::File`] if the file cannot be read or is none, [`LlamaError::Weights`] if it is no safetensors file.
    ///
    /// # Memory
    ///
    /// The header; nothing is allocated that the file does not hold.
    pub fn read(path: &Path) -> Result<Self> {
        const REMEDY: &str = "make it a file that can be read";
        check(path, REMEDY)?;
        let damaged = |problem: String| LlamaError::Weights { path: path.to_owned(), problem };
        let unreadable = |error| LlamaError::file(path, error, REMEDY);
        let mut file = File::open(path).map_err(unreadable)?;
        let bytes = file.metadata().map_err(unreadable)?.len();
        let mut length = [0; 8];
        if bytes < 8 {
            return Err(damaged(format!("{bytes} bytes are no safetensors file")));
        }
        file.read_exact(&mut length).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > (bytes - 8).min(LONGEST_HEADER) {
            return Err(damaged(format!("a header of {length} bytes in a file of {bytes}")));
        }
        let mut header = Vec::with_capacity(length as usize);
        file.take(length).read_to_end(&mut header).map_err(unreadable)?;
        let Fields { metadata, tensors } =
            serde_json::from_slice(&header).map_err(|error| damaged(format!("no safetensors header: {error}")))?;
        Ok(Self { tensors: tensors.into_keys().collect(), metadata: metadata.unwrap_or_default() })
    }
}
