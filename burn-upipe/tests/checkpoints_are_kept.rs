//! Which checkpoints are there after a save: the newest whole ones that were asked for, and nothing that a dead run left.

mod common;

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Checkpoints, MANIFEST, Piece, RunState};
use common::{holds, names, shard, state};
use proptest::prelude::*;
use serde_json::{Number, Value, json};

/// Saves these steps as one run of two ranks.
fn run(folder: &Path, keep: usize, steps: &[u64]) {
    let (folder, steps) = (folder.to_owned(), steps.to_owned());
    launch(2, move |world| {
        let checkpoints = Checkpoints::new(&folder, NonZeroUsize::new(keep));
        for &step in &steps {
            let path = checkpoints.save(&world, shard(step, world.rank(), 2), &state(step))?;
            holds(&Checkpoint::open(path)?, step)?;
            // Nobody saves again before the other has looked.
            world.barrier()?;
        }
        Ok::<_, CheckpointError>(())
    })
    .unwrap();
}

fn visible(folder: &Path) -> Vec<String> {
    names(folder).into_iter().filter(|name| !name.starts_with('.')).collect()
}

fn latest(folder: &Path) -> Checkpoint {
    Checkpoints::new(folder, None).latest(&ProcessGroup::single()).unwrap().unwrap()
}

#[test]
fn the_newest_are_kept() {
    for keep in 1..4 {
        let out = tempfile::tempdir().unwrap();
        run(out.path(), keep, &[5, 10, 15, 20, 25]);
        let expected = ["step-0000000015", "step-0000000020", "step-0000000025"];
        assert_eq!(visible(out.path()), expected[3 - keep..]);
    }
    let out = tempfile::tempdir().unwrap();
    run(out.path(), 0, &[5, 10, 15, 20, 25]);
    assert_eq!(visible(out.path()).len(), 5, "without a number all are kept");
    let listed = Checkpoints::new(out.path(), None).list().unwrap();
    assert_eq!(listed.iter().map(|saved| saved.step).collect::<Vec<_>>(), [25, 20, 15, 10, 5]);
}

/// Damaged ones are not what is kept, and the one just saved is kept whatever its step is.
#[test]
fn whole_ones_are_kept() {
    let out = tempfile::tempdir().unwrap();
    run(out.path(), 0, &[1, 2, 3, 4]);
    for step in [3, 4] {
        fs::write(out.path().join(format!("step-000000000{step}")).join(MANIFEST), "").unwrap();
    }
    run(out.path(), 2, &[5]);
    assert_eq!(visible(out.path()), [2, 3, 4, 5].map(|step| format!("step-000000000{step}")));
    run(out.path(), 1, &[2]);
    // 5 is newer and whole; 2 was just saved, in the place of the earlier one.
    assert_eq!(visible(out.path()), ["step-0000000002-1", "step-0000000005"]);
}

#[test]
fn a_step_that_comes_again_takes_the_place() {
    let out = tempfile::tempdir().unwrap();
    run(out.path(), 3, &[10, 20]);
    run(out.path(), 3, &[10, 20]);
    assert_eq!(visible(out.path()), ["step-0000000010-1", "step-0000000020-1"]);
    holds(&latest(out.path()), 20).unwrap();
    run(out.path(), 3, &[20]);
    assert_eq!(visible(out.path()), ["step-0000000010-1", "step-0000000020-2"]);
    // If the newer one is damaged, and the older still there, that one is found.
    let again = out.path().join("step-0000000020-2");
    fs::rename(&again, out.path().join("step-0000000020-10")).unwrap();
    run(out.path(), 3, &[30]);
    fs::rename(out.path().join("step-0000000030"), out.path().join("step-0000000020-9")).unwrap();
    assert_eq!(Checkpoints::new(out.path(), None).list().unwrap()[0].replay, 10, "as numbers, not as letters");
}

#[test]
fn what_dead_runs_left_is_removed() {
    let out = tempfile::tempdir().unwrap();
    run(out.path(), 0, &[1]);
    for left in [".step-0000000002.partial", ".step-0000000002-3.partial", ".step-0000000001.removed"] {
        fs::create_dir(out.path().join(left)).unwrap();
        fs::write(out.path().join(left).join("rank-0000-of-0001.safetensors"), "half").unwrap();
    }
    // Not ours.
    for other in [".step-x.partial", ".cache.partial", "notes", "step-2", "step-0000000002.partial"] {
        fs::create_dir(out.path().join(other)).unwrap();
    }
    assert_eq!(latest(out.path()).step(), 1);
    run(out.path(), 0, &[2]);
    let mut expected = vec![".lock", ".step-x.partial", ".cache.partial", "notes", "step-2", "step-0000000002.partial"];
    expected.extend(["step-0000000001", "step-0000000002"]);
    expected.sort_unstable();
    assert_eq!(names(out.path()), expected);
    holds(&latest(out.path()), 2).unwrap();
}

