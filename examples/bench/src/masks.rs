//! What masks cost: time follows the pairs of tokens that see each other, not the square of the length.

use std::fmt::Write;

use anyhow::{Context, Result};
use burn::tensor::{Device, Distribution, Tensor};
use burn_context_parallel::flash::{FlashOptions, flash_attention, reference};
use burn_context_parallel::sequence::Documents;
use burn_context_parallel::vjp::pullback;
use llama::DeviceChoice;

use crate::measure::{Samples, agree, order, table};
use crate::refuse;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Tokens of the sequence, S; several are measured one after the other.
    #[arg(long, num_args = 1.., default_values_t = [4096, 8192, 16384])]
    seq_len: Vec<usize>,
    /// Tokens of the window, and of each document.
    #[arg(long, default_value_t = 1024)]
    window: usize,
    /// Heads, H.
    #[arg(long, default_value_t = 2)]
    heads: usize,
    /// Head dimension, D.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Measured turns, after one that is not.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Where it runs, as this program was built: flex, cpu, wgpu, vulkan, cuda:N, rocm:N, metal.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::FLEX)]
    device: DeviceChoice,
}

pub fn run(args: &Args) -> Result<String> {
    if args.seq_len.contains(&0) || args.window * args.heads * args.head_dim == 0 {
        refuse("--seq-len, --window, --heads, --head-dim: use positive numbers".to_owned());
    }
    let device = args.device.open().unwrap_or_else(|error| refuse(format!("--device: {error}")));
    let mut out = format!(
        "flash attention, f32, on {}, {} heads of {}, forward + backward under autodiff; medians of {} turns\n\
         pairs: of tokens that see each other; ratios are to causal at the same length\n\n",
        args.device, args.heads, args.head_dim, args.repeats
    );
    let mut rows = table(&["S", "mask", "pairs", "ratio", "s", "ratio"]);
    check(args, &device)?;
    for &len in &args.seq_len {
        let masks = masks(args.window, len)?;
        let inputs = inputs(args, len, &device);
        let mut samples = vec![Samples::default(); masks.len()];
        for (_, options) in &masks {
            step(&inputs, options)?;
        }
        for turn in 0..args.repeats as usize {
            for index in order(masks.len(), turn) {
                samples[index].take(&device, || step(&inputs, &masks[index].1))?;
            }
        }
        let base = pairs(&masks[0].1, len);
        for ((name, options), sample) in masks.iter().zip(&samples) {
            let seen = pairs(options, len);
            rows.add_row([
                len.to_string(),
                name.clone(),
                seen.to_string(),
                format!("{:.3}", seen as f64 / base as f64),
                format!("{:.3}", sample.seconds()),
                format!("{:.3}", sample.seconds() / samples[0].seconds()),
            ]);
        }
    }
    write!(out, "{rows}")?;
    Ok(out)
}

fn masks(window: usize, len: usize) -> Result<Vec<(String, FlashOptions)>> {
    let lengths: Vec<usize> = (0..len).step_by(window).map(|start| window.min(len - start)).collect();
    let documents = Documents::from_lengths(&lengths)?;
    Ok(vec![
        ("causal".to_owned(), FlashOptions::causal()),
        (format!("causal, window {window}"), FlashOptions::causal().with_window(window)),
        (format!("causal, documents of {window}"), FlashOptions::causal().with_documents(documents)),
        (
            format!("window of {} to both sides", window / 2),
            FlashOptions::full().with_window(window / 2 + 1).with_lookahead(window / 2),
        ),
        ("causal, softcap 30".to_owned(), FlashOptions::causal().with_softcap(30.0)),
    ])
}

/// Counted, not computed: from the limits of each query.
fn pairs(options: &FlashOptions, len: usize) -> u64 {
    let ahead = if options.causal { 0 } else { options.lookahead.unwrap_or(len) };
    (0..len)
        .map(|i| {
            let (mut low, mut high) =
                (options.window.map_or(0, |w| (i + 1).saturating_sub(w)), (i + ahead + 1).min(len));
            if let Some((ids, _)) = &options.documents {
                let ids = ids.row(0);
                low = low.max(ids.partition_point(|id| *id < ids[i]));
                high = high.min(ids.partition_point(|id| *id <= ids[i]));
            }
            high.saturating_sub(low) as u64
        })
        .sum()
}

fn inputs(args: &Args, len: usize, device: &Device) -> [Tensor<4>; 4] {
    let shape = [1, args.heads, len, args.head_dim];
    std::array::from_fn(|_| Tensor::random(shape, Distribution::Normal(0.0, 1.0), device))
}

/// Results before times: every mask against all scores in memory, at a short length.
fn check(args: &Args, device: &Device) -> Result<()> {
    const LEN: usize = 700;
    let inputs = inputs(args, LEN, device);
    for (name, options) in masks(args.window.min(150), LEN)? {
        let [q, k, v, _] = inputs.clone();
        let expected = reference::attention(q.clone(), k.clone(), v.clone(), &options)?.into_data();
        agree("out", &flash_attention(q, k, v, &options)?.into_data(), &expected).context(name)?;
    }
    Ok(())
}

/// The gradients of q, k, v.
fn step([q, k, v, d_out]: &[Tensor<4>; 4], options: &FlashOptions) -> Result<[Tensor<4>; 3]> {
    let [q, k, v] = [q, k, v].map(|x| x.clone().autodiff().require_grad());
    let out = flash_attention(q.clone(), k.clone(), v.clone(), options)?;
    let mut grads = pullback(out, d_out.clone());
    let mut grad = |x: Tensor<4>| x.grad_remove(&mut grads).context("no gradient");
    Ok([grad(q)?, grad(k)?, grad(v)?])
}
