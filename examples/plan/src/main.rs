//! `plan`: see the library, which is the whole program but for the process around it.

use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = match plan::Args::read(std::env::args_os()) {
        Ok(args) => args,
        // --help
        Err(plan::Error::Usage(error)) if !error.use_stderr() => error.exit(),
        Err(error) => return complain(&error),
    };
    match plan::run(&args, io::stdout()) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => complain(&error),
    }
}

fn complain(error: &plan::Error) -> ExitCode {
    // Nothing is left to do if stderr is closed.
    let _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(error.exit_code())
}
