//! `cargo xtask kill`: tests that changes which a server has acknowledged survive its death.
//!
//! Each run makes an image, puts a server's disk under load over NBD, vhost-user-blk or both, kills
//! the server at a random moment, starts it again with the same options, and reads everything back.
//! A model of the disk knows which changes were acknowledged. Most runs flush nothing, so the next
//! server learns of some changes only from the state that outlives the process. Other runs kill
//! servers whose disk is being mirrored to another image, or whose bitmaps are in a side file.
//!
//! A run that finds a loss prints the line that replays it, and keeps image, state and log.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "it talks to the person who started it")]

mod changed;
mod combination;
mod folders;
mod guest;
mod load;
mod mirror;
mod model;
mod nbd_client;
mod reconnect;
mod report;
mod run;
mod server;
mod side_file;
mod template;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use combination::{Combination, Image, Only, combinations};
use fastrand::Rng;
use folders::{Finding, Setting, State};
use lab_tools::apt;
use lab_tools::build::binary_under_test;
use lab_tools::workspace::Workspace;
use parking_lot::Mutex;
use report::{Counts, Report};
use template::Template;

/// Default number of runs with mirrors: two of each kind of target.
const MIRRORS: usize = 10;
/// Default number of runs of volumes with a side file: two of each kind of volume.
const SIDE_FILES: usize = 4;
/// This many runs of either kind come first.
const FIRST_RUNS: usize = 2;
/// The folders of this many findings are kept.
const MAX_KEPT: u32 = 20;

/// Kill servers under load, and look whether what they answered is there.
#[derive(Parser)]
#[command(bin_name = "cargo xtask kill")]
struct Cli {
    /// What is shown; left out, all of it
    scenarios: Vec<Scenario>,
    /// How many runs, each with an image of its own; left out, one for each combination
    #[arg(long)]
    runs: Option<u64>,
    /// How many servers of each run are killed
    #[arg(long, default_value_t = 3)]
    kills: u32,
    /// Begin no more runs after this many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// The random numbers of the first run; the others count up from it
    #[arg(long)]
    seed: Option<u64>,
    /// Only these combinations: IMAGE/CACHE/ENGINE, where an empty part means any
    #[arg(long)]
    only: Option<Only>,
    /// How many runs at a time; left out, one for each processor
    #[arg(long)]
    jobs: Option<usize>,
    /// Test this binary instead of the workspace's
    #[arg(long)]
    binary: Option<PathBuf>,
    /// Serve without state that outlives the server: qcow2 images must lose something, or the test
    /// itself is broken. Ends at the first loss, and succeeds only when it finds one
    #[arg(long)]
    without_state: bool,
}

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// What was answered reads back after each kill, under load from NBD clients and guests
    Load,
    /// A redo log is refused where QEMU changed the image after the kill
    Changed,
    /// Clients of QEMU and libnbd that reconnect see no error
    Reconnect,
    /// After a kill while a disk is mirrored, what is beside the images says which one is the disk,
    /// and it has what was answered
    Mirror,
    /// Increments by a bitmap in a side file lack nothing after kills, of a raw file and a device
    SideFile,
}

/// One run.
#[derive(Clone, Copy, Debug)]
enum Task {
    Load(Combination),
    Changed(Image),
    Reconnect { is_held: bool },
    Mirror,
    SideFile,
}

