//! What other systems got wrong when heads are exchanged for tokens. Each test names where it was reported.
//!
//! Beside these: `exchanged_heads_carry_their_codes`, `any_heads_on_any_ranks_at_any_stage_width`,
//! `a_query_head_meets_its_own_key_value_head`, and `two_ranks_need_half_the_memory_each` in `memory_is_as_stated`.

use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::attention::{ContextParallelDevice, SequenceContext, attention, ulysses};
use burn_context_parallel::flash::{FlashOptions, flash_attention, reference};
use burn_context_parallel::sequence::{Batch, RotaryFrequencies, SequenceLayout};
use burn_upipe::upipe::{AttentionScheme, Given, Schedule, UPipeAttention, UPipeAttentionConfig, upipe};
use rstest::rstest;
use tests::{assert_close, assert_gradients, filled, gradients, on_ranks, summed, tensor, values};

const TOLERANCE: f64 = 1e-11;

fn whole(seed: u64, shape: [usize; 4], device: &Device) -> Tensor<4> {
    tensor(&values(seed, &shape), DType::F64, device)
}

/// vllm-omni#5716, prime-rl PR#3042, verl#1226: fewer key/value heads than ranks. Rank r reads head floor(r K / P), and dk is the sum
/// over all ranks that read it.
#[rstest]
fn gradients_of_a_shared_key_head_are_summed_over_its_readers(
    #[values(1, 2, 4, 8)] kv_heads: usize,
    #[values(true, false)] staged: bool,
) {
    let (heads, ranks, len, dim) = (8, 4, 10, 4);
    let device = Device::flex().autodiff();
    let shapes = [[1, len, heads, dim], [1, len, kv_heads, dim], [1, len, kv_heads, dim], [1, len, heads, dim]];
    let all = move |device: &Device| [1, 2, 3, 4].map(|seed| whole(seed, shapes[seed as usize - 1], device));
    let [q, k, v, d_out] = all(&device);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let first = |x: &Tensor<4>| x.clone().swap_dims(1, 2);
    let out = reference::attention(first(&q), first(&k), first(&v), &FlashOptions::causal()).unwrap().swap_dims(1, 2);
    let grads = (out.clone() * d_out).sum().backward();
    let expected = [out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()];

    let layout = SequenceLayout::contiguous(len, ranks).unwrap();
    let of_ranks = layout.clone();
    let parts = on_ranks(ranks, move |world| {
        let mine = |x: Tensor<4>| Tensor::from_inner(of_ranks.cut(&x, 1, world.rank()));
        let [q, k, v, d_out] = all(&Device::flex()).map(mine);
        let [q, k, v] = [q, k, v].map(Tensor::require_grad);
        let options = FlashOptions::causal();
        let out = if staged {
            let context = SequenceContext::from_layout(&world, of_ranks.clone(), 1)?;
            let (source, inputs) = Given::new(q.clone(), k.clone(), v.clone());
            upipe(source, inputs, &Schedule::new(heads, kv_heads, ranks, ranks)?, &options, &context)?
        } else {
            let [q, k, v] = [&q, &k, &v].map(|x| x.clone().swap_dims(1, 2));
            ulysses(q, k, v, &options, &world, &of_ranks, &of_ranks)?.swap_dims(1, 2)
        };
        let grads = (out.clone() * d_out).sum().backward();
        Ok([out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
            .map(|x| x.to_data()))
    });
    for (i, (name, expected)) in ["out", "dq", "dk", "dv"].iter().zip(&expected).enumerate() {
        let parts: Vec<Tensor<4>> = parts.iter().map(|part| tensor(&part[i], DType::F64, &Device::flex())).collect();
        assert_close(
            format!("8/{kv_heads}, staged {staged}: {name}"),
            &layout.assemble(&parts, 1),
            expected,
            TOLERANCE,
        );
    }
}

fn module(config: &UPipeAttentionConfig, scheme: AttentionScheme) -> UPipeAttention {
    let module = config.init(&Device::flex().autodiff()).unwrap().with_scheme(scheme).unwrap();
    let module = module.with_rotary(RotaryFrequencies::new(config.head_dim, 1e4).unwrap()).unwrap();
    filled(module, 9, DType::F64, 0.5)
}

/// y of the whole sequence, and all parameters' gradients summed over ranks.
fn step(
    config: &UPipeAttentionConfig,
    scheme: AttentionScheme,
    ranks: usize,
    change: impl Fn(UPipeAttention) -> UPipeAttention + Send + Sync + 'static,
) -> (Tensor<3>, Vec<TensorData>) {
    let (config, layout) = (config.clone(), SequenceLayout::contiguous(19, ranks).unwrap());
    let of_ranks = layout.clone();
    let parts = on_ranks(ranks, move |world| {
        let module = change(module(&config, scheme));
        let mine = |seed| {
            let whole = tensor::<3>(&values(seed, &[1, 19, config.d_model]), DType::F64, &Device::flex());
            Tensor::<3>::from_inner(of_ranks.cut(&whole, 1, world.rank()))
        };
        let context = SequenceContext::from_layout(&world, of_ranks.clone(), 1)?;
        let y = module.forward_in(mine(1).require_grad(), &context)?;
        let grads = (y.clone() * mine(2)).sum().backward();
        Ok((y.inner().to_data(), gradients(&module, &grads)))
    });
    let outs: Vec<Tensor<3>> = parts.iter().map(|part| tensor(&part.0, DType::F64, &Device::flex())).collect();
    let grads: Vec<_> = parts.into_iter().map(|part| part.1).collect();
    (layout.assemble(&outs, 1), summed(&grads))
}

/// NeMo Automodel `upipe/layout.py` and Untied-Ulysses: the heads of a stage in another order than the pretrained weights have them.
/// Random weights train all the same and hide it; given weights don't.
#[rstest]
fn weights_that_were_trained_elsewhere_meet_their_own_heads(
    #[values((32, 8, 8), (16, 8, 4), (24, 8, 4), (64, 16, 8), (32, 32, 8))] counts: (usize, usize, usize),
) {
    let (heads, kv_heads, ranks) = counts;
    let config = UPipeAttentionConfig::new(12, heads, kv_heads, 2).with_qkv_bias(true).with_output_bias(true);
    let expected = step(&config, AttentionScheme::Single, 1, |module| module);
    for heads_per_stage in [None, Some(2 * ranks), Some(heads)] {
        let actual = step(&config, AttentionScheme::UPipe { heads_per_stage }, ranks, |module| module);
        let case = format!("{counts:?}, U {heads_per_stage:?}");
        assert_close(format!("{case}: y"), &actual.0, &expected.0, TOLERANCE);
        assert_gradients(&case, &actual.1, &expected.1, TOLERANCE);
    }
}

/// VeOmni#420: the norm's backward ran before the exchange of its gradient had arrived.
#[rstest]
fn norms_on_queries_and_keys_get_the_gradient_of_one_device(
    #[values(2, 3)] ranks: usize,
    #[values(true, false)] staged: bool,
) {
    #[derive(Module, Debug)]
    struct Norms {
        q: RmsNorm,
        k: RmsNorm,
    }
    let norms = || {
        let device = Device::flex().autodiff();
        let norm = || RmsNormConfig::new(4).init(&device);
        filled(Norms { q: norm(), k: norm() }, 3, DType::F64, 1.0)
    };
    let heads = |x: Tensor<4>, norm: &RmsNorm| norm.forward(x);
    let device = Device::flex().autodiff();
    let all =
        |device: &Device| [(1, 6), (2, 3), (3, 3), (4, 6)].map(|(seed, heads)| whole(seed, [1, 11, heads, 4], device));
    let [q, k, v, d_out] = all(&device);
    let single = norms();
    let first = |x: Tensor<4>| x.swap_dims(1, 2);
    let out =
        flash_attention(first(heads(q, &single.q)), first(heads(k, &single.k)), first(v), &FlashOptions::causal());
    let grads = (first(out.unwrap()) * d_out).sum().backward();
    let expected = gradients(&single, &grads);

    let answers = on_ranks(ranks, move |world| {
        let layout = SequenceLayout::contiguous(11, world.size())?;
        let mine = |x: Tensor<4>| Tensor::from_inner(layout.cut(&x, 1, world.rank()));
        let [q, k, v, d_out] = all(&Device::flex()).map(mine);
        let own = norms();
        let (q, k) = (own.q.forward(q), own.k.forward(k));
        let out = if staged {
            let context = SequenceContext::from_layout(&world, layout.clone(), 1)?;
            let (source, inputs) = Given::new(q, k, v);
            upipe(source, inputs, &Schedule::new(6, 3, world.size(), 1)?, &FlashOptions::causal(), &context)?
        } else {
            let [q, k, v] = [q, k, v].map(|x| x.swap_dims(1, 2));
            ulysses(q, k, v, &FlashOptions::causal(), &world, &layout, &layout)?.swap_dims(1, 2)
        };
        let grads = (out * d_out).sum().backward();
        Ok(gradients(&own, &grads))
    });
    assert_gradients(format!("{ranks} ranks, staged {staged}"), &summed(&answers), &expected, TOLERANCE);
}

/// VeOmni#1080: a frozen weight, and the backward pass that did not ask whose gradient is needed.
#[rstest]
fn a_frozen_projection_leaves_the_other_gradients_as_they_are(
    #[values(AttentionScheme::Ulysses, AttentionScheme::UPipe { heads_per_stage: Some(2) })] scheme: AttentionScheme,
    #[values(0, 1, 2)] frozen: usize,
) {
    let config = UPipeAttentionConfig::new(12, 6, 3, 4).with_qkv_bias(true);
    let freeze = move |mut module: UPipeAttention| {
        match frozen {
            0 => module.q_proj = module.q_proj.no_grad(),
            1 => module.k_proj = module.k_proj.no_grad(),
            _ => module.v_proj = module.v_proj.no_grad(),
        }
        module
    };
    let (y, all) = step(&config, scheme, 2, |module| module);
    let (same, some) = step(&config, scheme, 2, freeze);
    assert_close("y", &same, &y, 0.0);
    struct Trained(Vec<bool>);
    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.is_require_grad());
        }
    }
    let mut trained = Trained(Vec::new());
    freeze(module(&config, scheme)).visit(&mut trained);
    assert_eq!(trained.0.iter().filter(|trained| !**trained).count(), 2, "a weight and its bias");
    for (i, trained) in trained.0.iter().enumerate() {
        if *trained {
            assert_eq!(some[i], all[i], "gradient {i}");
        } else {
            assert_eq!(some[i].num_elements(), 0, "gradient {i} of a frozen parameter");
        }
    }
}

