//! Foreign programs, each with a deadline.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::wait_for_exit;

const USUAL_LIMIT: Duration = Duration::from_secs(60);

/// The exit status and the output of a program.
#[derive(Debug)]
pub struct Outcome {
    /// The exit status.
    pub status: ExitStatus,
    /// The standard output.
    pub stdout: String,
    /// The standard error.
    pub stderr: String,
    line: String,
}

impl Outcome {
    /// Asserts exit status 0.
    #[track_caller]
    pub fn success(self) -> Self {
        assert!(self.status.success(), "{}", self.describe("must succeed"));
        self
    }

    /// Asserts another exit status than 0, and that `word` is in the output.
    #[track_caller]
    pub fn failure(self, word: &str) -> Self {
        assert!(!self.status.success(), "{}", self.describe("must fail"));
        let said = [&*self.stdout, &*self.stderr].concat();
        assert!(said.contains(word), "{}", self.describe(&format!("must say {word:?}")));
        self
    }

    /// Everything about it, for people.
    pub fn describe(&self, why: &str) -> String {
        let Self { status, stdout, stderr, line } = self;
        format!("{why}: {line}\n{status}\nstdout: {stdout}\nstderr: {stderr}")
    }
}

/// A command for `program`, which is also searched for in the folders of administrators' tools.
pub fn tool(program: &str) -> Command {
    Command::new(find_program(program).unwrap_or_else(|| program.into()))
}

/// The file of a program on the search path.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let also = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let folders = std::env::split_paths(&path).chain(also);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Runs a command to its end, for at most a minute.
///
/// # Panics
/// When it cannot be started or takes longer.
#[track_caller]
pub fn run(command: &mut Command) -> Outcome {
    run_within(USUAL_LIMIT, command)
}

/// Runs a command to its end, with an empty standard input.
///
/// # Panics
/// When it cannot be started or takes longer than `limit`; then it is killed.
#[track_caller]
pub fn run_within(limit: Duration, command: &mut Command) -> Outcome {
    let line = line(command);
    // Files instead of pipes, which would have to be read while the program runs.
    let [mut stdout, mut stderr] = [(); 2].map(|()| tempfile::tempfile().expect("a scratch file"));
    let copy = |file: &File| Stdio::from(file.try_clone().expect("a second descriptor"));
    command.stdout(copy(&stdout)).stderr(copy(&stderr)).stdin(Stdio::null());
    // A separate process group, so that the program's children can be killed with it.
    let mut child = command.process_group(0).spawn().unwrap_or_else(|error| {
        panic!("cannot start {line}: {error}");
    });
    let status = wait_for_exit(&mut child, limit);
    if status.is_none() {
        let group = Pid::from_raw(child.id() as i32).expect("a process id is not 0");
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = child.wait();
    }
    let [stdout, stderr] = [&mut stdout, &mut stderr].map(contents);
    match status {
        Some(status) => Outcome { status, stdout, stderr, line },
        None => panic!("not done after {limit:?}: {line}\nstdout: {stdout}\nstderr: {stderr}"),
    }
}

fn contents(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).expect("a scratch file can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
