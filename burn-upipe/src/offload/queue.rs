//! Who copies, beside the computation: a narrow trait, and the thread that implements it.
//!
//! ```text
//! rank's thread     block 0 ------- block 1 ------- block 2 -------
//! copying thread        x_0 out ->      x_1 out ->      x_2 out ->
//! ```
//!
//! Each copy is a phase `offload` with its bytes, of the profile that listens where the copy was begun.
//!
//! On a CPU device the thread copies between heap and host buffers. On CubeCL's devices Burn gives each thread a stream of its own,
//! and a consumer waits for the stream of what it consumes: a thread that reads a tensor is the side stream on which it is copied,
//! and what it makes from read data is there when it is used. What was read stays as the backend gave it, in pinned memory where it
//! has that, and is handed back so. This follows from CubeCL's sources; no test here runs on such a device.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use burn::tensor::{DType, Device, Shape};
use burn_context_parallel::phase;
use burn_context_parallel::vjp::AnyTensor;

use super::copy::{into_slot, out_of_slot};
use super::{OffloadError, Slot, Ticket};
use crate::profile::heap;

/// A tensor on its way out. Its memory on the device is released when all handles are dropped.
#[derive(Debug)]
pub struct Departure {
    pub(super) tensor: AnyTensor,
}

/// What a tensor is to be when it is back.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Its shape.
    pub shape: Shape,
    /// Its type.
    pub dtype: DType,
    /// Its device, without autodiff.
    pub device: Device,
}

/// Begins copies and does not wait for them. Copies may end in any order; who uses a queue waits for the ticket of the copy out
/// of a slot's bytes before it begins the copy back.
pub trait CopyQueue: fmt::Debug + Send + Sync + 'static {
    /// Begins to copy `from` into `to`. Handles of both are dropped before the ticket is settled.
    fn copy_out(&self, from: Arc<Departure>, to: Arc<Slot>) -> Ticket<()>;

    /// Begins to make a tensor from a slot's bytes. The handle is dropped before the ticket is settled.
    fn copy_in(&self, from: Arc<Slot>, to: Arrival) -> Ticket<AnyTensor>;
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread that copies, one tensor after the other. What it allocates counts for the rank that made it.
#[derive(Debug)]
pub struct CopyThread {
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
}

impl CopyThread {
    /// Starts the thread. It ends when this is dropped, after what it has to do.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Copy`] if the system starts no thread.
    pub fn new() -> Result<Self, OffloadError> {
        let (jobs, todo) = channel::<Job>();
        let owner = heap::owner();
        let work = move || {
            for job in todo {
                // Anew for each: a profiler's phases change whose the thread's allocations are.
                let _owned = heap::inherit(owner);
                job();
            }
        };
        let thread = Builder::new()
            .name("offload".to_owned())
            .spawn(work)
            .map_err(|error| OffloadError::copy("starting the thread that copies", 0, error.to_string()))?;
        Ok(Self { jobs: Mutex::new(Some(jobs)), thread: Some(thread) })
    }

    /// A job that cannot be sent is dropped, and its promise with it.
    fn begin<H: Send + 'static, T: Send + 'static>(
        &self,
        action: &'static str,
        bytes: usize,
        held: H,
        copy: impl FnOnce(&H) -> Result<T, OffloadError> + Send + 'static,
    ) -> Ticket<T> {
        let (ticket, promise) = Ticket::new();
        let job = phase::carried(move || {
            let result = {
                let _phase = phase::copy("offload", bytes);
                copied(action, bytes, held, copy)
            };
            promise.settle(result);
        });
        if let Some(jobs) = &*self.jobs.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = jobs.send(Box::new(job));
        }
        ticket
    }
}

impl CopyQueue for CopyThread {
    fn copy_out(&self, from: Arc<Departure>, to: Arc<Slot>) -> Ticket<()> {
        let copy = |(from, to): &(Arc<Departure>, Arc<Slot>)| into_slot(&from.tensor, to);
        self.begin("copying a tensor from its device", to.bytes(), (from, to), copy)
    }

    fn copy_in(&self, from: Arc<Slot>, to: Arrival) -> Ticket<AnyTensor> {
        let copy = |(from, to): &(Arc<Slot>, Arrival)| out_of_slot(from, to);
        self.begin("copying a tensor to its device", from.bytes(), (from, to), copy)
    }
}

/// Copies, and lets go of what it needed for that. A device that failed in the first may fail in the second, too: neither ends the
/// thread, on which all later copies depend.
fn copied<H, T>(
    action: &'static str,
    bytes: usize,
    held: H,
    copy: impl FnOnce(&H) -> Result<T, OffloadError>,
) -> Result<T, OffloadError> {
    let result = guarded(action, bytes, || copy(&held));
    let released = guarded(action, bytes, || {
        drop(held);
        Ok(())
    });
    let value = result?;
    released.map(|()| value)
}

/// A device that has no memory left panics.
fn guarded<T>(
    action: &'static str,
    bytes: usize,
    f: impl FnOnce() -> Result<T, OffloadError>,
) -> Result<T, OffloadError> {
    let message = |payload: Box<dyn Any + Send>| match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => payload.downcast_ref::<&str>().map_or_else(|| "a panic".to_owned(), ToString::to_string),
    };
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| Err(OffloadError::copy(action, bytes, message(payload))))
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        drop(self.jobs.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handle of a device that fails whatever is done with it.
    struct Broken;

    impl Drop for Broken {
        fn drop(&mut self) {
            panic!("the handle is lost");
        }
    }

    /// Or every later step would fail, with an error that says to run the step again.
    #[test]
    fn a_device_that_fails_again_when_it_is_let_go_does_not_end_the_thread() {
        let thread = CopyThread::new().unwrap();
        let begin = |copy: fn(&Broken) -> Result<u8, OffloadError>| thread.begin("copying", 8, Broken, copy);
        let error = begin(|_| panic!("no memory")).take().unwrap_err();
        assert!(error.to_string().contains("no memory"), "the first cause: {error}");
        let error = begin(|_| Ok(1)).take().unwrap_err();
        assert!(error.to_string().contains("the handle is lost"), "{error}");
        assert_eq!(thread.begin("copying", 8, (), |()| Ok(2)).take(), Ok(2));
    }
}
