//! What was typed: no side effects, nothing derived. What it means is in [`Plan`](crate::Plan).

use std::ffi::OsString;
use std::path::PathBuf;

use burn_context_parallel::group::MeshShape;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use llama::DeviceList;

use crate::config;
use crate::error::{Error, Result};
use crate::offload::OffloadTo;
use crate::values::{
    Bytes, Clip, DataOrder, Packing, Precision, Schedule, Scheme, Steps, Switch, Tile, TokensFrom, at_least, mesh,
    not_negative, positive, seed,
};

const AFTER: &str = "\
Text: files of UTF-8, each a document; *.jsonl with an object a line, {\"text\": ..} a document, {\"messages\": [{\"role\": ..,
\"content\": ..}, ..]} a conversation, which the model's chat template renders and of which only answers are targets.
All tokens follow each other in file order and are cut into sequences of --seq-len; S tokens give S - 1 targets.

A step trains on --batch x --accumulate sequences, all ranks together on each of them, or under --mesh on the replicas' parts: ranks,
mesh, scheme, tiles, checkpoints and offload change memory and time only, losses are the same.

A checkpoint holds weights, optimizer and the place in the data. It is saved at the end, every --save-every steps, when a file
save-now appears in the output folder, and on SIGINT (Ctrl-C) or SIGTERM, which end the run after the step at hand; a second signal
ends it at once. --resume goes on from the newest whole one, with the same losses.

Exit status: 0 if the run came to its end or was asked to stop, 1 if it failed, 2 if the request makes no sense.";

/// Trains a Llama on long sequences, over ranks that share each of them.
///
/// Without arguments: a small model from scratch, on this repository's own source, with every technique on.
#[derive(Parser, Clone, Debug, PartialEq)]
#[command(name = "finetune", after_help = AFTER)]
pub struct Args {
    /// A Hugging Face folder (config.json, model.safetensors) to start from. Default: a small model from scratch.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// How text becomes token ids.
    #[arg(long, value_enum, default_value_t = TokensFrom::Auto)]
    pub tokens: TokensFrom,
    /// Files, and folders that are searched for source, text and JSONL files. Default: this repository's *.rs files.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Tokens of a sequence, S. Default: 4096; with --eval the whole text.
    #[arg(long, value_name = "N", value_parser = at_least::<2>, allow_negative_numbers = true)]
    pub seq_len: Option<usize>,
    /// How documents share a sequence.
    #[arg(long, value_enum, default_value_t = Packing::Auto)]
    pub packing: Packing,
    /// Use only the first N sequences. Default: all.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub sequences: Option<usize>,
    /// In which order sequences come.
    #[arg(long, value_enum, default_value_t = DataOrder::File)]
    pub data_order: DataOrder,
    /// Sequences side by side, B.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub batch: usize,
    /// Batches a step, one after the other; one mean over all their targets.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub accumulate: usize,
    /// Optimizer steps. Default: 40.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub steps: Option<usize>,
    /// Times through all sequences, in place of --steps.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub epochs: Option<usize>,
    /// Learning rate, the largest one. Default: 3e-3 from scratch, 1e-5 with --model.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// How the learning rate goes on after the warm-up.
    #[arg(long, value_enum, default_value_t = Schedule::Constant)]
    pub schedule: Schedule,
    /// Steps in which the learning rate rises from 0; the first one has 0.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = at_least::<0>, allow_negative_numbers = true)]
    pub warmup: usize,
    /// Where the cosine ends.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative, allow_negative_numbers = true)]
    pub min_lr: f64,
    /// AdamW's weight decay.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative, allow_negative_numbers = true)]
    pub weight_decay: f64,
    /// Largest norm of all gradients together, over all ranks.
    #[arg(long, value_name = "X|none", default_value = "1.0", allow_negative_numbers = true)]
    pub clip: Clip,
    /// Type of the computation; weights and optimizer are f32.
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// What the weights of a model from scratch and the order of --data-order shuffle are drawn from.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed, allow_negative_numbers = true)]
    pub seed: u64,
    /// Where it runs, as this program was built: flex, cpu, wgpu, vulkan, cuda:N, rocm:N, metal. All ranks share one device;
    /// several (cuda:0,cuda:1) are dealt out to ranks in turn.
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub device: DeviceList,
    /// Ranks (threads of this process) that share each sequence; with --mesh all of them. Default: 4; 1 under --attention single.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub ranks: Option<usize>,
    /// How ranks are divided: replicas that take turns with a step's sequences, and ranks that share each of them. Default: all
    /// share each sequence, data=1,ulysses=RANKS.
    #[arg(long, value_name = "data=N,ulysses=M", value_parser = mesh)]
    pub mesh: Option<MeshShape>,
    /// Shard weights, gradients and optimizer over all ranks (FSDP); whole weights exist for one block at a time.
    #[arg(long)]
    pub fsdp: bool,
    /// How attention runs.
    #[arg(long, value_enum, default_value_t = Scheme::Upipe)]
    pub attention: Scheme,
    /// Query heads (over all ranks) a stage, under upipe. Default: one a rank.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub heads_per_stage: Option<usize>,
    /// Recompute blocks in the backward pass.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub checkpoint: Switch,
    /// Blocks that are recomputed together, from the first one's input.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub blocks_per_checkpoint: usize,
    /// Where block inputs wait for the backward pass. Losses are the same.
    #[arg(long, value_enum, default_value_t = OffloadTo::None)]
    pub offload: OffloadTo,
    /// Offload the first of every N block inputs only. Default: all.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub offload_every: Option<usize>,
    /// Offload only block inputs beyond this on the device, over all ranks; 1073741824, 1GiB.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    pub offload_budget: Option<Bytes>,
    /// Host memory for them, over all ranks. Default: what machine and control group have left when training starts.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    pub offload_host_budget: Option<Bytes>,
    /// A folder for a file without a name: of --offload disk, or where host memory does not suffice. Default with disk: --out.
    #[arg(long, value_name = "DIR")]
    pub offload_dir: Option<PathBuf>,
    /// Disk for them, over all ranks. Default: as much as there is.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    pub offload_disk_budget: Option<Bytes>,
    /// Block inputs on a device at a time because of offload; 1 fetches none ahead. Default: 2.
    #[arg(long, value_name = "K", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub offload_in_flight: Option<usize>,
    /// Tokens a tile of the feed-forward.
    #[arg(long, value_name = "N|auto|off", allow_negative_numbers = true, default_value = "auto")]
    pub mlp_tile: Tile,
    /// Tokens a tile of the norms.
    #[arg(long, value_name = "N|auto|off", allow_negative_numbers = true, default_value = "auto")]
    pub norm_tile: Tile,
    /// Tokens a tile of output layer and loss.
    #[arg(long, value_name = "N|auto|off", allow_negative_numbers = true, default_value = "auto")]
    pub loss_tile: Tile,
    /// Only the loss, without training; --batch sequences at a time. Writes nothing unless there is --out.
    #[arg(long)]
    pub eval: bool,
    /// Where to write; a folder that does not exist or is empty, or with one of the next two a run's. Default: a new folder under
    /// runs/.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on with the run in --out from its newest checkpoint, on any mesh. Without a checkpoint there: start.
    #[arg(long)]
    pub resume: bool,
    /// Replace the run in --out.
    #[arg(long)]
    pub overwrite: bool,
    /// Save a checkpoint every N steps, too. Default: at the end, and when asked to.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub save_every: Option<usize>,
    /// How many checkpoints stay, the newest ones.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub keep: usize,
    /// Write where time and memory went in some steps to this folder (profile.txt, trace.json, memory.html); and when memory is out,
    /// what it was full of.
    #[arg(long, value_name = "DIR")]
    pub profile: Option<PathBuf>,
    /// The steps of --profile. Default: 2-3, the first one draws and allocates what stays.
    #[arg(long, value_name = "A-B|A,B,..", allow_negative_numbers = true)]
    pub profile_steps: Option<Steps>,
    /// Values for any of these, by the same names (seq-len = 8192); what is typed here wins.
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
}

