//! A step's sequences, dealt to the replicas of the data axis and cut into micro-batches.
//!
//! ```text
//! sequences 0 1 2 3 4, data=2, batch 2:   replica 0: [0 2] [4]      replica 1: [1 3] []
//! ```
//!
//! Every replica has as many micro-batches as any other, some of them perhaps without a sequence: what gathers weights over all ranks
//! inside a forward pass (FSDP) waits for every rank each time. A micro-batch without a sequence is padding that has no target: its
//! share of the step's loss is exactly 0, and so are its gradients.

/// One replica's micro-batches, each of at most `batch` of the sequences; without any it is padding.
///
/// Replicas take turns, so that none has more than one sequence more than another.
///
/// # Panics
///
/// If `batch` or `replicas` is 0.
pub(crate) fn deal(sequences: &[usize], replica: usize, replicas: usize, batch: usize) -> Vec<Vec<usize>> {
    let own: Vec<usize> = sequences.iter().copied().skip(replica).step_by(replicas).collect();
    let mut dealt: Vec<Vec<usize>> = own.chunks(batch).map(<[usize]>::to_vec).collect();
    dealt.resize(rounds(sequences.len(), replicas, batch), Vec::new());
    dealt
}

/// Micro-batches of every replica.
pub(crate) fn rounds(sequences: usize, replicas: usize, batch: usize) -> usize {
    sequences.div_ceil(replicas).div_ceil(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What makes collectives inside a forward pass safe, and the mean one over all sequences.
    #[test]
    fn every_sequence_is_dealt_once_and_every_replica_has_as_many_micro_batches() {
        for sequences in 1..12 {
            let all: Vec<usize> = (100..100 + sequences).collect();
            for replicas in 1..6 {
                for batch in 1..5 {
                    let dealt: Vec<_> = (0..replicas).map(|replica| deal(&all, replica, replicas, batch)).collect();
                    assert!(dealt.iter().all(|own| own.len() == rounds(sequences, replicas, batch)));
                    assert!(dealt.iter().flatten().all(|rows| rows.len() <= batch));
                    let mut found: Vec<usize> = dealt.iter().flatten().flatten().copied().collect();
                    found.sort_unstable();
                    assert_eq!(found, all);
                    let counts: Vec<usize> = dealt.iter().map(|own| own.iter().flatten().count()).collect();
                    assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
                }
            }
        }
    }

    #[test]
    fn one_replica_has_the_sequences_in_their_order() {
        assert_eq!(deal(&[7, 3, 5, 1, 2], 0, 1, 2), [vec![7, 3], vec![5, 1], vec![2]]);
        assert_eq!(deal(&[7, 3, 5], 1, 2, 1), [vec![3], vec![]]);
    }
}
