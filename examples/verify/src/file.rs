//! Reference files: safetensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use llama::SafetensorsHeader;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::report::Trouble;

/// Named tensors.
pub struct Reference {
    tensors: BTreeMap<String, TensorData>,
}

/// A file's metadata, from its header alone.
pub fn metadata(path: &Path) -> Result<BTreeMap<String, String>, String> {
    let header = SafetensorsHeader::read(path).map_err(|error| error.to_string())?;
    Ok(header.metadata)
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
