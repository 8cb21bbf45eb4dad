//! What a rank is doing: phases as `tracing` spans, for whoever listens.
//!
//! Nobody listens unless a subscriber is set for the rank's thread ([`Profiler`] of `burn-upipe` is one). Without it a phase is the
//! look at one number that every `tracing` macro takes, and nothing else: no allocation, no node on the tape.
//!
//! Each phase is a span of the target [`TARGET`], or of a module of one of these crates, with these fields:
//!
//! | field | |
//! |---|---|
//! | `name` | what it is called; without this field, the span's own name |
//! | `index` | which one: of a block, a stage |
//! | `pass` | `"forward"` or `"backward"` |
//! | `bytes` | how much it copies, to the host say |
//!
//! | phase | from | within |
//! |---|---|---|
//! | the collectives, by the names of their methods | [`ProcessGroup`](crate::group::ProcessGroup) | anything |
//! | `attention`, `mlp`, `norm`, `loss`, forward and backward | `burn-upipe` | a block |
//! | `stage` s, forward and backward | U-Pipe | `attention` |
//! | `recompute` | checkpointing and tiling, in the backward pass | what is computed again |
//! | `offload` | offloading: a copy, with its bytes, on the thread that copies; on the rank's own the wait for one, without | nothing, or a block |
//! | `embedding`; `block` i, forward and backward | a model, by [`around`] and [`after`] | forward: `step`; backward: `backward` |
//! | `step` n, `data`, `backward`, `gradient sum`, `optimizer` .. | a training loop, by [`enter`] | |
//!
//! A phase of the backward pass has its begin and its end on the tape. If it has no end there ([`after`], or an input that needs no
//! gradient), or `backward()` is given up before, it ends with the phase around it, which a training loop has by
//! `enter("backward", None)`. With nothing around it there is nothing to tell its end by: [`Profiler`] ends it as it begins.
//!
//! What crosses between ranks is an event of the same target with `sent` and `received`, in the span in which it happens; it is sent
//! where [`Counters`](crate::group::Counters) count, so that both agree.
//!
//! [`Profiler`]: https://docs.rs/burn-upipe

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use tracing::dispatcher;
use tracing::level_filters::LevelFilter;
use tracing::span::{EnteredSpan, Span};

use crate::vjp::{Inputs, custom_vjp};

/// The target of every phase.
pub const TARGET: &str = "phase";

/// Begins a phase, which ends when the result is dropped.
///
/// ```
/// use burn_context_parallel::phase;
///
/// let sum: u64 = {
///     let _phase = phase::enter("counting", None);
///     (0..10).sum()
/// };
/// assert_eq!(sum, 45);
/// ```
pub fn enter(name: &str, index: Option<usize>) -> EnteredSpan {
    tracing::trace_span!(target: TARGET, "phase", name, index).entered()
}

/// Begins a phase that copies so many bytes, to the host say, or back.
pub fn copy(name: &str, bytes: usize) -> EnteredSpan {
    tracing::trace_span!(target: TARGET, "phase", name, bytes).entered()
}

/// Begins one direction of a phase that has two.
pub fn pass(name: &str, index: Option<usize>, pass: Pass) -> EnteredSpan {
    span(name, index, pass).entered()
}

/// The two directions of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// From inputs to results.
    Forward,
    /// From gradients of results to those of inputs.
    Backward,
}

