//! The drawing of the live view.

use std::collections::VecDeque;

use crossterm::style::{ContentStyle, Stylize};
use unicode_width::UnicodeWidthStr;

use super::app::App;
use super::canvas::{Area, Canvas, wrap};
use super::rates::{Detail, Row};
use super::table;

/// Minimum number of columns for the detail tables side by side.
const MIN_BESIDE: usize = 100;
/// Minimum number of lines for one below the other; with fewer, only the first table is drawn.
const MIN_BELOW: usize = 12;
/// The maximum number of lines for the error of a failed reading.
const MAX_FAILURE_LINES: usize = 4;

/// Draws the whole view.
pub fn draw(canvas: &mut Canvas, app: &App) {
    let whole = canvas.area();
    let mut area = whole;
    let head = area.take_lines(1);
    let foot = foot(app, whole.width);
    let mut left = area.take_lines(area.height.saturating_sub(foot.len()));
    draw_head(canvas, app, head);
    draw_disks(canvas, app, left.take_lines((app.rows.len() + 1).min(whole.height / 2).max(2)));
    if let Some((_, row)) = app.selected_row() {
        draw_bars(canvas, app, row, left.take_lines(5));
        draw_details(canvas, row, left);
    }
    let style = if app.failure.is_some() { plain().dark_red() } else { plain() };
    for (number, line) in foot.iter().enumerate() {
        canvas.text(area, number, line, style);
    }
    if app.shows_help {
        draw_help(canvas);
    }
}

fn plain() -> ContentStyle {
    ContentStyle::new()
}

/// The first of `texts` that fits in `width` columns, or the last if none fits.
fn first_that_fits(texts: impl IntoIterator<Item = String>, width: usize) -> String {
    let mut last = String::new();
    for text in texts {
        last = text;
        if last.width() <= width {
            break;
        }
    }
    last
}

fn draw_head(canvas: &mut Canvas, app: &App, area: Area) {
    let sum = |number: fn(&Row) -> f64| app.rows.iter().map(number).sum::<f64>();
    let numbers = format!(
        "{} disks, {} requests/s, {}B/s, {} clients",
        app.rows.len(),
        table::count(sum(|row| row.all.rate)),
        table::bytes(sum(|row| row.reads.bytes + row.writes.bytes)),
        sum(|row| row.clients as f64),
    );
    let (version, server) = (&app.snapshot.version, &app.server);
    let (texts, style) = match app.age() {
        None => (
            [
                format!("blockhouse {version} at {server}: {numbers}"),
                format!("{server}: {numbers}"),
                numbers,
            ],
            plain().bold(),
        ),
        Some(age) => {
            let age = age.as_secs();
            (
                [
                    format!("OLD: {server} has not answered for {age} s; before: {numbers}"),
                    format!("OLD: no answer for {age} s; before: {numbers}"),
                    format!("OLD: no answer for {age} s"),
                ],
                plain().dark_red().bold().reverse(),
            )
        }
    };
    canvas.text(area, 0, &first_that_fits(texts, area.width), style);
}

fn draw_disks(canvas: &mut Canvas, app: &App, area: Area) {
    let mut lines = vec![table::HEADINGS.map(str::to_owned)];
    lines.extend(app.rows.iter().map(table::cells));
    let columns = table::fit(&lines, &table::FIRST_TO_GO, area.width);
    canvas.text(area, 0, &line_of(&lines[0], &columns), plain().reverse());
    let selected = app.selected_row().map_or(0, |(index, _)| index);
    let room = area.height.saturating_sub(1);
    let above = (selected + 1).saturating_sub(room);
    let disks = app.rows.iter().zip(&lines[1..]).enumerate().skip(above).take(room);
    for (line, (index, (row, cells))) in disks.enumerate() {
        let style = match (row.errors, table::wait(row)) {
            _ if index == selected => plain().white().on_dark_blue(),
            (0, None) => plain(),
            (0, Some(_)) => plain().dark_yellow(),
            _ => plain().dark_red(),
        };
        let style = if app.failure.is_some() { style.dim() } else { style };
        canvas.text(area, line + 1, &line_of(cells, &columns), style);
    }
}

