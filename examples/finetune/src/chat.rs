//! Conversations: rendered by the model's chat template, with only the answers as targets.
//!
//! [`answers`](crate::answers) says where those are.

use std::path::PathBuf;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde_json::Value as Json;

use crate::answers;
use crate::error::{Error, Result};
use crate::files;
use crate::template::{NoText, Template};
use crate::tokens::{CHAT_TEMPLATE, FolderTokenizer};

const ASSISTANT: &str = "assistant";
const FORM: &str =
    "give {\"messages\": [{\"role\": \"user\", \"content\": ..}, {\"role\": \"assistant\", \"content\": ..}]}";

/// Turns conversations into tokens.
#[derive(Debug)]
pub(crate) struct Chat<'a> {
    tokenizer: &'a FolderTokenizer,
    template: Template,
}

/// What is wrong with a conversation, and what to write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault(pub String, pub String);

fn fault(problem: impl Into<String>, remedy: impl Into<String>) -> Fault {
    Fault(problem.into(), remedy.into())
}

impl<'a> Chat<'a> {
    /// The chat template of the tokenizer's folder.
    ///
    /// # Errors
    ///
    /// [`Error::Template`] if there is none, or it is no template.
    pub fn new(tokenizer: &'a FolderTokenizer) -> Result<Self> {
        let folder = tokenizer.folder();
        let (path, source) = match source(tokenizer)? {
            Some(found) => found,
            None => {
                return Err(Error::Template {
                    path: folder.to_owned(),
                    problem: "conversations need a chat template, and the folder has none".into(),
                    remedy: "put a chat_template.jinja there, or use the model's instruct version",
                });
            }
        };
        let template = Template::new(&source, tokenizer.special()).map_err(|problem| Error::Template {
            path,
            problem,
            remedy: "put another template into the folder as chat_template.jinja",
        })?;
        Ok(Self { tokenizer, template })
    }

    /// The token ids of a conversation, a line of JSON, and which of them are targets.
    pub fn encode(&self, line: &str) -> Result<(Vec<u32>, Vec<bool>), Fault> {
        // As the template's values at once: fields keep their order, which `tojson` shows.
        let Conversation { messages, tools } =
            serde_json::from_str(line).map_err(|error| fault(format!("no conversation: {error}"), FORM))?;
        check(&messages)?;
        let render = |messages: &[Value], prompt: bool| {
            self.template.render(messages, &tools, prompt).map_err(|error| match error {
                NoText::Refused(said) => {
                    fault(format!("the chat template refuses: {said}"), "correct the conversation")
                }
                NoText::Failed(problem) => fault(
                    format!("the chat template fails: {problem}"),
                    "put one that can render this conversation into the model's folder as chat_template.jinja",
                ),
            })
        };
        let text = render(&messages, false)?;
        let mut found = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            if field(message, "role").as_str() == Some(ASSISTANT) {
                let answer = answers::find(&render, &messages, index, &text);
                found.push(answer.ok_or_else(|| {
                    fault(
                        format!(
                            "message {}: the chat template does not write this answer as it is, or what is around it \
                             changes with it, so that answers cannot be told from prompts",
                            index + 1
                        ),
                        "give a template that only appends, as chat_template.jinja in the model's folder",
                    )
                })?);
            }
        }
        let pieces = self.tokenizer.pieces(&text).map_err(|error| fault(error.to_string(), "correct the line"))?;
        let mut targets = vec![false; pieces.len()];
        for answer in found {
            for index in answers::inside(&pieces, &answer, &text) {
                targets[index] = true;
            }
        }
        Ok((pieces.iter().map(|piece| piece.id).collect(), targets))
    }
}

/// The template as a file of its own, or in the tokenizer's configuration: one, or several with names.
fn source(tokenizer: &FolderTokenizer) -> Result<Option<(PathBuf, String)>> {
    let path = tokenizer.folder().join(CHAT_TEMPLATE);
    if path.exists() {
        let text = files::read_text(&path).map_err(|error| Error::Template {
            path: path.clone(),
            problem: error.problem(),
            remedy: "put a template there that can be read",
        })?;
        return Ok(Some((path, text)));
    }
    let path = tokenizer.folder().join("tokenizer_config.json");
    let template = &tokenizer.config()["chat_template"];
    let named = |list: &Vec<Json>| {
        let default = list.iter().find(|entry| entry["name"] == "default");
        default.or(list.first()).and_then(|entry| entry["template"].as_str()).map(str::to_owned)
    };
    let text = template.as_str().map(str::to_owned).or_else(|| template.as_array().and_then(named));
    Ok(text.map(|text| (path, text)))
}

/// What is asked of a line; other fields are other programs'.
#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Value>,
    #[serde(default = "none")]
    tools: Value,
}

fn none() -> Value {
    Value::from(())
}