impl Pass {
    /// As the field `pass` has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

fn span(name: &str, index: Option<usize>, pass: Pass) -> Span {
    let pass = pass.name();
    tracing::trace_span!(target: TARGET, "phase", name, index, pass)
}

/// Bytes that this rank has sent to others and received from them.
pub(crate) fn moved(sent: u64, received: u64) {
    tracing::trace!(target: TARGET, sent, received);
}

/// `f(x)` as a phase in both directions: `f` runs in the forward one, and the backward pass of what `f` did in the backward one.
///
/// The backward phase begins when the gradient of the result is there, and ends when that of `x` is. If `x` needs no gradient, it ends
/// with the phase around it, or [as it begins](self). While nobody listens this is `f(x)`. While somebody does, values are the same; if `x` is used outside of
/// `f` as well, and several times within, the sum of its gradients is taken in another order.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::phase;
///
/// let x = Tensor::<1>::from_floats([3.0], &Device::flex().autodiff()).require_grad();
/// let y = phase::around("square", None, x.clone(), |x| x.clone() * x);
/// assert_eq!(x.grad(&y.backward()).unwrap().into_scalar::<f32>(), 6.0);
/// ```
pub fn around<const D: usize, const E: usize>(
    name: &'static str,
    index: Option<usize>,
    x: Tensor<D>,
    f: impl FnOnce(Tensor<D>) -> Tensor<E>,
) -> Tensor<E> {
    let forward = span(name, index, Pass::Forward);
    if forward.is_disabled() {
        return f(x);
    }
    let backward = Backward::new(name, index);
    let x = backward.clone().ends(x);
    let y = forward.in_scope(|| f(x));
    backward.begins(y)
}

/// [`around`] for what can fail.
///
/// # Errors
///
/// Those of `f`.
pub fn try_around<const D: usize, const E: usize, Err>(
    name: &'static str,
    index: Option<usize>,
    x: Tensor<D>,
    f: impl FnOnce(Tensor<D>) -> Result<Tensor<E>, Err>,
) -> Result<Tensor<E>, Err> {
    let forward = span(name, index, Pass::Forward);
    if forward.is_disabled() {
        return f(x);
    }
    let backward = Backward::new(name, index);
    let x = backward.clone().ends(x);
    let y = forward.in_scope(|| f(x))?;
    Ok(backward.begins(y))
}

/// [`around`] for what has no float input, an embedding say: its backward phase ends with the phase around it, or
/// [as it begins](self).
pub fn after<const E: usize>(name: &'static str, index: Option<usize>, f: impl FnOnce() -> Tensor<E>) -> Tensor<E> {
    let forward = span(name, index, Pass::Forward);
    if forward.is_disabled() {
        return f();
    }
    let y = forward.in_scope(f);
    Backward::new(name, index).begins(y)
}

/// A phase of the backward pass that begins in one step of the tape and ends in another. It is known by now: the tape's steps run
/// wherever `backward()` is called.
#[derive(Clone)]
struct Backward {
    name: &'static str,
    index: Option<usize>,
    open: Arc<Mutex<Option<Span>>>,
}

impl Backward {
    fn new(name: &'static str, index: Option<usize>) -> Self {
        Self { name, index, open: Arc::default() }
    }

    /// The phase begins when this tensor's gradient is there.
    fn begins<const D: usize>(self, y: Tensor<D>) -> Tensor<D> {
        through(y, move || {
            // Not entered by a guard: those stay where they were made.
            let span = span(self.name, self.index, Pass::Backward);
            span.with_subscriber(|(id, dispatch)| dispatch.enter(id));
            *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(span);
        })
    }

    /// The phase ends when this tensor's gradient is there.
    fn ends<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        through(x, move || {
            if let Some(span) = self.open.lock().unwrap_or_else(PoisonError::into_inner).take() {
                span.with_subscriber(|(id, dispatch)| dispatch.exit(id));
            }
        })
    }
}

/// `x`, whose gradient passes by `look`.
fn through<const D: usize>(x: Tensor<D>, look: impl FnOnce() + Send + 'static) -> Tensor<D> {
    if !x.is_autodiff() {
        return x;
    }
    let inputs = Inputs::new().input(&x);
    custom_vjp(inputs, x.inner(), move |dx: Tensor<D>| {
        look();
        vec![Some(dx.into_dispatch())]
    })
}

/// `work` for another thread of this rank, whose phases go to whoever listens here.
pub fn carried<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let listener =
        (LevelFilter::current() != LevelFilter::OFF).then(|| dispatcher::get_default(dispatcher::Dispatch::clone));
    move || match listener {
        Some(listener) => dispatcher::with_default(&listener, work),
        None => work(),
    }
}
