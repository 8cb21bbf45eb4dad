//! The output layer and the loss over tiles of tokens: logits [B L, V] never exist as a whole.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_context_parallel::attention::current;
use burn_context_parallel::group::{ProcessGroup, ReduceOp};
use burn_context_parallel::sequence::IGNORE_INDEX;
use burn_context_parallel::vjp::{Inputs, beside, custom_vjp};
use burn_context_parallel::{Error, Result, catch, phase, raise};

use super::tiles;
use crate::recompute::{Join, recompute};

const NAME: &str = "tiled_cross_entropy";

/// The loss of one step over all ranks.
#[derive(Clone, Debug)]
pub struct TokenLoss {
    /// The mean over all valid targets of all ranks, of shape `[1]`, the same on every rank. Its gradient on this rank is that of this
    /// rank's targets: gradients summed over ranks are those of the whole.
    pub mean: Tensor<1>,
    /// Valid targets of all ranks.
    pub valid: usize,
}

/// One rank's part of a loss whose denominator was known before: of a step of several micro-batches, say.
#[derive(Clone, Debug)]
pub struct LossShare {
    /// The sum of this rank's losses over `total`, of shape `[1]`. Shares of all ranks and micro-batches sum to the mean, and so do
    /// their gradients.
    pub share: Tensor<1>,
    /// Valid targets in this share.
    pub valid: usize,
}

/// Linear layer and cross-entropy, over tiles of tokens.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_upipe::tiling::TiledLinearCrossEntropy;
///
/// let device = Device::flex().autodiff();
/// let head = TiledLinearCrossEntropy::new(LinearConfig::new(4, 10).with_bias(false).init(&device), Some(2));
/// let x = Tensor::<3>::zeros([1, 3, 4], &device).require_grad();
/// let targets = Tensor::<2, Int>::from_ints([[1, -100, 3]], &Device::flex());
/// let loss = head.forward(x, targets, None)?;
/// assert_eq!(loss.valid, 2);
/// assert!((loss.mean.into_scalar::<f32>() - 10f32.ln()).abs() < 1e-6);
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct TiledLinearCrossEntropy {
    /// The output layer, [E, V].
    pub inner: Linear,
    #[module(skip)]
    tile: Option<usize>,
}

impl TiledLinearCrossEntropy {
    /// The loss of `linear`'s logits, over tiles of at most `tile` tokens; `None`, or 0, takes all at once.
    pub fn new(linear: Linear, tile: Option<usize>) -> Self {
        Self { inner: linear, tile: tile.filter(|tile| *tile > 0) }
    }

    /// As [`tiled_cross_entropy`], with the layer of this module.
    ///
    /// # Errors
    ///
    /// As [`tiled_cross_entropy`].
    pub fn forward(&self, x: Tensor<3>, targets: Tensor<2, Int>, group: Option<&ProcessGroup>) -> Result<TokenLoss> {
        tiled_cross_entropy(&self.inner, x, targets, self.tile, group, |linear, x| linear.forward(x))
    }

    /// As [`tiled_cross_entropy_over`], with the layer of this module.
    ///
    /// # Errors
    ///
    /// As [`tiled_cross_entropy_over`].
    pub fn forward_over(&self, x: Tensor<3>, targets: Tensor<2, Int>, total: usize) -> Result<LossShare> {
        tiled_cross_entropy_over(&self.inner, x, targets, self.tile, total, |linear, x| linear.forward(x))
    }
}

