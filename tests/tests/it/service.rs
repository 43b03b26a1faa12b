//! What a server tells those who run it: pid file, messages to the service manager and its
//! watchdog, warnings, hints.

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhouse_tests::upgrade::{Servers, upgrade_in_the_end};
use blockhouse_tests::{Scratch, Serve, Server, eventually, need, require, run, tool};

/// The longest time of an operation on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// The watchdog's timeout: the server sends four messages in this time.
const WATCHDOG: Duration = Duration::from_millis(400);

/// The socket of a service manager.
struct Manager(UnixDatagram);

impl Manager {
    fn new(scratch: &Scratch) -> Self {
        let socket = UnixDatagram::bind(scratch.socket("notify")).expect("the test's own socket");
        Self(socket)
    }

    /// The next message, if it comes in time.
    fn next_within(&self, limit: Duration) -> Option<String> {
        self.0.set_read_timeout(Some(limit)).expect("a deadline");
        let mut message = [0; 4096];
        let length = self.0.recv(&mut message).ok()?;
        Some(String::from_utf8_lossy(&message[..length]).into_owned())
    }

    /// Waits for a message with this line, and returns it.
    #[track_caller]
    fn wait_for(&self, line: &str) -> String {
        let mut others = Vec::new();
        while let Some(message) = self.next_within(LONG) {
            if message.lines().any(|found| found.starts_with(line)) {
                return message;
            }
            others.push(message);
        }
        panic!("no {line}; but {others:?}")
    }
}

fn number(server: &Server) -> String {
    format!("{}\n", server.pid().as_raw_nonzero())
}

#[test]
fn the_pid_file_names_the_process_that_serves() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (file, control) = (scratch.path("server.pid"), scratch.socket("control"));
    let content = || std::fs::read_to_string(&file).unwrap_or_default();
    std::fs::write(&file, "1\n").expect("the file of a server that was killed");
    let serve = Serve::new(&scratch, image.path()).option("--pid-file", &file);
    let mut server = serve.option("--control", &control).start();
    assert_eq!(content(), number(&server));
    let servers = Servers(&scratch);
    upgrade_in_the_end(&control, &[]);
    server.wait(LONG);
    assert_eq!(content(), format!("{}\n", servers.running()[0].as_raw_nonzero()));
    servers.stop();
    assert!(!file.exists(), "it is removed at the end");
}

#[test]
fn a_pid_file_that_cannot_be_written_is_an_error_of_one_line() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let file = scratch.path("missing/server.pid");
    let serve = Serve::new(&scratch, image.path()).option("--pid-file", &file);
    serve.refused().failed(&["server.pid", "cannot write the pid file", "No such file"]);
    // The image is closed and the socket removed.
    Serve::new(&scratch, image.path()).start().stop();
}

#[test]
fn the_service_manager_knows_what_is_served() {
    let scratch = Scratch::new();
    let images = ["a.img", "b.img"].map(|name| scratch.image(name, 1 << 20));
    let manager = Manager::new(&scratch);
    let serve = Serve::new(&scratch, images[0].path()).also(images[1].path());
    let server = serve.environment("NOTIFY_SOCKET", scratch.socket("notify")).start();
    let ready = manager.wait_for("READY=1");
    assert!(ready.contains("STATUS=serving 2 disks at 2 addresses by "), "{ready}");
    server.stop();
    assert!(manager.wait_for("STOPPING=1").contains("STATUS=stopping"));
}

/// The threads of a process with this name.
fn threads(server: &Server, name: &str) -> Vec<String> {
    let folder = format!("/proc/{}/task", server.pid().as_raw_nonzero());
    let list = std::fs::read_dir(&folder).expect("the server runs");
    let ids =
        list.map(|entry| entry.expect("a thread").file_name().into_string().expect("a number"));
    let is_it = |id: &String| {
        std::fs::read_to_string(format!("{folder}/{id}/comm"))
            .is_ok_and(|found| found.trim() == name)
    };
    ids.filter(is_it).collect()
}

fn watched(scratch: &Scratch, serve: Serve) -> Server {
    let time = WATCHDOG.as_micros().to_string();
    let serve = serve.environment("NOTIFY_SOCKET", scratch.socket("notify"));
    serve.environment("WATCHDOG_USEC", time).start()
}

