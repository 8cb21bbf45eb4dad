//! Flash attention against attention that keeps every score, and against Burn's own.
//!
//! H heads, S sequence, D head dimension.

use std::fmt::Write;

use anyhow::{Context, Result};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Distribution, Tensor};
use burn_context_parallel::flash::{Blueprint, FlashOptions, blueprint_for, flash_attention, reference};
use burn_context_parallel::vjp::pullback;
use llama::DeviceChoice;

use crate::measure::{Samples, agree, order, table};
use crate::refuse;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Tokens of the sequence, S; several are measured one after the other.
    #[arg(long, num_args = 1.., default_values_t = [1024, 2048, 4096])]
    seq_len: Vec<usize>,
    /// Heads, H.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Head dimension, D.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Measured turns, after one that is not.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Where it runs, as this program was built: flex, cpu, wgpu, vulkan, cuda:N, rocm:N, metal.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::FLEX)]
    device: DeviceChoice,
    /// How kernels are cut on a CubeCL device, in place of what is chosen for it: block:64x64v4u256 (own x step rows, vector, units), of all
    /// kernels, or of forward, dq, and dk and dv.
    #[arg(long, value_name = "TILES")]
    blueprint: Option<Blueprint>,
}

impl Args {
    fn options(&self) -> FlashOptions {
        let causal = FlashOptions::causal();
        match self.blueprint {
            Some(blueprint) => causal.with_blueprint(blueprint),
            None => causal,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Side {
    Flash,
    Reference,
    Burn,
}

const SIDES: [Side; 3] = [Side::Flash, Side::Reference, Side::Burn];

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Flash => "flash",
            Self::Reference => "O(S^2)",
            Self::Burn => "burn",
        }
    }

    fn attend(self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: &FlashOptions) -> Result<Tensor<4>> {
        Ok(match self {
            Self::Flash => flash_attention(q, k, v, options)?,
            Self::Reference => reference::attention(q, k, v, &FlashOptions::causal())?,
            Self::Burn => {
                let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
                attention(q, k, v, None, None, options)
            }
        })
    }

    /// Output and the gradients of q, k, v.
    fn step(self, inputs: &[Tensor<4>; 4], options: &FlashOptions) -> Result<[Tensor<4>; 4]> {
        let [q, k, v, d_out] = inputs;
        let [q, k, v] = [q, k, v].map(|x| x.clone().autodiff().require_grad());
        let out = self.attend(q.clone(), k.clone(), v.clone(), options)?;
        let value = out.clone().inner();
        let mut grads = pullback(out, d_out.clone());
        let mut grad = |x: Tensor<4>| x.grad_remove(&mut grads).context("no gradient");
        Ok([value, grad(q)?, grad(k)?, grad(v)?])
    }
}

pub fn run(args: &Args) -> Result<String> {
    if args.seq_len.contains(&0) || [args.heads, args.head_dim].contains(&0) {
        refuse("--seq-len, --heads, --head-dim: use positive numbers".to_owned());
    }
    let device = args.device.open().unwrap_or_else(|error| refuse(format!("--device: {error}")));
    let peak = match args.device.runtime().is_heap() {
        true => "bytes above the inputs",
        false => "bytes by which the device's pools grow",
    };
    let mut out = format!(
        "causal attention, f32, on {}, one sequence, {} heads of {}: forward off the tape, and forward + backward under autodiff\n\
         medians of {} turns; GFLOP/s at 4 D a visible pair of tokens forward, 14 D forward + backward (what else a side computes does\n\
         not count); peak: {peak}, forward + backward\n\n",
        args.device, args.heads, args.head_dim, args.repeats
    );
    let mut rows =
        table(&["S", "side", "forward s", "GFLOP/s", "ratio", "fwd + bwd s", "GFLOP/s", "ratio", "peak MiB", "ratio"]);
    let mut blueprints = String::new();
    for &len in &args.seq_len {
        let q = || Tensor::<4>::zeros([1, args.heads, len, args.head_dim], &device);
        match blueprint_for(&q(), &q(), &args.options()) {
            Ok(None) if args.blueprint.is_some() => {
                refuse(format!("--blueprint: {} has no kernels to be cut", args.device))
            }
            Ok(_) => {}
            Err(error) if args.blueprint.is_some() => refuse(format!("--blueprint: {error}")),
            Err(error) => refuse(format!("--device: {error}")),
        }
        let sides = measure(args, len, &device)?;
        if let Some(blueprint) = blueprint_for(&q(), &q(), &args.options())? {
            write!(blueprints, "\nS {len}: kernels {blueprint}")?;
        }
        let pairs = args.heads as f64 * len as f64 * (len as f64 + 1.0) / 2.0;
        let gflops = |per_pair: f64, seconds: f64| per_pair * args.head_dim as f64 * pairs / seconds / 1e9;
        let [(forward0, both0), ..] = &sides;
        for (side, (forward, both)) in SIDES.iter().zip(&sides) {
            rows.add_row([
                len.to_string(),
                side.name().to_owned(),
                format!("{:.4}", forward.seconds()),
                format!("{:.1}", gflops(4.0, forward.seconds())),
                format!("{:.2}", forward.seconds() / forward0.seconds()),
                format!("{:.4}", both.seconds()),
                format!("{:.1}", gflops(14.0, both.seconds())),
                format!("{:.2}", both.seconds() / both0.seconds()),
                format!("{:.1}", both.mib()),
                format!("{:.2}", both.mib() / both0.mib()),
            ]);
        }
    }
    write!(out, "{rows}\n\nratio: times flash's{blueprints}")?;
    Ok(out)
}

/// Forward, and forward + backward, of each side.
fn measure(args: &Args, len: usize, device: &Device) -> Result<[(Samples, Samples); 3]> {
    let random = |heads| -> [Tensor<4>; 4] {
        let shape = [1, heads, len, args.head_dim];
        std::array::from_fn(|_| Tensor::random(shape, Distribution::Normal(0.0, 1.0), device))
    };
    let options = args.options();
    // Kernels are tuned with one head: what Burn tunes products by does not say how many, and some it tries on processors take minutes.
    let one_head = random(1);
    for side in SIDES {
        side.step(&one_head, &options)?;
    }
    drop(one_head);

    let inputs = random(args.heads);
    let expected = Side::Reference.step(&inputs, &options)?.map(Tensor::into_data);
    for side in SIDES {
        let found = side.step(&inputs, &options)?.map(Tensor::into_data);
        for ((name, a), b) in ["out", "dq", "dk", "dv"].iter().zip(&found).zip(&expected) {
            agree(name, a, b).with_context(|| format!("{} at S {len}", side.name()))?;
        }
    }
    drop(expected);

    let mut samples: [(Samples, Samples); 3] = Default::default();
    for (side, (_, both)) in SIDES.iter().zip(&mut samples) {
        both.take_pools(device, || side.step(&inputs, &options))?;
    }
    for turn in 0..args.repeats as usize {
        for index in order(SIDES.len(), turn) {
            let (forward, both) = &mut samples[index];
            let [q, k, v] = [0, 1, 2].map(|i| inputs[i].clone());
            forward.take(device, || SIDES[index].attend(q, k, v, &options))?;
            both.take(device, || SIDES[index].step(&inputs, &options))?;
        }
    }
    Ok(samples)
}
