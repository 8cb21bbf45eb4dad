//! What was typed: no side effects, nothing derived. What it means is in [`Request`](crate::Request).

use std::ffi::OsString;
use std::path::PathBuf;

use burn_context_parallel::group::MeshShape;
use clap::Parser;

use crate::error::{Error, Result};
use crate::values::{
    Checkpoint, Mode, Place, Precision, Scheme, Switch, Tile, Waiting, at_least_one, bytes, bytes_or_none, fraction,
    mesh, positive, tokens,
};

const AFTER: &str = "\
Where nothing is typed every technique is on, as U-Pipe was published: FSDP over all devices, attention upipe with one head a rank and
stage, checkpoints, offload to the host (where that is another memory than the device's), tiles; the optimizer is on the device.

Under fit what is typed is held, and what is not typed is searched: all meshes; attention at once, and in stages of every number of heads
that keeps all ranks equally busy; checkpoints of 1, 2 or 4 blocks, or none; offload of all, every second or every fourth of their inputs to
host or disk, or none; tiles of 512, 2048 or 8192 tokens, or none; shards with and without prefetch, or none; the optimizer's place. Of those
that are equally fast (within a thousandth) it names the one with the fewest techniques, of those the smallest, with tiles as large as fit.
Batch, micro-batches and what is in flight stay as they are.

Models: llama-3-8b, llama-3-70b, llama-3.2-1b, llama-3.2-3b, qwen3-0.6b, -1.7b, -4b, -8b, -14b, -32b; or the path of a config.json, or of
a folder with one: the families llama, mistral, qwen2, qwen3.
Devices: h100-80g, h200-141g, a100-40g, a100-80g, l40s-48g, rtx4090-24g (bf16); m4-pro-48g, m4-max-128g, m2-ultra-192g, m3-ultra-512g
(bf16, memory shared with the host); this (the machine at hand: ranks are threads, f32; its disk is what is free where temporary files go).
Sizes may be left out: of an a100 the larger one is meant.
Tokens may be written 1000000, 512K (2^19) or 1.5M (1.5 x 2^20); bytes 80G or 80GiB (x 2^30) or 1.9TB (x 10^12).

Bytes are those of one rank, the one that holds the most. A host's memory and disk are shared equally by its ranks.
--json prints one object: fits, binding_limit (device_memory, host_memory, disk, time, none: what is exceeded; if all fits, what a longer
sequence would exceed), max_seq_len, device_bytes_peak, host_bytes, disk_bytes, parts (name -> bytes at the peak), phases, collectives,
flops, seconds, ..., arguments (what to type for it); ladder adds ladder, fit adds tried and fitting. If there is no answer the object has
error and exit_status, and the error is on standard error, too.

Exit status: 0 if the question was answered, also if the answer is that it does not fit (fits is false); 1 if the answer could not be
written; 2 if the request makes no sense.

  plan --model llama-3-8b --device h100-80g --devices 8 --seq-len 3M
  plan max --model llama-3-8b --device h100-80g --devices 8 --attention ulysses
  plan ladder --model llama-3-8b --device h100-80g --devices 8 --seq-len 3M --svg ladder.svg
  plan fit --model qwen3-32b --device h100-80g --devices 16 --seq-len 1M --offload none";

/// What a training step takes, before it runs: memory by part and phase, communication, time; and what fits.
#[derive(Parser, Clone, Debug, PartialEq)]
#[command(name = "plan", after_help = AFTER)]
pub struct Args {
    /// What is asked. Default: plan.
    #[arg(value_enum, value_name = "MODE")]
    pub mode_word: Option<Mode>,
    /// The same as a flag.
    #[arg(long, value_enum, conflicts_with = "mode_word")]
    pub mode: Option<Mode>,
    /// A model by name, or the path of its config.json.
    #[arg(long, value_name = "NAME|PATH")]
    pub model: String,
    /// Tokens of a sequence, S. plan and fit need it; ladder takes the longest that fits with everything; max says whether it is within.
    #[arg(long, value_name = "N", value_parser = tokens, allow_negative_numbers = true)]
    pub seq_len: Option<usize>,
    /// Sequences side by side, B.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, allow_negative_numbers = true)]
    pub batch: usize,
    /// Micro-batches a step.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, allow_negative_numbers = true)]
    pub accumulate: usize,
    /// The most hours that a step may take.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true)]
    pub hours_per_step: Option<f64>,

    /// A device by name, or this.
    #[arg(long, value_name = "NAME", default_value = "this", help_heading = "Devices")]
    pub device: String,
    /// How many; each is a rank. Default: as many as --mesh has, or 1.
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true, help_heading = "Devices")]
    pub devices: Option<usize>,
    /// How ranks are divided: replicas, and ranks that share each sequence. Default: all share each sequence, or with --attention single
    /// none do.
    #[arg(long, value_name = "data=N,ulysses=M", value_parser = mesh, help_heading = "Devices")]
    pub mesh: Option<MeshShape>,
    /// A device's memory; of one that shares it, the host's.
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Devices")]
    pub memory: Option<usize>,
    /// One host's memory, for its devices together.
    #[arg(long, value_name = "BYTES", value_parser = bytes_or_none, help_heading = "Devices")]
    pub host_memory: Option<usize>,
    /// One host's disk, for its devices together.
    #[arg(long, value_name = "BYTES", value_parser = bytes_or_none, help_heading = "Devices")]
    pub disk: Option<usize>,
    /// Devices of one host, at most.
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true, help_heading = "Devices")]
    pub devices_per_host: Option<usize>,
    /// What allocator, runtime and communicators take of a device: a part of its own.
    #[arg(long, value_name = "BYTES", value_parser = bytes_or_none, help_heading = "Devices")]
    pub overhead: Option<usize>,

    /// Peak TFLOP/s of a device, dense.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true, help_heading = "Speed")]
    pub tflops: Option<f64>,
    /// What matrix products achieve of it.
    #[arg(long, value_name = "X", value_parser = fraction, allow_negative_numbers = true, help_heading = "Speed")]
    pub matmul_fraction: Option<f64>,
    /// What attention achieves of it.
    #[arg(long, value_name = "X", value_parser = fraction, allow_negative_numbers = true, help_heading = "Speed")]
    pub attention_fraction: Option<f64>,
    /// GB/s of device memory.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true, help_heading = "Speed")]
    pub memory_bandwidth: Option<f64>,
    /// GB/s from a rank to another of its host.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true, help_heading = "Speed")]
    pub link: Option<f64>,
    /// GB/s from a rank to one of another host.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true, help_heading = "Speed")]
    pub network: Option<f64>,
    /// GB/s between device and host.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true, help_heading = "Speed")]
    pub host_link: Option<f64>,
    /// GB/s of one host's disk.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true, help_heading = "Speed")]
    pub disk_bandwidth: Option<f64>,

    /// How attention runs.
    #[arg(long, value_enum, help_heading = "Techniques")]
    pub attention: Option<Scheme>,
    /// Query heads (over all ranks) a stage, U, under upipe. Default: one a rank.
    #[arg(long, value_name = "U", value_parser = at_least_one, allow_negative_numbers = true, help_heading = "Techniques")]
    pub heads_per_stage: Option<usize>,
    /// Recompute blocks in the backward pass; with a number, so many of them are one checkpoint.
    #[arg(long, value_name = "on|off|N", help_heading = "Techniques")]
    pub checkpoint: Option<Checkpoint>,
    /// Tokens a tile of the feed-forward.
    #[arg(long, value_name = "N|on|off", allow_negative_numbers = true, help_heading = "Techniques")]
    pub mlp_tile: Option<Tile>,
    /// Tokens a tile of the norms.
    #[arg(long, value_name = "N|on|off", allow_negative_numbers = true, num_args = 0..=1, default_missing_value = "on", help_heading = "Techniques")]
    pub norm_tile: Option<Tile>,
    /// Tokens a tile of output layer and loss.
    #[arg(long, value_name = "N|on|off", allow_negative_numbers = true, num_args = 0..=1, default_missing_value = "on", help_heading = "Techniques")]
    pub loss_tile: Option<Tile>,
    /// Where saved block inputs wait.
    #[arg(long, value_enum, help_heading = "Techniques")]
    pub offload: Option<Waiting>,
    /// Offload the input of one checkpoint in N. Default: all.
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true, help_heading = "Techniques")]
    pub offload_every: Option<usize>,
    /// Offload only inputs beyond this on the device, over all ranks: the newest stay.
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Techniques")]
    pub offload_budget: Option<usize>,
    /// Host memory for them, over all ranks. Default: no limit but the host's. With --offload host.
    #[arg(long, value_name = "BYTES", value_parser = bytes_or_none, help_heading = "Techniques")]
    pub offload_host_budget: Option<usize>,
    /// Disk for them, over all ranks; with --offload host what finds no room there goes to it. What finds none at all stays on the device.
    #[arg(long, value_name = "BYTES", value_parser = bytes_or_none, help_heading = "Techniques")]
    pub offload_disk_budget: Option<usize>,
    /// How many offloaded inputs are on their way at once. Default: 2.
    #[arg(long, alias = "offload-in-flight", value_name = "K", value_parser = at_least_one, allow_negative_numbers = true, help_heading = "Techniques")]
    pub in_flight: Option<usize>,
    /// Where the optimizer's state is.
    #[arg(long, value_enum, help_heading = "Techniques")]
    pub optimizer: Option<Place>,
    /// Weights, gradients and optimizer state in shards over all ranks.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "on", help_heading = "Techniques")]
    pub fsdp: Option<Switch>,
    /// Gather the next block's weights while one computes.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "on", help_heading = "Techniques")]
    pub prefetch: Option<Switch>,
    /// The type that is computed in. Default: bf16, on this f32. In f32 weights and gradients are f32, too, and products run in TF32 where
    /// a device has it.
    #[arg(long, value_enum, help_heading = "Techniques")]
    pub dtype: Option<Precision>,

    /// Print one JSON object.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Draw the ladder, as SVG.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub svg: Option<PathBuf>,
}

impl Args {
    /// Reads a command line, its first word the program's name.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`]; `--help` is one.
    pub fn read<T: Into<OsString> + Clone>(line: impl IntoIterator<Item = T>) -> Result<Self> {
        Self::try_parse_from(line).map_err(|error| Error::Usage(Box::new(error)))
    }

    /// What is asked.
    pub fn mode(&self) -> Mode {
        self.mode.or(self.mode_word).unwrap_or_default()
    }
}
