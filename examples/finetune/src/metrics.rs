//! What a step was: a line for people, a row for programs.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// One optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepMetrics {
    /// Counted from 1.
    pub step: usize,
    /// Mean loss over all targets of all ranks, in nats, before the step.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens a second, over all ranks.
    pub tokens_per_s: f64,
    /// The most heap bytes alive at once during the step, the sum over all ranks in the process; 0 without the
    /// counting allocator.
    pub peak_bytes: usize,
}

impl StepMetrics {
    /// For people.
    pub fn line(&self, total: usize) -> String {
        let width = total.to_string().len();
        format!(
            "step {:>width$}/{total}  loss {:.4}  grad norm {:.3}  {:.0} tokens/s  peak {:.1} MiB",
            self.step,
            self.loss,
            self.grad_norm,
            self.tokens_per_s,
            self.peak_bytes as f64 / (1 << 20) as f64
        )
    }
}

/// A CSV file that grows row by row, complete after each.
#[derive(Debug)]
pub struct Table {
    path: PathBuf,
    file: File,
}

impl Table {
    /// The columns, in order.
    pub const HEADER: &str = "step,loss,grad_norm,lr,tokens_per_s,peak_bytes";

    /// A new file with the header.
    ///
    /// # Errors
    ///
    /// [`Error::Write`].
    pub fn create(path: &Path) -> Result<Self> {
        let open = || -> std::io::Result<File> {
            let mut file = File::create(path)?;
            writeln!(file, "{}", Self::HEADER)?;
            Ok(file)
        };
        let file = open().map_err(|source| Error::Write { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Adds a row. Numbers have all their digits: reading them back gives the same bits.
    ///
    /// # Errors
    ///
    /// [`Error::Write`].
    pub fn add(&mut self, step: &StepMetrics) -> Result<()> {
        let StepMetrics { step, loss, grad_norm, lr, tokens_per_s, peak_bytes } = step;
        // One write a row: whoever reads along never sees half of one.
        let row = format!("{step},{loss},{grad_norm},{lr},{tokens_per_s:.1},{peak_bytes}\n");
        self.file.write_all(row.as_bytes()).map_err(|source| Error::Write { path: self.path.clone(), source })
    }
}
