//! The program as one runs it: exit status, one line for what makes no sense, one object for --json.

use std::fs;
use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;

const ON_8: &str = "--model llama-3-8b --device h100-80g --devices 8";

fn plan(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plan")).args(line.split_whitespace()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn json(line: &str) -> Value {
    let output = plan(&format!("{line} --json"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[rstest]
#[case("", "--model <NAME|PATH>")]
#[case("--model llama-3-8b", "no --seq-len: type the tokens of a sequence (--seq-len 1M), or ask for the longest: max")]
#[case("fit --model llama-3-8b", "no --seq-len")]
#[case("--model gpt --seq-len 1M", "no model is called \"gpt\": use llama-3-8b")]
#[case("--model nowhere/config.json --seq-len 1M", "nowhere/config.json")]
#[case("--model ./nowhere --seq-len 1M", "./nowhere/config.json: No such file")]
#[case("--model Org/nowhere --seq-len 1M", "no model is called \"Org/nowhere\": use llama-3-8b")]
#[case("--model llama-3-8b --seq-len 1M --device h900", "no device is called \"h900\": use h100-80g")]
#[case("--model llama-3-8b --seq-len 1.5", "give a number of tokens from 1: 100000, 512K (2^19)")]
#[case("--model llama-3-8b --seq-len -1", "give a number of tokens from 1")]
#[case("--model llama-3-8b --seq-len 8G", "8589934592 tokens: use at most 4294967296")]
#[case("--model llama-3-8b --seq-len 1M --mesh ring=2,ulysses=4", "ring=2 is not built yet: use ring=1 and ulysses=8")]
#[case("--model llama-3-8b --seq-len 1M --mesh tensor=2", "no axis is called \"tensor\": give data=N,ulysses=M")]
#[case(
    "--model llama-3-8b --seq-len 1M --devices 4 --mesh data=2,ulysses=3",
    "data=2 x ulysses=3 needs 6 ranks, 4 were launched"
)]
#[case("--model llama-3-8b --seq-len 1M --devices 0", "give a whole number from 1")]
#[case("--model llama-3-8b --seq-len 1M --devices 5000", "5000 ranks")]
#[case(
    "--model llama-3-8b --seq-len 1M --devices 1000000000000",
    "1000000000000 ranks, one a device: use at most 4096"
)]
#[case("max --model llama-3-8b --mesh data=1000000000000", "1000000000000 ranks, one a device: use at most 4096")]
#[case(
    "--model llama-3-8b --device h100 --devices 8 --seq-len 8 --accumulate 8000000000",
    "more bytes than can be counted: use smaller numbers"
)]
#[case("--model llama-3-8b --seq-len 1M --overhead 18446744073709551615", "give bytes: 80G")]
#[case(
    "--model llama-3-8b --device h100 --seq-len 1M --offload none --offload-every 3",
    "--offload-every 3 where nothing is offloaded: leave it out, or use --offload host or disk"
)]
#[case("--model llama-3-8b --seq-len 1M --in-flight 3", "--in-flight 3 where nothing is offloaded")]
#[case("fit --model llama-3-8b --seq-len 1M --offload none --in-flight 3", "--in-flight 3 where nothing is offloaded")]
#[case(
    "--model llama-3-8b --seq-len 1M --offload none --offload-budget 1G",
    "--offload-budget 1073741824 where nothing is offloaded"
)]
#[case(
    "--model llama-3-8b --seq-len 1M --offload host --offload-every 2 --offload-budget 1G",
    "together: leave one of them out"
)]
#[case(
    "--model llama-3-8b --seq-len 1M --offload disk --offload-host-budget 1G",
    "--offload-host-budget with --offload disk: leave it out"
)]
#[case(
    "fit --model llama-3-8b --device h100 --seq-len 1M --offload-disk-budget 1G",
    "say which with --offload host or disk"
)]
#[case("--model llama-3-8b --seq-len 1M --attention ring", "possible values: single, ulysses, upipe")]
#[case("--model llama-3-8b --seq-len 1M --heads-per-stage 33", "33 heads a stage of 32 query heads: use 1 to 32")]
#[case("--model llama-3-8b --seq-len 1M --heads-per-stage 8 --attention ulysses", "--heads-per-stage without stages")]
#[case(
    "--model llama-3-8b --seq-len 1M --mesh ulysses=2 --attention single",
    "attention on a single rank where 2 share a sequence"
)]
#[case(
    "--model llama-3-8b --seq-len 1M --checkpoint off --offload host",
    "offload to the host of block inputs that no checkpoint keeps"
)]
#[case("--model llama-3-8b --seq-len 1M --svg x.svg", "--svg without a ladder: ask for ladder, or leave out --svg")]
#[case("--model llama-3-8b --seq-len 1M --memory lots", "give bytes: 80G")]
#[case("--model llama-3-8b --seq-len 1M --hours-per-step 0", "give a number above 0")]
#[case("max plan --model llama-3-8b", "unexpected argument 'plan'")]
#[case("max --mode plan --model llama-3-8b", "cannot be used with")]
fn what_makes_no_sense_is_one_line_with_a_remedy(#[case] line: &str, #[case] expected: &str) {
    let output = plan(line);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(output.stdout.is_empty());
    assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
    assert!(error.contains(expected), "{error:?} has no {expected:?}");
}

