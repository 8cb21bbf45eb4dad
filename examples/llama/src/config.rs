//! `config.json`: read in both layouts of transformers, checked, and written in the newer one.
//!
//! What a configuration asks for and this crate does not do is an error, never ignored.

use std::path::Path;

use burn_context_parallel::sequence::RotaryFrequencies;
use serde_json::{Map, Value, json};

use crate::error::{LlamaError, Result};
use crate::rope::{self, RopeScaling};

/// A Llama model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Vocabulary V.
    pub vocab_size: usize,
    /// Model width E.
    pub hidden_size: usize,
    /// Feed-forward width F.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Query heads H.
    pub num_attention_heads: usize,
    /// Key/value heads G, a divisor of H.
    pub num_key_value_heads: usize,
    /// Head dimension D; H D need not be E.
    pub head_dim: usize,
    /// The longest sequence of pretraining, in tokens; nothing here is limited by it.
    pub max_position_embeddings: usize,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How they are rescaled.
    pub rope_scaling: RopeScaling,
    /// Whether the output layer is the embedding table.
    pub tie_word_embeddings: bool,
    /// Biases on q, k, v and output projections.
    pub attention_bias: bool,
    /// Biases on the feed-forward projections.
    pub mlp_bias: bool,
    /// What else the file had (token ids and the like): kept for writing.
    pub other: Map<String, Value>,
}

impl LlamaConfig {
    /// A configuration of the given sizes with Llama's defaults: untied, no biases, theta 10000.
    ///
    /// ```
    /// use llama::LlamaConfig;
    ///
    /// let config = LlamaConfig::new(256, 64, 176, 2, 8, 2);
    /// assert_eq!(config.head_dim, 8);
    /// assert!(config.check().is_ok());
    /// assert!(LlamaConfig { num_key_value_heads: 3, ..config }.check().is_err());
    /// ```
    pub fn new(
        vocab_size: usize,
        hidden_size: usize,
        intermediate_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        num_key_value_heads: usize,
    ) -> Self {
        Self {
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim: hidden_size.checked_div(num_attention_heads).unwrap_or(0),
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            other: Map::new(),
        }
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    ///
    /// [`LlamaError::File`] if it cannot be read, [`LlamaError::Config`] if it is not JSON or describes no model,
    /// [`LlamaError::Unsupported`] if the model is one that this crate does not build.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| LlamaError::file(path, error, "give a Hugging Face model folder with a config.json"))?;
        Self::parse(&text, path)
    }

    /// Parses the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), but for reading.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let json: Value = serde_json::from_str(text)
            .map_err(|error| LlamaError::config(path, format!("not JSON: {error}"), "save the model again"))?;
        let Value::Object(fields) = json else {
            return Err(LlamaError::config(path, "not a JSON object", "save the model again"));
        };
        let mut fields = Fields { path, fields };
        fields.refuse_unbuilt()?;

        let hidden_size = fields.required("hidden_size")?;
        let num_attention_heads: usize = fields.required("num_attention_heads")?;
        let head_dim = match fields.optional("head_dim")? {
            Some(head_dim) => head_dim,
            None if num_attention_heads > 0 && hidden_size % num_attention_heads == 0 => {
                hidden_size / num_attention_heads
            }
            None => {
                return Err(fields.wrong(
                    format!("hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"),
                    "give head_dim",
                ));
            }
        };
        let (rope_theta, rope_scaling) = fields.rope()?;
        let config = Self {
            vocab_size: fields.required("vocab_size")?,
            hidden_size,
            intermediate_size: fields.required("intermediate_size")?,
            num_hidden_layers: fields.required("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: fields.optional("num_key_value_heads")?.unwrap_or(num_attention_heads),
            head_dim,
            max_position_embeddings: fields.optional("max_position_embeddings")?.unwrap_or(2048),
            rms_norm_eps: fields.optional("rms_norm_eps")?.unwrap_or(1e-6),
            initializer_range: fields.optional("initializer_range")?.unwrap_or(0.02),
            rope_theta,
            rope_scaling,
            tie_word_embeddings: fields.optional("tie_word_embeddings")?.unwrap_or(false),
            attention_bias: fields.optional("attention_bias")?.unwrap_or(false),
            mlp_bias: fields.optional("mlp_bias")?.unwrap_or(false),
            other: fields.fields,
        };
        config.check_in(path)?;
        Ok(config)
    }

