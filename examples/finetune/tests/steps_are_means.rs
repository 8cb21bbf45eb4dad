//! A step is one mean over all its targets, however they are split into sequences, micro-batches and ranks.

mod common;

use std::sync::LazyLock;

use common::{bytes, on_bytes};
use finetune::Summary;
use rstest::rstest;

/// Two sequences of 16 bytes: thirteen documents with 3 targets together, three with 13.
static INPUT: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| bytes("a b c d e f g h i j k l mnop qrstu vwxyz ABCDEF".split(' ')));

fn finetune(args: &str) -> Summary {
    on_bytes(INPUT.path(), args)
}

fn close(a: f64, b: f64, relative: f64) -> bool {
    (a - b).abs() <= relative * b.abs()
}

/// The loss of the second step tells the gradients of the first.
#[rstest]
#[case("--accumulate 2 --attention single")]
#[case("--accumulate 2 --ranks 2")]
#[case("--accumulate 2 --ranks 3 --attention ulysses")]
#[case("--batch 2 --ranks 2")]
fn two_micro_batches_are_one_batch_of_both(#[case] args: &str) {
    let rest = "--steps 3 --lr 1e-2 --clip none";
    let expected = finetune(&format!("--batch 2 --attention single {rest}")).steps;
    let found = finetune(&format!("{args} {rest}")).steps;
    assert_eq!(found.len(), 3);
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            close(found.loss, expected.loss, 1e-5) && close(found.grad_norm, expected.grad_norm, 1e-4),
            "{args}: {found:?}, not {expected:?}"
        );
    }
    assert!(expected[2].loss < expected[0].loss - 0.05, "the steps do something: {expected:?}");
}

#[test]
fn the_mean_is_over_targets_and_not_of_means() {
    let loss = |args: &str| finetune(&format!("--steps 1 --attention single {args}")).steps[0].loss;
    let both = loss("--accumulate 2");
    let whole = finetune("--eval --batch 2 --attention single").evaluation.unwrap();
    let first = finetune("--eval --sequences 1 --attention single").evaluation.unwrap();
    assert_eq!((first.valid_tokens, whole.valid_tokens), (3, 16));
    let second = (16.0 * whole.loss - 3.0 * first.loss) / 13.0;
    assert!(close(both, (3.0 * first.loss + 13.0 * second) / 16.0, 1e-5));
    assert!((both - (first.loss + second) / 2.0).abs() > 1e-3, "{first:?} {second}: the example tells them apart");
}

#[rstest]
#[case("--ranks 2")]
#[case("--ranks 3 --attention ulysses --batch 2")]
#[case("--ranks 5 --batch 9 --checkpoint off --loss-tile off")]
fn an_evaluation_is_the_same_on_any_ranks(#[case] args: &str) {
    let expected = finetune("--eval --attention single").evaluation.unwrap();
    let found = finetune(&format!("--eval {args}")).evaluation.unwrap();
    assert!(close(found.loss, expected.loss, 1e-6), "{found:?}, not {expected:?}");
    assert_eq!(found.valid_tokens, expected.valid_tokens);
    assert!(close(found.perplexity, found.loss.exp(), 1e-12));
}

#[test]
fn an_evaluation_is_the_loss_of_the_first_step() {
    let evaluation = finetune("--eval --ranks 2").evaluation.unwrap();
    let step = finetune("--steps 1 --batch 2 --ranks 2").steps[0];
    assert!(close(evaluation.loss, step.loss, 1e-6), "{evaluation:?} {step:?}");
}

#[rstest]
#[case("--epochs 2", 4)]
#[case("--epochs 3 --batch 2", 3)]
#[case("--steps 3 --batch 2", 3)]
#[case("--epochs 2 --sequences 1", 2)]
fn epochs_and_steps_are_as_many_as_asked(#[case] args: &str, #[case] steps: usize) {
    assert_eq!(finetune(args).steps.len(), steps);
}

#[test]
fn the_rate_of_each_step_is_the_schedules() {
    let rates: Vec<f64> =
        finetune("--steps 4 --warmup 2 --schedule cosine --lr 1e-3").steps.iter().map(|step| step.lr).collect();
    assert_eq!(rates[..3], [0.0, 5e-4, 1e-3]);
    assert!(close(rates[3], 5e-4, 1e-12), "{rates:?}");
}

/// The model hardly changes: a step's loss tells which sequence it was.
#[test]
fn a_shuffled_order_is_the_seeds() {
    let losses = |args: &str| -> Vec<f64> {
        let summary = finetune(&format!("--epochs 8 --lr 1e-9 --attention single {args}"));
        summary.steps.iter().map(|step| step.loss).collect()
    };
    let file = losses("--seed 1");
    let shuffled = losses("--seed 1 --data-order shuffle");
    assert_eq!(shuffled, losses("--seed 1 --data-order shuffle"));
    let rising = |losses: &[f64]| -> Vec<bool> { losses.chunks(2).map(|epoch| epoch[0] < epoch[1]).collect() };
    assert_eq!(rising(&file), [rising(&file)[0]; 8]);
    assert!(rising(&shuffled).contains(&true) && rising(&shuffled).contains(&false), "{shuffled:?}");
}
