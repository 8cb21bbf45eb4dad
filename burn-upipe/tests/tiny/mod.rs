//! What the learner's tests share: a small transformer of Burn's modules, rows of text with unequal targets, and a silent training.
#![allow(dead_code)]

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig, lr_scheduler::constant::ConstantLr};
use burn::tensor::activation::gelu;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor, TensorData, TensorReadError};
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{Metric, MetricDefinition, MetricMetadata, MetricName, SerializedEntry};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};
use burn::train::{
    InferenceStep, Learner, LearnerModel, LearnerSummary, LearningResult, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use burn_context_parallel::attention::attention;
use burn_context_parallel::sequence::{Batch, IGNORE_INDEX};
use burn_upipe::checkpoint::Checkpointed;
use burn_upipe::learner::metrics::TokenLossInput;
use burn_upipe::learner::{SequenceBatch, TokenOutput};

pub const VOCABULARY: usize = 13;
/// Rows of the table of positions: no more than the longest sequence of any test, so that padding must not look beyond.
pub const LONGEST: usize = 21;
const WIDTH: usize = 16;
const HEADS: usize = 4;

/// A transformer block; its attention is the only line that is ours.
#[derive(Module, Debug)]
pub struct Block {
    norm: RmsNorm,
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norm: RmsNormConfig::new(WIDTH).init(device),
            qkv: linear(WIDTH, 3 * WIDTH),
            out: linear(WIDTH, WIDTH),
            up: linear(WIDTH, 2 * WIDTH),
            down: linear(2 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [rows, len, _] = x.dims();
        let heads = |part: Tensor<3>| part.reshape([rows, len, HEADS, WIDTH / HEADS]).swap_dims(1, 2);
        let [q, k, v] = self.qkv.forward(self.norm.forward(x.clone())).chunk(3, 2).try_into().unwrap();
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let y = attention(heads(q), heads(k), heads(v), None, None, options);
        let x = x + self.out.forward(y.swap_dims(1, 2).reshape([rows, len, WIDTH]));
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }
}

/// The model as its author wrote it for one device, with a batch that has a loss.
#[derive(Module, Debug)]
pub struct Tiny {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Checkpointed<Block>>,
    head: Linear,
    #[module(skip)]
    fault: Fault,
}

/// Fills weights with the numbers of a small generator.
struct Fill(u64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let dims = old.dims();
            let mut next = || {
                self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5
            };
            // Vectors are norms and biases.
            let value = |x: f32| if D == 1 { 1.0 + 0.2 * x } else { 0.5 * x };
            let values: Vec<f32> = (0..dims.iter().product()).map(|_| value(next())).collect();
            Tensor::from_data(TensorData::new(values, dims), &old.device()).set_require_grad(old.is_require_grad())
        })
    }
}

/// What goes wrong in a step, on which rank and when.
#[derive(Clone, Debug, Default)]
pub struct Fault {
    pub kind: Option<FaultKind>,
    pub rank: usize,
    pub step: usize,
    steps: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    Panic,
    Raise,
}

impl Fault {
    pub fn new(kind: FaultKind, rank: usize, step: usize) -> Self {
        Self { kind: Some(kind), rank, step, steps: Arc::default() }
    }

    fn happen(&self) {
        if std::thread::current().name() != Some(&format!("rank {}", self.rank)) {
            return;
        }
        let step = self.steps.fetch_add(1, Ordering::SeqCst) + 1;
        match self.kind {
            Some(FaultKind::Panic) if step == self.step => panic!("the fault of step {step}"),
            Some(FaultKind::Raise) if step == self.step => burn_context_parallel::raise(
                burn_context_parallel::Error::invalid("Tiny", format!("the fault of step {step}"), "none"),
            ),
            _ => {}
        }
    }
}

impl Tiny {
    pub fn new(device: &Device) -> Self {
        let model = Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(LONGEST, WIDTH).init(device),
            blocks: (0..2).map(|_| Checkpointed::new(Block::new(device))).collect(),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
            fault: Fault::default(),
        };
        // Every test starts from the same weights: what is drawn depends on the other tests of the process.
        model.map(&mut Fill(1)).fork(device)
    }

    pub fn with_fault(self, fault: Fault) -> Self {
        Self { fault, ..self }
    }

    fn forward(&self, tokens: Tensor<2, Int>, positions: Tensor<2, Int>) -> Tensor<3> {
        let mut x = self.tokens.forward(tokens) + self.positions.forward(positions);
        for block in &self.blocks {
            x = block.forward(x, |block, x| block.forward(x));
        }
        self.head.forward(x)
    }

    fn loss(&self, batch: &SequenceBatch) -> Tensor<1> {
        batch.loss(self.forward(batch.tokens.clone(), batch.positions.clone()))
    }
}

impl TrainStep for Tiny {
    type Input = SequenceBatch;
    type Output = TokenOutput;

    fn step(&self, batch: SequenceBatch) -> TrainOutput<TokenOutput> {
        self.fault.happen();
        let loss = self.loss(&batch);
        TrainOutput::new(self, loss.backward(), batch.output(loss))
    }
}

impl InferenceStep for Tiny {
    type Input = SequenceBatch;
    type Output = TokenOutput;

    fn step(&self, batch: SequenceBatch) -> TokenOutput {
        batch.output(self.loss(&batch))
    }
}

