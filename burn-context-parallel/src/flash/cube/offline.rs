//! The kernels of both families, and the prepass, compiled for NVIDIA's devices without one: expanded, lowered to PTX, and where the
//! assembler is installed assembled, with their registers and spills.
#![allow(clippy::print_stdout, reason = "the figures, for whoever runs it with --nocapture")]

use std::fmt;
use std::io::{Write, stderr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use cubecl::Compiler;
use cubecl::ir::*;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{shape, strides};
use cubecl_common::device::{DeviceId, ServiceId};
use cubecl_cpp::shared::{CompilationOptions, CppSupportedFeatures};
use cubecl_cuda::compiler::{CudaBackend, CudaCompilationOptions, CudaCompiler, CudaRepresentation};
use cubecl_llvm::nvptx::ptx_version::PtxVersion;
use cubecl_llvm::shared::lowered_features::{GpuTarget, restrict_features};
use cubecl_runtime::runtime::Runtime;
use rstest::rstest;

use super::super::blueprint::{Blueprint, DeviceLimits, Tiles};
use super::block::{BlockConfig, block_forward, block_keys, block_queries};
use super::delta::row_delta;
use super::rows::{RowsConfig, rows_forward, rows_keys, rows_queries};
use super::table::Labels;

/// A generation of NVIDIA's GPUs; those with an `a` have what only they have.
#[derive(Clone, Copy)]
struct Generation(u32, &'static str);

/// The oldest with bf16, and Hopper.
const GENERATIONS: [Generation; 2] = [Generation(80, ""), Generation(90, "a")];

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.0, self.1)
    }
}

fn properties(generation: u32) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 48 << 10,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity =
        DeviceIdentity { name: "offline".into(), fingerprint: format!("offline_{generation}"), physical: None };
    let memory = MemoryDeviceProperties::new(1 << 34, 512);
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, cubecl::profile::TimingMethod::Device, identity);
    cubecl_cpp::register_supported_types(&mut properties);
    restrict_features(&mut properties, GpuTarget::Nvptx);
    properties
}

/// Compiles a kernel; with the assembler, its registers and bytes of spills.
fn compile(name: &str, generation: Generation, kernel: impl CubeKernel) -> Option<(usize, usize)> {
    let definition = cubecl::define_kernel(&kernel).unwrap_or_else(|error| panic!("{name}: {error:?}"));
    let options = CudaCompilationOptions {
        cpp: CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures { fast_math: true, grid_constants: true, ..Default::default() },
            ..Default::default()
        },
        arch: Some(nvidia::SmArch::new(generation.0, !generation.1.is_empty())),
        ptx_version: PtxVersion::for_driver(12090),
    };
    let made = CudaCompiler::new(CudaBackend::Llvm).compile(definition, &options);
    let CudaRepresentation::Llvm(made) = made.unwrap_or_else(|error| panic!("{name}: {error:?}")) else {
        panic!("{name}: not compiled by LLVM");
    };
    let ptx: Vec<u8> = made.ptx.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    assert!(!ptx.is_empty());
    let Some(assembler) = assembler() else {
        let _ = writeln!(
            stderr(),
            "skipped: {name}, {generation}: there is no ptxas to assemble it; `.ci/setup nvidia` brings one"
        );
        return None;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kernel.ptx");
    std::fs::write(&file, ptx).unwrap();
    let output = Command::new(assembler)
        .args(["-v", &format!("-arch={generation}"), "-o", "/dev/null"])
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {said}");
    let number = |before: &str| -> usize {
        let at = said.find(before).unwrap_or_else(|| panic!("{name}: no {before} in {said}"));
        said[..at].split_whitespace().next_back().unwrap().parse().unwrap()
    };
    Some((number(" registers"), number(" bytes spill stores") + number(" bytes spill loads")))
}

