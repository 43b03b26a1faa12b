//! `blockhouse bench`: the gain of each optimization on this machine, measured on the production
//! path.
//!
//! The command first prints how long it takes and how much it writes at most. Only a slow fill of
//! the disk or the last round can exceed the time. The command uses a new file, which it removes at
//! the end, unless `--destroy-data` is given.

mod device;
mod load;
mod questions;
mod report;
mod rows;
mod schedule;
mod stop;
mod target;
mod testbed;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output;
use blockhouse_config::size;
use questions::Question;
use report::{Report, ResourceUse, Skipped, html, table};
use rows::{Case, ROUNDS, Row};
use schedule::Schedule;
use stop::Stop;
use target::{ExistingData, Target};
use testbed::{DISK_SIZE, Testbed};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The question to measure.
    question: Question,
    /// Work in a new file in this folder, or next to this file.
    #[arg(long, value_name = "PATH", default_value = ".")]
    file: PathBuf,
    /// Write over the file or block device itself that --file names. Its data is lost.
    #[arg(long)]
    destroy_data: bool,
    /// The time limit; left out, 120 for all and 30 for a single question.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(2..=86_400))]
    seconds: Option<u64>,
    /// Write the results as JSON to a file, or instead of the table.
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
    /// Write the results, with plots, as a page of HTML to a file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut results = arguments.json.iter().flatten().chain(&arguments.html);
    results.try_for_each(|path| can_be_written(path))?;
    let data = if arguments.destroy_data { ExistingData::Destroyed } else { ExistingData::Kept };
    let stop = Stop::on_signals()?;
    let target = Target::at(&arguments.file, data, 2 * DISK_SIZE)?;
    target.folder().into_iter().for_each(|folder| stop.removes(folder));
    let testbed = Testbed::new(target, stop)?;
    let (cases, mut left_out) = all_cases(&testbed, arguments.question);
    let time = arguments.seconds.map_or(arguments.question.usual_time(), Duration::from_secs);
    let mut schedule = Schedule::new(time, cases.iter().map(|(_, case)| case), ROUNDS);
    schedule.written += DISK_SIZE;
    testbed.set_sample_time(schedule.sample_time);
    announce(&schedule, testbed.target());
    testbed.fill()?;
    let rows = measure(cases, &mut schedule, &mut left_out)?;
    let announced = ResourceUse { time: schedule.most, written: Some(schedule.written) };
    let took = ResourceUse::since(schedule.begin);
    let report = Report::new(&testbed, rows, left_out, (announced, took));
    show(arguments, &report)
}

/// Checks that the folder of the results exists, before the measurement, which takes minutes. Does
/// not check the permission to write.
fn can_be_written(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let folder = folder.unwrap_or(Path::new("."));
    ensure!(
        folder.is_dir(),
        "{}: cannot be written: there is no such folder; make it first",
        path.display()
    );
    ensure!(!path.is_dir(), "{}: cannot be written: it is a folder", path.display());
    Ok(())
}

fn all_cases(
    testbed: &Testbed,
    question: Question,
) -> (Vec<(&'static str, Case<'_>)>, Vec<Skipped>) {
    let (mut cases, mut left_out) = (Vec::new(), Vec::new());
    for part in question.parts() {
        let found = part.cases(testbed);
        cases.extend(found.cases.into_iter().map(|case| (part.name(), case)));
        if let Some(why) = found.missing {
            left_out.push(Skipped { question: part.name(), case: None, why });
        }
    }
    (cases, left_out)
}

fn announce(schedule: &Schedule, target: &Target) {
    output::tell(&format!(
        "blockhouse: takes about {:.0} s, {:.0} s at most, and writes {} at most, in {}; {}",
        schedule.expected.as_secs_f64(),
        schedule.most.as_secs_f64(),
        size::show(schedule.written),
        target.path().display(),
        match target.folder() {
            Some(_) => "what it made is removed at the end",
            None => "WHAT IS THERE IS WRITTEN OVER",
        }
    ));
}

fn measure(
    cases: Vec<(&'static str, Case<'_>)>,
    schedule: &mut Schedule,
    left_out: &mut Vec<Skipped>,
) -> Result<Vec<Row>> {
    let variants: usize = cases.iter().map(|(_, case)| case.variants.len()).sum();
    let bar = ProgressBar::new((variants * ROUNDS) as u64);
    let style = ProgressStyle::with_template("{percent:>3}% [{bar:40}] {eta} left  {msg}")?;
    let bar = bar.with_style(style.progress_chars("=> "));
    let (mut rows, mut done) = (Vec::new(), 0);
    for (question, case) in cases {
        bar.set_message(format!("{question}: {}", case.name));
        done += case.variants.len() * ROUNDS;
        match schedule.next(&case, Instant::now()) {
            Some(end) => {
                rows.extend(rows::run_case(question, case, (ROUNDS, end), || bar.inc(1))?);
            }
            None => {
                let why = "there was no time left; give more with --seconds".to_owned();
                left_out.push(Skipped { question, case: Some(case.name), why });
            }
        }
        bar.set_position(done as u64);
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn show(arguments: &Arguments, report: &Report) -> Result<()> {
    if let Some(path) = &arguments.html {
        write_file(path, &html::page(report))?;
    }
    match &arguments.json {
        Some(None) => return report::print_json(report),
        Some(Some(path)) => write_file(path, &format!("{:#}\n", report.json()))?,
        None => {}
    }
    table::print(report)
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display()))
}
