//! A rank's engine: which of its saved tensors is where, and what is on its way.
//!
//! ```text
//! save ──► on the device ──► leaving ──► away ──► coming ──► here ──► dropped
//!               │ (by policy,    └── needed before it has left ──►┘
//!               │  or no room)
//!               └──► used from where it is
//! ```
//!
//! Leaving, coming and here are in flight: the device holds the tensor because of offload. There are at most K of them: `save`
//! waits for the oldest copy out, and nothing is fetched ahead beyond it. Saved tensors are needed in the opposite order of their
//! saving, so what is fetched ahead is what was saved before the one that is asked for.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn::tensor::Tensor;
use burn_context_parallel::vjp::AnyTensor;

use super::config::{OffloadConfig, OffloadPolicy, Place};
use super::copy::is_on_cpu;
use super::disk::DiskFile;
use super::host::HostPool;
use super::queue::{Arrival, CopyQueue, CopyThread, Departure};
use super::slot::Hold;
use super::{OffloadError, OffloadStats, Saved, Slot, Ticket};

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

#[derive(Default)]
struct State {
    next: u64,
    /// In the order of saving.
    entries: BTreeMap<u64, Entry>,
    peak: usize,
    kept: usize,
}

struct Entry {
    /// A checkpoint's, and not somebody's who named it.
    of_step: bool,
    bytes: usize,
    arrival: Arrival,
    at: Whereabouts,
}

enum Whereabouts {
    Device(AnyTensor),
    Leaving {
        /// Gone when the copy has ended.
        departure: Weak<Departure>,
        slot: Arc<Slot>,
        ticket: Ticket<()>,
    },
    Away(Arc<Slot>),
    Coming {
        slot: Arc<Slot>,
        ticket: Ticket<AnyTensor>,
    },
    Here {
        slot: Arc<Slot>,
        tensor: AnyTensor,
        /// Its copy out, if that may go on.
        leaving: Option<Ticket<()>>,
        /// Somebody has asked for it.
        asked: bool,
    },
    Failed(OffloadError),
}

/// What somebody who waits without the lock waits for.
enum Wait {
    Out(Ticket<()>),
    In(Ticket<AnyTensor>),
}

impl Wait {
    fn wait(self) {
        match self {
            Self::Out(ticket) => ticket.wait(),
            Self::In(ticket) => ticket.wait(),
        }
    }
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

    /// Keeps `x` until it is asked for again, where the policy says. Its device memory is free when everybody else has
    /// dropped `x`, too, and the copy has ended.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Invalid`] if `x` has autodiff; and what failed of the copies of what is still saved.
    ///
    /// # Memory
    ///
    /// The tensor's bytes, in host memory or on disk; on the device where neither has room, or the policy says so. While K tensors
    /// are in flight it waits.
    pub fn save<const D: usize>(&self, x: Tensor<D>) -> Result<Saved<D>, OffloadError> {
        self.save_for(x, false)
    }

