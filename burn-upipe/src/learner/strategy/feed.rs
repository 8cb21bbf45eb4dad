//! From one loader to all ranks: rounds of items, and the agreement on what comes next.

use std::sync::mpsc::{Receiver, Sender, channel};

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::tensor::TensorData;
use burn::train::Interrupter;
use burn_context_parallel::group::{MeshShape, ProcessGroup, ReduceOp};
use burn_context_parallel::{Error, Result};

use crate::learner::SequenceInput;

/// What one rank does in one optimizer step.
pub(super) struct Round<I> {
    /// This replica's items, whole, one after the other.
    pub items: Vec<I>,
    /// Valid targets of all replicas' items.
    pub total: usize,
    pub progress: Progress,
}

pub(super) type Outboxes<I> = Vec<Sender<Round<I>>>;
pub(super) type Inbox<I> = Receiver<Round<I>>;

/// A box per rank. The leader fills all before an agreement and each rank empties its own after it, so that nobody waits at a box.
pub(super) fn channels<I>(ranks: usize) -> (Outboxes<I>, Vec<Inbox<I>>) {
    (0..ranks).map(|_| channel()).unzip()
}

/// What all ranks do next; where they differ, the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Next {
    /// The next round, or epoch.
    Go,
    /// The loader is empty, or early stopping has what it wants.
    End,
    /// An interruption or an error.
    Stop,
}

impl Next {
    /// Communication: 8 bytes to each rank.
    pub fn agree(self, world: &ProcessGroup) -> Result<Self> {
        let all = world.all_reduce(TensorData::from([self as i64]), ReduceOp::Max)?;
        Ok(match all.iter::<i64>().next() {
            Some(0) => Self::Go,
            Some(1) => Self::End,
            _ => Self::Stop,
        })
    }
}

/// The first rank's end: reads the loader and hands out rounds.
pub(super) struct Reader<'a, I> {
    pub loader: Box<dyn DataLoaderIterator<I> + 'a>,
    pub outboxes: &'a Outboxes<I>,
    pub shape: MeshShape,
    /// Items of a replica in a round.
    pub micro_batches: usize,
}

impl<I: SequenceInput> Reader<'_, I> {
    /// Reads the next round and puts it into all boxes.
    pub fn next(&mut self, interrupter: &Interrupter) -> Next {
        let replicas = self.shape.data;
        let mut items = Vec::new();
        while items.len() < replicas.saturating_mul(self.micro_batches) {
            if interrupter.should_stop() {
                return Next::Stop;
            }
            match self.loader.next() {
                Some(Ok(item)) => items.push(item),
                Some(Err(error)) => {
                    interrupter.fail(error);
                    return Next::Stop;
                }
                None => break,
            }
        }
        if interrupter.should_stop() {
            return Next::Stop;
        }
        if items.is_empty() {
            return Next::End;
        }
        let total = items.iter().map(SequenceInput::valid).sum();
        let progress = self.loader.progress();
        let per_replica = self.outboxes.len() / replicas;
        for (rank, outbox) in self.outboxes.iter().enumerate() {
            let items = of_replica(&items, rank / per_replica, replicas);
            // A rank that is gone has failed, and the agreement says so.
            let _ = outbox.send(Round { items, total, progress: progress.clone() });
        }
        Next::Go
    }
}

/// Item i is replica i mod `replicas`'; who has none left repeats another's without its targets.
fn of_replica<I: SequenceInput>(items: &[I], replica: usize, replicas: usize) -> Vec<I> {
    let mine = |turn: &[I]| turn.get(replica).cloned().unwrap_or_else(|| turn[0].clone().without_targets());
    items.chunks(replicas).map(mine).collect()
}

/// What has been agreed on, on every rank.
pub(super) fn take<I>(inbox: &Inbox<I>) -> Result<Round<I>> {
    inbox.try_recv().map_err(|_| {
        Error::invalid(
            "ContextParallelStrategy",
            "a round was agreed on that did not come",
            "the first rank has failed: see its error",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learner::Place;
    use burn_context_parallel::attention::SequenceContext;
    use burn_context_parallel::group::launch;

    /// A number, and as many targets.
    #[derive(Clone, Debug, PartialEq)]
    struct Item(usize, usize);

    impl SequenceInput for Item {
        fn valid(&self) -> usize {
            self.1
        }

        fn without_targets(self) -> Self {
            Self(self.0, 0)
        }

        fn shard(self, _: &Place, _: usize) -> Result<Self> {
            Ok(self)
        }

        fn context(&self, _: &Place) -> Result<SequenceContext> {
            SequenceContext::single(1, 1)
        }
    }

    #[test]
    fn every_item_has_one_replica_and_all_replicas_make_as_many() {
        for replicas in 1..=5 {
            for count in 1..=11 {
                let items: Vec<Item> = (0..count).map(|index| Item(index, index + 1)).collect();
                let shares: Vec<Vec<Item>> =
                    (0..replicas).map(|replica| of_replica(&items, replica, replicas)).collect();
                assert!(shares.iter().all(|share| share.len() == count.div_ceil(replicas)), "{count} over {replicas}");
                assert!((0..count).all(|index| shares[index % replicas][index / replicas] == items[index]));
                let targets: usize = shares.iter().flatten().map(Item::valid).sum();
                assert_eq!(targets, items.iter().map(Item::valid).sum::<usize>());
            }
        }
    }

    #[test]
    fn the_most_decided_rank_is_followed() {
        let agreed = launch(3, |world| {
            let says = |rank, next| if world.rank() == rank { next } else { Next::Go };
            let said = [Next::Go, says(0, Next::End), says(2, Next::Stop)];
            said.into_iter().map(|next| next.agree(&world)).collect::<Result<Vec<_>>>()
        });
        assert_eq!(agreed.unwrap(), vec![vec![Next::Go, Next::End, Next::Stop]; 3]);
    }
}
