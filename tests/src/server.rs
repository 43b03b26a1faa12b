//! `blockhouse serve` from its command line to its exit.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::ToSocketAddrs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};

use crate::control::Control;
use crate::nbd::{Address, Client, Framing};
use crate::{Cache, Engine, Scratch, blockhouse, nbd_uri, wait_for_exit};

/// The longest time until a server is ready: a debug build under strace on a busy machine is slow.
const START_LIMIT: Duration = Duration::from_secs(20);
/// The longest time until a server ends: longer than it waits for clients to read their last
/// replies.
const STOP_LIMIT: Duration = Duration::from_secs(40);
/// A correct client is served within this time, whatever others do.
const SERVE_LIMIT: Duration = Duration::from_secs(5);
/// The limit for the memory of a server with a few clients, in bytes.
const MEMORY_LIMIT: u64 = 256 << 20;

/// A command line of `blockhouse serve`.
pub struct Serve {
    binary: PathBuf,
    images: Vec<PathBuf>,
    options: Vec<OsString>,
    exports: usize,
    ready_lines: Option<usize>,
    wrapper: Vec<OsString>,
    environment: Vec<(String, OsString)>,
    stdin: Stdio,
    stderr: Option<Stdio>,
    log: PathBuf,
}

impl Serve {
    /// Serves `image` under the empty name on the socket `nbd` of the scratch folder.
    pub fn new(scratch: &Scratch, image: &Path) -> Self {
        let socket = scratch.socket("nbd");
        Self::bare(scratch, image).export(&nbd_uri("", &socket))
    }

    /// Serves the disks that its options name.
    pub fn without_image(scratch: &Scratch) -> Self {
        Self { images: Vec::new(), ..Self::bare(scratch, Path::new("")) }
    }

    /// Serves `image` without an export.
    pub fn bare(scratch: &Scratch, image: &Path) -> Self {
        Self {
            binary: blockhouse().into(),
            images: vec![image.into()],
            options: Vec::new(),
            exports: 0,
            ready_lines: None,
            wrapper: Vec::new(),
            environment: Vec::new(),
            stdin: Stdio::null(),
            stderr: None,
            log: scratch.socket(&format!("log{}", fastrand::u32(..))),
        }
    }

    /// Adds an export at a URI.
    pub fn export(mut self, uri: &str) -> Self {
        self.exports += 1;
        self.option("--nbd", uri)
    }

    /// Serves another image beside the first.
    pub fn also(mut self, image: &Path) -> Self {
        self.images.push(image.into());
        self
    }

    /// Sets the number of ready lines, if it is not one for each image at each URI.
    pub fn ready_lines(mut self, count: usize) -> Self {
        self.ready_lines = Some(count);
        self
    }

    /// Adds an option with its value.
    pub fn option(self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.flag(name).flag(value)
    }

    /// Adds one word.
    pub fn flag(mut self, word: impl AsRef<OsStr>) -> Self {
        self.options.push(word.as_ref().into());
        self
    }

    /// Chooses an engine.
    pub fn engine(self, engine: Engine) -> Self {
        self.option("--engine", engine.as_str())
    }

    /// Chooses a cache mode.
    pub fn cache(self, cache: Cache) -> Self {
        self.option("--cache", cache.as_str())
    }

    /// Puts a wrapper command before the command line. The wrapper must finally exec the command
    /// line in its own process.
    pub fn under<S: AsRef<OsStr>>(mut self, wrapper: impl IntoIterator<Item = S>) -> Self {
        let words = wrapper.into_iter().map(|word| word.as_ref().to_owned());
        self.wrapper = words.chain(self.wrapper).collect();
        self
    }

