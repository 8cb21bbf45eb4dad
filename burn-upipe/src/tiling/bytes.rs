//! What feed-forward, norms and loss hold, as formulas of their shapes: whole, as a tape keeps them, or tile by tile.

use super::even_bytes;

/// Bytes of a gated feed-forward `down(silu(gate(x)) * up(x))`, over all tokens at once or in tiles.
///
/// ```text
/// f = B n F size, e = B n E size (n = L, or a tile's), w = E F of a gradient
/// ```
///
/// ```
/// use burn_upipe::tiling::FeedForwardBytes;
///
/// let whole = FeedForwardBytes::new(1, 1 << 16, None, 4096, 14336, 2, 2);
/// let tiled = FeedForwardBytes::new(1, 1 << 16, Some(2048), 4096, 14336, 2, 2);
/// assert!(tiled.backward() * 10 < whole.saved() + whole.backward());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedForwardBytes {
    inner: usize,
    width: usize,
    weights: usize,
    wide: FeedForwardWidths,
    casts: usize,
    tiled: bool,
}

/// How many tensors as wide as the feed-forward an implementation has at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedForwardWidths {
    /// That a tape keeps.
    pub kept: usize,
    /// At the peak of the backward pass, those among them.
    pub backward: usize,
}

impl FeedForwardWidths {
    /// Burn: gate, its sigmoid, silu(gate), up, and their product; two gradients.
    pub const BURN: Self = Self { kept: 5, backward: 7 };
    /// PyTorch, whose silu keeps only its input: gate, silu(gate), up, product; of silu, up and product gradients, when two have gone.
    pub const TORCH: Self = Self { kept: 4, backward: 6 };
    /// One kernel for silu(gate) * up that writes gradients where gate and up were: gate, up, product, and its gradient.
    pub const FUSED: Self = Self { kept: 3, backward: 4 };
}

impl FeedForwardBytes {
    /// For `local` tokens, `tile` of them at a time; `gradient` bytes an element of a weight's gradient.
    pub fn new(
        batch: usize,
        local: usize,
        tile: Option<usize>,
        width: usize,
        inner: usize,
        size: usize,
        gradient: usize,
    ) -> Self {
        let row = |width: usize| even_bytes(batch, local, tile.unwrap_or(local), width, size);
        Self {
            inner: row(inner),
            width: row(width),
            weights: width * inner * gradient,
            wide: FeedForwardWidths::BURN,
            casts: 0,
            tiled: tile.is_some(),
        }
    }

    /// Of another implementation than [Burn's](FeedForwardWidths::BURN).
    pub fn with_widths(self, wide: FeedForwardWidths) -> Self {
        Self { wide, ..self }
    }

    /// Of a backend that computes element by element in f32, and so has a half-typed activation once more in it.
    pub fn with_casts(self, size: usize) -> Self {
        Self { casts: if size < 4 { self.inner / size * 4 } else { 0 }, ..self }
    }

    /// The gradient of one of its three matrices.
    pub fn weights(&self) -> usize {
        self.weights
    }

    /// What a tape keeps beside x; tiles keep nothing.
    ///
    /// ```text
    /// 5 f
    /// ```
    pub fn saved(&self) -> usize {
        if self.tiled { 0 } else { self.wide.kept * self.inner }
    }

    /// What is in f32 for a moment, where half types are [cast](Self::with_casts).
    pub fn cast(&self) -> usize {
        self.casts
    }

    /// The peak of a forward pass above x and y, without a tape.
    ///
    /// ```text
    /// 3 f, and a tile's e; 2 f if half types are cast
    /// ```
    pub fn forward(&self) -> usize {
        3 * self.inner + self.casts + if self.tiled { self.width } else { 0 }
    }

    /// The peak of the backward pass above x and dy, with what a tape [saved](Self::saved), and with dx where there are no tiles.
    ///
    /// ```text
    /// whole: max(7 f, f + 3 e + 3 w);  tiles: max(6 f + 5 w, f + 7 w) + 3 e;  3 f beside the first if half types are cast
    /// ```
    pub fn backward(&self) -> usize {
        let Self { inner, width, weights, wide, .. } = *self;
        if self.tiled {
            (6 * inner + self.casts * 3 / 2 + 5 * weights).max(inner + 7 * weights) + 3 * width
        } else {
            (wide.backward * inner + self.casts * 3 / 2).max(inner + 3 * width + 3 * weights)
        }
    }
}

/// Bytes at the peak of a norm's forward pass over `local` tokens above x and y: a row's statistics and x once more, for a tile. Without tiles
/// the normed x is kept for the backward pass.
///
/// ```text
/// tiles: 3 B n E size;  whole: B L E size
/// ```
pub fn norm_bytes(batch: usize, local: usize, tile: Option<usize>, width: usize, size: usize) -> usize {
    match tile {
        Some(tile) => 3 * even_bytes(batch, local, tile, width, size),
        None => batch * local * width * size,
    }
}

/// Bytes at the peak of a norm's backward pass above x, dy and what is added to dx.
///
/// ```text
/// tiles: B L E size + 3 B n E size;  whole: 2 B L E size
/// ```
pub fn norm_backward_bytes(batch: usize, local: usize, tile: Option<usize>, width: usize, size: usize) -> usize {
    let whole = batch * local * width * size;
    whole + norm_bytes(batch, local, tile, width, size)
}

/// Bytes of [`tiled_cross_entropy`](super::tiled_cross_entropy()) above x, with a gradient of `weights` bytes of the output layer.
///
/// ```text
/// z = B n V max(size, 4) of logits (n = L, or a tile's), e = B n E size
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropyBytes {
    /// Logits in f32 or f64.
    logits: usize,
    /// Their gradient in half types, once more in their own.
    halves: usize,
    width: usize,
    weights: usize,
    tiled: bool,
}

impl CrossEntropyBytes {
    /// For `local` tokens, `tile` of them at a time.
    pub fn new(
        batch: usize,
        local: usize,
        tile: Option<usize>,
        vocabulary: usize,
        width: usize,
        size: usize,
        gradient: usize,
    ) -> Self {
        let row = |width: usize, size: usize| even_bytes(batch, local, tile.unwrap_or(local), width, size);
        Self {
            logits: row(vocabulary, size.max(4)),
            halves: if size < 4 { row(vocabulary, size) } else { 0 },
            width: row(width, size),
            weights: vocabulary * width * gradient,
            tiled: tile.is_some(),
        }
    }

    /// The gradient of the output layer.
    pub fn weights(&self) -> usize {
        self.weights
    }

    /// What a tape keeps; tiles keep nothing.
    ///
    /// ```text
    /// z
    /// ```
    pub fn saved(&self) -> usize {
        if self.tiled { 0 } else { self.logits }
    }

    /// The peak of the forward pass.
    ///
    /// ```text
    /// 2 z, in half types z once more in their own, and a tile's e
    /// ```
    pub fn forward(&self) -> usize {
        2 * self.logits + self.halves + if self.tiled { self.width } else { 0 }
    }

    /// The peak of the backward pass, with what is [saved](Self::saved) and, without tiles, dx.
    ///
    /// ```text
    /// whole: max(3 z, z + 2 e + w);  tiles: max(3 z + w, z + 3 w) + 4 e
    /// ```
    pub fn backward(&self) -> usize {
        let Self { logits, halves, width, weights, .. } = *self;
        if self.tiled {
            (3 * logits + weights).max(logits + halves + 3 * weights) + 4 * width
        } else {
            (3 * logits).max(logits + halves + 2 * width + weights)
        }
    }
}
