//! `blockhouse bench`: what the fast ways bring on this machine, measured on the production path.
//!
//! It says beforehand how long it takes and how much it writes, and keeps to both; works in a new file
//! unless told otherwise, and leaves nothing behind.

mod datasync;
mod device;
mod fixed_files;
mod fua;
mod html;
mod load;
mod plot;
mod random;
mod report;
mod rows;
mod schedule;
mod stop;
mod table;
mod target;
#[cfg(test)]
mod tests;
mod vmstate;
mod wakeup;

use std::cell::{Cell, OnceCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blockhouse_disk::{CacheMode, Disk};
use blockhouse_engine::{Engine, EngineChoice, EventLoop, HostFile};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use crate::{output, size};
use device::Device;
use load::{Limits, Load, LoopSetup, Sample};
use report::{Report, ResourceUse, Skipped};
use rows::{Case, Cases, Row};
use schedule::Schedule;
use stop::Stop;
use target::{ExistingData, Target};

/// Bytes of the file that is read and written.
const DISK_SIZE: u64 = 256 << 20;
/// How often each variant is measured, if there is time. That seven rounds agree by chance on who is
/// faster happens once in 64 cases.
const ROUNDS: usize = 7;
/// No slice writes more than this.
const MAX_BYTES: u64 = 64 << 20;

/// Arguments of `bench`.
#[derive(clap::Args)]
pub struct Arguments {
    /// What to measure.
    question: Question,
    /// Work in a new file in this folder, or next to this file.
    #[arg(long, value_name = "PATH", default_value = ".")]
    file: PathBuf,
    /// Write over the file or block device itself that --file names. Its data is lost.
    #[arg(long)]
    destroy_data: bool,
    /// How long it may take; left out, 120 for all and 30 for a single question.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(2..=86_400))]
    seconds: Option<u64>,
    /// Write the results as JSON to a file, or instead of the table (docs/bench.schema.json).
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
    /// Write the results, with plots, as a page of HTML to a file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Question {
    /// Durable writes as one request, against a write and then a flush.
    Fua,
    /// Overwrites from one end to the other: not durable, with a flush each, as one request.
    Datasync,
    /// Small reads with the file in the ring's own table, and by its descriptor.
    FixedFiles,
    /// A machine's state in small pieces into an image, one by one and through the stream.
    Vmstate,
    /// Requests from another thread, with the wake-up of the loop and without.
    Wakeup,
    /// Small reads and writes, per engine.
    Random,
    /// All of these.
    All,
}

impl Question {
    /// What it consists of.
    fn parts(self) -> Vec<Self> {
        match self {
            Self::All => {
                Self::value_variants().iter().copied().filter(|&one| one != Self::All).collect()
            }
            one => vec![one],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fua => "fua",
            Self::Datasync => "datasync",
            Self::FixedFiles => "fixed-files",
            Self::Vmstate => "vmstate",
            Self::Wakeup => "wakeup",
            Self::Random => "random",
            Self::All => "all",
        }
    }

    /// What one part is about, for people.
    fn about(self) -> &'static str {
        match self {
            Self::Fua => fua::ABOUT,
            Self::Datasync => datasync::ABOUT,
            Self::FixedFiles => fixed_files::ABOUT,
            Self::Vmstate => vmstate::ABOUT,
            Self::Wakeup => wakeup::ABOUT,
            Self::Random => random::ABOUT,
            Self::All => "",
        }
    }

    /// The cases of one part.
    fn cases(self, bench: &Bench) -> Cases<'_> {
        match self {
            Self::Fua => fua::cases(bench),
            Self::Datasync => datasync::cases(bench),
            Self::FixedFiles => fixed_files::cases(bench),
            Self::Vmstate => vmstate::cases(bench),
            Self::Wakeup => wakeup::cases(bench),
            Self::Random => random::cases(bench),
            Self::All => Cases::all([]),
        }
    }

    /// How long it may take unless the user says it.
    fn usual_time(self) -> Duration {
        Duration::from_secs(if self == Self::All { 120 } else { 30 })
    }
}

/// What every question works with.
struct Bench {
    /// Made when the user has been told what happens.
    disk: OnceCell<(Arc<Disk<HostFile>>, CacheMode)>,
    /// The engines that this machine has, best first.
    engines: Vec<Engine>,
    device: Option<Device>,
    /// How long one measurement lasts.
    slice: Cell<Duration>,
    stop: Stop,
    /// The last field, so that its files are removed after everything that uses them.
    target: Target,
}

impl Bench {
    fn new(target: Target, stop: Stop) -> Result<Self> {
        let usable = |engine: &Engine| EventLoop::new(EngineChoice::Only(*engine)).is_ok();
        let engines: Vec<_> = Engine::ALL.into_iter().filter(usable).collect();
        ensure!(!engines.is_empty(), "no engine can be used here");
        let device = Device::under(target.path());
        let (disk, slice) = (OnceCell::new(), Cell::new(Duration::ZERO));
        Ok(Self { disk, engines, device, slice, stop, target })
    }

    /// Makes and fills the disk.
    fn fill(&self) -> Result<()> {
        let disk = self.target.new_disk(DISK_SIZE, &self.stop)?;
        assert!(self.disk.set(disk).is_ok(), "it is filled once");
        Ok(())
    }

    fn disk(&self) -> &Arc<Disk<HostFile>> {
        &self.disk.get().expect("measuring begins after the disk is filled").0
    }

    fn cache(&self) -> CacheMode {
        self.disk.get().expect("measuring begins after the disk is filled").1
    }

    /// One slice of a load on the disk.
    fn slice(&self, way: LoopSetup<'_>, load: Load) -> Result<Sample> {
        let limits = Limits { time: self.slice.get(), requests: load.most_requests() };
        load::measure(self.disk(), way, (load, limits), (self.device.as_ref(), &self.stop))
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut results = arguments.json.iter().flatten().chain(&arguments.html);
    results.try_for_each(|path| can_be_written(path))?;
    let data = match arguments.destroy_data {
        true => ExistingData::Destroyed,
        false => ExistingData::Kept,
    };
    let stop = Stop::on_signals()?;
    let target = Target::at(&arguments.file, data, 2 * DISK_SIZE)?;
    target.folder().into_iter().for_each(|folder| stop.removes(folder));
    let bench = Bench::new(target, stop)?;
    let (cases, mut left_out) = all_cases(&bench, arguments.question);
    let time = arguments.seconds.map_or(arguments.question.usual_time(), Duration::from_secs);
    let mut schedule = Schedule::new(time, cases.iter().map(|(_, case)| case), ROUNDS);
    schedule.written += DISK_SIZE;
    bench.slice.set(schedule.slice);
    announce(&schedule, &bench.target);
    bench.fill()?;
    let rows = measure(cases, &mut schedule, &mut left_out)?;
    let announced = ResourceUse { time: schedule.most, written: Some(schedule.written) };
    let took = ResourceUse::since(schedule.begin);
    let report = Report::new(&bench, rows, left_out, (announced, took));
    show(arguments, &report)
}

/// That the results will find a place is known before minutes are spent on them.
fn can_be_written(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let folder = folder.unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), "{}: cannot be written: no such folder", path.display());
    ensure!(!path.is_dir(), "{}: cannot be written: it is a folder", path.display());
    Ok(())
}

fn all_cases(bench: &Bench, question: Question) -> (Vec<(&'static str, Case<'_>)>, Vec<Skipped>) {
    let (mut cases, mut left_out) = (Vec::new(), Vec::new());
    for part in question.parts() {
        let found = part.cases(bench);
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
