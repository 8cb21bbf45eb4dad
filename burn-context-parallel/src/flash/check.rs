//! What is refused, with its numbers, before any kernel runs.

use burn::backend::{DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, TensorMetadata};
use burn::tensor::{DType, Tensor};

use super::FlashOptions;
use crate::{Error, Result};

/// The sizes of one attention. B batch, H query heads, G key/value heads, D head dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashShape {
    /// B.
    pub batch: usize,
    /// H.
    pub q_heads: usize,
    /// G; divides H.
    pub kv_heads: usize,
    /// Number of queries.
    pub q_len: usize,
    /// Number of keys.
    pub k_len: usize,
    /// D.
    pub head_dim: usize,
}

impl FlashShape {
    /// The sizes behind `q [B, H, Sq, D]` and `k`, `v` `[B, G, Sk, D]`.
    pub(crate) fn of(operation: &'static str, q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self> {
        let shapes = format!("q is {q:?}, k is {k:?}, v is {v:?}");
        let remedy = "give q [B, H, Sq, D] and k, v [B, G, Sk, D]";
        if k[..3] != v[..3] {
            return Err(Error::invalid(operation, format!("k and v differ: {shapes}"), remedy));
        }
        if k[3] != v[3] {
            return Err(Error::unsupported(
                operation,
                format!("a value head dimension of {} beside a key head dimension of {}", v[3], k[3]),
                "project keys and values to the same head dimension",
            ));
        }
        if q[0] != k[0] || q[3] != k[3] {
            return Err(Error::invalid(
                operation,
                format!("batch or head dimension of q and k differ: {shapes}"),
                remedy,
            ));
        }
        let (heads, kv_heads) = (q[1], k[1]);
        if kv_heads == 0 && heads != 0 || kv_heads != 0 && !heads.is_multiple_of(kv_heads) {
            return Err(Error::invalid(
                operation,
                format!("{heads} query heads cannot share {kv_heads} key/value heads evenly"),
                "make the number of query heads a multiple of the number of key/value heads",
            ));
        }
        Ok(Self { batch: q[0], q_heads: heads, kv_heads, q_len: q[2], k_len: k[2], head_dim: q[3] })
    }

    pub(crate) fn q(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.head_dim]
    }

    pub(crate) fn rows(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }

    pub(crate) fn kv(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.k_len, self.head_dim]
    }

    /// Query heads per key/value head.
    #[cfg(feature = "flex")]
    pub(crate) fn group(&self) -> usize {
        self.q_heads / self.kv_heads.max(1)
    }
}

/// The type of log-sum-exps and row sums beside tensors of `dtype`; refuses what the kernels don't compute in.
pub(crate) fn row_dtype(operation: &'static str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(DType::F32),
        DType::F64 => Ok(DType::F64),
        other => Err(Error::unsupported(
            operation,
            format!("element type {other:?}"),
            "cast the inputs to f32, f16, bf16 or f64",
        )),
    }
}

/// Which backend a tensor lives on, without autodiff around it.
fn place(tensor: &DispatchTensor) -> &DispatchTensorKind {
    match &tensor.kind {
        DispatchTensorKind::Autodiff(inner) => inner,
        kind => kind,
    }
}

