//! The mask as kernels on a device read it: one table of 32-bit numbers.
//!
//! Positions become ranks: with the distinct positions of all keys in order, query `i` sees exactly the keys whose rank `r_j` is in
//! `low_i .. high_i`, whatever 64-bit numbers the positions were. Without positions per token a key's rank is its index, and the
//! bounds are the query's index plus a number. Documents become 32-bit numbers that are equal where documents are.
//!
//! Sizes: Sq queries, Sk keys, rows of labels (1, shared by all sequences, or B).

use super::super::{FlashOptions, FlashShape};
use crate::sequence::PerToken;
use crate::{Error, Result};

/// Where the parts of a table begin, by their place in its head. All parts follow the head.
pub(super) mod head {
    /// `low_i` less i, without positions per token.
    pub const LOW_SHIFT: usize = 0;
    /// `high_i` less i, without positions per token.
    pub const HIGH_SHIFT: usize = 1;
    /// Documents of queries, and of keys.
    pub const Q_DOCUMENTS: usize = 2;
    pub const K_DOCUMENTS: usize = 3;
    /// `low_i`, `high_i` and `r_j`, with positions per token.
    pub const LOW: usize = 4;
    pub const HIGH: usize = 5;
    pub const RANK: usize = 6;
    /// Extremes of each tile of queries: documents from and to, least low, largest high.
    pub const Q_TILES: usize = 7;
    /// Extremes of each tile of keys: documents from and to, least and largest rank.
    pub const K_TILES: usize = 8;
    /// From one sequence of the batch to the next, in each of the parts: 0 where all share one row.
    pub const Q_DOCUMENTS_STEP: usize = 9;
    pub const K_DOCUMENTS_STEP: usize = 10;
    pub const Q_RANKS_STEP: usize = 11;
    pub const K_RANKS_STEP: usize = 12;
    pub const Q_TILES_STEP: usize = 13;
    pub const K_TILES_STEP: usize = 14;
    pub const LEN: usize = 16;
}

/// Numbers of a tile's extremes.
pub(super) const EXTREMES: usize = 4;
/// A token of no document: queries and keys differ in it, so that it is equal to nothing. Everything else here is at least 0.
const NO_QUERY: i32 = -1;
const NO_KEY: i32 = -2;
/// Sequences are shorter, so that no sum of an index and a shift overflows.
const LONGEST: usize = (1 << 30) - 2;

/// Which labels a table has: what a kernel is compiled for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Labels {
    /// Whether tokens belong to documents.
    pub documents: bool,
    /// Whether positions are given per token.
    pub positions: bool,
}

impl Labels {
    pub fn of(options: &FlashOptions) -> Self {
        Self { documents: options.documents.is_some(), positions: options.positions.is_some() }
    }

    /// Whether tiles have extremes to be looked up.
    pub fn any(&self) -> bool {
        self.documents || self.positions
    }
}

/// Refuses sequences of 2^30 tokens or more, and labels of which a table has no room, before anything is started.
pub(in super::super) fn expect_lengths(
    operation: &'static str,
    shape: &FlashShape,
    options: &FlashOptions,
) -> Result<()> {
    let (queries, keys) = (shape.q_len, shape.k_len);
    if queries.max(keys) > LONGEST {
        let problem =
            format!("{queries} queries and {keys} keys on a CubeCL device, whose tokens are counted in 30 bits");
        return Err(Error::unsupported(operation, problem, "spread the sequence over more ranks"));
    }
    let documents = options.documents.as_ref().map_or(0, |(q, k)| q.rows().max(k.rows()));
    let positions = options.positions.as_ref().map_or(0, |(q, k)| q.rows().max(k.rows()));
    let rows = documents.saturating_add(positions);
    // Three numbers of a token at most, and the extremes of its tile, which may be of one token.
    let numbers = rows.saturating_mul((3 + EXTREMES) * (queries + keys));
    if numbers > i32::MAX as usize {
        let problem = format!(
            "documents or positions of {rows} rows of {queries} queries and {keys} keys on a CubeCL device, whose kernels read \
             {} numbers of them at most",
            i32::MAX
        );
        return Err(Error::unsupported(operation, problem, "take fewer sequences at once, or one row for all"));
    }
    Ok(())
}