/// A row of tokens, of which some are targets.
#[derive(Clone, Debug)]
pub struct Row {
    tokens: Vec<i64>,
    labels: Vec<i64>,
}

/// Rows of `len` tokens with very unequal numbers of targets; some have one, some all.
pub fn rows(count: usize, len: usize) -> Vec<Row> {
    (0..count)
        .map(|row| {
            let tokens: Vec<i64> = (0..len).map(|i| ((row * 7 + i * i + 3 * i) % VOCABULARY) as i64).collect();
            let keep = |i: usize| row % 3 == 0 || i + 1 == len || (row % 3 == 1 && i % 4 == 1);
            let labels = tokens.iter().enumerate().map(|(i, t)| if keep(i) { *t } else { IGNORE_INDEX }).collect();
            Row { tokens, labels }
        })
        .collect()
}

#[derive(Clone)]
struct RowBatcher;

impl Batcher<Row, SequenceBatch> for RowBatcher {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> SequenceBatch {
        let tokens: Vec<Vec<i64>> = rows.iter().map(|row| row.tokens.clone()).collect();
        let shape = [rows.len(), rows[0].tokens.len()];
        let labels: Vec<i64> = rows.iter().flat_map(|row| row.labels.clone()).collect();
        let labels = Tensor::<1, Int>::from_ints(&labels[..], &Device::flex()).reshape(shape);
        SequenceBatch::new(Batch::from_rows(&tokens).unwrap().with_labels(labels).unwrap(), device).unwrap()
    }
}

pub type Loader = Arc<dyn DataLoader<SequenceBatch>>;

pub fn loader(rows: Vec<Row>, batch: usize) -> Loader {
    DataLoaderBuilder::new(RowBatcher).batch_size(batch).build(InMemDataset::new(rows))
}

/// The loss of each step and its targets, in order, of one split.
pub type Losses = Arc<Mutex<Vec<(f64, usize)>>>;

#[derive(Clone)]
pub struct Record(pub &'static str, pub Losses);

impl Metric for Record {
    type Input = TokenLossInput;

    fn name(&self) -> MetricName {
        Arc::new(self.0.to_owned())
    }

    fn update(&mut self, item: &TokenLossInput, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        self.1.lock().unwrap().push((item.loss()?, item.valid()));
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(String::new(), String::new()))
    }

    fn clear(&mut self) {}
}

/// Shows nothing.
pub struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl TrainingProgressLogger for Silent {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}
    fn update_epoch(&mut self, _: usize) {}
    fn start_split(&mut self, _: &str, _: usize) {}
    fn update_split(&mut self, _: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Silent {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// What a training of [`Tiny`] left.
pub struct Trained<M> {
    pub result: LearningResult<M>,
    pub train: Vec<(f64, usize)>,
    pub valid: Vec<(f64, usize)>,
}

/// How to train.
#[derive(Clone)]
pub struct Recipe {
    pub train: Loader,
    pub valid: Loader,
    pub epochs: usize,
    pub accumulate: Option<NonZeroUsize>,
    pub optimizer: ModuleOptimizer,
    pub rate: f64,
}

impl Recipe {
    pub fn sgd(train: Loader) -> Self {
        let valid = loader(rows(3, 12), 1);
        Self { train, valid, epochs: 1, accumulate: None, optimizer: SgdConfig::new().init(), rate: 0.1 }
    }

    pub fn adamw(train: Loader) -> Self {
        Self { optimizer: AdamWConfig::new().init(), rate: 3e-3, ..Self::sgd(train) }
    }

    /// Trains `model`; `strategy` is Burn's own for one device if it is `None`.
    pub fn run<M>(
        &self,
        model: M,
        strategy: Option<TrainingStrategy<M>>,
        more: impl FnOnce(SupervisedTraining<M>) -> SupervisedTraining<M>,
    ) -> Trained<M>
    where
        M: LearnerModel,
        M: TrainStep<Input = SequenceBatch, Output = TokenOutput>,
        M: InferenceStep<Input = SequenceBatch, Output = TokenOutput>,
    {
        let folder = tempfile::tempdir().unwrap();
        let (train, valid) = (Losses::default(), Losses::default());
        let mut training = SupervisedTraining::new(folder.path(), self.train.clone(), self.valid.clone())
            .metric_train(Record("train", train.clone()))
            .metric_valid(Record("valid", valid.clone()))
            .with_metric_logger(burn::train::logger::InMemoryMetricLogger::new())
            .with_application_logger(None)
            .renderer(Box::new(Silent))
            .num_epochs(self.epochs);
        if let Some(accumulate) = self.accumulate {
            training = training.grads_accumulation(accumulate.get());
        }
        if let Some(strategy) = strategy {
            training = training.with_training_strategy(strategy);
        }
        let learner = Learner::new(model, self.optimizer.clone(), ConstantLr::new(self.rate));
        let result = more(training).launch(learner);
        let take = |losses: Losses| std::mem::take(&mut *losses.lock().unwrap());
        Trained { result, train: take(train), valid: take(valid) }
    }
}

/// All float parameters, in the module's order.
pub fn weights<M: Module>(model: &M) -> Vec<f64> {
    struct Collect(Vec<f64>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.base().into_data().iter::<f64>());
        }
    }
    let mut collect = Collect(Vec::new());
    model.visit(&mut collect);
    collect.0
}

pub fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
