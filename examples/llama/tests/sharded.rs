//! A model in several files is the model, and an index that does not fit its files is an error that says where.

mod common;

use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{DType, Device};
use common::{family, read, write};
use llama::{LlamaError, ParallelConfig, load, load_as};
use rstest::rstest;
use serde_json::{Value, json};

const FIRST: &str = "model-00001-of-00003.safetensors";
const SECOND: &str = "model-00002-of-00003.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn copy() -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in fs::read_dir(family("llama_sharded")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    copy
}

fn edit_index(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let path = folder.join(INDEX);
    let mut index: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut index);
    fs::write(&path, index.to_string()).unwrap();
}

fn failure(folder: &Path) -> LlamaError {
    load(folder, &ParallelConfig::none(), &Device::flex()).map(drop).unwrap_err()
}

#[test]
fn shards_are_one_model() {
    let folder = copy();
    let (model, report) = load(folder.path(), &ParallelConfig::none(), &Device::flex()).unwrap();
    assert!(report.is_complete());
    assert_eq!(report.applied.len(), 21);
    // As one file it is the same, which wins where both are there, as in transformers.
    model.save(folder.path()).unwrap();
    fs::remove_file(folder.path().join(FIRST)).unwrap();
    let (again, _) = load(folder.path(), &ParallelConfig::none(), &Device::flex()).unwrap();
    assert_eq!(again.num_params(), model.num_params());
    for (a, b) in model.layers.iter().zip(&again.layers) {
        let weight = |layer: &burn_upipe::checkpoint::Checkpointed<llama::Block>| {
            layer.inner.inner.self_attn.k_proj.weight.val().into_data()
        };
        assert_eq!(weight(a), weight(b));
    }
}

#[test]
fn a_missing_shard_is_named() {
    let folder = copy();
    fs::remove_file(folder.path().join(SECOND)).unwrap();
    let error = failure(folder.path());
    assert!(matches!(error, LlamaError::File { .. }) && error.to_string().contains(SECOND), "{error}");
}

#[test]
fn a_truncated_shard_is_named() {
    for bytes in [0, 4, 8, 100, 20_000] {
        let folder = copy();
        let whole = fs::read(folder.path().join(SECOND)).unwrap();
        fs::write(folder.path().join(SECOND), &whole[..bytes]).unwrap();
        let error = failure(folder.path());
        assert!(matches!(error, LlamaError::Weights { .. }) && error.to_string().contains(SECOND), "{bytes}: {error}");
    }
}

