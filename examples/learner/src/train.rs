//! From choices to a trained model.

use std::fs;

use anyhow::{Context, Result, anyhow, ensure};
use burn::lr_scheduler::constant::ConstantLr;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn::train::metric::LearningRateMetric;
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainStep, TrainingStrategy,
};
use burn_context_parallel::fsdp::FsdpConfig;
use burn_upipe::learner::metrics::{
    MemoryInUseMetric, MemoryReservedMetric, TokenLossMetric, TokenPerplexityMetric, TokensPerSecondMetric,
    TokensSeenMetric,
};
use burn_upipe::learner::{ContextParallelStrategy, SequenceBatch, Sharded, TokenOutput};

use crate::cli::{Args, Stage};
use crate::data::{Loader, TEXT, loaders};
use crate::lines::Lines;
use crate::stages::{all, flash, plain, upipe};

/// Trains as the arguments say; what it leaves is in `args.out`.
///
/// # Errors
///
/// Arguments that do not fit, files that cannot be read or written, and whatever ends training on a rank.
pub fn run(args: &Args) -> Result<()> {
    let shape = args.shape()?;
    let strategy = shape.map(ContextParallelStrategy::new).transpose()?;
    let text = match &args.text {
        Some(path) => fs::read(path).with_context(|| format!("--text {}", path.display()))?,
        None => TEXT.into(),
    };
    let (train, valid) = loaders(&text, args.seq_len, args.sequences, args.batch / args.data_ranks)?;
    let is_free = fs::read_dir(&args.out).map_or(true, |mut entries| entries.next().is_none());
    ensure!(is_free, "--out {}: it holds something already, name a new folder", args.out.display());

    let device = Device::flex().autodiff();
    // Every stage starts from the same weights.
    device.seed(42);
    let model = plain(args.seq_len, &device);
    let single = ExecutionStrategy::single(device);
    let data = (train, valid);
    match (args.stage, strategy) {
        (Stage::Plain, _) => fit(args, data, model, single.into()),
        (Stage::Flash, _) => fit(args, data, flash(model)?, single.into()),
        (_, None) => Err(anyhow!("this stage trains on ranks")),
        (Stage::ContextParallel, Some(strategy)) => fit(args, data, flash(model)?, strategy.into()),
        (Stage::Upipe, Some(strategy)) => fit(args, data, upipe(flash(model)?)?, strategy.into()),
        (Stage::All, Some(strategy)) => {
            let model = Sharded::new(all(upipe(flash(model)?)?));
            fit(args, data, model, strategy.with_fsdp(FsdpConfig::new()).into())
        }
    }
}

/// burn-train's loop, the same for every stage.
fn fit<M>(args: &Args, (train, valid): (Loader, Loader), model: M, strategy: TrainingStrategy<M>) -> Result<()>
where
    M: LearnerModel,
    M: TrainStep<Input = SequenceBatch, Output = TokenOutput>,
    M: InferenceStep<Input = SequenceBatch, Output = TokenOutput>,
{
    let mut training = SupervisedTraining::new(&args.out, train, valid)
        .with_training_strategy(strategy)
        .metrics((TokenLossMetric::new(), TokenPerplexityMetric::new()))
        .metric_train_numeric(TokensPerSecondMetric::new())
        .metric_train_numeric(TokensSeenMetric::new())
        .metric_train_numeric(MemoryInUseMetric::new())
        .metric_train_numeric(MemoryReservedMetric::new())
        .metric_train_numeric(LearningRateMetric::new())
        .num_epochs(args.epochs);
    if args.log {
        training = training.renderer(Box::new(Lines::default())).with_application_logger(None);
    }
    let learner = Learner::new(model, AdamWConfig::new().init(), ConstantLr::new(3e-3));
    let result = training.launch(learner);
    if let Some(error) = result.error {
        return Err(anyhow!("{error}"));
    }
    let path = args.out.join("model");
    result.model.save_file(&path).with_context(|| format!("the model, to {}", path.display()))
}
