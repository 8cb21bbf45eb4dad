//! What the arguments mean: every value resolved, checked, and printed with its reason.
//!
//! S sequence, L = ceil(S / P) local sequence, P ranks, H query heads, U query heads a stage.

use std::fmt;
use std::path::PathBuf;

use burn_context_parallel::group::MAX_RANKS;
use burn_context_parallel::sequence::SequenceLayout;
use burn_upipe::upipe::{AttentionScheme, Schedule};
use llama::{LlamaConfig, LlamaError, ParallelConfig};

use crate::cli::{Args, Scheme, Switch, Tile};
use crate::data::Text;
use crate::error::{Error, Result};
use crate::out;

/// Token ids of a byte-level vocabulary.
const BYTES: usize = 256;

/// Where the weights come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// Drawn from the seed.
    Scratch,
    /// A Hugging Face folder.
    Folder(PathBuf),
}

/// Where results go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutFolder {
    /// The folder that was asked for.
    Given(PathBuf),
    /// A new, numbered folder under this one.
    NewUnder(PathBuf),
}

/// A run, ready to start.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where the weights come from.
    pub model: ModelSource,
    /// The model's shape.
    pub config: LlamaConfig,
    /// What is trained on.
    pub text: Text,
    /// Tokens of a sequence, and of a step.
    pub seq_len: usize,
    /// Ranks that share it.
    pub ranks: usize,
    /// Which tokens each rank holds.
    pub layout: SequenceLayout,
    /// Which heads each rank holds at each stage, under U-Pipe.
    pub schedule: Option<Schedule>,
    /// The techniques in use.
    pub parallel: ParallelConfig,
    /// Optimizer steps.
    pub steps: usize,
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The largest norm of all gradients.
    pub clip: Option<f64>,
    /// Seed of the weights.
    pub seed: u64,
    /// Where results go.
    pub out: OutFolder,
    /// What was typed, for the reasons.
    args: Args,
}

impl Plan {
    /// Resolves and checks. Reads the text and the model's configuration; writes nothing.
    ///
    /// # Errors
    ///
    /// What is wrong with the arguments, all with [`Error::exit_code`] 2.
    pub fn new(args: &Args) -> Result<Self> {
        let ranks = ranks(args)?;
        let (model, config) = model(args)?;
        let text = match &args.data[..] {
            [] => Text::own_source(args.seq_len)?,
            paths => Text::read(paths, args.seq_len)?,
        };
        let layout = SequenceLayout::contiguous(args.seq_len, ranks).map_err(core)?;
        let schedule = schedule(args, &config, ranks)?;
        let local = layout.local_len(0);
        let largest = ParallelConfig::all();
        let parallel = ParallelConfig {
            attention: match args.attention {
                Scheme::Single => AttentionScheme::Single,
                Scheme::Ulysses => AttentionScheme::Ulysses,
                Scheme::Upipe => AttentionScheme::UPipe { heads_per_stage: args.heads_per_stage },
            },
            checkpoint: args.checkpoint == Switch::On,
            mlp_tile: tile(args.mlp_tile, local, largest.mlp_tile),
            norm_tile: tile(args.norm_tile, local, largest.norm_tile),
            loss_tile: tile(args.loss_tile, local, largest.loss_tile),
        };
        let out = match &args.out {
            Some(path) => {
                out::check(path)?;
                OutFolder::Given(path.clone())
            }
            None => OutFolder::NewUnder("runs".into()),
        };
        Ok(Self {
            model,
            config,
            text,
            seq_len: args.seq_len,
            ranks,
            layout,
            schedule,
            parallel,
            steps: args.steps,
            lr: args.lr,
            weight_decay: args.weight_decay,
            clip: args.clip.0,
            seed: args.seed,
            out,
            args: args.clone(),
        })
    }

    /// Parameters of the model.
    pub fn parameters(&self) -> usize {
        self.config.num_params()
    }
}

fn ranks(args: &Args) -> Result<usize> {
    match (args.attention, args.ranks) {
        (Scheme::Single, None | Some(1)) => Ok(1),
        (Scheme::Single, Some(ranks)) => Err(Error::input(
            format!("--attention single with --ranks {ranks}"),
            "leave --ranks out, or use ulysses or upipe",
        )),
        (_, None) => Ok(4),
        (_, Some(ranks)) if ranks > MAX_RANKS => {
            Err(Error::input(format!("--ranks {ranks}"), format!("use at most {MAX_RANKS}")))
        }
        (_, Some(ranks)) => Ok(ranks),
    }
}

fn model(args: &Args) -> Result<(ModelSource, LlamaConfig)> {
    let Some(folder) = &args.model else {
        let config =
            LlamaConfig { max_position_embeddings: args.seq_len, ..LlamaConfig::new(BYTES, 128, 352, 4, 8, 2) };
        return Ok((ModelSource::Scratch, config));
    };
    let config = LlamaConfig::read(&folder.join("config.json")).map_err(Error::Model)?;
    if config.vocab_size < BYTES {
        return Err(Error::NotByteLevel { folder: folder.clone(), vocab_size: config.vocab_size });
    }
    Ok((ModelSource::Folder(folder.clone()), config))
}

