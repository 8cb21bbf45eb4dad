//! What [`ulysses`](super::ulysses()) holds on one rank, as formulas of its shapes.

use super::HeadSplit;

/// Bytes that [`ulysses`](super::ulysses()) keeps on one rank between forward and backward beside its output: q, k, v of this rank's heads
/// over the whole sequence, and the log-sum-exp.
///
/// ```text
/// B S ((h + 2 g) D * size + 4 h),  h, g = this rank's query and key/value heads
/// ```
pub fn ulysses_bytes(split: &HeadSplit, rank: usize, batch: usize, seq: usize, dim: usize, size: usize) -> usize {
    UlyssesBytes::new(split, rank, batch, seq, dim, size).saved()
}

/// What attention's kernel takes beside its inputs and results, and how it gives gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelBytes {
    /// Scratch of the forward and of the backward pass.
    pub scratch: [usize; 2],
    /// Bytes of an element of the gradients as it gives them.
    pub result: usize,
    /// Whether half types exist once more in f32 while it runs backward: q, k, v and d_out.
    pub casts: bool,
}

impl KernelBytes {
    /// Gradients of `elements`, as the kernel gives them.
    pub fn results(&self, elements: usize) -> usize {
        elements * self.result
    }

    /// What is cast of `elements` of `size` bytes.
    pub fn cast(&self, elements: usize, size: usize) -> usize {
        if self.casts && size < 4 { 4 * elements } else { 0 }
    }
}

/// Bytes of the tensors of one rank's [`ulysses`](super::ulysses()), and the peaks that they add up to.
///
/// ```text
/// q = B L H D size, k = B L G D size; of this rank's heads q' = B S h D size, k' = B S g D size; lse = 4 B S h; sent = (P - 1)/P q
/// ```
///
/// ```
/// use burn_context_parallel::attention::{HeadSplit, KernelBytes, UlyssesBytes};
///
/// let bytes = UlyssesBytes::new(&HeadSplit::new(32, 8, 8)?, 0, 1, 3 << 20, 128, 2);
/// let kernel = KernelBytes { scratch: [0; 2], result: 2, casts: false };
/// assert!(bytes.backward(&kernel, false) < bytes.backward(&kernel, true));
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UlyssesBytes {
    /// q of this rank's tokens; out and d_out are as large.
    pub q: usize,
    /// One of k and v of this rank's tokens.
    pub k: usize,
    /// q' of this rank's heads.
    pub q_heads: usize,
    /// One of k' and v' of this rank's heads.
    pub k_heads: usize,
    /// A statistic of each row of this rank's heads: lse, or delta.
    pub rows: usize,
    /// What an exchange of q has on its way to others.
    pub sent: usize,
    size: usize,
}

impl UlyssesBytes {
    /// For `seq` tokens of all ranks, in equal parts, the last one padded.
    pub fn new(split: &HeadSplit, rank: usize, batch: usize, seq: usize, dim: usize, size: usize) -> Self {
        let ranks = split.ranks();
        let (h, g) = (split.queries(rank).len(), split.keys(rank).len());
        let heads = |count: usize, tokens: usize| batch * tokens * count * dim * size;
        let q = heads(split.heads(), seq.div_ceil(ranks));
        Self {
            q,
            k: heads(split.kv_heads(), seq.div_ceil(ranks)),
            q_heads: heads(h, seq),
            k_heads: heads(g, seq),
            rows: 4 * batch * seq * h,
            sent: q / ranks * (ranks - 1),
            size,
        }
    }

    /// [`ulysses_bytes`].
    pub fn saved(&self) -> usize {
        self.q_heads + 2 * self.k_heads + self.rows
    }

    /// The peak of the forward pass, with q, k and v of this rank's tokens. `kept` says whether somebody holds these to its end: the
    /// caller, or a transport that copies.
    ///
    /// ```text
    /// max(q + 2 k + q' + 2 k' + sent, [q + 2 k] + q' + 2 k' + q' + lse + max(scratch, q + 2 sent))
    /// ```
    pub fn forward(&self, kernel: &KernelBytes, kept: bool) -> usize {
        let input = self.q + 2 * self.k;
        let attending = if kept { input } else { 0 } + self.saved() + self.q_heads;
        let exchanging = input + self.q_heads + 2 * self.k_heads + self.sent;
        exchanging.max(attending + kernel.scratch[0].max(self.q + 2 * self.sent))
    }

    /// The peak of the backward pass, with what was [saved](Self::saved), out, d_out and the gradients of q, k and v. `kept` says whether all
    /// that was sent or used is held to its end, as by a transport that copies.
    ///
    /// ```text
    /// here = saved + d_out' + delta, grads = dq' + dk' + dv' as the kernel gives them, back = q + 2 k + sent
    /// not kept: max(out + d_out + here + sent, here + grads + casts + scratch, grads + back)
    /// kept:     max(out + d_out + here + sent, out + d_out + here + grads + max(casts + scratch, back))
    /// ```
    pub fn backward(&self, kernel: &KernelBytes, kept: bool) -> usize {
        let output = 2 * self.q;
        let here = self.saved() + self.q_heads + self.rows;
        let gradients = self.gradients(kernel);
        let attending = here + gradients + kernel.cast((2 * self.q_heads + 2 * self.k_heads) / self.size, self.size);
        let returning = gradients + self.q + 2 * self.k + self.sent;
        let (before, after) = if kept { (output, output + here) } else { (0, 0) };
        (output + here + self.sent).max(before + attending + kernel.scratch[1]).max(after + returning)
    }

    /// dq', dk', dv'. A kernel that casts nothing sums dk and dv in its result's type only where query heads share them.
    fn gradients(&self, kernel: &KernelBytes) -> usize {
        let alone = !kernel.casts && self.k_heads == self.q_heads;
        let keys = if alone { 2 * self.k_heads } else { kernel.results(2 * self.k_heads / self.size) };
        kernel.results(self.q_heads / self.size) + keys
    }
}