#[test]
fn an_absurd_header_length_allocates_nothing() {
    for length in [1 << 20, 1 << 40, u64::MAX] {
        let folder = copy();
        let mut bytes = fs::read(folder.path().join(FIRST)).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(folder.path().join(FIRST), &bytes).unwrap();
        let error = failure(folder.path());
        assert!(matches!(error, LlamaError::Weights { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("a header of {length} bytes")), "{error}");
    }
}

#[test]
fn a_tensor_that_the_index_promises_must_be_in_its_shard() {
    let folder = copy();
    edit_index(folder.path(), |index| index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = json!(FIRST));
    let error = failure(folder.path());
    assert!(matches!(error, LlamaError::Weights { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(FIRST) && text.contains("does not have model.layers.9.mlp.up_proj.weight"), "{text}");
}

#[test]
fn a_tensor_that_the_index_does_not_name_is_an_error() {
    let folder = copy();
    edit_index(folder.path(), |index| {
        index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight").unwrap();
    });
    let error = failure(folder.path()).to_string();
    assert!(error.contains("model.norm.weight, which the index does not name"), "{error}");

    // In two shards at once: which one counts would be a guess.
    let folder = copy();
    let mut tensors = read(&folder.path().join(FIRST));
    let other = read(&folder.path().join("model-00003-of-00003.safetensors"));
    tensors.insert("model.norm.weight".into(), other["model.norm.weight"].clone());
    write(&folder.path().join(FIRST), &tensors);
    let error = failure(folder.path()).to_string();
    assert!(error.contains("model.norm.weight, which is said to be in model-00003"), "{error}");
}

#[rstest]
#[case("../elsewhere.safetensors")]
#[case("/etc/passwd")]
#[case("deeper/model.safetensors")]
#[case("..")]
#[case("")]
fn a_shard_outside_the_folder_is_refused(#[case] name: &str) {
    let folder = copy();
    edit_index(folder.path(), |index| index["weight_map"]["model.norm.weight"] = json!(name));
    let error = failure(folder.path());
    assert!(matches!(error, LlamaError::Weights { .. }), "{error:?}");
    assert!(error.to_string().contains("no file of this folder"), "{error}");
}

#[rstest]
#[case("")]
#[case("[]")]
#[case("{}")]
#[case(r#"{"weight_map": {}}"#)]
#[case(r#"{"weight_map": {"model.norm.weight": 3}}"#)]
#[case(r#"{"weight_map": "model.safetensors"}"#)]
fn what_is_no_index_is_an_error(#[case] text: &str) {
    let folder = copy();
    fs::write(folder.path().join(INDEX), text).unwrap();
    let error = failure(folder.path());
    assert!(matches!(error, LlamaError::Weights { .. }) && error.to_string().contains(INDEX), "{error:?}");
}

#[test]
fn a_report_is_of_all_shards_together() {
    let folder = copy();
    let mut tensors = read(&folder.path().join(SECOND));
    let name = tensors.keys().find(|name| name.ends_with("up_proj.weight")).unwrap().clone();
    let misspelt = name.replace("up_proj", "upp_proj");
    let moved = tensors.remove(&name).unwrap();
    tensors.insert(misspelt.clone(), moved);
    write(&folder.path().join(SECOND), &tensors);
    edit_index(folder.path(), |index| {
        index["weight_map"].as_object_mut().unwrap().remove(&name);
        index["weight_map"][&misspelt] = json!(SECOND);
    });
    let LlamaError::Mismatch { path, report } = failure(folder.path()) else { panic!("a mismatch") };
    assert!(path.ends_with(INDEX));
    assert_eq!(report.missing.len(), 1);
    assert_eq!((&report.missing[0].name, report.missing[0].did_you_mean.as_ref()), (&name, Some(&misspelt)));
    assert_eq!(report.unused, [misspelt]);
    // Names are compared before anything is read.
    assert_eq!((report.applied.len(), report.errors.len()), (0, 0));
}

/// Files of f32, bf16 and f16, loaded as f32 and as bf16: exact, or rounded once.
#[rstest]
fn any_float_file_loads_as_any_float(
    #[values(DType::F32, DType::BF16, DType::F16)] stored: DType,
    #[values(DType::F32, DType::BF16)] wanted: DType,
) {
    use burn::tensor::{bf16, f16};

    let folder = copy();
    let mut expected = Vec::new();
    for file in fs::read_dir(folder.path()).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("model-") {
            continue;
        }
        let mut tensors = read(&path);
        for (name, (dtype, _, bytes)) in &mut tensors {
            let values: Vec<f32> = bytes.chunks(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect();
            let stored_values: Vec<f32> = match stored {
                DType::BF16 => values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect(),
                DType::F16 => values.iter().map(|value| f16::from_f32(*value).to_f32()).collect(),
                _ => values,
            };
            if name == "model.embed_tokens.weight" {
                expected = stored_values.clone();
            }
            (*dtype, *bytes) = match stored {
                DType::BF16 => (
                    safetensors::Dtype::BF16,
                    stored_values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
                ),
                DType::F16 => (
                    safetensors::Dtype::F16,
                    stored_values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
                ),
                _ => (safetensors::Dtype::F32, stored_values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            };
        }
        write(&path, &tensors);
    }
    if wanted == DType::BF16 {
        expected.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
    }
    let (model, _) = load_as(folder.path(), &ParallelConfig::none(), &Device::flex(), wanted).unwrap();
    let weight = model.embed_tokens.weight.val();
    assert_eq!(weight.dtype(), wanted);
    assert_eq!(weight.into_data().iter::<f32>().collect::<Vec<_>>(), expected);
}

/// Bytes of the header changed at random: the model, or an error that names a file.
#[test]
fn a_damaged_header_never_panics() {
    const BYTES: &[u8] = b"0123456789{}[]\",:-eFU \x00\xff";
    let mut state = 7u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let folder = copy();
    let path = folder.path().join(FIRST);
    let whole = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut refused = 0;
    for _ in 0..400 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random(3) {
            bytes[8 + random(header - 8)] = BYTES[random(BYTES.len())];
        }
        fs::write(&path, &bytes).unwrap();
        if let Err(error) = load(folder.path(), &ParallelConfig::none(), &Device::flex()) {
            assert!(matches!(error, LlamaError::Weights { .. } | LlamaError::Mismatch { .. }), "{error:?}");
            refused += 1;
        }
    }
    assert!(refused > 300, "{refused}");
}
