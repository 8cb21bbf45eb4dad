//! One mechanism for every operation that brings its own backward pass.
//!
//! Burn's autodiff asks for a type per operation and backend. Here an operation is a value computed without a tape and a
//! closure, its vector-Jacobian product:
//!
//! ```text
//! y = f(x_1 .. x_n)          computed by the caller, on tensors without autodiff
//! backward: dy -> (dx_1 .. dx_n)
//! ```
//!
//! [`custom_vjp`] puts both on the tape of whatever device the inputs live on. Collectives, attention, U-Pipe,
//! checkpointing and tiling are all built on it; [`pullback`] is the other half, a nested backward pass over
//! a graph of its own, for closures that recompute.

use std::fmt;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients as Tape;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, BackendTensor, DispatchKindConversion, DispatchTensor, DispatchTensorKind,
};
use burn::tensor::kind::Basic;
use burn::tensor::{Gradients, Tensor};

/// A float tensor of any rank, with or without autodiff.
pub type AnyTensor = DispatchTensor;

/// The gradient of every input of an operation, in order; `None` adds nothing.
pub type InputGradients = Vec<Option<AnyTensor>>;

/// How many graph parents one operation can have.
pub const MAX_INPUTS: usize = 10;

type BackwardFn = Box<dyn FnOnce(AnyTensor) -> InputGradients + Send>;

/// What [`custom_vjp`] differentiates with respect to.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// `None` for a constant: holding it would keep it alive through the forward pass.
    parents: Vec<Option<AnyTensor>>,
    leaves: Vec<AnyTensor>,
}

impl Inputs {
    /// No inputs yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor from anywhere in a graph; at most [`MAX_INPUTS`] of them.
    pub fn input<const D: usize>(mut self, tensor: &Tensor<D>) -> Self {
        let tensor = tensor.clone().into_dispatch();
        self.parents.push(is_autodiff(&tensor).then_some(tensor));
        self
    }

    /// Adds leaves: parameters themselves (`Param::base`), not results of operations. Any number of them; their gradients
    /// come after the inputs' in the closure's answer, and are delivered straight to the parameters.
    pub fn leaves(mut self, leaves: impl IntoIterator<Item = AnyTensor>) -> Self {
        self.leaves.extend(leaves);
        self
    }
}

/// Whether any gradient can flow to this tensor.
fn is_autodiff(tensor: &AnyTensor) -> bool {
    matches!(tensor.kind, DispatchTensorKind::Autodiff(_))
}

/// `ids`, an int or bool tensor, on the autodiff device of `like`, or without autodiff if `like` has none: what a gather or a mask
/// with a tracked tensor asks for. `Tensor::autodiff` gives the default checkpointing strategy, and Burn refuses to mix two.
///
/// A float tensor is returned as it is.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_context_parallel::vjp::beside;
///
/// let x = Tensor::<2>::ones([1, 3], &Device::flex().autodiff().gradient_checkpointing()).require_grad();
/// let ids = Tensor::<2, Int>::from_ints([[2]], &Device::flex());
/// assert_eq!(x.clone().gather(1, beside(ids, &x)).dims(), [1, 1]);
/// ```
pub fn beside<const D: usize, const E: usize, K: Basic>(ids: Tensor<D, K>, like: &Tensor<E>) -> Tensor<D, K> {
    if ids.dtype().is_float() {
        return ids;
    }
    let mut ids = ids.into_dispatch();
    ids.autodiff = like.clone().into_dispatch().autodiff;
    Tensor::from_dispatch(ids)
}

