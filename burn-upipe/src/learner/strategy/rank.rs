//! One rank's training: the same loop on all of them, with a leader among them.

use std::sync::Arc;
use std::time::Instant;

use burn::optim::GradientsAccumulator;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, InferenceStep, Learner, LearnerEvent, LearnerModel, LearningCheckpointer, TrainLoader,
    TrainStep, TrainingItem, ValidLoader,
};
use burn_context_parallel::Result;
use burn_context_parallel::attention::scope;

use super::feed::{Inbox, Next, Outboxes, Reader, take};
use super::fit::Shared;
use super::place::Place;
use super::states;
use super::{ContextParallelStrategy, SequenceModel};
use crate::learner::training::Holding;
use crate::learner::{RankOutput, SequenceInput, StepReport};
use crate::profile::heap;

/// What only the first rank has.
pub(super) struct Lead<M: LearnerModel> {
    pub train: TrainLoader<M>,
    pub valid: ValidLoader<M>,
    pub checkpointer: Option<LearningCheckpointer<M>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub event_store: Arc<EventStoreClient>,
}

type TrainInput<M> = <M as TrainStep>::Input;
type ValidInput<M> = <M as InferenceStep>::Input;
type Inboxes<M> = (Inbox<TrainInput<M>>, Inbox<ValidInput<M>>);
type Leading<M> = (Lead<M>, Outboxes<TrainInput<M>>, Outboxes<ValidInput<M>>);

pub(super) struct Rank<M: LearnerModel> {
    place: Place,
    learner: Learner<M>,
    holding: Holding,
    max_norm: Option<f64>,
    shared: Arc<Shared<M>>,
    inboxes: Inboxes<M>,
    lead: Option<Leading<M>>,
    /// Its allocations are counted as this rank's.
    _heap: heap::Owned,
}

impl<M: SequenceModel> Rank<M> {
    pub fn start(
        place: Place,
        mut learner: Learner<M>,
        strategy: &ContextParallelStrategy,
        shared: Arc<Shared<M>>,
        inboxes: Inboxes<M>,
        lead: Option<Leading<M>>,
    ) -> Result<Self> {
        let _heap = heap::own(place.world().rank());
        let holding = states::prepare(&place, strategy.fsdp.as_ref(), &mut learner)?;
        let rank = Self { place, learner, holding, max_norm: strategy.max_norm, shared, inboxes, lead, _heap };
        rank.publish(rank.learner.model());
        Ok(rank)
    }

    pub fn run(mut self) -> Result<()> {
        for epoch in self.shared.starting_epoch..=self.shared.num_epochs {
            if self.train(epoch)? == Next::Stop {
                break;
            }
            if self.validate(epoch)? == Next::Stop {
                break;
            }
            let next = self.conclude(epoch);
            if next.agree(self.place.world())? != Next::Go {
                break;
            }
        }
        let whole = states::whole(&self.holding, self.learner.model())?;
        self.publish(whole);
        Ok(())
    }

    fn train(&mut self, epoch: usize) -> Result<Next> {
        let shared = self.shared.clone();
        let lead = self.lead.as_ref().map(|(lead, outboxes, _)| (lead.train.clone(), outboxes.clone()));
        let mut reader = lead.as_ref().map(|(loader, outboxes)| {
            shared.train_event(LearnerEvent::StartSplit { epoch_number: epoch, total_items: loader.num_items() });
            let (shape, micro_batches) = (self.place.mesh().shape(), shared.micro_batches);
            Reader { loader: loader.iter(), outboxes, shape, micro_batches }
        });
        let mut iteration = 0;
        let mut since = Instant::now();
        let end = loop {
            let next = reader.as_mut().map_or(Next::Go, |reader| reader.next(&shared.interrupter));
            let next = next.agree(self.place.world())?;
            if next != Next::Go {
                break next;
            }
            let round = take(&self.inboxes.0)?;
            iteration += 1;
            let output = self.step(round.items, round.total, &mut since)?;
            if reader.is_some() {
                let rate = Some(self.learner.lr_current());
                let item = TrainingItem::new(output, round.progress, Some(iteration), rate);
                shared.train_event(LearnerEvent::ProcessedItem(item));
            }
        };
        if reader.is_some() {
            shared.train_event(LearnerEvent::EndSplit(epoch));
        }
        Ok(end)
    }

