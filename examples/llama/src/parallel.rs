//! Which techniques a model uses; the result is the same with any of them.

use burn_context_parallel::Error;
use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::offload::{Offload, Offloaded};
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
/// | `blocks_per_checkpoint` n | inputs of n - 1 of n blocks | the intermediates of n blocks at a time, in backward |
/// | `mlp_tile` | the feed-forward intermediates, 4 B L F, but for one tile | the feed-forward once more |
/// | `norm_tile` | the norms' intermediates, 3 B L E, but for one tile | the norms once more |
/// | `loss_tile` | logits and their gradients, 4 B L V in f32, but for one tile | the output layer once more |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelConfig {
    /// How attention runs.
    pub attention: AttentionScheme,
    /// Whether blocks are recomputed in the backward pass.
    pub checkpoint: bool,
    /// How many blocks are recomputed together, from the first one's input; 1 or more.
    pub blocks_per_checkpoint: usize,
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
        Self {
            attention: AttentionScheme::Single,
            checkpoint: false,
            blocks_per_checkpoint: 1,
            mlp_tile: None,
            norm_tile: None,
            loss_tile: None,
        }
    }

    /// Everything, for the longest sequences, on one rank or many.
    pub fn all() -> Self {
        Self {
            attention: AttentionScheme::UPipe { heads_per_stage: None },
            checkpoint: true,
            blocks_per_checkpoint: 1,
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
/// [`LlamaError::Core`](crate::LlamaError::Core) if the heads per stage are not in 1..=H, or there are no blocks in a checkpoint.
pub fn parallelize(mut model: Llama, parallel: &ParallelConfig) -> Result<Llama> {
    if parallel.blocks_per_checkpoint == 0 {
        return Err(Error::invalid("parallelize", "0 blocks per checkpoint", "use 1 or more").into());
    }
    let mut layers = Vec::with_capacity(model.layers.len());
    for layer in model.layers {
        let offload = layer.offload().cloned();
        let mut block = layer.inner.inner;
        // Attention talks to other ranks: inside everything that recomputes, so that it knows the scope it is run again in.
        block.self_attn = block.self_attn.with_scheme(parallel.attention)?;
        // Tiles inside the checkpoint: a block that is computed again is again computed tile by tile.
        block.mlp = TiledMlp::new(block.mlp.inner, parallel.mlp_tile);
        block.input_layernorm = TiledNorm::new(block.input_layernorm.inner, parallel.norm_tile);
        block.post_attention_layernorm = TiledNorm::new(block.post_attention_layernorm.inner, parallel.norm_tile);
        // Checkpointing wraps the block with all of the above, and offload what checkpointing keeps.
        let checkpointed = Checkpointed::new(block).enabled(parallel.checkpoint);
        layers.push(Offloaded::new(checkpointed).with(offload.as_ref()));
    }
    model.layers = layers;
    model.settings.blocks_per_checkpoint = parallel.blocks_per_checkpoint;
    // Outside the blocks, so nothing recomputes these but themselves.
    model.norm = TiledNorm::new(model.norm.inner, parallel.norm_tile);
    model.settings.loss_tile = parallel.loss_tile;
    Ok(model)
}

impl Llama {
    /// Lets what checkpoints keep wait outside the device: `offload` is this rank's engine, made on its thread.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_context_parallel::group::ProcessGroup;
    /// use burn_context_parallel::sequence::{Batch, SequenceLayout};
    /// use burn_upipe::offload::{Offload, OffloadConfig, saved_bytes};
    /// use llama::{Llama, LlamaConfig, ParallelConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let (blocks, tokens, width) = (3, 24, 16);
    /// let config = LlamaConfig::new(32, width, 40, blocks, 4, 2);
    /// let offload = Offload::new(OffloadConfig::new())?;
    /// let model = Llama::init(&config, &ParallelConfig::all(), &device)?.offload(&offload);
    ///
    /// let batch = Batch::from_rows(&[(0..tokens as i64).collect()])?;
    /// let shard = batch.shard(&SequenceLayout::contiguous(tokens, 1)?, 0, &device)?;
    /// let loss = model.loss(&shard, &ProcessGroup::single())?;
    /// assert_eq!(offload.stats().host_bytes, saved_bytes(blocks, 1, tokens, width, 4));
    /// let _grads = loss.mean.backward();
    /// assert_eq!(offload.stats().host_bytes, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn offload(mut self, offload: &Offload) -> Self {
        self.layers = self.layers.into_iter().map(|layer| layer.with(Some(offload))).collect();
        self
    }
}
