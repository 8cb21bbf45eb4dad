//! Checkpointing and tiling change what is kept, not what comes out: loss and gradients are those of the plain module.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{DType, Device, Gradients, Int, Tensor, activation};
use burn_context_parallel::attention::{ContextParallelDevice, SequenceContext};
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{Batch, IGNORE_INDEX, SequenceLayout};
use burn_context_parallel::{Error, catch};
use burn_upipe::checkpoint::{Checkpointed, forward_group};
use burn_upipe::tiling::{TiledLinearCrossEntropy, TiledMlp, TiledNorm, tiled_cross_entropy, tiles};
use burn_upipe::upipe::{AttentionScheme, UPipeAttention, UPipeAttentionConfig};
use llama::{Llama, LlamaConfig, ParallelConfig};
use rstest::rstest;
use tests::{assert_close, filled, on_ranks, tensor, values};

/// Sums over tiles are taken in another order than over the whole, nothing else differs.
const TOLERANCE: f64 = 2e-6;

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn new(width: usize, device: &Device) -> Self {
        device.seed(5);
        Self {
            up: LinearConfig::new(width, 3 * width).init(device),
            down: LinearConfig::new(3 * width, width).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(activation::gelu(self.up.forward(x)))
    }
}

/// All parameters' gradients, flattened, in visiting order.
fn gradients<M: Module>(module: &M, grads: &Gradients) -> Vec<Option<Tensor<1>>> {
    struct Collect<'a>(&'a Gradients, Vec<Option<Tensor<1>>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = param.base().grad(self.0);
            self.1.push(grad.map(|grad| {
                let n = grad.shape().num_elements();
                grad.reshape([n])
            }));
        }
    }
    let mut collect = Collect(grads, Vec::new());
    module.visit(&mut collect);
    collect.1
}

fn same_gradients(case: &str, actual: &[Option<Tensor<1>>], expected: &[Option<Tensor<1>>]) {
    assert_eq!(actual.len(), expected.len());
    for (i, pair) in actual.iter().zip(expected).enumerate() {
        match pair {
            (Some(a), Some(b)) => assert_close(format!("{case}: gradient {i}"), a, b, TOLERANCE),
            (None, None) => {}
            _ => panic!("{case}: gradient {i} is there in one and absent in the other"),
        }
    }
}

#[rstest]
fn a_tiled_mlp_is_the_mlp(
    #[values(1, 2)] batch: usize,
    #[values(125, 425)] tokens: usize,
    #[values(1, 63, 107, 124, 125, 1000)] tile: usize,
) {
    let device = Device::flex().autodiff();
    let plain = Mlp::new(6, &device);
    let data = values(1, &[batch, tokens, 6]);
    let run = |f: &dyn Fn(Tensor<3>) -> Tensor<3>, module: &dyn Fn(&Gradients) -> Vec<Option<Tensor<1>>>| {
        let x = tensor::<3>(&data, DType::F32, &device).require_grad();
        let y = f(x.clone());
        let dy = tensor::<3>(&values(2, &y.dims()), DType::F32, &device);
        let grads = (y.clone() * dy).sum().backward();
        (y.inner(), x.grad(&grads).unwrap(), module(&grads))
    };
    let (y, dx, grads) = run(&|x| plain.forward(x), &|grads| gradients(&plain, grads));
    let tiled = TiledMlp::new(plain.clone(), Some(tile));
    let (tiled_y, tiled_dx, tiled_grads) =
        run(&|x| tiled.forward(x, |mlp: &Mlp, x| mlp.forward(x)), &|grads| gradients(&tiled, grads));
    let case = format!("B {batch}, {tokens} tokens in tiles of {tile}");
    assert_close(format!("{case}: y"), &tiled_y, &y, TOLERANCE);
    assert_close(format!("{case}: dx"), &tiled_dx, &dx, TOLERANCE);
    same_gradients(&case, &tiled_grads, &grads);
}