/// Calls a function that is generic over backend and checkpointing strategy with those of a tensor on a tape.
macro_rules! on_tape {
    ($like:expr, $function:ident($($argument:expr),*)) => {{
        use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
        use burn::backend::{DispatchAutodiffContext, GradientCheckpointingStrategy};

        let like: &AnyTensor = $like;
        let balanced = like.autodiff == DispatchAutodiffContext::Enabled(GradientCheckpointingStrategy::Balanced);
        macro_rules! on {
            ($backend:ty) => {
                if balanced {
                    $function::<$backend, BalancedCheckpointing>($($argument),*)
                } else {
                    $function::<$backend, NoCheckpointing>($($argument),*)
                }
            };
        }
        let DispatchTensorKind::Autodiff(kind) = &like.kind else {
            unreachable!("only for tensors with autodiff");
        };
        match kind.as_ref() {
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(_) => on!(burn::backend::Flex),
            #[cfg(feature = "cube")]
            DispatchTensorKind::Cube(_) => on!(burn::backend::Cube),
            #[allow(unreachable_patterns)]
            _ => unreachable!("no backend feature of this crate covers this tensor"),
        }
    }};
}

/// The place of a tensor in its graph, to tell leaves apart: an optimizer step makes new ones. `None` without autodiff.
pub fn node_id(tensor: &AnyTensor) -> Option<NodeId> {
    is_autodiff(tensor).then(|| on_tape!(tensor, node_id_on(tensor.clone())))
}

fn node_id_on<B, C>(tensor: AnyTensor) -> NodeId
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    float::<Autodiff<B, C>>(tensor).id()
}

/// Puts `output` on the tape as a function of `inputs`, with `backward` as its vector-Jacobian product.
///
/// `output` was computed without autodiff. `backward` receives the gradient of `output`, and answers with one gradient
/// per input, then one per leaf. It owns whatever it needs (tensors without autodiff: see `# Panics`), runs at most once,
/// on the thread that calls `backward()`, and may itself run a nested backward pass ([`pullback`]) or wait for other ranks.
/// With no autodiff input, `output` is returned as it is and `backward` is dropped.
///
/// # Panics
///
/// If there are more than [`MAX_INPUTS`] inputs, or `backward` answers with a wrong number of gradients: both are faults of
/// the operation, not of its user. A closure that holds tensors of the outer graph and uses them deadlocks; don't.
///
/// # Memory
///
/// What the closure owns, until the backward pass or until the graph is dropped.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::vjp::{Inputs, custom_vjp};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([3.0], &device).require_grad();
/// let value = x.clone().inner();
/// let square = custom_vjp(Inputs::new().input(&x), value.clone() * value.clone(), move |dy: Tensor<1>| {
///     vec![Some((dy * value * 2.0).into_dispatch())]
/// });
/// let grads = square.backward();
/// assert_eq!(x.grad(&grads).unwrap().into_scalar::<f32>(), 6.0);
/// ```
pub fn custom_vjp<const D: usize>(
    inputs: Inputs,
    output: Tensor<D>,
    backward: impl FnOnce(Tensor<D>) -> InputGradients + Send + 'static,
) -> Tensor<D> {
    let Some(like) = inputs.parents.iter().flatten().chain(&inputs.leaves).find(|t| is_autodiff(t)).cloned() else {
        return output;
    };
    let backward: BackwardFn = Box::new(move |dy| backward(Tensor::from_dispatch(dy)));
    let output = output.into_dispatch();
    Tensor::from_dispatch(on_tape!(&like, record_on(inputs, output, backward)))
}

