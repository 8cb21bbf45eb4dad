//! Every reference case under every scheme, rank count and stage width, with and without checkpointing and tiling.

use std::path::{Path, PathBuf};
use std::process::Command;

use rstest::rstest;

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference")
}

/// A folder with the cases that have at least `heads` query heads.
fn cases(heads: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let attention = [
        ("full", 4),
        ("causal", 4),
        ("causal_gqa", 8),
        ("causal_mqa_d64", 4),
        ("causal_q_block", 4),
        ("causal_block_all_masked_rows", 2),
        ("scaled", 2),
        ("large_scores", 2),
        ("window", 4),
        ("documents", 4),
        ("softcap", 2),
    ];
    for (name, _) in attention.iter().filter(|(_, has)| *has >= heads) {
        let file = format!("{name}.safetensors");
        std::fs::copy(reference().join("attention").join(&file), folder.path().join(&file)).expect("copied");
    }
    for model in ["llama", "llama_scaled_tied"] {
        let (from, to) = (reference().join("models").join(model), folder.path().join(model));
        std::fs::create_dir(&to).expect("created");
        for file in std::fs::read_dir(from).expect("the reference models") {
            let file = file.expect("an entry").path();
            std::fs::copy(&file, to.join(file.file_name().expect("a name"))).expect("copied");
        }
    }
    folder
}

fn passes(folder: &Path, arguments: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_verify")).arg(folder).args(arguments).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap_or_default()).expect("a JSON line");
    assert!(output.status.success(), "{arguments:?}:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(last["cases"].as_u64() >= Some(3) && last["passed"] == last["cases"], "{arguments:?}: {last}");
}

#[rstest]
fn all_cases_pass(
    #[values("1", "2", "3", "4", "8")] ranks: &str,
    #[values(&[], &["--checkpoint"], &["--tile", "17"], &["--checkpoint", "--tile", "40"])] techniques: &[&str],
) {
    let all = cases(1);
    if ranks == "1" {
        passes(all.path(), &[&["--attention", "single"], techniques].concat());
    }
    passes(all.path(), &[&["--attention", "ulysses", "--ranks", ranks], techniques].concat());
    for (heads, widths) in [(2, ["1", "2"].as_slice()), (4, &["3", "4"]), (8, &["5", "6", "7", "8"])] {
        let folder = cases(heads);
        for width in widths {
            let scheme = ["--attention", "upipe", "--ranks", ranks, "--heads-per-stage", width];
            passes(folder.path(), &[&scheme, techniques].concat());
        }
    }
}

/// Models of every family, rotary scaling and layout of configuration: windows, biases, norms on heads, one key/value head, shards.
#[rstest]
fn every_family_passes(
    #[values("1", "2", "3", "4")] ranks: &str,
    #[values(&[], &["--checkpoint", "--tile", "40"])] techniques: &[&str],
) {
    let families = reference().join("families");
    if ranks == "1" {
        passes(&families, &[&["--attention", "single"], techniques].concat());
    }
    passes(&families, &[&["--attention", "ulysses", "--ranks", ranks], techniques].concat());
    passes(&families, &[&["--attention", "upipe", "--ranks", ranks], techniques].concat());
    // The fewest heads are four.
    for width in ["1", "2", "3", "4"] {
        let scheme = ["--attention", "upipe", "--ranks", ranks, "--heads-per-stage", width];
        passes(&families, &[&scheme, techniques].concat());
    }
}
