//! FSDP of what models have beside plain matrices: frozen, tied, rarely used and adapted parameters, convolutions, odd sizes, half precision;
//! and what it refuses.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::module::{Lora, Module, ModuleVisitor, Param, ParamId};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, LionConfig, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::Error;
use burn_context_parallel::fsdp::{Accumulation, Fsdp, FsdpConfig};
use burn_context_parallel::group::{LaunchConfig, ProcessGroup, launch};
use burn_upipe::checkpoint::Checkpointed;
use rstest::rstest;
use tests::{assert_close, filled, on_ranks, tensor, values};

/// Odd sizes, a bias, a norm, a convolution; and a layer that only some steps use.
#[derive(Module, Debug)]
struct Net {
    first: Checkpointed<Linear>,
    conv: Conv1d,
    norm: LayerNorm,
    rare: Checkpointed<Linear>,
    last: Linear,
}

fn net() -> Net {
    let device = Device::flex().autodiff();
    let net = Net {
        first: Checkpointed::new(LinearConfig::new(5, 7).init(&device)),
        conv: Conv1dConfig::new(1, 3, 3).init(&device),
        norm: LayerNormConfig::new(5).init(&device),
        rare: Checkpointed::new(LinearConfig::new(5, 5).init(&device)),
        last: LinearConfig::new(5, 1).init(&device),
    };
    filled(net, 3, DType::F64, 0.5)
}

impl Net {
    fn forward(&self, x: Tensor<2>, rare: bool) -> Tensor<1> {
        let y = self.first.forward(x, |linear, x| linear.forward(x).tanh());
        let [rows, width] = y.dims();
        let y = self.conv.forward(y.reshape([rows, 1, width])).mean_dim(1).reshape([rows, width - 2]);
        let mut y = self.norm.forward(y);
        if rare {
            y = self.rare.forward(y, |linear, x| linear.forward(x).tanh());
        }
        self.last.forward(y).powf_scalar(2.0).sum()
    }
}

fn input(rank: usize, step: usize) -> Tensor<2> {
    tensor(&values((rank * 10 + step) as u64 + 1, &[2, 5]), DType::F64, &Device::flex().autodiff())
}

/// The parameters after some steps, on one device that sees all ranks' rows.
fn one_device(net: Net, ranks: usize, steps: usize, rare: impl Fn(usize) -> bool) -> Net {
    let (mut net, mut optimizer) = (net, AdamWConfig::new().with_weight_decay(0.1).init());
    for step in 0..steps {
        let loss = (0..ranks).map(|rank| net.forward(input(rank, step), rare(step))).reduce(|a, b| a + b).unwrap();
        net = optimizer.step(1e-2, net.clone(), GradientsParams::from_grads(loss.backward(), &net));
    }
    net.valid()
}

fn sharded(ranks: usize, steps: usize, config: FsdpConfig, net: fn() -> Net, rare: fn(usize) -> bool) -> Net {
    on_ranks(ranks, move |world| {
        let fsdp = Fsdp::over(&world, config.clone())?;
        let (mut net, mut optimizer) = (fsdp.shard(net())?, AdamWConfig::new().with_weight_decay(0.1).init());
        for step in 0..steps {
            fsdp.begin(&net);
            let loss = net.forward(input(world.rank(), step), rare(step));
            let grads = fsdp.finish(GradientsParams::from_grads(loss.backward(), &net), &net)?;
            net = optimizer.step(1e-2, net, grads);
        }
        fsdp.gather(&net.valid())
    })
    .remove(0)
}

fn assert_same<M: Module>(case: &str, actual: &M, expected: &M, tolerance: f64) {
    struct Flat(Vec<Tensor<1>>);
    impl ModuleVisitor for Flat {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.base().inner();
            self.0.push(value.clone().reshape([value.dims().iter().product::<usize>()]));
        }
    }
    let [mut a, mut b] = [Flat(Vec::new()), Flat(Vec::new())];
    actual.visit(&mut a);
    expected.visit(&mut b);
    assert_eq!(a.0.len(), b.0.len());
    for (i, (a, b)) in a.0.iter().zip(&b.0).enumerate() {
        assert_close(format!("{case}: parameter {i}"), a, b, tolerance);
    }
}

