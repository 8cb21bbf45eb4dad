//! A run that was killed, stopped or moved to another mesh goes on as if nothing had happened.

#![cfg(unix)]

mod common;
mod process;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread;
use std::time::Duration;

use process::{any, checkpoints, command, contents, finetune, losses, rows, said, start, until, weights};
use rstest::rstest;

#[rstest]
#[case("--mesh data=2,ulysses=2")]
#[case("--mesh data=2,ulysses=2 --fsdp")]
#[case("--attention single")]
#[case("--ranks 2 --dtype bf16")]
fn a_killed_run_ends_with_the_same_losses_and_weights_to_the_last_bit(#[case] args: &str) {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    said(finetune(&whole, &format!("{args} --steps 10")));
    assert_eq!(rows(&whole).len(), 10);
    let [first, .., last] = losses(&whole)[..] else { panic!("ten steps") };
    assert!(last < first - 0.1, "the steps do something: {first} {last}");

    let out = folder.path().join("out");
    let args = format!("{args} --steps 10 --save-every {}", 1 + any(3));
    let mut killed = Vec::new();
    for _ in 0..40 {
        let resume = if out.exists() { "--resume" } else { "" };
        let (mut child, before) = (start(&out, &format!("{args} {resume}")), rows(&out).len());
        // Somewhere in a step, a save, or the end.
        let at = before + any(4) as usize;
        let mut status = None;
        until("a step", || {
            status = child.try_wait().unwrap();
            status.is_some() || rows(&out).len() >= at.min(10)
        });
        thread::sleep(Duration::from_micros(any(20_000)));
        child.kill().unwrap();
        if child.wait().unwrap().signal().is_some() {
            killed.push((at, checkpoints(&out)));
        } else if killed.is_empty() {
            // It was faster than its killer: once more from its birth.
            fs::remove_dir_all(&out).unwrap();
            continue;
        }
        if status.is_some() || killed.len() == 4 {
            break;
        }
    }
    assert!(!killed.is_empty(), "no run was killed");
    said(finetune(&out, &format!("{args} --resume")));
    assert_eq!(rows(&out), rows(&whole), "killed at {killed:?}");
    assert!(weights(&out) == weights(&whole), "killed at {killed:?}");
    // The whole curve, not that of the last part.
    let curve = fs::read_to_string(out.join("loss.svg")).unwrap();
    assert_eq!(curve, fs::read_to_string(whole.join("loss.svg")).unwrap());
}

#[rstest]
#[case("--mesh data=4,ulysses=1")]
#[case("--mesh data=1,ulysses=1 --attention single")]
#[case("--mesh data=1,ulysses=4")]
#[case("--mesh data=1,ulysses=4 --fsdp")]
#[case("--mesh data=3 --attention single --fsdp --checkpoint off --loss-tile off")]
fn a_run_goes_on_on_another_mesh(#[case] other: &str, #[values("", "--fsdp")] fsdp: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [whole, out] = ["whole", "out"].map(|name| folder.path().join(name));
    let mesh = format!("--mesh data=2,ulysses=2 {fsdp}");
    said(finetune(&whole, &format!("{mesh} --steps 10")));
    said(finetune(&out, &format!("{mesh} --steps 5")));
    assert_eq!(rows(&out), rows(&whole)[..5]);
    said(finetune(&out, &format!("{other} --steps 10 --resume")));
    assert_eq!(rows(&out)[..5], rows(&whole)[..5]);
    let (found, expected) = (losses(&out), losses(&whole));
    assert_eq!(found.len(), 10);
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-4, "{found} {expected}");
    }
}

/// What the two above rest on: a run that begins its optimizer anew is another one.
#[test]
fn without_its_moments_a_run_would_be_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, half, again] = ["whole", "half", "again"].map(|name| folder.path().join(name));
    said(finetune(&whole, "--ranks 2 --steps 10"));
    said(finetune(&half, "--ranks 2 --steps 5"));
    let model = half.join("model").display().to_string();
    said(finetune(&again, &format!("--ranks 2 --steps 5 --model {model}")));
    let (found, expected) = (losses(&again), losses(&whole));
    assert!((found[4] - expected[9]).abs() > 1e-3, "{found:?} {expected:?}");
}

