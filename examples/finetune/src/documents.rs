//! From files to documents: a text file is one, a line of a JSONL file is one.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::chat::{Chat, Fault};
use crate::error::{Error, Result};
use crate::files::{self, TextError};
use crate::tokens::Tokens;

/// The tokens of all documents, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Documents {
    /// Token ids; 32 bits each, for texts of any length.
    pub tokens: Vec<u32>,
    /// Which tokens count as targets; `None` for all.
    pub targets: Option<Vec<bool>>,
    /// Where documents begin, rising from 0.
    pub starts: Vec<usize>,
    /// Documents that are text files.
    pub texts: usize,
    /// Documents that are lines with a text.
    pub records: usize,
    /// Documents that are conversations.
    pub chats: usize,
    /// Texts without a token, which are left out.
    pub empty: usize,
}

impl Documents {
    /// Reads files in order.
    ///
    /// The end token, if there is one, stands between a text file and what follows it (one file stays as it is) and after each text of a
    /// JSONL file, but not twice; a conversation ends as its template ends it.
    ///
    /// # Errors
    ///
    /// [`Error::Text`] for a file, with the line in JSONL; [`Error::Template`] for conversations without a usable template;
    /// [`Error::Tokenizer`].
    pub fn read(paths: &[PathBuf], tokens: &Tokens) -> Result<Self> {
        let mut all = Self::default();
        let mut chat = None;
        // Whether the last document is a text file, whose end is marked once something follows it.
        let mut open = false;
        for path in paths {
            let text = files::read_text(path)?;
            if path.extension().is_some_and(|ending| ending == "jsonl") {
                // An editor's mark at the beginning.
                let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
                for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                    let place = Place { path, line: index + 1 };
                    let (ids, targets) = document(&place, line, tokens, &mut chat)?;
                    let conversation = targets.is_some();
                    all.finish_if(&mut open, !ids.is_empty(), tokens);
                    match (all.push(ids, targets), conversation) {
                        (true, true) => all.chats += 1,
                        (true, false) => {
                            all.records += 1;
                            all.finish(tokens);
                        }
                        (false, _) => {}
                    }
                }
                continue;
            }
            let ids = tokens.encode(&text)?;
            all.finish_if(&mut open, !ids.is_empty(), tokens);
            if all.push(ids, None) {
                all.texts += 1;
                open = true;
            }
        }
        Ok(all)
    }

    fn finish_if(&mut self, open: &mut bool, followed: bool, tokens: &Tokens) {
        if *open && followed {
            self.finish(tokens);
            *open = false;
        }
    }

    /// A document; `false` if it has no token.
    pub(crate) fn push(&mut self, ids: Vec<u32>, targets: Option<Vec<bool>>) -> bool {
        if ids.is_empty() {
            self.empty += 1;
            return false;
        }
        self.starts.push(self.tokens.len());
        if targets.is_some() && self.targets.is_none() {
            self.targets = Some(vec![true; self.tokens.len()]);
        }
        if let Some(all) = &mut self.targets {
            all.extend(targets.unwrap_or_else(|| vec![true; ids.len()]));
        }
        self.tokens.extend(ids);
        true
    }

    /// Ends the last document.
    fn finish(&mut self, tokens: &Tokens) {
        if let Some(end) = tokens.end().filter(|end| self.tokens.last().is_some_and(|last| last != end)) {
            self.tokens.push(end);
            self.targets.iter_mut().for_each(|targets| targets.push(true));
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.starts.len()
    }
}

struct Place<'a> {
    path: &'a Path,
    line: usize,
}

impl Place<'_> {
    fn error(&self, Fault(problem, remedy): Fault) -> Error {
        Error::Text(TextError::Line { path: self.path.to_owned(), line: self.line, problem, remedy })
    }
}

/// The token ids of a line, and of a conversation which of them are targets.
fn document<'t>(
    place: &Place<'_>,
    line: &str,
    tokens: &'t Tokens,
    chat: &mut Option<Chat<'t>>,
) -> Result<(Vec<u32>, Option<Vec<bool>>)> {
    match record(line).map_err(|fault| place.error(fault))? {
        Record::Text(text) => Ok((tokens.encode(&text)?, None)),
        Record::Chat => {
            let Tokens::Tokenizer(tokenizer) = tokens else {
                return Err(place.error(Fault(
                    "a conversation, and byte tokens have no chat template".into(),
                    "use --model with a folder that has a tokenizer and a chat template".into(),
                )));
            };
            let chat = match chat {
                Some(chat) => chat,
                none => none.insert(Chat::new(tokenizer)?),
            };
            let (ids, targets) = chat.encode(line).map_err(|fault| place.error(fault))?;
            Ok((ids, Some(targets)))
        }
    }
}

#[derive(Debug, PartialEq)]
enum Record {
    Text(String),
    Chat,
}

