//! Tasks that anyone can run: `cargo xtask --help` lists them.
//!
//! A task prints what it does and leaves no files outside `target/`. It exits with 0 on success,
//! else with 1 and one line on standard error.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a task talks to the person who started it")]

mod changes;
mod ci;
mod deny;
mod dist;
mod fuzz;
mod lab;
mod map;
mod options;
mod soak;
mod test;
mod test_programs;
mod tidy;
mod tools;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use lab_tools::workspace::Workspace;

use crate::test::Seeds;
use crate::test_programs::OnFailure;

/// Tasks of the Blockhouse workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what the tests need, then run all tests
    Test {
        /// Explore all seeds of the simulator's tests, not a quarter of them (other ones each time)
        #[arg(long)]
        all_seeds: bool,

        /// Passed on to `cargo test`, which then runs what they select, with all seeds
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Fuzz everything that reads what others wrote
    Fuzz(fuzz::Options),
    /// Crash disks in the simulator, millions of times, each time by other seeds
    Soak(soak::Options),
    /// Check the rules that no compiler checks: lengths, headers, circles, layers, unsafe code,
    /// documentation
    Tidy,
    /// Say which file is about what: all, or those whose path or first line has WORD
    Map {
        /// Words that a line must have, in any case
        #[arg(value_name = "WORD")]
        words: Vec<String>,
    },
    /// Make the option reference, the control socket's schema, man pages and completions in
    /// target/generated
    Options,
    /// Check licences, bans and sources of all dependencies, and advisories where reachable
    Deny,
    /// Make a Debian package, a static binary and the file tree of an OCI image
    Dist(dist::Options),
    /// Make all that is published of a version: packages, checksums and notes, in
    /// target/release-VERSION
    Release(dist::ReleaseOptions),
    /// Compare the speed of Blockhouse with qemu-storage-daemon and nbdkit (`lab/compare`)
    #[command(disable_help_flag = true)]
    Compare(lab::Args),
    /// Prove durability on a real kernel, in a virtual machine (`lab/vm`)
    #[command(disable_help_flag = true)]
    Vm(lab::Args),
    /// Kill servers under load, and look whether what they answered is there (`lab/kill`)
    #[command(disable_help_flag = true)]
    Kill(lab::Args),
    /// Everything that must be clean before a change lands
    Ci {
        /// Run the steps, too, that show only what has not changed since the commit in
        /// `.ci/proven`
        #[arg(long)]
        all: bool,
    },
}

fn main() -> ExitCode {
    let task = Cli::parse().task;
    match Workspace::find().and_then(|workspace| run(task, &workspace)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task, workspace: &Workspace) -> anyhow::Result<()> {
    match task {
        Task::Test { args, all_seeds } if args.is_empty() => {
            let seeds = if all_seeds { Seeds::All } else { Seeds::Quarter };
            test::run(workspace, seeds, OnFailure::Fail).map(drop)
        }
        Task::Test { args, .. } => test::run_some(workspace, &args),
        Task::Fuzz(options) => fuzz::run(workspace, &options),
        Task::Soak(options) => soak::run(workspace, &options),
        Task::Tidy => tidy::run(workspace),
        Task::Map { words } => map::run(workspace, &words),
        Task::Options => options::run(workspace),
        Task::Deny => deny::run(workspace),
        Task::Dist(options) => dist::run(workspace, &options),
        Task::Release(options) => dist::run_release(workspace, &options),
        Task::Compare(args) => lab::exec(lab::COMPARE, &args),
        Task::Vm(args) => lab::exec("lab-vm", &args),
        Task::Kill(args) => lab::exec("lab-kill", &args),
        Task::Ci { all } => ci::run(workspace, all),
    }
}
