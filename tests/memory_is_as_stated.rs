//! What the techniques promise of memory, counted: every heap byte of every rank, in a process of its own.
//!
//! The counting allocator sees all ranks together, exchange buffers included, and every other thread as well. So this file is one
//! test: nothing else runs, ends, or frees what it held, while something is counted.

// What was counted, for --nocapture.
#![allow(clippy::print_stdout)]

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_context_parallel::attention::{
    ContextParallelDevice, HeadSplit, KernelBytes, SequenceContext, UlyssesBytes, ulysses, ulysses_bytes,
};
use burn_context_parallel::flash::FlashOptions;
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{Batch, RotaryFrequencies, SequenceLayout, apply_rotary};
use burn_upipe::checkpoint;
use burn_upipe::profile::heap::{self, CountingAllocator};
use burn_upipe::tiling::{CrossEntropyBytes, TiledLinearCrossEntropy, TiledMlp, tile_bytes};
use burn_upipe::upipe::{self, AttentionScheme, HeadNorm, Projection, ProjectionWeights, Schedule};
use llama::{Llama, LlamaConfig, ParallelConfig};
use tests::on_ranks;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

#[test]
fn memory_is_as_stated() {
    // Not vacuous: the allocator is installed and counts.
    let (_, peak) = heap::peak_of(|| std::hint::black_box(vec![1u8; 1 << 20]));
    assert!(peak >= 1 << 20, "the counting allocator is not installed");
    ulysses_keeps_what_is_stated();
    a_tile_takes_its_tokens_bytes_and_no_more();
    a_checkpointed_model_keeps_one_input_per_block();
    the_loss_peak_does_not_grow_with_vocabulary_times_sequence();
    two_ranks_need_half_the_memory_each();
    upipe_needs_a_quarter_of_ulysses();
}

const MIB: f64 = (1 << 20) as f64;

/// H = 64, G = 8, D = 64, P = 8: q, x and out are 64 MiB each over all ranks.
mod large {
    pub const RANKS: usize = 8;
    pub const HEADS: usize = 64;
    pub const KV_HEADS: usize = 8;
    pub const DIM: usize = 64;
    pub const SEQ: usize = 4096;
    /// u: one whole query-sized tensor in f32.
    pub const WHOLE: usize = SEQ * HEADS * DIM * 4;
}

/// Peaks of attention with projections: the sum of the ranks' own peaks in bytes, above x, weights, out, d_out and gradients.
///
/// Of the ranks' own peaks, not of the heap: which ranks are at their peaks together is a matter of chance here, and of none on as
/// many devices. What a rank sends counts for it until the last receiver has let go of it.
struct Peaks {
    forward: f64,
    backward: f64,
}