#[test]
fn that_it_does_not_fit_is_an_answer() {
    let answer = json(&format!("{ON_8} --seq-len 64M"));
    assert_eq!(answer["fits"], false);
    assert_eq!(answer["binding_limit"], "device_memory");
    let largest = answer["max_seq_len"].as_u64().unwrap();
    assert!(largest > 1 << 20 && largest < 64 << 20);
    let output = plan(&format!("{ON_8} --seq-len 64M"));
    assert!(text(&output.stdout).contains("does not fit: device memory: the longest that does is"));
}

/// What asks for an object gets one, and only that.
#[rstest]
#[case("--model llama-3-8b --json", 2, "no --seq-len")]
#[case("--json --model gpt --seq-len 1M", 2, "no model is called")]
#[case("--json --no-such-flag", 2, "--no-such-flag")]
#[case("ladder --model llama-3-8b --device h100 --json --svg no/such/folder/x.svg", 1, "no/such/folder/x.svg")]
fn an_error_is_one_object_too(#[case] line: &str, #[case] status: i32, #[case] expected: &str) {
    let output = plan(line);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), answer["exit_status"].as_i64()), (Some(status), Some(i64::from(status))));
    let error = answer["error"].as_str().unwrap();
    assert!(error.contains(expected), "{error}");
    assert_eq!(text(&output.stderr), format!("error: {error}\n"));
}

