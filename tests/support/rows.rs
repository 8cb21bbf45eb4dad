//! Sequences of which some targets count, and what is read off a loss.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_context_parallel::sequence::{Batch, IGNORE_INDEX};

/// Ids are below this.
const VOCABULARY: i64 = 23;

/// Tokens, and their labels.
pub type Row = (Vec<i64>, Vec<i64>);

/// A row of `len` tokens of which only the last `valid` targets count.
pub fn row(seed: i64, len: usize, valid: usize) -> Row {
    let tokens: Vec<i64> = (0..len as i64).map(|i| (i * i * 3 + seed * 7 + i) % VOCABULARY).collect();
    let labels = tokens.iter().enumerate().map(|(i, id)| if i >= len - valid { *id } else { IGNORE_INDEX }).collect();
    (tokens, labels)
}

/// Rows of one length.
///
/// # Panics
///
/// If there are none, or they differ in length.
pub fn batch(rows: &[Row]) -> Batch {
    let labels = rows.iter().flat_map(|(_, labels)| labels.clone()).collect::<Vec<_>>();
    let len = labels.len() / rows.len();
    let labels = Tensor::<2, Int>::from_data(TensorData::new(labels, [rows.len(), len]), &Device::flex());
    let tokens: Vec<_> = rows.iter().map(|(tokens, _)| tokens.clone()).collect();
    Batch::from_rows(&tokens).expect("rows of one length").with_labels(labels).expect("as many labels")
}

/// The value of a tensor of one element, tracked or not.
///
/// # Panics
///
/// If it has none.
pub fn number(x: &Tensor<1>) -> f64 {
    x.clone().inner().into_data().iter::<f64>().next().expect("one element")
}
