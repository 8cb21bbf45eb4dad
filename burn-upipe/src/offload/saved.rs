//! One saved tensor, as its owner sees it.

use std::marker::PhantomData;

use burn::tensor::kind::Basic;
use burn::tensor::{Float, Tensor};

use super::{Offload, OffloadError};

/// A tensor that was [saved](Offload::save). Dropped, it is gone: its place is free, wherever it was.
///
/// From [`get`](Self::get) until it is dropped it is in flight, one of K.
#[derive(Debug)]
pub struct Saved<const D: usize, K = Float> {
    offload: Offload,
    id: u64,
    kind: PhantomData<([(); D], K)>,
}

impl<const D: usize, K: Basic> Saved<D, K> {
    pub(super) fn new(offload: Offload, id: u64) -> Self {
        Self { offload, id, kind: PhantomData }
    }

    /// The tensor on its device, with the same bits. Others with names that were saved before it begin to come, as far as K allows.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Disk`] or [`OffloadError::Copy`] if a copy of it failed.
    pub fn get(&self) -> Result<Tensor<D, K>, OffloadError> {
        self.offload.fetch(self.id).map(Tensor::from_dispatch)
    }

    /// [`get`](Self::get), and releases it.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    pub fn take(self) -> Result<Tensor<D, K>, OffloadError> {
        self.get()
    }
}

impl<const D: usize, K> Drop for Saved<D, K> {
    fn drop(&mut self) {
        self.offload.forget(self.id);
    }
}

/// What waits for a backward pass: under an engine, or on the device.
pub(crate) enum Kept<const D: usize> {
    Here(Box<Tensor<D>>),
    Saved(Saved<D>),
}

impl<const D: usize> Kept<D> {
    pub fn new(x: &Tensor<D>, offload: Option<&Offload>) -> Result<Self, OffloadError> {
        Ok(match offload {
            None => Self::Here(Box::new(x.clone())),
            Some(offload) => Self::Saved(offload.save_for(x.clone(), true)?),
        })
    }

    /// The tensor; one that was away is in flight until this is dropped.
    pub fn get(&self) -> Result<Tensor<D>, OffloadError> {
        match self {
            Self::Here(x) => Ok(x.as_ref().clone()),
            Self::Saved(saved) => saved.get(),
        }
    }
}

/// Gives the step up if what it guards does not come to its end: the graph that is left behind is freed who knows when.
pub(crate) struct OrGiveUp<'a>(pub Option<&'a Offload>);

impl Drop for OrGiveUp<'_> {
    fn drop(&mut self) {
        if let Some(offload) = self.0.filter(|_| std::thread::panicking()) {
            offload.give_up();
        }
    }
}