#[rstest]
#[case("")]
#[case("plan")]
#[case("--mode plan")]
fn a_plan_is_one_object(#[case] mode: &str) {
    let answer =
        json(&format!("{mode} {ON_8} --seq-len 1M --attention ulysses --mesh data=1,ulysses=8 --fsdp --offload host"));
    assert_eq!(answer["mode"], "plan");
    assert_eq!(answer["fits"], true);
    assert_eq!(answer["seq_len"], 1 << 20);
    let parts = answer["parts"].as_object().unwrap();
    let sum: u64 = parts.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(Some(sum), answer["device_bytes_peak"].as_u64());
    let phases = answer["phases"].as_array().unwrap();
    assert!(phases.iter().any(|phase| phase["bytes"].as_u64() == Some(sum)));
    // Block inputs, to the byte.
    assert_eq!(answer["host_bytes"], 32 * (1u64 << 17) * 4096 * 2);
    assert!(answer["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_longest_fits_and_one_more_does_not() {
    let found = json(&format!("max {ON_8} --attention ulysses"));
    let len = found["max_seq_len"].as_u64().unwrap();
    assert_eq!((&found["fits"], found["seq_len"].as_u64()), (&Value::Bool(true), Some(len)));
    let at = |len: u64| json(&format!("{ON_8} --attention ulysses --seq-len {len}"))["fits"].clone();
    assert_eq!((at(len), at(len + 8)), (Value::Bool(true), Value::Bool(false)));
    // A minute a step is less.
    let minute = json(&format!("max {ON_8} --attention ulysses --hours-per-step 0.016"));
    assert!(minute["max_seq_len"].as_u64().unwrap() < len);
    assert_eq!(minute["binding_limit"], "time");
    assert!(minute["seconds"].as_f64().unwrap() <= 0.016 * 3600.0);
    let asked = json(&format!("max {ON_8} --attention ulysses --seq-len {}", len + 8));
    assert_eq!(asked["asked"]["fits"], false);
}

#[test]
fn nothing_fits_where_states_do_not() {
    let found = json("max --model llama-3-70b --device rtx4090 --devices 1 --optimizer device");
    assert_eq!((&found["fits"], &found["max_seq_len"]), (&Value::Bool(false), &Value::from(0)));
    assert_eq!(found["binding_limit"], "device_memory");
}

#[test]
fn what_fit_finds_can_be_typed() {
    let found = json(&format!("fit {ON_8} --seq-len 512K"));
    assert_eq!(found["fits"], true);
    let (tried, fitting) = (found["tried"].as_u64().unwrap(), found["fitting"].as_u64().unwrap());
    assert!(tried > 500 && fitting > 0 && fitting < tried, "{fitting} of {tried}");
    let same = json(&format!("{ON_8} --seq-len 512K {}", found["arguments"].as_str().unwrap()));
    for field in ["device_bytes_peak", "host_bytes", "seconds", "techniques", "parts", "collectives"] {
        assert_eq!(found[field], same[field], "{field}");
    }
}

/// In what it finds, and in what it says is to be typed.
#[rstest]
#[case("--attention upipe --heads-per-stage 16 --mesh ulysses=8 --mlp-tile 1000", &["--attention upipe --heads-per-stage 16", "--mesh data=1,ulysses=8", "--mlp-tile 1000"])]
#[case("--attention upipe", &["--attention upipe --heads-per-stage "])]
#[case("--prefetch off", &["--fsdp on --prefetch off"])]
#[case("--offload-every 4 --in-flight 1", &["--offload-every 4 --in-flight 1"])]
#[case("--offload disk --in-flight 3", &["--offload disk ", "--in-flight 3"])]
#[case("--offload none", &["--offload none"])]
#[case("--offload host --offload-host-budget 80G --offload-disk-budget 1T", &["--offload host", "--offload-host-budget 85899345920 --offload-disk-budget 1099511627776"])]
#[case("--offload disk --offload-budget 8G", &["--offload disk --in-flight 2 --offload-budget 8589934592"])]
#[case("--checkpoint 3 --optimizer host", &["--checkpoint 3", "--optimizer host"])]
#[case("--norm-tile 100 --mlp-tile off", &["--mlp-tile off --norm-tile 100"])]
fn what_is_typed_is_held(#[case] typed: &str, #[case] words: &[&str]) {
    let found = json(&format!("fit {ON_8} --seq-len 512K {typed}"));
    assert_eq!(found["fits"], true, "{found}");
    let arguments = found["arguments"].as_str().unwrap();
    for word in words {
        assert!(arguments.contains(word), "{arguments:?} has no {word:?}");
    }
    let same = json(&format!("{ON_8} --seq-len 512K {arguments}"));
    for field in ["device_bytes_peak", "host_bytes", "disk_bytes", "seconds", "techniques", "parts", "arguments"] {
        assert_eq!(found[field], same[field], "{field}");
    }
}

/// Block inputs of 512K tokens over 8 ranks: 32 of 512 MiB on each.
#[test]
fn what_finds_no_room_on_the_host_goes_to_disk_and_then_stays() {
    const INPUT: u64 = 512 << 20;
    let line = |typed: &str| json(&format!("{ON_8} --seq-len 512K {typed}"));
    let waiting = |answer: &Value| (answer["host_bytes"].as_u64().unwrap(), answer["disk_bytes"].as_u64().unwrap());
    let saved = |answer: &Value| {
        let phases = answer["phases"].as_array().unwrap();
        let backward = phases.iter().find(|phase| phase["name"] == "loss backward").unwrap();
        backward["parts"]["saved inputs"].as_u64().unwrap_or(0)
    };
    let all = line("");
    assert_eq!((waiting(&all), saved(&all)), ((32 * INPUT, 0), 0));
    let spilled = line("--offload host --offload-host-budget 80G --offload-disk-budget 48G");
    assert_eq!((waiting(&spilled), saved(&spilled)), ((20 * INPUT, 12 * INPUT), 0));
    let kept = line("--offload host --offload-host-budget 80G");
    assert_eq!((waiting(&kept), saved(&kept)), ((20 * INPUT, 0), 12 * INPUT));
    let newest = line("--offload disk --offload-budget 40G");
    assert_eq!((waiting(&newest), saved(&newest)), ((0, 22 * INPUT), 10 * INPUT));
    for answer in [&spilled, &kept, &newest] {
        let arguments = answer["arguments"].as_str().unwrap();
        let same = line(arguments);
        for field in ["phases", "parts", "host_bytes", "disk_bytes", "seconds", "arguments"] {
            assert_eq!(same[field], answer[field], "{field} of {arguments}");
        }
    }
}

#[test]
fn f32_takes_twice_the_memory_and_time() {
    let line = |dtype: &str| json(&format!("{ON_8} --seq-len 1M --dtype {dtype}"));
    let (bf16, f32) = (line("bf16"), line("f32"));
    let ratio = |of: &dyn Fn(&Value) -> f64| of(&f32) / of(&bf16);
    assert_eq!(bf16, json(&format!("{ON_8} --seq-len 1M")));
    assert_eq!(ratio(&|answer| answer["host_bytes"].as_f64().unwrap()), 2.0);
    assert_eq!(ratio(&|answer| answer["seconds_by_part"]["compute"].as_f64().unwrap()), 2.0);
    assert!((ratio(&|answer| answer["parts"]["weights"].as_f64().unwrap()) - 2.0).abs() < 1e-6);
    assert!(f32["assumptions"][1].as_str().unwrap().contains("of 494.5 TFLOP/s"), "{}", f32["assumptions"]);
}

#[test]
fn a_ladder_has_a_rung_a_technique_and_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("ladder.svg");
    let answer = json(&format!("ladder {ON_8} --seq-len 3M --svg {}", svg.display()));
    let rungs = answer["ladder"].as_array().unwrap();
    let names: Vec<&str> = rungs.iter().map(|rung| rung["technique"].as_str().unwrap()).collect();
    assert_eq!(names, ["nothing", "+ FSDP", "+ Ulysses", "+ checkpoints", "+ offload", "+ tiles", "+ U-Pipe"]);
    let longest: Vec<u64> = rungs.iter().map(|rung| rung["max_seq_len"].as_u64().unwrap()).collect();
    assert!(longest.is_sorted() && longest[0] == 0 && longest[6] > longest[5], "{longest:?}");
    assert_eq!(rungs[6]["device_bytes_peak"], answer["device_bytes_peak"]);
    let picture = fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg") && names.iter().all(|name| picture.contains(name)), "{picture}");
    // Six bars: nothing fits without FSDP. And the background.
    assert_eq!(picture.matches("<rect").count(), 7);
    let missing = folder.path().join("no/ladder.svg");
    let output = plan(&format!("ladder {ON_8} --svg {}", missing.display()));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_model_is_a_name_or_a_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let write = |text: &str| fs::write(folder.path().join("config.json"), text).unwrap();
    let fields =
        "\"vocab_size\": 151936, \"hidden_size\": 1024, \"intermediate_size\": 3072, \"num_hidden_layers\": 28,
        \"num_attention_heads\": 16, \"num_key_value_heads\": 8, \"tie_word_embeddings\": true";
    write(&format!("{{\"model_type\": \"qwen3\", {fields}}}"));
    let line = |model: &str| json(&format!("--model {model} --device a100-40g --seq-len 64K"));
    let named = line("qwen3-0.6b");
    for model in [folder.path().to_owned(), folder.path().join("config.json")] {
        let read = line(&model.display().to_string());
        for field in ["parameters", "device_bytes_peak", "seconds"] {
            assert_eq!(read[field], named[field], "{field}");
        }
        assert_eq!(read["notes"].as_array().unwrap().len(), 0);
    }
    write(&format!(
        "{{\"model_type\": \"qwen3\", \"use_sliding_window\": true, \"max_window_layers\": 0, \"sliding_window\": 4096, {fields}}}"
    ));
    assert!(line(&folder.path().display().to_string())["notes"][0].as_str().unwrap().contains("window of 4096 tokens"));
    write("{\"model_type\": \"mamba\"}");
    let output = plan(&format!("--model {} --seq-len 1K", folder.path().display()));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("\"mamba\""), "{}", text(&output.stderr));
}

