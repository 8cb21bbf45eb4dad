//! Everything: checkpointed blocks of U-Pipe attention, tiled norms, feed-forward and loss. Shards come with the strategy.

use burn::module::Module;
use burn::nn::{Embedding, LayerNorm, Linear};
use burn::tensor::activation::gelu;
use burn::tensor::{Int, Tensor};
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use burn_context_parallel::OrRaise;
use burn_context_parallel::fsdp::embedding;
use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::learner::{SequenceBatch, TokenOutput};
use burn_upipe::tiling::{TiledLinearCrossEntropy, TiledMlp, TiledNorm};
use burn_upipe::upipe::UPipeAttention;

use crate::model::Model;

/// Tokens of a tile.
const TILE: usize = 64;

/// [E, 4 E] and [4 E, E] with what is between.
#[derive(Module, Debug)]
pub struct FeedForward {
    up: Linear,
    down: Linear,
}

impl FeedForward {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(gelu(self.up.forward(x)))
    }
}

/// A block whose norms and feed-forward go over tiles.
#[derive(Module, Debug)]
pub struct TiledBlock {
    norm_1: TiledNorm<LayerNorm>,
    attention: UPipeAttention,
    norm_2: TiledNorm<LayerNorm>,
    feed_forward: TiledMlp<FeedForward>,
}

impl TiledBlock {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let norm = |norm: &LayerNorm, x| norm.forward(x);
        let x = x.clone() + self.attention.forward(self.norm_1.forward(x, norm));
        x.clone() + self.feed_forward.forward(self.norm_2.forward(x, norm), |feed_forward, x| feed_forward.forward(x))
    }
}

/// The model of the last stage.
#[derive(Module, Debug)]
pub struct AllModel {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Checkpointed<TiledBlock>>,
    norm: TiledNorm<LayerNorm>,
    head: TiledLinearCrossEntropy,
}

/// The same function of the same parameters.
pub fn all(model: Model<UPipeAttention>) -> AllModel {
    let tile = Some(TILE);
    let blocks = model.blocks.into_iter().map(|block| {
        let (up, down) = (block.up, block.down);
        // A block is computed again as a whole; what it tiles inside is computed once more then.
        Checkpointed::new(TiledBlock {
            norm_1: TiledNorm::new(block.norm_1, tile),
            attention: block.attention,
            norm_2: TiledNorm::new(block.norm_2, tile),
            feed_forward: TiledMlp::new(FeedForward { up, down }, tile),
        })
    });
    AllModel {
        blocks: blocks.collect(),
        tokens: model.tokens,
        positions: model.positions,
        norm: TiledNorm::new(model.norm, tile),
        head: TiledLinearCrossEntropy::new(model.head, tile),
    }
}

impl AllModel {
    fn hidden(&self, tokens: Tensor<2, Int>, positions: Tensor<2, Int>) -> Tensor<3> {
        // As Burn's look-up, but a sharded table is not kept for the backward pass.
        let mut x = embedding(&self.tokens.weight, tokens) + embedding(&self.positions.weight, positions);
        for block in &self.blocks {
            x = block.forward(x, |block, x| block.forward(x));
        }
        self.norm.forward(x, |norm, x| norm.forward(x))
    }

    fn loss(&self, batch: &SequenceBatch) -> Tensor<1> {
        let x = self.hidden(batch.tokens.clone(), batch.positions.clone());
        self.head.forward_over(x, batch.targets.clone(), batch.total()).or_raise().share
    }
}

impl TrainStep for AllModel {
    type Input = SequenceBatch;
    type Output = TokenOutput;

    fn step(&self, batch: SequenceBatch) -> TrainOutput<TokenOutput> {
        let loss = self.loss(&batch);
        TrainOutput::new(self, loss.backward(), batch.output(loss))
    }
}

impl InferenceStep for AllModel {
    type Input = SequenceBatch;
    type Output = TokenOutput;

    fn step(&self, batch: SequenceBatch) -> TokenOutput {
        batch.output(self.loss(&batch))
    }
}
