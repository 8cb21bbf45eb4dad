//! Training under the strategy gives the losses and the weights of Burn's own strategy on one device, on every mesh.

mod tiny;

use std::num::NonZeroUsize;

use burn::tensor::Device;
use burn_context_parallel::fsdp::FsdpConfig;
use burn_context_parallel::group::MeshShape;
use burn_upipe::learner::{ContextParallelStrategy, Sharded};
use rstest::rstest;
use tiny::{Recipe, Tiny, Trained, largest_difference, loader, rows, weights};

const LEN: usize = 21; // no number of ranks here divides it

fn mesh(data: usize, ulysses: usize) -> ContextParallelStrategy {
    ContextParallelStrategy::new(MeshShape { data, ulysses, ..Default::default() }).unwrap()
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// Burn's strategy for one device, whose batches hold what a step of the mesh holds.
fn one_device(recipe: &Recipe) -> Trained<Tiny> {
    let trained = recipe.run(Tiny::new(&device()), None, |training| training);
    assert!(trained.result.error.is_none());
    trained
}

fn assert_same(one: &Trained<Tiny>, losses: &[(f64, usize)], valid: &[(f64, usize)], model: &[f64]) {
    assert_eq!(one.train.len(), losses.len());
    for (step, (wanted, got)) in one.train.iter().zip(losses).enumerate() {
        assert_eq!(wanted.1, got.1, "targets of step {step}");
        assert!((wanted.0 - got.0).abs() <= 1e-5, "loss of step {step}: {} instead of {}", got.0, wanted.0);
    }
    let mean = |losses: &[(f64, usize)]| {
        let sum = losses.iter().map(|(loss, valid)| loss * *valid as f64).sum::<f64>();
        sum / losses.iter().map(|(_, valid)| *valid as f64).sum::<f64>()
    };
    assert!((mean(&one.valid) - mean(valid)).abs() <= 1e-5);
    let start = weights(&Tiny::new(&device()));
    let end = weights(&one.result.model);
    assert!(largest_difference(&start, &end) > 1e-2, "training has changed little: the comparison would say nothing");
    let difference = largest_difference(&end, model);
    assert!(difference <= 1e-5, "weights differ by {difference:e}");
}

#[rstest]
#[case(1, 1)]
#[case(1, 2)]
#[case(2, 1)]
#[case(2, 2)]
#[case(1, 4)]
#[case(1, 3)]
fn losses_and_weights_are_those_of_one_device(#[case] data: usize, #[case] ulysses: usize) {
    let one = one_device(&Recipe::sgd(loader(rows(20, LEN), 2)));
    let recipe = Recipe::sgd(loader(rows(20, LEN), 2 / data));
    let many = recipe.run(Tiny::new(&device()), Some(mesh(data, ulysses).into()), |training| training);
    assert!(many.result.error.is_none(), "{:?}", many.result.error);
    assert_same(&one, &many.train, &many.valid, &weights(&many.result.model));
}

#[rstest]
#[case(1, 1, 4)]
#[case(1, 2, 2)]
#[case(2, 2, 2)]
fn accumulated_micro_batches_are_one_batch(#[case] data: usize, #[case] ulysses: usize, #[case] micro: usize) {
    // 18 rows: the last step has two.
    let one = one_device(&Recipe::sgd(loader(rows(18, LEN), 4)));
    let recipe =
        Recipe { accumulate: NonZeroUsize::new(micro), ..Recipe::sgd(loader(rows(18, LEN), 4 / (data * micro))) };
    let many = recipe.run(Tiny::new(&device()), Some(mesh(data, ulysses).into()), |training| training);
    assert!(many.result.error.is_none(), "{:?}", many.result.error);
    assert_same(&one, &many.train, &many.valid, &weights(&many.result.model));
}

#[rstest]
#[case(2, 1, 7)]
#[case(3, 1, 7)]
#[case(2, 2, 5)]
fn the_last_items_are_learned_from_and_nobody_hangs(#[case] data: usize, #[case] ulysses: usize, #[case] count: usize) {
    let one = one_device(&Recipe::sgd(loader(rows(count, LEN), data)));
    let recipe = Recipe::sgd(loader(rows(count, LEN), 1));
    let many = recipe.run(Tiny::new(&device()), Some(mesh(data, ulysses).into()), |training| training);
    assert!(many.result.error.is_none(), "{:?}", many.result.error);
    assert_same(&one, &many.train, &many.valid, &weights(&many.result.model));
}

#[rstest]
#[case(1, 2, 1)]
#[case(2, 2, 1)]
#[case(2, 1, 2)]
fn shards_train_as_the_whole(#[case] data: usize, #[case] ulysses: usize, #[case] micro: usize) {
    // 10 steps and a smaller one.
    let count = 10 * data * micro + 1;
    let one = one_device(&Recipe::sgd(loader(rows(count, LEN), data * micro)));
    let recipe = Recipe { accumulate: NonZeroUsize::new(micro), ..Recipe::sgd(loader(rows(count, LEN), 1)) };
    let strategy = mesh(data, ulysses).with_fsdp(FsdpConfig::new());
    let many = recipe.run(Sharded::new(Tiny::new(&device())), Some(strategy.into()), |training| training);
    assert!(many.result.error.is_none(), "{:?}", many.result.error);
    assert_same(&one, &many.train, &many.valid, &weights(&many.result.model.into_inner()));
}

#[test]
fn epochs_learning_rates_and_adamw_agree() {
    let recipe = |batch| Recipe { epochs: 3, ..Recipe::adamw(loader(rows(6, LEN), batch)) };
    let one = one_device(&recipe(2));
    let many = recipe(1).run(Tiny::new(&device()), Some(mesh(2, 2).into()), |training| training);
    assert_eq!(many.train.len(), 9);
    assert_same(&one, &many.train, &many.valid, &weights(&many.result.model));
}

#[test]
fn a_limit_on_the_norm_is_one_limit_for_whole_and_sharded_gradients() {
    let recipe = Recipe::sgd(loader(rows(8, LEN), 1));
    let strategy = || mesh(1, 2).with_max_norm(0.05).unwrap();
    let whole = recipe.run(Tiny::new(&device()), Some(strategy().into()), |training| training);
    let fsdp = strategy().with_fsdp(FsdpConfig::new());
    let sharded = recipe.run(Sharded::new(Tiny::new(&device())), Some(fsdp.into()), |training| training);
    let free = recipe.run(Tiny::new(&device()), Some(mesh(1, 2).into()), |training| training);
    let [whole, sharded, free] =
        [weights(&whole.result.model), weights(&sharded.result.model.into_inner()), weights(&free.result.model)];
    assert!(largest_difference(&whole, &sharded) <= 1e-5);
    assert!(largest_difference(&whole, &free) > 1e-3, "the limit has changed nothing");
}

#[test]
fn evaluation_is_the_same_on_any_number_of_ranks() {
    let recipe = Recipe { epochs: 1, valid: loader(rows(7, LEN), 1), ..Recipe::sgd(loader(rows(0, LEN), 1)) };
    let losses: Vec<f64> = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
        .into_iter()
        .map(|(data, ulysses)| {
            let trained = recipe.run(Tiny::new(&device()), Some(mesh(data, ulysses).into()), |training| training);
            assert!(trained.train.is_empty() && !trained.valid.is_empty());
            let targets: usize = trained.valid.iter().map(|(_, valid)| valid).sum();
            trained.valid.iter().map(|(loss, valid)| loss * *valid as f64).sum::<f64>() / targets as f64
        })
        .collect();
    for loss in &losses {
        assert!((loss - losses[0]).abs() <= 1e-6, "{losses:?}");
    }
}
