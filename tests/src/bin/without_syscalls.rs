//! `without_syscalls NAME,NAME COMMAND ARGUMENT...`: executes a command to which the kernel refuses
//! these system calls with EPERM, as the seccomp profiles of container engines do.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, exit};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

fn main() {
    let error = execute().expect_err("a success never returns");
    eprintln!("without_syscalls: {error:#}");
    exit(127);
}

fn execute() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let names = arguments.next().context("no system calls are named")?;
    let program = arguments.next().context("no command is named")?;
    let names = names.to_str().context("system calls have plain names")?;
    let rules = names.split(',').map(|name| Ok((number(name)?, Vec::new())));
    let filter = SeccompFilter::new(
        rules.collect::<Result<BTreeMap<_, _>>>()?,
        SeccompAction::Allow,
        SeccompAction::Errno(Errno::PERM.raw_os_error() as u32),
        std::env::consts::ARCH.try_into()?,
    )?;
    apply_filter(&BpfProgram::try_from(filter)?)?;
    Err(Command::new(program).args(arguments).exec().into())
}

/// The number of a system call. Those that came with the kernels of this decade have the same one
/// on every architecture.
fn number(name: &str) -> Result<i64> {
    Ok(match (name, std::env::consts::ARCH) {
        ("io_uring_setup", _) => 425,
        ("io_setup", "x86_64") => 206,
        ("io_setup", "aarch64" | "riscv64") => 0,
        _ => bail!("the number of {name} is not known here"),
    })
}
