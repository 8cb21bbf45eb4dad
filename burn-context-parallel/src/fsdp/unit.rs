//! Parameters that are gathered together and whose gradients are reduced together: those of one block.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, TensorMetadata};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

use super::gather::found;
use super::placement::Placement;
use super::{Accumulation, Shared};
use crate::Result;
use crate::buffer::{accumulator, own, zeros};
use crate::group::{ProcessGroup, ReduceOp};
use crate::vjp::{AnyTensor, InputGradients, node_id};

/// The float parameters of a module, each once, in visiting order, and what is sharded of them.
///
/// For those who write operations that run a whole module: [`gather`](Self::gather) it before use, and [`reduce`](Self::reduce) its
/// gradients. Holds handles of the shards, nothing of a graph.
pub struct Unit {
    entries: Vec<Entry>,
    shared: Option<Arc<Shared>>,
}

#[derive(Clone)]
pub(super) struct Entry {
    pub id: ParamId,
    /// This rank's shard, without autodiff; empty for what is whole.
    pub shard: Option<(Arc<Placement>, Tensor<1>)>,
    /// Tells an optimizer step's parameter from the next one's.
    pub version: Option<NodeId>,
    /// The parameter's own shape: of the shard, where it is one.
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub trains: bool,
}

impl Unit {
    /// What a module has. A module that is not sharded has an empty unit, that does nothing.
    pub fn of<M: Module>(module: &M) -> Self {
        let mut collect = Collect { entries: Vec::new(), flats: Vec::new(), seen: HashSet::new() };
        let shared = found(|| module.visit(&mut collect));
        let Some(shared) = shared else {
            // Whoever keeps this keeps nothing.
            return Self { entries: Vec::new(), shared: None };
        };
        let Collect { mut entries, flats, .. } = collect;
        for (entry, flat) in entries.iter_mut().zip(flats) {
            entry.shard = shared
                .placement(entry.id)
                .filter(|placement| placement.shape() != entry.shape)
                .map(|placement| (placement, flat));
        }
        Self { entries, shared: Some(shared) }
    }

    pub(super) fn one<const D: usize>(
        shared: &Arc<Shared>,
        placement: &Arc<Placement>,
        id: ParamId,
        base: &Tensor<D>,
    ) -> Self {
        let (mut entry, flat) = entry(id, base);
        entry.shard = Some((placement.clone(), flat));
        Self { entries: vec![entry], shared: Some(shared.clone()) }
    }