#[rstest]
fn a_tiled_norm_is_the_norm(#[values(1, 4, 7, 50)] tile: usize) {
    let device = Device::flex().autodiff();
    let plain = RmsNormConfig::new(6).init(&device);
    let run = |norm: &dyn Fn(Tensor<3>) -> Tensor<3>| {
        let x = tensor::<3>(&values(1, &[2, 13, 6]), DType::F32, &device).require_grad();
        let y = norm(x.clone());
        let dy = tensor::<3>(&values(2, &y.dims()), DType::F32, &device);
        let grads = (y * dy).sum().backward();
        (x.grad(&grads).unwrap(), plain.gamma.val().grad(&grads).unwrap())
    };
    let expected = run(&|x| plain.forward(x));
    let tiled = TiledNorm::new(plain.clone(), Some(tile));
    let actual = run(&|x| tiled.forward(x, |norm: &RmsNorm, x| norm.forward(x)));
    assert_close("dx", &actual.0, &expected.0, TOLERANCE);
    assert_close("dgamma", &actual.1, &expected.1, TOLERANCE);
}

#[test]
fn checkpoints_nest_share_parameters_and_leave_frozen_ones_alone() {
    let device = Device::flex().autodiff();
    let plain = Mlp::new(6, &device);
    let plain = Mlp { up: plain.up.no_grad(), down: plain.down };
    let run = |f: &dyn Fn(Tensor<3>) -> Tensor<3>, tracked: bool| {
        let x = tensor::<3>(&values(1, &[2, 9, 6]), DType::F32, &device);
        let x = if tracked { x.require_grad() } else { x };
        let y = f(x.clone());
        let grads = (y.clone() * y).sum().backward();
        (x.grad(&grads), gradients(&plain, &grads))
    };
    for tracked in [true, false] {
        // The same block twice: its gradients add up.
        let twice = |x: Tensor<3>| plain.forward(plain.forward(x));
        let expected = run(&twice, tracked);
        let block = Checkpointed::new(plain.clone());
        let once = |x| block.forward(x, |mlp: &Mlp, x| mlp.forward(x));
        let outer = Checkpointed::new(Checkpointed::new(plain.clone()));
        let nested =
            |x| outer.forward(x, |inner: &Checkpointed<Mlp>, x| inner.forward(x, |mlp: &Mlp, x| mlp.forward(x)));
        for (name, actual) in
            [("flat", run(&|x| once(once(x)), tracked)), ("nested", run(&|x| nested(nested(x)), tracked))]
        {
            assert_eq!(actual.0.is_some(), tracked, "{name}");
            if let (Some(a), Some(b)) = (&actual.0, &expected.0) {
                assert_close(format!("{name}: dx"), a, b, TOLERANCE);
            }
            same_gradients(name, &actual.1, &expected.1);
            assert!(actual.1[0].is_none() && actual.1[1].is_none() && actual.1[2].is_some(), "up is frozen");
        }
    }
}

#[test]
fn everything_frozen_gives_an_untracked_result() {
    let device = Device::flex().autodiff();
    let block = Checkpointed::new(Mlp::new(6, &device).no_grad());
    let y = block.forward(Tensor::<3>::ones([1, 2, 6], &device), |mlp: &Mlp, x| mlp.forward(x));
    assert!(y.is_autodiff() && !y.is_tracked());
}

#[test]
fn without_autodiff_a_wrapper_is_its_module() {
    let device = Device::flex();
    let mlp = Mlp::new(6, &device);
    let x = tensor::<3>(&values(1, &[1, 5, 6]), DType::F32, &device);
    let block = Checkpointed::new(mlp.clone());
    let y = block.forward(x.clone(), |mlp: &Mlp, x| mlp.forward(x));
    tests::assert_same_bits("y", &y, &mlp.forward(x));
}

/// A mask that is drawn again would give the gradient of another function.
#[test]
fn dropout_in_a_checkpoint_is_refused() {
    #[derive(Module, Debug)]
    struct Noisy {
        linear: Linear,
        dropout: Dropout,
    }
    let device = Device::flex().autodiff();
    let noisy =
        |prob| Noisy { linear: LinearConfig::new(8, 8).init(&device), dropout: DropoutConfig::new(prob).init() };
    let step = |prob| {
        let block = Checkpointed::new(noisy(prob));
        let x = Tensor::<3>::ones([1, 16, 8], &device).require_grad();
        let y = block.forward(x, |m: &Noisy, x| m.dropout.forward(m.linear.forward(x)));
        catch(|| y.sum().backward()).map(drop)
    };
    assert_eq!(step(0.0), Ok(()));
    let error = step(0.5).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("without dropout"), "{error}");
    assert_eq!(step(0.0), Ok(()), "the next step is clean");
}