#[rstest]
#[case("TERM")]
#[case("INT")]
fn a_signal_ends_the_step_saves_and_ends_with_0(#[case] signal: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [whole, out] = ["whole", "out"].map(|name| folder.path().join(name));
    let child = command(&out, "--mesh data=2,ulysses=2 --steps 1000").spawn().unwrap();
    until("steps", || rows(&out).len() >= 3);
    assert!(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap().success());
    let text = said(child.wait_with_output().unwrap());
    let done = rows(&out).len();
    assert!((3..1000).contains(&done), "{done}");
    assert_eq!(checkpoints(&out), [format!("step-{done:010}")]);
    assert!(text.contains(&format!("stopped after step {done} of 1000")) && text.contains("--resume"), "{text}");
    assert!(!out.join("model").exists(), "a run that is not over has no weights");

    // Fewer steps than it was begun with, but all that it has.
    let steps = done + 2;
    said(finetune(&whole, &format!("--mesh data=2,ulysses=2 --steps {steps}")));
    let text = said(finetune(&out, &format!("--mesh data=2,ulysses=2 --steps {steps} --resume")));
    assert!(text.contains(&format!("after step {done}")), "{text}");
    assert_eq!(rows(&out), rows(&whole));
    assert!(weights(&out) == weights(&whole));
}

#[test]
fn a_file_asks_for_a_checkpoint_and_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut child = start(&out, "--ranks 2 --steps 100000");
    until("steps", || rows(&out).len() >= 2);
    assert_eq!(checkpoints(&out), Vec::<String>::new());
    fs::write(out.join("save-now"), "").unwrap();
    until("the file is served", || !out.join("save-now").exists());
    let saved = checkpoints(&out);
    assert_eq!(saved.len(), 1, "{saved:?}");
    let step: usize = saved[0].trim_start_matches("step-").parse().unwrap();
    assert!(step >= 2);
    until("it goes on", || rows(&out).len() > step + 2);
    child.kill().unwrap();
    child.wait().unwrap();

    let text = said(finetune(&out, &format!("--ranks 2 --steps {} --resume", step + 1)));
    assert!(text.contains(&format!("after step {step}")), "{text}");
    assert_eq!(rows(&out).len(), step + 1, "rows after the checkpoint are cut off");
}

/// The newest one is damaged: the one before it serves.
#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, out] = ["whole", "out"].map(|name| folder.path().join(name));
    said(finetune(&whole, "--ranks 2 --steps 9"));
    said(finetune(&out, "--ranks 2 --steps 7 --save-every 3"));
    assert_eq!(checkpoints(&out), ["step-0000000006", "step-0000000007"]);
    let newest = out.join("checkpoints/step-0000000007");
    let shard =
        contents(&newest).into_iter().find(|(path, _)| path.extension().is_some_and(|end| end == "safetensors"));
    let (path, mut bytes) = shard.unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
    let text = said(finetune(&out, "--ranks 2 --steps 9 --resume"));
    assert!(text.contains("after step 6"), "{text}");
    assert_eq!(rows(&out), rows(&whole));
    assert!(weights(&out) == weights(&whole));
}

/// A run's own words are enough to go on.
#[test]
fn the_written_configuration_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, out] = ["whole", "out"].map(|name| folder.path().join(name));
    said(finetune(&whole, "--mesh data=2,ulysses=2 --fsdp --steps 5"));
    let mut child = start(&out, "--mesh data=2,ulysses=2 --fsdp --steps 1000 --save-every 2 --keep 5");
    until("a checkpoint", || !checkpoints(&out).is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    let newest = checkpoints(&out).pop().unwrap();
    let done: usize = newest.trim_start_matches("step-").parse().unwrap();
    let steps = done + 2;
    let resume = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
        command.arg("--config").arg(out.join("config.toml")).arg("--out").arg(&out).args(args).output().unwrap()
    };
    said(resume(&["--resume", "--steps", &steps.to_string()]));
    let common = steps.min(5);
    assert_eq!(rows(&out).len(), steps);
    assert_eq!(rows(&out)[..common], rows(&whole)[..common]);
}

#[test]
fn a_folder_named_save_now_asks_for_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    fs::create_dir_all(&out).unwrap();
    said(finetune(&out, "--ranks 2 --steps 1"));
    fs::create_dir(out.join("save-now")).unwrap();
    said(finetune(&out, "--ranks 2 --steps 3 --resume"));
}
