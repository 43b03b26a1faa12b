//! A server in the background: a process that goes on when the command that started it has ended.
//!
//! Guarantees: what the server says until it listens is passed on, and its exit status where it
//! never does. Afterwards it has neither standard output nor standard error, so that a program that
//! reads those of the command does not wait for its end; a terminal's Ctrl-C is not for it. Where
//! the command ends before, so does the server: it cannot say that it listens.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use blockhouse_engine::keep_descriptors_from_children;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{called_as, output};

/// The option of a server that was started in the background: it ends the lines that say where it
/// listens with an empty one.
pub const OPTION: &str = "--in-background";

/// Bytes that are passed on together.
const CHUNK: usize = 4096;

/// The outcome of starting a server.
pub enum Started {
    /// Everything listens. The lines that say where.
    Listens(String),
    /// It has ended before, and said why.
    Ended(ExitCode),
}

/// Starts `blockhouse` with the words of a `serve` command, [`OPTION`] among them, and waits until
/// it listens or has ended. It inherits standard input and descriptors only where a word names a
/// file by one.
///
/// # Errors
/// It cannot be started, or was killed by a signal before it listened.
pub fn start(words: Vec<OsString>) -> Result<Started> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let names = |file: &[u8]| {
        words.iter().any(|word| word.as_bytes().windows(file.len()).any(|part| part == file))
    };
    let mut command = Command::new(program);
    command.stdin(if names(b"/dev/stdin") { Stdio::inherit() } else { Stdio::null() });
    if !names(b"/fd/") {
        keep_descriptors_from_children().context("cannot start the server")?;
    }
    let mut words = &words[..];
    if let (true, Some(name), [_, rest @ ..]) =
        (called_as::is_qemu_nbd(), std::env::args_os().next(), words)
    {
        // The name stands for the command.
        command.arg0(name);
        words = rest;
    }
    command.args(words).process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = command.spawn().context("cannot start the server")?;
    let outcome = until_it_listens(&mut server);
    if outcome.is_err() {
        // Where it has not ended, it would run unknown to its user.
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
    /// The bytes that came from standard output.
    lines: Vec<u8>,
}

impl Output {
    fn of(server: &mut Child) -> Option<Self> {
        let (stdout, stderr) = (server.stdout.take()?, server.stderr.take()?);
        Some(Self { stdout, stderr, lines: Vec::new() })
    }

    /// Passes on what is said until everything listens: false where standard output ends before.
    fn pass_on_until_ready(&mut self) -> io::Result<bool> {
        loop {
            let [says, complains] = self.wait(None)?;
            if complains && !self.pass_on_some()? && !says {
                // Closed: only the other one is worth waiting for.
                return self.read_lines_to_the_end();
            }
            if says && self.read_lines()? == 0 {
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

    /// Passes on what standard error has; false at its end.
    fn pass_on_some(&mut self) -> io::Result<bool> {
        let mut bytes = [0; CHUNK];
        let length = self.stderr.read(&mut bytes)?;
        output::pass_on(&bytes[..length]);
        Ok(length > 0)
    }

    /// Passes on what standard error has now.
    fn pass_on(&mut self) -> io::Result<()> {
        while self.wait(Some(&Timespec::default()))?[1] && self.pass_on_some()? {}
        Ok(())
    }

    /// Which of standard output and standard error has something to read, or has ended.
    fn wait(&self, limit: Option<&Timespec>) -> io::Result<[bool; 2]> {
        let mut both =
            [PollFd::new(&self.stdout, PollFlags::IN), PollFd::new(&self.stderr, PollFlags::IN)];
        poll(&mut both, limit)?;
        Ok(both.map(|one| !one.revents().is_empty()))
    }
}
