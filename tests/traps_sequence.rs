//! What other systems got wrong when a sequence is cut: positions, masks, packing, padding. Each test names where it was reported.
//!
//! Beside these: `rotary_positions_are_those_of_the_whole`, `every_target_is_the_next_token_wherever_it_lies`,
//! `earlier_outputs_keep_their_bits`, `padding_is_no_key`, `any_local_lengths`. All of them run on a CPU backend (pytorch#147793).

use burn::module::Module;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_context_parallel::attention::{ContextParallelDevice, HeadExchange, SequenceContext, try_attention, ulysses};
use burn_context_parallel::flash::{self, FlashOptions, flash_attention};
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_context_parallel::sequence::{Batch, Document, Documents, SequenceLayout};
use burn_context_parallel::{Error, catch};
use burn_upipe::upipe::{AttentionScheme, Given, Schedule, upipe};
use llama::{Llama, LlamaConfig, ParallelConfig};
use rstest::rstest;
use tests::{assert_close, assert_gradients, assert_same_bits, filled, gradients, on_ranks, summed, tensor, values};

fn ints(x: Tensor<2, Int>) -> Vec<i64> {
    x.into_data().iter::<i64>().collect()
}

/// axolotl PR#3498, accelerate#3862: two layers of tooling both shard, and a rank sees 1/C^2. Every token is embedded once; that a
/// shard is not sharded again the types say (see `Batch`), and what is cut twice by hand is refused.
#[rstest]
fn every_token_enters_once(#[values(1, 2, 3, 4)] ranks: usize, #[values(4, 16, 19)] len: usize) {
    let tokens = on_ranks(ranks, move |world| {
        let batch = Batch::from_rows(&[(100..100 + len as i64).collect()])?;
        let cp = Device::flex().context_parallel(&world);
        let shard = cp.shard(&batch)?;
        let twice = Batch::new(shard.tokens.clone())?.shard(shard.layout(), world.rank(), &Device::flex());
        assert_eq!(twice.is_err(), world.size() > 1 && shard.tokens.dims()[1] != len);
        let options = AttentionModuleOptions::default;
        let half = Tensor::<4>::ones([1, 2, shard.tokens.dims()[1] + 1, 4], &Device::flex());
        let error = cp.scope(&shard, || try_attention(half.clone(), half.clone(), half, None, None, options()));
        assert!(error.unwrap_err().to_string().contains("neither the whole sequence nor a slice"));
        Ok(ints(shard.tokens))
    });
    let mut entered: Vec<i64> = tokens.concat().into_iter().filter(|id| *id != 0).collect();
    entered.sort_unstable();
    assert_eq!(entered, (100..100 + len as i64).collect::<Vec<_>>());
}

/// Untied-Ulysses `context_parallel_2d.py`: after the exchange the tokens are not in the order of the sequence, and the future leaks.
#[rstest]
#[case(&[5, 1, 9])]
#[case(&[1, 20])]
#[case(&[3, 3, 4, 1])]
fn exchanged_tokens_lie_in_the_order_of_the_sequence(#[case] lengths: &'static [usize]) {
    on_ranks(lengths.len(), move |world| {
        let layout = SequenceLayout::from_lengths(lengths)?;
        let len = layout.len();
        let codes: Vec<f32> = (0..len).flat_map(|token| vec![token as f32; 2 * lengths.len()]).collect();
        let codes = Tensor::<4>::from_data(TensorData::new(codes, [1, len, 2 * lengths.len(), 1]), &Device::flex());
        let to = (0..lengths.len()).map(|rank| vec![2 * rank, 2 * rank + 1]).collect();
        let exchange = HeadExchange::new(2 * lengths.len(), to)?;
        let held = exchange.to_heads(layout.cut(&codes, 1, world.rank()), &world, &layout)?.expect("two heads each");
        let tokens: Vec<f32> = held.narrow(2, 1, 1).into_data().iter::<f32>().collect();
        assert_eq!(tokens, (0..len).map(|token| token as f32).collect::<Vec<_>>());
        Ok(())
    });
}

