//! A folder that is not the configured model is an error that says which file, which tensor, and what to do.

mod common;

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use common::{edited, folder};
use llama::{LlamaConfig, LlamaError, ParallelConfig, RotaryScaling, SafetensorsHeader, load, not_finite};
use rstest::rstest;
use serde_json::{Value, json};

fn try_load(folder: &Path) -> Result<llama::LoadReport, LlamaError> {
    load(folder, &ParallelConfig::none(), &Device::flex()).map(|(_, report)| report)
}

fn mismatch(folder: &Path) -> (llama::LoadReport, String) {
    match try_load(folder).unwrap_err() {
        error @ LlamaError::Mismatch { .. } => {
            let text = error.to_string();
            let LlamaError::Mismatch { report, .. } = error else { unreachable!() };
            (*report, text)
        }
        other => panic!("{other}"),
    }
}

/// The untied model's configuration with fields replaced.
fn config(changes: Value) -> String {
    let text = fs::read_to_string(folder("llama").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    let fields = config.as_object_mut().unwrap();
    for (name, value) in changes.as_object().unwrap() {
        fields.insert(name.clone(), value.clone());
    }
    config.to_string()
}

#[test]
fn a_misspelt_tensor_is_missing_and_unused_with_a_suggestion() {
    let copy = edited("llama", |tensors| {
        let moved = tensors.remove("model.layers.1.mlp.up_proj.weight").unwrap();
        tensors.insert("model.layers.1.mlp.upp_proj.weight".into(), moved);
    });
    let (report, text) = mismatch(copy.path());
    assert_eq!(report.missing.len(), 1);
    assert_eq!(report.missing[0].name, "model.layers.1.mlp.up_proj.weight");
    assert_eq!(report.missing[0].did_you_mean.as_deref(), Some("model.layers.1.mlp.upp_proj.weight"));
    assert_eq!(report.unused, ["model.layers.1.mlp.upp_proj.weight"]);
    assert!(text.contains("model.safetensors") && text.contains("did you mean"), "{text}");
    assert!(text.contains("use the config.json that was saved with these weights"), "{text}");
}

#[rstest]
#[case("model.embed_tokens.weight")]
#[case("model.norm.weight")]
#[case("lm_head.weight")]
#[case("model.layers.0.self_attn.k_proj.weight")]
#[case("model.layers.1.post_attention_layernorm.weight")]
fn a_missing_tensor_is_an_error(#[case] name: &str) {
    let copy = edited("llama", |tensors| drop(tensors.remove(name).unwrap()));
    let (report, _) = mismatch(copy.path());
    assert_eq!(report.missing.len(), 1);
    assert_eq!(report.missing[0].name, name);
    assert!(report.unused.is_empty() && report.errors.is_empty());
}

#[rstest]
#[case("model.layers.2.mlp.up_proj.weight")] // the model has two layers
#[case("model.layers.0.self_attn.q_proj.bias")] // attention_bias is false
#[case("score.weight")]
#[case("norm.weight")] // without the prefix
fn a_tensor_too_many_is_an_error(#[case] name: &str) {
    let copy = edited("llama", |tensors| {
        let other = tensors["model.norm.weight"].clone();
        tensors.insert(name.into(), other);
    });
    let (report, text) = mismatch(copy.path());
    assert_eq!(report.unused, [name]);
    assert!(report.missing.is_empty());
    assert!(text.contains(name), "{text}");
}

/// The module's own name of a norm's weight is not Hugging Face's.
#[test]
fn a_tensor_under_the_modules_name_is_not_taken_for_the_parameter() {
    let copy = edited("llama", |tensors| {
        let moved = tensors.remove("model.norm.weight").unwrap();
        tensors.insert("model.norm.gamma".into(), moved);
    });
    let (report, text) = mismatch(copy.path());
    assert_eq!(report.unused, ["model.norm.gamma"]);
    assert_eq!(report.missing.len(), 1);
    assert!(text.contains("model.norm.weight (did you mean model.norm.gamma, which the file has?)"), "{text}");
}

/// By name, before thousands of layers are built or a weight is read: shapes would be wrong.
#[test]
fn a_model_of_far_more_layers_is_refused_by_name() {
    let copy = edited("llama", |tensors| tensors.values_mut().for_each(|(_, shape, _)| shape.reverse()));
    fs::write(copy.path().join("config.json"), config(json!({"num_hidden_layers": 9999}))).unwrap();
    let (report, text) = mismatch(copy.path());
    assert_eq!(report.missing.len(), 9997 * 9);
    assert!(report.unused.is_empty() && report.errors.is_empty(), "no weight was looked at");
    assert!(text.contains("missing: model.layers.10.") && text.contains("more"), "{text}");
}

#[test]
fn a_wrong_shape_is_an_error_with_both_shapes_as_the_file_has_them() {
    let copy = edited("llama", |tensors| {
        let weight = tensors.get_mut("model.layers.0.mlp.down_proj.weight").unwrap();
        weight.1.reverse();
    });
    let (report, text) = mismatch(copy.path());
    assert_eq!(report.errors, ["model.layers.0.mlp.down_proj.weight is [176, 64] where config.json says [64, 176]"]);
    assert!(report.missing.is_empty() && report.unused.is_empty(), "{text}");
}

#[test]
fn tensors_that_say_nothing_are_accepted_and_named() {
    let copy = edited("llama_scaled_tied", |tensors| {
        let head = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), head);
        let norm = tensors["model.norm.weight"].clone();
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), norm);
    });
    let report = try_load(copy.path()).unwrap();
    assert!(report.is_complete());
    assert_eq!(report.ignored, ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]);
    let summary = report.summary();
    assert!(summary.starts_with(&format!("{} weights loaded; ignored", report.applied.len())), "{summary}");
    assert!(summary.ends_with(": lm_head.weight, model.layers.0.self_attn.rotary_emb.inv_freq"), "{summary}");
}

