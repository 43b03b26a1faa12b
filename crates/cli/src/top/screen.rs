//! The drawing of the live view.

use std::collections::VecDeque;

use ratatui::Frame;
use ratatui::layout::{Constraint, Flex, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{
    Block, Cell, Clear, Paragraph, Row as TableRow, Sparkline, Table, TableState, Wrap,
};

use super::app::App;
use super::rates::{Detail, Row};
use super::table;

/// On a screen with fewer columns, the detail tables are one below the other.
const MIN_BESIDE: u16 = 100;
/// Two tables one below the other need this many lines.
const MIN_BELOW: u16 = 12;
/// The maximum number of lines for the error of a failed reading.
const MAX_FAILURE_LINES: u16 = 4;

/// Draws the whole view.
pub fn draw(frame: &mut Frame<'_>, app: &App) {
    let rows = app.rows.len() as u16 + 1;
    let [head, disks, lines, details, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(rows.min(frame.area().height / 2).max(2)),
        Constraint::Length(5),
        Constraint::Min(0),
        Constraint::Length(foot_lines(app, frame.area().width)),
    ])
    .areas(frame.area());
    draw_head(frame, app, head);
    draw_disks(frame, app, disks);
    if let Some((_, row)) = app.selected_row() {
        draw_lines(frame, app, row, lines);
        draw_details(frame, row, details);
    }
    draw_foot(frame, app, foot);
    if app.shows_help {
        draw_help(frame);
    }
}

/// The first of `texts` that fits in `width` columns, or the last.
fn first_that_fits(texts: impl IntoIterator<Item = String>, width: u16) -> String {
    let mut last = String::new();
    for text in texts {
        last = text;
        if last.chars().count() <= usize::from(width) {
            break;
        }
    }
    last
}

fn draw_head(frame: &mut Frame<'_>, app: &App, area: Rect) {
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
            Style::new().add_modifier(Modifier::BOLD),
        ),
        Some(age) => {
            let age = age.as_secs();
            (
                [
                    format!("OLD: {server} has not answered for {age} s; before: {numbers}"),
                    format!("OLD: no answer for {age} s; before: {numbers}"),
                    format!("OLD: no answer for {age} s"),
                ],
                Style::new().fg(Color::Red).add_modifier(Modifier::BOLD | Modifier::REVERSED),
            )
        }
    };
    let text = first_that_fits(texts, area.width);
    frame.render_widget(Paragraph::new(text).style(style), area);
}

fn draw_disks(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let mut lines = vec![table::HEADINGS.map(str::to_owned)];
    lines.extend(app.rows.iter().map(table::cells));
    let columns = table::fit(&lines, &table::FIRST_TO_GO, area.width.into());
    let is_old = app.failure.is_some();
    let line = |(row, cells): (&Row, &[String; 12])| {
        let style = match (row.errors, table::wait(row)) {
            (0, None) => Style::new(),
            (0, Some(_)) => Style::new().fg(Color::Yellow),
            _ => Style::new().fg(Color::Red),
        };
        let style = if is_old { style.add_modifier(Modifier::DIM) } else { style };
        TableRow::new(aligned(cells, &columns)).style(style)
    };
    let header = TableRow::new(aligned(&lines[0], &columns));
    let disks = Table::new(app.rows.iter().zip(&lines[1..]).map(line), widths(&columns))
        .header(header.style(Modifier::REVERSED))
        .row_highlight_style(Style::new().bg(Color::Blue).fg(Color::White));
    let mut state = TableState::new().with_selected(app.selected_row().map(|(index, _)| index));
    frame.render_stateful_widget(disks, area, &mut state);
}

fn widths(columns: &[(usize, usize)]) -> impl Iterator<Item = Constraint> {
    columns.iter().map(|(_, width)| Constraint::Length(*width as u16))
}

/// The cells of these columns: the name to the left, numbers to the right.
fn aligned<const N: usize>(
    cells: &[String; N],
    columns: &[(usize, usize)],
) -> impl Iterator<Item = Cell<'static>> {
    columns.iter().map(|(column, width)| match column {
        0 => Cell::new(table::shorten(&cells[0], *width)),
        _ => Cell::new(Line::from(cells[*column].clone()).right_aligned()),
    })
}