/// Cross-entropy of `project(module, x)` against `targets`, one mean over all valid targets of all ranks.
///
/// ```text
/// mean = sum_r sum_i (logsumexp(z_i) - z_i[t_i]) / sum_r count_r,   z = project(module, x),  t_i != IGNORE_INDEX
/// ```
///
/// The ranks are those of `group`, or if that is `None` those of the sequence scope: pass a larger group than the scope's where ranks
/// have different batches, too. Targets are already shifted, as
/// [`Batch::shard`](burn_context_parallel::sequence::Batch::shard) has them. Without any valid target the loss is 0 and so is every gradient; a rank without targets adds
/// zero. Logits are taken to f32 before the softmax.
///
/// # Shapes
///
/// `x`: [B, L, E], `targets`: [B, L], `project`: [B, n, E] -> [B, n, V].
///
/// # Errors
///
/// [`Error::Invalid`] if the shapes differ or a target is not in the vocabulary; [`Error::Group`] if the collective fails.
///
/// # Memory
///
/// `x` is kept; [`CrossEntropyBytes`](super::CrossEntropyBytes) at the peak, which grows with the tile and not with L.
///
/// # Communication
///
/// 16 bytes to each rank.
pub fn tiled_cross_entropy<M, F>(
    module: &M,
    x: Tensor<3>,
    targets: Tensor<2, Int>,
    tile: Option<usize>,
    group: Option<&ProcessGroup>,
    project: F,
) -> Result<TokenLoss>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<3>) -> Tensor<3> + Send + 'static,
{
    let (sum, valid) = tiled_sum(module, x, targets, tile, project)?;
    let scope = current();
    let group = group.or(scope.as_ref().map(|context| context.group()));
    mean(sum, valid, group)
}

/// [`tiled_cross_entropy`] with a denominator that the caller knows: the valid targets of everything that a step learns from.
///
/// ```text
/// share = sum_i (logsumexp(z_i) - z_i[t_i]) / total
/// ```
///
/// With gradient accumulation a mean per micro-batch, averaged, would weigh a target by how few others are beside it. Here all
/// count alike: give every micro-batch on every rank the same `total`, and sum shares and gradients.
///
/// # Shapes
///
/// As [`tiled_cross_entropy`].
///
/// # Errors
///
/// As [`tiled_cross_entropy`], and [`Error::Invalid`] if `total` is less than the valid targets at hand.
///
/// # Memory
///
/// As [`tiled_cross_entropy`].
///
/// # Communication
///
/// None.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_upipe::tiling::tiled_cross_entropy_over;
///
/// let device = Device::flex();
/// let head = LinearConfig::new(4, 10).init(&device);
/// let share = |targets: [[i64; 3]; 1], total| {
///     let x = Tensor::<3>::zeros([1, 3, 4], &device);
///     let targets = Tensor::<2, Int>::from_ints(targets, &device);
///     tiled_cross_entropy_over(&head, x, targets, None, total, |head: &Linear, x| head.forward(x))
/// };
/// // Micro-batches of one and of three targets.
/// let parts = [share([[7, -100, -100]], 4)?, share([[1, 2, 3]], 4)?];
/// assert_eq!(parts.each_ref().map(|part| part.valid), [1, 3]);
/// assert!(share([[1, 2, 3]], 2).is_err());
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
pub fn tiled_cross_entropy_over<M, F>(
    module: &M,
    x: Tensor<3>,
    targets: Tensor<2, Int>,
    tile: Option<usize>,
    total: usize,
    project: F,
) -> Result<LossShare>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<3>) -> Tensor<3> + Send + 'static,
{
    let (sum, valid) = tiled_sum(module, x, targets, tile, project)?;
    if total < valid {
        return Err(Error::invalid(
            NAME,
            format!("a total of {total} targets, of which {valid} are in this part"),
            "count the valid targets of all micro-batches and ranks of the step",
        ));
    }
    let factor = if total == 0 { 0.0 } else { 1.0 / total as f64 };
    Ok(LossShare { share: sum * factor, valid })
}