/// `ptxas` of a CUDA toolkit, if there is one: in the toolkit's folder, or on the path.
fn assembler() -> Option<PathBuf> {
    let toolkit = std::env::var_os("CUDA_PATH").map(|folder| PathBuf::from(folder).join("bin/ptxas"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    toolkit
        .into_iter()
        .chain(std::env::split_paths(&path).map(|folder| folder.join("ptxas")))
        .find(|file| file.is_file())
}

/// A buffer of no device.
fn handle(bytes: usize) -> Handle {
    let service = ServiceId { device: DeviceId { type_id: 0, index_id: 0 }, service: std::any::TypeId::of::<()>() };
    Handle::new(service, cubecl_environment::stream::StreamId::current(), bytes as u64)
}

fn tensor(shape: [usize; 4], size: usize) -> TensorArg {
    let [b, h, s, d] = shape;
    // SAFETY: the handle is as long as the shape says; nothing is started.
    unsafe {
        TensorArg::from_raw_parts(handle(b * h * s * d * size), strides![h * s * d, s * d, d, 1], shape![b, h, s, d])
    }
}

fn numbers(len: usize) -> BufferArg {
    // SAFETY: as above.
    unsafe { BufferArg::from_raw_parts(handle(len * 4), len) }
}

/// A tensor of numbers of a type.
#[derive(Clone, Copy)]
struct Numbers(ElemType, usize);

impl Numbers {
    fn of(dtype: &str) -> Self {
        match dtype {
            "f32" => Self(f32::elem_type_native(), 4),
            "f16" => Self(half::f16::elem_type_native(), 2),
            _ => Self(half::bf16::elem_type_native(), 2),
        }
    }
}

/// What kernels are compiled for.
struct Case {
    generation: Generation,
    dim: usize,
    inputs: Numbers,
    results: Numbers,
    address: AddressType,
    onto: bool,
}

impl Case {
    fn device(&self) -> Arc<DeviceProperties> {
        Arc::new(properties(self.generation.0))
    }

    fn limits(&self) -> DeviceLimits {
        let shared_bytes = self.device().hardware.max_shared_memory_size;
        DeviceLimits { plane: 32, units: 1024, vector: 4, shared_bytes, bindings: 1024, wide_addresses: true }
    }

    fn tensor(&self, Numbers(_, size): Numbers) -> TensorArg {
        tensor([1, 4, 1024, self.dim], size)
    }
}

/// Forward, dq, dk and dv of a family, compiled: names, and what was found.
macro_rules! compiled {
    ($case:ident, $blueprint:ident, ($forward:ident, $queries:ident, $keys:ident), $config:expr) => {{
        let Case { generation, inputs, results, address, onto, .. } = *$case;
        let (device, target) = ($case.device(), Arc::new(cubecl_cuda::CudaRuntime::target_properties()));
        let dtypes = [inputs.0, results.0];
        let rows = || tensor([1, 4, 1024, 1], 4);
        let count = || CubeCount::Static(1, 1, 1);
        let units = |tiles: &Tiles| CubeDim::new_1d(tiles.units as u32);
        let (read, written) = (|| $case.tensor(inputs), || $case.tensor(results));
        let tiles = $blueprint.forward;
        let forward = $forward::create_dummy_kernel(
            device.clone(),
            target.clone(),
            count(),
            units(&tiles),
            address,
            tiles.vector,
            read(),
            read(),
            read(),
            numbers(64),
            written(),
            rows(),
            0.1,
            0.0,
            1.0,
            0,
            $config(&tiles),
            dtypes,
        );
        let tiles = $blueprint.queries;
        let queries = $queries::create_dummy_kernel(
            device.clone(),
            target.clone(),
            count(),
            units(&tiles),
            address,
            tiles.vector,
            read(),
            read(),
            read(),
            read(),
            rows(),
            rows(),
            numbers(64),
            written(),
            0.1,
            0.0,
            1.0,
            0,
            $config(&tiles),
            dtypes,
        );
        let tiles = $blueprint.keys;
        let keys = $keys::create_dummy_kernel(
            device,
            target,
            count(),
            units(&tiles),
            address,
            tiles.vector,
            read(),
            read(),
            read(),
            read(),
            rows(),
            rows(),
            numbers(64),
            written(),
            written(),
            0.1,
            0.0,
            1.0,
            0,
            onto,
            $config(&tiles),
            dtypes,
        );
        [
            ("forward", compile("forward", generation, forward)),
            ("dq", compile("dq", generation, queries)),
            ("dk and dv", compile("dk and dv", generation, keys)),
        ]
    }};
}

fn delta(case: &Case) -> Option<(usize, usize)> {
    let rows = || tensor([1, 4, 1024, 1], 4);
    let kernel = row_delta::create_dummy_kernel(
        case.device(),
        Arc::new(cubecl_cuda::CudaRuntime::target_properties()),
        CubeCount::Static(1, 1, 1),
        CubeDim::new_1d(64),
        case.address,
        case.tensor(case.inputs),
        case.tensor(case.results),
        rows(),
        rows(),
        case.onto,
        [case.inputs.0, case.results.0],
    );
    compile("delta", case.generation, kernel)
}

/// A causal mask; labels of all kinds, results in f32 and on top of others, with addresses past 2^31; the same, bent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Causal,
    Labels,
    Softcap,
}

fn case(generation: Generation, dim: usize, dtype: &str, kind: Kind) -> Case {
    let all = kind != Kind::Causal;
    let inputs = Numbers::of(dtype);
    let results = if all { Numbers::of("f32") } else { inputs };
    let address = if all { AddressType::U64 } else { AddressType::U32 };
    Case { generation, dim, inputs, results, address, onto: all }
}

fn labels(kind: Kind) -> Labels {
    let all = kind != Kind::Causal;
    Labels { documents: all, positions: all }
}

#[rstest]
fn block_kernels_compile_without_spills(
    #[values(8, 33, 64, 96, 128, 256)] dim: usize,
    #[values("f32", "f16", "bf16")] dtype: &str,
    #[values(Kind::Causal, Kind::Labels, Kind::Softcap)] kind: Kind,
) {
    for generation in GENERATIONS {
        let case = &case(generation, dim, dtype, kind);
        let blueprint = Blueprint::choose(&case.limits(), dim);
        blueprint.check(&case.limits(), dim).unwrap();
        let config =
            |tiles: &Tiles| BlockConfig::new(dim, tiles, labels(kind), kind == Kind::Softcap, dtype == "f32", false);
        let found = compiled!(case, blueprint, (block_forward, block_queries, block_keys), config);
        for (name, found) in found.into_iter().chain([("delta", delta(case))]) {
            let Some((registers, spills)) = found else { continue };
            println!("{generation} {dtype} D {dim} {kind:?}: {name} {registers} registers, {spills} bytes of spills");
            assert_eq!(spills, 0, "{name}");
        }
    }
}

/// Nobody would choose them there, where they spill; but one source is for all. Larger heads take the compiler minutes.
#[rstest]
fn rows_kernels_compile(
    #[values(8)] dim: usize,
    #[values("f32", "bf16")] dtype: &str,
    #[values(Kind::Causal, Kind::Labels, Kind::Softcap)] kind: Kind,
) {
    for generation in GENERATIONS {
        let case = &case(generation, dim, dtype, kind);
        let blueprint: Blueprint = "rows:8x4v4u64".parse().unwrap();
        blueprint.check(&case.limits(), dim).unwrap();
        let config = |tiles: &Tiles| RowsConfig {
            dim,
            lanes: tiles.vector,
            vectors: tiles.own / tiles.vector,
            step: tiles.step,
            tile: 64,
            dense: true,
            labels: labels(kind),
            softcap: kind == Kind::Softcap,
            exact: dtype == "f32",
            by_bits: false,
        };
        let found = compiled!(case, blueprint, (rows_forward, rows_queries, rows_keys), config);
        for (name, found) in found {
            let Some((registers, spills)) = found else { continue };
            println!("{generation} {dtype} D {dim} {kind:?}: {name} {registers} registers, {spills} bytes of spills");
        }
    }
}
