//! Whether weights are numbers.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::model::Llama;
use crate::names::hf_name;

/// The first weight, under Hugging Face's name, that holds a NaN or an infinity; `None` if all are numbers.
///
/// ```
/// use burn::tensor::Device;
/// use llama::{Llama, LlamaConfig, ParallelConfig, not_finite};
///
/// let mut model = Llama::init(&LlamaConfig::new(32, 16, 40, 1, 4, 2), &ParallelConfig::none(), &Device::flex())?;
/// assert_eq!(not_finite(&model), None);
/// model.norm.inner.gamma = model.norm.inner.gamma.map(|gamma| gamma / 0.0);
/// assert_eq!(not_finite(&model).as_deref(), Some("model.norm.weight"));
/// # Ok::<(), llama::LlamaError>(())
/// ```
///
/// # Memory
///
/// The largest tensor once more, for a moment.
pub fn not_finite(model: &Llama) -> Option<String> {
    let mut search = Search { path: Vec::new(), found: None };
    model.visit(&mut search);
    search.found
}

struct Search {
    path: Vec<String>,
    found: Option<String>,
}

impl ModuleVisitor for Search {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.found.is_none() && !param.val().is_finite().all().into_scalar::<bool>() {
            self.found = Some(hf_name(&self.path.join(".")));
        }
    }
}
