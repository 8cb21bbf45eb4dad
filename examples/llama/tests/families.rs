//! Each family is transformers' own: what its configuration means, absent fields included, and what its checkpoint computes.

mod common;

use std::path::Path;

use burn::module::Module;
use burn::tensor::{DType, Device};
use common::{Reference, error, family, folder};
use llama::{AttentionScheme, Family, Llama, LlamaConfig, LlamaError, ParallelConfig, RotaryScaling, load, load_as};
use rstest::rstest;
use serde_json::{Value, json};

fn parse(config: &Value) -> Result<LlamaConfig, LlamaError> {
    LlamaConfig::parse(&config.to_string(), Path::new("config.json"))
}

/// The fewest fields that are a configuration; `changes` on top.
fn config(family: &str, changes: Value) -> Value {
    let mut config = json!({
        "model_type": family, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 32,
    });
    for (name, value) in changes.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

/// transformers 5.24's configuration classes.
#[rstest]
#[case("llama", Family::Llama, 32, 2, 2048, None)]
#[case("mistral", Family::Mistral, 8, 2, 131_072, Some(4096))]
#[case("qwen2", Family::Qwen2, 32, 2, 32_768, None)]
#[case("qwen3", Family::Qwen3, 32, 128, 32_768, None)]
fn absent_fields_are_the_familys_defaults(
    #[case] name: &str,
    #[case] family: Family,
    #[case] kv_heads: usize,
    #[case] head_dim: usize,
    #[case] tokens: usize,
    #[case] window: Option<usize>,
) {
    let got = parse(&config(name, json!({}))).unwrap();
    let expected = LlamaConfig {
        family,
        num_key_value_heads: kv_heads,
        head_dim,
        max_position_embeddings: tokens,
        sliding_window: window,
        rms_norm_eps: 1e-6,
        initializer_range: 0.02,
        rope_theta: 10_000.0,
        rope_scaling: RotaryScaling::Default,
        tie_word_embeddings: false,
        attention_bias: false,
        mlp_bias: false,
        window_layers: vec![],
        ..LlamaConfig::new(100, 64, 96, 3, 32, kv_heads)
    };
    assert_eq!(got, expected);
    // Null is not absent: as many key/value heads as query heads, no window.
    let nulls = parse(&config(name, json!({"num_key_value_heads": null, "sliding_window": null}))).unwrap();
    assert_eq!((nulls.num_key_value_heads, nulls.sliding_window), (32, None));
    let (qkv, output, norm) = (got.qkv_bias(), got.output_bias(), got.qk_norm());
    assert_eq!((qkv, output, norm.is_some()), (family == Family::Qwen2, false, family == Family::Qwen3));
}

#[rstest]
#[case(json!({}), [None, None, None])]
#[case(json!({"sliding_window": 9}), [None, None, None])] // use_sliding_window is false
#[case(json!({"use_sliding_window": true}), [None, None, None])] // from layer 28
#[case(json!({"use_sliding_window": true, "max_window_layers": 1}), [None, Some(4096), Some(4096)])]
#[case(json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 0}), [Some(9), Some(9), Some(9)])]
#[case(json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0}), [None, None, None])]
#[case(
    json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 0,
           "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    [Some(9), None, None]
)]
fn windows_lie_where_qwen_has_them(
    #[values("qwen2", "qwen3")] family: &str,
    #[case] changes: Value,
    #[case] expected: [Option<usize>; 3],
) {
    let parsed = parse(&config(family, changes)).unwrap();
    assert_eq!([0, 1, 2].map(|layer| parsed.window(layer)), expected);
    // And back.
    let again = parse(&parsed.to_json()).unwrap();
    assert_eq!([0, 1, 2].map(|layer| again.window(layer)), expected);
}

#[rstest]
#[case(json!({"rope_theta": 5e5}), 5e5, RotaryScaling::Default)]
#[case(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}), 5e5, RotaryScaling::Default)]
#[case(json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}), 5e5, RotaryScaling::Linear { factor: 2.0 })]
#[case(json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "type": "default"}}), 1e4, RotaryScaling::Linear { factor: 2.0 })]
#[case(json!({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}), 1e4, RotaryScaling::Linear { factor: 2.0 })]
#[case(
    json!({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 512}),
    1e4,
    RotaryScaling::yarn(4.0, 512)
)]
#[case(
    json!({"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64}),
    1e4,
    RotaryScaling::yarn(4.0, 64)
)]
#[case(
    json!({"rope_parameters": {"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 64,
           "beta_fast": null, "beta_slow": 0}, "max_position_embeddings": 512}),
    1e4,
    RotaryScaling::yarn(8.0, 64)
)]
#[case(
    json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
           "max_position_embeddings": 512}),
    1e4,
    RotaryScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 512 }
)]
fn rotary_parameters_of_both_layouts(#[case] changes: Value, #[case] theta: f64, #[case] scaling: RotaryScaling) {
    let parsed = parse(&config("llama", changes)).unwrap();
    assert_eq!((parsed.rope_theta, &parsed.rope_scaling), (theta, &scaling));
    let again = parse(&parsed.to_json()).unwrap();
    assert_eq!((again.rope_theta, again.rope_scaling), (theta, scaling));
}

