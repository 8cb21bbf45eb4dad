//! What the arguments mean: every value resolved and checked. Why each is what it is stands in [`explain`](crate::explain).
//!
//! S sequence, L = ceil(S / P) local sequence, P ranks of a sequence, B sequences side by side, H query heads, U query heads a stage.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use burn_context_parallel::group::{MAX_RANKS, MeshShape};
use burn_context_parallel::sequence::SequenceLayout;
use burn_upipe::upipe::{AttentionScheme, Schedule as StageSchedule};
use llama::{LlamaConfig, LlamaError, ParallelConfig};

use crate::cli::Args;
use crate::corpus::Corpus;
use crate::documents::Documents;
use crate::error::{Error, Result};
use crate::files;
use crate::offload::OffloadPlan;
use crate::order::Order;
use crate::out;
use crate::profile;
use crate::schedule::LearningRate;
use crate::tokens::{BYTES, Tokens};
use crate::values::{OnRun, Packing, Precision, Schedule, Scheme, Steps, Switch, Tile, TokensFrom, mesh_word};

/// Where neither --steps nor --epochs says.
pub(crate) const STEPS: usize = 40;
/// Where --seq-len does not say.
pub(crate) const SEQ_LEN: usize = 4096;
/// Where --lr does not say: weights from scratch have everything to learn,
pub(crate) const LR_SCRATCH: f64 = 3e-3;
/// pretrained ones much to lose.
pub(crate) const LR_MODEL: f64 = 1e-5;
/// A run of more steps is a slip of the keyboard: at a millisecond each it takes a day.
const MAX_STEPS: usize = 100_000_000;

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
    /// Nowhere: an evaluation is said, not written.
    Nowhere,
}

/// Which steps are profiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Where the profile goes.
    pub folder: PathBuf,
    /// The steps.
    pub steps: Steps,
}

/// A run, ready to start. A clone shares the text.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where the weights come from.
    pub model: ModelSource,
    /// The model's shape.
    pub config: LlamaConfig,
    /// How text becomes token ids.
    pub tokens: Arc<Tokens>,
    /// What is trained on.
    pub corpus: Arc<Corpus>,
    /// How documents share a sequence; never [`Packing::Auto`].
    pub packing: Packing,
    /// Tokens of a sequence, S.
    pub seq_len: usize,
    /// Sequences side by side, B.
    pub batch: usize,
    /// Micro-batches of a step.
    pub accumulate: usize,
    /// Which sequences each step takes.
    pub order: Order,
    /// All ranks.
    pub ranks: usize,
    /// How they are divided: `data` replicas of `ulysses` ranks, P, that share each sequence.
    pub mesh: MeshShape,
    /// Whether weights, gradients and optimizer are in shards over all ranks.
    pub fsdp: bool,
    /// Which tokens each of the P ranks holds.
    pub layout: SequenceLayout,
    /// Which heads each rank holds at each stage, under U-Pipe.
    pub schedule: Option<StageSchedule>,
    /// The techniques in use.
    pub parallel: ParallelConfig,
    /// Where block inputs wait, if not on the device.
    pub offload: Option<OffloadPlan>,
    /// Optimizer steps.
    pub steps: usize,
    /// Learning rate of each step.
    pub rate: LearningRate,
    /// Weight decay.
    pub weight_decay: f64,
    /// The largest norm of all gradients.
    pub clip: Option<f64>,
    /// The type of the computation.
    pub precision: Precision,
    /// Seed of the weights and of the order.
    pub seed: u64,
    /// Only the loss, without training.
    pub eval: bool,
    /// Where results go.
    pub out: OutFolder,
    /// What becomes of a run that is there.
    pub on_run: OnRun,
    /// Steps between checkpoints, beside those that are saved in any case.
    pub save_every: Option<usize>,
    /// Checkpoints that stay.
    pub keep: NonZeroUsize,
    /// What of it is profiled.
    pub profile: Option<Profile>,
    /// What was typed, for the reasons.
    args: Args,
}