fn schedule(args: &Args, config: &LlamaConfig, ranks: usize) -> Result<Option<Schedule>> {
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    match (args.attention, args.heads_per_stage) {
        (Scheme::Upipe, Some(per_stage)) if per_stage > heads => Err(Error::input(
            format!("--heads-per-stage {per_stage} of {heads} query heads"),
            format!("use 1 to {heads}"),
        )),
        (Scheme::Upipe, per_stage) => {
            let per_stage = per_stage.unwrap_or_else(|| Schedule::default_per_stage(heads, ranks));
            Schedule::new(heads, kv_heads, ranks, per_stage).map(Some).map_err(core)
        }
        (_, None) => Ok(None),
        (_, Some(_)) => Err(Error::input("--heads-per-stage without --attention upipe", "leave one of them out")),
    }
}

/// `largest` suits long sequences; a shorter shard is still cut in four, so that the tiles are at work.
fn tile(asked: Tile, local: usize, largest: Option<usize>) -> Option<usize> {
    match asked {
        Tile::Off => None,
        Tile::Tokens(tokens) => Some(tokens),
        Tile::Auto => largest.map(|largest| local.div_ceil(4).min(largest)),
    }
}

fn core(error: burn_context_parallel::Error) -> Error {
    Error::Model(LlamaError::Core(error))
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, text: String| writeln!(f, "{name:<13}{text}");
        let c = &self.config;
        let local = self.layout.local_len(0);

        line(
            "model",
            match &self.model {
                ModelSource::Scratch => {
                    format!("from scratch, drawn once from seed {} and copied to every rank", self.seed)
                }
                ModelSource::Folder(folder) => format!("{}, copied to every rank", folder.display()),
            },
        )?;
        line(
            "",
            format!(
                "V {}, E {}, F {}, {} layers, {}/{} heads of {}: {} parameters",
                c.vocab_size,
                c.hidden_size,
                c.intermediate_size,
                c.num_hidden_layers,
                c.num_attention_heads,
                c.num_key_value_heads,
                c.head_dim,
                self.parameters()
            ),
        )?;
        if self.seq_len > c.max_position_embeddings {
            line(
                "",
                format!(
                    "trained on at most {} tokens before: a sequence of {} has positions that are new to it",
                    c.max_position_embeddings, self.seq_len
                ),
            )?;
        }
        line(
            "text",
            format!(
                "{} files, {} bytes{}",
                self.text.files.len(),
                self.text.bytes(),
                if self.args.data.is_empty() { ", this repository's own source (no --data)" } else { "" }
            ),
        )?;
        line(
            "tokens",
            match c.vocab_size {
                BYTES => "bytes".to_owned(),
                more => format!("bytes, as the first 256 of {more} ids: the model's own tokenizer is not used"),
            },
        )?;
        let sequences = self.text.sequences();
        line(
            "",
            format!(
                "{sequences} sequences of {}, {} bytes at the end left over; {:.2} times through them",
                self.seq_len,
                self.text.bytes() - sequences * self.seq_len,
                self.steps as f64 / sequences as f64
            ),
        )?;
        line(
            "steps",
            format!(
                "{} of {} tokens and {} targets (the last token has none)",
                self.steps,
                self.seq_len,
                self.seq_len - 1
            ),
        )?;
        line(
            "ranks",
            match (self.args.attention, self.args.ranks) {
                (Scheme::Single, _) => "1, attention is single".to_owned(),
                (_, None) => format!("{}, the default; threads of this process", self.ranks),
                (_, Some(_)) => format!("{}, as asked; threads of this process", self.ranks),
            },
        )?;
        line(
            "shards",
            format!(
                "{} tokens a rank, {} / {} rounded up; {} padding",
                local,
                self.seq_len,
                self.ranks,
                self.layout.padded_len() - self.seq_len
            ),
        )?;
        line("attention", self.attention())?;
        line(
            "checkpoint",
            match self.parallel.checkpoint {
                true => "on: a block keeps its input only, and runs again in the backward pass".to_owned(),
                false => "off: a block keeps all its intermediates".to_owned(),
            },
        )?;
        for (name, asked, tile) in [
            ("mlp tile", self.args.mlp_tile, self.parallel.mlp_tile),
            ("norm tile", self.args.norm_tile, self.parallel.norm_tile),
            ("loss tile", self.args.loss_tile, self.parallel.loss_tile),
        ] {
            line(
                name,
                match tile {
                    None => format!("off: {local} tokens at once"),
                    Some(tile) => format!(
                        "{tile} tokens, {} a shard{}",
                        local.div_ceil(tile),
                        if asked == Tile::Auto { "; auto takes a quarter of it, up to a limit" } else { "" }
                    ),
                },
            )?;
        }
        line(
            "optimizer",
            format!("AdamW, lr {}, betas 0.9 and 0.999, eps 1e-8, weight decay {}", self.lr, self.weight_decay),
        )?;
        line(
            "clip",
            match self.clip {
                Some(norm) => format!("{norm}, the norm of all gradients together, summed over ranks"),
                None => "none".to_owned(),
            },
        )?;
        line("peak", "heap bytes of this process: the sum over all its ranks".to_owned())?;
        line(
            "out",
            match &self.out {
                OutFolder::Given(path) => path.display().to_string(),
                OutFolder::NewUnder(parent) => format!("a new folder under {}", parent.display()),
            },
        )
    }
}

