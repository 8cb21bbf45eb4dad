//! Parameter names: Hugging Face's and the module's, in one place for loading, saving and looking at gradients.
//!
//! ```text
//! model.layers.0.mlp.gate_proj.weight  [out, in]   <->   layers.0.inner.inner.mlp.inner.gate_proj.weight  [in, out]
//! model.norm.weight                                <->   norm.inner.gamma
//! lm_head.weight                       [out, in]   <->   lm_head.weight                                   [in, out]
//! ```
//!
//! A wrapper (offload, checkpointing, tiling) is a level named `inner`. Transposing and norms' `gamma` are done by burn-store's PyTorch
//! adapters where data is moved.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use burn_store::KeyRemapper;

use crate::config::LlamaConfig;
use crate::error::Result;
use crate::model::Llama;

/// Hugging Face -> module, in this order.
const TO_MODULE: [(&str, &str); 5] = [
    (r"^(model\.layers\.\d+)\.", "$1.inner.inner."),
    (r"^(model\..*\.(?:input_layernorm|post_attention_layernorm|mlp))\.", "$1.inner."),
    (r"^model\.norm\.", "model.norm.inner."),
    // Without the prefix a name is not Hugging Face's: marked, or it could meet a parameter of ours by chance.
    (r"^(embed_tokens|layers|norm)\.", "?.$1."),
    (r"^model\.", ""),
];

/// Module -> Hugging Face, in this order.
const TO_HF: [(&str, &str); 4] = [
    (r"(?:\.inner)+\.", "."),
    (r"\.gamma$", ".weight"),
    (r"^(embed_tokens|layers|norm)\.", "model.$1."),
    (r"^\?\.", ""),
];

pub(crate) fn to_module() -> KeyRemapper {
    KeyRemapper::from_patterns(TO_MODULE.to_vec()).expect("constant patterns")
}

pub(crate) fn to_hf() -> KeyRemapper {
    KeyRemapper::from_patterns(TO_HF.to_vec()).expect("constant patterns")
}

/// The Hugging Face name of the parameter at a module path.
///
/// ```
/// assert_eq!(llama::hf_name("layers.3.inner.inner.mlp.inner.up_proj.weight"), "model.layers.3.mlp.up_proj.weight");
/// assert_eq!(llama::hf_name("norm.inner.gamma"), "model.norm.weight");
/// assert_eq!(llama::hf_name("lm_head.weight"), "lm_head.weight");
/// ```
pub fn hf_name(path: &str) -> String {
    rename(path, &to_hf())
}

fn rename(name: &str, remapper: &KeyRemapper) -> String {
    remapper
        .patterns
        .iter()
        .fold(name.to_owned(), |name, (pattern, to)| pattern.replace_all(&name, to.as_str()).into_owned())
}

/// Whether Hugging Face has this weight transposed.
pub(crate) fn is_transposed(hf_name: &str) -> bool {
    hf_name.ends_with("_proj.weight") || hf_name == "lm_head.weight"
}

/// Who looks at parameters under their Hugging Face names.
pub(crate) trait Look {
    fn look<const D: usize>(&mut self, name: String, param: &Param<Tensor<D>>);
}

/// Shows every float parameter of the model; one that is used twice comes twice.
pub(crate) fn show(model: &Llama, to: &mut impl Look) {
    model.visit(&mut Walk { remapper: to_hf(), path: Vec::new(), to });
}

struct Walk<'a, L> {
    remapper: KeyRemapper,
    path: Vec<String>,
    to: &'a mut L,
}

impl<L: Look> ModuleVisitor for Walk<'_, L> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.to.look(rename(&self.path.join("."), &self.remapper), param);
    }
}

/// Every parameter of a model of this shape, under its Hugging Face name.
///
/// Thousands of layers are named without being built: they are all alike.
pub(crate) fn parameters(config: &LlamaConfig, device: &Device) -> Result<BTreeSet<String>> {
    let mut first = LlamaConfig { num_hidden_layers: 1, ..config.clone() };
    first.window_layers.truncate(1);
    let mut names = BTreeSet::new();
    show(&Llama::lazy(&first, device)?, &mut names);
    let of_a_layer: Vec<String> =
        names.iter().filter_map(|name| name.strip_prefix("model.layers.0.")).map(str::to_owned).collect();
    for layer in 1..config.num_hidden_layers {
        names.extend(of_a_layer.iter().map(|name| format!("model.layers.{layer}.{name}")));
    }
    Ok(names)
}

impl Look for BTreeSet<String> {
    fn look<const D: usize>(&mut self, name: String, _: &Param<Tensor<D>>) {
        self.insert(name);
    }
}

/// Collects gradients.
struct Named<'a> {
    grads: &'a GradientsParams,
    found: BTreeMap<String, TensorData>,
    seen: Vec<ParamId>,
}

impl Look for Named<'_> {
    fn look<const D: usize>(&mut self, name: String, param: &Param<Tensor<D>>) {
        if self.seen.contains(&param.id) {
            return;
        }
        self.seen.push(param.id);
        let Some(grad) = self.grads.get::<D>(param.id) else { return };
        let grad = if D == 2 && is_transposed(&name) { grad.transpose() } else { grad };
        self.found.insert(name, grad.into_data());
    }
}

/// Every gradient under its parameter's Hugging Face name, in Hugging Face's orientation ([out, in] for linear layers).
///
/// Parameters without a gradient are absent.
pub fn named_gradients(model: &Llama, grads: &GradientsParams) -> BTreeMap<String, TensorData> {
    let mut named = Named { grads, found: BTreeMap::new(), seen: Vec::new() };
    show(model, &mut named);
    named.found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_to_the_module_and_back() {
        let names = [
            "model.embed_tokens.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.11.self_attn.q_proj.bias",
            "model.layers.11.post_attention_layernorm.weight",
            "model.layers.1.mlp.down_proj.weight",
            "model.norm.weight",
            "lm_head.weight",
        ];
        for name in names {
            assert_eq!(rename(&rename(name, &to_module()), &to_hf()), name);
        }
    }

    #[test]
    fn parameters_are_those_of_the_whole_model() {
        let mut config = LlamaConfig::new(16, 8, 12, 3, 2, 1);
        config.attention_bias = true;
        let device = Device::flex();
        let mut all = BTreeSet::new();
        show(&Llama::lazy(&config, &device).unwrap(), &mut all);
        assert_eq!(parameters(&config, &device).unwrap(), all);
        // Nine weights and four biases a layer, two tables and a norm.
        assert_eq!(all.len(), 3 * 13 + 3);
    }

    #[test]
    fn a_name_without_prefix_is_not_taken_for_ours() {
        for name in ["norm.weight", "layers.0.mlp.up_proj.weight", "embed_tokens.weight"] {
            let path = rename(name, &to_module());
            assert!(path.starts_with('?'));
            assert_eq!(rename(&path, &to_hf()), name);
        }
    }
}
