//! Where a moment and a number of bytes lie on the paper.

use std::time::{Duration, Instant};

use super::super::timeline::Timeline;

/// The width of the drawing, without the margins.
pub(super) const WIDTH: f64 = 1080.0;
/// For the numbers of bytes.
pub(super) const LEFT: f64 = 84.0;
/// The height of the memory's part.
pub(super) const HEIGHT: f64 = 170.0;
/// Above it.
pub(super) const TOP: f64 = 10.0;

/// Seconds that were recorded, one window after the other: what lies between was not.
pub(super) struct Clock {
    origin: Option<Instant>,
    /// Begin and end since the origin, in seconds.
    windows: Vec<(f64, f64)>,
}

impl Clock {
    pub fn of(ranks: &[Timeline]) -> Self {
        let origin = ranks.iter().map(|timeline| timeline.origin).min();
        let mut clock = Self { origin, windows: Vec::new() };
        for timeline in ranks {
            for (at, (begin, end)) in timeline.windows.iter().enumerate() {
                let (begin, end) = (clock.since(timeline, *begin), clock.since(timeline, *end));
                match clock.windows.get_mut(at) {
                    Some(window) => *window = (window.0.min(begin), window.1.max(end)),
                    None => clock.windows.push((begin, end)),
                }
            }
        }
        // Ranks do not begin and end together: what lies in two windows is counted once.
        for at in 1..clock.windows.len() {
            let end = clock.windows[at - 1].1;
            clock.windows[at].0 = clock.windows[at].0.max(end);
        }
        clock
    }

    fn since(&self, timeline: &Timeline, time: Duration) -> f64 {
        let shift = self.origin.map_or(Duration::ZERO, |origin| timeline.origin - origin);
        (time + shift).as_secs_f64()
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.windows.iter().map(|(begin, end)| (end - begin).max(0.0)).sum::<f64>().max(1e-9)
    }

    /// Recorded seconds before a rank's moment.
    pub fn seconds(&self, timeline: &Timeline, time: Duration) -> f64 {
        let time = self.since(timeline, time);
        self.windows.iter().map(|(begin, end)| (time.min(*end) - begin).max(0.0)).sum()
    }

    pub fn x(&self, seconds: f64) -> f64 {
        LEFT + WIDTH * seconds / self.total()
    }

    /// Where a window ends and the next one begins.
    pub fn seams(&self) -> Vec<f64> {
        let mut at = 0.0;
        let ends = self.windows.iter().map(|(begin, end)| {
            at += (end - begin).max(0.0);
            at
        });
        let mut seams: Vec<f64> = ends.collect();
        seams.pop();
        seams
    }

    pub fn ticks(&self) -> Vec<f64> {
        ticks(self.total())
    }
}

/// Bytes, in one unit.
pub(super) struct Scale {
    pub unit: &'static str,
    size: f64,
    top: f64,
}

impl Scale {
    pub fn of(highest: u64) -> Self {
        let (unit, size) = match highest {
            0x4000_0000.. => ("GiB", f64::from(1 << 30)),
            0x10_0000.. => ("MiB", f64::from(1 << 20)),
            _ => ("KiB", 1024.0),
        };
        Self { unit, size, top: (highest as f64 * 1.05).max(1.0) }
    }

    pub fn y(&self, bytes: f64) -> f64 {
        TOP + HEIGHT * (1.0 - bytes / self.top)
    }

    /// In bytes, with what is written there.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        ticks(self.top / self.size)
            .into_iter()
            .map(|tick| (tick * self.size, format!("{} {}", number(tick), self.unit)))
            .collect()
    }
}

/// Round numbers from 0 up to `top`, some five of them.
fn ticks(top: f64) -> Vec<f64> {
    let rough = top / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough).unwrap_or(rough);
    (0..=(top / step).floor() as usize).map(|at| at as f64 * step).collect()
}

/// Without digits that say nothing.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_over_the_axis() {
        assert_eq!(ticks(1.0), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(ticks(33.0), [0.0, 10.0, 20.0, 30.0]);
        assert_eq!(number(0.6000000000000001), "0.6");
        assert_eq!(Scale::of(3 << 30).ticks()[1].1, "1 GiB");
        assert_eq!(Scale::of(700 << 20).ticks()[1].1, "200 MiB");
    }
}
