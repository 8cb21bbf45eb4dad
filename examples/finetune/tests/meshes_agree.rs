//! The data axis changes who computes what, not what is computed: losses are those of one rank, on any mesh.

mod common;

use std::sync::LazyLock;

use common::{UNEVEN, bytes, documents, on_bytes};
use finetune::{StepMetrics, Summary};
use rstest::rstest;

static INPUT: LazyLock<tempfile::TempDir> = LazyLock::new(|| bytes(documents(&UNEVEN)));

fn finetune(args: &str) -> Summary {
    on_bytes(INPUT.path(), args)
}

/// Seven sequences, five a step: steps of five and two in turn, so that four replicas lack sequences in every one of them.
const STEPS: &str = "--batch 1 --accumulate 5 --steps 5 --lr 1e-2 --clip 1.0";

static ONE_RANK: LazyLock<Vec<StepMetrics>> =
    LazyLock::new(|| finetune(&format!("{STEPS} --attention single --checkpoint off")).steps);

#[rstest]
#[case("--mesh data=1,ulysses=1")]
#[case("--mesh data=2,ulysses=1")]
#[case("--mesh data=1,ulysses=2")]
#[case("--mesh data=2,ulysses=2")]
#[case("--mesh data=4,ulysses=1")]
#[case("--mesh data=1,ulysses=4")]
#[case("--mesh data=4 --attention single")]
#[case("--mesh data=3,ulysses=2 --attention ulysses --ranks 6")]
fn losses_are_those_of_one_rank_on_any_mesh(#[case] mesh: &str) {
    let steps = finetune(&format!("{STEPS} {mesh}")).steps;
    assert_eq!(steps.len(), 5);
    for (step, expected) in steps.iter().zip(&*ONE_RANK) {
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
        assert!(
            close(step.loss, expected.loss) && close(step.grad_norm, expected.grad_norm),
            "{mesh}: {step:?}, on one rank {expected:?}"
        );
    }
}

/// What the comparison above rests on: the sequences have unequal targets, and the steps do something.
#[test]
fn one_rank_learns_from_sequences_of_unequal_targets() {
    let targets: Vec<usize> = (1..=7)
        .map(|sequences| finetune(&format!("--eval --attention single --sequences {sequences}")).evaluation.unwrap())
        .scan(0, |before, evaluation| {
            Some(evaluation.valid_tokens - std::mem::replace(before, evaluation.valid_tokens))
        })
        .collect();
    assert!(targets.iter().min().unwrap() * 2 < *targets.iter().max().unwrap(), "{targets:?}");
    let losses: Vec<f64> = ONE_RANK.iter().map(|step| step.loss).collect();
    assert!(losses[2] < losses[0] - 0.05 && losses[3] < losses[1] - 0.05, "{losses:?}");
}

/// A batch that is larger than a replica's part, and one that does not divide it.
#[rstest]
#[case("--batch 5", "--mesh data=2,ulysses=2")]
#[case("--batch 3 --accumulate 2", "--mesh data=2")]
#[case("--batch 2 --accumulate 3 --dtype f32 --loss-tile 3", "--mesh data=3,ulysses=2 --heads-per-stage 4")]
fn a_step_is_the_same_however_it_is_dealt(#[case] step: &str, #[case] mesh: &str) {
    let run = |mesh: &str| finetune(&format!("{step} --steps 3 --lr 1e-2 {mesh}")).steps;
    for (found, expected) in run(mesh).iter().zip(run("--attention single")) {
        assert!((found.loss - expected.loss).abs() <= 1e-5 * expected.loss, "{found:?}, on one rank {expected:?}");
    }
}

#[rstest]
#[case("--mesh data=2,ulysses=2")]
#[case("--mesh data=4 --batch 2")]
#[case("--mesh data=3,ulysses=1 --batch 18446744073709551615 --attention single")]
fn an_evaluation_is_the_same_on_any_mesh(#[case] args: &str) {
    let expected = finetune("--eval --attention single").evaluation.unwrap();
    let found = finetune(&format!("--eval {args}")).evaluation.unwrap();
    assert!((found.loss - expected.loss).abs() <= 1e-6 * expected.loss, "{found:?}, not {expected:?}");
    assert_eq!(found.valid_tokens, expected.valid_tokens);
}