/// torchtitan#2780, PR#2560: packed documents whose positions were made again after the cut.
#[rstest]
fn positions_of_packed_documents_are_slices_of_the_whole(#[values(1, 2, 3, 4, 5)] ranks: usize) {
    let expected: Vec<i64> = (0..3).chain(0..5).chain(0..8).collect();
    let documents = [3, 5, 8].map(|len: i64| Document::new((1..=len).collect()));
    let batch = Batch::packed(&[documents.to_vec()], 16).unwrap();
    let layout = SequenceLayout::contiguous(16, ranks).unwrap();
    for rank in 0..ranks {
        let shard = batch.shard(&layout, rank, &Device::flex()).unwrap();
        assert_eq!(ints(shard.positions), layout.cut_row(&expected, rank, 0), "rank {rank} of {ranks}");
    }
}

/// prime-rl PR#2392: boundaries built from a shard, so that rank 1 of one document of 2048 began at 1024 for 1024 tokens.
#[test]
fn boundaries_are_those_of_the_whole_sequence() {
    let documents = Documents::from_cu_seqlens(&[0, 2048]).unwrap();
    assert!(Documents::from_cu_seqlens(&[1024, 3072]).is_err());
    let batch = Batch::from_rows(&[vec![0; 2048]]).unwrap();
    assert!(batch.clone().with_documents(Documents::from_cu_seqlens(&[0, 1024]).unwrap()).is_err());
    let batch = batch.with_documents(documents).unwrap();
    let shard = batch.shard(&SequenceLayout::contiguous(2048, 2).unwrap(), 1, &Device::flex()).unwrap();
    assert_eq!(shard.documents().unwrap().len(), 2048);
    assert_eq!(ints(shard.positions), (1024..2048).collect::<Vec<_>>());
}

