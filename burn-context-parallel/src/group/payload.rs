//! What can be given to a collective, and how its type is taken off for the way and put on again.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::{Error, Result};

use super::call::Kind;
use super::parcel::{Body, Parcel};

/// What collectives carry: [`TensorData`], and float and int tensors with any number of dimensions.
///
/// A float tensor must be without autodiff; the differentiable collectives put a tape around these. An int tensor has no
/// gradient, so it may come from an autodiff device; it arrives without.
pub trait Payload: Sized {
    /// What it is, for the agreement between ranks.
    const KIND: Kind;
    /// Its number of dimensions, where the type fixes it.
    const DIMS: Option<usize>;

    /// Where it lives; `None` for plain data.
    fn home(&self) -> Option<Device>;

    /// Takes the type's name off.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a float tensor with autodiff, [`Error::Unsupported`] for a quantized one.
    fn pack(self) -> Result<Parcel>;

    /// Puts it on again, at home; without one, on the sender's device.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the parcel holds another kind of value: the transport mixed up ranks.
    fn unpack(parcel: Parcel, home: Option<&Device>) -> Result<Self>;
}

impl Payload for TensorData {
    const KIND: Kind = Kind::Data;
    const DIMS: Option<usize> = None;

    fn home(&self) -> Option<Device> {
        None
    }

    fn pack(self) -> Result<Parcel> {
        Ok(Parcel::from_data(self))
    }

    fn unpack(parcel: Parcel, _: Option<&Device>) -> Result<Self> {
        parcel.into_data()
    }
}

impl<const D: usize> Payload for Tensor<D> {
    const KIND: Kind = Kind::Float;
    const DIMS: Option<usize> = Some(D);

    fn home(&self) -> Option<Device> {
        Some(self.device().inner())
    }

    fn pack(self) -> Result<Parcel> {
        if self.is_autodiff() {
            return Err(Error::invalid(
                "a collective",
                "it was given a tensor with autodiff, and carries values only",
                "use the differentiable `collective::*`, or `.inner()` if no gradient is wanted",
            ));
        }
        if matches!(self.dtype(), DType::QFloat(_)) {
            return Err(Error::unsupported("a collective", "a quantized tensor", "dequantize it before it travels"));
        }
        let device = self.device();
        Ok(Parcel::from_tensor(self.into_dispatch(), device))
    }

    fn unpack(parcel: Parcel, home: Option<&Device>) -> Result<Self> {
        check(&parcel, D, parcel.dtype().is_float(), "a float tensor")?;
        match deliver(parcel, home)? {
            Delivery::Here(tensor) => Ok(Self::from_dispatch(tensor)),
            Delivery::Upload(data, device) => {
                let dtype = data.dtype();
                Ok(Self::from_data(data, (&device, dtype)))
            }
        }
    }
}

impl<const D: usize> Payload for Tensor<D, Int> {
    const KIND: Kind = Kind::Int;
    const DIMS: Option<usize> = Some(D);

    fn home(&self) -> Option<Device> {
        Some(self.device().inner())
    }

    fn pack(self) -> Result<Parcel> {
        let tensor = self.inner();
        let device = tensor.device();
        Ok(Parcel::from_tensor(tensor.into_dispatch(), device))
    }

    fn unpack(parcel: Parcel, home: Option<&Device>) -> Result<Self> {
        let dtype = parcel.dtype();
        check(&parcel, D, dtype.is_int() || dtype.is_uint(), "an int tensor")?;
        match deliver(parcel, home)? {
            Delivery::Here(tensor) => Ok(Self::from_dispatch(tensor)),
            Delivery::Upload(data, device) => Ok(Self::from_data(data, (&device, dtype))),
        }
    }
}

fn check(parcel: &Parcel, dims: usize, kind: bool, want: &str) -> Result<()> {
    if kind && parcel.shape().len() == dims {
        return Ok(());
    }
    Err(Error::invalid(
        "receiving",
        format!("{parcel:?} arrived where {want} with {dims} dimensions was expected"),
        "the transport must compare `Call`s before it delivers",
    ))
}

#[allow(clippy::large_enum_variant, reason = "as large as Burn's handles on the device, and one a message")]
enum Delivery {
    Here(DispatchTensor),
    Upload(TensorData, Device),
}

fn deliver(parcel: Parcel, home: Option<&Device>) -> Result<Delivery> {
    let Some(device) = home.or(parcel.device()).cloned() else {
        return Err(Error::invalid(
            "receiving",
            format!("{parcel:?} is for a tensor, but no device is known"),
            "the transport must keep a parcel's device",
        ));
    };
    match parcel.body() {
        Body::Tensor(tensor) if parcel.device() == Some(&device) => Ok(Delivery::Here(tensor.clone())),
        _ => Ok(Delivery::Upload(parcel.into_data()?, device)),
    }
}
