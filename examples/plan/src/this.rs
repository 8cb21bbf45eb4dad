//! The machine at hand.

use std::env;
use std::path::Path;

use burn_upipe::offload::host_budget;
use burn_upipe::plan::Hardware;
use sysinfo::Disks;

use crate::error::{Error, Result};

/// Its memory, as typed or as much as this process may still take, its cores, and what is free on the disk where temporary files go.
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
    Ok(Hardware::cpu("this", memory, free_disk(&env::temp_dir()), cores))
}

/// Free bytes of the disk that `folder` is on; 0 where the system does not say.
fn free_disk(folder: &Path) -> usize {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let disks = Disks::new_with_refreshed_list();
    let holding = disks.iter().filter(|disk| folder.starts_with(disk.mount_point()));
    // The innermost of those that are mounted above it.
    let innermost = holding.max_by_key(|disk| disk.mount_point().components().count());
    innermost.map_or(0, |disk| usize::try_from(disk.available_space()).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_on_a_disk() {
        let folder = tempfile::tempdir().unwrap();
        let free = free_disk(folder.path());
        assert!(free > 1 << 20, "{free}");
        assert_eq!(free_disk(Path::new("nowhere/at/all")), 0);
    }
}
