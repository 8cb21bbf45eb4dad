//! A small model folder with a tokenizer: one word a token, and a chat template.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use llama::{Llama, LlamaConfig, ParallelConfig};
use serde_json::{Value, json};

/// Its words, with their ids in order.
pub const WORDS: [&str; 16] =
    ["<unk>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"];

pub const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Weights for so many token ids.
pub fn weights(folder: &Path, vocabulary: usize) {
    let config = LlamaConfig { initializer_range: 0.2, ..LlamaConfig::new(vocabulary, 8, 12, 2, 2, 1) };
    Llama::init(&config, &ParallelConfig::none(), &Device::flex()).unwrap().save(folder).unwrap();
}

/// Everything but the weights.
pub fn tokenizer(folder: &Path, template: Option<&str>) {
    let special = |id: usize| {
        json!({ "id": id, "content": WORDS[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true })
    };
    let vocabulary: serde_json::Map<String, Value> =
        WORDS.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": (1..5).map(special).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "unk_token": "<unk>", "vocab": vocabulary },
    });
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({ "eos_token": "</s>", "chat_template": template });
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

/// A whole folder.
pub fn model(folder: &Path) {
    weights(folder, WORDS.len());
    tokenizer(folder, Some(TEMPLATE));
}
