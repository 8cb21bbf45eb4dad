//! With offload the device holds no saved input beyond K in flight, the host exactly layers x L x E x size. One test in a binary of its
//! own: the allocator counts all that runs, and not what lies in maps.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::Result;
use burn_context_parallel::attention::ContextParallelDevice;
use burn_context_parallel::group::ProcessGroup;
use burn_context_parallel::sequence::{Batch, Documents};
use burn_upipe::offload::{Offload, OffloadConfig, in_flight_bytes, saved_bytes};
use burn_upipe::profile::heap::{self, CountingAllocator};
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig};
use tests::on_ranks;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const WIDTH: usize = 16;
/// Of a rank. Long beside the weights: what is measured are activations.
const LOCAL: usize = 4096;
/// An input of a block.
const INPUT: usize = LOCAL * WIDTH * 4;
/// A layer's own: weights' gradients, its part of the graph.
const OF_A_LAYER: usize = 32 << 10;

/// Bytes of one rank above those at rest.
#[derive(Clone, Copy, Debug)]
struct Use {
    /// The most in forward.
    forward: usize,
    /// Between forward and backward.
    between: usize,
    /// The most in backward.
    backward: usize,
}

/// The largest of all ranks, of a second step.
fn measure(ranks: usize, layers: usize, per_checkpoint: usize, offload: Option<OffloadConfig>) -> Use {
    let used = on_ranks(ranks, move |world| on_rank(&world, layers, per_checkpoint, offload.clone()));
    let most = |of: fn(&Use) -> usize| used.iter().map(of).max().expect("ranks");
    Use { forward: most(|u| u.forward), between: most(|u| u.between), backward: most(|u| u.backward) }
}

fn on_rank(world: &ProcessGroup, layers: usize, per_checkpoint: usize, offload: Option<OffloadConfig>) -> Result<Use> {
    let (rank, _owned) = (world.rank(), heap::own(world.rank()));
    let device = Device::flex().autodiff();
    let attention = if world.size() > 1 { AttentionScheme::default() } else { AttentionScheme::Single };
    let tiles = Some(512);
    let parallel = ParallelConfig {
        attention,
        checkpoint: true,
        blocks_per_checkpoint: per_checkpoint,
        mlp_tile: tiles,
        norm_tile: tiles,
        loss_tile: tiles,
    };
    let model = Llama::init(&LlamaConfig::new(32, WIDTH, 24, layers, 2, 2), &parallel, &device).expect("a model");
    let mut model = model.fork(&device);
    let engine = offload.map(Offload::new).transpose()?;
    if let Some(engine) = &engine {
        model = model.offload(engine);
    }
    // Documents, so that attention is short.
    let row: Vec<i64> = (0..(LOCAL * world.size()) as i64).map(|i| i % 32).collect();
    let documents = Documents::from_lengths(&vec![256; row.len() / 256])?;
    let batch = Batch::from_rows(&[row])?.with_documents(documents)?;
    let shard = device.context_parallel(world).shard(&batch)?;
    let reset = || -> Result<usize> {
        world.barrier()?;
        if rank == 0 {
            heap::reset_peak();
        }
        world.barrier()?;
        Ok(heap::in_use_by(rank))
    };
    let step = || -> Result<Use> {
        let rest = reset()?;
        let loss = model.loss(&shard, world).expect("a loss");
        // Copies that are under way come to their end.
        while engine.as_ref().is_some_and(|engine| engine.stats().in_flight > 0) {
            std::thread::yield_now();
        }
        let (forward, between) = (heap::peak_by(rank) - rest, heap::in_use_by(rank) - rest);
        if let Some(engine) = &engine {
            let stats = engine.stats();
            let checkpoints = layers.div_ceil(per_checkpoint);
            assert_eq!(stats.host_bytes, saved_bytes(checkpoints, 1, LOCAL, WIDTH, 4), "to the byte");
            assert_eq!((stats.device_bytes, stats.allocations), (0, checkpoints));
        }
        reset()?;
        drop(loss.mean.backward());
        Ok(Use { forward, between, backward: heap::peak_by(rank) - rest })
    };
    step()?;
    step()
}

