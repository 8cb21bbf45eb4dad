//! The one mechanism behind checkpointing and tiling: forward without a tape, tile by tile; backward makes each tile again
//! on a tape of its own.
//!
//! ```text
//! forward:   y = join_i f(module, x_i)                 x_i = tiles of x; nothing kept but x
//! backward:  for each i: y_i again, pulled back to dx_i and to the parameters, whose gradients are summed over tiles
//! ```
//!
//! One tile is block-level checkpointing. The sequence context of the forward pass is entered again in the backward pass,
//! which may run after its scope has ended.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, TensorMetadata};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Gradients, Tensor};
use burn_context_parallel::attention::{current, scope};
use burn_context_parallel::buffer::{accumulator, zeros};
use burn_context_parallel::fsdp::Unit;
use burn_context_parallel::vjp::{AnyTensor, InputGradients, Inputs, custom_vjp, pullback};
use burn_context_parallel::{Error, OrRaise, phase, raise};

use crate::offload::{Kept, Offload, OrGiveUp};

/// How tiles' results become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    /// Side by side along the tiled dim.
    Concat,
    /// Added up.
    Sum,
}

/// How many elements of a result are compared with the recomputed one.
const SAMPLES: usize = 128;

/// `f` over tiles of `x` along `dim`, with lengths `tiles`; see the module's documentation.
///
/// `f` must be a function of its arguments and of tensors without autodiff. It runs twice, so that randomness in it would give
/// gradients of another function than the one that was computed: what it gives the second time is compared with
/// the first, and a difference is [raised](burn_context_parallel::raise).
///
/// `offload` keeps `x` until then, if there is one.
#[allow(clippy::too_many_arguments)] // what varies between its few callers
pub(crate) fn recompute<M, F, const D: usize, const E: usize>(
    name: &'static str,
    module: &M,
    x: Tensor<D>,
    offload: Option<&Offload>,
    dim: usize,
    tiles: Vec<usize>,
    join: Join,
    f: F,
) -> Tensor<E>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<D>, usize) -> Tensor<E> + Send + 'static,
{
    let leaves = leaves(name, module);
    // What is sharded is gathered here, for this module's forward pass, and again for its backward pass; inside it is whole.
    let unit = Unit::of(module);
    if !x.is_autodiff() && !leaves.iter().any(|leaf| leaf.autodiff) {
        let module = unit.gather(module).or_raise();
        let mut joined = Joined::new(name, dim, join, x_len(&x, dim));
        for (i, start, len) in starts(&tiles) {
            joined.add(f(&module, tile(x.clone(), dim, start, len), i), start, len);
        }
        return joined.finish();
    }
    let dtypes: Vec<DType> = leaves.iter().map(|leaf| leaf.tensor.dtype()).collect();
    let forward = move |(shards, unit, tiles, f): &(M, Unit, Vec<usize>, F), x: Tensor<D>, tracked: bool| {
        let module = unit.gather(shards).or_raise();
        let mut witness = None;
        let mut joined = Joined::new(name, dim, join, x_len(&x, dim));
        for (i, start, len) in starts(tiles) {
            let y = f(&module, tile(x.clone(), dim, start, len), i);
            if y.is_autodiff() {
                raise(captured(name));
            }
            if tracked && i == 0 {
                witness = Some(Witness::of(&y));
            }
            joined.add(y, start, len);
        }
        (joined.finish(), witness)
    };
    let backward = move |(shards, unit, tiles, f): (M, Unit, Vec<usize>, F), saved: Waiting<D>, dy: Tensor<E>| {
        let (mut total, mut whole_dy) = (Total::default(), Some(dy));
        let whole = tiles.iter().sum();
        // Before the weights are waited for: what comes next may come meanwhile.
        let x = saved.kept.get().or_raise();
        let module = unit.gather(&shards).or_raise();
        for (i, start, len) in starts(&tiles) {
            let x = tile(x.clone(), dim, start, len).autodiff().require_grad();
            let module = module.clone().train();
            let y = {
                let _phase = phase::enter("recompute", None);
                f(&module, x.clone(), i)
            };
            if i == 0 {
                saved.witness.check(name, &y);
            }
            // The last tile takes it along: it is freed where it is used up, and not when all is done.
            let last = start + len == whole;
            let part = if last { whole_dy.take() } else { whole_dy.clone() }.expect("taken by the last tile");
            let dy = match join {
                Join::Concat => tile(part, dim, start, len),
                Join::Sum => part,
            };
            let mut gradients = pullback(y, dy);
            total.add_input(x.grad_remove(&mut gradients), x.dims(), dim, start, whole);
            total.add_parameters(&module, &mut gradients);
        }
        // Freed before gradients are copied for their way.
        drop((module, x, saved));
        total.into_gradients(&dtypes, &unit)
    };
    two_passes(leaves, x, offload, (module.valid(), unit, tiles, f), forward, backward)
}

