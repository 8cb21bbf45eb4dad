//! Text to token ids: with the model folder's tokenizer, or byte by byte.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokenizers::{Encoding, Tokenizer};

use crate::error::{Error, Result};
use crate::files;
use crate::guard::guarded;

/// Token ids of a byte-level vocabulary.
pub(crate) const BYTES: usize = 256;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";
const REMEDY: &str = "download or save it again, or use --tokens bytes for byte tokens";
const GENERATION_CONFIG: &str = "generation_config.json";

/// What belongs to a model besides its configuration and weights, and is copied with it.
pub(crate) const COMPANIONS: [&str; 9] = [
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

/// How text becomes token ids.
#[derive(Clone, Debug)]
pub enum Tokens {
    /// Each byte is a token, 0 to 255; nothing marks an end.
    Bytes,
    /// A tokenizer.json.
    Tokenizer(Box<FolderTokenizer>),
}

/// The tokenizer of a model folder.
#[derive(Clone, Debug)]
pub struct FolderTokenizer {
    folder: PathBuf,
    /// As transformers calls it: special tokens as the post-processor adds them, neither cut nor padded.
    plain: Tokenizer,
    /// Without post-processor, for text that has its special tokens already; offsets are then those of the text.
    bare: Tokenizer,
    /// The end of a document, and where that was found.
    end: Option<(u32, &'static str)>,
    special: BTreeMap<&'static str, String>,
    config: Value,
}

/// A token and the bytes of the text that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub id: u32,
    pub start: usize,
    pub end: usize,
    /// An added token with a meaning of its own, such as the end of a turn.
    pub special: bool,
}

impl Tokens {
    /// The tokenizer of a folder.
    ///
    /// # Errors
    ///
    /// [`Error::Tokenizer`] if the folder has none, or it cannot be read.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join(TOKENIZER);
        let fail = |path: &Path, problem: String, remedy| Error::Tokenizer { path: path.to_owned(), problem, remedy };
        if !path.exists() {
            return Err(fail(&path, "no such file".into(), "use --tokens bytes for byte tokens, or a folder with it"));
        }
        let text = files::read_text(&path).map_err(|error| fail(&path, error.problem(), REMEDY))?;
        let mut plain = guarded(|| text.parse::<Tokenizer>())
            .map_err(|panic| format!("damaged: {panic}"))
            .and_then(|parsed| parsed.map_err(|error| format!("no tokenizer: {error}")))
            .map_err(|problem| fail(&path, problem, REMEDY))?;
        // The file may carry what it was last used with; a text is neither cut nor padded.
        plain.with_truncation(None).map_err(|error| fail(&path, error.to_string(), REMEDY))?;
        plain.with_padding(None);
        let mut bare = plain.clone();
        bare.with_post_processor(None::<tokenizers::PostProcessorWrapper>);

        let object = |name: &str| -> Result<Value> {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(Value::Null);
            }
            let text = files::read_text(&path).map_err(|error| fail(&path, error.problem(), REMEDY))?;
            serde_json::from_str(&text).map_err(|error| fail(&path, format!("not JSON: {error}"), REMEDY))
        };
        let (config, map) = (object(TOKENIZER_CONFIG)?, object("special_tokens_map.json")?);
        let special: BTreeMap<_, _> = ["bos_token", "eos_token", "unk_token", "pad_token"]
            .into_iter()
            .filter_map(|name| Some((name, content(&config[name]).or_else(|| content(&map[name]))?)))
            .collect();
        let named = special.get("eos_token").and_then(|token| plain.token_to_id(token));
        let end = match named {
            Some(id) => Some((id, "eos_token of tokenizer_config.json")),
            None => match first_id(&object("config.json")?["eos_token_id"]) {
                Some(id) => Some((id, "eos_token_id of config.json")),
                None => first_id(&object(GENERATION_CONFIG)?["eos_token_id"])
                    .map(|id| (id, "eos_token_id of generation_config.json")),
            },
        };
        Ok(Self::Tokenizer(Box::new(FolderTokenizer { folder: folder.to_owned(), plain, bare, end, special, config })))
    }

    /// The ids of a text of its own, special tokens as the tokenizer adds them.
    ///
    /// # Errors
    ///
    /// [`Error::Tokenizer`] if the tokenizer refuses.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            // Without offsets, which nobody needs here: they cost more than the ids.
            Self::Tokenizer(tokenizer) => {
                let encoding = tokenizer.checked(|| tokenizer.plain.encode_fast(text, true))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The token between documents.
    pub fn end(&self) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::Tokenizer(tokenizer) => tokenizer.end.map(|(id, _)| id),
        }
    }

    /// Puts beside weights in `folder` what makes it a whole model.
    ///
    /// # Errors
    ///
    /// [`Error::Write`].
    pub(crate) fn save_beside(&self, model: Option<&Path>, folder: &Path) -> Result<()> {
        let write = |name: &str, from: Option<&Path>, json: &Value| {
            let path = folder.join(name);
            match from {
                Some(from) => fs::copy(from, &path).map(drop),
                None => fs::write(&path, format!("{json:#}\n")),
            }
            .map_err(|source| Error::Write { path, source })
        };
        match model {
            Some(model) => {
                for name in COMPANIONS {
                    let from = model.join(name);
                    if from.is_file() {
                        write(name, Some(&from), &Value::Null)?;
                    }
                }
                Ok(())
            }
            None => {
                write(TOKENIZER, None, &byte_tokenizer())?;
                write(TOKENIZER_CONFIG, None, &json!({ "tokenizer_class": "PreTrainedTokenizerFast" }))
            }
        }
    }

    /// For the plan.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Bytes => format!("bytes, ids 0 to {}; nothing marks an end", BYTES - 1),
            Self::Tokenizer(tokenizer) => format!(
                "{}, {} ids; {}",
                tokenizer.folder.join(TOKENIZER).display(),
                tokenizer.plain.get_vocab_size(true),
                match tokenizer.end {
                    Some((id, from)) => format!("end token {id}, the {from}"),
                    None => "nothing marks an end".to_owned(),
                }
            ),
        }
    }
}

