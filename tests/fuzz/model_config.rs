//! Whatever a `config.json` holds, reading it gives a configuration or an error; a configuration survives being written.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use llama::LlamaConfig;

fuzz_target!(|text: &str| {
    let path = Path::new("config.json");
    if let Ok(config) = LlamaConfig::parse(text, path) {
        let written = config.to_json().to_string();
        assert_eq!(LlamaConfig::parse(&written, path).expect("what was written can be read"), config);
        let _ = config.frequencies();
    }
});
