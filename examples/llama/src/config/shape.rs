//! What a planner asks of a configuration.

use burn_upipe::plan::ModelShape;

use super::LlamaConfig;

impl LlamaConfig {
    /// The shape on which a step's memory and time depend. Windows are left out: a planner takes attention over the whole sequence.
    /// So are biases of output and feed-forward projections, which are a few vectors.
    ///
    /// ```
    /// use llama::LlamaConfig;
    ///
    /// let config = LlamaConfig::new(256, 64, 176, 2, 8, 2);
    /// assert_eq!(config.shape("tiny").parameters(), config.num_params());
    /// ```
    pub fn shape(&self, name: &str) -> ModelShape {
        ModelShape {
            name: name.to_owned(),
            vocab: self.vocab_size,
            width: self.hidden_size,
            inner: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            tied: self.tie_word_embeddings,
            qkv_bias: self.qkv_bias(),
            qk_norm: self.qk_norm().is_some(),
        }
    }
}
