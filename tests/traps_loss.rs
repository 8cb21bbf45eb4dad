//! What other systems got wrong between the loss and the optimizer: who divides by what, and who sums. Each test names where it was
//! reported.
//!
//! Beside these: `no_valid_target_is_a_zero_loss_with_zero_gradients`, `the_loss_has_the_same_bits_on_every_rank`,
//! `gradients_are_summed_also_where_a_rank_has_none`, `a_group_that_does_not_start_at_rank_0_uses_its_own_numbers`.

use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::collective::{
    all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter, shift, sum_gradients,
};
use burn_context_parallel::group::{Axis, Mesh, MeshShape, ProcessGroup};
use burn_context_parallel::sequence::{Batch, IGNORE_INDEX};
use burn_context_parallel::{Error, Result};
use burn_upipe::tiling::TiledLinearCrossEntropy;
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, LlamaError, ParallelConfig, clip_grad_norm};
use rstest::rstest;
use tests::{assert_close, assert_gradients, filled, gradients, norm, on_ranks, summed, tensor, values};

const TOLERANCE: f64 = 1e-10;
const LEN: usize = 15;

fn model(recompute: bool) -> Llama {
    let plain = ParallelConfig { attention: AttentionScheme::default(), ..ParallelConfig::none() };
    let tiled =
        ParallelConfig { checkpoint: true, mlp_tile: Some(2), norm_tile: Some(3), loss_tile: Some(2), ..plain.clone() };
    let parallel = if recompute { tiled } else { plain };
    let model = Llama::init(&LlamaConfig::new(19, 12, 20, 2, 6, 3), &parallel, &Device::flex().autodiff()).unwrap();
    filled(model, 1, DType::F64, 0.6)
}

/// Sequences of `LEN` tokens, of which the last so many are targets.
fn batch(valid: &[usize]) -> Batch {
    let row = |row: usize| (0..LEN as i64).map(|i| (i * i * 3 + i * row as i64 + 5) % 19).collect::<Vec<_>>();
    let rows: Vec<Vec<i64>> = (0..valid.len()).map(row).collect();
    let label = |valid: usize, i: usize, id: i64| if i + valid >= LEN { id } else { IGNORE_INDEX };
    let labels =
        rows.iter().zip(valid).flat_map(|(row, valid)| row.iter().enumerate().map(|(i, id)| label(*valid, i, *id)));
    let labels = TensorData::new(labels.collect::<Vec<_>>(), [rows.len(), LEN]);
    let batch =
        Batch::from_rows(&rows).unwrap().with_labels(Tensor::<2, Int>::from_data(labels, &Device::flex())).unwrap();
    assert_eq!(batch.valid(), valid.iter().sum::<usize>());
    batch
}

fn core(error: LlamaError) -> Error {
    Error::invalid("Llama", error.to_string(), "")
}

fn scalar(x: Tensor<1>) -> f64 {
    x.into_data().iter::<f64>().next().unwrap()
}

