//! What is where, and what is on its way: a list of saved tensors, without the copies themselves.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use burn_context_parallel::phase;
use burn_context_parallel::vjp::AnyTensor;

use super::queue::{Arrival, Departure};
use super::{OffloadError, Slot, Ticket};

#[derive(Default)]
pub(super) struct State {
    next: u64,
    /// In the order of saving.
    pub entries: BTreeMap<u64, Entry>,
    pub peak: usize,
    pub kept: usize,
}

pub(super) struct Entry {
    /// A checkpoint's, and not somebody's who named it.
    pub of_step: bool,
    pub bytes: usize,
    pub arrival: Arrival,
    pub at: Whereabouts,
    /// It was to leave and found no room.
    pub refused: bool,
}

pub(super) enum Whereabouts {
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
        /// As in `Here`.
        asked: bool,
    },
    Here {
        slot: Arc<Slot>,
        tensor: AnyTensor,
        /// Its copy out, if that may go on.
        leaving: Option<Ticket<()>>,
        /// Somebody has asked for it, and not only for what is needed before it.
        asked: bool,
    },
    Failed(OffloadError),
}

/// What somebody who waits without the lock waits for.
pub(super) enum Wait {
    Out(Ticket<()>),
    In(Ticket<AnyTensor>),
}

impl Wait {
    /// Waits, in a phase of its own: the bytes are in that of the copy.
    pub fn wait(self) {
        let _phase = phase::enter("offload", None);
        match self {
            Self::Out(ticket) => ticket.wait(),
            Self::In(ticket) => ticket.wait(),
        }
    }
}

/// What becomes of a tensor that is asked for.
#[allow(clippy::large_enum_variant, reason = "as large as Burn's handles on the device, and one a question")]
pub(super) enum Asked {
    Here(AnyTensor),
    Coming(Ticket<AnyTensor>),
    Leaving(Ticket<()>),
    Away,
}

impl State {
    /// Puts a tensor on the list, on its device; how many of the same sort were there before.
    pub fn add(&mut self, of_step: bool, bytes: usize, arrival: Arrival, tensor: AnyTensor) -> (u64, usize) {
        let (id, position) = (self.next, self.entries.values().filter(|entry| entry.of_step == of_step).count());
        self.next += 1;
        let at = Whereabouts::Device(tensor);
        self.entries.insert(id, Entry { of_step, bytes, arrival, at, refused: false });
        (id, position)
    }

    /// The tensor, while it has not left its device.
    pub fn staying(&self, id: u64) -> Option<&AnyTensor> {
        match &self.entries.get(&id)?.at {
            Whereabouts::Device(tensor) => Some(tensor),
            _ => None,
        }
    }

