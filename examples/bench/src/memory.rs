//! What each technique is worth: the most memory that one training step of a small Llama takes, against the sequence's length.
//!
//! S sequence, P ranks, H query heads, G key/value heads, D head dimension, L layers.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::module::{attention, embedding};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Tensor};
use burn_context_parallel::attention::SequenceContext;
use burn_context_parallel::collective::sum_gradients;
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_context_parallel::sequence::{Batch, RotaryTable, SequenceLayout, Shard, apply_rotary};
use burn_upipe::profile::heap;
use burn_upipe::tiling::{TokenLoss, tiled_cross_entropy};
use burn_upipe::upipe::AttentionScheme;
use llama::{Llama, LlamaConfig, ParallelConfig, parallelize};

use crate::measure::table;
use crate::picture::{Series, picture};
use crate::refuse;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Tokens of the sequence, S; several are measured one after the other.
    #[arg(long, num_args = 1.., default_values_t = [512, 1024, 2048, 4096, 8192, 16384])]
    seq_len: Vec<usize>,
    /// Ranks (threads) of the last lines, P.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Leaves Burn's own attention out where its scores, H S^2 a layer, would take more than this.
    #[arg(long, default_value_t = 512, value_name = "MIB")]
    scores_limit: usize,
    /// Also draws the table, as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// One line of the table: each has what the one before has, and one technique more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Burn,
    Flash,
    Checkpoint,
    Tiling,
    Ulysses,
    UPipe,
}

const SIDES: [Side; 6] = [Side::Burn, Side::Flash, Side::Checkpoint, Side::Tiling, Side::Ulysses, Side::UPipe];

impl Side {
    fn name(self, ranks: usize) -> String {
        match self {
            Self::Burn => "Burn's attention".to_owned(),
            Self::Flash => "flash attention".to_owned(),
            Self::Checkpoint => "+ checkpointed blocks".to_owned(),
            Self::Tiling => "+ tiles".to_owned(),
            Self::Ulysses => format!("+ Ulysses, {ranks} ranks"),
            Self::UPipe => format!("U-Pipe, {ranks} ranks"),
        }
    }

    fn ranks(self, args: &Args) -> usize {
        if matches!(self, Self::Ulysses | Self::UPipe) { args.ranks } else { 1 }
    }

    fn parallel(self) -> ParallelConfig {
        let tiles = matches!(self, Self::Tiling | Self::Ulysses | Self::UPipe);
        ParallelConfig {
            attention: match self {
                Self::Ulysses => AttentionScheme::Ulysses,
                Self::UPipe => AttentionScheme::UPipe { heads_per_stage: None },
                _ => AttentionScheme::Single,
            },
            checkpoint: tiles || self == Self::Checkpoint,
            blocks_per_checkpoint: 1,
            mlp_tile: tiles.then_some(256),
            norm_tile: tiles.then_some(256),
            loss_tile: tiles.then_some(256),
        }
    }
}

pub fn run(args: &Args) -> Result<String> {
    if args.seq_len.contains(&0) || args.ranks == 0 {
        refuse("--seq-len, --ranks: use positive numbers".to_owned());
    }
    let config = LlamaConfig::new(2048, 256, 704, 2, 16, 4);
    let device = Device::flex().autodiff();
    device.seed(0);
    let model = Llama::init(&config, &ParallelConfig::none(), &device)?;

    let mut rows =
        table(&[&["MiB a rank, S ="], &lengths(args).iter().map(String::as_str).collect::<Vec<_>>()[..]].concat());
    let mut expected = vec![None; args.seq_len.len()];
    let mut lines = Vec::new();
    for side in SIDES {
        let name = side.name(args.ranks);
        let mut row = vec![name.clone()];
        let mut points = Vec::new();
        for (&len, expected) in args.seq_len.iter().zip(&mut expected) {
            if side == Side::Burn && scores_mib(&config, len) > args.scores_limit {
                row.push("-".to_owned());
                continue;
            }
            let (loss, bytes) =
                step(side, side.ranks(args), &model, len).with_context(|| format!("{name}, S {len}"))?;
            let first = *expected.get_or_insert(loss);
            ensure!((loss - first).abs() <= 1e-4 * first, "{name}, S {len}: loss {loss} where the first has {first}");
            let mib = bytes as f64 / (1 << 20) as f64;
            row.push(format!("{mib:.1}"));
            points.push((len as f64, mib));
        }
        rows.add_row(row);
        lines.push(Series { name, points });
    }
    let mut out = format!(
        "one training step (loss and all gradients, f32) of a Llama of {} layers, E {}, {}/{} heads, F {}, V {}, one sequence of S\n\
         tokens: the most heap bytes alive above the weights; over ranks the sum of all, divided by their number. -: scores above {} MiB\n\n",
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
        args.scores_limit
    );
    write!(out, "{rows}")?;
    if let Some(path) = &args.svg {
        fs::write(path, picture("sequence length", "MiB a rank, one training step", &lines))
            .with_context(|| format!("--svg {}", path.display()))?;
    }
    Ok(out)
}

