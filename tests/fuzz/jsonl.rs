//! Whatever a JSONL file holds, reading it gives documents or an error; texts by bytes, conversations by a template.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use finetune::{Documents, Tokens};
use libfuzzer_sys::fuzz_target;

const TEMPLATE: &str = r#"{"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"}"#;

const WORDS: &str = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel", "vocab": {"?": 0, "user": 1, "assistant": 2, "a": 3, "<s>": 4, "</s>": 5}, "unk_token": "?"}}"#;

fn tokenizer() -> &'static Tokens {
    static TOKENIZER: OnceLock<Tokens> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("tokenizer.json"), WORDS).expect("written");
        std::fs::write(folder.path().join("tokenizer_config.json"), TEMPLATE).expect("written");
        Tokens::from_folder(folder.path()).expect("a tokenizer")
    })
}

fuzz_target!(|text: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    let path: PathBuf = folder.path().join("data.jsonl");
    std::fs::write(&path, text).expect("written");
    for tokens in [&Tokens::Bytes, tokenizer()] {
        match Documents::read(std::slice::from_ref(&path), tokens) {
            Ok(documents) => {
                let targets = documents.targets.as_ref().map_or(documents.tokens.len(), Vec::len);
                assert_eq!(targets, documents.tokens.len(), "a target or none for every token");
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});
