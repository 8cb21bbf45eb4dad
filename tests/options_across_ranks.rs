//! Windows, lookahead, softcaps, documents and positions mean the same on any number of ranks: random combinations of all, in f64,
//! against every score written out on one device.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::attention::{SequenceContext, ulysses};
use burn_context_parallel::flash::{FlashOptions, reference};
use burn_context_parallel::sequence::{Batch, Documents, PerToken, SequenceLayout};
use burn_upipe::upipe::{Given, Schedule, upipe, upipe_cross};
use proptest::option;
use proptest::prelude::*;
use rstest::rstest;
use tests::{assert_close, on_ranks, tensor, values};

const TOLERANCE: f64 = 1e-11;
const BATCH: usize = 2;
const DIM: usize = 4;

#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    /// `None` is Ulysses.
    per_stage: Option<usize>,
    options: FlashOptions,
}

fn inputs(case: &Case) -> [TensorData; 4] {
    let (q, kv) = (case.q_layout.len(), case.kv_layout.len());
    [
        values(1, &[BATCH, q, case.heads, DIM]),
        values(2, &[BATCH, kv, case.kv_heads, DIM]),
        values(3, &[BATCH, kv, case.kv_heads, DIM]),
        values(4, &[BATCH, q, case.heads, DIM]),
    ]
}

