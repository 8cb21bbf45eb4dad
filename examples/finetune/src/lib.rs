//! Trains a Llama on text that is longer than one device would hold, from an ordinary Burn program.
//!
//! ```text
//! cargo run --release -p finetune
//! cargo run --release -p finetune -- --data FOLDER --seq-len 8192 --ranks 4 --attention upipe --heads-per-stage 4
//! cargo run --release -p finetune -- --model DIR --data chats.jsonl --epochs 2 --batch 2 --accumulate 4 --lr 1e-5 --schedule cosine --warmup 10
//! cargo run --release -p finetune -- --model DIR --data book.txt --eval
//! cargo run --release -p finetune -- --data FOLDER --mesh data=2,ulysses=2 --fsdp --save-every 100 --out run --resume
//! ```
//!
//! [`Args`] is what was typed (or stands in the file of `--config`), [`Plan`] what it means; [`run`] checks everything, then makes the
//! output folder, then trains:
//!
//! | file | what |
//! |---|---|
//! | `plan.txt` | the plan, every derived value with its reason |
//! | `config.toml` | the same as values: `--config` takes it, and gives the same run |
//! | `metrics.csv` | one line a step, written as it happens |
//! | `loss.svg` | the loss curve |
//! | `model/` | the weights as transformers loads them, with the tokenizer |
//! | `checkpoints/` | what `--resume` goes on from |
//!
//! `--profile DIR` writes where time and memory went in some steps: a table, a trace and a picture
//! ([`burn_upipe::profile`]); and `out-of-memory.txt`, what memory was full of when there was none left.
//!
//! ```
//! use finetune::{Args, Plan};
//!
//! let plan = Plan::new(&Args::read(["finetune", "--seq-len", "64", "--ranks", "2", "--batch", "3"])?)?;
//! assert_eq!(plan.layout.local_len(0), 32);
//! let text = plan.to_string();
//! assert!(text.contains("32 tokens a rank, 64 / 2 rounded up; 0 padding"));
//! assert!(text.contains("192 tokens: batch 3 x accumulate 1 = 3 sequences"));
//!
//! let error = Plan::new(&Args::read(["finetune", "--heads-per-stage", "9"])?).unwrap_err();
//! assert_eq!(error.to_string(), "--heads-per-stage 9 of 8 query heads: use 1 to 8");
//! assert_eq!(error.exit_code(), 2);
//! # Ok::<(), finetune::Error>(())
//! ```

mod answers;
mod chat;
mod cli;
mod config;
mod corpus;
mod deal;
mod documents;
mod error;
mod eval;
mod explain;
mod files;
mod guard;
mod json;
mod memory;
mod metrics;
mod offload;
mod order;
mod out;
mod picture;
mod plan;
mod profile;
mod progress;
mod ranks;
mod resume;
mod saving;
mod schedule;
mod start;
mod template;
mod tokens;
mod train;
mod values;
mod weights;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use burn_upipe::learner::stop::Stop;

use resume::Begin;

pub use burn_upipe::learner::stop;
pub use cli::{Args, one_line};
pub use corpus::Corpus;
pub use documents::Documents;
pub use error::{Error, Result};
pub use eval::{Evaluation, evaluate};
pub use files::TextError;
pub use guard::quiet_guarded_panics;
pub use metrics::{StepMetrics, Table};
pub use offload::{OffloadPlan, OffloadTo, Waited};
pub use order::Order;
pub use plan::{ModelSource, OutFolder, Plan, Profile};
pub use progress::Voice;
pub use resume::Difference;
pub use saving::Saving;
pub use schedule::LearningRate;
pub use start::{Start, initial};
pub use tokens::{FolderTokenizer, Tokens};
pub use train::{Event, Halt, Trained, train};
pub use values::{
    Bytes, Clip, DataOrder, OnRun, Packing, Precision, Schedule, Scheme, Steps, Switch, Tile, TokensFrom,
};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It did what was asked for.
    Complete,
    /// It was asked to stop after so many steps, and can be resumed.
    Stopped(usize),
    /// It was to be resumed, and was complete before.
    Already,
}

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The folder that was made for it, if any.
    pub out: Option<PathBuf>,
    /// Every step, in order; those before it was resumed as well.
    pub steps: Vec<StepMetrics>,
    /// The loss without training, under `--eval`.
    pub evaluation: Option<Evaluation>,
    /// How it ended.
    pub end: End,
}

