//! A run that is saved and restored goes on as if nothing had happened: to the bit on the mesh that saved it, within rounding on any other, with
//! FSDP or without.

use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::fsdp::{Fsdp, FsdpConfig, ShardedOptimizer, StatePlace};
use burn_context_parallel::group::{Axis, Mesh, MeshShape, ReduceOp};
use burn_context_parallel::sequence::Batch;
use burn_upipe::learner::checkpoint::{CheckpointError, Checkpoints, RunState};
use burn_upipe::learner::training::{Holding, Parts, parts, restore};
use llama::{Llama, LlamaConfig, ParallelConfig, adamw_rule};
use rstest::rstest;
use tests::{filled, on_ranks, row};

/// A folder of its own, removed at the end.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("burn-upipe-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn model(tied: bool, width: usize) -> Llama {
    let config = LlamaConfig { tie_word_embeddings: tied, ..LlamaConfig::new(23, width, 20, 2, 4, 2) };
    let parallel = ParallelConfig { loss_tile: Some(3), ..ParallelConfig::all() };
    filled(Llama::init(&config, &parallel, &Device::flex().autodiff()).unwrap(), 9, DType::F32, 0.3)
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    data: usize,
    context: usize,
    fsdp: bool,
}

/// Losses of the steps, and the shards' or whole weights' bytes of every rank at the end.
type Outcome = (Vec<f64>, Vec<Vec<u8>>);

/// Trains the steps `from..to`, restoring before and saving after if there is a folder.
fn run(layout: Layout, tied: bool, from: usize, to: usize, load: Option<&Path>, save: Option<&Path>) -> Outcome {
    let shape = MeshShape { data: layout.data, ulysses: layout.context, ..MeshShape::default() };
    let (load, save) = (load.map(Path::to_owned), save.map(Path::to_owned));
    let outcomes = on_ranks(shape.ranks().unwrap(), move |world| {
        let mesh = Mesh::new(&world, shape)?;
        let device = Device::flex().autodiff();
        let fsdp = layout.fsdp.then(|| Fsdp::over(&world, FsdpConfig::new())).transpose()?;
        let mut model = match &fsdp {
            Some(fsdp) => fsdp.shard(model(tied, 16))?,
            None => model(tied, 16).fork(&device),
        };
        let holding = fsdp.clone().map_or_else(|| Holding::Whole(world.clone()), Holding::Sharded);
        let mut optimizer = ShardedOptimizer::new(adamw_rule(0.1), StatePlace::Device);
        if let Some(folder) = &load {
            let checkpoint = Checkpoints::new(folder, None).latest(&world).unwrap().expect("saved before");
            assert_eq!(checkpoint.step() as usize, from);
            model = restore(model, &mut optimizer, &holding, &checkpoint).unwrap();
        }
        let (sequence, mut losses) = (mesh.axis(Axis::Ulysses), Vec::new());
        for step in from..to {
            let rows: Vec<_> = (0..4).map(|i| row((step * 4 + i) as i64, 9, 9).0).collect();
            let mine = &rows[mesh.coordinates().data * 4 / shape.data..][..4 / shape.data];
            let shard = device.context_parallel(sequence).shard(&Batch::from_rows(mine)?)?;
            let share = model.loss_over(&shard, sequence, 4 * 8).unwrap().share;
            let value = share.clone().inner().into_data().convert_dtype(DType::F64);
            losses.push(world.all_reduce(value, ReduceOp::Sum)?.iter::<f64>().next().unwrap());
            let grads = GradientsParams::from_grads(share.backward(), &model);
            let (grads, _) = holding.clip(holding.sum(grads, &model)?, &model, 0.5)?;
            model = optimizer.step(1e-2, model, grads);
        }
        if let Some(folder) = &save {
            let Parts { pieces, scalars } = parts(&model, &optimizer, &holding);
            let state = RunState { step: to as u64, optimizer: scalars, ..RunState::default() };
            Checkpoints::new(folder, None).save(&world, pieces, &state).unwrap();
        }
        struct Bytes(Vec<u8>);
        impl ModuleVisitor for Bytes {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.extend(param.base().into_data().as_bytes());
            }
        }
        let mut bytes = Bytes(Vec::new());
        model.visit(&mut bytes);
        Ok((losses, bytes.0))
    });
    let losses = outcomes[0].0.clone();
    (losses, outcomes.into_iter().map(|(_, bytes)| bytes).collect())
}

