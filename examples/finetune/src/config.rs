//! `--config`: a TOML file with the names of the command line, read into words of one; and the resolved one, written.

use std::path::Path;

use burn_upipe::offload::OffloadPolicy;
use clap::CommandFactory;
use toml::Value;
use toml::de::{DeTable, DeValue};

use crate::cli::Args;
use crate::error::{Error, Result};
use crate::files;
use crate::plan::{ModelSource, Plan};
use crate::values::{Clip, Switch, word};

/// What is typed without a value.
const FLAGS: [&str; 4] = ["eval", "fsdp", "resume", "overwrite"];

/// The file's values as words of a command line, without those that are also typed.
///
/// # Errors
///
/// [`Error::Config`] if the file cannot be read, is not TOML, or has a key or a kind of value that nothing takes.
pub(crate) fn words(path: &Path, typed_too: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let fail = |line: Option<usize>, problem: String, remedy: String| Error::Config {
        path: path.to_owned(),
        line,
        problem,
        remedy,
    };
    let text = files::read_text(path)
        .map_err(|error| fail(None, error.problem(), "give a TOML file of values, seq-len = 8192".to_owned()))?;
    let table = DeTable::parse(&text).map_err(|error| {
        let line = error.span().map(|span| line(&text, span.start));
        let problem = format!("not TOML: {}", error.message().lines().next().unwrap_or_default());
        fail(line, problem, "write name = value, words in quotes".to_owned())
    })?;
    let known = names();
    let mut words = Vec::new();
    for (key, value) in table.get_ref() {
        let name = key.get_ref().as_ref();
        let line = Some(line(&text, key.span().start));
        if !known.iter().any(|known| known == name) {
            return Err(fail(line, format!("unknown key {name:?}"), near(name, &known)));
        }
        if typed_too(name) {
            continue;
        }
        match value.get_ref() {
            DeValue::Boolean(on) if FLAGS.contains(&name) => words.extend(on.then(|| format!("--{name}"))),
            // None would be no --data, which is this repository's source.
            DeValue::Array(items) if name == "data" && items.is_empty() => {
                return Err(fail(
                    line,
                    "data is an empty list".into(),
                    "name files or folders, or leave data out".into(),
                ));
            }
            DeValue::Array(items) if name == "data" => {
                for item in items.iter() {
                    let DeValue::String(item) = item.get_ref() else {
                        return Err(fail(line, format!("{name} has an item that is no string"), quotes()));
                    };
                    words.push(format!("--{name}={item}"));
                }
            }
            _ if FLAGS.contains(&name) => {
                return Err(fail(line, format!("{name} is neither true nor false"), "use true".into()));
            }
            DeValue::String(value) => words.push(format!("--{name}={value}")),
            DeValue::Integer(value) if value.radix() == 10 => words.push(format!("--{name}={}", value.as_str())),
            DeValue::Float(value) => words.push(format!("--{name}={}", value.as_str())),
            other => {
                let problem = format!("{name} is of type {}", other.type_str());
                return Err(fail(line, problem, "give a number, or a word in quotes".to_owned()));
            }
        }
    }
    Ok(words)
}

fn quotes() -> String {
    "give a list of paths in quotes".to_owned()
}

