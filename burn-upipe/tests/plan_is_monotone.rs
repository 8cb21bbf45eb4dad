//! What any plan must obey, whatever its numbers.

use burn_context_parallel::group::MeshShape;
use burn_upipe::plan::{
    Accounting, Attention, Choices, Hardware, Limit, Machines, ModelShape, OffloadPlan, PlanError, Setup, StatePlace,
    Techniques, WaitingPlace, device, fit, flops, limit, longest, memory, model, plan, time, traffic,
};
use proptest::prelude::*;

fn shape() -> impl Strategy<Value = ModelShape> {
    (1usize..5, 0usize..4, 0usize..3, 1usize..5, 1usize..6, any::<bool>(), any::<bool>()).prop_map(
        |(kv_heads, group, dim, width, layers, tied, qk_norm)| {
            let (heads, head_dim) = ((2 * kv_heads) << group, 32 << dim);
            ModelShape {
                name: "any".to_owned(),
                vocab: 1000 * width,
                width: 256 * width,
                inner: 640 * width,
                layers,
                heads,
                kv_heads: 2 * kv_heads,
                head_dim,
                tied,
                qkv_bias: false,
                qk_norm,
            }
        },
    )
}

fn techniques() -> impl Strategy<Value = Techniques> {
    let tile = prop_oneof![Just(None), Just(Some(512)), Just(Some(4096))];
    let place = prop_oneof![Just(None), Just(Some(WaitingPlace::Host)), Just(Some(WaitingPlace::Disk))];
    (0usize..3, any::<bool>(), [tile.clone(), tile.clone(), tile], place, any::<[bool; 3]>()).prop_map(
        |(attention, checkpoint, [mlp_tile, norm_tile, loss_tile], place, [fsdp, prefetch, host])| Techniques {
            attention: [
                Attention::Ulysses,
                Attention::UPipe { per_stage: None },
                Attention::UPipe { per_stage: Some(2) },
            ][attention],
            checkpoint: checkpoint.then_some(1),
            mlp_tile,
            norm_tile,
            loss_tile,
            offload: place.filter(|_| checkpoint).map(OffloadPlan::to),
            fsdp,
            prefetch,
            optimizer: if host { StatePlace::Host } else { StatePlace::Device },
        },
    )
}

fn setup() -> impl Strategy<Value = Setup> {
    (shape(), techniques(), 1usize..4, 1usize..3, 1usize..3, 1usize..200_000, any::<bool>()).prop_map(
        |(model, techniques, ulysses, data, batch, seq_len, cpu)| Setup {
            model,
            seq_len: seq_len + 4,
            batch,
            accumulate: 1,
            mesh: MeshShape { data, ulysses, ..MeshShape::default() },
            techniques,
            accounting: if cpu { Accounting::flex(2) } else { machines(data * ulysses).accounting() },
        },
    )
}

fn machines(count: usize) -> Machines {
    Machines { hardware: device("l40s-48g").unwrap(), count }
}