#[rstest]
fn ten_steps_are_five_and_five(
    #[values((1, 1), (2, 2), (1, 3), (4, 1))] mesh: (usize, usize),
    #[values(false, true)] fsdp: bool,
    #[values(false, true)] tied: bool,
) {
    let layout = Layout { data: mesh.0, context: mesh.1, fsdp };
    let folder = folder(&format!("five-{}-{}-{fsdp}-{tied}", mesh.0, mesh.1));
    let (losses, weights) = run(layout, tied, 0, 10, None, None);
    let (first, _) = run(layout, tied, 0, 5, None, Some(&folder));
    let (second, resumed) = run(layout, tied, 5, 10, Some(&folder), None);
    // The bits: nothing was rounded, no moment and no count of steps was lost.
    assert_eq!([first, second].concat(), losses);
    assert!(resumed == weights, "weights differ");
    std::fs::remove_dir_all(folder).unwrap();
}

/// DeepSpeed PR#8226, PR#8122: saved on one mesh, loaded on another, the next losses are equal.
#[rstest]
fn another_mesh_goes_on(
    #[values((4, 1), (1, 1), (1, 4), (1, 3), (2, 2))] mesh: (usize, usize),
    #[values((true, true), (true, false), (false, true))] fsdp: (bool, bool),
    #[values(false, true)] tied: bool,
) {
    let folder = folder(&format!("mesh-{}-{}-{}-{}-{tied}", mesh.0, mesh.1, fsdp.0, fsdp.1));
    let saving = Layout { data: 2, context: 2, fsdp: fsdp.0 };
    let (losses, _) = run(saving, tied, 0, 8, None, None);
    run(saving, tied, 0, 5, None, Some(&folder));
    let loading = Layout { data: mesh.0, context: mesh.1, fsdp: fsdp.1 };
    let (again, _) = run(loading, tied, 5, 8, Some(&folder), None);
    for (step, (a, b)) in again.iter().zip(&losses[5..]).enumerate() {
        assert!((a - b).abs() < 1e-4, "step {}: {a}, not {b}", step + 5);
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn another_models_checkpoint_is_refused() {
    let folder = folder("foreign");
    run(Layout { data: 1, context: 1, fsdp: false }, false, 0, 1, None, Some(&folder));
    let here = folder.clone();
    on_ranks(1, move |world| {
        let checkpoint = Checkpoints::new(&here, None).latest(&world).unwrap().unwrap();
        let holding = Holding::Whole(world.clone());
        let mut optimizer = ShardedOptimizer::new(adamw_rule(0.1), StatePlace::Device);
        let wider = restore(model(false, 24), &mut optimizer, &holding, &checkpoint).unwrap_err();
        assert!(matches!(&wider, CheckpointError::Mismatch { .. }), "{wider}");
        // It has an output layer more than this model.
        let tied = restore(model(true, 16), &mut optimizer, &holding, &checkpoint).unwrap_err().to_string();
        assert!(tied.contains("lm_head"), "{tied}");
        // SGD's state may be empty, and so could be made of anything.
        let mut sgd = ShardedOptimizer::new(burn::optim::SgdConfig::new().build(), StatePlace::Device);
        let other = restore(model(false, 16), &mut sgd, &holding, &checkpoint).unwrap_err().to_string();
        assert!(other.contains("that of another one"), "{other}");
        Ok(())
    });
    std::fs::remove_dir_all(folder).unwrap();
}
