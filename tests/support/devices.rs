//! The device that a build of the tests is made for.

use std::io::{Write, stderr};

use burn::tensor::Device;

/// The CubeCL device of the build's features, or Flex.
pub fn device() -> Device {
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

/// Says that a test, or a part of one, was left out: on standard error itself, which a test that passes does not swallow, and in a form that is
/// counted.
pub fn skipped(test: &str, why: &str) {
    let _ = writeln!(stderr(), "skipped: {test}: {why}");
}
