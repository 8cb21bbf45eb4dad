//! `FlashMultiHeadAttention` is Burn's `MultiHeadAttention`: the same record, the same outputs, the same gradients, on one rank or
//! several. Burn's own forward is the oracle, in f64.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::store::ModuleRecord;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_context_parallel::attention::{
    ContextParallelDevice, FlashMhaInput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig, SequenceContext,
    scope,
};
use burn_context_parallel::flash::FlashOptions;
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{Batch, Documents, PerToken, SequenceLayout};
use burn_context_parallel::{Error, Result};
use rstest::rstest;
use tests::{assert_close, assert_same_bits, filled, gradients, on_ranks, summed, tensor, values};

const TOLERANCE: f64 = 1e-11;
const BATCH: usize = 2;
/// Head dimensions of 1, 4 and 16: Burn takes the root of the scale in f32, which in f64 shows for others.
const WIDTH: usize = 16;

/// Burn's module with weights of a seed, and no dropout.
fn burns(heads: usize, dtype: DType, device: &Device) -> MultiHeadAttention {
    filled(MultiHeadAttentionConfig::new(WIDTH, heads).with_dropout(0.0).init(device), 60, dtype, 0.5)
}

fn ours(heads: usize, dtype: DType, device: &Device) -> FlashMultiHeadAttention {
    FlashMultiHeadAttention::from_burn(burns(heads, dtype, device)).unwrap()
}

fn parameters<M: Module>(module: &M) -> Vec<(ParamId, TensorData)> {
    struct Collect(Vec<(ParamId, TensorData)>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((param.id, param.val().to_data()));
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

fn flat(data: &TensorData) -> Tensor<1> {
    let values: Vec<f64> = data.iter::<f64>().collect();
    tensor(&TensorData::new(values.clone(), [values.len()]), DType::F64, &Device::flex())
}

/// y, then the gradients of query, key and value inputs.
type Flow = [TensorData; 4];

fn flow<M: Module>(
    module: &M,
    inputs: [Tensor<3>; 3],
    dy: Tensor<3>,
    forward: impl FnOnce(&M, [Tensor<3>; 3]) -> Result<Tensor<3>>,
) -> Result<(Flow, Vec<TensorData>)> {
    let inputs = inputs.map(|x| x.detach().require_grad());
    let y = forward(module, inputs.clone())?;
    let grads = (y.clone() * dy).sum().backward();
    let [q, k, v] = inputs.map(|x| x.grad(&grads).unwrap().to_data());
    Ok(([y.inner().to_data(), q, k, v], gradients(module, &grads)))
}

fn whole(seed: u64, len: usize) -> Tensor<3> {
    tensor(&values(seed, &[BATCH, len, WIDTH]), DType::F64, &Device::flex().autodiff())
}

fn bools<const D: usize>(shape: [usize; D], f: impl Fn(usize) -> bool) -> Tensor<D, Bool> {
    let count = shape.iter().product();
    let values: Vec<bool> = (0..count).map(f).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff())
}

/// The second row ends in padding, the first has a hole.
fn padding(len: usize) -> Tensor<2, Bool> {
    bools([BATCH, len], |i| if i < len { i == 2 } else { i >= 2 * len - 3 })
}

fn compare(case: &str, actual: &(Flow, Vec<TensorData>), expected: &(Flow, Vec<TensorData>)) {
    for (name, (a, b)) in ["y", "dquery", "dkey", "dvalue"].iter().zip(actual.0.iter().zip(&expected.0)) {
        assert_close(format!("{case}: {name}"), &flat(a), &flat(b), TOLERANCE);
    }
    assert_eq!(actual.1.len(), expected.1.len());
    for (i, (a, b)) in actual.1.iter().zip(&expected.1).enumerate() {
        // The gradient of the key's bias is 0 but for rounding: softmax ignores what all keys share.
        let scale = expected.1.iter().map(|grad| flat(grad).abs().max().into_scalar::<f64>()).fold(0.0, f64::max);
        let difference = (flat(a) - flat(b)).abs().max().into_scalar::<f64>();
        assert!(difference <= TOLERANCE * scale, "{case}: gradient {i} differs by {difference:e} of {scale:e}");
    }
}

#[rstest]
fn records_load_both_ways(#[values(true, false)] bias: bool) {
    let device = Device::flex();
    let config = MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0);
    let config = config.with_query_bias(bias).with_key_bias(!bias).with_value_bias(bias).with_output_bias(bias);
    let source = filled(config.init(&device), 5, DType::F32, 0.5);
    let expected = parameters(&source);

    let fresh = FlashMultiHeadAttentionConfig::from_burn(&config).unwrap().init(&device).unwrap();
    let through = |bytes| ModuleRecord::from_bytes(bytes).unwrap();
    let loaded = fresh.try_load_record(through(source.clone().into_record().into_bytes().unwrap())).unwrap();
    assert_eq!(parameters(&loaded), expected, "Burn's record in ours");

    let back = config.init(&device);
    let back = back.try_load_record(through(loaded.into_record().into_bytes().unwrap())).unwrap();
    assert_eq!(parameters(&back), expected, "ours in Burn's");

    let taken = FlashMultiHeadAttention::from_burn(source).unwrap();
    assert_eq!(parameters(&taken), expected, "the module itself: ids and values");
}