#[test]
fn hardware_is_what_is_typed() {
    let line = |more: &str| json(&format!("{ON_8} --seq-len 1M {more}"));
    let usual = line("");
    assert_eq!(line("--host-memory 800G")["host_bytes_limit"], 100u64 << 30);
    assert_eq!(line("--memory 40GiB")["device_bytes_limit"], 40u64 << 30);
    assert_eq!(line("--memory 10G")["fits"], false);
    assert_eq!(line("--host-memory 1G")["binding_limit"], "host_memory");
    assert_eq!(line("--disk 1G --offload disk")["binding_limit"], "disk");
    let seconds = |answer: &Value| answer["seconds"].as_f64().unwrap();
    assert!(seconds(&line("--tflops 2000")) < seconds(&usual));
    assert!(seconds(&line("--link 1")) > seconds(&usual));
    let this = json("--model qwen3-0.6b --memory 16G --devices 4 --seq-len 4K");
    assert_eq!(this["device_bytes_limit"], 4u64 << 30);
    let here = json("--model qwen3-0.6b --seq-len 1K");
    assert_eq!(here["device"], "this");
    // What is free where temporary files go.
    assert!(here["disk_bytes_limit"].as_u64().unwrap() > 1 << 20);
    assert_eq!(json("--model qwen3-0.6b --seq-len 1K --disk 0")["disk_bytes_limit"], 0);
}

#[test]
fn help_says_that_no_is_an_answer() {
    let output = plan("--help");
    assert!(output.status.success());
    let help = text(&output.stdout);
    assert!(help.contains("also if the answer is that it does not fit (fits is false)"), "{help}");
    // Names that are said are known.
    for name in burn_upipe::plan::DEVICES {
        assert!(help.contains(name), "{name}");
    }
}
