//! The page: a legend, and for each rank memory over time above its phases. One file, that needs nothing else.

mod axis;
mod chart;

use std::fmt::Write;

use super::report::{Report, bytes};
use super::timeline::Timeline;
use axis::{Clock, Scale};

/// Ranks that are drawn: those with the largest peaks.
const RANKS: usize = 16;

/// Told apart on white and on black, neighbours above all.
const COLOURS: [&str; 14] = [
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#edc948", "#ff9da7", "#9c755f", "#86bc86",
    "#d37295", "#8cd17d", "#a0cbe8", "#b6992d",
];
/// Of what was there before anything was recorded, or in no phase.
const REST: &str = "#9aa0a6";

const STYLE: &str = "\
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --line: #d8dee4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d; } }
body { margin: 24px; background: var(--paper); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 18px; } h2 { font-size: 15px; margin: 20px 0 4px; }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px; }
li span { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 2px; }
svg { width: 100%; min-width: 860px; max-width: 1200px; height: auto; display: block; }
text { fill: var(--ink); font-size: 11px; } .grid { stroke: var(--line); stroke-width: 1; }
.peak { fill: none; stroke: var(--ink); stroke-width: 1; } .look { fill: transparent; } .look:hover { fill: var(--ink); fill-opacity: .12; }
.passing { fill-opacity: .4; } .bar { stroke: var(--paper); stroke-width: .4; }
.name { fill: #14171a; font-size: 9px; pointer-events: none; }";

/// What allocations are told apart by, over all ranks: what always holds something first, since it carries what comes and goes; then in
/// the order in which they came.
struct Groups(Vec<String>);

impl Groups {
    fn colour(&self, name: &str) -> &'static str {
        match self.0.iter().position(|known| known == name) {
            Some(at) => COLOURS[at % COLOURS.len()],
            None => REST,
        }
    }
}

pub(super) fn page(report: &Report) -> String {
    let mut names: Vec<String> = Vec::new();
    for name in report.ranks.iter().flat_map(|timeline| &timeline.groups) {
        // What only holds others would take a colour for nothing.
        if !names.contains(name) && !["step", "backward"].contains(&name.as_str()) {
            names.push(name.clone());
        }
    }
    names.sort_by_key(|name| std::cmp::Reverse(always(report, name)));
    let groups = Groups(names);
    let highest = |at: usize| report.ranks[at].samples.iter().map(|sample| sample.peak).max().unwrap_or(0);
    let mut drawn: Vec<usize> = (0..report.ranks.len()).collect();
    drawn.sort_by_key(|at| std::cmp::Reverse(highest(*at)));
    drawn.truncate(RANKS);
    drawn.sort_unstable();
    let clock = Clock::of(&report.ranks);
    let scale = Scale::of(drawn.iter().map(|at| highest(*at)).max().unwrap_or(0));

    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>Memory by phase</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
    );
    let source = report.ranks.first().map_or("", |timeline| timeline.source);
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "<h1>Memory by phase: {} ranks, {:.3} s</h1>\n<p>Bytes in use ({}), coloured by the phase in which they were allocated; the line is \
         the most in use at once between two moments, paler what was gone at the end of them. Below it the phases, from the outside in. Point at anything for its numbers.</p>\n<ul>\n",
        report.ranks.len(),
        report.wall().as_secs_f64(),
        escape(source)
    );
    for name in &groups.0 {
        let _ = writeln!(page, "<li><span style=\"background:{}\"></span>{}</li>", groups.colour(name), escape(name));
    }
    let _ = writeln!(page, "<li><span style=\"background:{REST}\"></span>before, or in no phase</li>\n</ul>");
    for at in &drawn {
        let timeline = &report.ranks[*at];
        let _ = writeln!(page, "<h2>rank {}: peak {}</h2>", timeline.rank, bytes(highest(*at)));
        chart::draw(&mut page, timeline, &clock, &scale, &groups);
    }
    if drawn.len() < report.ranks.len() {
        let _ = writeln!(
            page,
            "<p>{} more ranks, whose peaks are lower, are in the table and the trace.</p>",
            report.ranks.len() - drawn.len()
        );
    }
    page + "</body>\n</html>\n"
}

/// What of a group is alive at every moment on some rank.
fn always(report: &Report, name: &str) -> u64 {
    let on_rank = |timeline: &Timeline| {
        let at = timeline.groups.iter().position(|known| known == name)?;
        timeline.samples.iter().map(|sample| sample.alive.get(at).copied().unwrap_or(0)).min()
    };
    report.ranks.iter().filter_map(on_rank).max().unwrap_or(0)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
