//! What must hold for any sizes, offsets and strides.

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_context_parallel::flash::{
    self, Blueprint, DeviceLimits, Family, FlashOptions, Tiles, flash_attention_with_lse, merge, reference,
};
use burn_context_parallel::sequence::{Documents, PerToken};
use common::{close, difference, largest, random, values};
use proptest::prelude::*;
use rstest::rstest;

#[derive(Clone, Debug)]
struct Sizes {
    b: usize,
    g: usize,
    group: usize,
    sq: usize,
    sk: usize,
    d: usize,
    options: FlashOptions,
    /// How k and v lie in memory.
    lie: usize,
    seed: u64,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    // Lengths around the tile size (96) and its fractions as well as tiny ones.
    let length = || prop_oneof![1usize..20, 90usize..103, 180usize..210];
    let options = (any::<bool>(), prop_oneof![Just(None), (-1.5f64..1.5).prop_map(Some)], -30i64..130, -30i64..130);
    let reach = || prop_oneof![3 => Just(None), 2 => (1usize..250).prop_map(Some)];
    let mask =
        (reach(), reach(), prop_oneof![2 => Just(None), 1 => (0.5f64..20.0).prop_map(Some)], 0usize..5, any::<bool>());
    let dim = prop_oneof![1usize..20, Just(16), Just(32), Just(64), Just(80)];
    ((1usize..3, 1usize..3, 1usize..4), length(), length(), dim, options, mask, 0usize..4, any::<u64>()).prop_map(
        |(
            (b, g, group),
            sq,
            sk,
            d,
            (causal, scale, q, k),
            (window, lookahead, softcap, documents, placed),
            lie,
            seed,
        )| {
            let base = if causal { FlashOptions::causal() } else { FlashOptions::full() };
            let mut options = base.with_offsets(q, k);
            options.scale = scale;
            options.window = window;
            options.lookahead = lookahead;
            options.softcap = softcap;
            let mut next = numbers(seed);
            if let Some(ids) = documents.checked_sub(1) {
                let mut side = |len| ids_of(ids, b, len, &mut next);
                let (queries, keys) = (side(sq), side(sk));
                options = options.with_cross_documents(Documents::from_ids(queries), Documents::from_ids(keys));
            }
            if placed {
                let mut side = |len| PerToken::shared((0..len).map(|_| next() % 200 - 20).collect());
                let (queries, keys) = (side(sq), side(sk));
                options = options.with_offsets(0, 0).with_positions(queries, keys);
            }
            Sizes { b, g, group, sq, sk, d, options, lie, seed }
        },
    )
}

/// Whole numbers without a pattern.
fn numbers(seed: u64) -> impl FnMut() -> i64 {
    let mut state = seed | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as i64
    }
}

/// Documents one after the other, long or short; scattered over the sequence; with tokens that belong to none; a row for each sequence.
fn ids_of(kind: usize, batch: usize, len: usize, next: &mut impl FnMut() -> i64) -> PerToken {
    let mut row = |kind: usize| -> Vec<i64> {
        let mut id = 0;
        (0..len)
            .map(|_| match kind {
                0 => {
                    id += i64::from(next() % 70 == 0);
                    id
                }
                1 => {
                    id += i64::from(next() % 4 == 0);
                    if id % 5 == 4 { -1 } else { id }
                }
                _ => next() % 4 - 1,
            })
            .collect()
    };
    match kind {
        3 => PerToken::per_row(&(0..batch).map(|b| row(b % 3)).collect::<Vec<_>>()).unwrap(),
        kind => PerToken::shared(row(kind)),
    }
}

impl Sizes {
    fn inputs(&self, device: &Device, dtype: DType) -> [Tensor<4>; 4] {
        let Self { b, g, sq, sk, d, seed, .. } = *self;
        let q = [b, g * self.group, sq, d];
        let kv = |seed: u64| match self.lie {
            0 => random([b, g, sk, d], seed, device, dtype),
            // [B, S, G, D], as projections leave them
            1 => random([b, sk, g, d], seed, device, dtype).swap_dims(1, 2),
            // part of a longer cache, with heads that are not ours
            2 => random([b, g + 1, sk + 3, d], seed, device, dtype).narrow(1, 1, g).narrow(2, 2, sk),
            // a last dimension that is not contiguous
            _ => random([b, g, d, sk], seed, device, dtype).swap_dims(2, 3),
        };
        let seed = seed % 1_000_000;
        [
            random([b, sq, q[1], d], seed, device, dtype).swap_dims(1, 2),
            kv(seed + 1),
            kv(seed + 2),
            random(q, seed + 3, device, dtype),
        ]
    }
}

