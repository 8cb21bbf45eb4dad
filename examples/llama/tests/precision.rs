//! bf16 compute with f32 master weights trains as f32 does, and loses no update however small.

mod common;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{SequenceLayout, Shard};
use common::{Reference, family};
use llama::{AttentionScheme, Llama, ParallelConfig, adamw, clip_grad_norm, load, precision};
use rstest::rstest;

struct Types(Vec<(DType, bool)>);

impl ModuleVisitor for Types {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push((param.base().dtype(), param.base().is_require_grad()));
    }
}

fn types(model: &Llama) -> Vec<(DType, bool)> {
    let mut types = Types(Vec::new());
    model.visit(&mut types);
    types.0
}

fn number(x: &Tensor<1>) -> f64 {
    x.clone().inner().into_data().iter::<f64>().next().unwrap()
}

fn start(name: &str, parallel: &ParallelConfig, device: &Device) -> (Llama, Shard) {
    let (model, _) = load(&family(name), parallel, device).unwrap();
    let batch = Reference::at(&family(name)).batch();
    let layout = SequenceLayout::contiguous(batch.len(), 1).unwrap();
    (model, batch.shard(&layout, 0, device).unwrap())
}

fn train(name: &str, parallel: &ParallelConfig, device: &Device, dtype: DType, steps: usize) -> (Vec<f64>, Llama) {
    let (mut master, shard) = start(name, parallel, device);
    let mut optimizer = adamw(0.0);
    let mut losses = Vec::new();
    for _ in 0..steps {
        let model = precision::compute(&master, dtype);
        let loss = model.loss(&shard, &ProcessGroup::single()).unwrap().mean;
        losses.push(number(&loss));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = precision::to_f32(grads, &master);
        let (grads, norm) = clip_grad_norm(grads, &master, 1e3, &ProcessGroup::single()).unwrap();
        assert!(norm.is_finite() && norm > 0.0);
        master = optimizer.step(1e-2, master, grads);
    }
    (losses, master)
}

#[rstest]
fn a_few_steps_stay_near_f32s(
    #[values("llama2", "qwen3", "qwen2_window_yarn", "llama_biases_mqa_tied")] name: &str,
    #[values(Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing())] device: Device,
    #[values(
        ParallelConfig::none(),
        ParallelConfig {
            attention: AttentionScheme::UPipe { heads_per_stage: Some(3) }, loss_tile: Some(20), mlp_tile: Some(17),
            ..ParallelConfig::all()
        }
    )]
    parallel: ParallelConfig,
) {
    let want: Vec<f64> = Reference::at(&family(name)).get("loss_curve").iter::<f64>().collect();
    let (exact, _) = train(name, &parallel, &device, DType::F32, 5);
    let (half, master) = train(name, &parallel, &device, DType::BF16, 5);
    for (step, want) in want.iter().enumerate() {
        assert!((exact[step] - want).abs() <= 1e-3 * want, "f32, step {step}: {} and not {want}", exact[step]);
        // One rounding is 1/256 of a weight or an activation; the loss averages over 150 targets.
        assert!((half[step] - want).abs() <= 0.02 * want, "bf16, step {step}: {} and not {want}", half[step]);
    }
    assert_ne!(exact, half);
    assert!(types(&master).iter().all(|(dtype, trained)| (*dtype, *trained) == (DType::F32, true)));
}

/// The same leaves: no copy, and gradients under either name.
#[test]
fn in_f32_nothing_is_copied() {
    let device = Device::flex().autodiff();
    let (master, shard) = start("llama2", &ParallelConfig::none(), &device);
    let model = precision::compute(&master, DType::F32);
    let grads = model.loss(&shard, &ProcessGroup::single()).unwrap().mean.backward();
    let weight = |model: &Llama| model.lm_head.as_ref().unwrap().weight.val();
    assert!(weight(&master).grad(&grads).is_some(), "the master's own leaf is in the graph");
    let count = GradientsParams::from_grads(grads, &model).len();
    assert_eq!(count, types(&master).len());
}

#[test]
fn the_computing_model_is_bf16_under_the_same_ids_and_frozen_stays_frozen() {
    struct Ids(Vec<burn::module::ParamId>);
    impl ModuleVisitor for Ids {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.id);
        }
    }
    let ids = |model: &Llama| {
        let mut ids = Ids(Vec::new());
        model.visit(&mut ids);
        ids.0
    };
    let device = Device::flex().autodiff();
    let (mut master, shard) = start("qwen3", &ParallelConfig::none(), &device);
    master.embed_tokens = master.embed_tokens.no_grad();
    let model = precision::compute(&master, DType::BF16);
    assert_eq!(ids(&model), ids(&master));
    assert!(types(&model).iter().all(|(dtype, _)| *dtype == DType::BF16));
    let trained: Vec<bool> = types(&model).iter().map(|(_, trained)| *trained).collect();
    assert_eq!(trained.iter().filter(|trained| !**trained).count(), 1);
    let loss = model.loss(&shard, &ProcessGroup::single()).unwrap().mean;
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    assert_eq!(grads.len(), trained.len() - 1);

    // Off the tape, for evaluation.
    let plain = precision::compute(&master.valid(), DType::BF16);
    assert!(types(&plain).iter().all(|kind| *kind == (DType::BF16, false)));
}

/// A bf16 weight of 1 does not notice 1e-4; thirty of them together it does.
#[test]
fn updates_below_a_roundings_size_are_not_lost() {
    let device = Device::flex().autodiff();
    let (mut master, _) = start("llama2", &ParallelConfig::none(), &device);
    let gamma = |model: &Llama| model.norm.inner.gamma.val().into_data().iter::<f32>().collect::<Vec<_>>();
    let before = (gamma(&master), gamma(&precision::compute(&master, DType::BF16)));
    let mut sgd = SgdConfig::new().init();
    let mut unnoticed = 0;
    for _ in 0..100 {
        let model = precision::compute(&master, DType::BF16);
        unnoticed += usize::from(gamma(&model) == before.1);
        let loss = model.norm.inner.gamma.val().sum();
        let grads = precision::to_f32(GradientsParams::from_grads(loss.backward(), &model), &master);
        master = sgd.step(1e-4, master, grads);
    }
    assert!(unnoticed > 1, "the updates are too large to show anything");
    for (before, after) in before.0.iter().zip(gamma(&master)) {
        assert!((before - after - 1e-2).abs() < 1e-5, "{before} {after}");
    }
    assert_ne!(gamma(&precision::compute(&master, DType::BF16)), before.1);
}
