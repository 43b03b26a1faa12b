//! Listening sockets in the service manager's descriptor store: clients wait for the next server, whatever ended the last one.

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::str;
use blockhouse_tests::nbd::{Address, Client};
use blockhouse_tests::{Scratch, Serve, Server, eventually};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::Signal;
use serde_json::json;

const LONG: Duration = Duration::from_secs(60);
/// What a service manager does: the socket is descriptor 3, and the process is told its own id.
const PASS: &str = r#"exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@""#;

/// A service manager, as far as it keeps descriptors.
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

    /// Starts a server with the socket that was kept under a name.
    fn restarts(&mut self, serve: Serve, name: &str) -> Server {
        let socket = self.kept.get(name).expect("it is kept").try_clone().expect("a copy");
        let serve = serve.under(["sh", "-c", PASS, "sh"]).stdin(socket);
        self.starts(serve.environment("LISTEN_FDNAMES", name))
    }

    /// Takes messages until one has these words, and does what they ask for.
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
                assert!(self.kept.remove(name.expect("a name")).is_some(), "{text}");
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

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

#[test]
fn clients_that_come_between_two_servers_are_served_by_the_second() {
    let scratch = Scratch::new();
    let mut manager = Manager::new(&scratch);
    let image = scratch.image("disk", 1 << 20);
    let (nbd, vu) = (scratch.socket("kept"), scratch.socket("vu"));
    let serve = || Serve::bare(&scratch, image.path()).export(&uri(&nbd));
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
        // Connected, and not refused, while nothing serves.
        let address = Address::Unix(nbd.clone());
        let early = std::thread::spawn(move || Client::open(&address).read(0, 4096));
        server = manager.restarts(serve(), &name);
        assert_eq!(early.join().expect("it is served"), Ok(vec![7; 4096]));
        manager.hear("READY=1");
        assert_eq!(manager.name_of(&nbd).as_ref(), Some(&name), "it is the same");
    }
    server.stop();
}

/// What is not wanted any more is given up, with its file, and so is a socket whose path has another server's.
#[test]
fn sockets_that_are_not_listened_at_any_more_are_given_up() {
    let scratch = Scratch::new();
    let mut manager = Manager::new(&scratch);
    let image = scratch.image("disk", 1 << 20);
    let (first, second) = (scratch.socket("first"), scratch.socket("second"));
    let serve = |socket: &Path| Serve::bare(&scratch, image.path()).export(&uri(socket));
    let server = manager.starts(serve(&first));
    manager.hear("READY=1");
    server.stop();
    manager.hear("STOPPING=1");
    let name = manager.name_of(&first).expect("it is kept at the end");
    assert!(first.exists());
    let server = manager.restarts(serve(&second), &name);
    manager.hear("READY=1");
    assert!(!first.exists() && manager.name_of(&first).is_none() && second.exists());
    server.stop();
    manager.hear("STOPPING=1");
    let name = manager.name_of(&second).expect("it is kept at the end");
    std::fs::rename(&second, scratch.socket("third")).expect("it is there");
    let server = manager.restarts(serve(&second), &name);
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
    for (export, socket) in [(uri(&more), &more), (str(&vu).to_owned(), &vu)] {
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