/// A line with these columns: the name left-aligned, the numbers right-aligned.
fn line_of<const N: usize>(cells: &[String; N], columns: &[(usize, usize)]) -> String {
    let cell = |&(column, width): &(usize, usize)| match column {
        0 => table::padded(&table::shorten(&cells[0], width), width),
        _ => format!("{:>width$}", cells[column]),
    };
    columns.iter().map(cell).collect::<Vec<_>>().join(" ")
}

fn draw_bars(canvas: &mut Canvas, app: &App, row: &Row, area: Area) {
    let Some(history) = app.history.get(&row.name) else { return };
    let last = |list: &VecDeque<u64>| list.back().copied().unwrap_or(0);
    let rate = format!(" requests/s {} ", table::count(last(&history.rates) as f64));
    let lists = [
        (&history.rates, rate),
        (&history.p50, format!(" p50 {} ", table::time(row.all.p50))),
        (&history.p99, format!(" p99 {} ", table::time(row.all.p99))),
    ];
    for ((list, title), area) in lists.into_iter().zip(area.columns::<3>()) {
        let inner = canvas.bordered(area, &title);
        canvas.bars(inner, list);
    }
}

fn draw_details(canvas: &mut Canvas, row: &Row, mut area: Area) {
    let areas = match area.width >= MIN_BESIDE {
        true => area.columns(),
        false if area.height >= MIN_BELOW => [area.take_lines(area.height / 2), area],
        false => [area, Area::default()],
    };
    let wait = table::wait(row).map_or_else(String::new, |wait| format!("{wait} "));
    for (title, details, area) in [
        (format!(" {} requests {wait}", row.name.escape_debug()), &row.requests, areas[0]),
        (" where they spend their time ".into(), &row.stages, areas[1]),
    ] {
        let inner = canvas.bordered(area, &title);
        let mut lines = vec![["", "/S", "B/S", "P50", "P99", "ERR"].map(str::to_owned)];
        lines.extend(details.iter().map(detail_cells));
        let mut columns = table::fit(&lines, &DETAILS_FIRST_TO_GO, inner.width);
        let taken = columns.iter().map(|(_, width)| width + 1).sum::<usize>() - 1;
        columns[0].1 += inner.width.saturating_sub(taken);
        for (number, line) in lines.iter().enumerate() {
            let style = if number == 0 { plain().dim() } else { plain() };
            canvas.text(inner, number, &line_of(line, &columns), style);
        }
    }
}

/// The columns of the detail tables, in the order in which a narrow screen drops them.
const DETAILS_FIRST_TO_GO: [usize; 5] = [2, 3, 5, 1, 4];

fn detail_cells(detail: &Detail) -> [String; 6] {
    let activity = detail.activity;
    [
        format!("{} {}", detail.origin, detail.operation),
        table::count(activity.rate),
        table::bytes(activity.bytes),
        table::time(activity.p50),
        table::time(activity.p99),
        detail.errors.to_string(),
    ]
}

/// The last lines: the error of a failed reading, or the keys.
fn foot(app: &App, width: usize) -> Vec<String> {
    if let Some(failure) = &app.failure {
        let mut lines = wrap(failure, width);
        lines.truncate(MAX_FAILURE_LINES);
        return lines;
    }
    let state = if app.is_paused { "PAUSED  " } else { "" };
    let keys = format!("{state}q quit  ↑↓ disk  s sort  p pause  h help");
    let sort = app.sort_by.as_str();
    let order = format!("{keys}  (sorted by {sort}, every {:?})", app.interval);
    vec![first_that_fits([order, keys], width)]
}

const HELP: &str = "\
q, Esc, Ctrl-C  quit
up, down, j, k  select a disk (before: the busiest one)
PgUp, PgDn      ten disks further
Home, End       the first, the last
s               sort by the next column
p, space        pause, and go on
h, ?            this page

P50 and P99 are of the requests that ended in the
last interval. ERRORS counts since the server's start.";

fn draw_help(canvas: &mut Canvas) {
    let area = canvas.area().center(58, HELP.lines().count() + 2);
    let inner = canvas.bordered(area, " keys ");
    for (number, line) in HELP.lines().enumerate() {
        canvas.text(inner, number, line, plain());
    }
}

#[cfg(test)]
mod tests;
