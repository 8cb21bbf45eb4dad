//! A rank's engine: which of its saved tensors is where, and what is on its way.
//!
//! ```text
//! save ──► on the device ──► leaving ──► away ──► coming ──► here ──► dropped
//!               │ (by policy,    └── needed before it has left ──►┘
//!               │  or no room)
//!               └──► used from where it is
//! ```
//!
//! Leaving, coming and here are in flight: the device holds the tensor because of offload. There are at most K of them, unless
//! more than that were asked for by hand and are still held: `save` waits for the oldest copy out, and nothing is fetched ahead beyond K. Saved tensors are needed in the opposite order of their
//! saving, so what is fetched ahead is what was saved before the one that is asked for.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::kind::Autodiff;
use burn::tensor::{DType, Tensor};
use burn_context_parallel::vjp::AnyTensor;

use super::config::{OffloadConfig, OffloadPolicy, Place};
use super::copy::is_on_cpu;
use super::disk::DiskFile;
use super::host::HostPool;
use super::queue::{Arrival, CopyQueue, CopyThread, Departure};
use super::slot::Hold;
use super::state::{Asked, Entry, State, Wait, Whereabouts};
use super::{OffloadError, OffloadStats, Saved, Slot};

/// A handle of one rank's engine; clones are the same one. Ranks have an engine each, made on the rank's thread.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_upipe::offload::{Offload, OffloadConfig};
///
/// let offload = Offload::new(OffloadConfig::new())?;
/// let x = Tensor::<2>::ones([64, 64], &Device::flex());
/// let saved = offload.save(x.clone())?;
/// assert_eq!((offload.stats().host_bytes, offload.stats().saved), (64 * 64 * 4, 1));
/// assert_eq!(saved.take()?.into_data(), x.into_data());
/// assert_eq!((offload.stats().host_bytes, offload.stats().saved), (0, 0));
/// # Ok::<(), burn_upipe::offload::OffloadError>(())
/// ```
#[derive(Clone)]
pub struct Offload(Arc<Engine>);

struct Engine {
    config: OffloadConfig,
    queue: Box<dyn CopyQueue>,
    host: Arc<HostPool>,
    disk: Option<Arc<DiskFile>>,
    state: Mutex<State>,
}

impl Offload {
    /// An engine with a thread that copies.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Invalid`] for settings that make no sense, [`OffloadError::Disk`] if the file cannot be made,
    /// [`OffloadError::Copy`] if there is no thread.
    pub fn new(config: OffloadConfig) -> Result<Self, OffloadError> {
        config.check()?;
        Self::with_queue(config, CopyThread::new()?)
    }

