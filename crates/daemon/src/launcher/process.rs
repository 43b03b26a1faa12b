//! The process: it does what the server asks, one request after the other, until the server ends.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use blockhouse_engine::become_user;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::protocol::{Channel, Reply, Request, Rules};

/// Serves the server whose socket is standard input, until it ends.
///
/// # Errors
/// Standard input is no such socket, or what came over it makes no sense.
pub fn run() -> Result<()> {
    // These are meant for the server. A handler and not "ignore", which what is started would inherit.
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::default()).context("cannot watch for signals")?;
    }
    // The name of the file would be "exe". A name is for people only.
    let _ = rustix::thread::set_name(c"blockhouse-run");
    let channel = channel_at_stdin().context("this is for 'blockhouse serve' alone")?;
    let rules = match channel.receive()? {
        // The server has ended before it could serve.
        None => return Ok(()),
        Some((Request::Rules(rules), _)) => rules,
        Some(_) => bail!("this is for 'blockhouse serve' alone: no rules came"),
    };
    if let Some((user, group)) = rules.user {
        become_user(user, group).context("cannot become the user of the server")?;
    }
    let mut state = State { rules, child: None };
    while let Some((request, descriptor)) = channel.receive()? {
        let reply = state.execute(request, descriptor)?;
        if let Err(error) = channel.send(&reply, None) {
            return if super::is_end(&error) { Ok(()) } else { Err(error.into()) };
        }
    }
    Ok(())
}

/// How the names of other programs begin that are started.
const NAME: &str = "blockhouse";

struct State {
    rules: Rules,
    /// What was started last.
    child: Option<Child>,
}

impl State {
    /// # Errors
    /// A request that a server never makes.
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
                    // It fails for a process that has ended already.
                    let _ = child.kill();
                    let _ = child.wait();
                }
                Reply::Done
            }
            Request::Wait => Reply::Ended {
                status: match self.child.as_mut().map(Child::wait) {
                    Some(Ok(status)) => status.to_string(),
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
        let binary = match binary {
            None => self.out_of_reach(&own_binary()?)?,
            Some(_) if !self.rules.any_program => {
                bail!("another program than its own is not started for a server without --control")
            }
            Some(path) => named_blockhouse(self.out_of_reach(path)?)?,
        };
        let arguments = self.rules.arguments.iter().cloned().map(OsString::from_vec);
        let child = Command::new(&binary)
            .args(arguments)
            .stdin(Stdio::from(stdin))
            .spawn()
            .with_context(|| format!("{}: cannot be started", binary.display()))?;
        let process = child.id();
        self.child = Some(child);
        Ok(Reply::Started { process, program: binary.into_os_string().into_vec() })
    }

    /// The program at a path.
    ///
    /// # Errors
    /// It is missing, or it is where the server can write.
    fn out_of_reach(&self, path: &Path) -> Result<PathBuf> {
        let cannot = || format!("{}: cannot be started", path.display());
        let found = path.canonicalize().with_context(cannot)?;
        let mut not_below =
            self.rules.not_below.iter().map(|path| Path::new(OsStr::from_bytes(path)));
        match not_below.find(|folder| found.starts_with(folder)) {
            None => Ok(found),
            Some(folder) => bail!(
                "{}: cannot be started: the server can write below {}, so the program may be a stranger's; install it \
                 elsewhere",
                path.display(),
                folder.display()
            ),
        }
    }

    /// Sends a signal to what was started last, unless its end was waited for already.
    fn signal(&mut self, signal: i32) {
        let Some(child) = &mut self.child else { return };
        let runs = matches!(child.try_wait(), Ok(None));
        let (process, signal) = (Pid::from_raw(child.id() as i32), Signal::from_named_raw(signal));
        if let (true, Some(process), Some(signal)) = (runs, process, signal) {
            // It may end at this moment; the id stays its own until it is waited for.
            let _ = kill_process(process, signal);
        }
    }
}

/// The program, if its name says that it is Blockhouse.
///
/// # Errors
/// It does not.
fn named_blockhouse(program: PathBuf) -> Result<PathBuf> {
    if program.file_name().unwrap_or_default().as_bytes().starts_with(NAME.as_bytes()) {
        return Ok(program);
    }
    bail!(
        "{}: cannot be started: a server is replaced only by a program whose name begins with '{NAME}'",
        program.display()
    )
}

/// The socket, which is standard input. What takes its place there reads as empty.
fn channel_at_stdin() -> Result<Channel> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(null)?;
    Ok(Channel::new(UnixStream::from(socket)))
}

/// The program at the path from which this process was started: another one by now, if it was replaced.
fn own_binary() -> Result<PathBuf> {
    let path = std::fs::read_link("/proc/self/exe").context("cannot find this program's path")?;
    Ok(without_deleted(&path))
}

/// The path without what the kernel adds to that of a file which was replaced.
fn without_deleted(path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    let bytes = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_was_replaced_is_found_at_its_path() {
        let found = |path: &str| without_deleted(Path::new(path));
        assert_eq!(found("/usr/bin/blockhouse (deleted)"), Path::new("/usr/bin/blockhouse"));
        assert_eq!(found("/usr/bin/blockhouse"), Path::new("/usr/bin/blockhouse"));
    }

    #[test]
    fn only_what_the_rules_allow_is_started() {
        let stdin = || Some(OwnedFd::from(UnixStream::pair().expect("a socket pair").0));
        let folder = tempfile::tempdir().expect("a folder");
        let [shell, named] = ["sh", "blockhouse-sh"].map(|name| folder.path().join(name));
        for path in [&shell, &named] {
            std::fs::copy("/bin/sh", path).expect("a copy");
        }
        let start = |any_program, program: &Path, not_below: &str| {
            let arguments = vec![b"-c".to_vec(), b"exit 7".to_vec()];
            let not_below = Path::new(not_below).canonicalize().expect("it is there");
            let not_below = vec![not_below.into_os_string().into_vec()];
            let rules = Rules { arguments, any_program, not_below, user: None };
            let mut state = State { rules, child: None };
            let binary = Some(program.as_os_str().as_bytes().to_vec());
            let reply = state.execute(Request::Start { binary }, stdin()).expect("a request");
            (reply, state)
        };
        let own = folder.path().to_str().expect("a path of text");
        for (reply, word) in [
            (start(false, &named, "/usr").0, "--control"),
            (start(true, &named, own).0, "can write"),
            (start(true, &shell, "/usr").0, "begins with 'blockhouse'"),
        ] {
            assert!(matches!(&reply, Reply::Refused { why } if why.contains(word)), "{reply:?}");
        }
        let (reply, mut state) = start(true, &named, "/usr");
        assert!(matches!(reply, Reply::Started { .. }), "{reply:?}");
        let ended = state.execute(Request::Wait, None).expect("a request");
        assert!(
            matches!(&ended, Reply::Ended { status } if status == "exit status: 7"),
            "{ended:?}"
        );
        assert!(state.execute(Request::Rules(Rules::default()), None).is_err());
    }
}