/// The whole program: plan, then train or evaluate, and write. What it says goes to `voice`.
///
/// Nothing is written before everything that was asked for has been checked, the model's weights included.
///
/// # Errors
///
/// [`Error::exit_code`] 2 for a request that cannot be served, 1 for a run that failed. A loss that is not a number ends the run
/// with [`Error::Diverged`]; the last good weights are saved then. A voice that cannot be heard ends no run: if whoever listened has
/// gone (`finetune | head`), that is no error, and on a full disk it is [`Error::Say`] once everything is saved.
pub fn run(args: &Args, voice: &Voice) -> Result<Summary> {
    run_until(args, voice, || Ok(Stop::new()))
}

/// [`run`], which saves and ends when `stop` says so. That is made when training begins: until then a signal does what it always does.
///
/// # Errors
///
/// As [`run`], and [`Error::Signals`] if `stop` cannot be had.
pub fn run_until(args: &Args, voice: &Voice, stop: impl FnOnce() -> io::Result<Stop>) -> Result<Summary> {
    let plan = Plan::new(args)?;
    // What cannot run is not explained.
    plan.open()?;
    voice.line(&plan.to_string());
    // A checkpoint has the weights; they are read when the folder is this run's.
    let start = match out::may_resume(&plan)? {
        true => None,
        false => Some(first(&plan, voice)?),
    };
    out::probe(&plan)?;
    let claimed = out::claim(&plan)?;
    let summary = match claimed {
        Some(out::Claimed { path, training: Some(training) }) => train_into(&plan, start, path, training, voice, stop),
        claimed => {
            let start = start.map_or_else(|| first(&plan, voice), Ok)?;
            evaluate_into(&plan, start, claimed.map(|claimed| claimed.path), voice)
        }
    }?;
    // Last: what was to be kept is on the disk by now.
    voice.failure().map_or(Ok(summary), |error| Err(Error::Say(error)))
}

fn first(plan: &Plan, voice: &Voice) -> Result<Start> {
    let (start, report) = initial(plan)?;
    if let Some(report) = report {
        voice.line(&format!("{}\n", report.summary()));
    }
    Ok(start)
}

fn evaluate_into(plan: &Plan, start: Start, out: Option<PathBuf>, voice: &Voice) -> Result<Summary> {
    if let Some(out) = &out {
        voice.line(&format!("writing to {}\n", out.display()));
        out::write(&out.join("config.toml"), &config::resolved(plan))?;
    }
    voice.begin(plan.corpus.sequences());
    let guard = progress::Bar(voice);
    let evaluation = {
        let voice = voice.clone();
        evaluate(plan, start, move |done| voice.done(done))
    };
    drop(guard);
    let evaluation = evaluation?;
    if !evaluation.loss.is_finite() {
        return Err(Error::NoLoss(evaluation.loss));
    }
    voice.line(&evaluation.to_string());
    if let Some(out) = &out {
        let json = serde_json::json!(evaluation);
        out::write(&out.join("eval.json"), &format!("{json:#}\n"))?;
    }
    Ok(Summary { out, steps: Vec::new(), evaluation: Some(evaluation), end: End::Complete })
}

/// The bytes that the planner says a rank will hold at the peak of a step.
///
/// # Errors
///
/// As [`run`], and [`Error::Planner`] if the planner does not know such a step.
pub fn planned_peak(args: &Args) -> Result<usize> {
    Ok(memory::planned(&Plan::new(args)?)?.0)
}