/// out, dq, dk, dv of the whole padded sequence, [1, S, heads, D].
fn padded_run(real: usize, padded: usize, ranks: usize, per_stage: Option<usize>) -> Vec<Tensor<4>> {
    let layout = SequenceLayout::contiguous(padded, ranks).unwrap();
    let of_ranks = layout.clone();
    let parts = on_ranks(ranks, move |world| {
        let device = Device::flex();
        let mine = |seed, heads: usize| {
            let whole = tensor::<4>(&values(seed, &[1, padded, heads, 4]), DType::F32, &device);
            Tensor::from_inner(of_ranks.cut(&whole, 1, world.rank()))
        };
        let [q, k, v] = [mine(1, 4), mine(2, 2), mine(3, 2)].map(Tensor::require_grad);
        let options =
            FlashOptions::causal().with_documents(Documents::from_lengths(&[real]).unwrap().padded_to(padded).unwrap());
        let out = match per_stage {
            None => {
                let [q, k, v] = [&q, &k, &v].map(|x| x.clone().swap_dims(1, 2));
                ulysses(q, k, v, &options, &world, &of_ranks, &of_ranks)?.swap_dims(1, 2)
            }
            Some(per_stage) => {
                let context = SequenceContext::from_layout(&world, of_ranks.clone(), 1)?;
                let (source, inputs) = Given::new(q.clone(), k.clone(), v.clone());
                upipe(source, inputs, &Schedule::new(4, 2, world.size(), per_stage)?, &options, &context)?
            }
        };
        let grads = (out.clone() * mine(4, 4)).sum().backward();
        Ok([out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
            .map(|x| x.to_data()))
    });
    let join = |i: usize| {
        let parts: Vec<Tensor<4>> = parts.iter().map(|part| tensor(&part[i], DType::F32, &Device::flex())).collect();
        layout.assemble(&parts, 1)
    };
    (0..4).map(join).collect()
}

/// TransformerEngine#3331, PR#3332, #1929, #3487: local lengths from `cu_seqlens // cp` drop keys where the real length is not a
/// multiple. Real rows are those of one device, padded rows exactly 0, two runs the same bits.
#[rstest]
#[case(698, 704, 4)]
#[case(7, 8, 2)]
fn padded_rows_are_zero_and_real_ones_those_of_one_device(
    #[case] real: usize,
    #[case] padded: usize,
    #[case] ranks: usize,
    #[values(None, Some(1), Some(4))] per_stage: Option<usize>,
) {
    let device = Device::flex().autodiff();
    let whole =
        |seed, heads: usize| tensor::<4>(&values(seed, &[1, padded, heads, 4]), DType::F32, &device).narrow(1, 0, real);
    let [q, k, v] = [whole(1, 4), whole(2, 2), whole(3, 2)].map(|x| x.detach().require_grad());
    let first = |x: &Tensor<4>| x.clone().swap_dims(1, 2);
    let out = flash_attention(first(&q), first(&k), first(&v), &FlashOptions::causal()).unwrap().swap_dims(1, 2);
    let grads = (out.clone() * whole(4, 4)).sum().backward();
    let expected = [out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()];
    let (run, again) = (padded_run(real, padded, ranks, per_stage), padded_run(real, padded, ranks, per_stage));
    for (i, name) in ["out", "dq", "dk", "dv"].iter().enumerate() {
        assert_same_bits(format!("{name}: run to run"), &again[i], &run[i]);
        assert_close(*name, &run[i].clone().narrow(1, 0, real), &expected[i], 2e-6);
        let rest = run[i].clone().narrow(1, real, padded - real);
        assert!(rest.into_data().iter::<f32>().all(|x| x == 0.0), "{name} of padding");
    }
}

/// EasyContext#57, DeepSpeed#5177, TE#1929: S = 2 C k + 1 is an error or is cut short. Same loss, count and gradients as on S tokens.
#[rstest]
fn one_token_too_many_for_the_ranks_is_as_on_one_device(#[values(2, 3, 4)] ranks: usize) {
    let len = 2 * ranks * 3 + 1;
    let step = move |world: ProcessGroup, scheme| {
        let device = Device::flex().autodiff();
        let parallel = ParallelConfig { attention: scheme, ..ParallelConfig::none() };
        let model = Llama::init(&LlamaConfig::new(19, 12, 20, 2, 6, 3), &parallel, &device).unwrap();
        let model = filled(model, 1, DType::F64, 0.6);
        let batch = Batch::from_rows(&[(0..len as i64).map(|i| i * 5 % 19).collect()])?;
        let loss = model.loss(&device.context_parallel(&world).shard(&batch)?, &world).unwrap();
        assert_eq!(loss.valid, len - 1);
        let grads = gradients(&model, &loss.mean.backward());
        Ok((loss.mean.into_scalar::<f64>(), grads))
    };
    let expected = on_ranks(1, move |world| step(world, AttentionScheme::Single)).remove(0);
    let answers = on_ranks(ranks, move |world| step(world, AttentionScheme::default()));
    assert!(answers.iter().all(|answer| (answer.0 - expected.0).abs() < 1e-12 * expected.0));
    let grads: Vec<_> = answers.into_iter().map(|answer| answer.1).collect();
    assert_gradients(format!("{len} tokens on {ranks}"), &summed(&grads), &expected.1, 1e-11);
}

/// DeepSpeed `ulysses_sp.py`: a dense mask that cannot be exchanged is dropped, and every rank believes it is causal from 0. Here it
/// is an error, in a scope and outside, that names the O(S^2) path; so is a bias. Positions are there without being asked for.
#[rstest]
fn a_dense_mask_is_an_error_and_never_dropped(#[values(1, 2)] ranks: usize) {
    on_ranks(ranks, |world| {
        let cp = Device::flex().context_parallel(&world);
        let shard = cp.shard(&Batch::from_rows(&[(0..8).collect()])?)?;
        assert_eq!(ints(shard.positions.clone())[0], 8 / world.size() as i64 * world.rank() as i64);
        let local = shard.tokens.dims()[1];
        let x = || Tensor::<4>::ones([1, 2, local, 4], &Device::flex());
        let options = AttentionModuleOptions::default;
        let mask = || {
            Some(Tensor::<4, Bool>::from_data(
                TensorData::new(vec![false; local * local], [1, 1, local, local]),
                &Device::flex(),
            ))
        };
        let bias = || Some(Tensor::<4>::zeros([1, 1, local, local], &Device::flex()));
        let calls = || {
            [
                try_attention(x(), x(), x(), mask(), None, options()),
                try_attention(x(), x(), x(), None, bias(), options()),
                // Burn's signature has no room for an error: it is raised.
                catch(|| burn_context_parallel::attention::attention(x(), x(), x(), mask(), None, options())),
            ]
        };
        for error in cp.scope(&shard, calls).into_iter().chain(calls()).map(Result::unwrap_err) {
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains("flash::reference::dense_attention"), "{error}");
        }
        // Nothing was sent: the ranks still agree.
        assert!(cp.scope(&shard, || try_attention(x(), x(), x(), None, None, options())).is_ok());
        Ok(())
    });
}