/// A checkpoint of a larger model names its parameters by path: there, too, one module stands for the other.
#[test]
fn a_record_of_a_model_around_it_loads() {
    #[derive(Module, Debug)]
    struct Before {
        attention: MultiHeadAttention,
        heads: Vec<MultiHeadAttention>,
    }
    #[derive(Module, Debug)]
    struct After {
        attention: FlashMultiHeadAttention,
        heads: Vec<FlashMultiHeadAttention>,
    }
    let device = Device::flex();
    let before = Before { attention: burns(4, DType::F32, &device), heads: vec![burns(4, DType::F32, &device)] };
    let fresh = |heads| FlashMultiHeadAttentionConfig::new(WIDTH, heads).init(&device).unwrap();
    let after = After { attention: fresh(4), heads: vec![fresh(4)] };
    let expected = parameters(&before);
    assert_eq!(parameters(&after.try_load_record(before.into_record()).unwrap()), expected);
}

#[rstest]
fn self_attention_is_burns(
    #[values(1, 4, 16)] heads: usize,
    #[values(false, true)] causal: bool,
    #[values(false, true)] padded: bool,
) {
    let (device, len) = (Device::flex().autodiff(), 11);
    let (x, dy) = (whole(1, len), whole(2, len));
    let expected =
        flow(&burns(heads, DType::F64, &device), [x.clone(), x.clone(), x.clone()], dy.clone(), |m, [q, k, v]| {
            let mut input = MhaInput::new(q, k, v);
            if causal {
                input = input.mask_attn(generate_autoregressive_mask(BATCH, len, &device));
            }
            if padded {
                input = input.mask_pad(padding(len));
            }
            Ok(m.forward(input).context)
        });
    let actual =
        flow(&ours(heads, DType::F64, &device).with_causal(causal), [x.clone(), x.clone(), x], dy, |m, [q, k, v]| {
            let input = FlashMhaInput::new(q, k, v);
            m.try_forward(if padded { input.mask_pad(padding(len)) } else { input })
        });
    compare(&format!("{heads} heads, causal {causal}, padded {padded}"), &actual.unwrap(), &expected.unwrap());
}

#[test]
fn in_f32_it_is_burns_within_rounding() {
    let device = Device::flex().autodiff();
    let x = tensor::<3>(&values(1, &[BATCH, 50, WIDTH]), DType::F32, &device);
    let expected = burns(4, DType::F32, &device).forward(MhaInput::self_attn(x.clone())).context;
    let actual = ours(4, DType::F32, &device).forward(FlashMhaInput::self_attn(x));
    assert_close("f32", &actual.inner(), &expected.inner(), 2e-6);
}

