//! Whatever lies where weights should be, loading gives a model or an error.
#![no_main]

use std::sync::OnceLock;

use burn::tensor::Device;
use libfuzzer_sys::fuzz_target;
use llama::{Llama, LlamaConfig, ParallelConfig, load};
use tempfile::TempDir;

fn folder() -> &'static TempDir {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let config = LlamaConfig::new(8, 4, 4, 1, 2, 1);
        let model = Llama::init(&config, &ParallelConfig::none(), &Device::flex()).expect("a model");
        model.save(folder.path()).expect("saved");
        folder
    })
}

fuzz_target!(|bytes: &[u8]| {
    let folder = folder().path();
    std::fs::write(folder.join("model.safetensors"), bytes).expect("written");
    if let Err(error) = load(folder, &ParallelConfig::none(), &Device::flex()) {
        assert!(!error.to_string().is_empty());
    }
});
