//! Who computes which tile, and in which memory.

use std::sync::Mutex;

use bytemuck::{Pod, Zeroable};

use super::real::LINE;

/// Queries per tile, and keys per tile.
///
/// One tile of scores is 96 x 112 x 4 bytes = 42 KiB, and a tile of queries, keys or values 24 KiB at D = 64: what one
/// product touches at a time stays near the 32-48 KiB of a first-level cache, and everything a worker touches (about
/// 150 KiB forward, 250 KiB backward) within the 512 KiB or more of a second-level one. 96 is divisible by the 6 and 12
/// rows and by the 16, 32 and (nearly) 64 columns that the matrix product holds in registers. Larger tiles compute more of
/// the masked triangle, smaller ones load and rescale the accumulators more often; 64 and 192 were tried, and are no faster.
pub(super) const Q_TILE: usize = 96;
/// See [`Q_TILE`].
pub(super) const K_TILE: usize = 96;

/// Elements from row to row in a tile of scores: one cache line more than the tile, because a power of two would put
/// the rows that a column walks over into the same few cache sets.
pub(super) const fn score_row(tile: usize, pad: usize) -> usize {
    tile.next_multiple_of(pad) + pad
}

/// Zeroed memory that starts at a cache line, for tiles; parts of whole lines are split off it.
pub(super) struct Scratch {
    lines: Vec<Line>,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

impl Scratch {
    fn new(bytes: usize) -> Self {
        Self { lines: bytemuck::zeroed_vec(bytes.div_ceil(LINE)) }
    }

    pub(super) fn parts<R: Pod>(&mut self) -> Parts<'_, R> {
        Parts(bytemuck::cast_slice_mut(&mut self.lines))
    }
}

/// What is left of a [`Scratch`].
pub(super) struct Parts<'a, R>(&'a mut [R]);

impl<'a, R: Pod> Parts<'a, R> {
    /// The next `elements`, which must be whole lines.
    pub(super) fn take(&mut self, elements: usize) -> &'a mut [R] {
        debug_assert!((elements * size_of::<R>()).is_multiple_of(LINE));
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(elements);
        self.0 = rest;
        part
    }
}

/// Runs `work` on every task, on as many threads as rayon has, each with its own scratch.
///
/// Tasks are taken in order by whoever is free: put the long ones first. What a task computes does not depend on who runs
/// it, so results are the same on any number of threads. Tasks never wait for anything, so ranks that are threads of one
/// process can share the pool.
pub(super) fn run<T: Send>(tasks: Vec<T>, scratch_bytes: usize, work: impl Fn(T, &mut Scratch) + Sync) {
    let threads = workers(tasks.len(), rayon::current_num_threads());
    let queue = Mutex::new(tasks.into_iter());
    let worker = || {
        let mut scratch = Scratch::new(scratch_bytes);
        loop {
            let task = queue.lock().expect("taking a task does not panic").next();
            match task {
                Some(task) => work(task, &mut scratch),
                None => return,
            }
        }
    };
    match threads {
        0 => {}
        1 => worker(),
        _ => rayon::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|_| worker());
            }
        }),
    }
}

/// How many threads work on so many tasks.
pub(super) fn workers(tasks: usize, threads: usize) -> usize {
    tasks.min(threads)
}