    pub(super) fn from_entries(entries: Vec<Entry>, shared: &Arc<Shared>) -> Self {
        Self { entries, shared: Some(shared.clone()) }
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Whether any parameter is a shard.
    pub fn is_sharded(&self) -> bool {
        self.entries.iter().any(|entry| entry.shard.is_some())
    }

    pub(super) fn sharded(&self) -> impl Iterator<Item = (&Entry, &Arc<Placement>, &Tensor<1>)> {
        self.entries.iter().filter_map(|entry| entry.shard.as_ref().map(|(placement, flat)| (entry, placement, flat)))
    }

    /// `module`, of which this is the unit, with all parameters whole and in the computing type; without autodiff if it is.
    ///
    /// # Errors
    ///
    /// [`Error::Group`](crate::Error::Group) if the collective fails.
    ///
    /// # Memory
    ///
    /// The module's whole weights in the computing type, and this rank's shards of them once more for the exchange.
    ///
    /// # Communication
    ///
    /// One all-gather a type, [`gather_bytes`](super::gather_bytes).
    pub fn gather<M: Module>(&self, module: &M) -> Result<M> {
        let compute = self.shared.as_ref().and_then(|shared| shared.config.compute);
        self.gather_in(module, compute)
    }

    /// [`gather`](Self::gather) in another type; `None` is the parameters' own.
    pub(super) fn gather_in<M: Module>(&self, module: &M, dtype: Option<DType>) -> Result<M> {
        if self.shared.is_none() {
            return Ok(module.clone());
        }
        let whole = self.fetch_in(dtype)?;
        let whole = self
            .sharded()
            .zip(whole)
            .map(|((entry, placement, _), whole)| (entry.id, (whole, placement.clone())))
            .collect();
        Ok(module.clone().map(&mut Replace { whole, compute: dtype }))
    }

    /// The whole of every shard, flat, in order, in the computing type.
    pub(super) fn fetch(&self) -> Result<Vec<Tensor<1>>> {
        self.fetch_in(self.shared.as_ref().and_then(|shared| shared.config.compute))
    }

    fn fetch_in(&self, dtype: Option<DType>) -> Result<Vec<Tensor<1>>> {
        let Some(shared) = self.shared.as_ref().filter(|_| self.is_sharded()) else { return Ok(Vec::new()) };
        shared.counts.gathered();
        // Ahead weights are fetched in the computing type.
        let ahead = if dtype == shared.config.compute { shared.prefetched(self)? } else { None };
        let parts = match ahead {
            Some(parts) => parts,
            None => exchange(&shared.group.about(self.digest(shared)), self.outgoing(dtype))?,
        };
        Ok(self.assemble(parts, dtype))
    }

    pub(super) fn digest(&self, shared: &Shared) -> u64 {
        shared.digest(self.sharded().map(|(entry, ..)| entry.id))
    }

    /// What this rank brings: its shards of one type side by side.
    pub(super) fn outgoing(&self, compute: Option<DType>) -> Vec<Tensor<1>> {
        self.groups(compute)
            .into_iter()
            .map(|(dtype, members)| join(members.into_iter().map(|(_, flat)| flat.clone().cast(dtype)).collect()))
            .collect()
    }

    fn groups(&self, compute: Option<DType>) -> Vec<(DType, Vec<(&Placement, &Tensor<1>)>)> {
        let mut groups: Vec<(DType, Vec<_>)> = Vec::new();
        for (_, placement, flat) in self.sharded() {
            let dtype = compute.unwrap_or(flat.dtype());
            let at = groups.iter().position(|(known, _)| *known == dtype).unwrap_or_else(|| {
                groups.push((dtype, Vec::new()));
                groups.len() - 1
            });
            groups[at].1.push((&**placement, flat));
        }
        groups
    }

    /// Parameters from all ranks' parts, by type and rank.
    fn assemble(&self, mut parts: Vec<Vec<Tensor<1>>>, compute: Option<DType>) -> Vec<Tensor<1>> {
        let dtypes: Vec<DType> = self.groups(compute).into_iter().map(|(dtype, _)| dtype).collect();
        let mut starts = vec![0; parts.len()];
        let mut whole = Vec::new();
        for (_, placement, flat) in self.sharded() {
            let dtype = compute.unwrap_or(flat.dtype());
            let group = dtypes.iter().position(|known| *known == dtype).expect("grouped above");
            let (start, len) = (starts[group], placement.shard_len());
            starts[group] += len;
            // The last rank's padding is never copied: cut before, not after, the parts are joined.
            let of_all = parts[group].iter_mut().enumerate().filter_map(|(rank, part)| {
                let len = placement.range(rank).len();
                (len > 0).then(|| cut(part, start, len))
            });
            whole.push(join(of_all.collect()));
        }
        whole
    }

    /// From gradients of whole parameters, in the unit's order, to those of what the module holds: sums over ranks, this rank's
    /// shard of them.
    ///
    /// Every trainable parameter takes part on every rank; one that has a gradient on no rank has none afterwards. Gradients of
    /// parameters that are whole pass through; [`Fsdp::finish`](super::Fsdp::finish) sums them. Under
    /// [`Accumulation::Once`] gradients of shards are kept for `finish`, and `None` is given.
    ///
    /// # Errors
    ///
    /// [`Error::Group`](crate::Error::Group) if the collective fails.
    ///
    /// # Communication
    ///
    /// One reduce-scatter in f32 (f64 stays), [`reduce_bytes`](super::reduce_bytes).
    pub fn reduce(&self, gradients: InputGradients) -> Result<InputGradients> {
        let Some(shared) = self.shared.as_ref().filter(|_| self.is_sharded()) else { return Ok(gradients) };
        if shared.config.accumulation == Accumulation::Once {
            return Ok(self.keep(shared, gradients));
        }
        self.reduce_now(shared, gradients)
    }

    fn keep(&self, shared: &Shared, mut gradients: InputGradients) -> InputGradients {
        for (entry, slot) in self.entries.iter().zip(&mut gradients) {
            if let (Some((placement, _)), Some(gradient)) = (&entry.shard, slot.take_if(|_| entry.shard.is_some())) {
                shared.add_deferred(entry.id, flatten(gradient, placement.elements()));
            }
        }
        gradients
    }

    pub(super) fn reduce_now(&self, shared: &Shared, mut gradients: InputGradients) -> Result<InputGradients> {
        let reduced: Vec<usize> =
            (0..self.entries.len()).filter(|&i| self.entries[i].trains && self.entries[i].shard.is_some()).collect();
        let Some(&first) = reduced.first() else { return Ok(gradients) };
        shared.counts.reduced();
        let (device, ranks) = (self.flat(first).device(), shared.group.size());
        // The widest of them, so that none loses.
        let dtypes = reduced.iter().map(|&i| accumulator(self.entries[i].dtype));
        let dtype = dtypes.max_by_key(DType::size).unwrap_or(DType::F32);

        // Whether this rank has a gradient goes along: one that nobody has is none, not zero.
        let has = presence(reduced.iter().map(|&i| gradients[i].is_some()), &device, dtype);
        let whole: Vec<Option<Tensor<1>>> = reduced
            .iter()
            .map(|&i| {
                let gradient = gradients[i].take()?;
                Some(flatten(gradient, self.placement(i).elements()).cast(dtype))
            })
            .collect();
        let parts = (0..ranks)
            .map(|rank| {
                let mut pieces = Vec::new();
                for (&i, gradient) in reduced.iter().zip(&whole) {
                    let (placement, range) = (self.placement(i), self.placement(i).range(rank));
                    let padding = match gradient {
                        Some(gradient) if !range.is_empty() => {
                            pieces.push(gradient.clone().narrow(0, range.start, range.len()));
                            placement.shard_len() - range.len()
                        }
                        _ => placement.shard_len(),
                    };
                    if padding > 0 {
                        pieces.push(zeros([padding], &device, dtype));
                    }
                }
                pieces.push(has.clone());
                join(pieces)
            })
            .collect();
        drop(whole);
        let sum = shared.group.reduce_scatter(parts, ReduceOp::Sum)?;

        let mut start = 0;
        for (&i, anybody) in reduced.iter().zip(present(&sum, reduced.len())) {
            let len = self.placement(i).shard_len();
            if anybody {
                // A copy: a view would keep the whole block's.
                let shard = own(sum.clone().narrow(0, start, len)).cast(self.entries[i].dtype).into_dispatch();
                gradients[i] = Some(Dispatch::float_reshape(shard, Shape::from(self.entries[i].shape.clone())));
            }
            start += len;
        }
        Ok(gradients)
    }

    fn placement(&self, index: usize) -> &Placement {
        &self.entries[index].shard.as_ref().expect("only of shards").0
    }

    fn flat(&self, index: usize) -> &Tensor<1> {
        &self.entries[index].shard.as_ref().expect("only of shards").1
    }
}

/// Every rank's parts, by type and rank.
pub(super) fn exchange(group: &ProcessGroup, outgoing: Vec<Tensor<1>>) -> Result<Vec<Vec<Tensor<1>>>> {
    outgoing.into_iter().map(|part| group.all_gather(part)).collect()
}

/// Numbers that go along with a sum of gradients: 1 where this rank has one.
pub(super) fn presence(has: impl Iterator<Item = bool>, device: &Device, dtype: DType) -> Tensor<1> {
    let has: Vec<f64> = has.map(|has| f64::from(u8::from(has))).collect();
    Tensor::from_data(TensorData::from(&has[..]), (device, dtype))
}

/// Of a sum whose last `count` elements are [`presence`]: whether anybody had one.
pub(super) fn present(sum: &Tensor<1>, count: usize) -> Vec<bool> {
    let counts = sum.clone().narrow(0, sum.dims()[0] - count, count);
    counts.into_data().iter::<f64>().map(|ranks| ranks > 0.0).collect()
}

pub(super) fn flatten(tensor: AnyTensor, elements: usize) -> Tensor<1> {
    debug_assert_eq!(tensor.shape().num_elements(), elements);
    Tensor::from_dispatch(Dispatch::float_reshape(tensor, Shape::from(vec![elements])))
}

/// One tensor of all parts; `cat` of a single one would copy it on some backends.
fn join(mut parts: Vec<Tensor<1>>) -> Tensor<1> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
}

