//! What is saved is what was loaded, in the layout that transformers writes.

mod common;

use std::collections::BTreeMap;
use std::fs;

use burn::tensor::Device;
use common::{folder, read};
use llama::{LlamaConfig, ParallelConfig, load};
use rstest::rstest;
use safetensors::SafeTensors;

#[rstest]
fn loading_and_saving_keeps_every_bit(
    #[values("llama", "llama_scaled_tied")] model: &str,
    #[values(ParallelConfig::none(), ParallelConfig::all())] parallel: ParallelConfig,
    #[values(Device::flex(), Device::flex().autodiff())] device: Device,
) {
    let copy = tempfile::tempdir().unwrap();
    let target = copy.path().join("new/folder");
    let (loaded, _) = load(&folder(model), &parallel, &device).unwrap();
    loaded.save(&target).unwrap();

    // Names, orientation and bytes are transformers' own.
    let saved = read(&target.join("model.safetensors"));
    assert_eq!(
        saved.keys().collect::<Vec<_>>(),
        read(&folder(model).join("model.safetensors")).keys().collect::<Vec<_>>()
    );
    assert!(saved == read(&folder(model).join("model.safetensors")));
    let bytes = fs::read(target.join("model.safetensors")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata: BTreeMap<_, _> = metadata.metadata().clone().unwrap().into_iter().collect();
    assert_eq!(metadata, BTreeMap::from([("format".to_owned(), "pt".to_owned())]));

    // The configuration is the same model, token ids and all.
    let config = |folder: &std::path::Path| LlamaConfig::read(&folder.join("config.json")).unwrap();
    assert_eq!(config(&target), config(&folder(model)));

    // And it loads again.
    let (again, report) = load(&target, &parallel, &device).unwrap();
    assert!(report.is_complete());
    assert_eq!(again.embed_tokens.weight.val().into_data(), loaded.embed_tokens.weight.val().into_data());
}

#[test]
fn saving_replaces_what_was_there_and_leaves_nothing_else() {
    let copy = tempfile::tempdir().unwrap();
    fs::write(copy.path().join("model.safetensors"), "old").unwrap();
    fs::write(copy.path().join("config.json"), "old").unwrap();
    let (model, _) = load(&folder("llama"), &ParallelConfig::none(), &Device::flex()).unwrap();
    model.save(copy.path()).unwrap();
    model.save(copy.path()).unwrap();
    let mut names: Vec<_> = fs::read_dir(copy.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors"]);
    assert!(load(copy.path(), &ParallelConfig::none(), &Device::flex()).is_ok());
}

#[test]
fn weights_that_cannot_be_written_are_an_error_of_the_place() {
    let copy = tempfile::tempdir().unwrap();
    // Where the file would be is a folder with something in it.
    fs::create_dir_all(copy.path().join("model.safetensors/below")).unwrap();
    let (model, _) = load(&folder("llama"), &ParallelConfig::none(), &Device::flex()).unwrap();
    let error = model.save(copy.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: ") && error.ends_with("has room for the weights"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let copy = tempfile::tempdir().unwrap();
    let file = copy.path().join("file");
    fs::write(&file, "").unwrap();
    let (model, _) = load(&folder("llama"), &ParallelConfig::none(), &Device::flex()).unwrap();
    let error = model.save(&file.join("below")).unwrap_err().to_string();
    assert!(error.contains("below"), "{error}");
}
