//! Figures of the qcow2 comparison: as text, as Markdown, as JSON.

use std::fmt::Write;

use anyhow::Result;
use serde_json::{Value, json};

use crate::report::{Environment, json as raw_json, markdown as raw_markdown};
use crate::servers::Kind;
use blockhouse_figures::Spread;

/// The role of a program in a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Ours, on a qcow2 image.
    Ours,
    /// Ours, on a raw image of the same content.
    OurRaw,
    /// Another program, on a qcow2 image.
    Peer,
    /// The same tool, which bypasses the page cache when it writes.
    PeerDirect,
}

impl Part {
    fn is_peer(self) -> bool {
        matches!(self, Self::Peer | Self::PeerDirect)
    }
}

/// A program that is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Contender {
    /// The part.
    pub part: Part,
    /// The server, or `None` for a tool.
    pub kind: Option<Kind>,
}

impl Contender {
    /// The name in reports.
    pub fn name(self) -> String {
        let program = match (self.kind, self.part) {
            (Some(kind), _) => kind.name(),
            (None, Part::Peer) => "qemu-img",
            (None, Part::PeerDirect) => "qemu-img -t none",
            (None, Part::Ours | Part::OurRaw) => "blockhouse",
        };
        let raw = if self.part == Part::OurRaw { " (raw)" } else { "" };
        format!("{program}{raw}")
    }

    fn is_like(self, other: Self) -> bool {
        self.kind.map(Kind::caching) == other.kind.map(Kind::caching)
    }
}

/// The unit of a row's figures.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Thousands of requests a second; more is better.
    ThousandsASecond,
    /// MiB a second; more is better.
    MebibytesASecond,
    /// Seconds; less is better.
    Seconds,
    /// Milliseconds; less is better.
    Milliseconds,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::ThousandsASecond => "kIOPS",
            Self::MebibytesASecond => "MiB/s",
            Self::Seconds => "s",
            Self::Milliseconds => "ms",
        }
    }

    /// The unit of the processor time beside it.
    fn cpu_name(self) -> &'static str {
        match self {
            Self::ThousandsASecond | Self::MebibytesASecond => "us",
            Self::Seconds => "s",
            Self::Milliseconds => "ms",
        }
    }

    fn is_time(self) -> bool {
        matches!(self, Self::Seconds | Self::Milliseconds)
    }

    fn digits(self) -> usize {
        if self == Self::Seconds { 3 } else { 1 }
    }
}

/// One contender's rounds.
pub struct Cell {
    /// The contender whose cell it is.
    pub contender: Contender,
    /// In the unit of the row.
    pub values: Vec<f64>,
    /// Processor time: microseconds a request, or of the whole run in the unit of the row.
    pub cpu: Vec<f64>,
}

/// One row on one storage.
pub struct Outcome {
    /// The name.
    pub row: &'static str,
    /// The unit of all its values.
    pub unit: Unit,
    /// Whether all ways of caching do the same work here.
    pub any_caching: bool,
    /// In the order of turns.
    pub cells: Vec<Cell>,
}

/// Ratios of ours to another, round by round.
struct Comparison {
    ours: String,
    other: String,
    /// How many times as fast; above 1 is better.
    speed: Spread,
    /// Our processor time, divided by the other's; below 1 is better.
    cpu: Spread,
    /// How much longer ours takes, in the unit of the row, if that is a time.
    longer: Option<Spread>,
}

/// Storage, bytes in the image, rows.
pub type OnStorage = (String, u64, Vec<Outcome>);

impl Outcome {
    fn comparisons(&self) -> Vec<Comparison> {
        let ours = self.cells.iter().filter(|cell| cell.contender.part == Part::Ours);
        ours.flat_map(|ours| self.others(ours).map(|other| self.comparison(ours, other)))
            .flatten()
            .collect()
    }

    /// The cells that `ours` is compared with: our own raw and the best peer.
    fn others(&self, ours: &Cell) -> impl Iterator<Item = &Cell> {
        let raw = self.cells.iter().find(|cell| {
            cell.contender.part == Part::OurRaw && cell.contender.kind == ours.contender.kind
        });
        let peers = self.cells.iter().filter(|cell| {
            cell.contender.part.is_peer()
                && (self.any_caching || cell.contender.is_like(ours.contender))
        });
        let best = peers.max_by(|one, other| self.merit(one).total_cmp(&self.merit(other)));
        best.into_iter().chain(raw)
    }

