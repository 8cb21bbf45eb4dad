//! Whatever ends training ends it on all ranks, at once, and is told.

mod tiny;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use burn::train::checkpoint::FileCheckpointer;
use burn::train::metric::store::EventStoreClient;
use burn::train::{EarlyStoppingStrategy, Interrupter, TrainingError};
use burn_context_parallel::fsdp::FsdpConfig;
use burn_context_parallel::group::{LaunchConfig, MeshShape};
use burn_upipe::learner::{ContextParallelStrategy, SequenceBatch, Sharded};
use rstest::rstest;
use tiny::{Fault, FaultKind, Loader, Recipe, Tiny, largest_difference, loader, rows, weights};

fn mesh(data: usize, ulysses: usize) -> ContextParallelStrategy {
    let limits = LaunchConfig::new(1).with_timeout(Duration::from_secs(60)).with_grace(Duration::from_secs(20));
    ContextParallelStrategy::new(MeshShape { data, ulysses, ..Default::default() }).unwrap().with_launch(limits)
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// A loader that does something before an item.
struct Hooked {
    inner: Loader,
    at: usize,
    hook: Arc<dyn Fn() -> Result<(), DatasetError> + Send + Sync>,
}

struct HookedIterator<'a> {
    inner: Box<dyn DataLoaderIterator<SequenceBatch> + 'a>,
    left: usize,
    hook: &'a (dyn Fn() -> Result<(), DatasetError> + Send + Sync),
}

impl Iterator for HookedIterator<'_> {
    type Item = Result<SequenceBatch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0
            && let Err(error) = (self.hook)()
        {
            return Some(Err(error));
        }
        self.left = self.left.wrapping_sub(1);
        self.inner.next()
    }
}

impl DataLoaderIterator<SequenceBatch> for HookedIterator<'_> {
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
}

impl DataLoader<SequenceBatch> for Hooked {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<SequenceBatch> + 'a> {
        Box::new(HookedIterator { inner: self.inner.iter(), left: self.at, hook: &*self.hook })
    }

    fn num_items(&self) -> usize {
        self.inner.num_items()
    }

    fn to_device(&self, device: &Device) -> Loader {
        Arc::new(Self { inner: self.inner.to_device(device), at: self.at, hook: self.hook.clone() })
    }

    fn slice(&self, start: usize, end: usize) -> Loader {
        Arc::new(Self { inner: self.inner.slice(start, end), at: self.at, hook: self.hook.clone() })
    }
}

fn hooked(at: usize, hook: impl Fn() -> Result<(), DatasetError> + Send + Sync + 'static) -> Loader {
    Arc::new(Hooked { inner: loader(rows(12, 12), 1), at, hook: Arc::new(hook) })
}

#[rstest]
#[case(FaultKind::Panic, 0)]
#[case(FaultKind::Panic, 3)]
#[case(FaultKind::Raise, 0)]
#[case(FaultKind::Raise, 1)]
fn a_rank_that_fails_ends_training_with_its_rank_and_reason(#[case] kind: FaultKind, #[case] rank: usize) {
    let model = Tiny::new(&device()).with_fault(Fault::new(kind, rank, 3));
    let trained = Recipe::sgd(loader(rows(12, 12), 1)).run(model, Some(mesh(2, 2).into()), |training| training);
    match trained.result.error.as_deref() {
        Some(TrainingError::Workers(failures)) => {
            assert_eq!(failures[0].device_id, rank);
            assert!(failures[0].message.contains("the fault of step 3"), "{}", failures[0].message);
        }
        other => panic!("expected the rank's failure, got {other:?}"),
    }
    // Two steps were whole, and the model is that of the second.
    assert!(trained.train.len() >= 2 && trained.result.interrupted.is_none());
    let two =
        Recipe::sgd(loader(rows(4, 12), 1)).run(Tiny::new(&device()), Some(mesh(2, 2).into()), |training| training);
    assert_eq!(largest_difference(&weights(&two.result.model), &weights(&trained.result.model)), 0.0);
}

#[test]
fn a_rank_that_fails_with_shards_ends_training() {
    let model = Tiny::new(&device()).with_fault(Fault::new(FaultKind::Raise, 1, 2));
    let strategy = mesh(1, 3).with_fsdp(FsdpConfig::new());
    let trained =
        Recipe::sgd(loader(rows(12, 12), 1)).run(Sharded::new(model), Some(strategy.into()), |training| training);
    assert!(trained.result.error.unwrap().to_string().contains("the fault of step 2"));
}

#[rstest]
#[case(1, 2)]
#[case(2, 2)]
fn an_interruption_ends_all_ranks_at_the_same_step(#[case] data: usize, #[case] ulysses: usize) {
    let interrupter = Interrupter::new();
    let stop = interrupter.clone();
    let train = hooked(5, move || {
        stop.stop(Some("enough"));
        Ok(())
    });
    let trained = Recipe { epochs: 3, ..Recipe::sgd(train) }.run(
        Tiny::new(&device()),
        Some(mesh(data, ulysses).into()),
        |training| training.with_interrupter(interrupter),
    );
    assert!(trained.result.error.is_none());
    assert_eq!(trained.result.interrupted.unwrap().reason.as_deref(), Some("enough"));
    assert!(trained.train.len() <= 6 / data && trained.train.len() >= 5 / data, "{} steps", trained.train.len());
    assert!(trained.valid.is_empty());
}

