//! A rank that cannot save makes all ranks fail with a typed error; what was saved before is untouched, nothing half written is left,
//! and the group goes on.

mod common;

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Piece, RunState};
use common::{holds, names, save, shard, state};

type Attempt = dyn Fn(&Checkpoints, &ProcessGroup) -> Result<(), CheckpointError> + Send + Sync;

/// Step 1 is there; all three ranks attempt something as step 2 that one of them cannot do. Their errors, by rank.
fn fails(
    attempt: impl Fn(&Checkpoints, &ProcessGroup) -> Result<(), CheckpointError> + Send + Sync + 'static,
) -> Vec<CheckpointError> {
    let out = tempfile::tempdir().unwrap();
    let before = save(out.path(), 1, 3).unwrap();
    let (folder, attempt): (_, Arc<Attempt>) = (out.path().to_owned(), Arc::new(attempt));
    let errors = launch(3, move |world| {
        let checkpoints = Checkpoints::new(&folder, None);
        let error = attempt(&checkpoints, &world).expect_err("one rank cannot");
        assert_eq!(names(&folder), [".lock", "step-0000000001"], "{error}");
        assert_eq!(checkpoints.latest(&world)?.map(|latest| latest.step()), Some(1));
        // The next one works, on the same group and the same value.
        checkpoints.save(&world, shard(2, world.rank(), 3), &state(2))?;
        Ok::<_, CheckpointError>(error)
    });
    let after = Checkpoint::open(out.path().join("step-0000000002")).unwrap();
    holds(&after, 2).unwrap();
    holds(&Checkpoint::open(before).unwrap(), 1).unwrap();
    errors.unwrap()
}

/// That `rank` has its own error, and the others point to it.
fn is_of(errors: &[CheckpointError], rank: usize, own: impl Fn(&CheckpointError) -> bool) {
    assert!(own(&errors[rank]), "{:?}", errors[rank]);
    for (other, error) in errors.iter().enumerate().filter(|(other, _)| *other != rank) {
        match error {
            CheckpointError::Rank { rank: named, problem } => {
                assert_eq!((*named, problem), (rank, &errors[rank].to_string()), "on rank {other}");
            }
            error => panic!("rank {other}: {error:?}"),
        }
    }
}

#[test]
fn a_device_that_cannot_be_read() {
    for culprit in 0..3 {
        let errors = fails(move |checkpoints, world| {
            let mut pieces = shard(2, world.rank(), 3);
            if world.rank() == culprit {
                pieces.push(Piece::new("late", DType::F32, [4], 0..4, || Err::<TensorData, _>("the device is gone")));
            }
            checkpoints.save(world, pieces, &state(2)).map(drop)
        });
        is_of(&errors, culprit, |error| matches!(error, CheckpointError::Source { name, .. } if name == "late"));
    }
}

#[test]
fn values_that_are_others_than_the_piece_says() {
    let wrong =
        [TensorData::from([1f32, 2.0]), TensorData::from([1f64, 2.0, 3.0]), TensorData::from([1f32, 2.0, 3.0, 4.0])];
    for wrong in wrong {
        let errors = fails(move |checkpoints, world| {
            let mut pieces = shard(2, world.rank(), 3);
            if world.rank() == 1 {
                let wrong = wrong.clone();
                pieces.push(Piece::new("new", DType::F32, [3], 0..3, || Ok::<_, CheckpointError>(wrong)));
            }
            checkpoints.save(world, pieces, &state(2)).map(drop)
        });
        is_of(&errors, 1, |error| matches!(error, CheckpointError::Invalid { what, .. } if what.contains("`new`")));
    }
}

/// These show only when all ranks' pieces are seen together, on the first rank.
#[test]
fn pieces_that_do_not_make_tensors() {
    fn ones(n: usize) -> TensorData {
        TensorData::new(vec![1f32; n], [n])
    }
    type Extra = fn() -> Vec<Piece<'static>>;
    let extra: [(usize, &str, Extra); 4] = [
        (1, "there twice", || vec![Piece::part("block.0.weight", [7, 5], 0..1, ones(1))]),
        (2, "missing", || vec![Piece::part("new", [4], 1..4, ones(3))]),
        (1, "missing", || vec![Piece::part("new", [4], 0..1, ones(1)), Piece::part("new", [4], 3..4, ones(1))]),
        (0, "missing", || vec![Piece::part("new", [4], 2..2, ones(0))]),
    ];
    for (rank, what, pieces) in extra {
        let errors = fails(move |checkpoints, world| {
            let mut mine = shard(2, world.rank(), 3);
            if world.rank() == rank {
                mine.append(&mut pieces());
            }
            checkpoints.save(world, mine, &state(2)).map(drop)
        });
        is_of(&errors, 0, |error| matches!(error, CheckpointError::Invalid { what: is, .. } if is.contains(what)));
    }
}

