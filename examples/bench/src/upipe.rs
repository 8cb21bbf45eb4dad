//! U-Pipe against Ulysses: one attention layer over ranks, forward and backward.
//!
//! S sequence, L local sequence, P ranks, H query heads, G key/value heads, D head dimension, E model width, U query heads a stage.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn_context_parallel::attention::SequenceContext;
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_context_parallel::sequence::{RotaryFrequencies, SequenceLayout};
use burn_context_parallel::vjp::pullback;
use burn_upipe::profile::heap;
use burn_upipe::upipe::{AttentionScheme, UPipeAttention, UPipeAttentionConfig};

use crate::measure::{Samples, agree, order, table};
use crate::refuse;
use crate::sweep::{self, Point};

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Tokens of the sequence, S.
    #[arg(long, default_value_t = 8192)]
    seq_len: usize,
    /// Ranks (threads), P.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Query heads, H.
    #[arg(long, default_value_t = 32)]
    heads: usize,
    /// Key/value heads, G.
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    /// Head dimension, D; the model's width is H * D.
    #[arg(long, default_value_t = 16)]
    head_dim: usize,
    /// Query heads (over all ranks) a stage, U; several are measured side by side. Default: one a rank, two, four, up to all heads.
    #[arg(long, num_args = 1..)]
    heads_per_stage: Vec<usize>,
    /// Where to draw memory and throughput over U.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Measured turns, after one that is not.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
}

/// One scheme on one rank.
struct Side {
    module: UPipeAttention,
    samples: Samples,
    sent: u64,
}

/// What rank 0 brings home of one scheme.
struct Result0 {
    samples: Samples,
    sent: u64,
}

pub fn run(args: &Args) -> Result<String> {
    let stages = match &args.heads_per_stage[..] {
        // Whatever the ranks, the widest stage has all heads.
        [] => std::iter::successors(Some(args.ranks.max(1)), |u| u.checked_mul(2))
            .take_while(|u| *u < args.heads)
            .chain([args.heads])
            .collect(),
        given => given.to_vec(),
    };
    if let Some(u) = stages.iter().find(|u| !(1..=args.heads).contains(*u)) {
        refuse(format!("--heads-per-stage {u} of {} query heads: use 1 to {}", args.heads, args.heads));
    }
    if args.seq_len == 0 || args.ranks == 0 || args.heads * args.kv_heads * args.head_dim == 0 {
        refuse("--seq-len, --ranks, --heads, --kv-heads, --head-dim: use positive numbers".to_owned());
    }
    let mut schemes = vec![AttentionScheme::Ulysses];
    schemes.extend(stages.iter().map(|u| AttentionScheme::UPipe { heads_per_stage: Some(*u) }));

    let (ranks_args, ranks_schemes) = (args.clone(), schemes.clone());
    let sides = launch(args.ranks, move |world| rank(&ranks_args, &ranks_schemes, &world))?.swap_remove(0);

    let mut out = format!(
        "one attention layer, forward and backward (f32, causal, rotary): S {}, P {} ranks (threads), E {}, {}/{} heads of {}\n\
         medians of {} turns; peak: bytes above those at the start, each rank's own, summed over ranks\n\n",
        args.seq_len,
        args.ranks,
        args.heads * args.head_dim,
        args.heads,
        args.kv_heads,
        args.head_dim,
        args.repeats
    );
    let mut rows = table(&["scheme", "stages", "s", "tokens/s", "ratio", "peak MiB", "ratio", "sent MiB/rank"]);
    let base = &sides[0].samples;
    for (scheme, side) in schemes.iter().zip(&sides) {
        let (name, stages) = match scheme {
            AttentionScheme::UPipe { heads_per_stage: Some(u) } => (format!("U-Pipe, U {u}"), args.heads.div_ceil(*u)),
            _ => ("Ulysses".to_owned(), 1),
        };
        let Result0 { samples, sent } = side;
        rows.add_row([
            name,
            stages.to_string(),
            format!("{:.3}", samples.seconds()),
            format!("{:.0}", args.seq_len as f64 / samples.seconds()),
            format!("{:.2}", base.seconds() / samples.seconds()),
            format!("{:.1}", samples.mib()),
            format!("{:.2}", samples.mib() / base.mib()),
            format!("{:.1}", *sent as f64 / (1 << 20) as f64),
        ]);
    }
    write!(out, "{rows}")?;
    if let Some(path) = &args.svg {
        let point = |heads: usize, side: &Result0| Point {
            heads,
            tokens_per_s: args.seq_len as f64 / side.samples.seconds(),
            peak_mib: side.samples.mib(),
        };
        let mut points: Vec<Point> = stages.iter().zip(&sides[1..]).map(|(u, side)| point(*u, side)).collect();
        points.sort_by_key(|point| point.heads);
        let title = format!(
            "One attention layer, forward and backward: S {}, {} ranks, {}/{} heads of {}",
            args.seq_len, args.ranks, args.heads, args.kv_heads, args.head_dim
        );
        sweep::draw(path, &title, &points, point(args.heads, &sides[0]))?;
        write!(out, "\n\n{}", path.display())?;
    }
    Ok(out)
}

