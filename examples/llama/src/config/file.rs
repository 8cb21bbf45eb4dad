//! The text of a `config.json`: read in both layouts of transformers, and written in the newer one.

use std::path::Path;

use burn_context_parallel::sequence::RotaryScaling;
use serde_json::{Map, Value, json};

use super::{Family, LlamaConfig};
use crate::error::{LlamaError, Result};

/// Windows from this layer on, where the file does not say.
const MAX_WINDOW_LAYERS: usize = 28;

pub(super) fn parse(text: &str, path: &Path) -> Result<LlamaConfig> {
    let json: Value = serde_json::from_str(text)
        .map_err(|error| LlamaError::config(path, format!("not JSON: {error}"), "save the model again"))?;
    let Value::Object(fields) = json else {
        return Err(LlamaError::config(path, "not a JSON object", "save the model again"));
    };
    let mut fields = Fields { path, fields };
    let family = fields.family()?;
    let defaults = family.defaults();
    fields.refuse_unbuilt(family)?;

    let hidden_size = fields.required("hidden_size")?;
    let num_attention_heads: usize = fields.required("num_attention_heads")?;
    let num_hidden_layers = fields.required("num_hidden_layers")?;
    let head_dim = match fields.or_absent("head_dim", defaults.head_dim)? {
        Some(head_dim) => head_dim,
        None if num_attention_heads > 0 && hidden_size % num_attention_heads == 0 => hidden_size / num_attention_heads,
        None => {
            return Err(fields.wrong(
                format!("hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"),
                "give head_dim",
            ));
        }
    };
    let max_position_embeddings =
        fields.optional("max_position_embeddings")?.unwrap_or(defaults.max_position_embeddings);
    let (rope_theta, rope_scaling) = fields.rope(max_position_embeddings)?;
    let (sliding_window, window_layers) = fields.windows(family, num_hidden_layers)?;
    Ok(LlamaConfig {
        family,
        vocab_size: fields.required("vocab_size")?,
        hidden_size,
        intermediate_size: fields.required("intermediate_size")?,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: fields.or_absent("num_key_value_heads", defaults.kv_heads)?.unwrap_or(num_attention_heads),
        head_dim,
        max_position_embeddings,
        rms_norm_eps: fields.optional("rms_norm_eps")?.unwrap_or(1e-6),
        initializer_range: fields.optional("initializer_range")?.unwrap_or(0.02),
        rope_theta,
        rope_scaling,
        sliding_window,
        window_layers,
        tie_word_embeddings: fields.optional("tie_word_embeddings")?.unwrap_or(false),
        attention_bias: fields.optional("attention_bias")?.unwrap_or(false) && family != Family::Qwen2,
        mlp_bias: fields.optional("mlp_bias")?.unwrap_or(false),
        other: fields.fields,
    })
}

pub(super) fn to_json(config: &LlamaConfig) -> Value {
    let mut own = json!({
        "architectures": [config.family.architecture()],
        "model_type": config.family.model_type(),
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "rope_parameters": rope_json(config),
        "tie_word_embeddings": config.tie_word_embeddings,
    });
    match config.family {
        Family::Llama => {
            own["attention_bias"] = config.attention_bias.into();
            own["mlp_bias"] = config.mlp_bias.into();
        }
        Family::Mistral => own["sliding_window"] = json!(config.sliding_window),
        Family::Qwen2 | Family::Qwen3 => {
            if config.family == Family::Qwen3 {
                own["attention_bias"] = config.attention_bias.into();
            }
            own["use_sliding_window"] = config.sliding_window.is_some().into();
            own["sliding_window"] = json!(config.sliding_window);
            let kinds = (0..config.num_hidden_layers).map(|layer| layer_type(config.window(layer).is_some()));
            own["layer_types"] = kinds.collect();
        }
    }
    let mut all = config.other.clone();
    if let Value::Object(own) = own {
        all.extend(own);
    }
    Value::Object(all)
}

fn rope_json(config: &LlamaConfig) -> Value {
    let theta = config.rope_theta;
    match &config.rope_scaling {
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "rope_theta": theta, "factor": factor }),
        RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            json!({
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            })
        }
        RotaryScaling::Yarn {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            attention_factor,
            mscale,
            mscale_all_dim,
            truncate,
        } => {
            let mut rope = json!({
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": factor,
                "original_max_position_embeddings": original_max_position_embeddings,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "truncate": truncate,
            });
            let given =
                [("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", mscale_all_dim)];
            for (name, value) in given {
                if let Some(value) = value {
                    rope[name] = json!(value);
                }
            }
            rope
        }
        _ => json!({ "rope_type": "default", "rope_theta": theta }),
    }
}

