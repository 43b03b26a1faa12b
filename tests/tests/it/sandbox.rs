//! The sandbox from inside: a build with debug assertions tries what an attacker would, on an event
//! loop of the server. All other tests show that a server in the sandbox does what users ask for.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use blockhouse_tests::control::Control;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::need::skip;
use blockhouse_tests::upgrade::{Servers, upgrade, upgrade_in_the_end};
use blockhouse_tests::{
    Engine, Scratch, Serve, Server, blockhouse, image_tool, nbd_uri, on_every_engine,
};
use rustix::process::{Pid, Signal};
use serde_json::json;

/// The wrapper that makes system calls fail for the command that it executes.
const WITHOUT: &str = env!("CARGO_BIN_EXE_without_syscalls");
/// SIGSYS, which has the same number on all architectures that have a filter.
const SIGSYS: i32 = 31;
/// The error code of a request that failed.
const FAILED: i64 = -32000;
/// EPERM, from the seccomp filter.
const NOT_PERMITTED: &str = "Operation not permitted (os error 1)";
/// EACCES, from the restrictions of an io_uring ring.
const DENIED: &str = "Permission denied (os error 13)";

fn image(scratch: &Scratch) -> PathBuf {
    image_tool::new_image(scratch, "disk.qcow2", "64M")
}

/// A server that makes these attempts before it is ready.
fn trying(scratch: &Scratch, image: &Path, words: &str) -> Serve {
    Serve::new(scratch, image).environment("BLOCKHOUSE_SANDBOX_PROBE", words)
}

/// The outcome of an attempt; `None` if the binary makes no attempts.
fn outcome<'a>(log: &'a str, word: &str) -> Option<&'a str> {
    let begin = format!("sandbox probe {word}: ");
    log.lines().find_map(|line| line.split_once(&begin)).map(|(_, outcome)| outcome)
}

/// Whether the binary under test makes attempts; a release build does not.
fn has_attempts(server: &Server, word: &str) -> bool {
    let has = outcome(&server.log(), word).is_some();
    if !has {
        skip("the binary under test has no attempts");
    }
    has
}

/// Whether this kernel can restrict files.
fn has_landlock(server: &Server) -> bool {
    let has = server.details().contains("landlock");
    if !has {
        skip("this kernel has no Landlock");
    }
    has
}

/// A file of another owner, in a folder of its own.
fn secret(other: &Scratch) -> PathBuf {
    let secret = other.path("secret.img");
    std::fs::write(&secret, [7; 4096]).expect("a file");
    secret
}

/// This server may open files, because it compares its pid file at the end.
#[test]
fn a_server_that_opens_its_own_files_reaches_no_others() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let (image, secret) = (image(&scratch), secret(&other));
    let pid_file = scratch.path("pid");
    let attempt = |what: &str, path: &Path| format!("{what}={}", path.display());
    let refused = [
        attempt("open", &secret),
        attempt("remove", &secret),
        attempt("create", &other.path("new")),
        // The image is open, but cannot be opened by its path.
        attempt("open", &image),
        "open=/etc/passwd".into(),
    ];
    let own = attempt("open", &pid_file);
    let words = format!("{} {own}", refused.join(" "));
    let server =
        trying(&scratch, &image, &words).option("--pid-file", &pid_file).flag("-v").start();
    if !has_landlock(&server) || !has_attempts(&server, &own) {
        return;
    }
    let log = server.log();
    for word in &refused {
        assert_eq!(outcome(&log, word), Some(DENIED), "{word}");
    }
    assert_eq!(outcome(&log, &own), Some("done"));
    assert!(secret.exists() && !other.path("new").exists());
    server.stop();
    assert!(!pid_file.exists() && !scratch.socket("nbd").exists());
}

