//! What is cut into shards comes back whole: tokens, positions, targets, heads and their codes.

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_context_parallel::attention::{ContextParallelDevice, HeadExchange, HeadShape, HeadSplit, SequenceContext};
use burn_context_parallel::group::{Operation, ProcessGroup};
use burn_context_parallel::sequence::{Batch, IGNORE_INDEX, RotaryFrequencies, SequenceLayout, apply_rotary};
use burn_upipe::upipe::{Given, Schedule, upipe};
use proptest::prelude::*;
use rstest::rstest;
use tests::{assert_same_bits, on_ranks, tensor, values};

fn ints(tensor: &Tensor<2, Int>) -> Vec<i64> {
    tensor.to_data().iter::<i64>().collect()
}

proptest! {
    #[test]
    fn assemble_is_the_inverse_of_cut(len in 1usize..60, ranks in 1usize..9, rows in 1usize..3) {
        let layout = SequenceLayout::contiguous(len, ranks).unwrap();
        let whole = tensor::<3>(&values(len as u64, &[rows, len, 2]), DType::F32, &Device::flex());
        let parts: Vec<_> = (0..ranks).map(|rank| layout.cut(&whole, 1, rank)).collect();
        assert_same_bits("assembled", &layout.assemble(&parts, 1), &whole);
        let mut indices: Vec<usize> = (0..ranks).flat_map(|rank| layout.indices(rank).collect::<Vec<_>>()).collect();
        indices.sort_unstable();
        prop_assert_eq!(indices, (0..layout.padded_len()).collect::<Vec<_>>(), "each index on one rank");
        for (rank, part) in parts.iter().enumerate() {
            let padding: Vec<usize> = layout.indices(rank).enumerate().filter(|(_, i)| *i >= len).map(|(at, _)| at).collect();
            for at in padding {
                prop_assert!(part.clone().narrow(1, at, 1).into_data().iter::<f32>().all(|x| x == 0.0));
            }
        }
    }

    /// DeepSpeed PR#7821, axolotl#3382: labels shifted after the cut, so that a shard's last token has no target.
    #[test]
    fn every_target_is_the_next_token_wherever_it_lies(len in 1usize..40, ranks in 1usize..7, seed in 0u64..1000) {
        let rows: Vec<Vec<i64>> = (0..2).map(|r| (0..len).map(|i| ((seed + r) * 31 + i as u64 * 7) as i64 % 50).collect()).collect();
        let counts: Vec<bool> = (0..2 * len).map(|i| !(i as u64 * 13 + seed).is_multiple_of(3)).collect();
        let mask = Tensor::<2, Bool>::from_data(TensorData::new(counts.clone(), [2, len]), &Device::flex());
        let batch = Batch::from_rows(&rows).unwrap().with_loss_mask(mask).unwrap();
        let layout = SequenceLayout::contiguous(len, ranks).unwrap();
        let mut seen = 0;
        for rank in 0..ranks {
            let shard = batch.shard(&layout, rank, &Device::flex()).unwrap();
            let (tokens, positions, targets) = (ints(&shard.tokens), ints(&shard.positions), ints(&shard.targets));
            for (at, position) in positions.iter().enumerate() {
                let (row, position) = (at / layout.local_len(rank), *position as usize);
                if position < len {
                    prop_assert_eq!(tokens[at], rows[row][position]);
                }
                let counted = position + 1 < len && counts[row * len + position + 1];
                let expected = if counted { rows[row][position + 1] } else { IGNORE_INDEX };
                prop_assert_eq!(targets[at], expected);
            }
            prop_assert_eq!(shard.valid, targets.iter().filter(|target| **target != IGNORE_INDEX).count());
            prop_assert_eq!(shard.valid_total, batch.valid());
            seen += shard.valid;
        }
        prop_assert_eq!(seen, batch.valid());
    }
}

#[test]
fn unshard_gives_what_was_sharded() {
    on_ranks(3, |world| {
        let batch = Batch::from_rows(&[(0..7).collect(), (10..17).collect()])?;
        let cp = Device::flex().context_parallel(&world);
        let shard = cp.shard(&batch)?;
        let whole = cp.unshard(shard.layout(), shard.tokens.clone(), 1)?;
        assert_eq!(ints(&whole), (0..7).chain(10..17).collect::<Vec<_>>());
        assert!(cp.unshard(shard.layout(), shard.tokens.clone(), 0).is_err());
        assert!(cp.unshard(shard.layout(), shard.tokens.clone(), 5).is_err());
        Ok(())
    });
}

/// Megatron-LM#560, #453, PR#4977, PR#1612, NeMo Automodel#2377, #1482, trl PR#6846: angles from the index in the shard.
#[rstest]
fn rotary_positions_are_those_of_the_whole(#[values(2, 3, 5)] ranks: usize) {
    let len = 23;
    let x = tensor::<4>(&values(1, &[1, len, 2, 6]), DType::F32, &Device::flex());
    let frequencies = RotaryFrequencies::new(6, 1e4).unwrap();
    let whole = SequenceContext::single(len, 1).unwrap();
    let expected = apply_rotary(x.clone(), &whole.rotary(&frequencies, DType::F32, &Device::flex()));
    let layout = SequenceLayout::contiguous(len, ranks).unwrap();
    let (of_ranks, frequencies) = (layout.clone(), frequencies.clone());
    let parts = on_ranks(ranks, move |world| {
        let context = SequenceContext::from_layout(&world, of_ranks.clone(), 1)?;
        let table = context.rotary(&frequencies, DType::F32, &Device::flex());
        Ok(apply_rotary(of_ranks.cut(&x, 1, world.rank()), &table).to_data())
    });
    let parts: Vec<Tensor<4>> = parts.iter().map(|part| tensor(part, DType::F32, &Device::flex())).collect();
    assert_same_bits("rotated", &layout.assemble(&parts, 1), &expected);
}

