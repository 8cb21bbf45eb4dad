//! Attention spread over ranks, by any scheme, gives the outputs and gradients of one device.
//!
//! In f64, so that a difference is a fault and not rounding: sums are taken in another order, nothing else differs, and 1e-11 of the
//! largest magnitude is a thousand times what that explains.

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::attention::{SequenceContext, ulysses};
use burn_context_parallel::flash::{FlashOptions, reference};
use burn_context_parallel::sequence::{RotaryFrequencies, SequenceLayout};
use burn_upipe::upipe::{AttentionScheme, Given, Schedule, UPipeAttention, UPipeAttentionConfig, upipe};
use rstest::rstest;
use tests::{assert_close, assert_gradients, filled, gradients, on_ranks, summed, tensor, values};

const TOLERANCE: f64 = 1e-11;

#[derive(Clone, Copy, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    causal: bool,
    seq: usize,
}

const BATCH: usize = 2;
const DIM: usize = 6;

fn inputs(case: Case) -> [TensorData; 4] {
    let Case { heads, kv_heads, seq, .. } = case;
    [
        values(1, &[BATCH, seq, heads, DIM]),
        values(2, &[BATCH, seq, kv_heads, DIM]),
        values(3, &[BATCH, seq, kv_heads, DIM]),
        values(4, &[BATCH, seq, heads, DIM]),
    ]
}

fn options(case: Case) -> FlashOptions {
    if case.causal { FlashOptions::causal() } else { FlashOptions::full() }
}

