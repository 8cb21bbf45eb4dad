//! Whatever a `config.json` holds, reading it gives a configuration or an error; a configuration survives being written.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use llama::LlamaConfig;

fuzz_target!(|text: &str| {
    let path = Path::new("config.json");
    if let Ok(config) = LlamaConfig::parse(text, path) {
        let written = config.to_json().to_string();
        let again = LlamaConfig::parse(&written, path).expect("what was written can be read");
        // Not the floats: serde_json reads some of them a bit off.
        let whole = |c: &LlamaConfig| {
            let sizes = [c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.head_dim];
            (c.family, sizes, c.num_attention_heads, c.num_key_value_heads, c.sliding_window, c.window_layers.clone())
        };
        assert_eq!(whole(&again), whole(&config));
        let _ = config.frequencies();
    }
});
