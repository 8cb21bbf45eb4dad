//! Floating point operations of one rank in one step.
//!
//! B batch, S sequence, L local sequence, P ranks of a sequence, H query heads, D head dimension, E width, F feed-forward width, V
//! vocabulary.

use burn_context_parallel::attention::HeadSplit;

use super::{Attention, PlanError, Setup};

/// Operations by part; a multiplication and an addition are two.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flops {
    /// Matrix products that the loss and its gradients need.
    pub matmul: f64,
    /// Matrix products that are computed again.
    pub matmul_again: f64,
    /// Attention that the loss and its gradients need; of a causal mask only what is not masked.
    pub attention: f64,
    /// Attention that is computed again.
    pub attention_again: f64,
}

impl Flops {
    /// All that is computed.
    pub fn total(&self) -> f64 {
        self.matmul + self.matmul_again + self.attention + self.attention_again
    }

    /// What the loss and its gradients need: what a model's utilisation is counted in.
    pub fn needed(&self) -> f64 {
        self.matmul + self.attention
    }
}

/// What the rank with the most heads computes in a step.
///
/// ```text
/// a matrix of n elements    6 n a token: 2 forward, 4 backward;  2 more wherever it is computed again
/// causal attention          3.5 x 2 S^2 D a head and block:  4 S^2 D / 2 forward, 2.5 times that backward;  1 more if computed again
/// ```
///
/// Computed again are: a block under a checkpoint; the feed-forward in tiles; the output layer in tiles; q, k and v under U-Pipe's
/// backward pass. Windows are not taken off.
///
/// # Errors
///
/// [`PlanError`] if the setup cannot run.
///
/// ```
/// use burn_upipe::plan::{Setup, flops, model};
///
/// let setup = Setup::published(model("llama-3-8b")?, 1 << 20, 8);
/// let flops = flops(&setup)?;
/// // At a million tokens attention is nearly everything.
/// assert!(flops.attention > 15.0 * flops.matmul);
/// assert_eq!(flops.attention, 3.5 * 2.0 * (1u64 << 40) as f64 * 128.0 * 4.0 * 32.0);
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn flops(setup: &Setup) -> Result<Flops, PlanError> {
    setup.check()?;
    let (model, techniques) = (&setup.model, &setup.techniques);
    let passes = setup.accumulate as f64 * setup.batch as f64;
    let layers = model.layers as f64;
    let tokens = passes * setup.local() as f64;
    let qkv = model.width as f64 * ((model.heads + 2 * model.kv_heads) * model.head_dim) as f64;
    let mlp = 3.0 * model.width as f64 * model.inner as f64;
    let block = model.block_matrices() as f64;
    let table = model.table() as f64;

    let again = |when: bool, elements: f64| if when { 2.0 * elements * tokens } else { 0.0 };
    let checkpoint = techniques.checkpoint.is_some();
    let matmul_again = layers
        * (again(checkpoint, block)
            + again(techniques.mlp_tile.is_some(), mlp)
            + again(matches!(setup.attention(), Attention::UPipe { .. }), qkv))
        + again(techniques.loss_tile.is_some(), table);

    let split = HeadSplit::new(model.heads, model.kv_heads, setup.mesh.ulysses)?;
    let heads = split.queries(0).len() as f64;
    let length = setup.seq_len as f64;
    let forward = passes * layers * heads * 2.0 * length * length * model.head_dim as f64;
    Ok(Flops {
        matmul: 6.0 * tokens * (layers * block + table),
        matmul_again,
        attention: 3.5 * forward,
        attention_again: if checkpoint { forward } else { 0.0 },
    })
}
