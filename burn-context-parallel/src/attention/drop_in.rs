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
    if current().is_none() {
        let offset = key.dims()[2] as i64 - query.dims()[2] as i64;
        flash = flash.with_offsets(offset, 0);
    }
    attention_with(query, key, value, &flash)
}

/// Attention with [`FlashOptions`], for what Burn's options have no room for: a window, a lookahead, positions per token. Inside a
/// [scope](super::ContextParallel::scope) across the ranks that share the sequence, and within its documents; outside it plain flash attention.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_context_parallel::attention::attention_with;
/// use burn_context_parallel::flash::FlashOptions;
///
/// let x = Tensor::<4>::ones([1, 2, 6, 4], &Device::flex());
/// let window = FlashOptions::causal().with_window(3);
/// assert_eq!(attention_with(x.clone(), x.clone(), x, &window)?.dims(), [1, 2, 6, 4]);
/// # Ok::<(), burn_context_parallel::Error>(())
/// ```
///
/// # Shapes
///
/// As [`attention()`].
///
/// # Errors
///
/// [`Error::Invalid`] for shapes or options that do not fit, [`Error::Group`] if another rank fails.
pub fn attention_with(query: Tensor<4>, key: Tensor<4>, value: Tensor<4>, options: &FlashOptions) -> Result<Tensor<4>> {
    match current() {
        None => flash_attention(query, key, value, options),
        Some(context) => {
            context.expect(NAME, query.dims()[0], query.dims()[2])?;
            context.expect(NAME, key.dims()[0], key.dims()[2])?;
            let (layout, options) = (context.layout(), context.bound(options)?);
            ulysses(query, key, value, &options, context.group(), layout, layout)
        }
    }
}