#[test]
fn requests_open_what_is_beside_the_disks_and_what_is_allowed() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let (image, secret) = (image(&scratch), secret(&other));
    let beside = scratch.path("beside.img");
    std::fs::write(&beside, [3; 8192]).expect("a file");
    let control = scratch.socket("control");
    let socket = |folder: &Scratch| nbd_uri("", folder.socket("more"));
    let serve = || Serve::new(&scratch, &image).option("--control", &control).flag("-v");
    let server = serve().start();
    if !has_landlock(&server) {
        return;
    }
    let mut client = Control::connect(&control);
    let open =
        |path: &Path, exports: &[String]| json!({ "name": "b", "path": path, "exports": exports });
    client.get("disk.open", open(&beside, &[socket(&scratch)]));
    client.get("disk.close", json!({ "disk": "b", "force": true }));
    let words = ["secret.img: the sandbox", "--sandbox-allow DIR"];
    client.refused("disk.open", open(&secret, &[]), FAILED, &words);
    let words = ["more: the sandbox", "--sandbox-allow DIR"];
    client.refused("disk.open", open(&beside, &[socket(&other)]), FAILED, &words);
    let allowing = json!({ "name": "b", "path": beside, "allow-paths": [other.path("")] });
    client.refused("disk.open", allowing, FAILED, &["the sandbox", "--sandbox-allow DIR"]);
    let disk = client.get("disk.list", json!({}))[0]["disk"].clone();
    let mirror = json!({ "kind": "mirror", "disk": disk, "target": other.path("copy.img") });
    let words = ["copy.img: the sandbox", "--sandbox-allow DIR"];
    client.refused("job.start", mirror, FAILED, &words);
    assert!(!other.path("copy.img").exists());
    // A program that the operator has not named is not started, whatever its name.
    let program = scratch.path("blockhouse-program");
    std::fs::write(&program, "#!/bin/sh\n").expect("a script");
    for binary in [image_tool::str(&program), "/bin/sh"] {
        upgrade(&control, &["--binary", binary]).failure("--upgrade-to");
    }
    server.stop();
    // Neither is a program that the server could have made.
    let server = serve().option("--upgrade-to", &program).start();
    for words in [&[][..], &["--binary", image_tool::str(&program)]] {
        upgrade(&control, words).failure("can write below");
    }
    server.stop();
    let server = serve().option("--sandbox-allow", secret.parent().expect("a folder")).start();
    let mut client = Control::connect(&control);
    client.get("disk.open", open(&secret, &[socket(&scratch)]));
    server.stop();
}

on_every_engine! { what_is_not_needed_is_refused }

fn what_is_not_needed_is_refused(engine: Engine) {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let new = format!("create={}", scratch.path("new").display());
    let words = [
        "open=/etc/passwd",
        &new,
        "socket",
        "unix-socket",
        "executable-memory",
        "new-ring",
        "start",
        "user",
        "ring-open",
    ];
    let server = trying(&scratch, &image, &words.join(" ")).engine(engine).flag("-v").start();
    if !has_attempts(&server, words[0]) {
        return;
    }
    let log = server.log();
    for word in &words[..words.len() - 1] {
        assert_eq!(outcome(&log, word), Some(NOT_PERMITTED), "{word}");
    }
    let expected = if engine == Engine::IoUring { DENIED } else { "unsupported" };
    assert_eq!(outcome(&log, "ring-open"), Some(expected));
    assert!(!scratch.path("new").exists());
    assert!(
        server.details().contains(" sandbox=") && server.details().contains("seccomp"),
        "{}",
        server.details()
    );
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(4096, &[5; 70_000], 0), 0);
    assert_eq!(client.read(4096, 70_000), Ok(vec![5; 70_000]));
    assert_eq!(client.flush(), 0);
    server.stop();
}

/// Old kernels and some containers have no Landlock.
#[test]
fn without_landlock_a_server_that_opens_nothing_later_opens_nothing() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let words = format!("open={} open=/etc/passwd unix-socket socket start", image.display());
    let serve = trying(&scratch, &image, &words).under([WITHOUT, "landlock"]).flag("-v");
    let server = serve.start();
    assert!(!server.details().contains("landlock"), "{}", server.details());
    if has_attempts(&server, "start") {
        let log = server.log();
        for word in words.split(' ') {
            assert_eq!(outcome(&log, word), Some(NOT_PERMITTED), "{word}");
        }
    }
    server.stop();
}

/// Threads of Ceph's library block all signals, so the server cannot make them apply the rules for
/// reading files. They have inherited the rules for writing.
#[test]
fn a_thread_that_cannot_be_asked_writes_below_the_folders_of_the_server_alone() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let (image, secret) = (image(&scratch), secret(&other));
    let refused =
        [format!("remove={}", secret.display()), format!("create={}", other.path("new").display())];
    // Such a thread may read what its user may.
    let done =
        [format!("open={}", secret.display()), format!("create={}", scratch.path("new").display())];
    let words = [&refused[..], &done].concat().join(" ");
    let serve = || Serve::new(&scratch, &image).flag("-v");
    let plain = serve().start();
    if !has_landlock(&plain) {
        return;
    }
    plain.stop();
    let serve = serve().flag("--allow-remote");
    let server = serve.environment("BLOCKHOUSE_SANDBOX_PROBE_ASIDE", words).start();
    let first = format!("aside {}", refused[0]);
    if !has_attempts(&server, &first) {
        return;
    }
    assert!(server.details().contains("sandbox=writes,seccomp"), "{}", server.details());
    let log = server.log();
    for word in &refused {
        assert_eq!(outcome(&log, &format!("aside {word}")), Some(DENIED), "{word}");
    }
    for word in &done {
        assert_eq!(outcome(&log, &format!("aside {word}")), Some("done"), "{word}");
    }
    assert!(secret.exists() && !other.path("new").exists());
    server.assert_serves();
    server.stop();
}

