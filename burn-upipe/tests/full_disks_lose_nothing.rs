//! A disk that takes no more, in the middle of one rank's file: an error on all ranks, what was there before is untouched.
//!
//! The system's own limit on the size of files stands in for the disk: it is there for every user, and it refuses in the same call.
#![cfg(unix)]

mod common;

use std::path::Path;
use std::process::Command;

use burn::tensor::DType;
use burn_context_parallel::group::launch;
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Piece};
use common::{holds, names, save, shard, state, values};

/// In a process whose files may have 64 KiB; its folder is the working directory.
#[test]
#[ignore = "needs a limit: run by `a_rank_that_cannot_write`"]
fn saves_under_a_limit() {
    let errors = launch(3, |world| {
        let checkpoints = Checkpoints::new("checkpoints", None);
        let small = |step| shard(step, world.rank(), 3);
        let large = (world.rank() == 1).then(|| Piece::whole("large", values(&[1 << 20], DType::F32, 7)));
        let error =
            checkpoints.save(&world, small(2).into_iter().chain(large), &state(2)).expect_err("it is too large");
        assert_eq!(names(Path::new("checkpoints")), [".lock", "step-0000000001"]);
        world.barrier()?;
        // Without the large one there is room.
        checkpoints.save(&world, small(3), &state(3))?;
        Ok::<_, CheckpointError>(error)
    })
    .unwrap();
    assert!(matches!(&errors[1], CheckpointError::Io { .. }), "{:?}", errors[1]);
    for other in [&errors[0], &errors[2]] {
        assert!(matches!(other, CheckpointError::Rank { rank: 1, .. }), "{other:?}");
    }
    println!("\nrefused: {}", errors[1]);
}

#[test]
fn a_rank_that_cannot_write() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("checkpoints");
    save(&folder, 1, 3).unwrap();
    // In blocks of 512 or 1024 bytes, as the shell has it. The signal would end the process where an error is due.
    let script = r#"trap "" XFSZ; ulimit -f 64; exec "$0" --ignored --exact saves_under_a_limit --nocapture"#;
    let run =
        Command::new("sh").args(["-c", script]).arg(std::env::current_exe().unwrap()).current_dir(out.path()).output();
    let run = run.unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && said.contains("refused: writing"), "{said}");
    for step in [1, 3] {
        holds(&Checkpoint::open(folder.join(format!("step-000000000{step}"))).unwrap(), step).unwrap();
    }
    assert_eq!(names(&folder), [".lock", "step-0000000001", "step-0000000003"]);
}