/// A line of JSONL.
fn record(line: &str) -> Result<Record, Fault> {
    const FORM: &str = "give {\"text\": \"..\"} or {\"messages\": [..]}";
    let fault = |problem: String, remedy: &str| Fault(problem, remedy.to_owned());
    let value: Value = serde_json::from_str(line).map_err(|error| {
        let text = error.to_string();
        let what = text.split(" at line ").next().unwrap_or(&text);
        fault(format!("not JSON, at column {}: {what}", error.column()), "give one JSON object a line")
    })?;
    let Value::Object(mut fields) = value else {
        return Err(fault("JSON, but no object".to_owned(), FORM));
    };
    match (fields.contains_key("messages"), fields.remove("text")) {
        (true, None) => Ok(Record::Chat),
        (false, Some(Value::String(text))) => Ok(Record::Text(text)),
        (false, Some(_)) => Err(fault("text is no string".to_owned(), FORM)),
        (true, Some(_)) => Err(fault("both text and messages".to_owned(), "keep the one to train on")),
        (false, None) => {
            let found: Vec<&str> = fields.keys().map(String::as_str).collect();
            let near = found.iter().find_map(|found| {
                ["text", "messages"]
                    .into_iter()
                    .find(|known| strsim::jaro_winkler(found, known) > 0.8)
                    .map(|known| (found, known))
            });
            let remedy =
                near.map_or(FORM.to_owned(), |(found, known)| format!("did you mean {known} where it says {found}?"));
            Err(fault(format!("neither text nor messages among its fields ({})", found.join(", ")), &remedy))
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("{\"text\": \"a\"", "not JSON, at column 12: EOF while parsing an object")]
    #[case("[1]", "JSON, but no object")]
    #[case("{\"text\": 3}", "text is no string")]
    #[case("{\"text\": \"a\", \"messages\": []}", "both text and messages")]
    #[case("{\"txt\": \"a\", \"id\": 1}", "neither text nor messages among its fields (id, txt)")]
    fn a_line_of_another_form_is_refused(#[case] line: &str, #[case] expected: &str) {
        assert_eq!(record(line).unwrap_err().0, expected);
    }

    #[test]
    fn a_field_with_a_similar_name_is_named() {
        assert_eq!(record("{\"txt\": 1}").unwrap_err().1, "did you mean text where it says txt?");
    }

    /// Of a tokenizer whose end token is 256: text files when something follows, JSONL texts always, conversations never.
    #[test]
    fn the_end_of_a_text_file_is_marked_whatever_follows() {
        let folder = tempfile::tempdir().unwrap();
        Tokens::Bytes.save_beside(None, folder.path()).unwrap();
        let edit = |name: &str, edit: &dyn Fn(&mut Value)| {
            let path = folder.path().join(name);
            let mut json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            edit(&mut json);
            std::fs::write(path, json.to_string()).unwrap();
        };
        edit("tokenizer.json", &|json| {
            json["added_tokens"] = serde_json::json!([{ "id": 256, "content": "</s>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true }]);
        });
        edit("tokenizer_config.json", &|json| {
            json["eos_token"] = "</s>".into();
            json["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}".into();
        });
        let tokens = Tokens::from_folder(folder.path()).unwrap();
        let chat =
            "{\"messages\": [{\"role\": \"user\", \"content\": \"b\"}, {\"role\": \"assistant\", \"content\": \"c\"}]}";
        let read = |files: &[&str]| {
            let paths: Vec<PathBuf> = files
                .iter()
                .enumerate()
                .map(|(index, file)| {
                    let (name, text) = match *file {
                        "chat" => (format!("{index}.jsonl"), chat),
                        "record" => (format!("{index}.jsonl"), "\n{\"text\": \"\"}\n{\"text\": \"r\"}\n"),
                        text => (format!("{index}.txt"), text),
                    };
                    std::fs::write(folder.path().join(&name), text).unwrap();
                    folder.path().join(name)
                })
                .collect();
            let all = Documents::read(&paths, &tokens).unwrap();
            let text = |id: &u32| if *id == 256 { '.' } else { char::from_u32(*id).unwrap() };
            let targets = all.targets.map(|targets| targets.iter().map(|on| if *on { '1' } else { '0' }).collect());
            (all.tokens.iter().map(text).collect::<String>(), targets.unwrap_or_default())
        };
        let expect = |tokens: &str, targets: &str| (tokens.to_owned(), targets.to_owned());
        assert_eq!(read(&["a"]), expect("a", ""));
        assert_eq!(read(&["a", "", "d"]), expect("a.d", ""));
        assert_eq!(read(&["a", "record"]), expect("a.r.", ""));
        assert_eq!(read(&["a", "record", "d", ""]), expect("a.r.d", ""));
        assert_eq!(read(&["a", "chat"]), expect("a.bc", "1101"));
        assert_eq!(read(&["a", "chat", "d", "record"]), expect("a.bcd.r.", "11011111"));
        assert_eq!(read(&["a</s>", "chat"]), expect("a.bc", "1101"));
    }

    #[test]
    fn files_are_documents_in_their_order_and_empty_ones_none() {
        let folder = tempfile::tempdir().unwrap();
        let files = [
            ("a.txt", "abc"),
            ("empty", ""),
            ("b.jsonl", "{\"text\": \"de\"}\r\n\n{\"text\": \"\"}\n{\"text\": \"f\"}"),
            ("c", "g"),
        ];
        let paths = files.map(|(name, text)| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        });
        let all = Documents::read(&paths, &Tokens::Bytes).unwrap();
        assert_eq!(all.tokens, "abcdefg".bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(all.starts, [0, 3, 5, 6]);
        assert_eq!((all.texts, all.records, all.chats, all.empty, all.targets), (2, 2, 0, 2, None));
    }
}