#[rstest]
fn odd_sizes_convolutions_and_norms_are_those_of_one_device(
    #[values(1, 2, 3, 5)] ranks: usize,
    #[values(Accumulation::Each, Accumulation::Once)] accumulation: Accumulation,
) {
    let expected = one_device(net(), ranks, 5, |_| true);
    let actual = sharded(ranks, 5, FsdpConfig::new().with_accumulation(accumulation), net, |_| true);
    assert_same("all used", &actual, &expected, 1e-9);
}

/// A layer without gradient is left alone, weight decay and moments included; with prefetch, whose order changes.
#[rstest]
fn parameters_used_in_some_steps_only_rest_in_the_others(#[values(2, 3)] ranks: usize) {
    let expected = one_device(net(), ranks, 6, |step| step % 3 == 1);
    let actual = sharded(ranks, 6, FsdpConfig::new(), net, |step| step % 3 == 1);
    assert_same("sometimes used", &actual, &expected, 1e-9);
    let never = one_device(net(), ranks, 2, |_| false);
    assert_same("the rare layer", &never.rare, &net().valid().rare, 0.0);
    let never = sharded(ranks, 2, FsdpConfig::new(), net, |_| false);
    assert_same("the rare layer, sharded", &never.rare, &net().valid().rare, 0.0);
}

/// NVIDIA-NeMo/Automodel#3540: a parameter that first gets a gradient in the last micro-batch.
#[rstest]
fn a_gradient_in_the_last_micro_batch_only_counts(
    #[values(Accumulation::Each, Accumulation::Once)] accumulation: Accumulation,
) {
    let mut expected = net();
    let loss = (0..2).map(|rank| expected.forward(input(rank, 0), false) + expected.forward(input(rank, 1), true));
    let loss = loss.reduce(|a, b| a + b).unwrap();
    let grads = GradientsParams::from_grads(loss.backward(), &expected);
    expected = SgdConfig::new().init().step(0.1, expected, grads);
    let actual = on_ranks(2, move |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new().with_accumulation(accumulation))?;
        let net = fsdp.shard(net())?;
        let mut sums = GradientsAccumulator::new();
        for micro in 0..2 {
            let loss = net.forward(input(world.rank(), micro), micro == 1);
            sums.accumulate(&net, GradientsParams::from_grads(loss.backward(), &net));
        }
        let grads = fsdp.finish(sums.grads(), &net)?;
        fsdp.gather(&SgdConfig::new().init().step(0.1, net, grads).valid())
    });
    assert_same("late", &actual[0], &expected.valid(), 1e-9);
}

fn half_frozen() -> Net {
    let mut net = net();
    net.first = net.first.freeze();
    net.last = net.last.no_grad();
    net
}

#[rstest]
fn frozen_parameters_stay_and_are_sharded_all_the_same(#[values(2, 3)] ranks: usize) {
    let expected = one_device(half_frozen(), ranks, 4, |_| true);
    let actual = sharded(ranks, 4, FsdpConfig::new(), half_frozen, |_| true);
    assert_same("half frozen", &actual, &expected, 1e-9);
    assert_same("the frozen layer", &actual.first, &net().valid().first, 0.0);
    let shapes = on_ranks(ranks, |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        Ok(fsdp.shard(half_frozen())?.first.inner.weight.base().dims())
    });
    assert_eq!(shapes[0], [1, 35usize.div_ceil(ranks)]);
}

