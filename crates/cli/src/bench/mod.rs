//! `blockhouse bench`: what the fast ways bring on this machine, measured on the production path.
//!
//! It says beforehand how long it takes and how much it writes, works in a new file unless told
//! otherwise, and leaves nothing behind.

mod device;
mod fua;
mod load;
mod place;
mod random;
mod report;
mod rows;
mod stop;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockhouse_disk::{CacheMode, Disk};
use blockhouse_engine::{Engine, EngineChoice, EventLoop, HostFile};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use crate::size;
use device::Device;
use load::{Limits, Load, Slice};
use place::{ExistingData, Place};
use rows::{Case, Row};
use stop::Stop;

/// Bytes of the file that is read and written.
const DISK_SIZE: u64 = 256 << 20;
/// How often each variant is measured.
const ROUNDS: usize = 5;
/// No slice writes more than this.
const MOST_BYTES: u64 = 64 << 20;

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
    /// Write the results as JSON to a file, or instead of the table.
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
    /// How long each single measurement lasts at most, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 250)]
    #[arg(value_parser = clap::value_parser!(u64).range(10..=60_000))]
    slice: u64,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Question {
    /// Durable writes as one request, against a write and then a flush.
    Fua,
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
            Self::Random => "random",
            Self::All => "all",
        }
    }

    fn plan(self, engines: usize) -> Plan {
        match self {
            Self::Fua => fua::plan(engines),
            Self::Random => random::plan(engines),
            Self::All => self.parts().into_iter().map(|one| one.plan(engines)).sum(),
        }
    }

    fn cases(self, bench: &Bench) -> Vec<Case<'_>> {
        match self {
            Self::Fua => fua::cases(bench),
            Self::Random => random::cases(bench),
            Self::All => self.parts().into_iter().flat_map(|one| one.cases(bench)).collect(),
        }
    }
}

/// What a question takes in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Plan {
    /// Measurements.
    slices: usize,
    /// What they take beyond a slice's time each.
    extra: Duration,
    /// Bytes that they write at most.
    written: u64,
}

impl Plan {
    /// Slices of which so many write blocks of this size.
    fn of_slices(slices: usize, writing: usize, block: usize) -> Self {
        let written = writing as u64 * (MOST_BYTES / block as u64) * block as u64;
        Self { slices, extra: Duration::ZERO, written }
    }
}

impl std::iter::Sum for Plan {
    fn sum<I: Iterator<Item = Self>>(plans: I) -> Self {
        plans.fold(Self::default(), |sum, next| Self {
            slices: sum.slices + next.slices,
            extra: sum.extra + next.extra,
            written: sum.written + next.written,
        })
    }
}

/// What every question works with.
struct Bench {
    disk: Arc<Disk<HostFile>>,
    cache: CacheMode,
    engines: Vec<Engine>,
    device: Option<Device>,
    slice: Duration,
    stop: Stop,
    /// The last, so that its files go when nobody uses them any more.
    _place: Place,
}

impl Bench {
    /// One slice of a load on the disk.
    fn slice(&self, engine: Engine, load: Load) -> Result<Slice> {
        let limits = Limits { time: self.slice, requests: MOST_BYTES / load.block as u64 };
        load::measure(&self.disk, engine, (load, limits), (self.device.as_ref(), &self.stop))
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let engines = usable_engines();
    ensure!(!engines.is_empty(), "no engine can be used here");
    let data = match arguments.destroy_data {
        true => ExistingData::Destroyed,
        false => ExistingData::Kept,
    };
    let slice = Duration::from_millis(arguments.slice);
    let plan = arguments.question.plan(engines.len());
    let stop = Stop::on_signals()?;
    let place = Place::at(&arguments.file, data, 2 * DISK_SIZE)?;
    announce(plan, slice, &place);
    let device = Device::under(place.path());
    let (disk, cache) = place.new_disk(DISK_SIZE, &stop)?;
    let bench = Bench { disk, cache, engines, device, slice, stop, _place: place };
    let rows = measure(&bench, arguments.question, plan)?;
    show(arguments, &bench, &rows)
}

fn usable_engines() -> Vec<Engine> {
    let usable = |engine: &Engine| EventLoop::new(EngineChoice::Only(*engine)).is_ok();
    Engine::ALL.into_iter().filter(usable).collect()
}

fn announce(plan: Plan, slice: Duration, place: &Place) {
    let time = (slice * plan.slices as u32 + plan.extra) * ROUNDS as u32;
    let written = plan.written * ROUNDS as u64 + DISK_SIZE;
    // Filling the file, and the last requests of each slice.
    let seconds = time.as_secs_f64() * 1.2 + 10.0;
    eprintln!(
        "blockhouse: takes {seconds:.0} s at most and writes {} at most, in {}; {}",
        size::show(written),
        place.path().display(),
        match place.folder() {
            Some(_) => "what it made is removed at the end",
            None => "WHAT IS THERE IS WRITTEN OVER",
        }
    );
}

fn measure(bench: &Bench, question: Question, plan: Plan) -> Result<Vec<Row>> {
    let bar = ProgressBar::new((plan.slices * ROUNDS) as u64);
    let style = ProgressStyle::with_template("{percent:>3}% [{bar:40}] {eta} left  {msg}")?;
    let bar = bar.with_style(style.progress_chars("=> "));
    let mut rows = Vec::new();
    for part in question.parts() {
        for case in part.cases(bench) {
            bar.set_message(format!("{}: {}", part.name(), case.name));
            rows.extend(rows::run_case(part.name(), case, ROUNDS, || bar.inc(1))?);
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn show(arguments: &Arguments, bench: &Bench, rows: &[Row]) -> Result<()> {
    let results = report::json(bench, rows);
    match &arguments.json {
        Some(None) => report::print_json(&results),
        Some(Some(path)) => {
            std::fs::write(path, format!("{results:#}\n"))
                .with_context(|| format!("{}: cannot be written", path.display()))?;
            report::print_table(bench, rows)
        }
        None => report::print_table(bench, rows),
    }
}