/// The sum of the losses of all valid targets at hand, and how many those are.
fn tiled_sum<M, F>(
    module: &M,
    x: Tensor<3>,
    targets: Tensor<2, Int>,
    tile: Option<usize>,
    project: F,
) -> Result<(Tensor<1>, usize)>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<3>) -> Tensor<3> + Send + 'static,
{
    let [batch, local, _] = x.dims();
    if targets.dims() != [batch, local] {
        return Err(Error::invalid(
            NAME,
            format!("targets of shape {:?} for x of shape {:?}", targets.dims(), x.dims()),
            "give one target per token, already shifted",
        ));
    }
    let targets = targets.inner();
    let host: Vec<i64> = targets.to_data().iter::<i64>().collect();
    if let Some(target) = host.iter().find(|target| **target < 0 && **target != IGNORE_INDEX) {
        return Err(Error::invalid(
            NAME,
            format!("target {target}"),
            format!("use ids from 0, or IGNORE_INDEX ({IGNORE_INDEX}) where there is no target"),
        ));
    }
    let largest = host.iter().copied().max().unwrap_or(0);
    let valid = host.iter().filter(|target| **target != IGNORE_INDEX).count();

    // Untiled is one tile that the tape keeps in full.
    let cut = tile.map_or_else(|| vec![local], |tile| tiles(local, tile));
    let starts: Vec<usize> = cut
        .iter()
        .scan(0, |end, len| {
            *end += len;
            Some(*end - len)
        })
        .collect();
    let lengths = cut.clone();
    let row_ignores = |row: &[i64], i: usize| row[starts[i]..starts[i] + cut[i]].contains(&IGNORE_INDEX);
    let ignores: Vec<bool> = (0..cut.len()).map(|i| host.chunks(local.max(1)).any(|row| row_ignores(row, i))).collect();
    let f = move |module: &M, x: Tensor<3>, i: usize| {
        let targets = targets.clone().narrow(1, starts[i], lengths[i]);
        // What is at a position without target reaches the weights' gradient as x * 0: a NaN there would be a NaN.
        let x = if ignores[i] { without_ignored(x, &targets) } else { x };
        let logits = project(module, x);
        let vocabulary = logits.dims()[2];
        if largest >= vocabulary as i64 {
            raise(Error::invalid(
                NAME,
                format!("target {largest} for logits of {vocabulary} tokens"),
                "use ids below the width of the output layer",
            ));
        }
        summed(logits, targets)
    };
    let sum = catch(|| {
        phase::around("loss", None, x, |x| match tile {
            Some(_) => recompute(NAME, module, x, None, 1, cut, Join::Sum, f),
            None => f(module, x, 0),
        })
    })?;
    Ok((sum, valid))
}

/// Zeros at the positions without target.
fn without_ignored(x: Tensor<3>, targets: &Tensor<2, Int>) -> Tensor<3> {
    let ignored = targets.clone().equal_elem(IGNORE_INDEX).unsqueeze_dim::<3>(2).expand(x.dims());
    let ignored = beside(ignored, &x);
    x.mask_fill(ignored, 0.0)
}

/// The sum of the losses of the valid targets, [1] in f32.
fn summed(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let [batch, len, vocabulary] = logits.dims();
    let logits = logits.reshape([batch * len, vocabulary]);
    let logits = if logits.dtype() == DType::F64 { logits } else { logits.cast(DType::F32) };
    let targets = targets.reshape([batch * len, 1]);
    let ignored = targets.clone().equal_elem(IGNORE_INDEX);
    let targets = targets.mask_fill(ignored.clone(), 0);
    let (targets, ignored) = (beside(targets, &logits), beside(ignored, &logits));
    let losses = -log_softmax(logits, 1).gather(1, targets);
    // Selected, not multiplied by zero: a NaN at a padding position must not spread.
    losses.mask_fill(ignored, 0.0).sum()
}

/// The mean over ranks as a value, the same bits on every rank, with this rank's part as its gradient.
fn mean(sum: Tensor<1>, valid: usize, group: Option<&ProcessGroup>) -> Result<TokenLoss> {
    let mut total = (scalar(&sum), valid);
    if let Some(group) = group.filter(|group| group.size() > 1) {
        let data = TensorData::from([total.0, total.1 as f64]);
        let data: Vec<f64> = group.all_reduce(data, ReduceOp::Sum)?.iter::<f64>().collect();
        total = (data[0], data[1] as usize);
    }
    let (total, count) = total;
    // Without targets: zero, with a path to every parameter, so that gradients exist and are zero.
    let (value, factor) = if count == 0 { (0.0, 0.0) } else { (total / count as f64, 1.0 / count as f64) };
    let inputs = Inputs::new().input(&sum);
    let value = Tensor::full([1], value, (&sum.device().inner(), sum.dtype()));
    let mean = custom_vjp(inputs, value, move |dy: Tensor<1>| vec![Some((dy * factor).into_dispatch())]);
    Ok(TokenLoss { mean, valid: count })
}

/// The value of a tensor of one element, whatever its type.
fn scalar(x: &Tensor<1>) -> f64 {
    x.clone().inner().into_data().iter::<f64>().next().unwrap_or(0.0)
}
