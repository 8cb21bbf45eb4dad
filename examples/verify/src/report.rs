//! What was measured, and how it is told.

use std::collections::BTreeMap;
use std::error::Error;

use burn::tensor::TensorData;
use llama::LlamaError;
use serde_json::{Map, Value, json};

use crate::find::{Case, Kind};

/// One comparison.
pub struct Measure {
    /// What was compared; the JSON has the worst of each.
    pub kind: &'static str,
    /// Which tensor.
    pub name: String,
    /// The largest difference, relative to the largest magnitude of the reference.
    pub error: f64,
    /// What it may be.
    pub limit: f64,
}

/// Why a case has no measures.
#[derive(Debug)]
pub enum Trouble {
    /// It asks for what is not built.
    Unsupported(String),
    /// It could not be run.
    Failed(String),
}

impl Trouble {
    /// From any error of the libraries, which may lie under that of the launch.
    pub fn from_error(error: &(dyn Error + 'static)) -> Self {
        let mut cause = Some(error);
        while let Some(inner) = cause {
            let core = inner.downcast_ref::<burn_context_parallel::Error>();
            let unsupported = matches!(core, Some(burn_context_parallel::Error::Unsupported { .. }))
                || inner.downcast_ref::<LlamaError>().is_some_and(LlamaError::is_unsupported);
            if unsupported {
                return Self::Unsupported(inner.to_string());
            }
            cause = inner.source();
        }
        Self::Failed(error.to_string())
    }
}

impl Measure {
    /// Compares `got` with `want`, relative to the largest finite magnitude of `want`.
    pub fn new(kind: &'static str, name: impl Into<String>, got: &TensorData, want: &TensorData, limit: f64) -> Self {
        Self::above(0.0, kind, name, got, want, limit)
    }

    /// [`new`](Self::new), where magnitudes below `floor` count as `floor`.
    pub fn above(
        floor: f64,
        kind: &'static str,
        name: impl Into<String>,
        got: &TensorData,
        want: &TensorData,
        limit: f64,
    ) -> Self {
        Self { kind, name: name.into(), error: relative_error(got, want, floor), limit }
    }

    fn passed(&self) -> bool {
        self.error <= self.limit // false for NaN
    }
}

/// Infinite for different shapes, NaN, and infinities in different places.
fn relative_error(got: &TensorData, want: &TensorData, floor: f64) -> f64 {
    if got.shape() != want.shape() {
        return f64::INFINITY;
    }
    let largest =
        want.iter::<f64>().filter(|value| value.is_finite()).fold(floor, |max: f64, value| max.max(value.abs()));
    let mut worst = 0.0f64;
    for (got, want) in got.iter::<f64>().zip(want.iter::<f64>()) {
        if got == want {
            continue; // equal infinities, too
        }
        let error = (got - want).abs() / largest;
        worst = worst.max(if error.is_nan() { f64::INFINITY } else { error });
    }
    worst
}

/// All cases so far.
#[derive(Default)]
pub struct Report {
    cases: usize,
    passed: usize,
    unsupported: usize,
    worst: BTreeMap<&'static str, f64>,
}

impl Report {
    /// Counts a case, and gives its line.
    pub fn add(&mut self, case: &Case, result: Result<Vec<Measure>, Trouble>) -> String {
        self.cases += 1;
        let kind = match case.kind {
            Kind::Attention => "attention",
            Kind::Model => "model",
            Kind::Damaged(_) => "damaged",
        };
        let head = |verdict: &str| format!("{verdict:<12}{kind:<10} {}", case.name);
        let measures = match result {
            Ok(measures) => measures,
            Err(Trouble::Unsupported(what)) => {
                self.unsupported += 1;
                return format!("{}: {}", head("unsupported"), one_line(&what));
            }
            Err(Trouble::Failed(why)) => return format!("{}: {}", head("FAIL"), one_line(&why)),
        };
        // The worst of each kind: a model has one gradient a parameter.
        let mut worst: Vec<&Measure> = Vec::new();
        for measure in &measures {
            let total = self.worst.entry(measure.kind).or_insert(0.0);
            *total = total.max(measure.error);
            match worst.iter_mut().find(|known| known.kind == measure.kind && known.limit == measure.limit) {
                Some(known) if measure.error > known.error => *known = measure,
                Some(_) => {}
                None => worst.push(measure),
            }
        }
        let passed = !measures.is_empty() && measures.iter().all(Measure::passed);
        self.passed += usize::from(passed);
        let shown: Vec<String> = worst
            .iter()
            .map(|measure| {
                let mark = if measure.passed() { "" } else { "!" };
                format!("{} {:.1e}{mark} (<= {:.0e})", measure.name, measure.error, measure.limit)
            })
            .collect();
        format!("{}: {}", head(if passed { "ok" } else { "FAIL" }), shown.join(", "))
    }

    /// Whether there was a case and none failed.
    pub fn all_passed(&self) -> bool {
        self.cases > 0 && self.passed == self.cases
    }

    /// The last line. JSON has no infinity: such an error is null.
    pub fn json(&self) -> Value {
        let worst: Map<String, Value> =
            self.worst.iter().map(|(kind, error)| ((*kind).to_owned(), json!(error))).collect();
        json!({
            "cases": self.cases,
            "passed": self.passed,
            "failed": self.cases - self.passed - self.unsupported,
            "unsupported": self.unsupported,
            "worst": worst,
        })
    }
}

/// A case has one line.
fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