/// out, dq, dk, dv [B, S, heads, D] of one device, by the O(S^2) path.
fn one_device(case: Case) -> [Tensor<4>; 4] {
    let device = Device::flex().autodiff();
    let [q, k, v] = inputs(case)[..3].to_vec().try_into().expect("three");
    let [q, k, v]: [Tensor<4>; 3] =
        [q, k, v].map(|data: TensorData| tensor::<4>(&data, DType::F64, &device).require_grad());
    let heads_first = |x: &Tensor<4>| x.clone().swap_dims(1, 2);
    let out = reference::attention(heads_first(&q), heads_first(&k), heads_first(&v), &options(case)).unwrap();
    let out = out.swap_dims(1, 2);
    let d_out = tensor::<4>(&inputs(case)[3], DType::F64, &device);
    let grads = (out.clone() * d_out).sum().backward();
    [out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
}

/// The same from ranks; `per_stage` chooses U-Pipe, none Ulysses.
fn many_ranks(case: Case, layout: &SequenceLayout, per_stage: Option<usize>, dtype: DType) -> [Tensor<4>; 4] {
    let layout_of_ranks = layout.clone();
    let parts = on_ranks(layout.ranks(), move |world| {
        let layout = &layout_of_ranks;
        let device = Device::flex().autodiff();
        let mine = |data: &TensorData| {
            let whole = tensor::<4>(data, dtype, &Device::flex());
            Tensor::from_inner(layout.cut(&whole, 1, world.rank())).to_device(&device)
        };
        let [q, k, v, d_out] = inputs(case).each_ref().map(mine);
        let [q, k, v] = [q, k, v].map(|x| x.detach().require_grad());
        let out = match per_stage {
            None => {
                let [q, k, v] = [&q, &k, &v].map(|x| x.clone().swap_dims(1, 2));
                ulysses(q, k, v, &options(case), &world, layout, layout)?.swap_dims(1, 2)
            }
            Some(per_stage) => {
                let schedule = Schedule::new(case.heads, case.kv_heads, world.size(), per_stage)?;
                let context = SequenceContext::from_layout(&world, layout.clone(), BATCH)?;
                let (source, inputs) = Given::new(q.clone(), k.clone(), v.clone());
                upipe(source, inputs, &schedule, &options(case), &context)?
            }
        };
        let grads = (out.clone() * d_out).sum().backward();
        Ok([out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
            .map(|x| x.to_data()))
    });
    std::array::from_fn(|i| {
        let parts: Vec<Tensor<4>> = parts.iter().map(|part| tensor(&part[i], dtype, &Device::flex())).collect();
        layout.assemble(&parts, 1)
    })
}

fn compare(case: Case, layout: &SequenceLayout, per_stage: Option<usize>, expected: &[Tensor<4>; 4]) {
    let actual = many_ranks(case, layout, per_stage, DType::F64);
    for (name, (a, b)) in ["out", "dq", "dk", "dv"].iter().zip(actual.iter().zip(expected)) {
        assert_close(format!("{case:?}, {layout}, U {per_stage:?}: {name}"), a, b, TOLERANCE);
    }
}

/// Every head count against every rank count, at every U; a length that few rank counts divide.
#[rstest]
fn any_heads_on_any_ranks_at_any_stage_width(
    #[values((4, 4), (8, 2), (6, 1), (9, 3), (12, 3), (7, 7), (2, 1), (3, 3))] heads: (usize, usize),
    #[values(1, 2, 3, 4, 8)] ranks: usize,
) {
    let case = Case { heads: heads.0, kv_heads: heads.1, causal: true, seq: 29 };
    let expected = one_device(case);
    let layout = SequenceLayout::contiguous(case.seq, ranks).unwrap();
    compare(case, &layout, None, &expected);
    for per_stage in 1..=case.heads {
        compare(case, &layout, Some(per_stage), &expected);
    }
}

/// Padding lies at the end, where a causal mask hides it; here nothing hides it but the layout. (EasyContext#57, DeepSpeed#5177: lengths
/// that ranks do not divide; pytorch#141429: no mask at all.)
#[rstest]
fn padding_is_no_key(#[values(2, 3, 4, 8)] ranks: usize, #[values(9, 17, 25)] seq: usize) {
    let case = Case { heads: 4, kv_heads: 2, causal: false, seq };
    let expected = one_device(case);
    let layout = SequenceLayout::contiguous(seq, ranks).unwrap();
    compare(case, &layout, None, &expected);
    compare(case, &layout, Some(ranks.min(4)), &expected);
}

#[rstest]
#[case(&[5, 1, 9])]
#[case(&[1, 20])]
#[case(&[3, 3, 4, 1, 7])]
fn any_local_lengths(#[case] lengths: &[usize], #[values(true, false)] causal: bool) {
    let case = Case { heads: 6, kv_heads: 3, causal, seq: lengths.iter().sum() };
    let expected = one_device(case);
    let layout = SequenceLayout::from_lengths(lengths).unwrap();
    compare(case, &layout, None, &expected);
    compare(case, &layout, Some(lengths.len().min(6)), &expected);
    compare(case, &layout, Some(2), &expected);
}

/// A module with weights that tell heads apart (all weights random, biases too), in f64.
fn attention(scheme: AttentionScheme, heads: (usize, usize), device: &Device) -> UPipeAttention {
    let config = UPipeAttentionConfig::new(10, heads.0, heads.1, DIM).with_qkv_bias(true).with_output_bias(true);
    let module = config.init(device).unwrap().with_scheme(scheme).unwrap();
    let module = module.with_rotary(RotaryFrequencies::new(DIM, 10_000.0).unwrap()).unwrap();
    filled(module, 10, DType::F64, 0.4)
}

type Answer = (Tensor<3>, Tensor<3>, Vec<TensorData>);

/// y, dx and all parameter gradients on one rank.
fn run(
    module: &UPipeAttention,
    x: Tensor<3>,
    dy: Tensor<3>,
    context: &SequenceContext,
) -> burn_context_parallel::Result<Answer> {
    let x = x.detach().require_grad();
    let y = module.forward_in(x.clone(), context)?;
    let grads = (y.clone() * dy).sum().backward();
    let parameters = gradients(module, &grads);
    assert!(parameters.iter().all(|grad| grad.num_elements() > 0), "every parameter is used");
    Ok((y.inner(), x.grad(&grads).unwrap(), parameters))
}

#[rstest]
fn module_is_the_same_on_ranks(
    #[values((4, 2), (6, 1), (9, 3), (3, 3))] heads: (usize, usize),
    #[values(2, 3, 4)] ranks: usize,
) {
    let seq = 19;
    let data = (values(1, &[BATCH, seq, 10]), values(2, &[BATCH, seq, 10]));
    let device = Device::flex().autodiff();
    let single = attention(AttentionScheme::Single, heads, &device);
    let context = SequenceContext::single(seq, BATCH).unwrap();
    let whole = |data: &TensorData| tensor::<3>(data, DType::F64, &Device::flex().autodiff());
    let (y, dx, grads) = run(&single, whole(&data.0), whole(&data.1), &context).unwrap();

    let mut schemes = vec![AttentionScheme::Ulysses, AttentionScheme::default()];
    schemes.extend((1..=heads.0).map(|u| AttentionScheme::UPipe { heads_per_stage: Some(u) }));
    for scheme in schemes {
        let layout = SequenceLayout::contiguous(seq, ranks).unwrap();
        let (data, of_ranks) = (data.clone(), layout.clone());
        let answers = on_ranks(ranks, move |world| {
            let device = Device::flex().autodiff();
            let context = SequenceContext::from_layout(&world, of_ranks.clone(), BATCH)?;
            let mine = |data: &TensorData| {
                let whole = tensor::<3>(data, DType::F64, &Device::flex());
                Tensor::from_inner(of_ranks.cut(&whole, 1, world.rank()))
            };
            let module = attention(scheme, heads, &device);
            let (y, dx, grads) = run(&module, mine(&data.0), mine(&data.1), &context)?;
            Ok((y.to_data(), dx.to_data(), grads))
        });
        let join = |pick: fn(&(TensorData, TensorData, Vec<TensorData>)) -> &TensorData| {
            let parts: Vec<Tensor<3>> = answers.iter().map(|a| tensor(pick(a), DType::F64, &Device::flex())).collect();
            layout.assemble(&parts, 1)
        };
        let case = format!("{heads:?} on {ranks}, {scheme:?}");
        assert_close(format!("{case}: y"), &join(|a| &a.0), &y, TOLERANCE);
        assert_close(format!("{case}: dx"), &join(|a| &a.1), &dx, TOLERANCE);
        let sum = summed(&answers.into_iter().map(|answer| answer.2).collect::<Vec<_>>());
        assert_gradients(case, &sum, &grads, TOLERANCE);
    }
}

/// A bias on one projection only: each is there or not by itself.
#[test]
fn a_single_bias_is_not_dropped() {
    let device = Device::flex().autodiff();
    let context = SequenceContext::single(9, BATCH).unwrap();
    let x = || tensor::<3>(&values(1, &[BATCH, 9, 10]), DType::F64, &device);
    let only_q = |scheme| {
        let mut module = attention(scheme, (4, 2), &device);
        (module.k_proj.bias, module.v_proj.bias) = (None, None);
        module
    };
    let (y, dx, grads) = run(&only_q(AttentionScheme::Single), x(), x(), &context).unwrap();
    let (staged_y, staged_dx, staged) = run(&only_q(AttentionScheme::default()), x(), x(), &context).unwrap();
    assert_close("y", &staged_y, &y, TOLERANCE);
    assert_close("dx", &staged_dx, &dx, TOLERANCE);
    assert_eq!(staged.len(), grads.len());
    for (i, (a, b)) in staged.iter().zip(&grads).enumerate() {
        let flat = |data: &TensorData| {
            let values: Vec<f64> = data.iter::<f64>().collect();
            tensor::<1>(&TensorData::new(values.clone(), [values.len()]), DType::F64, &Device::flex())
        };
        assert_close(format!("gradient {i}"), &flat(a), &flat(b), TOLERANCE);
    }
}

/// Adapters on the projections: U-Pipe reads the weights that they make, and their factors get the gradients of one device, summed
/// over ranks.
#[rstest]
fn lora_composes_with_upipe(#[values(1, 2, 3)] ranks: usize) {
    use burn::module::Lora;

    let adapted = move |scheme| {
        let config = UPipeAttentionConfig::new(10, 4, 2, DIM);
        let module = config.init(&Device::flex().autodiff()).unwrap().with_scheme(scheme).unwrap();
        let module = module.apply_lora(Lora::new(2, 4.0));
        filled(module, 30, DType::F32, 0.4)
    };
    let trained = |module: &UPipeAttention, grads: &burn::tensor::Gradients| -> Vec<TensorData> {
        gradients(module, grads).into_iter().filter(|grad| grad.num_elements() > 0).collect()
    };
    let layout = SequenceLayout::contiguous(9, ranks).unwrap();
    let whole = tensor::<3>(&values(1, &[BATCH, 9, 10]), DType::F32, &Device::flex());
    let (y, dx, grads) = {
        let module = adapted(AttentionScheme::Single);
        let x = whole.clone().autodiff().require_grad();
        let y = module.forward(x.clone());
        let grads = (y.clone() * y.clone()).sum().backward();
        (y.inner(), x.grad(&grads).unwrap(), trained(&module, &grads))
    };
    let shared = layout.clone();
    let parts = on_ranks(ranks, move |world| {
        let module = adapted(AttentionScheme::UPipe { heads_per_stage: Some(ranks) });
        let context = SequenceContext::from_layout(&world, shared.clone(), BATCH)?;
        let x = shared.cut(&whole, 1, world.rank()).autodiff().require_grad();
        let y = module.forward_in(x.clone(), &context)?;
        let grads = (y.clone() * y.clone()).sum().backward();
        Ok((y.inner(), x.grad(&grads).unwrap(), trained(&module, &grads)))
    });
    let joined = |pick: fn(&(Tensor<3>, Tensor<3>, Vec<TensorData>)) -> Tensor<3>| {
        layout.assemble(&parts.iter().map(pick).collect::<Vec<_>>(), 1)
    };
    assert_close("y", &joined(|part| part.0.clone()), &y, 1e-5);
    assert_close("dx", &joined(|part| part.1.clone()), &dx, 1e-5);
    assert!(grads.len() >= 8, "two factors on each of four projections, found {}", grads.len());
    let sum = summed(&parts.into_iter().map(|part| part.2).collect::<Vec<_>>());
    assert_gradients("summed over ranks", &sum, &grads, 1e-5);
}

/// Half types: computed and summed in f32, rounded when they are exchanged and at the end. A rounding is 2^-8 (bf16) or 2^-11 (f16) of a
/// value; a dozen of them on the way from the inputs to a gradient are allowed.
#[rstest]
fn half_types_are_one_device_within_their_rounding(
    #[values((DType::BF16, 12.0 / 256.0), (DType::F16, 12.0 / 2048.0))] half: (DType, f64),
    #[values((8, 2), (6, 1), (9, 3))] heads: (usize, usize),
    #[values(2, 4)] ranks: usize,
) {
    let case = Case { heads: heads.0, kv_heads: heads.1, causal: true, seq: 29 };
    let expected = one_device(case);
    let layout = SequenceLayout::contiguous(case.seq, ranks).unwrap();
    for per_stage in [None, Some(1), Some(ranks), Some(heads.0)] {
        let actual = many_ranks(case, &layout, per_stage, half.0);
        for (name, (a, b)) in ["out", "dq", "dk", "dv"].iter().zip(actual.iter().zip(&expected)) {
            assert_close(format!("{half:?}, {case:?}, {layout}, U {per_stage:?}: {name}"), a, b, half.1);
        }
    }
}
