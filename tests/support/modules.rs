//! Modules with reproducible weights, and their gradients as plain numbers.

use std::fmt::Display;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};

use crate::{assert_close, tensor, values};

struct Fill {
    seed: u64,
    dtype: DType,
    scale: f64,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.seed += 1;
        let Self { seed, dtype, scale } = *self;
        // Adapters' own weights are trained, the ones below them frozen.
        let trained = param.base().is_require_grad();
        param.map(move |x| {
            let x = tensor::<D>(&values(seed, &x.dims()), dtype, &x.device()).mul_scalar(scale).detach();
            if trained { x.require_grad() } else { x }
        })
    }
}

/// The module with every parameter drawn anew from `seed`, in about `-scale..scale`.
pub fn filled<M: Module>(module: M, seed: u64, dtype: DType, scale: f64) -> M {
    module.map(&mut Fill { seed: seed * 1000, dtype, scale })
}

/// Every parameter's gradient, flat, in visiting order; zeros of length 0 where there is none.
pub fn gradients<M: Module>(module: &M, grads: &Gradients) -> Vec<TensorData> {
    struct Collect<'a>(&'a Gradients, Vec<TensorData>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = param.base().grad(self.0);
            self.1.push(grad.map_or_else(|| TensorData::new(Vec::<f64>::new(), [0]), |grad| flat(grad.to_data())));
        }
    }
    let mut collect = Collect(grads, Vec::new());
    module.visit(&mut collect);
    collect.1
}

fn flat(data: TensorData) -> TensorData {
    let values: Vec<f64> = data.iter::<f64>().collect();
    let count = values.len();
    TensorData::new(values, [count])
}

/// The sum of several ranks' (or micro-batches') gradients, parameter by parameter.
///
/// # Panics
///
/// If the lists differ in length.
pub fn summed(parts: &[Vec<TensorData>]) -> Vec<TensorData> {
    let add = |a: &TensorData, b: &TensorData| {
        let (a, b): (Vec<f64>, Vec<f64>) = (a.iter::<f64>().collect(), b.iter::<f64>().collect());
        if a.is_empty() || b.is_empty() {
            return flat(TensorData::new([a.clone(), b.clone()].concat(), [a.len() + b.len()]));
        }
        assert_eq!(a.len(), b.len(), "gradients of one parameter");
        let sum: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        TensorData::new(sum, [a.len()])
    };
    let mut parts = parts.iter();
    let first = parts.next().expect("at least one part").clone();
    parts.fold(first, |sum, part| {
        assert_eq!(sum.len(), part.len(), "gradients of one module");
        sum.iter().zip(part).map(|(a, b)| add(a, b)).collect()
    })
}

/// Asserts that gradients differ by at most `tolerance` times the largest magnitude of their own parameter's.
///
/// # Panics
///
/// If they do not.
pub fn assert_gradients(case: impl Display, actual: &[TensorData], expected: &[TensorData], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{case}: parameters");
    let tensor = |data: &TensorData| tensor::<1>(data, DType::F64, &Device::flex());
    for (i, (a, b)) in actual.iter().zip(expected).enumerate() {
        assert_close(format!("{case}: gradient {i}"), &tensor(a), &tensor(b), tolerance);
    }
}

/// The norm of all gradients together.
pub fn norm(grads: &[TensorData]) -> f64 {
    grads.iter().flat_map(|grad| grad.iter::<f64>().collect::<Vec<_>>()).map(|x| x * x).sum::<f64>().sqrt()
}
