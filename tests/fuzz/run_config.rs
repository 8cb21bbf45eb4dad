//! Whatever a `--config` file holds, reading it gives arguments or an error.
#![no_main]

use finetune::Args;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.toml");
    std::fs::write(&path, text).expect("written");
    let line = ["finetune".as_ref(), "--config".as_ref(), path.as_os_str()];
    if let Err(error) = Args::read(line) {
        assert!(!error.to_string().is_empty());
    }
});
