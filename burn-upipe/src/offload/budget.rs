//! How much host memory this process may still take.

use std::fs;
use std::path::{Path, PathBuf};

/// Host memory in bytes that is left: the smaller of what the system has available, and what the process's control group may
/// still take. A container's limit is below the machine's memory; who plans by the machine is killed by the limit.
///
/// What ranks of one process may take is this divided by their number. It changes with everything that runs: ask once, at
/// the start, and leave some. Where the system does not say (it is asked as Linux is) there is no budget: `usize::MAX`.
///
/// ```
/// assert!(burn_upipe::offload::host_budget() > 1 << 20);
/// ```
pub fn host_budget() -> usize {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text)).unwrap_or(u64::MAX);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    host_budget_of(group(Path::new("/sys/fs/cgroup"), &groups), available)
}

/// [`host_budget`] of known values: the control group's limit and what it has in use, and the system's available memory.
///
/// ```
/// use burn_upipe::offload::host_budget_of;
///
/// const GIB: u64 = 1 << 30;
/// assert_eq!(host_budget_of(None, 20 * GIB), 20 << 30);
/// assert_eq!(host_budget_of(Some((8 * GIB, 3 * GIB)), 20 * GIB), 5 << 30);
/// assert_eq!(host_budget_of(Some((64 * GIB, 3 * GIB)), 20 * GIB), 20 << 30);
/// // Over its limit: a group that is about to be killed.
/// assert_eq!(host_budget_of(Some((8 * GIB, 9 * GIB)), 20 * GIB), 0);
/// ```
pub fn host_budget_of(group: Option<(u64, u64)>, available: u64) -> usize {
    let left = group.map_or(u64::MAX, |(limit, in_use)| limit.saturating_sub(in_use));
    usize::try_from(left.min(available)).unwrap_or(usize::MAX)
}

/// What can be had without swapping: a line `MemAvailable: 123 kB`.
fn available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Limit and use of that control group which leaves the least: the process's own, or one above it. Lines are `0::/path` in the one
/// hierarchy of today, `4:memory:/path` before.
fn group(root: &Path, groups: &str) -> Option<(u64, u64)> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let all = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some((root.to_owned(), path, "memory.max", "memory.current")),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some((root.join("memory"), path, "memory.limit_in_bytes", "memory.usage_in_bytes"))
            }
            _ => None,
        }
    });
    let levels = all.flat_map(|(root, path, limit, current)| {
        Path::new(path).ancestors().map(move |path| (root.join(path), limit, current)).collect::<Vec<_>>()
    });
    let limits = levels.filter_map(|(folder, limit, current)| {
        let limit = number(folder.join(limit))?;
        // Files that nobody has looked at lately are given back before anybody is killed.
        let files = fs::read_to_string(folder.join("memory.stat")).ok();
        let files =
            files.and_then(|text| text.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok()));
        Some((limit, number(folder.join(current)).unwrap_or(0).saturating_sub(files.unwrap_or(0))))
    });
    limits.min_by_key(|(limit, in_use)| limit.saturating_sub(*in_use))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_a_line_of_kilobytes() {
        assert_eq!(available("MemTotal: 10 kB\nMemAvailable:    7 kB\n"), Some(7 * 1024));
        assert_eq!(available("MemTotal: 10 kB\n"), None);
    }

    #[test]
    fn the_group_that_leaves_the_least_counts() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b");
        fs::create_dir_all(&folder).unwrap();
        let write = |path: PathBuf, text: &str| fs::write(path, text).unwrap();
        let found = |groups| group(root.path(), groups);
        assert_eq!(found("0::/a/b\n"), None);
        write(folder.join("memory.max"), "max\n");
        write(root.path().join("a/memory.max"), "1000\n");
        write(root.path().join("a/memory.current"), "300\n");
        assert_eq!(found("0::/a/b\n"), Some((1000, 300)));
        write(root.path().join("a/memory.stat"), "anon 100\ninactive_file 200\n");
        assert_eq!(found("3:cpu:/x\n0::/a/b\n"), Some((1000, 100)));
        write(folder.join("memory.max"), "500\n");
        assert_eq!(found("0::/a/b\n"), Some((500, 0)));
        assert_eq!(found("0::/\n"), None);

        let before = root.path().join("memory/c");
        fs::create_dir_all(&before).unwrap();
        write(before.join("memory.limit_in_bytes"), "70\n");
        write(before.join("memory.usage_in_bytes"), "30\n");
        assert_eq!(found("5:cpu,memory:/c\n"), Some((70, 30)));
        assert_eq!(found("5:cpu:/c\n"), None);
    }
}
