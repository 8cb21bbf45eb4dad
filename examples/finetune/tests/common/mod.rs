//! A small model folder with a tokenizer: one word a token, and a chat template; and models that read bytes.

#![allow(dead_code)] // no test file uses all of it

use std::fs;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor};
use finetune::{Args, Summary, Voice, run};
use llama::{Llama, LlamaConfig, ParallelConfig};
use serde_json::{Value, json};
use tests::{tensor, values};

/// Its words, with their ids in order.
pub const WORDS: [&str; 16] =
    ["<unk>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"];

pub const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Weights for so many token ids.
pub fn weights(folder: &Path, vocabulary: usize) {
    drawn(&LlamaConfig::new(vocabulary, 8, 12, 2, 2, 1)).save(folder).unwrap();
}

/// A model that is the same in each run of a test, whatever other threads draw.
pub fn drawn(config: &LlamaConfig) -> Llama {
    struct Draw(u64);
    impl ModuleMapper for Draw {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            let seed = self.0;
            // Vectors are those of norms, and stay ones.
            if D == 1 {
                return param;
            }
            param.map(|x| tensor(&values(seed, &x.dims()), DType::F32, &x.device()).mul_scalar(0.35))
        }
    }
    Llama::undrawn(config, &ParallelConfig::none(), &Device::flex()).unwrap().map(&mut Draw(0))
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

/// Seven sequences of 16 bytes whose documents give them from 3 to 15 targets: so long are these.
pub const UNEVEN: [usize; 24] = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 16, 9, 2, 1, 1, 3, 12, 20, 15, 5, 13];

/// Documents of so many bytes.
pub fn documents(lengths: &[usize]) -> Vec<&'static str> {
    const TEXT: &str = "the quick brown fox jumps over the lazy dog and runs away";
    lengths.iter().enumerate().map(|(at, length)| &TEXT[at..at + length]).collect()
}

/// Documents in `data.jsonl`.
pub fn data<'a>(documents: impl IntoIterator<Item = &'a str>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = documents.into_iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect();
    fs::write(folder.path().join("data.jsonl"), lines).unwrap();
    folder
}

/// A model of bytes in `model`, beside [`data`].
pub fn bytes<'a>(documents: impl IntoIterator<Item = &'a str>) -> tempfile::TempDir {
    let folder = data(documents);
    byte_model(&folder.path().join("model"));
    folder
}

/// Weights that read bytes.
pub fn byte_model(folder: &Path) {
    drawn(&LlamaConfig::new(256, 24, 40, 2, 4, 2)).save(folder).unwrap();
}

/// A run over sequences of 16 bytes of what [`bytes`] made.
pub fn on_bytes(input: &Path, args: &str) -> Summary {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out").display().to_string();
    let [model, data] = ["model", "data.jsonl"].map(|name| input.join(name).display().to_string());
    let words = ["finetune", "--model", &model, "--tokens", "bytes", "--data", &data, "--out", &out, "--seq-len", "16"];
    let args = Args::read(words.into_iter().chain(args.split_whitespace())).unwrap();
    run(&args, &Voice::default()).unwrap()
}
