//! Tiles that the mask empties are never visited: what lies in them may be anything, and costs nothing.
//!
//! Inside a tile that is partly seen a NaN does reach others, as 0 times NaN: what is poisoned here is a whole tile away from what is seen.

mod common;

use std::ops::Range;

use burn::tensor::{Device, Tensor};
use burn_context_parallel::flash::FlashOptions;
use burn_context_parallel::sequence::{Documents, PerToken};
use common::attention::{Results, bits, inputs, run, to, unequal};
use common::{device, values};
use rstest::rstest;

/// Tokens of the largest tile that any blueprint has by itself.
const TILE: usize = 256;
const NONE: Range<usize> = 0..0;

/// So many tokens of each label.
fn labels(runs: &[(usize, i64)]) -> PerToken {
    PerToken::shared(runs.iter().flat_map(|(count, label)| std::iter::repeat_n(*label, *count)).collect())
}

/// So many tokens that count on from each position.
fn counted(runs: &[(usize, i64)]) -> PerToken {
    PerToken::shared(runs.iter().flat_map(|(count, from)| *from..*from + *count as i64).collect())
}

fn documents(options: FlashOptions, queries: &[(usize, i64)], keys: &[(usize, i64)]) -> FlashOptions {
    let [queries, keys] = [queries, keys].map(|runs| Documents::from_ids(labels(runs)));
    options.with_cross_documents(queries, keys)
}

fn positions(options: FlashOptions, queries: &[(usize, i64)], keys: &[(usize, i64)]) -> FlashOptions {
    options.with_positions(counted(queries), counted(keys))
}

/// All heads' rows of some tokens, filled.
fn fill(tensor: &Tensor<4>, tokens: &Range<usize>, value: f64) -> Tensor<4> {
    let [b, h, _, d] = tensor.dims();
    if tokens.is_empty() {
        return tensor.clone();
    }
    let rows = Tensor::full([b, h, tokens.len(), d], value, &tensor.device());
    tensor.clone().slice_assign([0..b, 0..h, tokens.clone(), 0..d], rows)
}

/// With some queries and keys filled.
fn filled(
    [q, k, v, d_out]: &[Tensor<4>; 4],
    options: &FlashOptions,
    [queries, keys]: [&Range<usize>; 2],
    value: f64,
    device: &Device,
) -> Results {
    let inputs = [fill(q, queries, value), fill(k, keys, value), fill(v, keys, value), fill(d_out, queries, value)];
    run(inputs.each_ref().map(|t| to(t, device)), options)
}

/// Nothing is NaN, and there is something.
fn expect_numbers(case: &str, (tensors, lse): &Results) {
    for (name, tensor) in ["out", "dq", "dk", "dv"].into_iter().zip(tensors) {
        let values = values(tensor);
        assert!(values.iter().all(|x| x.is_finite()), "{case}: {name}");
        assert!(values.iter().any(|x| *x != 0.0), "{case}: {name} is 0");
    }
    assert!(values(lse).iter().all(|x| x.is_finite() || *x == f64::NEG_INFINITY), "{case}: lse");
}

