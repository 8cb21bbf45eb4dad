//! A run that was killed, stopped or moved to another mesh goes on as if nothing had happened.

#![cfg(unix)]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use burn::tensor::Device;
use llama::{Llama, LlamaConfig, ParallelConfig};
use rstest::rstest;

/// A model, made once, and a text of documents of which sequences have unequal targets.
static INPUT: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let config = LlamaConfig { initializer_range: 0.2, ..LlamaConfig::new(256, 24, 40, 2, 4, 2) };
    Llama::init(&config, &ParallelConfig::none(), &Device::flex()).unwrap().save(&folder.path().join("model")).unwrap();
    let lines: String =
        (1..60).map(|at| format!("{{\"text\": \"{}\"}}\n", "the lazy dog ".repeat(1 + at * at % 7))).collect();
    fs::write(folder.path().join("data.jsonl"), lines).unwrap();
    folder
});

/// Steps of three sequences of 96 bytes, in another order in each epoch.
const RUN: [(&str, &str); 8] = [
    ("--tokens", "bytes"),
    ("--seq-len", "96"),
    ("--batch", "1"),
    ("--accumulate", "3"),
    ("--data-order", "shuffle"),
    ("--seed", "3"),
    ("--lr", "1e-2"),
    ("--weight-decay", "0.01"),
];

fn command(out: &Path, args: &str) -> Command {
    let [model, data] = ["model", "data.jsonl"].map(|name| INPUT.path().join(name).display().to_string());
    let words: Vec<&str> = args.split_whitespace().collect();
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
    for (name, value) in [("--model", &*model), ("--data", &*data)].into_iter().chain(RUN) {
        if !words.contains(&name) {
            command.args([name, value]);
        }
    }
    command.arg("--out").arg(out).args(words).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finetune(out: &Path, args: &str) -> Output {
    command(out, args).output().unwrap()
}

/// What a run that must succeed says.
fn said(output: Output) -> String {
    let [said, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(output.status.code(), Some(0), "{stderr}{said}");
    said
}

/// A run whose output nobody reads, so that it may say as much as it likes.
fn start(out: &Path, args: &str) -> Child {
    command(out, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Step, loss, norm and rate of every row, as written: the digits are those of the bits.
fn rows(out: &Path) -> Vec<String> {
    let text = fs::read_to_string(out.join("metrics.csv")).unwrap_or_default();
    text.lines().skip(1).map(|row| row.split(',').take(4).collect::<Vec<_>>().join(",")).collect()
}

fn losses(out: &Path) -> Vec<f64> {
    rows(out).iter().map(|row| row.split(',').nth(1).unwrap().parse().unwrap()).collect()
}

fn weights(out: &Path) -> Vec<u8> {
    fs::read(out.join("model/model.safetensors")).unwrap()
}

fn checkpoints(out: &Path) -> Vec<String> {
    let entries = fs::read_dir(out.join("checkpoints")).into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    names
}

/// Waits for something that a run will do.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(120), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Anything below `end`, another one in each run of the test.
fn any(end: u64) -> u64 {
    u64::from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos()) / 1000 % end
}

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
    let (mut killed, mut resume) = (Vec::new(), "");
    for _ in 0..4 {
        let (mut child, before) = (start(&out, &format!("{args} {resume}")), rows(&out).len());
        resume = "--resume";
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

fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(contents(&path)),
            false => found.push((path.clone(), fs::read(&path).unwrap())),
        }
    }
    found.sort();
    found
}

#[test]
fn a_finished_run_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    said(finetune(&out, "--ranks 2 --steps 3"));
    let before = contents(&out);
    let text = said(finetune(&out, "--ranks 2 --steps 3 --resume"));
    assert!(text.contains("finished") && text.contains("nothing to do"), "{text}");
    assert!(contents(&out) == before);

    // Killed after the last checkpoint and before the weights: it is not finished.
    let weights = weights(&out);
    fs::remove_dir_all(out.join("model")).unwrap();
    said(finetune(&out, "--ranks 2 --steps 3 --resume"));
    assert!(self::weights(&out) == weights);
    assert_eq!(rows(&out).len(), 3);
}

#[test]
fn a_run_that_is_not_there_starts_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let [new, killed] = ["new", "killed"].map(|name| folder.path().join(name));
    let text = said(finetune(&new, "--ranks 2 --steps 3 --resume"));
    assert!(text.contains("no checkpoint in") && text.contains("starting"), "{text}");

    let mut child = start(&killed, "--ranks 2 --steps 1000");
    until("a step", || rows(&killed).len() >= 2);
    child.kill().unwrap();
    child.wait().unwrap();
    let text = said(finetune(&killed, "--ranks 2 --steps 3 --resume"));
    assert!(text.contains("no checkpoint in") && text.contains("starting"), "{text}");
    assert_eq!(rows(&killed), rows(&new));
}