#[test]
fn the_watchdog_misses_a_loop_that_hangs() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let manager = Manager::new(&scratch);
    let server = watched(&scratch, Serve::new(&scratch, image.path()).option("--workers", "2"));
    for _ in 0..4 {
        manager.wait_for("WATCHDOG=1");
    }
    // Makes the second loop hang: strace delays all its system calls.
    let thread = threads(&server, "blockhouse-1");
    assert_eq!(thread.len(), 1, "the second loop's thread");
    let mut hang = tool("strace");
    hang.args(["-qq", "-o", "/dev/null", "-e", "inject=all:delay_enter=100s", "-p", &thread[0]]);
    let mut hang = hang.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("strace starts");
    let is_held = || {
        // Discards messages from before the loop hung.
        while manager.next_within(Duration::from_millis(1)).is_some() {}
        manager.next_within(4 * WATCHDOG).is_none()
    };
    let held = eventually(LONG, is_held);
    // Ends strace, so that the loop continues.
    hang.kill().expect("it runs");
    hang.wait().expect("it ends");
    assert!(held, "the service manager is told that all is well, and a loop hangs");
    manager.wait_for("WATCHDOG=1");
    server.stop();
}

#[test]
fn the_watchdog_goes_on_after_an_upgrade() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let manager = Manager::new(&scratch);
    let control = scratch.socket("control");
    let serve = Serve::new(&scratch, image.path()).option("--control", &control);
    let mut server = watched(&scratch, serve);
    manager.wait_for("WATCHDOG=1");
    let servers = Servers(&scratch);
    upgrade_in_the_end(&control, &[]);
    server.wait(LONG);
    while manager.next_within(Duration::from_millis(1)).is_some() {}
    manager.wait_for("WATCHDOG=1");
    servers.stop();
}

#[test]
fn what_may_not_be_meant_is_said_once() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let quiet = Serve::new(&scratch, image.path()).start();
    assert_eq!(quiet.log(), "");
    quiet.stop();
    let serve = Serve::bare(&scratch, image.path()).export("nbd://[::1]:0/");
    let server = serve.option("--cache", "unsafe").start();
    let log = server.log();
    assert!(log.contains("--cache unsafe: flushes are not carried out"), "{log}");
    assert_eq!(log.lines().count(), 1, "{log}");
    server.stop();
}

#[test]
fn the_machine_that_is_proposed_for_a_vhost_user_socket_starts() {
    require!(need::tools(&["qemu-system-x86_64"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let socket = scratch.socket("disk.vu");
    let serve = Serve::bare(&scratch, image.path()).option("--vhost-user-blk", &socket);
    let quiet = serve.start();
    assert_eq!(quiet.log(), "");
    quiet.stop();
    let serve = Serve::bare(&scratch, image.path()).option("--vhost-user-blk", &socket);
    let server = serve.option("--queues", "2").flag("--verbose").start();
    assert!(eventually(LONG, || server.log().contains("Stop with Ctrl-C")), "{}", server.log());
    let log = server.log();
    let line =
        log.split_once("Try: ").and_then(|(_, rest)| rest.split_once("...")).expect("a line").0;
    let script = format!(
        "printf 'info qtree\\nquit\\n' | {line} -nodefaults -display none -accel tcg -S -monitor stdio"
    );
    let outcome = run(Command::new("sh").args(["-c", &script])).success();
    assert!(outcome.stdout.contains("num-queues = 2"), "{}", outcome.describe("the device"));
    assert_eq!(outcome.stderr, "", "{script}");
    server.stop();
}

#[test]
fn the_log_of_a_server_has_times_or_is_json() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let serve = || Serve::new(&scratch, image.path()).option("--cache", "unsafe");
    let log_of = |server: Server| {
        let log = server.log();
        server.stop();
        assert!(!log.is_empty(), "a warning is expected");
        log
    };
    for line in log_of(serve().start()).lines() {
        let (time, rest) = line.split_once(' ').expect("a time");
        let is_time = time.starts_with("20") && time.contains('T') && time.ends_with('Z');
        assert!(is_time && rest.starts_with(" WARN "), "{line}");
    }
    for line in log_of(serve().option("--log-format", "json").start()).lines() {
        let object: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(object["level"], "warning", "{line}");
        for key in ["time", "target", "message"] {
            assert!(object[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {line}");
        }
    }
    let serve = Serve::new(&scratch, image.path()).option("--log-format", "json");
    let refusal = serve.option("--snapshot", "none").refused();
    refusal.failed(&[r#""level":"error""#, r#""message":"blockhouse: "#]);
}