type Attention =
    fn(Tensor<4>, Tensor<4>, Tensor<4>, &FlashOptions) -> burn_context_parallel::Result<(Tensor<4>, Tensor<3>)>;

/// out, dq, dk, dv, and lse, for a loss that uses both outputs.
fn everything(attention: Attention, sizes: &Sizes, dtype: DType) -> ([Tensor<4>; 4], Tensor<3>) {
    let device = Device::flex();
    let [q, k, v, d_out] = sizes.inputs(&device, dtype);
    let [q, k, v] = [q, k, v].map(|t| t.autodiff().require_grad());
    let (out, lse) = attention(q.clone(), k.clone(), v.clone(), &sizes.options).unwrap();
    let rows = random(lse.dims(), sizes.seed % 1000, &device, lse.dtype()).autodiff();
    // Rows without keys have no finite log-sum-exp to weigh.
    let empty = lse.clone().inner().equal_elem(f64::NEG_INFINITY);
    let finite = lse.clone().mask_fill(Tensor::from_inner(empty), 0.0);
    let loss = (out.clone().cast(lse.dtype()) * d_out.cast(lse.dtype()).autodiff()).sum() + (finite * rows).sum();
    let grads = loss.backward();
    let [dq, dk, dv] = [q, k, v].map(|t| t.grad(&grads).unwrap());
    ([out.inner(), dq, dk, dv], lse.inner())
}

/// Differences are measured against the largest magnitude of a tensor, but not below 0.1: everything may be masked, and a
/// query that sees one key has gradients that cancel to 0.
fn near<const D: usize>(what: &str, got: &Tensor<D>, wanted: &Tensor<D>, tolerance: f64) -> Result<(), TestCaseError> {
    let (difference, scale) = (difference(got, wanted), largest(wanted).max(0.1));
    prop_assert!(difference <= tolerance * scale, "{}: off by {:e}, largest {:e}", what, difference, scale);
    Ok(())
}

