//! The program as it is called: exit status, first line of complaint, and what it writes.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use burn::tensor::Device;
use llama::{LlamaConfig, ParallelConfig, load};

fn finetune(folder: &Path, args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_finetune")).current_dir(folder).args(args.split_whitespace()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

const SMALL: &str = "--seq-len 64 --steps 2 --ranks 2";

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
        assert_eq!(listing(&run), ["checkpoints", "config.toml", "loss.svg", "metrics.csv", "model", "plan.txt"]);
        assert_eq!(
            listing(&run.join("model")),
            ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        );
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

/// The device that is taken without being asked for.
#[test]
fn flex_is_what_runs_without_a_device() {
    let folder = tempfile::tempdir().unwrap();
    for (name, device) in [("a", ""), ("b", "--device flex"), ("c", "--config device.toml")] {
        fs::write(folder.path().join("device.toml"), "device = \"flex\"\n").unwrap();
        let output = finetune(folder.path(), &format!("{SMALL} --out {name} {device}"));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    let read = |name: &str, file: &str| fs::read_to_string(folder.path().join(name).join(file)).unwrap();
    for name in ["b", "c"] {
        assert_eq!(losses(&folder.path().join(name).join("metrics.csv")), losses(&folder.path().join("a/metrics.csv")));
        assert_eq!(read(name, "config.toml"), read("a", "config.toml"));
    }
    assert!(read("a", "config.toml").contains("\ndevice = \"flex\"\n"));
    assert!(
        read("a", "plan.txt").contains("\ndevice       flex, Burn's own backend for processors: all ranks share it\n")
    );
}

#[test]
fn a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_good_weights() {
    let folder = tempfile::tempdir().unwrap();
    let output = finetune(folder.path(), "--seq-len 64 --steps 9 --ranks 2 --lr 1e30 --clip none --out out");
    assert_eq!(output.status.code(), Some(1));
    let stderr = stderr(&output);
    let first = stderr.lines().next().unwrap();
    assert!(first.starts_with("error: step 2: loss NaN") && first.contains("lower --lr"), "{first}");
    assert!(first.contains("the initial weights are in out/model"), "{first}");
    assert_eq!(losses(&folder.path().join("out/metrics.csv")).len(), 1, "the step that was not taken has no row");

    // Those before the step that broke it: they can be evaluated.
    let output = finetune(folder.path(), "--seq-len 64 --steps 1 --model out/model --out again");
    assert_eq!(output.status.code(), Some(0), "{}", self::stderr(&output));
    let first = |name: &str| losses(&folder.path().join(name).join("metrics.csv"))[0];
    assert!((first("again")[0] - first("out")[0]).abs() < 1e-5);
}

fn eval(folder: &Path, model: &str) -> f64 {
    let output =
        finetune(folder, &format!("--seq-len 64 --eval --sequences 1 --ranks 2 --model {model} --tokens bytes"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().last().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A step that no further loss judges: its weights are looked at.
#[test]
fn weights_that_the_last_step_broke_are_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let broken = "--lr 1e30 --weight-decay 1e30 --schedule cosine";
    for (name, steps, kept) in [
        ("one", "--steps 1", "the initial weights are in one/model"),
        // The rate of the first step is 0, hence its weights are the initial ones.
        ("two", "--steps 2 --warmup 1", "the last good weights, those after step 1, are in two/model"),
    ] {
        let output = finetune(folder.path(), &format!("--seq-len 64 --ranks 2 {broken} {steps} --out {name}"));
        let stderr = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let step = steps.chars().nth(8).unwrap();
        let first = stderr.lines().next().unwrap();
        assert!(first.starts_with(&format!("error: step {step}: model.embed_tokens.weight is not finite")), "{first}");
        assert!(first.contains(kept) && first.contains("lower --lr"), "{first}");
        let begin = losses(&folder.path().join(name).join("metrics.csv"))[0][0];
        assert!((eval(folder.path(), &format!("{name}/model")) - begin).abs() < 1e-5);
    }
}

/// Weights of which the loss is finite and the gradients are not are no good ones.
#[test]
fn a_norm_that_is_not_a_number_keeps_the_weights_before() {
    let folder = tempfile::tempdir().unwrap();
    let output = finetune(folder.path(), "--seq-len 64 --ranks 2 --steps 3 --lr 1e38 --out out");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("the initial weights are in out/model"), "{stderr}");
    let begin = losses(&folder.path().join("out/metrics.csv"))[0][0];
    assert!((eval(folder.path(), "out/model") - begin).abs() < 1e-5);
}

/// Weights that are all numbers, and whose products are none.
fn too_large(folder: &Path) {
    let mut weights = common::drawn(&LlamaConfig::new(256, 8, 12, 2, 2, 1));
    weights.norm.inner.gamma = weights.norm.inner.gamma.map(|gamma| gamma * 1e38);
    let head = weights.lm_head.as_mut().unwrap();
    head.weight = head.weight.clone().map(|weight| weight * 1e10);
    weights.save(folder).unwrap();
}

#[test]
fn an_evaluation_that_gives_no_number_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    too_large(&folder.path().join("model"));
    let output =
        finetune(folder.path(), "--model model --tokens bytes --seq-len 64 --sequences 1 --ranks 2 --eval --out out");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: --eval: the loss is ") && stderr.contains("check the model"), "{stderr}");
    assert_eq!(listing(&folder.path().join("out")), ["config.toml", "plan.txt"]);
}

/// `finetune | head -1`.
#[test]
fn who_stops_listening_does_not_stop_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_finetune"))
        .current_dir(folder.path())
        .args(format!("{SMALL} --out out").split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(run.stdout.take());
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(
        listing(&folder.path().join("out")),
        ["checkpoints", "config.toml", "loss.svg", "metrics.csv", "model", "plan.txt"]
    );
    assert_eq!(losses(&folder.path().join("out/metrics.csv")).len(), 2);
}

/// Standard output on a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_log_that_cannot_be_written_is_told_after_the_weights_are_saved() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_finetune"))
        .current_dir(folder.path())
        .args(format!("{SMALL} --out out").split_whitespace())
        .stdout(fs::File::options().write(true).open("/dev/full").unwrap())
        .output()
        .unwrap();
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: standard output: No space left on device"), "{stderr}");
    assert!(folder.path().join("out/model/model.safetensors").exists());
}

#[test]
fn weights_that_fail_at_the_first_step_stay_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    too_large(&folder.path().join("model"));
    let output = finetune(folder.path(), "--model model --tokens bytes --seq-len 64 --ranks 2 --steps 2 --out out");
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: step 1: loss "), "{stderr}");
    assert!(
        stderr.contains("the initial weights are in out/model: no step was taken yet: check the model"),
        "{stderr}"
    );
    let read = |path: &str| fs::read(folder.path().join(path)).unwrap();
    assert!(read("model/model.safetensors") == read("out/model/model.safetensors"));
}

