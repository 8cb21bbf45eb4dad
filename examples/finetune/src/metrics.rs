//! What a step was: a line for people, a row for programs.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use llama::device::Runtime;

use crate::error::{Error, Result};
use crate::memory;
use crate::out;

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
    /// counting allocator. On devices with memory pools, which count no peak: what these hold after the step, in use or kept for
    /// reuse.
    pub peak_bytes: usize,
}

impl StepMetrics {
    /// For people; `total` steps in all, on devices of `runtime`.
    pub fn line(&self, total: usize, runtime: Runtime) -> String {
        let width = total.to_string().len();
        format!(
            "step {:>width$}/{total}  loss {:.4}  grad norm {:.3}  {:.0} tokens/s  {} {:.1} MiB",
            self.step,
            self.loss,
            self.grad_norm,
            self.tokens_per_s,
            memory::name(runtime),
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

    /// The table of a run that goes on after `step`: rows of later steps are cut off. With the rows that stay.
    ///
    /// A file that is not there, or is another one's, is begun anew.
    ///
    /// # Errors
    ///
    /// [`Error::Write`].
    pub fn resume(path: &Path, step: usize) -> Result<(Self, Vec<StepMetrics>)> {
        let (text, rows) = Self::read(path, step);
        out::write(path, &text)?;
        let fail = |source| Error::Write { path: path.to_owned(), source };
        let file = File::options().append(true).open(path).map_err(fail)?;
        Ok((Self { path: path.to_owned(), file }, rows))
    }

    /// The rows up to a step, as text and as numbers.
    pub(crate) fn read(path: &Path, step: usize) -> (String, Vec<StepMetrics>) {
        let text = fs::read_to_string(path).unwrap_or_default();
        let mut lines = text.lines();
        let ours = lines.next() == Some(Self::HEADER);
        let (mut kept, mut rows) = (format!("{}\n", Self::HEADER), Vec::new());
        for line in lines.filter(|_| ours) {
            // A row that was being written when the machine died is none.
            if let Some(row) = parse(line).filter(|row| row.step <= step) {
                kept += &format!("{line}\n");
                rows.push(row);
            }
        }
        (kept, rows)
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

fn parse(row: &str) -> Option<StepMetrics> {
    let mut values = row.split(',');
    let mut number = || values.next()?.parse::<f64>().ok();
    let (step, loss, grad_norm, lr, tokens_per_s, peak) =
        (number()?, number()?, number()?, number()?, number()?, number()?);
    let whole = |number: f64| (number >= 0.0 && number.fract() == 0.0).then_some(number as usize);
    let metrics = StepMetrics { step: whole(step)?, loss, grad_norm, lr, tokens_per_s, peak_bytes: whole(peak)? };
    values.next().is_none().then_some(metrics)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: usize) -> StepMetrics {
        StepMetrics { step, loss: 1.0 / step as f64, grad_norm: 0.1, lr: 3e-3, tokens_per_s: 7.25, peak_bytes: 9 }
    }

    #[test]
    fn a_resumed_table_has_every_step_once_and_no_torn_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.csv");
        let mut table = Table::create(&path).unwrap();
        (1..=4).for_each(|number| table.add(&step(number)).unwrap());
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{whole}5,0.2,0.")).unwrap();
        let (mut table, rows) = Table::resume(&path, 2).unwrap();
        assert_eq!(rows.iter().map(|row| (row.step, row.loss)).collect::<Vec<_>>(), [(1, 1.0), (2, 0.5)]);
        (3..=4).for_each(|number| table.add(&step(number)).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
    }

    #[test]
    fn a_table_that_is_missing_or_not_ours_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.csv");
        for before in [None, Some("a,b\n1,2\n"), Some("")] {
            before.inspect(|text| fs::write(&path, text).unwrap());
            let (mut table, rows) = Table::resume(&path, 3).unwrap();
            assert_eq!(rows, []);
            table.add(&step(4)).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(text.lines().collect::<Vec<_>>(), [Table::HEADER, "4,0.25,0.1,0.003,7.2,9"]);
        }
    }
}
