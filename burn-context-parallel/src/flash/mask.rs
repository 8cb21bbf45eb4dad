//! The mask as kernels need it: which tiles to visit, and what is hidden inside one.

use std::ops::Range;

use super::FlashOptions;

/// How much of a tile of scores is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cover {
    /// Nothing: the tile is not visited.
    Empty,
    /// Some of it.
    Part,
    /// All of it.
    Full,
}

/// The mask of one attention, with the least and the largest position and document of every tile.
pub(crate) struct Mask<'a> {
    options: &'a FlashOptions,
    /// Position of key 0 less that of query 0, where positions are counted.
    shift: i128,
    lens: [usize; 2],
    tiles: [usize; 2],
    /// Of queries and keys, per row of values and tile.
    documents: Option<[Vec<Extent>; 2]>,
    positions: Option<[Vec<Extent>; 2]>,
}

/// The least and the largest of some values.
#[derive(Clone, Copy)]
struct Extent {
    low: i64,
    high: i64,
}

impl Extent {
    fn of(values: &[i64]) -> Self {
        let low = values.iter().copied().min().unwrap_or(i64::MAX);
        Self { low, high: values.iter().copied().max().unwrap_or(i64::MIN) }
    }
}

const QUERIES: usize = 0;
const KEYS: usize = 1;

impl<'a> Mask<'a> {
    /// The mask of options that were [checked](FlashOptions::check_lengths), for tiles that start at multiples of their sizes.
    pub(crate) fn new(options: &'a FlashOptions, lens: [usize; 2], tiles: [usize; 2]) -> Self {
        let extents = |values: [&crate::sequence::PerToken; 2]| {
            [QUERIES, KEYS].map(|side| {
                let rows = 0..values[side].rows();
                rows.flat_map(|row| values[side].row(row).chunks(tiles[side]).map(Extent::of)).collect()
            })
        };
        Self {
            options,
            shift: i128::from(options.k_offset) - i128::from(options.q_offset),
            lens,
            tiles,
            documents: options.documents.as_ref().map(|(q, k)| extents([q.ids(), k.ids()])),
            positions: options.positions.as_ref().map(|(q, k)| extents([q, k])),
        }
    }

    /// The keys among which all are that some query of `queries` sees, as far as counted positions tell.
    pub(crate) fn keys(&self, queries: &Range<usize>) -> Range<usize> {
        self.beyond(QUERIES, queries)
    }

    /// The queries among which all are that see some key of `keys`, as far as counted positions tell.
    pub(crate) fn queries(&self, keys: &Range<usize>) -> Range<usize> {
        self.beyond(KEYS, keys)
    }

    /// How far back and forth from its own position a token of this side has to do with tokens of the other.
    fn reach(&self, side: usize) -> [Option<i128>; 2] {
        let [behind, ahead] = [self.options.behind(), self.options.ahead()];
        if side == QUERIES { [behind, ahead] } else { [ahead, behind] }
    }

    /// What tokens `own` of one side have to do with on the other.
    fn beyond(&self, side: usize, own: &Range<usize>) -> Range<usize> {
        let len = self.lens[1 - side];
        if self.positions.is_some() || own.is_empty() {
            return 0..len;
        }
        let shift = if side == QUERIES { -self.shift } else { self.shift };
        let clamp = |x: i128| x.clamp(0, len as i128) as usize;
        let [back, forth] = self.reach(side);
        let start = back.map_or(0, |back| clamp(own.start as i128 + shift - back));
        let end = forth.map_or(len, |forth| clamp(own.end as i128 + shift + forth));
        start.min(end)..end
    }

    /// How much of a tile is visible: [`Cover::Part`] may turn out to be less or more, the others are exact.
    pub(crate) fn cover(&self, sequence: usize, queries: &Range<usize>, keys: &Range<usize>) -> Cover {
        let mut full = true;
        if let Some([q, k]) = self.extents(&self.documents, sequence, queries, keys) {
            if q.high < k.low || k.high < q.low || q.high.min(k.high) < 0 {
                return Cover::Empty;
            }
            full &= q.low == q.high && k.low == k.high;
        }
        // The extremes of "position of the key less position of the query".
        let (least, most) = match self.extents(&self.positions, sequence, queries, keys) {
            Some([q, k]) => (i128::from(k.low) - i128::from(q.high), i128::from(k.high) - i128::from(q.low)),
            None => (
                keys.start as i128 + self.shift - (queries.end as i128 - 1),
                keys.end as i128 - 1 + self.shift - queries.start as i128,
            ),
        };
        if self.options.ahead().is_some_and(|ahead| least > ahead)
            || self.options.behind().is_some_and(|behind| most < -behind)
        {
            return Cover::Empty;
        }
        full &= self.options.ahead().is_none_or(|ahead| most <= ahead);
        full &= self.options.behind().is_none_or(|behind| least >= -behind);
        if full { Cover::Full } else { Cover::Part }
    }

