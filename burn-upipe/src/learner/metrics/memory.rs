//! Memory in use and reserved.

use burn::train::metric::Adaptor;

use super::gauge::{Gauge, gauge_metric};
use crate::learner::{MemoryUse, TokenOutput};

/// The memory of the rank that uses the most, if it is known.
#[derive(Clone, Copy, Debug)]
pub struct MemoryInput(pub Option<MemoryUse>);

impl Adaptor<MemoryInput> for TokenOutput {
    fn adapt(&self) -> MemoryInput {
        MemoryInput(self.memory)
    }
}

const MIB: f64 = (1u64 << 20) as f64;

macro_rules! memory_metric {
    ($(#[$doc:meta])* $metric:ident, $name:literal, $description:literal, $field:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $metric {
            gauge: Gauge,
        }

        impl $metric {
            /// The metric.
            pub fn new() -> Self {
                Self { gauge: Gauge::new($name, Some("MiB"), 1, false) }
            }

            fn reset(&mut self) {
                self.gauge.clear();
            }
        }

        gauge_metric!($metric, MemoryInput, $description, |metric, item| {
            if let Some(memory) = item.0 {
                let now = memory.$field as f64 / MIB;
                metric.gauge.now = Some((now, 1));
                metric.gauge.epoch = Some(metric.gauge.epoch.unwrap_or(0.0).max(now));
            }
        });
    };
}

memory_metric!(
    /// Memory in use at the end of a step's backward pass, of the rank that uses the most; not available where [`MemoryUse::of`] is
    /// `None`.
    MemoryInUseMetric,
    "Memory in use",
    "of the rank that uses the most, after backward",
    in_use
);
memory_metric!(
    /// Memory reserved, of the rank that uses the most: what its device's pools hold, or the most that its heap was.
    MemoryReservedMetric,
    "Memory reserved",
    "of the rank that uses the most: of its pools, or the peak of its heap",
    reserved
);