    pub fn place(&mut self, id: u64, at: Whereabouts) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.at = at;
        }
        self.peak = self.peak.max(self.in_flight());
    }

    /// Takes notice of copies that have ended.
    pub fn settle(&mut self) {
        for entry in self.entries.values_mut() {
            let ended = match &mut entry.at {
                Whereabouts::Leaving { slot, ticket, .. } if ticket.is_settled() => {
                    ticket.take().map(|()| Whereabouts::Away(slot.clone()))
                }
                Whereabouts::Coming { slot, ticket, asked } if ticket.is_settled() => {
                    let here = |tensor| Whereabouts::Here { slot: slot.clone(), tensor, leaving: None, asked: *asked };
                    ticket.take().map(here)
                }
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

    pub fn failure(&self) -> Option<OffloadError> {
        self.entries.values().find_map(|entry| match &entry.at {
            Whereabouts::Failed(error) => Some(error.clone()),
            _ => None,
        })
    }

    pub fn in_flight(&self) -> usize {
        let flies = |entry: &&Entry| match &entry.at {
            Whereabouts::Leaving { ticket, .. } => !ticket.is_settled(),
            Whereabouts::Coming { .. } | Whereabouts::Here { .. } => true,
            Whereabouts::Device(_) | Whereabouts::Away(_) | Whereabouts::Failed(_) => false,
        };
        self.entries.values().filter(flies).count()
    }

    pub fn on_device(&self) -> usize {
        let stays = |entry: &&Entry| matches!(entry.at, Whereabouts::Device(_));
        self.entries.values().filter(stays).map(|entry| entry.bytes).sum()
    }

    /// The oldest on the device, of those behind `after`, if there are more than `budget` bytes.
    pub fn beyond(&self, budget: usize, after: Option<u64>) -> Option<u64> {
        if self.on_device() <= budget {
            return None;
        }
        let from = after.map_or(0, |after| after + 1);
        let leaves = |entry: &Entry| entry.bytes > 0 && matches!(entry.at, Whereabouts::Device(_));
        self.entries.range(from..).find(|(_, entry)| leaves(entry)).map(|(id, _)| *id)
    }

    /// The last one that is away of those saved before `id`; of steps if `id` is, or of those with names.
    pub fn away_before(&self, id: u64) -> Option<u64> {
        let of_step = self.entries.get(&id)?.of_step;
        let away = |entry: &Entry| entry.of_step == of_step && matches!(entry.at, Whereabouts::Away(_));
        self.entries.range(..id).rev().find(|(_, entry)| away(entry)).map(|(id, _)| *id)
    }

    /// Makes room for one more in flight: what was fetched ahead goes again, copies out are waited for. Nothing is waited for that
    /// only the caller could release.
    pub fn room(&mut self, limit: usize) -> Option<Wait> {
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

    pub fn ask(&mut self, id: u64) -> Result<Asked, OffloadError> {
        let Some(entry) = self.entries.get_mut(&id) else {
            return Err(OffloadError::GivenUp);
        };
        let (answer, here) = match &mut entry.at {
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
            Whereabouts::Coming { ticket, asked, .. } => {
                *asked = true;
                (Asked::Coming(ticket.clone()), None)
            }
            Whereabouts::Away(_) => (Asked::Away, None),
            Whereabouts::Failed(error) => return Err(error.clone()),
        };
        if let Some(here) = here {
            entry.at = here;
        }
        Ok(answer)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{DType, Device, Tensor};

    use super::super::disk::DiskFile;
    use super::super::slot::Hold;
    use super::super::{Disk, Promise};
    use super::*;

    fn tensor() -> AnyTensor {
        Tensor::<1>::ones([4], &Device::flex()).into_dispatch()
    }

    /// A list with one tensor that is coming, and what ends its copy.
    fn coming(asked: bool) -> (State, u64, Promise<AnyTensor>) {
        let file = DiskFile::new(&Disk { folder: std::env::temp_dir(), budget: None }).unwrap();
        let slot = Arc::new(Slot::new(16, Hold::Disk(file.reserve(16).unwrap())));
        let mut state = State::default();
        let arrival = Arrival { shape: [4].into(), dtype: DType::F32, device: Device::flex() };
        let (id, _) = state.add(true, 16, arrival, tensor());
        let (ticket, promise) = Ticket::new();
        state.place(id, Whereabouts::Coming { slot, ticket, asked });
        (state, id, promise)
    }

    /// Two threads that each wait for a tensor under K = 1 must not send each other's away, or they copy for ever.
    #[test]
    fn what_somebody_waits_for_is_not_sent_away_when_it_comes() {
        for (begun_for, asked_meanwhile) in [(true, false), (false, true), (false, false)] {
            let (mut state, id, promise) = coming(begun_for);
            if asked_meanwhile {
                assert!(matches!(state.ask(id), Ok(Asked::Coming(_))));
            }
            promise.settle(Ok(tensor()));
            assert!(state.room(1).is_none());
            let wanted = begun_for || asked_meanwhile;
            assert_eq!(state.in_flight(), usize::from(wanted), "begun for it {begun_for}, asked {asked_meanwhile}");
        }
    }
}
