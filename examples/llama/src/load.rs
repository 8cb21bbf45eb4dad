//! Weights from a Hugging Face folder, with a report of what went where.

use std::fmt;
use std::io;
use std::path::Path;

use burn::tensor::{DType, Device};
use burn_store::{ApplyError, FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};

use crate::config::LlamaConfig;
use crate::error::{LlamaError, Result};
use crate::model::Llama;
use crate::names::{hf_name, is_transposed, to_module};
use crate::parallel::{ParallelConfig, parallelize};

/// The name of the configuration in a model folder.
pub(crate) const CONFIG: &str = "config.json";
/// The name of the weights in a model folder.
pub(crate) const WEIGHTS: &str = "model.safetensors";

/// What loading did, under Hugging Face's names. Whoever holds one from [`load`] has a complete model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Parameters that were loaded.
    pub applied: Vec<String>,
    /// Parameters of the model that the file does not have.
    pub missing: Vec<Missing>,
    /// Tensors of the file that the model does not have.
    pub unused: Vec<String>,
    /// Tensors of the file that carry no information: an output layer beside tied embeddings, rotary tables.
    pub ignored: Vec<String>,
    /// Tensors that have the wrong shape or type, with both.
    pub errors: Vec<String>,
}

/// A parameter that the file does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The parameter.
    pub name: String,
    /// A tensor of the file that nothing uses and that has a similar name.
    pub did_you_mean: Option<String>,
}

impl LoadReport {
    /// Whether every parameter was loaded and every tensor used.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.unused.is_empty() && self.errors.is_empty()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} loaded, {} missing, {} unused, {} of wrong shape or type",
            self.applied.len(),
            self.missing.len(),
            self.unused.len(),
            self.errors.len()
        )?;
        let missing = self.missing.iter().map(|missing| match &missing.did_you_mean {
            Some(similar) => format!("{} (did you mean {similar}, which the file has?)", missing.name),
            None => missing.name.clone(),
        });
        list(f, "missing", missing.collect())?;
        list(f, "unused", self.unused.clone())?;
        list(f, "wrong", self.errors.clone())?;
        list(f, "ignored", self.ignored.clone())
    }
}

/// A model of another size has hundreds of wrong tensors: the first few tell.
fn list(f: &mut fmt::Formatter<'_>, what: &str, names: Vec<String>) -> fmt::Result {
    const SHOWN: usize = 8;
    if names.is_empty() {
        return Ok(());
    }
    write!(f, "; {what}: {}", names[..names.len().min(SHOWN)].join(", "))?;
    if names.len() > SHOWN {
        write!(f, " and {} more", names.len() - SHOWN)?;
    }
    Ok(())
}

/// The model of a Hugging Face folder (`config.json` and `model.safetensors`) on `device`, in the device's float type.
///
/// Use an autodiff device for training.
///
/// # Errors
///
/// [`LlamaError::File`] if a file is absent, [`LlamaError::Config`] or [`LlamaError::Unsupported`] for what the configuration says,
/// [`LlamaError::Weights`] for a truncated or damaged file, [`LlamaError::Mismatch`] with the whole report if a
/// parameter is missing, a tensor is unused, or a shape is wrong; [`LlamaError::Core`] if `parallel` does not fit.
///
/// # Memory
///
/// The model, and one tensor of the file at a time.
pub fn load(folder: &Path, parallel: &ParallelConfig, device: &Device) -> Result<(Llama, LoadReport)> {
    let config = LlamaConfig::read(&folder.join(CONFIG))?;
    let path = folder.join(WEIGHTS);
    expect_file(folder, &path)?;
    // Parallelized first: a configuration that does not fit is known before gigabytes are read.
    let mut model = parallelize(Llama::lazy(&config, device)?, parallel)?;
    let float: DType = device.settings().float_dtype.into();
    let mut store = SafetensorsStore::from_file(&path)
        .remap(to_module())
        .with_from_adapter(PyTorchToBurnAdapter.chain(FloatCastAdapter::to(float)))
        .allow_partial(true)
        .validate(false); // the report has it all
    let result = model
        .load_from(&mut store)
        .map_err(|error| LlamaError::Weights { path: path.clone(), problem: error.to_string() })?;

    let (ignored, unused): (Vec<_>, Vec<_>) =
        names(result.unused.iter()).into_iter().partition(|name| is_redundant(name, &config));
    let missing = names(result.missing.iter().map(|(name, _)| name))
        .into_iter()
        .map(|name| Missing { did_you_mean: similar(&name, &unused), name })
        .collect();
    let report = LoadReport {
        applied: names(result.applied.iter()),
        missing,
        unused,
        ignored,
        errors: result.errors.iter().map(describe).collect(),
    };
    if !report.is_complete() {
        return Err(LlamaError::Mismatch { path, report: Box::new(report) });
    }
    log::info!("{}: {report}", path.display());
    Ok((model, report))
}

/// Hugging Face's names, in their own order.
fn names<'a>(paths: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut names: Vec<String> = paths.map(|path| hf_name(path)).collect();
    names.sort();
    names
}

fn expect_file(folder: &Path, path: &Path) -> Result<()> {
    if path.is_file() {
        return Ok(());
    }
    for (other, what) in [
        ("model.safetensors.index.json", "a sharded model"),
        ("pytorch_model.bin", "a PyTorch pickle"),
        ("pytorch_model.bin.index.json", "a sharded PyTorch pickle"),
    ] {
        let other = folder.join(other);
        if other.exists() {
            return Err(LlamaError::unsupported(
                &other,
                what,
                "save it with transformers as one model.safetensors (save_pretrained, max_shard_size=\"1TB\")",
            ));
        }
    }
    let error = io::Error::new(io::ErrorKind::NotFound, "no such file");
    Err(LlamaError::file(path, error, "give a folder that holds config.json and model.safetensors"))
}

fn is_redundant(name: &str, config: &LlamaConfig) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || (config.tie_word_embeddings && name == "lm_head.weight")
}

fn describe(error: &ApplyError) -> String {
    match error {
        ApplyError::ShapeMismatch { path, expected, found } => {
            let name = hf_name(path);
            let show = |shape: &[usize]| {
                let mut shape = shape.to_vec();
                if is_transposed(&name) {
                    shape.reverse();
                }
                format!("{shape:?}")
            };
            format!("{name} is {} where config.json says {}", show(found), show(expected))
        }
        ApplyError::DTypeMismatch { path, found, .. } => {
            format!("{} is of type {found:?}, not a float", hf_name(path))
        }
        ApplyError::AdapterError { path, message } | ApplyError::LoadError { path, message } => {
            format!("{}: {message}", hf_name(path))
        }
    }
}

/// The candidate that is fewest edits away, if those are few.
fn similar(name: &str, candidates: &[String]) -> Option<String> {
    candidates
        .iter()
        .map(|candidate| (edits(name, candidate), candidate))
        .min()
        .filter(|(distance, _)| *distance <= name.len() / 3)
        .map(|(_, candidate)| candidate.clone())
}

/// Levenshtein distance, in bytes.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let next = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = row[j + 1];
            row[j + 1] = next;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_counts_what_was_changed() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("same", "same"), 0);
    }
}
