//! Opening a device: a runtime that cannot start panics, on whatever thread, and what is missing is in the panic's message.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, DeviceIndex, DeviceKind, Tensor};

use super::{DeviceChoice, DeviceError, Runtime};

/// One opening at a time: each puts back the hook that it found.
static OPENING: Mutex<()> = Mutex::new(());

pub(super) fn open(choice: DeviceChoice) -> Result<Device, DeviceError> {
    let device = handle(choice)?;
    if choice.runtime().is_heap() {
        return Ok(device);
    }
    match quietly(|| probe(&device)) {
        Ok(Ok(())) => Ok(device),
        Ok(Err(problem)) | Err(problem) => Err(DeviceError::NotStarted { device: choice, problem }),
    }
}

/// Burn's handle; nothing is started by it.
#[allow(unused_variables, reason = "without the features there is nothing to choose")]
fn handle(choice: DeviceChoice) -> Result<Device, DeviceError> {
    let absent = |runtime| Err(DeviceError::NotCompiled { runtime });
    let index = DeviceIndex::Specified(choice.index());
    let best = DeviceKind::DefaultDevice;
    match choice.runtime() {
        #[cfg(feature = "flex")]
        Runtime::Flex => Ok(Device::flex()),
        #[cfg(feature = "cpu")]
        Runtime::Cpu => Ok(Device::cpu()),
        #[cfg(feature = "wgpu")]
        Runtime::Wgpu => Ok(Device::wgpu(best)),
        #[cfg(feature = "vulkan")]
        Runtime::Vulkan => Ok(Device::vulkan(best)),
        #[cfg(feature = "cuda")]
        Runtime::Cuda => Ok(Device::cuda(index)),
        #[cfg(feature = "rocm")]
        Runtime::Rocm => Ok(Device::rocm(index)),
        #[cfg(feature = "metal")]
        Runtime::Metal => Ok(Device::metal(best)),
        #[allow(unreachable_patterns, reason = "all of them may be compiled in")]
        runtime => absent(runtime),
    }
}

/// The first operation: it starts the runtime, compiles a kernel that calls the mathematics library (on CUDA it comes from libdevice), and
/// reads the result.
fn probe(device: &Device) -> Result<(), String> {
    let found = Tensor::<1>::from_floats([0.0, 1.0], device).exp().try_into_data();
    let found: Vec<f64> = found.map_err(|error| one_line(&error.to_string()))?.iter::<f64>().collect();
    let near = |(found, expected): (&f64, f64)| (found - expected).abs() < 1e-3;
    match found.len() == 2 && found.iter().zip([1.0, std::f64::consts::E]).all(near) {
        true => Ok(()),
        false => Err(format!("exp(0), exp(1) are {found:?} on it")),
    }
}

/// Whether the device does what it says of bf16. CubeCL's runtime for processors calls a function to round where the processor has no
/// instruction, which not every system has: without it a kernel is not started, and who reads the result learns nothing of it.
pub(super) fn rounds_to_bf16(device: &Device) -> bool {
    let third = || Tensor::<1>::from_floats([1.0 / 3.0], device).cast(DType::BF16).try_into_data();
    let near = |found: f64| (found - 1.0 / 3.0).abs() < 1e-2;
    quietly(third).is_ok_and(|found| found.is_ok_and(|found| found.iter::<f64>().all(near)))
}

/// What `start` gives, or the messages of all panics while it ran, of other threads, too: a runtime starts on a thread of its own, and whoever
/// waits for it learns only that it is gone.
fn quietly<T>(start: impl FnOnce() -> T) -> Result<T, String> {
    let _alone = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    let said = Arc::new(Mutex::new(Vec::<String>::new()));
    let before = panic::take_hook();
    panic::set_hook({
        let said = said.clone();
        Box::new(move |info| {
            said.lock().unwrap_or_else(PoisonError::into_inner).push(message(info.payload()));
        })
    });
    let result = panic::catch_unwind(AssertUnwindSafe(start));
    panic::set_hook(before);
    let said = std::mem::take(&mut *said.lock().unwrap_or_else(PoisonError::into_inner));
    // The first one is the cause, the others follow from it.
    result.map_err(|panic| said.into_iter().next().unwrap_or_else(|| message(&*panic)))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.map_or_else(|| "its runtime panicked".to_owned(), one_line)
}

/// Without line ends, and not without end: a message may list a whole kernel.
fn one_line(text: &str) -> String {
    const LONGEST: usize = 300;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = line.trim_end_matches(['.', ':']);
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{} ..", &line[..end]),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_first_panic_of_any_thread_is_the_cause() {
        assert_eq!(quietly(|| 3), Ok(3));
        assert_eq!(quietly(|| panic!("no\n  driver {}.", 4)), Err::<(), _>("no driver 4".to_owned()));
        let other = quietly(|| {
            assert!(thread::spawn(|| panic!("no adapter found")).join().is_err());
            panic!("the channel is closed");
        });
        assert_eq!(other, Err::<(), _>("no adapter found".to_owned()));
        assert_eq!(quietly(|| panic::panic_any(3)), Err::<(), _>("its runtime panicked".to_owned()));
    }

    #[test]
    fn a_message_has_one_line_and_an_end() {
        assert_eq!(one_line("a\n b:"), "a b");
        assert_eq!(one_line(&"ä".repeat(400)).chars().count(), 303);
    }

    #[test]
    fn what_runs_computes() {
        assert_eq!(probe(&Device::flex()), Ok(()));
        for runtime in Runtime::compiled_in() {
            match DeviceChoice::first(runtime).open() {
                Ok(device) => assert_eq!(probe(&device), Ok(())),
                // Not on every machine; but then it says what is missing.
                Err(error) => assert!(error.to_string().contains(runtime.needs()), "{error}"),
            }
        }
    }
}
