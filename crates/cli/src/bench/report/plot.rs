//! SVG plots that the page embeds: ratios with their spread, and latencies.
//!
//! The page's style sheet sets the colours by class, so the plots follow its theme. Scales are
//! logarithmic, because the values differ by factors.

use std::fmt::Write;

use crate::bench::rows::{Ratio, Row};

/// The width of a plot: wide enough for labels that are readable on a phone.
const WIDTH: f64 = 360.0;
/// Space left and right of the plot.
const MARGIN: f64 = 14.0;
/// The classes of the style sheet for lines, one for each variant of a case.
pub const SERIES: [&str; 4] = ["s0", "s1", "s2", "s3"];

/// Escapes a text for HTML and SVG.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Nanoseconds in a readable unit.
pub fn time(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        small if small < 999.5 => (small, "ns"),
        small if small < 999_500.0 => (small / 1e3, "µs"),
        small if small < 999_500_000.0 => (small / 1e6, "ms"),
        large => (large / 1e9, "s"),
    };
    format!("{} {unit}", digits(value))
}

/// At most three significant digits, without trailing zeros after the point.
pub fn digits(value: f64) -> String {
    let places = if value >= 100.0 { 0 } else { usize::from(value < 10.0) + 1 };
    let text = format!("{value:.places$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// A logarithmic scale from a range of values to a range of positions.
struct Scale {
    values: (f64, f64),
    places: (f64, f64),
}

impl Scale {
    /// A scale over all the values, with a margin.
    fn over(values: impl Iterator<Item = f64>, places: (f64, f64)) -> Self {
        let (low, high) = values
            .filter(|value| *value > 0.0)
            .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low <= high { (low, high) } else { (1.0, 1.0) };
        // The margin keeps values off the frame.
        Self { values: (low / 1.15, high * 1.15), places }
    }

    fn position(&self, value: f64) -> f64 {
        let ((low, high), (start, end)) = (self.values, self.places);
        start + (value.clamp(low, high) / low).ln() / (high / low).ln() * (end - start)
    }

    /// The marks of the axis: about four of 1, 2 and 5, or powers of ten.
    fn ticks(&self) -> Vec<f64> {
        let (low, high) = self.values;
        let decades = (high / low).log10();
        let steps: &[f64] = match decades {
            few if few < 0.4 => &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0],
            few if few < 2.2 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let every = if decades > 6.0 { 2 } else { 1 };
        let exponents = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let powers = exponents.filter(|exponent| exponent.rem_euclid(every) == 0);
        let ticks =
            powers.flat_map(|exponent| steps.iter().map(move |step| step * 10f64.powi(exponent)));
        ticks.filter(|tick| (low..=high).contains(tick)).collect()
    }
}

/// A ratio with its labels.
pub struct Labelled<'a> {
    /// The name of the ratio's data.
    pub label: String,
    /// The ratio.
    pub ratio: Ratio,
    /// The ratio of two figures published by others.
    pub published: Option<f64>,
    /// The variant's name.
    pub variant: &'a str,
}

/// The speed of each row relative to its baseline: a dot for the median and a line for the spread,
/// hollow if it is noise, and a diamond for the published figure.
pub fn ratios(rows: &[Labelled<'_>], title: &str) -> String {
    let values = rows
        .iter()
        .flat_map(|one| [one.ratio.low, one.ratio.high, 1.0, one.published.unwrap_or(1.0)]);
    let scale = Scale::over(values, (MARGIN, WIDTH - MARGIN));
    let bottom = 8.0 + 38.0 * rows.len() as f64;
    let mut svg = begin(bottom + 42.0, title);
    let axis = "times as fast as the baseline, logarithmic";
    text(&mut svg, "muted middle", (WIDTH / 2.0, bottom + 34.0), axis);
    for tick in scale.ticks() {
        text(&mut svg, "muted middle", (scale.position(tick), bottom + 16.0), &digits(tick));
    }
    for (index, Labelled { label, ratio, published, .. }) in rows.iter().enumerate() {
        let y = 20.0 + 38.0 * index as f64;
        text(&mut svg, "label", (MARGIN, y), label);
        rulers(&mut svg, &scale, (y + 5.0, y + 19.0));
        let (y, noise) = (y + 12.0, if ratio.is_noise() { "noise" } else { "clear" });
        line(
            &mut svg,
            &format!("spread {noise}"),
            (scale.position(ratio.low), y),
            (scale.position(ratio.high), y),
        );
        let x = scale.position(ratio.median);
        // Writing to a string cannot fail.
        let _ = write!(svg, r#"<circle class="dot {noise}" cx="{x:.1}" cy="{y:.1}" r="5"/>"#);
        if let Some(published) = *published {
            let x = scale.position(published);
            let _ =
                write!(svg, r#"<path class="published" d="M{x:.1} {:.1}l6 6-6 6-6-6z"/>"#, y - 6.0);
        }
    }
    svg.push_str("</svg>");
    svg
}

/// The lines of the ticks and of the baseline, around the dots only: they do not cross the labels.
fn rulers(svg: &mut String, scale: &Scale, (top, bottom): (f64, f64)) {
    let baseline = [("one", 1.0)];
    let ticks = scale.ticks().into_iter().map(|tick| ("grid", tick));
    for (class, value) in ticks.chain(baseline) {
        let x = scale.position(value);
        line(svg, class, (x, top), (x, bottom));
    }
}

/// The percentiles on the axis. Each nine has the same width.
const PERCENTILES: [(f64, &str); 5] =
    [(0.0, "0"), (0.5, "50"), (0.9, "90"), (0.99, "99"), (0.999, "99.9 %")];

/// The latencies of the variants of a case, by percentile.
pub fn latencies(rows: &[&Row], title: &str) -> String {
    let height = 224.0;
    let (top, bottom, left, right) = (26.0, height - 42.0, 56.0, WIDTH - 26.0);
    let at = |row: &Row, quantile: f64| row.latency.value_at_quantile(quantile) as f64;
    let ends = rows.iter().flat_map(|row| [at(row, 0.0), at(row, 0.999)]);
    let scale = Scale::over(ends, (bottom, top));
    let mut svg = begin(height, title);
    text(&mut svg, "muted", (4.0, 14.0), "latency, logarithmic");
    let axis = "percentile of the requests";
    text(&mut svg, "muted middle", ((left + right) / 2.0, height - 6.0), axis);
    for tick in scale.ticks() {
        let y = scale.position(tick);
        line(&mut svg, "grid", (left, y), (right, y));
        text(&mut svg, "muted end", (left - 6.0, y + 4.0), &time(tick));
    }
    let x = |quantile: f64| left + nines(quantile) / nines(0.999) * (right - left);
    for (quantile, name) in PERCENTILES {
        line(&mut svg, "grid", (x(quantile), top), (x(quantile), bottom));
        text(&mut svg, "muted middle", (x(quantile), bottom + 16.0), name);
    }
    for (row, class) in rows.iter().zip(SERIES) {
        let _ = write!(svg, r#"<polyline class="line {class}" points=""#);
        for step in 0..=60 {
            let quantile = 1.0 - 10f64.powf(-3.0 * f64::from(step) / 60.0);
            let (x, y) = (x(quantile), scale.position(at(row, quantile)));
            let _ = write!(svg, "{x:.1},{y:.1} ");
        }
        svg.push_str(r#""/>"#);
    }
    svg.push_str("</svg>");
    svg
}

fn nines(quantile: f64) -> f64 {
    -(1.0 - quantile).log10()
}

fn begin(height: f64, title: &str) -> String {
    let title = escape(title);
    format!(
        r#"<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}"><title>{title}</title>"#
    )
}

fn line(svg: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    // Writing to a string cannot fail.
    let _ = write!(
        svg,
        r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
    );
}

fn text(svg: &mut String, class: &str, (x, y): (f64, f64), text: &str) {
    let text = escape(text);
    let _ = write!(svg, r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{text}</text>"#);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_logarithmic_and_its_ticks_are_on_it() {
        let scale = Scale::over([1.0, 100.0].into_iter(), (0.0, 200.0));
        assert!((scale.position(10.0) - 100.0).abs() < 1e-9);
        assert_eq!(scale.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        let wide = Scale::over([0.5, 40_000.0].into_iter(), (0.0, 1.0));
        assert_eq!(wide.ticks(), [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        let narrow = Scale::over([0.97, 1.04].into_iter(), (0.0, 1.0));
        assert!(narrow.ticks().contains(&1.0));
    }

    #[test]
    fn nothing_and_one_value_have_a_scale_too() {
        for values in [vec![], vec![0.0], vec![7.0]] {
            let scale = Scale::over(values.into_iter(), (0.0, 10.0));
            assert!(scale.position(7.0).is_finite());
        }
    }

    #[test]
    fn times_have_the_unit_that_fits() {
        let shown = [12.0, 97_200.0, 999_400.0, 4.5e6, 1.3e9].map(time);
        assert_eq!(shown, ["12 ns", "97.2 µs", "999 µs", "4.5 ms", "1.3 s"]);
    }

    #[test]
    fn what_a_name_holds_is_text() {
        assert_eq!(escape("<b a=\"&\">"), "&lt;b a=&quot;&amp;&quot;&gt;");
    }
}
