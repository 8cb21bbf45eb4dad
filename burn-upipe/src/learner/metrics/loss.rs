//! Loss and perplexity per valid target.

use burn::tensor::{Device, Tensor, TensorReadError};
use burn::train::metric::{Adaptor, LossInput};

use super::gauge::{Gauge, gauge_metric};
use crate::learner::TokenOutput;
use crate::learner::output::Loss;

/// The mean loss of a step, and over how many targets it is a mean.
#[derive(Clone, Debug)]
pub struct TokenLossInput {
    loss: Loss,
    valid: usize,
}

impl TokenLossInput {
    /// A mean `[1]` over `valid` targets, for outputs of other types.
    pub fn new(loss: Tensor<1>, valid: usize) -> Self {
        Self { loss: Loss::Share(Box::new(loss)), valid }
    }

    /// The mean.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn loss(&self) -> Result<f64, TensorReadError> {
        self.loss.read()
    }

    /// Valid targets.
    pub fn valid(&self) -> usize {
        self.valid
    }
}

impl Adaptor<TokenLossInput> for TokenOutput {
    fn adapt(&self) -> TokenLossInput {
        TokenLossInput { loss: self.lazy_loss(), valid: self.valid }
    }
}

/// For Burn's `LossMetric`, whose epoch is a mean over steps.
impl Adaptor<LossInput> for TokenOutput {
    fn adapt(&self) -> LossInput {
        LossInput::new(match self.lazy_loss() {
            Loss::Share(share) => *share,
            Loss::Mean(mean) => Tensor::from_floats([mean], &near()),
        })
    }
}

/// A device that a number which is here already need not wake a GPU for.
fn near() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    Device::default()
}

/// A sum over targets, and how many.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, mean: f64, count: usize) -> Option<f64> {
        if count > 0 {
            self.sum += mean * count as f64;
            self.count += count;
        }
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// The loss per valid target. Named as Burn's, so that whatever looks for "Loss" (checkpoints of the best epoch, early stopping) finds it.
#[derive(Clone, Debug)]
pub struct TokenLossMetric {
    gauge: Gauge,
    mean: Mean,
}

impl TokenLossMetric {
    /// The metric.
    pub fn new() -> Self {
        Self { gauge: Gauge::new("Loss", None, 4, false), mean: Mean::default() }
    }

    fn reset(&mut self) {
        *self = Self::new();
    }
}

gauge_metric!(TokenLossMetric, TokenLossInput, "mean over all valid targets of all ranks", |metric, item| {
    let loss = item.loss()?;
    metric.gauge.now = Some((loss, item.valid));
    metric.gauge.epoch = metric.mean.add(loss, item.valid).or(metric.gauge.epoch);
});

/// The perplexity: exp of the loss per valid target.
#[derive(Clone, Debug)]
pub struct TokenPerplexityMetric {
    gauge: Gauge,
    mean: Mean,
}

impl TokenPerplexityMetric {
    /// The metric.
    pub fn new() -> Self {
        Self { gauge: Gauge::new("Perplexity", None, 2, false), mean: Mean::default() }
    }

    fn reset(&mut self) {
        *self = Self::new();
    }
}

gauge_metric!(
    TokenPerplexityMetric,
    TokenLossInput,
    "exp(loss) over all valid targets of all ranks",
    |metric, item| {
        let loss = item.loss()?;
        metric.gauge.now = Some((loss.exp(), item.valid));
        metric.gauge.epoch = metric.mean.add(loss, item.valid).map(f64::exp).or(metric.gauge.epoch);
    }
);
