//! What a way of moving values between ranks must do: the trait that threads implement now, and MPI and NCCL later.

use std::fmt;
use std::sync::Arc;

use crate::{Error, Result};

use super::call::{Call, ReduceOp};
use super::error::{Cause, GroupError};
use super::parcel::Parcel;
use super::reduce::{concat, reduce};
use super::traffic::Counters;

/// One rank's end of a group.
///
/// [`ProcessGroup`](super::ProcessGroup) checks arguments, takes types off and puts them on again; it never calls a
/// transport of one rank. All else is up to the transport. One exchange is enough to be correct; every collective that the
/// library underneath does better (`MPI_Allreduce`, `ncclReduceScatter`) should be overridden.
///
/// # What must be guaranteed
///
/// - **Order.** Calls of one member set are matched by `(Call::sequence, Call::step)`, even through two handles of it.
///   NCCL matches by the order of enqueueing, so such a transport keeps one communicator per member set and rank.
/// - **Agreement.** Every rank of a call whose announcements differ ([`disagreement`](super::disagreement)) gets the same
///   [`GroupError`], before a value is delivered. A transport between processes exchanges a hash of the [`Call`] first
///   (some bytes, which hide behind the previous collective), and the calls themselves only where hashes differ. Where
///   `expects` is `Some`, the shapes sent must be compared with it as well.
/// - **Release.** After [`fail`](Transport::fail), on any rank and in any group of the world, every call that waits or
///   comes later, on all ranks and groups, returns the recorded failure: the first one. A call that waits longer than the
///   timeout is such a failure. With NCCL this takes `ncclCommAbort` from a watching thread; with MPI, nonblocking
///   operations that are tested in a loop.
/// - **Values.** What arrives has the bits, shape and element type that were sent. Whoever sent a parcel may go on using
///   the tensor behind it: it must not be written to, and reading it must be ordered after the work that computes it
///   (with NCCL, on the stream of the tensor's device).
/// - **Reductions** are the same on all ranks, bit for bit. Rank order, as [`reduce`] has it, is not asked of an overriding
///   transport, but half precision accumulated in `f32` is: a transport that cannot do so leaves the default in place.
/// - **Counting.** [`exchange`](Transport::exchange) does not count, its callers here do. A method that is overridden counts
///   what it really sent to and received from other ranks ([`Counters::moved`]).
///
/// Calls come from the rank's own thread, or one after the other from threads of it; a transport need not order two that
/// race.
pub trait Transport: fmt::Debug + Send + Sync {
    /// This rank, in this group.
    fn rank(&self) -> usize;

    /// The group's members by their rank in the world, ascending.
    fn members(&self) -> &[usize];

    /// The end of a smaller group; `members` are world ranks, ascending, among [`members`](Transport::members), and
    /// include this rank. Does not communicate. The same members always make the same group.
    ///
    /// # Errors
    ///
    /// If the library underneath cannot make it.
    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Transport>>;

    /// The same members once more, whose calls are matched apart from those of other channels: what another thread of this rank
    /// needs to communicate meanwhile. Channel 0 is the group itself. With MPI and NCCL a communicator of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if there is one channel only, the default.
    fn channel(&self, channel: u32) -> Result<Arc<dyn Transport>> {
        Err(Error::unsupported(
            "a transport's channel",
            format!("channel {channel}"),
            "do without what communicates in the background (FsdpConfig::prefetch = false)",
        ))
    }

    /// The next collective's sequence number on this rank.
    fn begin(&self) -> u64;

    /// Sends `parcels[i]` to member `i` (its own part included), and returns what each member sent to this rank.
    ///
    /// Waits for all members, whatever is sent.
    ///
    /// # Errors
    ///
    /// [`Error::Group`], as above.
    fn exchange(&self, call: &Call, parcels: Vec<Option<Parcel>>) -> Result<Vec<Option<Parcel>>>;

    /// Records that this rank failed, unless a failure is recorded already, and releases all ranks of the world.
    fn fail(&self, cause: Cause);

    /// The failure that was recorded.
    fn failure(&self) -> Option<GroupError>;

    /// This rank's counters, shared by all groups of its world.
    fn counters(&self) -> &Arc<Counters>;

    /// Brings a value to where this transport can take it from, once, before it goes to any number of ranks.
    ///
    /// # Errors
    ///
    /// If a device cannot be read.
    fn prepare(&self, parcel: Parcel) -> Result<Parcel> {
        Ok(parcel)
    }

    /// Every rank gets every part.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Transport::exchange).
    ///
    /// # Communication
    ///
    /// Sends `(P - 1) n` bytes.
    fn all_gather(&self, call: &Call, part: Parcel) -> Result<Vec<Parcel>> {
        let parcels = vec![Some(part); self.members().len()];
        complete(exchange_counted(self, call, parcels)?)
    }

    /// Rank `i` gets the reduction of all parts `i`.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Transport::exchange).
    ///
    /// # Communication
    ///
    /// Sends the parts for others, receives `P - 1` times its own.
    fn reduce_scatter(&self, call: &Call, parts: Vec<Parcel>, op: ReduceOp) -> Result<Parcel> {
        let label = parts[self.rank()].label();
        let parcels = parts.into_iter().map(Some).collect();
        let parts = complete(exchange_counted(self, call, parcels)?)?;
        Ok(label.onto(reduce(&parts, op)?))
    }