fn measure(stage_heads: Option<usize>, width: usize, trainable: bool, normed: bool) -> Peaks {
    use large::*;
    let device = Device::flex();
    let random = |dims: [usize; 2]| Tensor::<2>::random(dims, Distribution::Normal(0.0, 0.02), &device);
    let x = Tensor::<3>::random([1, SEQ, width], Distribution::Normal(0.0, 1.0), &device);
    let weights = [random([width, HEADS * DIM]), random([width, KV_HEADS * DIM]), random([width, KV_HEADS * DIM])];
    let rotary = RotaryFrequencies::new(DIM, 1e4).unwrap();
    let layout = SequenceLayout::contiguous(SEQ, RANKS).unwrap();
    let weight_bytes = width * (HEADS + 2 * KV_HEADS) * DIM * 4;

    let counts = on_ranks(RANKS, move |world: ProcessGroup| {
        let _owned = heap::own(world.rank());
        let context = SequenceContext::from_layout(&world, layout.clone(), 1)?;
        let leaf = |x: &Tensor<2>| x.clone().autodiff().set_require_grad(trainable);
        let [wq, wk, wv] = [&weights[0], &weights[1], &weights[2]].map(leaf);
        let [gamma_q, gamma_k] = [(); 2].map(|()| Tensor::<1>::ones([DIM], &device).autodiff().require_grad());
        let x = layout.cut(&x, 1, world.rank()).copied().autodiff().require_grad();
        let d_out = Tensor::<4>::ones([1, x.dims()[1], HEADS, DIM], &x.device().inner());
        let table = context.rotary(&rotary, x.dtype(), &x.device());
        let begin = |world: &ProcessGroup| -> burn_context_parallel::Result<usize> {
            world.barrier()?;
            if world.rank() == 0 {
                heap::reset_peak();
            }
            world.barrier()?;
            Ok(heap::in_use_by(world.rank()))
        };
        // The product's own workspace (one second-level cache a thread, whatever the shapes) is there before the count begins: it
        // is taken when a product first reads a view.
        // Small, or it would run on other threads than this one.
        let small = Tensor::<2>::ones([64, 128], &x.device().inner());
        drop(small.clone().narrow(1, 0, 64).matmul(small.narrow(1, 64, 64)));
        let start = begin(&world)?;
        let out = match stage_heads {
            Some(per_stage) => {
                let schedule = Schedule::new(HEADS, KV_HEADS, RANKS, per_stage)?;
                let parts = ProjectionWeights {
                    q: wq.clone(),
                    k: wk.clone(),
                    v: wv.clone(),
                    biases: [None, None, None],
                    norms: [&gamma_q, &gamma_k]
                        .map(|gamma| normed.then(|| HeadNorm { gamma: gamma.clone(), epsilon: 1e-6 })),
                };
                let (source, inputs) = Projection::new(x.clone(), parts, DIM, Some(table));
                upipe::upipe(source, inputs, &schedule, &FlashOptions::causal(), &context)?
            }
            None => {
                let project = |weight: &Tensor<2>, heads: usize| {
                    let [_, local, _] = x.dims();
                    x.clone().matmul(weight.clone().unsqueeze_dim(0)).reshape([1, local, heads, DIM])
                };
                let q = apply_rotary(project(&wq, HEADS), &table).swap_dims(1, 2);
                let k = apply_rotary(project(&wk, KV_HEADS), &table).swap_dims(1, 2);
                let v = project(&wv, KV_HEADS).swap_dims(1, 2);
                ulysses(q, k, v, &FlashOptions::causal(), &world, &layout, &layout)?.swap_dims(1, 2)
            }
        };
        world.barrier()?;
        let forward = heap::peak_by(world.rank());
        begin(&world)?;
        // Inputs and outputs are not intermediates, so they live to the end; without these handles a scheme could free them early.
        let kept = (out.clone().inner(), d_out.clone());
        let root = burn_context_parallel::vjp::pullback(out, d_out);
        world.barrier()?;
        let backward = heap::peak_by(world.rank());
        drop(kept);
        assert!(x.grad(&root).is_some() && wq.grad(&root).is_some() == trainable);
        world.barrier()?;
        Ok((start, forward, backward))
    });
    let gradients = SEQ * width * 4 / RANKS + if trainable { weight_bytes } else { 0 };
    let sum = |above: &dyn Fn(&(usize, usize, usize)) -> f64| counts.iter().map(above).sum::<f64>();
    let out = (WHOLE / RANKS) as f64;
    Peaks {
        forward: sum(&|(start, forward, _)| *forward as f64 - *start as f64 - out),
        backward: sum(&|(start, _, backward)| *backward as f64 - *start as f64 - out - gradients as f64),
    }
}

/// A view's own copy, so that the whole is not kept alive by it.
trait Copied {
    fn copied(self) -> Self;
}

impl Copied for Tensor<3> {
    fn copied(self) -> Self {
        self * 1.0
    }
}

