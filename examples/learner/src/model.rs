//! The transformer, whatever its attention is.
//!
//! B sequences side by side, L tokens each on this rank, E width.

use burn::module::{Module, ModuleDisplay};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor};
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use burn_upipe::learner::{SequenceBatch, TokenOutput};

/// Bytes, each a token.
pub const VOCABULARY: usize = 256;
/// E.
pub const WIDTH: usize = 64;
/// Heads of the attention.
pub const HEADS: usize = 8;
/// How many blocks.
pub const BLOCKS: usize = 2;

/// What a block needs of its attention: causal, over the sequence at hand.
pub trait Attend: Module + ModuleDisplay {
    /// [B, L, E] -> [B, L, E].
    fn attend(&self, x: Tensor<3>) -> Tensor<3>;
}

/// A transformer block, norms first.
#[derive(Module, Debug)]
pub struct Block<A: Module> {
    /// Before attention.
    pub norm_1: LayerNorm,
    /// What the stages change.
    pub attention: A,
    /// Before the feed-forward.
    pub norm_2: LayerNorm,
    /// [E, 4 E].
    pub up: Linear,
    /// [4 E, E].
    pub down: Linear,
}

impl<A: Attend> Block<A> {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention.attend(self.norm_1.forward(x));
        x.clone() + self.down.forward(gelu(self.up.forward(self.norm_2.forward(x))))
    }
}

/// A language model of bytes.
#[derive(Module, Debug)]
pub struct Model<A: Module> {
    /// [256, E].
    pub tokens: Embedding,
    /// [longest sequence, E].
    pub positions: Embedding,
    /// One after the other.
    pub blocks: Vec<Block<A>>,
    /// After the last.
    pub norm: LayerNorm,
    /// [E, 256].
    pub head: Linear,
}

impl<A: Attend> Model<A> {
    /// A model for sequences of at most `longest` tokens, with weights drawn.
    pub fn new(longest: usize, device: &Device, attention: impl Fn() -> A) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block {
            norm_1: norm(),
            attention: attention(),
            norm_2: norm(),
            up: linear(WIDTH, 4 * WIDTH),
            down: linear(4 * WIDTH, WIDTH),
        };
        let model = Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(longest, WIDTH).init(device),
            blocks: (0..BLOCKS).map(block).collect(),
            norm: norm(),
            head: linear(WIDTH, VOCABULARY),
        };
        model.fork(device)
    }

    fn forward(&self, tokens: Tensor<2, Int>, positions: Tensor<2, Int>) -> Tensor<3> {
        let mut x = self.tokens.forward(tokens) + self.positions.forward(positions);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.norm.forward(x))
    }

    fn loss(&self, batch: &SequenceBatch) -> Tensor<1> {
        batch.loss(self.forward(batch.tokens.clone(), batch.positions.clone()))
    }
}

impl<A: Attend + 'static> TrainStep for Model<A> {
    type Input = SequenceBatch;
    type Output = TokenOutput;

    fn step(&self, batch: SequenceBatch) -> TrainOutput<TokenOutput> {
        let loss = self.loss(&batch);
        TrainOutput::new(self, loss.backward(), batch.output(loss))
    }
}

impl<A: Attend + 'static> InferenceStep for Model<A> {
    type Input = SequenceBatch;
    type Output = TokenOutput;

    fn step(&self, batch: SequenceBatch) -> TokenOutput {
        batch.output(self.loss(&batch))
    }
}
