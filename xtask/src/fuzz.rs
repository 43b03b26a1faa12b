//! `cargo xtask fuzz`: libFuzzer on the stable toolchain, with nothing else installed.
//!
//! The targets are the binaries of the package in `fuzz/`. LLVM's coverage passes are enabled by
//! compiler flags that every toolchain has; libFuzzer comes with its crate. Seeds are committed in
//! `fuzz/corpus/TARGET`; inputs that a run finds go to `target/fuzz/corpus/TARGET`, and only
//! `--keep` adds them to the seeds. Debug assertions and overflow checks are on. A failure leaves
//! its input in `fuzz/artifacts/TARGET` and prints the line that replays it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use lab_tools::apt;
use lab_tools::process::{self, cargo, executables, stdout_of};
use lab_tools::workers;
use lab_tools::workspace::Workspace;

/// Coverage as libFuzzer needs it: counters and a PC table for each edge, and calls that report the
/// operands of comparisons.
const COVERAGE: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "--cfg=fuzzing",
];

/// Makes glibc keep freed memory for the next input; otherwise the kernel clears new pages for each
/// input.
const KEEP_MEMORY: [(&str, &str); 3] = [
    ("MALLOC_MMAP_THRESHOLD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "268435456"),
    ("MALLOC_TOP_PAD_", "1048576"),
];

/// The targets, and how long each runs.
#[derive(Args)]
pub struct Options {
    /// The target; without it, all
    target: Option<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Executions of each target, however long they take
    #[arg(long, value_name = "NUMBER", conflicts_with = "seconds")]
    runs: Option<u64>,
    /// Run the target once on this input
    #[arg(long, value_name = "FILE", requires = "target")]
    replay: Option<PathBuf>,
    /// Afterwards, add what reached new code to the committed corpus
    #[arg(long)]
    keep: bool,
}

impl Options {
    /// All targets, `seconds` each.
    pub fn all(seconds: u64) -> Self {
        Self { target: None, seconds, runs: None, replay: None, keep: false }
    }
}

/// A built target and its folders.
struct Target {
    name: String,
    binary: PathBuf,
    seeds: PathBuf,
    found: PathBuf,
    artifacts: PathBuf,
    log: PathBuf,
}

/// Builds and runs.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let targets = build(workspace, options.target.as_deref())?;
    if let (Some(input), [target]) = (&options.replay, targets.as_slice()) {
        let mut replay = Command::new(&target.binary);
        replay.arg(input);
        return process::run(replay);
    }
    workers::side_by_side(&targets, |target| {
        fuzz(target, options)?;
        if options.keep { keep(target) } else { Ok(()) }
    })
}

/// Checks the format of the package in `fuzz/`, which is not a member of the workspace.
pub fn check_format(workspace: &Workspace) -> Result<()> {
    let mut format = cargo(["fmt", "--check", "--manifest-path"]);
    format.arg(workspace.root().join("fuzz/Cargo.toml"));
    process::run(format)
}

/// Checks the targets' code with clippy, all warnings denied. It is compiled like the workspace, so
/// that common dependencies are not checked again.
pub fn lint(workspace: &Workspace) -> Result<()> {
    apt::require(apt::FOR_FUZZING)?;
    let mut clippy = cargo(["clippy", "--all-targets", "--manifest-path"]);
    clippy.arg(workspace.root().join("fuzz/Cargo.toml"));
    clippy.arg("--target-dir").arg(workspace.target()).args(["--", "-D", "warnings"]);
    process::run(clippy)
}

/// A build of the package in `fuzz/`, with coverage. It names the host as the target, because only
/// then do the flags not affect build scripts and procedural macros.
fn instrumented_build(workspace: &Workspace) -> Result<Command> {
    let mut rustc = Command::new("rustc");
    rustc.arg("-vV");
    let version = stdout_of(rustc)?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    // Not --locked: a change of our crates' dependencies changes this lock file, too.
    let mut cargo = cargo(["build", "--release", "--manifest-path"]);
    cargo.arg(workspace.root().join("fuzz/Cargo.toml"));
    cargo.arg("--target-dir").arg(workspace.target().join("fuzz"));
    cargo.args(["--target", host.context("rustc does not tell its host")?]);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", COVERAGE.join("\x1f"));
    Ok(cargo)
}

