//! Plans a training step before it runs: memory by part and phase, communication, time, and what fits.
//!
//! ```text
//! cargo run --release -p plan -- --model llama-3-8b --device h100-80g --devices 8 --seq-len 3M
//! cargo run --release -p plan -- max --model llama-3-8b --device h100-80g --devices 8 --attention ulysses
//! cargo run --release -p plan -- ladder --model llama-3-8b --device h100-80g --devices 8 --seq-len 3M --svg ladder.svg
//! cargo run --release -p plan -- fit --model qwen3-32b --device h100-80g --devices 16 --seq-len 1M
//! ```
//!
//! [`Args`] is what was typed, [`Request`] what it means, [`Answer`] what comes of it. All mathematics is in [`burn_upipe::plan`].
//!
//! ```
//! use plan::{Answer, Args, Request};
//!
//! let line = "plan max --model llama-3-8b --device h100-80g --devices 8";
//! let answer = Answer::to(&Request::new(&Args::read(line.split(' '))?)?)?;
//! assert!(answer.plan.fits && answer.plan.max_seq_len > 1 << 20);
//!
//! let error = Request::new(&Args::read("plan --model llama-3-8b".split(' '))?).unwrap_err();
//! assert_eq!(error.exit_code(), 2);
//! # Ok::<(), plan::Error>(())
//! ```

mod answer;
mod cli;
mod error;
mod picture;
mod request;
mod this;
mod values;

use std::io::Write;

pub use answer::{Answer, Asked, Step};
pub use cli::Args;
pub use error::{Error, Result};
pub use request::Request;
pub use values::{Checkpoint, Mode, Place, Precision, Scheme, Switch, Tile, Waiting};

/// Answers what was typed, on `out`; the picture goes to its file.
///
/// # Errors
///
/// [`Error`]: nothing was said then.
pub fn run(args: &Args, mut out: impl Write) -> Result<Answer> {
    let answer = Answer::to(&Request::new(args)?)?;
    if let (Some(path), Some(rungs)) = (&args.svg, &answer.ladder) {
        let write = |source| Error::Write { path: path.clone(), source };
        let chart = picture::chart(&answer.plan, rungs).map_err(|error| write(std::io::Error::other(error)))?;
        std::fs::write(path, chart).map_err(write)?;
    }
    let text = if args.json {
        serde_json::to_string_pretty(&answer).map_err(|error| Error::Say(error.into()))?
    } else {
        answer.text()
    };
    writeln!(out, "{}", text.trim_end()).map_err(Error::Say)?;
    out.flush().map_err(Error::Say)?;
    Ok(answer)
}