fn one_device(case: &Case) -> [Tensor<4>; 4] {
    let device = Device::flex().autodiff();
    let [q, k, v, d_out] = inputs(case).map(|data| tensor::<4>(&data, DType::F64, &device));
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let heads_first = |x: &Tensor<4>| x.clone().swap_dims(1, 2);
    let out = reference::attention(heads_first(&q), heads_first(&k), heads_first(&v), &case.options).unwrap();
    let out = out.swap_dims(1, 2);
    let grads = (out.clone() * d_out).sum().backward();
    [out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
}

fn many_ranks(case: &Case) -> [Tensor<4>; 4] {
    let of_ranks = case.clone();
    let parts = on_ranks(case.q_layout.ranks(), move |world| {
        let Case { heads, kv_heads, q_layout, kv_layout, per_stage, options } = &of_ranks;
        let mine = |data: &TensorData, layout: &SequenceLayout| {
            let whole = tensor::<4>(data, DType::F64, &Device::flex());
            Tensor::from_inner(layout.cut(&whole, 1, world.rank()))
        };
        let [q, k, v, d_out] = inputs(&of_ranks);
        let [q, k, v] =
            [mine(&q, q_layout), mine(&k, kv_layout), mine(&v, kv_layout)].map(|x| x.detach().require_grad());
        let out = match per_stage {
            None => {
                let [q, k, v] = [&q, &k, &v].map(|x| x.clone().swap_dims(1, 2));
                ulysses(q, k, v, options, &world, q_layout, kv_layout)?.swap_dims(1, 2)
            }
            Some(per_stage) => {
                let schedule = Schedule::new(*heads, *kv_heads, world.size(), *per_stage)?;
                let (source, inputs) = Given::new(q.clone(), k.clone(), v.clone());
                upipe_cross(source, inputs, &schedule, options, &world, q_layout, kv_layout)?
            }
        };
        let grads = (out.clone() * mine(&d_out, q_layout)).sum().backward();
        Ok([out.inner(), q.grad(&grads).unwrap(), k.grad(&grads).unwrap(), v.grad(&grads).unwrap()]
            .map(|x| x.to_data()))
    });
    let join = |i: usize, layout: &SequenceLayout| {
        let parts: Vec<Tensor<4>> = parts.iter().map(|part| tensor(&part[i], DType::F64, &Device::flex())).collect();
        layout.assemble(&parts, 1)
    };
    [join(0, &case.q_layout), join(1, &case.q_layout), join(2, &case.kv_layout), join(3, &case.kv_layout)]
}

fn check(case: &Case) {
    let (actual, expected) = (many_ranks(case), one_device(case));
    for (name, (a, b)) in ["out", "dq", "dk", "dv"].iter().zip(actual.iter().zip(&expected)) {
        // Of the largest magnitude, but not below 0.1: a query that sees one key has gradients that cancel to 0.
        let largest = b.clone().abs().max().into_scalar::<f64>().max(0.1);
        let difference = (a.clone() - b.clone()).abs().max().into_scalar::<f64>();
        assert!(difference <= TOLERANCE * largest, "{case:?}: {name} differs by {difference:e} of {largest:e}");
    }
}

fn layouts(ranks: usize) -> impl Strategy<Value = SequenceLayout> {
    prop_oneof![
        (1usize..24).prop_map(move |len| SequenceLayout::contiguous(len, ranks).unwrap()),
        proptest::collection::vec(1usize..8, ranks).prop_map(|lengths| SequenceLayout::from_lengths(&lengths).unwrap()),
    ]
}

/// Small integers per token, in one row for all or a row for each sequence.
fn per_token(len: usize, values: std::ops::Range<i64>) -> impl Strategy<Value = PerToken> {
    let row = move || proptest::collection::vec(values.clone(), len);
    prop_oneof![
        row().prop_map(PerToken::shared),
        proptest::collection::vec(row(), BATCH).prop_map(|rows| PerToken::per_row(&rows).unwrap()),
    ]
}

fn options(q: usize, k: usize) -> impl Strategy<Value = FlashOptions> {
    let documents =
        (per_token(q, -1..3), per_token(k, -1..3)).prop_map(|(q, k)| (Documents::from_ids(q), Documents::from_ids(k)));
    let positions = (per_token(q, -3..25), per_token(k, -3..25));
    let places = prop_oneof![
        (-8i64..8, -8i64..8).prop_map(|(q, k)| (q, k, None)),
        positions.prop_map(|positions| (0, 0, Some(positions))),
    ];
    let masks = (any::<bool>(), option::of(1usize..9), option::of(0usize..6), option::of(documents));
    (masks, option::of(0.3f64..3.0), option::of(-1.0f64..2.0), places).prop_map(
        |((causal, window, lookahead, documents), softcap, scale, (q, k, positions))| {
            let mut options = if causal { FlashOptions::causal() } else { FlashOptions::full() }.with_offsets(q, k);
            (options.window, options.lookahead, options.softcap) = (window, lookahead, softcap);
            (options.scale, options.documents, options.positions) = (scale, documents, positions);
            options
        },
    )
}

fn cases() -> impl Strategy<Value = Case> {
    let counts = (1usize..=3, 1usize..=3, 1usize..=4);
    counts
        .prop_flat_map(|(kv_heads, group, ranks)| {
            let heads = kv_heads * group;
            let stage = option::of(1..=heads);
            (Just((heads, kv_heads)), layouts(ranks), layouts(ranks), any::<bool>(), stage)
        })
        .prop_flat_map(|(heads, q_layout, kv_layout, cross, per_stage)| {
            let kv_layout = if cross { kv_layout } else { q_layout.clone() };
            let options = options(q_layout.len(), kv_layout.len());
            (Just((heads, q_layout, kv_layout, per_stage)), options)
        })
        .prop_map(|(((heads, kv_heads), q_layout, kv_layout, per_stage), options)| Case {
            heads,
            kv_heads,
            q_layout,
            kv_layout,
            per_stage,
            options,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_options_on_any_ranks_are_those_of_one_device(case in cases()) {
        check(&case);
    }
}

/// What models use: a causal window in packed documents, wider and narrower than a shard, than a document, than the sequence.
#[rstest]
fn windows_with_documents_are_one_device(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(1, 2, 5, 7, 30)] window: usize,
    #[values(None, Some(1), Some(3), Some(6))] per_stage: Option<usize>,
) {
    let layout = SequenceLayout::contiguous(26, ranks).unwrap();
    let documents = Documents::from_cu_seqlens(&[0, 3, 4, 15, 23]).unwrap().padded_to(26).unwrap();
    for causal in [true, false] {
        let options = if causal { FlashOptions::causal() } else { FlashOptions::full().with_lookahead(2) };
        let options = options.with_window(window).with_documents(documents.clone());
        check(&Case { heads: 6, kv_heads: 3, q_layout: layout.clone(), kv_layout: layout.clone(), per_stage, options });
    }
}

/// Queries that share a row of positions or documents beside keys that have a row for each sequence, and the other way around.
#[rstest]
fn one_side_may_share_its_row(#[values(None, Some(1))] per_stage: Option<usize>, #[values(true, false)] queries: bool) {
    let layout = SequenceLayout::contiguous(9, 2).unwrap();
    let shared = PerToken::shared(vec![0, 1, 2, 3, 4, 5, 6, 7, 8]);
    let rows = PerToken::per_row(&[vec![0, 1, 2, 3, 4, 5, 6, 7, 8], vec![3, 3, 3, 1, 0, 9, 9, 2, 1]]).unwrap();
    let (q, k) = if queries { (shared, rows) } else { (rows, shared) };
    let documents = (Documents::from_ids(q.clone()), Documents::from_ids(k.clone()));
    for options in [
        FlashOptions::causal().with_positions(q, k),
        FlashOptions::full().with_cross_documents(documents.0, documents.1),
    ] {
        check(&Case { heads: 4, kv_heads: 2, q_layout: layout.clone(), kv_layout: layout.clone(), per_stage, options });
    }
}

/// The documents of a batch bound U-Pipe through the context as those in the options do.
#[rstest]
fn a_batchs_documents_reach_upipe(#[values(2, 3)] ranks: usize) {
    let documents = Documents::from_lengths(&[4, 9, 6]).unwrap();
    let (of_ranks, options) = (documents.clone(), FlashOptions::causal().with_window(5));
    let layout = SequenceLayout::contiguous(19, ranks).unwrap();
    let case = Case {
        heads: 6,
        kv_heads: 3,
        q_layout: layout.clone(),
        kv_layout: layout.clone(),
        per_stage: Some(2),
        options: options.clone().with_documents(documents),
    };
    let (expected, inputs) = (one_device(&case), inputs(&case));
    let parts = on_ranks(ranks, move |world| {
        let batch = Batch::from_rows(&vec![vec![0; 19]; BATCH])?.with_documents(of_ranks.clone())?;
        let layout = SequenceLayout::contiguous(19, world.size())?;
        let shard = batch.shard(&layout, world.rank(), &Device::flex())?;
        let context = SequenceContext::new(&world, &shard)?;
        let mine = |data: &TensorData| layout.cut(&tensor::<4>(data, DType::F64, &Device::flex()), 1, world.rank());
        let (source, parents) = Given::new(mine(&inputs[0]), mine(&inputs[1]), mine(&inputs[2]));
        let schedule = Schedule::new(6, 3, world.size(), 2)?;
        Ok(upipe(source, parents, &schedule, &options, &context)?.to_data())
    });
    let parts: Vec<Tensor<4>> = parts.iter().map(|part| tensor(part, DType::F64, &Device::flex())).collect();
    assert_close("out", &layout.assemble(&parts, 1), &expected[0], TOLERANCE);
}

/// Heads under different masks would be a wrong result and no error: ranks that disagree about options all get one.
#[rstest]
#[case::documents(|o: FlashOptions| o.with_documents(Documents::from_cu_seqlens(&[0, 5, 10]).unwrap()))]
#[case::other_documents(|o: FlashOptions| o.with_documents(Documents::from_cu_seqlens(&[0, 4, 10]).unwrap()))]
#[case::window(|o: FlashOptions| o.with_window(3))]
#[case::lookahead(|o: FlashOptions| o.with_lookahead(3))]
#[case::scale(|o: FlashOptions| o.with_scale(0.3))]
#[case::softcap(|o: FlashOptions| o.with_softcap(5.0))]
#[case::offsets(|o: FlashOptions| o.with_offsets(0, 1))]
#[case::positions(|o: FlashOptions| {
    let positions = PerToken::shared((1..11).collect());
    o.with_positions(positions.clone(), positions)
})]
#[case::not_causal(|_| FlashOptions::full())]
fn ranks_that_disagree_about_options_all_get_an_error(
    #[case] odd: fn(FlashOptions) -> FlashOptions,
    #[values(false, true)] staged: bool,
) {
    on_ranks(3, move |world| {
        let layout = SequenceLayout::contiguous(10, 3)?;
        let x = || Tensor::<4>::ones([1, 3, layout.local_len(world.rank()), 4], &Device::flex());
        let plain = FlashOptions::causal();
        let options = if world.rank() == 1 { odd(plain) } else { plain };
        let result = if staged {
            let schedule = Schedule::new(3, 3, 3, 3)?;
            let (source, inputs) = Given::new(x().swap_dims(1, 2), x().swap_dims(1, 2), x().swap_dims(1, 2));
            upipe_cross(source, inputs, &schedule, &options, &world, &layout, &layout)
        } else {
            ulysses(x(), x(), x(), &options, &world, &layout, &layout)
        };
        let error = result.unwrap_err();
        assert!(
            matches!(error, burn_context_parallel::Error::Group(_)) && error.to_string().contains("options"),
            "{error}"
        );
        Ok(())
    });
}
