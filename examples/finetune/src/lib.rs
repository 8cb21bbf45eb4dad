//! Trains a Llama on text that is longer than one device would hold, from an ordinary Burn program.
//!
//! ```text
//! cargo run --release -p finetune
//! cargo run --release -p finetune -- --data FOLDER --seq-len 8192 --ranks 4 --attention upipe --heads-per-stage 4
//! ```
//!
//! [`Args`] is what was typed, [`Plan`] what it means; [`run`] checks everything, then makes the output folder, then trains:
//!
//! | file | what |
//! |---|---|
//! | `plan.txt` | the plan, every derived value with its reason |
//! | `metrics.csv` | one line a step, written as it happens |
//! | `model/` | the weights, as transformers loads them |
//!
//! ```
//! use clap::Parser;
//! use finetune::{Args, Plan};
//!
//! let plan = Plan::new(&Args::parse_from(["finetune", "--seq-len", "64", "--ranks", "2"]))?;
//! assert_eq!(plan.layout.local_len(0), 32);
//! assert!(plan.to_string().contains("32 tokens a rank, 64 / 2 rounded up; 0 padding"));
//!
//! let error = Plan::new(&Args::parse_from(["finetune", "--heads-per-stage", "9"])).unwrap_err();
//! assert_eq!(error.to_string(), "--heads-per-stage 9 of 8 query heads: use 1 to 8");
//! assert_eq!(error.exit_code(), 2);
//! # Ok::<(), finetune::Error>(())
//! ```

mod cli;
mod data;
mod error;
mod metrics;
mod out;
mod plan;
mod train;

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

pub use cli::{Args, Clip, Scheme, Switch, Tile, one_line};
pub use data::{Text, TextError};
pub use error::{Error, Result};
pub use metrics::{StepMetrics, Table};
pub use plan::{ModelSource, OutFolder, Plan};
pub use train::{Halt, Trained, initial_model, train};

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The folder that was made for it.
    pub out: PathBuf,
    /// Every step, in order.
    pub steps: Vec<StepMetrics>,
}

/// The whole program: plan, train, write. What it says goes to `say`.
///
/// Nothing is written before everything that was asked for has been checked, the model's weights included.
///
/// # Errors
///
/// [`Error::exit_code`] 2 for a request that cannot be served, 1 for a run that failed. A loss that is not a number ends the run
/// with [`Error::Diverged`]; the last good weights are saved then.
pub fn run(args: &Args, say: impl Write + Send + 'static) -> Result<Summary> {
    let say = Arc::new(Mutex::new(say));
    let tell = {
        let say = say.clone();
        move |line: &str| {
            let mut say = say.lock().unwrap_or_else(PoisonError::into_inner);
            writeln!(say, "{line}").and_then(|()| say.flush()).map_err(Error::Say)
        }
    };

    let plan = Plan::new(args)?;
    tell(&plan.to_string())?;
    let model = initial_model(&plan)?;
    let out = out::claim(&plan.out)?;
    tell(&format!("writing to {}\n", out.display()))?;
    out::write(&out.join("plan.txt"), &plan.to_string())?;

    let mut table = Table::create(&out.join("metrics.csv"))?;
    let steps = Arc::new(Mutex::new(Vec::with_capacity(plan.steps)));
    let log = steps.clone();
    let total = plan.steps;
    let trained = train(&plan, model, move |step| {
        table.add(&step)?;
        tell(&step.line(total))?;
        log.lock().unwrap_or_else(PoisonError::into_inner).push(step);
        Ok(())
    })?;

    let folder = out.join("model");
    if let Some(model) = &trained.model {
        model.save(&folder).map_err(Error::Save)?;
    }
    if let Some(halt) = trained.halt {
        return Err(Error::Diverged { halt, saved: trained.model.is_some().then_some(folder) });
    }
    let steps = std::mem::take(&mut *steps.lock().unwrap_or_else(PoisonError::into_inner));
    if let ([first, ..], [.., last]) = (&steps[..], &steps[..]) {
        let mut say = say.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(
            say,
            "\nloss {:.4} -> {:.4} ({:+.0} %) in {} steps\nweights in {}",
            first.loss,
            last.loss,
            100.0 * (last.loss / first.loss - 1.0),
            steps.len(),
            folder.display()
        )
        .map_err(Error::Say)?;
    }
    Ok(Summary { out, steps })
}
