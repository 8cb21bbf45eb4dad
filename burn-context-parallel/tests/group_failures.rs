//! Nobody waits for ever: whatever ends one rank releases all others with one typed error, in every collective.

use std::error::Error as StdError;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_context_parallel::group::{
    Aspect, Cause, GroupError, LaunchConfig, LaunchError, MAX_RANKS, Operation, Place, ProcessGroup, ReduceOp, Site,
    launch, launch_each,
};
use burn_context_parallel::vjp::{Inputs, custom_vjp};
use burn_context_parallel::{Error, OrRaise, raise};
use rstest::rstest;

type BoxError = Box<dyn StdError + Send + Sync>;

fn data(n: usize) -> TensorData {
    TensorData::new(vec![0f32; n], [n])
}

fn call(group: &ProcessGroup, operation: Operation) -> Result<(), Error> {
    let p = group.size();
    match operation {
        Operation::AllToAll => group.all_to_all(vec![data(2); p]).map(drop),
        Operation::AllToAllUneven => group.all_to_all_uneven(vec![Some(data(2)); p], &vec![Some(vec![2]); p]).map(drop),
        Operation::AllGather => group.all_gather(data(2)).map(drop),
        Operation::AllGatherUneven => group.all_gather_uneven(data(2)).map(drop),
        Operation::ReduceScatter => group.reduce_scatter(vec![data(2); p], ReduceOp::Sum).map(drop),
        Operation::AllReduce => group.all_reduce(data(2), ReduceOp::Sum).map(drop),
        Operation::Broadcast => group.broadcast(Some(data(2)), 0).map(drop),
        Operation::Shift => group.shift(data(2), 1).map(drop),
        _ => group.barrier(),
    }
}

/// For ever, as far as a test can tell.
fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

fn failure<T>(outcome: &Result<T, LaunchError>) -> &GroupError {
    match outcome {
        Ok(_) => panic!("this rank should not have succeeded"),
        Err(error) => error.group_error().unwrap_or_else(|| panic!("not of the group: {error}")),
    }
}

fn place(operation: Operation, sequence: u64, members: &[usize]) -> Place {
    Place { operation, sequence, members: members.into() }
}

#[derive(Debug, Clone, Copy)]
enum End {
    Panics,
    Errs,
    Raises,
    Returns,
    Hangs,
}

/// What every rank says when one ends before `operation`; all others are in it, or come to it later.
fn outcomes(end: End, operation: Operation, culprit: usize, config: LaunchConfig) -> Vec<Result<(), LaunchError>> {
    launch_each(config, move |world| -> Result<(), BoxError> {
        world.barrier()?;
        if world.rank() == culprit {
            match end {
                End::Panics => panic!("out of luck"),
                End::Errs => return Err("out of data".into()),
                End::Raises => raise(Error::unsupported("forward", "this", "that")),
                End::Returns => return Ok(()),
                End::Hangs => hang(),
            }
        }
        let first = call(&world, operation).unwrap_err();
        // Later calls, of any kind, get the same.
        assert_eq!(world.barrier().unwrap_err(), first);
        assert_eq!(Error::Group(world.failure().unwrap()), first);
        Err(first.into())
    })
    .unwrap()
}

const OPERATIONS: [Operation; 9] = Operation::ALL;

/// Two of three ranks wait in each collective for one that never comes.
#[rstest]
fn ranks_that_wait_are_released(
    #[values(End::Panics, End::Errs, End::Raises, End::Returns)] end: End,
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8)] operation: usize,
    #[values(0, 1)] culprit: usize,
) {
    let operation = OPERATIONS[operation];
    let outcomes = outcomes(end, operation, culprit, LaunchConfig::new(3));
    let outside = Site::Outside { after: Some(place(Operation::Barrier, 0, &[0, 1, 2])) };
    let (site, cause) = match end {
        End::Panics => (outside, Cause::Panicked("out of luck".into())),
        End::Errs => (outside, Cause::Failed("out of data".into())),
        End::Raises => (outside, Cause::Failed("forward: this is not supported: that".into())),
        _ => (Site::Collective(place(operation, 1, &[0, 1, 2])), Cause::Departed),
    };
    let expected = GroupError { rank: culprit, operation: site, cause };
    for (rank, outcome) in outcomes.iter().enumerate() {
        if rank != culprit {
            assert_eq!(failure(outcome), &expected, "on rank {rank}");
        }
    }
    match (end, &outcomes[culprit]) {
        (End::Returns, own) => assert!(own.is_ok(), "{own:?}"),
        (End::Panics, Err(LaunchError::Panicked { message, .. })) => {
            assert_eq!(message, "out of luck");
        }
        (End::Errs, Err(own)) => {
            assert_eq!(own.to_string(), format!("rank {culprit}: out of data"));
        }
        (End::Raises, Err(own)) => {
            let own: Option<&Error> = own.downcast_ref();
            assert_eq!(own, Some(&Error::unsupported("forward", "this", "that")));
        }
        (_, own) => panic!("{end:?} became {own:?}"),
    }
}

