//! Chores that anyone can run: `cargo xtask --help` lists them.
//!
//! A chore prints what it does, leaves nothing behind outside `target/`, and exits 0 when it is done
//! and 1 with one line on standard error when it is not.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a chore talks to the person who started it")]

mod apt;
mod ci;
mod compare;
mod deny;
mod fuzz;
mod loom;
mod process;
mod soak;
mod test;
mod tidy;
mod vm;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Chores of the Blockhouse workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Install what the tests need, then run all tests and the loom models
    Test {
        /// Passed on to `cargo test`; with any, the loom models are left out
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run the loom models
    Loom,
    /// Fuzz everything that reads what others wrote
    Fuzz(fuzz::Options),
    /// Crash disks in the simulator, millions of times, each time by other seeds
    Soak(soak::Options),
    /// Check the rules that no compiler checks: lengths, headers, floors, banned words
    Tidy,
    /// Check licences, bans and sources of all dependencies, and advisories where reachable
    Deny,
    /// Compare the speed of Blockhouse with qemu-storage-daemon and nbdkit
    Compare(Box<compare::Options>),
    /// Serve nothing, as fast as the light client of `compare` can ask: that client's own limit
    #[command(hide = true)]
    Answerer {
        /// Unix socket to listen on
        socket: PathBuf,
        /// Bytes in the export
        size: u64,
    },
    /// Prove durability on a real kernel, in a virtual machine
    Vm(vm::Options),
    /// The other side of `vm`, inside the guest
    #[command(hide = true, subcommand)]
    Inside(vm::inside::Task),
    /// Everything that must be clean before a change lands
    Ci,
}

fn main() -> ExitCode {
    let result = match Cli::parse().chore {
        // Where it runs there is no cargo to ask.
        Chore::Inside(task) => vm::inside::run(task),
        chore => Workspace::find().and_then(|workspace| run(chore, &workspace)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore, workspace: &Workspace) -> anyhow::Result<()> {
    match chore {
        Chore::Test { args } => test::run(workspace, &args),
        Chore::Loom => loom::run(workspace),
        Chore::Fuzz(options) => fuzz::run(workspace, &options),
        Chore::Soak(options) => soak::run(workspace, &options),
        Chore::Tidy => tidy::run(workspace),
        Chore::Deny => deny::run(workspace),
        Chore::Compare(options) => compare::run(workspace, &options),
        Chore::Answerer { socket, size } => compare::answerer::serve(&socket, size),
        Chore::Vm(options) => vm::run(workspace, &options),
        Chore::Inside(task) => vm::inside::run(task),
        Chore::Ci => ci::run(workspace),
    }
}
