//! The answer to a request: a value that is said as text or as JSON.

use burn_upipe::plan::{
    Bytes, Limit, Longest, Plan, Rung, Setup, StatePlace, Tokens, WaitingPlace, fit, ladder, limit, longest, plan,
};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::error::Result;
use crate::request::Request;
use crate::values::Mode;

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// The question: plan, ladder, fit or max.
    pub mode: &'static str,
    /// The plan in question: under fit the fastest, under max that of the longest sequence, under ladder that of the last rung.
    #[serde(flatten)]
    pub plan: Plan,
    /// Under ladder: the rungs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ladder: Option<Vec<Step>>,
    /// Under fit: how many combinations can run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tried: Option<usize>,
    /// Under fit: how many of them fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fitting: Option<usize>,
    /// Under max with a length: whether that is within.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<Asked>,
    /// What to type for this setup.
    pub arguments: String,
    /// What the plan leaves out.
    pub notes: Vec<String>,
}

/// A length that was typed where the longest is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Asked {
    /// Its tokens.
    pub seq_len: usize,
    /// Whether it fits.
    pub fits: bool,
}

/// One rung of the ladder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// What came on top.
    pub technique: &'static str,
    /// The longest sequence that fits.
    pub max_seq_len: usize,
    /// What the next one runs into.
    pub binding_limit: Limit,
    /// Bytes of device memory at the peak of a step over the plan's sequence.
    pub device_bytes_peak: usize,
    /// Of host memory.
    pub host_bytes: usize,
    /// On disk.
    pub disk_bytes: usize,
    /// Whether that fits.
    pub fits: bool,
}

impl Answer {
    /// Answers.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`](crate::Error::Plan) if the setup cannot run.
    pub fn to(request: &Request) -> Result<Self> {
        let Request { setup, machines, seconds, .. } = request;
        let mut answer = match request.mode {
            Mode::Plan => Self::of(request, "plan", setup)?,
            Mode::Max => {
                let found = longest(setup, machines, *seconds)?;
                // Without one, the shortest says why.
                let len = found.seq_len.max(setup.mesh.ulysses);
                let answer = Self::of(request, "max", &Setup { seq_len: len, ..setup.clone() })?;
                let asked = request.seq_len.map(|seq_len| {
                    let fits = limit(&Setup { seq_len, ..setup.clone() }, machines, *seconds)?.is_none();
                    Ok::<_, burn_upipe::plan::PlanError>(Asked { seq_len, fits })
                });
                Self { asked: asked.transpose()?, ..answer }
            }
            Mode::Fit => {
                let found = fit(setup, machines, &request.choices, *seconds)?;
                let answer = Self::of(request, "fit", &found.setup)?;
                Self { tried: Some(found.tried), fitting: Some(found.fitting), ..answer }
            }
            Mode::Ladder => {
                let len = match request.seq_len {
                    Some(len) => len,
                    None => longest(setup, machines, *seconds)?.seq_len.max(setup.mesh.ulysses),
                };
                let full = Setup { seq_len: len, ..setup.clone() };
                let rungs = ladder(&full, machines, *seconds)?;
                let steps = rungs
                    .iter()
                    .map(|rung| Ok(step(rung, limit(&rung.setup, machines, *seconds)?.is_none())))
                    .collect::<Result<Vec<_>>>()?;
                Self { ladder: Some(steps), ..Self::of(request, "ladder", &full)? }
            }
        };
        answer.notes.extend(request.notes.iter().cloned());
        Ok(answer)
    }

    fn of(request: &Request, mode: &'static str, setup: &Setup) -> Result<Self> {
        Ok(Self {
            mode,
            plan: plan(setup, &request.machines, request.seconds)?,
            ladder: None,
            tried: None,
            fitting: None,
            asked: None,
            arguments: arguments(setup),
            notes: Vec::new(),
        })
    }

