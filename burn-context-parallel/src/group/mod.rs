//! Process groups: who the ranks are, and how values move between them.
//!
//! A [`ProcessGroup`] is one rank's handle of a group. [`launch`] starts ranks as threads of this process;
//! [`ProcessGroup::single`] is a group of one, for programs that run on one device. Smaller groups come from
//! [`subgroup`](ProcessGroup::subgroup) or from the axes of a [`Mesh`].
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_context_parallel::group::{ReduceOp, launch};
//!
//! let sums = launch(4, |world| {
//!     let x = Tensor::<1>::full([2], world.rank() as f32, &Device::flex());
//!     let sum = world.all_reduce(x, ReduceOp::Sum)?;
//!     Ok::<_, burn_context_parallel::Error>(sum.into_data())
//! })?;
//! assert_eq!(sums[0].try_to_vec::<f32>().unwrap(), [6.0, 6.0]);
//! # Ok::<(), burn_context_parallel::group::LaunchError>(())
//! ```
//!
//! # Nobody waits for ever
//!
//! A world fails once. Whatever goes wrong first (a rank returns an error, panics, leaves early, does not arrive, or makes
//! another call than the others) is recorded as a [`GroupError`], and every collective of every group of that world returns it
//! from then on.
//!
//! # Other transports
//!
//! A group works on anything that is a [`Transport`]; its documentation says what MPI or NCCL must provide.

mod call;
mod collectives;
mod error;
mod launch;
mod mesh;
mod parcel;
mod payload;
mod reduce;
mod threads;
mod traffic;
mod transport;

use std::fmt;
use std::sync::Arc;

use burn::tensor::Device;

pub use call::{Announcement, Argument, Call, Kind, Operation, ReduceOp, disagreement};
pub use error::{Aspect, Cause, Claim, GroupError, Place, Site};
pub use launch::{LaunchConfig, LaunchError, MAX_RANKS, STACKS, launch, launch_each};
pub use mesh::{Axis, Coordinates, Mesh, MeshShape, ParseMeshError};
pub use parcel::{Body, Parcel, Reading};
pub use payload::Payload;
pub use reduce::reduce;
pub use traffic::{Count, Counters, Traffic};
pub use transport::{DIRECT_BYTES, Transport, all_reduce_bytes};

use crate::{Error, Result};

/// One rank's handle of a group. Clones are the same handle.
#[derive(Clone)]
pub struct ProcessGroup {
    transport: Arc<dyn Transport>,
    /// What its unequal exchanges and its all-gathers are about.
    about: Option<u64>,
    /// Where this rank's tensors live, for calls that bring none.
    home: Option<Device>,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup").field("rank", &self.rank()).field("members", &self.members()).finish()
    }
}

impl ProcessGroup {
    /// A group of one rank: every collective returns what it was given, at once.
    ///
    /// ```
    /// use burn::tensor::TensorData;
    /// use burn_context_parallel::group::{ProcessGroup, ReduceOp};
    ///
    /// let group = ProcessGroup::single();
    /// assert_eq!((group.rank(), group.size()), (0, 1));
    /// assert_eq!(group.all_reduce(TensorData::from([3]), ReduceOp::Sum), Ok(TensorData::from([3])));
    /// ```
    pub fn single() -> Self {
        Self::from_transport(Arc::new(transport::Alone::default()))
    }

    /// A group over a transport.
    pub fn from_transport(transport: Arc<dyn Transport>) -> Self {
        Self { transport, about: None, home: None }
    }

    /// This group, with something that its ranks must agree on in every [`all_to_all_uneven`](Self::all_to_all_uneven) and
    /// [`all_gather`](Self::all_gather): where they do not, each of them gets an error. Costs no exchange.
    pub fn about(&self, digest: u64) -> Self {
        Self { about: Some(digest), ..self.clone() }
    }

    /// This group, for a rank whose tensors live on `device`: what arrives where the rank brings no tensor itself (of a
    /// [`broadcast`](Self::broadcast), of an [`all_to_all_uneven`](Self::all_to_all_uneven)) comes there, and not to the sender's device.
    /// Costs nothing.
    pub fn at(&self, device: &Device) -> Self {
        Self { home: Some(device.clone().inner()), ..self.clone() }
    }

    /// What it runs on; for a transport that wraps another one.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// This rank, in this group.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// The number of ranks in this group.
    pub fn size(&self) -> usize {
        self.members().len()
    }

    /// This rank, in the world.
    pub fn world_rank(&self) -> usize {
        self.members()[self.rank()]
    }

    /// The ranks of this group in the world, ascending.
    pub fn members(&self) -> &[usize] {
        self.transport.members()
    }

    /// The smaller group of some of this group's ranks. Every one of them calls this with the same list.
    ///
    /// Groups of the same ranks are one group: their collectives are matched in one order.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the list is not ascending, leaves this group, or leaves this rank out.
    ///
    /// # Communication
    ///
    /// None.
    ///
    /// ```
    /// use burn_context_parallel::group::launch;
    ///
    /// let placed = launch(4, |world| {
    ///     let half = if world.rank() < 2 { [0, 1] } else { [2, 3] };
    ///     world.subgroup(&half).map(|group| (group.rank(), group.world_rank()))
    /// })?;
    /// assert_eq!(placed, [(0, 0), (1, 1), (0, 2), (1, 3)]);
    /// assert!(launch(2, |world| world.subgroup(&[1, 0])).is_err());
    /// # Ok::<(), burn_context_parallel::group::LaunchError>(())
    /// ```
    pub fn subgroup(&self, members: &[usize]) -> Result<Self> {
        let refuse =
            |problem: &str, remedy: &str| Err(Error::invalid("subgroup", format!("{members:?} {problem}"), remedy));
        if !members.is_sorted_by(|a, b| a < b) {
            return refuse("is not ascending", "list every rank once, in order");
        }
        if members.last().is_some_and(|&last| last >= self.size()) {
            let problem = format!("leaves a group of {}", self.size());
            return refuse(&problem, "list ranks of this group, counted from 0");
        }
        if !members.contains(&self.rank()) {
            let problem = format!("leaves out rank {}, which asks for it", self.rank());
            return refuse(&problem, "only members make a group");
        }
        if members.len() == self.size() {
            return Ok(self.clone());
        }
        let members: Vec<_> = members.iter().map(|&member| self.members()[member]).collect();
        Ok(Self::from_transport(self.transport.subgroup(&members)?))
    }

    /// The same ranks once more, for another thread of this rank: calls of different channels are not matched with each other.
    /// Channel 0 is the group itself.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the transport has one channel only.
    ///
    /// # Communication
    ///
    /// None.
    pub fn channel(&self, channel: u32) -> Result<Self> {
        Ok(Self { transport: self.transport.channel(channel)?, ..self.clone() })
    }

    /// Ends the world on purpose: every other rank gets a [`GroupError`] with this message.
    ///
    /// For a rank that finds out what no error of its own will tell, a loss that is not finite for instance.
    pub fn fail(&self, message: impl Into<String>) {
        self.transport.fail(Cause::Failed(message.into()));
    }

    /// The failure that ended this world.
    pub fn failure(&self) -> Option<GroupError> {
        self.transport.failure()
    }

    /// What this rank has sent to others and received from them, in all groups of its world, since the last
    /// [reset](ProcessGroup::reset_traffic). What stays on a rank is not counted.
    pub fn traffic(&self) -> Traffic {
        self.transport.counters().read()
    }

    /// Counts again from zero, in all groups of this rank's world.
    pub fn reset_traffic(&self) {
        self.transport.counters().reset();
    }
}
