//! Every collective moves the right values, for plain data, float and int tensors, on any number of ranks.

use std::fmt::Debug;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_context_parallel::Error;
use burn_context_parallel::group::{LaunchError, Payload, ProcessGroup, ReduceOp, launch, launch_each};
use proptest::prelude::*;
use rstest::rstest;

/// A payload that tests can make and read.
trait Sample: Payload + Clone + Debug {
    fn make(values: Vec<f64>, shape: [usize; 2], dtype: DType) -> Self;
    fn data(self) -> TensorData;
}

impl Sample for TensorData {
    fn make(values: Vec<f64>, shape: [usize; 2], dtype: DType) -> Self {
        TensorData::new(values, shape).convert_dtype(dtype)
    }
    fn data(self) -> TensorData {
        self
    }
}

impl Sample for Tensor<2> {
    fn make(values: Vec<f64>, shape: [usize; 2], dtype: DType) -> Self {
        Tensor::from_data(TensorData::make(values, shape, dtype), (&Device::flex(), dtype))
    }
    fn data(self) -> TensorData {
        self.into_data()
    }
}

impl Sample for Tensor<2, Int> {
    fn make(values: Vec<f64>, shape: [usize; 2], dtype: DType) -> Self {
        Tensor::from_data(TensorData::make(values, shape, dtype), (&Device::flex(), dtype))
    }
    fn data(self) -> TensorData {
        self.into_data()
    }
}

/// The value from one rank to another, exact in every type here: 16 * from + 2 * to + k < 128.
fn code<T: Sample>(from: usize, to: usize, dtype: DType) -> T {
    let first = (16 * from + 2 * to) as f64;
    T::make(vec![first, first + 1.0], [1, 2], dtype)
}

fn run<T: Send + 'static>(
    ranks: usize,
    f: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    launch(ranks, f).unwrap()
}

fn all_to_all<T: Sample>(ranks: usize, dtype: DType) {
    run(ranks, move |world| {
        let me = world.rank();
        let parts = (0..ranks).map(|to| code::<T>(me, to, dtype)).collect();
        let received = world.all_to_all(parts)?;
        assert_eq!(received.len(), ranks);
        for (from, part) in received.into_iter().enumerate() {
            assert_eq!(part.data(), code::<TensorData>(from, me, dtype));
        }
        Ok(())
    });
}

fn all_to_all_uneven<T: Sample>(ranks: usize, dtype: DType) {
    // from + 2 * to rows; nothing where that is a multiple of 3.
    let shape = |from: usize, to: usize| match from + 2 * to {
        n if n.is_multiple_of(3) => None,
        n => Some([n, 2]),
    };
    let part =
        move |from, to| shape(from, to).map(|[n, m]| T::make(vec![(from * 8 + to) as f64; n * m], [n, m], dtype));
    run(ranks, move |world| {
        let me = world.rank();
        let parts = (0..ranks).map(|to| part(me, to)).collect();
        let expected: Vec<_> = (0..ranks).map(|from| shape(from, me).map(Vec::from)).collect();
        let received = world.all_to_all_uneven(parts, &expected)?;
        for (from, received) in received.into_iter().enumerate() {
            assert_eq!(received.map(T::data), part(from, me).map(T::data));
        }
        Ok(())
    });
}

fn all_gather<T: Sample>(ranks: usize, dtype: DType) {
    run(ranks, move |world| {
        let parts = world.all_gather(code::<T>(world.rank(), 0, dtype))?;
        let parts: Vec<_> = parts.into_iter().map(T::data).collect();
        let all: Vec<_> = (0..ranks).map(|from| code::<TensorData>(from, 0, dtype)).collect();
        assert_eq!(parts, all);
        Ok(())
    });
}

fn all_gather_uneven<T: Sample>(ranks: usize, dtype: DType) {
    // Rank 0 brings no rows at all.
    let part = move |rank: usize| T::make(vec![rank as f64; rank * 2], [rank, 2], dtype);
    run(ranks, move |world| {
        let parts = world.all_gather_uneven(part(world.rank()))?;
        let parts: Vec<_> = parts.into_iter().map(T::data).collect();
        assert_eq!(parts, (0..ranks).map(|rank| part(rank).data()).collect::<Vec<_>>());
        Ok(())
    });
}