    /// As text.
    pub fn text(&self) -> String {
        let plan = &self.plan;
        let mut text = String::new();
        if let Some(rungs) = &self.ladder {
            text += &format!(
                "{} on {} x {}: what each technique buys\n\n{}\n\nand the last of them:\n\n",
                plan.model,
                plan.devices,
                plan.device,
                table(rungs, plan.seq_len)
            );
        }
        if let (Some(tried), Some(fitting)) = (self.tried, self.fitting) {
            text += &match fitting {
                0 if plan.binding_limit == Limit::Time => {
                    format!("none of {tried} combinations is fast enough; the fastest that memory has room for:\n\n")
                }
                0 => format!("none of {tried} combinations fits; the one that needs the least device memory:\n\n"),
                _ => format!("{fitting} of {tried} combinations fit; the fastest:\n\n"),
            };
        }
        if self.mode == "max" {
            text += &match plan.max_seq_len {
                0 => format!("no sequence fits: {}; the shortest:\n\n", plan.binding_limit),
                len => format!("the longest sequence is {} ({len} tokens)\n\n", Tokens(len)),
            };
        }
        if let Some(asked) = self.asked {
            let verdict = if asked.fits { "fits" } else { "does not fit" };
            text += &format!("{} ({} tokens) {verdict}\n\n", Tokens(asked.seq_len), asked.seq_len);
        }
        text += &plan.to_string();
        if self.mode == "fit" {
            text += &format!("\n{}\n", self.arguments);
        }
        for note in &self.notes {
            text += &format!("note: {note}\n");
        }
        text
    }
}

fn step(rung: &Rung, fits: bool) -> Step {
    let Longest { seq_len, limit } = rung.longest;
    Step {
        technique: rung.name,
        max_seq_len: seq_len,
        binding_limit: limit,
        device_bytes_peak: rung.peak(),
        host_bytes: rung.memory.host,
        disk_bytes: rung.memory.disk,
        fits,
    }
}

fn table(rungs: &[Step], len: usize) -> Table {
    let mut table = Table::new();
    let at = |what: &str| format!("{what} at {}", Tokens(len));
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "technique".to_owned(),
        "longest sequence".to_owned(),
        "ends at".to_owned(),
        at("device"),
        at("host"),
        "fits".to_owned(),
    ]);
    for column in [1, 3, 4] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for rung in rungs {
        let longest = match rung.max_seq_len {
            0 => "none".to_owned(),
            len => Tokens(len).to_string(),
        };
        table.add_row([
            rung.technique.to_owned(),
            longest,
            rung.binding_limit.to_string(),
            Bytes(rung.device_bytes_peak).to_string(),
            Bytes(rung.host_bytes).to_string(),
            if rung.fits { "yes" } else { "no" }.to_owned(),
        ]);
    }
    table
}

/// The flags of a setup's techniques.
fn arguments(setup: &Setup) -> String {
    let techniques = &setup.techniques;
    let tile = |tile: Option<usize>| tile.map_or("off".to_owned(), |tile| tile.to_string());
    let mut words = vec![format!("--mesh {}", setup.mesh.typed())];
    words.push(match setup.per_stage() {
        Some(heads) => format!("--attention upipe --heads-per-stage {heads}"),
        None => format!("--attention {}", techniques.attention),
    });
    words.push(match techniques.checkpoint {
        None => "--checkpoint off".to_owned(),
        Some(1) => "--checkpoint on".to_owned(),
        Some(blocks) => format!("--checkpoint {blocks}"),
    });
    for (name, length) in [("mlp", techniques.mlp_tile), ("norm", techniques.norm_tile), ("loss", techniques.loss_tile)]
    {
        words.push(format!("--{name}-tile {}", tile(length)));
    }
    words.push(match techniques.offload {
        None => "--offload none".to_owned(),
        Some(offload) => {
            let place = if offload.place == WaitingPlace::Host { "host" } else { "disk" };
            let budgets = [
                ("budget", (offload.keep > 0).then_some(offload.keep)),
                ("host-budget", offload.host_budget),
                ("disk-budget", offload.disk_budget),
            ];
            let budgets = budgets.map(|(name, bytes)| {
                bytes
                    .map_or(String::new(), |bytes| format!(" --offload-{name} {}", bytes.saturating_mul(setup.ranks())))
            });
            let every = if offload.keep > 0 { String::new() } else { format!(" --offload-every {}", offload.every) };
            format!("--offload {place}{every} --in-flight {}{}", offload.in_flight, budgets.concat())
        }
    });
    words.push(format!("--optimizer {}", if techniques.optimizer == StatePlace::Host { "host" } else { "device" }));
    let word = |on| if on { "on" } else { "off" };
    words.push(format!("--fsdp {}", word(techniques.fsdp)));
    if techniques.fsdp {
        words.push(format!("--prefetch {}", word(techniques.prefetch)));
    }
    words.join(" ")
}