fn compare(sizes: &Sizes, dtype: DType, tolerance: f64) -> Result<(), TestCaseError> {
    // The inputs are random numbers rounded to `dtype`; the oracle sees those, in f64.
    let (got, lse) = everything(flash_attention_with_lse, sizes, dtype);
    let oracle: Attention = |q, k, v, options| {
        reference::attention_with_lse(q.cast(DType::F64), k.cast(DType::F64), v.cast(DType::F64), options)
    };
    let (wanted, wanted_lse) = everything(oracle, sizes, dtype);
    for (name, (got, wanted)) in ["out", "dq", "dk", "dv"].iter().zip(got.iter().zip(&wanted)) {
        near(name, got, wanted, tolerance)?;
    }
    near("lse", &lse, &wanted_lse, tolerance)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_plain_attention_in_f64(sizes in sizes()) {
        compare(&sizes, DType::F64, 1e-11)?;
    }

    #[test]
    fn agrees_with_plain_attention_in_f32(sizes in sizes()) {
        compare(&sizes, DType::F32, 2e-5)?;
    }

    #[test]
    fn halves_are_rounded_once(sizes in sizes(), bf16 in any::<bool>()) {
        let (dtype, unit) = if bf16 { (DType::BF16, 2f64.powi(-8)) } else { (DType::F16, 2f64.powi(-11)) };
        let half = sizes.inputs(&Device::flex(), dtype);
        let wide = half.clone().map(|t| t.cast(DType::F64));
        let ([q, k, v, d_out], options) = (half, &sizes.options);
        let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap();
        let delta = flash::delta(d_out.clone(), out.clone());
        let (dq, dk, dv) = flash::backward(q, k, v, d_out, lse, delta, options).unwrap();

        // In f64, but with the rounded output in delta: that rounding is the caller's, and everything else is f32's.
        let [q, k, v, d_out] = wide;
        let (wanted, lse) = flash::forward(q.clone(), k.clone(), v.clone(), options).unwrap();
        let delta = flash::delta(d_out.clone(), out.clone().cast(DType::F64));
        let wanted_grads = flash::backward(q, k, v, d_out, lse, delta, options).unwrap();
        let tolerance = 2.0 * unit;
        near("out", &out, &wanted, tolerance)?;
        near("dq", &dq, &wanted_grads.0, tolerance)?;
        near("dk", &dk, &wanted_grads.1, tolerance)?;
        near("dv", &dv, &wanted_grads.2, tolerance)?;
    }

    #[test]
    fn the_last_key_and_value_reach_no_earlier_query(sizes in sizes(), last in 0usize..1000) {
        let device = Device::flex();
        let [q, k, v, _] = sizes.inputs(&device, DType::F32);
        let mut options = FlashOptions::causal();
        options.scale = sizes.options.scale;
        let last = last % sizes.sk;
        let bump = |t: Tensor<4>| {
            let [b, g, s, d] = t.dims();
            let tail = random([b, g, s - last, d], 7, &Device::flex(), DType::F32) * 100.0;
            t.slice_assign([0..b, 0..g, last..s, 0..d], tail)
        };
        let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap();
        let (changed, changed_lse) = flash::forward(q, bump(k), bump(v), &options).unwrap();
        let earlier = last.min(sizes.sq);
        if earlier > 0 {
            let same = |t: Tensor<4>| values(&t.narrow(2, 0, earlier));
            prop_assert_eq!(same(out), same(changed));
            let same = |t: Tensor<3>| values(&t.narrow(2, 0, earlier));
            prop_assert_eq!(same(lse), same(changed_lse));
        }
    }

    #[test]
    fn two_blocks_of_keys_merge_into_both(sizes in sizes(), cut in 1usize..1000) {
        let [q, k, v, _] = sizes.inputs(&Device::flex(), DType::F64);
        prop_assume!(sizes.sk > 1);
        let cut = 1 + cut % (sizes.sk - 1);
        let block = |from: usize, n: usize| {
            let part = |values: &PerToken| {
                let rows = (0..values.rows()).map(|row| values.row(row)[from..from + n].to_vec());
                PerToken::per_row(&rows.collect::<Vec<_>>()).unwrap()
            };
            let mut options = sizes.options.clone();
            if let Some((q, k)) = options.documents.take() {
                options = options.with_cross_documents(q, Documents::from_ids(part(k.ids())));
            }
            options = match options.positions.take() {
                Some((q, k)) => options.with_positions(q, part(&k)),
                None => options.with_offsets(sizes.options.q_offset, sizes.options.k_offset + from as i64),
            };
            flash::forward(q.clone(), k.clone().narrow(2, from, n), v.clone().narrow(2, from, n), &options).unwrap()
        };
        let (out, lse) = block(0, sizes.sk);
        let (a, b) = (block(0, cut), block(cut, sizes.sk - cut));
        let (merged, merged_lse) = merge(a.0, a.1, b.0, b.1);
        near("out", &merged, &out, 1e-12)?;
        near("lse", &merged_lse, &lse, 1e-12)?;
    }
}

#[rstest]
fn scores_up_to_ten_thousand_keep_their_accuracy(
    #[values(100.0, 1000.0, 2500.0)] gain: f64,
    #[values(None, Some(3000.0))] softcap: Option<f64>,
) {
    let device = Device::flex();
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| random([1, 2, 130, 64], seed, &device, DType::F32));
    let q = q * gain;
    let mut options = FlashOptions::causal();
    options.softcap = softcap;
    let run = |dtype: DType, attention: Attention| {
        let [q, k, v] = [&q, &k, &v].map(|t| t.clone().cast(dtype).autodiff().require_grad());
        let (out, _) = attention(q.clone(), k.clone(), v.clone(), &options).unwrap();
        let grads = (out.clone() * d_out.clone().cast(dtype).autodiff()).sum().backward();
        (out.inner(), [q, k, v].map(|t| t.grad(&grads).unwrap()))
    };
    let (out, grads) = run(DType::F32, flash_attention_with_lse);
    let (wanted, wanted_grads) = run(DType::F64, reference::attention_with_lse);
    let scores = q.matmul(k.swap_dims(2, 3)) * options.resolved_scale(64);
    let tolerance = (4.0 * 2f64.powi(-24) * largest(&scores)).max(5e-5);
    // Not what f32 knows of such scores: 10^4 times a rounding is 6e-4.
    close("out", &out, &wanted, 1e-5);
    for (got, wanted) in grads.iter().zip(&wanted_grads) {
        close("gradient", got, wanted, tolerance);
    }
}

