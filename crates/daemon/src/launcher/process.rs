//! The launcher's process: it executes the server's requests, one after the other, until the server
//! ends.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_engine::{Confinement, become_user, confine};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::protocol::{Channel, Reply, Request, Rules};
use super::reach::{self, path_of};
use crate::process::stdin::take_stdin;

/// Serves the server whose socket is standard input, until it ends.
///
/// # Errors
/// Standard input is not such a socket, or an invalid message was received.
pub fn run() -> Result<()> {
    // Signals for the server also reach this process. The launcher handles them without effect and
    // does not ignore them, because a program that it starts would inherit SIG_IGN.
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::default()).context("cannot watch for signals")?;
    }
    // By default the process's name would be "exe". A failure is ignored, because only people read
    // the name.
    let _ = rustix::thread::set_name(c"blockhouse-run");
    // The program is opened first, before another file can replace it at its path.
    let own = Own::open()?;
    let socket = take_stdin().context("this is for 'blockhouse serve' alone")?;
    let channel = Channel::new(UnixStream::from(socket));
    let rules = match channel.receive()? {
        // The server has ended before it could serve.
        None => return Ok(()),
        Some((Request::Rules(rules), _)) => rules,
        Some(_) => bail!("this is for 'blockhouse serve' alone: no rules came"),
    };
    if let Some((user, group)) = rules.user {
        become_user(user, group).context("cannot become the user of the server")?;
    }
    let confinement = Confinement { ruleset: None, capabilities: rules.capabilities };
    confine(confinement).context("cannot drop capabilities")?;
    serve(&channel, &mut State { rules, own, child: None })
}

/// Executes requests from an untrusted peer under the strictest rules: for fuzz targets. Starts
/// nothing.
///
/// # Errors
/// A message that a server never sends.
pub fn serve_stranger(socket: UnixStream) -> Result<()> {
    let own = Own { path: PathBuf::from("/nowhere/blockhouse"), ..Own::open()? };
    serve(&Channel::new(socket), &mut State { rules: Rules::default(), own, child: None })
}

fn serve(channel: &Channel, state: &mut State) -> Result<()> {
    while let Some((request, descriptor)) = channel.receive()? {
        let reply = state.execute(request, descriptor)?;
        if let Err(error) = channel.send(&reply, None) {
            return if super::protocol::is_end(&error) { Ok(()) } else { Err(error.into()) };
        }
    }
    Ok(())
}

/// The launcher's own program.
struct Own {
    /// `O_PATH` descriptor of the file that is executed.
    descriptor: OwnedFd,
    /// The path at which the program was when it started.
    path: PathBuf,
}

impl Own {
    fn open() -> Result<Self> {
        let cannot = "cannot find this program (/proc/self/exe)";
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let descriptor = rustix::fs::open(SELF, flags, Mode::empty()).context(cannot)?;
        let path = without_deleted(&std::fs::read_link(SELF).context(cannot)?);
        Ok(Self { descriptor, path })
    }

    /// Whether `path` leads to this program.
    fn is_at(&self, path: &Path) -> bool {
        let identity = |status: rustix::fs::Stat| (status.st_dev, status.st_ino);
        let own = rustix::fs::fstat(&self.descriptor).map(identity);
        own.is_ok() && rustix::fs::stat(path).map(identity) == own
    }
}

/// How long a process may take to end after it has closed its standard input.
const END_TIME: Duration = Duration::from_secs(1);

/// The link to the running program.
const SELF: &str = "/proc/self/exe";

struct State {
    rules: Rules,
    own: Own,
    /// The process that was started last.
    child: Option<Child>,
}

impl State {
    /// # Errors
    /// A request that a server never sends.
    fn execute(&mut self, request: Request, descriptor: Option<OwnedFd>) -> Result<Reply> {
        Ok(match request {
            Request::Rules(_) => bail!("the rules came twice"),
            Request::Start { binary } => {
                let binary = binary.map(|path| PathBuf::from(OsString::from_vec(path)));
                match self.start(binary.as_deref(), descriptor) {
                    Ok(started) => started,
                    Err(error) => Reply::Refused { why: format!("{error:#}") },
                }
            }
            Request::Kill => {
                if let Some(child) = &mut self.child {
                    // This fails for a process that has ended already.
                    let _ = child.kill();
                    let _ = child.wait();
                }
                Reply::Done
            }
            Request::Wait => Reply::Ended {
                status: match self.child.as_mut().map(wait_or_kill) {
                    Some(Ok(status)) => status,
                    Some(Err(error)) => error.to_string(),
                    None => "it was never started".to_owned(),
                },
            },
            Request::Signal { signal } => {
                self.signal(signal);
                Reply::Done
            }
        })
    }