/// LoRA lies on top of shards; only its factors train.
#[rstest]
fn adapted_layers_train_their_factors(#[values(1, 2, 3)] ranks: usize) {
    #[derive(Module, Debug)]
    struct Adapted {
        layer: Checkpointed<Linear>,
    }
    fn model() -> Adapted {
        let device = Device::flex().autodiff();
        let layer = Checkpointed::new(LinearConfig::new(5, 6).init(&device).apply_lora(Lora::new(2, 4.0)));
        filled(Adapted { layer }, 5, DType::F64, 0.5)
    }
    fn loss(model: &Adapted, rank: usize, step: usize) -> Tensor<1> {
        model.layer.forward(input(rank, step), |linear, x| linear.forward(x).tanh()).powf_scalar(2.0).sum()
    }
    let (mut expected, mut optimizer) = (model(), SgdConfig::new().init());
    for step in 0..3 {
        let sum = (0..ranks).map(|rank| loss(&expected, rank, step)).reduce(|a, b| a + b).unwrap();
        expected = optimizer.step(0.1, expected.clone(), GradientsParams::from_grads(sum.backward(), &expected));
    }
    let actual = on_ranks(ranks, |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let (mut model, mut optimizer) = (fsdp.shard(model())?, SgdConfig::new().init());
        if world.size() > 1 {
            assert_eq!(model.layer.inner.weight.base().dims(), [1, 30usize.div_ceil(world.size())]);
        }
        for step in 0..3 {
            let grads = GradientsParams::from_grads(loss(&model, world.rank(), step).backward(), &model);
            let grads = fsdp.finish(grads, &model)?;
            model = optimizer.step(0.1, model, grads);
        }
        fsdp.gather(&model.valid())
    });
    assert_same("LoRA", &actual[0], &expected.valid(), 1e-9);
}

/// Any optimizer that works element by element steps shards as it steps wholes.
#[test]
fn other_elementwise_optimizers_step_shards() {
    let mut expected = net();
    let mut optimizer = LionConfig::new().init();
    for step in 0..4 {
        let loss = expected.forward(input(0, step), true) + expected.forward(input(1, step), true);
        let grads = GradientsParams::from_grads(loss.backward(), &expected);
        expected = optimizer.step(1e-2, expected, grads);
    }
    let actual = on_ranks(2, |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let (mut net, mut optimizer) = (fsdp.shard(net())?, LionConfig::new().init());
        for step in 0..4 {
            let loss = net.forward(input(world.rank(), step), true);
            let grads = fsdp.finish(GradientsParams::from_grads(loss.backward(), &net), &net)?;
            net = optimizer.step(1e-2, net, grads);
        }
        fsdp.gather(&net.valid())
    });
    assert_same("Lion", &actual[0], &expected.valid(), 1e-9);
}

/// bf16 is what travels and computes; shards, sums and steps are f32. Against f32: bf16 rounds to 1 in 256.
#[rstest]
fn in_bf16_shards_and_sums_stay_f32(#[values(1, 2)] ranks: usize) {
    fn model() -> Checkpointed<Linear> {
        let device = Device::flex().autodiff();
        filled(Checkpointed::new(LinearConfig::new(5, 6).init(&device)), 5, DType::F32, 0.5)
    }
    let input =
        |rank: usize, dtype: DType| tensor::<2>(&values(rank as u64 + 1, &[2, 5]), dtype, &Device::flex().autodiff());
    let loss = |model: &Checkpointed<Linear>, x: Tensor<2>| {
        model.forward(x, |linear, x| linear.forward(x)).cast(DType::F32).powf_scalar(2.0).sum()
    };
    let expected = model();
    let sum = (0..ranks).map(|rank| loss(&expected, input(rank, DType::F32))).reduce(|a, b| a + b).unwrap();
    let expected = GradientsParams::from_grads(sum.backward(), &expected).get::<2>(expected.inner.weight.id).unwrap();
    let actual = on_ranks(ranks, move |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new().with_compute(DType::BF16))?;
        let model = fsdp.shard(model())?;
        assert_eq!(model.inner.weight.base().dtype(), DType::F32);
        let loss = loss(&model, input(world.rank(), DType::BF16));
        let grads = fsdp.finish(GradientsParams::from_grads(loss.backward(), &model), &model)?;
        let shard = grads.get::<2>(model.inner.weight.id).expect("a gradient");
        assert_eq!(shard.dtype(), DType::F32);
        let shard = shard.reshape([30usize.div_ceil(world.size())]);
        Ok(Tensor::cat(world.all_gather(shard)?, 0).narrow(0, 0, 30).reshape([5, 6]))
    });
    assert_close("bf16", &actual[0], &expected, 0.03);
}