#[rstest]
fn cross_attention_is_burns(
    #[values((5, 9), (9, 5), (1, 7))] lengths: (usize, usize),
    #[values(false, true)] padded: bool,
) {
    let device = Device::flex().autodiff();
    let (q_len, k_len) = lengths;
    let inputs = || [whole(1, q_len), whole(2, k_len), whole(3, k_len)];
    let expected = flow(&burns(4, DType::F64, &device), inputs(), whole(4, q_len), |m, [q, k, v]| {
        let input = MhaInput::new(q, k, v);
        Ok(m.forward(if padded { input.mask_pad(padding(k_len)) } else { input }).context)
    });
    let actual = flow(&ours(4, DType::F64, &device), inputs(), whole(4, q_len), |m, [q, k, v]| {
        let input = FlashMhaInput::new(q, k, v);
        m.try_forward(if padded { input.mask_pad(padding(k_len)) } else { input })
    });
    compare(&format!("{lengths:?}, padded {padded}"), &actual.unwrap(), &expected.unwrap());
}

/// The same, but every rank has its part; gathered and summed.
fn on_many(
    ranks: usize,
    layouts: [&SequenceLayout; 2],
    heads: usize,
    causal: bool,
    forward: impl Fn(
        &FlashMultiHeadAttention,
        FlashMhaInput,
        &burn_context_parallel::group::ProcessGroup,
    ) -> Result<Tensor<3>>
    + Send
    + Sync
    + 'static,
) -> (Flow, Vec<TensorData>) {
    let [q_layout, kv_layout] = layouts.map(Clone::clone);
    let of_ranks = (q_layout.clone(), kv_layout.clone());
    let parts = on_ranks(ranks, move |world| {
        let device = Device::flex().autodiff();
        let module = ours(heads, DType::F64, &device).with_causal(causal);
        let mine = |x: Tensor<3>, layout: &SequenceLayout| Tensor::from_inner(layout.cut(&x.inner(), 1, world.rank()));
        let (q, k) = &of_ranks;
        let (q_len, k_len) = (q.len(), k.len());
        let inputs = [mine(whole(1, q_len), q), mine(whole(2, k_len), k), mine(whole(3, k_len), k)];
        flow(&module, inputs, mine(whole(4, q_len), q), |m, [q, k, v]| forward(m, FlashMhaInput::new(q, k, v), &world))
    });
    let join = |i: usize, layout: &SequenceLayout| {
        let parts: Vec<Tensor<3>> = parts.iter().map(|part| tensor(&part.0[i], DType::F64, &Device::flex())).collect();
        layout.assemble(&parts, 1).to_data()
    };
    let flow = [join(0, &q_layout), join(1, &q_layout), join(2, &kv_layout), join(3, &kv_layout)];
    let grads: Vec<Vec<TensorData>> = parts.iter().map(|part| part.1.clone()).collect();
    (flow, summed(&grads))
}

/// Documents of the batch and padded keys beside them, over ranks that neither respect; Burn gets all of it as a dense mask.
#[rstest]
fn in_a_scope_self_attention_runs_across_ranks(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(false, true)] causal: bool,
    #[values(false, true)] documents: bool,
    #[values(false, true)] padded: bool,
) {
    let (device, len, heads) = (Device::flex().autodiff(), 13, 4);
    let ids = [vec![0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2], vec![5, 5, 5, 5, 5, 5, 5, 5, 5, 3, 3, 3, 3]];
    let hidden = |at: usize| {
        let (row, i, j) = (at / (len * len), at / len % len, at % len);
        causal && j > i || documents && ids[row][i] != ids[row][j]
    };
    // Padding that leaves every query a key: a query without any is a mean of all values in Burn.
    let mask = move |at: usize| at == 5 || at == len + 7;
    let inputs = [whole(1, len), whole(2, len), whole(3, len)];
    let expected = flow(&burns(heads, DType::F64, &device), inputs, whole(4, len), |m, [q, k, v]| {
        let mut input = MhaInput::new(q, k, v).mask_attn(bools([BATCH, len, len], hidden));
        if padded {
            input = input.mask_pad(bools([BATCH, len], mask));
        }
        Ok(m.forward(input).context)
    });
    let layout = SequenceLayout::contiguous(len, ranks).unwrap();
    let of_ranks = layout.clone();
    let mut batch = Batch::from_rows(&vec![vec![0; len]; BATCH]).unwrap();
    if documents {
        batch = batch.with_documents(Documents::from_ids(PerToken::per_row(&ids).unwrap())).unwrap();
    }
    let actual = on_many(ranks, [&layout, &layout], heads, causal, move |module, mut input, world| {
        let cp = Device::flex().context_parallel(world);
        if padded {
            let own: Vec<bool> =
                (0..BATCH).flat_map(|row| of_ranks.indices(world.rank()).map(move |i| mask(row * len + i))).collect();
            let own = TensorData::new(own, [BATCH, of_ranks.local_len(world.rank())]);
            input = input.mask_pad(Tensor::from_data(own, &Device::flex()));
        }
        cp.scope(&cp.shard(&batch)?, || module.try_forward(input))
    });
    compare(
        &format!("{ranks} ranks, causal {causal}, documents {documents}, padded {padded}"),
        &actual,
        &expected.unwrap(),
    );
}

