//! Rotary frequencies rescaled for sequences longer than those of pretraining, as transformers computes them.

use std::f64::consts::PI;

use burn::config::Config;

use super::RotaryFrequencies;
use crate::{Error, Result};

const NAME: &str = "RotaryFrequencies::scaled";

/// How rotary frequencies are rescaled.
///
/// | | frequencies | cos and sin |
/// |---|---|---|
/// | [`Default`](Self::Default) | f | |
/// | [`Linear`](Self::Linear) | f / factor | |
/// | [`Llama3`](Self::Llama3) | low ones divided, high ones kept, those between blended | |
/// | [`Yarn`](Self::Yarn) | the same, blended by dimension | times an attention factor |
///
/// # References
///
/// Position interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071.
#[derive(Config, Debug, PartialEq)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// Not at all.
    Default,
    /// Positions interpolated: all frequencies divided.
    Linear {
        /// By how much the context is extended.
        factor: f64,
    },
    /// Llama 3.1's.
    ///
    /// ```text
    /// w = 2 pi / f                           the wavelength, in tokens
    /// f' = f                                 w < original / high
    /// f' = f / factor                        w > original / low
    /// f' = (1 - s) f / factor + s f          between, s = (original / w - low) / (high - low)
    /// ```
    Llama3 {
        /// By how much the context is extended.
        factor: f64,
        /// `low`.
        low_freq_factor: f64,
        /// `high`.
        high_freq_factor: f64,
        /// Tokens of pretraining, `original`.
        original_max_position_embeddings: usize,
    },
    /// YaRN.
    ///
    /// ```text
    /// d(r) = D ln(original / (2 pi r)) / (2 ln theta)        the pair that turns r times in `original` tokens
    /// s_i = clamp((i - d(beta_fast)) / (d(beta_slow) - d(beta_fast)), 0, 1)
    /// f'_i = s_i f_i / factor + (1 - s_i) f_i
    /// a = attention_factor                                   or, without one:
    /// a = m(mscale) / m(mscale_all_dim),  m(1) if either is absent or 0;  m(x) = 0.1 x ln factor + 1
    /// ```
    ///
    /// cos and sin are multiplied by `a`, hence scores by its square.
    Yarn {
        /// By how much the context is extended.
        factor: f64,
        /// Tokens of pretraining, `original`.
        original_max_position_embeddings: usize,
        /// Pairs that turn more often than this keep their frequency; 32 in most models.
        beta_fast: f64,
        /// Pairs that turn less often than this are divided; 1 in most models.
        beta_slow: f64,
        /// The attention factor `a`; `None` computes it.
        attention_factor: Option<f64>,
        /// Of the computed attention factor.
        mscale: Option<f64>,
        /// Of the computed attention factor.
        mscale_all_dim: Option<f64>,
        /// Whether the bounds d(beta_fast) and d(beta_slow) are rounded outwards to whole pairs; true in most models.
        truncate: bool,
    },
}

impl RotaryScaling {
    /// YaRN with the usual settings: `beta_fast` 32, `beta_slow` 1, bounds truncated, the attention factor computed.
    pub fn yarn(factor: f64, original_max_position_embeddings: usize) -> Self {
        Self::Yarn {
            factor,
            original_max_position_embeddings,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }
    }

    /// Checks that the numbers describe a scaling.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the number that does not fit.
    pub fn check(&self) -> Result<()> {
        let positive = |name: &str, value: f64| {
            // As it is used, in f32.
            if (value as f32).is_finite() && value as f32 > 0.0 {
                return Ok(());
            }
            Err(Error::invalid(NAME, format!("{name} is {value}"), "use a positive number"))
        };
        let original = |tokens: usize| match tokens {
            0 => Err(Error::invalid(
                NAME,
                "original_max_position_embeddings is 0",
                "give the longest sequence of pretraining, in tokens",
            )),
            _ => Ok(()),
        };
        match *self {
            Self::Default => Ok(()),
            Self::Linear { factor } => positive("factor", factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                positive("factor", factor)?;
                positive("low_freq_factor", low_freq_factor)?;
                positive("high_freq_factor", high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    return Err(Error::invalid(
                        NAME,
                        format!("high_freq_factor {high_freq_factor}, low_freq_factor {low_freq_factor}"),
                        "make high_freq_factor the larger one",
                    ));
                }
                original(original_max_position_embeddings)
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                mscale,
                mscale_all_dim,
                truncate: _,
            } => {
                positive("factor", factor)?;
                positive("beta_fast", beta_fast)?;
                positive("beta_slow", beta_slow)?;
                if beta_fast < beta_slow {
                    return Err(Error::invalid(
                        NAME,
                        format!("beta_fast {beta_fast}, beta_slow {beta_slow}"),
                        "make beta_fast the larger one",
                    ));
                }
                if let Some(value) = attention_factor {
                    positive("attention_factor", value)?;
                }
                for (name, value) in [("mscale", mscale), ("mscale_all_dim", mscale_all_dim)] {
                    if value.is_some_and(|value| !(value.is_finite() && value >= 0.0)) {
                        return Err(Error::invalid(
                            NAME,
                            format!("{name} is {value:?}"),
                            "use a number from 0, or None",
                        ));
                    }
                }
                original(original_max_position_embeddings)
            }
        }
    }
}

