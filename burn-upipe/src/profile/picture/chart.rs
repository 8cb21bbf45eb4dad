//! One rank: memory as a stack over time, and its phases as bars.

use std::fmt::Write;

use super::super::report::bytes;
use super::super::timeline::{Sample, Span, Timeline};
use super::axis::{Clock, HEIGHT, LEFT, Scale, TOP, WIDTH, number};
use super::{Groups, REST, escape};

/// Columns into which time is cut: a column shows the moment when most was in use.
const COLUMNS: usize = 720;
/// Columns that can be pointed at.
const LOOKS: usize = 180;
/// Levels of phases that are drawn, and the height of each.
const LEVELS: usize = 5;
const LEVEL: f64 = 12.0;
/// How wide a letter on a bar is, at the most; bars without room for their name have none.
const LETTER: f64 = 5.6;
/// Narrower bars are not drawn.
const NARROWEST: f64 = 0.5;

/// Writing to a string cannot fail, so results of it are dropped throughout.
pub(super) fn draw(page: &mut String, timeline: &Timeline, clock: &Clock, scale: &Scale, groups: &Groups) {
    let foot = TOP + HEIGHT;
    let bars = foot + 22.0;
    let height = bars + LEVEL * LEVELS as f64 + 6.0;
    let _ = writeln!(page, "<svg viewBox=\"0 0 {:.0} {height:.0}\" role=\"img\">", LEFT + WIDTH + 16.0);
    for (at, text) in scale.ticks() {
        let y = scale.y(at);
        let _ = writeln!(
            page,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            LEFT + WIDTH,
            LEFT - 6.0,
            y + 4.0
        );
    }
    for tick in clock.ticks() {
        let x = clock.x(tick);
        let _ = writeln!(
            page,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} s</text>",
            foot + 14.0,
            number(tick)
        );
    }
    let columns = columns(timeline, clock, COLUMNS);
    stack(page, timeline, &columns, clock, scale, groups);
    for seam in clock.seams() {
        let x = clock.x(seam);
        let _ = writeln!(
            page,
            "<line class=\"peak\" stroke-dasharray=\"3 3\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{foot}\"/>"
        );
    }
    looks(page, timeline, clock);
    for span in timeline.spans.iter().filter(|span| span.thread == 0 && span.depth < LEVELS) {
        bar(page, timeline, span, clock, groups, bars);
    }
    page.push_str("</svg>\n");
}

/// For each column the sample in it whose peak is highest.
fn columns<'a>(timeline: &'a Timeline, clock: &Clock, count: usize) -> Vec<Option<&'a Sample>> {
    let mut columns: Vec<Option<&Sample>> = vec![None; count];
    for sample in &timeline.samples {
        let column = |time| (count as f64 * clock.seconds(timeline, time) / clock.total()) as usize;
        let (from, to) = (column(sample.from), column(sample.to));
        for known in columns.iter_mut().take(to + 1).skip(from) {
            if known.is_none_or(|known| known.peak < sample.peak) {
                *known = Some(sample);
            }
        }
    }
    columns
}

/// What is alive of each group, the rest first.
fn layers(timeline: &Timeline, sample: &Sample, groups: &Groups) -> Vec<u64> {
    let mut layers = vec![0; groups.0.len() + 1];
    let place = |name: &str| groups.0.iter().position(|known| known == name).map_or(0, |at| at + 1);
    if sample.alive.is_empty() {
        // Nobody tags allocations: the phase at hand has it all.
        let at = sample.phase.map_or(0, |phase| place(&timeline.groups[timeline.phases[phase].group]));
        layers[at] = sample.memory.in_use;
        return layers;
    }
    for (name, bytes) in timeline.groups.iter().zip(&sample.alive) {
        layers[place(name)] += bytes;
    }
    let tagged: u64 = layers.iter().sum();
    layers[0] += sample.memory.in_use.saturating_sub(tagged);
    layers
}

fn stack(
    page: &mut String,
    timeline: &Timeline,
    columns: &[Option<&Sample>],
    clock: &Clock,
    scale: &Scale,
    groups: &Groups,
) {
    let x = |column: usize| clock.x(clock.total() * column as f64 / columns.len() as f64);
    let values: Vec<Vec<u64>> = columns
        .iter()
        .map(|sample| sample.map_or_else(|| vec![0; groups.0.len() + 1], |sample| layers(timeline, sample, groups)))
        .collect();
    let mut below = vec![0u64; columns.len()];
    for layer in 0..=groups.0.len() {
        let most = values.iter().map(|column| column[layer]).max().unwrap_or(0);
        if most == 0 {
            continue;
        }
        let above: Vec<u64> = below.iter().zip(&values).map(|(below, column)| below + column[layer]).collect();
        let mut path = String::new();
        outline(&mut path, &above, 0..columns.len(), &x, scale, 'M');
        outline(&mut path, &below, (0..columns.len()).rev(), &x, scale, 'L');
        let (name, colour) = match layer {
            0 => ("before, or in no phase", REST),
            layer => (&*groups.0[layer - 1], groups.colour(&groups.0[layer - 1])),
        };
        let _ = writeln!(
            page,
            "<path d=\"{path}Z\" fill=\"{colour}\"><title>{}: at most {}</title></path>",
            escape(name),
            bytes(most)
        );
        below = above;
    }
    transient(page, timeline, columns, &x, scale, groups);
    let peaks: Vec<u64> = columns.iter().map(|sample| sample.map_or(0, |sample| sample.peak)).collect();
    let mut path = String::new();
    outline(&mut path, &peaks, 0..columns.len(), &x, scale, 'M');
    let _ = writeln!(page, "<path class=\"peak\" d=\"{path}\"/>");
}