fn train_into(
    plan: &Plan,
    start: Option<Start>,
    out: PathBuf,
    training: out::Training,
    voice: &Voice,
    stop: impl FnOnce() -> io::Result<Stop>,
) -> Result<Summary> {
    let out::Training { checkpoints, begin } = training;
    let [metrics, curve] = ["metrics.csv", "loss.svg"].map(|name| out.join(name));
    let (start, mut table, before) = match begin {
        Begin::Finished => {
            voice.line(&format!("{}: finished, all {} steps are behind it: nothing to do", out.display(), plan.steps));
            let (_, steps) = Table::read(&metrics, plan.steps);
            // A run can die between its weights and its curve.
            if !curve.exists() {
                picture::loss_curve(&curve, &steps)?;
            }
            return Ok(Summary { out: Some(out), steps, evaluation: None, end: End::Already });
        }
        Begin::First => {
            let start = start.map_or_else(|| first(plan, voice), Ok)?;
            if plan.on_run == OnRun::Resume {
                voice.line(&format!("no checkpoint in {}: starting at the first step", out.display()));
            }
            (start, Table::create(&metrics)?, Vec::new())
        }
        Begin::After(checkpoint) => {
            let state = checkpoint.state();
            if let Some(profile) = plan.profile.as_ref().filter(|profile| profile.steps.last() <= state.step as usize) {
                return Err(Error::input(
                    format!("--profile-steps {} of a run that goes on after step {}", profile.steps, state.step),
                    format!("use steps from {} to {}", state.step + 1, plan.steps),
                ));
            }
            voice.line(&format!(
                "going on after step {} of {}, from {} (saved on {}; {} tokens seen)",
                state.step,
                plan.steps,
                checkpoint.path().display(),
                state.mesh,
                state.tokens_seen
            ));
            let (table, before) = Table::resume(&metrics, state.step as usize)?;
            (Start::Checkpoint(checkpoint), table, before)
        }
    };
    voice.line(&format!("writing to {}\n", out.display()));
    out::write(&out.join("config.toml"), &config::resolved(plan))?;

    let steps = Arc::new(Mutex::new(before));
    let (log, total, runtime) = (steps.clone(), plan.steps, plan.device.runtime());
    let saving = Saving { out: out.clone(), checkpoints, stop: stop().map_err(Error::Signals)? };
    voice.begin(total);
    let guard = progress::Bar(voice);
    let trained = {
        let voice = voice.clone();
        train(plan, start, saving, move |event| {
            match event {
                Event::Step(step) => {
                    table.add(&step)?;
                    voice.line(&step.line(total, runtime));
                    voice.done(step.step);
                    log.lock().unwrap_or_else(PoisonError::into_inner).push(step);
                }
                Event::Saved { step, path } => {
                    voice.line(&format!("checkpoint after step {step} in {}", path.display()));
                }
                Event::NotSaved { step, error } => voice.line(&format!("NO checkpoint after step {step}: {error}")),
            }
            Ok(())
        })
    };
    drop(guard);
    if let Some(profile) = plan.profile.as_ref().filter(|_| trained.is_ok()) {
        let (steps, folder) = (&profile.steps, profile.folder.display());
        voice.line(&format!("profile of steps {steps} in {folder}: profile.txt, trace.json, memory.html"));
    }
    let steps = std::mem::take(&mut *steps.lock().unwrap_or_else(PoisonError::into_inner));
    // Also of a run that failed: what was so far is worth a look then.
    let drawn = picture::loss_curve(&curve, &steps);
    let Trained { steps: done, stopped, halt, weights, memory: counted, waited, phases, checkpoint } = trained?;

    let folder = weights.transpose()?;
    if let Some(halt) = halt {
        return Err(Error::Diverged { halt, saved: folder });
    }
    checkpoint.transpose().map_err(Error::NotSaved)?;
    drawn?;
    if let Some(counted) = counted {
        voice.line(&memory::beside(plan, counted));
    }
    if let Some(waited) = waited {
        voice.line(&memory::waited(plan, waited));
    }
    // The planner's phases are Flex's.
    if !phases.is_empty() && runtime.is_heap() {
        voice.line(&memory::by_phase(plan, &phases));
    }
    if stopped {
        voice.line(&format!("\nstopped after step {done} of {total}, as asked: --resume goes on"));
        return Ok(Summary { out: Some(out), steps, evaluation: None, end: End::Stopped(done) });
    }
    if let ([first, ..], [.., last], Some(folder)) = (&steps[..], &steps[..], folder) {
        voice.line(&format!(
            "\nloss {:.4} -> {:.4} ({:+.0} %) in {} steps\nweights in {}",
            first.loss,
            last.loss,
            100.0 * (last.loss / first.loss - 1.0),
            steps.len(),
            folder.display()
        ));
    }
    Ok(Summary { out: Some(out), steps, evaluation: None, end: End::Complete })
}
