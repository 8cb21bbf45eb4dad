//! Collectives as differentiable tensor operations, each beside its adjoint.
//!
//! Ranks differentiate one objective together: the sum over ranks of what each of them calls `backward()` on. Under that
//! convention the adjoints are
//!
//! | forward | backward |
//! |---|---|
//! | [`all_to_all`] (split `a`, concatenate `b`) | [`all_to_all`] (split `b`, concatenate `a`) |
//! | [`all_gather`] | [`reduce_scatter`] |
//! | [`reduce_scatter`] | [`all_gather`] |
//! | [`all_reduce`] (sum) | [`all_reduce`] (sum) |
//! | [`broadcast`] | [`reduce`] |
//! | [`reduce`] | [`broadcast`] |
//! | [`shift`] by n | [`shift`] by -n |
//!
//! A loss that every rank holds in full is *not* summed again: see `TiledLinearCrossEntropy` of `burn-upipe`, whose gradient is that
//! of the local part.
//!
//! All of them work on tensors of any device, tracked or not; all ranks of the group must call them in the same order, and a
//! backward pass runs them in the reverse order, so that ranks built from the same code agree.

mod exchange;
pub(crate) mod norm;
mod reduce;

pub use exchange::{all_gather, all_to_all, reduce_scatter, shift};
pub use norm::clip_grad_norm;
pub use reduce::{all_reduce, broadcast, reduce, sum_gradients};
