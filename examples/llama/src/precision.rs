//! Compute in bf16 with master weights in f32.
//!
//! ```text
//! master (f32) --compute--> bf16 leaves --forward, backward--> gradients in bf16 --to_f32--> clip, optimizer on master (f32)
//! ```
//!
//! bf16 has 8 bits of mantissa: an update below 1/256 of a weight would be lost if weights were bf16. Here they gather in f32.
//! Parameters keep their ids, so that gradients of the computing copy are those of the master. In f32 nothing is copied.
//!
//! ```
//! use burn::optim::GradientsParams;
//! use burn::tensor::{DType, Device};
//! use burn_context_parallel::group::ProcessGroup;
//! use burn_context_parallel::sequence::{Batch, SequenceLayout};
//! use llama::{Llama, LlamaConfig, ParallelConfig, adamw, precision};
//!
//! let device = Device::flex().autodiff();
//! let mut master = Llama::init(&LlamaConfig::new(32, 16, 40, 1, 4, 2), &ParallelConfig::all(), &device)?;
//! let batch = Batch::from_rows(&[vec![5, 6, 7, 8, 9]])?;
//! let shard = batch.shard(&SequenceLayout::contiguous(5, 1)?, 0, &device)?;
//! let mut optimizer = adamw(0.0);
//! for _step in 0..2 {
//!     let model = precision::compute(&master, DType::BF16);
//!     let loss = model.loss(&shard, &ProcessGroup::single())?;
//!     let grads = GradientsParams::from_grads(loss.mean.backward(), &model);
//!     // Before gradients are summed over ranks or micro-batches: sums are then in f32, too.
//!     let grads = precision::to_f32(grads, &master);
//!     master = optimizer.step(1e-3, master, grads);
//! }
//! assert_eq!(master.norm.inner.gamma.val().dtype(), DType::F32);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # References
//!
//! Mixed precision training, arXiv 1710.03740.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

/// The model that computes: `master`'s weights rounded to `dtype`, as leaves of their own under the same ids. What is frozen
/// stays frozen.
///
/// Make it anew after each optimizer step, on the rank that uses it. If `dtype` is the master's it is the master.
///
/// # Memory
///
/// The weights once more in `dtype`; nothing if that is the master's.
pub fn compute<M: Module>(master: &M, dtype: DType) -> M {
    master.clone().map(&mut Cast { dtype })
}

struct Cast {
    dtype: DType,
}

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = self.dtype;
        if param.base().dtype() == dtype {
            return param;
        }
        param.map(|x| {
            let trained = x.is_require_grad();
            // Cast on the tape, then off it: on whatever device, and with whatever strategy of checkpointing, `x` is.
            x.cast(dtype).detach().set_require_grad(trained)
        })
    }
}

/// Gradients of [`compute`]'s model in f32, for clipping and for the optimizer of the master, whose ids they have.
///
/// Gradients that are f32 (or f64) already stay as they are.
///
/// # Memory
///
/// One gradient at a time exists twice.
pub fn to_f32<M: Module>(grads: GradientsParams, module: &M) -> GradientsParams {
    struct Widen {
        grads: GradientsParams,
        seen: HashSet<ParamId>,
    }
    impl ModuleVisitor for Widen {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if !self.seen.insert(param.id) {
                return; // tied
            }
            let half = |grad: &Tensor<D>| !matches!(grad.dtype(), DType::F32 | DType::F64);
            if self.grads.get::<D>(param.id).is_some_and(|grad| half(&grad))
                && let Some(grad) = self.grads.remove::<D>(param.id)
            {
                self.grads.register(param.id, grad.cast(DType::F32));
            }
        }
    }
    let mut widen = Widen { grads, seen: HashSet::new() };
    module.visit(&mut widen);
    widen.grads
}
