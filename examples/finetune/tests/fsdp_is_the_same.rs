//! Shards change who holds what, not what is computed: losses, saved weights and evaluations are those without --fsdp.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::LazyLock;

use burn::tensor::{DType, Device};
use burn_context_parallel::fsdp::whole_shapes;
use common::{UNEVEN, data, documents, drawn};
use finetune::{Args, Summary, Voice, run};
use llama::{FolderWeights, Llama, LlamaConfig, ParallelConfig};
use rstest::rstest;

/// Models, made once (one of them with tied embeddings), and seven sequences of 16 bytes of unequal targets.
static INPUT: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = data(documents(&UNEVEN));
    let config = LlamaConfig::new(257, 24, 40, 2, 4, 2);
    drawn(&config).save(&folder.path().join("model")).unwrap();
    drawn(&LlamaConfig { tie_word_embeddings: true, ..config }).save(&folder.path().join("tied")).unwrap();
    folder
});

fn finetune(out: &Path, args: &str) -> Summary {
    let data = INPUT.path().join("data.jsonl").display().to_string();
    let out = out.display().to_string();
    let words = ["finetune", "--tokens", "bytes", "--data", &data, "--out", &out, "--seq-len", "16"].map(str::to_owned);
    let args = args.split_whitespace().map(|word| match word {
        "MODEL" | "TIED" => INPUT.path().join(word.to_lowercase()).display().to_string(),
        word => word.to_owned(),
    });
    run(&Args::read(words.into_iter().chain(args)).unwrap(), &Voice::default()).unwrap()
}

/// The largest difference between the weights of two folders.
fn difference(a: &Path, b: &Path) -> f32 {
    let [mut a, mut b] = [a, b].map(|out| {
        let folder = out.join("model");
        let names: Vec<String> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(names.len() >= 2 && !names.iter().any(|name| name.starts_with('.')), "{names:?}");
        (FolderWeights::open(&folder, DType::F32, &Device::flex()).unwrap().0, folder)
    });
    let config = LlamaConfig::read(&a.1.join("config.json")).unwrap();
    assert_eq!(fs::read(a.1.join("config.json")).unwrap(), fs::read(b.1.join("config.json")).unwrap());
    let shapes = whole_shapes(&Llama::undrawn(&config, &ParallelConfig::none(), &Device::flex()).unwrap());
    let mut largest = 0.0f32;
    for (path, shape) in shapes {
        let [a, b] = [&mut a.0, &mut b.0].map(|folder| folder.read(&path, &shape).unwrap());
        largest = a.iter::<f32>().zip(b.iter::<f32>()).map(|(a, b)| (a - b).abs()).fold(largest, f32::max);
    }
    largest
}

/// Steps of five and two sequences in turn: on four replicas some micro-batches are padding.
#[rstest]
#[case("--mesh data=1,ulysses=1", "--model MODEL")]
#[case("--mesh data=2,ulysses=2", "--model MODEL")]
#[case("--mesh data=4 --attention single", "--model MODEL")]
#[case("--mesh data=1,ulysses=4 --checkpoint off --loss-tile off", "--model MODEL")]
#[case("--mesh data=3,ulysses=2", "--model TIED")]
#[case("--mesh data=2,ulysses=2", "--seed 5 --sequences 7")]
fn losses_norms_and_weights_are_those_without_shards(#[case] mesh: &str, #[case] model: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [whole, shards] = ["whole", "shards"].map(|name| folder.path().join(name));
    let common = format!("{model} --batch 1 --accumulate 5 --steps 5 --lr 1e-3 --clip 1.0");
    let expected = finetune(&whole, &format!("{common} --attention single"));
    let found = finetune(&shards, &format!("{common} {mesh} --fsdp"));
    assert_eq!(found.steps.len(), 5);
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        let close = |a: f64, b: f64, relative: f64| (a - b).abs() <= relative * b.abs();
        assert!(
            close(found.loss, expected.loss, 1e-5) && close(found.grad_norm, expected.grad_norm, 1e-4),
            "{mesh}: {found:?}, whole {expected:?}"
        );
    }
    let largest = difference(&shards, &whole);
    assert!(largest <= 1e-4, "{largest}, after steps of 1e-3");
}

