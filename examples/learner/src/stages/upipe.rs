//! U-Pipe attention: some heads at a time.

use burn::tensor::Tensor;
use burn_context_parallel::Result;
use burn_context_parallel::attention::FlashMultiHeadAttention;
use burn_upipe::upipe::{UPipeAttention, UPipeAttentionConfig};

use super::with_attention;
use crate::model::{Attend, HEADS, Model, WIDTH};

/// The same function of the same parameters.
///
/// # Errors
///
/// None for this model; heads that no stage can serve are refused.
pub fn upipe(model: Model<FlashMultiHeadAttention>) -> Result<Model<UPipeAttention>> {
    let config = UPipeAttentionConfig::new(WIDTH, HEADS, HEADS, WIDTH / HEADS);
    with_attention(model, |attention| {
        let device = attention.query.weight.lazy_device();
        let mut upipe = config.clone().with_qkv_bias(true).with_output_bias(true).init(&device)?;
        upipe.q_proj = attention.query;
        upipe.k_proj = attention.key;
        upipe.v_proj = attention.value;
        upipe.o_proj = attention.output;
        Ok(upipe)
    })
}

impl Attend for UPipeAttention {
    fn attend(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(x)
    }
}
