//! From a module to its shards, parameter by parameter: no rank but the first ever holds more than one whole parameter.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, Reparameterizer};
use burn::tensor::{Tensor, TensorData};

use super::gather::{Gather, found};
use super::placement::Placement;
use super::{Fsdp, Shared};
use crate::buffer::{own, zeros};
use crate::group::ProcessGroup;
use crate::{Error, Result};

impl Fsdp {
    /// Shards `model`, the same on every rank. The first rank's values count: parameters that are not drawn yet (lazy ones,
    /// as `init` makes them) are drawn there alone, one by one, in the module's order.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] if ranks' models differ in shape, or a collective fails. [`Error::Invalid`] for a module that is sharded
    /// already.
    ///
    /// # Memory
    ///
    /// A rank: its shards. The first rank: one whole parameter more, and the parts of it that are on their way.
    ///
    /// # Communication
    ///
    /// The first rank sends every other rank its shards.
    pub fn shard<M: Module>(&self, model: M) -> Result<M> {
        self.shard_from(model, |_, _| Ok(None))
    }

    /// As [`shard`](Self::shard), with values from elsewhere: `source` is asked on every rank for the whole value of the parameter at a
    /// path (`layers.0.weight`) with its shape, one after the other. For `None`, which all ranks must agree on, the module's own
    /// value is used.
    ///
    /// # Errors
    ///
    /// As [`shard`](Self::shard), those of `source`, and [`Error::Invalid`] if it gives another number of elements.
    ///
    /// # Memory
    ///
    /// A rank: its shards, and one whole parameter.
    ///
    /// # Communication
    ///
    /// None for what comes from `source`.
    pub fn shard_from<M: Module>(
        &self,
        model: M,
        source: impl FnMut(&str, &[usize]) -> Result<Option<TensorData>>,
    ) -> Result<M> {
        // Without a look at values, which would draw them.
        struct Pass;
        impl ModuleVisitor for Pass {}
        if found(|| model.visit(&mut Pass)).is_some() {
            return Err(Error::invalid("Fsdp::shard", "the module is sharded already", "shard a module once"));
        }
        let mut error = None;
        let model = model.apply_reparameterization(Sharder { shared: &self.shared, source, error: &mut error });
        match error {
            None => Ok(model),
            Some(error) => Err(error),
        }
    }
}

struct Sharder<'a, S> {
    shared: &'a Arc<Shared>,
    source: S,
    error: &'a mut Option<Error>,
}

impl<S: FnMut(&str, &[usize]) -> Result<Option<TensorData>>> Reparameterizer for Sharder<'_, S> {
    type Reparam = Gather;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Gather>) {
        if self.error.is_some() {
            return (param, None);
        }
        match self.place(path, &param) {
            Ok((value, placement)) => {
                let id = param.id;
                // On the parameter's own device: autodiff and its strategy of checkpointing come with it.
                let dtype = value.dtype();
                let value = Tensor::<D>::from_data(value.into_data(), (&param.lazy_device(), dtype));
                if let Some(placement) = &placement {
                    self.shared.place(id, placement.clone());
                }
                // As loading does it, since that is what leaves a lazy parameter undrawn; but not through what
                // a layer does to values from files.
                let param = param.load_mapper(|value| value).transform_for_load(value, id);
                (param, Some(Gather::new(self.shared.clone(), placement, id)))
            }
            Err(error) => {
                *self.error = Some(error);
                (param, None)
            }
        }
    }
}

impl<S: FnMut(&str, &[usize]) -> Result<Option<TensorData>>> Sharder<'_, S> {
    /// What this rank holds of a parameter, without autodiff.
    fn place<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<(Tensor<D>, Option<Arc<Placement>>)> {
        let shared = &**self.shared;
        let device = param.lazy_device().inner();
        let shape = param.lazy_shape().to_vec();
        if let Some(data) = (self.source)(path, &shape)? {
            let found = data.num_elements();
            if found != shape.iter().product::<usize>() {
                return Err(Error::invalid(
                    "Fsdp::shard_from",
                    format!("{found} elements for {path}, which has shape {shape:?}"),
                    "give the parameter's whole value",
                ));
            }
            let (bytes, _, dtype) = data.into_parts();
            let whole = Tensor::<1>::from_data(TensorData::from_bytes(bytes, [found], dtype), (&device, dtype));
            let Some(placement) = self.placement(&shape) else {
                return Ok((whole.reshape::<D, _>(std::array::from_fn(|dim| shape[dim])), None));
            };
            let shard = padded(&placement, &whole, shared.group.rank()).reshape(placement.shard_shape::<D>());
            return Ok((shard, Some(placement)));
        }
        // The first rank's shape as well: a lazy parameter may be turned while it is drawn.
        let first = shared.world.rank() == 0;
        let drawn = first.then(|| param.base().inner());
        let shape = agree(&shared.world, drawn.as_ref(), param)?;
        let Some(placement) = self.placement(&shape) else {
            return Ok((own(shared.world.at(&device).broadcast(drawn, 0)?), None));
        };
        let parts = match drawn {
            Some(whole) => {
                let flat = whole.reshape([placement.elements()]);
                shared.shard_of.iter().map(|&rank| Some(padded(&placement, &flat, rank))).collect()
            }
            None => vec![None; shared.world.size()],
        };
        let mut expected = vec![None; shared.world.size()];
        expected[0] = Some(vec![placement.shard_len()]);
        let mut parts = shared.world.at(&device).all_to_all_uneven(parts, &expected)?;
        let shard = parts[0].take().expect("the first rank sends to all");
        // What came may be the first rank's memory.
        let shard = if first { shard } else { own(shard) }.reshape(placement.shard_shape::<D>());
        Ok((shard, Some(placement)))
    }

    /// How a parameter of this shape is divided; `None` if it stays whole.
    fn placement(&self, shape: &[usize]) -> Option<Arc<Placement>> {
        let ranks = self.shared.group.size();
        let divided = Placement::shards(shape, ranks, self.shared.config.whole_below);
        divided.then(|| Arc::new(Placement::new(shape, ranks)))
    }
}

/// A rank's shard, with storage of its own.
fn padded(placement: &Placement, whole: &Tensor<1>, rank: usize) -> Tensor<1> {
    let (range, len) = (placement.range(rank), placement.shard_len());
    let shard = zeros([len], &whole.device(), whole.dtype());
    if range.is_empty() {
        return shard;
    }
    let part = whole.clone().narrow(0, range.start, range.len());
    shard.slice_assign(std::array::from_fn::<_, 1, _>(|_| 0..range.len()), part)
}

/// The first rank's shape, on every rank.
fn agree<const D: usize>(
    world: &ProcessGroup,
    drawn: Option<&Tensor<D>>,
    param: &Param<Tensor<D>>,
) -> Result<Vec<usize>> {
    if drawn.is_some_and(|value| !value.dtype().is_float()) {
        return Err(Error::unsupported("Fsdp::shard", "a quantized parameter", "dequantize it first"));
    }
    let mine = drawn.map(|value| TensorData::from(&value.dims().map(|dim| dim as i64)[..]));
    let shape: Vec<usize> = world.broadcast(mine, 0)?.iter::<i64>().map(|dim| dim as usize).collect();
    let (mut own, mut first) = (param.lazy_shape().to_vec(), shape.clone());
    own.sort_unstable();
    first.sort_unstable();
    if own != first {
        return Err(Error::invalid(
            "Fsdp::shard",
            format!("a parameter of shape {:?} where the first rank has {shape:?}", param.lazy_shape().to_vec()),
            "build the same model on every rank",
        ));
    }
    Ok(shape)
}