impl Args {
    /// Reads a command line, its first word the program's name, and the file of its `--config`.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] for what is typed (`--help` is one), [`Error::Config`] for what the file says; the latter's values obey
    /// the same rules.
    pub fn read<T: Into<OsString> + Clone>(line: impl IntoIterator<Item = T>) -> Result<Self> {
        let line: Vec<OsString> = line.into_iter().map(Into::into).collect();
        let usage = |error: clap::Error| Error::Usage(Box::new(error));
        let matches = Self::command().try_get_matches_from(&line).map_err(usage)?;
        let typed = Self::from_arg_matches(&matches).map_err(usage)?;
        let Some(path) = &typed.config else {
            return Ok(typed);
        };
        let typed_too = |name: &str| {
            let id = name.replace('-', "_");
            matches.value_source(&id) == Some(ValueSource::CommandLine)
                // Two names for one number.
                || (id == "steps" || id == "epochs") && (typed.steps.is_some() || typed.epochs.is_some())
                || (id == "ranks" || id == "mesh") && (typed.ranks.is_some() || typed.mesh.is_some())
        };
        let words: Vec<OsString> = config::words(path, typed_too)?.into_iter().map(OsString::from).collect();
        let name = || line.first().cloned().into_iter();
        // Alone first: what is wrong now is the file's.
        Self::try_parse_from(name().chain(words.clone())).map_err(|error| Error::Config {
            path: path.clone(),
            line: None,
            problem: one_line(&error.to_string()),
            remedy: "correct the file".to_owned(),
        })?;
        Self::try_parse_from(name().chain(words).chain(line.iter().skip(1).cloned())).map_err(usage)
    }
}

/// Clap's message as one line with fault and remedy, without "error: "; it spreads them over several.
pub fn one_line(message: &str) -> String {
    let mut parts: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    let has_remedy =
        |part: &&str| [": give ", ": use ", ": did you mean ", ": list it "].iter().any(|word| part.contains(word));
    if parts.len() < 2 && !parts.iter().any(has_remedy) {
        parts.push("see --help");
    }
    let line = parts.join(": ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("--clip -1", "invalid value '-1' for '--clip <X|none>': give a number above 0, or none")]
    #[case("--seq-len 1", "invalid value '1' for '--seq-len <N>': give a whole number from 2")]
    #[case("--rank 3", "unexpected argument '--rank' found: tip: a similar argument exists: '--ranks'")]
    #[case(
        "--attention qq",
        "invalid value 'qq' for '--attention <ATTENTION>': [possible values: single, ulysses, upipe]"
    )]
    #[case("--seed -1", "invalid value '-1' for '--seed <N>': give a whole number from 0 to 18446744073709551615")]
    #[case(
        "--device vulcan",
        "invalid value 'vulcan' for '--device <DEVICE>': no device is called \"vulcan\": did you mean vulkan?"
    )]
    #[case("once", "unexpected argument 'once' found: see --help")]
    fn a_message_is_one_line_with_a_remedy(#[case] args: &str, #[case] expected: &str) {
        let error = Args::read(["finetune"].into_iter().chain(args.split_whitespace())).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}
