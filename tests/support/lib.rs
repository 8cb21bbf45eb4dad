//! What the property tests share: reproducible data, ranks, and comparisons that say what differed.

mod devices;
mod modules;
mod rows;
mod step;

use std::fmt::Display;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::group::{ProcessGroup, launch};

pub use devices::{device, other_device, rounds_to, skipped};
pub use modules::{assert_gradients, filled, gradients, norm, summed};
pub use rows::{Row, batch, number, row};
pub use step::{Named, Step};

/// Reproducible values in about -1..1, the same on every machine.
pub fn values(seed: u64, shape: &[usize]) -> TensorData {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let count = shape.iter().product();
    let values: Vec<f64> = (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect();
    TensorData::new(values, shape.to_vec())
}

/// A tensor of the given type on `device`.
pub fn tensor<const D: usize>(data: &TensorData, dtype: DType, device: &Device) -> Tensor<D> {
    Tensor::from_data(data.clone().convert_dtype(dtype), (device, dtype))
}

/// Runs `f` on every rank of a new world.
///
/// # Panics
///
/// If a rank fails.
pub fn on_ranks<T: Send + 'static>(
    ranks: usize,
    f: impl Fn(ProcessGroup) -> burn_context_parallel::Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    launch(ranks, f).unwrap_or_else(|error| panic!("{ranks} ranks: {error}"))
}

/// Asserts that two tensors differ by at most `tolerance` times the largest magnitude of `expected`.
///
/// # Panics
///
/// If they do not, with the case's name and the difference.
pub fn assert_close<const D: usize>(case: impl Display, actual: &Tensor<D>, expected: &Tensor<D>, tolerance: f64) {
    assert_eq!(actual.dims(), expected.dims(), "{case}: shapes");
    let values = |x: &Tensor<D>| -> Vec<f64> { x.to_data().iter::<f64>().collect() };
    let (actual, expected) = (values(actual), values(expected));
    let largest = expected.iter().fold(0f64, |max, value| max.max(value.abs()));
    let worst = actual.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f64, f64::max);
    let finite = actual.iter().all(|value| value.is_finite());
    assert!(
        finite && worst <= tolerance * largest.max(f64::MIN_POSITIVE),
        "{case}: differs by {worst:e} of {largest:e}, allowed is {tolerance:e} of it"
    );
}

/// Asserts that two tensors have the same bits.
///
/// # Panics
///
/// If they have not.
pub fn assert_same_bits<const D: usize>(case: impl Display, actual: &Tensor<D>, expected: &Tensor<D>) {
    assert_eq!(actual.to_data().as_bytes(), expected.to_data().as_bytes(), "{case}: bits differ");
}

/// The README's programs, run as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
