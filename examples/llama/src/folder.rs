//! A folder's weights one by one, for whoever never holds a whole model: read in any order, written in the model's.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, TensorData};
use burn_store::{ModuleStore, SafetensorsStore, bridge};
use serde_json::{Map, Value, json};

use crate::config::LlamaConfig;
use crate::error::{LlamaError, Result};
use crate::files::SafetensorsHeader;
use crate::load::{CONFIG, LoadReport, expected_names};
use crate::names::{hf_name, is_transposed, parameters};
use crate::save::{REMEDY, write_config};
use crate::shards::{self, WEIGHTS};

/// The weights of a Hugging Face folder, one at a time, by the paths of a [`Llama`](crate::Llama)'s parameters and as they are there.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use llama::{FolderWeights, Llama, LlamaConfig, ParallelConfig};
///
/// let folder = std::env::temp_dir().join("llama-folder-weights");
/// let config = LlamaConfig::new(32, 16, 40, 1, 4, 2);
/// let model = Llama::init(&config, &ParallelConfig::none(), &Device::flex())?;
/// model.save(&folder)?;
/// let (mut weights, report) = FolderWeights::open(&folder, DType::F32, &Device::flex())?;
/// assert_eq!(report.applied.len(), 12);
/// let path = "layers.0.inner.inner.mlp.inner.up_proj.weight";
/// assert_eq!(weights.read(path, &[16, 40])?, model.layers[0].inner.inner.mlp.inner.up_proj.weight.val().into_data());
/// assert!(weights.read(path, &[40, 16]).unwrap_err().to_string().contains("[40, 16] where config.json says [16, 40]"));
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), llama::LlamaError>(())
/// ```
pub struct FolderWeights {
    named: PathBuf,
    files: Vec<(PathBuf, SafetensorsStore)>,
    /// Tensor -> file.
    tensors: BTreeMap<String, usize>,
    dtype: DType,
}

impl FolderWeights {
    /// Reads the configuration and the names of all tensors; no weight. Weights will be of type `dtype`.
    ///
    /// # Errors
    ///
    /// As [`load`](crate::load), for what names tell.
    pub fn open(folder: &Path, dtype: DType, device: &Device) -> Result<(Self, LoadReport)> {
        let device = device.clone().inner();
        let config = LlamaConfig::read(&folder.join(CONFIG))?;
        let found = shards::find(folder)?;
        let mut report = expected_names(&config, &device, found.tensors)?;
        if !report.is_complete() {
            return Err(LlamaError::Mismatch { path: found.named, report: Box::new(report) });
        }
        report.applied = parameters(&config, &device)?.into_iter().collect();
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for path in found.paths {
            tensors.extend(SafetensorsHeader::read(&path)?.tensors.into_iter().map(|name| (name, files.len())));
            let store = SafetensorsStore::from_file(&path);
            files.push((path, store));
        }
        Ok((Self { named: found.named, files, tensors, dtype }, report))
    }

    /// The parameter at `path`, which has this shape.
    ///
    /// # Errors
    ///
    /// [`LlamaError::Weights`] for a truncated or damaged file, [`LlamaError::Mismatch`] if the shape is another one or the model has
    /// no such parameter.
    ///
    /// # Memory
    ///
    /// The parameter, twice if it is turned or cast.
    pub fn read(&mut self, path: &str, shape: &[usize]) -> Result<TensorData> {
        let name = hf_name(path);
        let Some(&file) = self.tensors.get(&name) else {
            return Err(self.wrong(format!("{name} is in no file")));
        };
        let (path, store) = &mut self.files[file];
        let damaged = |problem: String| LlamaError::Weights { path: path.clone(), problem };
        let tensor = store.get_tensor(&name).map_err(|error| damaged(error.to_string()))?;
        let tensor = tensor.ok_or_else(|| damaged(format!("{name} is gone")))?;
        let data = bridge::to_data(tensor).map_err(|error| damaged(error.to_string()))?;
        if !data.dtype().is_float() {
            let dtype = data.dtype();
            return Err(self.wrong(format!("{name} is of type {dtype:?}, not a float")));
        }
        let mut expected = shape.to_vec();
        if is_transposed(&name) {
            expected.reverse();
        }
        if data.shape().to_vec() != expected {
            let found = data.shape().to_vec();
            return Err(self.wrong(format!("{name} is {found:?} where config.json says {expected:?}")));
        }
        let data = data.convert_dtype(self.dtype);
        Ok(if is_transposed(&name) { transposed(data) } else { data })
    }

