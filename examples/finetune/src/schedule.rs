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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The right sides are transformers', from `get_last_lr` before each step.
    #[rstest]
    #[case(Schedule::Constant, 4, &[0.0, 0.00075, 0.0015, 0.0022500000000000003, 0.003, 0.003, 0.003, 0.003, 0.003, 0.003, 0.003])]
    #[case(Schedule::Cosine, 3, &[
        0.0, 0.001, 0.002, 0.003, 0.00288581929876693, 0.002560660171779821, 0.002074025148547635, 0.0015,
        0.0009259748514523654, 0.0004393398282201788, 0.0001141807012330699,
    ])]
    #[case(Schedule::Cosine, 0, &[
        0.003, 0.002713525491562421, 0.0019635254915624212, 0.001036474508437579, 0.000286474508437579,
    ])]
    fn rates_are_those_of_transformers(#[case] kind: Schedule, #[case] warmup: usize, #[case] expected: &[f64]) {
        let rate = LearningRate { kind, peak: 0.003, min: 0.0, warmup, steps: expected.len() };
        for (step, expected) in expected.iter().enumerate() {
            let found = rate.at(step);
            assert!((found - expected).abs() <= 1e-15 * 0.003, "step {step}: {found}, not {expected}");
        }
    }

    #[test]
    fn the_cosine_ends_at_the_smallest_rate() {
        let rate = LearningRate { kind: Schedule::Cosine, peak: 1.0, min: 0.1, warmup: 0, steps: 10 };
        assert_eq!(rate.at(0), 1.0);
        assert!((rate.at(5) - 0.55).abs() < 1e-12);
        assert!((rate.at(10) - 0.1).abs() < 1e-12);
    }
}
