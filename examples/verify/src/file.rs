//! Reference files: safetensors.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::report::Trouble;

/// Named tensors.
pub struct Reference {
    tensors: BTreeMap<String, TensorData>,
}

/// Longer headers are refused by the format's own library.
const LONGEST_HEADER: u64 = 100_000_000;

/// A file's metadata, from its header alone.
pub fn metadata(path: &Path) -> Result<HashMap<String, String>, String> {
    let damaged = |problem: String| format!("not a safetensors file ({problem}): make it again");
    let mut file = fs::File::open(path).map_err(|error| format!("{error}: make the file readable"))?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|error| damaged(error.to_string()))?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Err(damaged(format!("a header of {length} bytes")));
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).map_err(|error| damaged(error.to_string()))?;
    let header: serde_json::Value = serde_json::from_slice(&header).map_err(|error| damaged(error.to_string()))?;
    let entries = header.get("__metadata__").and_then(serde_json::Value::as_object);
    Ok(entries
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect())
}

impl Reference {
    /// All tensors of a file; floats as f32, integers as i64.
    pub fn read(path: &Path) -> Result<Self, Trouble> {
        let name = path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into());
        let failed = |problem: String| Trouble::Failed(format!("{name}: {problem}: make the file again"));
        let bytes = fs::read(path).map_err(|error| failed(error.to_string()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| failed(error.to_string()))?;
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(name, view)| Ok((name.clone(), data(&name, &view)?)))
            .collect::<Result<_, Trouble>>()?;
        Ok(Self { tensors })
    }

    /// A tensor that the case cannot do without.
    pub fn get<const D: usize>(&self, name: &str) -> Result<TensorData, Trouble> {
        let data = self
            .tensors
            .get(name)
            .ok_or_else(|| Trouble::Failed(format!("the file has no tensor {name}: make it again")))?;
        if data.shape().len() != D {
            return Err(Trouble::Failed(format!(
                "{name} has {} dims, not {D}: make the file again",
                data.shape().len()
            )));
        }
        Ok(data.clone())
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }
}

fn data(name: &str, view: &TensorView<'_>) -> Result<TensorData, Trouble> {
    let dtype = match view.dtype() {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        other => return Err(Trouble::Unsupported(format!("{name} of type {other:?}: store floats and i64"))),
    };
    let target = if dtype.is_float() { DType::F32 } else { DType::I64 };
    let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype);
    Ok(data.convert_dtype(target))
}