    /// An engine whose copies are made by `queue`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_queue(config: OffloadConfig, queue: impl CopyQueue) -> Result<Self, OffloadError> {
        config.check()?;
        let host = HostPool::new(config.host_budget);
        let disk = config.disk.as_ref().map(DiskFile::new).transpose()?;
        Ok(Self(Arc::new(Engine { config, queue: Box::new(queue), host, disk, state: Mutex::default() })))
    }

    /// Its settings.
    pub fn config(&self) -> &OffloadConfig {
        &self.0.config
    }

    /// Keeps `x`, floats, ints or bools, until it is asked for again, where the policy says. Its device memory is free when
    /// everybody else has dropped `x`, too, and the copy has ended.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Invalid`] if `x` has autodiff, or is quantized; and what failed of the copies of what is still saved.
    ///
    /// # Memory
    ///
    /// The tensor's bytes, in host memory or on disk; on the device where neither has room, or the policy says so. While K tensors
    /// are in flight it waits.
    pub fn save<const D: usize, K: Autodiff>(&self, x: Tensor<D, K>) -> Result<Saved<D, K>, OffloadError> {
        self.save_for(x, false)
    }

    pub(super) fn save_for<const D: usize, K: Autodiff>(
        &self,
        x: Tensor<D, K>,
        of_step: bool,
    ) -> Result<Saved<D, K>, OffloadError> {
        let invalid = |what, remedy| OffloadError::Invalid {
            problem: format!("a tensor of shape {:?} {what}", x.dims()),
            remedy,
        };
        if x.is_autodiff() {
            return Err(invalid(
                "with autodiff",
                "save what is not tracked, `.inner()`: a graph does not leave its device",
            ));
        }
        if matches!(x.dtype(), DType::QFloat(_)) {
            return Err(invalid("that is quantized", "save it before it is quantized, or after `.dequantize()`"));
        }
        let arrival = Arrival { shape: x.shape(), dtype: x.dtype(), device: x.device() };
        let bytes = arrival.shape.num_elements() * arrival.dtype.size();
        let mut state = self.0.lock();
        state.settle();
        if let Some(error) = state.failure() {
            return Err(error);
        }
        let (id, position) = state.add(of_step, bytes, arrival, x.into_dispatch());
        drop(state);
        // From here on it is taken off the list whatever happens.
        let saved = Saved::new(self.clone(), id);
        match self.0.config.policy {
            OffloadPolicy::None => {}
            OffloadPolicy::All => self.0.send_off(id),
            OffloadPolicy::Every(k) => {
                if position % k == 0 {
                    self.0.send_off(id);
                }
            }
            OffloadPolicy::Budget(budget) => {
                // The lock is free again before the loop's body takes it. Each is tried once: one that finds no room does not
                // keep smaller ones here.
                let oldest = |after| self.0.lock().beyond(budget, after);
                let mut next = oldest(None);
                while let Some(id) = next {
                    self.0.send_off(id);
                    next = oldest(Some(id));
                }
            }
        }
        Ok(saved)
    }

    /// What is where now, and how much there was.
    pub fn stats(&self) -> OffloadStats {
        let (host, disk) = (self.0.host.counts(), self.0.disk.as_ref().map(|disk| disk.counts()).unwrap_or_default());
        let mut state = self.0.lock();
        state.settle();
        OffloadStats {
            saved: state.entries.len(),
            device_bytes: state.on_device(),
            host_bytes: host.used,
            host_bytes_peak: host.peak,
            host_reserved: host.reserved,
            allocations: host.allocations,
            disk_bytes: disk.0,
            disk_bytes_peak: disk.1,
            in_flight: state.in_flight(),
            in_flight_peak: state.peak,
            kept_on_device: state.kept,
        }
    }

    /// Gives up the step at hand: what checkpoints have saved is gone at once, and their backward passes are refused. What was
    /// [saved](Self::save) by name stays.
    ///
    /// A block whose forward pass fails does it by itself. Call it where a forward pass ended otherwise without a backward pass, and
    /// the program goes on: Burn frees a graph that was dropped in some later backward pass.
    pub fn give_up(&self) {
        let of_step = |(id, entry): (&u64, &Entry)| entry.of_step.then_some(*id);
        let ids: Vec<u64> = self.0.lock().entries.iter().filter_map(of_step).collect();
        ids.into_iter().for_each(|id| self.0.forget(id));
    }

    /// Returns host memory that no tensor uses to the system, and what is free at the end of the file.
    pub fn trim(&self) {
        self.0.host.trim();
        if let Some(disk) = &self.0.disk {
            disk.trim();
        }
    }

    /// The tensor, on its device; those that are needed next begin to come.
    pub(super) fn fetch(&self, id: u64) -> Result<AnyTensor, OffloadError> {
        self.0.fetch(id)
    }

    pub(super) fn forget(&self, id: u64) {
        self.0.forget(id);
    }
}

impl fmt::Debug for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offload").field("config", &self.0.config).finish_non_exhaustive()
    }
}