    /// One optimizer step. `since` is when the one before was measured: between two measurements lies all that a step takes.
    fn step(
        &mut self,
        items: Vec<TrainInput<M>>,
        total: usize,
        since: &mut Instant,
    ) -> Result<<M as TrainStep>::Output> {
        let model = self.learner.model();
        let mut gradients = GradientsAccumulator::new();
        let mut outputs = Vec::with_capacity(items.len());
        for item in items {
            let part = item.shard(&self.place, total)?;
            let context = part.context(&self.place)?;
            self.holding.begin(&model);
            let output = scope(Some(context), || TrainStep::step(&model, part));
            gradients.accumulate(&model, output.grads);
            outputs.push(output.item);
        }
        let mut gradients = self.holding.sum(gradients.grads(), &model)?;
        if let Some(max_norm) = self.max_norm {
            let norm;
            (gradients, norm) = self.holding.clip(gradients, &model, max_norm)?;
            log::debug!("norm of gradients: {norm}");
        }
        let elapsed = std::mem::replace(since, Instant::now()).elapsed();
        let output = RankOutput::over_ranks(outputs, &StepReport::new(&self.place, elapsed))?;
        drop(model);
        self.learner.lr_step();
        self.learner.optimizer_step(gradients);
        self.publish(self.learner.model());
        Ok(output)
    }

    fn validate(&mut self, epoch: usize) -> Result<Next> {
        let shared = self.shared.clone();
        let place = self.place.without_autodiff();
        let model = self.learner.model().valid();
        let lead = self.lead.as_ref().map(|(lead, _, outboxes)| (lead.valid.clone(), outboxes));
        let mut reader = lead.as_ref().map(|(loader, outboxes)| {
            shared.valid_event(LearnerEvent::StartSplit { epoch_number: epoch, total_items: loader.num_items() });
            Reader { loader: loader.iter(), outboxes, shape: place.mesh().shape(), micro_batches: 1 }
        });
        let mut iteration = 0;
        let end = loop {
            let next = reader.as_mut().map_or(Next::Go, |reader| reader.next(&shared.interrupter));
            let next = next.agree(place.world())?;
            if next != Next::Go {
                break next;
            }
            let round = take(&self.inboxes.1)?;
            iteration += 1;
            let since = Instant::now();
            let mut outputs = Vec::with_capacity(round.items.len());
            for item in round.items {
                let part = item.shard(&place, round.total)?;
                let context = part.context(&place)?;
                outputs.push(scope(Some(context), || InferenceStep::step(&model, part)));
            }
            let output = RankOutput::over_ranks(outputs, &StepReport::new(&place, since.elapsed()))?;
            if reader.is_some() {
                let item = TrainingItem::new(output, round.progress, Some(iteration), None);
                shared.valid_event(LearnerEvent::ProcessedItem(item));
            }
        };
        if reader.is_some() {
            shared.valid_event(LearnerEvent::EndSplit(epoch));
            shared.train_event(LearnerEvent::EndEpoch(epoch));
        }
        Ok(end)
    }

    /// What the leader does after an epoch, and what it thinks comes next.
    fn conclude(&mut self, epoch: usize) -> Next {
        let Some((lead, ..)) = &mut self.lead else { return Next::Go };
        if lead.checkpointer.is_some() || lead.early_stopping.is_some() {
            self.shared.flush();
        }
        if self.shared.interrupter.should_stop() {
            return Next::Stop;
        }
        if let Some(checkpointer) = &mut lead.checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, &lead.event_store);
        }
        let early_stopping = lead.early_stopping.as_mut();
        if early_stopping.is_some_and(|early_stopping| early_stopping.should_stop(epoch, &lead.event_store)) {
            return Next::End;
        }
        Next::Go
    }

    /// Keeps the model for whoever asks for it when this rank is gone.
    fn publish(&self, model: M) {
        if self.lead.is_some() {
            self.shared.publish(model);
        }
    }
}
