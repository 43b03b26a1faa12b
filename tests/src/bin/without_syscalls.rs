//! `without_syscalls NAME,NAME COMMAND ARGUMENT...`: executes a command for which some system calls
//! fail, as under the seccomp profiles of container engines and on old kernels.
#![forbid(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::process::{Command, exit};

use anyhow::{Context, Result, bail};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};

fn main() {
    let error = execute().expect_err("a success never returns");
    eprintln!("without_syscalls: {error:#}");
    exit(127);
}

fn execute() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let names = arguments.next().context("no system calls are named")?;
    let program = arguments.next().context("no command is named")?;
    for name in names.to_str().context("system calls have plain names")?.split(',') {
        refuse(name)?;
    }
    Err(Command::new(program).args(arguments).exec().into())
}

/// Makes the kernel refuse a system call to this process and to the program that it executes.
fn refuse(name: &str) -> Result<()> {
    let (call, rules, errno) = match name {
        "io_uring_setup" => (libc::SYS_io_uring_setup, Vec::new(), libc::EPERM),
        "io_setup" => (libc::SYS_io_setup, Vec::new(), libc::EPERM),
        // As on a kernel without Landlock.
        "landlock" => (libc::SYS_landlock_create_ruleset, Vec::new(), libc::ENOSYS),
        "durable-pwritev2" => {
            let dsync = SeccompCmpOp::MaskedEq(libc::RWF_DSYNC as u64);
            let flags =
                SeccompCondition::new(5, SeccompCmpArgLen::Dword, dsync, libc::RWF_DSYNC as u64);
            (libc::SYS_pwritev2, vec![SeccompRule::new(vec![flags?])?], libc::EOPNOTSUPP)
        }
        _ => bail!("{name} cannot be refused"),
    };
    let filter = SeccompFilter::new(
        [(call, rules)].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno as u32),
        std::env::consts::ARCH.try_into()?,
    )?;
    Ok(apply_filter(&BpfProgram::try_from(filter)?)?)
}