fn reduce_scatter<T: Sample>(ranks: usize, dtype: DType) {
    // Parts for different ranks have different shapes: rank i gets i + 1 columns.
    let part = move |from: usize, to: usize| {
        let values = (0..=to).map(|k| (from + k) as f64).collect();
        T::make(values, [1, to + 1], dtype)
    };
    run(ranks, move |world| {
        let me = world.rank();
        let parts = || (0..ranks).map(|to| part(me, to)).collect();
        let n = ranks as f64;
        let sum = (0..=me).map(|k| n * (n - 1.0) / 2.0 + n * k as f64).collect();
        let max = (0..=me).map(|k| n - 1.0 + k as f64).collect();
        let shape = [1, me + 1];
        let received = world.reduce_scatter(parts(), ReduceOp::Sum)?;
        assert_eq!(received.data(), TensorData::make(sum, shape, dtype));
        let received = world.reduce_scatter(parts(), ReduceOp::Max)?;
        assert_eq!(received.data(), TensorData::make(max, shape, dtype));
        Ok(())
    });
}

fn all_reduce<T: Sample>(ranks: usize, dtype: DType) {
    // One size for each of the two ways; the larger one is not divisible by the number of ranks.
    for elements in [3, 70_001] {
        run(ranks, move |world| {
            let value = |rank: usize| (0..elements).map(|k| (rank + k % 7) as f64).collect();
            let n = ranks as f64;
            let sum = (0..elements).map(|k| n * (n - 1.0) / 2.0 + n * (k % 7) as f64).collect();
            let shape = [elements, 1];
            let mine = || T::make(value(world.rank()), shape, dtype);
            let received = world.all_reduce(mine(), ReduceOp::Sum)?;
            assert_eq!(received.data(), TensorData::make(sum, shape, dtype));
            let received = world.all_reduce(mine(), ReduceOp::Max)?;
            assert_eq!(received.data(), TensorData::make(value(ranks - 1), shape, dtype));
            Ok(())
        });
    }
}

fn broadcast<T: Sample>(ranks: usize, dtype: DType) {
    run(ranks, move |world| {
        for root in 0..ranks {
            let is_root = world.rank() == root;
            let value = is_root.then(|| code::<T>(root, 0, dtype));
            let received = world.broadcast(value, root)?;
            assert_eq!(received.data(), code::<TensorData>(root, 0, dtype));
            // With something to replace.
            let received = world.broadcast(Some(code::<T>(world.rank(), 1, dtype)), root)?;
            assert_eq!(received.data(), code::<TensorData>(root, 1, dtype));
        }
        Ok(())
    });
}

fn shift<T: Sample>(ranks: usize, dtype: DType) {
    run(ranks, move |world| {
        let (me, n) = (world.rank() as isize, ranks as isize);
        for by in [1, -1, 0, 2, n, -n - 1, 5 * n + 3] {
            let received = world.shift(code::<T>(world.rank(), 0, dtype), by)?;
            let from = (me - by).rem_euclid(n) as usize;
            assert_eq!(received.data(), code::<TensorData>(from, 0, dtype), "by {by}");
        }
        Ok(())
    });
}

#[derive(Debug, Clone, Copy)]
enum Subject {
    Data(DType),
    Float(DType),
    Int(DType),
}
use Subject::{Data, Float};

macro_rules! on_every_payload {
    ($($name:ident => $check:ident;)*) => {$(
        #[rstest]
        fn $name(
            #[values(1, 2, 3, 4, 8)] ranks: usize,
            #[values(
                Data(DType::F32), Data(DType::BF16), Data(DType::U8), Data(DType::I64),
                Float(DType::F64), Float(DType::F32), Float(DType::F16), Float(DType::BF16),
                Subject::Int(DType::I64), Subject::Int(DType::I32)
            )]
            subject: Subject,
        ) {
            match subject {
                Data(dtype) => $check::<TensorData>(ranks, dtype),
                Float(dtype) => $check::<Tensor<2>>(ranks, dtype),
                Subject::Int(dtype) => $check::<Tensor<2, Int>>(ranks, dtype),
            }
        }
    )*};
}

on_every_payload! {
    all_to_all_sends_part_i_to_rank_i => all_to_all;
    all_to_all_uneven_sends_any_shapes_and_nothing => all_to_all_uneven;
    all_gather_returns_all_parts_by_rank => all_gather;
    all_gather_uneven_takes_any_length => all_gather_uneven;
    reduce_scatter_reduces_part_i_on_rank_i => reduce_scatter;
    all_reduce_gives_everyone_sum_and_max => all_reduce;
    broadcast_gives_everyone_the_roots_value => broadcast;
    shift_moves_around_the_ring => shift;
}

