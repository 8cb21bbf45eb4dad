//! Chat templates as transformers renders them: Jinja with trimmed blocks, Python's methods, and a few functions more.

use std::fmt::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, context, escape_formatter};

use crate::json::{self, LONGEST};

/// What rendering one conversation may cost: an instruction, or 64 bytes of text. A template of a model uses some dozens a message;
/// this is a second, and hundreds of megabytes.
const FUEL: u64 = 20_000_000;

/// A template and what it may call.
#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
    source: String,
}

impl Template {
    /// Compiles once, so that a template that is none is known before any conversation. `special` are the tokens that it may name
    /// (`bos_token` and others).
    pub fn new<'a>(
        source: &str,
        special: impl IntoIterator<Item = (&'a &'static str, &'a String)>,
    ) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| describe(&error))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(method);
        environment.set_formatter(|out, state, value| match value.kind() {
            // As Python writes them.
            ValueKind::None => out.write_str("None").map_err(Error::from),
            ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }).map_err(Error::from),
            ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
                let mut text = Limited(String::new());
                write!(text, "{value}").map_err(|_| Error::from(ErrorKind::OutOfFuel))?;
                out.write_str(&text.0).map_err(Error::from)
            }
            _ => escape_formatter(out, state, value),
        });
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Raised))
        });
        environment.add_function("strftime_now", |format: String| {
            let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
            strftime(&format, seconds).map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
        });
        for (name, token) in special {
            environment.add_global(*name, token.clone());
        }
        let template = Self { environment, source: without_generation_marks(source) };
        template.environment.template_from_str(&template.source).map_err(|error| describe(&error))?;
        Ok(template)
    }

    /// The text of a conversation.
    pub fn render(&self, messages: &[Value], tools: &Value, add_generation_prompt: bool) -> Result<String, NoText> {
        let context = context! { messages, tools, documents => (), add_generation_prompt };
        self.environment.render_str(&self.source, context).map_err(|error| {
            let mut causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
            match causes.any(|cause| cause.is::<Raised>()) {
                true => NoText::Refused(describe(&error)),
                false => NoText::Failed(describe(&error)),
            }
        })
    }
}

/// Why a conversation has no text, in one line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoText {
    /// The template says that the conversation is not as it should be.
    Refused(String),
    /// The template does not know what to do with it.
    Failed(String),
}

/// Marks errors of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("raise_exception")]
struct Raised;

/// `{% generation %}` marks answers for transformers; where they are is found otherwise here. Its whitespace control stays.
fn without_generation_marks(source: &str) -> String {
    let mut rest = source;
    let mut out = String::with_capacity(source.len());
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let (tag, after) = (&rest[start..start + len], start + len);
        let inner = tag[2..].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let replaced = match inner {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        };
        out.push_str(&rest[..start]);
        out.push_str(&replaced);
        rest = &rest[after..];
    }
    out + rest
}

