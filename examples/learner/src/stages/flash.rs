//! Flash attention, with the parameters of Burn's; inside the strategy it runs across ranks.

use burn::nn::attention::MultiHeadAttention;
use burn::tensor::Tensor;
use burn_context_parallel::Result;
use burn_context_parallel::attention::{FlashMhaInput, FlashMultiHeadAttention};

use super::with_attention;
use crate::model::{Attend, Model};

/// The same function of the same parameters.
///
/// # Errors
///
/// None for this model; Burn's module has options (dropout on weights) that have no counterpart.
pub fn flash(model: Model<MultiHeadAttention>) -> Result<Model<FlashMultiHeadAttention>> {
    with_attention(model, |attention| Ok(FlashMultiHeadAttention::from_burn(attention)?.with_causal(true)))
}

impl Attend for FlashMultiHeadAttention {
    fn attend(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(FlashMhaInput::self_attn(x))
    }
}
