//! The device that a build of the tests is made for.

use std::io::{Write, stderr};
use std::panic::catch_unwind;
use std::sync::OnceLock;

use burn::tensor::{DType, Device, Tensor};

/// The CubeCL device of the build's features, or Flex: also, as a counted skip of the whole binary, where its runtime does not start.
pub fn device() -> Device {
    static STARTS: OnceLock<bool> = OnceLock::new();
    let device = of_the_build();
    let starts = STARTS.get_or_init(|| {
        let probe = || Tensor::<1>::ones([1], &of_the_build()).exp().try_into_data().is_ok();
        let starts = catch_unwind(probe).unwrap_or(false);
        if !starts {
            skipped("all tests of this binary", &format!("{device:?} does not start here; they run on Flex"));
        }
        starts
    });
    if *starts { device } else { Device::flex() }
}

fn of_the_build() -> Device {
    #[cfg(feature = "cpu")]
    return Device::cpu();
    #[cfg(all(feature = "wgpu", not(feature = "cpu")))]
    return Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    #[cfg(not(any(feature = "cpu", feature = "wgpu")))]
    Device::flex()
}

/// Another device than [`device`]: the same adapter under another name, with queues and pools of its own, or Flex.
pub fn other_device() -> Device {
    #[cfg(all(feature = "wgpu", not(feature = "cpu")))]
    return Device::wgpu(burn::tensor::DeviceKind::Cpu);
    #[cfg(not(all(feature = "wgpu", not(feature = "cpu"))))]
    Device::flex()
}

/// Whether Burn's own operations have results of that type on [`device`]. CubeCL's runtime for processors says so of bf16 everywhere, but where
/// the processor has no instruction that rounds, it calls a function that libgcc has from version 13 on, and without it computes nothing.
pub fn rounds_to(dtype: DType) -> bool {
    static BF16: OnceLock<bool> = OnceLock::new();
    let rounds = || {
        let third = Tensor::<1>::from_floats([1.0 / 3.0], &device()).cast(DType::BF16).try_into_data();
        third.is_ok_and(|third| third.iter::<f32>().all(|x| (x - 1.0 / 3.0).abs() < 1e-2))
    };
    let bf16 = || *BF16.get_or_init(|| catch_unwind(rounds).unwrap_or(false));
    device().supports_dtype(dtype) && (dtype != DType::BF16 || bf16())
}

/// Says that a test, or a part of one, was left out: on standard error itself, which a test that passes does not swallow, and in a form that is
/// counted.
pub fn skipped(test: &str, why: &str) {
    let _ = writeln!(stderr(), "skipped: {test}: {why}");
}
