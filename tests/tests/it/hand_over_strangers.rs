//! Upgrades of a server that an attacker controls: the new process is confined before it reads a
//! byte of the offer, and no offer makes it open a path, connect, or end without a line that says
//! why.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhouse_tests::need::skip;
use blockhouse_tests::{Scratch, blockhouse, eventually, image_tool, nbd_uri};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(20);
/// The version of the hand-over format.
const VERSION: u32 = 5;

/// The new process of an upgrade, and our end of its standard input.
struct Successor {
    process: Child,
    socket: UnixStream,
}

impl Successor {
    /// Starts a process with this image and these options.
    fn start(image: &Path, options: &[&str], probe: &str) -> Self {
        let (socket, theirs) = UnixStream::pair().expect("a socket pair");
        socket.set_read_timeout(Some(LIMIT)).expect("a limit");
        let mut command = Command::new(blockhouse());
        command.args(["serve", "--hand-over", "--state", "off"]).args(options).arg(image);
        command.env("BLOCKHOUSE_SANDBOX_PROBE", probe);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        Self { process: command.spawn().expect("the binary"), socket }
    }

    /// Whether all its threads are confined, before anything is sent.
    fn is_confined(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id()));
        let mut tasks = tasks.expect("it runs").flatten();
        tasks.all(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2")
                || status.starts_with("Name:\tiou-wrk-")
        })
    }

    fn send(&self, message: &Value, descriptors: &[BorrowedFd<'_>], bytes: &[u8]) {
        let json = message.to_string();
        let mut header = b"BHANDOVR".to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((descriptors.len() as u32).to_le_bytes());
        header.extend((json.len() as u64).to_le_bytes());
        header.extend((bytes.len() as u64).to_le_bytes());
        // The process may have ended.
        let _ = (&self.socket).write_all(&header);
        for batch in descriptors.chunks(128) {
            send_with(&self.socket, batch);
        }
        let _ = (&self.socket).write_all(json.as_bytes());
        let _ = (&self.socket).write_all(bytes);
    }

    /// The next message.
    fn receive(&self) -> Option<Value> {
        let mut header = [0; 32];
        (&self.socket).read_exact(&mut header).ok()?;
        let length = u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"));
        let mut json = vec![0; length as usize];
        (&self.socket).read_exact(&mut json).expect("all of it");
        Some(serde_json::from_slice(&json).expect("JSON"))
    }

    /// Waits for its end; returns its log.
    fn end(mut self) -> String {
        drop(self.socket);
        let mut log = String::new();
        let mut pipe = self.process.stderr.take().expect("a pipe");
        pipe.read_to_string(&mut log).expect("text");
        let status = self.process.wait().expect("our child");
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(!log.contains("panicked"), "{log}");
        log
    }
}

fn send_with(socket: &UnixStream, descriptors: &[BorrowedFd<'_>]) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(128))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    let byte = [std::io::IoSlice::new(&[0])];
    let sent = sendmsg(socket, &byte, &mut ancillary, SendFlags::NOSIGNAL);
    assert!(matches!(sent, Ok(1) | Err(Errno::PIPE | Errno::CONNRESET)), "{sent:?}");
}

fn image(scratch: &Scratch) -> std::path::PathBuf {
    image_tool::new_image(scratch, "own.qcow2", "64M")
}

/// A disk of an offer.
fn disk(path: &str, files: &Value) -> Value {
    json!({
        "opened": {
            "name": "d", "path": path.as_bytes(), "format": "raw", "read-only": false,
            "cache": "writeback", "discard": "unmap", "detect-zeroes": "off", "create": 1 << 20,
            "snapshot": null, "allow-paths": [b"/"], "allow-remote": true, "bitmaps": [],
            "limits": null,
        },
        "moved": null, "is-protected": false, "limits": null, "files": files,
    })
}

fn offer(disks: &[Value]) -> Value {
    json!({ "offer": {
        "disks": disks, "configured": [], "sockets": [], "devices": [], "ublk": [],
        "control": null, "measured-since": 1,
    }})
}

fn yours(disks: usize) -> Value {
    json!({ "yours": {
        "flush-failures": vec![json!([null, null]); disks], "counts": vec![counts(); disks],
        "connections": [], "frontends": [],
    }})
}

#[test]
fn it_is_confined_before_it_reads_a_byte() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let image = image(&scratch);
    let secret = other.path("secret");
    std::fs::write(&secret, "x").expect("a file");
    let control = scratch.socket("control");
    let open = format!("open={}", secret.display());
    let create = format!("create={}", other.path("new").display());
    let words = format!("{open} {create} start user signal new-ring executable-memory");
    for options in [&[][..], &["--control", image_tool::str(&control)]] {
        let successor = Successor::start(&image, options, &words);
        assert!(eventually(LIMIT, || successor.is_confined()), "it is not confined");
        let log = successor.end();
        if !log.contains("sandbox probe") {
            return skip("the binary under test has no attempts");
        }
        for word in ["start", "user", "signal", "new-ring", "executable-memory"] {
            let line = format!("sandbox probe {word}: Operation not permitted");
            assert!(log.contains(&line), "{word}: {log}");
        }
        assert!(!log.contains(&format!("{open}: done")) || !has_landlock(), "{log}");
        assert!(!other.path("new").exists() || !has_landlock());
        assert!(log.contains("has ended"), "{log}");
    }
}

fn has_landlock() -> bool {
    let security = std::fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    security.is_empty() || security.contains("landlock")
}