    fn merit(&self, cell: &Cell) -> f64 {
        let median = Spread::of(cell.values.iter().copied()).map_or(f64::NAN, |all| all.median);
        if self.unit.is_time() { -median } else { median }
    }

    fn comparison(&self, ours: &Cell, other: &Cell) -> Option<Comparison> {
        let time = self.unit.is_time();
        let (better, worse) =
            if time { (&other.values, &ours.values) } else { (&ours.values, &other.values) };
        let differences = ours.values.iter().zip(&other.values).map(|(ours, other)| ours - other);
        Some(Comparison {
            ours: ours.contender.name(),
            other: other.contender.name(),
            speed: Spread::of_ratios(better, worse)?,
            cpu: Spread::of_ratios(&ours.cpu, &other.cpu)?,
            longer: if time { Spread::of(differences) } else { None },
        })
    }
}

/// Prints a finished row.
pub fn print(outcome: &Outcome) {
    let (unit, digits) = (outcome.unit, outcome.unit.digits());
    println!("\n  {:28}{:>26}{:>24}", outcome.row, unit.name(), format!("cpu {}", unit.cpu_name()));
    for cell in &outcome.cells {
        let spread = |values: &[f64]| Spread::of(values.iter().copied());
        let (Some(value), Some(cpu)) = (spread(&cell.values), spread(&cell.cpu)) else { continue };
        println!("  {:28}{value:>26.digits$}{cpu:>24.2}", cell.contender.name());
    }
    for comparison in outcome.comparisons() {
        let Comparison { ours, other, speed, cpu, .. } = &comparison;
        print!("  {ours}: speed {speed:.2}, CPU {cpu:.2} of {other}");
        match &comparison.longer {
            Some(longer) => println!("; {longer:.digits$} {} longer", unit.name()),
            None => println!(),
        }
    }
}

/// The whole report as Markdown.
pub fn markdown(environment: &Environment, results: &[OnStorage]) -> String {
    let mut text = raw_markdown::render(environment, &[]);
    for (storage, size, outcomes) in results {
        // Writing to a string cannot fail.
        let _ = tables(&mut text, storage, *size, outcomes);
    }
    text
}

fn tables(text: &mut String, storage: &str, size: u64, outcomes: &[Outcome]) -> std::fmt::Result {
    writeln!(text, "\n### qcow2: {storage}, {} MiB\n", size >> 20)?;
    writeln!(text, "| row | who | figure | CPU |\n| --- | --- | ---: | ---: |")?;
    for outcome in outcomes {
        let (unit, digits) = (outcome.unit, outcome.unit.digits());
        for cell in &outcome.cells {
            let spread = |values: &[f64]| Spread::of(values.iter().copied());
            let (Some(value), Some(cpu)) = (spread(&cell.values), spread(&cell.cpu)) else {
                continue;
            };
            let (row, name) = (outcome.row, cell.contender.name());
            let (unit, cpu_unit) = (unit.name(), unit.cpu_name());
            writeln!(text, "| {row} | {name} | {value:.digits$} {unit} | {cpu:.2} {cpu_unit} |")?;
        }
    }
    writeln!(text, "\n| row | ours | speed | CPU | of | longer |")?;
    writeln!(text, "| --- | --- | ---: | ---: | --- | ---: |")?;
    for outcome in outcomes {
        let digits = outcome.unit.digits();
        for Comparison { ours, other, speed, cpu, longer } in outcome.comparisons() {
            let longer = longer.map_or_else(String::new, |longer| {
                format!("{longer:.digits$} {}", outcome.unit.name())
            });
            let row = outcome.row;
            writeln!(text, "| {row} | {ours} | {speed:.2} | {cpu:.2} | {other} | {longer} |")?;
        }
    }
    Ok(())
}

/// The whole report as one JSON object.
pub fn json(environment: &Environment, results: &[OnStorage]) -> Result<String> {
    let cell = |cell: &Cell| json!({ "who": cell.contender.name(), "figures": cell.values, "cpu": cell.cpu });
    let row = |outcome: &Outcome| {
        json!({
            "row": outcome.row,
            "unit": outcome.unit.name(),
            "cpu-unit": outcome.unit.cpu_name(),
            "subjects": outcome.cells.iter().map(cell).collect::<Vec<_>>(),
        })
    };
    let storages: Vec<Value> = results
        .iter()
        .map(|(storage, size, outcomes)| {
            json!({
                "storage": storage,
                "bytes": size,
                "rows": outcomes.iter().map(row).collect::<Vec<_>>(),
            })
        })
        .collect();
    raw_json::with_storages(environment, storages)
}
