//! Words, and what they mean.

use rstest::rstest;

use super::*;

#[rstest]
#[case("flex", "flex")]
#[case("cpu", "cpu")]
#[case("wgpu", "wgpu")]
#[case("vulkan", "vulkan")]
#[case("metal", "metal")]
#[case("cuda", "cuda:0")]
#[case("cuda:0", "cuda:0")]
#[case("rocm:12", "rocm:12")]
#[case("cuda:1, cuda", "cuda:1,cuda:0")]
fn a_list_is_shown_as_it_is_typed(#[case] text: &str, #[case] shown: &str) {
    let list: DeviceList = text.parse().unwrap();
    assert_eq!(list.to_string(), shown);
    assert_eq!(shown.parse(), Ok(list));
}

#[rstest]
#[case("vulcan", "no device is called \"vulcan\": did you mean vulkan?")]
#[case("CUDA:1", "no device is called \"CUDA:1\": did you mean cuda?")]
#[case("gpu", "no device is called \"gpu\": did you mean cuda?")]
#[case("mps", "no device is called \"mps\": did you mean metal?")]
#[case("tpu-v5-pod", "no device is called \"tpu-v5-pod\": use one of flex, cpu, wgpu, vulkan, cuda:N, rocm:N, metal")]
#[case("flex:0", "no device is called \"flex:0\": flex has no numbers: use flex")]
#[case("cuda:", "no device is called \"cuda:\": use cuda:0 for the first one, cuda:1 for the next")]
#[case("cuda:+1", "no device is called \"cuda:+1\": use cuda:0 for the first one, cuda:1 for the next")]
#[case("rocm:-1", "no device is called \"rocm:-1\": use rocm:0 for the first one, rocm:1 for the next")]
#[case("cuda:99999", "no device is called \"cuda:99999\": use cuda:0 for the first one, cuda:1 for the next")]
#[case("cuda:0,rocm:0", "cuda:0 and rocm:0 in one list: use devices of one kind")]
#[case("cuda,cuda:0", "cuda:0 is listed twice: list it once: ranks that come in turn share it")]
fn what_is_no_device_says_what_would_be(#[case] text: &str, #[case] expected: &str) {
    assert_eq!(text.parse::<DeviceList>().unwrap_err().to_string(), expected);
}

#[rstest]
#[case("")]
#[case(",")]
#[case("flex,")]
#[case(":")]
#[case("cuda:0:1")]
fn scraps_are_refused(#[case] text: &str) {
    assert!(text.parse::<DeviceList>().is_err());
}

#[test]
fn ranks_take_devices_in_turn() {
    let list: DeviceList = "cuda:2,cuda:0,cuda:1".parse().unwrap();
    let found: Vec<usize> = (0..7).map(|rank| list.of_rank(rank).index()).collect();
    assert_eq!(found, [2, 0, 1, 2, 0, 1, 2]);
    assert_eq!(DeviceList::default(), DeviceChoice::FLEX.into());
}

#[test]
fn what_is_not_compiled_in_names_its_feature_and_is_never_opened() {
    let (there, absent): (Vec<_>, Vec<_>) = Runtime::ALL.into_iter().partition(|runtime| runtime.is_compiled_in());
    assert_eq!(there, Runtime::compiled_in());
    assert!(there.contains(&Runtime::Flex));
    for runtime in absent {
        let list = DeviceList::from(DeviceChoice::first(runtime));
        let error = list.open().unwrap_err();
        assert_eq!(error, DeviceError::NotCompiled { runtime });
        assert_eq!(list.expect_compiled_in(), Err(error.clone()));
        let text = error.to_string();
        let expected = format!("{runtime} is not compiled in: build with --features {runtime}; this program has flex");
        assert!(text.starts_with(&expected), "{text}");
    }
}

/// Every runtime has a feature of its own name, in the manifests of all programs.
#[test]
fn every_runtime_has_its_feature_in_every_program() {
    for manifest in [
        include_str!("../../Cargo.toml"),
        include_str!("../../../finetune/Cargo.toml"),
        include_str!("../../../verify/Cargo.toml"),
        include_str!("../../../bench/Cargo.toml"),
        include_str!("../../../../tests/Cargo.toml"),
    ] {
        let manifest: String = manifest.lines().map(|line| format!("\n{line}")).collect();
        for runtime in Runtime::ALL.into_iter().filter(|runtime| *runtime != Runtime::Flex) {
            assert!(manifest.contains(&format!("\n{runtime} = [")), "{runtime}: {manifest}");
        }
    }
}

#[test]
fn half_types_and_doubles_are_asked_for() {
    let flex = DeviceChoice::FLEX.open().unwrap();
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        assert_eq!(DeviceChoice::FLEX.expect_dtype(&flex, dtype), Ok(()));
    }
    // Whatever the device itself says: our kernels have no f64.
    let error = DeviceChoice::first(Runtime::Wgpu).expect_dtype(&flex, DType::F64).unwrap_err();
    assert_eq!(error.to_string(), "wgpu does not compute in F64: use f32, or the device flex");
}
