//! Weights from a Hugging Face folder, with a report of what went where.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use burn::tensor::{DType, Device};
use burn_context_parallel::Error;
use burn_store::{
    ApplyError, ApplyResult, FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore,
};

use crate::config::{LlamaConfig, nearest};
use crate::error::{LlamaError, Result};
use crate::model::Llama;
use crate::names::{hf_name, is_transposed, parameters, to_module};
use crate::parallel::{ParallelConfig, parallelize};
use crate::shards;

/// The name of the configuration in a model folder.
pub(crate) const CONFIG: &str = "config.json";

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

    /// A line for people about a complete load: how many weights, and which tensors were passed over.
    ///
    /// ```
    /// let report = llama::LoadReport {
    ///     applied: vec!["model.norm.weight".into()],
    ///     ignored: vec!["lm_head.weight".into()],
    ///     ..Default::default()
    /// };
    /// assert_eq!(report.summary(), "1 weights loaded; ignored, as they say nothing new: lm_head.weight");
    /// ```
    pub fn summary(&self) -> String {
        let ignored = match &self.ignored[..] {
            [] => "nothing ignored".to_owned(),
            names => format!("ignored, as they say nothing new: {}", first_few(names)),
        };
        format!("{} weights loaded; {ignored}", self.applied.len())
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
        list(f, "missing", &missing.collect::<Vec<_>>())?;
        list(f, "unused", &self.unused)?;
        list(f, "wrong", &self.errors)?;
        list(f, "ignored", &self.ignored)
    }
}

fn list(f: &mut fmt::Formatter<'_>, what: &str, names: &[String]) -> fmt::Result {
    match names {
        [] => Ok(()),
        names => write!(f, "; {what}: {}", first_few(names)),
    }
}

/// A model of another size has hundreds of wrong tensors: the first few tell.
fn first_few(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = match names.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    names[..names.len().min(SHOWN)].join(", ") + &more
}

/// The model of a Hugging Face folder on `device`, in the device's float type (f32, unless the device is configured otherwise),
/// whatever type the file has. [`load_as`] chooses the type.
///
/// The folder has `config.json`, and `model.safetensors` or shards with `model.safetensors.index.json`. Use an autodiff device for
/// training.
///
/// # Errors
///
/// [`LlamaError::File`] if a file is absent, [`LlamaError::Config`] or [`LlamaError::Unsupported`] for what the configuration says,
/// [`LlamaError::Weights`] for a truncated or damaged file or an index that does not fit its shards, [`LlamaError::Mismatch`] with
/// the whole report if a parameter is missing, a tensor is unused, or a shape is wrong; [`LlamaError::Core`] if `parallel` does
/// not fit.
///
/// # Memory
///
/// The model, and one tensor of the file at a time.
pub fn load(folder: &Path, parallel: &ParallelConfig, device: &Device) -> Result<(Llama, LoadReport)> {
    load_as(folder, parallel, device, device.settings().float_dtype.into())
}

/// [`load`], with weights of type `dtype`: f32, bf16, f16 or f64, exactly or rounded once.
///
/// To train in bf16 load the master weights in f32, and see [`precision`](crate::precision).
///
/// # Errors
///
/// As [`load`], and [`LlamaError::Core`] if `dtype` is none of these.
///
/// # Memory
///
/// As [`load`].
pub fn load_as(folder: &Path, parallel: &ParallelConfig, device: &Device, dtype: DType) -> Result<(Llama, LoadReport)> {
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64) {
        return Err(Error::unsupported("llama::load_as", format!("{dtype:?}"), "use F32, BF16, F16 or F64").into());
    }
    let config = LlamaConfig::read(&folder.join(CONFIG))?;
    let files = shards::find(folder)?;
    // By name first: that needs no weights, and a name of ours in the file would meet a parameter without being its own.
    let report = expected_names(&config, device, files.tensors)?;
    if !report.is_complete() {
        return Err(LlamaError::Mismatch { path: files.named, report: Box::new(report) });
    }
    // Parallelized first: a configuration that does not fit is known before gigabytes are read.
    let mut model = parallelize(Llama::lazy(&config, device)?, parallel)?;
    let mut found = Found::default();
    for path in files.paths {
        let mut store = SafetensorsStore::from_file(&path)
            .remap(to_module())
            .with_from_adapter(PyTorchToBurnAdapter.chain(FloatCastAdapter::to(dtype)))
            .allow_partial(true)
            .validate(false); // the report has it all
        let result = model
            .load_from(&mut store)
            .map_err(|error| LlamaError::Weights { path: path.clone(), problem: error.to_string() })?;
        found.add(result);
    }
    let report = found.report(&config);
    if !report.is_complete() {
        return Err(LlamaError::Mismatch { path: files.named, report: Box::new(report) });
    }
    log::info!("{}: {report}", files.named.display());
    Ok((model, report))
}

/// What a folder's tensors are by name alone, before any is read.
pub(crate) fn expected_names(config: &LlamaConfig, device: &Device, found: BTreeSet<String>) -> Result<LoadReport> {
    Ok(compare(config, parameters(config, device)?, found))
}

/// What the files together had.
#[derive(Default)]
struct Found {
    applied: Vec<String>,
    /// In no file so far; `None` before the first.
    missing: Option<BTreeSet<String>>,
    unused: Vec<String>,
    errors: Vec<String>,
}

impl Found {
    fn add(&mut self, result: ApplyResult) {
        let missing: BTreeSet<String> = result.missing.into_iter().map(|(path, _)| path).collect();
        self.missing = Some(match self.missing.take() {
            Some(before) => &before & &missing,
            None => missing,
        });
        self.applied.extend(result.applied);
        self.unused.extend(result.unused);
        self.errors.extend(result.errors.iter().map(describe));
    }

    fn report(self, config: &LlamaConfig) -> LoadReport {
        let missing = names(self.missing.unwrap_or_default().iter());
        let report = unmatched(config, missing, names(self.unused.iter()));
        LoadReport { applied: names(self.applied.iter()), errors: self.errors, ..report }
    }
}

/// What is missing and unused by name alone.
fn compare(config: &LlamaConfig, expected: BTreeSet<String>, found: BTreeSet<String>) -> LoadReport {
    let missing = expected.difference(&found).cloned().collect();
    unmatched(config, missing, found.difference(&expected).cloned().collect())
}

fn unmatched(config: &LlamaConfig, missing: Vec<String>, unused: Vec<String>) -> LoadReport {
    // Nobody reads more suggestions, and each compares all names.
    const SUGGESTIONS: usize = 64;
    let (ignored, unused): (Vec<_>, Vec<_>) = unused.into_iter().partition(|name| is_redundant(name, config));
    let similar = |name: &str| nearest(name, unused.iter().map(String::as_str)).map(str::to_owned);
    let missing = missing
        .into_iter()
        .enumerate()
        .map(|(index, name)| Missing { did_you_mean: (index < SUGGESTIONS).then(|| similar(&name)).flatten(), name })
        .collect();
    LoadReport { missing, unused, ignored, ..LoadReport::default() }
}

/// Hugging Face's names, in their own order.
fn names<'a>(paths: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut names: Vec<String> = paths.map(|path| hf_name(path)).collect();
    names.sort();
    names
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