#[test]
fn a_loader_that_fails_ends_training_with_its_error() {
    let train = hooked(3, || Err(DatasetError::new(std::io::Error::other("the disk is gone"))));
    let trained = Recipe::sgd(train).run(Tiny::new(&device()), Some(mesh(2, 1).into()), |training| training);
    match trained.result.error.as_deref() {
        Some(TrainingError::Dataset(error)) => assert!(error.to_string().contains("the disk is gone")),
        other => panic!("expected the loader's error, got {other:?}"),
    }
    assert_eq!(trained.train.len(), 1);
}

#[test]
fn a_loader_that_panics_ends_training() {
    let train = hooked(2, || panic!("no such file"));
    let trained = Recipe::sgd(train).run(Tiny::new(&device()), Some(mesh(1, 2).into()), |training| training);
    assert!(trained.result.error.unwrap().to_string().contains("no such file"));
}

#[derive(Clone)]
struct After(usize, Arc<AtomicUsize>);

impl EarlyStoppingStrategy for After {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        self.1.fetch_add(1, Ordering::SeqCst);
        epoch >= self.0
    }
}

#[test]
fn early_stopping_ends_all_ranks_after_its_epoch() {
    let asked = Arc::new(AtomicUsize::new(0));
    let recipe = Recipe { epochs: 5, ..Recipe::sgd(loader(rows(4, 12), 1)) };
    let after = After(2, asked.clone());
    let trained = recipe.run(Tiny::new(&device()), Some(mesh(2, 2).into()), |training| training.early_stopping(after));
    assert!(trained.result.error.is_none() && trained.result.interrupted.is_none());
    assert_eq!((trained.train.len(), asked.load(Ordering::SeqCst)), (2 * 2, 2));
}

#[test]
fn an_empty_loader_is_an_epoch_without_steps() {
    let recipe = Recipe { epochs: 2, valid: loader(rows(0, 12), 1), ..Recipe::sgd(loader(rows(0, 12), 1)) };
    let trained = recipe.run(Tiny::new(&device()), Some(mesh(2, 2).into()), |training| training);
    assert!(trained.result.error.is_none() && trained.train.is_empty() && trained.valid.is_empty());
    assert_eq!(weights(&trained.result.model), weights(&Tiny::new(&device())));
}

#[test]
fn a_checkpoint_of_an_epoch_is_resumed_from() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = |epochs| Recipe { epochs, ..Recipe::adamw(loader(rows(6, 12), 1)) };
    let run = |recipe: Recipe, from: Option<usize>| {
        let path = folder.path().to_owned();
        recipe.run(Tiny::new(&device()), Some(mesh(1, 2).into()), move |training| {
            let file = |name: &str| FileCheckpointer::new(&path, name);
            let training = training.with_custom_checkpointers(file("model"), file("optim"), file("scheduler"));
            match from {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            }
        })
    };
    let whole = recipe(3).run(Tiny::new(&device()), Some(mesh(1, 2).into()), |training| training);
    let _ = run(recipe(2), None);
    let rest = run(recipe(3), Some(2));
    assert_eq!(rest.train.len(), 6);
    assert_eq!(largest_difference(&weights(&whole.result.model), &weights(&rest.result.model)), 0.0);
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let shape = |data, ring, ulysses| MeshShape { data, ring, ulysses };
    assert!(ContextParallelStrategy::new(shape(0, 1, 1)).unwrap_err().to_string().contains("data=0"));
    assert!(ContextParallelStrategy::new(shape(1, 2, 2)).unwrap_err().to_string().contains("ulysses=4"));
    assert!(ContextParallelStrategy::new(shape(usize::MAX, 1, 2)).is_err());
    assert!(ContextParallelStrategy::new(shape(100_000, 1, 1)).is_err());
    assert!(mesh(1, 2).with_devices(vec![device()]).is_err());
    assert!(mesh(1, 2).with_max_norm(f64::NAN).is_err());
    // A model that is not Sharded, and checkpointers that want one rank to have everything.
    let recipe = Recipe::sgd(loader(rows(2, 12), 1));
    let fsdp = || mesh(1, 2).with_fsdp(FsdpConfig::new());
    let trained = recipe.run(Tiny::new(&device()), Some(fsdp().into()), |training| training);
    assert!(trained.result.error.unwrap().to_string().contains("Sharded::new"));
    let model = Sharded::new(Tiny::new(&device()));
    let trained = recipe.run(model, Some(fsdp().into()), |training| training.with_default_checkpointers());
    assert!(trained.result.error.unwrap().to_string().contains("checkpointer"));
}
