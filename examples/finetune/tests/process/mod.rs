//! The program itself, run as a process that can be killed, on a small model of bytes.

#![allow(dead_code)] // no test file uses all of it

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::common::bytes;

/// A model, made once, and a text of documents of which sequences have unequal targets.
pub static INPUT: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let documents: Vec<String> = (1..60).map(|at| "the lazy dog ".repeat(1 + at * at % 7)).collect();
    bytes(documents.iter().map(String::as_str))
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

pub fn command(out: &Path, args: &str) -> Command {
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

pub fn finetune(out: &Path, args: &str) -> Output {
    command(out, args).output().unwrap()
}

/// What a run that must succeed says.
pub fn said(output: Output) -> String {
    let [said, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(output.status.code(), Some(0), "{stderr}{said}");
    said
}

/// A run whose output nobody reads, so that it may say as much as it likes.
pub fn start(out: &Path, args: &str) -> Child {
    command(out, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Step, loss, norm and rate of every row, as written: the digits are those of the bits.
pub fn rows(out: &Path) -> Vec<String> {
    let text = fs::read_to_string(out.join("metrics.csv")).unwrap_or_default();
    text.lines().skip(1).map(|row| row.split(',').take(4).collect::<Vec<_>>().join(",")).collect()
}

pub fn losses(out: &Path) -> Vec<f64> {
    rows(out).iter().map(|row| row.split(',').nth(1).unwrap().parse().unwrap()).collect()
}

pub fn weights(out: &Path) -> Vec<u8> {
    fs::read(out.join("model/model.safetensors")).unwrap()
}

pub fn checkpoints(out: &Path) -> Vec<String> {
    let entries = fs::read_dir(out.join("checkpoints")).into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    names
}

/// Waits for something that a run will do.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(120), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Anything below `end`, another one in each run of the test.
pub fn any(end: u64) -> u64 {
    u64::from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos()) / 1000 % end
}

pub fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
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

/// Why a run that must be refused is.
pub fn refused(output: Output) -> String {
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    stderr
}
