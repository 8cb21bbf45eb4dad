//! The steps: which sequences each takes, how many there are, their learning rates, and which are profiled.

use crate::cli::Args;
use crate::error::{Error, Result};
use crate::order::Order;
use crate::profile;
use crate::schedule::LearningRate;
use crate::values::{Schedule, Steps};

use super::{LR_MODEL, LR_SCRATCH, Profile, STEPS};

/// A run of more steps is a slip of the keyboard: at a millisecond each it takes a day.
const MAX_STEPS: usize = 100_000_000;

pub(super) fn order(args: &Args, sequences: usize) -> Result<Order> {
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

pub(super) fn steps(args: &Args, order: &Order) -> Result<usize> {
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

pub(super) fn rate(args: &Args, steps: usize) -> Result<LearningRate> {
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

pub(super) fn profile(args: &Args, steps: usize) -> Result<Option<Profile>> {
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
