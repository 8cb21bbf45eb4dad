//! What a step runs on: memory, and what can be computed and moved in a second.

use super::{Accounting, PlanError};

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A graphics card with memory of its own.
    Gpu,
    /// A graphics processor that shares its memory with the host.
    Unified,
    /// Ranks are threads of this process and share its memory; computes in f32.
    Cpu,
}

/// The type that is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// 16 bits with the range of f32.
    Bf16,
    /// 32 bits; matrix products of GPUs in TF32, where they have it.
    F32,
}

/// One device, its host, and what connects them. Rates are a second's; every field may be set. A CPU is one device and host in one, which
/// all ranks share.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// What people call it.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Bytes of device memory that a program can have. Of a kind that shares: of the whole host.
    pub memory: usize,
    /// Bytes of one host's memory, which its devices share. Not used where device memory is host memory.
    pub host_memory: usize,
    /// Bytes of one host's disk.
    pub disk: usize,
    /// Devices of one host, at most. Of a CPU: as many as there are ranks.
    pub per_host: usize,
    /// Cores of one host.
    pub cores: usize,
    /// Floating point operations, dense, in the type that is computed with: at first that of [`Hardware::compute`].
    pub flops: f64,
    /// The same in f32, as matrix products have it.
    pub f32_flops: f64,
    /// What large matrix products achieve of it: an assumption.
    pub matmul_fraction: f64,
    /// What attention achieves of it: an assumption.
    pub attention_fraction: f64,
    /// Bytes of device memory read or written.
    pub memory_bandwidth: f64,
    /// Bytes sent to another device of the same host.
    pub link: f64,
    /// Bytes sent to a device of another host.
    pub network: f64,
    /// Bytes between device and host memory, in one direction.
    pub host_link: f64,
    /// Bytes written to or read from one host's disk.
    pub disk_bandwidth: f64,
}

/// So many devices of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Machines {
    /// Each of them.
    pub hardware: Hardware,
    /// How many.
    pub count: usize,
}

/// What one rank may use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// On its device; where that is host memory, of both together.
    pub device: usize,
    /// In host memory.
    pub host: usize,
    /// On disk.
    pub disk: usize,
    /// Whether device and host memory are the same.
    pub shared: bool,
}

pub(super) const GIB: usize = 1 << 30;
pub(super) const TERA: f64 = 1e12;
pub(super) const GIGA: f64 = 1e9;

// Nobody measured these: they are round, and such that published lengths fit.
/// What a driver, its libraries and an allocator's gaps take on a graphics card,
const RUNTIME: usize = GIB;
/// the buffers of communicators within a host,
const COMMUNICATORS: usize = GIB;
/// and those between hosts.
const NETWORK_COMMUNICATORS: usize = 2 * GIB;

/// What an allocator loses of what changes in a step, in percent.
const FRAGMENTATION: usize = 12;

/// The devices that are known by name, and `this`.
pub const DEVICES: [&str; 10] = [
    "h100-80g",
    "h200-141g",
    "a100-40g",
    "a100-80g",
    "l40s-48g",
    "rtx4090-24g",
    "m4-pro-48g",
    "m4-max-128g",
    "m2-ultra-192g",
    "m3-ultra-512g",
];

/// A device by name.
///
/// Memory is what a program gets of the nominal amount. TFLOP/s and memory bandwidth of graphics cards are the vendors', dense; links, networks
/// and disks are what such machines usually have, per direction, and all of the M-series a guess. What of them is achieved is an assumption: on
/// GPUs fitted once to published training speeds (see [`time`](super::time())), elsewhere a guess, too.
///
/// # Errors
///
/// [`PlanError::Invalid`] with the names that are known.
///
/// ```
/// use burn_upipe::plan::device;
///
/// assert_eq!(device("H100-80G")?.memory >> 30, 79);
/// assert!(device("h900").unwrap_err().to_string().contains("a100-40g"));
/// # Ok::<(), burn_upipe::plan::PlanError>(())
/// ```
pub fn device(name: &str) -> Result<Hardware, PlanError> {
    let wanted = plain(name);
    // Without its size the largest, which is the last.
    let without_size = |known: &str| known.rsplit_once('-').is_some_and(|(name, _)| plain(name) == wanted);
    let known = DEVICES
        .into_iter()
        .find(|known| plain(known) == wanted)
        .or_else(|| DEVICES.into_iter().rfind(|known| without_size(known)))
        .ok_or_else(|| {
            PlanError::invalid(format!("no device is called {name:?}"), format!("use {}, or this", DEVICES.join(", ")))
        })?;
    let gib = |count: f64| (count * GIB as f64) as usize;
    // TFLOP/s of bf16 and TF32 (f32 on graphics processors that have none) are those of the vendors' data sheets (H100 SXM, H200 SXM,
    // A100 SXM, L40S; of the RTX 4090 the Ada white paper), without sparsity.
    //                                  memory     host TB  bf16, TF32      memory TB/s  link  network  host link GB/s
    Ok(match known {
        "h100-80g" => gpu(known, gib(79.1), 1.9, [989.0, 494.5], 3.35, [450.0, 50.0, 55.0]),
        "h200-141g" => gpu(known, gib(139.8), 1.9, [989.0, 494.5], 4.8, [450.0, 50.0, 55.0]),
        "a100-40g" => gpu(known, gib(39.4), 0.96, [312.0, 156.0], 1.555, [300.0, 25.0, 25.0]),
        "a100-80g" => gpu(known, gib(79.1), 1.9, [312.0, 156.0], 2.039, [300.0, 25.0, 25.0]),
        "l40s-48g" => gpu(known, gib(44.4), 0.96, [362.0, 183.0], 0.864, [25.0, 25.0, 25.0]),
        "rtx4090-24g" => gpu(known, gib(23.6), 0.128, [165.2, 82.6], 1.008, [25.0, 1.25, 25.0]),
        "m4-pro-48g" => unified(known, 48, 9.2, 0.273),
        "m4-max-128g" => unified(known, 128, 18.4, 0.546),
        "m2-ultra-192g" => unified(known, 192, 27.2, 0.8),
        _ => unified(known, 512, 28.2, 0.819),
    })
}

