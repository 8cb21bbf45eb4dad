//! What can be chosen.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn_context_parallel::group::MeshShape;
use clap::{Parser, ValueEnum};

/// How much of the way from a Burn model to all techniques.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stage {
    /// Burn's attention, Burn's strategy.
    Plain,
    /// Flash attention on one device.
    Flash,
    /// The same model on many ranks.
    ContextParallel,
    /// U-Pipe attention.
    Upipe,
    /// Checkpointing, tiling and shards as well.
    All,
}

impl Stage {
    fn is_on_ranks(self) -> bool {
        !matches!(self, Self::Plain | Self::Flash)
    }
}

/// Trains a small byte-level transformer with burn-train, one technique after the other.
#[derive(Clone, Debug, Parser)]
pub struct Args {
    /// Which techniques.
    #[arg(long, value_enum, default_value_t = Stage::All)]
    pub stage: Stage,
    /// Ranks that share each sequence [default: 4; 1 for plain and flash].
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Replicas with different sequences.
    #[arg(long, default_value_t = 1)]
    pub data_ranks: usize,
    /// Passes over the text.
    #[arg(long, default_value_t = 3)]
    pub epochs: usize,
    /// Bytes of a sequence.
    #[arg(long, default_value_t = 256)]
    pub seq_len: usize,
    /// Sequences of a step, over all replicas.
    #[arg(long, default_value_t = 2)]
    pub batch: usize,
    /// Only the first sequences of the text.
    #[arg(long)]
    pub sequences: Option<usize>,
    /// A file to learn from [default: this workspace's Apache licence].
    #[arg(long)]
    pub text: Option<PathBuf>,
    /// A new folder for metrics, logs and the model.
    #[arg(long, default_value = "runs/learner")]
    pub out: PathBuf,
    /// A line a step instead of Burn's dashboard.
    #[arg(long)]
    pub log: bool,
}

impl Args {
    /// The mesh, or `None` for Burn's own strategy.
    ///
    /// # Errors
    ///
    /// What does not fit together.
    pub fn shape(&self) -> Result<Option<MeshShape>> {
        for (name, value) in [("epochs", self.epochs), ("batch", self.batch), ("data-ranks", self.data_ranks)] {
            ensure!(value > 0, "--{name} 0: use at least 1");
        }
        ensure!(self.seq_len >= 2, "--seq-len {}: a sequence needs a byte to predict, use at least 2", self.seq_len);
        if !self.stage.is_on_ranks() {
            ensure!(
                self.ranks.unwrap_or(1) == 1 && self.data_ranks == 1,
                "--stage plain and --stage flash train on one device: leave --ranks and --data-ranks out, or use --stage context-parallel"
            );
            return Ok(None);
        }
        ensure!(
            self.batch.is_multiple_of(self.data_ranks),
            "--batch {} for --data-ranks {}: use a multiple, so that replicas have equally many sequences",
            self.batch,
            self.data_ranks
        );
        Ok(Some(MeshShape { data: self.data_ranks, ulysses: self.ranks.unwrap_or(4), ..MeshShape::default() }))
    }
}