/// A field of a message; undefined if there is none.
pub(crate) fn field(message: &Value, name: &str) -> Value {
    message.get_attr(name).unwrap_or_default()
}

fn check(messages: &[Value]) -> Result<(), Fault> {
    if messages.is_empty() {
        return Err(fault("messages is empty", FORM));
    }
    for (index, message) in messages.iter().enumerate() {
        let number = index + 1;
        if message.kind() != ValueKind::Map {
            return Err(fault(format!("message {number} is no object"), FORM));
        }
        // What content may be (a list of parts, null beside tool calls) is the template's business.
        for (name, needed) in [("role", true), ("content", field(message, "tool_calls").is_undefined())] {
            if needed && field(message, name).is_undefined() {
                return Err(fault(format!("message {number} has no {name}"), FORM));
            }
        }
        let role = field(message, "role");
        if role.as_str().is_none() {
            return Err(fault(format!("message {number}: role is {role}"), "give a string"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::tokens::Tokens;

    const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    const INST: &str = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
        {% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}\
        {% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}";
    /// Nothing marks the end of a turn.
    const BARE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
        {% if add_generation_prompt %}assistant: {% endif %}";
    /// Earlier turns lose their thoughts, the last one always has some, as in Qwen3's; calls follow the content.
    const REWRITING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\
        {% set words = m.content.split('</think>')[-1].lstrip('\n') %}\
        {% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content }}\n\
        </think>\n\n{% endif %}{{ words }}{% for call in m.tool_calls %}{{ '\n' ~ (call | tojson) }}{% endfor %}\
        {% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    /// As SmolLM2's: a system message before a conversation that has none.
    const SYSTEM: &str = "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
        <|im_start|>system\nHelp.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    fn folder(template: Option<&str>) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        Tokens::Bytes.save_beside(None, folder.path()).unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut json: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let added = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"].iter().enumerate().map(|(index, token)| {
            json!({ "id": 256 + index, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
        });
        json["added_tokens"] = added.collect();
        std::fs::write(&path, json.to_string()).unwrap();
        let config = json!({ "bos_token": "<s>", "eos_token": "</s>", "chat_template": template });
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        folder
    }

    fn encode(template: &str, messages: Json) -> Result<(String, String), Fault> {
        let folder = folder(Some(template));
        let tokens = Tokens::from_folder(folder.path()).unwrap();
        let Tokens::Tokenizer(tokenizer) = &tokens else { panic!() };
        let record = json!({ "messages": messages });
        let (ids, targets) = Chat::new(tokenizer).unwrap().encode(&record.to_string())?;
        let bytes = |ids: &mut dyn Iterator<Item = u32>| -> String {
            let names = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"];
            let bytes = ids.flat_map(|id| match u8::try_from(id) {
                Ok(byte) => vec![byte],
                Err(_) => names[id as usize - 256].bytes().collect(),
            });
            String::from_utf8(bytes.collect()).unwrap()
        };
        let chosen = ids.iter().zip(&targets).filter_map(|(id, target)| target.then_some(*id));
        Ok((bytes(&mut ids.iter().copied()), bytes(&mut chosen.into_iter())))
    }

    fn talk() -> Json {
        json!([
            { "role": "user", "content": "Hi?" },
            { "role": "assistant", "content": "Ja, grün." },
            { "role": "user", "content": "assistant" },
            { "role": "assistant", "content": "\nNo" },
        ])
    }

    #[rstest]
    #[case(
        CHATML,
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nJa, grün.<|im_end|>\n",
        "Ja, grün.<|im_end|>\nNo<|im_end|>"
    )]
    #[case(INST, "<s>[INST] Hi? [/INST] Ja, grün. </s>[INST] assistant [/INST]", " Ja, grün. </s> \nNo </s>")]
    #[case(BARE, "user: Hi?\nassistant: Ja, grün.\nuser: assistant\n", "Ja, grün.\n\nNo\n")]
    fn only_answers_and_their_ends_are_targets(#[case] template: &str, #[case] begin: &str, #[case] targets: &str) {
        let (text, chosen) = encode(template, talk()).unwrap();
        assert!(text.starts_with(begin), "{text}");
        assert_eq!(chosen, targets);
    }

    #[test]
    fn other_roles_are_the_templates_business() {
        let messages = json!([{ "role": "tool", "content": "x" }, { "role": "assistant", "content": "y" }]);
        assert_eq!(encode(CHATML, messages.clone()).unwrap().1, "y<|im_end|>");
        let Fault(problem, _) = encode(INST, messages).unwrap_err();
        assert!(problem.contains("only user and assistant"), "{problem}");
    }

    #[test]
    fn a_conversation_without_answers_has_no_targets() {
        assert_eq!(encode(CHATML, json!([{ "role": "user", "content": "x" }])).unwrap().1, "");
    }

    /// The text is the template's of the whole conversation; targets are an answer's words there, its calls and its end.
    #[rstest]
    #[case(
        json!([{ "role": "user", "content": "Hi?" }, { "role": "assistant", "content": "<think>\nhm\n</think>\n\nJa, grün." },
            { "role": "user", "content": "Hi?" }, { "role": "assistant", "content": "<think>\nso\n</think>\n\nJa, grün." }]),
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nJa, grün.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n\
            <|im_start|>assistant\n<think>\nso\n</think>\n\nJa, grün.<|im_end|>\n",
        "Ja, grün.<|im_end|><think>\nso\n</think>\n\nJa, grün.<|im_end|>"
    )]
    #[case(
        json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b", "tool_calls": [1, 2] },
            { "role": "tool", "content": "3" }, { "role": "assistant", "content": "c" }]),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb\n1\n2<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n\
            <|im_start|>assistant\n<think>\n\n</think>\n\nc<|im_end|>\n",
        "b\n1\n2<|im_end|><think>\n\n</think>\n\nc<|im_end|>"
    )]
    // An answer that repeats its prompt, and one that is the word that marks answers.
    #[case(
        json!([{ "role": "user", "content": "x" }, { "role": "assistant", "content": "x" }, { "role": "user", "content": "x" },
            { "role": "assistant", "content": "answer0mark" }, { "role": "user", "content": "x" }]),
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\nx<|im_end|>\n\
            <|im_start|>assistant\nanswer0mark<|im_end|>\n<|im_start|>user\nx<|im_end|>\n",
        "x<|im_end|>answer0mark<|im_end|>"
    )]
    fn of_a_template_that_rewrites_the_past_targets_are_the_answers(
        #[case] messages: Json,
        #[case] text: &str,
        #[case] targets: &str,
    ) {
        assert_eq!(encode(REWRITING, messages).unwrap(), (text.to_owned(), targets.to_owned()));
    }

    #[rstest]
    #[case(CHATML, "<|im_start|>assistant\n")]
    #[case(SYSTEM, "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>assistant\n")]
    fn a_conversation_may_begin_with_an_answer(#[case] template: &str, #[case] begin: &str) {
        let messages = json!([{ "role": "assistant", "content": "Hallo" }, { "role": "user", "content": "y" },
            { "role": "assistant", "content": "z" }]);
        let (text, chosen) = encode(template, messages).unwrap();
        assert!(text.starts_with(begin), "{text}");
        assert_eq!(chosen, "Hallo<|im_end|>z<|im_end|>");
    }

    /// Answers in other letters, twice, with their length around them, or with an end that depends on what follows.
    #[rstest]
    #[case("{{ m.content | upper }}")]
    #[case("{{ m.content }}{{ m.content }}")]
    #[case("{{ m.content | length }} {{ m.content }}")]
    #[case("{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}")]
    fn an_answer_that_cannot_be_told_from_what_is_around_is_refused(#[case] message: &str) {
        let template = format!("{{{{ messages | length }}}}{{% for m in messages %}}{message}{{% endfor %}}");
        let Fault(problem, remedy) = encode(&template, talk()).unwrap_err();
        assert!(problem.contains("message 2") && remedy.contains("chat_template.jinja"), "{problem}: {remedy}");
    }

    #[rstest]
    #[case(json!(3), "no conversation: invalid type: integer `3`, expected a sequence at line 1 column 13")]
    #[case(json!([]), "messages is empty")]
    #[case(json!(["x"]), "message 1 is no object")]
    #[case(json!([{ "role": "user", "content": "a" }, { "content": "b" }]), "message 2 has no role")]
    #[case(json!([{ "role": "user" }]), "message 1 has no content")]
    #[case(json!([{ "role": 3, "content": "a" }]), "message 1: role is 3")]
    fn conversations_of_another_form_are_refused(#[case] messages: Json, #[case] expected: &str) {
        assert_eq!(encode(CHATML, messages).unwrap_err().0, expected);
    }

    #[rstest]
    #[case(json!([{ "name": "tool_use", "template": "t" }, { "name": "default", "template": "d" }]), Some("d"))]
    #[case(json!([{ "name": "rag", "template": "r" }]), Some("r"))]
    #[case(json!("one"), Some("one"))]
    #[case(json!(null), None)]
    fn a_template_is_one_or_named(#[case] template: Json, #[case] expected: Option<&str>) {
        let folder = folder(None);
        std::fs::write(folder.path().join("tokenizer_config.json"), json!({ "chat_template": template }).to_string())
            .unwrap();
        let read = || match Tokens::from_folder(folder.path()).unwrap() {
            Tokens::Tokenizer(tokenizer) => source(&tokenizer).unwrap().map(|(_, text)| text),
            Tokens::Bytes => panic!(),
        };
        assert_eq!(read().as_deref(), expected);
        std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
        assert_eq!(read().as_deref(), Some("file"), "a file of its own comes first");
    }
}