#[rstest]
fn cross_attention_runs_across_ranks(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values((7, 17), (10, 4))] lengths: (usize, usize),
) {
    let device = Device::flex().autodiff();
    let (q_len, k_len) = lengths;
    let inputs = [whole(1, q_len), whole(2, k_len), whole(3, k_len)];
    let expected = flow(&burns(4, DType::F64, &device), inputs, whole(4, q_len), |m, [q, k, v]| {
        Ok(m.forward(MhaInput::new(q, k, v)).context)
    });
    let layouts = [q_len, k_len].map(|len| SequenceLayout::contiguous(len, ranks).unwrap());
    let [q_layout, kv_layout] = layouts.clone();
    let actual = on_many(ranks, [&layouts[0], &layouts[1]], 4, false, move |module, input, world| {
        module.forward_cross_in(input, world, &q_layout, &kv_layout)
    });
    compare(&format!("{lengths:?} on {ranks}"), &actual, &expected.unwrap());
}

/// A query of document d sees the keys of document d of the other sequence.
#[test]
fn documents_bound_cross_attention() {
    let device = Device::flex();
    let module = ours(4, DType::F64, &device);
    let x = |seed, len| tensor::<3>(&values(seed, &[1, len, WIDTH]), DType::F64, &device);
    let (q, k) = (x(1, 5), x(2, 7));
    let input = FlashMhaInput::new(q.clone(), k.clone(), k.clone());
    let packed = module
        .forward(input.documents(Documents::from_lengths(&[2, 3]).unwrap(), Documents::from_lengths(&[4, 3]).unwrap()));
    let alone = |q0, q_len, k0, k_len| {
        let keys = k.clone().narrow(1, k0, k_len);
        module.forward(FlashMhaInput::new(q.clone().narrow(1, q0, q_len), keys.clone(), keys))
    };
    let apart = Tensor::cat(vec![alone(0, 2, 0, 4), alone(2, 3, 4, 3)], 1);
    assert_close("packed", &packed, &apart, TOLERANCE);
}

#[test]
fn a_query_that_sees_no_key_is_the_bias() {
    let device = Device::flex();
    let module = ours(4, DType::F64, &device);
    let x = tensor::<3>(&values(1, &[1, 3, WIDTH]), DType::F64, &device);
    let all: Tensor<2, Bool> = Tensor::from_data([[true, true, true]], &device);
    let y = module.forward(FlashMhaInput::self_attn(x).mask_pad(all));
    let bias = module.output.bias.as_ref().unwrap().val().reshape([1, 1, WIDTH]).expand([1, 3, WIDTH]);
    assert_close("bias", &y, &bias, TOLERANCE);
}