#[rstest]
#[case::everything_earlier(i64::MAX, i64::MIN, FlashOptions::full())]
#[case::everything_later(i64::MIN, i64::MAX, FlashOptions::causal().with_offsets(0, 1000))]
fn no_offset_overflows(#[case] q_offset: i64, #[case] k_offset: i64, #[case] same_as: FlashOptions) {
    let [q, k, v] = [1, 2, 3].map(|seed| random([1, 1, 100, 8], seed, &Device::flex(), DType::F32));
    let run = |options: FlashOptions| {
        let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap();
        (values(&out), values(&lse))
    };
    let options = FlashOptions::causal().with_offsets(q_offset, k_offset);
    assert_eq!(run(options), run(same_as));
}

#[test]
fn runs_and_thread_counts_agree_in_every_bit() {
    let device = Device::flex();
    let run = || {
        let [q, d_out] = [1, 2].map(|seed| random([2, 4, 300, 24], seed, &device, DType::F32));
        let [k, v] = [3, 4].map(|seed| random([2, 2, 300, 24], seed, &device, DType::F32));
        let options = FlashOptions::causal();
        let (out, lse) = flash::forward(q.clone(), k.clone(), v.clone(), &options).unwrap();
        let delta = flash::delta(d_out.clone(), out.clone());
        let (dq, dk, dv) = flash::backward(q, k, v, d_out, lse, delta, &options).unwrap();
        [out, dq, dk, dv].map(|t| values(&t))
    };
    let first = run();
    for threads in [1, 2, 3, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert!(pool.install(run) == first, "{threads} threads");
    }
}

#[rstest]
fn merging_is_stable_far_apart(
    #[values((200.0, -200.0), (-200.0, 200.0), (f64::NEG_INFINITY, -3.0), (5.0, f64::NEG_INFINITY), (1e4, 1e4))] lse: (
        f64,
        f64,
    ),
) {
    let device = Device::flex();
    let row = |x: f64| Tensor::<3>::full([1, 1, 1], x, (&device, DType::F32));
    let block = |seed, lse: f64| {
        let out = random([1, 1, 1, 4], seed, &device, DType::F32);
        if lse == f64::NEG_INFINITY { out.zeros_like() } else { out }
    };
    let (a, b) = (block(1, lse.0), block(2, lse.1));
    let (out, merged) = merge(a.clone(), row(lse.0), b.clone(), row(lse.1));
    let wanted = match lse {
        (x, y) if x == y => (a + b) / 2.0,
        (x, y) if x > y => a,
        _ => b,
    };
    assert_eq!(values(&out), values(&wanted));
    let analytic = if lse.0 == lse.1 { lse.0 + 2f64.ln() } else { lse.0.max(lse.1) };
    assert_eq!(values(&merged), [f64::from(analytic as f32)]);
}

#[test]
fn merging_nothing_with_nothing_is_nothing() {
    let device = Device::flex();
    let empty =
        || (Tensor::<4>::zeros([1, 1, 2, 4], &device), Tensor::<3>::full([1, 1, 2], f64::NEG_INFINITY, &device));
    let ((a, la), (b, lb)) = (empty(), empty());
    let (out, lse) = merge(a, la, b, lb);
    assert_eq!(values(&out), [0.0; 8]);
    assert_eq!(values(&lse), [f64::NEG_INFINITY; 2]);
}