#[test]
fn ranks_that_disagree_about_a_tensor() {
    let errors = fails(|checkpoints, world| {
        let shape = if world.rank() == 2 { [6, 1] } else { [2, 3] };
        let range = 2 * world.rank()..2 * (world.rank() + 1);
        let piece = Piece::part("weight", shape, range, TensorData::from([1f32, 2.0]));
        checkpoints.save(world, [piece], &state(2)).map(drop)
    });
    is_of(&errors, 0, |error| matches!(error, CheckpointError::Invalid { what, .. } if what.contains("`weight`")));
}

#[test]
fn ranks_that_disagree_about_the_step() {
    let errors = fails(|checkpoints, world| {
        let step = if world.rank() == 1 { 3 } else { 2 };
        checkpoints.save(world, shard(2, world.rank(), 3), &state(step)).map(drop)
    });
    is_of(&errors, 1, |error| matches!(error, CheckpointError::Invalid { .. }));
}

#[test]
fn pieces_that_no_tensor_has() {
    let bad: [fn() -> Piece<'static>; 6] = [
        || Piece::part("x", [2], 1..3, TensorData::from([1f32, 2.0])),
        || Piece::part("x", [usize::MAX, 2], 0..1, TensorData::from([1f32])),
        || Piece::part("x", [usize::MAX / 4], 0..1, TensorData::from([1f64])),
        || Piece::whole("", TensorData::from([1f32])),
        || Piece::whole("__metadata__", TensorData::from([1f32])),
        || Piece::whole("mask", TensorData::from([true])),
    ];
    for bad in bad {
        let errors = fails(move |checkpoints, world| {
            let extra = (world.rank() == 1).then(bad);
            checkpoints.save(world, shard(2, world.rank(), 3).into_iter().chain(extra), &state(2)).map(drop)
        });
        is_of(&errors, 1, |error| matches!(error, CheckpointError::Invalid { .. }));
    }
}

#[test]
fn a_state_that_cannot_be_read_back() {
    let errors = fails(|checkpoints, world| {
        let deep = (0..200).fold(serde_json::json!(1), |inner, _| serde_json::json!([inner]));
        let state = RunState { data: deep, ..state(2) };
        checkpoints.save(world, shard(2, world.rank(), 3), &state).map(drop)
    });
    is_of(&errors, 0, |error| matches!(error, CheckpointError::Invalid { .. }));
}

/// As every user meets them, root included: a file where a folder should be.
#[test]
fn a_folder_that_cannot_be_made() {
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("run"), "a file").unwrap();
    let folder = out.path().join("run/checkpoints");
    let errors = launch(2, move |world| {
        let checkpoints = Checkpoints::new(&folder, None);
        assert!(checkpoints.latest(&world).is_err());
        Ok::<_, CheckpointError>(checkpoints.save(&world, shard(2, world.rank(), 2), &state(2)).unwrap_err())
    });
    is_of(&errors.unwrap(), 0, |error| matches!(error, CheckpointError::Io { .. }));
}

#[test]
fn a_folder_is_one_runs() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_owned();
    let claim = |folder: &Path| {
        let checkpoints = Checkpoints::new(folder, NonZeroUsize::new(2));
        checkpoints.claim(&ProcessGroup::single()).map(|()| checkpoints)
    };
    let first = claim(&folder).unwrap();
    let errors = {
        let folder = folder.clone();
        launch(2, move |world| {
            let second = Checkpoints::new(&folder, None);
            let error = second.save(&world, shard(2, world.rank(), 2), &state(2)).unwrap_err();
            assert!(second.latest(&world)?.is_none());
            Ok::<_, CheckpointError>(error)
        })
    };
    is_of(&errors.unwrap(), 0, |error| matches!(error, CheckpointError::Locked { .. }));
    assert_eq!(names(&folder), [".lock"]);
    // It is free again when the first run has ended.
    drop(first);
    claim(&folder).unwrap();
}
