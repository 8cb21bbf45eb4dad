//! Sharded over data and context ranks, with unequal numbers of targets, a model has the gradients, the parameters and the losses of one
//! device.

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::fsdp::{Accumulation, Fsdp, FsdpConfig, ShardedOptimizer, StatePlace};
use burn_context_parallel::group::{Axis, Mesh, MeshShape, ProcessGroup};
use llama::{AttentionScheme, Llama, LlamaConfig, ParallelConfig, adamw_rule, clip_grad_norm};
use rstest::rstest;
use tests::{Row, assert_close, batch, filled, number, on_ranks, row, tensor};

const LEN: usize = 12;

/// The step's four rows, of 11, 1, 4 and no targets; another step, other tokens.
fn rows(step: usize) -> Vec<Row> {
    let valid = [11, 1, 4, 0];
    (0..4).map(|i| row((step * 4 + i) as i64, LEN, valid[(i + step) % 4])).collect()
}

#[derive(Clone, Debug)]
struct Case {
    data: usize,
    context: usize,
    dtype: DType,
    tied: bool,
    parallel: ParallelConfig,
    axes: Vec<Axis>,
    fsdp: FsdpConfig,
    micro_batches: usize,
    state: StatePlace,
}

impl Case {
    fn new(data: usize, context: usize, dtype: DType) -> Self {
        Self {
            data,
            context,
            dtype,
            tied: false,
            parallel: ParallelConfig { mlp_tile: Some(2), loss_tile: Some(3), ..ParallelConfig::all() },
            axes: vec![Axis::Data, Axis::Ulysses],
            fsdp: FsdpConfig::new(),
            micro_batches: 1,
            state: StatePlace::Device,
        }
    }

    fn model(&self) -> Llama {
        let device = Device::flex().autodiff();
        let config = LlamaConfig { tie_word_embeddings: self.tied, ..LlamaConfig::new(23, 16, 20, 2, 4, 2) };
        filled(Llama::init(&config, &self.parallel, &device).unwrap(), 7, self.dtype, 0.3)
    }
}

/// What a run gives: of every step the loss and the norm, of the first one the gradients, the parameters after the last one.
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    gradients: Vec<(String, TensorData)>,
    parameters: Vec<(String, TensorData)>,
}

struct Values(Vec<(String, TensorData)>, Vec<String>);

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.1.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.1.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push((self.1.join("."), param.base().into_data()));
    }
}

fn values<M: Module>(module: &M) -> Vec<(String, TensorData)> {
    let mut values = Values(Vec::new(), Vec::new());
    module.visit(&mut values);
    values.0
}

/// The module with gradients in place of values.
fn as_module<M: Module>(grads: &GradientsParams, module: &M) -> M {
    struct Put<'a>(&'a GradientsParams);
    impl ModuleMapper for Put<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let grad = self.0.get::<D>(param.id);
            param.map(|value| grad.unwrap_or_else(|| value.zeros_like()))
        }
    }
    module.valid().map(&mut Put(grads))
}

const CLIP: f64 = 0.5;

fn one_device<O: Optimizer>(case: &Case, optimizer: O, steps: usize, lr: f64) -> Run {
    let group = ProcessGroup::single();
    let mut model = case.model();
    let mut optimizer = ShardedOptimizer::new(optimizer, StatePlace::Device);
    let mut run = Run { losses: Vec::new(), norms: Vec::new(), gradients: Vec::new(), parameters: Vec::new() };
    for step in 0..steps {
        let shard = Device::flex().autodiff().context_parallel(&group).shard(&batch(&rows(step))).unwrap();
        let loss = model.loss(&shard, &group).unwrap();
        run.losses.push(number(&loss.mean));
        let grads = GradientsParams::from_grads(loss.mean.backward(), &model);
        if step == 0 {
            run.gradients = values(&as_module(&grads, &model));
        }
        let (grads, norm) = clip_grad_norm(grads, &model, CLIP, &group).unwrap();
        run.norms.push(norm);
        model = optimizer.step(lr, model, grads);
    }
    run.parameters = values(&model.valid());
    run
}

fn sharded<O: Optimizer>(case: &Case, optimizer: O, steps: usize, lr: f64) -> Run {
    let (shape, case) = (MeshShape { data: case.data, ulysses: case.context, ..MeshShape::default() }, case.clone());
    let runs = on_ranks(shape.ranks().unwrap(), move |world| {
        let mesh = Mesh::new(&world, shape)?;
        let device = Device::flex().autodiff();
        let fsdp = Fsdp::new(&mesh, &case.axes, case.fsdp.clone())?;
        let mut model = fsdp.shard(case.model())?;
        let sequence = mesh.axis(Axis::Ulysses);
        let mut optimizer = ShardedOptimizer::new(optimizer.clone(), case.state);
        let mut run = Run { losses: Vec::new(), norms: Vec::new(), gradients: Vec::new(), parameters: Vec::new() };
        for step in 0..steps {
            fsdp.begin(&model);
            let all = rows(step);
            let total = batch(&all).valid();
            let mine = &all[mesh.coordinates().data * 4 / shape.data..][..4 / shape.data];
            let (mut sums, mut value) = (GradientsAccumulator::new(), 0.0);
            for micro in mine.chunks(mine.len() / case.micro_batches) {
                let shard = device.context_parallel(sequence).shard(&batch(micro))?;
                let share = model.loss_over(&shard, sequence, total).unwrap().share;
                value += number(&share);
                sums.accumulate(&model, GradientsParams::from_grads(share.backward(), &model));
            }
            let loss = world.all_reduce(TensorData::from([value]), burn_context_parallel::group::ReduceOp::Sum)?;
            run.losses.push(loss.iter::<f64>().next().unwrap());
            let grads = fsdp.finish(sums.grads(), &model)?;
            if step == 0 {
                run.gradients = values(&fsdp.gather(&as_module(&grads, &model))?);
            }
            let (grads, norm) = fsdp.clip_grad_norm(grads, &model, CLIP)?;
            run.norms.push(norm);
            model = optimizer.step(lr, model, grads);
        }
        run.parameters = values(&fsdp.gather(&model.valid())?);
        Ok(Arc::new(run))
    });
    for run in &runs[1..] {
        // Ranks never drift apart.
        assert_eq!(run.norms, runs[0].norms);
        for ((name, a), (_, b)) in run.parameters.iter().zip(&runs[0].parameters) {
            assert_eq!(a.as_bytes(), b.as_bytes(), "{name} differs between ranks");
        }
    }
    let first = runs.into_iter().next().unwrap();
    Arc::try_unwrap(first).unwrap_or_else(|_| panic!("the only handle"))
}

