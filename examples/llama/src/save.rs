//! Back to a Hugging Face folder.

use std::path::Path;
use std::{fs, io};

use burn::module::Module;
use burn::tensor::DType;
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use serde_json::Value;

use crate::config::LlamaConfig;
use crate::error::{LlamaError, Result};
use crate::load::CONFIG;
use crate::model::Llama;
use crate::names::to_hf;
use crate::shards::WEIGHTS;

pub(crate) const REMEDY: &str = "give a folder that can be written and has room for the weights";

impl Llama {
    /// Writes `config.json` (newer layout) and `model.safetensors`, as transformers loads them. The folder is made if need be.
    ///
    /// Each file is written beside its place and renamed: an interrupted save leaves the file that was there. With several
    /// ranks, call it on one.
    ///
    /// # Errors
    ///
    /// [`LlamaError::File`] if the folder cannot be written, or the disk is full.
    pub fn save(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).map_err(|error| LlamaError::file(folder, error, REMEDY))?;
        let weights = folder.join(WEIGHTS);
        let mut store = SafetensorsStore::from_file(&weights)
            .remap(to_hf())
            .with_to_adapter(BurnToPyTorchAdapter)
            .overwrite(true)
            .clear_metadata()
            .metadata("format", "pt"); // transformers refuses a file without it
        // Without autodiff, so that reading weights records nothing.
        self.valid()
            .save_into(&mut store)
            .map_err(|error| LlamaError::file(&weights, io::Error::other(error.to_string()), REMEDY))?;

        write_config(folder, &self.settings.config, self.embed_tokens.weight.base().dtype())
    }
}

/// `config.json` for weights of this type.
pub(crate) fn write_config(folder: &Path, config: &LlamaConfig, dtype: DType) -> Result<()> {
    let mut json = config.to_json();
    if let Value::Object(fields) = &mut json {
        fields.remove("torch_dtype");
        fields.insert("dtype".into(), dtype_name(dtype).into());
    }
    let config = folder.join(CONFIG);
    let scratch = folder.join(format!(".{CONFIG}.{}", std::process::id()));
    fs::write(&scratch, format!("{json:#}\n"))
        .and_then(|()| fs::rename(&scratch, &config))
        .map_err(|error| LlamaError::file(&config, error, REMEDY))
}

/// As PyTorch calls it.
fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}