impl FolderTokenizer {
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The special tokens that templates may name.
    pub(crate) fn special(&self) -> &BTreeMap<&'static str, String> {
        &self.special
    }

    /// tokenizer_config.json.
    pub(crate) fn config(&self) -> &Value {
        &self.config
    }

    /// A text that has its special tokens already.
    pub(crate) fn pieces(&self, text: &str) -> Result<Vec<Piece>> {
        let encoding = self.checked(|| self.bare.encode(text, false))?;
        let added = self.bare.get_added_tokens_decoder();
        let pieces = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(pieces
            .map(|(&id, &(start, end))| Piece {
                id,
                start,
                end,
                special: added.get(&id).is_some_and(|token| token.special),
            })
            .collect())
    }

    /// The tokenizer believes its file: a token that is named and not there is a panic in it.
    fn checked(&self, encode: impl FnOnce() -> tokenizers::Result<Encoding>) -> Result<Encoding> {
        let fail = |problem, remedy| Error::Tokenizer { path: self.folder.join(TOKENIZER), problem, remedy };
        let encoding = guarded(encode).map_err(|panic| fail(format!("damaged, it fails on text: {panic}"), REMEDY))?;
        encoding.map_err(|error| {
            fail(
                format!("the text has no tokens: {error}"),
                "use a tokenizer with an unknown token, or --tokens bytes for byte tokens",
            )
        })
    }
}

