//! The machine at hand.

use std::fs;
use std::path::{Path, PathBuf};

use burn_upipe::plan::Hardware;

use crate::error::{Error, Result};

/// Its memory that is free, or less if this process may not have all of it, and its cores. What its disk has is not asked: 0.
///
/// # Errors
///
/// [`Error::Input`] where the system does not say, and nothing was typed.
pub(crate) fn this(typed: Option<usize>) -> Result<Hardware> {
    let memory = typed.or_else(memory).ok_or_else(|| {
        Error::input("--device this: the system does not say how much memory it has", "type --memory")
    })?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Hardware::cpu("this", memory, 0, cores))
}

fn memory() -> Option<usize> {
    let free = available(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = fs::read_to_string("/proc/self/cgroup").ok();
    let group = group.as_deref().and_then(unified);
    Some(group.and_then(|group| allowed(Path::new("/sys/fs/cgroup"), &group)).map_or(free, |allowed| free.min(allowed)))
}

/// What can be had without swapping: a line `MemAvailable: 123 kB`.
fn available(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// The group of this process in the one hierarchy: a line `0::/path`.
fn unified(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(PathBuf::from(path))
}

/// What the group and those above it leave: the smallest of limit less use. `None` if there is no limit.
fn allowed(root: &Path, group: &Path) -> Option<usize> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    let left = |group: &Path| {
        let folder = root.join(group);
        let limit = number(folder.join("memory.max"))?;
        Some(limit.saturating_sub(number(folder.join("memory.current")).unwrap_or(0)))
    };
    group.ancestors().filter_map(left).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_is_available_and_allowed() {
        assert_eq!(available("MemTotal: 10 kB\nMemAvailable:    7 kB\n"), Some(7 * 1024));
        assert_eq!(available("MemTotal: 10 kB\n"), None);
        assert_eq!(unified("3:cpu:/x\n0::/a/b\n"), Some(PathBuf::from("a/b")));
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("a/b");
        fs::create_dir_all(&group).unwrap();
        let write = |path: PathBuf, text: &str| fs::write(path, text).unwrap();
        assert_eq!(allowed(root.path(), Path::new("a/b")), None);
        write(group.join("memory.max"), "max\n");
        write(root.path().join("a/memory.max"), "1000\n");
        write(root.path().join("a/memory.current"), "300\n");
        assert_eq!(allowed(root.path(), Path::new("a/b")), Some(700));
        write(group.join("memory.max"), "500\n");
        assert_eq!(allowed(root.path(), Path::new("a/b")), Some(500));
    }
}
