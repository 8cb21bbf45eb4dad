//! Who sees whom, inside a kernel: reads the [table](super::table).

use cubecl::prelude::*;

use super::table::{EXTREMES, Labels, head};

/// The least rank that query `i` of sequence `b` sees.
#[cube]
pub(super) fn low(table: &[i32], b: usize, i: usize, #[comptime] labels: Labels) -> i32 {
    if comptime!(labels.positions) {
        table[part(table, head::LOW) + b * part(table, head::Q_RANKS_STEP) + i]
    } else {
        max(i as i32 + table[head::LOW_SHIFT], 0i32)
    }
}

/// One more than the largest rank that query `i` of sequence `b` sees.
#[cube]
pub(super) fn high(table: &[i32], b: usize, i: usize, k_len: usize, #[comptime] labels: Labels) -> i32 {
    if comptime!(labels.positions) {
        table[part(table, head::HIGH) + b * part(table, head::Q_RANKS_STEP) + i]
    } else {
        min(i as i32 + table[head::HIGH_SHIFT], k_len as i32)
    }
}

/// The rank of key `j`; one beyond the last is seen by nobody.
#[cube]
pub(super) fn rank(table: &[i32], b: usize, j: usize, k_len: usize, #[comptime] labels: Labels) -> i32 {
    if comptime!(labels.positions) {
        let at = part(table, head::RANK) + b * part(table, head::K_RANKS_STEP) + min(j, k_len - 1);
        select(j < k_len, table[at], i32::new(2147483647))
    } else {
        j as i32
    }
}

/// The document of query `i`.
#[cube]
pub(super) fn q_document(table: &[i32], b: usize, i: usize, #[comptime] labels: Labels) -> i32 {
    if comptime!(labels.documents) {
        table[part(table, head::Q_DOCUMENTS) + b * part(table, head::Q_DOCUMENTS_STEP) + i]
    } else {
        i32::new(0)
    }
}

/// The document of key `j`; that of one beyond the last is the last one's.
#[cube]
pub(super) fn k_document(table: &[i32], b: usize, j: usize, k_len: usize, #[comptime] labels: Labels) -> i32 {
    if comptime!(labels.documents) {
        table[part(table, head::K_DOCUMENTS) + b * part(table, head::K_DOCUMENTS_STEP) + min(j, k_len - 1)]
    } else {
        i32::new(0)
    }
}

/// Whether a query that sees ranks `least .. limit`, and its document `asking`, sees a key.
#[cube]
pub(super) fn sees(rank: i32, document: i32, least: i32, limit: i32, asking: i32, #[comptime] labels: Labels) -> bool {
    let mut seen = rank >= least && rank < limit;
    if comptime!(labels.documents) {
        seen = seen && document == asking;
    }
    seen
}

/// The opposite of [`sees`] for many queries, or many keys, at once.
#[cube]
pub(super) fn hides<N: Size>(
    rank: &Vector<i32, N>,
    document: &Vector<i32, N>,
    least: &Vector<i32, N>,
    limit: &Vector<i32, N>,
    asking: &Vector<i32, N>,
    #[comptime] labels: Labels,
) -> Vector<bool, N> {
    let mut hidden = rank.less_than(least).or(rank.greater_equal(limit));
    if comptime!(labels.documents) {
        hidden = hidden.or(asking.not_equal(document));
    }
    hidden
}

/// Whether some query of a tile may see some key of another, as far as documents and positions per token tell.
#[cube]
pub(super) fn meet(table: &[i32], b: usize, q_tile: usize, k_tile: usize, #[comptime] labels: Labels) -> bool {
    if comptime!(labels.any()) {
        let q = part(table, head::Q_TILES) + b * part(table, head::Q_TILES_STEP) + q_tile * EXTREMES;
        let k = part(table, head::K_TILES) + b * part(table, head::K_TILES_STEP) + k_tile * EXTREMES;
        let mut meet = true.runtime();
        if comptime!(labels.documents) {
            meet = table[q] <= table[k + 1] && table[k] <= table[q + 1];
        }
        if comptime!(labels.positions) {
            meet = meet && table[k + 2] < table[q + 3] && table[k + 3] >= table[q + 2];
        }
        meet
    } else {
        true.runtime()
    }
}

/// The first key that a query from `first` on may see; beyond all keys if there is none.
#[cube]
pub(super) fn first_key(table: &[i32], first: usize, #[comptime] labels: Labels) -> usize {
    if comptime!(labels.positions) {
        0usize.runtime()
    } else {
        max(first as i32 + table[head::LOW_SHIFT], 0i32) as usize
    }
}

/// One more than the last key that a query before `end` may see.
#[cube]
pub(super) fn end_key(table: &[i32], end: usize, k_len: usize, #[comptime] labels: Labels) -> usize {
    if comptime!(labels.positions) {
        k_len
    } else {
        min(max(end as i32 - 1i32 + table[head::HIGH_SHIFT], 0i32) as usize, k_len)
    }
}

/// The first query that may see a key from `first` on; beyond all queries if there is none.
#[cube]
pub(super) fn first_query(table: &[i32], first: usize, #[comptime] labels: Labels) -> usize {
    if comptime!(labels.positions) {
        0usize.runtime()
    } else {
        max(first as i32 - table[head::HIGH_SHIFT] + 1i32, 0i32) as usize
    }
}

/// One more than the last query that may see a key before `end`.
#[cube]
pub(super) fn end_query(table: &[i32], end: usize, q_len: usize, #[comptime] labels: Labels) -> usize {
    if comptime!(labels.positions) {
        q_len
    } else {
        min(max(end as i32 - table[head::LOW_SHIFT], 0i32) as usize, q_len)
    }
}

#[cube]
fn part(table: &[i32], #[comptime] name: usize) -> usize {
    table[name] as usize
}