impl Plan {
    /// Resolves and checks. Reads the text and the model's configuration; writes nothing.
    ///
    /// # Errors
    ///
    /// What is wrong with the arguments, the text or the model's folder, all with [`Error::exit_code`] 2.
    pub fn new(args: &Args) -> Result<Self> {
        let (mesh, ranks) = mesh(args)?;
        let on_run = on_run(args)?;
        let out = match &args.out {
            Some(path) => {
                out::check(path, on_run)?;
                if on_run == OnRun::Overwrite {
                    out::expect_apart(path, args.model.iter().map(|model| ("--model", model)))?;
                    out::expect_apart(path, args.data.iter().map(|data| ("--data", data)))?;
                }
                OutFolder::Given(path.clone())
            }
            None if args.eval => OutFolder::Nowhere,
            None => OutFolder::NewUnder("runs".into()),
        };
        let offload = OffloadPlan::new(args)?;
        let (model, mut config) = model(args)?;
        let schedule = schedule(args, &config, mesh.ulysses)?;
        let tokens = tokens(args, &config)?;
        let (corpus, packing) = corpus(args, &config, &tokens)?;
        let seq_len = corpus.seq_len;
        if model == ModelSource::Scratch {
            config.max_position_embeddings = seq_len;
        }
        if mesh.ulysses > seq_len {
            let asked = args.mesh.map_or_else(|| format!("--ranks {ranks}"), |_| format!("--mesh {}", mesh_word(mesh)));
            return Err(Error::input(
                format!("{asked} for sequences of {seq_len} tokens"),
                format!("use at most {seq_len}, or a longer --seq-len: every rank of a sequence needs a token"),
            ));
        }
        let layout = SequenceLayout::contiguous(seq_len, mesh.ulysses).map_err(core)?;
        let local = layout.local_len(0);
        let largest = ParallelConfig::all();
        let parallel = ParallelConfig {
            attention: match args.attention {
                Scheme::Single => AttentionScheme::Single,
                Scheme::Ulysses => AttentionScheme::Ulysses,
                Scheme::Upipe => AttentionScheme::UPipe { heads_per_stage: args.heads_per_stage },
            },
            checkpoint: args.checkpoint == Switch::On,
            blocks_per_checkpoint: blocks_per_checkpoint(args, &config)?,
            mlp_tile: tile(args.mlp_tile, local, largest.mlp_tile),
            norm_tile: tile(args.norm_tile, local, largest.norm_tile),
            loss_tile: tile(args.loss_tile, local, largest.loss_tile),
        };
        let order = order(args, corpus.sequences())?;
        let steps = steps(args, &order)?;
        let rate = rate(args, steps)?;
        Ok(Self {
            model,
            config,
            tokens: Arc::new(tokens),
            corpus: Arc::new(corpus),
            packing,
            seq_len,
            batch: args.batch,
            accumulate: args.accumulate,
            order,
            ranks,
            mesh,
            fsdp: args.fsdp,
            layout,
            schedule,
            parallel,
            offload,
            steps,
            rate,
            weight_decay: args.weight_decay,
            clip: args.clip.0,
            precision: args.dtype,
            seed: args.seed,
            eval: args.eval,
            out,
            on_run,
            save_every: args.save_every,
            keep: NonZeroUsize::new(args.keep).unwrap_or(NonZeroUsize::MIN),
            profile: profile(args, steps)?,
            args: args.clone(),
        })
    }

    /// What was typed.
    pub fn args(&self) -> &Args {
        &self.args
    }
}

fn on_run(args: &Args) -> Result<OnRun> {
    let on_run = match (args.resume, args.overwrite) {
        (false, false) => return Ok(OnRun::Refuse),
        (true, true) => {
            let remedy = "--resume goes on with the run in --out, --overwrite replaces it: use one of them";
            return Err(Error::input("--resume and --overwrite together", remedy));
        }
        (true, false) => OnRun::Resume,
        (false, true) => OnRun::Overwrite,
    };
    let name = if args.resume { "--resume" } else { "--overwrite" };
    if args.out.is_none() {
        return Err(Error::input(format!("{name} without --out"), "name the run's folder: --out runs/0001"));
    }
    if args.resume && args.eval {
        return Err(Error::input("--resume with --eval", "an evaluation starts anew each time: leave --resume out"));
    }
    Ok(on_run)
}