fn cut(part: &Tensor<1>, start: usize, len: usize) -> Tensor<1> {
    if start == 0 && len == part.dims()[0] { part.clone() } else { part.clone().narrow(0, start, len) }
}

fn entry<const D: usize>(id: ParamId, base: &Tensor<D>) -> (Entry, Tensor<1>) {
    let version = node_id(&base.clone().into_dispatch());
    let (shape, trains) = (base.dims().to_vec(), base.is_require_grad());
    let flat = base.clone().inner().reshape([shape.iter().product::<usize>()]);
    (Entry { id, shard: None, version, shape, dtype: base.dtype(), trains }, flat)
}

struct Collect {
    entries: Vec<Entry>,
    flats: Vec<Tensor<1>>,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Collect {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return; // tied
        }
        let (entry, flat) = entry(param.id, &param.base());
        self.entries.push(entry);
        self.flats.push(flat);
    }
}

struct Replace {
    whole: HashMap<ParamId, (Tensor<1>, Arc<Placement>)>,
    compute: Option<DType>,
}

impl ModuleMapper for Replace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let trained = |whole: Tensor<D>, base: Tensor<D>| {
            let trains = base.is_require_grad();
            let whole = if base.is_autodiff() && !whole.is_autodiff() { Tensor::from_inner(whole) } else { whole };
            // Leaves of their own, whatever computed them.
            if whole.is_autodiff() { whole.detach().set_require_grad(trains) } else { whole }
        };
        match (self.whole.get(&param.id), self.compute) {
            (Some((whole, placement)), _) => {
                let whole = whole.clone().reshape(placement.dims());
                param.map(|base| trained(whole, base))
            }
            (None, Some(dtype)) if param.base().dtype() != dtype => {
                param.map(|base| trained(base.clone().cast(dtype), base))
            }
            (None, _) => param,
        }
    }
}
