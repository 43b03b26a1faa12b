//! The results as one self-contained HTML page, without scripts or external resources.
//!
//! Plots and tables never make the page wider than a phone's screen. All colours come from two
//! palettes, light and dark, of which the reader's theme picks one. A test renders the page in a
//! browser.

use std::fmt::Write;

use super::plot::{self, Labelled, SERIES, digits, escape, time};
use super::table;
use super::{Report, answers};
use crate::bench::questions::Question;
use crate::bench::rows::{Published, Row};

const STYLE: &str = include_str!("page.css");

/// The page.
pub fn page(report: &Report) -> String {
    let mut page =
        String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    page.push_str(r#"<meta name="viewport" content="width=device-width, initial-scale=1">"#);
    page.push_str(r#"<meta name="color-scheme" content="light dark">"#);
    // Writing to a string cannot fail, here and below.
    let _ = write!(page, "<title>blockhouse bench</title><style>\n{STYLE}</style></head><body>");
    let _ = write!(
        page,
        "<h1>The gain of the fast ways on this disk</h1><p>{}</p><p>{}</p>",
        escape(&report.origin()),
        escape(&report.environment())
    );
    page.push_str("<ul class=\"answers\">");
    for (name, answer) in answers::of(report) {
        let _ = write!(page, "<li><strong>{name}</strong> {}</li>", escape(&answer));
    }
    page.push_str("</ul>");
    let _ = write!(
        page,
        "<p class=\"muted\">{LEGEND} It took {} s.</p>",
        digits(report.took.time.as_secs_f64())
    );
    for question in Question::All.parts() {
        let rows: Vec<&Row> =
            report.rows.iter().filter(|row| row.question == question.name()).collect();
        if !rows.is_empty() {
            section(&mut page, question, &rows);
        }
    }
    if !report.left_out.is_empty() {
        page.push_str("<h2>Left out</h2><ul>");
        for one in &report.left_out {
            let case = one.case.as_ref().map_or(String::new(), |case| format!(", {case}"));
            let _ = write!(
                page,
                "<li>{}</li>",
                escape(&format!("{}{case}: {}", one.question, one.why))
            );
        }
        page.push_str("</ul>");
    }
    page.push_str("</body></html>\n");
    page
}

const LEGEND: &str = "Ratios are taken within rounds in which all variants take turns: the dot is the \
    median, the line reaches from the lowest round to the highest. Where rounds do not agree on who is \
    faster, or are fewer than five, or the difference is less than 3 %, the dot is hollow: that is noise. Diamonds are figures \
    <em>measured elsewhere</em>, on other machines; the tables say where they are published. The device's requests are those of all \
    programs; a write that only asks for a flush is counted as a write and as a flush.";

fn section(page: &mut String, question: Question, rows: &[&Row]) {
    let name = question.name();
    let _ = write!(page, "<section id=\"{name}\"><h2>{name}</h2><p>{}</p>", question.about());
    ratios(page, rows);
    page.push_str("<div class=\"plots\">");
    for case in rows.chunk_by(|one, next| one.case == next.case) {
        let title = escape(&case[0].case);
        let svg =
            plot::latencies(case, &format!("{name}, {}: latency by percentile", case[0].case));
        let _ = write!(page, "<figure><h3>{title}</h3>{svg}<figcaption>Latency by percentile: ");
        for (row, class) in case.iter().zip(SERIES) {
            let _ = write!(page, "<span class=\"{class}\">━ {}</span>", escape(&row.variant));
        }
        page.push_str("</figcaption></figure>");
    }
    page.push_str("</div>");
    table_of(page, rows);
    page.push_str("</section>");
}

/// The plot of all ratios of a question.
fn ratios(page: &mut String, rows: &[&Row]) {
    let labelled = rows.chunk_by(|one, next| one.case == next.case).flat_map(|case| {
        let several = case.len() > 2;
        case.iter().filter_map(move |row| {
            let variant = row.variant.as_str();
            let label = if several { format!("{}: {variant}", row.case) } else { row.case.clone() };
            Some(Labelled { label, ratio: row.ratio?, published: row.published_ratio, variant })
        })
    });
    let labelled: Vec<_> = labelled.collect();
    let Some(first) = labelled.first() else { return };
    let same = labelled.iter().all(|one| one.variant == first.variant);
    let what = if same { format!("“{}”, times", first.variant) } else { "Times".to_owned() };
    let title = format!("{what} as fast as “{}”", rows[0].variant);
    let svg = plot::ratios(&labelled, &format!("{}: {title}", rows[0].question));
    let title = escape(&title);
    let _ = write!(page, "<figure class=\"wide\"><h3>{title}</h3>{svg}</figure>");
}

const COLUMNS: [&str; 10] = [
    "",
    "IOPS",
    "MiB/s",
    "p50",
    "p99",
    "p99.9",
    "CPU per request",
    "ratio (spread)",
    "device per request",
    "measured elsewhere",
];

fn table_of(page: &mut String, rows: &[&Row]) {
    page.push_str("<div class=\"table\" tabindex=\"0\"><table><thead><tr>");
    COLUMNS.iter().for_each(|name| {
        let _ = write!(page, "<th>{name}</th>");
    });
    page.push_str("</tr></thead><tbody>");
    for case in rows.chunk_by(|one, next| one.case == next.case) {
        let _ = write!(
            page,
            "<tr><th colspan=\"{}\">{}</th></tr>",
            COLUMNS.len(),
            escape(&case[0].case)
        );
        for row in case {
            page.push_str("<tr>");
            for cell in cells(row) {
                let _ = write!(page, "<td>{}</td>", escape(&cell));
            }
            page.push_str("</tr>");
            if let Some(note) = &row.note {
                let _ = write!(
                    page,
                    "<tr><td class=\"note\" colspan=\"{}\"><span>{}</span></td></tr>",
                    COLUMNS.len(),
                    escape(note)
                );
            }
        }
    }
    page.push_str("</tbody></table></div>");
}

fn cells(row: &Row) -> [String; COLUMNS.len()] {
    let latency = |quantile| time(row.latency.value_at_quantile(quantile) as f64);
    [
        row.variant.clone(),
        format!("{:.0}", row.rate),
        digits(row.throughput / f64::from(1 << 20)),
        latency(0.5),
        latency(0.99),
        latency(0.999),
        time(row.processor),
        row.ratio.map_or("baseline".into(), table::ratio),
        table::device(row),
        row.published.map_or(String::new(), |one| published(&one, row.published_ratio)),
    ]
}

fn published(one: &Published, ratio: Option<f64>) -> String {
    format!("elsewhere: {}", table::figure(one, ratio))
}