/// 256 + 1 is 256 in bf16, and 2048 + 1 is 2048 in f16: only a sum in f32 sees the small ones.
#[rstest]
#[case(DType::BF16, 256.0)]
#[case(DType::F16, 2048.0)]
fn half_precision_is_summed_in_f32(#[case] dtype: DType, #[case] large: f64) {
    for elements in [1, 20_000] {
        run(3, move |world| {
            let value = if world.rank() == 0 { large } else { 1.0 };
            let value = Tensor::<2>::make(vec![value; elements], [1, elements], dtype);
            let sum = world.all_reduce(value.clone(), ReduceOp::Sum)?;
            let expected = TensorData::make(vec![large + 2.0; elements], [1, elements], dtype);
            assert_eq!(sum.into_data(), expected);
            let sum = world.reduce_scatter(vec![value; 3], ReduceOp::Sum)?;
            assert_eq!(sum.into_data(), expected);
            Ok(())
        });
    }
}

/// (1e8 + 1) - 1e8 is 0 in f32 and any other order gives 1.
#[test]
fn sums_are_in_rank_order_on_every_rank() {
    for elements in [1, 20_000] {
        let sums = run(3, move |world| {
            let value = [1e8, 1.0, -1e8][world.rank()];
            let value = Tensor::<2>::make(vec![value; elements], [elements, 1], DType::F32);
            Ok(world.all_reduce(value, ReduceOp::Sum)?.into_data())
        });
        for sum in sums {
            assert_eq!(sum.try_to_vec::<f32>().unwrap(), vec![0.0; elements]);
        }
    }
}

#[test]
fn a_maximum_does_not_hide_nan_and_integers_wrap() {
    for nan_at in 0..3 {
        let max = run(3, move |world| {
            let value = if world.rank() == nan_at { f32::NAN } else { world.rank() as f32 };
            world.all_reduce(TensorData::from([value, -1.0]), ReduceOp::Max)
        });
        for max in max {
            let max = max.try_to_vec::<f32>().unwrap();
            assert!(max[0].is_nan() && max[1] == -1.0, "{max:?}");
        }
    }
    let sums = run(2, |world| world.all_reduce(TensorData::from([i32::MAX, world.rank() as i32]), ReduceOp::Sum));
    assert_eq!(sums[0], TensorData::from([-2i32, 1]));
}

/// Transposed, narrowed, flipped and expanded tensors are views of other memory.
#[test]
fn views_arrive_as_their_values() {
    run(2, |world| {
        let base = Tensor::<1>::arange_float(world.rank() as i64 * 100, 400);
        for view in [
            base.clone().swap_dims(0, 1),
            base.clone().narrow(0, 3, 11).narrow(1, 5, 7),
            base.clone().flip([0, 1]),
            base.clone().narrow(0, 2, 1).expand([9, 20]),
        ] {
            let mine = view.clone().into_data();
            let shifted = world.shift(view.clone(), 1)?;
            let back = world.shift(shifted.clone(), 1)?;
            assert_eq!(back.into_data(), mine);
            let sum = world.all_reduce(view.clone(), ReduceOp::Sum)?;
            assert_eq!(sum.into_data(), (view.clone() + shifted.clone()).into_data());
            let sum = world.reduce_scatter(vec![view.clone(), view.clone()], ReduceOp::Sum)?;
            assert_eq!(sum.into_data(), (view + shifted).into_data());
        }
        // Large enough for the all-reduce that cuts: 160 000 bytes.
        let big = Tensor::cat(vec![base; 100], 0).swap_dims(0, 1);
        let other = world.shift(big.clone(), 1)?;
        let sum = world.all_reduce(big.clone(), ReduceOp::Sum)?;
        assert_eq!(sum.dims(), [20, 2000]);
        assert_eq!(sum.into_data(), (big + other).into_data());
        Ok(())
    });

    trait Arange {
        fn arange_float(start: i64, count: i64) -> Tensor<2>;
    }
    impl Arange for Tensor<1> {
        fn arange_float(start: i64, count: i64) -> Tensor<2> {
            Tensor::<1, Int>::arange(start..start + count, &Device::flex()).float().reshape([20, -1])
        }
    }
}

/// Handles are shared between ranks: computing on, in place where Burn can, must not reach the other rank.
#[test]
fn what_was_sent_does_not_change_afterwards() {
    for _ in 0..50 {
        run(2, |world| {
            let mut mine = Tensor::<1>::full([4096], world.rank() as f32, &Device::flex());
            let mut theirs = world.shift(mine.clone(), 1)?;
            for _ in 0..10 {
                mine = mine + 10.0;
                theirs = theirs * 2.0;
            }
            let other = (1 - world.rank()) as f32;
            assert_eq!(mine.into_data().try_to_vec::<f32>().unwrap()[7], world.rank() as f32 + 100.0);
            assert_eq!(theirs.into_data().try_to_vec::<f32>().unwrap()[4095], other * 1024.0);
            Ok(())
        });
    }
}

