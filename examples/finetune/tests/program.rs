//! The program as it is called: exit status, first line of complaint, and what it writes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use burn::tensor::Device;
use llama::{Llama, LlamaConfig, ParallelConfig, load};
use rstest::rstest;

fn finetune(folder: &Path, args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_finetune")).current_dir(folder).args(args.split_whitespace()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

const SMALL: &str = "--seq-len 64 --steps 2 --ranks 2";

#[rstest]
#[case("--data nowhere", "--data nowhere: ", "give text files")]
#[case("--data empty", "--data empty: no text file in it", "name files")]
#[case("--data short.txt", "5 bytes of text are less than a sequence of 64", "--seq-len 5 or less")]
#[case("--model nowhere", "nowhere/config.json: ", "give a Hugging Face model folder")]
#[case("--model tiny", "--model tiny: a vocabulary of 100 is not byte-level", "use a model with at least 256")]
#[case("--model torn", "torn/model.safetensors: ", "download or save it again")]
#[case("--out full", "--out full: the folder is not empty", "give a new or empty folder")]
#[case("--out short.txt", "--out short.txt: a file, not a folder", "give a new or empty folder")]
#[case("--out short.txt/below", "--out short.txt/below: ", "give a new or empty folder")]
#[case("--attention single", "--attention single with --ranks 2", "leave --ranks out")]
#[case("--attention ulysses --heads-per-stage 2", "--heads-per-stage without --attention upipe", "leave one")]
#[case("--heads-per-stage 9", "--heads-per-stage 9 of 8 query heads", "use 1 to 8")]
#[case("--clip 0", "invalid value '0' for '--clip", "give a number above 0, or none")]
#[case("--lr inf", "invalid value 'inf' for '--lr", "give a number above 0")]
#[case("--mlp-tile -2", "invalid value '-2' for '--mlp-tile", "from 1, auto or off")]
#[case("--checkpoint maybe", "invalid value 'maybe' for '--checkpoint", "on, off")]
fn a_request_that_cannot_be_served_ends_with_2_and_writes_nothing(
    #[case] args: &str,
    #[case] fault: &str,
    #[case] remedy: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for name in ["empty", "full"] {
        fs::create_dir(path(name)).unwrap();
    }
    fs::write(path("short.txt"), "short").unwrap();
    fs::write(path("full/file"), "").unwrap();
    for (name, vocabulary) in [("tiny", 100), ("torn", 256)] {
        let config = LlamaConfig::new(vocabulary, 8, 8, 1, 2, 1);
        Llama::init(&config, &ParallelConfig::none(), &Device::flex()).unwrap().save(&path(name)).unwrap();
    }
    let weights = fs::read(path("torn/model.safetensors")).unwrap();
    fs::write(path("torn/model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let before = listing(folder.path());

    let output = finetune(folder.path(), &format!("{SMALL} {args}"));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let stderr = stderr(&output);
    let first = stderr.lines().next().unwrap();
    assert!(first.starts_with("error: ") && first.contains(fault) && first.contains(remedy), "{first}");
    assert_eq!(listing(folder.path()), before);
}

fn listing(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_run_has_its_own_folder_with_plan_metrics_and_weights() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let output = finetune(folder.path(), SMALL);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    assert_eq!(listing(&folder.path().join("runs")), ["0001", "0002"]);
    for run in ["runs/0001", "runs/0002"] {
        let run = folder.path().join(run);
        assert_eq!(listing(&run), ["metrics.csv", "model", "plan.txt"]);
        assert!(fs::read_to_string(run.join("plan.txt")).unwrap().contains("32 tokens a rank"));
        let (model, _) = load(&run.join("model"), &ParallelConfig::none(), &Device::flex()).unwrap();
        assert_eq!(model.config().vocab_size, 256);

        let metrics = fs::read_to_string(run.join("metrics.csv")).unwrap();
        let rows: Vec<Vec<&str>> = metrics.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(rows[0], ["step", "loss", "grad_norm", "lr", "tokens_per_s", "peak_bytes"]);
        assert_eq!(rows.len(), 3);
        for (row, step) in rows[1..].iter().zip(["1", "2"]) {
            assert_eq!((row[0], row[3]), (step, "0.003"));
            let number = |column: usize| row[column].parse::<f64>().unwrap();
            assert!(number(1) > 3.0 && number(1) < 6.0 && number(2) > 0.0 && number(4) > 0.0, "{row:?}");
            // Weights, gradients and two moments of 771200 parameters on two ranks are far more than this.
            assert!(number(5) > 8e6, "{row:?}");
        }
    }
}

/// The columns that do not depend on the clock.
fn losses(metrics: &Path) -> Vec<[f64; 2]> {
    let text = fs::read_to_string(metrics).unwrap();
    text.lines()
        .skip(1)
        .map(|line| {
            let mut row = line.split(',').skip(1).map(|value| value.parse().unwrap());
            [row.next().unwrap(), row.next().unwrap()]
        })
        .collect()
}

#[test]
fn a_model_from_scratch_is_the_seeds_whatever_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, args: &str| {
        let output = finetune(folder.path(), &format!("--seq-len 64 --steps 1 --out {name} {args}"));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        losses(&folder.path().join(name).join("metrics.csv"))[0]
    };
    let expected = run("one", "--seed 7 --attention single");
    for ranks in [2, 3] {
        let found = run(&format!("on{ranks}"), &format!("--seed 7 --ranks {ranks}"));
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() <= 1e-5 * b, "{ranks} ranks: {found:?}, on one {expected:?}");
        }
    }
    let other = run("other", "--seed 8 --attention single");
    assert!((other[1] - expected[1]).abs() > 1e-3, "{other:?} {expected:?}");
}

#[test]
fn the_same_run_twice_has_the_same_losses_to_the_last_digit() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        let output = finetune(folder.path(), &format!("--seq-len 96 --steps 3 --ranks 3 --out {name}"));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    let [a, b] = ["a", "b"].map(|name| losses(&folder.path().join(name).join("metrics.csv")));
    assert_eq!(a, b);
}

#[test]
fn a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_good_weights() {
    let folder = tempfile::tempdir().unwrap();
    let output = finetune(folder.path(), "--seq-len 64 --steps 9 --ranks 2 --lr 1e30 --clip none --out out");
    assert_eq!(output.status.code(), Some(1));
    let stderr = stderr(&output);
    let first = stderr.lines().next().unwrap();
    assert!(first.starts_with("error: step 2: loss NaN") && first.contains("lower --lr"), "{first}");
    assert_eq!(losses(&folder.path().join("out/metrics.csv")).len(), 1, "the step that was not taken has no row");

    // Those before the step that broke it: they can be evaluated.
    let output = finetune(folder.path(), "--seq-len 64 --steps 1 --model out/model --out again");
    assert_eq!(output.status.code(), Some(0), "{}", self::stderr(&output));
    let first = |name: &str| losses(&folder.path().join(name).join("metrics.csv"))[0];
    assert!((first("again")[0] - first("out")[0]).abs() < 1e-5);
}

#[test]
fn help_says_what_is_not_built() {
    let output = finetune(Path::new("."), "--help");
    assert_eq!(output.status.code(), Some(0));
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("Tokenizers (tokenizer.json), JSONL, schedules and resuming come later")
    );
}
