//! Metrics are of all ranks, and weigh a step by what it is about.

mod tiny;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::data::dataloader::Progress;
use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorReadError};
use burn::train::metric::{Metric, MetricMetadata, MetricName, Numeric, NumericEntry, SerializedEntry};
use burn_context_parallel::Error;
use burn_context_parallel::group::{MeshShape, ReduceOp, launch};
use burn_context_parallel::sequence::Batch;
use burn_upipe::learner::metrics::{
    MemoryInUseMetric, MemoryInput, MemoryReservedMetric, TokenLossInput, TokenLossMetric, TokenPerplexityMetric,
    TokensInput, TokensPerSecondMetric, TokensSeenMetric,
};
use burn_upipe::learner::{ContextParallelStrategy, MemoryUse, Place, SequenceBatch, SequenceInput};
use burn_upipe::profile::heap::CountingAllocator;
use tiny::{Recipe, Tiny, loader, rows};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

fn metadata() -> MetricMetadata {
    MetricMetadata { progress: Progress::new(1, 2, None), iteration: Some(1), lr: None }
}

fn last(entry: NumericEntry) -> f64 {
    match entry {
        NumericEntry::Final(value) => value,
        other => panic!("not the epoch's value: {other:?}"),
    }
}

fn loss(value: f32, valid: usize) -> TokenLossInput {
    TokenLossInput::new(Tensor::from_floats([value], &Device::flex()), valid)
}

#[test]
fn the_epochs_loss_is_the_mean_over_targets() {
    let (mut metric, mut perplexity) = (TokenLossMetric::new(), TokenPerplexityMetric::new());
    for (value, valid) in [(1.0, 1), (3.0, 3), (7.0, 0)] {
        metric.update(&loss(value, valid), &metadata()).unwrap();
        perplexity.update(&loss(value, valid), &metadata()).unwrap();
    }
    metric.compute().unwrap();
    perplexity.compute().unwrap();
    assert!((last(metric.final_value()) - 2.5).abs() < 1e-9);
    assert!((last(perplexity.final_value()) - 2.5f64.exp()).abs() < 1e-6);
    metric.clear();
    metric.update(&loss(4.0, 2), &metadata()).unwrap();
    assert!((last(metric.final_value()) - 4.0).abs() < 1e-9, "an epoch knows of the one before");
}

#[test]
fn speed_is_all_tokens_by_all_time() {
    let mut metric = TokensPerSecondMetric::new();
    for (tokens, seconds) in [(100, 1), (100, 4)] {
        metric.update(&TokensInput { tokens, elapsed: Some(Duration::from_secs(seconds)) }, &metadata()).unwrap();
    }
    assert_eq!(last(metric.final_value()), 40.0);
    let mut seen = TokensSeenMetric::from(1000);
    for _ in 0..2 {
        seen.update(&TokensInput { tokens: 10, elapsed: None }, &metadata()).unwrap();
        seen.clear();
    }
    seen.update(&TokensInput { tokens: 10, elapsed: None }, &metadata()).unwrap();
    assert_eq!(last(seen.final_value()), 1030.0);
}

#[test]
fn memory_that_is_not_known_is_not_shown_as_a_number() {
    let mut metric = MemoryInUseMetric::new();
    let entry = metric.update(&MemoryInput(None), &metadata()).unwrap();
    assert!(entry.is_not_available() && metric.value().is_none());
    let mib = |n: u64| MemoryInput(Some(MemoryUse { in_use: n << 20, reserved: n << 21 }));
    let mut reserved = MemoryReservedMetric::new();
    for memory in [mib(3), mib(1)] {
        metric.update(&memory, &metadata()).unwrap();
        reserved.update(&memory, &metadata()).unwrap();
    }
    assert_eq!((metric.value().unwrap().current(), last(metric.final_value())), (1.0, 3.0));
    assert_eq!(last(reserved.final_value()), 6.0);
}