#[test]
fn a_subgroup_that_does_not_start_at_rank_0_counts_its_own_ranks() {
    run(6, |world| {
        if world.rank() % 2 == 0 {
            return Ok(());
        }
        let odd = world.subgroup(&[1, 3, 5])?;
        let me = odd.rank();
        assert_eq!((odd.size(), odd.world_rank()), (3, 2 * me + 1));
        assert_eq!(odd.members(), [1, 3, 5]);
        let at =
            |values: &[TensorData]| -> Vec<i32> { values.iter().map(|v| v.try_to_vec::<i32>().unwrap()[0]).collect() };
        let value = |x: usize| TensorData::from([x as i32]);
        assert_eq!(at(&odd.all_gather(value(me))?), [0, 1, 2]);
        let parts = (0..3).map(|to| value(10 * me + to)).collect();
        let received = odd.all_to_all(parts)?;
        assert_eq!(at(&received), [0, 10, 20].map(|x| x + me as i32));
        let parts = (0..3).map(|to| value(10 * me + to)).collect();
        let sum = odd.reduce_scatter(parts, ReduceOp::Sum)?;
        assert_eq!(at(&[sum]), [30 + 3 * me as i32]);
        assert_eq!(at(&[odd.all_reduce(value(me), ReduceOp::Max)?]), [2]);
        assert_eq!(at(&[odd.shift(value(me), 1)?]), [((me + 2) % 3) as i32]);
        assert_eq!(at(&[odd.broadcast((me == 1).then(|| value(7)), 1)?]), [7]);
        odd.barrier()?;
        // A group of a group: ranks are counted within it.
        if me > 0 {
            let pair = odd.subgroup(&[1, 2])?;
            assert_eq!(pair.members(), [3, 5]);
            assert_eq!(at(&pair.all_gather(value(me))?), [1, 2]);
        }
        Ok(())
    });
}

/// Two handles of one member set are one group: a collective begun on one is not taken for one of the other.
#[test]
fn handles_of_the_same_members_share_one_order() {
    run(3, |world| {
        if world.rank() == 2 {
            return Ok(());
        }
        let (one, other) = (world.subgroup(&[0, 1])?, world.subgroup(&[0, 1])?);
        for round in 0..50 {
            let group = if round % 3 == 0 { &one } else { &other };
            let parts = group.all_gather(TensorData::from([round, world.rank() as i32]))?;
            assert_eq!(parts[1], TensorData::from([round, 1]));
        }
        Ok(())
    });
}

#[rstest]
fn a_tensor_with_autodiff_is_refused_on_any_number_of_ranks(#[values(1, 2)] ranks: usize) {
    let each = launch_each(ranks, move |world| -> Result<(), Error> {
        let x = Tensor::<1>::zeros([2], &Device::flex().autodiff());
        let refused = [
            world.all_reduce(x.clone(), ReduceOp::Sum).map(drop),
            world.all_gather(x.clone()).map(drop),
            world.all_to_all(vec![x.clone(); ranks]).map(drop),
            world.shift(x.clone(), 1).map(drop),
            world.broadcast(Some(x.clone()), 0).map(drop),
            world.reduce_scatter(vec![x.clone(); ranks], ReduceOp::Sum).map(drop),
        ];
        for refused in refused {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("autodiff") && message.contains(".inner()"), "{message}");
        }
        // An int tensor has no gradient to lose.
        let ids = Tensor::<1, Int>::zeros([2], &Device::flex().autodiff());
        assert!(!world.shift(ids, 1)?.device().is_autodiff());
        Ok(())
    });
    assert!(each.unwrap().iter().all(Result::is_ok));
}

