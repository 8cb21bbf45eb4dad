//! What was typed: no side effects, nothing derived. What it means is in [`Plan`](crate::Plan).

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};

const AFTER: &str = "\
Text is read as bytes: token ids 0 to 255. Tokenizers (tokenizer.json), JSONL, schedules and resuming come later; --model
takes any Llama with at least 256 token ids, and uses the first 256 of them.

Every switch changes memory and time only: losses are the same for any ranks, scheme, tiles and checkpoints.

Exit status: 0 if the run came to its end, 1 if it failed, 2 if the request makes no sense.";

/// Trains a Llama on long sequences, over ranks that share each of them.
///
/// Without arguments: a small model from scratch, on this repository's own source, with every technique on.
#[derive(Parser, Clone, Debug)]
#[command(name = "finetune", after_help = AFTER)]
pub struct Args {
    /// A Hugging Face folder (config.json, model.safetensors) to start from. Default: a small model from scratch.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Text files, and folders that are searched for source and text files. Default: this repository's *.rs files.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Tokens of a sequence, S; a step trains on one sequence.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least::<2>, allow_negative_numbers = true)]
    pub seq_len: usize,
    /// Ranks (threads of this process) that share each sequence. Default: 4; 1 under --attention single.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub ranks: Option<usize>,
    /// How attention runs.
    #[arg(long, value_enum, default_value_t = Scheme::Upipe)]
    pub attention: Scheme,
    /// Query heads (over all ranks) a stage, under upipe. Default: one a rank.
    #[arg(long, value_name = "N", value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub heads_per_stage: Option<usize>,
    /// Recompute blocks in the backward pass.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub checkpoint: Switch,
    /// Tokens a tile of the feed-forward.
    #[arg(long, value_name = "N|auto|off", allow_negative_numbers = true, default_value = "auto")]
    pub mlp_tile: Tile,
    /// Tokens a tile of the norms.
    #[arg(long, value_name = "N|auto|off", allow_negative_numbers = true, default_value = "auto")]
    pub norm_tile: Tile,
    /// Tokens a tile of output layer and loss.
    #[arg(long, value_name = "N|auto|off", allow_negative_numbers = true, default_value = "auto")]
    pub loss_tile: Tile,
    /// Optimizer steps.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = at_least::<1>, allow_negative_numbers = true)]
    pub steps: usize,
    /// Learning rate, the same at every step.
    #[arg(long, value_name = "X", default_value_t = 3e-3, value_parser = positive, allow_negative_numbers = true)]
    pub lr: f64,
    /// AdamW's weight decay.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative, allow_negative_numbers = true)]
    pub weight_decay: f64,
    /// Largest norm of all gradients together, over all ranks.
    #[arg(long, value_name = "X|none", default_value = "1.0", allow_negative_numbers = true)]
    pub clip: Clip,
    /// What the weights of a model from scratch are drawn from.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub seed: u64,
    /// Where to write; a folder that does not exist or is empty. Default: a new folder under runs/.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// How attention runs.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// The whole sequence on one rank.
    Single,
    /// Over ranks, all heads at once.
    Ulysses,
    /// Over ranks, some heads at a time.
    Upipe,
}

/// On or off.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// The size of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// From the shard's length.
    Auto,
    /// No tiles.
    Off,
    /// So many tokens.
    Tokens(usize),
}

impl FromStr for Tile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            number => match at_least::<1>(number) {
                Ok(tokens) => Ok(Self::Tokens(tokens)),
                Err(_) => Err("give a number of tokens from 1, auto or off".to_owned()),
            },
        }
    }
}

/// The largest norm, if any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip(pub Option<f64>);

impl FromStr for Clip {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            number => match positive(number) {
                Ok(norm) => Ok(Self(Some(norm))),
                Err(_) => Err("give a number above 0, or none".to_owned()),
            },
        }
    }
}

fn at_least<const MIN: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number >= MIN => Ok(number),
        _ => Err(format!("give a whole number from {MIN}")),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("give a number above 0".to_owned()),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("give 0 or a number above it".to_owned()),
    }
}

/// Clap's message as one line with fault and remedy; it spreads them over several.
pub fn one_line(message: &str) -> String {
    let mut parts: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    if parts.len() < 2 && !parts.iter().any(|part| part.contains(": give ")) {
        parts.push("see --help");
    }
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("--clip -1", "error: invalid value '-1' for '--clip <X|none>': give a number above 0, or none")]
    #[case("--seq-len 1", "error: invalid value '1' for '--seq-len <N>': give a whole number from 2")]
    #[case("--rank 3", "error: unexpected argument '--rank' found: tip: a similar argument exists: '--ranks'")]
    #[case(
        "--attention qq",
        "error: invalid value 'qq' for '--attention <ATTENTION>': [possible values: single, ulysses, upipe]"
    )]
    #[case("once", "error: unexpected argument 'once' found: see --help")]
    fn a_message_is_one_line_with_a_remedy(#[case] args: &str, #[case] expected: &str) {
        let error = Args::try_parse_from(["finetune"].into_iter().chain(args.split_whitespace())).unwrap_err();
        assert_eq!(one_line(&error.to_string()), expected);
    }

    #[rstest]
    #[case("auto", Some(Tile::Auto))]
    #[case("off", Some(Tile::Off))]
    #[case("7", Some(Tile::Tokens(7)))]
    #[case("0", None)]
    #[case("-3", None)]
    #[case("on", None)]
    fn a_tile_is_a_length_or_a_word(#[case] text: &str, #[case] expected: Option<Tile>) {
        assert_eq!(text.parse().ok(), expected);
    }
}
