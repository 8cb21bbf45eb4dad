//! A schedule is a permutation of the query heads, each meets its own key/value head, and nothing is sent twice.

use std::collections::BTreeMap;

use burn_upipe::upipe::Schedule;
use proptest::prelude::*;

/// H, G, P, U: any that a schedule accepts.
fn counts() -> impl Strategy<Value = (usize, usize, usize, usize)> {
    (1usize..=9, 1usize..=8, 1usize..=9)
        .prop_flat_map(|(kv, group, ranks)| (Just(kv * group), Just(kv), Just(ranks), 1..=kv * group))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_query_head_is_served_once((heads, kv, ranks, per_stage) in counts()) {
        let schedule = Schedule::new(heads, kv, ranks, per_stage).unwrap();
        let mut served: Vec<usize> = schedule.stages().iter().flat_map(|stage| stage.queries()).collect();
        served.sort_unstable();
        prop_assert_eq!(served, (0..heads).collect::<Vec<_>>());
        prop_assert_eq!(schedule.stages().len(), heads.div_ceil(per_stage));
        for stage in schedule.stages() {
            prop_assert!(stage.queries().len() <= per_stage);
            if per_stage % ranks == 0 {
                prop_assert!(stage.ranks.iter().all(|rank| rank.queries.len() <= per_stage / ranks));
            }
        }
    }

    /// NeMo Automodel `upipe/layout.py`, Untied-Ulysses: stages whose query heads read another's keys.
    #[test]
    fn a_query_head_meets_its_own_key_value_head((heads, kv, ranks, per_stage) in counts()) {
        let schedule = Schedule::new(heads, kv, ranks, per_stage).unwrap();
        for rank in schedule.stages().iter().flat_map(|stage| &stage.ranks) {
            for head in &rank.queries {
                let own = head / (heads / kv);
                prop_assert!(rank.held.contains(&own), "query head {} without its key/value head {}", head, own);
            }
        }
    }

    #[test]
    fn a_key_value_head_is_sent_once_each_way_to_each_rank_that_needs_it((heads, kv, ranks, per_stage) in counts()) {
        let schedule = Schedule::new(heads, kv, ranks, per_stage).unwrap();
        for rank in 0..ranks {
            let mut arrivals: BTreeMap<usize, usize> = BTreeMap::new();
            let mut departures: BTreeMap<usize, usize> = BTreeMap::new();
            let mut holding: Vec<usize> = Vec::new();
            for stage in schedule.stages() {
                let part = &stage.ranks[rank];
                for head in &part.arriving {
                    *arrivals.entry(*head).or_default() += 1;
                    holding.push(*head);
                }
                prop_assert_eq!(&part.held, &holding, "held is what has arrived and not left");
                for head in &part.leaving {
                    *departures.entry(*head).or_default() += 1;
                    holding.retain(|held| held != head);
                }
            }
            prop_assert!(holding.is_empty(), "everything leaves");
            prop_assert!(arrivals.values().chain(departures.values()).all(|times| *times == 1));
            let needed: Vec<usize> = schedule.split().keys(rank).collect();
            prop_assert_eq!(arrivals.keys().copied().collect::<Vec<_>>(), needed.clone());
            prop_assert_eq!(departures.keys().copied().collect::<Vec<_>>(), needed);
        }
    }

    #[test]
    fn ranks_are_evenly_loaded((heads, kv, ranks, per_stage) in counts()) {
        let schedule = Schedule::new(heads, kv, ranks, per_stage).unwrap();
        let load = |rank: usize| schedule.stages().iter().map(|stage| stage.ranks[rank].queries.len()).sum::<usize>();
        let loads: Vec<usize> = (0..ranks).map(load).collect();
        prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1);
    }
}

#[test]
fn a_stage_width_that_cannot_be_served_says_so() {
    for per_stage in [0, 9] {
        let error = Schedule::new(8, 2, 4, per_stage).unwrap_err().to_string();
        assert!(error.contains(&format!("{per_stage} heads a stage of 8")) && error.contains("use 1 to 8"), "{error}");
    }
    assert!(Schedule::new(8, 3, 4, 4).unwrap_err().to_string().contains("8 query heads, 3 key/value heads"));
}
