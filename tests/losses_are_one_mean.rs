//! The loss is one mean over all valid targets: of all ranks of a data x context mesh, and of all micro-batches of a step. Targets
//! are spread unevenly, so that a mean of means is another number.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::group::{Axis, LaunchError, Mesh, MeshShape, ProcessGroup, launch};
use llama::{AttentionScheme, Llama, LlamaConfig, ParallelConfig, named_gradients};
use rstest::rstest;
use tests::{Row, assert_close, batch, number, row, tensor};

const LEN: usize = 16;

fn parallel(tied: bool) -> ParallelConfig {
    match tied {
        true => ParallelConfig { loss_tile: Some(3), checkpoint: true, ..ParallelConfig::all() },
        false => ParallelConfig { attention: AttentionScheme::Ulysses, ..ParallelConfig::none() },
    }
}

fn model(tied: bool) -> Llama {
    let device = Device::flex().autodiff();
    let config =
        LlamaConfig { tie_word_embeddings: tied, initializer_range: 0.3, ..LlamaConfig::new(23, 16, 20, 2, 4, 2) };
    Llama::init(&config, &parallel(tied), &device).unwrap().fork(&device)
}

/// Rows with 15, 1, 4 and no targets: on two context ranks the second and third leave the first rank without any.
fn rows() -> Vec<Row> {
    [15, 1, 4, 0].into_iter().enumerate().map(|(i, valid)| row(i as i64, LEN, valid)).collect()
}

/// Loss, valid targets, gradients and the parameters after one step of plain SGD.
struct Step {
    loss: f64,
    valid: usize,
    gradients: Vec<(String, TensorData)>,
    after: Vec<TensorData>,
}

fn finish(model: Llama, loss: f64, valid: usize, grads: GradientsParams) -> Step {
    struct Values(Vec<TensorData>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().into_data());
        }
    }
    let gradients = named_gradients(&model, &grads).into_iter().collect();
    let model = SgdConfig::new().init().step(0.5, model, grads);
    let mut values = Values(Vec::new());
    model.visit(&mut values);
    Step { loss, valid, gradients, after: values.0 }
}

fn one_device(model: &Llama, rows: &[Row]) -> Step {
    let group = ProcessGroup::single();
    let shard = Device::flex().autodiff().context_parallel(&group).shard(&batch(rows)).unwrap();
    let loss = model.loss(&shard, &group).unwrap();
    let value = number(&loss.mean);
    let grads = GradientsParams::from_grads(loss.mean.backward(), model);
    finish(model.clone(), value, loss.valid, grads)
}

