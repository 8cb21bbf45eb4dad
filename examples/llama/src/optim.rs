//! AdamW as PyTorch's users mean it.

use burn::optim::{AdamW, AdamWConfig, ModuleOptimizer};
pub use burn_context_parallel::collective::clip_grad_norm;

/// AdamW with betas 0.9 and 0.999 and epsilon 1e-8. (Burn's own defaults are epsilon 1e-5 and weight decay 1e-4.)
pub fn adamw(weight_decay: f32) -> ModuleOptimizer {
    config(weight_decay).init()
}

/// [`adamw`] for one parameter, as [`ShardedOptimizer`](burn_context_parallel::fsdp::ShardedOptimizer) takes it.
pub fn adamw_rule(weight_decay: f32) -> AdamW {
    config(weight_decay).build()
}

fn config(weight_decay: f32) -> AdamWConfig {
    AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.999).with_epsilon(1e-8).with_weight_decay(weight_decay)
}
