//! How much host memory this process may still take.

use sysinfo::System;

use super::group;

/// Host memory in bytes that is left: the smaller of what the system has available, and what the process's control groups may
/// still take. A container's limit is below the machine's memory; who plans by the machine is killed by the limit.
///
/// Pages of files that were read count as free in both, since they go before anything fails.
///
/// What ranks of one process may take is this divided by their number. It changes with everything that runs: ask once, at
/// the start, before ranks do, and leave some.
///
/// ```
/// assert!(burn_upipe::offload::host_budget() > 1 << 20);
/// ```
pub fn host_budget() -> usize {
    let mut system = System::new();
    system.refresh_memory();
    let left = group::left();
    host_budget_of(left.map(|left| (left, 0)), system.available_memory())
}

/// [`host_budget`] of known values: the control group's limit and what it has in use without pages of files, and the system's
/// available memory.
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
