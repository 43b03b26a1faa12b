//! `cargo xtask compare`, `cargo xtask vm` and `cargo xtask kill`: separate programs, built only
//! when they are run, or with the tests.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Error, Result};
use lab_tools::build::{BINARY, Built};
use lab_tools::process::{self, cargo};
use lab_tools::workspace::Workspace;

/// The program that measures.
pub const COMPARE: &str = "lab-compare";

/// The arguments of such a program.
#[derive(clap::Args)]
pub struct Args {
    /// Passed on
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Replaces this process by the program of `package` (exec), so that the program gets this
/// process's signals.
pub fn exec(package: &str, args: &Args) -> Result<()> {
    let mut command = program(package);
    command.args(&args.args);
    let error = command.exec();
    Err(Error::new(error).context(format!("cannot start {}", process::line(&command))))
}

/// Runs the program of `package` with these arguments; it was built with the tests, and so was the
/// binary under test.
pub fn run(workspace: &Workspace, package: &str, args: &[&str]) -> Result<()> {
    let built = Built::all(workspace)?;
    let mut command = Command::new(built.program(package)?);
    command.args(args).env(BINARY, built.program("blockhouse")?);
    process::run(command)
}

/// The command that runs the program of `package`. Relative paths in its arguments are relative to
/// the current folder.
fn program(package: &str) -> Command {
    let mut run = cargo(["run", "--quiet", "--package", package]);
    if package == COMPARE {
        // A client that is not optimized would limit what it measures.
        run.args(["--profile", "dist"]);
    }
    run.arg("--");
    run
}