/// What a backward pass begins from.
pub(crate) struct Waiting<const D: usize> {
    pub kept: Kept<D>,
    pub witness: Witness,
}

/// The order of all that is recomputed: `x` is kept before anything is computed, so that it leaves meanwhile; a forward pass that
/// fails leaves nothing behind; the backward pass runs in the sequence context of the forward one.
///
/// Both passes work on `parts`. `forward` is told whether there will be a backward pass, and has a witness if so.
pub(crate) fn two_passes<T: Send + 'static, const D: usize, const E: usize>(
    leaves: Vec<Leaf>,
    x: Tensor<D>,
    offload: Option<&Offload>,
    parts: T,
    forward: impl FnOnce(&T, Tensor<D>, bool) -> (Tensor<E>, Option<Witness>),
    backward: impl FnOnce(T, Waiting<D>, Tensor<E>) -> InputGradients + Send + 'static,
) -> Tensor<E> {
    let context = current();
    // Without a gradient there is no backward pass, and nothing waits for it.
    let tracked = x.is_tracked() || leaves.iter().any(|leaf| leaf.tracked);
    let offload = offload.filter(|_| tracked);
    let inputs = Inputs::new().input(&x).leaves(leaves.into_iter().map(|leaf| leaf.tensor));
    let x = x.inner();
    let given_up = OrGiveUp(offload);
    let kept = tracked.then(|| Kept::new(&x, offload).or_raise());
    let (y, witness) = forward(&parts, x, tracked);
    drop(given_up);
    let Some((kept, witness)) = kept.zip(witness) else { return custom_vjp(inputs, y, |_| Vec::new()) };
    custom_vjp(inputs, y, move |dy| scope(context, || backward(parts, Waiting { kept, witness }, dy)))
}

/// The equal cut of `len` into `count` tiles: lengths that differ by one at most.
pub(crate) fn even_tiles(len: usize, count: usize) -> Vec<usize> {
    let count = count.clamp(1, len.max(1));
    (0..count).map(|i| len / count + usize::from(i < len % count)).collect()
}

fn starts(tiles: &[usize]) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
    tiles.iter().enumerate().scan(0, |end, (i, len)| {
        *end += len;
        Some((i, *end - len, *len))
    })
}

fn tile<const D: usize>(x: Tensor<D>, dim: usize, start: usize, len: usize) -> Tensor<D> {
    if dim >= D || len == x.dims()[dim] { x } else { x.narrow(dim, start, len) }
}

fn x_len<const D: usize>(x: &Tensor<D>, dim: usize) -> usize {
    x.dims().get(dim).copied().unwrap_or(1)
}

/// The result while it grows: tiles are written into it one by one, so that it never exists twice.
struct Joined<const E: usize> {
    name: &'static str,
    dim: usize,
    join: Join,
    len: usize,
    whole: Option<Tensor<E>>,
}

impl<const E: usize> Joined<E> {
    fn new(name: &'static str, dim: usize, join: Join, len: usize) -> Self {
        Self { name, dim, join, len, whole: None }
    }

