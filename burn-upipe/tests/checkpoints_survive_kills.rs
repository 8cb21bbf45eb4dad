//! A run that is killed while it saves, at any moment: the newest readable checkpoint is whole, and as new as the run has said.
#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use burn::tensor::{DType, TensorData};
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Piece};
use common::{names, part, state, values};

const KILLS: u64 = 50;
const RANKS: usize = 3;

/// Large enough that most of the time is spent in writing.
fn weight(step: u64) -> TensorData {
    values(&[96, 1024], DType::F32, step)
}

/// The run: goes on from the newest checkpoint, or one step before it, and saves every step until it is killed. Its folder is the
/// working directory.
#[test]
#[ignore = "is killed: run by `fifty_kills`"]
fn run_until_killed() {
    launch(RANKS, |world| {
        let checkpoints = Checkpoints::new("checkpoints", std::num::NonZeroUsize::new(2));
        let from = checkpoints.latest(&world)?.map_or(0, |latest| latest.step());
        for step in from.max(1).. {
            let range = |rank: usize| 96 * 1024 * rank / RANKS;
            let range = range(world.rank())..range(world.rank() + 1);
            let data = weight(step);
            let piece = Piece::part("weight", [96, 1024], range.clone(), part(&data, range));
            checkpoints.save(&world, [piece], &state(step))?;
            if world.rank() == 0 {
                println!("\nsaved {step}");
            }
        }
        Ok::<_, CheckpointError>(())
    })
    .unwrap();
}

/// Starts the run, and kills it so long after its first checkpoint. The last step that it said was saved.
fn killed_run(folder: &Path, after: Duration) -> u64 {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "run_until_killed", "--nocapture"])
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (said, steps) = channel();
    let out = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        for line in out.lines().map_while(Result::ok) {
            if let Some(step) = line.strip_prefix("saved ").and_then(|step| step.parse::<u64>().ok()) {
                let _ = said.send(step);
            }
        }
    });
    let first = steps.recv_timeout(Duration::from_secs(60)).expect("the run saves nothing");
    std::thread::sleep(after);
    // SIGKILL.
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());
    reader.join().unwrap();
    steps.try_iter().last().unwrap_or(first)
}

#[test]
fn fifty_kills() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("checkpoints");
    let (mut written, mut removed, mut newest) = (0, 0, 0);
    for kill in 0..KILLS {
        // 0 to 40 ms, no two alike; a save takes a few.
        let after =
            Duration::from_micros(common::bytes(2, kill).iter().fold(0, |sum, &byte| 157 * u64::from(byte) + sum));
        let reported = killed_run(out.path(), after);
        let left = names(&folder);
        written += usize::from(left.iter().any(|name| name.ends_with(".partial")));
        removed += usize::from(left.iter().any(|name| name.ends_with(".removed")));

        // Whatever has a name is whole: not only the newest.
        let checkpoints = Checkpoints::new(&folder, None);
        let listed = checkpoints.list().unwrap();
        for saved in &listed {
            let checkpoint = Checkpoint::open(&saved.path).unwrap();
            checkpoint.verify().unwrap();
            assert_eq!(checkpoint.state(), &state(saved.step));
            assert!(checkpoint.read_whole("weight").unwrap().as_bytes() == weight(saved.step).as_bytes());
        }
        let latest = checkpoints.latest(&ProcessGroup::single()).unwrap().expect("one was saved").step();
        assert!(latest >= reported && latest >= newest, "kill {kill}: {latest} is the newest of {reported} saved");
        newest = latest;
    }
    println!(
        "{KILLS} kills up to step {newest}: {written} left a half written checkpoint, {removed} a half removed one"
    );
    assert!(written + removed >= 10, "only {} of {KILLS} kills hit a save: they prove nothing", written + removed);
}
