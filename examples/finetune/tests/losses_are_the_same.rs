//! Ranks, schemes, tiles and checkpoints change memory and time only: losses and gradient norms are those of one device.

mod common;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use finetune::{Args, StepMetrics, Voice, run};
use rstest::rstest;

/// A folder with a small model and a text, made once: all runs start from the same weights.
static INPUT: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    common::byte_model(&folder.path().join("model"));
    let text: String = (0..400).map(|i| format!("let x{i} = {};\n", i * i % 97)).collect();
    std::fs::write(folder.path().join("text.rs"), text).unwrap();
    folder
});

fn train(args: &str, out: &Path) -> Vec<StepMetrics> {
    let path = |name: &str| INPUT.path().join(name).display().to_string();
    let common =
        ["finetune", "--model", &path("model"), "--data", &path("text.rs"), "--out", &out.display().to_string()]
            .map(str::to_owned);
    let bytes = ["--tokens", "bytes"].map(str::to_owned);
    let args = common.into_iter().chain(bytes).chain(args.split_whitespace().map(str::to_owned));
    run(&Args::read(args).unwrap(), &Voice::default()).unwrap().steps
}

const PLAIN: &str = "--attention single --checkpoint off --mlp-tile off --norm-tile off --loss-tile off";

static ONE_DEVICE: LazyLock<Vec<StepMetrics>> = LazyLock::new(|| {
    let out = tempfile::tempdir().unwrap();
    train(&format!("{PLAIN} --seq-len 101 --steps 3 --lr 1e-3 --clip 1.0"), out.path())
});

#[rstest]
#[case("--attention single")]
#[case("")]
#[case("--ranks 1")]
#[case("--ranks 2 --heads-per-stage 3 --mlp-tile 7 --norm-tile 11 --loss-tile 13")]
#[case("--ranks 3 --heads-per-stage 1 --checkpoint off")]
#[case("--blocks-per-checkpoint 2")]
#[case("--blocks-per-checkpoint 4 --ranks 2 --fsdp")]
#[case("--ranks 5 --mlp-tile off --loss-tile 1")]
#[case("--attention ulysses --ranks 2")]
#[case("--attention ulysses --ranks 3 --checkpoint off --mlp-tile off --norm-tile off --loss-tile off")]
#[case("--attention ulysses --ranks 7 --norm-tile off")]
#[case("--data-order file --sequences 3 --ranks 2")]
fn losses_and_norms_are_those_of_one_device(#[case] args: &str) {
    let out = tempfile::tempdir().unwrap();
    let steps = train(&format!("{args} --seq-len 101 --steps 3 --lr 1e-3 --clip 1.0"), out.path());
    assert_eq!(steps.len(), 3);
    for (step, expected) in steps.iter().zip(&*ONE_DEVICE) {
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
        assert!(
            close(step.loss, expected.loss) && close(step.grad_norm, expected.grad_norm),
            "{args}: {step:?}, on one device {expected:?}"
        );
    }
}

/// Where block inputs wait is nobody's business but the memory's: not one bit of a loss or a norm differs.
#[rstest]
#[case("", "--offload host")]
#[case("", "--offload host --offload-every 2 --offload-in-flight 1")]
#[case("", "--offload disk --offload-budget 20KiB")]
#[case("", "--offload host --offload-host-budget 30000 --offload-in-flight 3")]
#[case("--batch 2 --accumulate 2 --attention ulysses", "--offload host --offload-host-budget 0 --offload-dir .")]
#[case("--attention single --dtype bf16", "--offload host")]
#[case("--mesh data=2,ulysses=2 --fsdp --batch 2", "--offload host")]
#[case("--fsdp --dtype bf16 --blocks-per-checkpoint 3", "--offload disk --offload-disk-budget 40000")]
fn offload_changes_no_bit(#[case] args: &str, #[case] offload: &str) {
    let run = |offload: &str| {
        let out = tempfile::tempdir().unwrap();
        let steps = train(&format!("{args} {offload} --seq-len 101 --steps 3 --lr 1e-3"), out.path());
        steps.into_iter().map(|step| (step.loss, step.grad_norm)).collect::<Vec<_>>()
    };
    assert_eq!(run(offload), run(""));
}

/// Compute in bf16 is near, with master weights that learn as those of f32 do.
#[rstest]
#[case("--attention single")]
#[case("--ranks 2")]
#[case("--ranks 3 --batch 2")]
fn bf16_stays_near_f32(#[case] args: &str) {
    let run = |dtype: &str| {
        let out = tempfile::tempdir().unwrap();
        train(&format!("{args} --seq-len 101 --steps 3 --lr 1e-3 --dtype {dtype}"), out.path())
    };
    let (found, expected) = (run("bf16"), run("f32"));
    assert!(found[0].loss != expected[0].loss, "bf16 is at work");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found.loss - expected.loss).abs() <= 0.01 * expected.loss, "{args}: {found:?}, in f32 {expected:?}");
    }
}

/// What the comparison above rests on: the steps do something, and clipping is at work.
#[test]
fn one_device_learns_and_clips() {
    let [first, .., last] = &ONE_DEVICE[..] else { panic!("three steps") };
    assert!(last.loss < first.loss - 0.01, "{first:?} {last:?}");
    assert!(first.grad_norm > 1.0, "{first:?}");
}

/// Weights that were saved from ranks are the trained ones, and load on one device.
#[test]
fn saved_weights_go_on_where_training_ended() {
    let (out, again): (tempfile::TempDir, PathBuf) = (tempfile::tempdir().unwrap(), PathBuf::from("model"));
    let whole = train("--ranks 3 --seq-len 50 --steps 1 --lr 1e-2", &out.path().join("a"));
    let folder = out.path().join("a").join(again);
    let text = INPUT.path().join("text.rs");
    let args = [
        "finetune",
        "--tokens",
        "bytes",
        "--attention",
        "single",
        "--seq-len",
        "50",
        "--steps",
        "1",
        "--model",
        &folder.display().to_string(),
        "--data",
        &text.display().to_string(),
        "--out",
        &out.path().join("b").display().to_string(),
    ];
    // The same first sequence, after one step on it.
    let after = run(&Args::read(args).unwrap(), &Voice::default()).unwrap().steps[0].loss;
    assert!(after < whole[0].loss - 0.05, "{} {after}", whole[0].loss);
}
