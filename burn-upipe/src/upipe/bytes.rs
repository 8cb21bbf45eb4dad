//! What U-Pipe holds on one rank, as formulas beside the code that allocates it.
//!
//! Bytes above the block's input, weights, output, its gradient and all gradients of inputs. With n = the query heads of a rank and a
//! stage, and g = the key/value heads that they read, one head over the whole sequence takes
//!
//! ```text
//! h = B S D size,   and of this rank's tokens, for all ranks, P (B L D size) = h
//! ```
//!
//! What a part is on its way through (projected, normed, rotated, for one rank at a time) is not counted: a few times n h / P, with
//! norms on heads in f32.

use super::Schedule;

/// Bytes that [`upipe`](super::upipe()) keeps between forward and backward beside its input and output: the log-sum-exp.
///
/// ```text
/// 4 B S h,  h = the rank's query heads, H / P
/// ```
pub fn saved_bytes(schedule: &Schedule, batch: usize, seq: usize) -> usize {
    4 * batch * seq * schedule.split().queries(0).len()
}

/// Bytes at the peak of the forward pass.
///
/// ```text
/// max(q gathered, k and v projected and gathered; q, k, v, out of a stage) = (n + max(4 a, 2 g + n)) h,  a = arriving heads
/// ```
pub fn forward_bytes(schedule: &Schedule, batch: usize, seq: usize, dim: usize, size: usize) -> usize {
    let (queries, held, arriving) = schedule.widest();
    let head = batch * seq * dim * size;
    (queries + (4 * arriving).max(2 * held + queries)) * head + saved_bytes(schedule, batch, seq)
}

/// Bytes at the peak of the backward pass.
///
/// ```text
/// q, d_out, dq of a stage; k, v held; dk, dv summed = (3 n + 4 g) h
/// ```
///
/// In half types q, k, v and d_out exist once more in f32, in which gradients are summed.
pub fn backward_bytes(schedule: &Schedule, batch: usize, seq: usize, dim: usize, size: usize) -> usize {
    backward_bytes_of(schedule, batch, seq, dim, size, size.max(4), size < 4)
}

/// [`backward_bytes`] with a kernel that gives gradients of `result` bytes an element, and reads what is gathered as it is, or
/// `casts` it to f32 first.
pub fn backward_bytes_of(
    schedule: &Schedule,
    batch: usize,
    seq: usize,
    dim: usize,
    size: usize,
    result: usize,
    casts: bool,
) -> usize {
    let (queries, held, _) = schedule.widest();
    let head = batch * seq * dim;
    let gathered = (2 * queries + 2 * held) * head * size;
    let copies = if casts { (2 * queries + 2 * held) * head * 4 } else { 0 };
    let results = (queries + 2 * held) * head * result;
    gathered + copies + results + saved_bytes(schedule, batch, seq)
}

/// Bytes of one stage's query heads on the rank that has the most of them, over the whole sequence.
pub fn stage_bytes(schedule: &Schedule, batch: usize, seq: usize, dim: usize, size: usize) -> usize {
    schedule.widest().0 * batch * seq * dim * size
}
