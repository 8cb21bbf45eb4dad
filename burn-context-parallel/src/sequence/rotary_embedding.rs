//! Rotary positions as a module, for models that hand positions on explicitly.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::{RotaryFrequencies, RotaryScaling, apply_rotary};
use crate::{Error, OrRaise, Result};

const NAME: &str = "RotaryEmbedding";

/// Configuration of [`RotaryEmbedding`].
#[derive(Config, Debug)]
pub struct RotaryEmbeddingConfig {
    /// Head dimension D; even.
    pub head_dim: usize,
    /// Base of the frequencies.
    #[config(default = 10000.0)]
    pub theta: f64,
    /// How they are rescaled.
    #[config(default = "RotaryScaling::Default")]
    pub scaling: RotaryScaling,
}

impl RotaryEmbeddingConfig {
    /// The module; it has no parameters, and no device.
    ///
    /// # Errors
    ///
    /// As [`RotaryFrequencies::scaled`].
    pub fn init(&self) -> Result<RotaryEmbedding> {
        RotaryFrequencies::scaled(self.head_dim, self.theta, &self.scaling).map(RotaryEmbedding::new)
    }
}

/// Rotates queries or keys by the positions that come with them (half-rotation, as Hugging Face's Llama).
///
/// Unlike `burn::nn::RotaryEncoding`, which rotates interleaved pairs and counts from a start, it takes any positions: a shard's
/// are not 0..L. (burn-upipe's `UPipeAttention` rotates by itself.)
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_context_parallel::sequence::RotaryEmbeddingConfig;
///
/// let device = Device::flex();
/// let rotary = RotaryEmbeddingConfig::new(8).init()?;
/// let x = Tensor::<4>::random([1, 4, 2, 8], Distribution::Default, &device);
/// let whole = rotary.forward(x.clone(), Tensor::<2, Int>::from_ints([[0, 1, 2, 3]], &device));
/// // The second half of the tokens, as another rank has them.
/// let half = rotary.forward(x.narrow(1, 2, 2), Tensor::<2, Int>::from_ints([[2, 3]], &device));
/// assert_eq!(half.clone().into_data(), whole.narrow(1, 2, 2).into_data());
///
/// let error = rotary.try_forward(half, Tensor::<2, Int>::from_ints([[0, 1, 2]], &device)).unwrap_err();
/// assert!(error.to_string().contains("positions of shape [1, 3] for x of shape [1, 2, 2, 8]"));
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
///
/// # References
///
/// RoFormer, arXiv 2104.09864.
#[derive(Module, Debug)]
pub struct RotaryEmbedding {
    #[module(skip)]
    frequencies: RotaryFrequencies,
}

impl RotaryEmbedding {
    /// With frequencies of any origin.
    pub fn new(frequencies: RotaryFrequencies) -> Self {
        Self { frequencies }
    }

    /// What it rotates by.
    pub fn frequencies(&self) -> &RotaryFrequencies {
        &self.frequencies
    }

    /// Rotates every head of `x`; tracked. Positions may be on any device.
    ///
    /// # Shapes
    ///
    /// `x`: [B, L, heads, D]; `positions`: [B, L], or [1, L] for all rows -> [B, L, heads, D].
    ///
    /// # Panics
    ///
    /// [Raises](crate::raise) what [`try_forward`](Self::try_forward) returns as an error.
    pub fn forward(&self, x: Tensor<4>, positions: Tensor<2, Int>) -> Tensor<4> {
        self.try_forward(x, positions).or_raise()
    }

    /// [`forward`](Self::forward), with its errors as values.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if D is not the frequencies', or there is not one position per token.
    ///
    /// # Memory
    ///
    /// A table of B L D elements is kept for the backward pass, and nothing of `x`. Rotate q and k with
    /// [`RotaryFrequencies::table`] and [`apply_rotary`] to share one.
    pub fn try_forward(&self, x: Tensor<4>, positions: Tensor<2, Int>) -> Result<Tensor<4>> {
        let [batch, len, _, dim] = x.dims();
        if dim != self.frequencies.head_dim() {
            return Err(Error::invalid(
                NAME,
                format!("heads of {dim} dimensions, frequencies for {}", self.frequencies.head_dim()),
                "pass [B, L, heads, D] with the configured head_dim",
            ));
        }
        let [rows, count] = positions.dims();
        if count != len || !(rows == batch || rows == 1) {
            return Err(Error::invalid(
                NAME,
                format!("positions of shape {:?} for x of shape {:?}", positions.dims(), x.dims()),
                "pass [B, L], or [1, L], one position per token",
            ));
        }
        if rows * len == 0 {
            return Ok(x);
        }
        let positions: Vec<i64> = positions.inner().into_data().iter::<i64>().collect();
        let table = self.frequencies.table(&positions, rows, x.dtype(), &x.device().inner());
        Ok(apply_rotary(x, &table))
    }
}
