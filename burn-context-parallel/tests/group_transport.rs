//! A group runs on any transport: here one whose tensors all go through host memory, as those of a GPU do, and that relies
//! on nothing but `exchange`.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_context_parallel::group::{
    Body, Call, Cause, Counters, GroupError, Parcel, Payload, ProcessGroup, ReduceOp, Transport, launch,
};
use burn_context_parallel::{Error, Result};

#[derive(Debug)]
struct ThroughHost(Arc<dyn Transport>);

impl Transport for ThroughHost {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn members(&self) -> &[usize] {
        self.0.members()
    }
    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Self(self.0.subgroup(members)?)))
    }
    fn begin(&self) -> u64 {
        self.0.begin()
    }
    fn exchange(&self, call: &Call, parcels: Vec<Option<Parcel>>) -> Result<Vec<Option<Parcel>>> {
        for (to, parcel) in parcels.iter().enumerate() {
            let on_host = parcel.as_ref().is_none_or(|p| matches!(p.body(), Body::Host(..)));
            assert!(on_host || to == self.rank(), "only a rank's own part may skip `prepare`");
        }
        self.0.exchange(call, parcels)
    }
    fn fail(&self, cause: Cause) {
        self.0.fail(cause);
    }
    fn failure(&self) -> Option<GroupError> {
        self.0.failure()
    }
    fn counters(&self) -> &Arc<Counters> {
        self.0.counters()
    }
    fn prepare(&self, parcel: Parcel) -> Result<Parcel> {
        parcel.into_host()
    }
}

/// Rank r holds r * 10^6 + k, in a transposed view.
fn value(rank: usize, columns: usize) -> Tensor<2> {
    let from = rank as i64 * 1_000_000;
    let ids = Tensor::<1, Int>::arange(from..from + 5 * columns as i64, &Device::flex());
    ids.float().reshape([columns, 5]).swap_dims(0, 1)
}

fn everything(group: &ProcessGroup) -> Result<Vec<TensorData>> {
    let (me, p) = (group.rank(), group.size());
    let mut seen = group.all_gather(value(me, 3))?;
    seen.extend(group.all_gather_uneven(value(me, me + 1))?);
    seen.extend(group.all_to_all((0..p).map(|to| value(me + to, 2)).collect())?);
    let parts = (0..p).map(|to| (to != me).then(|| value(me, to + 1))).collect();
    let expected: Vec<_> = (0..p).map(|from| (from != me).then(|| vec![5, me + 1])).collect();
    seen.extend(group.all_to_all_uneven(parts, &expected)?.into_iter().flatten());
    let parts = (0..p).map(|to| value(me + to, 2)).collect();
    seen.push(group.reduce_scatter(parts, ReduceOp::Sum)?);
    seen.push(group.all_reduce(value(me, 3), ReduceOp::Max)?);
    seen.push(group.all_reduce(value(me, 7001), ReduceOp::Sum)?);
    seen.push(group.broadcast((me == 1).then(|| value(9, 4)), 1)?);
    seen.push(group.shift(value(me, 2), 1)?);
    group.barrier()?;
    Ok(seen.into_iter().map(Tensor::into_data).collect())
}

#[test]
fn a_transport_through_host_memory_gives_the_same_values_and_counts() {
    let same = launch(3, |world| {
        let handles = everything(&world)?;
        let counted = world.traffic();
        world.reset_traffic();
        let wrapped = ProcessGroup::from_transport(Arc::new(ThroughHost(world.transport().clone())));
        let through_host = everything(&wrapped)?;
        assert_eq!(handles.len(), 16);
        Ok::<_, Error>((handles == through_host, counted == wrapped.traffic()))
    });
    assert_eq!(same.unwrap(), [(true, true); 3]);
}

#[test]
fn a_subgroup_keeps_its_transport() {
    launch(4, |world| {
        let wrapped = ProcessGroup::from_transport(Arc::new(ThroughHost(world.transport().clone())));
        let half = wrapped.subgroup(&if world.rank() < 2 { [0, 1] } else { [2, 3] })?;
        assert!(format!("{:?}", half.transport()).starts_with("ThroughHost"));
        assert_eq!(half.shift(value(world.rank(), 1), 1)?.dims(), [5, 1]);
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// Both ways of cutting a parcel, by handle and in host memory, and the way back.
#[test]
fn a_parcel_is_cut_where_it_lies() {
    let tensor = value(1, 4);
    let flat = tensor.clone().into_data().try_to_vec::<f32>().unwrap();
    for parcel in [tensor.clone().pack().unwrap(), tensor.pack().unwrap().into_host().unwrap()] {
        assert_eq!((parcel.shape(), parcel.elements(), parcel.bytes()), (&[5, 4][..], 20, 80));
        let pieces = parcel.cut(&[3, 3, 20]).unwrap();
        for (piece, range) in pieces.into_iter().zip([0..3, 3..3, 3..20]) {
            assert_eq!((piece.shape(), piece.bytes()), (&[range.len()][..], 4 * range.len() as u64));
            let read: Vec<f32> = bytemuck::pod_collect_to_vec(&piece.read().unwrap()[..]);
            assert_eq!(read, flat[range.clone()]);
            let tensor = Tensor::<1>::unpack(piece, None).unwrap();
            assert_eq!(tensor.into_data().try_to_vec::<f32>().unwrap(), flat[range]);
        }
    }
}

/// A transport that mixes up its parcels is found out at the door.
#[test]
fn a_parcel_of_another_kind_is_not_delivered() {
    let parcel = || TensorData::from([1i32, 2]).pack().unwrap();
    let device = Device::flex();
    assert!(Tensor::<1>::unpack(parcel(), Some(&device)).is_err());
    assert!(Tensor::<2, Int>::unpack(parcel(), Some(&device)).is_err());
    assert!(Tensor::<1, Int>::unpack(parcel(), None).is_err());
    let delivered = Tensor::<1, Int>::unpack(parcel(), Some(&device)).unwrap();
    assert_eq!(delivered.into_data(), TensorData::from([1i32, 2]));
}