#[test]
fn an_overwritten_run_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [out, other] = ["out", "other"].map(|name| folder.path().join(name));
    said(finetune(&out, "--ranks 2 --steps 6 --save-every 2"));
    said(finetune(&out, "--ranks 2 --steps 3 --lr 1e-3 --overwrite"));
    said(finetune(&other, "--ranks 2 --steps 3 --lr 1e-3"));
    assert_eq!(rows(&out), rows(&other));
    assert_eq!(checkpoints(&out), ["step-0000000003"]);
    assert!(weights(&out) == weights(&other));
}

#[test]
fn as_many_checkpoints_stay_as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    said(finetune(&out, "--ranks 2 --steps 7 --save-every 2 --keep 3"));
    assert_eq!(checkpoints(&out), ["step-0000000004", "step-0000000006", "step-0000000007"]);
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

/// What was asked for now, what stands in the run's folder, and what the refusal says.
#[rstest]
#[case("--steps 6 --resume --lr 1e-3", &["lr", "0.01", "0.001"], &["config.toml", "--overwrite"])]
#[case("--steps 6 --resume --seed 4 --batch 3", &["seed", "3", "4", "batch", "1"], &["config.toml", "--overwrite"])]
#[case("--steps 6 --resume --seq-len 64", &["seq-len", "96", "64"], &["config.toml"])]
#[case("--steps 6 --resume --dtype bf16", &["dtype", "f32", "bf16"], &["config.toml"])]
#[case("--steps 6 --resume --schedule cosine", &["schedule", "constant", "cosine"], &["config.toml"])]
#[case("--steps 6 --resume --clip none --weight-decay 0.5", &["clip", "weight-decay"], &["config.toml"])]
#[case("--steps 2 --resume", &["--steps 2", "4"], &["--steps 4"])]
#[case("--steps 6", &["out"], &["--resume", "--overwrite"])]
#[case("--steps 6 --resume --overwrite", &["--resume and --overwrite together"], &["one of them"])]
#[case("--eval --resume", &["--resume with --eval"], &["leave"])]
fn a_run_that_would_be_another_one_is_refused_and_stays(
    #[case] args: &str,
    #[case] fault: &[&str],
    #[case] remedy: &[&str],
) {
    static FINISHED: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        said(finetune(&folder.path().join("out"), "--ranks 2 --steps 4"));
        folder
    });
    // One at a time: a run that is being looked at is locked.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let out = FINISHED.path().join("out");
    let before = contents(&out);
    let output = finetune(&out, &format!("--ranks 2 {args}"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let first = stderr.lines().next().unwrap();
    for part in fault.iter().chain(remedy) {
        assert!(first.contains(part), "no {part} in {first}");
    }
    assert!(contents(&out) == before);
}

#[test]
fn another_text_is_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let data = folder.path().join("moved.jsonl");
    fs::copy(INPUT.path().join("data.jsonl"), &data).unwrap();
    let args = format!("--ranks 2 --steps 2 --save-every 1 --data {}", data.display());
    said(finetune(&out, &args));
    let text = fs::read_to_string(&data).unwrap();
    fs::write(&data, text.replacen("lazy", "hazy", 1)).unwrap();
    let output = finetune(&out, &format!("{args} --resume"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.lines().next().unwrap().contains("moved.jsonl"), "{stderr}");
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

/// Two programs do not write to one folder.
#[test]
fn a_run_that_is_at_work_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut child = start(&out, "--ranks 2 --steps 100000");
    until("a step", || !rows(&out).is_empty());
    for word in ["--resume", "--overwrite"] {
        let output = finetune(&out, &format!("--ranks 2 --steps 100000 {word}"));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("another run writes"), "{stderr}");
    }
    let before = rows(&out).len();
    until("it goes on", || rows(&out).len() > before + 2);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// An evaluation in place of a training: of that nothing stays.
#[test]
fn an_evaluation_overwrites_a_training() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    said(finetune(&out, "--ranks 2 --steps 1"));
    said(finetune(&out, "--ranks 2 --eval --overwrite"));
    let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["config.toml", "eval.json", "plan.txt"]);
    // A training may begin where only an evaluation is.
    let text = said(finetune(&out, "--ranks 2 --steps 1 --resume"));
    assert!(text.contains("no checkpoint in"), "{text}");
}

