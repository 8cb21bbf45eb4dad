//! The files of a folder's weights: one, or several with an index, checked before any weight is read.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::error::{LlamaError, Result};
use crate::files::{SafetensorsHeader, read_text};

/// The name of the weights in a model folder.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The name of the index where they are in several files.
const INDEX: &str = "model.safetensors.index.json";

/// The weights of a folder.
pub(crate) struct Files {
    /// What to name in messages: the one file, or the index.
    pub named: PathBuf,
    /// Every file.
    pub paths: Vec<PathBuf>,
    /// The tensors of all of them.
    pub tensors: BTreeSet<String>,
}

/// As transformers chooses: the one file if there is one, else the index.
pub(crate) fn find(folder: &Path) -> Result<Files> {
    let (single, index) = (folder.join(WEIGHTS), folder.join(INDEX));
    // What is there and is no file is refused when it is read, not passed over.
    if single.exists() {
        let tensors = SafetensorsHeader::read(&single)?.tensors;
        return Ok(Files { named: single.clone(), paths: vec![single], tensors });
    }
    if index.exists() {
        return shards(folder, index);
    }
    for (other, what) in
        [("pytorch_model.bin", "a PyTorch pickle"), ("pytorch_model.bin.index.json", "a sharded PyTorch pickle")]
    {
        let other = folder.join(other);
        if other.exists() {
            return Err(LlamaError::unsupported(
                &other,
                what,
                "save it with transformers as safetensors (save_pretrained)",
            ));
        }
    }
    let error = io::Error::new(io::ErrorKind::NotFound, "no such file");
    Err(LlamaError::file(&single, error, "give a folder that holds config.json and model.safetensors"))
}

#[derive(Deserialize)]
struct Index {
    /// Tensor -> file.
    weight_map: BTreeMap<String, String>,
}

fn shards(folder: &Path, index: PathBuf) -> Result<Files> {
    let damaged = |problem: String| LlamaError::Weights { path: index.clone(), problem };
    let text = read_text(&index, "make it a readable file of text")?;
    let Index { weight_map } =
        serde_json::from_str(&text).map_err(|error| damaged(format!("no index of shards: {error}")))?;
    let mut shards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        if !is_plain(shard) {
            return Err(damaged(format!("{tensor} is said to be in {shard:?}, which is no file of this folder")));
        }
        shards.entry(shard).or_default().insert(tensor);
    }
    if shards.is_empty() {
        return Err(damaged("weight_map is empty".into()));
    }
    let mut paths = Vec::with_capacity(shards.len());
    for (shard, tensors) in shards {
        let path = folder.join(shard);
        if !path.exists() {
            let error = io::Error::new(io::ErrorKind::NotFound, "no such shard");
            return Err(LlamaError::file(&path, error, "download all files that model.safetensors.index.json names"));
        }
        let held = SafetensorsHeader::read(&path)?.tensors;
        if let Some(name) = tensors.iter().find(|name| !held.contains(**name)) {
            return Err(damaged(format!("{shard} does not have {name}")));
        }
        if let Some(name) = held.iter().find(|name| !tensors.contains(name.as_str())) {
            let said = match weight_map.get(name) {
                Some(other) => format!("which is said to be in {other}"),
                None => "which the index does not name".into(),
            };
            return Err(damaged(format!("{shard} has {name}, {said}")));
        }
        paths.push(path);
    }
    Ok(Files { named: index, paths, tensors: weight_map.into_keys().collect() })
}

/// Whether this is the name of a file in the same folder: no path, and nothing that leads out.
fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    plain && !name.contains(['/', '\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_files_beside_the_index_are_plain() {
        for name in ["model-00001-of-00002.safetensors", "a", "..a", "a b"] {
            assert!(is_plain(name), "{name}");
        }
        for name in ["", ".", "..", "../a", "a/b", "/a", "a/", "./a", "a\\b", "a/../b", "a\0"] {
            assert!(!is_plain(name), "{name:?}");
        }
    }
}
