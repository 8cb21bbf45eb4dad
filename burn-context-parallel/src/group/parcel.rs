//! What travels between ranks: values whose type is known at run time only.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
#[cfg(feature = "flex")]
use burn::tensor::Bytes;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::{Error, Result};

/// A value on its way, with the type's name taken off: a shape, an element type, and either host memory or a tensor.
///
/// Cloning is cheap: both bodies are shared.
#[derive(Clone)]
pub struct Parcel {
    shape: Vec<usize>,
    dtype: DType,
    /// Where the sender's value lives; `None` for plain data.
    device: Option<Device>,
    body: Body,
}

/// What a [`Parcel`] holds.
#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "as large as Burn's handles on the device, and one a message")]
pub enum Body {
    /// Host memory: all of it, or a window of these bytes.
    Host(Arc<TensorData>, Option<Range<usize>>),
    /// A tensor's handle, without autodiff.
    Tensor(DispatchTensor),
}

impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = match self.body {
            Body::Host(..) => "host",
            Body::Tensor(_) => "tensor",
        };
        write!(f, "Parcel({:?}, {}, {body})", self.shape, self.dtype.name())
    }
}

impl Parcel {
    /// Host memory.
    pub fn from_data(data: TensorData) -> Self {
        Self { shape: data.shape().to_vec(), dtype: data.dtype(), device: None, body: Body::Host(Arc::new(data), None) }
    }

