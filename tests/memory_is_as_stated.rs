//! What the techniques promise of memory, counted: every heap byte of every rank, in a process of its own.
//!
//! The counting allocator sees all ranks together, exchange buffers included. Tests of this file run one at a time.

use std::sync::{Mutex, MutexGuard};

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_context_parallel::attention::{ContextParallelDevice, SequenceContext, ulysses};
use burn_context_parallel::flash::FlashOptions;
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{Batch, RotaryFrequencies, SequenceLayout, apply_rotary};
use burn_upipe::checkpoint;
use burn_upipe::profile::heap::{self, CountingAllocator};
use burn_upipe::tiling::{TiledLinearCrossEntropy, cross_entropy_bytes};
use burn_upipe::upipe::{self, Projection, ProjectionWeights, Schedule};
use llama::{Llama, LlamaConfig, ParallelConfig};
use tests::on_ranks;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poison| poison.into_inner());
    // Not vacuous: the allocator is installed and counts.
    let (_, peak) = heap::peak_of(|| std::hint::black_box(vec![1u8; 1 << 20]));
    assert!(peak >= 1 << 20, "the counting allocator is not installed");
    guard
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

/// Peaks of attention with projections, in bytes over all ranks, above x, weights, out, d_out and all gradients.
struct Peaks {
    forward: f64,
    backward: f64,
}

fn measure(stage_heads: Option<usize>, width: usize, trainable: bool) -> Peaks {
    use large::*;
    let device = Device::flex();
    let random = |dims: [usize; 2]| Tensor::<2>::random(dims, Distribution::Normal(0.0, 0.02), &device);
    let x = Tensor::<3>::random([1, SEQ, width], Distribution::Normal(0.0, 1.0), &device);
    let weights = [random([width, HEADS * DIM]), random([width, KV_HEADS * DIM]), random([width, KV_HEADS * DIM])];
    let rotary = RotaryFrequencies::new(DIM, 1e4).unwrap();
    let layout = SequenceLayout::contiguous(SEQ, RANKS).unwrap();
    let weight_bytes = width * (HEADS + 2 * KV_HEADS) * DIM * 4;

    let counts = on_ranks(RANKS, move |world: ProcessGroup| {
        let context = SequenceContext::from_layout(&world, layout.clone(), 1)?;
        let leaf = |x: &Tensor<2>| x.clone().autodiff().set_require_grad(trainable);
        let [wq, wk, wv] = [&weights[0], &weights[1], &weights[2]].map(leaf);
        let x = layout.cut(&x, 1, world.rank()).copied().autodiff().require_grad();
        let d_out = Tensor::<4>::ones([1, x.dims()[1], HEADS, DIM], &x.device().inner());
        let table = context.rotary(&rotary, x.dtype(), &x.device());
        let begin = |world: &ProcessGroup| -> burn_context_parallel::Result<usize> {
            world.barrier()?;
            if world.rank() == 0 {
                heap::reset_peak();
            }
            world.barrier()?;
            Ok(heap::in_use())
        };
        let start = begin(&world)?;
        let out = match stage_heads {
            Some(per_stage) => {
                let schedule = Schedule::new(HEADS, KV_HEADS, RANKS, per_stage)?;
                let parts = ProjectionWeights { q: wq.clone(), k: wk.clone(), v: wv.clone(), bias: None };
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
        let forward = heap::peak();
        begin(&world)?;
        // d_out is an input of the backward pass; multiplying by it would make another copy.
        let root = burn_context_parallel::vjp::pullback(out, d_out);
        world.barrier()?;
        let backward = heap::peak();
        assert!(x.grad(&root).is_some() && wq.grad(&root).is_some() == trainable);
        world.barrier()?;
        Ok((start, forward, backward))
    });
    let (start, forward, backward) = counts[0];
    let gradients = SEQ * width * 4 + if trainable { RANKS * weight_bytes } else { 0 };
    Peaks {
        forward: forward as f64 - start as f64 - WHOLE as f64,
        backward: backward as f64 - start as f64 - WHOLE as f64 - gradients as f64,
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
/// everything else. Then narrow and trained, so that the products of weight gradients are counted, too.
#[test]
fn upipe_needs_a_quarter_of_ulysses() {
    let _alone = alone();
    for (width, trainable) in [(512, true), (large::HEADS * large::DIM, false)] {
        let staged = measure(Some(8), width, trainable);
        let whole = measure(None, width, trainable);
        let u = large::WHOLE as f64;
        println!("E = {width}, weights {}:", if trainable { "trained" } else { "frozen" });
        for (name, peaks) in [("U-Pipe", &staged), ("Ulysses", &whole)] {
            println!(
                "{name:8} forward {:7.1} MiB = {:.2} u, backward {:7.1} MiB = {:.2} u",
                peaks.forward / MIB,
                peaks.forward / u,
                peaks.backward / MIB,
                peaks.backward / u
            );
        }
        let (forward, backward) = (staged.forward / whole.forward, staged.backward / whole.backward);
        println!("ratio forward {forward:.3}, backward {backward:.3}");
        assert!(forward <= 0.25, "forward {forward}");
        assert!(backward <= 0.3, "backward {backward}");
    }
}