/// What is no number only the second time is the worst that a recomputation can give, and must not pass for rounding.
#[rstest]
fn a_recomputation_that_gives_no_number_is_refused(
    #[values(0.3, f32::NAN, f32::INFINITY)] first: f32,
    #[values(0.3, f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] again: f32,
    #[values(false, true)] group: bool,
) {
    let device = Device::flex().autodiff();
    let block = Checkpointed::new(LinearConfig::new(8, 8).with_bias(false).init(&device));
    let x = Tensor::<3>::ones([1, 16, 8], &device).require_grad();
    let runs = AtomicUsize::new(0);
    let f = move |linear: &Linear, x: Tensor<3>| {
        let add = if runs.fetch_add(1, SeqCst) == 0 { first } else { again };
        linear.forward(x) * 0.0 + add
    };
    let y = if group { forward_group([&block.inner], 0, None, x, f) } else { block.forward(x, f) };
    let result = catch(|| y.sum().backward()).map(drop);
    let same = first == again || (first.is_nan() && again.is_nan());
    match result {
        Ok(()) => assert!(same, "{again} passed for {first}"),
        Err(error) => assert!(!same && error.to_string().contains("the recomputation gave"), "{error}"),
    }
}

#[test]
fn a_captured_tracked_tensor_is_refused() {
    let device = Device::flex().autodiff();
    let block = Checkpointed::new(Mlp::new(6, &device));
    let outside = Mlp::new(6, &device);
    let x = Tensor::<3>::ones([1, 2, 6], &device).require_grad();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        block.forward(x, move |_: &Mlp, x| outside.forward(x))
    }));
    assert!(result.is_err(), "never a silently missing gradient");
}

/// The plain loss: one mean over valid targets.
fn plain_loss(logits: Tensor<3>, targets: &[i64]) -> Tensor<1> {
    let [b, l, v] = logits.dims();
    let logits = logits.reshape([b * l, v]);
    let picked: Vec<(usize, i64)> =
        targets.iter().copied().enumerate().filter(|(_, target)| *target != IGNORE_INDEX).collect();
    let losses = picked.iter().map(|(row, target)| {
        let row = activation::log_softmax(logits.clone().narrow(0, *row, 1), 1);
        -row.narrow(1, *target as usize, 1).reshape([1])
    });
    let count = picked.len() as f64;
    Tensor::cat(losses.collect(), 0).sum() / count
}

#[rstest]
fn a_tiled_loss_is_the_loss(
    #[values(None, Some(1), Some(3), Some(5), Some(64))] tile: Option<usize>,
    #[values(true, false)] bias: bool,
) {
    let device = Device::flex().autodiff();
    device.seed(3);
    let linear = LinearConfig::new(5, 11).with_bias(bias).init(&device);
    let targets: Vec<i64> = (0..14).map(|i| if i % 4 == 1 { IGNORE_INDEX } else { (i * 5) % 11 }).collect();
    let target_tensor = Tensor::<2, Int>::from_data(burn::tensor::TensorData::new(targets.clone(), [2, 7]), &device);
    let x = || tensor::<3>(&values(4, &[2, 7, 5]), DType::F32, &device).require_grad();
    let expected_x = x();
    let expected = plain_loss(linear.forward(expected_x.clone()), &targets);
    let expected_grads = expected.backward();
    let head = TiledLinearCrossEntropy::new(linear.clone(), tile);
    let actual_x = x();
    let loss = head.forward(actual_x.clone(), target_tensor, None).unwrap();
    assert_eq!(loss.valid, targets.iter().filter(|target| **target >= 0).count());
    assert_close("loss", &loss.mean.clone().inner(), &expected.clone().inner(), TOLERANCE);
    let grads = (loss.mean * 1.0).backward();
    assert_close("dx", &actual_x.grad(&grads).unwrap(), &expected_x.grad(&expected_grads).unwrap(), TOLERANCE);
    same_gradients("head", &gradients(&linear, &grads), &gradients(&linear, &expected_grads));
}

