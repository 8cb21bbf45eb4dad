//! `--profile`: the files, the steps, the same losses; and a last word when memory is out.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn finetune(folder: &Path, args: &str) -> Output {
    let out = Command::new(env!("CARGO_BIN_EXE_finetune")).current_dir(folder).args(args.split_whitespace()).output();
    let out = out.unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    out
}

fn losses(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    text.lines().map(|line| line.split(',').take(3).collect::<Vec<_>>().join(",")).collect()
}

#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_written_is_known_before_a_run_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let run = "--seq-len 64 --steps 1 --ranks 2 --sequences 4 --out kept";
    finetune(folder.path(), run);
    for (more, said) in [
        ("--offload disk --offload-dir /proc", "--offload-dir: /proc cannot be written"),
        ("--profile /proc/profile", "--profile: /proc cannot be written"),
        ("--offload disk --offload-dir kept/model", "is within --out, which --overwrite empties"),
    ] {
        let args = format!("{run} --overwrite {more}");
        let finetune = env!("CARGO_BIN_EXE_finetune");
        let out = Command::new(finetune).current_dir(folder.path()).args(args.split_whitespace()).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains(said), "{:?}: {stderr}", out.status);
        assert!(folder.path().join("kept/model/model.safetensors").exists(), "{more}");
    }
}

#[test]
fn a_profile_is_of_the_steps_that_were_asked_for_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let run = "--seq-len 96 --steps 4 --ranks 2 --sequences 8";
    finetune(folder.path(), &format!("{run} --out plain"));
    for (name, more) in [("whole", ""), ("sharded", "--fsdp")] {
        let args = format!("{run} {more} --out {name} --profile {name}.profile --profile-steps 2,4");
        let output = finetune(folder.path(), &args);
        assert!(String::from_utf8_lossy(&output.stdout).contains(&format!("profile of steps 2,4 in {name}.profile")));
        if more.is_empty() {
            assert_eq!(losses(&folder.path().join(name)), losses(&folder.path().join("plain")));
        }
        let profile = folder.path().join(format!("{name}.profile"));
        let mut names: Vec<_> = fs::read_dir(&profile).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["memory.html", "profile.txt", "trace.json"]);

        let trace: Value = serde_json::from_str(&fs::read_to_string(profile.join("trace.json")).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let found: BTreeSet<(u64, &str)> = events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| (event["pid"].as_u64().unwrap(), event["name"].as_str().unwrap()))
            .collect();
        for rank in 0..2 {
            for (step, profiled) in [(1, false), (2, true), (3, false), (4, true)] {
                assert_eq!(found.contains(&(rank, &*format!("step {step}"))), profiled, "step {step}");
            }
            for block in 0..4 {
                for pass in ["forward", "backward"] {
                    assert!(found.contains(&(rank, &*format!("block {block} {pass}"))), "block {block} {pass}");
                }
            }
            for phase in ["embedding forward", "loss backward", "recompute", "optimizer", "gradient sum", "data"] {
                assert!(found.contains(&(rank, phase)), "{phase}");
            }
        }
        let table = fs::read_to_string(profile.join("profile.txt")).unwrap();
        let runs = |phase: &str| {
            let line = table.lines().find(|line| line.trim_start().starts_with(phase));
            line.unwrap_or_else(|| panic!("no {phase} in {table}"))
                .split_whitespace()
                .nth(phase.split(' ').count())
                .unwrap()
                .to_owned()
        };
        // Two steps of four blocks.
        assert_eq!((runs("step"), runs("block forward"), runs("optimizer")), ("2".into(), "8".into(), "2".into()));
    }
}

/// Memory that the system refuses, by a limit on the address space.
#[cfg(target_os = "linux")]
#[test]
fn when_memory_is_out_what_it_was_full_of_is_written() {
    let folder = tempfile::tempdir().unwrap();
    // Nothing is tiled: the feed-forward's intermediates of all blocks are kept.
    let args = "--attention single --checkpoint off --mlp-tile off --norm-tile off --loss-tile off --seq-len 256 --batch 160 --steps 1 --out out --profile profile";
    let program = env!("CARGO_BIN_EXE_finetune");
    let command = format!("ulimit -v 1200000; exec {program} {args}");
    let output = Command::new("sh").current_dir(folder.path()).args(["-c", &command]).output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("error: out of memory: see profile/out-of-memory.txt"), "{stderr}");
    let text = fs::read_to_string(folder.path().join("profile/out-of-memory.txt")).unwrap();
    let first = text.lines().next().unwrap();
    assert!(
        first.starts_with("out of memory: an allocation of ") && first.contains(" bytes failed in rank 0, "),
        "{text}"
    );
    // What the blocks keep is most of it.
    let most = text.lines().skip_while(|line| !line.starts_with("alive by")).nth(1).unwrap();
    assert!(most.contains("MiB  rank 0    block forward"), "{text}");
}