/// DeepSpeed PR#5664, #5808: ranks inside the head dimension in another order; PR#6797, #6774: uneven heads on the way back. Every
/// element is `1000 token + head`.
#[rstest]
fn exchanged_heads_carry_their_codes(
    #[values((8, 8), (7, 7), (8, 2), (8, 1), (3, 3))] heads: (usize, usize),
    #[values(1, 2, 4)] ranks: usize,
) {
    on_ranks(ranks, move |world| {
        let layout = SequenceLayout::contiguous(9, world.size())?;
        let split = HeadSplit::new(heads.0, heads.1, world.size())?;
        for (count, own) in [
            (heads.0, (0..world.size()).map(|rank| split.queries(rank).collect()).collect::<Vec<Vec<usize>>>()),
            (heads.1, (0..world.size()).map(|rank| split.keys(rank).collect()).collect()),
        ] {
            let codes: Vec<f32> = (0..9).flat_map(|t| (0..count).map(move |h| (1000 * t + h) as f32)).collect();
            let whole = Tensor::<4>::from_data(TensorData::new(codes, [1, 9, count, 1]), &Device::flex());
            let mine = layout.cut(&whole, 1, world.rank());
            let exchange = HeadExchange::new(count, own.clone())?;
            let held = exchange.to_heads(mine.clone(), &world, &layout)?;
            assert_eq!(held.is_none(), own[world.rank()].is_empty());
            if let Some(held) = &held {
                let held: Vec<f32> = held.to_data().iter::<f32>().collect();
                let expected: Vec<f32> =
                    (0..9).flat_map(|t| own[world.rank()].iter().map(move |h| (1000 * t + h) as f32)).collect();
                assert_eq!(held, expected);
            }
            let back = exchange.to_sequence(held, &HeadShape::of(&mine), &world, &layout)?;
            let holders: Vec<f32> =
                (0..count).map(|h| own.iter().filter(|own| own.contains(&h)).count() as f32).collect();
            let times = Tensor::<4>::from_data(TensorData::new(holders, [1, 1, count, 1]), &Device::flex());
            assert_same_bits("and back, once for each holder", &back, &(mine * times));
        }
        Ok(())
    });
}

/// "Sent once" counted where bytes leave, not in the schedule.
#[rstest]
fn upipe_sends_what_its_formula_says(
    #[values((8, 4, 2), (8, 2, 4), (12, 3, 3))] counts: (usize, usize, usize),
    #[values(1, 3, 8)] per_stage: usize,
) {
    let (heads, kv_heads, ranks) = counts;
    let (local, dim) = (5, 4);
    let schedule = Schedule::new(heads, kv_heads, ranks, per_stage).unwrap();
    let (split, stated) = (schedule.split().clone(), schedule.clone());
    let sent = on_ranks(ranks, move |world: ProcessGroup| {
        let device = Device::flex().autodiff();
        let context =
            SequenceContext::from_layout(&world, SequenceLayout::contiguous(local * world.size(), world.size())?, 1)?;
        let part = |seed: u64, heads: usize| {
            tensor::<4>(&values(seed, &[1, local, heads, dim]), DType::F32, &device).require_grad()
        };
        let (source, inputs) = Given::new(part(1, heads), part(2, kv_heads), part(3, kv_heads));
        let options = burn_context_parallel::flash::FlashOptions::causal();
        world.reset_traffic();
        let out = upipe(source, inputs, &stated, &options, &context)?;
        let forward = world.traffic().of(Operation::AllToAll).sent + world.traffic().of(Operation::AllToAllUneven).sent;
        world.reset_traffic();
        out.sum().backward();
        let backward =
            world.traffic().of(Operation::AllToAll).sent + world.traffic().of(Operation::AllToAllUneven).sent;
        Ok((forward, backward))
    });
    for (rank, (forward, backward)) in sent.into_iter().enumerate() {
        let head = (local * dim * 4) as u64; // one head of one rank's tokens
        let row = (local * 4) as u64;
        let others = (ranks - 1) as u64;
        let (q, kv) = (split.queries(rank).len() as u64, split.keys(rank).len() as u64);
        let (all_q, all_kv) = (heads as u64, (0..ranks).map(|rank| split.keys(rank).len() as u64).sum::<u64>());
        // My tokens of the others' heads go out; my heads of the others' tokens go back.
        let to_heads = |all: u64, mine: u64| all - mine;
        assert_eq!(
            forward,
            head * (to_heads(all_q, q) + 2 * to_heads(all_kv, kv) + q * others),
            "rank {rank}: forward"
        );
        let gathered = head * (2 * to_heads(all_q, q) + 2 * to_heads(all_kv, kv)) + row * to_heads(all_q, q);
        assert_eq!(backward, gathered + head * others * (q + 2 * kv), "rank {rank}: backward");
    }
}
