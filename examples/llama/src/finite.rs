//! Whether weights are numbers.

use burn::module::Param;
use burn::tensor::Tensor;

use crate::model::Llama;
use crate::names::{Look, show};

/// The first weight, under Hugging Face's name, that holds a NaN or an infinity; `None` if all are numbers. Of a sharded model, among
/// what this rank holds.
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
    let mut search = Search(None);
    show(model, &mut search);
    search.0
}

struct Search(Option<String>);

impl Look for Search {
    fn look<const D: usize>(&mut self, name: String, param: &Param<Tensor<D>>) {
        // What the rank holds: the value of a shard would be asked of all of them.
        if self.0.is_none() && !param.base().is_finite().all().into_scalar::<bool>() {
            self.0 = Some(name);
        }
    }
}