    /// Every rank gets the reduction of all values.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Transport::exchange).
    ///
    /// # Communication
    ///
    /// Up to [`DIRECT_BYTES`], every rank sends its value to every other: `(P - 1) n` bytes in one exchange. Above, each rank
    /// reduces one part and passes it on: `2 (P - 1) / P n` bytes in two.
    fn all_reduce(&self, call: &Call, value: Parcel, op: ReduceOp) -> Result<Parcel> {
        let (ranks, elements) = (self.members().len(), value.elements());
        let label = value.label();
        if value.bytes() <= DIRECT_BYTES {
            let values = complete(exchange_counted(self, call, vec![Some(value); ranks])?)?;
            return Ok(label.onto(reduce(&values, op)?));
        }
        let ends: Vec<_> = (1..=ranks).map(|i| part_end(elements, ranks, i)).collect();
        let pieces = value.cut(&ends)?.into_iter().map(Some).collect();
        let pieces = complete(exchange_counted(self, call, pieces)?)?;
        let mine = Parcel::from_data(reduce(&pieces, op)?);
        drop(pieces);
        let pieces = exchange_counted(self, &call.next_step(), vec![Some(mine); ranks])?;
        let whole = concat(&complete(pieces)?, &label.shape, label.dtype)?;
        Ok(label.onto(whole))
    }

    /// Every rank gets the root's value.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Transport::exchange).
    ///
    /// # Communication
    ///
    /// The root sends `(P - 1) n` bytes.
    fn broadcast(&self, call: &Call, value: Option<Parcel>, root: usize) -> Result<Parcel> {
        let parcels = vec![value; self.members().len()];
        received(exchange_counted(self, call, parcels)?, root)
    }

    /// Sends to the rank `by` further on in the ring, receives from the one `by` before; `by` is less than the group's size.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Transport::exchange).
    ///
    /// # Communication
    ///
    /// Sends `n` bytes.
    fn shift(&self, call: &Call, value: Parcel, by: usize) -> Result<Parcel> {
        let (rank, size) = (self.rank(), self.members().len());
        let mut parcels = vec![None; size];
        parcels[(rank + by) % size] = Some(value);
        received(exchange_counted(self, call, parcels)?, (rank + size - by) % size)
    }

    /// Waits for all members.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Transport::exchange).
    fn barrier(&self, call: &Call) -> Result<()> {
        self.exchange(call, vec![None; self.members().len()]).map(drop)
    }
}

/// Up to how many bytes the default all-reduce saves an exchange at the price of `P / 2` times the bytes.
pub const DIRECT_BYTES: u64 = 32 * 1024;

/// Bytes that `rank` sends in one default all-reduce of so many elements of so many bytes.
///
/// ```text
/// (P - 1) n   up to DIRECT_BYTES,   n - m + (P - 1) m   above, where m = n / P is the rank's part of n
/// ```
pub fn all_reduce_bytes(elements: usize, size: usize, ranks: usize, rank: usize) -> usize {
    let ranks = ranks.max(1);
    let others = ranks - 1;
    if (elements * size) as u64 <= DIRECT_BYTES {
        return others * elements * size;
    }
    let mine = part_end(elements, ranks, rank + 1) - part_end(elements, ranks, rank);
    (elements - mine + others * mine) * size
}

/// Where the first `parts` ranks' parts of a value end.
fn part_end(elements: usize, ranks: usize, parts: usize) -> usize {
    (parts as u128 * elements as u128 / ranks as u128) as usize
}

/// An exchange, and its bytes.
pub(super) fn exchange_counted<T: Transport + ?Sized>(
    transport: &T,
    call: &Call,
    parcels: Vec<Option<Parcel>>,
) -> Result<Vec<Option<Parcel>>> {
    let crossing = |parcels: &[Option<Parcel>]| {
        let others = parcels.iter().enumerate().filter(|(index, _)| *index != transport.rank());
        others.filter_map(|(_, parcel)| parcel.as_ref()).map(Parcel::bytes).sum()
    };
    let sent = crossing(&parcels);
    let arrived = transport.exchange(call, parcels)?;
    transport.counters().moved(call.operation, sent, crossing(&arrived));
    Ok(arrived)
}

/// Every member's part.
fn complete(parcels: Vec<Option<Parcel>>) -> Result<Vec<Parcel>> {
    let count = parcels.len();
    let parcels: Vec<_> = parcels.into_iter().flatten().collect();
    if parcels.len() == count { Ok(parcels) } else { Err(lost()) }
}

/// One member's part.
fn received(mut parcels: Vec<Option<Parcel>>, from: usize) -> Result<Parcel> {
    parcels.get_mut(from).and_then(Option::take).ok_or_else(lost)
}

fn lost() -> Error {
    Error::invalid(
        "receiving",
        "a part that was announced did not arrive",
        "the transport must compare `Call`s before it delivers",
    )
}

/// A group of one rank: nothing is ever sent.
#[derive(Debug, Default)]
pub(super) struct Alone {
    counters: Arc<Counters>,
}

impl Transport for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &[usize] {
        &[0]
    }

    fn subgroup(&self, _: &[usize]) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Self { counters: self.counters.clone() }))
    }

    fn channel(&self, _: u32) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Self { counters: self.counters.clone() }))
    }

    fn begin(&self) -> u64 {
        0
    }

    fn exchange(&self, _: &Call, parcels: Vec<Option<Parcel>>) -> Result<Vec<Option<Parcel>>> {
        Ok(parcels)
    }

    fn fail(&self, _: Cause) {}

    fn failure(&self) -> Option<GroupError> {
        None
    }

    fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
}
