//! A line chart on two logarithmic axes, as SVG text. It has its own background: pages may be dark.

use std::fmt::Write;

/// One line of the chart; coordinates are positive.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
/// The plot's frame: left, top, right, bottom.
const FRAME: [f64; 4] = [64.0, 24.0, 560.0, 370.0];
/// Told apart also by those who do not see red and green as different (Okabe and Ito).
const COLORS: [&str; 7] = ["#000000", "#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7"];

/// The chart of `lines`; each is named at its right end.
pub fn picture(x_title: &str, y_title: &str, lines: &[Series]) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let x_range = doublings(points().map(|point| point.0));
    let y_range = doublings(points().map(|point| point.1));
    let [left, top, right, bottom] = FRAME;
    let at = |value: f64, [low, high]: [i32; 2], from: f64, to: f64| {
        from + (value.log2() - f64::from(low)) / f64::from((high - low).max(1)) * (to - from)
    };
    let x = |value| at(value, x_range, left, right);
    let y = |value| at(value, y_range, bottom, top);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    let mut put = |line: String| writeln!(svg, "{line}").expect("text grows");
    for power in x_range[0]..=x_range[1] {
        let (value, at) = (f64::from(power).exp2(), x(f64::from(power).exp2()));
        put(format!("<line x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#e4e4e4\"/>"));
        put(format!("<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{value}</text>", bottom + 16.0));
    }
    for power in y_range[0]..=y_range[1] {
        let (value, at) = (f64::from(power).exp2(), y(f64::from(power).exp2()));
        put(format!("<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#e4e4e4\"/>"));
        put(format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>", left - 6.0, at + 4.0));
    }
    put(format!(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{x_title}</text>",
        (left + right) / 2.0,
        HEIGHT - 12.0
    ));
    put(format!("<text x=\"8\" y=\"14\">{y_title}</text>"));

    let names = apart(lines.iter().map(|line| line.points.last().map_or(bottom, |point| y(point.1))).collect());
    for (index, (line, name_y)) in lines.iter().zip(names).enumerate() {
        let color = COLORS[index % COLORS.len()];
        let Some(&(last_x, last_y)) = line.points.last() else { continue };
        let path: Vec<String> =
            line.points.iter().map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1))).collect();
        put(format!("<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>", path.join(" ")));
        for point in &line.points {
            put(format!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{color}\"/>", x(point.0), y(point.1)));
        }
        // A line that ends early is named where it ends.
        let (text_x, text_y) = if x(last_x) < right { (x(last_x) + 8.0, y(last_y)) } else { (right + 8.0, name_y) };
        put(format!("<text x=\"{text_x:.1}\" y=\"{:.1}\" fill=\"{color}\">{}</text>", text_y + 4.0, line.name));
    }
    svg + "</svg>\n"
}

/// The powers of two around all values.
fn doublings(values: impl Iterator<Item = f64>) -> [i32; 2] {
    let (low, high) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), x| (low.min(x), high.max(x)));
    [low.min(high).log2().floor() as i32, high.log2().ceil() as i32]
}

/// Moves names so that none covers another, in the order of their heights.
fn apart(heights: Vec<f64>) -> Vec<f64> {
    const LINE: f64 = 15.0;
    let mut order: Vec<usize> = (0..heights.len()).collect();
    order.sort_by(|a, b| heights[*a].total_cmp(&heights[*b]));
    let mut moved = heights;
    for pair in order.windows(2) {
        moved[pair[1]] = moved[pair[1]].max(moved[pair[0]] + LINE);
    }
    moved
}
