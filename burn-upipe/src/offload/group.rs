//! How much memory control groups leave: of this process's group and of those around it, in both versions of the system's files.
//!
//! ```text
//! left = min over groups with a limit (limit - (in use - page cache))
//! ```
//!
//! A group's use counts the pages of files that were read or written, and the system gives those up before anything fails: a
//! container that has read its weights looks full and is not. What the system itself calls available counts them as free, too.

use std::fs;
use std::path::{Path, PathBuf};

/// The names of one version's files.
struct Files {
    /// How its line of `/proc/self/cgroup` is known.
    controller: &'static str,
    root: &'static str,
    limit: &'static str,
    in_use: &'static str,
    /// Lines of `memory.stat`, those within the group included.
    cache: [&'static str; 2],
}

const VERSIONS: [Files; 2] = [
    Files {
        controller: "",
        root: "sys/fs/cgroup",
        limit: "memory.max",
        in_use: "memory.current",
        cache: ["inactive_file", "active_file"],
    },
    Files {
        controller: "memory",
        root: "sys/fs/cgroup/memory",
        limit: "memory.limit_in_bytes",
        in_use: "memory.usage_in_bytes",
        cache: ["total_inactive_file", "total_active_file"],
    },
];

/// Bytes that the groups of this process leave it; `None` without a limit, or on a system without groups.
pub(super) fn left() -> Option<u64> {
    left_under(Path::new("/"))
}

/// [`left`] where the system's files lie under `system`.
fn left_under(system: &Path) -> Option<u64> {
    let groups = fs::read_to_string(system.join("proc/self/cgroup")).ok()?;
    VERSIONS.iter().filter_map(|files| files.left(system, &groups)).min()
}

impl Files {
    fn left(&self, system: &Path, groups: &str) -> Option<u64> {
        let root = system.join(self.root);
        let mut group = self.group(&root, groups)?;
        let mut left = None;
        loop {
            left = left.into_iter().chain(self.left_of(&group)).min();
            if group == root || !group.pop() {
                return left;
            }
        }
    }

    /// This process's group. In a container its path can be that of the machine, which is not there: then the root is it.
    fn group(&self, root: &Path, groups: &str) -> Option<PathBuf> {
        let path = groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let known = fields.next()?.split(',').any(|controller| controller == self.controller);
            fields.next().filter(|_| known)
        })?;
        let parts = Path::new(path).components().filter(|part| matches!(part, std::path::Component::Normal(_)));
        let group = root.join(parts.collect::<PathBuf>());
        Some(if group.is_dir() { group } else { root.to_owned() })
    }

    fn left_of(&self, group: &Path) -> Option<u64> {
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // "max" is no number, and no limit.
        let (limit, in_use) = (number(self.limit)?, number(self.in_use)?);
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let of = |line: &str| {
            let (name, bytes) = line.split_once(' ')?;
            self.cache.contains(&name).then(|| bytes.trim().parse::<u64>().ok())?
        };
        let cache: u64 = stat.lines().filter_map(of).sum();
        Some(limit.saturating_sub(in_use.saturating_sub(cache)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A system with such files.
    fn system(files: &[(&str, String)]) -> tempfile::TempDir {
        let system = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = system.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        system
    }

    fn group(at: &str, limit: &str, in_use: u64, cache: [u64; 2]) -> Vec<(String, String)> {
        vec![
            (format!("{at}/memory.max"), format!("{limit}\n")),
            (format!("{at}/memory.current"), format!("{in_use}\n")),
            (
                format!("{at}/memory.stat"),
                format!("anon 7\nfile 9\ninactive_file {}\nactive_file {}\n", cache[0], cache[1]),
            ),
        ]
    }

    fn left_with(cgroup: &str, files: Vec<(String, String)>) -> Option<u64> {
        let mut all = vec![("proc/self/cgroup", cgroup.to_owned())];
        all.extend(files.iter().map(|(path, text)| (path.as_str(), text.clone())));
        left_under(system(&all).path())
    }

    /// 64 GiB, of which weights that were read from files have 58: they make room.
    #[test]
    fn files_that_were_read_do_not_count() {
        let files = group("sys/fs/cgroup/job", &(64 * GIB).to_string(), 60 * GIB, [50 * GIB, 8 * GIB]);
        assert_eq!(left_with("0::/job\n", files), Some(62 * GIB));
    }

    #[test]
    fn the_tightest_of_the_groups_around_counts() {
        let mut files = group("sys/fs/cgroup/a/b", "max", GIB, [0, 0]);
        files.extend(group("sys/fs/cgroup/a", &(8 * GIB).to_string(), 6 * GIB, [GIB, 0]));
        assert_eq!(left_with("0::/a/b\n", files.clone()), Some(3 * GIB));
        files.extend(group("sys/fs/cgroup", &(4 * GIB).to_string(), 5 * GIB, [0, 0]));
        assert_eq!(left_with("0::/a/b\n", files), Some(0), "beyond its limit");
        assert_eq!(left_with("0::/a\n", group("sys/fs/cgroup/a", "max", GIB, [0, 0])), None);
    }

    #[test]
    fn the_older_files_are_read_also_where_the_path_is_that_of_the_machine() {
        let at = "sys/fs/cgroup/memory";
        let files = vec![
            (format!("{at}/memory.limit_in_bytes"), (8 * GIB).to_string()),
            (format!("{at}/memory.usage_in_bytes"), (5 * GIB).to_string()),
            (format!("{at}/memory.stat"), format!("inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n")),
        ];
        let cgroup = "5:cpu,cpuacct:/\n4:memory:/machine/of/others\n0::/\n";
        assert_eq!(left_with(cgroup, files), Some(4 * GIB));
    }

    #[test]
    fn what_cannot_be_read_is_no_limit() {
        assert_eq!(left_under(system(&[]).path()), None);
        assert_eq!(left_with("nonsense\n0::/../../..\n", Vec::new()), None);
        let files = group("sys/fs/cgroup/a", "many", GIB, [0, 0]);
        assert_eq!(left_with("0::/a\n", files), None);
    }
}
