//! What is left to do with gradients after the backward passes of a step: sums that were put off, replicas, whole parameters, the norm.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};

use super::unit::{Unit, presence, present};
use super::{Accumulation, Fsdp, lock};
use crate::buffer::{accumulator, own, zeros};
use crate::collective::norm;
use crate::group::{ProcessGroup, ReduceOp};
use crate::{Error, Result};

impl Fsdp {
    /// Makes a step's gradients those of the whole: after the last micro-batch, before clipping.
    ///
    /// Gradients of shards that waited ([`Accumulation::Once`]) are reduced; those of shards are summed over replicas, those of whole
    /// parameters over all ranks. Sums, in f32 (f64 stays): the loss has been divided by what it asks for already. A parameter that has a
    /// gradient on no rank has none afterwards, so that an optimizer leaves it alone. Ends what [`begin`](Self::begin) began.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] if a collective fails.
    ///
    /// # Communication
    ///
    /// One all-reduce of all whole parameters together; with replicas one a shard; under `Once` one reduce-scatter a parameter.
    pub fn finish<M: Module>(&self, grads: GradientsParams, module: &M) -> Result<GradientsParams> {
        lock(&self.shared.prefetch).end();
        let mut finish = Finish { fsdp: self, grads, seen: HashSet::new(), whole: Vec::new(), error: None };
        module.visit(&mut finish);
        let Finish { mut grads, whole, error, .. } = finish;
        if let Some(error) = error {
            return Err(error);
        }
        if self.shared.world.size() > 1 && !whole.is_empty() {
            let sums =
                sum_known(&self.shared.world, whole.iter().map(|whole| whole.gradient.clone()).collect(), &whole)?;
            struct Put<'a> {
                grads: &'a mut GradientsParams,
                sums: HashMap<ParamId, Option<Tensor<1>>>,
            }
            impl ModuleVisitor for Put<'_> {
                fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                    let Some(sum) = self.sums.remove(&param.id) else { return };
                    self.grads.remove::<D>(param.id);
                    if let Some(sum) = sum {
                        let base = param.base();
                        self.grads.register(param.id, sum.cast(base.dtype()).reshape(base.dims()));
                    }
                }
            }
            let sums = whole.iter().map(|whole| whole.id).zip(sums).collect();
            module.visit(&mut Put { grads: &mut grads, sums });
        }
        Ok(grads)
    }

    /// Scales all gradients by one factor so that their norm over all shards and ranks is at most `max_norm`, and gives the norm before:
    /// [`collective::clip_grad_norm`](crate::collective::clip_grad_norm) for shards. After [`finish`](Self::finish).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `max_norm` is not a positive number; [`Error::Group`] if the collective fails.
    ///
    /// # Communication
    ///
    /// 8 bytes from every rank to every other.
    pub fn clip_grad_norm<M: Module>(
        &self,
        grads: GradientsParams,
        module: &M,
        max_norm: f64,
    ) -> Result<(GradientsParams, f64)> {
        norm::check(max_norm)?;
        let shared = &self.shared;
        // A shard counts where it lies, a whole parameter once.
        let counts = |id| shared.group.rank() == 0 || shared.placement(id).is_some();
        let mut square = norm::squares(&grads, module, counts);
        if shared.group.size() > 1 {
            let sum = shared.group.all_reduce(TensorData::from([square]), ReduceOp::Sum)?;
            square = sum.iter::<f64>().next().unwrap_or(f64::NAN);
        }
        Ok(norm::scaled(grads, module, max_norm, square.sqrt()))
    }
}

struct Finish<'a> {
    fsdp: &'a Fsdp,
    grads: GradientsParams,
    seen: HashSet<ParamId>,
    whole: Vec<Whole>,
    error: Option<Error>,
}

/// A whole parameter's part of one flat sum.
struct Whole {
    id: ParamId,
    gradient: Option<Tensor<1>>,
    like: Tensor<1>,
}

impl ModuleVisitor for Finish<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let base = param.base();
        if self.error.is_some() || !base.is_require_grad() || !self.seen.insert(param.id) {
            return;
        }
        if let Err(error) = self.one(param.id, base) {
            self.error = Some(error);
        }
    }
}

impl Finish<'_> {
    fn one<const D: usize>(&mut self, id: ParamId, base: Tensor<D>) -> Result<()> {
        let shared = &self.fsdp.shared;
        let (dims, dtype) = (base.dims(), base.dtype());
        let elements = dims.iter().product::<usize>();
        let Some(placement) = shared.placement(id) else {
            let gradient = self.grads.get::<D>(id).map(|gradient| gradient.reshape([elements]));
            self.whole.push(Whole { id, gradient, like: base.inner().reshape([elements]) });
            return Ok(());
        };
        if shared.config.accumulation == Accumulation::Once {
            let deferred = lock(&shared.deferred).remove(&id).map(Tensor::into_dispatch);
            let sum = Unit::one(shared, &placement, id, &base).reduce_now(shared, vec![deferred])?.remove(0);
            if let Some(sum) = sum.map(Tensor::<D>::from_dispatch) {
                self.add(id, sum);
            }
        }
        if shared.replicas.size() > 1 {
            let gradient = self.grads.remove::<D>(id).map(|gradient| gradient.reshape([elements]));
            let whole = [Whole { id, gradient: gradient.clone(), like: base.inner().reshape([elements]) }];
            if let Some(sum) = sum_known(&shared.replicas, vec![gradient], &whole)?.remove(0) {
                self.grads.register(id, sum.cast(dtype).reshape(dims));
            }
        }
        Ok(())
    }

    fn add<const D: usize>(&mut self, id: ParamId, gradient: Tensor<D>) {
        let sum = match self.grads.remove::<D>(id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        self.grads.register(id, sum);
    }
}

/// Sums of gradients that some ranks may not have; `None` for what nobody has. One all-reduce.
fn sum_known(
    group: &ProcessGroup,
    gradients: Vec<Option<Tensor<1>>>,
    like: &[Whole],
) -> Result<Vec<Option<Tensor<1>>>> {
    let device = like[0].like.device();
    let dtype = like.iter().map(|whole| accumulator(whole.like.dtype())).find(|dtype| dtype.size() > 4);
    let dtype = dtype.unwrap_or(burn::tensor::DType::F32);
    let has = presence(gradients.iter().map(Option::is_some), &device, dtype);
    let mut parts: Vec<Tensor<1>> = gradients
        .into_iter()
        .zip(like)
        .map(|(gradient, whole)| match gradient {
            Some(gradient) => gradient.cast(dtype),
            None => zeros(whole.like.dims(), &device, dtype),
        })
        .collect();
    parts.push(has);
    let sum = group.all_reduce(Tensor::cat(parts, 0), ReduceOp::Sum)?;
    let mut start = 0;
    let sums = like.iter().zip(present(&sum, like.len())).map(|(whole, anybody)| {
        let len = whole.like.dims()[0];
        start += len;
        anybody.then(|| own(sum.clone().narrow(0, start - len, len)))
    });
    Ok(sums.collect())
}