/// As wide as its heads, as models are; weights frozen, since with only 4096 tokens their gradients (one copy a rank) would outweigh
/// everything else. Narrow and trained as well, so that the products of weight gradients are counted, too. And with norms on heads, of
/// which a part's intermediates exist at a time.
fn upipe_needs_a_quarter_of_ulysses() {
    let wide = large::HEADS * large::DIM;
    for (width, trainable, normed) in [(64, true, false), (wide, false, false), (wide, false, true)] {
        let staged = measure(Some(8), width, trainable, normed);
        // Ulysses without norms: with them it keeps more.
        let whole = measure(None, width, trainable, false);
        let u = large::WHOLE as f64;
        println!(
            "E = {width}, weights {}, {} norms on heads:",
            if trainable { "trained" } else { "frozen" },
            if normed { "with" } else { "without" }
        );
        for (name, peaks) in [("U-Pipe", &staged), ("Ulysses", &whole)] {
            println!(
                "{name:8} forward {:7.1} MiB = {:.2} u, backward {:7.1} MiB = {:.2} u",
                peaks.forward / MIB,
                peaks.forward / u,
                peaks.backward / MIB,
                peaks.backward / u
            );
        }
        let schedule = Schedule::new(large::HEADS, large::KV_HEADS, large::RANKS, 8).unwrap();
        let shape = (1, large::SEQ, large::DIM, 4);
        let stated = [
            large::RANKS * upipe::forward_bytes(&schedule, shape.0, shape.1, shape.2, shape.3),
            large::RANKS * upipe::backward_bytes(&schedule, shape.0, shape.1, shape.2, shape.3),
        ];
        for (name, measured, stated) in
            [("forward", staged.forward, stated[0]), ("backward", staged.backward, stated[1])]
        {
            println!("U-Pipe {name}: stated {:.1} MiB", stated as f64 / MIB);
            // A rank's share of each stage on its way (a part being projected, rotated or cut) comes on top: an eighth of a
            // stage here; and a buffer that the slowest receiver still holds.
            let bound = stated as f64 * 1.1;
            assert!(
                measured <= bound && measured >= stated as f64 * 0.85,
                "{name}: {measured} measured, {stated} stated"
            );
        }
        // Ulysses: its inputs are let go once they are sent, out and d_out are not counted. E = 64 has the products of weights on top.
        let split = HeadSplit::new(large::HEADS, large::KV_HEADS, large::RANKS).unwrap();
        let bytes = UlyssesBytes::new(&split, 0, shape.0, shape.1, shape.2, shape.3);
        let kernel = KernelBytes { scratch: [0; 2], result: 4, casts: true };
        let stated = [
            large::RANKS * (bytes.forward(&kernel, false) - bytes.q),
            // Until they are sent, out and d_out are there in any case.
            large::RANKS * bytes.backward(&kernel, false),
        ];
        for (name, measured, stated) in [("forward", whole.forward, stated[0]), ("backward", whole.backward, stated[1])]
        {
            println!("Ulysses {name}: stated {:.1} MiB", stated as f64 / MIB);
            let bound = stated as f64 * 1.15;
            // What is not counted of the backward pass: out and d_out.
            let beside = if name == "backward" { 2.0 * u } else { 0.0 };
            assert!(measured <= bound, "{name}: {measured} measured, {stated} stated");
            assert!(measured + beside >= stated as f64 * 0.85, "{name}: {measured} measured, {stated} stated");
        }
        let (forward, backward) = (staged.forward / whole.forward, staged.backward / whole.backward);
        println!("ratio forward {forward:.3}, backward {backward:.3}");
        assert!(forward <= 0.25, "forward {forward}");
        assert!(backward <= 0.3, "backward {backward}");
    }
}

