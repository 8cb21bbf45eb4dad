//! The reference models, and files made from them.
#![allow(dead_code)] // each test binary uses a part

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_context_parallel::sequence::Batch;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

/// A file's tensors: type, shape, bytes.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models").join(model)
}

/// A reference model of another family or layout.
pub fn family(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/families").join(model)
}

pub fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect()
}

pub fn write(path: &Path, tensors: &Tensors) {
    let views: Vec<(String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()))
        .collect();
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A copy of a reference model, without its results, whose weights `edit` has changed.
pub fn edited(model: &str, edit: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    fs::copy(folder(model).join("config.json"), copy.path().join("config.json")).unwrap();
    let mut tensors = read(&folder(model).join("model.safetensors"));
    edit(&mut tensors);
    write(&copy.path().join("model.safetensors"), &tensors);
    copy
}

/// PyTorch's results for a reference model.
pub struct Reference {
    tensors: Tensors,
}

impl Reference {
    pub fn of(model: &str) -> Self {
        Self::at(&folder(model))
    }

    pub fn at(folder: &Path) -> Self {
        Self { tensors: read(&folder.join("reference.safetensors")) }
    }

    pub fn get(&self, name: &str) -> TensorData {
        let (dtype, shape, bytes) = &self.tensors[name];
        let dtype = match dtype {
            Dtype::F32 => DType::F32,
            Dtype::I64 => DType::I64,
            other => panic!("{name} is of type {other:?}"),
        };
        TensorData::from_bytes_vec(bytes.clone(), shape.clone(), dtype)
    }

    pub fn gradients(&self) -> BTreeMap<String, TensorData> {
        let name = |name: &String| name.strip_prefix("grad.").map(str::to_owned);
        self.tensors.keys().filter_map(|key| Some((name(key)?, self.get(key)))).collect()
    }

    pub fn tokens(&self) -> Tensor<2, Int> {
        Tensor::from_data(self.get("input_ids"), &burn::tensor::Device::flex())
    }

    pub fn batch(&self) -> Batch {
        let device = burn::tensor::Device::flex();
        let int = |name: &str| Tensor::<2, Int>::from_data(self.get(name), &device);
        Batch::new(int("input_ids")).unwrap().with_labels(int("labels")).unwrap()
    }
}

/// The largest difference, relative to the largest magnitude of `want`.
pub fn error(got: &TensorData, want: &TensorData) -> f64 {
    assert_eq!(got.shape(), want.shape());
    let largest = want.iter::<f64>().fold(0.0, |max: f64, value| max.max(value.abs()));
    assert!(largest > 0.0, "a reference of zeros compares nothing");
    got.iter::<f64>().zip(want.iter::<f64>()).fold(0.0, |max: f64, (got, want)| {
        let difference = (got - want).abs();
        max.max(if difference.is_nan() { f64::INFINITY } else { difference })
    }) / largest
}
