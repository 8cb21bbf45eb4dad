//! Where answers are in a conversation's text.
//!
//! That is found by rendering, not by knowing templates, in one of two ways:
//!
//! - The conversation up to the answer with the prompt for one, and the conversation with it. If the first text begins the second and
//!   the second the whole, the answer is between. That holds for templates that only append.
//! - Some rewrite earlier turns (Qwen3 drops their thoughts), or put a system message before a first answer. There the whole
//!   conversation is rendered once more with a mark in place of the answer's content: what is before and after the mark must be
//!   in the text as it is, and between is what the template makes of the content. What ends the turn is what follows the mark in
//!   the conversation that stops there; the whole must go on with it, too.
//!
//! What is trained on is the whole conversation as the template renders it, in either way. Of a template for which neither holds
//! nobody can say what its answers are, and it is an error.

use std::ops::Range;

use minijinja::Value;

use crate::chat::{Fault, field};
use crate::tokens::Piece;

/// The text of messages, with or without the prompt for an answer.
pub(crate) trait Render: Fn(&[Value], bool) -> Result<String, Fault> {}

impl<F: Fn(&[Value], bool) -> Result<String, Fault>> Render for F {}

/// The bytes of the answer that is message `index`, in the whole conversation's text; `None` if nobody can say.
pub(crate) fn find(render: &impl Render, messages: &[Value], index: usize, whole: &str) -> Option<Range<usize>> {
    appended(render, messages, index, whole).or_else(|| marked(render, messages, index, whole))
}

/// The bytes of an answer and of what ends its turn, under a template that only appends.
fn appended(render: &impl Render, messages: &[Value], index: usize, whole: &str) -> Option<Range<usize>> {
    // Of no messages many templates cannot make a prompt, or not the one that the whole begins with.
    let before = messages.get(..index).filter(|before| !before.is_empty())?;
    let (begin, end) = (render(before, true).ok()?, render(&messages[..=index], false).ok()?);
    (end.starts_with(&begin) && whole.starts_with(&end)).then_some(begin.len()..end.len())
}

/// The same, found by a mark in place of the answer's content: from the content on.
fn marked(render: &impl Render, messages: &[Value], index: usize, whole: &str) -> Option<Range<usize>> {
    let content = field(&messages[index], "content");
    let content = content.as_str()?;
    // One word, which no template trims, splits or takes for a tag.
    let mark = (0..).map(|number| format!("answer{number}mark")).find(|mark| !whole.contains(mark))?;
    let mut messages = messages.to_vec();
    messages[index] = with_content(&messages[index], &mark)?;
    let (with_mark, alone) = (render(&messages, false).ok()?, render(&messages[..=index], false).ok()?);
    let ((before, after), (_, end)) = (around(&with_mark, &mark)?, around(&alone, &mark)?);
    let inner = whole.strip_prefix(before)?.strip_suffix(after)?;
    // White space around may be the template's to remove, and thoughts of earlier turns: what is left is the content's.
    (content.contains(inner) && after.starts_with(end)).then(|| before.len()..before.len() + inner.len() + end.len())
}

/// What is before and after the only place of `mark`.
fn around<'t>(text: &'t str, mark: &str) -> Option<(&'t str, &'t str)> {
    text.split_once(mark).filter(|(_, after)| !after.contains(mark))
}

/// The message with another content, its fields in their order.
fn with_content(message: &Value, content: &str) -> Option<Value> {
    let fields = message.try_iter().ok()?.map(|key| {
        let value = if key.as_str() == Some("content") { Value::from(content) } else { message.get_item(&key).ok()? };
        Some((key, value))
    });
    fields.collect::<Option<Vec<_>>>().map(Value::from_pairs)
}

/// Which tokens are an answer's: up to its end-of-turn token, if it ends with one. White space after that separates turns, the model
/// never writes it.
pub(crate) fn inside(pieces: &[Piece], answer: &Range<usize>, text: &str) -> Range<usize> {
    // A token that begins before the answer is the prompt's, also if it ends within.
    let first = pieces.partition_point(|piece| piece.start < answer.start);
    let end = pieces.partition_point(|piece| piece.start < answer.end).max(first);
    let blank =
        |piece: &Piece| !piece.special && text.get(piece.start..piece.end).is_some_and(|text| text.trim().is_empty());
    match pieces[first..end].iter().rposition(|piece| !blank(piece)) {
        Some(last) if pieces[first + last].special => first..first + last + 1,
        _ => first..end,
    }
}