fn compare(case: &str, got: &Step, want: &Step) {
    assert_eq!(got.valid, want.valid, "{case}");
    assert!((got.loss - want.loss).abs() <= 1e-6 * want.loss, "{case}: {} and not {}", got.loss, want.loss);
    let flat = |data: &TensorData| -> Tensor<1> {
        let data = TensorData::new(data.iter::<f32>().collect::<Vec<_>>(), [data.num_elements()]);
        tensor(&data, burn::tensor::DType::F32, &Device::flex())
    };
    assert_eq!(got.gradients.len(), want.gradients.len());
    for ((name, got), (_, want)) in got.gradients.iter().zip(&want.gradients) {
        assert_close(format!("{case}: gradient of {name}"), &flat(got), &flat(want), 3e-6);
    }
    for (i, (got, want)) in got.after.iter().zip(&want.after).enumerate() {
        assert_close(format!("{case}: parameter {i} after the step"), &flat(got), &flat(want), 1e-6);
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Every rank's step, with a model of its own.
fn on_mesh(
    model: &Llama,
    (data, context): (usize, usize),
    step: impl Fn(&Llama, &Mesh) -> Result<(f64, usize, GradientsParams), Failure> + Send + Sync + 'static,
) -> Vec<Step> {
    let model = std::sync::Mutex::new(model.clone());
    let result: Result<_, LaunchError> = launch(data * context, move |world| {
        let model = model.lock().unwrap().clone().fork(&Device::flex().autodiff());
        let mesh = Mesh::new(&world, MeshShape { data, ulysses: context, ..MeshShape::default() })?;
        let (loss, valid, grads) = step(&model, &mesh)?;
        let grads = sum_gradients(grads, &model, &world)?;
        Ok::<_, Failure>(finish(model, loss, valid, grads))
    });
    result.unwrap()
}

#[rstest]
fn over_data_and_context_ranks(
    #[values((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))] mesh: (usize, usize),
    #[values(true, false)] tied: bool,
) {
    let model = model(tied);
    let expected = one_device(&model, &rows());
    assert_eq!(expected.valid, 20);
    let steps = on_mesh(&model, mesh, move |model, mesh| {
        // Each replica has its own rows, shared by its context ranks.
        let share = rows().len() / mesh.shape().data;
        let mine = &rows()[mesh.coordinates().data * share..][..share];
        let sequence = mesh.axis(Axis::Ulysses);
        let shard = Device::flex().autodiff().context_parallel(sequence).shard(&batch(mine))?;
        let loss = model.loss_across(&shard, sequence, mesh.world())?;
        let value = number(&loss.mean);
        Ok((value, loss.valid, GradientsParams::from_grads(loss.mean.backward(), model)))
    });
    for (rank, step) in steps.iter().enumerate() {
        compare(&format!("{mesh:?}, rank {rank}"), step, &expected);
    }
}

/// Micro-batches of 3 and of 13 targets, and one of none.
#[rstest]
fn over_micro_batches(#[values((1, 1), (1, 2), (2, 2))] mesh: (usize, usize), #[values(true, false)] tied: bool) {
    let micro = || [row(1, LEN, 3), row(2, LEN, 13), row(3, LEN, 0), row(4, LEN, 5)];
    let model = model(tied);
    let expected = one_device(&model, &micro());
    assert_eq!(expected.valid, 21);
    let steps = on_mesh(&model, mesh, move |model, mesh| {
        let share = micro().len() / mesh.shape().data;
        let sequence = mesh.axis(Axis::Ulysses);
        let mut accumulated = burn::optim::GradientsAccumulator::new();
        let (mut sum, mut valid) = (0.0, 0);
        for row in &micro()[mesh.coordinates().data * share..][..share] {
            let shard =
                Device::flex().autodiff().context_parallel(sequence).shard(&batch(std::slice::from_ref(row)))?;
            let loss = model.loss_over(&shard, sequence, 21)?;
            sum += number(&loss.share);
            valid += loss.valid;
            accumulated.accumulate(model, GradientsParams::from_grads(loss.share.backward(), model));
        }
        // Shares of all ranks sum to the mean.
        let total = TensorData::from([sum, valid as f64]);
        let total = mesh.world().all_reduce(total, burn_context_parallel::group::ReduceOp::Sum)?;
        let total: Vec<f64> = total.iter::<f64>().collect();
        Ok((total[0], total[1] as usize, accumulated.grads()))
    });
    for (rank, step) in steps.iter().enumerate() {
        compare(&format!("{mesh:?}, rank {rank}"), step, &expected);
    }
}

#[test]
fn a_total_below_the_targets_at_hand_is_an_error_and_none_at_all_is_zero() {
    let model = model(false);
    let group = ProcessGroup::single();
    let shard = |rows: &[_]| Device::flex().autodiff().context_parallel(&group).shard(&batch(rows)).unwrap();
    let error = model.loss_over(&shard(&[row(1, LEN, 3)]), &group, 2).unwrap_err().to_string();
    assert!(error.contains("a total of 2 targets, of which 3"), "{error}");
    let loss = model.loss_over(&shard(&[row(1, LEN, 0)]), &group, 0).unwrap();
    assert_eq!((number(&loss.share), loss.valid), (0.0, 0));
    let grads = named_gradients(&model, &GradientsParams::from_grads(loss.share.backward(), &model));
    assert!(!grads.is_empty() && grads.values().all(|grad| grad.iter::<f32>().all(|value| value == 0.0)));
}
