//! From a configuration's rotary parameters to frequencies.

use std::f32::consts::PI;

use burn_context_parallel::Result;
use burn_context_parallel::sequence::RotaryFrequencies;

/// How rotary frequencies are rescaled for sequences longer than those of pretraining.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Llama 3.1's: low frequencies divided, high ones kept, those between blended.
    ///
    /// ```text
    /// w = 2 pi / f                           the wavelength, in tokens
    /// f' = f                                 w < original / high
    /// f' = f / factor                        w > original / low
    /// f' = (1 - s) f / factor + s f          between, s = (original / w - low) / (high - low)
    /// ```
    Llama3 {
        /// By how much the context is extended.
        factor: f32,
        /// `low`.
        low_freq_factor: f32,
        /// `high`.
        high_freq_factor: f32,
        /// Tokens of pretraining, `original`.
        original_max_position_embeddings: usize,
    },
}

/// The frequencies of heads of `head_dim` dimensions.
///
/// # Errors
///
/// As [`RotaryFrequencies::new`].
pub fn frequencies(head_dim: usize, theta: f64, scaling: &RopeScaling) -> Result<RotaryFrequencies> {
    let frequencies = RotaryFrequencies::new(head_dim, theta)?;
    Ok(match *scaling {
        RopeScaling::Default => frequencies,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let original = original_max_position_embeddings as f32;
            // In f32 and in transformers' order of operations: pretrained weights expect these very bits.
            frequencies.map(|frequency| {
                let wavelength = 2.0 * PI / frequency;
                if wavelength < original / high_freq_factor {
                    frequency
                } else if wavelength > original / low_freq_factor {
                    frequency / factor
                } else {
                    let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_keeps_high_frequencies_and_divides_low_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let plain = frequencies(8, 500_000.0, &RopeScaling::Default).unwrap();
        let scaled = frequencies(8, 500_000.0, &scaling).unwrap();
        // Wavelengths 6.28, 167, 4443, 118142 against the bounds 16 and 64.
        assert_eq!(scaled.values()[0], plain.values()[0]);
        for i in 1..4 {
            assert_eq!(scaled.values()[i], plain.values()[i] / 8.0);
        }
    }

    #[test]
    fn llama3_scaling_blends_between_the_bounds() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 320,
        };
        let scaled = frequencies(8, 500_000.0, &scaling).unwrap();
        let plain = frequencies(8, 500_000.0, &RopeScaling::Default).unwrap();
        // Wavelength 167.08 lies between 80 and 320: s = (320 / 167.08 - 1) / 3 = 0.305078.
        let expected = f64::from(plain.values()[1]) * ((1.0 - 0.305078) / 8.0 + 0.305078);
        assert!((f64::from(scaled.values()[1]) / expected - 1.0).abs() < 1e-4);
    }
}
