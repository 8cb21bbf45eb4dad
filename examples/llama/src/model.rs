//! The model: embedding, blocks, norm, output layer.
//!
//! B batch, L local sequence, E model width, V vocabulary.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, RmsNorm};
use burn::tensor::{Device, Int, Tensor};
use burn_context_parallel::attention::{SequenceContext, scope};
use burn_context_parallel::fsdp::embedding;
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{IGNORE_INDEX, Shard};
use burn_context_parallel::{Error, OrRaise, catch, phase};
use burn_upipe::checkpoint::{Checkpointed, forward_group};
use burn_upipe::offload::Offloaded;
use burn_upipe::tiling::{LossShare, TiledNorm, TokenLoss, tiled_cross_entropy, tiled_cross_entropy_over};

use crate::block::{self, Block};
use crate::config::LlamaConfig;
use crate::error::Result;
use crate::parallel::{ParallelConfig, parallelize};

/// A Llama language model.
///
/// Positions come from the sequence scope in which it runs, or outside any scope count from 0.
#[derive(Module, Debug)]
pub struct Llama {
    /// Token embeddings, [V, E].
    pub embed_tokens: Embedding,
    /// The blocks.
    pub layers: Vec<Offloaded<Checkpointed<Block>>>,
    /// Before the output layer.
    pub norm: TiledNorm<RmsNorm>,
    /// The output layer, [E, V]; without it the embedding table serves (tied).
    pub lm_head: Option<Linear>,
    #[module(skip)]
    pub(crate) settings: Settings,
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub config: LlamaConfig,
    pub loss_tile: Option<usize>,
    pub blocks_per_checkpoint: usize,
}