/// Megatron-LM#673, #906, #1124, SkyRL PR#1420, torchtitan#1132, #4195, DeepSpeed#5248: gradients off by the number of ranks that
/// share a sequence, or of replicas. One global batch of 2 and 11 targets, divided in every way; plain gradients, as an adaptive
/// optimizer would hide a factor.
#[rstest]
#[case(1, 1)]
#[case(2, 1)]
#[case(1, 2)]
#[case(2, 2)]
#[case(1, 4)]
fn gradients_do_not_depend_on_how_ranks_divide_the_batch(
    #[case] data: usize,
    #[case] ulysses: usize,
    #[values(false, true)] recompute: bool,
) {
    let global = [2, 11];
    let single = model(false);
    let group = ProcessGroup::single();
    let shard = Device::flex().autodiff().context_parallel(&group).shard(&batch(&global)).unwrap();
    let loss = single.loss(&shard, &group).unwrap();
    let expected = gradients(&single, &loss.mean.backward());
    let answers = on_ranks(data * ulysses, move |world| {
        let mesh = Mesh::new(&world, MeshShape { data, ulysses, ..MeshShape::default() })?;
        let sequence = mesh.axis(Axis::Ulysses);
        // Its replica's rows of the global batch, with the ids that they have there.
        let rows = if data == 1 { vec![0, 1] } else { vec![mesh.coordinates().data] };
        let batch = rows_of(&batch(&global), &rows);
        let model = model(recompute);
        let shard = Device::flex().autodiff().context_parallel(sequence).shard(&batch)?;
        let loss = model.loss_across(&shard, sequence, &world).map_err(core)?;
        assert_eq!(loss.valid, 13);
        Ok((scalar(loss.mean.clone()), gradients(&model, &loss.mean.backward())))
    });
    let case = format!("{data} replicas of {ulysses} ranks, recomputing {recompute}");
    let mean = scalar(loss.mean);
    assert!(answers.iter().all(|answer| (answer.0 - mean).abs() < TOLERANCE * mean), "{case}: loss");
    let grads = summed(&answers.into_iter().map(|answer| answer.1).collect::<Vec<_>>());
    assert_gradients(&case, &grads, &expected, TOLERANCE);
    let (a, b) = (norm(&grads), norm(&expected));
    assert!((a - b).abs() < TOLERANCE * b, "{case}: norm {a}, one device {b}");
}

/// Some rows of a batch, with their targets.
fn rows_of(batch: &Batch, rows: &[usize]) -> Batch {
    let group = ProcessGroup::single();
    let shard = Device::flex().context_parallel(&group).shard(batch).unwrap();
    let host = |x: Tensor<2, Int>| x.into_data().iter::<i64>().collect::<Vec<_>>();
    let (tokens, targets) = (host(shard.tokens), host(shard.targets));
    let pick = |values: &[i64]| rows.iter().map(|row| values[row * LEN..(row + 1) * LEN].to_vec()).collect::<Vec<_>>();
    // A target stands before its token; labels stand at it.
    let labels = pick(&targets).into_iter().flat_map(|row| [vec![IGNORE_INDEX], row[..LEN - 1].to_vec()].concat());
    let labels = TensorData::new(labels.collect::<Vec<_>>(), [rows.len(), LEN]);
    Batch::from_rows(&pick(&tokens)).unwrap().with_labels(Tensor::from_data(labels, &Device::flex())).unwrap()
}

/// Megatron-LM#1764, NeMo-Speech#14488, axolotl#3026, OLMo-core PR#657, OpenRLHF PR#583, cosmos-rl PR#155: a rank, or everybody,
/// without a target divides 0 by 0, and the sum over ranks spreads it.
#[rstest]
fn ranks_without_targets_add_zero(#[values(2, 3, 4)] ranks: usize, #[values(false, true)] recompute: bool) {
    for valid in [&[3][..], &[1, 0], &[0, 0], &[0]] {
        let single = model(false);
        let group = ProcessGroup::single();
        let shard = Device::flex().autodiff().context_parallel(&group).shard(&batch(valid)).unwrap();
        let loss = single.loss(&shard, &group).unwrap().mean;
        let expected = gradients(&single, &loss.backward());
        let answers = on_ranks(ranks, move |world| {
            let model = model(recompute);
            let shard = Device::flex().autodiff().context_parallel(&world).shard(&batch(valid))?;
            assert!(world.rank() > 0 || shard.valid == 0, "the first rank has no target");
            let loss = model.loss(&shard, &world).map_err(core)?;
            Ok((scalar(loss.mean.clone()), gradients(&model, &loss.mean.backward())))
        });
        assert!(answers.iter().all(|answer| answer.0 == answers[0].0));
        assert!((answers[0].0 - scalar(loss)).abs() < TOLERANCE);
        let grads = summed(&answers.into_iter().map(|answer| answer.1).collect::<Vec<_>>());
        assert_gradients(format!("{valid:?} on {ranks}"), &grads, &expected, TOLERANCE);
        assert_eq!(norm(&grads) == 0.0, valid.iter().sum::<usize>() == 0, "exactly 0, and only then");
    }
}

