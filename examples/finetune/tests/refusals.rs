//! What cannot be served ends with 2; the first line of stderr names the fault and the remedy, and nothing is written.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::LazyLock;

use llama::device::Runtime;
use rstest::rstest;

/// All files that the cases name, made once; no case writes.
static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for name in ["empty", "full", "noconfig", "profiled"] {
        fs::create_dir(path(name)).unwrap();
    }
    let write = |name: &str, text: &[u8]| fs::write(path(name), text).unwrap();
    write("full/file", b"");
    write("profiled/trace.json", b"{}");
    write("empty.txt", b"");
    write("empty.jsonl", b"\n");
    write("latin.jsonl", b"{\"text\": \"fine\"}\n{\"text\": \"gr\xfcn\"}\n");
    write("short.txt", b"short");
    write("latin.txt", b"gr\xfcn und so weiter");
    write("binary", b"\x7fELF\0\0\0\0");
    write("abc.txt", "a b c d e f g h i j k ".repeat(20).as_bytes());

    for (name, lines) in [
        ("torn", "{\"text\": \"fine\"}\n\n{\"text\": \"torn\n"),
        ("array", "[1, 2]\n"),
        ("fields", "{\"text\": \"fine\"}\n{\"txt\": \"a\"}\n"),
        ("number", "{\"text\": 3}\n"),
        ("nomessages", "{\"messages\": []}\n"),
        ("norole", "{\"messages\": [{\"content\": \"a\"}]}\n"),
        ("nocontent", "{\"messages\": [{\"role\": \"user\"}]}\n"),
        ("noanswer", "{\"messages\": [{\"role\": \"user\", \"content\": \"a b c d e f g h\"}]}\n"),
        (
            "chat",
            "{\"messages\": [{\"role\": \"user\", \"content\": \"a b c d\"}, {\"role\": \"assistant\", \"content\": \"e f\"}]}\n",
        ),
    ] {
        write(&format!("{name}.jsonl"), lines.as_bytes());
    }
    for (name, text) in [
        ("notoml", "steps = 3\nlr = = 4\n"),
        ("unknown", "steps = 3\n\nlearning-rate = 4\nsteps_per = 1\n"),
        ("near", "seq_len = 64\n"),
        ("value", "lr = -1.0\n"),
        ("kind", "steps = [3]\n"),
        ("nodata", "steps = 3\ndata = []\n"),
        ("both", "steps = 3\nepochs = 2\n"),
        ("flag", "fsdp = 3\n"),
        ("device", "device = \"npu\"\n"),
        ("mesh", "mesh = \"data=2,ring=2\"\n"),
    ] {
        write(&format!("{name}.toml"), text.as_bytes());
    }

    common::model(&path("good"));
    let copy = |name: &str| {
        fs::create_dir(path(name)).unwrap();
        for entry in fs::read_dir(path("good")).unwrap() {
            let from = entry.unwrap().path();
            fs::copy(&from, path(name).join(from.file_name().unwrap())).unwrap();
        }
        path(name)
    };
    fs::remove_file(copy("notokenizer").join("tokenizer.json")).unwrap();
    fs::write(copy("badtokenizer").join("tokenizer.json"), "{\"model\": 3}").unwrap();
    let damaged = |name: &str, field: &str, value: &str| {
        let file = copy(name).join("tokenizer.json");
        let text = fs::read_to_string(&file).unwrap();
        let from = format!("\"{field}\":null");
        assert!(text.contains(&from), "{text}");
        fs::write(file, text.replace(&from, &format!("\"{field}\":{value}"))).unwrap();
    };
    damaged(
        "nospecial",
        "post_processor",
        "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<s>\", \"type_id\": 0}}, \
         {\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}], \"pair\": [{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}, \
         {\"Sequence\": {\"id\": \"B\", \"type_id\": 0}}], \"special_tokens\": {}}",
    );
    damaged("charsmap", "normalizer", "{\"type\": \"Precompiled\", \"precompiled_charsmap\": \"AAAA\"}");
    common::tokenizer(&copy("notemplate"), None);
    common::tokenizer(&copy("badtemplate"), Some("{% if %}"));
    common::tokenizer(&copy("failing"), Some("{{ messages[9].content.strip() }}"));
    common::tokenizer(
        &copy("endless"),
        Some("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    );
    common::tokenizer(&copy("refusing"), Some("{{ raise_exception('no talk') }}"));
    common::tokenizer(
        &copy("rewriting"),
        Some("{% for m in messages %}{% if loop.last %}<|end|>{% endif %} {{ m.content | upper }}{% endfor %}"),
    );
    common::weights(&copy("small"), 9);
    let edited = |name: &str, from: &str, to: &str| {
        let config = copy(name).join("config.json");
        let text = fs::read_to_string(&config).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(config, text.replace(from, to)).unwrap();
    };
    edited("heads", "\"num_key_value_heads\": 1", "\"num_key_value_heads\": 3");
    edited("nohead", "\"num_attention_heads\": 2", "\"num_attention_heads\": 0");
    edited("type", "\"model_type\": \"llama\"", "\"model_type\": \"lama\"");
    edited("wide", "\"intermediate_size\": 12", "\"intermediate_size\": 14");
    edited("deep", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    edited("deepest", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9999");
    edited("shallow", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    edited("nojson", "{", "");
    let cut = copy("truncated").join("model.safetensors");
    let weights = fs::read(&cut).unwrap();
    fs::write(&cut, &weights[..weights.len() / 2]).unwrap();
    fs::write(copy("garbage").join("model.safetensors"), [0xff; 64]).unwrap();
    fs::write(copy("emptyweights").join("model.safetensors"), []).unwrap();
    fs::remove_file(copy("noweights").join("model.safetensors")).unwrap();
    folder
});

fn finetune(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_finetune"))
        .current_dir(FOLDER.path())
        .args(args.split_whitespace())
        .output()
        .unwrap()
}

/// Every file and folder, with sizes.
fn listing(folder: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let metadata = entry.metadata().unwrap();
        found.push((entry.path().display().to_string(), if metadata.is_file() { metadata.len() } else { 0 }));
        if metadata.is_dir() {
            found.extend(listing(&entry.path()));
        }
    }
    found.sort();
    found
}

#[rstest]
// What is typed.
#[case("--ranks 0", "invalid value '0' for '--ranks", "give a whole number from 1")]
#[case("--ranks 1000000000", "--ranks 1000000000", "use at most")]
#[case("--ranks 65", "--ranks 65 for sequences of 64 tokens", "use at most 64")]
#[case("--ranks -3", "invalid value '-3' for '--ranks", "give a whole number")]
#[case("--steps 0", "invalid value '0' for '--steps", "give a whole number from 1")]
#[case("--steps 1000000000", "--steps 1000000000", "use at most 100000000")]
#[case("--steps 99999999999999999999999", "invalid value", "give a whole number")]
#[case("--steps 2 --epochs 2", "--steps and --epochs together", "leave one of them out")]
#[case("--epochs 18446744073709551615", "--epochs 18446744073709551615", "use at most")]
#[case("--seq-len 0", "invalid value '0' for '--seq-len", "give a whole number from 2")]
#[case("--seq-len 1000000000000", "are less than a sequence of 1000000000000", "or --seq-len")]
#[case("--batch 0", "invalid value '0' for '--batch", "give a whole number from 1")]
#[case("--batch 1000000000", "--batch 1000000000 x --accumulate 1", "sequences a step")]
#[case("--batch 9999999999 --accumulate 9999999999", "x --accumulate 9999999999", "sequences a step")]
#[case("--sequences 1000000", "--sequences 1000000 of", "use at most")]
#[case("--warmup 9 --steps 8", "--warmup 9 in 8 steps", "use at most 8")]
#[case("--lr nan", "invalid value 'nan' for '--lr", "give a number above 0")]
#[case("--lr inf", "invalid value 'inf' for '--lr", "give a number above 0")]
#[case("--lr -1", "invalid value '-1' for '--lr", "give a number above 0")]
#[case("--lr 0", "invalid value '0' for '--lr", "give a number above 0")]
#[case("--lr 1e300", "invalid value '1e300' for '--lr", "give a number from 1.1754944e-38 to 3.4028235e38")]
#[case("--lr 1e-300", "invalid value '1e-300' for '--lr", "give a number from 1.1754944e-38 to 3.4028235e38")]
#[case(
    "--min-lr 1e300 --schedule cosine",
    "invalid value '1e300' for '--min-lr",
    "give 0 or a number from 1.1754944e-38"
)]
#[case(
    "--model good --min-lr 1e-4 --schedule cosine --data abc.txt",
    "--min-lr 0.0001 above --lr 0.00001",
    "lower --min-lr"
)]
#[case("--min-lr 1e-4", "--min-lr without --schedule cosine", "leave one of them out")]
#[case("--schedule cosine --min-lr 1", "--min-lr 1 above --lr 0.003", "lower --min-lr")]
#[case("--weight-decay nan", "invalid value 'nan' for '--weight-decay", "give 0 or a number above")]
#[case("--weight-decay 1e300", "invalid value '1e300' for '--weight-decay", "give 0 or a number from 1.1754944e-38")]
#[case(
    "--clip 1e-300",
    "invalid value '1e-300' for '--clip",
    "give a number from 1.1754944e-38 to 3.4028235e38, as 32 bits hold it, or none"
)]
#[case("--seed -1", "invalid value '-1' for '--seed", "give a whole number from 0")]
#[case("--clip 0", "invalid value '0' for '--clip", "give a number above 0, or none")]
#[case("--mlp-tile -2", "invalid value '-2' for '--mlp-tile", "from 1, auto or off")]
#[case("--checkpoint maybe", "invalid value 'maybe' for '--checkpoint", "on, off")]
#[case("--dtype f64", "invalid value 'f64' for '--dtype", "f32, bf16")]
#[case("--schedule linear", "invalid value 'linear' for '--schedule", "constant, cosine")]
#[case("--data-order random", "invalid value 'random' for '--data-order", "file, shuffle")]
#[case("--attention single --ranks 2", "--attention single with --ranks 2", "leave --ranks out")]
#[case("--mesh data=2,ulysses=2 --ranks 3", "data=2 x ulysses=2 needs 4 ranks, --ranks 3 was given", "use --ranks 4")]
#[case("--mesh data=2 --ranks 4", "data=2 needs 2 ranks, --ranks 4 was given", "use --ranks 2")]
#[case(
    "--mesh data=2,ulysses=2 --attention single",
    "--attention single with --mesh data=2,ulysses=2",
    "use ulysses=1"
)]
#[case("--mesh ring=2", "invalid value 'ring=2' for '--mesh", "ring attention is not built: give data=N,ulysses=M")]
#[case("--mesh data=0", "invalid value 'data=0' for '--mesh", "data=0 has no degree from 1: give data=N,ulysses=M")]
#[case("--mesh tensor=2", "no axis is called \"tensor\"", "give data=N,ulysses=M")]
#[case("--mesh 4", "\"4\" is no axis with a degree", "give data=N,ulysses=M")]
#[case("--mesh ulysses=65", "--mesh data=1,ulysses=65 for sequences of 64 tokens", "use at most 64")]
#[case("--mesh data=4000,ulysses=4000", "--mesh data=4000,ulysses=4000", "use at most 4096 ranks")]
#[case("--mesh data=4294967296,ulysses=4294967296", "--mesh data=4294967296", "use at most 4096 ranks")]
#[case("--resume", "--resume without --out", "--out runs/0001")]
#[case("--overwrite", "--overwrite without --out", "--out runs/0001")]
#[case("--resume --overwrite --out new", "--resume and --overwrite together", "use one of them")]
#[case("--resume --eval --out new", "--resume with --eval", "leave --resume out")]
#[case("--save-every 0", "invalid value '0' for '--save-every", "give a whole number from 1")]
#[case("--keep 0", "invalid value '0' for '--keep", "give a whole number from 1")]
#[case("--keep -1", "invalid value '-1' for '--keep", "give a whole number from 1")]
#[case("--profile-steps 2-3", "--profile-steps without --profile", "--profile DIR")]
#[case(
    "--profile new --profile-steps 3-2",
    "invalid value '3-2' for '--profile-steps",
    "give steps from 1, as 2-3 or 1,4-6"
)]
#[case("--profile new --profile-steps 0-2", "invalid value '0-2' for '--profile-steps", "give steps from 1")]
#[case("--profile new --profile-steps all", "invalid value 'all' for '--profile-steps", "give steps from 1")]
#[case("--profile new --profile-steps 1,8-9 --steps 8", "--profile-steps 1,8-9 of 8 steps", "use steps from 1 to 8")]
#[case("--profile new --eval", "--profile with --eval", "leave --profile out")]
#[case("--profile short.txt", "--profile short.txt: not a folder", "name a folder")]
#[case("--profile short.txt/new", "--profile short.txt/new: short.txt is not a folder", "name a folder")]
#[case("--profile profiled", "--profile profiled: trace.json is there already", "name another folder")]
#[case("--config flag.toml", "--config flag.toml:1: fsdp is neither true nor false", "use true")]
#[case("--model wide --fsdp --data abc.txt", "where config.json says", "use the config.json that was saved")]
#[case("--model deep --fsdp --data abc.txt", "missing: model.layers.2", "use the config.json that was saved")]
#[case("--model garbage --fsdp --data abc.txt", "garbage/model.safetensors: ", "download or save it again")]
#[case("--config mesh.toml", "--config mesh.toml: invalid value 'data=2,ring=2' for '--mesh", "ring attention is not")]
#[case("--attention ulysses --heads-per-stage 2", "--heads-per-stage without --attention upipe", "leave one")]
#[case("--heads-per-stage 9", "--heads-per-stage 9 of 8 query heads", "use 1 to 8")]
#[case("--rank 2", "unexpected argument '--rank'", "'--ranks'")]
#[case(
    "--device vulcan",
    "invalid value 'vulcan' for '--device <DEVICE>': no device is called",
    "did you mean vulkan?"
)]
#[case(
    "--device tpu-pod",
    "invalid value 'tpu-pod' for '--device",
    "use one of flex, cpu, wgpu, vulkan, cuda:N, rocm:N, metal"
)]
#[case("--device flex:0", "no device is called \"flex:0\": flex has no numbers", "use flex")]
#[case("--device cuda:x", "no device is called \"cuda:x\"", "use cuda:0 for the first one")]
#[case("--device cuda:0,rocm:0", "cuda:0 and rocm:0 in one list", "use devices of one kind")]
#[case("--device cuda:1,cuda:1", "cuda:1 is listed twice", "list it once")]
#[case("--config device.toml", "--config device.toml: invalid value 'npu' for '--device", "did you mean cpu?")]
#[case("--blocks-per-checkpoint 0", "invalid value '0' for '--blocks-per-checkpoint", "give a whole number from 1")]
#[case("--blocks-per-checkpoint 5", "--blocks-per-checkpoint 5 of 4 blocks", "use 1 to 4")]
#[case(
    "--blocks-per-checkpoint 2 --checkpoint off",
    "--blocks-per-checkpoint 2 with --checkpoint off",
    "leave one of them out"
)]
#[case("--offload ssd", "invalid value 'ssd' for '--offload", "none, host, disk")]
#[case("--offload host --checkpoint off", "--offload with --checkpoint off", "use --checkpoint on")]
#[case("--offload host --eval", "--offload with --eval", "leave one of them out")]
#[case("--offload-in-flight 3", "--offload-in-flight without --offload", "use --offload host")]
#[case("--offload none --offload-dir empty", "--offload-dir without --offload", "leave it out")]
#[case("--offload host --offload-in-flight 0", "invalid value '0' for '--offload-in-flight", "whole number from 1")]
#[case("--offload host --offload-every 0", "invalid value '0' for '--offload-every", "give a whole number from 1")]
#[case("--offload host --offload-budget 3GB", "invalid value '3GB' for '--offload-budget", "KiB, MiB, GiB or TiB")]
#[case("--offload host --offload-budget -1", "invalid value '-1' for '--offload-budget", "give a number of bytes")]
#[case(
    "--offload host --offload-every 2 --offload-budget 9",
    "--offload-every and --offload-budget together",
    "leave one of them out"
)]
#[case("--offload disk --offload-host-budget 9", "--offload-host-budget with --offload disk", "use --offload host")]
#[case("--offload host --offload-disk-budget 9", "--offload-disk-budget without a disk", "--offload-dir")]
#[case("--offload disk --offload-dir nowhere", "--offload-dir nowhere: no such folder", "name a folder that exists")]
#[case("--offload disk --offload-dir abc.txt", "--offload-dir abc.txt: no such folder", "name a folder that exists")]
// Texts.
#[case("--data nowhere", "nowhere: ", "give text files")]
#[case("--data empty", "--data empty: no text file in it", "name files")]
#[case("--data empty.txt", "0 tokens of text are less than a sequence of 64", "give more with --data")]
#[case("--data short.txt", "5 tokens of text are less than a sequence of 64", "--seq-len 5 or less")]
#[case("--data short.txt --eval --seq-len 6", "5 tokens of text are less than a sequence of 6", "--seq-len 5")]
#[case("--data empty.txt --eval", "0 tokens of text", "give more with --data")]
#[case("--data latin.txt", "latin.txt: not UTF-8 from byte 2", "give text in UTF-8")]
#[case("--data latin.jsonl", "latin.jsonl: not UTF-8 from byte 29, in line 2", "give text in UTF-8")]
#[case("--data empty.jsonl", "0 tokens of text are less than a sequence of 64 (empty.jsonl)", "give more with --data")]
#[case("--data binary", "binary: a zero byte at 4", "give text in UTF-8")]
#[case("--data torn.jsonl", "torn.jsonl:3: not JSON, at column", "give one JSON object a line")]
#[case("--data array.jsonl", "array.jsonl:1: JSON, but no object", "give {\"text\"")]
#[case("--data fields.jsonl", "fields.jsonl:2: neither text nor messages", "did you mean text where it says txt?")]
#[case("--data number.jsonl", "number.jsonl:1: text is no string", "give {\"text\"")]
#[case("--data chat.jsonl", "chat.jsonl:1: a conversation, and byte tokens have no chat template", "use --model")]
#[case("--model good --data nomessages.jsonl", "nomessages.jsonl:1: messages is empty", "give {\"messages\"")]
#[case("--model good --data norole.jsonl", "norole.jsonl:1: message 1 has no role", "give {\"messages\"")]
#[case("--model good --data nocontent.jsonl", "nocontent.jsonl:1: message 1 has no content", "give {\"messages\"")]
#[case("--model good --data noanswer.jsonl --seq-len 8", "no answer, hence no target", "the role \"assistant\"")]
#[case("--model notemplate --data chat.jsonl", "notemplate: conversations need a chat template", "chat_template.jinja")]
#[case("--model badtemplate --data chat.jsonl", "badtemplate/tokenizer_config.json: line 1", "put another template")]
#[case("--model refusing --data chat.jsonl", "chat.jsonl:1: the chat template refuses: line 1: no talk", "correct the")]
#[case(
    "--model failing --data chat.jsonl",
    "chat.jsonl:1: the chat template fails: line 1: ",
    "as chat_template.jinja"
)]
#[case("--model endless --data chat.jsonl", "the chat template fails: line 1: no end after", "as chat_template.jinja")]
#[case(
    "--model rewriting --data chat.jsonl",
    "chat.jsonl:1: message 2: the chat template does not write",
    "that only appends"
)]
// Models.
#[case("--model nowhere", "nowhere/config.json: ", "give a Hugging Face model folder")]
#[case("--model noconfig", "noconfig/config.json: ", "give a Hugging Face model folder")]
#[case("--model short.txt", "short.txt/config.json: ", "give a Hugging Face model folder")]
#[case("--model nojson", "nojson/config.json: not JSON", "save the model again")]
#[case("--model heads", "2 query heads for 3 key/value heads", "must divide")]
#[case("--model nohead", "num_attention_heads", "")]
#[case("--model type", "model_type \"lama\"", "llama")]
#[case("--model notokenizer", "notokenizer/tokenizer.json: no such file", "use --tokens bytes")]
#[case("--model badtokenizer", "badtokenizer/tokenizer.json: no tokenizer", "--tokens bytes")]
#[case("--model nospecial --data abc.txt", "nospecial/tokenizer.json: damaged", "--tokens bytes")]
#[case("--model charsmap --data abc.txt", "charsmap/tokenizer.json: ", "--tokens bytes")]
#[case("--model small --tokens bytes", "a vocabulary of 9 has no room for bytes", "at least 256 token ids")]
#[case("--model small --data abc.txt", "in a vocabulary of 9", "the tokenizer.json that belongs to the model")]
#[case("--model truncated --data abc.txt", "truncated/model.safetensors: ", "download or save it again")]
#[case("--model garbage --data abc.txt", "garbage/model.safetensors: ", "download or save it again")]
#[case("--model emptyweights --data abc.txt", "emptyweights/model.safetensors: ", "download or save it again")]
#[case("--model noweights --data abc.txt", "model.safetensors: ", "give a folder")]
#[case("--model wide --data abc.txt", "where config.json says", "use the config.json that was saved")]
#[case("--model deep --data abc.txt", "missing: model.layers.2", "use the config.json that was saved")]
#[case("--model deepest --data abc.txt", "missing: model.layers.10.", "use the config.json that was saved")]
#[case("--model shallow --data abc.txt", "unused: model.layers.1", "use the config.json that was saved")]
// Output folders.
#[case("--out full", "--out full: the folder is not empty", "give a new or empty folder")]
#[case("--out full --resume", "--out full: the folder is not empty, and holds no run", "give a new or empty folder")]
#[case("--out full --overwrite", "--out full: the folder is not empty, and holds no run", "give a new or empty folder")]
#[case("--out short.txt", "--out short.txt: a file, not a folder", "give a new or empty folder")]
#[case("--out short.txt/below", "--out short.txt/below: ", "give a new or empty folder")]
#[case("--out /proc/finetune", "--out /proc/finetune: ", "give a new or empty folder")]
// Configuration files.
#[case("--config nowhere.toml", "--config nowhere.toml: ", "give a TOML file")]
#[case("--config empty", "--config empty: ", "give a TOML file")]
#[case("--config binary", "--config binary: ", "give a TOML file")]
#[case("--config notoml.toml", "--config notoml.toml:2: not TOML", "write name = value")]
#[case("--config unknown.toml", "--config unknown.toml:3: unknown key \"learning-rate\"", "use one of")]
#[case("--config near.toml", "--config near.toml:1: unknown key \"seq_len\"", "did you mean seq-len")]
#[case("--config value.toml", "--config value.toml: invalid value '-1.0' for '--lr", "give a number above 0")]
#[case("--config kind.toml", "--config kind.toml:1: steps is of type array", "give a number")]
#[case("--config nodata.toml", "--config nodata.toml:2: data is an empty list", "or leave data out")]
#[case("--config both.toml", "--steps and --epochs together", "leave one of them out")]
fn a_request_that_cannot_be_served_ends_with_2_and_writes_nothing(
    #[case] args: &str,
    #[case] fault: &str,
    #[case] remedy: &str,
) {
    let before = listing(FOLDER.path());
    let rest = |name: &str, value: &str| if args.contains(name) { String::new() } else { format!(" {name} {value}") };
    let output = finetune(&format!("{args}{}{}", rest("--seq-len", "64"), rest("--attention", "upipe")));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let first = stderr.lines().next().unwrap();
    assert!(first.starts_with("error: ") && first.contains(fault) && first.contains(remedy), "{first}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert_eq!(listing(FOLDER.path()), before);
}

/// Devices that this program does not have, or that do not start on this machine.
#[test]
fn a_device_that_cannot_be_had_is_refused_with_what_is_missing() {
    for runtime in Runtime::ALL.into_iter().filter(|runtime| *runtime != Runtime::Flex) {
        let before = listing(FOLDER.path());
        let output =
            finetune(&format!("--device {runtime} --seq-len 64 --steps 1 --ranks 1 --data abc.txt --model nowhere"));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        let first = stderr.lines().next().unwrap();
        let missing = match runtime.is_compiled_in() {
            false => format!("error: --device: {runtime} is not compiled in: build with --features {runtime}"),
            // There it is, and the next fault is that of the model.
            true if first.starts_with("error: nowhere") => continue,
            true => runtime.needs().to_owned(),
        };
        assert!(first.contains(&missing), "{first}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        assert_eq!(listing(FOLDER.path()), before);
    }
}

/// A pipe that nobody writes to would be waited for.
#[cfg(unix)]
#[rstest]
#[case("--data pipe", "pipe: neither a file nor a folder: write what it gives to a file first")]
#[case("--data /dev/zero", "/dev/zero: neither a file nor a folder")]
#[case("--config pipe", "--config pipe: neither a file nor a folder: give a TOML file of values, seq-len = 8192")]
#[case(
    "--config /dev/zero",
    "--config /dev/zero: neither a file nor a folder: give a TOML file of values, seq-len = 8192"
)]
#[case("--model config.json", "config.json/config.json: a folder, a pipe or a device, not a file: give a Hugging Face")]
#[case("--model tokenizer.json", "tokenizer.json/tokenizer.json: neither a file nor a folder: download")]
#[case(
    "--model tokenizer_config.json",
    "tokenizer_config.json/tokenizer_config.json: neither a file nor a folder: download"
)]
#[case("--model special_tokens_map.json", "special_tokens_map.json: neither a file nor a folder: download")]
#[case("--model chat_template.jinja", "chat_template.jinja: neither a file nor a folder: put a template there")]
#[case("--model model.safetensors", "model.safetensors: a folder, a pipe or a device, not a file: make it a file")]
#[case(
    "--model model.safetensors.index.json",
    "index.json: a folder, a pipe or a device, not a file: make it a readable"
)]
fn pipes_and_devices_are_refused_at_once(#[case] args: &str, #[case] expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    let pipe = |path: &Path| {
        fs::remove_file(path).ok();
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    pipe(&folder.path().join("pipe"));
    // A model of which one file is a pipe.
    if let Some(name) = args.strip_prefix("--model ") {
        let model = folder.path().join(name);
        common::model(&model);
        if name.ends_with("index.json") {
            fs::remove_file(model.join("model.safetensors")).unwrap();
        }
        pipe(&model.join(name));
    }
    let chat =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a b\"}, {\"role\": \"assistant\", \"content\": \"c\"}]}";
    fs::write(folder.path().join("chat.jsonl"), chat).unwrap();
    let data = if args.contains("--data") { "" } else { " --data chat.jsonl --seq-len 7 --ranks 2" };
    let args = format!("{args}{data}");
    let output = Command::new(env!("CARGO_BIN_EXE_finetune"))
        .current_dir(folder.path())
        .args(args.split_whitespace())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.lines().next().unwrap().contains(expected), "{stderr}");
}

/// A file that only others may read; who may read everything cannot see that.
#[cfg(unix)]
#[test]
fn a_file_that_may_not_be_read_is_named() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret.txt");
    fs::write(&path, "text").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    let readable = fs::read(&path).is_ok();
    let output = Command::new(env!("CARGO_BIN_EXE_finetune"))
        .current_dir(folder.path())
        .args(["--data", "secret.txt"])
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let expected = if readable { "4 tokens of text are less" } else { "secret.txt: Permission denied" };
    assert!(stderr.contains(expected), "{stderr}");
}
