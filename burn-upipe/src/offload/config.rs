//! What leaves the device, where it goes, and how much of it is on the way.

use std::path::PathBuf;

use super::OffloadError;

/// Which saved tensors leave the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadPolicy {
    /// None: everything stays on the device.
    None,
    /// All of them.
    All,
    /// The first of every so many, counted over what is saved at that moment: blocks 0, k, 2k, .. What was saved by name counts apart.
    Every(usize),
    /// What exceeds so many bytes on the device, oldest first: the oldest is needed last. One that finds no room elsewhere is passed over.
    Budget(usize),
}

/// Where tensors wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In host memory; on disk when the host budget is used up and there is a [`Disk`].
    Host,
    /// On disk.
    Disk,
}

/// A folder for a file without a name, which is gone with its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// On a disk that is fast enough, as NVMe.
    pub folder: PathBuf,
    /// How large the file may become, in bytes; `None` is as large as there is room.
    pub budget: Option<u64>,
}

/// An engine's settings. The result of a step is the same with any of them.
///
/// | field | saves | costs |
/// |---|---|---|
/// | `policy` | saved tensors on the device, all or a part of them | copies to and from it, beside the computation |
/// | `in_flight` | less is at the same time on its way, with 1 nothing ahead of its use | time, where a copy takes longer than a block |
///
/// ```
/// use burn_upipe::offload::{Disk, Offload, OffloadConfig, OffloadPolicy, Place};
///
/// let folder = std::env::temp_dir();
/// let config = OffloadConfig::new()
///     .with_policy(OffloadPolicy::Every(2))
///     .with_host_budget(Some(64 << 20))
///     .with_disk(Some(Disk { folder, budget: Some(1 << 30) }));
/// assert_eq!((config.place, config.in_flight), (Place::Host, 2));
/// Offload::new(config)?;
/// assert!(Offload::new(OffloadConfig::new().with_in_flight(0)).is_err());
/// # Ok::<(), burn_upipe::offload::OffloadError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadConfig {
    /// Which tensors leave.
    pub policy: OffloadPolicy,
    /// Where they go.
    pub place: Place,
    /// K: how many tensors may be on the device because of offload, on their way out, or back and in use.
    pub in_flight: usize,
    /// How much host memory may be taken, in bytes; `None` is no limit. See [`host_budget`](super::host_budget).
    pub host_budget: Option<usize>,
    /// Where a file may be written.
    pub disk: Option<Disk>,
}

impl OffloadConfig {
    /// All tensors to host memory without limit, two in flight.
    pub fn new() -> Self {
        Self { policy: OffloadPolicy::All, place: Place::Host, in_flight: 2, host_budget: None, disk: None }
    }

    /// Another choice of tensors.
    pub fn with_policy(self, policy: OffloadPolicy) -> Self {
        Self { policy, ..self }
    }

    /// Another place.
    pub fn with_place(self, place: Place) -> Self {
        Self { place, ..self }
    }

    /// Another number of tensors in flight.
    pub fn with_in_flight(self, in_flight: usize) -> Self {
        Self { in_flight, ..self }
    }

    /// Another limit of host memory.
    pub fn with_host_budget(self, host_budget: Option<usize>) -> Self {
        Self { host_budget, ..self }
    }

    /// Another disk, or none.
    pub fn with_disk(self, disk: Option<Disk>) -> Self {
        Self { disk, ..self }
    }

    pub(super) fn check(&self) -> Result<(), OffloadError> {
        let invalid = |problem: String, remedy| Err(OffloadError::Invalid { problem, remedy });
        if self.in_flight == 0 {
            return invalid("0 tensors in flight".to_owned(), "use at least 1, with 2 the next one is fetched ahead");
        }
        if self.policy == OffloadPolicy::Every(0) {
            return invalid("every 0th tensor".to_owned(), "use 1 for all, 2 for every second, ..");
        }
        if self.place == Place::Disk && self.disk.is_none() {
            return invalid("tensors are to go to disk, and no folder is given".to_owned(), "give one");
        }
        Ok(())
    }
}

impl Default for OffloadConfig {
    /// [`new`](Self::new).
    fn default() -> Self {
        Self::new()
    }
}
