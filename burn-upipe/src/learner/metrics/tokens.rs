//! How many tokens, and how fast.

use std::time::{Duration, Instant};

use burn::train::metric::Adaptor;

use super::gauge::{Gauge, gauge_metric};
use crate::learner::TokenOutput;

/// Tokens of a step, and the time that they took.
#[derive(Clone, Copy, Debug)]
pub struct TokensInput {
    /// Tokens that are no padding, of all ranks.
    pub tokens: usize,
    /// `None`: the time since the step before.
    pub elapsed: Option<Duration>,
}

impl Adaptor<TokensInput> for TokenOutput {
    fn adapt(&self) -> TokensInput {
        TokensInput { tokens: self.tokens, elapsed: self.elapsed }
    }
}

/// Tokens per second, all ranks together.
#[derive(Clone, Debug)]
pub struct TokensPerSecondMetric {
    gauge: Gauge,
    tokens: usize,
    time: Duration,
    last: Option<Instant>,
}

impl TokensPerSecondMetric {
    /// The metric.
    pub fn new() -> Self {
        let gauge = Gauge::new("Tokens per second", Some("tokens/s"), 0, true);
        Self { gauge, tokens: 0, time: Duration::ZERO, last: None }
    }

    fn reset(&mut self) {
        *self = Self::new();
    }
}

gauge_metric!(TokensPerSecondMetric, TokensInput, "tokens of all ranks per second", |metric, item| {
    let since = metric.last.replace(Instant::now()).map(|last| last.elapsed());
    // The first step that nobody measured began at an unknown time.
    if let Some(elapsed) = item.elapsed.or(since).filter(|elapsed| !elapsed.is_zero()) {
        metric.tokens += item.tokens;
        metric.time += elapsed;
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
        // A mean of rates weighted by time is the rate of the whole.
        metric.gauge.now = Some((rate(item.tokens, elapsed), elapsed.as_micros() as usize));
        metric.gauge.epoch = Some(rate(metric.tokens, metric.time));
    }
});

/// Tokens since training began, over all epochs.
#[derive(Clone, Debug)]
pub struct TokensSeenMetric {
    gauge: Gauge,
    tokens: usize,
}

impl TokensSeenMetric {
    /// The metric, from 0.
    pub fn new() -> Self {
        Self::from(0)
    }

    /// The metric of a training that goes on after so many tokens.
    pub fn from(tokens: usize) -> Self {
        Self { gauge: Gauge::new("Tokens seen", Some("tokens"), 0, true), tokens }
    }

    fn reset(&mut self) {
        self.gauge.clear();
    }
}

gauge_metric!(TokensSeenMetric, TokensInput, "tokens of all ranks since training began", |metric, item| {
    metric.tokens += item.tokens;
    metric.gauge.now = Some((metric.tokens as f64, 1));
    metric.gauge.epoch = Some(metric.tokens as f64);
});