impl Llama {
    /// A model with random weights: normal with the configuration's deviation, norms 1, biases 0.
    ///
    /// Weights are drawn here, so that clones (a rank each) have the same.
    ///
    /// # Errors
    ///
    /// [`LlamaError::Config`](crate::LlamaError::Config) if the configuration describes no model,
    /// [`LlamaError::Core`](crate::LlamaError::Core) if `parallel` does not fit it.
    pub fn init(config: &LlamaConfig, parallel: &ParallelConfig, device: &Device) -> Result<Self> {
        struct Draw;
        impl ModuleVisitor for Draw {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                param.base();
            }
        }
        let model = Self::undrawn(config, parallel, device)?;
        model.visit(&mut Draw);
        Ok(model)
    }

    /// As [`init`](Self::init), but weights are drawn when they are first used: for whoever will give them others, or shards it.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init).
    pub fn undrawn(config: &LlamaConfig, parallel: &ParallelConfig, device: &Device) -> Result<Self> {
        parallelize(Self::lazy(config, device)?, parallel)
    }

    pub(crate) fn lazy(config: &LlamaConfig, device: &Device) -> Result<Self> {
        config.check()?;
        let rotary = config.frequencies()?;
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Block::lazy(config, layer, &rotary, device))
            .map(|block| Ok(Offloaded::new(Checkpointed::new(block?).enabled(false))))
            .collect::<Result<_>>()?;
        let lm_head = (!config.tie_word_embeddings)
            .then(|| block::linear(config, config.hidden_size, config.vocab_size, false, device));
        Ok(Self {
            embed_tokens: EmbeddingConfig::new(config.vocab_size, config.hidden_size)
                .with_initializer(block::normal(config))
                .init(device),
            layers,
            norm: TiledNorm::new(block::norm(config, device), None),
            lm_head,
            settings: Settings { config: config.clone(), loss_tile: None, blocks_per_checkpoint: 1 },
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &LlamaConfig {
        &self.settings.config
    }

    /// Hidden states after the final norm.
    ///
    /// # Shapes
    ///
    /// [B, L] -> [B, L, E].
    ///
    /// # Panics
    ///
    /// [Raises](burn_context_parallel::raise) if a token id is not in the vocabulary, or the tokens are not the shard of the
    /// scope.
    pub fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.expect_ids("Llama::hidden", "token", tokens.clone()).or_raise();
        let mut x = phase::after("embedding", None, || embedding(&self.embed_tokens.weight, tokens));
        let each = self.settings.blocks_per_checkpoint;
        for (at, group) in self.layers.chunks(each).enumerate() {
            x = match group {
                [first, _, ..] if first.inner.is_enabled() => {
                    let blocks = group.iter().map(|layer| &layer.inner.inner);
                    forward_group(blocks, at * each, first.offload(), x, |block, x| block.forward(x))
                }
                layers => layers.iter().enumerate().fold(x, |x, (index, layer)| {
                    let around = |x| layer.forward(x, |block, x| block.forward(x));
                    phase::around("block", Some(at * each + index), x, around)
                }),
            };
        }
        self.norm.forward(x, |norm, x| norm.forward(x))
    }

    /// The whole logits; for evaluation. Training takes [`loss`](Self::loss), which can do without them.
    ///
    /// # Shapes
    ///
    /// [B, L] -> [B, L, V].
    ///
    /// # Panics
    ///
    /// As [`hidden`](Self::hidden).
    ///
    /// # Memory
    ///
    /// B L V * size.
    pub fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.hidden(tokens);
        match &self.lm_head {
            Some(head) => head.forward(x),
            None => tied_logits(&self.embed_tokens, x),
        }
    }

    /// The mean next-token loss over all ranks of `group`, of which `shard` is this rank's part.
    ///
    /// After `backward()`, sum gradients over ranks with
    /// [`sum_gradients`](burn_context_parallel::collective::sum_gradients).
    ///
    /// # Errors
    ///
    /// [`LlamaError::Core`](crate::LlamaError::Core) if the shard is another group's or rank's, an id is not in the vocabulary, or a
    /// collective fails. Errors of the backward pass are [raised](burn_context_parallel::raise).
    pub fn loss(&self, shard: &Shard, group: &ProcessGroup) -> Result<TokenLoss> {
        self.loss_across(shard, group, group)
    }

    /// [`loss`](Self::loss) where ranks have different batches, too: the sequence lies on the ranks of `sequence`, the mean is one
    /// over all valid targets of the ranks of `all`. Sum gradients over `all`.
    ///
    /// # Errors
    ///
    /// As [`loss`](Self::loss).
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_context_parallel::attention::ContextParallelDevice;
    /// use burn_context_parallel::group::{Axis, Mesh, MeshShape, launch};
    /// use burn_context_parallel::sequence::Batch;
    /// use llama::{Llama, LlamaConfig, ParallelConfig};
    ///
    /// let losses = launch(4, |world| {
    ///     let device = Device::flex();
    ///     let model = Llama::init(&LlamaConfig::new(32, 8, 16, 1, 2, 1), &ParallelConfig::all(), &device)?;
    ///     let mesh = Mesh::new(&world, MeshShape { data: 2, ulysses: 2, ..MeshShape::default() })?;
    ///     // Two batches of 3 and of 6 targets, each over two ranks.
    ///     let batch = Batch::from_rows(&[(0..[4, 7][mesh.coordinates().data]).collect()])?;
    ///     let sequence = mesh.axis(Axis::Ulysses);
    ///     let shard = device.context_parallel(sequence).shard(&batch)?;
    ///     model.loss_across(&shard, sequence, &world)
    /// })?;
    /// assert!(losses.iter().all(|loss| loss.valid == 9));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn loss_across(&self, shard: &Shard, sequence: &ProcessGroup, all: &ProcessGroup) -> Result<TokenLoss> {
        let (tile, targets) = (self.settings.loss_tile, shard.targets.clone());
        self.in_scope(shard, sequence, |x| match &self.lm_head {
            Some(head) => tiled_cross_entropy(head, x, targets, tile, Some(all), |head, x| head.forward(x)),
            None => tiled_cross_entropy(&self.embed_tokens, x, targets, tile, Some(all), tied_logits),
        })
    }

    /// This rank's share of a loss whose denominator, `total` valid targets, is that of the whole step: of all its micro-batches
    /// on all ranks. Shares summed over both are the mean, and so are gradients.
    ///
    /// # Errors
    ///
    /// As [`loss`](Self::loss), and if the shard alone has more valid targets than `total`.
    ///
    /// # Communication
    ///
    /// None but attention's.
    pub fn loss_over(&self, shard: &Shard, sequence: &ProcessGroup, total: usize) -> Result<LossShare> {
        let (tile, targets) = (self.settings.loss_tile, shard.targets.clone());
        self.in_scope(shard, sequence, |x| match &self.lm_head {
            Some(head) => tiled_cross_entropy_over(head, x, targets, tile, total, |head, x| head.forward(x)),
            None => tiled_cross_entropy_over(&self.embed_tokens, x, targets, tile, total, tied_logits),
        })
    }

    /// `f` of the shard's hidden states, in its scope.
    fn in_scope<T>(
        &self,
        shard: &Shard,
        sequence: &ProcessGroup,
        f: impl FnOnce(Tensor<3>) -> Result<T, Error>,
    ) -> Result<T> {
        let context = SequenceContext::new(sequence, shard)?;
        self.expect_ids("Llama::loss", "target", shard.targets.clone())?;
        Ok(catch(|| scope(Some(context), || f(self.hidden(shard.tokens.clone()))))??)
    }

    /// A backend reads out of bounds or panics on an id that the table does not have.
    fn expect_ids(&self, name: &'static str, what: &str, ids: Tensor<2, Int>) -> Result<(), Error> {
        let vocabulary = self.settings.config.vocab_size;
        let ids: Vec<i64> = ids.inner().into_data().iter::<i64>().collect();
        let known = |id: &i64| (0..vocabulary as i64).contains(id) || (what == "target" && *id == IGNORE_INDEX);
        let Some(largest) = ids.into_iter().find(|id| !known(id)) else {
            return Ok(());
        };
        Err(Error::invalid(
            name,
            format!("{what} id {largest} in a vocabulary of {vocabulary}"),
            "use the tokenizer that belongs to the model",
        ))
    }
}

/// x [B, n, E] times the transposed table [V, E].
fn tied_logits(table: &Embedding, x: Tensor<3>) -> Tensor<3> {
    let [batch, len, width] = x.dims();
    let table = table.weight.val();
    let vocabulary = table.dims()[0];
    x.reshape([batch * len, width]).matmul(table.transpose()).reshape([batch, len, vocabulary])
}
