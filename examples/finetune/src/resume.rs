//! Whether a run may go on from a checkpoint: what would change its result must be as it was.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use burn_upipe::learner::checkpoint::Checkpoint;
use serde_json::{Value, json};
use toml::Table;

use crate::config;
use crate::error::{Error, Result};
use crate::out::weights_are_there;
use crate::plan::Plan;
use crate::values::Schedule;

/// What may differ: who computes, how much memory that takes, and what is kept.
const FREE: [&str; 20] = [
    "device",
    "ranks",
    "mesh",
    "attention",
    "heads-per-stage",
    "checkpoint",
    "blocks-per-checkpoint",
    "offload",
    "offload-every",
    "offload-budget",
    "offload-host-budget",
    "offload-dir",
    "offload-disk-budget",
    "offload-in-flight",
    "mlp-tile",
    "norm-tile",
    "loss-tile",
    "fsdp",
    "save-every",
    "keep",
];
/// What the text itself tells better than where it lay: see [`text`].
const TEXT: &str = "data";
const STEPS: &str = "steps";

/// Where a run begins.
#[derive(Clone, Debug)]
pub(crate) enum Begin {
    /// At the first step.
    First,
    /// After that of a checkpoint.
    After(Box<Checkpoint>),
    /// It is over.
    Finished,
}

/// A value that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The argument, without dashes.
    pub key: String,
    /// In the run that is there.
    pub before: String,
    /// As it was asked for now.
    pub now: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {}, now {}", self.key, self.before, self.now)
    }
}

/// How a plan goes on from a checkpoint in `out`.
///
/// # Errors
///
/// [`Error::Differs`], and [`Error::Resume`] for fewer steps than are behind it or a checkpoint of another program.
pub(crate) fn begin(plan: &Plan, checkpoint: Checkpoint, out: &Path) -> Result<Begin> {
    let state = checkpoint.state();
    let mut differences = differences(&state.config, &config::resolved(plan), &state.data, &text(plan), plan.rate.kind)
        .map_err(|problem| Error::Resume { path: out.to_owned(), problem, remedy: "give another folder".into() })?;
    differences.extend(of_models(&state.data["model"], &plan.config.to_json()));
    if !differences.is_empty() {
        return Err(Error::Differs { path: out.to_owned(), differences });
    }
    let done = checkpoint.step();
    if done > plan.steps as u64 {
        return Err(Error::Resume {
            path: out.to_owned(),
            problem: format!("--steps {}: {done} are behind it", plan.steps),
            remedy: format!("use --steps {done} or more, or start anew with --overwrite"),
        });
    }
    let complete = state.data["weights_saved"] == json!(true) && weights_are_there(out);
    Ok(if done == plan.steps as u64 && complete { Begin::Finished } else { Begin::After(Box::new(checkpoint)) })
}

/// What the tokens are, wherever their files lie.
pub(crate) fn text(plan: &Plan) -> Value {
    let corpus = &plan.corpus;
    json!({ "tokens": corpus.documents.tokens.len(), "checksum": format!("{:016x}", corpus.checksum()) })
}

/// Where a model's `config.json` is another one than it was.
fn of_models(before: &Value, now: &Value) -> Vec<Difference> {
    let (Some(before), Some(now)) = (before.as_object(), now.as_object()) else { return Vec::new() };
    let found = between(before, now).into_iter();
    found.map(|difference| Difference { key: format!("model's {}", difference.key), ..difference }).collect()
}

/// What differs between two tables, by key.
fn between<'a, V: PartialEq + ToString + 'a>(
    before: impl IntoIterator<Item = (&'a String, &'a V)>,
    now: impl IntoIterator<Item = (&'a String, &'a V)>,
) -> Vec<Difference> {
    let mut values: BTreeMap<&String, [Option<&V>; 2]> = BTreeMap::new();
    for (key, value) in before {
        values.entry(key).or_default()[0] = Some(value);
    }
    for (key, value) in now {
        values.entry(key).or_default()[1] = Some(value);
    }
    let show = |value: Option<&V>| value.map_or_else(|| "not given".to_owned(), ToString::to_string);
    let found = values.into_iter().filter(|(_, [before, now])| before != now);
    found.map(|(key, [before, now])| Difference { key: key.clone(), before: show(before), now: show(now) }).collect()
}