fn main() -> ExitCode {
    match run_all(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kill: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The tasks, and what they found.
struct Runs<'a> {
    cli: &'a Cli,
    setting: Setting,
    /// Each with its seed.
    tasks: Vec<(Task, u64)>,
    next: AtomicUsize,
    end: Option<Instant>,
    templates: Mutex<Vec<(Image, Arc<Template>)>>,
    report: Mutex<Report>,
}

fn run_all(cli: &Cli) -> Result<()> {
    let workspace = Workspace::find()?;
    apt::require(apt::FOR_KILLS)?;
    let binary = match &cli.binary {
        Some(binary) => std::path::absolute(binary)?,
        None => binary_under_test(&workspace)?,
    };
    let disk = workspace.target().join("kill");
    std::fs::create_dir_all(&disk)?;
    let state = match (server::has_state(&binary)?, cli.without_state) {
        (true, false) => State::On,
        (true, true) => State::Off,
        (false, _) => State::Absent,
    };
    let seed = cli.seed.unwrap_or_else(|| fastrand::u64(..1 << 40));
    let runs = Runs {
        setting: Setting { binary, state, disk, kills: cli.kills },
        tasks: tasks(cli, seed),
        next: AtomicUsize::new(0),
        end: cli.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds)),
        templates: Mutex::default(),
        report: Mutex::default(),
        cli,
    };
    println!("kill: {} runs, seed {seed}, state {state:?}", runs.tasks.len());
    let jobs = cli.jobs.or_else(|| std::thread::available_parallelism().ok().map(usize::from));
    let started = Instant::now();
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..jobs.unwrap_or(1)).map(|_| scope.spawn(|| runs.work())).collect();
        jobs.into_iter().try_for_each(|job| job.join().expect("runs catch panics"))
    })?;
    runs.finish(started.elapsed())
}

/// The tasks: reconnects, two mirrors and two volumes first, then loads and changes evenly mixed,
/// so that a short time has some of each; the other mirrors and volumes at the end.
fn tasks(cli: &Cli, seed: u64) -> Vec<(Task, u64)> {
    let only = cli.only.clone().unwrap_or_default();
    let is_named = |scenario| cli.scenarios.contains(&scenario);
    let has = |scenario| cli.scenarios.is_empty() || is_named(scenario);
    let mut random = Rng::with_seed(seed);
    let mut tasks = Vec::new();
    // The reconnect scenario has its own image, so `--only` without its name leaves it out.
    if has(Scenario::Reconnect) && (cli.only.is_none() || !cli.scenarios.is_empty()) {
        tasks.extend([true, false].map(|is_held| Task::Reconnect { is_held }));
    }
    // Mirrors and side files rely on the state that the next server finds.
    let is_possible = cli.only.is_none() && !cli.without_state;
    let mut later = Vec::new();
    for (scenario, task, count) in [
        (Scenario::Mirror, Task::Mirror, MIRRORS),
        (Scenario::SideFile, Task::SideFile, SIDE_FILES),
    ] {
        if has(scenario) && is_possible || is_named(scenario) {
            let count = cli.runs.map_or(count, |runs| runs as usize);
            let first = count.min(FIRST_RUNS);
            tasks.extend(std::iter::repeat_n(task, first));
            later.extend(std::iter::repeat_n(task, count - first));
        }
    }
    let mut images = Image::all();
    images
        .retain(|image| has(Scenario::Changed) && changed::has_log(image) && only.has_image(image));
    random.shuffle(&mut images);
    let mut combinations = combinations(&only);
    random.shuffle(&mut combinations);
    let count = cli.runs.map_or(combinations.len(), |runs| runs as usize);
    let count = if has(Scenario::Load) { count } else { 0 };
    let between = count / images.len().max(1);
    let mut loads = combinations.into_iter().cycle().take(count).map(Task::Load);
    for image in images {
        tasks.push(Task::Changed(image));
        tasks.extend(loads.by_ref().take(between));
    }
    tasks.extend(loads);
    tasks.append(&mut later);
    // The first task of each kind has the given seed, so that one run can be repeated alone.
    let (mut loads, mut changes, mut mirrors, mut volumes) = (seed.., seed.., seed.., seed..);
    let seed_of = |task: &Task| match task {
        Task::Load(_) => loads.next().unwrap_or(seed),
        Task::Changed(_) => changes.next().unwrap_or(seed),
        Task::Mirror => mirrors.next().unwrap_or(seed),
        Task::SideFile => volumes.next().unwrap_or(seed),
        Task::Reconnect { .. } => seed,
    };
    let seeds: Vec<u64> = tasks.iter().map(seed_of).collect();
    tasks.into_iter().zip(seeds).collect()
}