fn peak(setup: &Setup) -> usize {
    memory(setup).unwrap().peak().unwrap().total()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_longer_sequence_takes_no_less(setup in setup(), more in 1usize..5000) {
        // By whole multiples of the ranks and of all tiles: shards are cut evenly into tiles, which get shorter where one more is needed.
        let step = setup.mesh.ulysses * 4096;
        let longer = Setup { seq_len: setup.seq_len.next_multiple_of(step) + more / 1000 * step, ..setup.clone() };
        let shorter = Setup { seq_len: setup.seq_len.next_multiple_of(step), ..setup };
        prop_assert!(peak(&longer) >= peak(&shorter));
        prop_assert!(memory(&longer).unwrap().host >= memory(&shorter).unwrap().host);
        let machines = machines(longer.ranks());
        prop_assert!(time(&longer, &machines).unwrap().seconds() >= time(&shorter, &machines).unwrap().seconds());
        prop_assert!(flops(&longer).unwrap().total() >= flops(&shorter).unwrap().total());
    }

    #[test]
    fn on_fewer_ranks_each_holds_no_less(setup in setup(), fewer in 1usize..3) {
        prop_assume!(fewer < setup.mesh.ulysses && setup.mesh.ulysses <= setup.model.heads);
        // As many heads a rank and stage, so that stages are alike; what communicators take is another matter.
        let per_rank = |ranks: usize| Techniques {
            attention: match setup.techniques.attention {
                Attention::UPipe { .. } => Attention::UPipe { per_stage: Some(ranks) },
                other => other,
            },
            ..setup.techniques
        };
        let on = |ulysses: usize| Setup {
            seq_len: setup.seq_len.next_multiple_of(6 * 4096),
            mesh: MeshShape { ulysses, ..setup.mesh },
            techniques: per_rank(ulysses),
            ..setup.clone()
        };
        let (few, many) = (on(fewer), on(setup.mesh.ulysses));
        prop_assert!(peak(&few) >= peak(&many), "{} on {fewer}, {} on {}", peak(&few), peak(&many), setup.mesh.ulysses);
    }

    #[test]
    fn offload_takes_no_more_of_the_device(setup in setup()) {
        let without = Setup { techniques: Techniques { offload: None, ..setup.techniques }, ..setup.clone() };
        prop_assert!(peak(&setup) <= peak(&without), "{} with, {} without", peak(&setup), peak(&without));
        let place = setup.techniques.offload.map(|offload| offload.place);
        let memory = memory(&setup).unwrap();
        let inputs = setup.model.layers * setup.batch * setup.local() * setup.model.width * setup.accounting.compute;
        if place == Some(WaitingPlace::Disk) {
            prop_assert_eq!(memory.disk, inputs);
        }
        if place == Some(WaitingPlace::Host) && setup.techniques.optimizer == StatePlace::Device {
            prop_assert_eq!(memory.host, inputs);
        }
    }

    /// With all else equal, one head a rank and stage, of several stages. Beside its stages U-Pipe sums the gradients of its own weights, which
    /// Ulysses makes when its buffers are gone: of a few tokens those weigh more.
    #[test]
    fn upipe_takes_no_more_than_ulysses(setup in setup()) {
        let with = |attention| Setup { techniques: Techniques { attention, ..setup.techniques }, ..setup.clone() };
        prop_assume!(setup.model.heads >= 2 * setup.mesh.ulysses && setup.mesh.ulysses > 1);
        let ModelShape { width, heads, kv_heads, head_dim, .. } = setup.model;
        let weights = 2 * width * (heads + kv_heads) * head_dim * setup.accounting.compute;
        let (upipe, ulysses) = (with(Attention::UPipe { per_stage: None }), with(Attention::Ulysses));
        prop_assert!(peak(&upipe) <= peak(&ulysses) + weights * 5 / 4, "{} of U-Pipe, {} of Ulysses", peak(&upipe), peak(&ulysses));
    }

    #[test]
    fn the_longest_fits_and_the_next_does_not(setup in setup(), hours in prop::option::of(0.001f64..1.0)) {
        let (machines, seconds) = (machines(setup.ranks()), hours.map(|hours| 3600.0 * hours));
        let found = longest(&setup, &machines, seconds).unwrap();
        let at = |len| limit(&Setup { seq_len: len, ..setup.clone() }, &machines, seconds).unwrap();
        if found.seq_len > 0 {
            prop_assert_eq!(at(found.seq_len), None);
        }
        if found.limit != Limit::None {
            prop_assert_eq!(at(found.seq_len + setup.mesh.ulysses), Some(found.limit));
        }
    }

    /// Parts add up, phase by phase; the peak is the largest of them.
    #[test]
    fn parts_add_up(setup in setup()) {
        let plan = plan(&setup, &machines(setup.ranks()), None).unwrap();
        prop_assert_eq!(plan.parts.values().sum::<usize>(), plan.device_bytes_peak);
        prop_assert_eq!(plan.phases.iter().map(|phase| phase.bytes).max(), Some(plan.device_bytes_peak));
        for phase in &plan.phases {
            prop_assert_eq!(phase.parts.values().sum::<usize>(), phase.bytes);
        }
        prop_assert!(plan.fits == (plan.device_bytes_peak <= plan.device_bytes_limit && plan.host_bytes <= plan.host_bytes_limit
            && plan.disk_bytes <= plan.disk_bytes_limit));
        prop_assert!(!plan.fits || plan.max_seq_len > 0);
    }

    /// Bytes sent are bytes received, over all ranks of one sequence.
    #[test]
    fn what_is_sent_grows_with_ranks_and_is_nothing_on_one(setup in setup()) {
        let alone = Setup { mesh: MeshShape::default(), ..setup.clone() };
        prop_assert!(traffic(&alone, 0).unwrap().is_empty());
        let parts = traffic(&setup, setup.ranks() - 1).unwrap();
        prop_assert_eq!(parts.is_empty(), setup.ranks() == 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn what_a_search_finds_fits_and_nothing_that_is_held_is_faster(setup in setup(), seq_len in 1usize..400) {
        let setup = Setup { seq_len: 1024 * seq_len, ..setup };
        let machines = machines(setup.ranks());
        let found = fit(&setup, &machines, &Choices::all(setup.ranks()), None).unwrap();
        if found.fitting == 0 {
            return Ok(());
        }
        prop_assert_eq!(limit(&found.setup, &machines, None).unwrap(), None);
        prop_assert_eq!(found.setup.seq_len, setup.seq_len);
        let speed = |setup: &Setup| setup.mesh.data as f64 / time(setup, &machines).unwrap().seconds();
        if limit(&setup, &machines, None).unwrap().is_none() {
            // One of those that were searched, but for the sizes of tiles and stages.
            prop_assert!(speed(&found.setup) >= 0.999 * speed(&setup));
        }
        // Held to what was found, it finds the same.
        let held = Choices {
            mesh: vec![found.setup.mesh],
            attention: Some(vec![found.setup.techniques.attention]),
            ..Choices::all(setup.ranks())
        };
        prop_assert!(fit(&setup, &machines, &held, None).unwrap().fitting <= found.fitting);
    }
}

#[test]
fn what_cannot_run_is_an_error_with_its_numbers() {
    let good = Setup::published(model("llama-3-8b").unwrap(), 1 << 20, 8);
    let wrong = |change: &dyn Fn(&mut Setup)| {
        let mut setup = good.clone();
        change(&mut setup);
        let error = setup.check().unwrap_err();
        assert_eq!(memory(&setup).map(drop).unwrap_err().to_string(), error.to_string());
        error
    };
    for (change, expected) in [
        (
            &(|s: &mut Setup| s.mesh.ring = 2) as &dyn Fn(&mut Setup),
            "ring=2 is not built yet: use ring=1 and ulysses=16",
        ),
        (&|s| s.mesh.data = 0, "data=0"),
        (&|s| s.seq_len = 0, "sequence length of 0"),
        (&|s| s.seq_len = 7, "7 tokens"),
        (&|s| s.seq_len = 1 << 33, "8589934592 tokens"),
        (&|s| s.model.kv_heads = 5, "32 query heads, 5 key/value heads"),
        (&|s| s.techniques.attention = Attention::Single, "ulysses=8"),
        (&|s| s.techniques.attention = Attention::UPipe { per_stage: Some(0) }, "0 heads a stage"),
        (&|s| s.techniques.checkpoint = Some(33), "33 blocks in a model of 32"),
        (&|s| s.techniques.checkpoint = None, "offload to the host"),
        (&|s| s.techniques.mlp_tile = Some(0), "tile of 0"),
        (&|s| s.batch = 1 << 40, "more bytes than can be counted"),
        (&|s| s.model.width = 1 << 50, "more bytes than can be counted"),
        (&|s| s.mesh.ulysses = 5000, "5000"),
    ] {
        let text = wrong(change).to_string();
        assert!(text.contains(expected), "{text:?} has no {expected:?}");
    }
    assert!(matches!(wrong(&|s| s.mesh.ring = 2), PlanError::NotBuilt { .. }));
    let error = plan(&good, &machines(6), None).unwrap_err().to_string();
    assert!(error.contains("ulysses=8 needs 8 ranks, 6 were launched"), "{error}");
}

#[test]
fn threads_share_the_memory_of_their_host() {
    let machine = |count| Machines { hardware: Hardware::cpu("this", 8 << 30, 1 << 40, 4), count };
    let setup = |ranks| Setup {
        accounting: machine(ranks).accounting(),
        ..Setup::published(model("qwen3-0.6b").unwrap(), 1, ranks)
    };
    let longest = |ranks| longest(&setup(ranks), &machine(ranks), None).unwrap();
    // More ranks, but no more memory.
    assert!(longest(4).seq_len <= longest(1).seq_len + 4, "{:?} {:?}", longest(4), longest(1));
}
