//! The drop-in for `burn::tensor::module::attention`.

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor};

use super::{current, ulysses};
use crate::flash::{FlashOptions, flash_attention};
use crate::{Error, OrRaise, Result};

const NAME: &str = "attention";

/// Attention with the signature of `burn::tensor::module::attention`: inside
/// [`ContextParallel::scope`](super::ContextParallel::scope) it runs across the ranks that share the sequence, outside it is plain flash
/// attention. Tracked, exact, O(S) memory in both directions.
///
/// In a scope, attention stays inside the documents of the batch, if it has any.
///
/// As in Burn, causal is aligned to the bottom right: query i sees key j if `j <= i + (Sk - Sq)`. Beyond Burn, k and v may have
/// fewer heads than q (grouped queries).
///
/// # Shapes
///
/// `query`: [B, H, L, D]; `key`, `value`: [B, G, L', D] -> [B, H, L, D]. In a scope, L = L' = the shard's length.
///
/// # Panics
///
/// [Raises](crate::raise) what [`try_attention`] returns as an error; Burn's signature has no room for one.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Tensor<4> {
    try_attention(query, key, value, mask, attn_bias, options).or_raise()
}

/// [`attention()`], with its errors as values.
///
/// # Errors
///
/// [`Error::Unsupported`] for a dense mask or a bias (never silently ignored), [`Error::Invalid`] for shapes that do
/// not fit, [`Error::Group`] if another rank fails.
pub fn try_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>> {
    const DENSE: &str = "it would take O(S^2) memory: use is_causal, FlashOptions with a window, or documents \
                         (Batch::with_documents); or ask for O(S^2) by name, flash::reference::dense_attention on one device";
    if mask.is_some() {
        return Err(Error::unsupported(NAME, "a dense mask", DENSE));
    }
    if attn_bias.is_some() {
        return Err(Error::unsupported(NAME, "an attention bias", DENSE));
    }
    let mut flash = if options.is_causal { FlashOptions::causal() } else { FlashOptions::full() };
    if let Some(scale) = options.scale {
        flash = flash.with_scale(scale);
    }
    flash.softcap = options.softcap;
    match current() {
        None => {
            let offset = key.dims()[2] as i64 - query.dims()[2] as i64;
            flash_attention(query, key, value, &flash.with_offsets(offset, 0))
        }
        Some(context) => {
            context.expect(NAME, query.dims()[0], query.dims()[2])?;
            context.expect(NAME, key.dims()[0], key.dims()[2])?;
            let (layout, flash) = (context.layout(), context.bound(&flash)?);
            ulysses(query, key, value, &flash, context.group(), layout, layout)
        }
    }
}