/// Counted from 1.
fn line(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

/// What a file may set: everything but the file itself.
fn names() -> Vec<String> {
    let command = Args::command();
    let names = command.get_arguments().filter_map(|arg| arg.get_long()).map(str::to_owned);
    names.filter(|name| !["help", "config"].contains(&&**name)).collect()
}

fn near(name: &str, known: &[String]) -> String {
    let name = name.to_lowercase().replace('_', "-");
    let mut near: Vec<(f64, &str)> = known
        .iter()
        .map(|known| (strsim::jaro_winkler(&name, known), &**known))
        .filter(|(score, _)| *score > 0.8)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.truncate(3);
    match &near[..] {
        [] => format!("use one of {}", known.join(", ")),
        near => format!("did you mean {}?", near.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(" or ")),
    }
}

/// The plan as a file that `--config` takes: the same run again, with everything decided. Without `out`, `resume`,
/// `overwrite` and `profile`: each of those is said anew.
pub(crate) fn resolved(plan: &Plan) -> String {
    let mut file = "# This run again, in a folder of its own: finetune --config THIS_FILE --out NEW\n".to_owned();
    // Line by line, in the order of --help; a table would sort them.
    let mut set = |name: &str, value: Value| file += &format!("{name} = {value}\n");
    let number = |number: usize| Value::Integer(i64::try_from(number).unwrap_or(i64::MAX));
    let text = |text: String| Value::String(text);
    let tile = |tile: Option<usize>| tile.map_or_else(|| text("off".into()), number);
    // Absolute: the file lies elsewhere than where it was typed.
    let path = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        text(path.display().to_string())
    };
    let args = plan.args();

    if let ModelSource::Folder(folder) = &plan.model {
        set("model", path(folder));
    }
    set("tokens", text(word(args.tokens)));
    if !args.data.is_empty() {
        set("data", Value::Array(args.data.iter().map(|data| path(data)).collect()));
    }
    set("seq-len", number(plan.seq_len));
    set("packing", text(word(plan.packing)));
    if let Some(sequences) = args.sequences {
        set("sequences", number(sequences));
    }
    set("data-order", text(word(plan.order.kind)));
    set("batch", number(plan.batch));
    set("accumulate", number(plan.accumulate));
    set("steps", number(plan.steps));
    set("lr", Value::Float(plan.rate.peak));
    set("schedule", text(word(plan.rate.kind)));
    set("warmup", number(plan.rate.warmup));
    set("min-lr", Value::Float(plan.rate.min));
    set("weight-decay", Value::Float(plan.weight_decay));
    set("clip", plan.clip.map_or_else(|| text(Clip(None).to_string()), Value::Float));
    set("dtype", text(word(plan.precision)));
    set("seed", i64::try_from(plan.seed).map_or_else(|_| text(plan.seed.to_string()), Value::Integer));
    set("device", text(plan.device.to_string()));
    set("ranks", number(plan.ranks));
    if plan.mesh.data > 1 {
        set("mesh", text(plan.mesh.typed()));
    }
    if plan.fsdp {
        set("fsdp", Value::Boolean(true));
    }
    set("attention", text(word(args.attention)));
    if let Some(schedule) = &plan.schedule {
        set("heads-per-stage", number(schedule.per_stage()));
    }
    set("checkpoint", text(word(if plan.parallel.checkpoint { Switch::On } else { Switch::Off })));
    set("blocks-per-checkpoint", number(plan.parallel.blocks_per_checkpoint));
    set("offload", text(word(args.offload)));
    if let Some(offload) = &plan.offload {
        match offload.policy {
            OffloadPolicy::Every(every) => set("offload-every", number(every)),
            OffloadPolicy::Budget(bytes) => set("offload-budget", number(bytes)),
            OffloadPolicy::All | OffloadPolicy::None => {}
        }
        if let Some(bytes) = offload.host_budget {
            set("offload-host-budget", number(bytes));
        }
        if let Some(folder) = &offload.folder {
            set("offload-dir", path(folder));
        }
        if let Some(bytes) = offload.disk_budget {
            set("offload-disk-budget", number(usize::try_from(bytes).unwrap_or(usize::MAX)));
        }
        set("offload-in-flight", number(offload.in_flight));
    }
    set("mlp-tile", tile(plan.parallel.mlp_tile));
    set("norm-tile", tile(plan.parallel.norm_tile));
    set("loss-tile", tile(plan.parallel.loss_tile));
    if let Some(steps) = plan.save_every {
        set("save-every", number(steps));
    }
    set("keep", number(plan.keep.get()));
    if plan.eval {
        set("eval", Value::Boolean(true));
    }
    file
}
