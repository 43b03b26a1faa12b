//! `cargo xtask ci`: all checks that must pass before a change is merged, the quick ones first.
//!
//! Stops at the first failure. Each step ends with a line saying how long it took. Long steps are
//! left out, or shortened, if nothing that they test has changed since the last commit that passed
//! all of them (`changes`). The first line says which; `--all` runs all steps in full.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::changes::{self, Changes};
use crate::test::{self, Seeds};
use crate::test_programs::OnFailure;
use crate::{deny, fuzz, lab, tidy};
use lab_tools::process::{self, cargo};
use lab_tools::workspace::Workspace;

/// Seconds for each target: enough to notice a broken target, not to find rare bugs.
const FUZZ_SECONDS: u64 = 8;
/// Seconds for killed servers: enough for some of all combinations, others each time.
const KILL_SECONDS: &str = "20";

/// The files of packages that the deny step reads.
const DENY: &[&str] = &[changes::MANIFESTS];
/// The packages that the kill step tests.
const KILL: &[&str] = &["blockhouse-daemon", "lab-kill"];
/// The packages in `crates/` that fuzz targets use, and the targets.
const FUZZ: &[&str] = &["blockhouse-qmp", "blockhouse-fuzz"];
/// The scenarios of `cargo xtask vm`, and the package that each tests.
const SCENARIOS: &[(&str, &str)] = &[
    ("fua", "blockhouse-disk"),
    ("first-writes", "blockhouse-disk"),
    ("power", "blockhouse-disk"),
    ("guest", "blockhouse-nbd"),
    ("guest-vhost-user", "blockhouse-vhost-user"),
    ("nbd", "blockhouse-nbd"),
    ("ublk", "blockhouse-ublk"),
    ("ublk-pages", "blockhouse-ublk"),
    ("ublk-costs", "blockhouse-ublk"),
    ("ublk-nvme", "blockhouse-ublk"),
    ("ublk-hostile", "blockhouse-ublk"),
    ("attach-nbd", "blockhouse-kernel-nbd"),
    ("io-poll", "blockhouse-disk"),
    ("lost-writes", "blockhouse-disk"),
];

/// The reason to run everything that a person gives.
const ALL: &str = "--all";

/// A name, and the step, which may name tests that failed once.
type Step = (&'static str, fn(&Workspace, &Changes, &mut Vec<String>) -> Result<()>);

const STEPS: &[Step] = &[
    ("fmt", |workspace, _, _| {
        cargo_step(workspace, "fmt --all --check", None)?;
        fuzz::check_format(workspace)
    }),
    ("tidy", |workspace, _, _| tidy::run(workspace)),
    ("clippy", |workspace, _, _| {
        cargo_step(workspace, "clippy --workspace --all-targets --locked -- -D warnings", None)
    }),
    ("doc", |workspace, _, _| {
        let flags = Some(("RUSTDOCFLAGS", "-Dwarnings"));
        cargo_step(workspace, "doc --workspace --no-deps --locked", flags)
    }),
    ("deny", |workspace, changes, _| {
        if !changes.reach(DENY) {
            return Ok(());
        }
        deny::run(workspace)
    }),
    ("test", |workspace, changes, failed_once| {
        let is_whole = matches!(changes, Changes::Everything(reason) if reason == ALL);
        let seeds = if is_whole { Seeds::All } else { Seeds::Quarter };
        *failed_once = test::run(workspace, seeds, OnFailure::Repeat)?;
        Ok(())
    }),
    ("kill", |workspace, changes, _| {
        if !changes.reach(KILL) {
            return Ok(());
        }
        lab::run(workspace, "lab-kill", &["--seconds", KILL_SECONDS])?;
        // A server that is wrong on purpose must fail.
        lab::run(workspace, "lab-kill", &["load", "--without-state", "--seconds", "60"])
    }),
    ("vm", |workspace, changes, _| {
        let reached: Vec<_> = scenarios(changes, true).collect();
        if reached.is_empty() { Ok(()) } else { lab::run(workspace, "lab-vm", &reached) }
    }),
    ("fuzz", |workspace, changes, _| {
        if !changes.reach(FUZZ) {
            return Ok(());
        }
        fuzz::run(workspace, &fuzz::Options::all(FUZZ_SECONDS))?;
        fuzz::lint(workspace)
    }),
];

/// Runs all steps; with `all` also those that no change affects. Records the commit if no step was
/// left out, and no test failed at first.
pub fn run(workspace: &Workspace, all: bool) -> Result<()> {
    let started = Instant::now();
    let changes =
        if all { Changes::Everything(ALL.to_owned()) } else { Changes::since_proven(workspace) };
    let left_out = left_out(&changes);
    println!("ci: {}", said(&changes, &left_out));
    let mut failed_once = Vec::new();
    for (name, step) in STEPS {
        let step_started = Instant::now();
        println!("ci: {name} ...");
        let result = step(workspace, &changes, &mut failed_once);
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!("ci: {name} {verdict} after {:.1} s", step_started.elapsed().as_secs_f64());
        result.with_context(|| format!("step {name}"))?;
    }
    if !failed_once.is_empty() {
        println!("ci: failed once, then passed: {}", failed_once.join(", "));
    }
    println!("ci: all clean after {:.1} s", started.elapsed().as_secs_f64());
    let is_proven = left_out.is_empty() && failed_once.is_empty();
    if is_proven { changes::note_proven(workspace) } else { Ok(()) }
}

/// The scenarios that `changes` affect, or those that they do not.
fn scenarios(changes: &Changes, reached: bool) -> impl Iterator<Item = &'static str> {
    let of_these = SCENARIOS
        .iter()
        .filter(move |(_, package)| changes.reach(&[*package, "lab-vm"]) == reached);
    of_these.map(|(name, _)| *name)
}

/// The steps that are not run.
fn left_out(changes: &Changes) -> Vec<String> {
    let whole = [("deny", DENY), ("kill", KILL), ("fuzz", FUZZ)];
    let mut names: Vec<_> = whole
        .iter()
        .filter(|(_, packages)| !changes.reach(packages))
        .map(|(name, _)| (*name).to_owned())
        .collect();
    names.extend(scenarios(changes, false).map(|scenario| format!("vm {scenario}")));
    names
}

/// The line that says which steps are not run, and why.
fn said(changes: &Changes, left_out: &[String]) -> String {
    match changes {
        Changes::Everything(reason) => format!("every step: {reason}"),
        Changes::Packages { commit, .. } if left_out.is_empty() => {
            format!("every step: all have changed since {commit}")
        }
        Changes::Packages { commit, .. } => format!(
            "left out, because nothing that they show has changed since {commit}: {}",
            left_out.join(", ")
        ),
    }
}

fn cargo_step(workspace: &Workspace, line: &str, env: Option<(&str, &str)>) -> Result<()> {
    let mut command = cargo(line.split(' '));
    command.current_dir(workspace.root()).envs(env);
    process::run(command)
}