fn rank(args: &Args, schemes: &[AttentionScheme], world: &ProcessGroup) -> Result<Vec<Result0>> {
    // Ranks share a heap here, and would not elsewhere; which of them are at their peaks together is a matter of chance.
    let _owned = heap::own(world.rank());
    let device = Device::flex().autodiff();
    let layout = SequenceLayout::contiguous(args.seq_len, args.ranks)?;
    let local = layout.local_len(world.rank());
    let context = SequenceContext::from_layout(world, layout, 1)?;
    let width = args.heads * args.head_dim;

    // Random weights differ from rank to rank; the first rank's are used everywhere.
    let config = UPipeAttentionConfig::new(width, args.heads, args.kv_heads, args.head_dim);
    let module = config.init(&device)?.with_rotary(RotaryFrequencies::new(args.head_dim, 10_000.0)?)?;
    let module = of_first_rank(module, world)?;
    let mut sides = schemes
        .iter()
        .map(|scheme| Ok(Side { module: module.clone().with_scheme(*scheme)?, samples: Samples::default(), sent: 0 }))
        .collect::<Result<Vec<_>>>()?;
    let random = || Tensor::<3>::random([1, local, width], Distribution::Default, &Device::flex());
    let (x, dy) = (random(), random());

    // Warm-up, and the comparison.
    let mut expected: Option<[TensorData; 2]> = None;
    for (side, scheme) in sides.iter().zip(schemes) {
        let y = side.module.forward_in(x.clone().autodiff(), &context)?.inner();
        let found = [y, step(&side.module, &x, &dy, &context)?].map(Tensor::into_data);
        match &expected {
            None => expected = Some(found),
            Some(expected) => {
                for ((name, a), b) in ["y", "dx"].iter().zip(&found).zip(expected) {
                    agree(name, a, b).with_context(|| format!("{scheme:?} against {:?}", schemes[0]))?;
                }
            }
        }
    }
    drop(expected);

    for turn in 0..args.repeats as usize {
        for index in order(sides.len(), turn) {
            let side = &mut sides[index];
            world.reset_traffic();
            world.barrier()?;
            if world.rank() == 0 {
                heap::reset_peak();
            }
            world.barrier()?;
            let before = heap::in_use_by(world.rank());
            let started = Instant::now();
            drop(step(&side.module, &x, &dy, &context)?);
            world.barrier()?;
            let seconds = started.elapsed().as_secs_f64();
            let peak = heap::peak_by(world.rank()).saturating_sub(before);
            side.samples.add(seconds, sum(peak, world)?);
            side.sent = world.traffic().total().sent;
        }
    }
    Ok(sides.into_iter().map(|side| Result0 { samples: side.samples, sent: side.sent }).collect())
}

/// Over all ranks.
fn sum(bytes: usize, world: &ProcessGroup) -> Result<usize> {
    let all = world.all_gather(TensorData::from([bytes as f64]))?;
    Ok(all.iter().flat_map(|data| data.iter::<f64>()).sum::<f64>() as usize)
}

/// Forward and backward: dx. Gradients of weights are computed, too.
fn step(module: &UPipeAttention, x: &Tensor<3>, dy: &Tensor<3>, context: &SequenceContext) -> Result<Tensor<3>> {
    let x = x.clone().autodiff().require_grad();
    let y = module.forward_in(x.clone(), context)?;
    let mut grads = pullback(y, dy.clone());
    x.grad_remove(&mut grads).context("no gradient of x")
}

/// The first rank's weights, on every rank.
fn of_first_rank(module: UPipeAttention, world: &ProcessGroup) -> Result<UPipeAttention> {
    use burn::module::{ModuleMapper, Param};
    struct Copy<'a>(&'a ProcessGroup, Option<burn_context_parallel::Error>);
    impl ModuleMapper for Copy<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let group = self.0;
            let error = &mut self.1;
            param.map(|weight| {
                let mine = (group.rank() == 0).then(|| weight.clone().inner());
                match group.at(&weight.device()).broadcast(mine, 0) {
                    Ok(first) => Tensor::from_inner(first).require_grad(),
                    Err(failed) => {
                        *error = Some(failed);
                        weight
                    }
                }
            })
        }
    }
    let mut copy = Copy(world, None);
    let module = module.map(&mut copy);
    copy.1.map_or(Ok(module), |error| Err(error.into()))
}
