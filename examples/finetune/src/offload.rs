//! Where block inputs wait for the backward pass, as it was asked for and as each rank has it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use burn_upipe::offload::{Disk, Offload, OffloadConfig, OffloadPolicy, Place, host_budget};
use clap::ValueEnum;

use crate::cli::Args;
use crate::error::{Error, Result};
use crate::values::{Bytes, Switch};

/// Where block inputs wait.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadTo {
    /// On the device.
    None,
    /// In host memory; what does not fit there in --offload-dir, or on the device.
    Host,
    /// In a file without a name.
    Disk,
}

/// Offload as it was asked for. Budgets are of all ranks together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadPlan {
    /// Where tensors go.
    pub place: Place,
    /// Which do.
    pub policy: OffloadPolicy,
    /// K.
    pub in_flight: usize,
    /// Host memory, in bytes; `None` is what is left when training starts.
    pub host_budget: Option<usize>,
    /// Where a file may be written; `None` under [`Place::Disk`] is the output folder.
    pub folder: Option<PathBuf>,
    /// How large the files may become, in bytes.
    pub disk_budget: Option<u64>,
}

impl OffloadPlan {
    /// What was asked for, if anything.
    pub(crate) fn new(args: &Args) -> Result<Option<Self>> {
        let given = [
            ("--offload-every", args.offload_every.is_some()),
            ("--offload-budget", args.offload_budget.is_some()),
            ("--offload-host-budget", args.offload_host_budget.is_some()),
            ("--offload-disk-budget", args.offload_disk_budget.is_some()),
            ("--offload-dir", args.offload_dir.is_some()),
            ("--offload-in-flight", args.offload_in_flight.is_some()),
        ];
        let place = match args.offload {
            OffloadTo::None => {
                return match given.iter().find(|(_, given)| *given) {
                    Some((name, _)) => {
                        Err(Error::input(format!("{name} without --offload"), "leave it out, or use --offload host"))
                    }
                    None => Ok(None),
                };
            }
            OffloadTo::Host => Place::Host,
            OffloadTo::Disk => Place::Disk,
        };
        if args.checkpoint == Switch::Off {
            let remedy = "use --checkpoint on: what is kept for a block's recomputation is what leaves the device";
            return Err(Error::input("--offload with --checkpoint off", remedy));
        }
        if args.eval {
            return Err(Error::input("--offload with --eval", "an evaluation keeps nothing: leave one of them out"));
        }
        let policy = match (args.offload_every, args.offload_budget) {
            (Some(_), Some(_)) => {
                return Err(Error::input("--offload-every and --offload-budget together", "leave one of them out"));
            }
            (Some(every), None) => OffloadPolicy::Every(every),
            (None, Some(bytes)) => OffloadPolicy::Budget(bytes.0),
            (None, None) => OffloadPolicy::All,
        };
        if place == Place::Disk && args.offload_host_budget.is_some() {
            let remedy = "leave it out, or use --offload host with --offload-dir: what does not fit goes there";
            return Err(Error::input("--offload-host-budget with --offload disk", remedy));
        }
        if place == Place::Host && args.offload_disk_budget.is_some() && args.offload_dir.is_none() {
            let remedy = "name the folder with --offload-dir, or use --offload disk";
            return Err(Error::input("--offload-disk-budget without a disk", remedy));
        }
        if let Some(folder) = &args.offload_dir
            && !folder.is_dir()
        {
            let problem = format!("--offload-dir {}: no such folder", folder.display());
            return Err(Error::input(problem, "name a folder that exists, on a fast disk"));
        }
        Ok(Some(Self {
            place,
            policy,
            in_flight: args.offload_in_flight.unwrap_or(OffloadConfig::new().in_flight),
            host_budget: args.offload_host_budget.map(|bytes| bytes.0),
            folder: args.offload_dir.clone(),
            disk_budget: args.offload_disk_budget.map(|bytes| bytes.0 as u64),
        }))
    }

    /// The settings of each rank's engine: an equal share of the budgets. Made once, before there are ranks: each would find what
    /// the others have left.
    pub(crate) fn of_ranks(&self, ranks: usize, out: &Path) -> OffloadConfig {
        self.of_ranks_with(ranks, out, host_budget)
    }

