//! `plan`: see the library, which is the whole program but for the process around it.

use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = match plan::Args::read(std::env::args_os()) {
        Ok(args) => args,
        // --help
        Err(plan::Error::Usage(error)) if !error.use_stderr() => error.exit(),
        // What asks for an object gets one, also where the rest makes no sense.
        Err(error) => return complain(&error, std::env::args_os().any(|word| word == "--json")),
    };
    match plan::run(&args, io::stdout()) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => complain(&error, args.json),
    }
}

fn complain(error: &plan::Error, json: bool) -> ExitCode {
    // Nothing is left to do if these are closed.
    if json {
        let _ = writeln!(io::stdout(), "{}", error.object());
    }
    let _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(error.exit_code())
}
