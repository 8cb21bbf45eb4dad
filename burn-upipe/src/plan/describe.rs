//! Setups in words.

use std::fmt;

use super::{Attention, Setup, StatePlace, Techniques, WaitingPlace};
use crate::upipe::Schedule;

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single => f.write_str("single"),
            Self::Ulysses => f.write_str("ulysses"),
            Self::UPipe { per_stage: None } => f.write_str("upipe"),
            Self::UPipe { per_stage: Some(heads) } => write!(f, "upipe (U {heads})"),
        }
    }
}

impl fmt::Display for StatePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Host => "host",
        })
    }
}

impl fmt::Display for WaitingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Disk => "disk",
        })
    }
}

/// What is on.
impl fmt::Display for Techniques {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attention {}", self.attention)?;
        match self.checkpoint {
            Some(1) => f.write_str(", checkpoints")?,
            Some(blocks) => write!(f, ", checkpoints of {blocks} blocks")?,
            None => {}
        }
        if let Some(offload) = self.offload {
            write!(f, ", offload to {}", offload.place)?;
            if offload.every > 1 {
                write!(f, " of one input in {}", offload.every)?;
            }
            if offload.keep > 0 {
                write!(f, " of all but the newest {}", Bytes(offload.keep))?;
            }
            match (offload.place, offload.host_budget, offload.disk_budget) {
                (WaitingPlace::Host, Some(host), None) => write!(f, ", at most {}", Bytes(host))?,
                (WaitingPlace::Host, Some(host), Some(disk)) => {
                    write!(f, ", at most {}, then {} to disk", Bytes(host), Bytes(disk))?;
                }
                (WaitingPlace::Disk, _, Some(disk)) => write!(f, ", at most {}", Bytes(disk))?,
                _ => {}
            }
            if offload.in_flight != 2 {
                write!(f, ", {} in flight", offload.in_flight)?;
            }
        }
        for (name, tile) in [("mlp", self.mlp_tile), ("norm", self.norm_tile), ("loss", self.loss_tile)] {
            if let Some(tile) = tile {
                write!(f, ", {name} tiles of {tile}")?;
            }
        }
        if self.fsdp {
            f.write_str(if self.prefetch { ", fsdp" } else { ", fsdp without prefetch" })?;
        }
        if self.optimizer == StatePlace::Host {
            f.write_str(", optimizer on the host")?;
        }
        Ok(())
    }
}

impl Techniques {
    /// How many are on: a setup with fewer is easier to run.
    pub fn count(&self) -> usize {
        let on = [
            self.checkpoint.is_some(),
            self.mlp_tile.is_some(),
            self.norm_tile.is_some(),
            self.loss_tile.is_some(),
            self.offload.is_some(),
            self.fsdp,
            self.optimizer == StatePlace::Host,
            self.attention != Attention::Single,
            matches!(self.attention, Attention::UPipe { .. }),
        ];
        on.into_iter().filter(|on| *on).count()
    }
}

impl Setup {
    /// Query heads a stage, where attention runs in stages.
    pub fn per_stage(&self) -> Option<usize> {
        match self.attention() {
            Attention::UPipe { per_stage } => {
                Some(per_stage.unwrap_or_else(|| Schedule::default_per_stage(self.model.heads, self.mesh.ulysses)))
            }
            _ => None,
        }
    }
}

/// Bytes as people read them.
///
/// ```
/// use burn_upipe::plan::Bytes;
///
/// assert_eq!(Bytes(66 << 29).to_string(), "33.0 GiB");
/// assert_eq!(Bytes(1000).to_string(), "1000 B");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            small if small < 10_000 => format!("{small} B"),
            bytes if bytes < 10 << 20 => format!("{:.1} KiB", bytes as f64 / 1024.0),
            bytes if bytes < 10 << 30 => format!("{:.1} MiB", bytes as f64 / 1024f64.powi(2)),
            bytes => format!("{:.1} GiB", bytes as f64 / 1024f64.powi(3)),
        };
        f.pad(&text)
    }
}

/// Tokens as people read them: 1M is 2^20, 512K is 2^19.
///
/// ```
/// use burn_upipe::plan::Tokens;
///
/// assert_eq!(Tokens(3 << 20).to_string(), "3M");
/// assert_eq!(Tokens(3_900_000).to_string(), "3.72M");
/// assert_eq!(Tokens(1000).to_string(), "1000");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens(pub usize);

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scaled = |unit: usize, letter: &str| {
            let text = format!("{:.2}", self.0 as f64 / unit as f64);
            format!("{}{letter}", text.trim_end_matches('0').trim_end_matches('.'))
        };
        f.pad(&match self.0 {
            few if few < 10 << 10 => few.to_string(),
            some if some < 1 << 20 => scaled(1 << 10, "K"),
            _ => scaled(1 << 20, "M"),
        })
    }
}

/// Seconds as people read them.
///
/// ```
/// use burn_upipe::plan::Seconds;
///
/// assert_eq!([0.0, 0.0123, 12.34, 7000.0, 36000.0].map(|s| Seconds(s).to_string()), ["0 s", "12.3 ms", "12.3 s", "116.7 min", "10.00 h"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seconds(pub f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&match self.0 {
            0.0 => "0 s".to_owned(),
            short if short < 1.0 => format!("{:.1} ms", 1e3 * short),
            some if some < 600.0 => format!("{some:.1} s"),
            long if long < 7200.0 => format!("{:.1} min", long / 60.0),
            long => format!("{:.2} h", long / 3600.0),
        })
    }
}