/// NeMo Automodel#1470, #2658: a query without keys in this block is NaN. Its output is 0, its log-sum-exp -inf, its gradient 0, and
/// merging gives the other block exactly.
#[test]
fn a_query_without_keys_is_nothing_and_merges_into_the_other_block() {
    let device = Device::flex();
    let x = |seed, device: &Device| tensor::<4>(&values(seed, &[1, 2, 6, 4]), DType::F32, device);
    // All keys of the block lie behind the queries.
    let none = FlashOptions::causal().with_offsets(0, 6);
    let (empty, empty_lse) = flash::forward(x(1, &device), x(2, &device), x(3, &device), &none).unwrap();
    assert!(empty.to_data().iter::<f32>().all(|x| x == 0.0));
    assert!(empty_lse.to_data().iter::<f32>().all(|x| x == f32::NEG_INFINITY));
    let (out, lse) = flash::forward(x(1, &device), x(4, &device), x(5, &device), &FlashOptions::causal()).unwrap();
    for (a, b) in [
        ((out.clone(), lse.clone()), (empty.clone(), empty_lse.clone())),
        ((empty.clone(), empty_lse.clone()), (out.clone(), lse.clone())),
    ] {
        let (merged, merged_lse) = flash::merge(a.0, a.1, b.0, b.1);
        assert_same_bits("out", &merged, &out);
        assert_same_bits("lse", &merged_lse, &lse);
    }
    let tracked = device.autodiff();
    let [q, k, v] = [1, 2, 3].map(|seed| x(seed, &tracked).require_grad());
    // Partly empty: the first document of the queries has no key.
    let lone = FlashOptions::full()
        .with_cross_documents(Documents::from_lengths(&[2, 4]).unwrap(), Documents::from_lengths(&[0, 6]).unwrap());
    for options in [none, lone] {
        let grads = flash_attention(q.clone(), k.clone(), v.clone(), &options).unwrap().sum().backward();
        for x in [&q, &k, &v] {
            assert!(x.grad(&grads).unwrap().into_data().iter::<f32>().all(f32::is_finite), "{options:?}");
        }
        assert!(q.grad(&grads).unwrap().narrow(2, 0, 2).into_data().iter::<f32>().all(|x| x == 0.0));
    }
}

