//! What our metrics have in common: a value of now and one of the epoch, and how both are shown.

use std::sync::Arc;

use burn::train::metric::{
    MetricAttributes, MetricName, NumericAttributes, NumericEntry, SerializedEntry, format_float,
};

/// A named value of now, with one of the epoch so far.
#[derive(Clone, Debug)]
pub(super) struct Gauge {
    pub name: MetricName,
    unit: Option<&'static str>,
    precision: usize,
    higher_is_better: bool,
    /// The value of now, with its weight in an average; `None` before the first, and where it is not known.
    pub now: Option<(f64, usize)>,
    /// The value of the epoch.
    pub epoch: Option<f64>,
}

impl Gauge {
    pub fn new(name: &str, unit: Option<&'static str>, precision: usize, higher_is_better: bool) -> Self {
        Self { name: Arc::new(name.to_owned()), unit, precision, higher_is_better, now: None, epoch: None }
    }

    pub fn attributes(&self) -> MetricAttributes {
        let unit = self.unit.map(str::to_owned);
        NumericAttributes { unit, higher_is_better: self.higher_is_better }.into()
    }

    pub fn clear(&mut self) {
        (self.now, self.epoch) = (None, None);
    }

    pub fn value(&self) -> Option<NumericEntry> {
        self.now.map(|(aggregated_value, count)| NumericEntry::Aggregated { aggregated_value, count })
    }

    pub fn running(&self) -> Option<NumericEntry> {
        self.epoch.map(NumericEntry::Value)
    }

    pub fn last(&self) -> NumericEntry {
        NumericEntry::Final(self.epoch.unwrap_or(f64::NAN))
    }

    /// The entry of a step.
    pub fn step_entry(&self) -> SerializedEntry {
        self.entry(self.value())
    }

    /// The entry of an epoch.
    pub fn epoch_entry(&self) -> SerializedEntry {
        self.entry(self.epoch.map(NumericEntry::Final))
    }

    fn entry(&self, entry: Option<NumericEntry>) -> SerializedEntry {
        let (Some(entry), Some(epoch)) = (entry, self.epoch) else {
            return SerializedEntry::not_available(self.unit);
        };
        let now = self.now.map_or(epoch, |(now, _)| now);
        let unit = self.unit.map_or_else(String::new, |unit| format!(" {unit}"));
        let show = |value| format_float(value, self.precision);
        let formatted = format!("epoch {}{unit} - batch {}{unit}", show(epoch), show(now));
        SerializedEntry::new(formatted, entry.serialize())
    }
}

/// What Burn asks of a metric that is a [`Gauge`] and its input; `$update` changes the gauge.
macro_rules! gauge_metric {
    ($metric:ident, $input:ty, $description:literal, |$this:ident, $item:ident| $update:block) => {
        impl Default for $metric {
            fn default() -> Self {
                Self::new()
            }
        }

        impl burn::train::metric::Metric for $metric {
            type Input = $input;

            fn name(&self) -> burn::train::metric::MetricName {
                self.gauge.name.clone()
            }

            fn description(&self) -> Option<String> {
                Some($description.into())
            }

            fn attributes(&self) -> burn::train::metric::MetricAttributes {
                self.gauge.attributes()
            }

            fn update(
                &mut self,
                item: &Self::Input,
                _: &burn::train::metric::MetricMetadata,
            ) -> Result<burn::train::metric::SerializedEntry, burn::tensor::TensorReadError> {
                let ($this, $item) = (&mut *self, item);
                $update
                Ok(self.gauge.step_entry())
            }

            fn compute(&mut self) -> Result<burn::train::metric::SerializedEntry, burn::tensor::TensorReadError> {
                Ok(self.gauge.epoch_entry())
            }

            fn clear(&mut self) {
                self.reset();
            }
        }

        impl burn::train::metric::Numeric for $metric {
            fn value(&self) -> Option<burn::train::metric::NumericEntry> {
                self.gauge.value()
            }

            fn running_value(&self) -> Option<burn::train::metric::NumericEntry> {
                self.gauge.running()
            }

            fn final_value(&self) -> burn::train::metric::NumericEntry {
                self.gauge.last()
            }
        }
    };
}

pub(super) use gauge_metric;