    fn add(&mut self, part: Tensor<E>, start: usize, len: usize) {
        let whole = self.whole.take();
        self.whole = Some(match (self.join, whole) {
            (Join::Sum, None) => part,
            (Join::Sum, Some(sum)) => sum + part,
            (Join::Concat, None) if len == self.len => part,
            (Join::Concat, whole) => {
                let mut dims = part.dims();
                if self.dim >= E || dims[self.dim] != len {
                    raise(Error::invalid(
                        self.name,
                        format!("a tile of {len} tokens gave a result of shape {dims:?}"),
                        format!("a tiled function must keep the length of dim {}", self.dim),
                    ));
                }
                dims[self.dim] = self.len;
                let whole = whole.unwrap_or_else(|| zeros(dims, &part.device(), part.dtype()));
                write(whole, self.dim, start, part)
            }
        });
    }

    fn finish(self) -> Tensor<E> {
        self.whole.expect("there is at least one tile")
    }
}

/// Writes `part` into `whole` at `start` of `dim`; in place, since nobody shares `whole`.
fn write<const E: usize>(whole: Tensor<E>, dim: usize, start: usize, part: Tensor<E>) -> Tensor<E> {
    let dims = part.dims();
    let ranges: [std::ops::Range<usize>; E] =
        std::array::from_fn(|d| if d == dim { start..start + dims[d] } else { 0..dims[d] });
    whole.slice_assign(ranges, part)
}

/// Gradients summed over tiles.
#[derive(Default)]
pub(crate) struct Total {
    input: Option<AnyTensor>,
    parameters: Vec<Option<AnyTensor>>,
}

impl Total {
    fn add_input<const D: usize>(
        &mut self,
        dx: Option<Tensor<D>>,
        tile: [usize; D],
        dim: usize,
        start: usize,
        whole: usize,
    ) {
        let Some(dx) = dx else { return };
        if dim >= D || tile[dim] == whole {
            self.input = Some(dx.into_dispatch());
            return;
        }
        let total = match self.input.take() {
            Some(total) => Tensor::<D>::from_dispatch(total),
            None => {
                let mut dims = tile;
                dims[dim] = whole;
                zeros(dims, &dx.device(), dx.dtype())
            }
        };
        self.input = Some(write(total, dim, start, dx).into_dispatch());
    }

    pub fn add_parameters<M: Module>(&mut self, module: &M, gradients: &mut Gradients) {
        struct Add<'a> {
            total: &'a mut Vec<Option<AnyTensor>>,
            gradients: &'a mut Gradients,
            seen: Vec<ParamId>,
        }
        impl ModuleVisitor for Add<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if self.seen.contains(&param.id) {
                    return; // tied: its gradient has been taken
                }
                self.seen.push(param.id);
                let slot = self.seen.len() - 1;
                if self.total.len() == slot {
                    self.total.push(None);
                }
                if let Some(grad) = param.base().grad_remove(self.gradients) {
                    // Over tiles in f32; over one tile as it is.
                    let sum = match self.total[slot].take() {
                        Some(total) => {
                            let exact = accumulator(grad.dtype());
                            Tensor::<D>::from_dispatch(total).cast(exact) + grad.cast(exact)
                        }
                        None => grad,
                    };
                    self.total[slot] = Some(sum.into_dispatch());
                }
            }
        }
        module.visit(&mut Add { total: &mut self.parameters, gradients, seen: Vec::new() });
    }

    /// The input's gradient, and those of what the module holds.
    fn into_gradients(mut self, dtypes: &[DType], unit: &Unit) -> InputGradients {
        let input = self.input.take();
        std::iter::once(input).chain(self.into_parameters(dtypes, unit)).collect()
    }

    /// The gradients of what the module holds, shards where it holds shards, in its types.
    pub fn into_parameters(mut self, dtypes: &[DType], unit: &Unit) -> InputGradients {
        self.parameters.resize_with(dtypes.len(), || None);
        let cast = |(grad, dtype): (Option<AnyTensor>, &DType)| {
            grad.map(|grad| if grad.dtype() == *dtype { grad } else { Dispatch::float_cast(grad, (*dtype).into()) })
        };
        unit.reduce(self.parameters).or_raise().into_iter().zip(dtypes).map(cast).collect()
    }
}