#[test]
fn a_model_that_is_broken_already_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = common::drawn(&LlamaConfig::new(256, 8, 12, 2, 2, 1));
    model.norm.inner.gamma = model.norm.inner.gamma.map(|gamma| gamma * f32::NAN);
    model.save(&folder.path().join("model")).unwrap();
    let output = finetune(folder.path(), "--model model --tokens bytes --seq-len 64");
    assert_eq!(output.status.code(), Some(2));
    let expected = "error: model: model.norm.weight has values that are not finite numbers: download or save it again";
    assert_eq!(stderr(&output).lines().next(), Some(expected));
    assert_eq!(listing(folder.path()), ["model"]);
}

#[test]
fn pretrained_weights_have_a_smaller_rate_and_what_was_loaded_is_said() {
    let folder = tempfile::tempdir().unwrap();
    common::model(&folder.path().join("model"));
    fs::write(folder.path().join("text.txt"), "a b c d e f g h i j k ".repeat(9)).unwrap();
    let output = finetune(folder.path(), "--model model --data text.txt --seq-len 16 --steps 1 --ranks 2 --out out");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("0.00001 is the default with --model"), "{said}");
    // Two tables, a norm, and in each of two layers two norms and seven projections.
    assert!(said.lines().any(|line| line == "21 weights loaded; nothing ignored"), "{said}");
    let metrics = fs::read_to_string(folder.path().join("out/metrics.csv")).unwrap();
    assert_eq!(metrics.lines().nth(1).unwrap().split(',').nth(3), Some("0.00001"));
}

