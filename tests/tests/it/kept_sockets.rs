//! Listening sockets in the service manager's file descriptor store: clients wait for the next
//! server, however the last one ended.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::str;
use blockhouse_tests::metrics::Metrics;
use blockhouse_tests::nbd::{Address, Client};
use blockhouse_tests::upgrade::{Servers, upgrade_in_the_end};
use blockhouse_tests::{Scratch, Serve, Server, eventually, nbd_uri, need, require};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::Signal;
use serde_json::json;

const LONG: Duration = Duration::from_secs(60);
/// Starts a server as a service manager does: sockets are descriptors from 3 on, and LISTEN_PID is
/// the process's own id. The script receives the sockets over standard input.
const PASS: &str = r#"
import fcntl, os, socket, sys
channel = socket.socket(fileno=0)
passed = socket.recv_fds(channel, 1, 64)[1]
passed = [fcntl.fcntl(one, fcntl.F_DUPFD, 100) for one in passed]
channel.detach()
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
for place, one in enumerate(passed):
    os.dup2(one, 3 + place)
    os.close(one)
os.environ.update(LISTEN_FDS=str(len(passed)), LISTEN_PID=str(os.getpid()))
os.execvp(sys.argv[1], sys.argv[1:])
"#;

/// The part of a service manager that keeps descriptors.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    kept: BTreeMap<String, OwnedFd>,
}

impl Manager {
    fn new(scratch: &Scratch) -> Self {
        let path = scratch.socket("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(LONG)).expect("a limit");
        Self { socket, path, kept: BTreeMap::new() }
    }

    fn starts(&self, serve: Serve) -> Server {
        serve.environment("NOTIFY_SOCKET", &self.path).environment("FDSTORE", "64").start()
    }

    /// Starts a server with all kept sockets.
    fn restarts(&self, serve: Serve) -> Server {
        let (own, passed) = UnixStream::pair().expect("two sockets");
        let descriptors: Vec<_> = self.kept.values().map(AsFd::as_fd).collect();
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&own, &[IoSlice::new(&[0])], &mut control, SendFlags::empty()).expect("room");
        let names: Vec<_> = self.kept.keys().map(String::as_str).collect();
        let serve = serve.under(["python3", "-c", PASS]).stdin(OwnedFd::from(passed));
        self.starts(serve.environment("LISTEN_FDNAMES", names.join(":")))
    }

    /// Receives messages until one has these words, and stores or removes descriptors as they say.
    fn hear(&mut self, words: &str) {
        loop {
            let mut bytes = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let received = recvmsg(&self.socket, &mut parts, &mut control, flags);
            let count = received.expect("a message in time").bytes;
            let descriptors = control.drain().flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
                _ => Vec::new(),
            });
            let descriptors: Vec<_> = descriptors.collect();
            let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
            if text.contains("FDSTORE=1") {
                assert_eq!(descriptors.len(), 1, "{text}");
                self.kept.extend(name.map(str::to_owned).into_iter().zip(descriptors));
            } else if text.contains("FDSTOREREMOVE=1") {
                // The descriptor may have been removed before.
                self.kept.remove(name.expect("a name"));
            }
            if text.contains(words) {
                return;
            }
        }
    }

    /// The name under which the socket at a path is kept.
    fn name_of(&self, path: &Path) -> Option<String> {
        self.kept.keys().find(|name| name.ends_with(&format!("={}", path.display()))).cloned()
    }
}

/// A request at the control socket.
const VERSION: &str = r#"{"jsonrpc":"2.0","id":7,"method":"server.version","params":{}}"#;

#[test]
fn clients_that_come_between_two_servers_are_served_by_the_second() {
    require!(need::tools(&["python3"]));
    let scratch = Scratch::new();
    let mut manager = Manager::new(&scratch);
    let image = scratch.image("disk", 1 << 20);
    let (nbd, vu) = (scratch.socket("kept"), scratch.socket("vu"));
    let serve = || Serve::bare(&scratch, image.path()).export(&nbd_uri("", &nbd));
    let mut server = manager.starts(serve().option("--vhost-user-blk", &vu).ready_lines(2));
    manager.hear("READY=1");
    assert_eq!(manager.kept.len(), 2, "{:?}", manager.kept);
    assert!(manager.name_of(&vu).is_some());
    let name = manager.name_of(&nbd).expect("its name");
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        let mut client = Client::open(&Address::Unix(nbd.clone()));
        assert_eq!(client.write(0, &[7; 4096], 0), 0);
        server.signal(signal);
        server.wait(LONG);
        assert!(nbd.exists(), "it is listened at");
        // The client connects, and is not refused, while no server runs.
        let address = Address::Unix(nbd.clone());
        let early = std::thread::spawn(move || Client::open(&address).read(0, 4096));
        server = manager.restarts(serve());
        assert_eq!(early.join().expect("it is served"), Ok(vec![7; 4096]));
        manager.hear("READY=1");
        assert_eq!(manager.name_of(&nbd).as_ref(), Some(&name), "it is the same");
    }
    server.stop();
}