    pub(super) fn save_for<const D: usize>(&self, x: Tensor<D>, of_step: bool) -> Result<Saved<D>, OffloadError> {
        if x.is_autodiff() {
            return Err(OffloadError::Invalid {
                problem: format!("a tensor of shape {:?} with autodiff", x.dims()),
                remedy: "save what is not tracked, `.inner()`: a graph does not leave its device",
            });
        }
        let arrival = Arrival { shape: x.shape(), dtype: x.dtype(), device: x.device() };
        let bytes = arrival.shape.num_elements() * arrival.dtype.size();
        let mut state = self.0.lock();
        state.settle();
        if let Some(error) = state.failure() {
            return Err(error);
        }
        let (id, position) = (state.next, state.entries.len());
        state.next += 1;
        state.entries.insert(id, Entry { of_step, bytes, arrival, at: Whereabouts::Device(x.into_dispatch()) });
        drop(state);
        // From here on it is taken off the list whatever happens.
        let saved = Saved::new(self.clone(), id);
        match self.0.config.policy {
            OffloadPolicy::None => {}
            OffloadPolicy::All => {
                self.0.send_off(id);
            }
            OffloadPolicy::Every(k) => {
                if position % k == 0 {
                    self.0.send_off(id);
                }
            }
            OffloadPolicy::Budget(budget) => {
                // The lock is free again before the loop's body takes it.
                let oldest = || self.0.lock().beyond(budget);
                while oldest().is_some_and(|oldest| self.0.send_off(oldest)) {}
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

    /// Returns host memory that no tensor uses to the system.
    pub fn trim(&self) {
        self.0.host.trim();
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

    /// Begins the copy out; `false` if there is no room anywhere, and the tensor stays.
    fn send_off(&self, id: u64) -> bool {
        let mut state = self.with_room();
        let Some(Entry { bytes, at: Whereabouts::Device(tensor), .. }) = state.entries.get(&id) else { return true };
        let (bytes, tensor) = (*bytes, tensor.clone());
        let Some(slot) = self.slot(bytes, is_on_cpu(&tensor)) else {
            if state.kept == 0 {
                log::warn!(
                    "offload: no room for {bytes} bytes, they stay on the device: host memory has {:?}, the disk {:?}",
                    self.config.host_budget,
                    self.config.disk
                );
            }
            state.kept += 1;
            return false;
        };
        let slot = Arc::new(slot);
        let departure = Arc::new(Departure { tensor });
        let at = Arc::downgrade(&departure);
        let ticket = self.queue.copy_out(departure, slot.clone());
        state.place(id, Whereabouts::Leaving { departure: at, slot, ticket });
        true
    }

    fn slot(&self, bytes: usize, on_cpu: bool) -> Option<Slot> {
        if bytes == 0 {
            return None;
        }
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
                        self.begin_fetch(&mut state, id);
                        continue;
                    }
                },
            };
            drop(state);
            wait.wait();
        }
    }

    fn begin_fetch(&self, state: &mut State, id: u64) {
        let Some(Entry { arrival, at: Whereabouts::Away(slot), .. }) = state.entries.get(&id) else { return };
        let (slot, arrival) = (slot.clone(), arrival.clone());
        let ticket = self.queue.copy_in(slot.clone(), arrival);
        state.place(id, Whereabouts::Coming { slot, ticket });
    }

    fn fetch_ahead(&self, state: &mut State, id: u64) {
        let away = |(id, entry): (&u64, &Entry)| matches!(entry.at, Whereabouts::Away(_)).then_some(*id);
        while state.in_flight() < self.config.in_flight {
            let Some(before) = state.entries.range(..id).rev().find_map(away) else { return };
            self.begin_fetch(state, before);
        }
    }

    /// Takes it off the list. Copies of it are waited for: afterwards nothing of it is anywhere.
    fn forget(&self, id: u64) {
        let entry = self.lock().entries.remove(&id);
        match entry.map(|entry| entry.at) {
            Some(Whereabouts::Leaving { ticket, .. } | Whereabouts::Here { leaving: Some(ticket), .. }) => {
                ticket.wait()
            }
            Some(Whereabouts::Coming { ticket, .. }) => ticket.wait(),
            _ => {}
        }
    }
}

enum Asked {
    Here(AnyTensor),
    Coming(Ticket<AnyTensor>),
    Leaving(Ticket<()>),
    Away,
}