#[rstest]
#[case::later_keys(FlashOptions::causal(), [200, 900], [NONE, 500..900])]
#[case::earlier_queries(FlashOptions::causal().with_offsets(0, 600), [800, 200], [0..340, NONE])]
#[case::keys_behind_a_window(FlashOptions::causal().with_window(40).with_offsets(700, 0), [150, 850], [NONE, 0..400])]
#[case::queries_beyond_a_window(FlashOptions::full().with_window(40), [800, 100], [400..800, NONE])]
#[case::keys_beyond_a_lookahead(FlashOptions::full().with_lookahead(20), [200, 900], [NONE, 500..900])]
#[case::other_documents(
    // Extremes of tiles are compared: documents of the tiles in which two meet must not lie around another.
    documents(FlashOptions::full(), &[(230, 2), (570, 1)], &[(200, 2), (650, 3)]), [800, 850], [490..800, 460..850]
)]
#[case::no_document(
    documents(FlashOptions::causal(), &[(230, 0), (570, -1)], &[(200, 0), (650, -1)]), [800, 850], [490..800, 460..850]
)]
#[case::later_and_earlier_positions(
    positions(FlashOptions::causal(), &[(230, 0), (570, -5000)], &[(200, 0), (650, 10_000)]),
    [800, 850],
    [490..800, 460..850]
)]
#[case::positions_behind_a_window(
    positions(FlashOptions::causal().with_window(40), &[(230, 1 << 40)], &[(650, 0), (200, 1 << 40)]),
    [230, 850],
    [NONE, 0..390]
)]
#[case::documents_and_positions(
    documents(
        positions(FlashOptions::causal(), &[(230, 0), (570, -5000)], &[(850, 0)]), &[(800, 1)], &[(200, 1), (650, 3)]
    ),
    [800, 850],
    [490..800, 460..850]
)]
fn what_nobody_sees_changes_no_bit(
    #[case] options: FlashOptions,
    #[case] lengths: [usize; 2],
    #[case] nobody: [Range<usize>; 2],
) {
    let ([sq, sk], [queries, keys]) = (lengths, nobody);
    let near = |at: usize, of: &Range<usize>| !of.is_empty() && at + TILE >= of.start && at < of.end + TILE;
    let met = (0..sq).flat_map(|i| (0..sk).map(move |j| (i, j))).filter(|(i, j)| options.sees(0, *i, *j));
    assert!(met.into_iter().all(|(i, j)| !near(i, &queries) && !near(j, &keys)), "the case is not what it says");

    let inputs = inputs([1, 4, 2, sq, sk], 16, 21);
    for device in [Device::flex(), device()] {
        let case = format!("{device:?}");
        let zeros = filled(&inputs, &options, [&queries, &keys], 0.0, &device);
        let poisoned = filled(&inputs, &options, [&queries, &keys], f64::NAN, &device);
        expect_numbers(&case, &poisoned);
        assert_eq!(unequal(&bits(poisoned), &bits(zeros)), [""; 0], "{case}");
    }
}

/// A sequence that attends to itself, spoiled at one end: the other end is none the wiser.
#[rstest]
#[case::window(FlashOptions::causal().with_window(40), None)]
#[case::both_ways(FlashOptions::full().with_window(40).with_lookahead(40), None)]
#[case::documents(FlashOptions::full(), Some([350, 150, 150, 650]))]
#[case::positions(
    FlashOptions::causal().with_window(40).with_positions(
        PerToken::shared((0..1300).rev().collect()), PerToken::shared((0..1300).rev().collect())
    ),
    None
)]
fn what_is_far_changes_no_bit(
    #[case] options: FlashOptions,
    #[case] lengths: Option<[usize; 4]>,
    #[values(false, true)] end: bool,
) {
    let len = 1300;
    let (spoiled, kept) = if end { (950..len, 0..394) } else { (0..350, 906..len) };
    let options = match lengths {
        // The documents of both ends, and two between them, since neighbours share a tile.
        Some(mut lengths) => {
            if end {
                lengths.reverse();
            }
            options.with_documents(Documents::from_lengths(&lengths).unwrap())
        }
        None => options,
    };
    let inputs = inputs([1, 2, 1, len, len], 16, 22);
    for device in [Device::flex(), device()] {
        let case = format!("{device:?}");
        let [zeros, poisoned] = [0.0, f64::NAN].map(|value| {
            let (tensors, lse) = filled(&inputs, &options, [&spoiled, &spoiled], value, &device);
            let part = |t: Tensor<4>| t.narrow(2, kept.start, kept.len());
            (tensors.map(part), lse.narrow(2, kept.start, kept.len()))
        });
        expect_numbers(&case, &poisoned);
        assert_eq!(unequal(&bits(poisoned), &bits(zeros)), [""; 0], "{case}");
    }
}