#[test]
fn a_dense_mask_is_taken_by_name_only() {
    let device = Device::flex().autodiff();
    let len = 9;
    let mask = || bools([BATCH, len, len], |at| at % 3 == 1 && at % len != 0);
    let inputs = || [whole(1, len), whole(2, len), whole(3, len)];
    let expected = flow(&burns(4, DType::F64, &device), inputs(), whole(4, len), |m, [q, k, v]| {
        Ok(m.forward(MhaInput::new(q, k, v).mask_attn(mask()).mask_pad(padding(len))).context)
    });
    let module = ours(4, DType::F64, &device);
    let actual = flow(&module, inputs(), whole(4, len), |m, [q, k, v]| {
        m.forward_dense(FlashMhaInput::new(q, k, v).mask_attn(mask()).mask_pad(padding(len)))
    });
    compare("dense", &actual.unwrap(), &expected.unwrap());

    let error = module.try_forward(FlashMhaInput::self_attn(whole(1, len)).mask_attn(mask())).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("forward_dense"), "{error}");

    on_ranks(2, move |world| {
        let device = Device::flex();
        let module = ours(4, DType::F64, &device);
        let context = SequenceContext::from_layout(&world, SequenceLayout::contiguous(8, 2)?, 1)?;
        let x = Tensor::<3>::zeros([1, 4, WIDTH], (&device, DType::F64));
        let mask = Tensor::<3, Bool>::from_data(TensorData::new(vec![false; 16], [1, 4, 4]), &device);
        let input = FlashMhaInput::self_attn(x).mask_attn(mask);
        let errors = scope(Some(context), || [module.try_forward(input.clone()), module.forward_dense(input)]);
        for error in errors.map(Result::unwrap_err) {
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        }
        Ok(())
    });
}

/// In a scope the batch brings the documents: a dense mask does not let others take their place.
#[test]
fn a_dense_mask_stays_within_the_documents_of_the_scope() {
    let device = Device::flex();
    let module = ours(4, DType::F64, &device);
    let documents = || Documents::from_lengths(&[3, 5]).unwrap();
    let batch = Batch::from_rows(&[(0..8).collect()]).unwrap().with_documents(documents()).unwrap();
    let cp = device.context_parallel(&ProcessGroup::single());
    let shard = cp.shard(&batch).unwrap();
    let x = tensor::<3>(&values(1, &[1, 8, WIDTH]), DType::F64, &device);
    let mask = Tensor::<3, Bool>::from_data(
        TensorData::new((0..64).map(|i| i % 5 == 1).collect::<Vec<_>>(), [1, 8, 8]),
        &device,
    );
    let input = || FlashMhaInput::self_attn(x.clone()).mask_attn(mask.clone());
    let inside = cp.scope(&shard, || module.forward_dense(input())).unwrap();
    let outside = module.forward_dense(input().documents(documents(), documents())).unwrap();
    assert_eq!(inside.into_data(), outside.into_data());
    let error = cp.scope(&shard, || module.forward_dense(input().documents(documents(), documents()))).unwrap_err();
    assert!(error.to_string().contains("give documents with the batch"), "{error}");
    let other = Tensor::<3>::zeros([1, 5, WIDTH], (&device, DType::F64));
    let error = cp.scope(&shard, || module.forward_dense(FlashMhaInput::self_attn(other))).unwrap_err();
    assert!(error.to_string().contains("5 tokens where rank 0 of 1 holds"), "{error}");
}

#[test]
fn keys_of_another_length_in_a_scope_are_told_where_to_go() {
    on_ranks(2, |world| {
        let module = ours(4, DType::F32, &Device::flex());
        let cp = Device::flex().context_parallel(&world);
        let shard = cp.shard(&Batch::from_rows(&[(0..8).collect()])?)?;
        let x = |len| Tensor::<3>::ones([1, len, WIDTH], &Device::flex());
        let error = cp.scope(&shard, || module.try_forward(FlashMhaInput::new(x(4), x(6), x(6)))).unwrap_err();
        assert!(error.to_string().contains("forward_cross_in"), "{error}");
        let error = cp.scope(&shard, || module.try_forward(FlashMhaInput::self_attn(x(8)))).unwrap_err();
        assert!(error.to_string().contains("8 tokens where rank"), "{error}");
        world.barrier()
    });
}