    fn start(&mut self, binary: Option<&Path>, stdin: Option<OwnedFd>) -> Result<Reply> {
        let stdin = stdin.context("no standard input came for the new server")?;
        if let Some(child) = &mut self.child
            && matches!(child.try_wait(), Ok(None))
        {
            bail!("a new server was started before, and goes on");
        }
        let (file, program) = self.program(binary)?;
        let arguments = self.rules.arguments.iter().cloned().map(OsString::from_vec);
        let child = Command::new(&file)
            .arg0(&program)
            .args(arguments)
            .stdin(Stdio::from(stdin))
            .spawn()
            .with_context(|| format!("{}: cannot be started", program.display()))?;
        let process = child.id();
        self.child = Some(child);
        Ok(Reply::Started { process, program: program.into_os_string().into_vec() })
    }

    /// The path to execute, and the program's name.
    ///
    /// # Errors
    /// The rules forbid the program, or the server could have written it.
    fn program(&self, binary: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
        let named: Vec<_> = self.rules.programs.iter().map(|path| path_of(path)).collect();
        let program = match (binary, named.first()) {
            (None, None) => return self.own_program(),
            (None, Some(first)) => first,
            (Some(binary), _) => {
                let cannot = || format!("{}: cannot be started", binary.display());
                let found = binary.canonicalize().with_context(cannot)?;
                let is_it = |path: &&PathBuf| path.canonicalize().is_ok_and(|path| path == found);
                let known = named.iter().find(is_it);
                if known.is_none() && self.own.is_at(&found) {
                    return self.own_program();
                }
                known.with_context(|| {
                    format!(
                        "{}: cannot be started: an upgrade starts another program than the one that runs only if the \
                         server was started with --upgrade-to {}",
                        binary.display(),
                        found.display()
                    )
                })?
            }
        };
        let program = reach::check(program, &self.rules.reach)
            .with_context(|| format!("{}: cannot be started", program.display()))?;
        Ok((program.clone(), program))
    }

    fn own_program(&self) -> Result<(PathBuf, PathBuf)> {
        let Own { descriptor, path } = &self.own;
        if !self.own.is_at(path) {
            bail!(
                "{}: another program is there than the one that runs; a server starts it if it was started with \
                 --upgrade-to {}, or restart this one",
                path.display(),
                path.display()
            );
        }
        Ok((format!("/proc/self/fd/{}", descriptor.as_raw_fd()).into(), path.clone()))
    }

    /// Sends a signal to the process that was started last, unless it has ended.
    fn signal(&mut self, signal: i32) {
        let Some(child) = &mut self.child else { return };
        let runs = matches!(child.try_wait(), Ok(None));
        let (process, signal) = (Pid::from_raw(child.id() as i32), Signal::from_named_raw(signal));
        if let (true, Some(process), Some(signal)) = (runs, process, signal) {
            // The process may end at this moment; its id is not reused before `wait`.
            let _ = kill_process(process, signal);
        }
    }
}