#[test]
fn half_precision_weights_become_the_devices_floats_exactly() {
    let copy = edited("llama", |tensors| {
        for (dtype, _, bytes) in tensors.values_mut() {
            *dtype = safetensors::Dtype::BF16; // the upper half of an f32
            *bytes = bytes.chunks(4).flat_map(|value| [value[2], value[3]]).collect();
        }
    });
    let (model, _) = load(copy.path(), &ParallelConfig::none(), &Device::flex()).unwrap();
    let (exact, _) = load(&folder("llama"), &ParallelConfig::none(), &Device::flex()).unwrap();
    let values =
        |model: &llama::Llama| model.lm_head.as_ref().unwrap().weight.val().into_data().try_to_vec::<f32>().unwrap();
    for (half, exact) in values(&model).iter().zip(values(&exact)) {
        assert_eq!(half.to_bits(), exact.to_bits() & 0xFFFF_0000);
    }
}

#[rstest]
#[case::empty(0)]
#[case::header_length_only(8)]
#[case::half_a_header(500)]
#[case::half_the_weights(200_000)]
fn a_truncated_file_is_an_error_that_names_it(#[case] bytes: usize) {
    let copy = edited("llama", |_| {});
    let path = copy.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    assert!(bytes < whole.len());
    fs::write(&path, &whole[..bytes]).unwrap();
    let error = try_load(copy.path()).unwrap_err();
    assert!(matches!(error, LlamaError::Weights { .. }), "{error:?}");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
}

#[test]
fn garbage_is_an_error() {
    let copy = edited("llama", |_| {});
    fs::write(copy.path().join("model.safetensors"), [0xFF; 4096]).unwrap();
    assert!(matches!(try_load(copy.path()).unwrap_err(), LlamaError::Weights { .. }));
}

#[test]
fn absent_files_are_errors_that_name_what_should_be_there() {
    let empty = tempfile::tempdir().unwrap();
    let error = try_load(empty.path()).unwrap_err();
    assert!(matches!(error, LlamaError::File { .. }) && error.to_string().contains("config.json"), "{error}");

    let copy = edited("llama", |_| {});
    fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    let error = try_load(copy.path()).unwrap_err();
    assert!(matches!(error, LlamaError::File { .. }) && error.to_string().contains("model.safetensors"), "{error}");

    fs::write(copy.path().join("pytorch_model.bin"), "").unwrap();
    let error = try_load(copy.path()).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("PyTorch pickle"), "{error}");
}

/// Whoever opened it would wait for a writer.
#[cfg(unix)]
#[rstest]
#[case("config.json")]
#[case("model.safetensors")]
#[case("model.safetensors.index.json")]
fn a_pipe_is_no_file_of_a_model(#[case] name: &str) {
    let copy = edited("llama", |_| {});
    if name.ends_with("index.json") {
        fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    }
    let path = copy.path().join(name);
    fs::remove_file(&path).ok();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = try_load(copy.path()).unwrap_err();
    assert!(matches!(error, LlamaError::File { .. }), "{error:?}");
    assert!(error.to_string().contains(&format!("{name}: a folder, a pipe or a device, not a file")), "{error}");
}