#[test]
fn what_would_be_another_function_is_refused() {
    let base = || MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0);
    let cases = [
        (base().with_dropout(0.1), "dropout"),
        (base().with_quiet_softmax(true), "quiet_softmax"),
        (base().with_min_float(-5.0), "min_float"),
        (base().with_min_float(f64::NAN), "min_float"),
    ];
    for (config, named) in cases {
        let device = Device::flex();
        let of_config = FlashMultiHeadAttentionConfig::from_burn(&config).map(drop).unwrap_err();
        let of_module = FlashMultiHeadAttention::from_burn(config.init(&device)).map(drop).unwrap_err();
        assert_eq!(of_config, of_module);
        assert!(matches!(of_config, Error::Unsupported { .. }) && of_config.to_string().contains(named), "{of_config}");
    }
    assert!(FlashMultiHeadAttentionConfig::from_burn(&base().with_min_float(f64::NEG_INFINITY)).is_ok());
}

#[test]
fn what_describes_no_attention_is_an_error() {
    let device = Device::flex();
    let config = FlashMultiHeadAttentionConfig::new;
    for bad in [
        config(0, 1),
        config(8, 0),
        config(8, 3),
        config(usize::MAX, 1),
        config(8, 2).with_window(Some(0)),
        config(8, 2).with_softcap(Some(-1.0)),
        config(8, 2).with_scale(Some(f64::NAN)),
    ] {
        assert!(matches!(bad.init(&device), Err(Error::Invalid { .. })), "{bad}");
    }
    let module = || config(8, 2).init(&device).unwrap();
    for options in [
        FlashOptions::causal().with_documents(Documents::from_lengths(&[3]).unwrap()),
        FlashOptions::causal().with_offsets(1, 0),
        FlashOptions::causal().with_window(0),
    ] {
        assert!(module().with_options(options).is_err());
    }
    let x = |shape: [usize; 3]| Tensor::<3>::ones(shape, &device);
    for input in [
        FlashMhaInput::self_attn(x([1, 4, 7])),
        FlashMhaInput::new(x([1, 4, 8]), x([2, 4, 8]), x([2, 4, 8])),
        FlashMhaInput::new(x([1, 4, 8]), x([1, 4, 8]), x([1, 5, 8])),
        FlashMhaInput::self_attn(x([1, 4, 8])).mask_pad(Tensor::from_data([[true, false]], &device)),
        FlashMhaInput::self_attn(x([1, 4, 8]))
            .documents(Documents::from_lengths(&[4]).unwrap(), Documents::from_lengths(&[5]).unwrap()),
    ] {
        assert!(matches!(module().try_forward(input), Err(Error::Invalid { .. })));
    }
    let mut odd = MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0).init(&device);
    odd.value = burn::nn::LinearConfig::new(8, 4).init(&device);
    assert!(FlashMultiHeadAttention::from_burn(odd).unwrap_err().to_string().contains("value projection"));
}

/// Options of the module are those of the bare operation.
#[test]
fn windows_and_softcaps_are_those_of_flash() {
    let device = Device::flex();
    let options = FlashOptions::causal().with_window(3).with_softcap(0.5).with_scale(2.0);
    let module = ours(4, DType::F64, &device).with_options(options.clone()).unwrap();
    let config = FlashMultiHeadAttentionConfig::new(WIDTH, 4)
        .with_causal(true)
        .with_window(Some(3))
        .with_softcap(Some(0.5))
        .with_scale(Some(2.0));
    assert_eq!(config.init(&device).unwrap().options(), &options);
    let x = tensor::<3>(&values(1, &[1, 9, WIDTH]), DType::F64, &device);
    let heads = |linear: &burn::nn::Linear| linear.forward(x.clone()).reshape([1, 9, 4, WIDTH / 4]).swap_dims(1, 2);
    let (q, k, v) = (heads(&module.query), heads(&module.key), heads(&module.value));
    let out = burn_context_parallel::flash::flash_attention(q, k, v, &options).unwrap();
    let expected = module.output.forward(out.swap_dims(1, 2).reshape([1, 9, WIDTH]));
    assert_same_bits("y", &module.forward(FlashMhaInput::self_attn(x)), &expected);
}