/// Megatron-LM#1764, NeMo-Speech#14488, axolotl#3026: 0 / 0.
#[rstest]
fn no_valid_target_is_a_zero_loss_with_zero_gradients(#[values(None, Some(2))] tile: Option<usize>) {
    let device = Device::flex().autodiff();
    let head = TiledLinearCrossEntropy::new(LinearConfig::new(5, 11).init(&device), tile);
    let x = Tensor::<3>::ones([1, 6, 5], &device).require_grad();
    let loss = head.forward(x.clone(), Tensor::full([1, 6], IGNORE_INDEX, &device), None).unwrap();
    assert_eq!(loss.mean.clone().into_scalar::<f32>(), 0.0);
    let grads = loss.mean.backward();
    assert!(x.grad(&grads).unwrap().into_data().iter::<f32>().all(|grad| grad == 0.0));
}

/// What lies at a position without target must not spread, not even a NaN (Megatron-Bridge PR#3117; gradients: `traps_loss`).
#[test]
fn a_nan_at_an_ignored_position_does_not_reach_the_loss() {
    let device = Device::flex().autodiff();
    let head = TiledLinearCrossEntropy::new(LinearConfig::new(2, 3).init(&device), Some(2));
    let x = Tensor::<3>::from_floats([[[1.0, 2.0], [f32::NAN, 0.0]]], &device);
    let targets = Tensor::<2, Int>::from_ints([[1, -100]], &device);
    assert!(head.forward(x, targets, None).unwrap().mean.into_scalar::<f32>().is_finite());
}

#[derive(Module, Debug)]
struct Tiny {
    embedding: Embedding,
    block: Checkpointed<UPipeAttention>,
}

fn tiny(scheme: AttentionScheme, checkpoint: bool, device: &Device) -> Tiny {
    let attention = UPipeAttentionConfig::new(8, 4, 2, 4).init(device).unwrap().with_scheme(scheme).unwrap();
    let tiny = Tiny {
        embedding: EmbeddingConfig::new(13, 8).init(device),
        block: Checkpointed::new(attention).enabled(checkpoint),
    };
    filled(tiny, 40, DType::F32, 1.0)
}

impl Tiny {
    fn loss(&self, shard: &burn_context_parallel::sequence::Shard, tile: Option<usize>) -> Tensor<1> {
        let x = self.embedding.forward(shard.tokens.clone());
        let x = x.clone() + self.block.forward(x, |attention: &UPipeAttention, x| attention.forward(x));
        let project =
            |embedding: &Embedding, x: Tensor<3>| x.matmul(embedding.weight.val().transpose().unsqueeze_dim::<3>(0));
        tiled_cross_entropy(&self.embedding, x, shard.targets.clone(), tile, None, project).unwrap().mean
    }
}

/// Loss and summed gradients; `outside` runs the backward pass after the scope has ended.
fn tiny_step(
    batch: &Batch,
    ranks: usize,
    scheme: AttentionScheme,
    checkpoint: bool,
    tile: Option<usize>,
    outside: bool,
) -> (f32, Vec<Tensor<1>>) {
    let batch = batch.clone();
    let answers = on_ranks(ranks, move |world: ProcessGroup| {
        let device = Device::flex().autodiff();
        let cp = device.context_parallel(&world);
        let shard = cp.shard(&batch)?;
        let model = tiny(scheme, checkpoint, &device);
        let (loss, grads) = if outside {
            let loss = cp.scope(&shard, || model.loss(&shard, tile));
            assert!(burn_context_parallel::attention::current().is_none());
            let grads = loss.backward();
            (loss, grads)
        } else {
            cp.scope(&shard, || {
                let loss = model.loss(&shard, tile);
                let grads = loss.backward();
                (loss, grads)
            })
        };
        let grads: Vec<_> = gradients(&model, &grads).into_iter().map(|grad| grad.unwrap().to_data()).collect();
        Ok((loss.into_scalar::<f32>(), grads))
    });
    let sums = (0..answers[0].1.len())
        .map(|i| {
            answers.iter().map(|a| tensor::<1>(&a.1[i], DType::F32, &Device::flex())).reduce(|a, b| a + b).unwrap()
        })
        .collect();
    assert!(answers.iter().all(|a| a.0 == answers[0].0), "the loss is one number on all ranks");
    (answers[0].0, sums)
}