/// A token in a tokenizer's configuration: a string, or an object with one.
fn content(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// One id, or the first of a list.
fn first_id(value: &Value) -> Option<u32> {
    let value = value.as_array().map_or(Some(value), |list| list.first())?;
    u32::try_from(value.as_u64()?).ok()
}

/// Bytes as a tokenizer.json: a text's ids are its bytes, so that a model from scratch is a whole folder too.
fn byte_tokenizer() -> Value {
    // GPT-2's printable names of bytes, as the byte-level pre-tokenizer gives them.
    let printable = |byte: u32| (0x21..=0x7e).contains(&byte) || (0xa1..=0xac).contains(&byte) || byte >= 0xae;
    let mut others = 0..;
    let vocabulary: serde_json::Map<String, Value> = (0..BYTES as u32)
        .filter_map(|byte| {
            let code = if printable(byte) { byte } else { BYTES as u32 + others.next()? };
            Some((char::from_u32(code)?.to_string(), json!(byte)))
        })
        .collect();
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, json) in files {
            fs::write(folder.path().join(name), json.to_string()).unwrap();
        }
        folder
    }

    /// One word a token; the post-processor sets a first one, and the file was last used for 2 tokens with padding to 9.
    fn words() -> Value {
        json!({
            "version": "1.0",
            "truncation": { "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 },
            "padding": { "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "<unk>" },
            "added_tokens": [
                { "id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                  "special": true },
                { "id": 2, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                  "normalized": false, "special": true },
            ],
            "normalizer": null,
            "pre_tokenizer": { "type": "WhitespaceSplit" },
            "post_processor": { "type": "TemplateProcessing",
                "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
                "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } } },
            "decoder": null,
            "model": { "type": "WordLevel", "unk_token": "<unk>",
                "vocab": { "<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5 } },
        })
    }

    #[test]
    fn special_tokens_are_those_of_the_post_processor_and_nothing_is_cut_or_padded() {
        let folder = folder(&[("tokenizer.json", words())]);
        let tokens = Tokens::from_folder(folder.path()).unwrap();
        assert_eq!(tokens.encode("a b  c x\n</s> a").unwrap(), [1, 3, 4, 5, 0, 2, 3]);
        let Tokens::Tokenizer(tokenizer) = &tokens else { panic!() };
        let pieces = tokenizer.pieces("b <s>c").unwrap();
        let expected = [(4, 0, 1, false), (1, 2, 5, true), (5, 5, 6, false)];
        assert_eq!(pieces, expected.map(|(id, start, end, special)| Piece { id, start, end, special }));
    }

    #[rstest]
    #[case(&[], None)]
    #[case(&[("tokenizer_config.json", json!({ "eos_token": "</s>" })), ("config.json", json!({ "eos_token_id": 5 }))], Some(2))]
    #[case(&[("tokenizer_config.json", json!({ "eos_token": { "content": "</s>" } }))], Some(2))]
    #[case(&[("special_tokens_map.json", json!({ "eos_token": "</s>" }))], Some(2))]
    #[case(&[("tokenizer_config.json", json!({ "eos_token": null })), ("config.json", json!({ "eos_token_id": [5, 2] }))], Some(5))]
    #[case(&[("config.json", json!({})), ("generation_config.json", json!({ "eos_token_id": 4 }))], Some(4))]
    fn the_end_token_is_what_the_folder_says(#[case] files: &[(&str, Value)], #[case] expected: Option<u32>) {
        let folder = folder(files);
        fs::write(folder.path().join("tokenizer.json"), words().to_string()).unwrap();
        assert_eq!(Tokens::from_folder(folder.path()).unwrap().end(), expected);
    }

    #[rstest]
    #[case(None, "tokenizer.json: no such file: use --tokens bytes")]
    #[case(Some("{"), "tokenizer.json: no tokenizer: EOF")]
    #[case(Some("{\"model\": 3}"), "tokenizer.json: no tokenizer: ")]
    fn a_folder_without_a_tokenizer_says_what_helps(#[case] text: Option<&str>, #[case] expected: &str) {
        let folder = folder(&[]);
        if let Some(text) = text {
            fs::write(folder.path().join("tokenizer.json"), text).unwrap();
        }
        let error = Tokens::from_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("--tokens bytes"), "{error}");
    }

    /// The library panics on both, one at the first text, one at the file.
    #[rstest]
    #[case("/post_processor/special_tokens", json!({}))]
    #[case("/normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" }))]
    #[case("/normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "/////wAAAAAA" }))]
    fn a_damaged_tokenizer_is_an_error_and_no_panic(#[case] place: &str, #[case] value: Value) {
        let mut tokenizer = words();
        *tokenizer.pointer_mut(place).unwrap() = value;
        let folder = folder(&[("tokenizer.json", tokenizer)]);
        let error = Tokens::from_folder(folder.path()).and_then(|tokens| tokens.encode("a b")).unwrap_err();
        assert!(matches!(error, Error::Tokenizer { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("tokenizer.json: ") && text.ends_with(REMEDY) && !text.contains('\n'), "{text}");
    }

    #[test]
    fn the_byte_tokenizer_gives_each_texts_bytes() {
        let folder = folder(&[]);
        Tokens::Bytes.save_beside(None, folder.path()).unwrap();
        let tokens = Tokens::from_folder(folder.path()).unwrap();
        let text: String = (0..0x250).filter_map(char::from_u32).chain("  \r\n\t<s> 汉字 🦀".chars()).collect();
        assert_eq!(tokens.encode(&text).unwrap(), Tokens::Bytes.encode(&text).unwrap());
        assert_eq!(tokens.end(), None);
    }
}
