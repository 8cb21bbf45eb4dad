//! The loss curve as SVG.

use std::path::Path;

use plotters::prelude::*;

use crate::error::{Error, Result};
use crate::metrics::StepMetrics;
use crate::out;

/// Draws loss against step.
///
/// # Errors
///
/// [`Error::Write`].
pub(crate) fn loss_curve(path: &Path, steps: &[StepMetrics]) -> Result<()> {
    if steps.is_empty() {
        return Ok(());
    }
    let mut text = String::new();
    draw(&mut text, steps)
        .map_err(|error| Error::Write { path: path.to_owned(), source: std::io::Error::other(error.to_string()) })?;
    out::write(path, &text)
}

fn draw(text: &mut String, steps: &[StepMetrics]) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let points: Vec<(f64, f64)> = steps.iter().map(|step| (step.step as f64, step.loss)).collect();
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for (_, loss) in &points {
        (low, high) = (low.min(*loss), high.max(*loss));
    }
    // A flat curve has a height, too.
    let margin = (0.05 * (high - low)).max(0.01 * high.abs()).max(1e-3);
    let last = points.len().max(2) as f64;

    let area = SVGBackend::with_string(text, (800, 450)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(1.0..last, (low - margin)..(high + margin))?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("loss (nats a token)")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.3}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    chart.draw_series(LineSeries::new(points.iter().copied(), BLUE.stroke_width(2)))?;
    if let [only] = points[..] {
        chart.draw_series([Circle::new(only, 3, BLUE.filled())])?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(1)]
    #[case(2)]
    #[case(50)]
    fn a_curve_has_every_step(#[case] count: usize) {
        let steps: Vec<StepMetrics> = (1..=count)
            .map(|step| StepMetrics {
                step,
                loss: 5.0 / step as f64,
                grad_norm: 1.0,
                lr: 1.0,
                tokens_per_s: 1.0,
                peak_bytes: 0,
            })
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        loss_curve(&path, &steps).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("loss (nats a token)"));
        let line = svg.lines().rfind(|line| line.contains("<polyline") && line.contains("#0000FF"));
        let points = line.map_or(0, |line| line.split("points=\"").nth(1).unwrap().trim().split(' ').count() - 1);
        assert!(points >= count || count == 1 && svg.contains("<circle"), "{points} points: {svg}");
    }
}
