//! What is saved: flat pieces of named tensors.

use std::error::Error as StdError;
use std::fmt;
use std::ops::Range;

use burn::tensor::{DType, TensorData};
use safetensors::Dtype;

use super::{CheckpointError, Result};

type BoxError = Box<dyn StdError + Send + Sync>;

/// A part of a named tensor that one rank saves: a range of the whole tensor's elements in row-major order.
///
/// How tensors are cut, and by whom the pieces are saved, is free; together the pieces of all ranks must be each tensor once,
/// without gaps and overlaps. (Of copies that several ranks hold, one rank saves.)
///
/// The values are asked for when they are written, one piece at a time, so that a shard on a device need not lie in host memory before.
pub struct Piece<'a> {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
    read: Box<dyn FnOnce() -> Result<TensorData, BoxError> + 'a>,
}

impl fmt::Debug for Piece<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, dtype, shape, range, .. } = self;
        write!(f, "Piece({name}, {}, {shape:?}, {range:?})", dtype.name())
    }
}

impl<'a> Piece<'a> {
    /// The elements `range` of the tensor `name`, which has this element type and, whole, this shape. `read` brings exactly these
    /// elements when they are to be written; their shape does not matter.
    pub fn new<E: Into<BoxError>>(
        name: impl Into<String>,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        range: Range<usize>,
        read: impl FnOnce() -> Result<TensorData, E> + 'a,
    ) -> Self {
        let read = Box::new(|| read().map_err(Into::into));
        Self { name: name.into(), dtype, shape: shape.into(), range, read }
    }

    /// Elements that are in host memory already.
    pub fn part(name: impl Into<String>, shape: impl Into<Vec<usize>>, range: Range<usize>, data: TensorData) -> Self {
        Self::new(name, data.dtype(), shape, range, || Ok::<_, BoxError>(data))
    }

    /// A whole tensor that is in host memory already.
    pub fn whole(name: impl Into<String>, data: TensorData) -> Self {
        let (shape, elements) = (data.shape().to_vec(), data.num_elements());
        Self::part(name, shape, 0..elements, data)
    }

    /// Refuses what cannot be saved, before anything is written.
    pub(super) fn check(&self) -> Result<()> {
        let Self { name, dtype, shape, range, .. } = self;
        if name.is_empty() || name == "__metadata__" {
            return Err(CheckpointError::invalid(
                format!("a tensor is named {name:?}, which the file format does not allow"),
                "use its path in the model",
            ));
        }
        stored(*dtype).ok_or_else(|| {
            CheckpointError::invalid(
                format!("`{name}` is {}, which is not saved", dtype.name()),
                "convert it to plain floats or integers",
            )
        })?;
        let elements = elements(shape).filter(|elements| elements.checked_mul(dtype.size()).is_some());
        if elements.is_none_or(|elements| range.start > range.end || range.end > elements) {
            return Err(CheckpointError::invalid(
                format!("elements {range:?} of `{name}` do not exist, whose shape is {shape:?}"),
                "count elements of the whole tensor in row-major order",
            ));
        }
        Ok(())
    }

    /// The values.
    pub(super) fn read(self) -> Result<TensorData> {
        let Self { name, dtype, range, read, .. } = self;
        let data = read().map_err(|source| CheckpointError::Source { name: name.clone(), source })?;
        if data.dtype() != dtype || data.num_elements() != range.len() {
            let found = format!("{} elements of {}", data.num_elements(), data.dtype().name());
            return Err(CheckpointError::invalid(
                format!("the elements {range:?} of `{name}` should be {}, and {found} came", dtype.name()),
                "bring what the piece says",
            ));
        }
        Ok(data)
    }
}

/// The number of elements, if there is such a number.
pub(super) fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))
}

const TYPES: [(DType, Dtype); 12] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U16, Dtype::U16),
    (DType::U8, Dtype::U8),
];

/// How an element type is called in the file.
pub(super) fn stored(dtype: DType) -> Option<Dtype> {
    TYPES.iter().find(|(ours, _)| *ours == dtype).map(|(_, theirs)| *theirs)
}

/// The element type that is called so in the file.
pub(super) fn loaded(dtype: Dtype) -> Option<DType> {
    TYPES.iter().find(|(_, theirs)| *theirs == dtype).map(|(ours, _)| *ours)
}