/// No location of a disk or of its backing files in an offer is opened, and no server is connected
/// to.
#[test]
fn a_location_in_an_offer_is_a_name() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let image = image(&scratch);
    let control = scratch.socket("control");
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    tcp.set_nonblocking(true).expect("a flag");
    let unix = other.socket("stranger");
    let listener = UnixListener::bind(&unix).expect("a socket");
    listener.set_nonblocking(true).expect("a flag");
    let port = tcp.local_addr().expect("an address").port();
    let secret = other.path("secret.raw");
    std::fs::write(&secret, [7; 4096]).expect("a file");
    for name in [
        format!("nbd://127.0.0.1:{port}/x"),
        nbd_uri("x", &unix),
        format!("nbds://127.0.0.1:{port}/x?tls-certificates={}", other.path("").display()),
        format!("rbd:pool/x?conf={}&id=admin", secret.display()),
        secret.display().to_string(),
        "/dev/mem".to_owned(),
    ] {
        // Also if the server may connect later, on requests of its users.
        for options in [&[][..], &["--control", image_tool::str(&control), "--allow-remote"]] {
            let successor = Successor::start(&image, options, "");
            successor.send(&offer(&[disk(&name, &json!([]))]), &[], b"");
            assert_eq!(successor.receive(), Some(json!("ready")));
            successor.send(&yours(1), &[], b"");
            let refused = successor.receive().expect("an answer")["refused"]["why"].clone();
            let refused = refused.as_str().expect("it refuses").to_owned();
            let is_why = ["cannot be handed over", "does not have it open"];
            assert!(is_why.iter().any(|why| refused.contains(why)), "{name}: {refused}");
            successor.end();
        }
    }
    // The name of a backing file, in an image that is handed over.
    for name in
        [format!("nbd://127.0.0.1:{port}/x"), format!("rbd:pool/x?conf={}", secret.display())]
    {
        let overlay = other.path("overlay.qcow2");
        let _ = std::fs::remove_file(&overlay);
        image_tool::qemu_img(&[
            "create",
            "-f",
            "qcow2",
            "-b",
            &name,
            "-F",
            "raw",
            "-u",
            image_tool::str(&overlay),
            "1M",
        ])
        .success();
        let file = std::fs::File::options().read(true).write(true).open(&overlay).expect("a file");
        let path = overlay.display().to_string();
        let files = json!([{ "path": path, "has-tail": false, "has-flushed": false }]);
        let mut one = disk(&path, &files);
        one["opened"]["format"] = json!("qcow2");
        let successor = Successor::start(&image, &["--allow-remote"], "");
        successor.send(&offer(&[one]), &[file.as_fd()], b"");
        assert_eq!(successor.receive(), Some(json!("ready")));
        successor.send(&yours(1), &[], b"");
        let refused = successor.receive().expect("an answer")["refused"]["why"].to_string();
        assert!(refused.contains("another server") || refused.contains("handed over"), "{refused}");
        successor.end();
    }
    assert!(tcp.accept().is_err() && listener.accept().is_err(), "it has connected");
}

/// Empty counters of a disk.
fn counts() -> Value {
    json!({
        "requests": [], "stages": [], "clients": [], "totals": [0, 0, 0, 0], "cache": [0, 0],
        "delayed": [0, 0],
    })
}

/// Invalid frames and offers, descriptors of the wrong kind, and too many descriptors.
#[test]
fn offers_that_make_no_sense_are_refused_in_one_line() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let (pipe, _other) = rustix::pipe::pipe().expect("a pipe");
    let file = |path: &str| json!([{ "path": path, "has-tail": true, "has-flushed": true }]);
    let listening = json!({ "address": { "unix": b"/etc/passwd" }, "has-file": true });
    let mut with_control = offer(&[]);
    with_control["offer"]["control"] = listening.clone();
    let mut with_device = offer(&[]);
    with_device["offer"]["devices"] = json!([{ "socket": listening, "disk": 7 }]);
    let mut with_ublk = offer(&[disk("/x", &json!([]))]);
    with_ublk["offer"]["ublk"] = json!([{ "id": 0, "disk": 0, "image": b"/x" }]);
    let mut unknown = offer(&[]);
    unknown["offer"]["more"] = json!(1);
    for (message, descriptors) in [
        (offer(&[disk("/x", &file("/x"))]), 0),
        (with_control, 1),
        (with_device, 2),
        (with_ublk, 0),
        (unknown, 0),
        (json!("mine"), 0),
        (json!({ "refused": { "why": "no" } }), 300),
        (Value::Null, 0),
    ] {
        let successor = Successor::start(&image, &[], "");
        successor.send(&message, &vec![pipe.as_fd(); descriptors], b"");
        let refused = successor.receive().expect("an answer")["refused"]["why"].clone();
        assert!(refused.as_str().is_some_and(|why| !why.contains('\n')), "{message}: {refused}");
        successor.end();
    }
    // A pipe instead of an image.
    let successor = Successor::start(&image, &[], "");
    successor.send(&offer(&[disk("/x", &file("/x"))]), &[pipe.as_fd(); 3], b"");
    assert_eq!(successor.receive(), Some(json!("ready")));
    successor.send(&yours(1), &[], b"");
    assert!(successor.receive().expect("an answer")["refused"]["why"].is_string());
    successor.end();
    // Bytes that are not a frame.
    for bytes in [&[0xff; 64][..], b"BHANDOVR\x05\0\0\0\xff\xff\xff\xff", b"BHAND"] {
        let successor = Successor::start(&image, &[], "");
        (&successor.socket).write_all(bytes).expect("room");
        successor.socket.shutdown(std::net::Shutdown::Write).expect("a socket");
        successor.end();
    }
}