/// Letters and digits, without vendors, kinds of memory and sockets, which programs that list devices add.
fn plain(name: &str) -> String {
    const BESIDE: [&str; 10] = ["nvidia", "geforce", "apple", "gpu", "tensor", "core", "sxm", "sxm4", "sxm5", "hbm3"];
    let name = name.to_ascii_lowercase();
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !BESIDE.contains(word));
    let all = words.map(|word| word.strip_prefix("rtx").unwrap_or(word)).collect::<String>();
    let size = all.trim_end_matches("gib").trim_end_matches("gb").trim_end_matches('g');
    size.to_owned()
}

fn gpu(
    name: &str,
    memory: usize,
    host: f64,
    [flops, f32_flops]: [f64; 2],
    bandwidth: f64,
    [link, network, host_link]: [f64; 3],
) -> Hardware {
    Hardware {
        name: name.to_owned(),
        kind: DeviceKind::Gpu,
        memory,
        host_memory: (host * TERA) as usize,
        disk: (15.0 * TERA) as usize,
        per_host: 8,
        cores: 96,
        flops: flops * TERA,
        f32_flops: f32_flops * TERA,
        matmul_fraction: super::time::GPU_MATMUL,
        attention_fraction: super::time::GPU_ATTENTION,
        memory_bandwidth: bandwidth * TERA,
        link: link * GIGA,
        network: network * GIGA,
        host_link: host_link * GIGA,
        disk_bandwidth: 12.0 * GIGA,
    }
}

/// Of unified memory the system leaves three quarters to the graphics processor.
fn unified(name: &str, gib: usize, flops: f64, bandwidth: f64) -> Hardware {
    Hardware {
        name: name.to_owned(),
        kind: DeviceKind::Unified,
        memory: gib * GIB / 4 * 3,
        host_memory: 0,
        disk: TERA as usize,
        per_host: 1,
        cores: 16,
        flops: flops * TERA,
        f32_flops: flops * TERA, // of one speed in both types
        matmul_fraction: 0.7,
        attention_fraction: 0.4,
        memory_bandwidth: bandwidth * TERA,
        link: 1.25 * GIGA,
        network: 1.25 * GIGA,
        host_link: bandwidth * TERA / 2.0,
        disk_bandwidth: 5.0 * GIGA,
    }
}

impl Hardware {
    /// A computer of so many bytes of memory and so many cores, on which ranks are threads. 32 operations a cycle and core at 3 GHz.
    pub fn cpu(name: &str, memory: usize, disk: usize, cores: usize) -> Self {
        let cores = cores.max(1);
        let flops = 96.0 * GIGA * cores as f64;
        Self {
            name: name.to_owned(),
            kind: DeviceKind::Cpu,
            memory,
            host_memory: 0,
            disk,
            per_host: usize::MAX,
            cores,
            flops,
            f32_flops: flops,
            matmul_fraction: 0.6,
            attention_fraction: 0.3,
            memory_bandwidth: 20.0 * GIGA,
            link: 5.0 * GIGA,
            network: 5.0 * GIGA,
            host_link: 10.0 * GIGA,
            disk_bandwidth: GIGA,
        }
    }

