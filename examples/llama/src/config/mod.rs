//! A model's shape, from and to `config.json`.
//!
//! What a configuration asks for and this crate does not do is an error, never ignored.

mod family;
mod file;
mod shape;

use std::path::Path;

use burn_context_parallel::sequence::{RotaryFrequencies, RotaryScaling};
use serde_json::{Map, Value};

use crate::error::{LlamaError, Result};
use crate::files::read_text;

pub use family::Family;
pub(crate) use family::nearest;

/// Far above any model; a file with garbage in it must not take the machine's memory.
const LAYERS: usize = 10_000;

/// A model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Which architecture.
    pub family: Family,
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
    pub rope_scaling: RotaryScaling,
    /// How many tokens a token looks back on, itself included; `None` for all of them.
    pub sliding_window: Option<usize>,
    /// Which layers have that window; empty for all.
    pub window_layers: Vec<bool>,
    /// Whether the output layer is the embedding table.
    pub tie_word_embeddings: bool,
    /// Biases on q, k, v and output projections, in families where that is a choice; Qwen2 has those of q, k and v always.
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
            family: Family::Llama,
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
            rope_scaling: RotaryScaling::Default,
            sliding_window: None,
            window_layers: Vec::new(),
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
    /// [`LlamaError::File`] if it cannot be read or is no file, [`LlamaError::Config`] if it is not JSON or describes no model,
    /// [`LlamaError::Unsupported`] if the model is one that this crate does not build.
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_text(path, "give a Hugging Face model folder with a config.json")?;
        Self::parse(&text, path)
    }

    /// Parses the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), but for reading.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let config = file::parse(text, path)?;
        config.check_in(path)?;
        Ok(config)
    }

    /// The `config.json` in the newer layout, of the same family.
    pub fn to_json(&self) -> Value {
        file::to_json(self)
    }

    /// The window of a layer, in tokens; `None` if it looks back on all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.window_layers.get(layer).copied().unwrap_or(true))
    }

    /// Whether q, k and v projections have biases.
    pub fn qkv_bias(&self) -> bool {
        self.family.qkv_bias(self.attention_bias)
    }

    /// Whether the output projection has one.
    pub fn output_bias(&self) -> bool {
        self.attention_bias
    }

    /// The epsilon of norms on single heads of q and k, if there are any.
    pub fn qk_norm(&self) -> Option<f64> {
        self.family.has_qk_norm().then_some(self.rms_norm_eps)
    }

    /// Parameters of the model, each counted once: what `Module::num_params` answers, without making one.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::tensor::Device;
    /// use llama::{Family, Llama, LlamaConfig, ParallelConfig};
    ///
    /// let config = LlamaConfig { family: Family::Qwen2, ..LlamaConfig::new(256, 64, 176, 2, 8, 2) };
    /// let model = Llama::init(&config, &ParallelConfig::none(), &Device::flex())?;
    /// assert_eq!(config.num_params(), model.num_params());
    /// # Ok::<(), llama::LlamaError>(())
    /// ```
    pub fn num_params(&self) -> usize {
        // Each number is checked, their products are not: in 128 bits nothing overflows.
        let wide = |count: usize| count as u128;
        let dim = wide(self.head_dim);
        let (q, kv) = (wide(self.num_attention_heads) * dim, wide(self.num_key_value_heads) * dim);
        let (e, f) = (wide(self.hidden_size), wide(self.intermediate_size));
        let when = |has: bool, count: u128| if has { count } else { 0 };
        let attention = 2 * e * q
            + 2 * e * kv
            + when(self.qkv_bias(), q + 2 * kv)
            + when(self.output_bias(), e)
            + when(self.qk_norm().is_some(), 2 * dim);
        let mlp = 3 * e * f + when(self.mlp_bias, 2 * f + e);
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        let all = tables * wide(self.vocab_size) * e + wide(self.num_hidden_layers) * (attention + mlp + 2 * e) + e;
        usize::try_from(all).unwrap_or(usize::MAX)
    }

    /// The rotary frequencies of this model.
    ///
    /// # Errors
    ///
    /// [`LlamaError::Core`] if `head_dim` is odd, theta not a positive number, or the scaling's numbers do not fit.
    pub fn frequencies(&self) -> Result<RotaryFrequencies> {
        Ok(RotaryFrequencies::scaled(self.head_dim, self.rope_theta, &self.rope_scaling)?)
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
        if let Err(error) = self.frequencies() {
            return wrong(format!("rotary parameters {:?}: {error}", self.rope_scaling), "use a pretrained model's");
        }
        self.check_family(path)
    }

    /// What a family does not have.
    fn check_family(&self, path: &Path) -> Result<()> {
        let wrong = |problem: String, remedy: &str| Err(LlamaError::config(path, problem, remedy));
        let family = self.family;
        if self.attention_bias && matches!(family, Family::Mistral | Family::Qwen2) {
            return wrong(format!("attention_bias in a model of type \"{family}\""), "set it to false");
        }
        if self.mlp_bias && family != Family::Llama {
            return wrong(format!("mlp_bias in a model of type \"{family}\""), "set it to false");
        }
        if self.sliding_window.is_some() && family == Family::Llama {
            return wrong(
                "sliding_window in a model of type \"llama\"".into(),
                "set it to None, or use another family",
            );
        }
        if self.sliding_window == Some(0) {
            return wrong("sliding_window is 0".into(), "use at least 1, or null for no window");
        }
        let listed = self.window_layers.len();
        if listed != 0 && (listed != self.num_hidden_layers || !family.has_window_layers()) {
            return wrong(
                format!(
                    "a list of {listed} layers with a window for {} layers of type \"{family}\"",
                    self.num_hidden_layers
                ),
                "list every layer of a Qwen model, or none",
            );
        }
        Ok(())
    }
}