fn draw_lines(frame: &mut Frame<'_>, app: &App, row: &Row, area: Rect) {
    let Some(history) = app.history.get(&row.name) else { return };
    let areas: [Rect; 3] = Layout::horizontal([Constraint::Fill(1); 3]).areas(area);
    let last = |list: &VecDeque<u64>| list.back().copied().unwrap_or(0);
    for (list, title, area) in [
        (
            &history.rates,
            format!("requests/s {}", table::count(last(&history.rates) as f64)),
            areas[0],
        ),
        (&history.p50, format!("p50 {}", table::time(row.all.p50)), areas[1]),
        (&history.p99, format!("p99 {}", table::time(row.all.p99)), areas[2]),
    ] {
        let block = Block::bordered().title(format!(" {title} "));
        let width = block.inner(area).width as usize;
        let latest = list.iter().skip(list.len().saturating_sub(width)).copied();
        let line = Sparkline::default().data(latest).style(Color::Green).block(block);
        frame.render_widget(line, area);
    }
}

fn draw_details(frame: &mut Frame<'_>, row: &Row, area: Rect) {
    let both = [Constraint::Fill(1); 2];
    let areas: [Rect; 2] = match area.width >= MIN_BESIDE {
        true => Layout::horizontal(both).areas(area),
        false if area.height >= MIN_BELOW => Layout::vertical(both).areas(area),
        false => [area, Rect::ZERO],
    };
    let wait = table::wait(row).map_or_else(String::new, |wait| format!("{wait} "));
    for (title, details, area) in [
        (format!(" {} requests {wait}", row.name.escape_debug()), &row.requests, areas[0]),
        (" where they spend their time ".into(), &row.stages, areas[1]),
    ] {
        let block = Block::bordered().title(title);
        let mut lines = vec![["", "/S", "B/S", "P50", "P99", "ERR"].map(str::to_owned)];
        lines.extend(details.iter().map(detail_cells));
        let inner = block.inner(area).width;
        let mut columns = table::fit(&lines, &DETAILS_FIRST_TO_GO, inner.into());
        let taken = columns.iter().map(|(_, width)| width + 1).sum::<usize>() - 1;
        columns[0].1 += usize::from(inner).saturating_sub(taken);
        let rows = lines[1..].iter().map(|cells| TableRow::new(aligned(cells, &columns)));
        let list = Table::new(rows, widths(&columns))
            .header(TableRow::new(aligned(&lines[0], &columns)).style(Modifier::DIM))
            .block(block);
        frame.render_widget(list, area);
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

/// An error of several lines gets one more, because wrapping at words leaves part of each line
/// empty.
fn foot_lines(app: &App, width: u16) -> u16 {
    let Some(failure) = &app.failure else { return 1 };
    let lines = failure.chars().count() as u16 / width.max(1) + 1;
    (if lines > 1 { lines + 1 } else { 1 }).min(MAX_FAILURE_LINES)
}

fn draw_foot(frame: &mut Frame<'_>, app: &App, area: Rect) {
    if let Some(failure) = &app.failure {
        let text = Paragraph::new(failure.clone()).wrap(Wrap { trim: true });
        return frame.render_widget(text.style(Style::new().fg(Color::Red)), area);
    }
    let state = if app.is_paused { "PAUSED  " } else { "" };
    let keys = format!("{state}q quit  ↑↓ disk  s sort  p pause  h help");
    let sort = app.sort_by.as_str();
    let order = format!("{keys}  (sorted by {sort}, every {:?})", app.interval);
    frame.render_widget(Paragraph::new(first_that_fits([order, keys], area.width)), area);
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

fn draw_help(frame: &mut Frame<'_>) {
    let (width, height) = (58, HELP.lines().count() as u16 + 2);
    let [area] =
        Layout::horizontal([Constraint::Max(width)]).flex(Flex::Center).areas(frame.area());
    let [area] = Layout::vertical([Constraint::Max(height)]).flex(Flex::Center).areas(area);
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(HELP).block(Block::bordered().title(" keys ")), area);
}

#[cfg(test)]
mod tests;