fn layer_type(window: bool) -> &'static str {
    if window { "sliding_attention" } else { "full_attention" }
}

/// The fields of a file, taken out one by one.
struct Fields<'a> {
    path: &'a Path,
    fields: Map<String, Value>,
}

impl Fields<'_> {
    fn wrong(&self, problem: impl Into<String>, remedy: impl Into<String>) -> LlamaError {
        LlamaError::config(self.path, problem, remedy)
    }

    fn unsupported(&self, what: impl Into<String>, remedy: impl Into<String>) -> LlamaError {
        LlamaError::unsupported(self.path, what, remedy)
    }

    /// Takes a field; null counts as absent.
    fn optional<T: serde::de::DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>> {
        let Some(value) = self.fields.remove(name).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let shown = value.to_string();
        serde_json::from_value(value)
            .map(Some)
            .map_err(|error| self.wrong(format!("{name} is {shown}: {error}"), "correct the field"))
    }

    /// Takes a field whose absence means `absent`, while null means none.
    fn or_absent<T: serde::de::DeserializeOwned>(&mut self, name: &str, absent: Option<T>) -> Result<Option<T>> {
        if self.fields.contains_key(name) { self.optional(name) } else { Ok(absent) }
    }

    fn required<T: serde::de::DeserializeOwned>(&mut self, name: &str) -> Result<T> {
        self.optional(name)?.ok_or_else(|| self.wrong(format!("{name} is missing"), "give the field"))
    }

    fn family(&mut self) -> Result<Family> {
        let model_type: String = self.required("model_type")?;
        Family::parse(&model_type).map_err(|remedy| self.unsupported(format!("model_type {model_type:?}"), remedy))
    }

    /// Everything that would change the result and is not built.
    fn refuse_unbuilt(&mut self, family: Family) -> Result<()> {
        let act: String = self.optional("hidden_act")?.unwrap_or_else(|| "silu".into());
        if act != "silu" {
            return Err(self.unsupported(format!("hidden_act {act:?}"), "use a model with \"silu\""));
        }
        let dropout: f64 = self.optional("attention_dropout")?.unwrap_or(0.0);
        if dropout != 0.0 {
            return Err(self.unsupported(format!("attention_dropout {dropout}"), "set it to 0.0"));
        }
        if let Some(value) = self.optional::<Value>("quantization_config")? {
            return Err(self.unsupported(format!("quantization_config {value}"), "use the model's unquantised weights"));
        }
        // What transformers would ignore in these families; the weights would then not be what the file says.
        let fixed: &[(&str, bool)] = match family {
            Family::Llama => &[],
            Family::Mistral => &[("attention_bias", false), ("mlp_bias", false)],
            Family::Qwen2 => &[("attention_bias", true), ("mlp_bias", false)],
            Family::Qwen3 => &[("mlp_bias", false)],
        };
        for (name, value) in fixed {
            let given: Option<bool> = self.fields.get(*name).and_then(Value::as_bool);
            if given.is_some_and(|given| given != *value) {
                return Err(self.unsupported(
                    format!("{name} {} in a model of type \"{family}\"", !value),
                    format!("set it to {value}, as this family has it"),
                ));
            }
        }
        Ok(())
    }

    /// The window, and which layers have it (none listed: all).
    fn windows(&mut self, family: Family, layers: usize) -> Result<(Option<usize>, Vec<bool>)> {
        let window = self.or_absent("sliding_window", family.defaults().sliding_window)?;
        if family == Family::Llama && window.is_some() {
            return Err(self.unsupported(
                format!("sliding_window {} in a model of type \"llama\"", window.unwrap_or(0)),
                "set it to null; transformers would ignore it",
            ));
        }
        let listed: Option<Vec<String>> = self.optional("layer_types")?;
        let listed = listed.map(|kinds| self.layer_types(&kinds, layers)).transpose()?;
        if !family.has_window_layers() {
            // transformers does not look at the list in these families.
            if listed.is_some_and(|listed| listed.iter().any(|has| *has != window.is_some())) {
                return Err(self.unsupported(
                    format!("layer_types other than sliding_window in a model of type \"{family}\""),
                    "remove layer_types",
                ));
            }
            return Ok((window, Vec::new()));
        }
        let used: bool = self.optional("use_sliding_window")?.unwrap_or(false);
        let window = window.filter(|_| used);
        let first = self.optional("max_window_layers")?.unwrap_or(MAX_WINDOW_LAYERS);
        if layers > super::LAYERS {
            return Ok((window, Vec::new())); // refused by the check that follows
        }
        let has = listed.unwrap_or_else(|| (0..layers).map(|layer| window.is_some() && layer >= first).collect());
        match window {
            None if has.contains(&true) => Err(self.wrong(
                "layer_types has \"sliding_attention\" without a window",
                "give sliding_window, and set use_sliding_window to true",
            )),
            // No layer has it: no window, so that equal models are equal configurations.
            Some(_) if !has.contains(&true) => Ok((None, Vec::new())),
            None => Ok((None, Vec::new())),
            Some(_) => Ok((window, has)),
        }
    }

    fn layer_types(&self, kinds: &[String], layers: usize) -> Result<Vec<bool>> {
        if kinds.len() != layers {
            return Err(self.wrong(
                format!("layer_types has {} entries for {layers} layers", kinds.len()),
                "give one for each layer",
            ));
        }
        kinds
            .iter()
            .map(|kind| match kind.as_str() {
                "full_attention" => Ok(false),
                "sliding_attention" => Ok(true),
                other => Err(self.unsupported(
                    format!("a layer of type {other:?}"),
                    "use a model with \"full_attention\" and \"sliding_attention\"",
                )),
            })
            .collect()
    }

    /// Theta and scaling, from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older). `tokens` is
    /// `max_position_embeddings`.
    fn rope(&mut self, tokens: usize) -> Result<(f64, RotaryScaling)> {
        let older_theta: Option<f64> = self.optional("rope_theta")?;
        let older: Option<Map<String, Value>> = self.optional("rope_scaling")?;
        let newer: Option<Map<String, Value>> = self.optional("rope_parameters")?;
        let partial: Option<f64> = self.optional("partial_rotary_factor")?;
        let pretraining: Option<usize> = self.optional("original_max_position_embeddings")?;
        // Where a file has both, transformers takes the older one.
        let fields = older.filter(|fields| !fields.is_empty()).or(newer).unwrap_or_default();
        if let Some((name, _)) = fields.iter().find(|(_, value)| value.is_object()) {
            return Err(self.unsupported(
                format!("rotary parameters of their own for {name:?}"),
                "use a model with the same in every layer",
            ));
        }
        let mut rope = Fields { path: self.path, fields };
        let theta = rope.optional("rope_theta")?.or(older_theta).unwrap_or(10_000.0);
        let newer_type: Option<String> = rope.optional("rope_type")?;
        let older_type: Option<String> = rope.optional("type")?;
        let kind = newer_type.or(older_type).unwrap_or_else(|| "default".into());
        if let Some(partial) = rope.optional("partial_rotary_factor")?.or(partial).filter(|partial| *partial != 1.0) {
            return Err(
                rope.unsupported(format!("partial_rotary_factor {partial}"), "use a model that rotates whole heads")
            );
        }
        let original = |rope: &mut Self| {
            let inside = rope.optional("original_max_position_embeddings")?;
            Ok::<usize, LlamaError>(pretraining.or(inside).unwrap_or(tokens))
        };
        let scaling = match kind.as_str() {
            "default" => RotaryScaling::Default,
            "linear" => RotaryScaling::Linear { factor: rope.required("factor")? },
            "llama3" => RotaryScaling::Llama3 {
                factor: rope.required("factor")?,
                low_freq_factor: rope.required("low_freq_factor")?,
                high_freq_factor: rope.required("high_freq_factor")?,
                original_max_position_embeddings: original(&mut rope)?,
            },
            "yarn" => {
                let original = original(&mut rope)?;
                if !rope.fields.contains_key("factor") {
                    return Err(rope.wrong("factor is missing", "give the field"));
                }
                RotaryScaling::Yarn {
                    factor: rope.optional("factor")?.unwrap_or(tokens as f64 / original as f64),
                    original_max_position_embeddings: original,
                    beta_fast: rope.optional("beta_fast")?.filter(|beta| *beta != 0.0).unwrap_or(32.0),
                    beta_slow: rope.optional("beta_slow")?.filter(|beta| *beta != 0.0).unwrap_or(1.0),
                    attention_factor: rope.optional("attention_factor")?,
                    mscale: rope.optional("mscale")?,
                    mscale_all_dim: rope.optional("mscale_all_dim")?,
                    truncate: rope.optional("truncate")?.unwrap_or(true),
                }
            }
            other => {
                return Err(rope.unsupported(
                    format!("rope_type {other:?}"),
                    "use a model with \"default\", \"linear\", \"llama3\" or \"yarn\"",
                ));
            }
        };
        Ok((theta, scaling))
    }
}
