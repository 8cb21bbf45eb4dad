//! The program: see the crate's documentation for what its stages are.

use std::io::Write;
use std::process::ExitCode;

use burn_upipe::profile::heap::CountingAllocator;
use clap::Parser;
use learner::cli::Args;

/// For the memory metrics: on a CPU, tensors are heap memory.
#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    match learner::train::run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}
