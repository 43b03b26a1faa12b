//! What the live view looks like.

use std::collections::VecDeque;

use ratatui::Frame;
use ratatui::layout::{Constraint, Flex, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{
    Block, Cell, Clear, Paragraph, Row as TableRow, Sparkline, Table, TableState,
};

use super::app::App;
use super::rates::{Detail, Row};
use super::table;

/// Draws all of it.
pub fn draw(frame: &mut Frame<'_>, app: &App) {
    let rows = app.rows.len() as u16 + 1;
    let [head, disks, lines, details, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(rows.min(frame.area().height / 2).max(2)),
        Constraint::Length(5),
        Constraint::Min(0),
        Constraint::Length(1),
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

fn draw_head(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let sum = |number: fn(&Row) -> f64| app.rows.iter().map(number).sum::<f64>();
    let text = format!(
        "blockhouse {} at {}: {} disks, {} requests/s, {}B/s, {} clients",
        app.snapshot.version,
        app.server,
        app.rows.len(),
        table::count(sum(|row| row.all.rate)),
        table::bytes(sum(|row| row.reads.bytes + row.writes.bytes)),
        sum(|row| row.clients as f64),
    );
    frame.render_widget(Paragraph::new(text).style(Modifier::BOLD), area);
}

fn draw_disks(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let name = app.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).clamp(8, 32);
    let widths = table::HEADINGS.iter().enumerate().map(|(index, heading)| match index {
        0 => Constraint::Length(name as u16),
        _ => Constraint::Length((heading.len() as u16).max(7)),
    });
    let line = |row: &Row| {
        let style = if row.errors > 0 { Style::new().fg(Color::Red) } else { Style::new() };
        TableRow::new(aligned(table::cells(row))).style(style)
    };
    let header = TableRow::new(aligned(table::HEADINGS.map(str::to_owned)));
    let disks = Table::new(app.rows.iter().map(line), widths)
        .header(header.style(Modifier::REVERSED))
        .row_highlight_style(Style::new().bg(Color::Blue).fg(Color::White));
    let mut state = TableState::new().with_selected(app.selected_row().map(|(index, _)| index));
    frame.render_stateful_widget(disks, area, &mut state);
}

/// The name to the left, numbers to the right.
fn aligned<const N: usize>(cells: [String; N]) -> impl Iterator<Item = Cell<'static>> {
    cells.into_iter().enumerate().map(|(index, cell)| match index {
        0 => Cell::new(cell),
        _ => Cell::new(Line::from(cell).right_aligned()),
    })
}

fn draw_lines(frame: &mut Frame<'_>, app: &App, row: &Row, area: Rect) {
    let Some(history) = app.history.get(&row.name) else { return };
    let areas: [Rect; 3] = Layout::horizontal([Constraint::Fill(1); 3]).areas(area);
    let last = |list: &VecDeque<u64>| list.back().copied().unwrap_or(0);
    for (list, title, area) in [
        (&history.rates, format!("requests/s {}", last(&history.rates)), areas[0]),
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
    let areas: [Rect; 2] = Layout::horizontal([Constraint::Fill(1); 2]).areas(area);
    for (title, details, area) in [
        (format!(" {} requests ", row.name.escape_debug()), &row.requests, areas[0]),
        (" where they spend their time ".into(), &row.stages, areas[1]),
    ] {
        let line = |detail: &Detail| {
            let activity = detail.activity;
            let what = format!("{} {}", detail.origin, detail.operation);
            let numbers = [
                table::count(activity.rate),
                table::bytes(activity.bytes),
                table::time(activity.p50),
                table::time(activity.p99),
                detail.errors.to_string(),
            ];
            let [rate, bytes, p50, p99, errors] = numbers;
            TableRow::new(aligned([what, rate, bytes, p50, p99, errors]))
        };
        let headings = ["", "/S", "B/S", "P50", "P99", "ERR"].map(str::to_owned);
        let numbers = [6, 6, 6, 6, 4].map(Constraint::Length);
        let widths = [Constraint::Fill(1)].into_iter().chain(numbers);
        let list = Table::new(details.iter().map(line), widths)
            .header(TableRow::new(aligned(headings)).style(Modifier::DIM))
            .block(Block::bordered().title(title));
        frame.render_widget(list, area);
    }
}

fn draw_foot(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let (text, style) = match &app.failure {
        Some(failure) => (failure.clone(), Style::new().fg(Color::Red)),
        None => {
            let state = if app.is_paused { "PAUSED  " } else { "" };
            let sort = app.sort_by.as_str();
            let keys = "q quit  ↑↓ disk  s sort  p pause  h help";
            (format!("{state}{keys}  (sorted by {sort}, every {:?})", app.interval), Style::new())
        }
    };
    frame.render_widget(Paragraph::new(text).style(style), area);
}

const HELP: &str = "\
q, Esc, Ctrl-C  quit
up, down, j, k  select a disk
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