    fn wrong(&self, error: String) -> LlamaError {
        let report = LoadReport { errors: vec![error], ..LoadReport::default() };
        LlamaError::Mismatch { path: self.named.clone(), report: Box::new(report) }
    }
}

/// Writes what [`Llama::save`](crate::Llama::save) writes, in f32 and one parameter at a time.
///
/// The folder is made if need be. Files are written beside their places and renamed at the end.
pub struct FolderWriter {
    folder: PathBuf,
    config: LlamaConfig,
    scratch: PathBuf,
    file: BufWriter<File>,
    /// Paths and shapes to come, the next one last.
    left: Vec<(String, Vec<usize>)>,
}

impl FolderWriter {
    /// Begins with parameters at these paths, of these shapes, in the order in which they will be [added](Self::add).
    ///
    /// # Errors
    ///
    /// [`LlamaError::File`] if the folder cannot be written.
    pub fn create(folder: &Path, config: &LlamaConfig, parameters: Vec<(String, Vec<usize>)>) -> Result<Self> {
        let scratch = folder.join(format!(".{WEIGHTS}.{}", std::process::id()));
        let fail = |error| LlamaError::file(&scratch, error, REMEDY);
        fs::create_dir_all(folder).map_err(|error| LlamaError::file(folder, error, REMEDY))?;
        let mut header = Map::new();
        // transformers refuses a file without it
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        let mut start = 0;
        for (path, shape) in &parameters {
            let name = hf_name(path);
            let mut shape = shape.clone();
            if is_transposed(&name) {
                shape.reverse();
            }
            let end = start + shape.iter().product::<usize>() * size_of::<f32>();
            header.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] }));
            start = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        // Data begins at a multiple of 8.
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut file = BufWriter::new(File::create(&scratch).map_err(fail)?);
        let length = (header.len() as u64).to_le_bytes();
        file.write_all(&length).and_then(|()| file.write_all(&header)).map_err(fail)?;
        let left = parameters.into_iter().rev().collect();
        Ok(Self { folder: folder.to_owned(), config: config.clone(), scratch, file, left })
    }

    /// Writes the next parameter. One that is not the next is passed over: a tied one comes twice.
    ///
    /// # Errors
    ///
    /// [`LlamaError::File`] if the disk is full, or the value has another shape or is not f32.
    pub fn add(&mut self, path: &str, value: TensorData) -> Result<()> {
        let Some((_, shape)) = self.left.pop_if(|(next, _)| next == path) else { return Ok(()) };
        let fail = |error| LlamaError::file(&self.scratch, error, REMEDY);
        if value.shape().to_vec() != shape || value.dtype() != DType::F32 {
            let problem = format!("{path} is {:?} {:?}, not F32 {shape:?}", value.dtype(), value.shape().to_vec());
            return Err(fail(io::Error::new(io::ErrorKind::InvalidData, problem)));
        }
        let value = if is_transposed(&hf_name(path)) { transposed(value) } else { value };
        self.file.write_all(value.as_bytes()).map_err(fail)
    }

    /// Gives both files their names, when they are on disk.
    ///
    /// # Errors
    ///
    /// [`LlamaError::File`] if the disk is full, or parameters are missing.
    pub fn finish(mut self) -> Result<()> {
        let fail = |error| LlamaError::file(&self.scratch, error, REMEDY);
        if let Some((path, _)) = self.left.last() {
            return Err(fail(io::Error::new(io::ErrorKind::InvalidData, format!("{path} was not given"))));
        }
        self.file.flush().and_then(|()| self.file.get_ref().sync_all()).map_err(fail)?;
        fs::rename(&self.scratch, self.folder.join(WEIGHTS)).map_err(fail)?;
        write_config(&self.folder, &self.config, DType::F32)
    }
}

