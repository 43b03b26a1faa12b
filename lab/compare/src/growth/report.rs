//! Figures of growth: as text, as Markdown, as JSON.

use std::fmt::Write;

use anyhow::Result;
use blockhouse_figures::Spread;
use serde_json::json;

use super::subjects::{Subject, Work};
use crate::report::{self, Environment, json as raw_json, markdown as raw_markdown};
use crate::servers::Kind;

/// One server at one step.
pub struct Cell {
    /// The server.
    pub kind: Kind,
    /// The step.
    pub point: u64,
    values: Vec<f64>,
    cpu: Vec<f64>,
}

impl Cell {
    /// A cell without figures.
    pub fn new(kind: Kind, point: u64) -> Self {
        Self { kind, point, values: Vec::new(), cpu: Vec::new() }
    }

    /// Adds a round: its figure and its processor time.
    pub fn add(&mut self, (value, cpu): (f64, f64)) {
        self.values.push(value);
        self.cpu.push(cpu);
    }
}

/// The results of one subject. The cells of a server are adjacent, in the order of steps.
pub struct Outcome {
    /// The subject that grew.
    pub subject: Subject,
    /// The measured cells.
    pub cells: Vec<Cell>,
}

impl Outcome {
    /// A row for each cell: server, step, figure, processor time, ratio to the first step.
    fn rows(&self) -> Vec<[String; 5]> {
        let has_cpu = self.subject.work != Work::Take;
        let steps = self.cells.chunks(self.subject.points.len());
        let rows = steps.flat_map(|cells| cells.iter().map(move |cell| (cell, &cells[0])));
        let rows = rows.map(|(cell, first)| {
            let spread = |values: &[f64], digits| report::spread(values.iter().copied(), digits);
            let ratio = Spread::of_ratios(&cell.values, &first.values);
            [
                cell.kind.name().to_owned(),
                cell.point.to_string(),
                spread(&cell.values, 1),
                if has_cpu { spread(&cell.cpu, 2) } else { String::new() },
                report::cell(ratio, 2),
            ]
        });
        rows.collect()
    }
}

/// Prints one subject.
pub fn print(outcome: &Outcome) {
    println!("\n{} ({})", outcome.subject.name, outcome.subject.work.unit());
    for [server, point, value, cpu, ratio] in outcome.rows() {
        println!("  {server:20} {point:>6}  {value:28} {cpu:28} {ratio}");
    }
}

/// All subjects as tables.
pub fn markdown(environment: &Environment, outcomes: &[Outcome]) -> Result<String> {
    let mut text = raw_markdown::render(environment, &[]);
    for outcome in outcomes {
        let Subject { what, work, .. } = outcome.subject;
        let cpu = if work == Work::Open { "CPU, ms" } else { "CPU, us a request" };
        writeln!(text, "\n| server | {what} | {} | {cpu} | of the first |", work.unit())?;
        writeln!(text, "| --- | ---: | ---: | ---: | ---: |")?;
        for row in outcome.rows() {
            writeln!(text, "| {} |", row.join(" | "))?;
        }
    }
    Ok(text)
}

/// All figures of all rounds.
pub fn json(environment: &Environment, outcomes: &[Outcome]) -> Result<String> {
    let cell = |cell: &Cell| {
        let Cell { kind, point, values, cpu } = cell;
        json!({ "who": kind.name(), "step": point, "figures": values, "cpu": cpu })
    };
    let row = |outcome: &Outcome| {
        json!({
            "row": outcome.subject.name,
            "unit": outcome.subject.work.unit(),
            "steps": outcome.cells.iter().map(cell).collect::<Vec<_>>(),
        })
    };
    let rows: Vec<_> = outcomes.iter().map(row).collect();
    raw_json::with_storages(environment, vec![json!({ "storage": "file on tmpfs", "rows": rows })])
}
