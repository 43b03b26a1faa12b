//! The launcher: a small process beside the server that starts other programs for it.
//!
//! A server in its sandbox cannot execute programs, but an upgrade must start one. So the server
//! starts this process before anything else. It is the same program (`blockhouse __launch`),
//! without the server's data in its memory, and never parses untrusted input.
//!
//! Guarantees: the launcher starts nothing before it has received its rules, which then never
//! change. It starts only its own program, or a program that the operator has named
//! (`--upgrade-to`) in a place where the server cannot write. It gives each program the arguments
//! of the rules and no capability that the server would drop, and starts one program at a time. It
//! sends signals only to programs that it has started. It ends with the server, but does not end
//! the process that took over.
//!
//! - [`Launcher`]: the server's end
//! - [`run`]: the process
//! - `reach`: whether the server could have written a program
//! - `protocol`: the messages between the two

mod process;
mod protocol;
mod reach;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use blockhouse_config::user_options::UserIds;
use parking_lot::Mutex;
pub use process::{run, serve_stranger};
use protocol::{Channel, Reply, Request, Rules};
pub use reach::read_mounts;

use crate::sandbox::Reach;

/// The hidden command that runs the launcher.
pub const WORD: &str = "__launch";

/// The server's end of the connection to its launcher.
pub(crate) struct Launcher(Result<Mutex<Channel>, String>);

/// A process that a launcher has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launched {
    /// The id.
    pub(crate) process: u32,
    /// The program.
    pub(crate) program: PathBuf,
}

impl Launcher {
    /// Starts the process, which does nothing before it receives its rules. If that fails, the
    /// server still serves, and each use of the launcher returns the reason.
    pub(crate) fn start() -> Self {
        let started = start().map_err(|error| format!("{error:#}"));
        if let Err(why) = &started {
            tracing::warn!("this server cannot be upgraded while it runs: {why}");
        }
        Self(started)
    }

    /// Sends the launcher its rules, once and before anything is served.
    pub(crate) fn tell(&self, rules: LaunchRules) {
        let Ok(channel) = &self.0 else { return };
        let bytes = OsString::into_vec;
        let rules = Rules {
            arguments: rules.arguments.into_iter().map(bytes).collect(),
            programs: rules.programs.into_iter().map(|path| bytes(path.into())).collect(),
            reach: reach::told(&rules.reach),
            capabilities: rules.capabilities,
            user: rules.user.map(|UserIds { user, group }| (user, group)),
        };
        // If the launcher has ended, the first request reports that.
        let _ = channel.lock().send(&Request::Rules(rules), None);
    }

    /// Starts a program with the server's command line for a hand-over, and this standard input.
    /// `None` means the first program of the rules, or this server's own program if there is none.
    ///
    /// # Errors
    /// The program cannot be started, or the rules forbid it.
    pub(crate) fn launch(&self, binary: Option<&Path>, stdin: OwnedFd) -> Result<Launched> {
        let binary = binary.map(|path| path.as_os_str().as_bytes().to_vec());
        match self.ask(&Request::Start { binary }, Some(stdin))? {
            Reply::Started { process, program } => {
                let program = PathBuf::from(OsString::from_vec(program));
                Ok(Launched { process, program })
            }
            Reply::Refused { why } => bail!(why),
            other => bail!("the launcher answered {other:?}"),
        }
    }

    /// Kills the process that was launched last, and waits for its end.
    ///
    /// # Errors
    /// The launcher has ended. The process may still run.
    pub(crate) fn kill(&self) -> Result<()> {
        self.ask(&Request::Kill, None).map(drop)
    }

    /// Waits for the end of the process that was launched last and has closed its standard input.
    /// Kills the process if it does not end. Returns its exit status as a text.
    ///
    /// # Errors
    /// The launcher has ended.
    pub(crate) fn wait(&self) -> Result<String> {
        match self.ask(&Request::Wait, None)? {
            Reply::Ended { status } => Ok(status),
            other => bail!("the launcher answered {other:?}"),
        }
    }

    /// Sends a signal to the process that was launched last, if it still runs.
    pub(crate) fn signal(&self, signal: i32) {
        // The launcher may have ended.
        let _ = self.ask(&Request::Signal { signal }, None);
    }

    fn ask(&self, request: &Request, descriptor: Option<OwnedFd>) -> Result<Reply> {
        let channel = self.0.as_ref().map_err(|why| anyhow::anyhow!("no launcher: {why}"))?;
        let channel = channel.lock();
        let asked = channel.send(request, descriptor).and_then(|()| channel.receive());
        match asked.context("cannot ask the launcher")? {
            Some((reply, _)) => Ok(reply),
            None => bail!("the launcher has ended; restart the server instead"),
        }
    }
}

#[cfg(test)]
impl Launcher {
    /// The server's end of a launcher that has ended.
    pub(crate) fn ended() -> Self {
        Self(Err("it has ended".to_owned()))
    }
}

impl fmt::Debug for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Launcher")
    }
}

/// The programs that a launcher may start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LaunchRules {
    /// The arguments that each program gets.
    pub(crate) arguments: Vec<OsString>,
    /// The user that the launcher becomes.
    pub(crate) user: Option<UserIds>,
    /// The programs that it may start besides its own.
    pub(crate) programs: Vec<PathBuf>,
    /// The paths that the server can write. The launcher starts no program from there except its
    /// own.
    pub(crate) reach: Reach,
    /// The capabilities that it keeps, for the programs that it starts.
    pub(crate) capabilities: u64,
}

fn start() -> Result<Mutex<Channel>> {
    let (ours, theirs) = UnixStream::pair().context("cannot make a socket pair")?;
    let own = std::env::args_os().next();
    Command::new("/proc/self/exe")
        .arg0(own.as_deref().unwrap_or(OsStr::new("blockhouse")))
        .arg(WORD)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()
        .context("cannot start its launcher (this program, by /proc/self/exe)")?;
    Ok(Mutex::new(Channel::new(ours)))
}