    /// A tensor without autodiff, on `device`.
    pub fn from_tensor(tensor: DispatchTensor, device: Device) -> Self {
        Self { shape: tensor.shape().to_vec(), dtype: tensor.dtype(), device: Some(device), body: Body::Tensor(tensor) }
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its size in bytes, as it is counted.
    pub fn bytes(&self) -> u64 {
        match &self.body {
            // Quantized data has no size per element.
            Body::Host(_, Some(window)) => window.len() as u64,
            Body::Host(data, None) => data.bytes().len() as u64,
            Body::Tensor(_) => (self.elements() * self.dtype.size()) as u64,
        }
    }

    /// The device of the sender's value, if it is a tensor.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// What it holds.
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Whether the value can be read by any thread of this process as it is.
    pub fn in_host_memory(&self) -> bool {
        #[cfg(feature = "flex")]
        if flex::tensor(&self.body).is_some() {
            return true;
        }
        matches!(self.body, Body::Host(..))
    }

    /// The value in host memory; nothing is copied if it is there and nobody else holds it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the device cannot be read.
    pub fn into_data(self) -> Result<TensorData> {
        match self.body {
            Body::Host(data, None) => Ok(Arc::unwrap_or_clone(data)),
            Body::Host(data, Some(window)) => {
                let bytes = data.bytes()[window].to_vec();
                Ok(TensorData::from_bytes_vec(bytes, self.shape, self.dtype))
            }
            Body::Tensor(tensor) => {
                // The number of dimensions in these types is not looked at when data is read.
                let data = if self.dtype.is_float() {
                    Tensor::<1>::from_dispatch(tensor).try_into_data()
                } else {
                    Tensor::<1, Int>::from_dispatch(tensor).try_into_data()
                };
                data.map_err(|error| {
                    Error::invalid(
                        "reading a tensor for a collective",
                        format!("the device refused: {error}"),
                        "look at the device's earlier errors",
                    )
                })
            }
        }
    }

    /// The same parcel with its body in host memory, still bound for the device it came from.
    ///
    /// # Errors
    ///
    /// As [`Parcel::into_data`].
    pub fn into_host(self) -> Result<Self> {
        let Self { shape, dtype, device, body } = self;
        let body = match body {
            Body::Tensor(_) => {
                let parcel = Self { shape: shape.clone(), dtype, device: None, body };
                Body::Host(Arc::new(parcel.into_data()?), None)
            }
            host => host,
        };
        Ok(Self { shape, dtype, device, body })
    }

    /// Cuts the flattened value at `ends`, the first elements after each piece. Nothing is copied, except once a tensor
    /// that does not lie in host memory in order.
    ///
    /// # Errors
    ///
    /// As [`Parcel::into_data`].
    pub fn cut(self, ends: &[usize]) -> Result<Vec<Self>> {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let ranges = starts.zip(ends).map(|(start, &end)| start..end);
        #[cfg(feature = "flex")]
        if let Some(tensor) = flex::tensor(&self.body) {
            let flat = tensor.reshape([self.elements()].into());
            let pieces = ranges.map(|range| Self {
                shape: vec![range.len()],
                body: flex::body(flat.narrow(0, range.start, range.len())),
                ..self.clone()
            });
            return Ok(pieces.collect());
        }
        let Self { dtype, device, body, .. } = self.into_host()?;
        let Body::Host(data, window) = body else {
            unreachable!("it was just brought to host memory");
        };
        let (offset, size) = (window.map_or(0, |window| window.start), dtype.size());
        let pieces = ranges.map(|range| Self {
            shape: vec![range.len()],
            dtype,
            device: device.clone(),
            body: Body::Host(data.clone(), Some(offset + range.start * size..offset + range.end * size)),
        });
        Ok(pieces.collect())
    }

    /// The value's bytes in row-major order, for reading; copied only where they do not lie so.
    ///
    /// # Errors
    ///
    /// As [`Parcel::into_data`].
    pub fn read(&self) -> Result<Reading> {
        #[cfg(feature = "flex")]
        if let Some(tensor) = flex::tensor(&self.body) {
            let tensor = tensor.to_contiguous();
            if let Some((start, end)) = tensor.layout().contiguous_offsets() {
                let size = self.dtype.size();
                return Ok(Reading::Flex(tensor.data_arc(), start * size..end * size));
            }
        }
        match self.clone().into_host()?.body {
            Body::Host(data, window) => {
                let window = window.unwrap_or(0..data.bytes().len());
                Ok(Reading::Host(data, window))
            }
            Body::Tensor(_) => unreachable!("it was just brought to host memory"),
        }
    }

    /// Shape, element type and device alone, so that the value itself is not held.
    pub(super) fn label(&self) -> Label {
        Label { shape: self.shape.clone(), dtype: self.dtype, device: self.device.clone() }
    }
}

/// What is written on a [`Parcel`].
pub(super) struct Label {
    pub shape: Vec<usize>,
    pub dtype: DType,
    device: Option<Device>,
}

impl Label {
    /// Host memory, bound for the same device.
    pub fn onto(self, data: TensorData) -> Parcel {
        Parcel { device: self.device, ..Parcel::from_data(data) }
    }
}

/// Bytes held open for reading.
pub enum Reading {
    /// Part of plain data.
    Host(Arc<TensorData>, Range<usize>),
    /// Part of a Flex tensor's storage.
    #[cfg(feature = "flex")]
    Flex(Arc<Bytes>, Range<usize>),
}

impl Deref for Reading {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Host(data, window) => &data.bytes()[window.clone()],
            #[cfg(feature = "flex")]
            Self::Flex(bytes, window) => &bytes[window.clone()],
        }
    }
}

/// Flex tensors lie in this process's memory: their handles can be passed on, cut and read where they are.
#[cfg(feature = "flex")]
mod flex {
    use super::*;
    use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensorKind};
    use burn_flex::FlexTensor;

    pub fn tensor(body: &Body) -> Option<&FlexTensor> {
        let Body::Tensor(tensor) = body else { return None };
        match &tensor.kind {
            DispatchTensorKind::Flex(BackendTensor::Float(tensor) | BackendTensor::Int(tensor)) => Some(tensor),
            _ => None,
        }
    }

    pub fn body(tensor: FlexTensor) -> Body {
        let tensor = if tensor.dtype().is_float() { BackendTensor::Float(tensor) } else { BackendTensor::Int(tensor) };
        Body::Tensor(DispatchTensor {
            kind: DispatchTensorKind::Flex(tensor),
            autodiff: DispatchAutodiffContext::Disabled,
        })
    }
}