/// verl#7476: a degree that is accepted while every rank attends with the whole sequence. What attention is called with is counted
/// from inside, and what it gives is that of the whole.
#[rstest]
fn attention_in_a_scope_holds_a_share_of_the_tokens(#[values(2, 4)] ranks: usize) {
    let len = 32;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let inside = seen.clone();
    let options = || AttentionModuleOptions { is_causal: true, ..Default::default() };
    let parts = on_ranks(ranks, move |world| {
        let cp = Device::flex().context_parallel(&world);
        let shard = cp.shard(&Batch::from_rows(&[(0..len as i64).collect()])?)?;
        let x = shard.tokens.clone().float().reshape([1, 1, -1, 1]).repeat_dim(1, 4) / 10;
        inside.lock().unwrap().push(x.dims()[2]);
        world.reset_traffic();
        let out = cp.scope(&shard, || attention(x.clone(), x.clone(), x, None, None, options()));
        assert!(world.traffic().total().sent > 0, "the ranks talked");
        Ok(out.to_data())
    });
    assert_eq!(*seen.lock().unwrap(), vec![len / ranks; ranks]);
    let x = Tensor::<1>::from_floats(std::array::from_fn::<f32, 32, _>(|i| i as f32), &Device::flex());
    let x = x.reshape([1, 1, 32, 1]).repeat_dim(1, 4) / 10;
    let whole = attention(x.clone(), x.clone(), x, None, None, options());
    let parts: Vec<Tensor<4>> = parts.iter().map(|part| tensor(part, DType::F32, &Device::flex())).collect();
    assert_close("out", &Tensor::cat(parts, 2), &whole, 1e-6);
}
