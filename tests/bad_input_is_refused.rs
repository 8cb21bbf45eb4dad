//! Every public constructor that can be given nonsense answers with a typed error that tells the numbers and the remedy: no panic, no
//! hang, no memory that grows with the nonsense.

use std::time::Duration;

use burn::nn::attention::MultiHeadAttentionConfig;
use burn::nn::{Embedding, EmbeddingConfig, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_context_parallel::attention::{
    ContextParallelDevice, FlashMhaInput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig, HeadExchange,
    HeadSplit, SequenceContext, attention_with, try_attention, ulysses,
};
use burn_context_parallel::collective::{all_gather, all_to_all, broadcast, reduce, reduce_scatter};
use burn_context_parallel::flash::{FlashOptions, flash_attention, flash_attention_with_lse, reference};
use burn_context_parallel::group::{LaunchConfig, LaunchError, Mesh, MeshShape, ProcessGroup, launch};
use burn_context_parallel::sequence::{
    Batch, Document, Documents, PerToken, RotaryEmbeddingConfig, RotaryFrequencies, RotaryScaling, SequenceLayout,
};
use burn_context_parallel::{Error, Result};
use burn_upipe::tiling::{TiledLinearCrossEntropy, TiledMlp, tiled_cross_entropy, tiles};
use burn_upipe::upipe::{AttentionScheme, Given, Schedule, UPipeAttentionConfig, upipe};
use rstest::rstest;

const HUGE: usize = usize::MAX;

/// What was asked for, and what came of it.
type Row = (&'static str, Result<()>);

/// A row of the table: the call as its own name.
macro_rules! rows {
    ($($call:expr),* $(,)?) => { vec![$((stringify!($call), $call.map(drop).map_err(Error::from))),*] };
}

fn refused(rows: Vec<Row>) {
    assert!(!rows.is_empty());
    for (call, result) in rows {
        match result {
            Ok(()) => panic!("{call}: taken"),
            Err(error @ (Error::Invalid { .. } | Error::Unsupported { .. })) => {
                let text = error.to_string();
                // operation: problem: remedy
                assert!(text.split(": ").filter(|part| !part.trim().is_empty()).count() >= 3, "{call}: {text}");
                assert!(text.len() < 2000, "{call}: a message that grows with its input");
            }
            Err(error) => panic!("{call}: {error:?}"),
        }
    }
}

fn ones<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::ones(shape, &Device::flex())
}

fn ids<const D: usize>(shape: [usize; D]) -> Tensor<D, Int> {
    Tensor::ones(shape, &Device::flex())
}

fn truths<const D: usize>(shape: [usize; D]) -> Tensor<D, Bool> {
    Tensor::from_data(TensorData::new(vec![true; shape.iter().product()], shape), &Device::flex())
}

fn batch() -> Batch {
    Batch::from_rows(&[vec![1, 2, 3, 4], vec![5, 6, 7, 8]]).unwrap()
}

fn context() -> SequenceContext {
    SequenceContext::single(4, 2).unwrap()
}

#[test]
fn layouts_and_schedules() {
    refused(rows![
        SequenceLayout::contiguous(0, 1),
        SequenceLayout::contiguous(1, 0),
        SequenceLayout::contiguous(HUGE, 1),
        SequenceLayout::contiguous(1 << 40, 4),
        SequenceLayout::contiguous(5, HUGE),
        SequenceLayout::contiguous(5, 4097),
        SequenceLayout::from_lengths(&[]),
        SequenceLayout::from_lengths(&[3, 0]),
        SequenceLayout::from_lengths(&[HUGE, 2]),
        SequenceLayout::from_lengths(&vec![1; 5000]),
        HeadSplit::new(0, 0, 1),
        HeadSplit::new(4, 0, 1),
        HeadSplit::new(4, 3, 1),
        HeadSplit::new(2, 4, 1),
        HeadSplit::new(4, 4, 0),
        HeadSplit::new(4, 4, HUGE),
        HeadExchange::new(2, vec![vec![0, 2]]),
        HeadExchange::new(0, vec![vec![HUGE]]),
        Schedule::new(4, 2, 2, 0),
        Schedule::new(4, 2, 2, 5),
        Schedule::new(4, 2, 0, 1),
        Schedule::new(4, 2, HUGE, 1),
        Schedule::new(HUGE, HUGE, 1, 1),
        Schedule::new(HUGE, 1, 1, HUGE),
        Schedule::new(1 << 40, 1, 4, 1),
        Schedule::new(1 << 14, 1, 4096, 1),
    ]);
}

#[test]
fn sequences_and_their_documents() {
    let layout = || SequenceLayout::contiguous(4, 2).unwrap();
    let single = ProcessGroup::single;
    let rotary = || RotaryEmbeddingConfig::new(4).init().unwrap();
    refused(rows![
        Batch::from_rows(&[]),
        Batch::from_rows(&[vec![]]),
        Batch::from_rows(&[vec![1, 2], vec![3]]),
        Batch::from_rows(&[vec![1, -2]]),
        Batch::new(ids([0, 4])),
        Batch::new(ids([2, 0])),
        Batch::packed(&[], 4),
        Batch::packed(&[vec![]], 0),
        Batch::packed(&[vec![]], HUGE),
        Batch::packed(&[vec![], vec![]], 1 << 40),
        Batch::packed(&[vec![Document::new(vec![1, 2, 3])]], 2),
        Batch::packed(&[vec![Document::new(vec![1, -2, 3])]], 4),
        Document::with_labels(vec![1, 2], vec![1]),
        batch().with_loss_mask(truths([2, 3])),
        batch().with_labels(ids([1, 4])),
        batch().with_documents(Documents::from_lengths(&[5]).unwrap()),
        batch().with_documents(Documents::from_ids(PerToken::per_row(&vec![vec![0; 4]; 3]).unwrap())),
        batch().with_positions(PerToken::shared(vec![])),
        batch().shard(&SequenceLayout::contiguous(5, 2).unwrap(), 0, &Device::flex()),
        batch().shard(&layout(), 2, &Device::flex()),
        batch().shard(&layout(), HUGE, &Device::flex()),
        PerToken::per_row(&[]),
        Documents::from_lengths(&[HUGE, 1]),
        Documents::from_lengths(&[1 << 40]),
        Documents::from_lengths(&[3]).unwrap().padded_to(1 << 50),
        PerToken::per_row(&[vec![1], vec![2]]).unwrap().resized(HUGE, 0),
        PerToken::per_row(&[vec![1], vec![]]),
        Documents::from_cu_seqlens(&[]),
        Documents::from_cu_seqlens(&[1, 4]),
        Documents::from_cu_seqlens(&[0, 4, 3]),
        Documents::from_cu_seqlens(&[0, HUGE]),
        SequenceContext::single(0, 1),
        SequenceContext::single(4, 0),
        SequenceContext::single(HUGE, 1),
        SequenceContext::single(4, HUGE),
        SequenceContext::from_layout(&single(), layout(), 1),
        SequenceContext::new(&single(), &batch().shard(&layout(), 1, &Device::flex()).unwrap()),
        RotaryFrequencies::new(0, 1e4),
        RotaryFrequencies::new(5, 1e4),
        RotaryFrequencies::new(4, 0.0),
        RotaryFrequencies::new(4, -1e4),
        RotaryFrequencies::new(4, f64::NAN),
        RotaryFrequencies::new(4, f64::INFINITY),
        RotaryFrequencies::new(HUGE - 1, 1e4),
        RotaryFrequencies::scaled(4, 1e4, &RotaryScaling::Linear { factor: 0.0 }),
        RotaryFrequencies::scaled(4, 1e4, &RotaryScaling::Linear { factor: f64::NAN }),
        RotaryFrequencies::scaled(4, 1e4, &RotaryScaling::yarn(f64::NAN, 8)),
        RotaryFrequencies::scaled(4, 1e4, &RotaryScaling::yarn(2.0, 0)),
        RotaryEmbeddingConfig::new(5).init(),
        rotary().try_forward(ones([1, 3, 2, 6]), ids([1, 3])),
        rotary().try_forward(ones([1, 3, 2, 4]), ids([1, 4])),
        rotary().try_forward(ones([1, 3, 2, 4]), ids([2, 3])),
        context().expect("a test", 2, 5),
        context().expect("a test", 1, 4),
    ]);
}

#[test]
fn groups_and_meshes() {
    let shape = |data, ring, ulysses| MeshShape { data, ring, ulysses };
    let single = ProcessGroup::single();
    refused(rows![
        shape(0, 1, 1).check(1),
        shape(0, 1, 1).check(0),
        shape(1, 0, 4).check(4),
        shape(2, 1, 1).check(0),
        shape(2, 3, 1).check(4),
        shape(HUGE, HUGE, HUGE).check(4),
        shape(HUGE, 1, 1).check(1),
        Mesh::new(&single, shape(1, 1, 0)),
        Mesh::new(&single, shape(1, 2, 1)),
        single.subgroup(&[]),
        single.subgroup(&[1]),
        single.subgroup(&[0, 0]),
        single.subgroup(&[HUGE]),
    ]);
    let default = LaunchConfig::new(1);
    for config in [
        LaunchConfig::new(0),
        LaunchConfig::new(4097),
        LaunchConfig::new(HUGE),
        default.clone().with_stack(0),
        default.clone().with_stack(HUGE),
    ] {
        let error = launch(config.clone(), |_| Ok::<_, Error>(())).unwrap_err();
        assert!(matches!(error, LaunchError::Refused(Error::Invalid { .. })), "{config:?}: {error}");
    }
    // Times that no clock counts are none, and a time of zero is only too short where somebody waits.
    for config in [default.clone().with_timeout(Duration::MAX), default.clone().with_grace(Duration::MAX)] {
        assert!(launch(LaunchConfig { ranks: 2, ..config }, |world| world.barrier()).is_ok());
    }
    assert!(launch(default.with_timeout(Duration::ZERO), |world| world.barrier()).is_ok());
}

#[test]
fn attention_in_every_form() {
    let q = || ones([1, 4, 4, 8]);
    let options = FlashOptions::causal;
    let burns = burn::tensor::ops::AttentionModuleOptions::default;
    let single = ProcessGroup::single();
    let layout = |len| SequenceLayout::contiguous(len, 1).unwrap();
    let bad_options = || {
        [
            options().with_scale(f64::NAN),
            options().with_scale(f64::INFINITY),
            options().with_softcap(0.0),
            options().with_softcap(-1.0),
            options().with_softcap(f64::NAN),
            options().with_window(0),
            options().with_documents(Documents::from_lengths(&[3]).unwrap()),
            options().with_positions(PerToken::shared(vec![0; 4]), PerToken::shared(vec![0; 3])),
            options().with_positions(PerToken::shared(vec![0; 4]), PerToken::shared(vec![0; 4])).with_offsets(1, 0),
        ]
    };
    for options in bad_options() {
        let source = || Given::new(q().swap_dims(1, 2), q().swap_dims(1, 2), q().swap_dims(1, 2));
        let context = SequenceContext::single(4, 1).unwrap();
        refused(rows![
            flash_attention(q(), q(), q(), &options),
            attention_with(q(), q(), q(), &options),
            flash_attention_with_lse(q(), q(), q(), &options),
            reference::attention(q(), q(), q(), &options),
            reference::dense_attention(q(), q(), q(), None, None, &options),
            ulysses(q(), q(), q(), &options, &single, &layout(4), &layout(4)),
            upipe(source().0, source().1, &Schedule::new(4, 4, 1, 1).unwrap(), &options, &context),
        ]);
    }
    refused(rows![
        flash_attention(q(), ones([1, 3, 4, 8]), ones([1, 3, 4, 8]), &options()),
        flash_attention(q(), ones([1, 0, 4, 8]), ones([1, 0, 4, 8]), &options()),
        flash_attention(q(), ones([2, 4, 4, 8]), ones([2, 4, 4, 8]), &options()),
        flash_attention(q(), q(), ones([1, 4, 5, 8]), &options()),
        flash_attention(q(), q(), ones([1, 4, 4, 2]), &options()),
        reference::dense_attention(q(), q(), q(), Some(truths([1, 1, 4, 5])), None, &options()),
        reference::dense_attention(q(), q(), q(), None, Some(ones([3, 1, 4, 4])), &options()),
        try_attention(q(), q(), q(), Some(truths([1, 1, 4, 4])), None, burns()),
        try_attention(q(), q(), q(), None, Some(ones([1, 1, 4, 4])), burns()),
        ulysses(q(), q(), q(), &options(), &single, &layout(5), &layout(4)),
        ulysses(q(), q(), q(), &options(), &single, &SequenceLayout::contiguous(8, 2).unwrap(), &layout(4)),
        ulysses(q(), ones([1, 3, 4, 8]), ones([1, 3, 4, 8]), &options(), &single, &layout(4), &layout(4)),
    ]);
}

#[test]
fn modules() {
    let device = Device::flex();
    let config = UPipeAttentionConfig::new;
    let burns = || MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0);
    let mine = |d_model, n_heads| FlashMultiHeadAttentionConfig::new(d_model, n_heads).init(&device);
    let x = |width| FlashMhaInput::self_attn(ones([1, 4, width]));
    let upiped = || config(8, 2, 2, 4).init(&device).unwrap();
    refused(rows![
        config(0, 2, 2, 4).init(&device),
        config(8, 0, 0, 4).init(&device),
        config(8, 4, 3, 4).init(&device),
        config(8, 4, 2, 0).init(&device),
        config(8, HUGE, 1, 4).init(&device),
        config(HUGE, 4, 2, 4).init(&device),
        config(8, 4, 2, HUGE).init(&device),
        config(8, 4, 2, 4).with_window(Some(0)).init(&device),
        config(8, 4, 2, 4).with_softcap(Some(0.0)).init(&device),
        config(8, 4, 2, 4).with_qk_norm(Some(-1.0)).init(&device),
        config(8, 4, 2, 4).with_scale(Some(f64::NAN)).init(&device),
        upiped().with_scheme(AttentionScheme::UPipe { heads_per_stage: Some(0) }),
        upiped().with_scheme(AttentionScheme::UPipe { heads_per_stage: Some(HUGE) }),
        upiped().with_rotary(RotaryFrequencies::new(6, 1e4).unwrap()),
        upiped().schedule(0),
        upiped().schedule(HUGE),
        upiped().forward_in(ones([2, 4, 7]), &context()),
        upiped().forward_in(ones([2, 5, 8]), &context()),
        mine(0, 1),
        mine(8, 0),
        mine(8, 3),
        mine(HUGE, 1),
        FlashMultiHeadAttentionConfig::from_burn(&burns().with_dropout(0.1)),
        FlashMultiHeadAttention::from_burn(burns().with_quiet_softmax(true).init(&device)),
        FlashMultiHeadAttention::from_burn(burns().with_min_float(0.0).init(&device)),
        mine(8, 2).unwrap().try_forward(x(7)),
        mine(8, 2).unwrap().try_forward(x(8).mask_attn(truths([1, 4, 4]))),
        mine(8, 2).unwrap().try_forward(x(8).mask_pad(truths([1, 5]))),
        mine(8, 2).unwrap().forward_dense(x(8).mask_attn(truths([1, 4, 5]))),
    ]);
}