#[test]
fn memory_is_as_stated() {
    what_is_restored_counts_for_its_rank();
    for (ranks, numbers) in [(1, &[1, 2, 3][..]), (2, &[2])] {
        let plain = [1, 3, 7].map(|layers| measure(ranks, layers, 1, None));
        println!("{ranks} ranks, an input is {INPUT} bytes\n    on the device  {plain:?}");
        // What offload is measured against: an input a layer.
        let kept = (plain[2].between - plain[1].between) / 4;
        assert!((INPUT..INPUT + OF_A_LAYER).contains(&kept), "{kept} bytes a layer without offload");
        for &in_flight in numbers {
            let config = OffloadConfig::new().with_in_flight(in_flight);
            let away = [1, 3, 7].map(|layers| measure(ranks, layers, 1, Some(config.clone())));
            println!("    {in_flight} in flight    {away:?}");
            for (layers, (plain, away)) in [1, 3, 7].into_iter().zip(plain.iter().zip(&away)) {
                // Between forward and backward all of them are away, the first block's too: nobody else holds one.
                let saved = plain.between - away.between;
                let all = layers * INPUT;
                assert!(
                    saved <= all + OF_A_LAYER && saved + layers * OF_A_LAYER / 8 >= all,
                    "{layers}: {saved} of {all}"
                );
            }
            // More layers: nothing more of activations, in no phase.
            let grown = |of: fn(&Use) -> usize| of(&away[2]).saturating_sub(of(&away[1])) / 4;
            for (phase, of) in [
                ("forward", (|u| u.forward) as fn(&Use) -> usize),
                ("between", |u| u.between),
                ("backward", |u| u.backward),
            ] {
                // Whether a fast copy met the peak differs from run to run, by what is in flight.
                let allowed = OF_A_LAYER + if phase == "between" { 0 } else { in_flight * INPUT / 4 };
                assert!(grown(of) <= allowed, "{phase}: {} bytes a layer, K {in_flight}", grown(of));
            }
            // What is in flight is all that a step takes beside its own.
            let bound = in_flight_bytes(in_flight, 7, 1, LOCAL, WIDTH, 4) + 7 * OF_A_LAYER;
            let alone = plain[0];
            assert!(away[2].forward <= alone.forward + bound, "forward {} {}", away[2].forward, alone.forward);
            assert!(away[2].backward <= alone.backward + bound, "backward {} {}", away[2].backward, alone.backward);
        }
    }
    // Two blocks a checkpoint: half the inputs, as `measure` checks, and on the device again none.
    let (two, four) = (measure(1, 2, 2, Some(OffloadConfig::new())), measure(1, 8, 2, Some(OffloadConfig::new())));
    println!("2 a checkpoint: 2 layers {two:?}, 8 layers {four:?}");
    assert!(four.between - two.between <= 6 * OF_A_LAYER, "{two:?} {four:?}");
    assert!(four.backward - two.backward <= INPUT + 6 * OF_A_LAYER, "{two:?} {four:?}");
}

/// The thread that copies works for the rank that made it.
fn what_is_restored_counts_for_its_rank() {
    on_ranks(2, |world| {
        let (rank, _owned) = (world.rank(), heap::own(world.rank()));
        let offload = Offload::new(OffloadConfig::new())?;
        let elements = (1 + rank) << 18;
        let before = heap::in_use_by(rank);
        let saved = offload.save(Tensor::<1>::ones([elements], &Device::flex()))?;
        while offload.stats().in_flight > 0 {
            std::thread::yield_now();
        }
        let away = heap::in_use_by(rank) - before;
        assert!(away < 16 << 10, "rank {rank}: {away} bytes left of what has left");
        let x = saved.take()?;
        let back = heap::in_use_by(rank) - before;
        assert!((4 * elements..4 * elements + (16 << 10)).contains(&back), "rank {rank}: {back} bytes");
        drop(x);
        Ok(())
    });
}
