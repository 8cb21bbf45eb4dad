//! Which sequences a step takes.

use std::ops::Range;

use crate::values::DataOrder;

/// The order of sequences: epoch after epoch through all of them, `per_step` at a time. An epoch's last step has what is left,
/// which may be fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// That of the files, or drawn.
    pub kind: DataOrder,
    /// What it is drawn from.
    pub seed: u64,
    /// Sequences in all.
    pub sequences: usize,
    /// Sequences of a step, B times micro-batches.
    pub per_step: usize,
}

impl Order {
    /// Steps that go once through all sequences.
    pub fn steps_per_epoch(&self) -> usize {
        self.sequences.div_ceil(self.per_step)
    }

    /// The sequences of a step, counted from 0.
    ///
    /// # Memory
    ///
    /// Shuffled: 8 bytes a sequence, for a moment.
    pub fn step(&self, step: usize) -> Vec<usize> {
        let (epoch, within) = (step / self.steps_per_epoch(), step % self.steps_per_epoch());
        let range: Range<usize> = within * self.per_step..((within + 1) * self.per_step).min(self.sequences);
        match self.kind {
            DataOrder::File => range.collect(),
            DataOrder::Shuffle => self.epoch(epoch)[range].to_vec(),
        }
    }

    /// All sequences, in the order of an epoch: a permutation that depends on seed and epoch alone.
    fn epoch(&self, epoch: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.sequences).collect();
        let mut state = mix(mix(self.seed) ^ epoch as u64);
        for last in (1..order.len()).rev() {
            state = state.wrapping_add(GOLDEN);
            // Multiplying spreads 64 random bits over 0..=last; the bias is last / 2^64.
            let chosen = ((u128::from(mix(state)) * (last as u128 + 1)) >> 64) as usize;
            order.swap(last, chosen);
        }
        order
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's output function (Steele, Lea, Flood 2014): the same numbers on every machine and with every release of a crate.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn order(kind: DataOrder, seed: u64, sequences: usize, per_step: usize) -> Order {
        Order { kind, seed, sequences, per_step }
    }

    #[test]
    fn in_file_order_the_last_step_of_an_epoch_has_what_is_left() {
        let order = order(DataOrder::File, 3, 5, 2);
        assert_eq!(order.steps_per_epoch(), 3);
        let steps: Vec<Vec<usize>> = (0..4).map(|step| order.step(step)).collect();
        assert_eq!(steps, [vec![0, 1], vec![2, 3], vec![4], vec![0, 1]]);
    }

    #[rstest]
    #[case(1, 1)]
    #[case(7, 3)]
    #[case(100, 8)]
    fn shuffled_every_epoch_has_every_sequence_once(#[case] sequences: usize, #[case] per_step: usize) {
        let order = order(DataOrder::Shuffle, 5, sequences, per_step);
        for epoch in 0..3 {
            let steps = epoch * order.steps_per_epoch()..(epoch + 1) * order.steps_per_epoch();
            let mut all: Vec<usize> = steps.flat_map(|step| order.step(step)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..sequences).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_order_depends_on_seed_and_epoch_and_on_nothing_else() {
        let epoch = |seed, epoch, per_step| order(DataOrder::Shuffle, seed, 64, per_step).epoch(epoch);
        assert_eq!(epoch(1, 2, 4), epoch(1, 2, 32));
        assert_ne!(epoch(1, 2, 4), epoch(1, 3, 4));
        assert_ne!(epoch(1, 2, 4), epoch(2, 2, 4));
        assert_ne!(epoch(1, 2, 4), (0..64).collect::<Vec<_>>());
        // The same on every machine.
        assert_eq!(order(DataOrder::Shuffle, 0, 8, 8).step(0).len(), 8);
    }

    /// Every place gets every sequence about equally often.
    #[test]
    fn places_are_drawn_evenly() {
        let mut counts = [[0; 5]; 5];
        for seed in 0..1000 {
            for (place, sequence) in order(DataOrder::Shuffle, seed, 5, 5).step(0).into_iter().enumerate() {
                counts[place][sequence] += 1;
            }
        }
        assert!(counts.iter().flatten().all(|count| (140..260).contains(count)), "{counts:?}");
    }
}
