//! `cargo xtask soak`: repeats the crash tests, and the tests with hostile guests and clients
//! beside their neighbours, with other seeds each time, for a given time.
//!
//! They are compiled as for `cargo test`: optimised, with debug assertions. The first failure ends
//! the task, with the line that replays the failure.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use lab_tools::build::{BINARY, Profile, build_binary};
use lab_tools::process::{self, cargo};
use lab_tools::workspace::Workspace;

/// Crates whose tests crash simulated disks, and the common part of these tests' names. For jobs,
/// all tests, because those without crashes have errors, delays and racing guests.
const CRASHED: &[(&str, &str)] =
    &[("disk", "crash_at_every"), ("format", "crash_at_every"), ("jobs", "")];

/// The package and the tests of hostile parties and their neighbours, which use the binary itself.
const PARTIES: (&str, &str) = ("blockhouse-tests", "hostile_parties::");

/// Seconds for which the parties of each engine misbehave in a round.
const PARTY_SECONDS: u64 = 20;

/// Seeds for each run of a test: some 200,000 crashes, well under a minute on two processors.
const SEEDS_A_TIME: u64 = 500;

/// How long.
#[derive(clap::Args)]
pub struct Options {
    /// For how many minutes; the round that runs then is finished
    #[arg(long, default_value_t = 10)]
    minutes: u64,

    /// Run these seeds of the crash tests once, and nothing else; the line of each some hundred
    /// says how far it is
    #[arg(long, value_name = "FIRST..END", conflicts_with = "minutes")]
    seeds: Option<String>,

    /// Of the crash tests, run only those with this in their name, such as `restarts` for servers
    /// that die
    #[arg(long, value_name = "NAME", requires = "seeds")]
    only: Option<String>,

    /// Of the crash tests, run only those of this crate: disk, format or jobs
    #[arg(long = "crate", value_name = "NAME", requires = "seeds")]
    of_crate: Option<String>,

    /// Of the moments that tests of jobs would crash at, crash at one in this many: more seeds in
    /// the same time
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    one_moment_in: u32,
}

/// The crash tests of one package.
struct CrashTests<'a> {
    binary: PathBuf,
    /// The common part of the tests' names.
    filter: &'a str,
    one_moment_in: u32,
}

/// Runs rounds until the time is over.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let is_wanted = |name: &str| options.of_crate.as_ref().is_none_or(|wanted| wanted == name);
    let wanted = CRASHED.iter().filter(|(name, _)| is_wanted(name));
    let tests = wanted.map(|(name, filter)| {
        let filter = options.only.as_deref().unwrap_or(filter);
        let binary = build(workspace, &format!("blockhouse-{name}"))?;
        Ok(CrashTests { binary, filter, one_moment_in: options.one_moment_in })
    });
    let tests = tests.collect::<Result<Vec<_>>>()?;
    ensure!(!tests.is_empty(), "no crate of that name has crash tests: disk, format, jobs");
    if let Some(seeds) = &options.seeds {
        return run_seeds(workspace, &tests, parse_seeds(seeds)?);
    }
    let parties = build(workspace, PARTIES.0)?;
    let binary = build_binary(workspace, Profile::Dev)?;
    let until = Instant::now() + Duration::from_secs(options.minutes * 60);
    let mut crashes = 0;
    while Instant::now() < until {
        let first = RandomState::new().build_hasher().finish() >> 32;
        let seeds = format!("{first}..{}", first + SEEDS_A_TIME);
        for test in &tests {
            crashes += test.run(workspace, &seeds)?;
        }
        misbehave(workspace, &parties, &binary)?;
        println!("soak: seeds {seeds}: fine; {crashes} crashes so far");
    }
    Ok(())
}

fn parse_seeds(text: &str) -> Result<Range<u64>> {
    let parsed = text
        .split_once("..")
        .and_then(|(first, end)| Some(first.trim().parse().ok()?..end.trim().parse().ok()?));
    parsed.filter(|seeds: &Range<u64>| !seeds.is_empty()).with_context(|| {
        format!("--seeds {text}: two numbers are expected, the first and the end, such as 0..1000")
    })
}

/// Runs these seeds, some at a time for each test.
fn run_seeds(workspace: &Workspace, tests: &[CrashTests<'_>], seeds: Range<u64>) -> Result<()> {
    let (mut first, mut crashes) = (seeds.start, 0);
    let began = Instant::now();
    while first < seeds.end {
        let end = seeds.end.min(first + SEEDS_A_TIME);
        for test in tests {
            crashes += test.run(workspace, &format!("{first}..{end}"))?;
        }
        let minutes = began.elapsed().as_secs_f64() / 60.0;
        println!(
            "soak: seeds {}..{end} fine after {minutes:.1} min; {crashes} crashes",
            seeds.start
        );
        first = end;
    }
    Ok(())
}

/// Builds the integration tests of `package`.
fn build(workspace: &Workspace, package: &str) -> Result<PathBuf> {
    let mut build = cargo(["test", "--no-run", "--package", package, "--test", "it"]);
    build.current_dir(workspace.root());
    let built = process::executables(build)?.into_iter().find(|(name, _)| name == "it");
    Ok(built.with_context(|| format!("cargo built no integration tests of {package}"))?.1)
}

/// Runs hostile parties for some seconds.
fn misbehave(workspace: &Workspace, parties: &Path, binary: &Path) -> Result<()> {
    let mut command = Command::new(parties);
    command.args(["--nocapture", PARTIES.1]).current_dir(workspace.root());
    command.env(BINARY, binary);
    command.env("BLOCKHOUSE_HOSTILE_SECONDS", PARTY_SECONDS.to_string());
    let output = command.output().context("cannot start the hostile parties")?;
    check(&output, &String::from_utf8_lossy(&output.stderr), parties)
}

impl CrashTests<'_> {
    /// Runs one round; returns the number of crashes in the tests.
    fn run(&self, workspace: &Workspace, seeds: &str) -> Result<u64> {
        let mut command = Command::new(&self.binary);
        command.args(["--nocapture", self.filter]).current_dir(workspace.root());
        command.env("BLOCKHOUSE_SIM_SEEDS", seeds);
        command.env("BLOCKHOUSE_SIM_ONE_MOMENT_IN", self.one_moment_in.to_string());
        let output =
            command.output().with_context(|| format!("cannot start {}", self.binary.display()))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        check(&output, &said, &self.binary)?;
        Ok(crashes_in(&said))
    }
}

fn check(output: &Output, said: &str, test: &Path) -> Result<()> {
    if !output.status.success() {
        bail!("{}: {}\n{said}", test.display(), output.status);
    }
    Ok(())
}

/// The sum of the tests' reports: `crashes: N` in each.
fn crashes_in(said: &str) -> u64 {
    let numbers = said.split("crashes: ").skip(1).filter_map(|rest| {
        let end = rest.find(|char: char| !char.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse::<u64>().ok()
    });
    numbers.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_two_numbers() {
        assert_eq!(parse_seeds("3..7").unwrap(), 3..7);
        assert!(parse_seeds("7").is_err() && parse_seeds("7..7").is_err());
    }

    #[test]
    fn crashes_of_all_reports_count() {
        let said = "one: seeds 1..2, Report { failed: 3, crashes: 40 }\ntwo: Report { crashes: 2 }";
        assert_eq!(crashes_in(said), 42);
        assert_eq!(crashes_in("nothing"), 0);
    }
}