/// Megatron-Bridge PR#3117: NaN at a position without target, times a mask of 0, is NaN. Loss and every gradient are those of
/// zeros there: selected, not multiplied.
#[rstest]
fn a_nan_where_there_is_no_target_reaches_no_gradient(
    #[values(None, Some(1), Some(2), Some(64))] tile: Option<usize>,
    #[values(1, 2)] ranks: usize,
) {
    let step = move |fill: f32| {
        on_ranks(ranks, move |world| {
            let device = Device::flex().autodiff();
            let head = LinearConfig::new(5, 11).with_bias(true).init(&device);
            let head = TiledLinearCrossEntropy::new(filled(head, 2, DType::F32, 1.0), tile);
            let x = tensor::<3>(&values(7 + world.rank() as u64, &[2, 6, 5]), DType::F32, &Device::flex());
            let targets: Vec<i64> =
                (0..12).map(|i| if i % 3 == 1 || world.rank() == 1 && i < 9 { IGNORE_INDEX } else { i % 11 }).collect();
            let targets = Tensor::<2, Int>::from_data(TensorData::new(targets, [2, 6]), &Device::flex());
            let ignored = targets.clone().equal_elem(IGNORE_INDEX).unsqueeze_dim::<3>(2).expand([2, 6, 5]);
            let x = Tensor::<3>::from_inner(x.mask_fill(ignored, fill)).require_grad();
            let loss = head.forward(x.clone(), targets, Some(&world))?;
            let grads = loss.mean.backward();
            let dx = x.grad(&grads).unwrap().reshape([60]).to_data().convert::<f64>();
            Ok([vec![loss.mean.into_data().convert::<f64>(), dx], gradients(&head, &grads)].concat())
        })
    };
    for (rank, (nan, zero)) in step(f32::NAN).iter().zip(&step(0.0)).enumerate() {
        assert_gradients(format!("rank {rank}, tile {tile:?}: loss, dx, dw, db"), nan, zero, 0.0);
    }
}

/// transformers#41832, #35438, verl#2857, axolotl PR#2977, 360-LLaMA-Factory#1: a mean per micro-batch, averaged. Two of 3 and of 13
/// targets are one batch of both.
#[rstest]
fn accumulated_micro_batches_are_one_batch(#[values(1, 2)] ranks: usize, #[values(false, true)] recompute: bool) {
    let single = model(false);
    let group = ProcessGroup::single();
    let whole = batch(&[3, 13]);
    let shard = Device::flex().autodiff().context_parallel(&group).shard(&whole).unwrap();
    let loss = single.loss(&shard, &group).unwrap().mean;
    let (expected, mean) = (gradients(&single, &loss.backward()), scalar(loss));
    let answers = on_ranks(ranks, move |world| {
        let model = model(recompute);
        let (mut losses, mut grads) = (Vec::new(), Vec::new());
        for row in [0, 1] {
            let micro = rows_of(&batch(&[3, 13]), &[row]);
            let shard = Device::flex().autodiff().context_parallel(&world).shard(&micro)?;
            let loss = model.loss_over(&shard, &world, 16).map_err(core)?;
            assert_eq!(loss.valid, shard.valid);
            grads.push(gradients(&model, &loss.share.backward()));
            losses.push(scalar(loss.share));
        }
        Ok((losses, summed(&grads)))
    });
    let total: f64 = answers.iter().flat_map(|answer| &answer.0).sum();
    assert!((total - mean).abs() < TOLERANCE * mean, "{total}, at once {mean}");
    let micro = |i: usize, valid: f64| answers.iter().map(|answer| answer.0[i]).sum::<f64>() * 16.0 / valid;
    let of_means = (micro(0, 3.0) + micro(1, 13.0)) / 2.0;
    assert!((of_means - mean).abs() > 1e-3 * mean, "a mean of means would be {of_means}: not told apart from {mean}");
    let grads = summed(&answers.into_iter().map(|answer| answer.1).collect::<Vec<_>>());
    assert_gradients(format!("{ranks} ranks"), &grads, &expected, TOLERANCE);
}

