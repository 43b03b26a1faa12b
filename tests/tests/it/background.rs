//! `serve --fork`: a server in the background. The test reads the output of each command to its
//! end, which would not come if the server kept the pipe open.

use std::path::Path;
use std::time::Duration;

use blockhouse_tests::image_tool::{command, str};
use blockhouse_tests::upgrade::upgrade_in_the_end;
use blockhouse_tests::{Scratch, blockhouse, eventually, nbd_uri, need, require, run, tool};
use rustix::process::{Pid, Signal, kill_process};

const LONG: Duration = Duration::from_secs(60);

/// A server that a command has started in the background.
struct Behind(Pid);

impl Behind {
    /// The server that has written this pid file.
    fn of(pid_file: &Path) -> Self {
        let text = std::fs::read_to_string(pid_file).expect("a pid file");
        Self(text.trim().parse().ok().and_then(Pid::from_raw).expect("a process"))
    }

    /// Whether it runs. A process that has ended stays as a zombie until its status is read.
    fn is_there(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", self.0.as_raw_nonzero()));
        status.is_ok_and(|status| !status.contains(") Z "))
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.0, signal).expect("it is there");
    }

    /// Ends the server in order.
    fn end(self) {
        self.signal(Signal::TERM);
        assert!(eventually(LONG, || !self.is_there()), "it goes on");
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        // The pid is not reused so soon.
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn a_server_goes_on_when_the_command_has_ended() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (pid_file, socket) = (scratch.path("pid"), scratch.socket("s"));
    let uri = nbd_uri("", &socket);
    let words = ["serve", image.str(), "--fork", "--nbd", &uri, "--pid-file", str(&pid_file)];
    let started = command(&words).success();
    let server = Behind::of(&pid_file);
    assert_eq!(started.stdout, format!("ready {uri}\n"));
    let size = || run(tool("nbdinfo").args(["--size", &uri])).success().stdout;
    assert_eq!(size(), "1048576\n");
    // The server prints something that is never read.
    server.signal(Signal::HUP);
    assert_eq!(size(), "1048576\n");
    server.end();
    assert!(!pid_file.exists() && !socket.exists(), "it has left something behind");
}

#[test]
fn what_is_wrong_is_said_before_the_command_ends() {
    let scratch = Scratch::new();
    let missing = scratch.path("missing.img");
    let refused = command(&["serve", "--fork", str(&missing)]).failure("missing.img");
    assert_eq!(refused.status.code(), Some(1), "{}", refused.describe("a missing image"));
    let image = scratch.image("disk.img", 1 << 20);
    let words = ["serve", "--fork", image.str(), "--detect-zeroes", "unmap", "--discard", "ignore"];
    let refused = command(&words).failure("--detect-zeroes unmap needs");
    assert_eq!(refused.status.code(), Some(2), "{}", refused.describe("wrong usage"));
}

#[test]
fn what_is_not_wrong_is_said_as_well() {
    let scratch = Scratch::new();
    let image = scratch.path("--fork");
    command(&["create", "-f", "qcow2", str(&image), "1M"]).success();
    let pid_file = scratch.path("pid");
    let uri = nbd_uri("", scratch.socket("s"));
    let mut serve = std::process::Command::new(blockhouse());
    serve.args(["serve", "--fork", "--nbd", &uri, "--pid-file", str(&pid_file)]);
    serve.args(["-f", "qcow2", "--cache", "unsafe", "--", "--fork"]);
    serve.current_dir(image.parent().expect("a folder"));
    let started = run(&mut serve).success();
    let server = Behind::of(&pid_file);
    assert!(started.stderr.contains("--cache unsafe"), "{}", started.describe("a warning"));
    server.end();
}

#[test]
fn another_process_goes_on_in_the_background() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (pid_file, control) = (scratch.path("pid"), scratch.socket("c"));
    let uri = nbd_uri("", scratch.socket("s"));
    let words = ["serve", image.str(), "--fork", "--nbd", &uri, "--pid-file", str(&pid_file)];
    command(&[&words[..], &["--control", str(&control)]].concat()).success();
    let first = Behind::of(&pid_file);
    upgrade_in_the_end(&control, &[]);
    assert!(eventually(LONG, || !first.is_there()), "the first one goes on");
    run(tool("nbdinfo").args(["--size", &uri])).success();
    Behind::of(&pid_file).end();
}

#[test]
fn it_inherits_no_locks_of_the_command() {
    require!(need::tools(&["flock"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (pid_file, lock) = (scratch.path("pid"), scratch.path("lock"));
    let uri = nbd_uri("", scratch.socket("s"));
    let script = r#"exec 9>"$0"; flock 9; exec "$@""#;
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", script, str(&lock), str(blockhouse()), "serve", image.str(), "--fork"]);
    run(shell.args(["--nbd", &uri, "--pid-file", str(&pid_file)])).success();
    let server = Behind::of(&pid_file);
    run(tool("flock").args(["--nonblock", str(&lock), "true"])).success();
    server.end();
}