fn compare(what: &str, actual: &[(String, TensorData)], expected: &[(String, TensorData)], tolerance: f64) {
    let plain = |values: &[(String, TensorData)]| -> Vec<(String, TensorData)> {
        values.iter().filter(|(name, _)| !name.contains("fsdp")).cloned().collect()
    };
    let (actual, expected) = (plain(actual), plain(expected));
    assert_eq!(actual.len(), expected.len());
    for ((name, a), (_, b)) in actual.iter().zip(&expected) {
        let flat = |data: &TensorData| {
            let values: Vec<f64> = data.iter::<f64>().collect();
            let len = values.len();
            tensor::<1>(&TensorData::new(values, [len]), DType::F64, &Device::flex())
        };
        assert_close(format!("{what} of {name}"), &flat(a), &flat(b), tolerance);
    }
}

/// Everything on, and everything that makes a difference to FSDP.
fn variants(case: Case) -> Vec<(&'static str, Case)> {
    let plain = ParallelConfig { attention: AttentionScheme::Ulysses, ..ParallelConfig::none() };
    let ranks = case.data * case.context;
    let mut variants = vec![
        ("all", case.clone()),
        ("no recomputation", Case { parallel: plain, ..case.clone() }),
        ("tied", Case { tied: true, ..case.clone() }),
        ("no prefetch", Case { fsdp: FsdpConfig::new().with_prefetch(false), ..case.clone() }),
        ("state in host memory", Case { state: StatePlace::Host, ..case.clone() }),
        ("small ones whole", Case { fsdp: FsdpConfig::new().with_whole_below(200), ..case.clone() }),
    ];
    if case.data == 1 || case.data == 2 {
        let micro = Case { micro_batches: 2, ..case.clone() };
        let once = FsdpConfig::new().with_accumulation(Accumulation::Once);
        variants.push(("two micro-batches", micro.clone()));
        variants.push(("two micro-batches, reduced once", Case { fsdp: once, ..micro }));
    }
    if ranks == 4 && case.data == 2 {
        variants.push(("shards over context, replicas over data", Case { axes: vec![Axis::Ulysses], ..case.clone() }));
        variants.push(("shards over data, replicas over context", Case { axes: vec![Axis::Data], ..case }));
    }
    variants
}

/// f64: what differs is the order of sums, 1e-16 each; parameters are compared after steps that normalise.
#[rstest]
fn in_f64_gradients_and_parameters_are_those_of_one_device(
    #[values((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))] mesh: (usize, usize),
) {
    let case = Case::new(mesh.0, mesh.1, DType::F64);
    for (name, case) in variants(case) {
        let sgd = SgdConfig::new().build();
        let (expected, actual) = (one_device(&case, sgd.clone(), 2, 0.1), sharded(&case, sgd, 2, 0.1));
        compare(&format!("{name} on {mesh:?}: gradient"), &actual.gradients, &expected.gradients, 1e-9);
        compare(&format!("{name} on {mesh:?}: SGD"), &actual.parameters, &expected.parameters, 1e-9);
        for (a, b) in actual.norms.iter().zip(&expected.norms) {
            assert!((a - b).abs() <= 1e-9 * b, "{name} on {mesh:?}: norm {a}, not {b}");
        }
    }
    let case = Case::new(mesh.0, mesh.1, DType::F64);
    let (expected, actual) = (one_device(&case, adamw_rule(0.1), 20, 1e-2), sharded(&case, adamw_rule(0.1), 20, 1e-2));
    compare(&format!("{mesh:?}: AdamW"), &actual.parameters, &expected.parameters, 1e-8);
}

/// f32: sums of some hundred terms in another order.
#[rstest]
fn in_f32_gradients_and_losses_are_those_of_one_device(
    #[values((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))] mesh: (usize, usize),
) {
    let case = Case::new(mesh.0, mesh.1, DType::F32);
    let (expected, actual) = (one_device(&case, adamw_rule(0.1), 20, 1e-2), sharded(&case, adamw_rule(0.1), 20, 1e-2));
    compare(&format!("{mesh:?}: gradient"), &actual.gradients, &expected.gradients, 1e-5);
    for (step, (a, b)) in actual.losses.iter().zip(&expected.losses).enumerate() {
        assert!((a - b).abs() <= 1e-4, "{mesh:?}: loss {a} at step {step}, not {b}");
    }
}
