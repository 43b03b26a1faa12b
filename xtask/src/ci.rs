//! `cargo xtask ci`: everything that must be clean before a change lands, the quick checks first.
//!
//! Stops at the first failure. Each step ends with a line saying how long it took.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::{deny, fuzz, lab, test, tidy};
use lab_tools::process::{self, cargo};
use lab_tools::workspace::Workspace;

/// For each target: enough to notice what is broken now, not to find what is hidden.
const FUZZ_SECONDS: u64 = 8;
/// For servers that are killed: a part of all combinations, another one each time.
const KILL_SECONDS: &str = "20";

type Step = (&'static str, fn(&Workspace) -> Result<()>);

const STEPS: &[Step] = &[
    ("fmt", |workspace| {
        cargo_step(workspace, "fmt --all --check", None)?;
        fuzz::check_format(workspace)
    }),
    ("tidy", tidy::run),
    ("clippy", |workspace| {
        cargo_step(workspace, "clippy --workspace --all-targets --locked -- -D warnings", None)
    }),
    ("doc", |workspace| {
        let flags = Some(("RUSTDOCFLAGS", "-Dwarnings"));
        cargo_step(workspace, "doc --workspace --no-deps --locked", flags)
    }),
    ("deny", deny::run),
    ("test", |workspace| test::run(workspace, &[])),
    ("kill", |_| {
        lab::run("lab-kill", &["--seconds", KILL_SECONDS])?;
        // Made wrong on purpose, it must fail.
        lab::run("lab-kill", &["load", "--without-state", "--seconds", "3"])
    }),
    ("vm", |_| lab::run("lab-vm", &[])),
    ("fuzz", |workspace| fuzz::run(workspace, &fuzz::Options::all(FUZZ_SECONDS))),
    ("fuzz-lint", fuzz::lint),
];

/// Runs all steps.
pub fn run(workspace: &Workspace) -> Result<()> {
    let started = Instant::now();
    for (name, step) in STEPS {
        let step_started = Instant::now();
        println!("ci: {name} ...");
        let result = step(workspace);
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!("ci: {name} {verdict} after {:.1} s", step_started.elapsed().as_secs_f64());
        result.with_context(|| format!("step {name}"))?;
    }
    println!("ci: all clean after {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn cargo_step(workspace: &Workspace, line: &str, env: Option<(&str, &str)>) -> Result<()> {
    let mut command = cargo(line.split(' '));
    command.current_dir(workspace.root()).envs(env);
    process::run(command)
}
