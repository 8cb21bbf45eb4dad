//! Burn's own attention: every weight [B, H, S, S] exists.

use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::tensor::{Device, Tensor};

use crate::model::{Attend, HEADS, Model, WIDTH};

/// The model as a Burn author has it.
pub fn plain(longest: usize, device: &Device) -> Model<MultiHeadAttention> {
    Model::new(longest, device, || MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0).init(device))
}

impl Attend for MultiHeadAttention {
    fn attend(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, len, _] = x.dims();
        let mask = generate_autoregressive_mask(batch, len, &x.device());
        self.forward(MhaInput::self_attn(x).mask_attn(mask)).context
    }
}
