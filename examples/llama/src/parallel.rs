//! Which techniques a model uses; the result is the same with any of them.

use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::tiling::{TiledMlp, TiledNorm};
pub use burn_upipe::upipe::AttentionScheme;

use crate::error::Result;
use crate::model::Llama;

/// Switches every technique on its own. Lengths are in tokens of a rank's shard.
///
/// | field | saves | costs |
/// |---|---|---|
/// | `attention` | whole q, k, v and their exchange buffers (U-Pipe) | projections again in backward |
/// | `checkpoint` | all of a block's intermediates but its input, B L E | one more forward pass |
/// | `mlp_tile` | the feed-forward intermediates, 4 B L F, but for one tile | the feed-forward once more |
/// | `norm_tile` | the norms' intermediates, 3 B L E, but for one tile | the norms once more |
/// | `loss_tile` | logits and their gradients, 4 B L V in f32, but for one tile | the output layer once more |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelConfig {
    /// How attention runs.
    pub attention: AttentionScheme,
    /// Whether blocks are recomputed in the backward pass.
    pub checkpoint: bool,
    /// Tokens a tile of the feed-forward; `None` takes all at once.
    pub mlp_tile: Option<usize>,
    /// Tokens a tile of the norms; `None` takes all at once.
    pub norm_tile: Option<usize>,
    /// Tokens a tile of output layer and loss; `None` takes all at once.
    pub loss_tile: Option<usize>,
}

impl ParallelConfig {
    /// One device, nothing recomputed: the fastest where memory suffices.
    pub fn none() -> Self {
        Self { attention: AttentionScheme::Single, checkpoint: false, mlp_tile: None, norm_tile: None, loss_tile: None }
    }

    /// Everything, for the longest sequences, on one rank or many.
    pub fn all() -> Self {
        Self {
            attention: AttentionScheme::UPipe { heads_per_stage: None },
            checkpoint: true,
            // Large enough to keep matrix products efficient, small beside a sequence that needs this.
            mlp_tile: Some(2048),
            norm_tile: Some(8192),
            // Logits are V wide: 512 tokens of 128k entries are 256 MiB in f32.
            loss_tile: Some(512),
        }
    }
}

impl Default for ParallelConfig {
    /// [`none`](Self::none).
    fn default() -> Self {
        Self::none()
    }
}

/// Applies `parallel` to a model, whatever it used before; weights stay as they are.
///
/// # Errors
///
/// [`LlamaError::Core`](crate::LlamaError::Core) if the heads per stage are not in 1..=H.
pub fn parallelize(mut model: Llama, parallel: &ParallelConfig) -> Result<Llama> {
    let mut layers = Vec::with_capacity(model.layers.len());
    for layer in model.layers {
        let mut block = layer.inner;
        // Attention talks to other ranks: inside everything that recomputes, so that it knows the scope it is run again in.
        block.self_attn = block.self_attn.with_scheme(parallel.attention)?;
        // Tiles inside the checkpoint: a block that is computed again is again computed tile by tile.
        block.mlp = TiledMlp::new(block.mlp.inner, parallel.mlp_tile);
        block.input_layernorm = TiledNorm::new(block.input_layernorm.inner, parallel.norm_tile);
        block.post_attention_layernorm = TiledNorm::new(block.post_attention_layernorm.inner, parallel.norm_tile);
        // Checkpointing last: it wraps the block with all of the above.
        layers.push(Checkpointed::new(block).enabled(parallel.checkpoint));
    }
    model.layers = layers;
    // Outside the blocks, so nothing recomputes these but themselves.
    model.norm = TiledNorm::new(model.norm.inner, parallel.norm_tile);
    model.settings.loss_tile = parallel.loss_tile;
    Ok(model)
}
