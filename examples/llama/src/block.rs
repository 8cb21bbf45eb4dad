//! One transformer layer.
//!
//! B batch, L local sequence, E model width, F feed-forward width.

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::sequence::RotaryFrequencies;
use burn_upipe::tiling::{TiledMlp, TiledNorm};
use burn_upipe::upipe::{UPipeAttention, UPipeAttentionConfig};

use crate::config::LlamaConfig;
use crate::error::Result;

/// Attention and feed-forward, each after a norm and beside a residual.
///
/// ```text
/// h = x + attention(norm(x)),  y = h + mlp(norm(h))
/// ```
#[derive(Module, Debug)]
pub struct Block {
    /// Before attention.
    pub input_layernorm: TiledNorm<RmsNorm>,
    /// Self-attention.
    pub self_attn: UPipeAttention,
    /// Before the feed-forward.
    pub post_attention_layernorm: TiledNorm<RmsNorm>,
    /// The feed-forward.
    pub mlp: TiledMlp<Mlp>,
}

/// The gated feed-forward.
///
/// ```text
/// y = (silu(x Wg) * x Wu) Wd
/// ```
#[derive(Module, Debug)]
pub struct Mlp {
    /// [E, F].
    pub gate_proj: Linear,
    /// [E, F].
    pub up_proj: Linear,
    /// [F, E].
    pub down_proj: Linear,
}

impl Block {
    /// A block with random weights that are not drawn yet: loading replaces them before they exist.
    pub(crate) fn lazy(
        config: &LlamaConfig,
        layer: usize,
        rotary: &RotaryFrequencies,
        device: &Device,
    ) -> Result<Self> {
        let norm = || TiledNorm::new(norm(config, device), None);
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let (heads, kv_heads, dim) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
        let (qkv_bias, output_bias) = (config.qkv_bias(), config.output_bias());
        let mut self_attn = UPipeAttentionConfig::new(width, heads, kv_heads, dim)
            .with_qkv_bias(qkv_bias)
            .with_output_bias(output_bias)
            .with_qk_norm(config.qk_norm())
            .with_window(config.window(layer))
            .init(device)?
            .with_rotary(rotary.clone())?;
        // The module knows no initialisation but its own; these models' is normal.
        self_attn.q_proj = linear(config, width, heads * dim, qkv_bias, device);
        self_attn.k_proj = linear(config, width, kv_heads * dim, qkv_bias, device);
        self_attn.v_proj = linear(config, width, kv_heads * dim, qkv_bias, device);
        self_attn.o_proj = linear(config, heads * dim, width, output_bias, device);
        let mlp = Mlp {
            gate_proj: linear(config, width, inner, config.mlp_bias, device),
            up_proj: linear(config, width, inner, config.mlp_bias, device),
            down_proj: linear(config, inner, width, config.mlp_bias, device),
        };
        Ok(Self { input_layernorm: norm(), self_attn, post_attention_layernorm: norm(), mlp: TiledMlp::new(mlp, None) })
    }

    /// One layer over the sequence at hand.
    ///
    /// # Shapes
    ///
    /// [B, L, E] -> [B, L, E].
    ///
    /// # Panics
    ///
    /// [Raises](burn_context_parallel::raise) what attention refuses.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let normed = self.input_layernorm.forward(x.clone(), |norm, x| norm.forward(x));
        let x = x + self.self_attn.forward(normed);
        let normed = self.post_attention_layernorm.forward(x.clone(), |norm, x| norm.forward(x));
        x + self.mlp.forward(normed, |mlp, x| mlp.forward(x))
    }
}

impl Mlp {
    /// The feed-forward; every token on its own.
    ///
    /// # Shapes
    ///
    /// [B, n, E] -> [B, n, E].
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let gate = silu(self.gate_proj.forward(x.clone()));
        self.down_proj.forward(gate * self.up_proj.forward(x))
    }
}

pub(crate) fn norm(config: &LlamaConfig, device: &Device) -> RmsNorm {
    RmsNormConfig::new(config.hidden_size).with_epsilon(config.rms_norm_eps).init(device)
}

pub(crate) fn linear(config: &LlamaConfig, from: usize, to: usize, bias: bool, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(from, to).with_bias(bias).with_initializer(normal(config)).init(device);
    if bias {
        linear.bias = Some(Initializer::Zeros.init([to], device));
    }
    linear
}

pub(crate) fn normal(config: &LlamaConfig) -> Initializer {
    Initializer::Normal { mean: 0.0, std: config.initializer_range }
}