/// The table of one attention, for tiles of so many queries and keys; the lengths were [checked](expect_lengths).
///
/// # Memory
///
/// `64 + 4 rows (Sq + Sk)` bytes with documents, `4 rows (2 Sq + Sk)` more with positions, 16 per row and tile.
pub(super) fn table(options: &FlashOptions, shape: &FlashShape, tiles: [usize; 2]) -> Vec<i32> {
    let lens = [shape.q_len, shape.k_len];
    let mut table = vec![0; head::LEN];
    let shift = i128::from(options.q_offset) - i128::from(options.k_offset);
    let clamp = |x: i128| x.clamp(-(1 << 30), 1 << 30) as i32;
    table[head::LOW_SHIFT] = options.behind().map_or(-(1 << 30), |behind| clamp(shift - behind));
    table[head::HIGH_SHIFT] = options.ahead().map_or(1 << 30, |ahead| clamp(shift + ahead + 1));
    let mut sides = [Vec::new(), Vec::new()];
    if let Some((q, k)) = &options.documents {
        let [q, k] = documents([q.ids(), k.ids()]);
        append(&mut table, (head::Q_DOCUMENTS, Some(head::Q_DOCUMENTS_STEP)), &q, lens[0]);
        append(&mut table, (head::K_DOCUMENTS, Some(head::K_DOCUMENTS_STEP)), &k, lens[1]);
        sides[0].extend([q.clone(), q]);
        sides[1].extend([k.clone(), k]);
    } else {
        sides.iter_mut().for_each(|side| side.extend([vec![0], vec![0]]));
    }
    if let Some((q, k)) = &options.positions {
        let (low, high, rank) = ranks(options, q, k);
        append(&mut table, (head::LOW, Some(head::Q_RANKS_STEP)), &low, lens[0]);
        append(&mut table, (head::HIGH, None), &high, lens[0]);
        append(&mut table, (head::RANK, Some(head::K_RANKS_STEP)), &rank, lens[1]);
        sides[0].extend([low, high]);
        sides[1].extend([rank.clone(), rank]);
    } else {
        sides.iter_mut().for_each(|side| side.extend([vec![0], vec![0]]));
    }
    if Labels::of(options).any() {
        for (side, (start, step)) in
            [(head::Q_TILES, head::Q_TILES_STEP), (head::K_TILES, head::K_TILES_STEP)].into_iter().enumerate()
        {
            let extremes = extremes(&sides[side], lens[side], tiles[side]);
            append(&mut table, (start, Some(step)), &extremes, lens[side].div_ceil(tiles[side]) * EXTREMES);
        }
    }
    table
}

/// Adds a part of rows of `len` numbers, and says in the head where.
fn append(table: &mut Vec<i32>, (start, step): (usize, Option<usize>), values: &[i32], len: usize) {
    table[start] = i32::try_from(table.len()).expect("refused by expect_lengths");
    if let Some(step) = step {
        table[step] = if values.len() > len { len as i32 } else { 0 };
    }
    table.extend_from_slice(values);
}

/// 32-bit numbers for documents, equal where those are.
fn documents(sides: [&PerToken; 2]) -> [Vec<i32>; 2] {
    let ids = |side: &PerToken| (0..side.rows()).flat_map(|row| side.row(row).to_vec()).collect::<Vec<i64>>();
    let sides = sides.map(ids);
    let small = sides.iter().flatten().all(|id| i32::try_from(*id).is_ok());
    let mut known = Vec::new();
    if !small {
        known = sides.concat();
        known.sort_unstable();
        known.dedup();
    }
    let number = |id: i64| if small { id as i32 } else { known.partition_point(|other| *other < id) as i32 };
    let [q, k] = sides;
    let numbers =
        |side: Vec<i64>, none: i32| side.into_iter().map(|id| if id < 0 { none } else { number(id) }).collect();
    [numbers(q, NO_QUERY), numbers(k, NO_KEY)]
}

/// `low_i`, `high_i` and `r_j`, row by row.
fn ranks(options: &FlashOptions, q: &PerToken, k: &PerToken) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let rows = q.rows().max(k.rows());
    let (mut low, mut high, mut rank) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..rows {
        // `row` of a shared one is that one.
        let (q, k) = (q.row(row), k.row(row));
        let mut known = k.to_vec();
        known.sort_unstable();
        known.dedup();
        let count = |test: &dyn Fn(i128) -> bool| known.partition_point(|position| test(i128::from(*position))) as i32;
        low.extend(
            q.iter().map(|at| options.behind().map_or(0, |behind| count(&|key| key < i128::from(*at) - behind))),
        );
        high.extend(q.iter().map(|at| {
            options.ahead().map_or(known.len() as i32, |ahead| count(&|key| key <= i128::from(*at) + ahead))
        }));
        rank.extend(k.iter().map(|at| known.partition_point(|position| position < at) as i32));
    }
    (low, high, rank)
}

/// Least, largest, least, largest of four kinds of labels in each tile, row by row. A kind that is not there is one 0.
fn extremes(kinds: &[Vec<i32>], len: usize, tile: usize) -> Vec<i32> {
    let rows = kinds.iter().map(|kind| kind.len() / len.max(1)).max().unwrap_or(1).max(1);
    let mut found = Vec::with_capacity(rows * len.div_ceil(tile) * EXTREMES);
    for row in 0..rows {
        for start in (0..len).step_by(tile) {
            found.extend(kinds.iter().enumerate().map(|(kind, values)| {
                let row = if values.len() > len { row } else { 0 };
                let values = if values.len() < len {
                    &values[..]
                } else {
                    &values[row * len + start..row * len + (start + tile).min(len)]
                };
                // Tokens of no document meet nobody: alone, their extremes are those of nothing.
                let values = values.iter().copied().filter(|value| *value >= 0);
                if kind % 2 == 0 { values.min().unwrap_or(i32::MAX) } else { values.max().unwrap_or(-1) }
            }));
        }
    }
    found
}