/// Unequal numbers of targets, a rank without any, two rows, a length that ranks do not divide; the backward pass inside
/// and outside the scope.
#[rstest]
fn a_checkpointed_model_on_ranks_is_one_device(#[values(2, 3, 4)] ranks: usize, #[values(true, false)] outside: bool) {
    let row = |seed: i64| (0..14).map(|i| (i * 7 + seed) % 13).collect::<Vec<_>>();
    let labels: Vec<i64> = row(1)
        .iter()
        .enumerate()
        .map(|(i, id)| if i < 8 { -100 } else { *id })
        .chain(row(4).iter().enumerate().map(|(i, id)| if i < 9 { -100 } else { *id }))
        .collect();
    let labels = Tensor::<2, Int>::from_data(burn::tensor::TensorData::new(labels, [2, 14]), &Device::flex());
    let batch = Batch::from_rows(&[row(1), row(4)]).unwrap().with_labels(labels).unwrap();
    let (loss, grads) = tiny_step(&batch, 1, AttentionScheme::Single, false, None, false);
    for scheme in
        [AttentionScheme::Ulysses, AttentionScheme::default(), AttentionScheme::UPipe { heads_per_stage: Some(3) }]
    {
        for (checkpoint, tile) in [(false, None), (true, None), (false, Some(2)), (true, Some(3))] {
            let (actual, sums) = tiny_step(&batch, ranks, scheme, checkpoint, tile, outside);
            let case = format!("{scheme:?}, checkpoint {checkpoint}, tile {tile:?} on {ranks}");
            assert!((actual - loss).abs() <= 1e-6 * loss.abs(), "{case}: loss {actual}, one device {loss}");
            for (i, (a, b)) in sums.iter().zip(&grads).enumerate() {
                assert_close(format!("{case}: gradient {i}"), a, b, 1e-5);
            }
        }
    }
}

/// A collective inside a tile meets on all ranks only if they have equally many tiles.
#[test]
fn ranks_of_unequal_length_have_equally_many_tiles() {
    let counts = on_ranks(3, |world| {
        let layout = SequenceLayout::from_lengths(&[10, 3, 7])?;
        let context = SequenceContext::from_layout(&world, layout, 1)?;
        let local = context.local_len();
        burn_context_parallel::attention::scope(Some(context), || {
            let cut: Vec<Vec<usize>> = [1, 2, 4, 5, 100].iter().map(|tile| tiles(local, *tile)).collect();
            assert!(cut.iter().all(|cut| cut.iter().sum::<usize>() == local && !cut.contains(&0)));
            Ok(cut.iter().map(Vec::len).collect::<Vec<_>>())
        })
    });
    assert_eq!(counts, vec![vec![3, 3, 3, 2, 1]; 3]);
}

/// One number on all ranks, bit for bit, whatever the counts; a rank without targets adds zero.
#[test]
fn the_loss_has_the_same_bits_on_every_rank() {
    for seed in 0..20u64 {
        let losses = on_ranks(4, move |world| {
            let device = Device::flex().autodiff();
            let head = TiledLinearCrossEntropy::new(LinearConfig::new(3, 7).init(&device), Some(2));
            let local = 3 + (seed as usize + world.rank()) % 3;
            let x = tensor::<3>(&values(seed * 4 + world.rank() as u64, &[1, local, 3]), DType::F32, &device);
            let targets: Vec<i64> =
                (0..local as i64).map(|i| if world.rank() == 1 { -100 } else { (i + seed as i64) % 7 }).collect();
            let targets = Tensor::<2, Int>::from_data(burn::tensor::TensorData::new(targets, [1, local]), &device);
            let loss = head.forward(x, targets, Some(&world))?;
            Ok((loss.mean.into_scalar::<f32>().to_bits(), loss.valid))
        });
        assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    }
}

#[test]
fn no_valid_target_on_any_rank_is_zero_everywhere() {
    let losses = on_ranks(3, |world| {
        let device = Device::flex().autodiff();
        let head = TiledLinearCrossEntropy::new(LinearConfig::new(5, 11).init(&device), Some(2));
        let x = Tensor::<3>::ones([1, 4, 5], &device).require_grad();
        let loss = head.forward(x.clone(), Tensor::full([1, 4], IGNORE_INDEX, &device), Some(&world))?;
        let grads = loss.mean.clone().backward();
        let sum = x.grad(&grads).map(|grad| grad.abs().sum().into_scalar::<f32>());
        Ok((loss.mean.into_scalar::<f32>(), loss.valid, sum))
    });
    assert_eq!(losses, vec![(0.0, 0, Some(0.0)); 3]);
}