impl Plan {
    fn attention(&self) -> String {
        let heads = self.config.num_attention_heads;
        let idle = match self.ranks.saturating_sub(heads) {
            0 => String::new(),
            idle => format!("; {idle} ranks attend with no head: use at most {heads} ranks to keep all busy"),
        };
        match &self.schedule {
            None if self.ranks == 1 => format!("{:?}: all {heads} heads at once, no exchange", self.args.attention),
            None => format!("{:?}: all {heads} heads at once, exchanged between ranks{idle}", self.args.attention),
            Some(schedule) => {
                let per_stage = schedule.per_stage();
                let why = match self.args.heads_per_stage {
                    Some(_) => "as asked",
                    None => "one a rank",
                };
                let uneven = match per_stage % self.ranks {
                    0 => "",
                    _ => "; not a multiple of the ranks: they wait for each other",
                };
                format!(
                    "Upipe: {per_stage} of {heads} query heads a stage ({why}), {} stages{uneven}{idle}",
                    schedule.stages().len()
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::tensor::Device;
    use clap::Parser;
    use llama::Llama;
    use rstest::rstest;

    use super::*;

    fn plan(args: &str) -> Result<Plan> {
        Plan::new(&Args::parse_from(["finetune"].into_iter().chain(args.split_whitespace())))
    }

    #[rstest]
    #[case(LlamaConfig::new(256, 128, 352, 4, 8, 2))]
    #[case(LlamaConfig { tie_word_embeddings: true, attention_bias: true, ..LlamaConfig::new(300, 12, 20, 2, 6, 3) })]
    #[case(LlamaConfig { mlp_bias: true, head_dim: 10, ..LlamaConfig::new(256, 12, 20, 1, 6, 1) })]
    fn parameters_are_counted_as_the_model_has_them(#[case] config: LlamaConfig) {
        let model = Llama::init(&config, &ParallelConfig::none(), &Device::flex()).unwrap();
        let plan = Plan { config, ..plan("--seq-len 64").unwrap() };
        assert_eq!(plan.parameters(), model.num_params());
    }

    #[test]
    fn without_arguments_everything_is_on() {
        let plan = plan("").unwrap();
        assert_eq!((plan.ranks, plan.seq_len, plan.layout.local_len(0)), (4, 4096, 1024));
        assert_eq!(plan.schedule.as_ref().unwrap().stages().len(), 2);
        assert_eq!(
            plan.parallel,
            ParallelConfig {
                attention: AttentionScheme::UPipe { heads_per_stage: None },
                checkpoint: true,
                mlp_tile: Some(256),
                norm_tile: Some(256),
                loss_tile: Some(256),
            }
        );
    }

    #[test]
    fn everything_can_be_off() {
        let plan =
            plan("--attention single --checkpoint off --mlp-tile off --norm-tile off --loss-tile off --clip none")
                .unwrap();
        assert_eq!((plan.ranks, plan.parallel, plan.clip), (1, ParallelConfig::none(), None));
    }

    #[rstest]
    #[case("--seq-len 10 --ranks 4", "3 tokens a rank, 10 / 4 rounded up; 2 padding")]
    #[case("--heads-per-stage 3", "3 of 8 query heads a stage (as asked), 3 stages; not a multiple of the ranks")]
    #[case(
        "--ranks 9",
        "8 of 8 query heads a stage (one a rank), 1 stages; not a multiple of the ranks: they wait for each other; 1 ranks attend with no head"
    )]
    #[case("--attention ulysses", "Ulysses: all 8 heads at once, exchanged between ranks")]
    #[case("--attention single", "1, attention is single")]
    #[case("--steps 2 --seq-len 100", "2 of 100 tokens and 99 targets")]
    #[case("--mlp-tile 100", "mlp tile     100 tokens, 11 a shard")]
    fn derived_values_are_shown_with_their_reason(#[case] args: &str, #[case] expected: &str) {
        let text = plan(args).unwrap().to_string();
        assert!(text.contains(expected), "{text}");
    }

    #[rstest]
    #[case(Tile::Auto, 3, Some(1))]
    #[case(Tile::Auto, 1024, Some(256))]
    #[case(Tile::Auto, 1_000_000, Some(2048))]
    #[case(Tile::Off, 1024, None)]
    #[case(Tile::Tokens(5000), 1024, Some(5000))]
    fn tiles(#[case] asked: Tile, #[case] local: usize, #[case] expected: Option<usize>) {
        assert_eq!(tile(asked, local, Some(2048)), expected);
    }
}
