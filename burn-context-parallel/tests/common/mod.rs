//! What the flash attention tests share: reading reference cases, comparing tensors, random tensors.
#![allow(dead_code)]

pub mod attention;
#[path = "../../../tests/support/devices.rs"]
mod devices;

use std::path::PathBuf;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_context_parallel::flash::FlashOptions;
use burn_context_parallel::sequence::Documents;
use safetensors::SafeTensors;

#[allow(unused_imports, reason = "no test file uses all of it")]
pub use devices::{device, rounds_to, skipped};

/// One case of `tests/reference/make_attention.py` of the workspace.
pub struct Case {
    pub options: FlashOptions,
    bytes: Vec<u8>,
}

impl Case {
    pub fn read(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/reference/attention")
            .join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let options = &header.metadata().as_ref().unwrap()["options"];
        let json: serde_json::Value = serde_json::from_str(options).unwrap();
        let base = if json["causal"].as_bool().unwrap() { FlashOptions::causal() } else { FlashOptions::full() };
        let options = base
            .with_scale(json["scale"].as_f64().unwrap())
            .with_offsets(json["q_offset"].as_i64().unwrap(), json["k_offset"].as_i64().unwrap());
        let size = |value: &serde_json::Value| value.as_u64().map(|size| size as usize);
        let mut options = options;
        options.window = size(&json["window"]);
        options.softcap = json["softcap"].as_f64();
        if let Some(boundaries) = json["cu_seqlens"].as_array() {
            let boundaries: Vec<usize> = boundaries.iter().filter_map(size).collect();
            options = options.with_documents(Documents::from_cu_seqlens(&boundaries).unwrap());
        }
        Self { options, bytes }
    }

    pub fn tensor<const D: usize>(&self, name: &str, device: &Device) -> Tensor<D> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype(), safetensors::Dtype::F32);
        let values: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        Tensor::from_data(TensorData::new(values, view.shape().to_vec()), (device, DType::F32))
    }
}

pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().into_data().convert::<f64>().try_into_vec::<f64>().unwrap()
}

pub fn largest<const D: usize>(tensor: &Tensor<D>) -> f64 {
    values(tensor).into_iter().filter(|x| x.is_finite()).fold(0.0, |m, x| m.max(x.abs()))
}

/// Largest difference, where infinities must agree and nothing may be NaN.
pub fn difference<const D: usize>(got: &Tensor<D>, wanted: &Tensor<D>) -> f64 {
    assert_eq!(got.dims(), wanted.dims());
    values(got).into_iter().zip(values(wanted)).fold(0.0, |most: f64, (a, b)| {
        assert!(!a.is_nan() && !b.is_nan(), "NaN: {a} for {b}");
        if a == b { most } else { most.max((a - b).abs()) }
    })
}

/// Asserts agreement within `tolerance` of the largest wanted magnitude.
#[track_caller]
pub fn close<const D: usize>(what: &str, got: &Tensor<D>, wanted: &Tensor<D>, tolerance: f64) {
    let (difference, allowed) = (difference(got, wanted), tolerance * largest(wanted));
    assert!(difference <= allowed, "{what}: off by {difference:.3e}, {allowed:.3e} allowed");
}

/// Standard normal numbers from a seed.
pub fn random<const D: usize>(shape: [usize; D], seed: u64, device: &Device, dtype: DType) -> Tensor<D> {
    // splitmix64 and Box-Muller: no dependence on a crate's generator, so that failures reproduce.
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let values: Vec<f64> = (0..shape.iter().product())
        .map(|_| (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos())
        .collect();
    let exact = Tensor::<D>::from_data(TensorData::new(values, shape), (device, DType::F64));
    exact.cast(dtype)
}
