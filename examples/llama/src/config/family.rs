//! The model families, and what their configuration classes take for granted.

use std::fmt;

/// Which architecture a checkpoint has (`model_type`).
///
/// | | q, k, v biases | q/k norms | window |
/// |---|---|---|---|
/// | `Llama` | `attention_bias`, and one on the output | no | no |
/// | `Mistral` | no | no | `sliding_window` in every layer, null for none |
/// | `Qwen2` | always; never on the output | no | `use_sliding_window`, from layer `max_window_layers` or by `layer_types` |
/// | `Qwen3` | `attention_bias`, and one on the output | yes | as `Qwen2` |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Llama 2 and 3, and what is built like them (SmolLM2, Yi, ...).
    #[default]
    Llama,
    /// Mistral 7B.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, the dense ones.
    Qwen3,
}

impl Family {
    /// All that are built.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// As `model_type` has it.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// As `architectures` has it.
    pub(super) fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// The family of a `model_type`, or how to say that there is none: the built ones, and the nearest.
    pub(super) fn parse(model_type: &str) -> Result<Self, String> {
        if let Some(family) = Self::ALL.into_iter().find(|family| family.model_type() == model_type) {
            return Ok(family);
        }
        let built = Self::ALL.map(Self::model_type);
        let near = nearest(model_type, built).map(|name| format!("; did you mean {name:?}?")).unwrap_or_default();
        Err(format!("use a model of type {}{near}", built.map(|name| format!("{name:?}")).join(", ")))
    }

    /// Whether q, k and v have biases, given the file's `attention_bias`.
    pub(super) fn qkv_bias(self, attention_bias: bool) -> bool {
        match self {
            Self::Qwen2 => true,
            Self::Llama | Self::Mistral | Self::Qwen3 => attention_bias,
        }
    }

    /// Whether queries and keys are normed head by head.
    pub(super) fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }

    /// Whether a window is a matter of layers.
    pub(super) fn has_window_layers(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen3)
    }

    /// What a field means that the file does not have.
    pub(super) fn defaults(self) -> Defaults {
        match self {
            Self::Llama => {
                Defaults { kv_heads: None, head_dim: None, max_position_embeddings: 2048, sliding_window: None }
            }
            Self::Mistral => Defaults {
                kv_heads: Some(8),
                head_dim: None,
                max_position_embeddings: 4096 * 32,
                sliding_window: Some(4096),
            },
            Self::Qwen2 => Defaults {
                kv_heads: Some(32),
                head_dim: None,
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
            },
            Self::Qwen3 => Defaults {
                kv_heads: Some(32),
                head_dim: Some(128),
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
            },
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

/// What transformers' configuration classes have for absent fields, where families differ. (All have `rms_norm_eps` 1e-6,
/// `initializer_range` 0.02, `rope_theta` 10000, untied embeddings, no `attention_bias`, `max_window_layers` 28.) A null
/// `num_key_value_heads` is as many as query heads.
pub(super) struct Defaults {
    /// `None`: as many as query heads.
    pub kv_heads: Option<usize>,
    /// `None`: hidden size over query heads.
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub sliding_window: Option<usize>,
}

/// The candidate most like `name`, if there is one that is alike at all.
pub(crate) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::levenshtein(name, candidate), candidate))
        .min()
        .filter(|(distance, _)| *distance <= name.len() / 3 + 1)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_type_is_told_what_is_built_and_what_is_near() {
        let text = Family::parse("qwen4").unwrap_err();
        assert!(
            text.contains("\"llama\", \"mistral\", \"qwen2\", \"qwen3\"") && text.contains("did you mean"),
            "{text}"
        );
        assert!(!Family::parse("deepseek_v3").unwrap_err().contains("did you mean"));
        assert_eq!(Family::ALL.map(|family| Family::parse(family.model_type()).unwrap()), Family::ALL);
    }
}