/// The degrees, and how many ranks they make.
fn mesh(args: &Args) -> Result<(MeshShape, usize)> {
    let single = args.attention == Scheme::Single;
    let mesh = match (args.mesh, args.ranks) {
        (Some(mesh), _) => mesh,
        (None, None) => MeshShape { ulysses: if single { 1 } else { 4 }, ..MeshShape::default() },
        (None, Some(ranks)) => MeshShape { ulysses: ranks, ..MeshShape::default() },
    };
    let asked =
        args.mesh.map_or_else(|| format!("--ranks {}", mesh.ulysses), |mesh| format!("--mesh {}", mesh_word(mesh)));
    if single && mesh.ulysses > 1 {
        let remedy = match args.mesh {
            None => format!("leave --ranks out, use --mesh data={}, or use ulysses or upipe", mesh.ulysses),
            Some(_) => "use ulysses=1, or --attention ulysses or upipe".to_owned(),
        };
        return Err(Error::input(format!("--attention single with {asked}"), remedy));
    }
    let Some(ranks) = mesh.ranks().filter(|ranks| *ranks <= MAX_RANKS) else {
        return Err(Error::input(asked, format!("use at most {MAX_RANKS} ranks")));
    };
    match args.ranks {
        Some(given) if given != ranks => Err(Error::input(
            format!("{mesh} needs {ranks} ranks, --ranks {given} was given"),
            format!("leave --ranks out, or use --ranks {ranks}"),
        )),
        _ => Ok((mesh, ranks)),
    }
}

fn model(args: &Args) -> Result<(ModelSource, LlamaConfig)> {
    let Some(folder) = &args.model else {
        return Ok((ModelSource::Scratch, LlamaConfig::new(BYTES, 128, 352, 4, 8, 2)));
    };
    let config = LlamaConfig::read(&folder.join("config.json")).map_err(Error::Model)?;
    Ok((ModelSource::Folder(folder.clone()), config))
}

fn tokens(args: &Args, config: &LlamaConfig) -> Result<Tokens> {
    match (args.tokens, &args.model) {
        (TokensFrom::Auto, Some(folder)) => Tokens::from_folder(folder),
        (TokensFrom::Bytes, Some(folder)) if config.vocab_size < BYTES => {
            Err(Error::NotByteLevel { folder: folder.clone(), vocab_size: config.vocab_size })
        }
        _ => Ok(Tokens::Bytes),
    }
}

fn corpus(args: &Args, config: &LlamaConfig, tokens: &Tokens) -> Result<(Corpus, Packing)> {
    let files = match &args.data[..] {
        [] => files::own_source()?,
        paths => files::find(paths)?,
    };
    let documents = Documents::read(&files, tokens)?;
    let vocabulary = config.vocab_size;
    if let Some(id) = documents.tokens.iter().find(|id| **id as usize >= vocabulary) {
        return Err(Error::input(
            format!("token id {id} of the text in a vocabulary of {vocabulary}"),
            "put the tokenizer.json that belongs to the model into its folder",
        ));
    }
    let ended = tokens.end().is_some() || documents.records + documents.chats > 0;
    let packing = match args.packing {
        Packing::Auto if ended => Packing::Documents,
        Packing::Auto => Packing::Stream,
        asked => asked,
    };
    let seq_len = args.seq_len.or((!args.eval).then_some(SEQ_LEN));
    let corpus = Corpus::new(files, documents, packing == Packing::Documents, seq_len, args.sequences)?;
    Ok((corpus, packing))
}

fn order(args: &Args, sequences: usize) -> Result<Order> {
    let per_step = args.batch.checked_mul(args.accumulate).filter(|per_step| *per_step <= sequences);
    let per_step = match per_step {
        Some(per_step) => per_step,
        // An evaluation has no steps; its last batch is smaller.
        None if args.eval => sequences,
        None => {
            return Err(Error::input(
                format!("--batch {} x --accumulate {} of {sequences} sequences", args.batch, args.accumulate),
                format!("use at most {sequences} sequences a step, a smaller --seq-len, or more text"),
            ));
        }
    };
    Ok(Order { kind: args.data_order, seed: args.seed, sequences, per_step })
}

fn steps(args: &Args, order: &Order) -> Result<usize> {
    let remedy = format!("use at most {MAX_STEPS} steps");
    match (args.steps, args.epochs) {
        (Some(_), Some(_)) => Err(Error::input("--steps and --epochs together", "leave one of them out")),
        (None, None) => Ok(STEPS),
        (Some(steps), None) if steps <= MAX_STEPS => Ok(steps),
        (Some(steps), None) => Err(Error::input(format!("--steps {steps}"), remedy)),
        (None, Some(epochs)) => epochs
            .checked_mul(order.steps_per_epoch())
            .filter(|steps| *steps <= MAX_STEPS)
            .ok_or_else(|| Error::input(format!("--epochs {epochs} of {} steps", order.steps_per_epoch()), remedy)),
    }
}

