//! The picture of a sweep: what the width of a stage buys in memory and costs in throughput, on two axes.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

/// One width.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Query heads a stage, U.
    pub heads: usize,
    pub tokens_per_s: f64,
    pub peak_mib: f64,
}

const MEMORY: RGBColor = RGBColor(0xD5, 0x5E, 0x00);
const SPEED: RGBColor = RGBColor(0x00, 0x72, 0xB2);

/// Writes the sweep to `path`; `ulysses` (U = all heads at once) as dashed lines.
pub fn draw(path: &Path, title: &str, points: &[Point], ulysses: Point) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let text = svg(title, points, ulysses).map_err(|error| anyhow!("{}: {error}", path.display()))?;
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

fn svg(title: &str, points: &[Point], ulysses: Point) -> Result<String, Box<dyn std::error::Error>> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (760, 420)).into_drawing_area();
        root.fill(&WHITE)?;
        let all = || points.iter().chain([&ulysses]);
        let top = |value: fn(&Point) -> f64| 1.15 * all().map(value).fold(0.0, f64::max);
        let last = all().map(|point| point.heads).max().unwrap_or(1);
        let first = points.iter().map(|point| point.heads).min().unwrap_or(1);
        let range = (first as f64 * 0.9..last as f64 * 1.1).log_scale().base(2.0);
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 15))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .right_y_label_area_size(60)
            .build_cartesian_2d(range.clone(), 0.0..top(|point| point.peak_mib))?
            .set_secondary_coord(range, 0.0..top(|point| point.tokens_per_s));
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(WHITE)
            .x_desc("query heads a stage, U")
            .y_desc("peak memory of attention, MiB")
            .axis_desc_style(("sans-serif", 13))
            .x_label_formatter(&|heads| format!("{heads:.0}"))
            .draw()?;
        chart.configure_secondary_axes().y_desc("tokens/s").axis_desc_style(("sans-serif", 13)).draw()?;
        let line = |value: fn(&Point) -> f64| points.iter().map(move |point| (point.heads as f64, value(point)));
        let level = |value: f64| [(first as f64 * 0.9, value), (last as f64 * 1.1, value)];
        chart
            .draw_series(LineSeries::new(line(|point| point.peak_mib), MEMORY.stroke_width(2)).point_size(4))?
            .label("U-Pipe, memory")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], MEMORY.stroke_width(2)));
        chart
            .draw_series(DashedLineSeries::new(level(ulysses.peak_mib), 6, 5, MEMORY.into()))?
            .label("Ulysses, memory")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 8, y)], MEMORY));
        chart
            .draw_secondary_series(
                LineSeries::new(line(|point| point.tokens_per_s), SPEED.stroke_width(2)).point_size(4),
            )?
            .label("U-Pipe, tokens/s")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], SPEED.stroke_width(2)));
        chart
            .draw_secondary_series(DashedLineSeries::new(level(ulysses.tokens_per_s), 6, 5, SPEED.into()))?
            .label("Ulysses, tokens/s")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 8, y)], SPEED));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 12))
            .draw()?;
        root.present()?;
    }
    Ok(text)
}