/// The same with a rank that hangs in its own code, in all collectives at a time, since each takes its timeout.
#[test]
fn ranks_that_wait_for_one_that_hangs_are_released() {
    let timeout = Duration::from_secs(2);
    let config = LaunchConfig::new(3).with_timeout(timeout).with_grace(Duration::from_secs(1));
    std::thread::scope(|scope| {
        for operation in OPERATIONS {
            let config = config.clone();
            scope.spawn(move || {
                let outcomes = outcomes(End::Hangs, operation, 1, config);
                let expected = GroupError {
                    rank: 1,
                    operation: Site::Collective(place(operation, 1, &[0, 1, 2])),
                    cause: Cause::TimedOut { after: timeout, missing: vec![1] },
                };
                for outcome in &outcomes {
                    assert_eq!(failure(outcome), &expected);
                }
                assert!(matches!(&outcomes[1], Err(LaunchError::Abandoned { rank: 1, .. })));
            });
        }
    });
}

/// launch answers with the rank where it began, whatever its number, and that rank's own error.
#[rstest]
fn launch_returns_the_error_of_the_origin(#[values(0, 1, 3)] culprit: usize) {
    #[derive(Debug, PartialEq, thiserror::Error)]
    #[error("shard {0} is corrupt")]
    struct Corrupt(usize);

    let error = launch(4, move |world| -> Result<(), BoxError> {
        if world.rank() == culprit {
            return Err(Corrupt(7).into());
        }
        Ok(world.barrier()?)
    })
    .unwrap_err();
    assert_eq!(error.rank(), Some(culprit));
    assert_eq!(error.downcast_ref(), Some(&Corrupt(7)));
    assert_eq!(error.to_string(), format!("rank {culprit}: shard 7 is corrupt"));
}

/// A rank that returned too early has no error of its own; the others name it.
#[test]
fn launch_blames_a_rank_that_returned_through_one_that_waited() {
    let error = launch(3, |world| match world.rank() {
        2 => Ok(()),
        _ => world.barrier(),
    })
    .unwrap_err();
    assert_eq!(error.rank(), Some(0));
    assert_eq!(error.group_error().unwrap().rank, 2);
    assert_eq!(
        error.to_string(),
        "rank 0: rank 2 returned, but others wait for it in barrier #0 of ranks [0, 1, 2]: \
         every member must make the same calls"
    );
}