fn rate(args: &Args, steps: usize) -> Result<LearningRate> {
    if args.warmup > steps && !args.eval {
        return Err(Error::input(
            format!("--warmup {} in {steps} steps", args.warmup),
            format!("use at most {steps}, or more --steps"),
        ));
    }
    let peak = args.lr.unwrap_or(if args.model.is_some() { LR_MODEL } else { LR_SCRATCH });
    if args.min_lr > peak {
        return Err(Error::input(
            format!("--min-lr {} above --lr {peak}", args.min_lr),
            "the cosine falls: lower --min-lr",
        ));
    }
    if args.min_lr > 0.0 && args.schedule == Schedule::Constant {
        return Err(Error::input("--min-lr without --schedule cosine", "leave one of them out"));
    }
    Ok(LearningRate { kind: args.schedule, peak, min: args.min_lr, warmup: args.warmup, steps })
}

fn profile(args: &Args, steps: usize) -> Result<Option<Profile>> {
    let Some(folder) = &args.profile else {
        return match &args.profile_steps {
            Some(_) => Err(Error::input("--profile-steps without --profile", "name a folder: --profile DIR")),
            None => Ok(None),
        };
    };
    if args.eval {
        return Err(Error::input("--profile with --eval", "an evaluation has no steps: leave --profile out"));
    }
    let asked = match &args.profile_steps {
        Some(asked) if asked.last() > steps => {
            return Err(Error::input(
                format!("--profile-steps {asked} of {steps} steps"),
                format!("use steps from 1 to {steps}"),
            ));
        }
        Some(asked) => asked.clone(),
        None => Steps::range(2.min(steps), 3.min(steps)),
    };
    let shown = folder.display();
    if let Some(there) = folder.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir()) {
        let what = if there == folder { String::new() } else { format!("{} is ", there.display()) };
        let remedy = "name a folder, or one that is to be made";
        return Err(Error::input(format!("--profile {shown}: {what}not a folder"), remedy));
    }
    if let Some(file) = profile::files(folder).into_iter().find(|file| file.exists()) {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Err(Error::input(
            format!("--profile {shown}: {name} is there already"),
            "name another folder: no profile is replaced",
        ));
    }
    Ok(Some(Profile { folder: folder.clone(), steps: asked }))
}

fn schedule(args: &Args, config: &LlamaConfig, ranks: usize) -> Result<Option<StageSchedule>> {
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    match (args.attention, args.heads_per_stage) {
        (Scheme::Upipe, Some(per_stage)) if per_stage > heads => Err(Error::input(
            format!("--heads-per-stage {per_stage} of {heads} query heads"),
            format!("use 1 to {heads}"),
        )),
        (Scheme::Upipe, per_stage) => {
            let per_stage = per_stage.unwrap_or_else(|| StageSchedule::default_per_stage(heads, ranks));
            StageSchedule::new(heads, kv_heads, ranks, per_stage).map(Some).map_err(core)
        }
        (_, None) => Ok(None),
        (_, Some(_)) => Err(Error::input("--heads-per-stage without --attention upipe", "leave one of them out")),
    }
}