fn lengths(args: &Args) -> Vec<String> {
    args.seq_len.iter().map(usize::to_string).collect()
}

fn scores_mib(config: &LlamaConfig, len: usize) -> usize {
    (config.num_attention_heads * len * len * 4) >> 20
}

/// The loss of a step, and its bytes a rank.
fn step(side: Side, ranks: usize, model: &Llama, len: usize) -> Result<(f64, usize)> {
    let device = Device::flex().autodiff();
    let vocabulary = model.config().vocab_size;
    let batch = Batch::from_rows(&[(0..len).map(|i| (i * i % vocabulary) as i64).collect()])?;
    let model = parallelize(model.clone(), &side.parallel())?;
    // Forked here: ranks may share memory, never the leaves of a graph.
    let models = Mutex::new((0..ranks).map(|_| model.clone().fork(&device)).collect::<Vec<_>>());
    let shared = Arc::new((batch, models));
    let found = launch(ranks, move |world| {
        let (batch, models) = &*shared;
        let model = models.lock().unwrap_or_else(PoisonError::into_inner).pop().context("one a rank")?;
        let layout = SequenceLayout::contiguous(len, ranks)?;
        let shard = batch.shard(&layout, world.rank(), &device)?;
        world.barrier()?;
        let before = heap::in_use();
        if world.rank() == 0 {
            heap::reset_peak();
        }
        world.barrier()?;
        let loss = if side == Side::Burn { burn_loss(&model, &shard)? } else { model.loss(&shard, &world)? };
        let value = loss.mean.clone().inner().into_scalar::<f32>();
        let grads = GradientsParams::from_grads(loss.mean.backward(), &model);
        let grads = sum_gradients(grads, &model, &world)?;
        world.barrier()?;
        let peak = heap::peak().saturating_sub(before);
        world.barrier()?;
        drop(grads);
        Ok::<_, anyhow::Error>((f64::from(value), peak / ranks))
    })?;
    Ok(found[0])
}

/// The same model as one would write it without these crates: Burn's attention, nothing recomputed.
fn burn_loss(model: &Llama, shard: &Shard) -> Result<TokenLoss> {
    let config = model.config();
    let context = SequenceContext::new(&ProcessGroup::single(), shard)?;
    let mut x = embedding(model.embed_tokens.weight.val(), shard.tokens.clone().inner().autodiff());
    let table = context.rotary(&config.frequencies()?, x.dtype(), &x.device());
    for layer in &model.layers {
        let block = &layer.inner.inner;
        x = x.clone() + burn_attention(model, &block.self_attn, block.input_layernorm.inner.forward(x), &table);
        x = x.clone() + block.mlp.inner.forward(block.post_attention_layernorm.inner.forward(x));
    }
    let x = model.norm.inner.forward(x);
    let head = model.lm_head.as_ref().context("the head is not tied")?;
    Ok(tiled_cross_entropy(head, x, shard.targets.clone(), None, None, |head, x| head.forward(x))?)
}

fn burn_attention(
    model: &Llama,
    layer: &burn_upipe::upipe::UPipeAttention,
    x: Tensor<3>,
    table: &RotaryTable,
) -> Tensor<3> {
    let config = model.config();
    let (heads, kv_heads, dim) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let [batch, len, _] = x.dims();
    let q = layer.q_proj.forward(x.clone()).reshape([batch, len, heads, dim]);
    let k = layer.k_proj.forward(x.clone()).reshape([batch, len, kv_heads, dim]);
    let v = layer.v_proj.forward(x).reshape([batch, len, kv_heads, dim]);
    let (q, k) = (apply_rotary(q, table), apply_rotary(k, table));
    // Burn's attention knows no grouped queries.
    let shared = |x: Tensor<4>| {
        let group = heads / kv_heads;
        x.unsqueeze_dim::<5>(3)
            .expand([batch, len, kv_heads, group, dim])
            .reshape([batch, len, heads, dim])
            .swap_dims(1, 2)
    };
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let out = attention(q.swap_dims(1, 2), shared(k), shared(v), None, None, options);
    layer.o_proj.forward(out.swap_dims(1, 2).reshape([batch, len, heads * dim]))
}