#[test]
fn tiles_and_losses() {
    let device = Device::flex();
    let head = |tile| TiledLinearCrossEntropy::new(LinearConfig::new(4, 10).init(&device), tile);
    let table: Embedding = EmbeddingConfig::new(10, 4).init(&device);
    let project = |_: &Embedding, x: Tensor<3>| x.repeat_dim(2, 3);
    refused(rows![
        head(None).forward(ones([1, 3, 4]), ids([1, 2]), None),
        head(Some(2)).forward(ones([1, 3, 4]), ids([3, 1]), None),
        head(Some(HUGE)).forward(ones([1, 3, 4]), ids([1, 3]).mul_scalar(10), None),
        head(Some(1)).forward(ones([1, 3, 4]), ids([1, 3]).mul_scalar(-7), None),
        head(None).forward_over(ones([1, 3, 4]), ids([1, 3]), 2),
        tiled_cross_entropy(&table, ones([1, 3, 4]), ids([1, 3]).mul_scalar(12), Some(2), None, project),
    ]);
    // A tile of 0 is no tile, and one beyond the sequence is the sequence.
    let loss = |tile| head_loss(tile, &device);
    assert!([Some(0), Some(HUGE), Some(3)].iter().all(|tile| (loss(*tile) - loss(None)).abs() < 1e-6));
    assert_eq!(tiles(7, HUGE), [7]);
    assert_eq!(tiles(3, 0), [1, 1, 1]);
    assert_eq!(tiles(0, 5), [0]);
    let mlp = TiledMlp::new(LinearConfig::new(4, 4).with_bias(false).init(&device), Some(0));
    assert_eq!(mlp.forward(ones([1, 3, 4]), |linear: &burn::nn::Linear, x| linear.forward(x)).dims(), [1, 3, 4]);
}

