//! Whatever tiles are forced, attention is what it is on a Flex device; and of what a blueprint says, only the forward pass's steps change a bit.
#![cfg(feature = "cube")]

mod common;

use burn_context_parallel::flash::{self, Blueprint, Family, FlashOptions};
use burn_context_parallel::sequence::{Documents, PerToken};
use common::attention::{Draw, agree, bits, inputs, options, run, sizes, there, unequal};
use rstest::rstest;

/// The device's own blueprint for a head dimension.
fn own(dim: usize) -> Blueprint {
    let like = there(&inputs([1; 5], dim, 0)[0]);
    flash::blueprint_for(&like, &like, &FlashOptions::full()).unwrap().expect("a CubeCL device")
}

/// Of the device's family: the first list for `rows`, with no more units than the device has, the second for `block`.
fn of_family<const N: usize>(dim: usize, rows: [&str; N], block: [&str; N]) -> [Blueprint; N] {
    let own = own(dim);
    if own.family != Family::Rows {
        return block.map(|text| text.parse().unwrap());
    }
    rows.map(|text| {
        let mut blueprint: Blueprint = text.parse().unwrap();
        for tiles in [&mut blueprint.forward, &mut blueprint.queries, &mut blueprint.keys] {
            tiles.units = tiles.units.min(own.forward.units);
        }
        blueprint
    })
}

#[rstest]
#[case(0)]
#[case(1)]
#[case(2)]
#[case(3)]
#[case(4)]
fn forced_tiles_give_what_flex_gives(#[case] which: usize) {
    let dim = 20;
    // The smallest; a step that divides no tile of labels; vectors as wide as may be; all that registers may hold; other ones in each kernel.
    let rows = ["rows:1x1v1u1", "rows:12x3v4u2", "rows:16x4v16u2", "rows:32x8v4u2", "rows:24x5v8u2,8x1v2u1,16x2v8u2"];
    let block = [
        "block:4x4v1u16",
        "block:16x48v4u64",
        "block:16x16v4u256",
        "block:32x32v2u64",
        "block:8x24v1u64,32x16v4u64,24x8v2u64",
    ];
    let blueprint = of_family(dim, rows, block)[which];
    let mut draw = Draw(9000 + which as u64);
    for (turn, (documents, positions)) in
        [(false, false), (true, false), (false, true), (true, true)].into_iter().enumerate()
    {
        let sizes = sizes(&mut draw);
        let options = options(&mut draw, sizes, documents, positions, turn == 1);
        let inputs = inputs(sizes, dim, 40 + turn as u64);
        let forced = options.clone().with_blueprint(blueprint);
        let got = run(inputs.each_ref().map(there), &forced);
        agree(&format!("{blueprint} {sizes:?} {options:?}"), got, run(inputs, &options), 2e-5);
    }
}

/// With own rows, vectors and units as changed, or with other steps in the backward pass alone.
#[rstest]
fn other_tiles_give_the_same_bits(#[values(false, true)] labels: bool) {
    let (dim, len) = (24, 200);
    let rows = [
        "rows:32x4v16u2",
        "rows:48x4v16u2",
        "rows:96x4v16u2",
        "rows:16x4v4u1",
        "rows:8x4v8u1",
        "rows:32x4v16u2,16x3v8u2,64x8v16u1",
    ];
    let block = [
        "block:32x32v4u64",
        "block:16x32v4u64",
        "block:64x32v4u64",
        "block:32x32v1u64",
        "block:8x32v2u64",
        "block:32x32v4u64,16x16v4u64,32x16v1u64",
    ];
    let mut options = FlashOptions::causal().with_window(90);
    if labels {
        options = options
            .with_documents(Documents::from_lengths(&[70, 55, 75]).unwrap())
            .with_positions(PerToken::shared((0..200).collect()), PerToken::shared((0..200).collect()));
    }
    let inputs = inputs([1, 4, 2, len, len], dim, 50).each_ref().map(there);
    let all = of_family(dim, rows, block)
        .map(|blueprint| (blueprint, bits(run(inputs.clone(), &options.clone().with_blueprint(blueprint)))));
    for (blueprint, other) in &all[1..] {
        assert_eq!(unequal(other, &all[0].1), [""; 0], "{blueprint} and {}", all[0].0);
    }
}

/// That the test above sees what it says: sums in steps of another length are rounded elsewhere.
#[test]
fn other_steps_of_the_forward_pass_round_elsewhere() {
    let dim = 24;
    let texts = (["rows:32x4v16u2", "rows:32x8v16u2"], ["block:32x32v4u64", "block:32x16v4u64"]);
    let inputs = inputs([1, 4, 2, 200, 200], dim, 50).each_ref().map(there);
    let [a, b] = of_family(dim, texts.0, texts.1)
        .map(|blueprint| bits(run(inputs.clone(), &FlashOptions::causal().with_blueprint(blueprint))));
    assert!(unequal(&a, &b).contains(&"out"));
}