/// Refuses tensors that no kernel here can read, and mixes of backends, devices and autodiff strategies.
fn check_places(
    operation: &'static str,
    tensors: &[(&'static str, DispatchTensor)],
    options: &FlashOptions,
) -> Result<()> {
    let mut context: Option<(&'static str, DispatchAutodiffContext)> = None;
    for (name, tensor) in tensors {
        match place(tensor) {
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(_) => {
                if let Some(blueprint) = &options.blueprint {
                    return Err(Error::unsupported(
                        operation,
                        format!("a blueprint of CubeCL kernels ({}) for {name} on a Flex device", blueprint.family),
                        "leave the blueprint away, or use a CubeCL device",
                    ));
                }
            }
            #[cfg(feature = "cube")]
            DispatchTensorKind::Cube(_) => super::cube::check_tensor(operation, name, tensor, options)?,
            #[allow(unreachable_patterns)]
            _ => {
                return Err(Error::unsupported(
                    operation,
                    format!("flash attention on {:?} devices is not built yet; {name} there", tensor.device()),
                    "use a Flex device, or flash::reference::attention",
                ));
            }
        }
        if let DispatchAutodiffContext::Enabled(_) = tensor.autodiff {
            if options.f32_results && tensor.dtype().size() < 4 {
                return Err(Error::invalid(
                    operation,
                    format!("f32 results asked for, but {name} of {:?} is on an autodiff device", tensor.dtype()),
                    "cast the output, or call flash::forward and flash::backward without autodiff",
                ));
            }
            match context {
                Some((first, other)) if other != tensor.autodiff => {
                    return Err(Error::invalid(
                        operation,
                        format!(
                            "{first} and {name} are on autodiff devices with different checkpointing strategies \
                             ({other:?}, {:?})",
                            tensor.autodiff
                        ),
                        "create all inputs on the same autodiff device",
                    ));
                }
                _ => context = Some((name, tensor.autodiff)),
            }
        }
    }
    Ok(())
}

/// Everything that can be wrong with q, k and v.
pub(crate) fn check_inputs(
    operation: &'static str,
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    options: &FlashOptions,
) -> Result<FlashShape> {
    let named = [("q", q), ("k", k), ("v", v)];
    let named = named.map(|(name, t)| (name, t.clone().into_dispatch()));
    check_places(operation, &named, options)?;
    let shape = check_plain(operation, q, k, v, options)?;
    #[cfg(feature = "cube")]
    if let DispatchTensorKind::Cube(_) = place(&named[0].1) {
        super::cube::expect_lengths(operation, &shape, options)?;
    }
    Ok(shape)
}

/// Shapes and element types only: what [`reference`](super::reference) asks for, on any device.
pub(crate) fn check_plain(
    operation: &'static str,
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    options: &FlashOptions,
) -> Result<FlashShape> {
    row_dtype(operation, q.dtype())?;
    for (name, tensor) in [("k", k), ("v", v)] {
        if tensor.dtype() != q.dtype() {
            return Err(Error::invalid(
                operation,
                format!("q is {:?} and {name} is {:?}", q.dtype(), tensor.dtype()),
                "cast q, k and v to one type",
            ));
        }
        if tensor.device().inner() != q.device().inner() {
            return Err(Error::invalid(
                operation,
                format!("q is on {:?} and {name} on {:?}", q.device(), tensor.device()),
                "move q, k and v to one device",
            ));
        }
    }
    let shape = FlashShape::of(operation, q.dims(), k.dims(), v.dims())?;
    options.check_lengths(operation, shape.batch, shape.q_len, shape.k_len)?;
    Ok(shape)
}

/// Refuses autodiff tensors where a schedule calls the bare kernels: their gradients would be lost silently.
pub(crate) fn check_untracked<const D: usize>(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor<D>,
) -> Result<()> {
    if tensor.is_autodiff() {
        return Err(Error::invalid(
            operation,
            format!("{name} is on an autodiff device"),
            "pass `tensor.inner()`, or call flash::flash_attention, which is differentiable",
        ));
    }
    Ok(())
}

/// Everything that can be wrong with q, k and v as a backend has them.
#[cfg(any(feature = "flex", feature = "cube"))]
pub(crate) fn check_primitives<T: TensorMetadata>(
    operation: &'static str,
    [q, k, v]: [&T; 3],
    options: &FlashOptions,
) -> Result<FlashShape> {
    row_dtype(operation, q.dtype())?;
    let devices = [q, k, v].map(TensorMetadata::device);
    if devices[1..].iter().any(|device| *device != devices[0]) {
        return Err(Error::invalid(operation, format!("q, k and v are on {devices:?}"), "move them to one device"));
    }
    let dtypes = [q, k, v].map(TensorMetadata::dtype);
    if dtypes.iter().any(|dtype| *dtype != q.dtype()) {
        return Err(Error::invalid(operation, format!("q, k and v are {dtypes:?}"), "cast them to one type"));
    }
    let mut dims = [[0; 4]; 3];
    for (dims, tensor) in dims.iter_mut().zip([q, k, v]) {
        *dims = <[usize; 4]>::try_from(tensor.shape().as_slice()).map_err(|_| {
            let problem = format!("an input has shape {:?}", tensor.shape());
            Error::invalid(operation, problem, "give tensors of four dimensions, [B, heads, S, D]")
        })?;
    }
    let shape = FlashShape::of(operation, dims[0], dims[1], dims[2])?;
    options.check_lengths(operation, shape.batch, shape.q_len, shape.k_len)?;
    Ok(shape)
}

/// A gradient, sum or row statistic as a backend has it, beside the inputs: shape and type.
#[cfg(any(feature = "flex", feature = "cube"))]
pub(crate) fn check_primitive<T: TensorMetadata>(
    operation: &'static str,
    name: &str,
    tensor: &T,
    shape: &[usize],
    dtype: DType,
) -> Result<()> {
    if tensor.shape().as_slice() == shape && tensor.dtype() == dtype {
        return Ok(());
    }
    Err(Error::invalid(
        operation,
        format!("{name} is {:?} of {:?}", tensor.shape(), tensor.dtype()),
        format!("give {shape:?} of {dtype:?}"),
    ))
}

/// A gradient or row statistic beside the queries: place, shape and type.
pub(crate) fn check_beside<const D: usize>(
    operation: &'static str,
    q: &Tensor<4>,
    (name, tensor): (&'static str, &Tensor<D>),
    shape: [usize; D],
    dtype: DType,
) -> Result<()> {
    check_untracked(operation, name, tensor)?;
    check_places(operation, &[(name, tensor.clone().into_dispatch())], &FlashOptions::default())?;
    if tensor.device() != q.device() {
        let problem = format!("q is on {:?} and {name} on {:?}", q.device(), tensor.device());
        return Err(Error::invalid(operation, problem, format!("move {name} to q's device")));
    }
    if tensor.dims() != shape || tensor.dtype() != dtype {
        return Err(Error::invalid(
            operation,
            format!("{name} is {:?} of {:?}", tensor.dims(), tensor.dtype()),
            format!("give {shape:?} of {dtype:?}"),
        ));
    }
    Ok(())
}