/// Rounded as they are gathered, with shards in f32: the same numbers as from a rounded copy.
#[test]
fn bf16_is_that_of_whole_weights() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |name: &str, args: &str| -> Vec<f64> {
        let args = format!("--model MODEL --batch 2 --steps 4 --lr 1e-3 --dtype bf16 --mesh data=2,ulysses=2 {args}");
        finetune(&folder.path().join(name), &args).steps.iter().map(|step| step.loss).collect()
    };
    let (found, expected) = (losses("shards", "--fsdp"), losses("whole", ""));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 2e-3 * expected, "{found} {expected}");
    }
    assert_eq!(found[0], expected[0], "before the first step nothing was summed");
}

#[rstest]
#[case("--mesh data=2,ulysses=2")]
#[case("--mesh data=3 --attention single --batch 2")]
#[case("--ranks 3 --attention ulysses")]
fn an_evaluation_is_that_of_whole_weights(#[case] args: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [expected, found] = ["--attention single", &format!("{args} --fsdp")].map(|args| {
        let out = folder.path().join(args.replace(' ', "_"));
        finetune(&out, &format!("--model MODEL --eval {args}")).evaluation.unwrap()
    });
    assert!((found.loss - expected.loss).abs() <= 1e-6 * expected.loss, "{found:?}, not {expected:?}");
    assert_eq!(found.valid_tokens, expected.valid_tokens);
}

fn program(folder: &Path, args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_finetune")).current_dir(folder).args(args.split_whitespace()).output().unwrap()
}

#[test]
fn a_halt_keeps_the_last_good_shards() {
    let folder = tempfile::tempdir().unwrap();
    let args = "--seq-len 64 --mesh data=2,ulysses=2 --batch 2";
    let output = program(folder.path(), &format!("{args} --fsdp --steps 9 --lr 1e30 --clip none --out out"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let first = stderr.lines().next().unwrap();
    assert!(first.starts_with("error: step 2: loss NaN"), "{first}");
    assert!(first.contains("the initial weights are in out/model"), "{first}");
    for (name, fsdp) in [("fine", ""), ("shards", "--fsdp")] {
        let output = program(folder.path(), &format!("{args} {fsdp} --steps 1 --model out/model --out {name}"));
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let first = |name: &str| -> f64 {
        let text = fs::read_to_string(folder.path().join(name).join("metrics.csv")).unwrap();
        text.lines().nth(1).unwrap().split(',').nth(1).unwrap().parse().unwrap()
    };
    assert!((first("fine") - first("out")).abs() < 1e-5 && (first("shards") - first("out")).abs() < 1e-5);
}

/// The same heap holds all ranks: four whole copies of weights, gradients and moments, or one in shards.
#[test]
fn shards_take_less_memory_than_copies() {
    let folder = tempfile::tempdir().unwrap();
    let peak = |name: &str, args: &str| -> f64 {
        let args = format!("--seq-len 64 --mesh data=4 --batch 4 --steps 3 --attention single --out {name} {args}");
        let output = program(folder.path(), &args);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let text = fs::read_to_string(folder.path().join(name).join("metrics.csv")).unwrap();
        text.lines().last().unwrap().rsplit(',').next().unwrap().parse().unwrap()
    };
    let (copies, shards) = (peak("copies", ""), peak("shards", "--fsdp"));
    // Three of four are gone, of weights and of both moments at any time; how much of the gradients exists at the peak is timing.
    let weights = fs::metadata(folder.path().join("copies/model/model.safetensors")).unwrap().len() as f64;
    assert!(copies - shards > 3.0 * 3.0 * weights, "{shards} with shards, {copies} without, {weights} of weights");
}

/// Weights that cannot be used are known before anything is written.
#[test]
fn damaged_weights_are_refused_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(INPUT.path().join("model").join(name), model.join(name)).unwrap();
    }
    let weights = fs::read(model.join("model.safetensors")).unwrap();
    let run = || {
        let output =
            program(folder.path(), "--model model --tokens bytes --seq-len 64 --steps 1 --ranks 2 --fsdp --out out");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(!folder.path().join("out").exists());
        stderr
    };
    let mut infinite = weights.clone();
    let last = infinite.len() - 4;
    infinite[last..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    fs::write(model.join("model.safetensors"), infinite).unwrap();
    let stderr = run();
    assert!(stderr.contains("has values that are not finite numbers"), "{stderr}");
    fs::write(model.join("model.safetensors"), &weights[..weights.len() - 9]).unwrap();
    let stderr = run();
    assert!(stderr.contains("model.safetensors: ") && stderr.contains("download or save it again"), "{stderr}");
}