#[test]
fn arguments_that_do_not_fit_are_refused_with_the_numbers() {
    let messages = run(2, |world| {
        let data = |n: usize| TensorData::new(vec![0f32; n], [n]);
        let bools = || TensorData::from([true]);
        let none: Option<TensorData> = None;
        let refused = [
            world.all_to_all(vec![data(1); 3]).map(drop),
            world.all_to_all(vec![data(1), data(2)]).map(drop),
            world.all_to_all(vec![data(1), TensorData::from([1i32])]).map(drop),
            world.all_to_all_uneven(vec![none.clone(); 2], &[None]).map(drop),
            world.reduce_scatter(vec![data(1)], ReduceOp::Sum).map(drop),
            world.all_reduce(bools(), ReduceOp::Max).map(drop),
            world.broadcast(Some(data(1)), 2).map(drop),
            world.broadcast(none, world.rank()).map(drop),
            world.subgroup(&[0, 2]).map(drop),
            world.subgroup(&[1 - world.rank()]).map(drop),
            world.subgroup(&[]).map(drop),
        ];
        // What is refused was not begun: the group is still in step.
        world.barrier()?;
        Ok(refused.map(|refused| refused.unwrap_err().to_string()))
    });
    assert_eq!(
        messages[0],
        [
            "all_to_all: 3 parts for 2 ranks: give one part for every rank of the group, this one included",
            "all_to_all: part 1 is [2], part 0 is [1]: use all_to_all_uneven for parts of different shapes",
            "all_to_all: parts of f32 and of i32: all parts of one collective have one element type",
            "all_to_all_uneven: 1 parts for 2 ranks: give one part for every rank of the group, this one included",
            "reduce_scatter: 1 parts for 2 ranks: give one part for every rank of the group, this one included",
            "all_reduce: bool values have no sum and no maximum: convert them to integers or floats first",
            "broadcast: root 2 is not in a group of 2: the root is a rank of this group, counted from 0",
            "broadcast: rank 0 is the root and brings nothing: give the value there",
            "subgroup: [0, 2] leaves a group of 2: list ranks of this group, counted from 0",
            "subgroup: [1] leaves out rank 0, which asks for it: only members make a group",
            "subgroup: [] leaves out rank 0, which asks for it: only members make a group",
        ]
    );
}

/// Many exchanges on the world and its halves, without a barrier between them.
#[test]
fn groups_that_overlap_do_not_mix_their_rounds() {
    run(4, |world| {
        let me = world.rank();
        let row = world.subgroup(&if me < 2 { [0, 1] } else { [2, 3] })?;
        let column = world.subgroup(&if me % 2 == 0 { [0, 2] } else { [1, 3] })?;
        let value = |round: usize, rank: usize| TensorData::from([round as i64, rank as i64]);
        for round in 0..200 {
            assert_eq!(row.shift(value(round, me), 1)?, value(round, me ^ 1));
            assert_eq!(column.shift(value(round, me), 1)?, value(round, me ^ 2));
            if round % 3 == 0 {
                assert_eq!(world.shift(value(round, me), -1)?, value(round, (me + 1) % 4));
            }
        }
        Ok(())
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// all_to_all is a transposition of parts: doing it twice gives back what was sent.
    #[test]
    fn all_to_all_twice_is_the_identity(ranks in 1usize..6, rows in 0usize..4, columns in 1usize..5, seed: u8) {
        run(ranks, move |world| {
            let part = |to: usize| {
                let first = seed as usize + 1000 * world.rank() + 100 * to;
                let values = (0..rows * columns).map(|k| (first + k) as f64).collect();
                Tensor::<2>::make(values, [rows, columns], DType::F32)
            };
            let parts: Vec<_> = (0..ranks).map(part).collect();
            let back = world.all_to_all(world.all_to_all(parts.clone())?)?;
            for (back, sent) in back.into_iter().zip(parts) {
                assert_eq!(back.into_data(), sent.into_data());
            }
            Ok(())
        });
    }

    /// reduce_scatter, then all_gather, is all_reduce; to the bit.
    #[test]
    fn all_reduce_is_reduce_scatter_and_all_gather(ranks in 1usize..6, rows in 1usize..4, seed: u8) {
        run(ranks, move |world| {
            let value = |k: usize| ((seed as usize + 31 * k + 17 * world.rank()) as f64 * 0.37).sin();
            let values = (0..rows * ranks).map(value).collect();
            let x = Tensor::<2>::make(values, [rows * ranks, 1], DType::F32);
            let mine = world.reduce_scatter(x.clone().split(rows, 0), ReduceOp::Sum)?;
            let gathered = Tensor::cat(world.all_gather(mine)?, 0);
            assert_eq!(world.all_reduce(x, ReduceOp::Sum)?.into_data(), gathered.into_data());
            Ok(())
        });
    }
}

#[test]
fn launch_returns_results_by_rank_from_named_threads() -> Result<(), LaunchError> {
    let names = launch(3, |world| -> Result<_, Error> {
        Ok((world.rank(), std::thread::current().name().map(str::to_owned)))
    })?;
    assert_eq!(names, [0, 1, 2].map(|rank| (rank, Some(format!("rank {rank}")))));
    Ok(())
}