impl Engine {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A state in which one more tensor may be in flight.
    fn with_room(&self) -> MutexGuard<'_, State> {
        loop {
            let mut state = self.lock();
            match state.room(self.config.in_flight) {
                None => return state,
                Some(wait) => {
                    drop(state);
                    wait.wait();
                }
            }
        }
    }

    /// Begins the copy out. Where there is no room anywhere, the tensor stays; one without elements has nothing to copy.
    fn send_off(&self, id: u64) {
        let of = |state: &State| state.staying(id).map(|tensor| (state.entries[&id].bytes, is_on_cpu(tensor)));
        let Some((bytes, on_cpu)) = of(&self.lock()).filter(|(bytes, _)| *bytes > 0) else { return };
        // Before a place among those on their way is waited for: without a slot none is needed.
        let Some(slot) = self.slot(bytes, on_cpu) else { return self.refuse(id) };
        let slot = Arc::new(slot);
        let mut state = self.with_room();
        // Another thread may have been faster.
        let Some(tensor) = state.staying(id).cloned() else { return };
        let departure = Arc::new(Departure { tensor });
        let at = Arc::downgrade(&departure);
        let ticket = self.queue.copy_out(departure, slot.clone());
        state.place(id, Whereabouts::Leaving { departure: at, slot, ticket });
    }

    fn refuse(&self, id: u64) {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(&id) else { return };
        if std::mem::replace(&mut entry.refused, true) {
            return; // it counts once
        }
        let bytes = entry.bytes;
        state.kept += 1;
        if state.kept == 1 {
            log::warn!(
                "offload: no room for {bytes} bytes, they stay on the device: host memory has {:?}, the disk {:?}",
                self.config.host_budget,
                self.config.disk
            );
        }
    }

    fn slot(&self, bytes: usize, on_cpu: bool) -> Option<Slot> {
        let host = || match self.host.reserve(bytes, on_cpu)? {
            buffer if on_cpu => Some(Hold::Host(buffer)),
            counted => Some(Hold::Given(counted, None)),
        };
        let disk = || self.disk.as_ref()?.reserve(bytes).map(Hold::Disk);
        let hold = match self.config.place {
            Place::Host => host().or_else(disk),
            Place::Disk => disk(),
        }?;
        Some(Slot::new(bytes, hold))
    }

    fn fetch(&self, id: u64) -> Result<AnyTensor, OffloadError> {
        loop {
            let mut state = self.lock();
            state.settle();
            let wait = match state.ask(id)? {
                Asked::Here(tensor) => {
                    self.fetch_ahead(&mut state, id);
                    return Ok(tensor);
                }
                Asked::Coming(ticket) => {
                    // What comes next is on its way while this one is waited for.
                    self.fetch_ahead(&mut state, id);
                    Wait::In(ticket)
                }
                Asked::Leaving(ticket) => Wait::Out(ticket),
                Asked::Away => match state.room(self.config.in_flight) {
                    Some(wait) => wait,
                    None => {
                        self.begin_fetch(&mut state, id, true);
                        continue;
                    }
                },
            };
            drop(state);
            wait.wait();
        }
    }

    /// Begins the copy back; `asked`: for somebody who waits for this one, and not ahead of its use.
    fn begin_fetch(&self, state: &mut State, id: u64, asked: bool) {
        let Some(entry) = state.entries.get(&id) else { return };
        let Whereabouts::Away(slot) = &entry.at else { return };
        let (slot, arrival) = (slot.clone(), entry.arrival.clone());
        let ticket = self.queue.copy_in(slot.clone(), arrival);
        state.place(id, Whereabouts::Coming { slot, ticket, asked });
    }

    /// Those of a step ahead of those of a step only: what somebody has named may be needed at any time, or never.
    fn fetch_ahead(&self, state: &mut State, id: u64) {
        while state.in_flight() < self.config.in_flight {
            let Some(before) = state.away_before(id) else { return };
            self.begin_fetch(state, before, false);
        }
    }

    /// Takes it off the list. Copies of it are waited for: afterwards nothing of it is anywhere.
    fn forget(&self, id: u64) {
        let entry = self.lock().entries.remove(&id);
        let wait = match entry.map(|entry| entry.at) {
            Some(Whereabouts::Leaving { ticket, .. } | Whereabouts::Here { leaving: Some(ticket), .. }) => {
                Wait::Out(ticket)
            }
            Some(Whereabouts::Coming { ticket, .. }) => Wait::In(ticket),
            _ => return,
        };
        wait.wait();
    }
}
