//! The learning rate of each step.

use crate::values::Schedule;

/// Warm-up, then constant or half a cosine; the numbers are those of transformers' `get_constant_schedule_with_warmup` and
/// `get_cosine_schedule_with_warmup`.
///
/// ```text
/// warm-up   step < W    peak * step / W
/// constant              peak
/// cosine                min + (peak - min) * (1 + cos(pi (step - W) / (T - W))) / 2,   T steps in all
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// After the warm-up.
    pub kind: Schedule,
    /// The largest one.
    pub peak: f64,
    /// Where the cosine ends.
    pub min: f64,
    /// Steps of the warm-up, W.
    pub warmup: usize,
    /// All steps, T.
    pub steps: usize,
}

impl LearningRate {
    /// That of a step, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step as f64 / self.warmup as f64);
        }
        match self.kind {
            Schedule::Constant => self.peak,
            Schedule::Cosine => {
                let progress = (step - self.warmup) as f64 / self.steps.saturating_sub(self.warmup).max(1) as f64;
                let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
                self.min + (self.peak - self.min) * cosine.max(0.0)
            }
        }
    }
}
