//! What attention holds on a CubeCL device.

use burn::tensor::DType;

use super::super::{FlashOptions, FlashShape};
use super::launch::tile;
use super::table::EXTREMES;

/// The fewest rows of a tile that is chosen.
const LEAST_TILE: usize = 8;

/// Bytes that [`forward`](crate::flash::forward) holds at most at once above its inputs, the results among them, on a CubeCL device, before the
/// device's pools round them up.
///
/// ```text
/// out + lse + table
/// ```
///
/// Linear in Sq and Sk; there are no partial results. The table holds the mask, of `R` rows of labels (1, or B where sequences have their own):
/// 64 bytes, `4 R (Sq + Sk)` with documents, `4 R (2 Sq + Sk)` with positions per token, and with either of them 16 R for each tile of queries
/// and of keys, of 8 rows at least, or as many as a forced blueprint has.
///
/// ```
/// use burn::tensor::DType;
/// use burn_context_parallel::flash::{FlashOptions, FlashShape, device_forward_bytes};
///
/// let shape = FlashShape { batch: 1, q_heads: 8, kv_heads: 2, q_len: 1 << 20, k_len: 1 << 20, head_dim: 64 };
/// assert_eq!(device_forward_bytes(&shape, DType::BF16, &FlashOptions::causal()), (8 << 20) * (2 * 64 + 4) + 64);
/// ```
pub fn device_forward_bytes(shape: &FlashShape, dtype: DType, options: &FlashOptions) -> usize {
    let results = options.result_dtype(dtype).size();
    results * count(&shape.q()) + 4 * count(&shape.rows()) + table_bytes(shape, options)
}

/// Bytes that [`backward`](crate::flash::backward) holds at most at once above its inputs, the results among them, on a CubeCL device, before
/// the device's pools round them up: `dq + dk + dv`, and a [table](device_forward_bytes) for each of the two kernels.
pub fn device_backward_bytes(shape: &FlashShape, dtype: DType, options: &FlashOptions) -> usize {
    let results = options.result_dtype(dtype).size();
    results * (count(&shape.q()) + 2 * count(&shape.kv())) + 2 * table_bytes(shape, options)
}

fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

fn table_bytes(shape: &FlashShape, options: &FlashOptions) -> usize {
    let (queries, keys) = (shape.q_len, shape.k_len);
    let documents =
        options.documents.as_ref().map_or(0, |(q, k)| 4 * (q.ids().rows() * queries + k.ids().rows() * keys));
    let rows = |labels: [usize; 2]| labels.into_iter().max().unwrap_or(1);
    let positions =
        options.positions.as_ref().map_or(0, |(q, k)| 4 * rows([q.rows(), k.rows()]) * (2 * queries + keys));
    let most = rows([
        options.documents.as_ref().map_or(0, |(q, k)| rows([q.ids().rows(), k.ids().rows()])),
        options.positions.as_ref().map_or(0, |(q, k)| rows([q.rows(), k.rows()])),
    ]);
    let least = options.blueprint.map_or(LEAST_TILE, |forced| {
        let tiles = [forced.forward, forced.queries, forced.keys];
        tiles.map(|tiles| tiles.own.min(tile(forced.family, &tiles))).into_iter().min().unwrap_or(LEAST_TILE)
    });
    let tiles = queries.div_ceil(least.max(1)) + keys.div_ceil(least.max(1));
    64 + documents + positions + most * 4 * EXTREMES * tiles
}
