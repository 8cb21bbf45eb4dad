//! Whole parameters again: a module's at once, or one after the other for whoever writes them to a file.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorData};

use super::gather::found;
use super::{Fsdp, Unit};
use crate::{Error, Result};

impl Fsdp {
    /// The whole module on every rank, its parameters in the computing type. For evaluating small models, and for tests.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] if the collective fails.
    ///
    /// # Memory
    ///
    /// All weights.
    ///
    /// # Communication
    ///
    /// One all-gather of all weights.
    pub fn gather<M: Module>(&self, module: &M) -> Result<M> {
        Unit::of(module).gather(module)
    }

    /// [`gather`](Self::gather) in the parameters' own types: what is trained, not its rounding that is computed with.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    ///
    /// # Memory
    ///
    /// All weights.
    ///
    /// # Communication
    ///
    /// As [`gather`](Self::gather).
    pub fn gather_exact<M: Module>(&self, module: &M) -> Result<M> {
        Unit::of(module).gather_in(module, None)
    }

    /// Shows the first rank every float parameter as it is kept (not in the computing type), whole, by path, one after the other; a tied
    /// one comes each time. Other ranks send their shards.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] if a collective fails; those of `take`, which end the world.
    ///
    /// # Memory
    ///
    /// One parameter, on the first rank.
    ///
    /// # Communication
    ///
    /// Every rank sends its shards to the first.
    pub fn each_whole<M: Module>(&self, module: &M, take: impl FnMut(&str, TensorData) -> Result<()>) -> Result<()> {
        let mut each = Each { fsdp: self, take, path: Vec::new(), error: None };
        module.visit(&mut each);
        each.error.map_or(Ok(()), Err)
    }
}

/// The shapes of all float parameters by path, whole whether they are sharded or not, with what is tied once: what
/// [`Fsdp::each_whole`] shows, in its order. Draws nothing.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_context_parallel::fsdp::{Fsdp, FsdpConfig, whole_shapes};
/// use burn_context_parallel::group::launch;
///
/// let shapes = launch(2, |world| {
///     let linear = LinearConfig::new(3, 5).init(&Device::flex());
///     Ok::<_, burn_context_parallel::Error>(whole_shapes(&Fsdp::over(&world, FsdpConfig::new())?.shard(linear)?))
/// })?;
/// assert_eq!(shapes[1], [("weight".to_owned(), vec![3, 5]), ("bias".to_owned(), vec![5])]);
/// # Ok::<(), burn_context_parallel::group::LaunchError>(())
/// ```
pub fn whole_shapes<M: Module>(module: &M) -> Vec<(String, Vec<usize>)> {
    #[derive(Default)]
    struct Shapes {
        path: Vec<String>,
        seen: HashSet<ParamId>,
        held: Vec<(ParamId, String, Vec<usize>)>,
    }
    impl ModuleVisitor for Shapes {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.insert(param.id) {
                self.held.push((param.id, self.path.join("."), param.lazy_shape().to_vec()));
            }
        }
    }
    let mut shapes = Shapes::default();
    let shared = found(|| module.visit(&mut shapes));
    let placement = |id| shared.as_ref().and_then(|shared| shared.placement(id));
    let whole = |id, held| placement(id).map_or(held, |placement| placement.shape().to_vec());
    shapes.held.into_iter().map(|(id, path, held)| (path, whole(id, held))).collect()
}

struct Each<'a, T> {
    fsdp: &'a Fsdp,
    take: T,
    path: Vec<String>,
    error: Option<Error>,
}

impl<T: FnMut(&str, TensorData) -> Result<()>> ModuleVisitor for Each<'_, T> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        if let Err(error) = self.show(param.id, param.base().inner()) {
            self.error = Some(error);
        }
    }
}

impl<T: FnMut(&str, TensorData) -> Result<()>> Each<'_, T> {
    fn show<const D: usize>(&mut self, id: ParamId, base: Tensor<D>) -> Result<()> {
        let shared = &self.fsdp.shared;
        let first = shared.world.rank() == 0;
        let value = match shared.placement(id) {
            None => first.then(|| base.into_data()),
            // Replicas have the same: only the first rank's group sends.
            Some(placement) if shared.replicas.rank() == 0 => {
                let me = shared.group.rank();
                let len = placement.range(me).len();
                let home = base.device();
                let flat = base.reshape([placement.shard_len()]);
                let mut parts = vec![None; shared.group.size()];
                if len > 0 {
                    parts[0] = Some(if len == placement.shard_len() { flat } else { flat.narrow(0, 0, len) });
                }
                let expected: Vec<_> = (0..shared.group.size())
                    .map(|rank| {
                        let len = placement.range(rank).len();
                        (me == 0 && len > 0).then(|| vec![len])
                    })
                    .collect();
                let parts: Vec<_> =
                    shared.group.at(&home).all_to_all_uneven(parts, &expected)?.into_iter().flatten().collect();
                first.then(|| {
                    let (bytes, _, dtype) = Tensor::cat(parts, 0).into_data().into_parts();
                    TensorData::from_bytes(bytes, placement.shape().to_vec(), dtype)
                })
            }
            Some(_) => None,
        };
        match value {
            Some(value) => (self.take)(&self.path.join("."), value),
            None => Ok(()),
        }
    }
}
