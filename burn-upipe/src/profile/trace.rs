//! The trace format of Chrome's and Perfetto's viewers.

use serde_json::{Value, json};

use super::report::Report;
use super::timeline::Timeline;

/// Times are microseconds since the first rank's beginning; a rank is a process, its threads are threads.
pub(super) fn json(report: &Report) -> Value {
    let origin = report.ranks.iter().map(|timeline| timeline.origin).min();
    let mut events = Vec::new();
    for timeline in &report.ranks {
        let shift = origin.map_or(0.0, |origin| micros(timeline.origin - origin));
        rank(timeline, shift, &mut events);
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

fn rank(timeline: &Timeline, shift: f64, events: &mut Vec<Value>) {
    let pid = timeline.rank;
    let named = |name: &str, tid: usize, value: String| json!({ "ph": "M", "name": name, "pid": pid, "tid": tid, "args": { "name": value } });
    events.push(named("process_name", 0, format!("rank {pid}")));
    let threads = timeline.spans.iter().map(|span| span.thread).max().unwrap_or(0);
    for thread in 0..=threads {
        let name = if thread == 0 { "compute".to_owned() } else { format!("helper {thread}") };
        events.push(named("thread_name", thread, name));
    }
    // Viewers want those that begin first, first, and those around before those within.
    let mut spans: Vec<_> = timeline.spans.iter().collect();
    spans.sort_by_key(|span| (span.start, span.depth));
    for span in spans {
        let phase = &timeline.phases[span.phase];
        events.push(json!({
            "ph": "X",
            "name": phase.label,
            "cat": phase.kind,
            "pid": pid,
            "tid": span.thread,
            "ts": shift + micros(span.start),
            "dur": micros(span.duration),
            "args": {
                "peak": span.peak,
                "peak above": span.peak.saturating_sub(span.begin.in_use),
                "in use at begin": span.begin.in_use,
                "in use at end": span.end.in_use,
                "reserved": span.reserved,
                "sent": span.sent,
                "received": span.received,
                "copied": span.copied,
            },
        }));
    }
    for sample in &timeline.samples {
        let mut args = json!({ "in use": sample.memory.in_use, "peak": sample.peak });
        if let Some(reserved) = sample.memory.reserved {
            args["reserved"] = json!(reserved);
        }
        events.push(json!({ "ph": "C", "name": "memory", "pid": pid, "ts": shift + micros(sample.to), "args": args }));
        if !sample.alive.is_empty() {
            let alive: serde_json::Map<String, Value> =
                timeline.groups.iter().zip(&sample.alive).map(|(name, bytes)| (name.clone(), json!(bytes))).collect();
            let at = shift + micros(sample.to);
            events.push(json!({ "ph": "C", "name": "alive by phase", "pid": pid, "ts": at, "args": alive }));
        }
    }
}

fn micros(time: std::time::Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
