//! What any plan must obey, whatever its numbers.

use burn_context_parallel::group::MeshShape;
use burn_upipe::plan::{
    Accounting, Attention, AttentionChoice, Choices, Compute, Hardware, Limit, Machines, ModelShape, OffloadPlan,
    PlanError, Setup, StatePlace, Techniques, WaitingPlace, device, fit, flops, limit, longest, memory, model, plan,
    time, traffic,
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

/// For a model of so many blocks.
fn techniques(layers: usize, ulysses: usize) -> impl Strategy<Value = Techniques> {
    let tile = prop_oneof![Just(None), Just(Some(512)), Just(Some(4096))];
    let place = prop_oneof![Just(None), Just(Some(WaitingPlace::Host)), Just(Some(WaitingPlace::Disk))];
    let offload = (place, 1usize..5, 1usize..4, prop_oneof![Just(0), Just(0), 1usize..1 << 28]).prop_map(
        |(place, in_flight, every, keep)| {
            let usual = Techniques::all().offload.unwrap();
            place.map(|place| OffloadPlan { place, in_flight, every, ..usual }).map(|plan| OffloadPlan { keep, ..plan })
        },
    );
    let checkpoint = prop_oneof![Just(None), Just(Some(1)), (1..=layers).prop_map(Some)];
    let attention = prop_oneof![
        // Of one rank nothing is exchanged.
        Just(if ulysses == 1 { Attention::Single } else { Attention::Ulysses }),
        Just(Attention::UPipe { per_stage: None }),
        Just(Attention::UPipe { per_stage: Some(2) }),
    ];
    (attention, checkpoint, [tile.clone(), tile.clone(), tile], offload, any::<[bool; 3]>()).prop_map(
        |(attention, checkpoint, [mlp_tile, norm_tile, loss_tile], offload, [fsdp, prefetch, host])| Techniques {
            attention,
            checkpoint,
            mlp_tile,
            norm_tile,
            loss_tile,
            offload: offload.filter(|_| checkpoint.is_some()),
            fsdp,
            prefetch,
            optimizer: if host { StatePlace::Host } else { StatePlace::Device },
        },
    )
}

fn setup() -> impl Strategy<Value = Setup> {
    let sizes = (1usize..4, 1usize..3, 1usize..3, prop_oneof![Just(1usize), 2usize..4], 1usize..200_000, any::<bool>());
    (shape(), sizes).prop_flat_map(|(model, (ulysses, data, batch, accumulate, seq_len, cpu))| {
        techniques(model.layers, ulysses).prop_map(move |techniques| Setup {
            model: model.clone(),
            seq_len: seq_len + 4,
            batch,
            accumulate,
            mesh: MeshShape { data, ulysses, ..MeshShape::default() },
            techniques,
            accounting: if cpu { Accounting::flex(2) } else { machines(data * ulysses).accounting() },
        })
    })
}

fn machines(count: usize) -> Machines {
    Machines { hardware: device("l40s-48g").unwrap(), count }
}

fn peak(setup: &Setup) -> usize {
    memory(setup).unwrap().peak().unwrap().total()
}

/// Whether `one` is no more than `other`, but for what stages, tiles and shards that do not come out even change of a sum: a fiftieth, of
/// plans that are within a tenth of what is measured.
fn no_more(one: usize, other: usize) -> bool {
    one <= other + other / 50
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_longer_sequence_takes_no_less(setup in setup(), more in 1usize..5000) {
        // By whole multiples of the ranks and of all tiles: shards are cut evenly into tiles, which get shorter where one more is needed.
        let step = setup.mesh.ulysses * 4096;
        let longer = Setup { seq_len: setup.seq_len.next_multiple_of(step) + more / 1000 * step, ..setup.clone() };
        let shorter = Setup { seq_len: setup.seq_len.next_multiple_of(step), ..setup };
        prop_assert!(no_more(peak(&shorter), peak(&longer)), "{} shorter, {} longer", peak(&shorter), peak(&longer));
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
                _ if ranks == 1 => Attention::Single,
                _ => Attention::Ulysses,
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
        prop_assert!(no_more(peak(&many), peak(&few)), "{} on {fewer}, {} on {}", peak(&few), peak(&many), setup.mesh.ulysses);
    }

    #[test]
    fn offload_takes_no_more_of_the_device(setup in setup()) {
        let without = Setup { techniques: Techniques { offload: None, ..setup.techniques }, ..setup.clone() };
        prop_assert!(no_more(peak(&setup), peak(&without)), "{} with, {} without", peak(&setup), peak(&without));
        let (Some(offload), Some(blocks)) = (setup.techniques.offload, setup.techniques.checkpoint) else {
            return Ok(());
        };
        let memory = memory(&setup).unwrap();
        let one = setup.batch * setup.local() * setup.model.width * setup.accounting.compute;
        // Every so many of the inputs of checkpoints, but the newest ones that may stay.
        let inputs = setup.model.layers.div_ceil(blocks);
        let leaving = inputs.saturating_sub(offload.keep / one).div_ceil(offload.every) * one;
        if offload.place == WaitingPlace::Disk {
            prop_assert_eq!(memory.disk, leaving);
        }
        if offload.place == WaitingPlace::Host && setup.techniques.optimizer == StatePlace::Device {
            prop_assert_eq!(memory.host, leaving);
        }
    }

    /// A search looks at the smallest of them only.
    #[test]
    fn larger_tiles_take_no_less_and_no_other_time(setup in setup(), small in 1usize..5000, more in 1usize..5000, which in 0usize..3) {
        let with = |tokens: usize| {
            let mut techniques = setup.techniques;
            let tiles = [&mut techniques.mlp_tile, &mut techniques.norm_tile, &mut techniques.loss_tile];
            *tiles.into_iter().nth(which).unwrap() = Some(tokens);
            Setup { techniques, ..setup.clone() }
        };
        let (small, large) = (with(small), with(small + more));
        prop_assert!(no_more(peak(&small), peak(&large)), "{} {}", peak(&small), peak(&large));
        let (one, other) = (memory(&small).unwrap(), memory(&large).unwrap());
        prop_assert_eq!((one.host, one.disk), (other.host, other.disk));
        let machines = machines(setup.ranks());
        prop_assert_eq!(time(&small, &machines).unwrap(), time(&large, &machines).unwrap());
    }

    /// With all else equal, one head a rank and stage. Beside its stages U-Pipe sums the gradients of its own weights, which Ulysses makes when its
    /// buffers are gone: of a few tokens those weigh more. Two stages save half of a part of what is alive, and their sums take up to a
    /// twentieth more than that.
    #[test]
    fn upipe_takes_no_more_than_ulysses(setup in setup()) {
        let with = |attention| Setup { techniques: Techniques { attention, ..setup.techniques }, ..setup.clone() };
        prop_assume!(setup.mesh.ulysses > 1);
        let ModelShape { width, heads, kv_heads, head_dim, .. } = setup.model;
        let weights = 2 * width * (heads + kv_heads) * head_dim * setup.accounting.compute;
        let (upipe, ulysses) = (with(Attention::UPipe { per_stage: None }), with(Attention::Ulysses));
        let sums = if heads.div_ceil(setup.mesh.ulysses) == 2 { peak(&ulysses) / 20 } else { 0 };
        prop_assert!(no_more(peak(&upipe), peak(&ulysses) + weights * 5 / 4 + sums), "{} of U-Pipe, {} of Ulysses", peak(&upipe), peak(&ulysses));
    }

    /// A search looks at more heads a stage only where this fits.
    #[test]
    fn one_head_a_rank_and_stage_takes_no_more_than_several(setup in setup(), each in 1usize..64) {
        let (heads, ranks) = (setup.model.heads, setup.mesh.ulysses);
        prop_assume!(heads > ranks);
        let per_stage = ranks * (1 + each % (heads / ranks));
        let with = |heads| Setup {
            techniques: Techniques { attention: Attention::UPipe { per_stage: Some(heads) }, ..setup.techniques },
            ..setup.clone()
        };
        let (one, several) = (memory(&with(ranks)).unwrap(), memory(&with(per_stage)).unwrap());
        prop_assert_eq!((one.host, one.disk), (several.host, several.disk));
        // A single stage has no output to keep beside it.
        prop_assume!(per_stage < heads);
        prop_assert!(no_more(peak(&with(ranks)), peak(&with(per_stage))), "{} of {ranks}, {} of {per_stage}", peak(&with(ranks)), peak(&with(per_stage)));
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

    /// Beside a walk through all of them.
    #[test]
    fn what_a_search_finds_fits_and_nothing_that_fits_is_faster(setup in setup(), seq_len in 1usize..400) {
        let setup = Setup { seq_len: 1024 * seq_len, ..setup };
        let (machines, typed) = (machines(setup.ranks()), setup.techniques);
        let tiles = |typed: Option<usize>| vec![None, typed.or(Some(1024)), Some(2048)];
        let choices = Choices {
            mesh: vec![setup.mesh],
            attention: AttentionChoice::Held(typed.attention),
            checkpoint: vec![typed.checkpoint, Some(1)],
            mlp_tile: tiles(typed.mlp_tile),
            loss_tile: tiles(typed.loss_tile),
            norm_tile: vec![typed.norm_tile],
            offload: vec![None, typed.offload],
            ..Choices::all(setup.ranks())
        };
        let found = fit(&setup, &machines, &choices, None).unwrap();
        let speed = |setup: &Setup| setup.mesh.data as f64 / time(setup, &machines).unwrap().seconds();
        let mut fastest = None;
        for checkpoint in &choices.checkpoint {
            for offload in &choices.offload {
                for mlp_tile in &choices.mlp_tile {
                    for loss_tile in &choices.loss_tile {
                        for fsdp in &choices.fsdp {
                            for prefetch in &choices.prefetch {
                                for optimizer in &choices.optimizer {
                                    let techniques = Techniques {
                                        checkpoint: *checkpoint,
                                        offload: *offload,
                                        mlp_tile: *mlp_tile,
                                        loss_tile: *loss_tile,
                                        fsdp: *fsdp,
                                        prefetch: *prefetch,
                                        optimizer: *optimizer,
                                        ..typed
                                    };
                                    let one = Setup { techniques, ..setup.clone() };
                                    if one.check().is_ok() && limit(&one, &machines, None).unwrap().is_none() {
                                        fastest = Some(speed(&one).max(fastest.unwrap_or(0.0)));
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        prop_assert_eq!(found.fitting > 0, fastest.is_some());
        let Some(fastest) = fastest else { return Ok(()) };
        prop_assert_eq!(limit(&found.setup, &machines, None).unwrap(), None);
        prop_assert!(speed(&found.setup) >= 0.999 * fastest, "{} {fastest}", speed(&found.setup));
        prop_assert_eq!((found.setup.seq_len, found.setup.mesh, found.setup.batch), (setup.seq_len, setup.mesh, setup.batch));
        prop_assert_eq!(found.setup.techniques.attention, typed.attention);
    }
}

/// With tiles as large as fit, and no larger.
#[test]
fn a_search_takes_the_largest_tiles_that_fit() {
    let machines = Machines { hardware: device("h100-80g").unwrap(), count: 8 };
    let setup = Setup::published(model("llama-3-8b").unwrap(), 5 << 20, 8);
    let held = Choices {
        attention: AttentionChoice::Held(Attention::UPipe { per_stage: None }),
        checkpoint: vec![Some(1)],
        mesh: vec![setup.mesh],
        ..Choices::all(8)
    };
    let found = fit(&setup, &machines, &held, None).unwrap().setup;
    assert_eq!(limit(&found, &machines, None).unwrap(), None);
    let with = |mlp_tile| Setup { techniques: Techniques { mlp_tile, ..found.techniques }, ..found.clone() };
    let fits = |mlp_tile| limit(&with(mlp_tile), &machines, None).unwrap().is_none();
    let largest = [8192, 2048, 512].into_iter().find(|tile| fits(Some(*tile)));
    assert!(largest.is_some());
    assert_eq!(found.techniques.mlp_tile, largest);
}

/// A step that is too slow is no matter of memory.
#[test]
fn a_search_for_less_time_than_there_is_finds_the_fastest() {
    let machines = Machines { hardware: device("h100-80g").unwrap(), count: 8 };
    let setup = Setup::published(model("llama-3-8b").unwrap(), 1 << 20, 8);
    let held = Choices { checkpoint: vec![Some(1)], offload: vec![setup.techniques.offload], ..Choices::all(8) };
    let free = fit(&setup, &machines, &held, None).unwrap();
    let speed = |setup: &Setup| time(setup, &machines).unwrap().seconds() / setup.mesh.data as f64;
    let late = fit(&setup, &machines, &held, Some(1.0)).unwrap();
    assert_eq!((late.fitting, limit(&late.setup, &machines, Some(1.0)).unwrap()), (0, Some(Limit::Time)));
    assert!(speed(&late.setup) <= 1.001 * speed(&free.setup));
}

/// As many as can be written down: an answer, not a refusal.
#[test]
fn what_is_far_too_long_does_not_fit() {
    let machines = Machines { hardware: device("h100-80g").unwrap(), count: 1 };
    let setup = Setup::published(model("llama-3-70b").unwrap(), 1 << 30, 1);
    let plan = plan(&setup, &machines, None).unwrap();
    assert_eq!((plan.fits, plan.binding_limit, plan.max_seq_len), (false, Limit::DeviceMemory, 0));
}

/// U that no power of two is, of heads that no power of two are.
#[test]
fn a_search_looks_at_every_number_of_heads_a_stage() {
    let machines = Machines { hardware: device("h100-80g").unwrap(), count: 1 };
    let setup = Setup::published(model("llama-3.2-3b").unwrap(), 1 << 12, 1);
    let held = |attention| Choices { attention, checkpoint: vec![Some(1)], offload: vec![None], ..Choices::all(1) };
    let tried = |attention| fit(&setup, &machines, &held(attention), None).unwrap().tried;
    let one = tried(AttentionChoice::Held(Attention::UPipe { per_stage: Some(9) }));
    // 24 heads: of 1 to 24 a stage, and for any 1 to 23 or all at once.
    assert_eq!(tried(AttentionChoice::Staged), 24 * one);
    assert_eq!(tried(AttentionChoice::Any), 24 * one);
}

#[test]
fn a_search_over_more_devices_than_there_are_is_refused_at_once() {
    let setup = Setup::published(model("llama-3.2-1b").unwrap(), 1 << 12, 1);
    for count in [usize::MAX, 1_000_000_000_000] {
        let machines = Machines { hardware: device("h100-80g").unwrap(), count };
        assert!(fit(&setup, &machines, &Choices::all(count), None).is_err());
    }
    // And a mesh that leaves no rank.
    let held = Choices { mesh: vec![MeshShape { ulysses: 0, ..MeshShape::default() }], ..Choices::all(1) };
    let machines = Machines { hardware: device("h100-80g").unwrap(), count: 1 };
    let error = fit(&Setup { mesh: held.mesh[0], ..setup }, &machines, &held, None).unwrap_err();
    assert!(error.to_string().contains("ulysses=0 leaves no rank"), "{error}");
}

/// As sheets of data have it: half the speed; and nothing is left of two bytes.
#[test]
fn in_f32_all_is_in_f32() {
    let (bf16, f32) = (device("h100-80g").unwrap(), device("h100-80g").unwrap().computing_in(Compute::F32));
    let setup = |hardware: &Hardware, compute| {
        let machines = Machines { hardware: hardware.clone(), count: 8 };
        let setup = Setup::published(model("llama-3-8b").unwrap(), 1 << 20, 8);
        (Setup { accounting: machines.accounting_in(compute), ..setup }, machines)
    };
    let ((half, on_half), (full, on_full)) = (setup(&bf16, Compute::Bf16), setup(&f32, Compute::F32));
    let part = |setup: &Setup, name| memory(setup).unwrap().peak().unwrap().parts[name];
    let ratio = |name| part(&full, name) as f64 / part(&half, name) as f64;
    assert!((ratio("weights") - 2.0).abs() < 1e-6 && (ratio("optimizer state") - 2.0 / 3.0).abs() < 1e-6);
    assert_eq!(memory(&full).unwrap().host, 2 * memory(&half).unwrap().host);
    assert!(ratio("hidden states") == 2.0 && ratio("attention") > 1.5);
    let seconds = |setup, machines| time(setup, machines).unwrap().compute;
    assert_eq!(seconds(&full, &on_full), 2.0 * seconds(&half, &on_half));
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
        (&|s| (s.seq_len, s.accumulate) = (8, 8_000_000_000), "more bytes than can be counted"),
        (&|s| (s.model.vocab, s.model.width) = (usize::MAX, usize::MAX), "more bytes than can be counted"),
        (&|s| s.model.head_dim = usize::MAX, "more bytes than can be counted"),
        (&|s| s.model.layers = 1 << 40, "1099511627776 blocks"),
        (&|s| s.accounting.overhead = usize::MAX, "an overhead of 18446744073709551615 bytes"),
        (&|s| s.accounting.compute = 0, "elements of 0 bytes"),
        (&|s| s.accounting.compute = 3, "elements of 3 bytes"),
        (&|s| s.accounting.optimizer = usize::MAX, "bytes of optimizer state"),
        (&|s| s.accounting.threads = usize::MAX, "threads of a rank"),
        (&|s| s.accounting.fragmentation = 101, "101 percent"),
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