#[test]
fn a_halt_keeps_good_weights_also_with_micro_batches() {
    let folder = tempfile::tempdir().unwrap();
    let output =
        finetune(folder.path(), "--seq-len 64 --steps 9 --ranks 2 --accumulate 3 --lr 1e30 --clip none --out out");
    assert_eq!(output.status.code(), Some(1));
    let stderr = stderr(&output);
    assert!(stderr.lines().next().unwrap().starts_with("error: step 2: loss NaN"), "{stderr}");
    let output = finetune(folder.path(), "--seq-len 64 --eval --sequences 3 --model out/model");
    let evaluation = String::from_utf8(output.stdout).unwrap();
    let loss: f64 = evaluation.lines().last().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((loss - losses(&folder.path().join("out/metrics.csv"))[0][0]).abs() < 1e-5, "{evaluation}");
}

/// What a run wrote about itself is the run: the same losses, from another folder, without a word typed again.
#[test]
fn the_written_configuration_gives_the_same_run() {
    let folder = tempfile::tempdir().unwrap();
    common::model(&folder.path().join("model"));
    fs::write(folder.path().join("text.txt"), "a b c d e f g h i j k a c e g i k ".repeat(30)).unwrap();
    let args = "--model model --data text.txt --seq-len 24 --batch 2 --accumulate 2 --epochs 2 --data-order shuffle --seed 3 --lr 1e-3 \
        --schedule cosine --warmup 1 --min-lr 1e-5 --weight-decay 0.1 --clip 0.5 --ranks 2 --heads-per-stage 1 \
        --mlp-tile 5 --norm-tile off --checkpoint off --sequences 10";
    let output = finetune(folder.path(), &format!("{args} --out a"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    fs::create_dir(folder.path().join("elsewhere")).unwrap();
    let output = finetune(&folder.path().join("elsewhere"), "--config ../a/config.toml --out b");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let (a, b) = (folder.path().join("a"), folder.path().join("elsewhere/b"));
    assert_eq!(losses(&a.join("metrics.csv")), losses(&b.join("metrics.csv")));
    assert_eq!(losses(&a.join("metrics.csv")).len(), 6);
    let config = |out: &Path| fs::read_to_string(out.join("config.toml")).unwrap();
    assert_eq!(config(&a), config(&b));
    // Offload, too.
    let offload = "--checkpoint on --blocks-per-checkpoint 2 --offload host --offload-every 1 --offload-host-budget 1KiB \
        --offload-dir . --offload-disk-budget 2MiB --offload-in-flight 1";
    let output = finetune(folder.path(), &format!("--config a/config.toml {offload} --out d"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = finetune(&folder.path().join("elsewhere"), "--config ../d/config.toml --out e");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(config(&folder.path().join("d")), config(&folder.path().join("elsewhere/e")));
    for line in
        ["offload = \"host\"", "offload-host-budget = 1024", "offload-in-flight = 1", "blocks-per-checkpoint = 2"]
    {
        assert!(config(&folder.path().join("d")).lines().any(|found| found == line), "{line}");
    }
    // What is typed wins.
    let output = finetune(folder.path(), "--config a/config.toml --steps 1 --seq-len 8 --out c");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(losses(&folder.path().join("c/metrics.csv")).len(), 1);
}

#[test]
fn a_model_folder_stays_whole_and_an_answers_loss_is_of_its_words_and_end() {
    let folder = tempfile::tempdir().unwrap();
    common::model(&folder.path().join("model"));
    let chat = |answer: &str| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a b\"}}, {{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
        )
    };
    fs::write(folder.path().join("chat.jsonl"), chat("c d e") + &chat("f")).unwrap();
    let output = finetune(folder.path(), "--model model --data chat.jsonl --eval --ranks 3");
    let stdout = String::from_utf8(output.stdout).unwrap();
    // Three words and an end, one word and an end.
    assert!(stdout.lines().last().unwrap().ends_with("valid tokens 6"), "{stdout}");

    let output = finetune(folder.path(), "--model model --data chat.jsonl --seq-len 8 --steps 1 --ranks 2 --out out");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let read = |name: &str| fs::read(folder.path().join(name).join(file)).unwrap();
        assert_eq!(read("model"), read("out/model"));
    }
    let output = finetune(folder.path(), "--model out/model --data chat.jsonl --eval --out eval");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(listing(&folder.path().join("eval")), ["config.toml", "eval.json", "plan.txt"]);
}

#[test]
fn help_says_how_to_stop_and_how_to_go_on() {
    let output = finetune(Path::new("."), "--help");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["save-now", "SIGTERM", "--resume goes on", "0 if the run came to its end or was asked to stop"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
