//! The machine at hand.

use burn_upipe::offload::host_budget;
use burn_upipe::plan::Hardware;

use crate::error::{Error, Result};

/// Its memory, as typed or as much as this process may still take, and its cores. What its disk has is not asked: 0.
///
/// # Errors
///
/// [`Error::Input`] where the system does not say, and nothing was typed.
pub(crate) fn this(typed: Option<usize>) -> Result<Hardware> {
    let memory = typed.unwrap_or_else(host_budget);
    if memory == usize::MAX {
        return Err(Error::input("--device this: the system does not say how much memory it has", "type --memory"));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Hardware::cpu("this", memory, 0, cores))
}