/// Eight blocks, each keeping its input and nothing else.
fn a_checkpointed_model_keeps_one_input_per_block() {
    let (layers, seq, width) = (8, 512, 64);
    let mut config = LlamaConfig::new(64, width, 4 * width, layers, 4, 2);
    config.tie_word_embeddings = true;
    let batch = Batch::from_rows(&[(0..seq as i64).map(|i| i % 64).collect()]).unwrap();
    let kept = |checkpoint: bool| {
        let device = Device::flex().autodiff();
        let parallel = ParallelConfig { checkpoint, loss_tile: Some(64), ..ParallelConfig::none() };
        let model = Llama::init(&config, &parallel, &device).unwrap();
        let group = ProcessGroup::single();
        let shard = device.context_parallel(&group).shard(&batch).unwrap();
        let step = || model.loss(&shard, &group).unwrap().mean;
        drop(step().backward()); // lazy parameters and workspaces exist from here on
        // A worker of the matrix product may take its workspace, for good, at any time: of three the one in which none did.
        let kept = || {
            let before = heap::in_use();
            let loss = step();
            let kept = heap::in_use() - before;
            drop(loss.backward());
            kept
        };
        (0..3).map(|_| kept()).min().unwrap_or(0)
    };
    let one = checkpoint::saved_bytes(1, seq, width, 4);
    let (with, without) = (kept(true), kept(false));
    println!("kept: {with} bytes with checkpoints, {without} without; one block input is {one}");
    // Each block's input, the last block's output twice (into the final norm, and normed into the loss), and the graph itself.
    let stated = (layers + 3) * one;
    assert!(with <= stated + stated / 20 + (1 << 16), "{with} bytes kept, {stated} stated");
    assert!(with >= layers * one, "{with} bytes cannot hold {layers} inputs of {one}");
    assert!(without > 8 * with, "{without} bytes without checkpoints");
}

/// Logits would be V x S: with a tile, what grows with S is x, dx and the targets.
fn the_loss_peak_does_not_grow_with_vocabulary_times_sequence() {
    let (width, vocabulary, tile) = (16, 8192, 64);
    let device = Device::flex().autodiff();
    let head = LinearConfig::new(width, vocabulary).with_bias(false).init(&device);
    let head = TiledLinearCrossEntropy::new(head, Some(tile));
    let peak = |seq: usize| {
        let x = Tensor::<3>::ones([1, seq, width], &device).require_grad();
        let targets = Tensor::<2, Int>::ones([1, seq], &device);
        let run = || {
            let loss = head.forward(x.clone(), targets.clone(), None).unwrap();
            drop(loss.mean.backward());
        };
        run();
        heap::peak_of(run).1
    };
    let (short, long) = (peak(256), peak(2048));
    let stated = CrossEntropyBytes::new(1, 256, Some(tile), vocabulary, width, 4, 4).backward();
    println!("loss: {short} bytes at 256 tokens, {long} at 2048; stated are {stated}");
    // One more token costs its dx, and its target on device, on the host and as a mask.
    let per_token = width * 4 + 3 * 8 + 8;
    assert!(long <= short + (2048 - 256) * per_token + (1 << 16), "grows by {}", long - short);
    // dx of all, and targets; the graph.
    let bound = stated + 256 * per_token + (1 << 16);
    assert!(short <= bound + bound / 20, "{short} bytes at the peak, {bound} stated");
    assert!(short >= stated - stated / 10, "{short} bytes at the peak, {stated} stated");
    assert!(short >= tile * vocabulary * 4, "a tile's logits exist");
}

/// verl#7476: a degree that is accepted while nothing is cut, so that no memory is saved. Forward and backward of a model: a rank of two
/// peaks at little more than half of what one alone does.
fn two_ranks_need_half_the_memory_each() {
    let peak = |ranks: usize, scheme: AttentionScheme| {
        let peaks = on_ranks(ranks, move |world: ProcessGroup| {
            let _owned = heap::own(world.rank());
            let device = Device::flex().autodiff();
            let parallel = ParallelConfig { attention: scheme, ..ParallelConfig::none() };
            let model = Llama::init(&LlamaConfig::new(64, 32, 96, 3, 4, 2), &parallel, &device).expect("a model");
            let batch = Batch::from_rows(&[(0..2048).map(|i| i % 64).collect()])?;
            let shard = device.context_parallel(&world).shard(&batch)?;
            let step = || {
                let loss = model.loss(&shard, &world).expect("a loss");
                drop(loss.mean.backward());
            };
            step(); // workspaces are taken
            world.barrier()?;
            if world.rank() == 0 {
                heap::reset_peak();
            }
            world.barrier()?;
            step();
            Ok(heap::peak_by(world.rank()))
        });
        peaks.into_iter().max().unwrap_or(0)
    };
    for scheme in [AttentionScheme::Ulysses, AttentionScheme::default()] {
        let (alone, shared) = (peak(1, scheme), peak(2, scheme));
        println!("{scheme:?}: {alone} bytes alone, {shared} on each of two ranks");
        assert!(shared * 10 < alone * 6, "{scheme:?}: {shared} bytes on a rank of two, {alone} alone");
    }
}