/// NeMo Automodel#3540, pytorch#196996, #160279: gradients of two types, and a parameter that first gets one in the last micro-batch, on
/// one rank only.
#[test]
fn a_parameter_of_the_last_micro_batch_and_of_another_type_is_summed() {
    #[derive(Module, Debug)]
    struct Two {
        always: Linear,
        late: Param<Tensor<2>>,
    }
    let sums = on_ranks(2, |world| {
        let device = Device::flex().autodiff();
        let always = LinearConfig::new(2, 2).with_bias(false).init(&device);
        let late = Tensor::<2>::full([2, 2], 0.5, (&device, DType::BF16)).require_grad();
        let module = Two { always, late: Param::from_tensor(late) };
        let mut sums = GradientsAccumulator::new();
        for micro in 0..2 {
            let x = Tensor::<2>::ones([1, 2], &device);
            let mut loss = module.always.forward(x.clone()).sum();
            if micro == 1 && world.rank() == 1 {
                loss = loss + x.cast(DType::BF16).matmul(module.late.val()).sum().cast(DType::F32) * 3;
            }
            sums.accumulate(&module, GradientsParams::from_grads(loss.backward(), &module));
        }
        let grads = sum_gradients(sums.grads(), &module, &world)?;
        let of = |id| -> (DType, Vec<f64>) {
            let grad = grads.get::<2>(id).expect("summed");
            (grad.dtype(), grad.into_data().iter::<f64>().collect())
        };
        Ok((of(module.always.weight.id), of(module.late.id)))
    });
    assert_eq!(sums, vec![((DType::F32, vec![4.0; 4]), (DType::BF16, vec![3.0; 4])); 2]);
}

/// NeMo Automodel#3461, #3136, Megatron-LM#2263: the norm of a million gradients of 1e4 overflows in half types, or differs between
/// ranks, which then clip by different factors.
#[rstest]
#[case(DType::F32, 1e4)]
#[case(DType::F16, 1e4)]
#[case(DType::BF16, 9984.0)] // 1e4 rounded
fn the_gradient_norm_is_finite_and_one_on_all_ranks(#[case] dtype: DType, #[case] each: f64) {
    #[derive(Module, Debug)]
    struct One {
        a: Param<Tensor<2>>,
    }
    let answers = on_ranks(2, move |world| {
        let device = Device::flex();
        let zeros = || Tensor::<2>::zeros([1000, 1000], (&device, dtype));
        let module = One { a: Param::from_tensor(Tensor::from_inner(zeros()).require_grad()) };
        let mut grads = GradientsParams::new();
        // Each rank has half of it: powers of two, so that the sum is exact.
        grads.register(module.a.id, zeros().add_scalar(each / 2.0));
        let grads = sum_gradients(grads, &module, &world)?;
        let (grads, norm) = clip_grad_norm(grads, &module, 1e4, &world)?;
        let clipped = grads.get::<2>(module.a.id).unwrap().cast(DType::F64).square().sum().sqrt().into_scalar::<f64>();
        Ok((norm, clipped))
    });
    assert_eq!(answers[0].0.to_bits(), answers[1].0.to_bits());
    assert_eq!(answers[0].1.to_bits(), answers[1].1.to_bits());
    assert!((answers[0].0 / (each * 1e3) - 1.0).abs() < 1e-5, "{}", answers[0].0);
    assert!((answers[0].1 / 1e4 - 1.0).abs() < 1e-2, "{}", answers[0].1);
}