/// Waits for the end of a process that has closed its standard input, and kills the process if it
/// does not end, because guests wait meanwhile. Returns the exit status.
fn wait_or_kill(child: &mut Child) -> std::io::Result<String> {
    let deadline = Instant::now() + END_TIME;
    while child.try_wait()?.is_none() {
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok("it closed its standard input, went on and was killed".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(child.wait()?.to_string())
}

/// The path without the " (deleted)" that the kernel appends for a file that was replaced.
fn without_deleted(path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    let bytes = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::protocol::ToldReach;
    use crate::sandbox::Reach;

    #[test]
    fn a_program_that_was_replaced_is_found_at_its_path() {
        let found = |path: &str| without_deleted(Path::new(path));
        assert_eq!(found("/usr/bin/blockhouse (deleted)"), Path::new("/usr/bin/blockhouse"));
        assert_eq!(found("/usr/bin/blockhouse"), Path::new("/usr/bin/blockhouse"));
    }

    fn state(programs: &[&Path], reach: ToldReach, arguments: &[&str]) -> State {
        let arguments = arguments.iter().map(|text| text.as_bytes().to_vec()).collect();
        let bytes = |path: &&Path| path.as_os_str().as_bytes().to_vec();
        let programs = programs.iter().map(bytes).collect();
        let rules = Rules { arguments, programs, reach, capabilities: 0, user: None };
        State { rules, own: Own::open().expect("/proc"), child: None }
    }

    fn start(state: &mut State, binary: Option<&Path>) -> Reply {
        let stdin = OwnedFd::from(UnixStream::pair().expect("a socket pair").0);
        let binary = binary.map(|path| path.as_os_str().as_bytes().to_vec());
        state.execute(Request::Start { binary }, Some(stdin)).expect("a request")
    }

    #[test]
    fn only_what_the_operator_has_named_is_started() {
        if !reach::is_root_listed() {
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let [shell, other] =
            ["blockhouse-sh", "blockhouse-other"].map(|name| folder.path().join(name));
        for path in [&shell, &other] {
            std::fs::copy("/bin/sh", path).expect("a copy");
        }
        let exit = ["-c", "exit 7"];
        let below =
            || reach::told(&Reach::Below(vec![folder.path().canonicalize().expect("there")]));
        for (programs, reach, binary, word) in [
            (vec![], ToldReach::Anywhere, &shell, "--upgrade-to"),
            (vec![], ToldReach::User, &shell, "--upgrade-to"),
            (vec![&*shell], ToldReach::Anywhere, &other, "--upgrade-to"),
            (vec![&*shell], below(), &shell, "can write below"),
            // The folder belongs to this user.
            (vec![&*shell], ToldReach::User, &shell, "from writing"),
        ] {
            let reply = start(&mut state(&programs, reach, &exit), Some(binary));
            assert!(matches!(&reply, Reply::Refused { why } if why.contains(word)), "{reply:?}");
        }
        let elsewhere = reach::told(&Reach::Below(vec!["/usr".into()]));
        let mut state = state(&[&shell], elsewhere, &exit);
        let reply = start(&mut state, None);
        assert!(matches!(reply, Reply::Started { .. }), "{reply:?}");
        let ended = state.execute(Request::Wait, None).expect("a request");
        assert!(
            matches!(&ended, Reply::Ended { status } if status == "exit status: 7"),
            "{ended:?}"
        );
        assert!(state.execute(Request::Rules(Rules::default()), None).is_err());
    }

    #[test]
    fn the_program_that_runs_is_started_whatever_the_rules_say_of_places_and_once() {
        // This test's own program, which lists its tests.
        let reach = reach::told(&Reach::Below(vec!["/".into()]));
        let mut own = state(&[], reach, &["--list"]);
        let mut sleeping = state(&[Path::new("/bin/sleep")], ToldReach::Anywhere, &["60"]);
        let reply = start(&mut own, None);
        assert!(matches!(&reply, Reply::Started { .. }), "{reply:?}");
        let ended = own.execute(Request::Wait, None).expect("a request");
        assert!(
            matches!(&ended, Reply::Ended { status } if status == "exit status: 0"),
            "{ended:?}"
        );
        own.own.path = "/bin/sh".into();
        let reply = start(&mut own, None);
        assert!(matches!(&reply, Reply::Refused { why } if why.contains("--upgrade-to /bin/sh")));
        assert!(matches!(start(&mut sleeping, None), Reply::Started { .. }));
        let reply = start(&mut sleeping, None);
        assert!(matches!(&reply, Reply::Refused { why } if why.contains("before")), "{reply:?}");
        sleeping.execute(Request::Kill, None).expect("a request");
        assert!(matches!(start(&mut sleeping, None), Reply::Started { .. }));
        // The program does not end by itself in the time that it gets.
        let ended = sleeping.execute(Request::Wait, None).expect("a request");
        assert!(matches!(&ended, Reply::Ended { status } if status.contains("was killed")));
    }
}