/// A rank that hangs in its own code is left behind; launch returns.
#[test]
fn launch_returns_without_a_rank_that_hangs() {
    let config = LaunchConfig::new(2).with_timeout(Duration::from_millis(50)).with_grace(Duration::from_millis(20));
    let error = launch(config, |world| -> Result<(), Error> {
        if world.rank() == 1 {
            hang();
        }
        world.barrier()
    })
    .unwrap_err();
    assert!(matches!(error, LaunchError::Abandoned { rank: 1, .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "rank 1 was left behind 20ms after the failure: ranks [1] were waited for in barrier #0 of \
         ranks [0, 1], for 50ms: find what holds them, or raise the timeout if they are only slow"
    );
}

/// Rank 3 panics. 2 waits for it in their pair; 1 waits in the world; 0 waits for 1 in the other pair.
#[test]
fn a_failure_in_one_group_releases_ranks_that_wait_in_others() {
    let outcomes = launch_each(4, |world| -> Result<(), Error> {
        let pair = world.subgroup(&if world.rank() < 2 { [0, 1] } else { [2, 3] })?;
        world.barrier()?;
        match world.rank() {
            1 => world.barrier(),
            3 => panic!("in the other pair"),
            _ => pair.barrier(),
        }
    })
    .unwrap();
    for outcome in &outcomes[..3] {
        let failure = failure(outcome);
        assert_eq!(failure.rank, 3);
        assert_eq!(failure.cause, Cause::Panicked("in the other pair".into()));
    }
}

/// Rank 0 waits for 1, which waits for 2, which hangs: 2 is named, not 1.
#[test]
fn a_timeout_names_the_rank_at_the_end_of_the_chain() {
    let config = LaunchConfig::new(3).with_timeout(Duration::from_secs(2)).with_grace(Duration::ZERO);
    let error = launch(config, |world| -> Result<(), Error> {
        match world.rank() {
            0 => world.subgroup(&[0, 1])?.barrier(),
            1 => world.subgroup(&[1, 2])?.barrier(),
            _ => hang(),
        }
    })
    .unwrap_err();
    let Some(GroupError { rank: 2, cause: Cause::TimedOut { missing, .. }, .. }) = error.group_error() else {
        panic!("{error}");
    };
    assert_eq!(missing, &[2]);
}

/// Each of two ranks waits for the other in another group: nobody hangs, both are named.
#[test]
fn groups_entered_in_different_orders_time_out() {
    let config = LaunchConfig::new(3).with_timeout(Duration::from_secs(1));
    let outcomes = launch_each(config, |world| -> Result<(), Error> {
        let pair = world.subgroup(&[0, 1]);
        match world.rank() {
            0 => pair?.barrier(),
            _ => world.barrier(),
        }
    })
    .unwrap();
    for outcome in &outcomes {
        assert!(matches!(&failure(outcome).cause, Cause::TimedOut { missing, .. } if !missing.is_empty()));
        assert_eq!(failure(outcome), failure(&outcomes[0]));
    }
}

/// Rank 1 makes another call than 0 and 2.
#[rstest]
#[case::order(Aspect::Operation, |w: &ProcessGroup, odd| if odd { w.barrier() } else { w.shift(data(1), 1).map(drop) }, ["barrier", "shift"])]
#[case::shape(Aspect::Shape, |w: &ProcessGroup, odd| w.all_gather(data(if odd { 3 } else { 2 })).map(drop), ["[3]", "[2]"])]
#[case::dtype(Aspect::DType, |w: &ProcessGroup, odd| if odd { w.all_reduce(TensorData::from([1i32]), ReduceOp::Sum) } else { w.all_reduce(data(1), ReduceOp::Sum) }.map(drop), ["i32", "f32"])]
#[case::kind(Aspect::Kind, |w: &ProcessGroup, odd| if odd { w.all_gather(Tensor::<1, Int>::zeros([1], &Device::flex())).map(drop) } else { w.all_gather(Tensor::<1>::zeros([1], &Device::flex())).map(drop) }, ["an int tensor", "a float tensor"])]
#[case::root(Aspect::Argument, |w: &ProcessGroup, odd| w.broadcast(Some(data(1)), usize::from(odd)).map(drop), ["root 1", "root 0"])]
#[case::op(Aspect::Argument, |w: &ProcessGroup, odd| w.all_reduce(data(1), if odd { ReduceOp::Max } else { ReduceOp::Sum }).map(drop), ["Max", "Sum"])]
#[case::by(Aspect::Argument, |w: &ProcessGroup, odd| w.shift(data(1), if odd { -1 } else { 1 }).map(drop), ["by 2", "by 1"])]
#[case::dims(Aspect::Dims, |w: &ProcessGroup, odd| w.all_gather_uneven(if odd { TensorData::from([[1f32]]) } else { data(1) }).map(drop), ["2", "1"])]
#[case::parts(Aspect::Shape, |w: &ProcessGroup, odd| { let mut parts = vec![data(1); 3]; if odd { parts[2] = data(4); } w.reduce_scatter(parts, ReduceOp::Sum).map(drop) }, ["[[1], [1], [4]]", "[[1], [1], [1]]"])]
fn ranks_that_disagree_all_get_both_sides(
    #[case] aspect: Aspect,
    #[case] call: fn(&ProcessGroup, bool) -> Result<(), Error>,
    #[case] says: [&'static str; 2],
) {
    let outcomes = launch_each(3, move |world| {
        world.barrier()?;
        let failed = call(&world, world.rank() == 1);
        // Nobody goes on as if nothing had happened.
        assert!(failed.is_err());
        failed
    })
    .unwrap();
    let first = failure(&outcomes[0]);
    for outcome in &outcomes {
        assert_eq!(failure(outcome), first);
    }
    let Site::Collective(place) = &first.operation else { panic!("{first}") };
    assert_eq!((place.sequence, &*place.members), (1, &[0, 1, 2][..]));
    let Cause::Disagreed { on, ours, theirs } = &first.cause else { panic!("{first}") };
    assert_eq!(*on, aspect);
    assert_eq!(first.rank, theirs.rank);
    let (odd, even) = if ours.rank == 1 { (ours, theirs) } else { (theirs, ours) };
    assert_eq!((odd.rank, odd.says.as_str()), (1, says[0]));
    assert!(even.rank != 1 && even.says == says[1], "{first}");
}

/// A receiver of another type than the root's value cannot be given it.
#[test]
fn a_broadcast_agrees_on_the_type_though_only_the_root_has_a_value() {
    let outcomes = launch_each(2, |world| match world.rank() {
        0 => world.broadcast(Some(Tensor::<2>::zeros([2, 2], &Device::flex())), 0).map(drop),
        _ => world.broadcast(None::<Tensor<3>>, 0).map(drop),
    })
    .unwrap();
    for outcome in &outcomes {
        assert!(matches!(&failure(outcome).cause, Cause::Disagreed { on: Aspect::Dims, .. }));
    }
}

#[rstest]
#[case::other_shape(Some(vec![2]), Some(vec![3]), "it sends [2] to rank 2", "it expects [3] from rank 0")]
#[case::nothing_sent(None, Some(vec![3]), "it sends nothing to rank 2", "it expects [3] from rank 0")]
#[case::nothing_expected(Some(vec![2]), None, "it sends [2] to rank 2", "it expects nothing from rank 0")]
fn an_unexpected_part_is_an_error_on_every_rank(
    #[case] sent: Option<Vec<usize>>,
    #[case] expected: Option<Vec<usize>>,
    #[case] sender: &str,
    #[case] receiver: &str,
) {
    // Only what rank 0 sends to rank 2 does not fit; rank 1 has no part in it.
    let outcomes = launch_each(3, move |world| {
        let part = |from: usize, to: usize, shape: &Option<Vec<usize>>| match (from, to) {
            (0, 2) => shape.clone(),
            (1, _) | (_, 1) => None,
            _ => Some(vec![1]),
        };
        let me = world.rank();
        let parts = (0..3).map(|to| part(me, to, &sent).map(|shape| data(shape[0]))).collect();
        let expected: Vec<_> = (0..3).map(|from| part(from, me, &expected)).collect();
        world.all_to_all_uneven(parts, &expected).map(drop)
    })
    .unwrap();
    for outcome in &outcomes {
        let failure = failure(outcome);
        let Cause::Disagreed { on: Aspect::Part, ours, theirs } = &failure.cause else {
            panic!("{failure}");
        };
        assert_eq!((theirs.rank, theirs.says.as_str()), (0, sender));
        assert_eq!((ours.rank, ours.says.as_str()), (2, receiver));
        assert_eq!(failure.rank, 0);
    }
}

/// What all have entered is delivered, even if a rank fails right after; and a rank may leave as soon as it is done.
#[test]
fn a_complete_exchange_is_delivered_to_everyone() {
    for _ in 0..200 {
        let outcomes = launch_each(3, |world| -> Result<usize, BoxError> {
            let parts = world.all_gather(data(1))?;
            if world.rank() == 1 {
                return Err("afterwards".into());
            }
            Ok(parts.len())
        });
        let outcomes = outcomes.unwrap();
        assert!(matches!((&outcomes[0], &outcomes[2]), (Ok(3), Ok(3))), "{outcomes:?}");
        assert!(launch(3, |world| world.barrier()).is_ok());
    }
}

/// A collective that fails inside a backward step comes out of `backward()` as that rank's error.
#[test]
fn errors_leave_a_backward_step() {
    let outcomes = launch_each(2, |world| -> Result<(), Error> {
        let x = Tensor::<1>::zeros([1], &Device::flex().autodiff()).require_grad();
        let group = world.clone();
        let y = custom_vjp(Inputs::new().input(&x), x.clone().inner(), move |dy: Tensor<1>| {
            if group.rank() == 1 {
                raise(Error::invalid("step", "no gradient", "look here"));
            }
            vec![Some(group.all_reduce(dy, ReduceOp::Sum).or_raise().into_dispatch())]
        });
        y.backward();
        unreachable!("rank {} has no gradient", world.rank());
    })
    .unwrap();
    let origin = outcomes[1].as_ref().unwrap_err().downcast_ref::<Error>().unwrap();
    assert_eq!(origin, &Error::invalid("step", "no gradient", "look here"));
    assert_eq!(failure(&outcomes[0]).rank, 1);
    assert_eq!(
        failure(&outcomes[0]).to_string(),
        "rank 1 failed outside a collective, before the first one: step: no gradient: look here"
    );
}

/// The first failure stays: what follows from it does not replace it.
#[test]
fn consequences_do_not_replace_the_origin() {
    let outcomes = launch_each(8, |world| -> Result<(), BoxError> {
        world.barrier()?;
        if world.rank() == 5 {
            return Err("first".into());
        }
        // Each waiting rank fails in its own way once it is released.
        match world.barrier() {
            Err(_) if world.rank() % 2 == 0 => panic!("because of rank 5"),
            Err(error) => Err(format!("consequence: {error}").into()),
            Ok(()) => Ok(()),
        }
    })
    .unwrap();
    let origin = GroupError {
        rank: 5,
        operation: Site::Outside { after: Some(place(Operation::Barrier, 0, &(0..8).collect::<Vec<_>>())) },
        cause: Cause::Failed("first".into()),
    };
    let message = outcomes[7].as_ref().unwrap_err().to_string();
    assert_eq!(message, format!("rank 7: consequence: {origin}"));
    assert!(matches!(&outcomes[4], Err(LaunchError::Panicked { .. })));
}

#[test]
fn a_rank_can_end_the_world_on_purpose() {
    let outcomes = launch_each(2, |world| -> Result<(), Error> {
        if world.rank() == 0 {
            world.fail("the loss is not finite");
        }
        world.barrier()
    })
    .unwrap();
    for outcome in &outcomes {
        assert_eq!(failure(outcome).cause, Cause::Failed("the loss is not finite".into()));
        assert_eq!(failure(outcome).rank, 0);
    }
}

#[rstest]
#[case(0, "launch: 0 ranks were asked for: launch 1 to 4096")]
#[case(MAX_RANKS + 1, "launch: 4097 ranks were asked for: launch 1 to 4096")]
fn absurd_numbers_of_ranks_are_refused(#[case] ranks: usize, #[case] message: &str) {
    let refused = launch(ranks, |_| -> Result<(), Error> { unreachable!() }).unwrap_err();
    assert!(matches!(&refused, LaunchError::Refused(_)) && refused.rank().is_none());
    assert_eq!(refused.to_string(), message);
}

#[test]
fn a_panic_without_a_message_is_still_a_panic() {
    let error = launch(2, |world| -> Result<(), Error> {
        if world.rank() == 0 {
            std::panic::resume_unwind(Box::new(7u8));
        }
        world.barrier()
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "rank 0 panicked: a panic without a message");
}

/// An endless timeout is none, and does not overflow the clock.
#[test]
fn the_longest_timeout_works() {
    let config = LaunchConfig::new(2).with_timeout(Duration::MAX).with_grace(Duration::MAX);
    assert!(launch(config, |world| world.barrier()).is_ok());
}

#[test]
fn every_error_reads_as_a_sentence_with_a_remedy() {
    let here = || Site::Collective(place(Operation::AllReduce, 4, &[0, 2]));
    let claim = |rank, says: &str| burn_context_parallel::group::Claim { rank, says: says.into() };
    let disagreed = Cause::Disagreed { on: Aspect::Shape, ours: claim(0, "[2, 3]"), theirs: claim(2, "[2, 4]") };
    let timed_out = Cause::TimedOut { after: Duration::from_secs(600), missing: vec![2] };
    let after = Site::Outside { after: Some(place(Operation::Barrier, 0, &[0, 2])) };
    let sentences = [
        (after, Cause::Panicked("index out of bounds".into())),
        (Site::Outside { after: None }, Cause::Failed("no file".into())),
        (here(), Cause::Departed),
        (here(), timed_out),
        (here(), disagreed),
    ]
    .map(|(operation, cause)| GroupError { rank: 2, operation, cause }.to_string());
    assert_eq!(
        sentences,
        [
            "rank 2 panicked outside a collective, after barrier #0 of ranks [0, 2]: index out of bounds",
            "rank 2 failed outside a collective, before the first one: no file",
            "rank 2 returned, but others wait for it in all_reduce #4 of ranks [0, 2]: \
             every member must make the same calls",
            "ranks [2] were waited for in all_reduce #4 of ranks [0, 2], for 600s: \
             find what holds them, or raise the timeout if they are only slow",
            "ranks disagree on the shape in all_reduce #4 of ranks [0, 2]: rank 0 says [2, 3], \
             rank 2 says [2, 4]: every member must make the same calls in the same order",
        ]
    );
}