fn differences(
    before: &str,
    now: &str,
    data: &Value,
    text: &Value,
    schedule: Schedule,
) -> Result<Vec<Difference>, String> {
    let table = |text: &str| {
        text.parse::<Table>().map_err(|error| format!("its configuration is no TOML: {}", error.message()))
    };
    let (before, now) = (table(before)?, table(now)?);
    let mut found = between(&before, &now);
    found.retain(|Difference { key, .. }| {
        // The rate of a cosine is another one at each step if there are more of them.
        !FREE.contains(&key.as_str()) && key != TEXT && (key != STEPS || schedule == Schedule::Cosine)
    });
    // Other values give other tokens; then those tell.
    if data["text"] != *text && found.is_empty() {
        let show = |table: &Table, text: &Value| {
            let files = table.get(TEXT).map_or_else(|| "this repository's source".to_owned(), ToString::to_string);
            format!(
                "{files} of {} tokens (checksum {})",
                text["tokens"],
                text["checksum"].as_str().unwrap_or("unknown")
            )
        };
        found.push(Difference { key: TEXT.into(), before: show(&before, &data["text"]), now: show(&now, text) });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const BEFORE: &str = "data = [\"a\"]\nlr = 0.001\nseed = 3\nsteps = 10\nranks = 4\nkeep = 2\n";

    fn found(now: &str, tokens: usize, schedule: Schedule) -> Vec<String> {
        let data = json!({ "text": { "tokens": 9, "checksum": "ab" } });
        let text = json!({ "tokens": tokens, "checksum": "ab" });
        let found = differences(BEFORE, now, &data, &text, schedule).unwrap();
        found.iter().map(ToString::to_string).collect()
    }

    #[rstest]
    #[case(BEFORE, &[])]
    #[case("data = [\"a\"]\nlr = 0.001\nseed = 3\nsteps = 12\nranks = 1\nmesh = \"data=2,ulysses=1\"\n", &[])]
    #[case("data = [\"moved/a\"]\nlr = 0.001\nseed = 3\nsteps = 12\n", &[])]
    #[case("data = [\"a\"]\nlr = 0.002\nseed = 4\nsteps = 10\n", &["lr was 0.001, now 0.002", "seed was 3, now 4"])]
    #[case("data = [\"a\"]\nlr = 0.001\nsteps = 10\nsequences = 5\nseed = 3\n", &["sequences was not given, now 5"])]
    #[case("data = [\"a\"]\nlr = 0.001\nsteps = 10\n", &["seed was 3, now not given"])]
    fn only_what_changes_the_result_differs(#[case] now: &str, #[case] expected: &[&str]) {
        assert_eq!(found(now, 9, Schedule::Constant), expected);
    }

    #[test]
    fn another_shape_of_model_differs() {
        let (before, now) = (json!({ "rope_theta": 1e4, "layers": 2 }), json!({ "rope_theta": 777.0, "layers": 2 }));
        let found: Vec<String> = of_models(&before, &now).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["model's rope_theta was 10000.0, now 777.0"]);
        assert!(of_models(&before, &before).is_empty());
    }

    #[test]
    fn a_cosine_has_its_number_of_steps() {
        let now = BEFORE.replace("steps = 10", "steps = 12");
        assert_eq!(found(&now, 9, Schedule::Constant), Vec::<String>::new());
        assert_eq!(found(&now, 9, Schedule::Cosine), ["steps was 10, now 12"]);
    }

    #[test]
    fn another_text_differs_whatever_its_name() {
        let expected = "data was [\"a\"] of 9 tokens (checksum ab), now [\"a\"] of 8 tokens (checksum ab)";
        assert_eq!(found(BEFORE, 8, Schedule::Constant), [expected]);
    }
}
