//! What is attached to a sharded parameter: it makes the whole one wherever a module asks for its value.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, ParamId, Reparameterization};
use burn::tensor::{Device, Tensor};

use super::Shared;
use super::placement::Placement;
use super::unit::Unit;
use crate::OrRaise;
use crate::vjp::{Inputs, custom_vjp};

/// Attached to every float parameter of a sharded module.
///
/// `Param::val` of a sharded parameter gathers it, differentiably: its gradient is reduced onto the shards. `Param::base` is the
/// shard. A parameter that stays whole is given in the computing type.
#[derive(Clone)]
pub struct Gather {
    shared: Arc<Shared>,
    /// `None`: the parameter is whole.
    placement: Option<Arc<Placement>>,
    id: ParamId,
}

impl Gather {
    pub(super) fn new(shared: Arc<Shared>, placement: Option<Arc<Placement>>, id: ParamId) -> Self {
        Self { shared, placement, id }
    }
}

impl fmt::Debug for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gather").field("placement", &self.placement).finish_non_exhaustive()
    }
}

impl Reparameterization for Gather {
    const NAME: &'static str = "fsdp";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match &self.placement {
            Some(placement) if base.dims()[..] != *placement.shape() => {
                let unit = Unit::one(&self.shared, placement, self.id, &base);
                let inputs = Inputs::new().input(&base);
                let whole = unit.fetch().or_raise().remove(0).reshape(placement.dims());
                custom_vjp(inputs, whole, move |dy: Tensor<D>| unit.reduce(vec![Some(dy.into_dispatch())]).or_raise())
            }
            // Whole already: a vector, or a block's that has been gathered.
            _ => match self.shared.config.compute {
                Some(dtype) if base.dtype() != dtype => base.cast(dtype),
                _ => base,
            },
        }
    }
}

thread_local! {
    static FOUND: RefCell<Option<Option<Arc<Shared>>>> = const { RefCell::new(None) };
}

/// Runs `visit` over a module, and gives what its parameters are sharded with.
///
/// Burn shows visitors a parameter without what is attached to it, and erases that one's type; that it is visited itself is the
/// one call that reaches it. So it leaves its handle here, for the length of this call.
pub(super) fn found(visit: impl FnOnce()) -> Option<Arc<Shared>> {
    struct Restore(Option<Option<Arc<Shared>>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FOUND.set(self.0.take());
        }
    }
    let _restore = Restore(FOUND.replace(Some(None)));
    visit();
    FOUND.take().flatten()
}

/// It holds no parameter; visiting it is how it is found.
impl Module for Gather {
    fn visit<V: ModuleVisitor>(&self, _: &mut V) {
        FOUND.with_borrow_mut(|found| {
            if let Some(slot @ None) = found {
                *slot = Some(self.shared.clone());
            }
        });
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }
}