/// DeepSpeed PR#7821, accelerate#3917, axolotl#3382: in evaluation labels were not shifted, or the mean was over a shard.
#[rstest]
fn the_evaluation_loss_is_that_of_one_device(#[values(2, 3)] ranks: usize, #[values(false, true)] recompute: bool) {
    let evaluate = move |world: ProcessGroup| -> Result<f64> {
        let model = model(recompute);
        let trained = model.loss(&Device::flex().autodiff().context_parallel(&world).shard(&batch(&[4, 14]))?, &world);
        let shard = Device::flex().context_parallel(&world).shard(&batch(&[4, 14]))?;
        let loss = model.valid().loss(&shard, &world).map_err(core)?;
        assert!(!loss.mean.is_tracked());
        let (loss, trained) = (scalar(loss.mean), scalar(trained.map_err(core)?.mean));
        assert!((loss - trained).abs() < 1e-12, "the same function as in training");
        Ok(loss)
    };
    let expected = on_ranks(1, evaluate)[0];
    for loss in on_ranks(ranks, evaluate) {
        assert!((loss - expected).abs() < 1e-12 * expected, "{loss}, one device {expected}");
    }
}

fn apply(name: &str, x: Tensor<2>, group: &ProcessGroup) -> Result<Tensor<2>> {
    match name {
        "all_to_all" => all_to_all(x, 1, 0, &[3, 1], group),
        "all_gather" => all_gather(x, 0, group),
        "reduce_scatter" => reduce_scatter(x, 1, &[3, 1], group),
        "all_reduce" => all_reduce(x, group),
        "broadcast" => broadcast(x, 1, group),
        "reduce" => reduce(x, 1, group),
        "shift" => shift(x, 1, group),
        other => panic!("no operation {other}"),
    }
}

/// DeepSpeed PR#7809, #7672: the backward pass of a gather that took its slice by the rank in the world. In a group that does not begin
/// at rank 0 every collective gives what it gives in a world of that size.
#[rstest]
fn collectives_of_a_subgroup_are_those_of_a_world_of_its_size(
    #[values("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "shift")]
    name: &'static str,
) {
    let run = move |group: &ProcessGroup| -> Result<[Tensor<2>; 2]> {
        let x = tensor::<2>(&values(1 + group.rank() as u64, &[2, 4]), DType::F64, &Device::flex().autodiff())
            .require_grad();
        let y = apply(name, x.clone(), group)?;
        let weights = tensor::<2>(&values(8 + group.rank() as u64, &y.dims()), DType::F64, &Device::flex().autodiff());
        let grads = (y.clone() * weights).sum().backward();
        Ok([y.inner(), x.grad(&grads).unwrap()])
    };
    let expected = on_ranks(2, move |world| Ok(run(&world)?.map(|x| x.to_data())));
    let of_world = on_ranks(4, move |world| {
        let group = world.subgroup(if world.rank() % 2 == 1 { &[1, 3] } else { &[0, 2] })?;
        Ok((group.rank(), run(&group)?.map(|x| x.to_data())))
    });
    for (rank, answers) in of_world {
        for (i, what) in ["y", "dx"].iter().enumerate() {
            let of = |data: &TensorData| tensor::<2>(data, DType::F64, &Device::flex());
            assert_close(format!("{name}: {what}"), &of(&answers[i]), &of(&expected[rank][i]), 0.0);
        }
    }
}

/// long-context-attention#173: "2.10" is less than "2.9" as text. What runs here is pinned by the resolver, and no line of ours looks at
/// a version.
#[test]
fn no_version_is_compared_as_text() {
    fn look(folder: &Path, seen: &mut usize) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                look(&path, seen);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                *seen += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                // In two pieces, or this file would find itself.
                let found = text.contains(concat!("PKG_", "VERSION")) || text.contains(concat!("__ver", "sion__"));
                assert!(!found, "{} looks at a version", path.display());
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut seen = 0;
    for member in ["burn-context-parallel/src", "burn-upipe/src", "examples", "tests"] {
        look(&root.join(member), &mut seen);
    }
    assert!(seen > 100, "only {seen} files");
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    assert!(manifest.contains("burn = { version = \"=0.22.1\""), "Burn is pinned");
}
