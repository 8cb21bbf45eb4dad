//! What each stage changes, a file each.

mod all;
mod flash;
mod plain;
mod upipe;

use burn::module::Module;
use burn_context_parallel::Result;

pub use all::{AllModel, all};
pub use flash::flash;
pub use plain::plain;
pub use upipe::upipe;

use crate::model::{Block, Model};

/// The same model with another attention, its parameters taken over.
fn with_attention<A: Module, B: Module>(model: Model<A>, convert: impl Fn(A) -> Result<B>) -> Result<Model<B>> {
    let blocks = model.blocks.into_iter().map(|block| {
        let attention = convert(block.attention)?;
        Ok(Block { norm_1: block.norm_1, attention, norm_2: block.norm_2, up: block.up, down: block.down })
    });
    Ok(Model {
        blocks: blocks.collect::<Result<_>>()?,
        tokens: model.tokens,
        positions: model.positions,
        norm: model.norm,
        head: model.head,
    })
}
