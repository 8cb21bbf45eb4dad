//! What both comparisons share: taking turns, medians, agreement, tables.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{Device, TensorData};
use burn_upipe::profile::heap;
use comfy_table::{CellAlignment, Table, presets};

/// Repeated measurements of one side.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    seconds: Vec<f64>,
    peak: usize,
}

impl Samples {
    /// Runs and measures once, until `device` has done all of it. Bytes are the heap's; of a device with pools see
    /// [`take_pools`](Self::take_pools).
    pub fn take<T>(&mut self, device: &Device, f: impl FnOnce() -> Result<T>) -> Result<T> {
        device.sync()?;
        let started = Instant::now();
        let (result, peak) = heap::peak_of(|| {
            let result = f()?;
            device.sync()?;
            Ok(result)
        });
        let peak = if device.memory_pool_usage().is_some() { 0 } else { peak };
        self.add(started.elapsed().as_secs_f64(), peak);
        result
    }

    /// Runs once without taking the time: by how much the pools of `device` grow, which keep what they needed at the peak. Nothing on a
    /// device without pools, whose bytes come with each measurement.
    pub fn take_pools<T>(&mut self, device: &Device, f: impl FnOnce() -> Result<T>) -> Result<()> {
        let held = || -> Result<Option<usize>> {
            device.sync()?;
            Ok(device.memory_pool_usage().map(|usage| usage.bytes_reserved as usize))
        };
        device.sync()?;
        device.memory_cleanup();
        let Some(before) = held()? else { return Ok(()) };
        let result = f()?;
        let after = held()?.unwrap_or(before);
        drop(result);
        self.peak = self.peak.max(after.saturating_sub(before));
        Ok(())
    }

    pub fn add(&mut self, seconds: f64, peak: usize) {
        self.seconds.push(seconds);
        self.peak = self.peak.max(peak);
    }

    /// The median time.
    pub fn seconds(&self) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            len if len % 2 == 1 => sorted[middle],
            _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
        }
    }

    /// The largest peak, in MiB.
    pub fn mib(&self) -> f64 {
        self.peak as f64 / (1 << 20) as f64
    }
}

/// The order of turn `turn`: forth, then back, so that no side always comes first.
pub fn order(sides: usize, turn: usize) -> Vec<usize> {
    let forth = 0..sides;
    if turn.is_multiple_of(2) { forth.collect() } else { forth.rev().collect() }
}

/// A benchmark of wrong results is worth nothing: refuses to time them.
pub fn agree(name: &str, actual: &TensorData, expected: &TensorData) -> Result<()> {
    const TOLERANCE: f64 = 1e-4;
    ensure!(actual.shape() == expected.shape(), "{name}: shapes {:?} and {:?}", actual.shape(), expected.shape());
    let largest = expected.iter::<f64>().fold(0.0, |max: f64, x| max.max(x.abs()));
    let worst = actual.iter::<f64>().zip(expected.iter::<f64>()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    ensure!(
        actual.iter::<f64>().all(f64::is_finite) && worst <= TOLERANCE * largest,
        "{name}: differs by {worst:e} of {largest:e}: nothing was timed"
    );
    Ok(())
}

/// A table in Markdown, numbers to the right.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