/// What was there in between and gone at the end of a moment: of the phase at hand.
fn transient(
    page: &mut String,
    timeline: &Timeline,
    columns: &[Option<&Sample>],
    x: &impl Fn(usize) -> f64,
    scale: &Scale,
    groups: &Groups,
) {
    let mut from = 0;
    while from < columns.len() {
        let sample = columns[from];
        let same = |other: &&Option<&Sample>| match (sample, **other) {
            (Some(a), Some(b)) => std::ptr::eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        };
        let to = from + columns[from..].iter().take_while(same).count();
        if let Some(sample) = sample.filter(|sample| sample.peak > sample.memory.in_use) {
            let name = sample.phase.map(|phase| &timeline.groups[timeline.phases[phase].group]);
            let (top, bottom) = (scale.y(sample.peak as f64), scale.y(sample.memory.in_use as f64));
            let _ = writeln!(
                page,
                "<rect class=\"passing\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
                x(from),
                x(to) - x(from),
                bottom - top,
                name.map_or(REST, |name| groups.colour(name))
            );
        }
        from = to;
    }
}

/// Steps through columns in either direction; a point only where the height changes.
fn outline(
    path: &mut String,
    heights: &[u64],
    order: impl DoubleEndedIterator<Item = usize>,
    x: &impl Fn(usize) -> f64,
    scale: &Scale,
    first: char,
) {
    let order: Vec<usize> = order.collect();
    let forward = order.first() <= order.last();
    let mut command = first;
    let mut before = None;
    for (place, &column) in order.iter().enumerate() {
        let next = order.get(place + 1).map(|next| heights[*next]);
        let height = heights[column];
        let (enter, leave) = if forward { (column, column + 1) } else { (column + 1, column) };
        let y = scale.y(height as f64);
        if before != Some(height) {
            let _ = write!(path, "{command}{:.1} {y:.1}", x(enter));
            command = 'L';
        }
        if next != Some(height) {
            let _ = write!(path, "{command}{:.1} {y:.1}", x(leave));
        }
        before = Some(height);
    }
}

/// Columns that say, when pointed at, what there was.
fn looks(page: &mut String, timeline: &Timeline, clock: &Clock) {
    let width = WIDTH / LOOKS as f64;
    for (at, sample) in columns(timeline, clock, LOOKS).into_iter().enumerate() {
        let Some(sample) = sample else { continue };
        let phase = sample.phase.map_or_else(
            || "no phase".to_owned(),
            |phase| timeline.path(phase).into_iter().map(|phase| &*phase.label).collect::<Vec<_>>().join(" / "),
        );
        let mut alive: Vec<(u64, &String)> =
            sample.alive.iter().copied().zip(&timeline.groups).filter(|(bytes, _)| *bytes > 0).collect();
        alive.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        let mut title = format!(
            "{phase}\n{:.4} s: {} in use, at most {}",
            clock.seconds(timeline, sample.to),
            bytes(sample.memory.in_use),
            bytes(sample.peak)
        );
        if let Some(reserved) = sample.memory.reserved {
            let _ = write!(title, ", {} reserved", bytes(reserved));
        }
        for (size, name) in alive {
            let _ = write!(title, "\n{} of {name}", bytes(size));
        }
        let _ = writeln!(
            page,
            "<rect class=\"look\" x=\"{:.1}\" y=\"{TOP}\" width=\"{width:.2}\" height=\"{HEIGHT}\"><title>{}</title></rect>",
            LEFT + width * at as f64,
            escape(&title)
        );
    }
}

fn bar(page: &mut String, timeline: &Timeline, span: &Span, clock: &Clock, groups: &Groups, top: f64) {
    let (from, to) =
        (clock.x(clock.seconds(timeline, span.start)), clock.x(clock.seconds(timeline, span.start + span.duration)));
    if to - from < NARROWEST {
        return;
    }
    let phase = &timeline.phases[span.phase];
    let mut title = format!(
        "{}\n{:.4} s, peak {}, {} above its begin",
        phase.label,
        span.duration.as_secs_f64(),
        bytes(span.peak),
        bytes(span.peak.saturating_sub(span.begin.in_use))
    );
    for (what, size) in [("sent", span.sent), ("received", span.received), ("copied", span.copied)] {
        if size > 0 {
            let _ = write!(title, ", {} {what}", bytes(size));
        }
    }
    let _ = writeln!(
        page,
        "<rect class=\"bar\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{LEVEL}\" fill=\"{}\"><title>{}</title></rect>",
        top + LEVEL * span.depth as f64,
        to - from,
        groups.colour(&timeline.groups[phase.group]),
        escape(&title)
    );
    if LETTER * (phase.label.chars().count() + 1) as f64 <= to - from {
        let _ = writeln!(
            page,
            "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            from + 0.5 * LETTER,
            top + LEVEL * span.depth as f64 + LEVEL - 3.0,
            escape(&phase.label)
        );
    }
}