impl Drop for FolderWriter {
    fn drop(&mut self) {
        // Renamed already, or not wanted.
        let _ = fs::remove_file(&self.scratch);
    }
}

/// A matrix turned; what is none stays.
fn transposed(data: TensorData) -> TensorData {
    let &[rows, columns] = &data.shape()[..] else { return data };
    let (dtype, size, bytes) = (data.dtype(), data.dtype().size(), data.as_bytes());
    let mut turned = vec![0; bytes.len()];
    for row in 0..rows {
        for column in 0..columns {
            let (from, to) = ((row * columns + column) * size, (column * rows + row) * size);
            turned[to..to + size].copy_from_slice(&bytes[from..from + size]);
        }
    }
    TensorData::from_bytes_vec(turned, [columns, rows], dtype)
}

#[cfg(test)]
mod tests {
    use burn_context_parallel::fsdp::whole_shapes;

    use super::*;
    use crate::{Llama, ParallelConfig};

    /// The same bytes as the whole model's file in the values, and the same configuration.
    #[test]
    fn a_folder_that_is_written_one_by_one_loads_as_one_that_is_saved_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
        let config = LlamaConfig { initializer_range: 0.2, ..LlamaConfig::new(33, 16, 40, 2, 4, 2) };
        let device = Device::flex();
        Llama::init(&config, &ParallelConfig::all(), &device).unwrap().save(&whole).unwrap();
        let (mut weights, _) = FolderWeights::open(&whole, DType::F32, &device).unwrap();
        let shapes = whole_shapes(&Llama::undrawn(&config, &ParallelConfig::none(), &device).unwrap());
        assert_eq!(shapes.len(), 21);
        let mut writer = FolderWriter::create(&parts, &config, shapes.clone()).unwrap();
        for (path, shape) in &shapes {
            let value = weights.read(path, shape).unwrap();
            writer.add(path, value.clone()).unwrap();
            writer.add(path, value).unwrap();
        }
        writer.finish().unwrap();
        let read = |folder: &Path, name: &str| fs::read(folder.join(name)).unwrap();
        assert_eq!(read(&whole, CONFIG), read(&parts, CONFIG));
        assert_eq!(fs::read_dir(&parts).unwrap().count(), 2, "nothing else is left");
        let (mut again, _) = FolderWeights::open(&parts, DType::F32, &device).unwrap();
        let expected = SafetensorsHeader::read(&whole.join(WEIGHTS)).unwrap();
        assert_eq!(SafetensorsHeader::read(&parts.join(WEIGHTS)).unwrap(), expected);
        for (path, shape) in &shapes {
            assert_eq!(again.read(path, shape).unwrap(), weights.read(path, shape).unwrap(), "{path}");
        }
        crate::load(&parts, &ParallelConfig::none(), &device).unwrap();
    }

    #[test]
    fn a_folder_that_is_not_finished_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let config = LlamaConfig::new(33, 16, 40, 1, 4, 2);
        let shapes = whole_shapes(&Llama::undrawn(&config, &ParallelConfig::none(), &Device::flex()).unwrap());
        let mut writer = FolderWriter::create(folder.path(), &config, shapes.clone()).unwrap();
        let error = writer.add(&shapes[0].0, TensorData::from([1.0f32])).unwrap_err();
        assert!(error.to_string().contains("embed_tokens.weight is F32 [1], not F32 [33, 16]"), "{error}");
        let writer = FolderWriter::create(folder.path(), &config, shapes).unwrap();
        assert!(writer.finish().unwrap_err().to_string().contains("embed_tokens.weight was not given"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
