//! Figures of saving and loading: as text and as Markdown.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::{CONTENDERS, Contender, StateFigures, host};
use crate::caching::Caching;
use crate::report::cell;
use blockhouse_figures::Spread;
use lab_tools::process::stdout_of;

/// All rounds of one way of caching.
pub struct Row {
    caching: Caching,
    /// Each in the order of [`CONTENDERS`].
    rounds: Vec<Vec<StateFigures>>,
}

/// One line of a table: a name, the rates, and the ratios of ours to the others.
struct Line {
    name: String,
    rates: Vec<Option<Spread>>,
    of_dd: Option<Spread>,
    of_qemu: Option<Spread>,
    memory: Option<Spread>,
}

/// The programs and the machine of the comparison, as a list.
pub fn heading(blockhouse: &Path, mebibytes: u64, rounds: usize) -> Result<String> {
    let version = |program: &Path| {
        let mut command = Command::new(program);
        command.arg("--version");
        let said = stdout_of(command)?;
        Ok::<_, anyhow::Error>(said.lines().next().unwrap_or_default().to_owned())
    };
    let (processor, kernel) = host()?;
    let (ours, qemu) = (version(blockhouse)?, version(Path::new("qemu-system-x86_64"))?);
    Ok(format!(
        "- Processor: {processor}\n- Kernel: {kernel}\n- {ours}\n- {qemu}\n- {mebibytes} MiB, {rounds} \
         interleaved rounds; MiB a second, medians (smallest..largest)\n"
    ))
}

impl Row {
    pub fn new(caching: Caching) -> Self {
        Self { caching, rounds: Vec::new() }
    }

    /// A round, in the order of [`CONTENDERS`].
    pub fn add(&mut self, round: Vec<StateFigures>) {
        self.rounds.push(round);
    }

    fn values(&self, contender: Contender, figure: fn(&StateFigures) -> Option<f64>) -> Vec<f64> {
        let place = CONTENDERS.iter().position(|one| *one == contender);
        let turns = self.rounds.iter().filter_map(|round| round.get(place?));
        turns.filter_map(figure).collect()
    }

    fn line(&self, name: &str, figure: fn(&StateFigures) -> Option<f64>) -> Line {
        let caching = if self.caching == Caching::Direct { "direct" } else { "page cache" };
        let ours = self.values(Contender::Ours, figure);
        let of = |contender| Spread::of_ratios(&ours, &self.values(contender, figure));
        let rates = CONTENDERS.map(|contender| Spread::of(self.values(contender, figure)));
        Line {
            name: format!("{name}, {caching}"),
            rates: rates.to_vec(),
            of_dd: of(Contender::Dd),
            of_qemu: of(Contender::Qemu),
            memory: None,
        }
    }

    fn lines(&self) -> [Line; 2] {
        let memory = Spread::of(self.values(Contender::Ours, |turn| turn.memory));
        let save = Line { memory, ..self.line("save", |turn| turn.save) };
        [save, self.line("load", |turn| turn.load)]
    }

    /// As lines for a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for line in self.lines() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "\n  {}", line.name);
            for (contender, rate) in CONTENDERS.iter().zip(&line.rates) {
                let _ = rate.map(|rate| writeln!(text, "  {:24}{rate:>28.0}", name(*contender)));
            }
            for (other, ratio) in [("dd", line.of_dd), ("QEMU", line.of_qemu)] {
                let _ = ratio.map(|ratio| writeln!(text, "  ours, of {other:14}{ratio:>28.2}"));
            }
            let _ = line.memory.map(|memory| writeln!(text, "  MiB above idle{memory:>38.1}"));
        }
        text
    }
}

fn name(contender: Contender) -> &'static str {
    match contender {
        Contender::Dd => "dd bs=1M",
        Contender::Unbuffered => "each piece written",
        Contender::Qemu => "QEMU",
        Contender::Ours => "blockhouse",
    }
}

/// The whole report as Markdown.
pub fn markdown(heading: &str, rows: &[Row]) -> String {
    let names = CONTENDERS.map(name).join(" | ");
    let mut text = format!("{heading}\n| | {names} | of dd | of QEMU | MiB above idle |\n");
    text.push_str("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    for line in rows.iter().flat_map(Row::lines) {
        let rates = line.rates.iter().map(|&rate| (rate, 0));
        let ratios = [(line.of_dd, 2), (line.of_qemu, 2), (line.memory, 1)];
        let cells: Vec<String> =
            rates.chain(ratios).map(|(value, digits)| cell(value, digits)).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {} | {} |", line.name, cells.join(" | "));
    }
    text
}
