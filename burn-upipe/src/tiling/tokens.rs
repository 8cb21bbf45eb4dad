//! Modules that treat every token alike, over tiles of tokens.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_context_parallel::attention::current;
use burn_context_parallel::phase;

use crate::recompute::{Join, even_tiles, recompute};

/// The sequence dim of [B, L, E].
const SEQUENCE: usize = 1;

/// The tiles of at most about `tile` tokens into which a rank's `local` tokens are cut: of equal length but for one token.
///
/// In a scope every rank gets equally many tiles, also if their lengths differ: a collective inside a tile then meets on
/// all ranks. A rank with few tokens limits how many tiles there can be.
///
/// ```
/// assert_eq!(burn_upipe::tiling::tiles(10, 4), [4, 3, 3]);
/// ```
pub fn tiles(local: usize, tile: usize) -> Vec<usize> {
    let (longest, shortest) = match current() {
        Some(context) if context.local_len() == local => {
            let layout = context.layout();
            let lengths = || (0..layout.ranks()).map(|rank| layout.local_len(rank));
            (lengths().max().unwrap_or(local), lengths().min().unwrap_or(local))
        }
        _ => (local, local),
    };
    even_tiles(local, longest.div_ceil(tile.max(1)).min(shortest.max(1)))
}

/// Bytes of one tile of a function that keeps `width` values a token: what tiling leaves of `local` tokens.
pub fn tile_bytes(batch: usize, local: usize, tile: usize, width: usize, size: usize) -> usize {
    let longest = tiles(local, tile).into_iter().max().unwrap_or(0);
    batch * longest * width * size
}

/// [`tile_bytes`] outside any scope, where all ranks have `local` tokens.
pub fn even_bytes(batch: usize, local: usize, tile: usize, width: usize, size: usize) -> usize {
    let count = local.div_ceil(tile.max(1)).clamp(1, local.max(1));
    batch * local.div_ceil(count) * width * size
}

macro_rules! tiled {
    ($(#[$doc:meta])* $name:ident, $phase:literal) => {
        $(#[$doc])*
        #[derive(Module, Debug)]
        pub struct $name<M> {
            /// The module itself.
            pub inner: M,
            #[module(skip)]
            tile: Option<usize>,
        }

        impl<M: Module + 'static> $name<M> {
            /// Runs `inner` over tiles of at most `tile` tokens; `None`, or 0, runs it over all at once and keeps its
            /// intermediates.
            pub fn new(inner: M, tile: Option<usize>) -> Self {
                Self { inner, tile: tile.filter(|tile| *tile > 0) }
            }

            /// `f(inner, x)`, tile by tile along the sequence; `f` must treat every token alike and keep their number.
            ///
            /// # Shapes
            ///
            /// [B, L, E] -> [B, L, E'].
            ///
            /// # Panics
            ///
            /// [Raises](burn_context_parallel::raise) if `f` changes the number of tokens, or does not give the same twice
            /// (dropout).
            ///
            /// # Memory
            ///
            /// `x` is kept; `f`'s intermediates exist for one tile ([`tile_bytes`]), in both directions.
            pub fn forward<F>(&self, x: Tensor<3>, f: F) -> Tensor<3>
            where
                F: Fn(&M, Tensor<3>) -> Tensor<3> + Send + 'static,
            {
                let Some(tile) = self.tile else {
                    // One direction: around steps of the tape whose input others have, too, gradients would be added in
                    // another order.
                    let _phase = phase::pass($phase, None, phase::Pass::Forward);
                    return f(&self.inner, x);
                };
                phase::around($phase, None, x, |x| {
                    let cut = tiles(x.dims()[SEQUENCE], tile);
                    recompute(
                        concat!(stringify!($name), "::forward"),
                        &self.inner,
                        x,
                        None,
                        SEQUENCE,
                        cut,
                        Join::Concat,
                        move |module, x, _| f(module, x),
                    )
                })
            }
        }
    };
}

tiled!(
    /// A feed-forward block over tiles of tokens.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_upipe::tiling::TiledMlp;
    ///
    /// let device = Device::flex().autodiff();
    /// let mlp = TiledMlp::new(LinearConfig::new(4, 4).init(&device), Some(3));
    /// let x = Tensor::<3>::ones([2, 7, 4], &device).require_grad();
    /// let y = mlp.forward(x.clone(), |linear: &Linear, x| linear.forward(x));
    /// assert_eq!(y.dims(), [2, 7, 4]);
    /// let grads = y.sum().backward();
    /// assert!(mlp.inner.weight.val().grad(&grads).is_some());
    /// ```
    TiledMlp, "mlp"
);
tiled!(
    /// A normalisation over tiles of tokens.
    ///
    /// ```
    /// use burn::nn::{RmsNorm, RmsNormConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_upipe::tiling::TiledNorm;
    ///
    /// let device = Device::flex().autodiff();
    /// let norm = TiledNorm::new(RmsNormConfig::new(4).init(&device), Some(2));
    /// let y = norm.forward(Tensor::<3>::ones([1, 5, 4], &device), |norm: &RmsNorm, x| norm.forward(x));
    /// assert_eq!(y.dims(), [1, 5, 4]);
    /// ```
    TiledNorm, "norm"
);
