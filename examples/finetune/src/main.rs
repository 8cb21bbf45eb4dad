//! `finetune`: see the library, which is the whole program but for the process around it.

use std::io::{self, Write};
use std::process::ExitCode;

use burn_upipe::profile::heap::CountingAllocator;
use finetune::stop::Stop;

// Makes peak_bytes a count and not an estimate; on the CPU tensors are heap memory.
#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    finetune::quiet_guarded_panics();
    // Other crates' warnings would come before the line that says what is wrong.
    let mut logger = env_logger::Builder::new();
    for ours in ["burn_context_parallel", "burn_upipe", "llama", "finetune"] {
        logger.filter_module(ours, log::LevelFilter::Warn);
    }
    logger.init();
    let args = match finetune::Args::read(std::env::args_os()) {
        Ok(args) => args,
        // --help
        Err(finetune::Error::Usage(error)) if !error.use_stderr() => error.exit(),
        Err(error) => return complain(&error),
    };
    match finetune::run_until(&args, &finetune::Voice::new(io::stdout()).with_bar(), Stop::on_signals) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => complain(&error),
    }
}

fn complain(error: &finetune::Error) -> ExitCode {
    // Nothing is left to do if stderr is closed.
    let _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(error.exit_code())
}
