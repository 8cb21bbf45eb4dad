//! What the arguments mean: every value resolved and checked. Why each is what it is stands in [`explain`](crate::explain).
//!
//! S sequence, L = ceil(S / P) local sequence, P ranks of a sequence, B sequences side by side, H query heads, U query heads a stage.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use burn_context_parallel::group::MeshShape;
use burn_context_parallel::sequence::SequenceLayout;
use burn_upipe::upipe::{AttentionScheme, Schedule as StageSchedule};
use llama::{DeviceList, Devices, LlamaConfig, ParallelConfig};

use crate::cli::Args;
use crate::corpus::Corpus;
use crate::error::{Error, Result};
use crate::offload::OffloadPlan;
use crate::order::Order;
use crate::out;
use crate::schedule::LearningRate;
use crate::tokens::{BYTES, Tokens};
use crate::values::{OnRun, Packing, Precision, Scheme, Steps, Switch};

mod ranks;
mod steps;
mod text;

use ranks::{blocks_per_checkpoint, core, mesh, schedule, tile};
use steps::{order, profile, rate, steps};
use text::{corpus, tokens};

/// Where neither --steps nor --epochs says.
pub(crate) const STEPS: usize = 40;
/// Where --seq-len does not say.
pub(crate) const SEQ_LEN: usize = 4096;
/// Where --lr does not say: weights from scratch have everything to learn,
pub(crate) const LR_SCRATCH: f64 = 3e-3;
/// pretrained ones much to lose.
pub(crate) const LR_MODEL: f64 = 1e-5;

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
    /// Where it runs.
    pub device: DeviceList,
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
        args.device.expect_compiled_in()?;
        let (mesh, ranks) = mesh(args)?;
        if args.device.count() > ranks {
            return Err(Error::input(
                format!("--device {} for {ranks} ranks", args.device),
                format!("use at most {ranks} devices, or more --ranks: every device needs one"),
            ));
        }
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
            let asked = args.mesh.map_or_else(|| format!("--ranks {ranks}"), |_| format!("--mesh {}", mesh.typed()));
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
            device: args.device.clone(),
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

    /// Its devices, started, and able to do what is to be done.
    ///
    /// # Errors
    ///
    /// [`Error::Device`].
    pub fn open(&self) -> Result<Devices> {
        let devices = self.device.open()?;
        devices.expect_dtype(self.precision.dtype())?;
        Ok(devices)
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

fn model(args: &Args) -> Result<(ModelSource, LlamaConfig)> {
    let Some(folder) = &args.model else {
        return Ok((ModelSource::Scratch, LlamaConfig::new(BYTES, 128, 352, 4, 8, 2)));
    };
    let config = LlamaConfig::read(&folder.join("config.json")).map_err(Error::Model)?;
    Ok((ModelSource::Folder(folder.clone()), config))
}

#[cfg(test)]
mod tests;
