//! The events for subscribers of the control socket when a disk fails. The disk is an export of
//! nbdkit, in which the existence of a file makes an operation fail.

use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use blockhouse_tests::control::Control;
use blockhouse_tests::generated::control_schema;
use blockhouse_tests::guest::Guest;
use blockhouse_tests::image_tool::{command, str};
use blockhouse_tests::nbd::{Client, Framing, Greeted};
use blockhouse_tests::schema::Schema;
use blockhouse_tests::{
    FileSystem, Scratch, Serve, Server, SmallHost, eventually, nbd_uri, need, require, tool,
};
use blockhouse_vhost_user::driver::Options;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// An nbdkit server whose operations fail while a file with the operation's name exists.
struct Failing<'a> {
    scratch: &'a Scratch,
    nbdkit: Child,
}

impl<'a> Failing<'a> {
    fn start(scratch: &'a Scratch) -> Self {
        let fails = |operation: &str, errno: &str, otherwise: &str| {
            let file = scratch.path(operation);
            format!(
                "{operation}=if [ -e '{}' ]; then echo '{errno} as told' >&2; exit 1; fi; {otherwise}",
                file.display()
            )
        };
        let socket = scratch.socket("failing");
        let mut nbdkit = tool("nbdkit");
        nbdkit.args(["-f", "-U", str(&socket), "eval", "get_size=echo 1048576"]);
        nbdkit.args(["can_write=exit 0", "can_flush=exit 0"]);
        nbdkit.arg(fails("pread", "EIO", "head -c $3 /dev/zero"));
        // The script must read the data of a write, or nbdkit itself fails.
        nbdkit.arg(
            fails("pwrite", "ENOSPC", "exit 0").replace("pwrite=", "pwrite=cat > /dev/null; "),
        );
        nbdkit.arg(fails("flush", "EIO", "exit 0"));
        let nbdkit = nbdkit.stderr(Stdio::null()).spawn().expect("it can be started");
        let failing = Self { scratch, nbdkit };
        assert!(eventually(LONG, || socket.exists()), "nbdkit listens");
        failing
    }

    fn fail(&self, operation: &str) {
        fs::write(self.scratch.path(operation), "").expect("a file");
    }

    fn mend(&self, operation: &str) {
        fs::remove_file(self.scratch.path(operation)).expect("it was there");
    }

    /// Starts a server of its disk; returns it and a subscriber.
    fn serve(&self) -> (Server, Control) {
        let control = self.scratch.socket("control");
        let uri = nbd_uri("", self.scratch.socket("failing"));
        let serve = Serve::bare(self.scratch, uri.as_ref()).option("--name", "disk");
        let export = nbd_uri("disk", self.scratch.socket("nbd"));
        let server = serve.export(&export).option("--control", &control).start();
        let mut control = Control::connect(&control);
        control.get("event.subscribe", json!({}));
        (server, control)
    }
}

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        // Both fail only if the process has ended by itself.
        let _ = self.nbdkit.kill();
        let _ = self.nbdkit.wait();
    }
}

fn open(server: &Server) -> Client {
    Greeted::new(&server.address()).go("disk", Framing::Simple)
}

/// All events up to the one of this name; all must fit the schema.
fn events_until(control: &mut Control, name: &str) -> Vec<Value> {
    let schema = control_schema();
    let mut events = Vec::new();
    loop {
        let event = control.event();
        assert_eq!(Schema::of(schema, "/event").misfit(&event), None);
        let is_last = event["event"] == name;
        events.push(event);
        if is_last {
            return events;
        }
    }
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == name).collect()
}

#[test]
fn errors_of_a_disk_are_told_once_in_a_while() {
    require!(need::tools(&["nbdkit"]));
    let scratch = Scratch::new();
    let failing = Failing::start(&scratch);
    let (server, mut control) = failing.serve();
    let mut client = open(&server);
    assert_eq!(client.read(0, 512).map(|bytes| bytes.len()), Ok(512));
    let begin = Instant::now();
    failing.fail("pread");
    for _ in 0..40 {
        assert!(client.read(0, 512).is_err());
    }
    failing.mend("pread");
    assert!(client.read(0, 512).is_ok());
    client.disconnect();
    let events = events_until(&mut control, "client.left");
    let errors = named(&events, "disk.error");
    let most = 1 + begin.elapsed().as_secs() / 10;
    assert!((1..=most).contains(&(errors.len() as u64)), "{events:?}");
    let (first, told) = (errors[0], |key: &str| errors[0][key].clone());
    assert_eq!((told("disk"), told("operation")), (json!("disk"), json!("read")), "{first}");
    assert_eq!((told("errno"), told("count")), (json!(5), json!(1)), "{first}");
    let message = first["message"].as_str().expect("a text");
    assert!(message.contains("failing") && message.contains("offset 0"), "{message}");
    server.stop();
}