#[test]
fn a_target_outside_the_vocabulary_is_a_typed_error() {
    let device = Device::flex().autodiff();
    for tile in [None, Some(2)] {
        let head = TiledLinearCrossEntropy::new(LinearConfig::new(2, 3).init(&device), tile);
        for bad in [3, -7] {
            let targets = Tensor::<2, Int>::from_ints([[1, bad]], &device);
            let error = head.forward(Tensor::ones([1, 2, 2], &device), targets, None).unwrap_err();
            assert!(error.to_string().contains(&format!("target {bad}")), "{error}");
        }
    }
}

/// A gradient that only some ranks have counts as zero on the others (NeMo Automodel#3540).
#[test]
fn gradients_are_summed_also_where_a_rank_has_none() {
    use burn::optim::GradientsParams;
    use burn_context_parallel::collective::sum_gradients;

    let sums = on_ranks(3, |world| {
        let device = Device::flex().autodiff();
        let linear = LinearConfig::new(2, 2).with_bias(false).init(&device);
        let grads = if world.rank() == 1 {
            GradientsParams::from_grads(linear.forward(Tensor::<2>::ones([1, 2], &device)).sum().backward(), &linear)
        } else {
            GradientsParams::new()
        };
        let grads = sum_gradients(grads, &linear, &world)?;
        Ok(grads.get::<2>(linear.weight.id).expect("summed").into_data().iter::<f32>().collect::<Vec<_>>())
    });
    assert_eq!(sums, vec![vec![1.0; 4]; 3]);
}

/// Burn refuses to mix tensors of its two autodiff strategies: ids, targets and masks must have that of the model.
#[rstest]
fn a_loss_under_burns_own_checkpointing_is_the_loss(#[values(None, Some(3))] tile: Option<usize>) {
    let run = |device: &Device| {
        let weight = tensor::<2>(&values(1, &[5, 11]), DType::F32, device).require_grad();
        let linear = Linear { weight: Param::from_tensor(weight), bias: None };
        let x = tensor::<3>(&values(2, &[2, 7, 5]), DType::F32, device).require_grad();
        let targets = (0..14).map(|i| if i % 4 == 1 { IGNORE_INDEX } else { i % 11 }).collect::<Vec<i64>>();
        let targets = Tensor::<2, Int>::from_data(burn::tensor::TensorData::new(targets, [2, 7]), &Device::flex());
        let head = TiledLinearCrossEntropy::new(linear, tile);
        let loss = head.forward(x.clone(), targets, None).unwrap();
        let grads = loss.mean.backward();
        (x.grad(&grads).unwrap(), head.inner.weight.val().grad(&grads).unwrap())
    };
    let plain = run(&Device::flex().autodiff());
    let balanced = run(&Device::flex().autodiff().gradient_checkpointing());
    tests::assert_same_bits("dx", &balanced.0, &plain.0);
    tests::assert_same_bits("dw", &balanced.1, &plain.1);
}

#[rstest]
fn a_llama_trains_under_burns_own_checkpointing(#[values(true, false)] all: bool, #[values(true, false)] tied: bool) {
    let config = LlamaConfig { tie_word_embeddings: tied, ..LlamaConfig::new(16, 8, 12, 2, 4, 2) };
    let parallel = if all { ParallelConfig::all() } else { ParallelConfig::none() };
    let device = Device::flex().autodiff().gradient_checkpointing();
    let model = Llama::init(&config, &parallel, &device).unwrap();
    let group = ProcessGroup::single();
    let batch = Batch::from_rows(&[(0..13).collect()]).unwrap();
    let shard = batch.shard(&SequenceLayout::contiguous(13, 1).unwrap(), 0, &device).unwrap();
    let expected = model.valid().loss(&shard, &group).unwrap().mean;
    let loss = model.loss(&shard, &group).unwrap().mean;
    assert_close("loss", &loss.clone().inner(), &expected, TOLERANCE);
    let grads = loss.backward();
    assert!(gradients(&model, &grads).iter().all(Option::is_some));
}
