//! The durable operations of a server on the host, counted by strace.
//!
//! The engine of the traced server must be `threads`: io_uring's operations are not system calls.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// The system calls that write or make durable.
const CALLS: &str = "trace=pwritev2,pwritev,pwrite64,fdatasync,fsync";

/// The system calls of a server, logged before each returns.
pub struct Strace {
    log: PathBuf,
}

/// The calls in a part of the disk, and the flushes after its writes until the next part's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyscallCounts {
    /// Writes without durability.
    pub plain: u64,
    /// Durable writes.
    pub durable: u64,
    /// Flushes of the file.
    pub flushes: u64,
}

impl Strace {
    /// A trace that is written to `log`.
    pub fn new(log: PathBuf) -> Self {
        Self { log }
    }

    /// A command that starts `program` and traces it. The child process is the program, not strace.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("strace");
        command.args(["-D", "-f", "-qq", "-s", "0", "-e", "signal=none", "-e", CALLS, "-o"]);
        command.arg(&self.log).arg("--").arg(program);
        command
    }

    /// The calls in each part of the disk. The parts begin at these offsets; the last one has no
    /// end.
    pub fn calls(&self, parts: &[u64]) -> Result<Vec<SyscallCounts>> {
        let log = std::fs::read_to_string(&self.log)
            .with_context(|| format!("cannot read {}", self.log.display()))?;
        sort(&log, parts)
    }
}

fn sort(log: &str, parts: &[u64]) -> Result<Vec<SyscallCounts>> {
    let mut calls = vec![SyscallCounts::default(); parts.len()];
    let mut current = None;
    for line in log.lines() {
        let Some((name, arguments)) = beginning(line) else { continue };
        if matches!(name, "fdatasync" | "fsync") {
            if let Some(part) = current {
                let part: &mut SyscallCounts = &mut calls[part];
                part.flushes += 1;
            }
            continue;
        }
        let mut last = arguments.rsplit(", ");
        let flags = if name == "pwritev2" { last.next() } else { None };
        let offset = last.next().and_then(|offset| offset.parse::<u64>().ok());
        let offset = offset.with_context(|| format!("strace wrote: {line}"))?;
        current = parts.iter().rposition(|start| *start <= offset);
        let Some(part) = current else { continue };
        if flags.is_some_and(|flags| flags.contains("RWF_DSYNC")) {
            calls[part].durable += 1
        } else {
            calls[part].plain += 1
        }
    }
    Ok(calls)
}

/// The name and arguments of the call that begins in this line, after the thread's number. If lines
/// of other threads interrupt a call, its second line repeats neither.
fn beginning(line: &str) -> Option<(&str, &str)> {
    let text = line.split_once(char::is_whitespace)?.1.trim_start();
    let (name, rest) = text.split_once('(').filter(|(name, _)| !name.contains(' '))?;
    let arguments = match rest.rsplit_once(" = ") {
        Some((arguments, _)) => arguments.trim_end().strip_suffix(')')?,
        None => rest.strip_suffix(" <unfinished ...>")?.trim_end_matches([')', ' ']),
    };
    Some((name, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_where_they_belong() {
        let log = "7  pwritev2(9, [{iov_base=\"\"..., iov_len=4096}], 1, 8192, 0) = 4096\n\
            7  fdatasync(9 <unfinished ...>\n\
            8  pwritev2(9, [{iov_base=\"\"..., iov_len=4096}], 1, 1048576, 0 <unfinished ...>\n\
            7  <... fdatasync resumed>)       = 0\n\
            8  <... pwritev2 resumed>)        = 4096\n\
            7  fdatasync(9)                   = 0\n\
            7  pwritev2(9, [{iov_base=\"\"..., iov_len=4096}], 1, 2097152, RWF_DSYNC) = 4096\n\
            7  pwrite64(9, \"\"..., 4096, 2101248) = 4096\n";
        let calls = sort(log, &[1 << 20, 2 << 20]).expect("lines of strace");
        assert_eq!(calls[0], SyscallCounts { plain: 1, durable: 0, flushes: 1 });
        assert_eq!(calls[1], SyscallCounts { plain: 1, durable: 1, flushes: 0 });
        assert!(sort("7 pwritev2(9, what, 0) = 1", &[0]).is_err());
    }
}
