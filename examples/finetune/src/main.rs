//! `finetune`: see the library, which is the whole program but for the process around it.

use std::io::{self, Write};
use std::process::ExitCode;

use burn_upipe::profile::heap::CountingAllocator;
use clap::Parser;

// Makes peak_bytes a count and not an estimate; on the CPU tensors are heap memory.
#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    env_logger::Builder::new().filter_level(log::LevelFilter::Warn).init();
    let args = match finetune::Args::try_parse() {
        Ok(args) => args,
        Err(error) if error.use_stderr() => {
            complain(&finetune::one_line(&error.to_string()));
            return ExitCode::from(2);
        }
        // --help
        Err(error) => error.exit(),
    };
    match finetune::run(&args, io::stdout()) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("error: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

fn complain(message: &str) {
    // Nothing is left to do if stderr is closed.
    let _ = writeln!(io::stderr(), "{message}");
}