#[rstest]
#[case("qwen9", json!({}), "did you mean \"qwen")]
#[case("gpt2", json!({}), "\"llama\", \"mistral\", \"qwen2\", \"qwen3\"")]
#[case("llama", json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "dynamic")]
#[case("llama", json!({"rope_scaling": {"type": "longrope"}}), "longrope")]
#[case("llama", json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}), "full_attention")]
#[case("llama", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5")]
#[case("llama", json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}), "layer_types")]
#[case("mistral", json!({"layer_types": ["full_attention", "full_attention", "full_attention"]}), "layer_types")]
#[case("mistral", json!({"attention_bias": true}), "attention_bias true")]
#[case("mistral", json!({"mlp_bias": true}), "mlp_bias true")]
#[case("qwen2", json!({"attention_bias": false}), "attention_bias false")]
#[case("qwen3", json!({"mlp_bias": true}), "mlp_bias true")]
#[case("qwen3", json!({"layer_types": ["full_attention", "linear_attention", "full_attention"]}), "linear_attention")]
fn what_no_family_here_does_is_named(#[case] family: &str, #[case] changes: Value, #[case] named: &str) {
    let error = parse(&config(family, changes)).unwrap_err();
    assert!(error.is_unsupported(), "{error:?}");
    assert!(error.to_string().contains(named), "{error}");
}

#[rstest]
#[case("mistral", json!({"sliding_window": 0}), "sliding_window is 0")]
#[case("mistral", json!({"sliding_window": -5}), "sliding_window is -5")]
#[case("qwen3", json!({"layer_types": ["full_attention"]}), "layer_types has 1 entries for 3 layers")]
#[case("qwen3", json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}), "without a window")]
#[case("llama", json!({"rope_scaling": {"type": "linear"}}), "factor is missing")]
#[case("llama", json!({"rope_scaling": {"type": "linear", "factor": 0.0}}), "factor is 0")]
#[case("llama", json!({"rope_scaling": {"type": "yarn"}}), "factor is missing")]
#[case("llama", json!({"rope_scaling": {"type": "yarn", "factor": "four"}}), "factor is \"four\"")]
#[case("llama", json!({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}), "original")]
fn what_is_no_configuration_is_an_error(#[case] family: &str, #[case] changes: Value, #[case] named: &str) {
    let error = parse(&config(family, changes)).unwrap_err();
    assert!(matches!(error, LlamaError::Config { .. }), "{error:?}");
    assert!(error.to_string().contains(named), "{error}");
}

#[rstest]
#[case(LlamaConfig { mlp_bias: true, ..of(Family::Qwen3) })]
#[case(LlamaConfig { attention_bias: true, ..of(Family::Qwen2) })]
#[case(LlamaConfig { sliding_window: Some(8), ..of(Family::Llama) })]
#[case(LlamaConfig { sliding_window: Some(8), window_layers: vec![true], ..of(Family::Qwen3) })]
#[case(LlamaConfig { sliding_window: Some(8), window_layers: vec![true, false], ..of(Family::Mistral) })]
fn a_configuration_that_its_family_cannot_be_is_an_error(#[case] config: LlamaConfig) {
    assert!(matches!(
        Llama::init(&config, &ParallelConfig::none(), &Device::flex()).unwrap_err(),
        LlamaError::Config { .. }
    ));
}

fn of(family: Family) -> LlamaConfig {
    LlamaConfig { family, ..LlamaConfig::new(50, 16, 24, 2, 4, 2) }
}

#[rstest]
#[case(LlamaConfig { tie_word_embeddings: true, attention_bias: true, ..of(Family::Llama) })]
#[case(LlamaConfig { mlp_bias: true, head_dim: 10, ..of(Family::Llama) })]
#[case(of(Family::Mistral))]
#[case(of(Family::Qwen2))]
#[case(LlamaConfig { attention_bias: true, head_dim: 6, ..of(Family::Qwen3) })]
fn parameters_are_counted_as_the_model_has_them(#[case] config: LlamaConfig) {
    let model = Llama::init(&config, &ParallelConfig::none(), &Device::flex()).unwrap();
    assert_eq!(config.num_params(), model.num_params());
}

const MODELS: [&str; 11] = [
    "llama2",
    "llama_linear",
    "llama_yarn",
    "llama_biases_mqa_tied",
    "llama_sharded",
    "mistral_window",
    "mistral_full",
    "qwen2",
    "qwen2_window_yarn",
    "qwen3",
    "qwen3_windows_12_heads",
];

