//! Measures: U-Pipe against Ulysses on the same ranks, flash attention against attention that keeps every score, and what each
//! technique saves of a whole training step.
//!
//! ```text
//! cargo run --release -p bench -- upipe [--seq-len N] [--ranks N] [--heads-per-stage U ..] [--svg FILE]
//! cargo run --release -p bench -- flash [--seq-len N ..] [--device DEVICE]
//! cargo run --release -p bench -- masks [--seq-len N ..] [--window N] [--device DEVICE]
//! cargo run --release -p bench -- memory [--seq-len N ..] [--svg FILE]
//! cargo run --release -p bench -- longest [--gib N] [--svg FILE]
//! ```
//!
//! Results are compared before anything is timed. Sides take turns, so that what else the machine does meets all of them alike;
//! times are medians. Memory is counted by the allocator: the most heap bytes alive above those at the start, of all ranks.

mod flash;
mod longest;
mod masks;
mod measure;
mod memory;
mod picture;
mod sweep;
mod upipe;

use std::io::{self, Write};
use std::process::ExitCode;

use burn_upipe::profile::heap::CountingAllocator;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

/// Measures throughput and memory, both sides of a comparison by turns.
#[derive(Parser, Clone, Debug)]
#[command(name = "bench")]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Clone, Debug)]
enum What {
    /// U-Pipe against Ulysses: one attention layer, forward and backward, on the same ranks.
    Upipe(upipe::Args),
    /// Flash attention against the O(S^2) path and against Burn's own attention, on one device.
    Flash(flash::Args),
    /// Flash attention under windows and documents, against causal attention of the same length.
    Masks(masks::Args),
    /// The memory of one training step, with one technique after the other.
    Memory(memory::Args),
    /// The longest sequence under a limit of memory, with one technique after the other: measured beside planned.
    Longest(longest::Args),
    /// One step of finetune: what `longest` starts.
    #[command(hide = true)]
    One(longest::One),
}

/// Ends with status 2, for a request that makes no sense.
fn refuse(message: String) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}

fn main() -> ExitCode {
    let result = match Args::parse().what {
        What::Upipe(args) => upipe::run(&args),
        What::Flash(args) => flash::run(&args),
        What::Masks(args) => masks::run(&args),
        What::Memory(args) => memory::run(&args),
        What::Longest(args) => longest::run(&args),
        What::One(args) => longest::one(&args),
    };
    let written = match result {
        Ok(report) => writeln!(io::stdout(), "{report}"),
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
