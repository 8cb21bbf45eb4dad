//! A text as sequences of bytes.

use std::sync::Arc;

use anyhow::{Result, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::tensor::Device;
use burn_context_parallel::OrRaise;
use burn_context_parallel::sequence::Batch;
use burn_upipe::learner::SequenceBatch;

/// What is learned where no text is given: this workspace's licence.
pub const TEXT: &str = include_str!("../../../LICENSE-APACHE");

/// Puts sequences side by side; the strategy cuts them for ranks.
#[derive(Clone, Debug)]
pub struct Bytes;

impl Batcher<Vec<i64>, SequenceBatch> for Bytes {
    fn batch(&self, rows: Vec<Vec<i64>>, device: &Device) -> SequenceBatch {
        // Burn's batchers have no room for an error; raised on a rank, it ends training and is its error.
        Batch::from_rows(&rows).and_then(|batch| SequenceBatch::new(batch, device)).or_raise()
    }
}

/// A loader of batches.
pub type Loader = Arc<dyn DataLoader<SequenceBatch>>;

/// Loaders of a text in sequences of `seq_len` bytes: nine of ten to learn from, the last tenth (at least one) to validate on.
///
/// # Errors
///
/// If there are fewer than two sequences in the text.
pub fn loaders(text: &[u8], seq_len: usize, sequences: Option<usize>, batch: usize) -> Result<(Loader, Loader)> {
    let mut rows: Vec<Vec<i64>> =
        text.chunks_exact(seq_len).map(|row| row.iter().map(|byte| i64::from(*byte)).collect()).collect();
    rows.truncate(sequences.unwrap_or(usize::MAX));
    ensure!(
        rows.len() >= 2,
        "{} sequences of {seq_len} bytes in a text of {}: use a shorter --seq-len or a longer --text, so that one is left to validate on",
        rows.len(),
        text.len()
    );
    let valid = rows.split_off(rows.len() - (rows.len() / 10).max(1));
    let loader = || DataLoaderBuilder::new(Bytes).batch_size(batch);
    let train = loader().shuffle(42).build(InMemDataset::new(rows));
    Ok((train, loader().build(InMemDataset::new(valid))))
}
