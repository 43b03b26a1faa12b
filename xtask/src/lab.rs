//! `cargo xtask compare`, `cargo xtask vm` and `cargo xtask kill`: programs of their own, built
//! only when they are asked for.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Error, Result};
use lab_tools::process::{self, cargo};

/// The arguments of such a program.
#[derive(clap::Args)]
pub struct Args {
    /// Passed on
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Becomes the program of `package`, so that a signal to this process is one to it.
pub fn exec(package: &str, args: &Args) -> Result<()> {
    let mut command = program(package);
    command.args(&args.args);
    let error = command.exec();
    Err(Error::new(error).context(format!("cannot start {}", process::line(&command))))
}

/// Runs the program of `package` with these arguments.
pub fn run(package: &str, args: &[&str]) -> Result<()> {
    let mut command = program(package);
    command.args(args);
    process::run(command)
}

/// Relative paths in its arguments are those of the current folder.
fn program(package: &str) -> Command {
    cargo(["run", "--quiet", "--package", package, "--"])
}