/// A request for control or metrics between two servers is answered by the second one.
#[test]
fn control_and_metrics_go_on_after_the_server_is_killed() {
    require!(need::tools(&["python3"]));
    let scratch = Scratch::new();
    let mut manager = Manager::new(&scratch);
    let image = scratch.image("disk", 1 << 20);
    let (control, measured) = (scratch.socket("control"), scratch.socket("metrics"));
    let serve = || {
        let serve = Serve::new(&scratch, image.path()).option("--control", &control);
        serve.option("--metrics", format!("unix:{}", measured.display()))
    };
    let mut server = manager.starts(serve());
    manager.hear("READY=1");
    let names = [&control, &measured].map(|path| manager.name_of(path).expect("it is kept"));
    for signal in [Signal::KILL, Signal::TERM] {
        server.signal(signal);
        server.wait(LONG);
        // The client connects, and is not refused, while no server runs.
        let mut early = Control::connect(&control);
        early.send(VERSION.as_bytes()).expect("the socket takes it");
        let mut asking = UnixStream::connect(&measured).expect("it is listened at");
        asking.set_read_timeout(Some(LONG)).expect("a limit");
        asking.write_all(b"GET /metrics.json HTTP/1.1\r\nHost: x\r\n\r\n").expect("room");
        server = manager.restarts(serve());
        assert_eq!(early.receive().expect("an answer")["id"], 7);
        let mut answer = String::new();
        asking.read_to_string(&mut answer).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        manager.hear("READY=1");
        let now = [&control, &measured].map(|path| manager.name_of(path).expect("it is kept"));
        assert_eq!(now, names, "they are the same");
    }
    server.stop();
}

/// After an upgrade the new server makes its own metrics socket, as soon as the store no longer has
/// the old one.
#[test]
fn an_upgraded_server_has_its_own_socket_of_metrics_kept() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let mut manager = Manager::new(&scratch);
    let image = scratch.image("disk", 1 << 20);
    let (control, measured) = (scratch.socket("control"), scratch.socket("metrics"));
    let serve = Serve::new(&scratch, image.path()).option("--control", &control);
    let serve = serve.option("--metrics", format!("unix:{}", measured.display()));
    let server = manager.starts(serve);
    manager.hear("READY=1");
    let [of_metrics, of_control] = [&measured, &control].map(|path| manager.name_of(path));
    assert!(of_metrics.is_some() && of_control.is_some());
    upgrade_in_the_end(&control, &[]);
    // The new process removes the old socket from the store, and then stores its own.
    manager.hear("FDSTOREREMOVE=1");
    while manager.name_of(&measured).is_none() {
        manager.hear("FDNAME=");
    }
    assert_eq!(manager.name_of(&control), of_control);
    assert!(!Metrics::read(&measured).samples("blockhouse_disk_size_bytes", &[]).is_empty());
    servers.stop();
    drop(server);
}

/// A socket that is no longer used is removed from the store, with its file. So is one whose path
/// has another server's socket.
#[test]
fn sockets_that_are_not_listened_at_any_more_are_given_up() {
    require!(need::tools(&["python3"]));
    let scratch = Scratch::new();
    let mut manager = Manager::new(&scratch);
    let image = scratch.image("disk", 1 << 20);
    let (first, second) = (scratch.socket("first"), scratch.socket("second"));
    let serve = |socket: &Path| Serve::bare(&scratch, image.path()).export(&nbd_uri("", socket));
    let server = manager.starts(serve(&first));
    manager.hear("READY=1");
    server.stop();
    manager.hear("STOPPING=1");
    assert!(manager.name_of(&first).is_some(), "it is kept at the end");
    assert!(first.exists());
    let server = manager.restarts(serve(&second));
    manager.hear("READY=1");
    assert!(!first.exists() && manager.name_of(&first).is_none() && second.exists());
    server.stop();
    manager.hear("STOPPING=1");
    let name = manager.name_of(&second).expect("it is kept at the end");
    std::fs::rename(&second, scratch.socket("third")).expect("it is there");
    let server = manager.restarts(serve(&second));
    manager.hear("READY=1");
    assert_ne!(manager.name_of(&second), Some(name), "another socket is at the path");
    Client::open(&server.address()).disconnect();
    server.stop();
}

#[test]
fn exports_that_come_and_go_are_kept_and_given_up() {
    let scratch = Scratch::new();
    let mut manager = Manager::new(&scratch);
    let image = scratch.image("disk", 1 << 20);
    let (more, vu) = (scratch.socket("more"), scratch.socket("vu"));
    let serve = Serve::new(&scratch, image.path()).option("--control", scratch.socket("control"));
    let server = manager.starts(serve);
    manager.hear("READY=1");
    let mut control = Control::connect(&scratch.socket("control"));
    for (export, socket) in [(nbd_uri("", &more), &more), (str(&vu).to_owned(), &vu)] {
        control.get("export.add", json!({ "disk": "disk", "export": export }));
        manager.hear("FDSTORE=1");
        assert!(manager.name_of(socket).is_some(), "{export}");
        control.get("export.remove", json!({ "export": export }));
        manager.hear("FDSTOREREMOVE=1");
        assert!(manager.name_of(socket).is_none(), "{export}");
        assert!(eventually(LONG, || !socket.exists()), "{export}");
    }
    server.stop();
}
