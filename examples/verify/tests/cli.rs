//! The program as it is called: its exit status, its lines, and the JSON object at the end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use llama::device::Runtime;
use rstest::rstest;
use serde_json::Value;

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference")
}

fn verify(folder: &Path, args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_verify")).arg(folder).args(args.split_whitespace()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_str(text(&output.stdout).lines().last().expect("a last line")).unwrap()
}

/// A folder with copies of some attention cases.
fn cases(names: &[&str]) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for name in names {
        let name = format!("{name}.safetensors");
        fs::copy(reference().join("attention").join(&name), copy.path().join(&name)).unwrap();
    }
    copy
}

#[rstest]
#[case("--attention single")]
#[case("--attention single --ranks 3 --checkpoint --tile 11")]
#[case("--attention ulysses --ranks 3")]
#[case("--ranks 1")]
#[case("--ranks 2 --heads-per-stage 4 --tile 40")]
#[case("--ranks 3 --heads-per-stage 5 --checkpoint")]
#[case("--checkpoint --tile 7")]
#[case("--ranks 9")]
fn models_pass_on_any_number_of_ranks(#[case] args: &str) {
    let output = verify(&reference().join("models"), args);
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    let json = json(&output);
    assert_eq!((&json["cases"], &json["passed"], &json["unsupported"]), (&2.into(), &2.into(), &0.into()));
    for (kind, limit) in
        [("model.loss", 1e-5), ("model.logits", 2e-5), ("model.gradient", 2e-5), ("model.loss_curve", 1e-3)]
    {
        assert!(json["worst"][kind].as_f64().unwrap() <= limit, "{json}");
    }
}

#[rstest]
#[case("--attention single")]
#[case("--attention ulysses --ranks 2")]
#[case("--attention ulysses --ranks 7")]
#[case("--ranks 2 --heads-per-stage 2")]
#[case("--ranks 4")]
#[case("--ranks 30")]
fn attention_cases_pass_and_cross_lengths_are_among_them(#[case] args: &str) {
    let folder = cases(&[
        "full",
        "causal_gqa",
        "causal_mqa_d64",
        "causal_q_block",
        "causal_block_all_masked_rows",
        "large_scores",
        "window",
        "documents",
        "softcap",
    ]);
    let output = verify(folder.path(), args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    let json = json(&output);
    assert_eq!(json["passed"], 9);
    assert!(json["worst"]["attention.out"].as_f64().unwrap() <= 2e-5);
    assert!(json["worst"]["attention.gradient"].as_f64().is_some());
    assert_eq!(json["worst"]["attention.lse"].is_null(), !args.contains("single"));
}

#[test]
fn options_that_are_not_built_are_named_counted_and_fail_the_run() {
    let folder = cases(&["causal"]);
    // In place of an option's name one that nobody knows; the header keeps its length.
    let bytes = fs::read(reference().join("attention/softcap.safetensors")).unwrap();
    let at = bytes.windows(7).position(|part| part == b"softcap").unwrap();
    let mut other = bytes;
    other[at..at + 7].copy_from_slice(b"alibi_m");
    fs::write(folder.path().join("alibi.safetensors"), other).unwrap();
    let output = verify(folder.path(), "--attention single");
    assert_eq!(output.status.code(), Some(1));
    let json = json(&output);
    assert_eq!((&json["cases"], &json["passed"], &json["unsupported"]), (&2.into(), &1.into(), &1.into()));
    let lines = text(&output.stdout);
    assert!(lines.lines().any(|line| line.starts_with("unsupported") && line.contains("alibi_m 5.0")), "{lines}");
}

/// Changes one byte of the file, `from_end` bytes before its end.
fn flip(path: &Path, from_end: usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - from_end;
    bytes[at] ^= 0x40;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_wrong_reference_fails() {
    let folder = cases(&["causal", "full"]);
    flip(&folder.path().join("full.safetensors"), 1); // the exponent of the last element of the last tensor, v
    let output = verify(folder.path(), "--attention single");
    assert_eq!(output.status.code(), Some(1));
    let lines = text(&output.stdout);
    assert!(lines.lines().any(|line| line.starts_with("FAIL") && line.contains("full.safetensors")), "{lines}");
    assert!(lines.lines().any(|line| line.starts_with("ok") && line.contains("causal.safetensors")), "{lines}");
    assert_eq!(json(&output)["passed"], 1);
}

#[test]
fn a_model_with_other_weights_fails() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "reference.safetensors"] {
        fs::copy(reference().join("models/llama").join(name), folder.path().join(name)).unwrap();
    }
    flip(&folder.path().join("model.safetensors"), 1);
    let output = verify(folder.path(), "--ranks 2");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("FAIL"));

    fs::write(folder.path().join("config.json"), "{").unwrap();
    let output = verify(folder.path(), "--ranks 2");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("not JSON"), "{}", text(&output.stdout));
}

