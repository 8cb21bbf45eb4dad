//! A renderer for logs: a line a step, a line an epoch.

use std::collections::HashMap;
use std::io::{Write, stdout};

use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};

/// Writes what metrics say to standard output.
#[derive(Default)]
pub struct Lines {
    names: HashMap<MetricId, String>,
    values: Vec<String>,
    split: String,
    items: usize,
    epoch: usize,
}

impl Lines {
    fn note(&mut self, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        let formatted = &entry.serialized_entry.formatted;
        // "epoch 1.2 - batch 1.1": a line of a step shows the step's value.
        let now = formatted.rsplit("batch ").next().unwrap_or(formatted);
        if let Some(name) = self.names.get(&entry.metric_id).filter(|_| !now.contains("N/A")) {
            self.values.push(format!("{name} {}", now.trim()));
        }
    }

    fn line(&mut self, head: String) {
        let values = std::mem::take(&mut self.values).join("  ");
        // A closed pipe is no reason to stop training.
        let _ = writeln!(stdout(), "{head}  {values}");
    }
}

impl MetricsRendererTraining for Lines {
    fn update_train(&mut self, state: MetricState) {
        self.note(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.note(state);
    }

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for Lines {
    fn start(&mut self, epochs: usize, first: usize, _: Option<usize>, _: Option<&str>) {
        self.epoch = first;
        self.line(format!("training for {epochs} epochs"));
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.epoch = epoch + 1;
    }

    fn start_split(&mut self, split: &str, items: usize) {
        (self.split, self.items) = (split.to_owned(), items);
    }

    fn update_split(&mut self, items: usize) {
        self.line(format!("epoch {} {} {items}/{}", self.epoch, self.split, self.items));
    }

    /// Metrics have just been told for the whole epoch.
    fn end_split(&mut self) {
        self.values.clear();
    }

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl MetricsRendererEvaluation for Lines {
    fn update_test(&mut self, _: EvaluationName, state: MetricState) {
        self.note(state);
    }
}

impl EvaluationProgressLogger for Lines {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, name: &str, items: usize) {
        (self.split, self.items) = (name.to_owned(), items);
    }

    fn update_test_progress(&mut self, items: usize) {
        self.line(format!("{} {items}/{}", self.split, self.items));
    }

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for Lines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }
}