#[test]
fn a_header_says_names_and_metadata_of_a_file() {
    let header = SafetensorsHeader::read(&folder("llama").join("model.safetensors")).unwrap();
    let tensors = common::read(&folder("llama").join("model.safetensors"));
    assert!(header.tensors.iter().eq(tensors.keys()));
    assert_eq!(header.metadata.get("format").map(String::as_str), Some("pt"));
    assert!(matches!(SafetensorsHeader::read(&folder("llama")), Err(LlamaError::File { .. })));
}

#[test]
fn a_value_that_is_not_finite_is_found_by_its_name() {
    for (value, bits) in [("NaN", f32::NAN), ("infinity", f32::NEG_INFINITY)] {
        let copy = edited("llama", |tensors| {
            let weight = tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap();
            weight.2[400..404].copy_from_slice(&bits.to_le_bytes());
        });
        let (model, _) = load(copy.path(), &ParallelConfig::none(), &Device::flex().autodiff()).unwrap();
        assert_eq!(not_finite(&model).as_deref(), Some("model.layers.1.mlp.up_proj.weight"), "{value}");
    }
    let (model, _) = load(&folder("llama"), &ParallelConfig::none(), &Device::flex()).unwrap();
    assert_eq!(not_finite(&model), None);
}

#[rstest]
#[case(json!({"model_type": "gemma3"}), "gemma3")]
#[case(json!({"hidden_act": "gelu"}), "gelu")]
#[case(json!({"attention_dropout": 0.1}), "attention_dropout 0.1")]
#[case(json!({"sliding_window": 4096}), "sliding_window 4096")]
#[case(json!({"quantization_config": {"bits": 4}}), "quantization_config")]
#[case(json!({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}), "dynamic")]
#[case(json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}), "partial_rotary_factor")]
fn what_is_not_built_is_named(#[case] changes: Value, #[case] named: &str) {
    let error = LlamaConfig::parse(&config(changes), Path::new("somewhere/config.json")).unwrap_err();
    assert!(error.is_unsupported(), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(named) && text.starts_with("somewhere/config.json"), "{text}");
}

#[rstest]
#[case(json!({"num_key_value_heads": 3}), "8 query heads for 3")]
#[case(json!({"head_dim": 7}), "head_dim is 7")]
#[case(json!({"hidden_size": 0}), "hidden_size is 0")]
#[case(json!({"hidden_size": -64}), "hidden_size is -64")]
#[case(json!({"hidden_size": null}), "hidden_size is missing")]
#[case(json!({"vocab_size": "many"}), "vocab_size")]
#[case(json!({"num_hidden_layers": 1_000_000_000}), "num_hidden_layers is 1000000000")]
#[case(json!({"num_attention_heads": 4_000_000_000u64, "head_dim": 2}), "num_attention_heads is 4000000000")]
#[case(json!({"head_dim": 4_000_000_000u64}), "head_dim is 4000000000")]
#[case(json!({"num_attention_heads": 7, "head_dim": null, "num_key_value_heads": 7}), "not a multiple")]
#[case(json!({"rms_norm_eps": 0.0}), "rms_norm_eps is 0")]
#[case(json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}), "low_freq_factor is missing")]
#[case(json!({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}), "rope_theta is -1")]
fn a_configuration_of_no_model_is_an_error(#[case] changes: Value, #[case] named: &str) {
    let error = LlamaConfig::parse(&config(changes), Path::new("config.json")).unwrap_err();
    assert!(matches!(error, LlamaError::Config { .. }), "{error:?}");
    assert!(error.to_string().contains(named), "{error}");
}

#[rstest]
#[case("")]
#[case("{\"model_type\": \"llama\"")]
#[case("[1, 2]")]
fn what_is_not_json_is_an_error(#[case] text: &str) {
    assert!(matches!(LlamaConfig::parse(text, Path::new("c")).unwrap_err(), LlamaError::Config { .. }));
}

#[test]
fn the_older_layout_means_the_same() {
    let newer = fs::read_to_string(folder("llama_scaled_tied").join("config.json")).unwrap();
    let newer = LlamaConfig::parse(&newer, Path::new("c")).unwrap();
    assert!(matches!(newer.rope_scaling, RotaryScaling::Llama3 { .. }));
    let mut older = newer.to_json();
    let fields = older.as_object_mut().unwrap();
    let mut rope = fields.remove("rope_parameters").unwrap();
    let theta = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
    fields.insert("rope_theta".into(), theta);
    fields.insert("rope_scaling".into(), rope);
    let mut older = LlamaConfig::parse(&older.to_string(), Path::new("c")).unwrap();
    older.other = newer.other.clone();
    assert_eq!(older, newer);
}
