//! A table look-up that keeps no table.

use burn::module::Param;
use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use super::Unit;
use crate::buffer::{accumulator, zeros};
use crate::vjp::{Inputs, beside, custom_vjp};
use crate::{Error, OrRaise, Result, raise};

/// Rows of `table` [V, E] for ids [B, L]: [B, L, E]. As Burn's, which it is where the table is not sharded; a sharded one is
/// gathered, read and freed at once, since the backward pass needs ids only.
///
/// # Panics
///
/// [Raises](crate::raise) if the collective fails, or the table is sharded and carries LoRA.
///
/// # Memory
///
/// The whole table for the length of the look-up, and its gradient for that of the backward step.
///
/// # Communication
///
/// One all-gather, in backward one reduce-scatter.
pub fn embedding(table: &Param<Tensor<2>>, ids: Tensor<2, Int>) -> Tensor<3> {
    let unit = Unit::of(table);
    if !unit.is_sharded() {
        let table = table.val();
        let ids = beside(ids, &table);
        return burn::tensor::module::embedding(table, ids);
    }
    if unit.entries().len() > 1 {
        raise(Error::unsupported(
            "fsdp::embedding",
            "a sharded table that carries LoRA",
            "attach LoRA to other layers, or keep the table whole (FsdpConfig::whole_below)",
        ));
    }
    sharded(table, unit, ids).or_raise()
}

fn sharded(table: &Param<Tensor<2>>, unit: Unit, ids: Tensor<2, Int>) -> Result<Tensor<3>> {
    let base = table.base();
    let inputs = Inputs::new().leaves([base.clone().into_dispatch()]);
    let whole = unit.gather(&burn::module::Module::valid(table))?.val();
    let ids = ids.inner();
    let dims = whole.dims();
    let y = burn::tensor::module::embedding(whole, ids.clone());
    Ok(custom_vjp(inputs, y, move |dy: Tensor<3>| {
        let [batch, len, width] = dy.dims();
        let exact = accumulator(dy.dtype());
        let sum = zeros(dims, &dy.device(), exact);
        let dy = dy.cast(exact).reshape([batch * len, width]);
        let gradient = sum.select_assign(0, ids.reshape([batch * len]), dy, IndexingUpdateOp::Add);
        unit.reduce(vec![Some(gradient.into_dispatch())]).or_raise()
    }))
}
