//! What tests of checkpoints share.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::{Path, PathBuf};

use burn::tensor::{DType, TensorData};
use burn_context_parallel::group::{LaunchError, launch};
use burn_upipe::learner::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Piece, RunState};

/// Bytes that look like nothing else.
pub fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Any bits at all, NaN among them: they are compared as bytes.
pub fn values(shape: &[usize], dtype: DType, seed: u64) -> TensorData {
    let elements: usize = shape.iter().product();
    TensorData::from_bytes_vec(bytes(elements * dtype.size(), seed), shape.to_vec(), dtype)
}

/// The elements of a range.
pub fn part(data: &TensorData, range: std::ops::Range<usize>) -> TensorData {
    let size = data.dtype().size();
    let bytes = data.as_bytes()[range.start * size..range.end * size].to_vec();
    TensorData::from_bytes_vec(bytes, [range.len()], data.dtype())
}

/// Of all element types that models have; what they hold depends on the step.
pub fn tensors(step: u64) -> Vec<(String, TensorData)> {
    let tensor = |(i, (shape, dtype)): (usize, (&[usize], DType))| {
        (format!("block.{i}.weight"), values(shape, dtype, 100 * step + i as u64))
    };
    let kinds: [(&[usize], DType); 5] =
        [(&[7, 5], DType::F32), (&[64], DType::BF16), (&[3, 4, 5], DType::F64), (&[31], DType::F16), (&[], DType::I64)];
    kinds.into_iter().enumerate().map(tensor).collect()
}

/// What `rank` of `ranks` saves of [`tensors`]: every tensor cut into as many parts as there are ranks.
pub fn shard(step: u64, rank: usize, ranks: usize) -> Vec<Piece<'static>> {
    let cut = |(name, data): (String, TensorData)| {
        let n = data.num_elements();
        let range = n * rank / ranks..n * (rank + 1) / ranks;
        Piece::part(name, data.shape().to_vec(), range.clone(), part(&data, range))
    };
    tensors(step).into_iter().map(cut).collect()
}

pub fn state(step: u64) -> RunState {
    RunState {
        step,
        tokens_seen: 1000 * step,
        data: serde_json::json!({ "row": step, "shuffle": 0.1 }),
        ..RunState::default()
    }
}

/// Saves the step on so many ranks.
pub fn save(folder: &Path, step: u64, ranks: usize) -> Result<PathBuf, LaunchError> {
    let folder = folder.to_owned();
    let paths = launch(ranks, move |world| {
        Checkpoints::new(&folder, None).save(&world, shard(step, world.rank(), ranks), &state(step))
    })?;
    Ok(paths[0].clone())
}

/// That all values can be read, and are those of the step.
pub fn holds(checkpoint: &Checkpoint, step: u64) -> Result<(), CheckpointError> {
    assert_eq!(checkpoint.state(), &state(step));
    let expected = tensors(step);
    assert!(checkpoint.names().eq(expected.iter().map(|(name, _)| name.as_str())));
    for (name, data) in expected {
        let read = checkpoint.read_whole(&name)?;
        assert_eq!((read.dtype(), read.shape()), (data.dtype(), data.shape()), "{name}");
        assert!(read.as_bytes() == data.as_bytes(), "{name} of step {step} has other values");
    }
    Ok(())
}

/// The names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
