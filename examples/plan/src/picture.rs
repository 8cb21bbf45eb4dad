//! The ladder as a bar chart, SVG text: how long a sequence each technique allows.

use burn_upipe::plan::{Bytes, Plan, Tokens};
use plotters::prelude::*;

use crate::answer::Step;

const WIDTH: u32 = 860;
const ROW: i32 = 34;
const TOP: i32 = 68;
/// Where bars begin, and where the longest ends.
const BARS: [i32; 2] = [140, 600];
const TEXT: i32 = 14;

/// A bar a rung, as long as its longest sequence; beside it the numbers. It has its own background: pages may be dark.
///
/// # Errors
///
/// In words, if it cannot be drawn.
pub(crate) fn chart(plan: &Plan, rungs: &[Step]) -> Result<String, String> {
    let mut text = String::new();
    draw(&mut text, plan, rungs).map_err(|error| error.to_string())?;
    Ok(text)
}

fn draw(svg: &mut String, plan: &Plan, rungs: &[Step]) -> Result<(), Box<dyn std::error::Error>> {
    let height = TOP + ROW * rungs.len() as i32 + 16;
    let most = rungs.iter().map(|rung| rung.max_seq_len).max().unwrap_or(0).max(1) as f64;
    let area = SVGBackend::with_string(svg, (WIDTH, height as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    // Told from white and black also by those who do not see colours.
    let (bar, faint) = (RGBColor(0, 114, 178), RGBColor(90, 90, 90));
    let label = |text: String, at: (i32, i32), size: i32, color: &RGBColor| {
        area.draw(&Text::new(text, at, ("sans-serif", size).into_font().color(color)))
    };
    let title =
        format!("{}: the longest sequence that fits on {} x {}, in tokens", plan.model, plan.devices, plan.device);
    label(title, (16, 14), TEXT + 2, &BLACK)?;
    let memory = Bytes(plan.device_bytes_limit);
    let legend = format!("right: device memory of a rank at {} tokens, of {memory}", Tokens(plan.seq_len));
    label(legend, (16, 38), TEXT, &faint)?;
    let [left, right] = BARS;
    for (index, rung) in rungs.iter().enumerate() {
        let y = TOP + ROW * index as i32;
        let mut length = (rung.max_seq_len as f64 / most * f64::from(right - left)) as i32;
        let mut longest = Tokens(rung.max_seq_len).to_string();
        if rung.max_seq_len == 0 {
            longest = "none".to_owned();
        } else {
            // One that fits is seen, however short.
            length = length.max(1);
            area.draw(&Rectangle::new([(left, y), (left + length, y + 22)], bar.filled()))?;
        }
        label(rung.technique.to_owned(), (16, y + 5), TEXT, &BLACK)?;
        label(longest, (left + length + 8, y + 5), TEXT, &BLACK)?;
        let verdict = if rung.fits { "" } else { ": too much" };
        label(format!("{}{verdict}", Bytes(rung.device_bytes_peak)), (right + 80, y + 5), TEXT, &faint)?;
    }
    area.present()?;
    drop(area);
    Ok(())
}
