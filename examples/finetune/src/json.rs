//! Python's `json.dumps` for templates: spaces after commas and colons, nothing escaped for HTML, and an end to depth and length.

use std::io::{self, Write};

use minijinja::Value;
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

/// The most spaces a level.
const WIDEST: usize = 64;
/// The most levels; the serializer recurses, and a stack ends without an error.
const DEEPEST: usize = 256;
/// The most bytes: a template can make values of which the text would be endless.
pub(crate) const LONGEST: usize = 1 << 26;

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
///
/// # Errors
///
/// In words: a value that is no JSON, or that is too wide, too deep or too long.
pub(crate) fn dumps(value: &Value, indent: Option<usize>) -> Result<String, String> {
    if let Some(spaces) = indent.filter(|spaces| *spaces > WIDEST) {
        return Err(format!("an indent of {spaces}: at most {WIDEST} are built"));
    }
    let mut bytes = Limited(Vec::new());
    let format = Python { indent, depth: 0, filled: false };
    value.serialize(&mut Serializer::with_formatter(&mut bytes, format)).map_err(|error| error.to_string())?;
    String::from_utf8(bytes.0).map_err(|error| error.to_string())
}

struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LONGEST {
            return Err(io::Error::other(format!("more than {LONGEST} bytes of JSON")));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Python {
    indent: Option<usize>,
    depth: usize,
    /// Whether the list or object that ends has anything in it.
    filled: bool,
}

impl Python {
    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        if self.depth > DEEPEST {
            return Err(io::Error::other(format!("more than {DEEPEST} levels of lists and objects")));
        }
        writer.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&self, writer: &mut W, first: bool) -> io::Result<()> {
        match (self.indent, first) {
            (None, true) => Ok(()),
            (None, false) => writer.write_all(b", "),
            (Some(_), first) => {
                writer.write_all(if first { b"" } else { b"," })?;
                self.line(writer)
            }
        }
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(writer)?;
        }
        writer.write_all(bracket)
    }

    /// A new line, where there are any.
    fn line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(&[b' '; WIDEST][..indent]))
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The right sides are Python's.
    #[rstest]
    #[case(None, r#"[1, {"a": [], "b": {}}, {"c": [null, "é<"]}]"#)]
    #[case(Some(1), "[\n 1,\n {\n  \"a\": [],\n  \"b\": {}\n },\n {\n  \"c\": [\n   null,\n   \"é<\"\n  ]\n }\n]")]
    #[case(Some(0), "[\n1,\n{\n\"a\": [],\n\"b\": {}\n},\n{\n\"c\": [\nnull,\n\"é<\"\n]\n}\n]")]
    fn values_are_written_as_python_does(#[case] indent: Option<usize>, #[case] expected: &str) {
        let value: Value = serde_json::from_str(r#"[1,{"a":[],"b":{}},{"c":[null,"é<"]}]"#).unwrap();
        assert_eq!(dumps(&value, indent).unwrap(), expected);
    }

    #[test]
    fn what_has_no_end_is_an_error() {
        let error = dumps(&Value::from(1), Some(1_000_000_000_000)).unwrap_err();
        assert_eq!(error, "an indent of 1000000000000: at most 64 are built");
        let deep = |levels: usize| (0..levels).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert_eq!(dumps(&deep(DEEPEST), None).unwrap().len(), 2 * DEEPEST + 1);
        assert!(dumps(&deep(DEEPEST + 1), None).unwrap_err().contains("more than 256 levels"));
        // 2 ^ 60 numbers.
        let wide = (0..60).fold(Value::from(1), |inner, _| Value::from(vec![inner.clone(), inner]));
        assert!(dumps(&wide, Some(64)).unwrap_err().contains("more than 67108864 bytes"));
    }
}
