//! # From a Burn model to long sequences, step by step
//!
//! A small byte-level transformer of `burn::nn` parts, trained by burn-train's `SupervisedTraining`. Each stage changes a few lines of the
//! one before; all of them give the same losses. What comes first is what a Burn author has.
//!
//! ```sh
//! cargo run --release -p learner --features train                              # every technique, Burn's dashboard
//! cargo run --release -p learner --features train -- --stage plain --log       # Burn alone, a line a step
//! ```
//!
//! ## 0. The batch (all stages)
//!
//! A batcher gives whole sequences, with their targets shifted, and the loss comes from the batch. This is the one change in `TrainStep`;
//! `SequenceBatch` trains under Burn's own strategies as well.
//!
//! ```text
//! - type Input = TextBatch;                                       + type Input = SequenceBatch;
//! - let loss = CrossEntropyLoss::new(..).forward(logits, ..);     + let loss = batch.loss(logits);
//! - TrainOutput::new(self, loss.backward(), output)               + TrainOutput::new(self, loss.backward(), batch.output(loss))
//! ```
//!
//! Positions come with the batch too (`batch.positions`): a rank that holds the second half of a sequence does not start from 0. See
//! `model`, and `plain` for attention as Burn has it.
//!
//! ## 1. Flash attention (`--stage flash`)
//!
//! Burn's module keeps all weights, B H S S of them; this one has the same parameters and keeps none.
//!
//! ```text
//! - attention: MultiHeadAttention                                 + attention: FlashMultiHeadAttention
//! - let mask = generate_autoregressive_mask(..);                  + FlashMultiHeadAttention::from_burn(attention)?.with_causal(true)
//! - attention.forward(MhaInput::self_attn(x).mask_attn(mask))     + attention.forward(FlashMhaInput::self_attn(x))
//! ```
//!
//! ## 2. Context parallel (`--stage context-parallel --ranks 4`)
//!
//! The same model: what changes is the strategy. Each rank has a part of every sequence; attention crosses ranks, nothing else does.
//!
//! ```text
//! - training.with_training_strategy(ExecutionStrategy::single(device).into())
//! + let shape = MeshShape { data: 1, ulysses: 4, ..Default::default() };
//! + training.with_training_strategy(ContextParallelStrategy::new(shape)?.into())
//! ```
//!
//! ## 3. U-Pipe (`--stage upipe --ranks 4`)
//!
//! Queries, keys, values and what is exchanged of them exist for some heads at a time.
//!
//! ```text
//! - attention: FlashMultiHeadAttention                            + attention: UPipeAttention
//! - attention.forward(FlashMhaInput::self_attn(x))                + attention.forward(x)
//! ```
//!
//! ## 4. All (`--stage all --ranks 4`)
//!
//! Blocks keep their input and compute the rest again; norms, feed-forward and loss go over tiles of tokens, so that logits never exist
//! as a whole; weights, gradients and optimizer state lie in shards.
//!
//! ```text
//! - blocks: Vec<Block>                                            + blocks: Vec<Checkpointed<TiledBlock>>
//! - block.forward(x)                                              + block.forward(x, |block, x| block.forward(x))
//! - self.head.forward(x), batch.loss(logits)                      + self.head.forward_over(x, batch.targets.clone(), batch.total())?.share
//! - Learner::new(model, optimizer, rate)                          + Learner::new(Sharded::new(model), optimizer, rate)
//! -                                                               + strategy.with_fsdp(FsdpConfig::new())
//! ```

#[cfg(feature = "train")]
pub mod cli;
#[cfg(feature = "train")]
pub mod data;
#[cfg(feature = "train")]
pub mod lines;
#[cfg(feature = "train")]
pub mod model;
#[cfg(feature = "train")]
pub mod stages;
#[cfg(feature = "train")]
pub mod train;