fn head_loss(tile: Option<usize>, device: &Device) -> f32 {
    let linear = tests::filled(LinearConfig::new(4, 10).init(device), 1, burn::tensor::DType::F32, 1.0);
    let head = TiledLinearCrossEntropy::new(linear, tile);
    head.forward(ones([1, 3, 4]), ids([1, 3]), None).unwrap().mean.into_scalar::<f32>()
}

/// Refused on every rank before anything is sent: the group is still whole.
#[rstest]
fn collectives_and_scopes(#[values(1, 2, 3)] ranks: usize) {
    tests::on_ranks(ranks, |world| {
        let x = || ones([2, 3]);
        let (size, cp) = (world.size(), Device::flex().context_parallel(&world));
        refused(rows![
            all_gather(x(), 2, &world),
            all_gather(x(), HUGE, &world),
            all_to_all(x(), 1, 1, &vec![3; size], &world),
            all_to_all(x(), 1, 0, &[], &world),
            all_to_all(x(), HUGE, 0, &vec![1; size], &world),
            all_to_all(x(), 1, 0, &vec![HUGE; size], &world),
            reduce_scatter(x(), 0, &vec![7; size], &world),
            reduce_scatter(x(), HUGE, &vec![1; size], &world),
            broadcast(x(), size, &world),
            reduce(x(), HUGE, &world),
            cp.unshard(
                batch().shard(&SequenceLayout::contiguous(4, size)?, world.rank(), &Device::flex())?.layout(),
                ids([2, 9]),
                1
            ),
        ]);
        world.barrier()
    });
}