/// PyTorch `_attention.py`: k and v must be contiguous before the exchange, "the loss curve is bad" otherwise. Views give the bits of
/// their copies.
#[rstest]
fn views_are_exchanged_as_their_copies(#[values(2, 4)] ranks: usize) {
    launch(ranks, |world| {
        let layout = SequenceLayout::contiguous(10 * world.size(), world.size())?;
        // [B, D, heads, L] in memory, seen as [B, heads, L, D].
        let view = |seed: u64, heads: usize| {
            let data = values(seed + 10 * world.rank() as u64, &[2, 4, heads, 10]);
            tensor::<4>(&data, DType::F32, &Device::flex()).permute([0, 2, 3, 1])
        };
        let copy = |x: Tensor<4>| Tensor::<4>::from_data(x.to_data(), &Device::flex());
        let step = |x: [Tensor<4>; 3]| {
            let [q, k, v] = x.map(|x| Tensor::from_inner(x).require_grad());
            let out = ulysses(q.clone(), k.clone(), v.clone(), &FlashOptions::causal(), &world, &layout, &layout)?;
            let grads = (out.clone() * out.clone()).sum().backward();
            Ok::<_, Error>([out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()])
        };
        let views = || [view(1, 4), view(2, 2), view(3, 2)];
        for (i, (a, b)) in step(views())?.iter().zip(&step(views().map(copy))?).enumerate() {
            assert_same_bits(format!("result {i}"), a, b);
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// pytorch#141429: the balanced schedule skips blocks that only a causal mask hides. (The layout here is contiguous: nothing to skip.)
#[rstest]
fn without_a_mask_every_rank_reads_every_key(
    #[values(2, 4)] ranks: usize,
    #[values(None, Some(1))] per_stage: Option<usize>,
) {
    let parts = on_ranks(ranks, move |world| {
        let layout = SequenceLayout::contiguous(13, world.size())?;
        let (rank, local) = (world.rank(), layout.local_len(world.rank()));
        // Scores of 0, values of 1 at one token only: each output is 1 / S, whichever token it is.
        let zeros = || Tensor::<4>::zeros([1, local, 4, 2], &Device::flex());
        let mut seen = Vec::new();
        for token in 0..13 {
            let mark = Tensor::<4>::zeros([1, 13, 4, 2], &Device::flex());
            let mark =
                mark.slice_assign([0..1, token..token + 1, 0..4, 0..2], Tensor::ones([1, 1, 4, 2], &Device::flex()));
            let mark = layout.cut(&mark, 1, rank);
            let out = match per_stage {
                None => {
                    let [q, k, v] = [zeros(), zeros(), mark].map(|x| x.swap_dims(1, 2));
                    ulysses(q, k, v, &FlashOptions::full(), &world, &layout, &layout)?.swap_dims(1, 2)
                }
                Some(per_stage) => {
                    let context = SequenceContext::from_layout(&world, layout.clone(), 1)?;
                    let (source, inputs) = Given::new(zeros(), zeros(), mark);
                    upipe(
                        source,
                        inputs,
                        &Schedule::new(4, 4, world.size(), per_stage)?,
                        &FlashOptions::full(),
                        &context,
                    )?
                }
            };
            let real = layout.indices(rank).filter(|index| *index < 13).count();
            seen.extend(out.into_data().iter::<f32>().take(real * 8));
        }
        Ok(seen)
    });
    assert!(parts.concat().iter().all(|x| (x - 1.0 / 13.0).abs() < 1e-6));
}

/// What stands at padding that the layout adds is read by nobody, not even a NaN; its own gradients are 0.
#[test]
fn a_nan_at_padding_of_the_layout_reaches_nothing() {
    let parts = on_ranks(2, |world| {
        let layout = SequenceLayout::contiguous(7, 2)?;
        let x = |seed, heads: usize| {
            let x = tensor::<4>(&values(seed + world.rank() as u64, &[1, heads, 4, 4]), DType::F32, &Device::flex());
            let x = if world.rank() == 1 {
                x.slice_assign([0..1, 0..heads, 3..4, 0..4], Tensor::full([1, heads, 1, 4], f32::NAN, &Device::flex()))
            } else {
                x
            };
            Tensor::<4>::from_inner(x).require_grad()
        };
        let (q, k, v) = (x(1, 4), x(3, 2), x(5, 2));
        let out = ulysses(q.clone(), k.clone(), v.clone(), &FlashOptions::full(), &world, &layout, &layout)?;
        let grads = out.clone().narrow(2, 0, if world.rank() == 1 { 3 } else { 4 }).sum().backward();
        let finite = |x: Tensor<4>| x.into_data().iter::<f32>().all(f32::is_finite);
        Ok(finite(out.inner()) && [q, k, v].iter().all(|x| finite(x.grad(&grads).unwrap())))
    });
    assert_eq!(parts, [true, true]);
}

/// trl PR#6846, Megatron-LM#560: whatever the length of the shard, a model asks for positions and not for lengths. A model on ranks
/// whose shards differ in length gives the logits of one device.
#[test]
fn logits_do_not_depend_on_where_the_sequence_is_cut() {
    let device = Device::flex();
    let parallel = ParallelConfig { attention: AttentionScheme::Ulysses, ..ParallelConfig::none() };
    let model = Llama::init(&LlamaConfig::new(19, 12, 20, 2, 6, 3), &parallel, &device).unwrap();
    let model = filled(model, 1, DType::F64, 0.6);
    let batch = Batch::from_rows(&[(0..15).map(|i| i * 5 % 19).collect()]).unwrap();
    let whole = model.logits(batch.shard(&SequenceLayout::contiguous(15, 1).unwrap(), 0, &device).unwrap().tokens);
    for lengths in [&[7, 8][..], &[1, 13, 1], &[2, 3, 4, 6]] {
        let (layout, model, batch) = (SequenceLayout::from_lengths(lengths).unwrap(), model.clone(), batch.clone());
        let of_ranks = layout.clone();
        let parts = on_ranks(lengths.len(), move |world| {
            let shard = batch.shard(&of_ranks, world.rank(), &Device::flex())?;
            let model = model.clone().fork(&Device::flex());
            Ok(Device::flex().context_parallel(&world).scope(&shard, || model.logits(shard.tokens.clone())).to_data())
        });
        let parts: Vec<Tensor<3>> = parts.iter().map(|part| tensor(part, DType::F64, &Device::flex())).collect();
        assert_close(format!("{layout}"), &layout.assemble(&parts, 1), &whole, 1e-11);
    }
}