    /// What it computes in where nobody says.
    pub fn compute(&self) -> Compute {
        if self.kind == DeviceKind::Cpu { Compute::F32 } else { Compute::Bf16 }
    }

    /// The same device at work in another type: its speed there. A CPU has one speed.
    ///
    /// ```
    /// use burn_upipe::plan::{Compute, device};
    ///
    /// let h100 = device("h100-80g")?;
    /// assert_eq!(h100.clone().computing_in(Compute::F32).flops, h100.flops / 2.0);
    /// # Ok::<(), burn_upipe::plan::PlanError>(())
    /// ```
    pub fn computing_in(mut self, compute: Compute) -> Self {
        if compute == Compute::F32 {
            self.flops = self.f32_flops;
        }
        self
    }
}

impl Machines {
    /// Ranks on one host.
    pub fn on_host(&self) -> usize {
        self.count.min(self.hardware.per_host).max(1)
    }

    /// What one rank may use.
    pub fn budget(&self) -> Budget {
        let hardware = &self.hardware;
        let sharing = self.on_host();
        let shared = hardware.kind != DeviceKind::Gpu;
        let device = if shared { hardware.memory / sharing } else { hardware.memory };
        let host = if shared { device } else { hardware.host_memory / sharing };
        Budget { device, host, disk: hardware.disk / sharing, shared }
    }

    /// How such devices count in what they compute in where nobody says ([`Hardware::compute`]): bf16 on GPUs, with what runtime and
    /// communicators take; f32 in threads on a CPU.
    pub fn accounting(&self) -> Accounting {
        self.accounting_in(self.hardware.compute())
    }

    /// How such devices count in either type. Of a parameter all is 16 bytes: in bf16 on GPUs weights and gradients of 2 with f32 masters, otherwise
    /// all in f32, where on a CPU bf16 is the type of activations alone.
    ///
    /// ```
    /// use burn_upipe::plan::{Compute, Machines, device};
    ///
    /// let accounting = Machines { hardware: device("h100-80g")?, count: 8 }.accounting_in(Compute::F32);
    /// let parameter = accounting.weight + accounting.gradient + accounting.optimizer;
    /// assert_eq!((parameter, accounting.compute, accounting.sums), (16, 4, 4));
    /// # Ok::<(), burn_upipe::plan::PlanError>(())
    /// ```
    pub fn accounting_in(&self, compute: Compute) -> Accounting {
        let usual = match self.hardware.kind {
            DeviceKind::Gpu => {
                let within = if self.count > 1 { COMMUNICATORS } else { 0 };
                let between = if self.count > self.hardware.per_host { NETWORK_COMMUNICATORS } else { 0 };
                Accounting::published(RUNTIME + within + between, FRAGMENTATION)
            }
            DeviceKind::Unified => Accounting::published(RUNTIME, FRAGMENTATION),
            DeviceKind::Cpu => Accounting::flex((self.hardware.cores / self.count.max(1)).max(1)),
        };
        match compute {
            Compute::Bf16 => Accounting { compute: 2, ..usual },
            // Masters are the weights themselves; sums need no other type.
            Compute::F32 => Accounting { weight: 4, gradient: 4, optimizer: 8, compute: 4, sums: 4, ..usual },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_are_devices() {
        assert!(DEVICES.iter().all(|name| device(name).unwrap().name == *name));
        // Without a size the larger one.
        for (spelled, name) in [
            ("H200", "h200-141g"),
            ("h100", "h100-80g"),
            ("a100", "a100-80g"),
            ("NVIDIA A100-SXM4-40GB", "a100-40g"),
            ("NVIDIA H100 80GB HBM3", "h100-80g"),
            ("L40S", "l40s-48g"),
            ("4090", "rtx4090-24g"),
            ("NVIDIA GeForce RTX 4090", "rtx4090-24g"),
            ("Apple M4 Max", "m4-max-128g"),
            ("m2-ultra", "m2-ultra-192g"),
        ] {
            assert_eq!(device(spelled).unwrap().name, name);
        }
        for unknown in ["", "m4", "g", "rtx", "h100-40g", "h100 pcie", "rtx 4080"] {
            assert!(device(unknown).is_err(), "{unknown}");
        }
    }

    #[test]
    fn ranks_of_one_host_share_its_memory() {
        let budget = |count| Machines { hardware: device("h100-80g").unwrap(), count }.budget();
        assert_eq!(budget(1).host, 8 * budget(8).host);
        assert_eq!(budget(16).host, budget(8).host);
        assert_eq!(budget(1).device, budget(8).device);
        let threads = |count| Machines { hardware: Hardware::cpu("this", 16 * GIB, GIB, 4), count };
        assert_eq!(threads(4).budget().device, 4 * GIB);
        assert_eq!(threads(4).accounting().threads, 1);
    }
}
