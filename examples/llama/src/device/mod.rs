//! Which devices a program runs on: the words for them, what is compiled in, and how they are opened.
//!
//! | word | what | feature |
//! |---|---|---|
//! | `flex` | the processor, Burn's own backend | `flex`, the default |
//! | `cpu` | the processor, by CubeCL | `cpu` |
//! | `wgpu` | the best adapter of whatever graphics API there is | `wgpu` |
//! | `vulkan` | the best adapter of Vulkan | `vulkan` |
//! | `cuda:N` | NVIDIA's GPU number N; `cuda` is `cuda:0` | `cuda` |
//! | `rocm:N` | AMD's GPU number N; `rocm` is `rocm:0` | `rocm` |
//! | `metal` | Apple's GPU | `metal` |
//!
//! A list of them (`cuda:0,cuda:1`) is dealt out to ranks in turn; with one device all ranks share it.
//!
//! ```
//! use llama::{DeviceChoice, DeviceList};
//!
//! let list: DeviceList = "flex".parse()?;
//! assert_eq!((list.of_rank(0), list.of_rank(3)), (DeviceChoice::FLEX, DeviceChoice::FLEX));
//! let devices = list.open()?;
//! assert_eq!(devices.of_rank(3), &burn::tensor::Device::flex());
//!
//! let list: DeviceList = "cuda,cuda:1".parse()?;
//! assert_eq!(list.to_string(), "cuda:0,cuda:1");
//! assert_eq!(list.of_rank(3).to_string(), "cuda:1");
//!
//! let error = "wgpuu".parse::<DeviceList>().unwrap_err();
//! assert_eq!(error.to_string(), "no device is called \"wgpuu\": did you mean wgpu?");
//! # Ok::<(), llama::DeviceError>(())
//! ```

mod list;
mod open;

use std::fmt;
use std::str::FromStr;

use burn::tensor::{DType, Device};

use crate::config::nearest;

pub use list::{DeviceList, Devices};

/// What runs the operations of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Runtime {
    /// Burn's own backend on the processor.
    Flex,
    /// CubeCL on the processor.
    Cpu,
    /// CubeCL on what graphics API there is.
    Wgpu,
    /// CubeCL on Vulkan.
    Vulkan,
    /// CubeCL on NVIDIA's GPUs.
    Cuda,
    /// CubeCL on AMD's GPUs.
    Rocm,
    /// CubeCL on Apple's GPUs.
    Metal,
}

/// How well a runtime is known to work here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Tests run on it, without special hardware.
    Run,
    /// It is type-checked, or its kernels are compiled; nobody has run it.
    Compiled,
}

impl Runtime {
    /// All of them.
    pub const ALL: [Self; 7] = [Self::Flex, Self::Cpu, Self::Wgpu, Self::Vulkan, Self::Cuda, Self::Rocm, Self::Metal];