/// A configuration may be read again, and may name disks in the folders that it named at the start.
#[test]
fn a_configuration_reaches_its_folders_and_no_others() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let (image, secret) = (image(&scratch), secret(&other));
    let file = scratch.path("blockhouse.toml");
    let export = nbd_uri("", scratch.socket("nbd"));
    let disk = format!("[[disk]]\npath = {image:?}\nexports = [{export:?}]\n");
    std::fs::write(&file, disk).expect("room");
    let refused = [
        format!("open={}", secret.display()),
        format!("remove={}", secret.display()),
        format!("create={}", other.path("new").display()),
    ];
    let own = format!("open={}", image.display());
    let serve = Serve::without_image(&scratch).option("--config", &file).ready_lines(1).flag("-v");
    let words = format!("{} {own} start user new-ring", refused.join(" "));
    let server = serve.environment("BLOCKHOUSE_SANDBOX_PROBE", words).start();
    if !has_landlock(&server) || !has_attempts(&server, &own) {
        return;
    }
    let log = server.log();
    for word in &refused {
        assert_eq!(outcome(&log, word), Some(DENIED), "{word}");
    }
    for word in ["start", "user", "new-ring"] {
        assert_eq!(outcome(&log, word), Some(NOT_PERMITTED), "{word}");
    }
    assert_eq!(outcome(&log, &own), Some("done"));
    server.stop();
}

/// Calls that every server needs, with arguments that none has.
#[test]
fn what_reaches_others_is_refused() {
    let scratch = Scratch::new();
    let words = "signal connect-by-sending datagrams";
    let server = trying(&scratch, &image(&scratch), words).start();
    if !has_attempts(&server, "signal") {
        return;
    }
    let log = server.log();
    for word in words.split(' ') {
        assert_eq!(outcome(&log, word), Some(NOT_PERMITTED), "{word}");
    }
    server.stop();
}

#[test]
fn what_only_an_attacker_calls_ends_the_server() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let control = scratch.socket("control");
    let probing = trying(&scratch, &image, "no-such-attempt").start();
    if !has_attempts(&probing, "no-such-attempt") {
        return;
    }
    probing.stop();
    for word in ["execute", "trace"] {
        trying(&scratch, &image, word).refused().killed_by(SIGSYS);
        // Also if the server is allowed more.
        trying(&scratch, &image, word).option("--control", &control).refused().killed_by(SIGSYS);
    }
    // The image is unchanged.
    let server = Serve::new(&scratch, &image).start();
    assert_eq!(Client::open(&server.address()).read(0, 512), Ok(vec![0; 512]));
    server.stop();
}

#[test]
fn a_control_socket_needs_more_and_gets_no_more_than_that() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let control = scratch.socket("control");
    let special = format!("set-user-id={}", image.display());
    let words = "socket executable-memory new-ring start user signal connect-by-sending datagrams";
    let server = trying(&scratch, &image, &format!("{words} {special}"))
        .option("--control", &control)
        .start();
    let version = Control::connect(&control).get("server.version", json!({}));
    assert!(
        version["sandbox"].as_str().is_some_and(|parts| parts.contains("seccomp")),
        "{version}"
    );
    if has_attempts(&server, "socket") {
        let log = server.log();
        assert_eq!(outcome(&log, "socket"), Some("done"));
        for word in words.split(' ').skip(1).chain([special.as_str()]) {
            assert_eq!(outcome(&log, word), Some(NOT_PERMITTED), "{word}");
        }
    }
    server.stop();
}

#[test]
fn every_thread_is_in_it() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server = Serve::new(&scratch, &image)
        .option("--workers", "3")
        .option("--control", scratch.socket("control"))
        .option("--metrics", "127.0.0.1:0")
        .start();
    let tasks = format!("/proc/{}/task", server.pid().as_raw_nonzero());
    let tasks = std::fs::read_dir(tasks).expect("the server runs");
    let mut count = 0;
    for task in tasks {
        let status = task.expect("a thread").path().join("status");
        let status = std::fs::read_to_string(status).expect("it goes on");
        assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
        count += 1;
    }
    assert!(count >= 6, "{count} threads");
    server.stop();
}

/// The user id of "nobody", who owns no file, on every Linux.
const NOBODY: u32 = 65534;

/// Whether NOBODY can execute the binary under test.
fn is_reachable_for_all() -> bool {
    let can_enter = |folder: &Path| {
        folder.metadata().is_ok_and(|found| found.permissions().mode() & 0o001 != 0)
    };
    blockhouse().ancestors().all(can_enter)
}

