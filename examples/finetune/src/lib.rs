//! Trains a Llama on text that is longer than one device would hold, from an ordinary Burn program.
//!
//! ```text
//! cargo run --release -p finetune
//! cargo run --release -p finetune -- --data FOLDER --seq-len 8192 --ranks 4 --attention upipe --heads-per-stage 4
//! cargo run --release -p finetune -- --model DIR --data chats.jsonl --epochs 2 --batch 2 --accumulate 4 --lr 1e-5 --schedule cosine --warmup 10
//! cargo run --release -p finetune -- --model DIR --data book.txt --eval
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
mod metrics;
mod order;
mod out;
mod picture;
mod plan;
mod progress;
mod ranks;
mod schedule;
mod template;
mod tokens;
mod train;
mod values;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use llama::Llama;

pub use cli::{Args, one_line};
pub use corpus::Corpus;
pub use documents::Documents;
pub use error::{Error, Result};
pub use eval::{Evaluation, evaluate};
pub use files::TextError;
pub use guard::quiet_guarded_panics;
pub use metrics::{StepMetrics, Table};
pub use order::Order;
pub use plan::{ModelSource, OutFolder, Plan};
pub use progress::Voice;
pub use schedule::LearningRate;
pub use tokens::{FolderTokenizer, Tokens};
pub use train::{Halt, Trained, initial_model, train};
pub use values::{Clip, DataOrder, Packing, Precision, Schedule, Scheme, Switch, Tile, TokensFrom};

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The folder that was made for it, if any.
    pub out: Option<PathBuf>,
    /// Every step, in order.
    pub steps: Vec<StepMetrics>,
    /// The loss without training, under `--eval`.
    pub evaluation: Option<Evaluation>,
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
    let plan = Plan::new(args)?;
    let text = plan.to_string();
    voice.line(&text);
    let (model, report) = initial_model(&plan)?;
    if let Some(report) = report {
        voice.line(&format!("{}\n", report.summary()));
    }
    let out = out::claim(&plan.out, "plan.txt", &text)?;
    if let Some(out) = &out {
        voice.line(&format!("writing to {}\n", out.display()));
        out::write(&out.join("config.toml"), &config::resolved(&plan))?;
    }
    let summary = match out {
        Some(out) if !plan.eval => train_into(&plan, model, &out, voice),
        out => evaluate_into(&plan, model, out, voice),
    }?;
    // Last: what was to be kept is on the disk by now.
    voice.failure().map_or(Ok(summary), |error| Err(Error::Say(error)))
}

fn evaluate_into(plan: &Plan, model: Llama, out: Option<PathBuf>, voice: &Voice) -> Result<Summary> {
    voice.begin(plan.corpus.sequences());
    let guard = progress::Bar(voice);
    let evaluation = {
        let voice = voice.clone();
        evaluate(plan, model, move |done| voice.done(done))
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
    Ok(Summary { out, steps: Vec::new(), evaluation: Some(evaluation) })
}

fn train_into(plan: &Plan, model: Llama, out: &Path, voice: &Voice) -> Result<Summary> {
    let mut table = Table::create(&out.join("metrics.csv"))?;
    let steps = Arc::new(Mutex::new(Vec::new()));
    let (log, total) = (steps.clone(), plan.steps);
    voice.begin(total);
    let guard = progress::Bar(voice);
    let trained = {
        let voice = voice.clone();
        train(plan, model, move |step| {
            table.add(&step)?;
            voice.line(&step.line(total));
            voice.done(step.step);
            log.lock().unwrap_or_else(PoisonError::into_inner).push(step);
            Ok(())
        })
    };
    drop(guard);
    let steps = std::mem::take(&mut *steps.lock().unwrap_or_else(PoisonError::into_inner));
    // Also of a run that failed: what was so far is worth a look then.
    let drawn = picture::loss_curve(&out.join("loss.svg"), &steps);
    let trained = trained?;

    let folder = out.join("model");
    if let Some(model) = &trained.model {
        model.save(&folder).map_err(Error::Save)?;
        let from = match &plan.model {
            ModelSource::Folder(folder) => Some(&**folder),
            ModelSource::Scratch => None,
        };
        plan.tokens.save_beside(from, &folder)?;
    }
    if let Some(halt) = trained.halt {
        return Err(Error::Diverged { halt, saved: trained.model.is_some().then_some(folder) });
    }
    drawn?;
    if let ([first, ..], [.., last]) = (&steps[..], &steps[..]) {
        voice.line(&format!(
            "\nloss {:.4} -> {:.4} ({:+.0} %) in {} steps\nweights in {}",
            first.loss,
            last.loss,
            100.0 * (last.loss / first.loss - 1.0),
            steps.len(),
            folder.display()
        ));
    }
    Ok(Summary { out: Some(out.to_owned()), steps, evaluation: None })
}