    /// Its word, which is its feature's, too.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Metal => "metal",
        }
    }

    /// Whether its devices have numbers.
    pub const fn is_numbered(self) -> bool {
        matches!(self, Self::Cuda | Self::Rocm)
    }

    /// Whether this program has it.
    pub const fn is_compiled_in(self) -> bool {
        match self {
            Self::Flex => cfg!(feature = "flex"),
            Self::Cpu => cfg!(feature = "cpu"),
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Rocm => cfg!(feature = "rocm"),
            Self::Metal => cfg!(feature = "metal"),
        }
    }

    /// Those that this program has.
    pub fn compiled_in() -> Vec<Self> {
        Self::ALL.into_iter().filter(|runtime| runtime.is_compiled_in()).collect()
    }

    /// Whether tensors lie on the heap of the process, where an allocator can count them. Others have pools:
    /// [`Device::memory_pool_usage`].
    pub const fn is_heap(self) -> bool {
        matches!(self, Self::Flex)
    }

    /// How well it is known to work.
    pub const fn standing(self) -> Standing {
        match self {
            Self::Flex | Self::Cpu | Self::Wgpu => Standing::Run,
            Self::Vulkan | Self::Cuda | Self::Rocm | Self::Metal => Standing::Compiled,
        }
    }

    /// What must be on the machine.
    pub const fn needs(self) -> &'static str {
        match self {
            Self::Flex => "nothing",
            Self::Cpu => "LLVM's shared library, if it was built against one",
            Self::Wgpu => "a driver of Vulkan, Metal or DirectX 12 (without a graphics card: Mesa's llvmpipe)",
            Self::Vulkan => "a driver of Vulkan 1.3",
            Self::Cuda => {
                "NVIDIA's driver, and libdevice.10.bc of a CUDA toolkit: in nvvm/libdevice of the folder that CUDA_PATH names, or where that is not \
                 set of /usr/local/cuda"
            }
            Self::Rocm => "AMD's driver and the HIP libraries of ROCm",
            Self::Metal => "macOS with a GPU of Apple's",
        }
    }
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One device: `flex`, `cuda:1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceChoice {
    runtime: Runtime,
    index: u16,
}

impl DeviceChoice {
    /// The processor, by Burn's own backend.
    pub const FLEX: Self = Self::first(Runtime::Flex);

    /// The first device of a runtime, or the only one.
    pub const fn first(runtime: Runtime) -> Self {
        Self { runtime, index: 0 }
    }

    /// What runs it.
    pub const fn runtime(self) -> Runtime {
        self.runtime
    }

    /// Its number among those of its runtime.
    pub const fn index(self) -> usize {
        self.index as usize
    }

    /// The device, once it has computed something. Opening one again costs next to nothing.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NotCompiled`]; [`DeviceError::NotStarted`] where driver, library or hardware is missing.
    ///
    /// # Panics
    ///
    /// Never; but runtimes do while they start, and so the process's panic hook is exchanged for so long (not for Flex): open
    /// devices before the program has other threads.
    pub fn open(self) -> Result<Device, DeviceError> {
        open::open(self)
    }

    /// Checks that an open device computes in a type. f64 is not for CubeCL's devices: kernels of ours compute in f32.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Type`].
    pub fn expect_dtype(self, device: &Device, dtype: DType) -> Result<(), DeviceError> {
        let remedy = match dtype {
            DType::F64 if self.runtime != Runtime::Flex => "use f32, or the device flex",
            _ if self.runtime == Runtime::Flex => return Ok(()),
            _ if !device.supports_dtype(dtype) => "use f32, or another device",
            DType::BF16 if !open::rounds_to_bf16(device) => {
                "rounding to it takes a processor with AVX512-BF16, or libgcc 13 or later; use f32, or the device flex"
            }
            _ => return Ok(()),
        };
        Err(DeviceError::Type { device: self, dtype, remedy })
    }
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let (name, number) = match text.split_once(':') {
            Some((name, number)) => (name, Some(number)),
            None => (text, None),
        };
        let Some(runtime) = Runtime::ALL.into_iter().find(|runtime| runtime.name() == name) else {
            return Err(unknown(text, name));
        };
        let wrong = |remedy: String| DeviceError::Number { text: text.to_owned(), remedy };
        let index = match number {
            None => 0,
            Some(_) if !runtime.is_numbered() => return Err(wrong(format!("{runtime} has no numbers: use {runtime}"))),
            // No sign and no space, as u16 alone would have it.
            Some(number) => match number.parse() {
                Ok(index) if number.bytes().all(|byte| byte.is_ascii_digit()) => index,
                _ => return Err(wrong(format!("use {runtime}:0 for the first one, {runtime}:1 for the next"))),
            },
        };
        Ok(Self { runtime, index })
    }
}

fn unknown(text: &str, name: &str) -> DeviceError {
    let lower = name.trim().to_lowercase();
    // What people call them elsewhere.
    let known = match lower.as_str() {
        "gpu" | "nvidia" => Some("cuda"),
        "hip" | "amd" => Some("rocm"),
        "mps" => Some("metal"),
        "webgpu" => Some("wgpu"),
        _ => nearest(&lower, Runtime::ALL.map(Runtime::name)),
    };
    let remedy = match known {
        Some(known) => format!("did you mean {known}?"),
        None => format!("use one of {}", names(Runtime::ALL)),
    };
    DeviceError::Unknown { text: text.to_owned(), remedy }
}

/// `flex, cpu, cuda:N`.
fn names(runtimes: impl IntoIterator<Item = Runtime>) -> String {
    let name = |runtime: Runtime| format!("{runtime}{}", if runtime.is_numbered() { ":N" } else { "" });
    runtimes.into_iter().map(name).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.runtime.is_numbered() {
            true => write!(f, "{}:{}", self.runtime, self.index),
            false => write!(f, "{}", self.runtime),
        }
    }
}

/// Why there is no device to run on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No device has this name.
    #[error("no device is called {text:?}: {remedy}")]
    Unknown {
        /// As it was typed.
        text: String,
        /// What to type.
        remedy: String,
    },
    /// A number that is none, or one for a runtime whose devices have none.
    #[error("no device is called {text:?}: {remedy}")]
    Number {
        /// As it was typed.
        text: String,
        /// What to type.
        remedy: String,
    },
    /// Devices that make no list.
    #[error("{problem}: {remedy}")]
    List {
        /// Which.
        problem: String,
        /// What to type.
        remedy: &'static str,
    },
    /// The program was built without it.
    #[error(
        "{runtime} is not compiled in: build with --features {runtime}; this program has {}",
        names(Runtime::compiled_in())
    )]
    NotCompiled {
        /// Its runtime.
        runtime: Runtime,
    },
    /// Its driver, a library or the hardware is missing.
    #[error("{device} does not start: {problem}: it needs {}", device.runtime.needs())]
    NotStarted {
        /// Which device.
        device: DeviceChoice,
        /// What its runtime said.
        problem: String,
    },
    /// It does not compute in this type.
    #[error("{device} does not compute in {dtype:?}: {remedy}")]
    Type {
        /// Which device.
        device: DeviceChoice,
        /// In which type.
        dtype: DType,
        /// What works.
        remedy: &'static str,
    },
}

#[cfg(test)]
mod tests;