#[test]
fn a_full_host_and_a_failed_flush_are_told() {
    require!(need::tools(&["nbdkit"]));
    let scratch = Scratch::new();
    let failing = Failing::start(&scratch);
    let (server, mut control) = failing.serve();
    let mut client = open(&server);
    failing.fail("pwrite");
    assert_ne!(client.write(0, &[1; 512], 0), 0);
    let full = &events_until(&mut control, "disk.no-space")[1];
    assert_eq!((&full["disk"], &full["operation"]), (&json!("disk"), &json!("write")), "{full}");
    failing.mend("pwrite");
    assert_eq!(client.write(0, &[1; 512], 0), 0);
    failing.fail("flush");
    assert_ne!(client.flush(), 0);
    let lost = events_until(&mut control, "disk.flush-failed");
    assert_eq!(lost[0]["errno"], 5, "{lost:?}");
    // All later flushes fail, and the event says so.
    failing.mend("flush");
    assert_ne!(client.flush(), 0);
    client.disconnect();
    let events = events_until(&mut control, "client.left");
    assert!(named(&events, "disk.flush-failed").is_empty(), "{events:?}");
    assert_eq!(named(&events, "disk.error")[0]["operation"], "flush", "{events:?}");
    drop(server);
}

#[test]
fn what_a_client_does_wrong_is_no_error_of_the_disk() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", MIB);
    let serve = Serve::new(&scratch, image.path());
    let (server, mut control) = serve.flag("--read-only").start_with_control(&scratch);
    control.get("event.subscribe", json!({}));
    let mut client = Client::open(&server.address());
    assert_ne!(client.write(0, &[1; 512], 0), 0);
    assert!(client.read(MIB, 512).is_err());
    client.disconnect();
    let events = events_until(&mut control, "client.left");
    assert_eq!(events.len(), 2, "{events:?}");
    server.stop();
}

#[test]
fn a_file_system_without_space_is_told() {
    let scratch = Scratch::new();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, MIB));
    let (image, socket) = (host.path("disk.qcow2"), scratch.socket("control"));
    command(&["create", str(&image), "8M"]).success();
    let server = Serve::new(&scratch, &image).option("--control", &socket).start();
    let mut control = Control::connect(&socket);
    control.get("event.subscribe", json!({ "events": ["disk.no-space"] }));
    let mut client = Client::open(&server.address());
    let mut blocks = (0..32).map(|block| client.write(block << 16, &[7; 1 << 16], 0));
    assert!(blocks.any(|errno| errno != 0), "it is not that large");
    let full = control.event();
    assert_eq!((&full["event"], &full["disk"]), (&json!("disk.no-space"), &json!("disk.qcow2")));
    let message = full["message"].as_str().expect("a text");
    assert!(message.contains("No space left on device"), "{message}");
    drop(server);
}

#[test]
fn front_ends_that_come_and_leave_are_told() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", MIB);
    let [vu, socket] = ["vu", "control"].map(|name| scratch.socket(name));
    let serve = Serve::bare(&scratch, image.path()).option("--vhost-user-blk", &vu);
    let server = serve.option("--control", &socket).start();
    let mut control = Control::connect(&socket);
    control.get("event.subscribe", json!({}));
    for round in 0..2 {
        let mut guest = Guest::connect(&vu, Options::default());
        let came = control.event();
        let peer = format!("process {}", std::process::id());
        let expected = json!({ "event": "client.came", "export": str(&vu), "peer": peer });
        assert_eq!(came, expected);
        guest.write(0, 1, round);
        drop(guest);
        let left = control.event();
        assert_eq!((&left["event"], &left["peer"]), (&json!("client.left"), &came["peer"]));
    }
    server.stop();
}
