//! Numbers in JSON that come back bit for bit.
//!
//! How exactly a JSON parser reads a float may depend on how it was compiled, for the whole program. So floats are written as
//! strings, by and for the standard library, whose shortest form reads back as the same bits:
//!
//! ```text
//! 0.1          "~0.1"
//! -0.0         "~-0.0"
//! "~ a text"   "~~ a text"
//! ```

use serde_json::{Map, Number, Value};

/// Deeper than any state, and less than a parser takes.
const DEEPEST: usize = 96;

/// Marks a float; a text that begins so has it twice.
const MARK: char = '~';

/// `value` with its floats as strings.
///
/// # Errors
///
/// If it is nested too deep to be read back.
pub(super) fn encode(value: &Value) -> Result<Value, String> {
    walk(value, 0, &mut |leaf| match leaf {
        Value::Number(number) if number.is_f64() => {
            let float = number.as_f64().unwrap_or_default();
            Ok(Value::String(format!("{MARK}{float:?}")))
        }
        Value::String(text) if text.starts_with(MARK) => Ok(Value::String(format!("{MARK}{text}"))),
        other => Ok(other.clone()),
    })
}

/// What [`encode`] was given.
///
/// # Errors
///
/// If a marked text is no float, or it is nested too deep.
pub(super) fn decode(value: &Value) -> Result<Value, String> {
    walk(value, 0, &mut |leaf| {
        let Some(marked) = leaf.as_str().and_then(|text| text.strip_prefix(MARK)) else { return Ok(leaf.clone()) };
        if marked.starts_with(MARK) {
            return Ok(Value::String(marked.to_owned()));
        }
        let number = marked.parse().ok().and_then(Number::from_f64);
        number.map(Value::Number).ok_or_else(|| format!("`{MARK}{marked}` is no finite number"))
    })
}

type Leaf<'a> = &'a mut dyn FnMut(&Value) -> Result<Value, String>;

fn walk(value: &Value, depth: usize, leaf: Leaf<'_>) -> Result<Value, String> {
    if depth > DEEPEST {
        return Err(format!("it is nested deeper than {DEEPEST} levels"));
    }
    match value {
        Value::Array(items) => {
            items.iter().map(|item| walk(item, depth + 1, leaf)).collect::<Result<_, _>>().map(Value::Array)
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(key, field)| Ok((key.clone(), walk(field, depth + 1, leaf)?)));
            fields.collect::<Result<Map<_, _>, String>>().map(Value::Object)
        }
        other => leaf(other),
    }
}