    fn extents(
        &self,
        of: &Option<[Vec<Extent>; 2]>,
        sequence: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> Option<[Extent; 2]> {
        let of = of.as_ref()?;
        Some([(QUERIES, queries), (KEYS, keys)].map(|(side, range)| {
            let per_row = self.lens[side].div_ceil(self.tiles[side]);
            let rows = of[side].len() / per_row.max(1);
            debug_assert!(range.start.is_multiple_of(self.tiles[side]), "tiles start at multiples of their size");
            of[side][if rows == 1 { 0 } else { sequence * per_row } + range.start / self.tiles[side]]
        }))
    }

    /// Overwrites with `hidden` the scores of key `j` with those `queries` that do not see it.
    #[inline(always)]
    pub(crate) fn hide_queries<R: Copy>(
        &self,
        sequence: usize,
        j: usize,
        queries: &Range<usize>,
        row: &mut [R],
        hidden: R,
    ) {
        self.hide(KEYS, sequence, j, queries, row, hidden);
    }

    /// Overwrites with `hidden` what query `i` does not see in its `row` of scores with `keys`.
    #[inline(always)]
    pub(crate) fn hide_keys<R: Copy>(&self, sequence: usize, i: usize, keys: &Range<usize>, row: &mut [R], hidden: R) {
        self.hide(QUERIES, sequence, i, keys, row, hidden);
    }

    /// Hides in the `row` of one side's token what it has nothing to do with among `others` of the other.
    #[inline(always)]
    fn hide<R: Copy>(&self, side: usize, sequence: usize, own: usize, others: &Range<usize>, row: &mut [R], hidden: R) {
        fill_outside(row, others, &self.beyond(side, &(own..own + 1)), hidden);
        let (first, row) = (others.start, &mut row[..others.len()]);
        let sides = |(q, k): (&'a [i64], &'a [i64])| if side == QUERIES { (q, k) } else { (k, q) };
        if let Some((q, k)) = &self.options.documents {
            let (mine, theirs) = sides((q.row(sequence), k.row(sequence)));
            hide_others(row, &theirs[first..], mine[own], hidden);
        }
        if let Some((q, k)) = &self.options.positions {
            let (mine, theirs) = sides((q.row(sequence), k.row(sequence)));
            let (at, [back, forth]) = (i128::from(mine[own]), self.reach(side));
            let low = back.map_or(i64::MIN, |back| saturate(at - back));
            let high = forth.map_or(i64::MAX, |forth| saturate(at + forth));
            hide_beyond(row, &theirs[first..], (low, high), hidden);
        }
    }
}

fn saturate(x: i128) -> i64 {
    x.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
}

#[inline(always)]
fn fill_outside<R: Copy>(row: &mut [R], tile: &Range<usize>, seen: &Range<usize>, hidden: R) {
    let inside = |x: usize| x.clamp(tile.start, tile.end) - tile.start;
    row[..inside(seen.start)].fill(hidden);
    // To the end of the row: what lies beyond the tile is padding of whole registers.
    row[inside(seen.end)..].fill(hidden);
}

#[inline(always)]
fn hide_others<R: Copy>(row: &mut [R], documents: &[i64], own: i64, hidden: R) {
    for (score, document) in row.iter_mut().zip(documents) {
        *score = if *document == own && own >= 0 { *score } else { hidden };
    }
}

#[inline(always)]
fn hide_beyond<R: Copy>(row: &mut [R], positions: &[i64], (low, high): (i64, i64), hidden: R) {
    for (score, position) in row.iter_mut().zip(positions) {
        *score = if (low..=high).contains(position) { *score } else { hidden };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sequence::{Documents, PerToken};

    const TILE: usize = 4;

    fn tiles(len: usize) -> impl Iterator<Item = Range<usize>> {
        (0..len).step_by(TILE).map(move |start| start..(start + TILE).min(len))
    }

    fn options() -> impl Strategy<Value = (FlashOptions, usize, usize)> {
        let reach = || prop_oneof![Just(None), (1usize..30).prop_map(Some)];
        let ids = || proptest::collection::vec(-1i64..3, 30);
        let places = || proptest::collection::vec(-9i64..40, 30);
        let labels = (proptest::option::of((ids(), ids())), proptest::option::of((places(), places())));
        (any::<bool>(), reach(), reach(), -20i64..20, labels, 1usize..30, 1usize..30).prop_map(
            |(causal, window, lookahead, offset, (documents, positions), q_len, k_len)| {
                let mut options = FlashOptions { causal, window, lookahead, ..FlashOptions::default() };
                options = match positions {
                    Some((q, k)) => options
                        .with_positions(PerToken::shared(q[..q_len].to_vec()), PerToken::shared(k[..k_len].to_vec())),
                    None => options.with_offsets(offset, 0),
                };
                if let Some((q, k)) = documents {
                    let of = |ids: &[i64]| Documents::from_ids(PerToken::shared(ids.to_vec()));
                    options = options.with_cross_documents(of(&q[..q_len]), of(&k[..k_len]));
                }
                (options, q_len, k_len)
            },
        )
    }

    proptest! {
        #[test]
        fn no_visible_pair_is_left_out_and_no_hidden_one_let_in((options, q_len, k_len) in options()) {
            let mask = Mask::new(&options, [q_len, k_len], [TILE; 2]);
            for queries in tiles(q_len) {
                let range = mask.keys(&queries);
                for keys in tiles(k_len) {
                    let pairs: Vec<bool> =
                        queries.clone().flat_map(|i| keys.clone().map(move |j| (i, j))).map(|(i, j)| options.sees(0, i, j)).collect();
                    let outside = keys.end <= range.start || keys.start >= range.end;
                    match mask.cover(0, &queries, &keys) {
                        Cover::Empty => prop_assert!(pairs.iter().all(|seen| !seen)),
                        Cover::Full => prop_assert!(pairs.iter().all(|seen| *seen)),
                        Cover::Part => {}
                    }
                    prop_assert!(!outside || pairs.iter().all(|seen| !seen));
                    // One row at a time, from either side.
                    for i in queries.clone() {
                        let mut row = [true; TILE];
                        mask.hide_keys(0, i, &keys, &mut row, false);
                        for j in keys.clone() {
                            prop_assert_eq!(row[j - keys.start], options.sees(0, i, j));
                        }
                    }
                    for j in keys.clone() {
                        let mut row = [true; TILE];
                        mask.hide_queries(0, j, &queries, &mut row, false);
                        for i in queries.clone() {
                            prop_assert_eq!(row[i - queries.start], options.sees(0, i, j));
                        }
                    }
                }
            }
            for keys in tiles(k_len) {
                let range = mask.queries(&keys);
                let seen = (0..q_len).filter(|i| keys.clone().any(|j| options.sees(0, *i, j)));
                for i in seen {
                    prop_assert!(range.contains(&i));
                }
            }
        }
    }

    /// What a kernel computes: the tiles that it visits.
    fn visited(options: &FlashOptions, len: usize, tile: usize) -> usize {
        let mask = Mask::new(options, [len, len], [tile; 2]);
        let tiles = |range: Range<usize>| (range.start / tile * tile..range.end).step_by(tile);
        let all = |start: usize| start..(start + tile).min(len);
        tiles(0..len)
            .map(|first| {
                let keys = tiles(mask.keys(&all(first)));
                keys.filter(|start| mask.cover(0, &all(first), &all(*start)) != Cover::Empty).count()
            })
            .sum()
    }

    #[test]
    fn the_cost_follows_the_mask() {
        let (len, tile) = (96 * 400, 96);
        let tiles = len / tile;
        assert_eq!(visited(&FlashOptions::full(), len, tile), tiles * tiles);
        assert_eq!(visited(&FlashOptions::causal(), len, tile), tiles * (tiles + 1) / 2);
        // A window of ten tiles: eleven tiles a row of tiles, fewer at the beginning; twice the length, twice the cost.
        let window = FlashOptions::causal().with_window(960);
        let cost = visited(&window, len, tile);
        assert!(cost <= 11 * tiles && cost >= 10 * tiles, "{cost}");
        assert!(visited(&window, 2 * len, tile) <= 22 * tiles);
        let both = FlashOptions::full().with_window(960).with_lookahead(959);
        assert!(visited(&both, len, tile) <= 21 * tiles);
        // Forty documents of ten tiles: forty triangles.
        let documents = FlashOptions::causal().with_documents(Documents::from_lengths(&[960; 40]).unwrap());
        assert_eq!(visited(&documents, len, tile), 40 * 10 * 11 / 2);
        let padded =
            FlashOptions::full().with_documents(Documents::from_lengths(&[960]).unwrap().padded_to(len).unwrap());
        assert_eq!(visited(&padded, len, tile), 100);
    }
}