/// What cannot be saved is said, and what was reached is not thrown away for it.
#[test]
fn a_run_that_cannot_be_saved_goes_on_to_its_weights_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, out] = ["whole", "out"].map(|name| folder.path().join(name));
    said(finetune(&whole, "--ranks 2 --steps 3"));
    said(finetune(&out, "--ranks 2 --steps 1"));
    // A file where a folder is to be made, or removed.
    let in_the_way = out.join("checkpoints/.step-0000000002.partial");
    fs::write(&in_the_way, "").unwrap();
    let output = finetune(&out, "--ranks 2 --steps 3 --save-every 1 --resume");
    let [text, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(output.status.code(), Some(1), "{stderr}{text}");
    assert!(text.contains("NO checkpoint after step 2: ") && text.contains("NO checkpoint after step 3: "), "{text}");
    assert!(stderr.starts_with("error: checkpoint not saved: "), "{stderr}");
    assert_eq!(rows(&out), rows(&whole));
    assert!(weights(&out) == weights(&whole));
    assert_eq!(checkpoints(&out), ["step-0000000001"]);
    fs::remove_file(in_the_way).unwrap();
    said(finetune(&out, "--ranks 2 --steps 3 --resume"));
    assert_eq!(rows(&out), rows(&whole));
    assert_eq!(checkpoints(&out), ["step-0000000001", "step-0000000003"]);
}

/// What is not a run's is never removed.
#[test]
fn what_no_run_wrote_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    said(finetune(&out, "--ranks 2 --steps 1"));
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let before = contents(&out);
    let output = finetune(&out, "--ranks 2 --steps 1 --overwrite");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("notes.txt"), "{stderr}");
    assert!(contents(&out) == before);
    // Beside a run that goes on it may lie.
    said(finetune(&out, "--ranks 2 --steps 2 --resume"));

    fs::create_dir(folder.path().join("other")).unwrap();
    fs::write(folder.path().join("other/plan.txt"), "my plan\n").unwrap();
    for word in ["", "--resume", "--overwrite"] {
        let output = finetune(&folder.path().join("other"), &format!("--ranks 2 --steps 1 {word}"));
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(contents(&folder.path().join("other")).len(), 1);
    }
    // What is read is not removed first.
    let model = out.join("model").display().to_string();
    fs::remove_file(out.join("notes.txt")).unwrap();
    let output = finetune(&out, &format!("--model {model} --overwrite"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("what is read would be removed") && out.join("model/model.safetensors").exists(),
        "{stderr}"
    );
}

#[test]
fn what_no_run_has_written_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    said(finetune(&out, "--ranks 2 --steps 1"));
    for name in ["model/README.md", "model/notes/n", "checkpoints/mine.txt", "checkpoints/best/x", "save-now/x"] {
        let path = out.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "mine").unwrap();
        let output = finetune(&out, "--ranks 2 --steps 1 --overwrite");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {stderr}");
        assert!(stderr.contains("which no run has written"), "{stderr}");
        assert!(path.exists(), "{name} has gone");
        let known = ["model", "checkpoints"].map(|known| out.join(known));
        match path.parent().filter(|parent| **parent != known[0] && **parent != known[1]) {
            Some(parent) => fs::remove_dir_all(parent).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
    }
    said(finetune(&out, "--ranks 2 --steps 1 --overwrite"));
}

/// A run that died before its plan was written leaves its lock, and half a file.
#[rstest]
#[case("")]
#[case("--resume")]
#[case("--overwrite")]
fn a_run_that_died_at_birth_is_begun_again(#[case] word: &str) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    fs::create_dir_all(out.join("checkpoints")).unwrap();
    fs::write(out.join("checkpoints/.lock"), "").unwrap();
    fs::write(out.join("plan.txt.partial"), "model").unwrap();
    said(finetune(&out, &format!("--ranks 2 --steps 1 {word}")));
    assert!(out.join("model/model.safetensors").is_file());
}

#[test]
fn checkpoints_may_lie_behind_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (out, large) = (folder.path().join("run"), folder.path().join("large"));
    said(finetune(&out, "--ranks 2 --steps 1"));
    fs::rename(out.join("checkpoints"), &large).unwrap();
    std::os::unix::fs::symlink(&large, out.join("checkpoints")).unwrap();
    said(finetune(&out, "--ranks 2 --steps 2 --save-every 1 --overwrite"));
    said(finetune(&out, "--ranks 2 --steps 3 --resume"));
    assert!(out.join("checkpoints").is_symlink());
    assert!(large.join("step-0000000003").is_dir());
}

#[test]
fn another_config_of_the_model_is_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let (out, model) = (folder.path().join("run"), folder.path().join("model"));
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(INPUT.path().join("model")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let args = |rest: &str| format!("--model {} --ranks 2 {rest}", model.display());
    said(finetune(&out, &args("--steps 1")));
    let config = model.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"rms_norm_eps\":", "\"rms_norm_eps\": 0.125, \"was\":")).unwrap();
    let output = finetune(&out, &args("--steps 2 --resume"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("rms_norm_eps was") && stderr.contains("now 0.125"), "{stderr}");
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