pub(crate) struct Leaf {
    pub tensor: AnyTensor,
    pub autodiff: bool,
    /// It gets a gradient.
    pub tracked: bool,
}

/// The module's float parameters, each once, in visiting order.
pub(crate) fn leaves<M: Module>(name: &'static str, module: &M) -> Vec<Leaf> {
    struct Collect {
        name: &'static str,
        seen: Vec<ParamId>,
        leaves: Vec<Leaf>,
    }
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.contains(&param.id) {
                return;
            }
            self.seen.push(param.id);
            let base = param.base();
            let autodiff = base.is_autodiff();
            let tracked = autodiff && base.is_tracked();
            if tracked && !base.is_require_grad() {
                raise(Error::invalid(
                    self.name,
                    format!("parameter {} of shape {:?} is the result of an operation", param.id, base.dims()),
                    "parameters must be leaves: their gradients would be lost",
                ));
            }
            self.leaves.push(Leaf { tensor: base.into_dispatch(), autodiff, tracked });
        }
    }
    let mut collect = Collect { name, seen: Vec::new(), leaves: Vec::new() };
    module.visit(&mut collect);
    collect.leaves
}

/// A few elements of a result, to tell whether the recomputation gives the same.
pub(crate) struct Witness {
    samples: Vec<f32>,
}

impl Witness {
    pub fn of<const E: usize>(y: &Tensor<E>) -> Self {
        let dims = y.dims();
        let len: usize = dims.iter().product();
        let count = SAMPLES.min(len);
        let samples = (0..count)
            .map(|i| {
                // An odd stride, so that samples meet every position of a power-of-two width.
                let mut at = (i * ((len / count) | 1)) % len;
                let mut ranges: [std::ops::Range<usize>; E] = std::array::from_fn(|_| 0..1);
                for d in (0..E).rev() {
                    ranges[d] = at % dims[d]..at % dims[d] + 1;
                    at /= dims[d];
                }
                y.clone().slice(ranges).cast(DType::F32)
            })
            .map(|sample| sample.reshape([1]))
            .collect::<Vec<Tensor<1>>>();
        let samples =
            if samples.is_empty() { Vec::new() } else { Tensor::cat(samples, 0).into_data().iter::<f32>().collect() };
        Self { samples }
    }

    /// Rounding may differ (a backend can choose other kernels under autodiff); another random mask is of another size.
    pub fn check<const E: usize>(&self, name: &'static str, y: &Tensor<E>) {
        let tolerance = if matches!(y.dtype(), DType::F32 | DType::F64) { 1e-3 } else { 1e-2 };
        let again = Self::of(&y.clone().inner());
        let finite = self.samples.iter().chain(&again.samples).filter(|value| value.is_finite());
        let largest = finite.fold(0f32, |max, value| max.max(value.abs()));
        // What is no number in one of them only is no rounding.
        let near = |a: f32, b: f32| (a - b).abs() <= tolerance * largest;
        let differs = |(a, b): (&f32, &f32)| !near(*a, *b) && a != b && !(a.is_nan() && b.is_nan());
        if let Some(at) = self.samples.iter().zip(&again.samples).position(differs) {
            raise(Error::invalid(
                name,
                format!(
                    "the recomputation gave {} where the forward pass gave {}",
                    again.samples[at], self.samples[at]
                ),
                "the block must give the same twice: without dropout or other randomness, and without state that changes between forward and backward",
            ));
        }
    }
}

pub(crate) fn captured(name: &'static str) -> Error {
    Error::invalid(
        name,
        "the function gave a tracked result from untracked inputs",
        "capture only tensors without autodiff (`.inner()`), and use the module that is passed in, not one from outside",
    )
}
