//! Counters tell what crossed between ranks, to the byte.

use burn::tensor::{Device, Tensor, TensorData};
use burn_context_parallel::Error;
use burn_context_parallel::group::{
    Axis, Count, DIRECT_BYTES, Mesh, MeshShape, Operation, ProcessGroup, ReduceOp, Traffic, launch,
};

fn traffic(ranks: usize, f: impl Fn(&ProcessGroup) -> Result<(), Error> + Send + Sync + 'static) -> Vec<Traffic> {
    launch(ranks, move |world| f(&world).map(|()| world.traffic())).unwrap()
}

fn count(calls: u64, sent: u64, received: u64) -> Count {
    Count { calls, sent, received }
}

/// n f32.
fn value(n: usize) -> Tensor<1> {
    Tensor::zeros([n], &Device::flex())
}

#[test]
fn every_operation_counts_what_crossed() {
    let traffic = traffic(4, |world| {
        world.all_to_all(vec![value(5); 4])?; // 20 bytes to each of 3
        world.all_gather(value(3))?; // 12 bytes to each of 3
        world.reduce_scatter(vec![value(2); 4], ReduceOp::Sum)?; // 8 bytes to each of 3
        world.all_reduce(value(1), ReduceOp::Sum)?; // 4 bytes to each of 3
        world.broadcast((world.rank() == 2).then(|| value(10)), 2)?; // 40 bytes to each of 3
        world.shift(value(6), 1)?; // 24 bytes to one
        world.shift(value(6), 4)?; // to itself
        world.barrier()
    });
    for (rank, traffic) in traffic.iter().enumerate() {
        assert_eq!(traffic.of(Operation::AllToAll), count(1, 60, 60));
        assert_eq!(traffic.of(Operation::AllGather), count(1, 36, 36));
        assert_eq!(traffic.of(Operation::ReduceScatter), count(1, 24, 24));
        assert_eq!(traffic.of(Operation::AllReduce), count(1, 12, 12));
        let root = rank == 2;
        let broadcast = if root { count(1, 120, 0) } else { count(1, 0, 40) };
        assert_eq!(traffic.of(Operation::Broadcast), broadcast);
        assert_eq!(traffic.of(Operation::Shift), count(2, 24, 24));
        assert_eq!(traffic.of(Operation::Barrier), count(1, 0, 0));
        assert_eq!(traffic.of(Operation::AllToAllUneven), Count::default());
        let total = if root { count(8, 276, 156) } else { count(8, 156, 196) };
        assert_eq!(traffic.total(), total);
    }
}

/// Rank r sends r + 1 bytes to everyone above it.
#[test]
fn uneven_operations_count_each_direction() {
    let traffic = traffic(3, |world| {
        let me = world.rank();
        let part = |from: usize, to: usize| (from < to).then(|| TensorData::new(vec![0u8; from + 1], [from + 1]));
        let expected: Vec<_> = (0..3).map(|from| part(from, me).map(|p| p.shape().to_vec())).collect();
        world.all_to_all_uneven((0..3).map(|to| part(me, to)).collect(), &expected)?;
        world.all_gather_uneven(TensorData::new(vec![0u16; me], [me]))?;
        Ok(())
    });
    let uneven = [(2, 0), (2, 1), (0, 3)];
    let gather = [(0, 6), (4, 4), (8, 2)];
    for (rank, traffic) in traffic.iter().enumerate() {
        let (sent, received) = uneven[rank];
        assert_eq!(traffic.of(Operation::AllToAllUneven), count(1, sent, received));
        let (sent, received) = gather[rank];
        assert_eq!(traffic.of(Operation::AllGatherUneven), count(1, sent, received));
    }
}

#[test]
fn a_large_all_reduce_sends_two_parts_of_p_and_a_small_one_sends_all() {
    let limit = (DIRECT_BYTES / 4) as usize;
    let small = traffic(4, move |world| world.all_reduce(value(limit), ReduceOp::Sum).map(drop));
    let large = traffic(4, move |world| world.all_reduce(value(limit + 4), ReduceOp::Sum).map(drop));
    for traffic in small {
        assert_eq!(traffic.total(), count(1, 3 * DIRECT_BYTES, 3 * DIRECT_BYTES));
    }
    for traffic in large {
        let bytes = 2 * 3 * (DIRECT_BYTES + 16) / 4;
        assert_eq!(traffic.total(), count(1, bytes, bytes));
    }
}

#[test]
fn all_groups_of_a_rank_share_its_counters_and_a_reset_empties_them() {
    let traffic = traffic(4, |world| {
        let mesh = Mesh::new(world, MeshShape { ring: 2, ulysses: 2, ..Default::default() })?;
        mesh.axis(Axis::Ring).shift(value(1), 1)?;
        assert_eq!(mesh.axis(Axis::Ulysses).traffic().total(), count(1, 4, 4));
        world.reset_traffic();
        assert_eq!(mesh.axis(Axis::Ring).traffic(), Traffic::default());
        mesh.axis(Axis::Ulysses).shift(value(2), 1)?;
        world.shift(value(1), 1).map(drop)
    });
    assert!(traffic.iter().all(|traffic| traffic.of(Operation::Shift) == count(2, 12, 12)));
}

#[test]
fn a_group_of_one_counts_nothing() {
    let everything = |group: &ProcessGroup| -> Result<(), Error> {
        group.all_to_all(vec![value(5)])?;
        group.all_to_all_uneven(vec![Some(value(5))], &[Some(vec![5])])?;
        group.all_gather(value(5))?;
        group.all_gather_uneven(value(5))?;
        group.reduce_scatter(vec![value(5)], ReduceOp::Sum)?;
        group.all_reduce(value(5), ReduceOp::Sum)?;
        group.broadcast(Some(value(5)), 0)?;
        group.shift(value(5), 1)?;
        group.barrier()
    };
    let single = ProcessGroup::single();
    everything(&single).unwrap();
    assert_eq!(single.traffic(), Traffic::default());
    // An axis of degree 1 neither counts nor waits: the other ranks do nothing.
    let traffic = traffic(3, move |world| {
        let mesh = Mesh::new(world, MeshShape { ulysses: 3, ..Default::default() })?;
        if world.rank() == 1 {
            everything(mesh.axis(Axis::Ring))?;
            everything(&mesh.over(&[Axis::Data, Axis::Ring])?)?;
        }
        Ok(())
    });
    assert!(traffic.iter().all(|traffic| *traffic == Traffic::default()));
}

#[test]
fn traffic_prints_as_a_table_of_what_was_used() {
    let traffic = traffic(2, |world| {
        world.all_gather(value(256))?;
        world.barrier()
    });
    assert_eq!(
        traffic[0].to_string(),
        "operation            calls      bytes sent  bytes received\n\
         all_gather               1            1024            1024\n\
         barrier                  1               0               0\n\
         total                    2            1024            1024"
    );
}