    /// The `config.json` in the newer layout.
    pub fn to_json(&self) -> Value {
        let mut rope = json!({ "rope_type": "default", "rope_theta": self.rope_theta });
        if let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
            self.rope_scaling
        {
            rope = json!({
                "rope_type": "llama3",
                "rope_theta": self.rope_theta,
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            });
        }
        let own = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
        });
        let mut all = self.other.clone();
        if let Value::Object(own) = own {
            all.extend(own);
        }
        Value::Object(all)
    }

    /// The rotary frequencies of this model.
    ///
    /// # Errors
    ///
    /// [`LlamaError::Core`] if `head_dim` is odd or theta not a positive number.
    pub fn frequencies(&self) -> Result<RotaryFrequencies> {
        Ok(rope::frequencies(self.head_dim, self.rope_theta, &self.rope_scaling)?)
    }

    /// Checks that the numbers describe a model.
    ///
    /// # Errors
    ///
    /// [`LlamaError::Config`] with the numbers that do not fit.
    pub fn check(&self) -> Result<()> {
        self.check_in(Path::new("config.json"))
    }

    fn check_in(&self, path: &Path) -> Result<()> {
        // Far above any model; a file with garbage in it must not take the machine's memory.
        const LAYERS: usize = 10_000;
        const HEADS: usize = 10_000;
        const HEAD_DIM: usize = 1 << 16;
        let wrong = |problem: String, remedy: &str| Err(LlamaError::config(path, problem, remedy));
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
        ] {
            if value == 0 || value > u32::MAX as usize {
                return wrong(format!("{name} is {value}"), "use a positive number below 2^32");
            }
        }
        if self.num_hidden_layers > LAYERS {
            return wrong(format!("num_hidden_layers is {}", self.num_hidden_layers), "use at most 10000");
        }
        if self.num_attention_heads > HEADS {
            return wrong(format!("num_attention_heads is {}", self.num_attention_heads), "use at most 10000");
        }
        if self.head_dim > HEAD_DIM {
            return wrong(format!("head_dim is {}", self.head_dim), "use at most 65536");
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return wrong(
                format!("{} query heads for {} key/value heads", self.num_attention_heads, self.num_key_value_heads),
                "num_key_value_heads must divide num_attention_heads",
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong(format!("head_dim is {}", self.head_dim), "rotary pairs need an even head_dim");
        }
        for (name, value) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)] {
            if !(value.is_finite() && value > 0.0) {
                return wrong(format!("{name} is {value}"), "use a positive number");
            }
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            return wrong(format!("initializer_range is {}", self.initializer_range), "use 0.02");
        }
        if let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
            self.rope_scaling
        {
            let positive = |value: f32| value.is_finite() && value > 0.0;
            let fits = positive(factor)
                && positive(low_freq_factor)
                && positive(high_freq_factor)
                && high_freq_factor > low_freq_factor
                && original_max_position_embeddings > 0;
            if !fits {
                return wrong(
                    format!(
                        "llama3 rotary scaling with factor {factor}, low_freq_factor {low_freq_factor}, high_freq_factor \
                         {high_freq_factor}, original_max_position_embeddings {original_max_position_embeddings}"
                    ),
                    "all must be positive, and high_freq_factor above low_freq_factor",
                );
            }
        }
        Ok(())
    }
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

    /// Takes a field; null counts as absent, as in transformers.
    fn optional<T: serde::de::DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>> {
        let Some(value) = self.fields.remove(name).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let shown = value.to_string();
        serde_json::from_value(value)
            .map(Some)
            .map_err(|error| self.wrong(format!("{name} is {shown}: {error}"), "correct the field"))
    }

    fn required<T: serde::de::DeserializeOwned>(&mut self, name: &str) -> Result<T> {
        self.optional(name)?.ok_or_else(|| self.wrong(format!("{name} is missing"), "give the field"))
    }

    fn unsupported(&self, what: impl Into<String>, remedy: impl Into<String>) -> LlamaError {
        LlamaError::unsupported(self.path, what, remedy)
    }

    /// Everything that would change the result and is not built.
    fn refuse_unbuilt(&mut self) -> Result<()> {
        let model_type: String = self.required("model_type")?;
        if model_type != "llama" {
            return Err(self.unsupported(format!("model_type {model_type:?}"), "use a model of type \"llama\""));
        }
        let act: String = self.optional("hidden_act")?.unwrap_or_else(|| "silu".into());
        if act != "silu" {
            return Err(self.unsupported(format!("hidden_act {act:?}"), "use a model with \"silu\""));
        }
        let dropout: f64 = self.optional("attention_dropout")?.unwrap_or(0.0);
        if dropout != 0.0 {
            return Err(self.unsupported(format!("attention_dropout {dropout}"), "set it to 0.0"));
        }
        for (name, remedy) in [
            ("sliding_window", "use a model without a window, or set it to null"),
            ("quantization_config", "use the model's unquantised weights"),
        ] {
            if let Some(value) = self.optional::<Value>(name)? {
                return Err(self.unsupported(format!("{name} {value}"), remedy));
            }
        }
        Ok(())
    }

    /// Theta and scaling, from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older).
    fn rope(&mut self) -> Result<(f64, RopeScaling)> {
        let older_theta: Option<f64> = self.optional("rope_theta")?;
        let older: Option<Map<String, Value>> = self.optional("rope_scaling")?;
        let newer: Option<Map<String, Value>> = self.optional("rope_parameters")?;
        let fields = newer.or(older).unwrap_or_default();
        let mut rope = Fields { path: self.path, fields };
        let theta = rope.optional("rope_theta")?.or(older_theta).unwrap_or(10_000.0);
        let newer_type: Option<String> = rope.optional("rope_type")?;
        let older_type: Option<String> = rope.optional("type")?;
        let kind = newer_type.or(older_type).unwrap_or_else(|| "default".into());
        if let Some(partial) = rope.optional::<f64>("partial_rotary_factor")?.filter(|partial| *partial != 1.0) {
            return Err(
                rope.unsupported(format!("partial_rotary_factor {partial}"), "use a model that rotates whole heads")
            );
        }
        let scaling = match kind.as_str() {
            "default" => RopeScaling::Default,
            "llama3" => RopeScaling::Llama3 {
                factor: rope.required("factor")?,
                low_freq_factor: rope.required("low_freq_factor")?,
                high_freq_factor: rope.required("high_freq_factor")?,
                original_max_position_embeddings: rope.required("original_max_position_embeddings")?,
            },
            other => {
                return Err(
                    rope.unsupported(format!("rope_type {other:?}"), "use a model with \"default\" or \"llama3\"")
                );
            }
        };
        Ok((theta, scaling))
    }
}