    fn of_ranks_with(&self, ranks: usize, out: &Path, host_budget: impl FnOnce() -> usize) -> OffloadConfig {
        let share = |bytes: usize| bytes / ranks.max(1);
        let folder = self.folder.clone().or_else(|| (self.place == Place::Disk).then(|| out.to_owned()));
        let disk_budget = self.disk_budget.map(|bytes| bytes / ranks.max(1) as u64);
        let disk = folder.map(|folder| Disk { folder, budget: disk_budget });
        let host = (self.place == Place::Host).then(|| share(self.host_budget.unwrap_or_else(host_budget)));
        let policy = match self.policy {
            OffloadPolicy::Budget(bytes) => OffloadPolicy::Budget(share(bytes)),
            policy => policy,
        };
        let config = OffloadConfig::new().with_place(self.place).with_policy(policy).with_in_flight(self.in_flight);
        config.with_host_budget(host).with_disk(disk)
    }
}

/// The most bytes of block inputs that waited at once, of each the rank that had most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// In host memory.
    pub host: usize,
    /// On disk.
    pub disk: usize,
}

/// A rank's engine while it trains; what it has held is noted when this is dropped.
pub(crate) struct Waiting {
    pub engine: Offload,
    pub most: Arc<Mutex<Waited>>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let stats = self.engine.stats();
        let mut most = self.most.lock().unwrap_or_else(PoisonError::into_inner);
        most.host = most.host.max(stats.host_bytes_peak);
        most.disk = most.disk.max(usize::try_from(stats.disk_bytes_peak).unwrap_or(usize::MAX));
    }
}

/// For the plan: which, where to, how.
impl fmt::Display for OffloadPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.policy {
            OffloadPolicy::Every(every) => write!(f, "the first of every {every} block inputs waits")?,
            OffloadPolicy::Budget(bytes) => {
                write!(f, "block inputs beyond {} on the device, over all ranks, wait", Bytes(bytes))?;
            }
            OffloadPolicy::All | OffloadPolicy::None => f.write_str("all block inputs wait")?,
        }
        let folder = match (&self.folder, self.place) {
            (Some(folder), _) => Some(format!("a file in {}", folder.display())),
            (None, Place::Disk) => Some("a file in the output folder".to_owned()),
            (None, Place::Host) => None,
        };
        let disk = folder.map(|folder| match self.disk_budget {
            Some(bytes) => format!("{folder}, at most {} over all ranks", Bytes(bytes as usize)),
            None => folder,
        });
        if self.place == Place::Host {
            match self.host_budget {
                Some(bytes) => write!(f, " in host memory, at most {} over all ranks", Bytes(bytes))?,
                None => f.write_str(" in host memory, at most what is left when training starts")?,
            }
            match disk {
                Some(disk) => write!(f, "; what does not fit in {disk}")?,
                None => f.write_str("; what does not fit stays on the device")?,
            }
        } else if let Some(disk) = disk {
            write!(f, " in {disk}")?;
        }
        write!(f, "; at most {} in flight on each rank", self.in_flight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_what_was_left_before_they_were_there() {
        let plan = OffloadPlan {
            place: Place::Host,
            policy: OffloadPolicy::Budget(1003),
            in_flight: 3,
            host_budget: None,
            folder: Some("elsewhere".into()),
            disk_budget: Some(10),
        };
        let out = Path::new("out");
        let config = plan.of_ranks_with(4, out, || 4001);
        assert_eq!((config.host_budget, config.policy, config.in_flight), (Some(1000), OffloadPolicy::Budget(250), 3));
        assert_eq!(config.disk, Some(Disk { folder: "elsewhere".into(), budget: Some(2) }));
        let typed = OffloadPlan { host_budget: Some(80), ..plan.clone() };
        let config = typed.of_ranks_with(4, out, || panic!("nobody needs to know"));
        assert_eq!(config.host_budget, Some(20));
        let disk = OffloadPlan { place: Place::Disk, folder: None, disk_budget: None, ..plan };
        let config = disk.of_ranks_with(2, out, || panic!("nothing goes there"));
        assert_eq!((config.host_budget, config.disk), (None, Some(Disk { folder: "out".into(), budget: None })));
    }
}