impl RotaryFrequencies {
    /// The rescaled frequencies of heads of `head_dim` dimensions, and the factor on cos and sin.
    ///
    /// In f32 and in transformers' order of operations, where those are in f32: pretrained weights expect these very numbers.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::Invalid`] if the scaling's numbers do not fit.
    ///
    /// ```
    /// use burn_context_parallel::sequence::{RotaryFrequencies, RotaryScaling};
    ///
    /// let plain = RotaryFrequencies::new(8, 10_000.0)?;
    /// let scaled = RotaryFrequencies::scaled(8, 10_000.0, &RotaryScaling::Linear { factor: 4.0 })?;
    /// assert_eq!(scaled.values()[0], plain.values()[0] / 4.0);
    /// assert!(RotaryFrequencies::scaled(8, 10_000.0, &RotaryScaling::Linear { factor: 0.0 }).is_err());
    /// # Ok::<(), burn_context_parallel::Error>(())
    /// ```
    pub fn scaled(head_dim: usize, theta: f64, scaling: &RotaryScaling) -> Result<Self> {
        let plain = Self::new(head_dim, theta)?;
        scaling.check()?;
        let scaled = match *scaling {
            RotaryScaling::Default => plain,
            RotaryScaling::Linear { factor } => plain.map(|frequency| frequency / factor as f32),
            RotaryScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => {
                let original = original as f64;
                let (low, high) = ((original / low_freq_factor) as f32, (original / high_freq_factor) as f32);
                let factor = factor as f32;
                plain.map(|frequency| {
                    let wavelength = (2.0 * PI) as f32 / frequency;
                    if wavelength < high {
                        frequency
                    } else if wavelength > low {
                        frequency / factor
                    } else {
                        let smooth = (original as f32 / wavelength - low_freq_factor as f32)
                            / (high_freq_factor - low_freq_factor) as f32;
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                })
            }
            RotaryScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                attention_factor,
                mscale,
                mscale_all_dim,
                truncate,
            } => {
                let (low, high) = yarn_range(head_dim, theta, original, [beta_fast, beta_slow], truncate)?;
                let mut pair = -1.0f32;
                let mut values = plain.values().to_vec();
                for frequency in &mut values {
                    pair += 1.0;
                    let ramp = ((pair - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    let kept = 1.0 - ramp;
                    // The interpolated one is the inverse of a product, not a quotient.
                    let power = (theta as f32).powf(2.0 * pair / head_dim as f32);
                    let interpolated = 1.0 / (factor as f32 * power);
                    *frequency = interpolated * (1.0 - kept) + *frequency * kept;
                }
                let attention = attention_factor.unwrap_or_else(|| yarn_attention(factor, mscale, mscale_all_dim));
                Self::from_values(values).with_attention_factor(attention)
            }
        };
        match scaled.values().iter().find(|frequency| !frequency.is_finite()) {
            None => Ok(scaled),
            Some(frequency) => Err(Error::invalid(
                NAME,
                format!("{scaling:?} with theta {theta} gives the frequency {frequency}"),
                "use the numbers of a pretrained model's configuration",
            )),
        }
    }
}

/// The pairs between which YaRN blends; in f64, as Python has it.
fn yarn_range(
    head_dim: usize,
    theta: f64,
    original: usize,
    [fast, slow]: [f64; 2],
    truncate: bool,
) -> Result<(f64, f64)> {
    let dim = head_dim as f64;
    let pair = |turns: f64| dim * (original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (low, high) = (pair(fast), pair(slow));
    if !(low.is_finite() && high.is_finite()) {
        return Err(Error::invalid(NAME, format!("YaRN with theta {theta}"), "use a theta above 1, such as 10000"));
    }
    let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min(dim - 1.0));
    Ok((low, if low == high { high + 0.001 } else { high }))
}

/// The factor on cos and sin that YaRN computes if none is given.
fn yarn_attention(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    match (mscale, mscale_all_dim) {
        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => scale(one) / scale(all),
        _ => scale(1.0),
    }
}
