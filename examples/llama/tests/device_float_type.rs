//! Without a choice weights are of the device's float type. A test binary of its own: that type is set once, for the whole process.

mod common;

use burn::tensor::{DType, Device, DeviceConfig, FloatDType};
use common::{Reference, error, family};
use llama::{ParallelConfig, load, load_as};

#[test]
fn weights_are_of_the_devices_float_type() {
    let mut device = Device::flex();
    device.configure(DeviceConfig::default().float_dtype(FloatDType::BF16)).unwrap();
    let (model, _) = load(&family("qwen3"), &ParallelConfig::none(), &device).unwrap();
    assert_eq!(model.embed_tokens.weight.val().dtype(), DType::BF16);
    let reference = Reference::at(&family("qwen3"));
    let logits = model.logits(reference.tokens()).cast(DType::F32).into_data();
    assert!(error(&logits, &reference.get("logits")) < 24.0 / 256.0);

    let (exact, _) = load_as(&family("qwen3"), &ParallelConfig::all(), &device, DType::F32).unwrap();
    assert_eq!(exact.embed_tokens.weight.val().dtype(), DType::F32);
    assert!(error(&exact.logits(reference.tokens()).into_data(), &reference.get("logits")) <= 2e-5);
}
