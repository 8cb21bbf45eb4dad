//! The main thread's part: starts ranks, outlives them, and gives back what burn-train lent.

use std::error::Error as StdError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::train::train::WorkerFailure;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents,
    TrainingError, ValidLoader,
};
use burn_context_parallel::Error;
use burn_context_parallel::group::{LaunchError, launch};

use super::rank::{Lead, Rank};
use super::{ContextParallelStrategy, NAME, Place, SequenceModel, feed};

type Processor<M> = SupervisedTrainingEventProcessor<M>;

/// What all ranks see, and what outlives them.
pub(super) struct Shared<M: LearnerModel> {
    pub interrupter: Interrupter,
    pub num_epochs: usize,
    pub starting_epoch: usize,
    /// Items of a replica in a round.
    pub micro_batches: usize,
    /// The model after the first rank's last whole step.
    latest: Mutex<M>,
    /// Used by the first rank under the lock, so that it is not lost with a rank that does not come back.
    processor: Mutex<Option<Processor<M>>>,
}

impl<M: LearnerModel> Shared<M> {
    pub fn train_event(&self, event: LearnerEvent<<M as TrainStep>::Output>) {
        if let Some(processor) = lock(&self.processor).as_mut() {
            self.interrupter.fail_on_error(processor.process_train(event));
        }
    }

    pub fn valid_event(&self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        if let Some(processor) = lock(&self.processor).as_mut() {
            self.interrupter.fail_on_error(processor.process_valid(event));
        }
    }

    /// Waits until metrics have seen all events.
    pub fn flush(&self) {
        if let Some(processor) = lock(&self.processor).as_mut() {
            self.interrupter.fail_on_error(processor.flush());
        }
    }

    /// Keeps the model for the main thread.
    pub fn publish(&self, model: M) {
        *lock(&self.latest) = model;
    }
}

/// What is under these locks is replaced as a whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M: SequenceModel> SupervisedLearningStrategy<M> for ContextParallelStrategy {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, Processor<M>) {
        let interrupter = components.interrupter.clone();
        if self.fsdp.is_some() && (components.checkpointer.is_some() || components.checkpoint.is_some()) {
            let error = Error::unsupported(
                NAME,
                "a checkpointer of burn-train, which saves what one rank has, with FSDP",
                "train without a checkpointer and without checkpoint(epoch), or without FSDP",
            );
            interrupter.fail(failure(0, error.to_string()));
            return (learner.model(), components.event_processor);
        }
        // Lazy weights are drawn here, once, and not differently on every rank.
        let main = self.device(0, &learner.model());
        learner.fork(&main);
        let shared = Arc::new(Shared {
            interrupter: interrupter.clone(),
            num_epochs: components.num_epochs,
            starting_epoch,
            micro_batches: components.grad_accumulation.unwrap_or(1).max(1),
            latest: Mutex::new(learner.model()),
            processor: Mutex::new(Some(components.event_processor)),
        });
        let lead = Lead {
            train: train.to_device(&main),
            valid: valid.to_device(&main.clone().inner()),
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
            event_store: components.event_store,
        };
        if let Err(error) = self.launch(learner, lead, &shared) {
            interrupter.fail(failure(error.rank().unwrap_or(0), reason(&error)));
        }
        if let Some(interruption) = interrupter.interruption() {
            log::info!("training interrupted: {}", interruption.reason.as_deref().unwrap_or("no reason given"));
        }
        let model = lock(&shared.latest).clone();
        let processor = lock(&shared.processor).take().expect("only this takes it");
        (model, processor)
    }
}

impl ContextParallelStrategy {
    fn launch<M: SequenceModel>(
        &self,
        learner: Learner<M>,
        lead: Lead<M>,
        shared: &Arc<Shared<M>>,
    ) -> Result<(), LaunchError> {
        let (train, train_inboxes) = feed::channels(self.launch.ranks);
        let (valid, valid_inboxes) = feed::channels(self.launch.ranks);
        let model = learner.model();
        let mut lead = Some((lead, train, valid));
        let inboxes = train_inboxes.into_iter().zip(valid_inboxes).enumerate();
        let seeds: Vec<_> = inboxes
            .map(|(rank, inboxes)| Mutex::new(Some((learner.clone(), self.device(rank, &model), inboxes, lead.take()))))
            .collect();
        drop((learner, model));
        let (strategy, shared) = (self.clone(), shared.clone());
        launch(self.launch.clone(), move |world| {
            let seed = lock(&seeds[world.rank()]).take();
            let (learner, device, inboxes, lead) = seed.expect("a rank is started once");
            let place = Place::new(&world, strategy.shape, device)?;
            Rank::start(place, learner, &strategy, shared.clone(), inboxes, lead)?.run()
        })?;
        Ok(())
    }
}

/// burn-train's error of a rank, which it calls a worker's device.
fn failure(rank: usize, message: String) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure { device_id: rank, message }])
}

/// Without the rank, which the failure names.
fn reason(error: &LaunchError) -> String {
    match error {
        LaunchError::Returned { source, .. } => source.to_string(),
        LaunchError::Panicked { message, .. } => message.clone(),
        error => error.source().map_or_else(|| error.to_string(), ToString::to_string),
    }
}