fn build(workspace: &Workspace, only: Option<&str>) -> Result<Vec<Target>> {
    apt::require(apt::FOR_FUZZING)?;
    let mut build = instrumented_build(workspace)?;
    match only {
        Some(name) => build.args(["--bin", name]),
        None => build.arg("--bins"),
    };
    let mut targets = Vec::new();
    for (name, binary) in executables(build)? {
        let fuzz = workspace.root().join("fuzz");
        let work = workspace.target().join("fuzz");
        let target = Target {
            binary,
            seeds: fuzz.join("corpus").join(&name),
            found: work.join("corpus").join(&name),
            artifacts: fuzz.join("artifacts").join(&name),
            log: work.join(format!("{name}.log")),
            name,
        };
        ensure!(target.seeds.is_dir(), "{} has no corpus: {}", target.name, target.seeds.display());
        for folder in [&target.found, &target.artifacts] {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        targets.push(target);
    }
    ensure!(!targets.is_empty(), "there are no fuzz targets");
    Ok(targets)
}

fn fuzz(target: &Target, options: &Options) -> Result<()> {
    let log = File::create(&target.log)
        .with_context(|| format!("cannot write {}", target.log.display()))?;
    let mut fuzzer = Command::new(&target.binary);
    // New inputs go to the first folder; the seeds are only read.
    fuzzer.args([&target.found, &target.seeds]);
    fuzzer.arg(match options.runs {
        Some(runs) => format!("-runs={runs}"),
        None => format!("-max_total_time={}", options.seconds),
    });
    fuzzer.envs(KEEP_MEMORY);
    fuzzer.arg(format!("-artifact_prefix={}/", target.artifacts.display()));
    fuzzer.args(["-timeout=60", "-rss_limit_mb=2048", "-print_final_stats=1"]);
    fuzzer.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let status = fuzzer.status().with_context(|| format!("cannot start {}", target.name))?;
    let log = std::fs::read_to_string(&target.log)
        .with_context(|| format!("cannot read {}", target.log.display()))?;
    if status.success() {
        println!("fuzz: {}: {}", target.name, summary(&log));
        return Ok(());
    }
    eprintln!("{}", tail(&log));
    match artifact(&log) {
        Some(input) => bail!(
            "{} failed; replay with: cargo xtask fuzz {} --replay {}",
            target.name,
            target.name,
            relative(input).display()
        ),
        None => bail!("{} ended with {status}; see {}", target.name, target.log.display()),
    }
}

/// Adds the inputs to the committed corpus that reach code that it does not reach.
fn keep(target: &Target) -> Result<()> {
    let mut merge = Command::new(&target.binary);
    merge.arg("-merge=1").args([&target.seeds, &target.found]);
    merge.stdout(Stdio::null()).stderr(Stdio::null());
    process::run(merge)
}

/// The number of runs and the coverage, from libFuzzer's last lines.
fn summary(log: &str) -> String {
    let runs = log.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    let done = log.lines().rfind(|line| line.contains("DONE") && line.contains("cov:"));
    let done = done.and_then(|line| line.split_once("cov:"));
    let coverage = done.map_or("unknown", |(_, rest)| rest.split(" exec/s").next().unwrap_or(rest));
    format!("{} runs, coverage {}", runs.unwrap_or("unknown").trim(), coverage.trim())
}

fn artifact(log: &str) -> Option<&Path> {
    log.lines()
        .find_map(|line| line.split_once("Test unit written to "))
        .map(|(_, path)| Path::new(path))
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// `path` as seen from the current folder, if it is below.
fn relative(path: &Path) -> &Path {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(here).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "#2\tINITED cov: 5 ft: 5 corp: 1/1b exec/s: 0 rss: 30Mb\n\
        #900\tDONE   cov: 47 ft: 80 corp: 9/90b lim: 9 exec/s: 450 rss: 40Mb\n\
        stat::number_of_executed_units: 900\n";

    #[test]
    fn the_summary_tells_runs_and_coverage() {
        assert_eq!(summary(LOG), "900 runs, coverage 47 ft: 80 corp: 9/90b lim: 9");
    }

    #[test]
    fn the_artifact_is_found() {
        let log = "artifact_prefix='a/'; Test unit written to a/crash-1\nBase64: AA==\n";
        assert_eq!(artifact(log), Some(Path::new("a/crash-1")));
        assert_eq!(artifact(LOG), None);
    }
}