fn blocks_per_checkpoint(args: &Args, config: &LlamaConfig) -> Result<usize> {
    let (blocks, layers) = (args.blocks_per_checkpoint, config.num_hidden_layers);
    if blocks > 1 && args.checkpoint == Switch::Off {
        let asked = format!("--blocks-per-checkpoint {blocks} with --checkpoint off");
        return Err(Error::input(asked, "leave one of them out"));
    }
    if blocks > layers {
        return Err(Error::input(
            format!("--blocks-per-checkpoint {blocks} of {layers} blocks"),
            format!("use 1 to {layers}"),
        ));
    }
    Ok(blocks)
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn plan(args: &str) -> Result<Plan> {
        Plan::new(&Args::read(["finetune"].into_iter().chain(args.split_whitespace()))?)
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
                blocks_per_checkpoint: 1,
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
    #[case("--steps 2 --seq-len 100", "2 of 100 tokens: batch 1 x accumulate 1 = 1 sequences")]
    #[case("--seq-len 4096", "40, the default, of 4096 tokens")]
    #[case("--seq-len 100 --sequences 5 --batch 2 --epochs 3", "9, 3 x 3, of 200 tokens")]
    #[case("--seq-len 100 --sequences 5 --batch 2", "3 steps an epoch, the last one of 1 sequences")]
    #[case("--seq-len 100 --sequences 5", "of 100 tokens, 495 targets")]
    #[case("--seq-len 100 --batch 2 --accumulate 3", "600 tokens: batch 2 x accumulate 3 = 6 sequences")]
    #[case("--packing documents", "documents (as asked): attention and targets stay within each")]
    #[case("", "stream (nothing marks an end, auto)")]
    #[case("--data-order shuffle --seed 5", "another one in each epoch, drawn from seed 5")]
    #[case("--warmup 4 --schedule cosine", "from 0 in 4 steps, then 0.003 down to 0 by half a cosine over 36 steps")]
    #[case("--lr 1e-3", "rate         0.001; as asked")]
    #[case("", "rate         0.003; 0.003 is the default from scratch")]
    #[case("--ranks 2", "2, as asked; threads of this process, all together on each sequence")]
    #[case(
        "--mesh data=2,ulysses=3 --ranks 6",
        "6 = data=2 x ulysses=3, as asked; threads of this process: 2 replicas, 3 ranks together on each sequence"
    )]
    #[case("--mesh data=2,ulysses=4 --seq-len 64", "16 tokens a rank, 64 / 4 rounded up")]
    #[case(
        "--mesh data=3 --attention single",
        "3 = data=3, as asked; threads of this process: 3 replicas, one rank on"
    )]
    #[case(
        "--seq-len 64 --mesh data=2 --batch 2 --accumulate 3",
        "6 sequences of a step are dealt in turn, up to 3 each, in 2 micro-batches"
    )]
    #[case(
        "--seq-len 64 --mesh data=3 --batch 2",
        "2 sequences of a step are dealt in turn, up to 1 each, in 1 micro-"
    )]
    #[case("--seq-len 64 --mesh data=3 --batch 2", "1 replicas have none: use data=2")]
    #[case("--fsdp", "1 / 4 of weights, gradients and optimizer on each rank")]
    #[case("", "whole on each rank (no --fsdp)")]
    #[case(
        "",
        "checkpoints  at the end and on request; the newest 2 stay; a machine that dies takes all steps with it: see"
    )]
    #[case("--save-every 7 --keep 3", "checkpoints  every 7 steps, at the end and on request; the newest 3 stay")]
    #[case("--seq-len 64 --mesh data=2 --batch 2 --eval", "loss over all sequences, 4 at a time")]
    #[case("--seq-len 64 --sequences 3 --batch 2 --eval", "loss over all sequences, 2 at a time")]
    #[case("", "checkpoint   on: a block keeps its input only, and runs again")]
    #[case("--blocks-per-checkpoint 3", "checkpoint   on: 3 blocks keep the first one's input only, and run again")]
    #[case("", "offload      none: block inputs stay on the device (no --offload)")]
    #[case("--offload host", "all block inputs wait in host memory, at most what is left when training starts; what")]
    #[case(
        "--offload host --offload-host-budget 1GiB --offload-every 2 --offload-in-flight 3",
        "the first of every 2 block inputs waits in host memory, at most 1 GiB over all ranks; what does not fit stays on the \
         device; at most 3 in flight on each rank"
    )]
    #[case(
        "--offload host --offload-host-budget 0 --offload-dir . --offload-disk-budget 4096",
        "at most 0 bytes over all ranks; what does not fit in a file in ., at most 4 KiB over all ranks; at most 2 in"
    )]
    #[case(
        "--offload disk --offload-budget 1000",
        "block inputs beyond 1000 bytes on the device, over all ranks, wait in a file in the output folder; at most 2"
    )]
    #[case(
        "--offload host",
        "peak         heap bytes of this process: the sum over all its ranks; without what offload has"
    )]
    #[case("--profile new --steps 9", "profile      of steps 2-3, in new")]
    #[case("--profile new --steps 1", "profile      of steps 1, in new")]
    #[case("--profile new --steps 9 --profile-steps 1,4-6", "profile      of steps 1,4-6, in new")]
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
