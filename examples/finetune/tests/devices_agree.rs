//! A run on the CubeCL device that this build was made for is the run on Flex: the same losses, with every technique.
#![cfg(any(feature = "cpu", feature = "wgpu"))]

mod common;

use std::path::Path;
use std::sync::LazyLock;

use common::{UNEVEN, data, documents, drawn};
use finetune::{Args, Summary, Voice, run};
use llama::LlamaConfig;
use rstest::rstest;

const DEVICE: &str = if cfg!(feature = "cpu") { "cpu" } else { "wgpu" };

static INPUT: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = data(documents(&UNEVEN));
    drawn(&LlamaConfig::new(257, 24, 40, 2, 4, 2)).save(&folder.path().join("model")).unwrap();
    folder
});

fn finetune(out: &Path, args: &str) -> Summary {
    let [data, model] = ["data.jsonl", "model"].map(|name| INPUT.path().join(name).display().to_string());
    let out = out.display().to_string();
    let words = ["finetune", "--tokens", "bytes", "--data", &data, "--out", &out, "--seq-len", "16"].map(str::to_owned);
    let args = args.split_whitespace().map(|word| if word == "MODEL" { model.clone() } else { word.to_owned() });
    run(&Args::read(words.into_iter().chain(args)).unwrap(), &Voice::default()).unwrap()
}

/// Blocks are recomputed and everything is in tiles, unless it says `off`.
#[rstest]
#[case::one_rank("--model MODEL --attention single")]
#[case::plain(
    "--model MODEL --ranks 2 --attention ulysses --checkpoint off --mlp-tile off --norm-tile off --loss-tile off"
)]
#[case::all("--model MODEL --ranks 2 --attention upipe --heads-per-stage 2 --fsdp --offload host")]
#[case::all_to_disk("--seed 4 --mesh data=2,ulysses=2 --batch 2 --fsdp --offload disk --offload-in-flight 1")]
fn losses_are_those_on_flex(#[case] args: &str) {
    let folder = tempfile::tempdir().unwrap();
    let common = format!("{args} --steps 4 --lr 1e-3 --clip 1.0");
    let [expected, found] =
        ["flex", DEVICE].map(|device| finetune(&folder.path().join(device), &format!("{common} --device {device}")));
    assert_eq!(found.steps.len(), 4);
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        let (loss, norm) = (found.loss - expected.loss, found.grad_norm - expected.grad_norm);
        assert!(loss.abs() <= 1e-4, "{args}: {found:?}, on Flex {expected:?}");
        assert!(norm.abs() <= 1e-3 * expected.grad_norm, "{args}: {found:?}, on Flex {expected:?}");
    }
    assert!(found.steps[3].loss < found.steps[0].loss, "nothing was learned");
}

/// Of a device with pools, they are what a profile reads: never less than the parameters that both ranks hold.
#[test]
fn a_profile_tells_what_the_pools_hold() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile");
    let args = format!("--model MODEL --ranks 2 --steps 2 --device {DEVICE} --profile-steps 2 --profile");
    finetune(&folder.path().join("run"), &format!("{args} {}", profile.display()));
    let told = std::fs::read_to_string(profile.join("profile.txt")).unwrap();
    assert!(told.contains("memory: memory pools of the device"), "{told}");
    let weights = std::fs::metadata(INPUT.path().join("model/model.safetensors")).unwrap().len() as f64;
    // step, runs, time and its unit, share and its unit, peak and its unit.
    let step: Vec<_> = told.lines().find(|line| line.starts_with(" step ")).unwrap().split_whitespace().collect();
    let unit = ["B", "KiB", "MiB"].iter().position(|unit| *unit == step[7]).unwrap();
    let peak = step[6].parse::<f64>().unwrap() * 1024f64.powi(unit as i32);
    assert!(peak >= 2.0 * weights, "{peak} bytes held, two ranks' weights are {weights} each: {told}");
}

/// A checkpoint of one device goes on, on another.
#[test]
fn a_run_goes_on_on_another_device() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |name: &str, args: &str| -> Vec<f64> {
        let args = format!("--model MODEL --ranks 2 --lr 1e-3 {args}");
        finetune(&folder.path().join(name), &args).steps.iter().map(|step| step.loss).collect()
    };
    let expected = losses("whole", "--steps 5 --device flex");
    losses("parts", &format!("--steps 3 --device {DEVICE}"));
    let rest = losses("parts", "--steps 5 --device flex --resume");
    assert_eq!(rest.len(), 5);
    for (found, expected) in rest.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-4, "{rest:?}, at once {expected:?}");
    }
}
