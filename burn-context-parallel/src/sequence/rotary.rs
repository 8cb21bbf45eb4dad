//! Rotary positions (half-rotation, as Hugging Face's Llama), from positions and never from indices.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::vjp::{Inputs, custom_vjp};
use crate::{Error, Result};

/// The largest head dimension that rotary positions are made for.
pub const MAX_HEAD_DIM: usize = 1 << 16;

/// The angular frequency of each pair of dimensions.
///
/// ```text
/// inv_freq[i] = theta^(-2i / D),  i in 0..D/2
/// ```
///
/// # References
///
/// RoFormer, arXiv 2104.09864.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryFrequencies {
    inv_freq: Arc<[f32]>, // every layer has a handle to them
    attention_factor: f64,
}

impl RotaryFrequencies {
    /// The default frequencies for heads of `head_dim` dimensions.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `head_dim` is odd, zero or beyond [`MAX_HEAD_DIM`], or `theta` is not a positive number in f32.
    pub fn new(head_dim: usize, theta: f64) -> Result<Self> {
        const NAME: &str = "RotaryFrequencies::new";
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(Error::invalid(NAME, format!("head_dim {head_dim}"), "rotary pairs need an even head_dim"));
        }
        if head_dim > MAX_HEAD_DIM {
            return Err(Error::invalid(NAME, format!("head_dim {head_dim}"), format!("use at most {MAX_HEAD_DIM}")));
        }
        // In f32, as it is used: 1e300 would be infinite, and all frequencies but the first zero.
        if !((theta as f32).is_normal() && theta > 0.0) {
            return Err(Error::invalid(NAME, format!("theta {theta}"), "use a positive number, such as 10000"));
        }
        let half = head_dim / 2;
        // In f32, as PyTorch computes them: pretrained weights expect these very frequencies.
        let inv_freq =
            (0..half).map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / head_dim as f32)).collect::<Vec<_>>();
        Ok(Self::from_values(inv_freq))
    }

    pub(super) fn from_values(inv_freq: Vec<f32>) -> Self {
        Self { inv_freq: inv_freq.into(), attention_factor: 1.0 }
    }

    /// Multiplies cos and sin, hence every rotated vector, by `factor`: scores by its square.
    pub(super) fn with_attention_factor(mut self, factor: f64) -> Self {
        self.attention_factor = factor;
        self
    }

    /// What cos and sin are multiplied by; 1 but for [YaRN](super::RotaryScaling::Yarn).
    pub fn attention_factor(&self) -> f64 {
        self.attention_factor
    }

    /// Rescales each frequency, for context extension.
    pub fn map(mut self, f: impl Fn(f32) -> f32) -> Self {
        self.inv_freq = self.inv_freq.iter().map(|value| f(*value)).collect();
        self
    }

    /// The head dimension D.
    pub fn head_dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// The frequencies, [D / 2].
    pub fn values(&self) -> &[f32] {
        &self.inv_freq
    }

    /// Cosines and sines for `positions` (rows x length, on the host).
    ///
    /// Each is multiplied by [`attention_factor`](Self::attention_factor). Angles are computed in f64: at position 5 million a product in f32 is off by a quarter of a radian.
    ///
    /// # Memory
    ///
    /// `rows * length * D * size` bytes for both tables together.
    ///
    /// # Panics
    ///
    /// If `positions` is not a whole number of rows.
    pub fn table(&self, positions: &[i64], rows: usize, dtype: DType, device: &Device) -> RotaryTable {
        let half = self.inv_freq.len();
        assert!(rows > 0 && positions.len().is_multiple_of(rows), "positions come in whole rows");
        let mut cos = Vec::with_capacity(positions.len() * half);
        let mut sin = Vec::with_capacity(positions.len() * half);
        for position in positions {
            for frequency in self.inv_freq.iter() {
                let (s, c) = (*position as f64 * f64::from(*frequency)).sin_cos();
                cos.push(c * self.attention_factor);
                sin.push(s * self.attention_factor);
            }
        }
        let shape = [rows, positions.len() / rows, 1, half];
        let tensor = |values: Vec<f64>| {
            Tensor::<4>::from_data(TensorData::new(values, shape).convert_dtype(dtype), (device, dtype))
        };
        RotaryTable { cos: tensor(cos), sin: tensor(sin) }
    }
}

/// Cosines and sines, each [B, L, 1, D / 2], without autodiff.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl RotaryTable {
    fn rotate(&self, x: Tensor<4>, sign: f64) -> Tensor<4> {
        let half = x.dims()[3] / 2;
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let sin = if sign < 0.0 { -sin } else { sin };
        let first = x.clone().narrow(3, 0, half);
        let second = x.narrow(3, half, half);
        let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
        Tensor::cat(vec![rotated_first, second * cos + first * sin], 3)
    }
}

/// Rotates every head of `x` [B, L, heads, D] by its position's angles; tracked.
///
/// ```text
/// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin),  x1, x2 = the halves of D
/// ```
///
/// The table's cos and sin carry the attention factor, if there is one.
///
/// # Memory
///
/// Nothing is kept for the backward pass but a handle to the table.
pub fn apply_rotary(x: Tensor<4>, table: &RotaryTable) -> Tensor<4> {
    let inputs = Inputs::new().input(&x);
    let saved = table.clone();
    let y = table.rotate(x.inner(), 1.0);
    custom_vjp(inputs, y, move |dy: Tensor<4>| vec![Some(saved.rotate(dy, -1.0).into_dispatch())])
}

/// Bytes at the peak of [`apply_rotary`] above its input: the result and its halves, both or one with what it is added to.
///
/// ```text
/// 3/2 B L heads D * size
/// ```
pub fn rotary_bytes(batch: usize, local: usize, heads: usize, dim: usize, size: usize) -> usize {
    3 * batch * local * heads * dim * size / 2
}

/// The adjoint of [`apply_rotary`]: a rotation back (times the same attention factor), for gradients without
/// autodiff.
pub fn apply_rotary_adjoint(dy: Tensor<4>, table: &RotaryTable) -> Tensor<4> {
    table.rotate(dy, -1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gives_no_frequencies_is_an_error() {
        for (head_dim, theta) in [(0, 1e4), (3, 1e4), (4, 0.0), (4, -1.0), (4, f64::NAN), (4, 1e300), (4, 1e-300)] {
            assert!(RotaryFrequencies::new(head_dim, theta).is_err(), "head_dim {head_dim}, theta {theta}");
        }
    }
}