fn record_on<B, C>(inputs: Inputs, output: AnyTensor, backward: BackwardFn) -> AnyTensor
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B> + DispatchKindConversion<Autodiff<B, C>>,
{
    let mut step =
        Step { parents: Vec::new(), leaves: Vec::new(), answers: inputs.parents.len() + inputs.leaves.len(), backward };
    let mut guards = Vec::new();
    let first_leaf = inputs.parents.len();
    for (index, tensor) in inputs.parents.into_iter().enumerate() {
        let Some(tensor) = tensor else { continue };
        let tensor: FloatTensor<Autodiff<B, C>> = float::<Autodiff<B, C>>(tensor);
        if tensor.is_tracked() {
            step.parents.push(index);
            guards.push(tensor.into_parts().1);
        }
    }
    for (index, tensor) in inputs.leaves.into_iter().enumerate() {
        if !is_autodiff(&tensor) {
            continue;
        }
        let tensor: FloatTensor<Autodiff<B, C>> = float::<Autodiff<B, C>>(tensor);
        if tensor.is_tracked() {
            step.leaves.push((first_leaf + index, tensor.id()));
            if guards.is_empty() {
                // A leaf's gradient is delivered by its id. One of them is made a parent as well, or nothing would
                // connect this step to the graph and it would never run.
                guards.push(tensor.into_parts().1);
            }
        }
    }
    let output = float::<B>(output);
    let output = match guards.len() {
        0 => <Autodiff<B, C> as AutodiffBackend>::from_inner(output),
        1 => attach::<B, C, 1>(step, guards, output),
        2 => attach::<B, C, 2>(step, guards, output),
        3 => attach::<B, C, 3>(step, guards, output),
        4 => attach::<B, C, 4>(step, guards, output),
        5 => attach::<B, C, 5>(step, guards, output),
        6 => attach::<B, C, 6>(step, guards, output),
        7 => attach::<B, C, 7>(step, guards, output),
        8 => attach::<B, C, 8>(step, guards, output),
        9 => attach::<B, C, 9>(step, guards, output),
        10 => attach::<B, C, 10>(step, guards, output),
        n => panic!("an operation can have {MAX_INPUTS} tracked inputs, this one has {n}"),
    };
    wrap::<Autodiff<B, C>>(output)
}

fn attach<B, C, const N: usize>(
    step: Step,
    guards: Vec<NodeGuard>,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B>,
{
    let Ok(guards) = <[NodeGuard; N]>::try_from(guards) else { unreachable!("chosen by the number of guards") };
    match Backward::<B, N>::prepare::<C>(step, guards).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((), output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}

/// The closure, and where its answers go. Burn asks `Clone` of a step's state only, so the step itself can own an `FnOnce`.
struct Step {
    /// For each graph parent, the index of its answer (an anchor leaf has none).
    parents: Vec<usize>,
    leaves: Vec<(usize, NodeId)>,
    answers: usize,
    backward: BackwardFn,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomVjp").field("answers", &self.answers).finish_non_exhaustive()
    }
}

impl<B: Backend, const N: usize> Backward<B, N> for Step
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = ();

    fn backward(self, ops: Ops<(), N>, tape: &mut Tape, _: &mut Checkpointer) {
        let dy = wrap::<B>(tape.consume::<B>(&ops.node));
        let mut answers = (self.backward)(dy);
        assert_eq!(answers.len(), self.answers, "a backward closure must answer for every input");
        for (parent, index) in ops.parents.iter().zip(&self.parents) {
            if let (Some(node), Some(grad)) = (parent, answers[*index].take()) {
                tape.register::<B>(node.id, float::<B>(grad));
            }
        }
        for (index, id) in self.leaves {
            if let Some(grad) = answers[index].take() {
                tape.register::<B>(id, float::<B>(grad));
            }
        }
    }
}

/// Runs the backward pass of `y`'s own graph, seeded with `dy` in place of ones, and returns its gradients.
///
/// For use inside a [`custom_vjp`] closure that recomputed `y` from fresh leaves (`.autodiff().require_grad()`). The graph
/// of `y` must be disjoint from the one whose backward pass is running.
///
/// # Panics
///
/// If `y` is not tracked.
pub fn pullback<const D: usize>(y: Tensor<D>, dy: Tensor<D>) -> Gradients {
    let zero = Tensor::<1>::zeros([1], (&y.device().inner(), y.dtype()));
    let seeded = custom_vjp(Inputs::new().input(&y), zero, move |_: Tensor<1>| vec![Some(dy.into_dispatch())]);
    drop(y);
    seeded.backward()
}

fn float<B: Backend>(tensor: AnyTensor) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    match <DispatchTensor as DispatchKindConversion<B>>::try_into_backend(tensor) {
        Ok(BackendTensor::Float(tensor)) => tensor,
        Ok(other) => panic!("expected a float tensor, got {}", other.name()),
        Err(error) => panic!("{error}"),
    }
}

fn wrap<B: Backend>(tensor: FloatTensor<B>) -> AnyTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    <DispatchTensor as DispatchKindConversion<B>>::from_backend(BackendTensor::Float(tensor))
}