    /// Sets an environment variable.
    pub fn environment(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.into(), value.as_ref().into()));
        self
    }

    /// Gives the process this standard input.
    pub fn stdin(mut self, stdin: impl Into<Stdio>) -> Self {
        self.stdin = stdin.into();
        self
    }

    /// Gives the process this standard error instead of a log that can be read.
    pub fn stderr(mut self, stderr: impl Into<Stdio>) -> Self {
        self.stderr = Some(stderr.into());
        self
    }

    /// Runs another file than the usual binary.
    pub fn binary(mut self, binary: &Path) -> Self {
        self.binary = binary.into();
        self
    }

    /// Starts the server and waits until it is ready.
    ///
    /// # Panics
    /// When it does not get ready.
    #[track_caller]
    pub fn start(self) -> Server {
        self.start_within(START_LIMIT)
    }

    /// As [`start`](Self::start), with the control socket `control` of the scratch folder.
    #[track_caller]
    pub fn start_with_control(self, scratch: &Scratch) -> (Server, Control) {
        let socket = scratch.socket("control");
        let server = self.option("--control", &socket).start();
        (server, Control::connect(&socket))
    }

    /// As [`start`](Self::start), with a limit for a server that has to wait for something first.
    #[track_caller]
    pub fn start_within(self, limit: Duration) -> Server {
        let exports = self.ready_lines.unwrap_or(self.exports.max(1) * self.images.len());
        let (child, log) = self.spawn();
        Server::ready(child, log, exports, limit)
    }

    /// Runs the command line, which must end by itself because something is wrong with it.
    ///
    /// # Panics
    /// When a server starts.
    #[track_caller]
    pub fn refused(self) -> Refusal {
        let (mut child, log) = self.spawn();
        let status = wait_for_exit(&mut child, START_LIMIT);
        if status.is_none() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let stderr = std::fs::read_to_string(log).expect("the log is there");
        let Some(status) = status else { panic!("it started all the same; stderr: {stderr}") };
        Refusal { code: status.code(), signal: status.signal(), stderr }
    }

    #[track_caller]
    fn spawn(self) -> (Child, PathBuf) {
        let binary = [self.binary.into_os_string()];
        let mut words = self.wrapper.iter().chain(&binary);
        let mut command = Command::new(words.next().expect("there is the binary"));
        command.args(words).arg("serve").args(&self.images).args(&self.options);
        command.envs(self.environment).stdin(self.stdin).stdout(Stdio::piped());
        let log = File::create(&self.log).expect("the log can be written");
        command.stderr(self.stderr.unwrap_or(log.into()));
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        (child, self.log)
    }
}

/// How a command line failed.
#[derive(Debug)]
pub struct Refusal {
    code: Option<i32>,
    signal: Option<i32>,
    stderr: String,
}

impl Refusal {
    /// Asserts exit code 1, for a failed operation, and one line on standard error that has all
    /// these words.
    #[track_caller]
    pub fn failed(&self, words: &[&str]) {
        assert_eq!(self.code, Some(1), "exit code; stderr: {}", self.stderr);
        assert_eq!(self.stderr.lines().count(), 1, "one line is expected: {}", self.stderr);
        self.says(words);
    }

    /// Asserts exit code 2, for wrong usage, and all these words on standard error.
    #[track_caller]
    pub fn wrong_usage(&self, words: &[&str]) {
        assert_eq!(self.code, Some(2), "exit code; stderr: {}", self.stderr);
        self.says(words);
    }

    /// Asserts that this signal has ended the process.
    #[track_caller]
    pub fn killed_by(&self, signal: i32) {
        assert_eq!(self.signal, Some(signal), "exit code {:?}; stderr: {}", self.code, self.stderr);
    }

    #[track_caller]
    fn says(&self, words: &[&str]) {
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is expected: {}", self.stderr);
        }
    }
}

/// A running server; killed on drop.
pub struct Server {
    child: Child,
    log: PathBuf,
    uris: Vec<String>,
    details: Vec<String>,
    lines: Receiver<String>,
}

impl Server {
    #[track_caller]
    fn ready(mut child: Child, log: PathBuf, exports: usize, limit: Duration) -> Self {
        let lines = lines(child.stdout.take().expect("standard output is a pipe"));
        let mut server = Self { child, log, uris: Vec::new(), details: Vec::new(), lines };
        while server.uris.len() < exports {
            match server.lines.recv_timeout(limit) {
                Ok(line) => server.take_in(&line),
                Err(RecvTimeoutError::Timeout) => panic!("not ready after {limit:?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = wait_for_exit(&mut server.child, START_LIMIT);
                    panic!("the server ended before it was ready: {status:?}");
                }
            }
        }
        server
    }

    fn take_in(&mut self, line: &str) {
        if let Some(ready) = line.strip_prefix("ready ") {
            // With --verbose more words follow the URI.
            let (uri, details) = ready.split_once(' ').unwrap_or((ready, ""));
            self.uris.push(uri.into());
            self.details.push(details.into());
        }
    }