/// Saved and loaded again, the model is still of its family, and still PyTorch's.
#[test]
fn a_saved_model_is_the_same_model_of_the_same_family() {
    let device = Device::flex();
    for name in MODELS {
        let copy = tempfile::tempdir().unwrap();
        let (model, report) = load(&family(name), &ParallelConfig::none(), &device).unwrap();
        assert!(report.is_complete() && report.ignored.is_empty(), "{name}");
        model.save(copy.path()).unwrap();
        let written: Value =
            serde_json::from_str(&std::fs::read_to_string(copy.path().join("config.json")).unwrap()).unwrap();
        let original: Value =
            serde_json::from_str(&std::fs::read_to_string(family(name).join("config.json")).unwrap()).unwrap();
        for field in ["model_type", "architectures", "bos_token_id", "eos_token_id"] {
            assert_eq!(written[field], original[field], "{name}: {field}");
        }
        let (again, _) = load(copy.path(), &ParallelConfig::all(), &device).unwrap();
        let (mut before, mut after) = (model.config().clone(), again.config().clone());
        before.other.clear();
        after.other.clear();
        assert_eq!(before, after, "{name}");
        let reference = Reference::at(&family(name));
        let logits = again.logits(reference.tokens()).into_data();
        assert!(error(&logits, &reference.get("logits")) <= 2e-5, "{name}");
    }
}

/// A window that is ignored, a norm or a bias that is dropped: each changes the logits by far more than the tolerance.
#[rstest]
#[case("mistral_window", |config: &mut LlamaConfig| config.sliding_window = None)]
#[case("mistral_window", |config: &mut LlamaConfig| config.sliding_window = Some(14))]
#[case("qwen2_window_yarn", |config: &mut LlamaConfig| config.window_layers = vec![true, true])]
#[case("llama_yarn", |config: &mut LlamaConfig| config.rope_scaling = RotaryScaling::Default)]
#[case("llama_linear", |config: &mut LlamaConfig| config.rope_scaling = RotaryScaling::Default)]
fn the_references_would_notice(#[case] name: &str, #[case] change: fn(&mut LlamaConfig)) {
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(family(name).join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let mut config = LlamaConfig::read(&family(name).join("config.json")).unwrap();
    change(&mut config);
    std::fs::write(copy.path().join("config.json"), config.to_json().to_string()).unwrap();
    let (model, _) = load(copy.path(), &ParallelConfig::none(), &Device::flex()).unwrap();
    let reference = Reference::at(&family(name));
    assert!(error(&model.logits(reference.tokens()).into_data(), &reference.get("logits")) > 1e-3);
}

/// bf16 weights compute in bf16, near f32: with norms, windows and biases, and under U-Pipe.
#[rstest]
fn a_model_loads_and_computes_in_bf16(
    #[values("qwen3", "qwen2_window_yarn", "mistral_window")] name: &str,
    #[values(AttentionScheme::Single, AttentionScheme::UPipe { heads_per_stage: Some(3) })] attention: AttentionScheme,
) {
    let parallel = ParallelConfig { attention, ..ParallelConfig::none() };
    let (model, _) = load_as(&family(name), &parallel, &Device::flex(), DType::BF16).unwrap();
    assert_eq!(model.embed_tokens.weight.val().dtype(), DType::BF16);
    assert_eq!(model.norm.inner.gamma.val().dtype(), DType::BF16);
    let reference = Reference::at(&family(name));
    let logits = model.logits(reference.tokens());
    assert_eq!(logits.dtype(), DType::BF16);
    let off = error(&logits.cast(DType::F32).into_data(), &reference.get("logits"));
    // A rounding is 1/256; a dozen operations lie between a token and its logits, twice.
    assert!(off > 1e-4 && off < 24.0 / 256.0, "{off}");
}

#[test]
fn a_type_that_is_no_float_is_an_error() {
    let error = load_as(&folder("llama"), &ParallelConfig::none(), &Device::flex(), DType::I32).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("I32"), "{error}");
}

/// Any field, whatever is in it: a configuration or an error, never a panic, and never a model that takes the machine.
#[test]
fn odd_values_in_any_field_never_panic() {
    let odd = json!([null, true, -1, 0, 1, 7, 2.5, 1e308, -1e308, u64::MAX, "", "yarn", [], [1], {}, {"type": "yarn", "factor": 0}]);
    let fields = [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "initializer_range",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "attention_dropout",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
    ];
    let rope = [
        "rope_type",
        "type",
        "factor",
        "rope_theta",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "original_max_position_embeddings",
    ];
    let (mut good, mut bad) = (0, 0);
    let mut count = |result: Result<LlamaConfig, LlamaError>| match result {
        Ok(config) => {
            good += 1;
            assert_eq!(parse(&config.to_json()).map(|again| again.num_params()).ok(), Some(config.num_params()));
        }
        Err(error) => {
            bad += 1;
            assert!(error.to_string().starts_with("config.json: "), "{error}");
        }
    };
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        for value in odd.as_array().unwrap() {
            for field in fields {
                count(parse(&config(family, json!({"use_sliding_window": true, field: value}))));
            }
            for kind in ["linear", "llama3", "yarn"] {
                for field in rope {
                    let mut scaling =
                        json!({"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
                    scaling[field] = value.clone();
                    count(parse(&config(family, json!({"rope_parameters": scaling}))));
                }
            }
        }
    }
    assert!(good > 500 && bad > 500, "{good} read, {bad} refused");
}