/// One line, the deepest cause included.
fn describe(error: &Error) -> String {
    let detail = match error.kind() {
        ErrorKind::OutOfFuel => Some("no end after 20 million instructions"),
        _ => error.detail(),
    };
    let kind = error.kind().to_string();
    let mut text = match (error.line(), detail.or(error.line().map(|_| &*kind))) {
        (Some(line), Some(detail)) => format!("line {line}: {detail}"),
        (None, Some(detail)) => detail.to_owned(),
        _ => error.to_string(),
    };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source.filter(|cause| !cause.is::<Raised>()) {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text.lines().collect::<Vec<_>>().join(" ")
}

/// The text of a value of many parts, which is charged only once it is there.
struct Limited(String);

impl Write for Limited {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > LONGEST {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// Python's methods. Those that fuel does not bound are paid in advance, or take no values of many parts.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, format!("{name} {what} is not built")));
    match (name, value.as_str()) {
        ("format", Some(format)) => {
            let format = format.replace("{{", "");
            let fields: Vec<&str> = format.split('{').skip(1).filter_map(|field| field.split('}').next()).collect();
            let digits = fields.iter().flat_map(|field| field.split(|c: char| !c.is_ascii_digit()));
            let widths = digits.filter(|run| !run.is_empty()).map(|run| run.parse().unwrap_or(u64::MAX));
            let mut longest = 1;
            for arg in args {
                match (arg.kind(), arg.as_str()) {
                    (_, Some(text)) => longest = longest.max(text.len() as u64),
                    (ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Undefined, _) => {}
                    _ => return refuse("with names, lists or objects"),
                }
            }
            let bytes = widths.fold((fields.len() as u64).saturating_mul(longest), u64::saturating_add);
            state.consume_fuel(bytes / 64)?;
        }
        ("join", Some(_)) => {
            let items =
                args.first().filter(|items| items.kind() != ValueKind::String).map(Value::try_iter).transpose()?;
            if items.into_iter().flatten().any(|item| matches!(item.kind(), ValueKind::Seq | ValueKind::Map)) {
                return refuse("of lists or objects");
            }
        }
        _ => {}
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Python's `json.dumps(x, ensure_ascii=False, indent=..)`.
fn tojson(value: Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    // As transformers' own templates give it; ASCII alone is not built.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    json::dumps(&value, indent)
        .map(Value::from_safe_string)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}")))
}

/// The codes that templates use, in UTC: a run must not depend on where it is.
fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, second) = (seconds / 86400, seconds % 86400);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut day) = (1970, days);
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    let (day, weekday) = (day + 1, DAYS[(days % 7) as usize]);

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        out += &match chars.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{:02}", month + 1),
            Some('B') => MONTHS[month].to_owned(),
            Some('b') => MONTHS[month][..3].to_owned(),
            Some('d') => format!("{day:02}"),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => format!("{:02}", second / 3600),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('F') => format!("{year}-{:02}-{day:02}", month + 1),
            Some('%') => "%".to_owned(),
            other => return Err(format!("strftime_now: %{} is not built", other.unwrap_or(' '))),
        };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn render(source: &str) -> Result<String, String> {
        let special = [("bos_token", "<s>".to_owned())];
        let template = Template::new(source, special.iter().map(|(name, token)| (name, token)))?;
        let messages = r#"[{"role": "user", "content": "a<b> & 'c'"}, {"role": "x", "content": null}]"#;
        let messages: Vec<Value> = serde_json::from_str(messages).unwrap();
        template
            .render(&messages, &Value::from(()), true)
            .map_err(|(NoText::Refused(text) | NoText::Failed(text))| text)
    }

    /// The right sides are Jinja2's, with transformers' settings.
    #[rstest]
    #[case("{{ bos_token }}{{ eos_token }}|", "<s>|")]
    #[case("{% for m in messages %}\n  {% if loop.first %}\n{{ m['role'] }}\n  {% endif %}\n{% endfor %}\n", "user\n")]
    #[case("{{ messages[0].content }}", "a<b> & 'c'")]
    #[case("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "a<b> & 'c'"}"#)]
    #[case("{{ [1, {'a': []}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"a\": []\n  }\n]")]
    #[case("{{ messages[1].content }} {{ add_generation_prompt }} {{ tools is none }}", "None True True")]
    #[case("{{ messages[0]['content'].split('<')[0].strip().upper() }}", "A")]
    #[case("{{ '{:>3}|{}'.format('a', 1.5) }} {{ '-'.join(['a', 'b']) }}", "  a|1.5 a-b")]
    #[case("{{ '%02d' | format(3) ~ messages[1].get('missing', 'm') }}", "03m")]
    #[case("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2")]
    #[case("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}", "1")]
    #[case("a {%- generation -%} b {%- endgeneration %} c", "ab c")]
    fn templates_render_as_in_transformers(#[case] source: &str, #[case] expected: &str) {
        assert_eq!(render(source).unwrap(), expected);
    }

    #[rstest]
    #[case("{{ raise_exception('roles must alternate') }}", "roles must alternate")]
    #[case("{% if %}", "line 1: ")]
    #[case("{{ 1 | nofilter }}", "nofilter")]
    #[case("{{ messages[3].content.strip() }}", "line 1: undefined value")]
    #[case("{{ '{}'.format([1]) }}", "format with names, lists or objects is not built")]
    #[case("{{ strftime_now('%Q') }}", "%Q is not built")]
    fn what_a_template_refuses_is_said_in_one_line(#[case] source: &str, #[case] expected: &str) {
        let error = render(source).unwrap_err();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }

    /// Each would take hours, all memory or the stack.
    #[rstest]
    #[case::loops(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "line 1: no end after"
    )]
    #[case::repeats("{{ 'x' * 1000000000000 }}", "no end after")]
    #[case::doubles(
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "no end after"
    )]
    #[case::replaces("{{ ('x' * 1000000).replace('x', 'x' * 1000000) }}", "no end after")]
    #[case::indent("{{ 'a\nb' | indent(1000000000000) }}", "no end after")]
    #[case::width("{{ '%1000000000000d' | format(3) }}", "")]
    #[case::star("{{ '%*d' | format(1000000000000, 3) }}", "")]
    #[case::precision("{{ '%.1000000000f' | format(3.0) }}", "")]
    #[case::method_width("{{ '{:>1000000000000}'.format(3) }}", "")]
    #[case::json_indent("{{ [1] | tojson(indent=1000000000000) }}", "tojson: an indent of 1000000000000: at most 64")]
    #[case::json_wide(
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "bytes of JSON"
    )]
    #[case::json_deep(
        "{% set ns = namespace(x=[1]) %}{% for a in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "more than 256 levels"
    )]
    #[case::itself("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | tojson }}", "")]
    #[case::recursion("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "")]
    fn a_template_without_end_is_refused(#[case] source: &str, #[case] expected: &str) {
        let error = render(source).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }

    /// 2 ^ 60 numbers in 60 lists.
    #[rstest]
    fn a_value_of_far_too_many_parts_is_no_text(
        #[values("{{ ns.x }}", "{{ '{}'.format(ns.x) }}", "{{ '{a}'.format(a=ns.x) }}", "{{ 'a'.join(ns.x) }}")]
        last: &str,
    ) {
        let source = format!(
            "{{% set ns = namespace(x=[1], y=[1]) %}}{{% for a in range(60) %}}{{% set ns.x = [ns.x, ns.x] %}}\
             {{% set ns.y = [ns.y, ns.y] %}}{{% endfor %}}{last}"
        );
        assert!(render(&source).is_err());
    }

    #[test]
    fn what_a_template_says_is_told_from_what_it_cannot_do() {
        let render = |source: &str| Template::new(source, []).unwrap().render(&[], &Value::from(()), true).unwrap_err();
        assert_eq!(render("{{ raise_exception('no') }}"), NoText::Refused("line 1: no".to_owned()));
        let raised = "{% macro a() %}{{ raise_exception('no') }}{% endmacro %}{{ a() }}";
        assert!(matches!(render(raised), NoText::Refused(_)));
        assert!(matches!(render("{{ 1 | nofilter }}"), NoText::Failed(_)));
        assert!(matches!(render("{{ messages[3].content.strip() }}"), NoText::Failed(_)));
    }

    #[rstest]
    #[case(0, "Thu Thursday 01 Jan January 1970-01-01 00:00:00 70")]
    #[case(951_827_696, "Tue Tuesday 29 Feb February 2000-02-29 12:34:56 00")]
    #[case(4_107_542_399, "Sun Sunday 28 Feb February 2100-02-28 23:59:59 00")]
    fn dates_are_those_of_the_calendar(#[case] seconds: u64, #[case] expected: &str) {
        assert_eq!(strftime("%a %A %d %b %B %Y-%m-%d %H:%M:%S %y", seconds).unwrap(), expected);
    }
}
