//! What a run leaves, and what others have put beside it, is kept: nothing is overwritten, mixed up or removed that was not asked for.

#![cfg(unix)]

mod common;
mod process;

use std::fs;
use std::sync::{LazyLock, Mutex, PoisonError};

use process::{INPUT, checkpoints, contents, finetune, refused, rows, said, start, until, weights};
use rstest::rstest;

#[test]
fn a_finished_run_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    said(finetune(&out, "--ranks 2 --steps 3"));
    let before = contents(&out);
    let text = said(finetune(&out, "--ranks 2 --steps 3 --resume"));
    assert!(text.contains("finished") && text.contains("nothing to do"), "{text}");
    assert!(contents(&out) == before);

    // Killed after the weights and before the curve.
    fs::remove_file(out.join("loss.svg")).unwrap();
    said(finetune(&out, "--ranks 2 --steps 3 --resume"));
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
    let stderr = refused(finetune(&out, &format!("--ranks 2 {args}")));
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
    let stderr = refused(finetune(&out, &format!("{args} --resume")));
    assert!(stderr.lines().next().unwrap().contains("moved.jsonl"), "{stderr}");
}

/// Two programs do not write to one folder.
#[test]
fn a_run_that_is_at_work_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut child = start(&out, "--ranks 2 --steps 100000");
    until("a step", || !rows(&out).is_empty());
    for word in ["--resume", "--overwrite"] {
        let stderr = refused(finetune(&out, &format!("--ranks 2 --steps 100000 {word}")));
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
    let stderr = refused(finetune(&out, "--ranks 2 --steps 1 --overwrite"));
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
    let stderr = refused(finetune(&out, &format!("--model {model} --overwrite")));
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
        let stderr = refused(finetune(&out, "--ranks 2 --steps 1 --overwrite"));
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
fn half_a_file_of_somebody_else_is_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("film.partial"), "mine").unwrap();
    for word in ["", "--resume", "--overwrite"] {
        assert!(refused(finetune(&out, &format!("--ranks 2 --steps 1 {word}"))).contains("not empty"));
    }
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
    let stderr = refused(finetune(&out, &args("--steps 2 --resume")));
    assert!(stderr.contains("rms_norm_eps was") && stderr.contains("now 0.125"), "{stderr}");
}