#[test]
fn root_opens_and_another_user_serves() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root becomes another user");
    }
    let scratch = Scratch::new();
    let image = image(&scratch);
    let control = scratch.socket("control");
    let memory = Scratch::in_memory();
    let state = memory.path("state");
    let serve = || {
        let serve = trying(&scratch, &image, "user").option("--user", NOBODY.to_string());
        let serve = serve.option("--group", NOBODY.to_string()).option("--control", &control);
        serve.option("--state", &state).flag("-v")
    };
    let servers = Servers(&scratch);
    let server = serve().start();
    assert!(server.details().contains(" sandbox=user"), "{}", server.details());
    if has_attempts(&server, "user") {
        assert_eq!(outcome(&server.log(), "user"), Some(NOT_PERMITTED));
    }
    is_nobody(server.pid());
    for file in [&control, &scratch.socket("nbd"), &state] {
        assert_eq!(file.metadata().expect("it is there").uid(), NOBODY, "{}", file.display());
    }
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[8; 4096], 0), 0);
    // Acknowledged writes are there after a kill, for the next server that root starts.
    server.signal(Signal::KILL);
    drop(server);
    let server = serve().start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.read(0, 4096), Ok(vec![8; 4096]));
    if is_reachable_for_all() {
        upgrade_in_the_end(&control, &[]);
        servers.wait_for(1);
        is_nobody(servers.running()[0]);
        assert_eq!(client.read(0, 4096), Ok(vec![8; 4096]));
    }
    servers.stop();
    assert_eq!(std::fs::read_dir(&state).expect("a folder").count(), 0, "it was closed in order");
    let refusal = trying(&scratch, &image, "").option("--group", "nogroup").refused();
    refusal.wrong_usage(&["--group needs --user"]);
}

/// Asserts that all threads of a process run as NOBODY, without capabilities. The kernel's io_uring
/// workers are exempt: they run no code of the process, and act with the rights of the thread that
/// submits a request.
#[track_caller]
fn is_nobody(process: Pid) {
    let tasks = format!("/proc/{}/task", process.as_raw_nonzero());
    for task in std::fs::read_dir(tasks).expect("the server runs") {
        let status = std::fs::read_to_string(task.expect("a thread").path().join("status"));
        let status = status.expect("it goes on");
        if status.starts_with("Name:\tiou-wrk-") {
            continue;
        }
        for line in [
            "Uid:\t65534\t65534\t65534\t65534",
            "Gid:\t65534\t65534\t65534\t65534",
            "Groups:\t \n",
            "CapPrm:\t0000000000000000",
        ] {
            assert!(status.contains(line), "{line:?}: {status}");
        }
    }
}

#[test]
fn off_is_off() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server = Serve::new(&scratch, &image).option("--sandbox", "off").flag("-v").start();
    assert!(server.details().ends_with(" sandbox=off"), "{}", server.details());
    let status = format!("/proc/{}/status", server.pid().as_raw_nonzero());
    let status = std::fs::read_to_string(status).expect("it runs");
    let own = std::fs::read_to_string("/proc/self/status").expect("we run");
    let line =
        |text: &str| text.lines().find(|line| line.starts_with("Seccomp:")).map(String::from);
    assert_eq!(line(&status), line(&own));
    server.stop();
    let refusal = Serve::new(&scratch, &image).option("--sandbox", "maybe").refused();
    refusal.wrong_usage(&["use on or off"]);
}

#[test]
fn a_server_of_root_keeps_few_capabilities() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server =
        Serve::new(&scratch, &image).option("--control", scratch.socket("control")).start();
    assert_few_capabilities(&server);
    server.stop();
}

/// Asserts that no thread of a server has a capability of root beyond files, memory and ports.
#[track_caller]
pub(crate) fn assert_few_capabilities(server: &Server) {
    // Of `<linux/capability.h>`: `NET_RAW`, `SYS_MODULE`, `SYS_PTRACE`, `SYS_ADMIN`, `SYSLOG`,
    // `PERFMON`, `BPF`.
    let dangerous = [13, 16, 19, 21, 34, 38, 39].iter().fold(0_u64, |all, bit| all | 1 << bit);
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("a process");
    let mut seen = 0;
    for thread in threads {
        let status = thread.expect("a thread").path().join("status");
        let Ok(status) = std::fs::read_to_string(status) else { continue };
        let line = |name| status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        // In each request, an io_uring worker has the rights of the thread that submitted it.
        if line("Name:").contains("iou-wrk") {
            continue;
        }
        for set in ["CapPrm:", "CapEff:", "CapInh:"] {
            let bits = u64::from_str_radix(line(set).trim(), 16).expect("a number");
            assert_eq!(bits & dangerous, 0, "{set} {bits:x} of {}", line("Name:"));
        }
        seen += 1;
    }
    assert!(seen > 1);
}