/// A step's tokens, whether it was timed, and its memory.
type Number = (usize, bool, Option<MemoryUse>);

/// Every number that metrics get of a training.
#[derive(Clone, Default)]
struct Numbers(Arc<Mutex<Vec<Number>>>);

#[derive(Clone)]
struct Tokens(Numbers);

#[derive(Clone)]
struct Memory(Numbers);

impl Metric for Tokens {
    type Input = TokensInput;

    fn name(&self) -> MetricName {
        Arc::new("tokens".into())
    }

    fn update(&mut self, item: &TokensInput, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        let timed = item.elapsed.is_some_and(|elapsed| !elapsed.is_zero());
        self.0.0.lock().unwrap().push((item.tokens, timed, None));
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn clear(&mut self) {}
}

impl Metric for Memory {
    type Input = MemoryInput;

    fn name(&self) -> MetricName {
        Arc::new("memory".into())
    }

    fn update(&mut self, item: &MemoryInput, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        self.0.0.lock().unwrap().push((0, false, item.0));
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn clear(&mut self) {}
}

#[test]
fn tokens_are_those_of_all_ranks_without_padding_and_repetition() {
    // 3 rows of 21 on 2 replicas of 2 ranks: a token of padding, and in the second step a replica without a row.
    let strategy = ContextParallelStrategy::new(MeshShape { data: 2, ulysses: 2, ..Default::default() }).unwrap();
    let (tokens, memory) = (Numbers::default(), Numbers::default());
    let recipe = Recipe::sgd(loader(rows(3, 21), 1));
    let trained = recipe.run(Tiny::new(&Device::flex().autodiff()), Some(strategy.into()), |training| {
        training.metric_train(Tokens(tokens.clone())).metric_train(Memory(memory.clone()))
    });
    assert!(trained.result.error.is_none());
    let tokens = tokens.0.lock().unwrap().clone();
    assert_eq!(tokens.iter().map(|(tokens, timed, _)| (*tokens, *timed)).collect::<Vec<_>>(), [(42, true), (21, true)]);
    for (_, _, memory) in memory.0.lock().unwrap().iter() {
        // A rank has its weights and their gradients at least.
        let memory = memory.expect("the counting allocator is installed");
        let weights = trained.result.model.num_params() as u64 * 4;
        assert!(memory.in_use >= weights && memory.reserved >= memory.in_use, "{memory:?}, weights {weights}");
    }
}

#[test]
fn shares_of_ranks_and_micro_batches_sum_to_one_mean() {
    let row = |len: i64| (0..len).map(|i| i % 5).collect::<Vec<_>>();
    let items = [row(9), row(4)];
    let losses = launch(3, move |world| {
        let shape = MeshShape { ulysses: 3, ..Default::default() };
        let place = Place::new(&world, shape, Device::flex())?;
        let total = items.iter().map(|row| row.len() - 1).sum::<usize>();
        let mut sum = Tensor::<1>::zeros([1], &Device::flex());
        for row in &items {
            let item = SequenceBatch::new(Batch::from_rows(std::slice::from_ref(row))?, &Device::flex())?;
            assert_eq!(item.valid(), row.len() - 1);
            let part = item.clone().shard(&place, total)?;
            let logits = Tensor::<3>::zeros([1, part.tokens.dims()[1], 5], &Device::flex());
            sum = sum + part.loss(logits.clone());
            // Without targets it is the same work, and nothing.
            let empty = item.without_targets().shard(&place, total)?;
            assert_eq!((empty.valid, empty.tokens_at_hand(), empty.tokens.dims()), (0, 0, part.tokens.dims()));
            assert_eq!(empty.loss(logits).into_scalar::<f32>(), 0.0);
        }
        Ok::<_, Error>(world.all_reduce(sum, ReduceOp::Sum)?.into_scalar::<f32>())
    })
    .unwrap();
    for loss in losses {
        assert!((loss - 5f32.ln()).abs() < 1e-6);
    }
}
