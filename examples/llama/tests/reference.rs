//! A model from a Hugging Face folder is PyTorch's model: logits, loss, gradients and training, with every technique.

mod common;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{Batch, SequenceLayout, Shard};
use common::{Reference, error, folder};
use llama::{AttentionScheme, Llama, LlamaConfig, ParallelConfig, adamw, load, named_gradients};
use rstest::rstest;

fn shard(batch: &Batch, device: &Device) -> Shard {
    batch.shard(&SequenceLayout::contiguous(batch.len(), 1).unwrap(), 0, device).unwrap()
}

/// Tiles that do not divide the 96 tokens, heads per stage that do not divide the 8 heads.
fn everything() -> ParallelConfig {
    ParallelConfig {
        attention: AttentionScheme::UPipe { heads_per_stage: Some(3) },
        checkpoint: true,
        blocks_per_checkpoint: 1,
        mlp_tile: Some(7),
        norm_tile: Some(50),
        loss_tile: Some(13),
    }
}

#[rstest]
fn outputs_gradients_and_training_are_pytorchs(
    #[values("llama", "llama_scaled_tied")] model: &str,
    #[values(
        ParallelConfig::none(),
        ParallelConfig { attention: AttentionScheme::Ulysses, ..ParallelConfig::none() },
        ParallelConfig { checkpoint: true, ..ParallelConfig::none() },
        ParallelConfig { checkpoint: true, blocks_per_checkpoint: 2, ..ParallelConfig::none() },
        ParallelConfig { loss_tile: Some(10), ..ParallelConfig::none() },
        everything(),
        ParallelConfig::all()
    )]
    parallel: ParallelConfig,
) {
    let reference = Reference::of(model);
    let device = Device::flex().autodiff();
    let (mut llama, report) = load(&folder(model), &parallel, &device).unwrap();
    assert!(report.is_complete() && report.ignored.is_empty());
    assert_eq!(report.applied.len(), reference.gradients().len());
    let (batch, group) = (reference.batch(), ProcessGroup::single());
    let shard = shard(&batch, &device);

    let logits = llama.valid().logits(shard.tokens.clone()).into_data();
    assert!(error(&logits, &reference.get("logits")) <= 2e-5);

    let mut optimizer = adamw(0.0);
    for (step, want) in reference.get("loss_curve").iter::<f64>().enumerate() {
        let loss = llama.loss(&shard, &group).unwrap();
        assert_eq!(loss.valid, batch.valid());
        let got = f64::from(loss.mean.clone().inner().into_scalar::<f32>());
        let limit = if step == 0 { 1e-5 } else { 1e-3 };
        assert!((got - want).abs() <= limit * want, "loss of step {step}: {got}, not {want}");
        let grads = GradientsParams::from_grads(loss.mean.backward(), &llama);
        if step == 0 {
            let (got, want) = (named_gradients(&llama, &grads), reference.gradients());
            assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
            for (name, got) in &got {
                assert!(error(got, &want[name]) <= 2e-5, "{name}");
            }
        }
        llama = optimizer.step(1e-2, llama, grads);
    }
}

/// transformers has no reference here, but what each technique gives must agree, and a bias must be used.
#[test]
fn biases_have_the_same_gradients_with_every_technique() {
    let device = Device::flex().autodiff();
    let config = LlamaConfig { attention_bias: true, mlp_bias: true, ..LlamaConfig::new(50, 32, 48, 2, 4, 2) };
    let model = Llama::init(&config, &ParallelConfig::none(), &device).unwrap();
    let batch = Batch::from_rows(&[(1..20).collect(), (20..39).collect()]).unwrap();
    let shard = shard(&batch, &device);
    let gradients = |model: &Llama| {
        let loss = model.loss(&shard, &ProcessGroup::single()).unwrap();
        named_gradients(model, &GradientsParams::from_grads(loss.mean.backward(), model))
    };
    let plain = gradients(&model);
    let all = gradients(&llama::parallelize(model.clone(), &everything()).unwrap());
    assert_eq!(plain.len(), 2 * (9 + 7) + 3);
    for (name, want) in &plain {
        assert!(error(&all[name], want) <= 2e-5, "{name}");
    }
}

#[test]
fn a_new_model_has_the_configured_deviation_and_clones_are_equal() {
    let device = Device::flex();
    let config = LlamaConfig { initializer_range: 0.05, ..LlamaConfig::new(64, 64, 96, 1, 4, 4) };
    let model = Llama::init(&config, &ParallelConfig::none(), &device).unwrap();
    let weight = model.layers[0].inner.inner.mlp.inner.up_proj.weight.val();
    let deviation = weight.clone().var(1).mean().sqrt().into_scalar::<f32>();
    assert!((deviation - 0.05).abs() < 0.005, "{deviation}");
    assert_eq!(model.norm.inner.gamma.val().into_data(), Tensor::<1>::ones([64], &device).into_data());
    assert_eq!(model.clone().embed_tokens.weight.val().into_data(), model.embed_tokens.weight.val().into_data());
    assert_eq!(model.num_params(), 64 * 64 * 2 + 64 * 64 * 4 + 3 * 64 * 96 + 3 * 64);
}

#[test]
fn an_id_outside_the_vocabulary_is_an_error() {
    let device = Device::flex().autodiff();
    let model = Llama::init(&LlamaConfig::new(10, 8, 8, 1, 2, 1), &ParallelConfig::none(), &device).unwrap();
    let loss =
        |rows: &[Vec<i64>]| model.loss(&shard(&Batch::from_rows(rows).unwrap(), &device), &ProcessGroup::single());
    assert!(loss(&[vec![1, 9, 0]]).is_ok());
    let error = loss(&[vec![10, 1]]).unwrap_err().to_string();
    assert!(error.contains("token id 10 in a vocabulary of 10"), "{error}");
    let error = loss(&[vec![1, 10]]).unwrap_err().to_string();
    assert!(error.contains("id 10 in a vocabulary of 10"), "{error}");
}

#[test]
fn heads_per_stage_that_the_model_does_not_have_are_an_error() {
    let parallel =
        ParallelConfig { attention: AttentionScheme::UPipe { heads_per_stage: Some(9) }, ..ParallelConfig::none() };
    let error = load(&folder("llama"), &parallel, &Device::flex()).unwrap_err().to_string();
    assert!(error.contains("9 heads a stage of 8"), "{error}");
}
