//! Saving holds one piece, reading holds the answer. One test in a binary of its own, for the allocator counts everything that runs.

use burn::tensor::{DType, TensorData};
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_upipe::learner::checkpoint::{CheckpointError, Checkpoints, Piece, RunState};
use burn_upipe::profile::heap::{self, CountingAllocator};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const PIECE: usize = 4 << 20;
const ELEMENTS: usize = PIECE / 4;
/// Buffers of 256 KiB, names, checksums, the manifest's JSON.
const SLACK: usize = 1 << 20;

/// Not from bytes, which Burn would copy.
fn ones(elements: usize) -> TensorData {
    TensorData::new(vec![1f32; elements], [elements])
}

#[test]
fn memory_is_as_stated() {
    let out = tempfile::tempdir().unwrap();
    // Three ranks with five pieces of 4 MiB each of a tensor of 60 MiB, and 200 small tensors.
    let folder = out.path().to_owned();
    let peaks = launch(3, move |world| {
        let rank = world.rank();
        let checkpoints = Checkpoints::new(&folder, None);
        let piece = |i: usize| {
            let range = i * ELEMENTS..(i + 1) * ELEMENTS;
            Piece::new("weight", DType::F32, [15, ELEMENTS], range, move || Ok::<_, CheckpointError>(ones(ELEMENTS)))
        };
        let small = (0..200).map(|i| Piece::whole(format!("small.{rank}.{i}"), ones(8)));
        world.barrier()?;
        let owned = heap::own(rank);
        let before = heap::in_use_by(rank);
        checkpoints.save(&world, (5 * rank..5 * rank + 5).map(piece).chain(small), &RunState::default())?;
        let peak = heap::peak_by(rank) - before;
        drop(owned);
        Ok::<_, CheckpointError>(peak)
    })
    .unwrap();
    for (rank, peak) in peaks.iter().enumerate() {
        println!("saving, rank {rank}: {} KiB above nothing, a piece is {} KiB", peak / 1024, PIECE / 1024);
        assert!((PIECE..PIECE + SLACK).contains(peak), "rank {rank} held {peak} bytes, a piece is {PIECE}");
    }

    let (latest, peak) = heap::peak_of(|| Checkpoints::new(out.path(), None).latest(&ProcessGroup::single()));
    let latest = latest.unwrap().unwrap();
    println!("finding and verifying 60 MiB: {} KiB", peak / 1024);
    assert!(peak < SLACK, "{peak} bytes");

    // Two elements more than a piece, and none of them at a piece's edge; a few; the whole.
    for range in [3 * ELEMENTS - 1..4 * ELEMENTS + 1, ELEMENTS - 3..ELEMENTS + 3, 0..15 * ELEMENTS] {
        let answer = 4 * range.len();
        let (read, peak) = heap::peak_of(|| latest.read("weight", range.clone()));
        println!("reading {range:?}: {} KiB, the answer is {} KiB", peak / 1024, answer / 1024);
        assert!((answer..answer + SLACK).contains(&peak), "{range:?}: {peak} bytes for {answer}");
        assert_eq!(read.unwrap().as_bytes().len(), answer);
    }
}
