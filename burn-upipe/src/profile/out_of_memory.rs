//! What is written when memory is out.

use std::error::Error;
use std::fmt::Write;
use std::time::SystemTime;

use super::heap::{Alive, Phase, alive_by_phase, in_use, peak};
use super::report::bytes;
use super::source::resident;

/// What is alive, by the phase in which it was allocated, as text. It locks nothing: for [`on_out_of_memory`](super::heap::on_out_of_memory).
pub fn alive() -> String {
    let alive = alive_by_phase();
    let mut text = format!("{} in use on the heap, at most {} so far", bytes(in_use() as u64), bytes(peak() as u64));
    // Writing to a string cannot fail.
    if let Some(resident) = resident() {
        let _ = write!(text, "; resident set {}", bytes(resident));
    }
    text += "\n\nalive by the phase in which it was allocated, the most first:\n";
    for Alive { rank, phase, bytes: size } in alive {
        let rank = rank.map_or_else(|| "process".to_owned(), |rank| format!("rank {rank}"));
        let _ = writeln!(text, "{:>12}  {rank:<9} {phase}", bytes(size as u64));
    }
    text
}

/// [`alive`] with its occasion: the allocation that failed, or the error of a device whose memory is out.
pub fn out_of_memory(occasion: &str) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let phase = Phase::current().map_or_else(String::new, |phase| {
        let rank = phase.rank().map_or_else(String::new, |rank| format!("rank {rank}, "));
        format!(" in {rank}{}", phase.name())
    });
    format!("out of memory: {occasion}{phase} (at {now} s since 1970)\n{}", alive())
}

/// Whether an error says that a device's memory is out. Devices tell so in words only.
pub fn is_out_of_memory(error: &(dyn Error + 'static)) -> bool {
    let says = |text: String| {
        let text = text.to_lowercase();
        ["out of memory", "outofmemory", "buffertoobig", "out_of_memory"].iter().any(|words| text.contains(words))
    };
    let mut next = Some(error);
    while let Some(error) = next {
        if says(error.to_string()) {
            return true;
        }
        next = error.source();
    }
    false
}