/// Weights are drawn on the first rank alone, and once; every rank built the same layer.
#[test]
fn what_is_not_drawn_yet_is_drawn_once() {
    static DRAWN: AtomicUsize = AtomicUsize::new(0);
    let wholes = on_ranks(3, |world| {
        let rank = world.rank();
        let mut linear = LinearConfig::new(5, 7).with_bias(false).init(&Device::flex());
        linear.weight = Param::uninitialized(
            ParamId::new(),
            move |device, _| {
                DRAWN.fetch_add(1, Ordering::Relaxed);
                Tensor::arange(0..35, device).float().reshape([5, 7]) + rank as f32
            },
            Device::flex(),
            true,
            [5, 7].into(),
        );
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let linear = fsdp.shard(linear)?;
        Ok(fsdp.gather(&linear)?.weight.val().into_data())
    });
    assert_eq!(DRAWN.load(Ordering::Relaxed), 1);
    let expected = Tensor::<1, burn::tensor::Int>::arange(0..35, &Device::flex()).float().reshape::<2, _>([5, 7]);
    for whole in wholes {
        assert_eq!(whole, expected.to_data());
    }
}

/// What comes from elsewhere is asked for path by path, and cut; what does not, is the first rank's.
#[test]
fn values_come_from_a_source_by_path() {
    let wholes = on_ranks(2, |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let mut asked = Vec::new();
        let linear = fsdp.shard_from(LinearConfig::new(3, 5).init(&Device::flex()), |path, shape| {
            asked.push((path.to_owned(), shape.to_vec()));
            Ok((path == "weight").then(|| TensorData::new((0..15).map(|i| i as f32).collect(), [3, 5])))
        })?;
        assert_eq!(asked, [("weight".to_owned(), vec![3, 5]), ("bias".to_owned(), vec![5])]);
        let mut shown = Vec::new();
        fsdp.each_whole(&linear, |path, data| {
            shown.push((path.to_owned(), data));
            Ok(())
        })?;
        assert_eq!(shown.len(), if world.rank() == 0 { 2 } else { 0 });
        let error = fsdp.shard_from(LinearConfig::new(3, 5).init(&Device::flex()), |_, _| {
            Ok(Some(TensorData::new(vec![1f32; 4], [4])))
        });
        assert!(error.unwrap_err().to_string().contains("4 elements for weight, which has shape [3, 5]"));
        Ok((fsdp.gather(&linear)?.weight.val().into_data(), shown.into_iter().next()))
    });
    assert_eq!(wholes[0].0, TensorData::new((0..15).map(|i| i as f32).collect(), [3, 5]));
    assert_eq!(wholes[0].1.as_ref().unwrap().1, wholes[1].0);
}

#[test]
fn evaluation_gathers_and_leaves_no_tape() {
    let whole = net().valid().forward(input(0, 0).inner(), true);
    let values = on_ranks(2, |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let net = fsdp.shard(net())?;
        fsdp.begin(&net);
        Ok(net.valid().forward(input(0, 0).inner(), true))
    });
    for value in values {
        assert!(!value.is_autodiff());
        assert_close("evaluation", &value, &whole, 1e-12);
    }
}