/// q, k and v of a rank's heads over the whole sequence, and the log-sum-exp; with fewer key/value heads than ranks, too.
fn ulysses_keeps_what_is_stated() {
    const DIM: usize = 32;
    let (ranks, seq) = (4, 1024);
    for (heads, kv_heads) in [(8, 8), (8, 2), (6, 3)] {
        let layout = SequenceLayout::contiguous(seq, ranks).unwrap();
        let split = HeadSplit::new(heads, kv_heads, ranks).unwrap();
        let stated: usize = (0..ranks).map(|rank| ulysses_bytes(&split, rank, 1, seq, DIM, 4)).sum();
        let kept = on_ranks(ranks, move |world: ProcessGroup| {
            let _owned = heap::own(world.rank());
            let local = layout.local_len(world.rank());
            let leaf =
                |heads: usize| Tensor::<4>::ones([1, heads, local, DIM], &Device::flex()).autodiff().require_grad();
            let (q, k, v) = (leaf(heads), leaf(kv_heads), leaf(kv_heads));
            world.barrier()?;
            let before = heap::in_use_by(world.rank());
            // The inputs stay: they are the caller's.
            let out = ulysses(q.clone(), k.clone(), v.clone(), &FlashOptions::causal(), &world, &layout, &layout)?;
            world.barrier()?;
            let kept = heap::in_use_by(world.rank()) - before - heads * local * DIM * 4;
            world.barrier()?;
            drop((out, q, k, v));
            Ok(kept)
        });
        let kept: usize = kept.into_iter().sum();
        println!("Ulysses, {heads}/{kv_heads} heads: {kept} bytes kept, {stated} stated");
        // Above: the graph, the layout and the group's own small things, a few KiB a rank.
        assert!((stated..=stated + stated / 50 + ranks * (8 << 10)).contains(&kept), "{kept} kept, {stated} stated");
    }
}

/// What a tiled feed-forward takes grows with the tile as [`tile_bytes`] says, not with the sequence.
fn a_tile_takes_its_tokens_bytes_and_no_more() {
    const SEQ: usize = 2048;
    let (width, wide) = (16, 512);
    let device = Device::flex().autodiff();
    let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&device);
    let mlp = (linear(width, wide), linear(wide, width));
    let peak = |seq: usize, tile: usize| {
        let mlp = TiledMlp::new(mlp.clone(), Some(tile));
        let run = || {
            let x = Tensor::<3>::ones([1, seq, width], &device).require_grad();
            let y = mlp.forward(x, |(up, down): &(Linear, Linear), x| {
                down.forward(burn::tensor::activation::relu(up.forward(x)))
            });
            drop(y.sum().backward());
        };
        run();
        heap::peak_of(run).1 as f64
    };
    let peaks = [128, 256, 512].map(|tile| peak(SEQ, tile));
    let stated = [128, 256, 512].map(|tile| tile_bytes(1, SEQ, tile, wide, 4) as f64);
    // The feed-forward and its gradient hold a fixed number of such tensors at once.
    let tensors = [1, 2].map(|i| (peaks[i] - peaks[i - 1]) / (stated[i] - stated[i - 1]));
    println!("tiles: {peaks:?} bytes, {tensors:.2?} times tile_bytes");
    assert!(tensors.iter().all(|n| (2.0..=5.0).contains(n)), "{tensors:?} tensors as wide as the feed-forward");
    assert!((tensors[0] - tensors[1]).abs() < 0.3, "not linear in the tile: {tensors:?}");
    // Twice the tokens: only x, y and their gradients are longer.
    let longer = peak(2 * SEQ, 128) - peaks[0];
    assert!(longer <= (SEQ * width * 4 * 6 + (64 << 10)) as f64, "{longer} bytes more for twice the tokens");
}
