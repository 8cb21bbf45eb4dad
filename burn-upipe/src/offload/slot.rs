//! Where one tensor waits: host memory or a part of a file.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::TensorData;

use super::OffloadError;
use super::disk::DiskPart;
use super::host::HostBuffer;

/// Room for one tensor's bytes outside its device. It goes back to where it came from when the last handle is dropped.
#[derive(Debug)]
pub struct Slot {
    bytes: usize,
    hold: Mutex<Hold>,
}

#[derive(Debug)]
pub(super) enum Hold {
    /// Memory of ours.
    Host(HostBuffer),
    /// Memory of the backend, pinned where it pins: its bytes are counted here, until this is dropped, and it is held as it came. How
    /// the backend allocates and rounds is not known here.
    Given(#[allow(dead_code)] HostBuffer, Option<TensorData>),
    Disk(DiskPart),
}

impl Slot {
    pub(super) fn new(bytes: usize, hold: Hold) -> Self {
        Self { bytes, hold: Mutex::new(hold) }
    }

    /// How many bytes it takes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a tensor's bytes.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Disk`] if a file cannot be written, [`OffloadError::Copy`] if these are not as many bytes as it has.
    pub fn write(&self, data: &[u8]) -> Result<(), OffloadError> {
        self.expect(data.len())?;
        match &mut *self.lock() {
            Hold::Host(buffer) => {
                buffer.bytes_mut().ok_or_else(|| self.unmapped())?.copy_from_slice(data);
                Ok(())
            }
            Hold::Given(..) => Err(self.unmapped()),
            Hold::Disk(part) => part.write(data),
        }
    }

    /// Gives the bytes back.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn read(&self, data: &mut [u8]) -> Result<(), OffloadError> {
        self.expect(data.len())?;
        match &*self.lock() {
            Hold::Host(buffer) => {
                data.copy_from_slice(buffer.bytes().ok_or_else(|| self.unmapped())?);
                Ok(())
            }
            Hold::Given(..) => Err(self.unmapped()),
            Hold::Disk(part) => part.read(data),
        }
    }

    /// Takes what a backend read from its device: as it is, if memory of the backend is to hold it.
    pub(super) fn put(&self, data: TensorData) -> Result<(), OffloadError> {
        self.expect(data.bytes().len())?;
        if let Hold::Given(_, given) = &mut *self.lock() {
            *given = Some(data);
            return Ok(());
        }
        self.write(data.as_bytes())
    }

    /// What [`put`](Self::put) kept as it was.
    pub(super) fn take_given(&self) -> Option<TensorData> {
        if let Hold::Given(_, given) = &mut *self.lock() { given.take() } else { None }
    }

    /// Whether the bytes are still here after they were given back.
    pub(super) fn keeps(&self) -> bool {
        !matches!(&*self.lock(), Hold::Given(_, None))
    }

    fn expect(&self, bytes: usize) -> Result<(), OffloadError> {
        if bytes == self.bytes {
            return Ok(());
        }
        Err(OffloadError::copy("copying", bytes, format!("its place has {} bytes", self.bytes)))
    }

    fn unmapped(&self) -> OffloadError {
        OffloadError::copy("copying", self.bytes, "its place has no memory of its own")
    }

    fn lock(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