impl State {
    fn place(&mut self, id: u64, at: Whereabouts) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.at = at;
        }
        self.peak = self.peak.max(self.in_flight());
    }

    /// Takes notice of copies that have ended.
    fn settle(&mut self) {
        for entry in self.entries.values_mut() {
            let ended = match &mut entry.at {
                Whereabouts::Leaving { slot, ticket, .. } if ticket.is_settled() => {
                    ticket.take().map(|()| Whereabouts::Away(slot.clone()))
                }
                Whereabouts::Coming { slot, ticket } if ticket.is_settled() => ticket
                    .take()
                    .map(|tensor| Whereabouts::Here { slot: slot.clone(), tensor, leaving: None, asked: false }),
                Whereabouts::Here { leaving, .. } => {
                    // The tensor is here: whether its copy was made does not matter any more.
                    leaving.take_if(|ticket| ticket.is_settled());
                    continue;
                }
                _ => continue,
            };
            entry.at = ended.unwrap_or_else(Whereabouts::Failed);
        }
    }

    fn failure(&self) -> Option<OffloadError> {
        self.entries.values().find_map(|entry| match &entry.at {
            Whereabouts::Failed(error) => Some(error.clone()),
            _ => None,
        })
    }

    fn in_flight(&self) -> usize {
        let flies = |entry: &&Entry| match &entry.at {
            Whereabouts::Leaving { ticket, .. } => !ticket.is_settled(),
            Whereabouts::Coming { .. } | Whereabouts::Here { .. } => true,
            Whereabouts::Device(_) | Whereabouts::Away(_) | Whereabouts::Failed(_) => false,
        };
        self.entries.values().filter(flies).count()
    }

    fn on_device(&self) -> usize {
        let stays = |entry: &&Entry| matches!(entry.at, Whereabouts::Device(_));
        self.entries.values().filter(stays).map(|entry| entry.bytes).sum()
    }

    /// The oldest on the device, if there are more than `budget` bytes.
    fn beyond(&self, budget: usize) -> Option<u64> {
        if self.on_device() <= budget {
            return None;
        }
        self.entries.iter().find(|(_, entry)| matches!(entry.at, Whereabouts::Device(_))).map(|(id, _)| *id)
    }

    /// Makes room for one more in flight: what was fetched ahead goes again, copies out are waited for. Nothing is waited for that
    /// only the caller could release.
    fn room(&mut self, limit: usize) -> Option<Wait> {
        self.settle();
        if self.in_flight() < limit {
            return None;
        }
        let ahead = self.entries.values_mut().find_map(|entry| match &entry.at {
            Whereabouts::Here { slot, asked: false, .. } if slot.keeps() => {
                entry.at = Whereabouts::Away(slot.clone());
                Some(())
            }
            _ => None,
        });
        if ahead.is_some() {
            return self.room(limit);
        }
        self.entries.values().find_map(|entry| match &entry.at {
            Whereabouts::Leaving { ticket, .. } => Some(Wait::Out(ticket.clone())),
            Whereabouts::Coming { ticket, .. } => Some(Wait::In(ticket.clone())),
            _ => None,
        })
    }

    fn ask(&mut self, id: u64) -> Result<Asked, OffloadError> {
        let Some(entry) = self.entries.get_mut(&id) else {
            return Err(OffloadError::GivenUp);
        };
        let (asked, here) = match &mut entry.at {
            Whereabouts::Device(tensor) => (Asked::Here(tensor.clone()), None),
            Whereabouts::Here { tensor, asked, .. } => {
                *asked = true;
                (Asked::Here(tensor.clone()), None)
            }
            Whereabouts::Leaving { departure, slot, ticket } => match departure.upgrade() {
                // Still there: nothing needs to be copied back.
                Some(departure) => {
                    let (tensor, slot) = (departure.tensor.clone(), slot.clone());
                    let leaving = Some(ticket.clone());
                    (Asked::Here(tensor.clone()), Some(Whereabouts::Here { slot, tensor, leaving, asked: true }))
                }
                None => (Asked::Leaving(ticket.clone()), None),
            },
            Whereabouts::Coming { ticket, .. } => (Asked::Coming(ticket.clone()), None),
            Whereabouts::Away(_) => (Asked::Away, None),
            Whereabouts::Failed(error) => return Err(error.clone()),
        };
        if let Some(here) = here {
            entry.at = here;
        }
        Ok(asked)
    }
}
