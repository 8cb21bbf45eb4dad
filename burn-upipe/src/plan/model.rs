//! A transformer's shape, as far as memory and time depend on it.

/// A decoder of the Llama kind: blocks of norm, grouped-query attention, norm and gated feed-forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// What people call it.
    pub name: String,
    /// Tokens of the vocabulary, V.
    pub vocab: usize,
    /// Model width, E.
    pub width: usize,
    /// Feed-forward width, F.
    pub inner: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key/value heads, G.
    pub kv_heads: usize,
    /// Head dimension, D.
    pub head_dim: usize,
    /// Whether the embedding table is the output layer, too.
    pub tied: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the heads of q and k are normed.
    pub qk_norm: bool,
}

impl ModelShape {
    /// Elements of one block's matrices.
    pub fn block_matrices(&self) -> usize {
        let Self { width, inner, heads, kv_heads, head_dim, .. } = self;
        2 * width * heads * head_dim + 2 * width * kv_heads * head_dim + 3 * width * inner
    }

    /// Elements of one block's vectors: norms and biases.
    pub fn block_vectors(&self) -> usize {
        let bias = if self.qkv_bias { (self.heads + 2 * self.kv_heads) * self.head_dim } else { 0 };
        let norms = if self.qk_norm { 2 * self.head_dim } else { 0 };
        2 * self.width + bias + norms
    }

    /// Elements of the embedding table.
    pub fn table(&self) -> usize {
        self.vocab * self.width
    }

    /// Elements of the output layer that are not the embedding table's.
    pub fn head(&self) -> usize {
        if self.tied { 0 } else { self.table() }
    }

    /// All parameters.
    pub fn parameters(&self) -> usize {
        self.table() + self.head() + self.width + self.layers * (self.block_matrices() + self.block_vectors())
    }
}