#[test]
fn a_module_is_sharded_once_and_alike_on_all_ranks() {
    let fsdp = Fsdp::over(&ProcessGroup::single(), FsdpConfig::new()).unwrap();
    let net = fsdp.shard(net()).unwrap();
    let error = fsdp.shard(net).unwrap_err().to_string();
    assert_eq!(error, "Fsdp::shard: the module is sharded already: shard a module once");

    let error = launch(2, |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let linear = LinearConfig::new(4 + world.rank(), 4).init(&Device::flex());
        fsdp.shard(linear).map(drop)
    });
    assert!(error.unwrap_err().to_string().contains("build the same model on every rank"));

    let error = Fsdp::over(&ProcessGroup::single(), FsdpConfig::new().with_compute(DType::I64)).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
}

/// One rank leaves a block out: all get an error, nobody waits.
#[test]
fn ranks_that_run_other_blocks_get_an_error() {
    let result = launch(2, |world| {
        let fsdp = Fsdp::over(&world, FsdpConfig::new())?;
        let net = fsdp.shard(net())?;
        let loss = burn_context_parallel::catch(|| net.forward(input(0, 0), world.rank() == 0).backward())?;
        fsdp.finish(GradientsParams::from_grads(loss, &net), &net).map(drop)
    });
    let error = result.unwrap_err().to_string();
    assert!(error.contains("rank"), "{error}");
}

/// Blocks of one size: what arrives would fit, and be another block.
#[test]
fn ranks_that_run_alike_blocks_in_another_order_get_an_error() {
    for prefetch in [false, true] {
        // Under prefetch one rank waits for the other's block ahead, and that one for its present block: the timeout ends it.
        let config = LaunchConfig::new(2).with_timeout(Duration::from_secs(3));
        let result = launch(config, move |world| {
            let device = Device::flex().autodiff();
            let fsdp = Fsdp::over(&world, FsdpConfig::new().with_prefetch(prefetch))?;
            let layer = || Checkpointed::new(LinearConfig::new(4, 4).init(&device));
            let layers: Vec<Checkpointed<Linear>> = fsdp.shard(vec![layer(), layer()])?;
            for step in 0..3 {
                fsdp.begin(&layers);
                let order = if step == 2 && world.rank() == 1 { [1, 0] } else { [0, 1] };
                let x = Tensor::<2>::ones([1, 4], &device);
                let run = |x, at: usize| layers[at].forward(x, |layer: &Linear, x| layer.forward(x));
                let y = burn_context_parallel::catch(|| order.into_iter().fold(x.clone(), run).sum().backward())?;
                fsdp.finish(GradientsParams::from_grads(y, &layers), &layers)?;
            }
            Ok::<_, Error>(())
        });
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank"), "{error}");
    }
}

/// Two sharded models on the same ranks fetch ahead each on a channel of its own.
#[test]
fn two_models_fetch_ahead_side_by_side() {
    on_ranks(2, |world| {
        let device = Device::flex().autodiff();
        let [a, b] = [Fsdp::over(&world, FsdpConfig::new())?, Fsdp::over(&world, FsdpConfig::new())?];
        let layer = || Checkpointed::new(LinearConfig::new(4, 4).init(&device));
        let models = [a.shard(vec![layer(), layer()])?, b.shard(vec![layer(), layer()])?];
        let forward = |model: &Vec<Checkpointed<Linear>>| {
            let x = Tensor::<2>::ones([1, 4], &device);
            model.iter().fold(x, |x, layer| layer.forward(x, |layer: &Linear, x| layer.forward(x))).sum()
        };
        let expected = [a.gather(&models[0])?, b.gather(&models[1])?].map(|model| forward(&model).inner().into_data());
        for _ in 0..20 {
            a.begin(&models[0]);
            b.begin(&models[1]);
            let sums = [forward(&models[0]), forward(&models[1])];
            for (sum, expected) in sums.iter().zip(&expected) {
                assert_eq!(sum.clone().inner().into_data(), *expected);
            }
            let [first, second] = sums;
            a.finish(GradientsParams::from_grads(first.backward(), &models[0]), &models[0])?;
            b.finish(GradientsParams::from_grads(second.backward(), &models[1]), &models[1])?;
        }
        assert!(a.counts().prefetched > 0 && b.counts().prefetched > 0);
        Ok(())
    });
}