#[test]
fn there_may_be_nothing_to_save() {
    let out = tempfile::tempdir().unwrap();
    let none = Checkpoints::new(out.path().join("never"), None);
    assert!(none.latest(&ProcessGroup::single()).unwrap().is_none() && none.list().unwrap().is_empty());
    assert_eq!(names(out.path()).len(), 0, "looking makes nothing");

    // Ranks without pieces, tensors without elements, scalars.
    let folder = out.path().to_owned();
    launch(3, move |world| {
        let checkpoints = Checkpoints::new(&folder, None);
        assert!(checkpoints.latest(&world)?.is_none());
        let empty = TensorData::from_bytes_vec(vec![], [0, 4], DType::BF16);
        let pieces = [
            Piece::whole("empty", empty.clone()),
            Piece::whole("scalar", TensorData::from_bytes_vec(vec![1, 2, 3, 4], [0usize; 0], DType::U32)),
            Piece::part("weight", [4], 2..2, TensorData::from_bytes_vec(vec![], [0], DType::F32)),
            Piece::part("weight", [4], 0..4, TensorData::from([1f32, 2.0, 3.0, 4.0])),
        ];
        let mine = pieces.into_iter().filter(|_| world.rank() == 1);
        checkpoints.save(&world, mine, &RunState::default())?;
        let latest = checkpoints.latest(&world)?.expect("it was saved");
        assert_eq!((latest.step(), latest.names().collect::<Vec<_>>()), (0, vec!["empty", "scalar", "weight"]));
        assert_eq!(latest.read_whole("empty")?, empty);
        assert_eq!(latest.read("empty", 0..0)?.num_elements(), 0);
        assert_eq!(
            (latest.shape("scalar")?, latest.read_whole("scalar")?.as_bytes()),
            ([].as_slice(), [1, 2, 3, 4].as_slice())
        );
        // A run of no tensors at all.
        checkpoints.save(&world, [], &state(1))?;
        assert_eq!(checkpoints.latest(&world)?.map(|latest| latest.names().len()), Some(0));
        Ok::<_, CheckpointError>(())
    })
    .unwrap();
}

fn values() -> impl Strategy<Value = Value> {
    let float = any::<u64>().prop_map(f64::from_bits).prop_filter_map("JSON has no others", Number::from_f64);
    let leaf = prop_oneof![
        float.prop_map(Value::Number),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        "~{0,3}[~a-z0-9.\"\\\\\u{0}-\u{20}é]{0,6}".prop_map(Value::from),
        Just(Value::Null),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map("[~a-z.]{0,4}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// `PartialEq` of floats takes -0.0 for 0.0.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) if a.is_f64() => {
            b.is_f64() && a.as_f64().map(f64::to_bits) == b.as_f64().map(f64::to_bits)
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|((k, a), (l, b))| k == l && same(a, b))
        }
        (a, b) => a == b,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn states_come_back_bit_for_bit(
        values in prop::array::uniform4(values()),
        counts in any::<[u64; 3]>(),
        floats in prop::collection::vec(any::<u64>(), 50),
    ) {
        let out = tempfile::tempdir().unwrap();
        let group = ProcessGroup::single();
        let [scheduler, rng, data, optimizer] = values;
        let [step, tokens_seen, valid_tokens_seen] = counts;
        let floats: Vec<_> = floats.into_iter().map(f64::from_bits).filter(|float| float.is_finite()).collect();
        let optimizer = json!({ "a": optimizer, "floats": floats, "zero": -0.0, "least": f64::from_bits(1) });
        let config = "~ a = 0.1\n[b]\nc = \"é\"\n".to_owned();
        let mesh = "data=2,ulysses=2".to_owned();
        let state = RunState { step, mesh, tokens_seen, valid_tokens_seen, scheduler, rng, data, optimizer, config };
        let checkpoints = Checkpoints::new(out.path(), None);
        checkpoints.save(&group, [], &state).unwrap();
        let latest = checkpoints.latest(&group).unwrap().unwrap();
        let [before, after] = [&state, latest.state()].map(|state| serde_json::to_value(state).unwrap());
        prop_assert!(same(&before, &after), "{before} became {after}");
    }
}
