//! The extension trait: the two kernels that every backend brings, and their place on the tape.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape};

use super::FlashOptions;

/// Exact attention in O(S) memory, as the operations of a backend.
///
/// Layouts: q, out, d_out, dq `[B, H, Sq, D]`; k, v, dk, dv `[B, G, Sk, D]`; lse, delta `[B, H, Sq]` in f32 (f64 beside
/// f64). Query head `h` reads key/value head `h / (H / G)`.
///
/// Users call [`flash_attention`](super::flash_attention); schedules that bring their own backward pass call
/// [`forward`](super::forward) and [`backward`](super::backward). All of them check their arguments first: here, what does
/// not fit [`raise`](crate::raise)s, and a device without an implementation panics.
#[backend_extension(Cube: cfg(feature = "cube"), Flex: cfg(feature = "flex"), Autodiff)]
pub trait FlashOps: Backend {
    /// The output, and the natural logarithm of each row's sum of exponentials.
    ///
    /// Rows that see no key have output 0 and log-sum-exp -inf. Through autodiff both outputs are differentiable.
    fn flash_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradients of q, k and v.
    ///
    /// `delta = rowsum(d_out * out) - d_lse`: given from outside, so that a ring can pass the lse and delta of the whole
    /// sequence, and so that ranks exchange D times fewer bytes than `out` has. Not differentiable itself.
    fn flash_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`flash_backward`](Self::flash_backward), with dk and dv added to sums of earlier calls: in place, if nobody else holds
    /// them. For schedules that meet one key/value head, or block of keys, several times.
    #[allow(clippy::too_many_arguments)] // the operation's own inputs
    fn flash_backward_onto(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        dk: FloatTensor<Self>,
        dv: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `rowsum(d_out * out)`, in the type of row statistics: what [`flash_backward`](Self::flash_backward) subtracts.
    fn flash_delta(d_out: FloatTensor<Self>, out: FloatTensor<Self>) -> FloatTensor<Self> {
        row_dot::<Self>(d_out, out)
    }

    /// [`flash_delta`](Self::flash_delta) less `d_lse`, the gradient of the log-sum-exp.
    fn flash_delta_less(
        d_out: FloatTensor<Self>,
        out: FloatTensor<Self>,
        d_lse: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::float_sub(row_dot::<Self>(d_out, out), d_lse)
    }
}

/// The gradient of the log-sum-exp on its way from one step to the other.
type Stash<B> = Arc<Mutex<Option<FloatTensor<B>>>>;

/// `out` as a function of q, k, v. Runs after [`LseStep`], which is its child in the graph.
#[derive(Debug)]
struct OutStep;

#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    d_lse: Stash<B>,
    options: FlashOptions,
}

impl<B: Backend + FlashOps> Backward<B, 3> for OutStep {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let Saved { q, k, v, out, lse, d_lse, options } = ops.state;
        let delta = match d_lse.lock().expect("no step panics while holding this").take() {
            Some(d_lse) => B::flash_delta_less(d_out.clone(), out, d_lse),
            None => B::flash_delta(d_out.clone(), out),
        };
        let (dq, dk, dv) = B::flash_backward(q, k, v, d_out, lse, delta, options);
        for (parent, grad) in ops.parents.iter().zip([dq, dk, dv]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

/// `lse` as a function of `out`, as far as the graph knows: a step has one output, so the second one hangs on the first,
/// leaves its gradient in the stash, and adds nothing to the gradient of `out`.
#[derive(Debug)]
struct LseStep;

/// What `out` looks like: who has no use for lse keeps this step to the end of the backward pass, and must not keep `out` with it.
type Like<B> = (Shape, Device<B>, DType);

impl<B: Backend> Backward<B, 1> for LseStep {
    type State = (Stash<B>, Like<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_lse = grads.consume::<B>(&ops.node);
        let (stash, (shape, device, dtype)) = ops.state;
        *stash.lock().expect("no step panics while holding this") = Some(d_lse);
        if let [Some(parent)] = &ops.parents {
            // Something must be there for `OutStep` to consume when only lse is used.
            let zeros = B::float_zeros(shape, &device, dtype.into());
            grads.register::<B>(parent.id, zeros);
        }
    }
}

/// `rowsum(a * b)` over the last dimension of `[B, H, S, D]`, in the type of row statistics.
fn row_dot<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = crate::buffer::accumulator(b.dtype());
    let shape = a.shape();
    let rows = Shape::from([shape[0], shape[1], shape[2]]);
    if shape.num_elements() == 0 {
        return B::float_zeros(rows, &a.device(), dtype.into());
    }
    let cast = |t: FloatTensor<B>| if t.dtype() == dtype { t } else { B::float_cast(t, dtype.into()) };
    B::float_reshape(B::float_sum_dim(B::float_mul(cast(a), cast(b)), 3), rows)
}

impl<B: Backend + FlashOps, C: CheckpointStrategy> FlashOps for Autodiff<B, C> {
    fn flash_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let prep = OutStep.prepare::<C>([q.node(), k.node(), v.node()]).compute_bound().stateful();
        let [q, k, v] = [q, k, v].map(|t| t.into_primitive());
        let (out, lse) = B::flash_forward(q.clone(), k.clone(), v.clone(), options.clone());
        match prep {
            OpsKind::Tracked(prep) => {
                let d_lse = Stash::<B>::default();
                let saved = Saved { q, k, v, out: out.clone(), lse: lse.clone(), d_lse: d_lse.clone(), options };
                let like = (out.shape(), out.device(), out.dtype());
                let tracked = prep.finish(saved, out);
                let lse = match LseStep.prepare::<C>([tracked.node()]).compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish((d_lse, like), lse),
                    OpsKind::UnTracked(prep) => prep.finish(lse),
                };
                (tracked, lse)
            }
            OpsKind::UnTracked(prep) => (prep.finish(out), <Self as AutodiffBackend>::from_inner(lse)),
        }
    }

    fn flash_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let [q, k, v, d_out, lse, delta] = [q, k, v, d_out, lse, delta].map(|t| t.into_primitive());
        let (dq, dk, dv) = B::flash_backward(q, k, v, d_out, lse, delta, options);
        let wrap = <Self as AutodiffBackend>::from_inner;
        (wrap(dq), wrap(dk), wrap(dv))
    }

    fn flash_backward_onto(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        dk: FloatTensor<Self>,
        dv: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let [q, k, v, d_out, lse, delta] = [q, k, v, d_out, lse, delta].map(|t| t.into_primitive());
        let [dk, dv] = [dk, dv].map(|t| t.into_primitive());
        let (dq, dk, dv) = B::flash_backward_onto(q, k, v, d_out, lse, delta, dk, dv, options);
        let wrap = <Self as AutodiffBackend>::from_inner;
        (wrap(dq), wrap(dk), wrap(dv))
    }
}