#[test]
fn a_damaged_file_fails_and_does_not_stop_the_others() {
    let folder = cases(&["causal", "full"]);
    let path = folder.path().join("causal.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    fs::write(folder.path().join("garbage.safetensors"), "garbage").unwrap();
    let output = verify(folder.path(), "--attention single");
    assert_eq!(output.status.code(), Some(1));
    let json = json(&output);
    assert_eq!((&json["cases"], &json["passed"]), (&3.into(), &1.into()));
}

#[cfg(unix)]
#[test]
fn a_pipe_among_the_cases_fails_and_is_not_waited_for() {
    let folder = cases(&["full"]);
    let made = Command::new("mkfifo").arg(folder.path().join("pipe.safetensors")).status().unwrap();
    assert!(made.success());
    let output = verify(folder.path(), "--attention single");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("pipe.safetensors: not a file"), "{}", text(&output.stdout));
    assert_eq!(json(&output)["passed"], 1);
}

#[test]
fn heads_per_stage_that_a_case_does_not_have_fail_that_case() {
    let folder = cases(&["causal_gqa", "scaled"]); // 8 and 2 query heads
    let output = verify(folder.path(), "--ranks 2 --heads-per-stage 8");
    assert_eq!(output.status.code(), Some(1));
    let lines = text(&output.stdout);
    assert!(lines.lines().any(|line| line.starts_with("FAIL") && line.contains("8 heads a stage of 2")), "{lines}");
    assert_eq!(json(&output)["passed"], 1);
}

#[rstest]
#[case("", "--ranks 0", "0 is not in 1..=1024")]
#[case("", "--ranks many", "invalid value 'many'")]
#[case("", "--attention flash", "single, ulysses, upipe")]
#[case("", "--tile 0", "0 is not in 1..")]
#[case("", "--attention single --heads-per-stage 2", "leave one of them out")]
#[case("", "--device vulcan", "did you mean vulkan?")]
#[case("", "--device flex,flex", "flex is listed twice")]
#[case(
    "",
    "--device cuda:0,cuda:1 --ranks 1",
    "--device cuda:0,cuda:1 for 1 ranks: use at most as many devices as ranks"
)]
#[case("nowhere", "", "give a readable folder")]
#[case("attention/causal.safetensors", "", "give a readable folder")]
fn a_request_that_makes_no_sense_exits_2_with_the_remedy(
    #[case] folder: &str,
    #[case] args: &str,
    #[case] remedy: &str,
) {
    let output = verify(&reference().join(folder), args);
    assert_eq!(output.status.code(), Some(2));
    let complaint = text(&output.stderr);
    let first = complaint.lines().next().unwrap_or_default();
    assert!(first.contains(remedy), "{complaint}");
    assert!(first.starts_with("error: "), "{complaint}");
}

/// Not compiled in, or not to be started on this machine; where it starts there is a folder to complain about.
#[test]
fn a_device_that_cannot_be_had_exits_2_with_what_is_missing() {
    for runtime in Runtime::ALL {
        let output = verify(&reference().join("nowhere"), &format!("--device {runtime}"));
        let complaint = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        let first = complaint.lines().next().unwrap_or_default();
        let expected = match runtime.is_compiled_in() {
            false => format!("error: --device: {runtime} is not compiled in: build with --features {runtime}"),
            true if first.contains("does not start") => runtime.needs().to_owned(),
            true => "give a readable folder".to_owned(),
        };
        assert!(first.contains(&expected) && !complaint.contains("panicked"), "{runtime}: {complaint}");
    }
}

#[test]
fn flex_is_what_runs_without_a_device() {
    let folder = cases(&["causal", "full"]);
    let [with, without] = ["--device flex", ""].map(|device| verify(folder.path(), &format!("--ranks 2 {device}")));
    assert_eq!(text(&with.stdout), text(&without.stdout));
    assert!(text(&with.stdout).lines().next().unwrap().contains("on flex"));
}

#[test]
fn a_folder_without_cases_does_not_pass() {
    let empty = tempfile::tempdir().unwrap();
    let output = verify(empty.path(), "");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(json(&output)["cases"], 0);
    assert!(text(&output.stderr).contains("no reference case found"));
}