    /// The part that `--verbose` adds to the first ready line.
    pub fn details(&self) -> &str {
        &self.details[0]
    }

    /// The URI of the first ready line.
    pub fn uri(&self) -> &str {
        &self.uris[0]
    }

    /// The URIs of all ready lines.
    pub fn uris(&self) -> &[String] {
        &self.uris
    }

    /// The address of the first export.
    pub fn address(&self) -> Address {
        address(self.uri())
    }

    /// The process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The standard error so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("the log is there")
    }

    /// The resident memory, in bytes.
    pub fn resident_memory(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kilobytes.and_then(|number| number.parse::<u64>().ok()).expect("a size in kB") * 1024
    }

    /// Asserts that a correct client is served within seconds, and that the server's memory is
    /// within its limit.
    #[track_caller]
    pub fn assert_serves(&self) {
        let start = Instant::now();
        let mut client = Client::open_with(&self.address(), Framing::Structured);
        assert_eq!(client.write(512, &[9; 1024], 0), 0);
        assert_eq!(client.read(512, 1024), Ok(vec![9; 1024]));
        client.disconnect();
        assert!(start.elapsed() < SERVE_LIMIT, "{:?}", start.elapsed());
        let memory = self.resident_memory();
        assert!(memory < MEMORY_LIMIT, "{memory} bytes in use");
    }

    /// Limits the number of descriptors that it may still open.
    pub fn limit_descriptors(&self, free: usize) {
        let folder = format!("/proc/{}/fd", self.child.id());
        let is_free = |number: &u64| !Path::new(&folder).join(number.to_string()).is_symlink();
        let first_refused = (0..).filter(is_free).nth(free);
        self.limit(Resource::Nofile, first_refused);
    }

    /// The mapped address space, in bytes: the minimum of some readings, because the C library maps
    /// more for a moment when a thread first allocates.
    pub fn mapped_memory(&self) -> u64 {
        let path = format!("/proc/{}/statm", self.child.id());
        let read = |_| {
            std::thread::sleep(Duration::from_millis(10));
            let sizes = std::fs::read_to_string(&path).expect("the server runs");
            let pages = sizes.split(' ').next().and_then(|text| text.parse::<u64>().ok());
            pages.expect("pages") * rustix::param::page_size() as u64
        };
        (0..20).map(read).min().expect("there are readings")
    }

    /// Sets a limit of the running server; `None`: unlimited.
    ///
    /// # Panics
    /// When this user may not change the limit.
    pub fn limit(&self, resource: Resource, current: Option<u64>) {
        let own = getrlimit(resource);
        let limit = Rlimit { current, maximum: own.maximum };
        prlimit(Some(self.pid()), resource, limit).expect("a limit of our own process");
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("the server runs");
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let status = wait_for_exit(&mut self.child, limit);
        status.unwrap_or_else(|| panic!("the server still runs after {limit:?}"))
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child can be asked").is_none()
    }

    /// Stops it by SIGTERM; it must end with exit code 0.
    #[track_caller]
    pub fn stop(mut self) {
        assert!(self.is_running(), "the server ended by itself");
        self.signal(Signal::TERM);
        let status = self.wait(STOP_LIMIT);
        assert_eq!((status.code(), status.signal()), (Some(0), None), "{}", self.log());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The log's folder may be removed already, and another panic would abort all tests.
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("the server's standard error: {log}");
        }
        // Both fail only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads the lines of a pipe in another thread, so that the pipe never fills up.
fn lines(stdout: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // The receiver may have been dropped.
            let _ = sender.send(line);
        }
    });
    receiver
}

/// The address in a URI of a ready line.
fn address(uri: &str) -> Address {
    if let Some((_, path)) = uri.split_once("?socket=") {
        assert!(!path.contains('%'), "an encoded path: {path}");
        return Address::Unix(path.into());
    }
    let host = uri.strip_prefix("nbds://").or_else(|| uri.strip_prefix("nbd://"));
    let host = host.expect("an NBD URI");
    let host = host.split('/').next().expect("there is always a first part");
    let mut addresses = host.to_socket_addrs().expect("an address and a port");
    Address::Tcp(addresses.next().expect("a host has an address"))
}
