//! A server in the background: a process that keeps running after the command that started it ends.
//!
//! Guarantees: the command forwards the server's standard error until the server listens. If the
//! server ends before that, the command ends with the server's exit status. A listening server has
//! closed the standard output and error that it shared with the command, so a program that reads
//! the command's output to its end does not wait for the server. The server is in a process group
//! of its own, so that Ctrl-C does not end it. If the command ends before the server listens, the
//! server ends, because it cannot report that it listens.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use blockhouse_engine::keep_descriptors_from_children;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::called_as::Tool;
use crate::{called_as, output};

/// The option that starts a server in the background. Such a server prints an empty line after the
/// lines with the addresses at which it listens.
pub const OPTION: &str = "--in-background";

/// The texts in arguments that name a descriptor; the last three are those of qemu-storage-daemon.
const DESCRIPTORS: [&[u8]; 4] = [b"/fd/", b"fd=", b"=fd", b"\"fd\""];

/// Bytes of one read of the server's output.
const CHUNK: usize = 4096;

/// The outcome of starting a server.
pub enum Started {
    /// The server listens at the addresses in these lines.
    Listens(String),
    /// The server ended before it listened, and printed the reason.
    Ended(ExitCode),
}

/// Starts `blockhouse` with the arguments of a `serve` command, which include [`OPTION`], and waits
/// until the server listens or has ended. The server inherits standard input and other descriptors
/// only if an argument names one (`/dev/stdin`, `/dev/fd/3`, `fd=3`).
///
/// # Errors
/// The server cannot be started, or was killed by a signal before it listened.
pub fn start(words: Vec<OsString>) -> Result<Started> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let names = |file: &[u8]| {
        words.iter().any(|word| word.as_bytes().windows(file.len()).any(|part| part == file))
    };
    let mut command = Command::new(program);
    command.stdin(if names(b"/dev/stdin") { Stdio::inherit() } else { Stdio::null() });
    if !DESCRIPTORS.iter().any(|text| names(text)) {
        keep_descriptors_from_children().context("cannot start the server")?;
    }
    let mut words = &words[..];
    let implied = called_as::tool().and_then(Tool::implied_command);
    if let (Some(_), Some(name), [_, rest @ ..]) = (implied, std::env::args_os().next(), words) {
        // The program name selects the command, so the word of the command is left out.
        command.arg0(name);
        words = rest;
    }
    command.args(words).process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = command.spawn().context("cannot start the server")?;
    let outcome = until_it_listens(&mut server);
    if outcome.is_err() {
        // The server is killed, because otherwise it would keep running without the user's
        // knowledge.
        let _ = server.kill();
    }
    outcome
}

fn until_it_listens(server: &mut Child) -> Result<Started> {
    let mut output = Output::of(server).context("the server has no output")?;
    if output.pass_on_until_ready().context("cannot read from the server")? {
        let lines = String::from_utf8_lossy(&output.lines).trim_end().to_owned();
        return Ok(Started::Listens(lines));
    }
    let status = server.wait().context("cannot wait for the server")?;
    output.pass_on().context("cannot read from the server")?;
    match status.code() {
        Some(code) => Ok(Started::Ended(ExitCode::from(u8::try_from(code).unwrap_or(1)))),
        None => bail!("the server ended before it listened: {status}"),
    }
}

/// Standard output and standard error of a server.
struct Output {
    stdout: ChildStdout,
    stderr: ChildStderr,
    /// The bytes read from standard output.
    lines: Vec<u8>,
}

impl Output {
    fn of(server: &mut Child) -> Option<Self> {
        let (stdout, stderr) = (server.stdout.take()?, server.stderr.take()?);
        Some(Self { stdout, stderr, lines: Vec::new() })
    }

    /// Forwards standard error and collects standard output until the server listens; false if
    /// standard output ends before that.
    fn pass_on_until_ready(&mut self) -> io::Result<bool> {
        loop {
            let [has_output, has_errors] = self.wait(None)?;
            if has_errors && !self.pass_on_some()? && !has_output {
                // Standard error is closed, so `poll` would always return at once for it.
                return self.read_lines_to_the_end();
            }
            if has_output && self.read_lines()? == 0 {
                return Ok(false);
            }
            if self.is_ready() {
                self.pass_on()?;
                return Ok(true);
            }
        }
    }

    fn read_lines_to_the_end(&mut self) -> io::Result<bool> {
        while !self.is_ready() {
            if self.read_lines()? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_ready(&self) -> bool {
        self.lines.ends_with(b"\n\n")
    }

    fn read_lines(&mut self) -> io::Result<usize> {
        let mut bytes = [0; CHUNK];
        let length = self.stdout.read(&mut bytes)?;
        self.lines.extend_from_slice(&bytes[..length]);
        Ok(length)
    }

    /// Forwards the next bytes of standard error; false at its end.
    fn pass_on_some(&mut self) -> io::Result<bool> {
        let mut bytes = [0; CHUNK];
        let length = self.stderr.read(&mut bytes)?;
        output::pass_on(&bytes[..length]);
        Ok(length > 0)
    }

    /// Forwards the available bytes of standard error, without waiting for more.
    fn pass_on(&mut self) -> io::Result<()> {
        while self.wait(Some(&Timespec::default()))?[1] && self.pass_on_some()? {}
        Ok(())
    }

    /// Waits until standard output or standard error can be read or has ended. Returns this for
    /// each of the two.
    fn wait(&self, limit: Option<&Timespec>) -> io::Result<[bool; 2]> {
        let mut both =
            [PollFd::new(&self.stdout, PollFlags::IN), PollFd::new(&self.stderr, PollFlags::IN)];
        poll(&mut both, limit)?;
        Ok(both.map(|one| !one.revents().is_empty()))
    }
}