#[rstest]
#[case::no_keys([2, 4, 3, 8], [2, 2, 0, 8])]
#[case::no_queries([2, 4, 0, 8], [2, 2, 3, 8])]
#[case::no_batch([0, 4, 3, 8], [0, 2, 3, 8])]
#[case::no_heads([2, 0, 3, 8], [2, 0, 3, 8])]
#[case::nothing_visible([1, 2, 3, 8], [1, 1, 4, 8])]
fn empty_inputs_give_empty_results(#[case] q: [usize; 4], #[case] kv: [usize; 4]) {
    let device = Device::flex();
    let zeros = |shape: [usize; 4]| Tensor::<4>::ones(shape, (&device, DType::F32));
    let options = FlashOptions::causal().with_offsets(0, 50);
    let (query, d_out, k, v) = (zeros(q), zeros(q), zeros(kv), zeros(kv));
    let (out, lse) = flash::forward(query.clone(), k.clone(), v.clone(), &options).unwrap();
    assert_eq!((out.dims(), lse.dims()), (q, [q[0], q[1], q[2]]));
    assert!(values(&out).iter().all(|x| *x == 0.0));
    assert!(values(&lse).iter().all(|x| *x == f64::NEG_INFINITY));
    let (expected, expected_lse) =
        reference::attention_with_lse(query.clone(), k.clone(), v.clone(), &options).unwrap();
    assert_eq!((values(&out), values(&lse)), (values(&expected), values(&expected_lse)));
    let delta = flash::delta(d_out.clone(), out);
    let (dq, dk, dv) = flash::backward(query, k, v, d_out, lse, delta, &options).unwrap();
    assert_eq!((dq.dims(), dk.dims(), dv.dims()), (q, kv, kv));
    assert!([dq, dk, dv].iter().all(|t| values(t).iter().all(|x| *x == 0.0)));
}

proptest! {
    /// What is printed can be forced.
    #[test]
    fn blueprints_are_read_as_they_are_written(
        numbers in proptest::array::uniform12(0usize..10_000), block in any::<bool>(), one in any::<bool>()
    ) {
        let tiles = |n: usize| {
            let [vector, own, step, units] = [0, 1, 2, 3].map(|i| numbers[if one { i } else { 4 * n + i }]);
            Tiles { vector, own, step, units }
        };
        let family = if block { Family::Block } else { Family::Rows };
        let blueprint = Blueprint { family, forward: tiles(0), queries: tiles(1), keys: tiles(2) };
        prop_assert_eq!(blueprint.to_string().parse(), Ok(blueprint));
    }
}

#[rstest]
fn other_text_is_no_blueprint(
    #[values(
        "",
        "block",
        "block:",
        "blocks:64x64v4u256",
        "block:64x64v4",
        "block:64x64v4u256,64x64v4u256",
        "block:-64x64v4u256",
        "block:64x64v4u256,",
        "block:64v4x64u256",
        "rows:99999999999999999999x4v1u1",
        " rows:4x4v1u1"
    )]
    text: &str,
) {
    let error = text.parse::<Blueprint>().unwrap_err().to_string();
    assert!(error.contains(&format!("{text:?}")) && error.contains("block:64x64v4u256"), "{error}");
}

/// Those would be read and written beyond their memory, or never end.
#[rstest]
#[case::a_row_of_a_sum_has_no_room("block:1x1v4u1", 64, "a row of a sum is 16 vectors of 4, shared memory has 10")]
#[case::nor_number_by_number("block:4x4v16u16", 256, "a row of a sum is 256 vectors of 1, shared memory has 136")]
#[case::units("rows:64x4v16u4294967296", 64, "4294967296 units a cube, the device has 256 at most")]
#[case::rows("block:4294967296x4294967296v4u256", 64, "own 1024 rows at most")]
#[case::vectors("rows:64x4v32u2", 64, "use a vector of 1, 2, 4, 8 or 16 numbers")]
#[case::dimension("rows:64x4v16u2", 257, "a head dimension of 257")]
fn blueprints_that_no_kernel_can_have(#[case] text: &str, #[case] dim: usize, #[case] message: &str) {
    let blueprint: Blueprint = text.parse().unwrap();
    let error = blueprint.check(&LIMITS, dim).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

/// The smallest and the largest devices have a blueprint for every head dimension.
#[test]
fn every_head_dimension_has_a_blueprint() {
    for (plane, units, shared_bytes) in
        [(1, 1, 0), (1, 64, 32 << 10), (8, 64, 16 << 10), (32, 1024, 48 << 10), (64, 256, 64 << 10)]
    {
        for vector in [1, 4, 16] {
            let limits = DeviceLimits { plane, units, vector, shared_bytes, ..LIMITS };
            for dim in 1..=256 {
                let blueprint = Blueprint::choose(&limits, dim);
                assert_eq!(blueprint.check(&limits, dim), Ok(()), "{limits:?}, {dim}: {blueprint}");
            }
        }
    }
}

const LIMITS: DeviceLimits =
    DeviceLimits { plane: 32, units: 256, vector: 4, shared_bytes: 48 << 10, bindings: 64, wide_addresses: true };