impl Runs<'_> {
    /// Does runs until none is left.
    fn work(&self) -> Result<()> {
        while !self.is_over() {
            let Some((task, seed)) = self.tasks.get(self.next.fetch_add(1, Relaxed)) else { break };
            let run = || self.run(*task, *seed);
            let Ok(outcome) = catch_unwind(AssertUnwindSafe(run)) else {
                bail!("a run panicked; replay: {}", self.replay(*task, *seed));
            };
            if let Some(finding) = outcome.with_context(|| self.replay(*task, *seed))? {
                self.tell(*task, *seed, &finding)?;
            }
        }
        Ok(())
    }

    /// Whether no more runs are to begin. Without state the first finding is the proof.
    fn is_over(&self) -> bool {
        let is_late = self.end.is_some_and(|end| Instant::now() >= end);
        is_late || self.cli.without_state && self.report.lock().findings() > 0
    }

    fn run(&self, task: Task, seed: u64) -> Result<Option<Finding>> {
        let setting = &self.setting;
        let (counts, finding) = match task {
            Task::Load(combination) => {
                let template = self.template(combination.image)?;
                run::run(setting, &template, combination, seed)?
            }
            Task::Changed(image) => {
                let finding = changed::run(setting, &self.template(image)?, image, seed)?;
                (Counts::of_scenario(image.to_string(), "changed by QEMU", 1), finding)
            }
            Task::Reconnect { is_held } => {
                let (kills, finding) = reconnect::run(setting, is_held, seed)?;
                (Counts::of_scenario("qcow2".into(), "reconnect", kills), finding)
            }
            Task::Mirror => {
                return Ok(self.add("mirrored", "mirror", mirror::run(setting, seed)?));
            }
            Task::SideFile => {
                return Ok(self.add("volume", "side-file", side_file::run(setting, seed)?));
            }
        };
        self.report.lock().add(&counts, finding.is_some());
        Ok(finding)
    }

    /// Adds the counts of a run that has several rows.
    fn add(
        &self,
        image: &str,
        scenario: &str,
        (counts, finding): (Vec<Counts>, Option<Finding>),
    ) -> Option<Finding> {
        let mut report = self.report.lock();
        counts.iter().for_each(|counts| report.add(counts, false));
        if finding.is_some() {
            report.add(&Counts::of_scenario(image.into(), scenario, 0), true);
        }
        finding
    }

    fn tell(&self, task: Task, seed: u64, finding: &Finding) -> Result<()> {
        if !self.cli.without_state {
            println!("FOUND: {}\n  replay: {}", finding.what, self.replay(task, seed));
        }
        let is_kept = !self.cli.without_state && self.report.lock().findings() <= MAX_KEPT;
        for folder in &finding.kept {
            if is_kept {
                println!("  kept: {}", folder.display())
            } else {
                std::fs::remove_dir_all(folder)?
            }
        }
        Ok(())
    }

    /// The command line that repeats a run. Only the moments of the kills differ.
    fn replay(&self, task: Task, seed: u64) -> String {
        let kills = self.setting.kills;
        let (scenario, only) = match task {
            Task::Load(combination) => {
                ("load", format!("--only '{combination}' --runs 1 --kills {kills}"))
            }
            Task::Changed(image) => ("changed", format!("--only '{image}'")),
            Task::Mirror => ("mirror", format!("--runs 1 --kills {kills}")),
            Task::SideFile => ("side-file", format!("--runs 1 --kills {kills}")),
            Task::Reconnect { .. } => ("reconnect", String::new()),
        };
        format!("cargo xtask kill {scenario} --seed {seed} {only}").trim_end().to_owned()
    }

    fn template(&self, image: Image) -> Result<Arc<Template>> {
        let mut templates = self.templates.lock();
        if let Some((_, template)) = templates.iter().find(|(known, _)| *known == image) {
            return Ok(Arc::clone(template));
        }
        let template = Arc::new(Template::make(&image)?);
        templates.push((image, Arc::clone(&template)));
        Ok(template)
    }

    fn finish(&self, time: Duration) -> Result<()> {
        let report = self.report.lock();
        report.print();
        let (kills, findings) = (report.kills(), report.findings());
        println!(
            "kill: {kills} kills in {:.1} s, {findings} runs found a loss",
            time.as_secs_f64()
        );
        if self.cli.without_state {
            ensure!(findings > 0, "no loss was found without state: the test finds nothing");
            return Ok(());
        }
        ensure!(findings == 0, "{findings} runs found something; the first line of each says what");
        Ok(())
    }
}
