//! `serve --on-full hold`: writes wait for space, on the device under a qcow2 image or on the host
//! of a raw one, while everything else continues. They continue when there is space, or fail after
//! a timeout or when the server ends.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockhouse_tests::control::Control;
use blockhouse_tests::guest::{Guest, IN, LONG, OUT, content};
use blockhouse_tests::image_tool::{command as command_line, qemu_img, str};
use blockhouse_tests::metrics::Metrics;
use blockhouse_tests::nbd::{Client, Request, command, errno, flag};
use blockhouse_tests::upgrade::{Servers, upgrade, upgrade_in_the_end};
use blockhouse_tests::{
    Cache, FileSystem, Image, LoopDevice, Scratch, Serve, Server, SmallHost, eventually, need,
    require,
};
use blockhouse_vhost_user::driver::Options;
use rustix::process::Signal;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 64 << 10;
/// Bytes of a new device.
const ROOM: u64 = 8 * MIB;
/// The byte that the device was filled with before.
const STALE: u8 = 0xaa;

/// A qcow2 image on a device, and a server that holds its writes.
struct Held {
    scratch: Scratch,
    file: Image,
    device: LoopDevice,
    server: Server,
    control: Control,
}

impl Held {
    fn new(options: &[(&str, &str)]) -> Result<Self, String> {
        need::tools(&["qemu-img"])?;
        let scratch = Scratch::new();
        let file = scratch.image_of("backing", &vec![STALE; ROOM as usize]);
        let device = LoopDevice::over(&file, &[])?;
        command_line(&["create", "-f", "qcow2", str(device.path()), "64G"]).success();
        let serve = Serve::new(&scratch, device.path()).option("--format", "qcow2");
        let (socket, metrics) = (scratch.socket("control"), scratch.socket("metrics"));
        let serve = serve.option("--control", &socket).option("--name", "disk");
        let serve = serve.option("--metrics", format!("unix:{}", metrics.display()));
        let serve = serve.option("--on-full", "hold");
        let serve = options.iter().fold(serve, |serve, (name, value)| serve.option(name, value));
        let server = serve.start();
        let control = Control::connect(&socket);
        Ok(Self { scratch, file, device, server, control })
    }

    /// Makes the device longer; the new part has stale bytes.
    fn lengthen(&self, bytes: u64) {
        self.device.lengthen(self.file.path(), &vec![STALE; bytes as usize]);
    }

    /// The number of held requests.
    fn held(&mut self) -> u64 {
        held(&mut self.control)
    }

    /// Writes pieces of 1 MiB, each to another offset, until a write is held, which is not answered
    /// yet. Returns its number.
    fn fill(&mut self, client: &mut Client, flags: u16) -> u64 {
        for number in 0.. {
            assert!(number <= ROOM / MIB, "more was taken than there is room for");
            let before = completed(&mut self.control);
            send(client, command::WRITE, flags, number * MIB, &piece(number));
            if is_held(&mut self.control, before) {
                return number;
            }
            assert_eq!(client.receive().expect("an answer").1.error, 0);
        }
        unreachable!("there is an end")
    }

    /// Ends the server, and checks the image.
    fn stop(self) {
        self.server.stop();
        qemu_img(&["check", "-f", "qcow2", str(self.device.path())]).success();
    }
}

fn piece(number: u64) -> Vec<u8> {
    vec![number as u8 + 1; MIB as usize]
}

fn disk(control: &mut Control) -> Value {
    control.get("disk.list", json!({}))[0].take()
}

fn held(control: &mut Control) -> u64 {
    disk(control)["held"].as_u64().unwrap_or(0)
}

/// The number of requests that have completed.
fn completed(control: &mut Control) -> u64 {
    let stats = control.get("disk.stats", json!({}))[0].take();
    let count = |key: &str| stats[key].as_u64().expect("a count");
    count("writes") + count("reads") - count("in-flight")
}

/// Waits until a request is held, or until more than `before` requests are completed; returns
/// whether one is held.
#[track_caller]
fn is_held(control: &mut Control, before: u64) -> bool {
    let mut is_held = false;
    let has_come = eventually(LONG, || {
        is_held = held(control) > 0;
        is_held || completed(control) > before
    });
    assert!(has_come, "neither answered nor held");
    is_held
}

fn send(client: &mut Client, command: u16, flags: u16, offset: u64, bytes: &[u8]) {
    let length = bytes.len() as u64;
    client.send_with(Request { command, flags, offset, length }, bytes).expect("it is taken");
}

/// The next event about held requests: its name and, when the hold ends, how many requests failed.
fn next_crossing(events: &mut Control) -> (String, Option<u64>) {
    let event = events.event();
    let name = event["event"].as_str().expect("a name").to_owned();
    assert!(name != "disk.released" || event["held-ms"].is_u64(), "{event}");
    assert!(name != "disk.held" || event["message"].is_string(), "{event}");
    (name, event["failed"].as_u64())
}

fn subscribed(socket: &Path) -> Control {
    let mut events = Control::connect(socket);
    events.get("event.subscribe", json!({ "events": ["disk.held", "disk.released"] }));
    events
}

#[test]
fn writes_wait_for_a_device_that_becomes_longer_and_nothing_else_does() {
    let mut held = require!(Held::new(&[]));
    let socket = held.scratch.socket("control");
    let mut events = subscribed(&socket);
    let mut client = Client::open(&held.server.address());
    let number = held.fill(&mut client, 0);
    assert!(number >= 4, "{number}");
    assert_eq!(next_crossing(&mut events), ("disk.held".into(), None));
    // The same client can continue with other requests.
    send(&mut client, command::WRITE, flag::FUA, 0, &piece(99));
    assert_eq!(client.receive().expect("an answer").1.error, 0, "it has its place");
    let mut other = Client::open(&held.server.address());
    assert_eq!(other.read(0, MIB), Ok(piece(99)));
    assert_eq!(other.read(40 << 30, 512), Ok(vec![0; 512]));
    assert_eq!(other.flush(), 0);
    send(&mut other, command::WRITE, flag::FUA, 40 << 30, &[7; 512]);
    assert!(eventually(LONG, || held.held() == 2), "{}", held.held());
    let metrics = Metrics::read(&held.scratch.socket("metrics"));
    assert_eq!(metrics.sum("blockhouse_held_requests", &[("disk", "disk")]), 2);
    let ctl = ["ctl", str(&socket), "disks"];
    let listed = command_line(&ctl).success().stdout;
    assert!(listed.contains("disk: 2 requests wait for room"), "{listed}");

    // The writes continue by themselves, within little more than a second.
    held.lengthen(16 * MIB);
    assert_eq!(client.receive().expect("an answer").1.error, 0);
    assert_eq!(other.receive().expect("an answer").1.error, 0);
    assert_eq!(next_crossing(&mut events), ("disk.released".into(), Some(0)));
    assert_eq!(other.read(number * MIB, MIB), Ok(piece(number)));
    // The device had stale bytes in these clusters.
    let cluster = other.read(40 << 30, CLUSTER).expect("it can be read");
    assert!(cluster[..512] == [7; 512] && cluster[512..].iter().all(|&byte| byte == 0));
    for at in 0..32 {
        let offset = (20 << 30) + at * CLUSTER;
        assert_eq!(other.write(offset + 1000, &[5; 24], 0), 0);
        let bytes = other.read(offset, CLUSTER).expect("it can be read");
        let stale = bytes.iter().position(|&byte| byte == STALE);
        assert_eq!(stale, None, "cluster {at}");
    }
    other.disconnect();
    client.disconnect();
    held.stop();
}

#[test]
fn a_device_that_is_made_longer_again_and_again_shows_no_error() {
    let mut held = require!(Held::new(&[]));
    let socket = held.scratch.socket("control");
    let mut events = subscribed(&socket);
    let (address, written, stop) =
        (held.server.address(), AtomicU64::new(0), AtomicBool::new(false));
    let (written, stop) = (&written, &stop);
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..2)
            .map(|client| {
                let mut random = fastrand::Rng::with_seed(client);
                let mut own = Client::open(&address);
                scope.spawn(move || {
                    let mut places = std::collections::BTreeMap::new();
                    for number in 1_u8..=120 {
                        let place = (random.u64(..1 << 16) * 2 + client) * CLUSTER;
                        let bytes = vec![number; 48 << 10];
                        let flags = [0, flag::FUA][random.usize(..2)];
                        assert_eq!(own.write(place + 512, &bytes, flags), 0, "write {number}");
                        places.insert(place, number);
                        written.fetch_add(1, Ordering::SeqCst);
                    }
                    for (&place, &number) in &places {
                        let bytes = own.read(place, CLUSTER).expect("it can be read");
                        let is_right = |(at, byte): (usize, &u8)| {
                            *byte == if (512..49_664).contains(&at) { number } else { 0 }
                        };
                        assert!(bytes.iter().enumerate().all(is_right), "cluster at {place}");
                    }
                    own.disconnect();
                    places.len() as u64
                })
            })
            .collect();
        let growing = scope.spawn(|| {
            let mut crossings = 0;
            while !stop.load(Ordering::SeqCst) {
                if held.held() > 0 {
                    crossings += 1;
                    held.lengthen(MIB);
                    let params = json!({ "disk": "disk" });
                    held.control.get("disk.refresh", params);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            crossings
        });
        let counts = clients.into_iter().map(|client| client.join().expect("no error")).collect();
        stop.store(true, Ordering::SeqCst);
        assert!(growing.join().expect("no error") > 3, "it was never full");
        counts
    });
    assert!(counts.iter().all(|&count| count > 100) && written.load(Ordering::SeqCst) == 240);
    // Each hold has its end, and no request has failed.
    for _ in 0..2 {
        assert_eq!(next_crossing(&mut events).0, "disk.held");
        assert_eq!(next_crossing(&mut events), ("disk.released".into(), Some(0)));
    }
    held.stop();
}

#[test]
fn at_its_limit_a_held_write_fails() {
    let mut held = require!(Held::new(&[("--hold-seconds", "10")]));
    let mut events = subscribed(&held.scratch.socket("control"));
    let mut client = Client::open(&held.server.address());
    held.fill(&mut client, flag::FUA);
    let start = Instant::now();
    assert_eq!(client.receive().expect("an answer").1.error, errno::ENOSPC);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(next_crossing(&mut events), ("disk.held".into(), None));
    assert_eq!(next_crossing(&mut events), ("disk.released".into(), Some(1)));
    let start = Instant::now();
    assert_eq!(client.write(30 << 30, &piece(0), 0), errno::ENOSPC);
    assert!(start.elapsed() >= Duration::from_secs(10), "{:?}", start.elapsed());
    // The failed write lost nothing else.
    assert_eq!(client.flush(), 0);
    held.lengthen(4 * MIB);
    assert_eq!(client.write(30 << 30, &piece(3), flag::FUA), 0);
    client.disconnect();
    held.stop();
}

#[test]
fn a_server_ends_beside_a_held_write() {
    let mut held = require!(Held::new(&[]));
    let mut client = Client::open(&held.server.address());
    held.fill(&mut client, 0);
    held.server.signal(Signal::TERM);
    assert_eq!(client.receive().expect("an answer").1.error, errno::ENOSPC);
    // The server, which is ending, does not wait for the client's NBD_CMD_DISC.
    drop(client);
    let status = held.server.wait(Duration::from_secs(20));
    assert_eq!(status.code(), Some(0), "{}", held.server.log());
    qemu_img(&["check", "-f", "qcow2", str(held.device.path())]).success();
}

#[test]
fn a_disk_is_closed_beside_a_held_write_and_others_go_on() {
    let mut held = require!(Held::new(&[]));
    let mut client = Client::open(&held.server.address());
    held.fill(&mut client, 0);
    held.control.get("disk.close", json!({ "disk": "disk", "force": true }));
    assert_eq!(client.receive().expect("an answer").1.error, errno::ENOSPC);
    held.stop();
}

#[test]
fn a_signal_and_a_request_have_held_writes_tried_again() {
    let mut held = require!(Held::new(&[]));
    let socket = held.scratch.socket("control");
    let mut client = Client::open(&held.server.address());
    held.fill(&mut client, 0);
    let words = ["ctl", str(&socket), "refresh", "disk"];
    let refreshed = command_line(&words).success().stdout;
    assert_eq!(refreshed.trim(), "64 GiB, 1 held requests");
    assert_eq!(held.held(), 1, "there is no more room than before");
    held.lengthen(4 * MIB);
    held.server.signal(Signal::HUP);
    assert_eq!(client.receive().expect("an answer").1.error, 0);
    assert_eq!(held.held(), 0);
    let refreshed = held.control.get("disk.refresh", json!({ "disk": "disk" }));
    assert_eq!(refreshed, json!({ "size": 64_u64 << 30, "held": 0 }));
    client.disconnect();
    held.stop();
}

#[test]
fn a_guest_of_vhost_user_waits_for_room() {
    let scratch = Scratch::new();
    let file = scratch.image_of("backing", &vec![STALE; MIB as usize]);
    let device = require!(LoopDevice::over(&file, &[]));
    command_line(&["create", "-f", "qcow2", str(device.path()), "1G"]).success();
    let (socket, vu) = (scratch.socket("control"), scratch.socket("vu"));
    let serve = Serve::bare(&scratch, device.path()).option("--format", "qcow2");
    let serve = serve.option("--vhost-user-blk", &vu).option("--control", &socket);
    let server = serve.option("--on-full", "hold").start();
    let (mut control, mut guest) =
        (Control::connect(&socket), Guest::connect(&vu, Options::default()));
    let block = fill(&mut guest, &mut control);
    guest.post(0, 1, IN, 0);
    assert_eq!(guest.finish(0, LONG), Some(1), "a read goes on");
    device.lengthen(file.path(), &vec![STALE; MIB as usize]);
    assert_eq!(guest.finish(0, LONG), Some(0), "and so does the write");
    assert_eq!(guest.read(0, block), content(block + 1));
    drop(guest);
    server.stop();
}

/// Writes blocks, each in its own cluster, until a write is held. Returns the block of that write;
/// its content is the block number plus 1.
fn fill(guest: &mut Guest, control: &mut Control) -> u64 {
    let mut block = 0;
    loop {
        let before = completed(control);
        guest.fill(0, 0, block + 1);
        guest.post(0, 0, OUT, block);
        if is_held(control, before) {
            return block;
        }
        assert_eq!(guest.finish(0, LONG), Some(0));
        block += CLUSTER / 4096;
    }
}

/// A guest on a device that is full, with a held write.
struct HeldGuest {
    scratch: Scratch,
    file: Image,
    device: LoopDevice,
    server: Server,
    guest: Guest,
    /// The block of the held write; its content is this number plus 1.
    block: u64,
}

impl HeldGuest {
    fn serve(scratch: &Scratch, device: &LoopDevice) -> Server {
        let serve = Serve::bare(scratch, device.path()).option("--format", "qcow2");
        let serve = serve.option("--vhost-user-blk", scratch.socket("vu"));
        let serve = serve.option("--control", scratch.socket("control"));
        serve.option("--name", "disk").option("--on-full", "hold").start()
    }

    fn new() -> Result<Self, String> {
        let scratch = Scratch::new();
        let file = scratch.image_of("backing", &vec![STALE; MIB as usize]);
        let device = LoopDevice::over(&file, &[])?;
        command_line(&["create", "-f", "qcow2", str(device.path()), "1G"]).success();
        let server = Self::serve(&scratch, &device);
        let mut guest = Guest::connect(&scratch.socket("vu"), Options::default());
        guest.driver.track().expect("requests in flight are tracked");
        let mut control = Control::connect(&scratch.socket("control"));
        let block = fill(&mut guest, &mut control);
        Ok(Self { scratch, file, device, server, guest, block })
    }
}

#[test]
fn a_guest_that_is_stopped_waits_for_no_room() {
    let mut held = require!(HeldGuest::new());
    let start = Instant::now();
    held.guest.driver.stop_queue(0).expect("it stops");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // The held write was answered, and later writes are held again.
    held.guest.driver.start_queue(0).expect("it starts");
    assert_eq!(held.guest.outcome(0, LONG), Some((0, 1)), "the write that was held has failed");
    let mut control = Control::connect(&held.scratch.socket("control"));
    assert_eq!(self::held(&mut control), 0);
    let before = completed(&mut control);
    held.guest.post(0, 0, OUT, held.block);
    assert!(is_held(&mut control, before));
    held.device.lengthen(held.file.path(), &vec![STALE; MIB as usize]);
    assert_eq!(held.guest.finish(0, LONG), Some(0));
    assert_eq!(held.guest.read(0, held.block), content(held.block + 1));
    drop(held.guest);
    held.server.stop();
}

#[test]
fn a_held_write_of_a_guest_outlives_its_server() {
    let mut held = require!(HeldGuest::new());
    held.server.signal(Signal::KILL);
    held.server.wait(LONG);
    let mut server = HeldGuest::serve(&held.scratch, &held.device);
    held.guest.driver.reconnect(&held.scratch.socket("vu")).expect("the server is there again");
    let mut control = Control::connect(&held.scratch.socket("control"));
    assert!(eventually(LONG, || self::held(&mut control) == 1), "it is carried out again");
    held.device.lengthen(held.file.path(), &vec![STALE; MIB as usize]);
    assert_eq!(held.guest.finish(0, LONG), Some(0));
    for block in (0..=held.block).step_by(CLUSTER as usize / 4096) {
        assert_eq!(held.guest.read(0, block), content(block + 1), "{block}");
    }
    drop(held.guest);
    server.signal(Signal::TERM);
    server.wait(LONG);
    qemu_img(&["check", "-f", "qcow2", str(held.device.path())]).success();
}

#[test]
fn a_guest_that_is_gone_leaves_no_write_that_waits() {
    let held = require!(HeldGuest::new());
    drop(held.guest);
    let mut control = Control::connect(&held.scratch.socket("control"));
    assert!(eventually(Duration::from_secs(10), || self::held(&mut control) == 0));
    let mut guest = Guest::connect(&held.scratch.socket("vu"), Options::default());
    assert_eq!(guest.read(0, 0), content(1));
    drop(guest);
    held.server.stop();
}

#[test]
fn a_kill_beside_a_held_write_loses_nothing_that_was_answered() {
    let mut held = require!(Held::new(&[]));
    let mut client = Client::open(&held.server.address());
    let number = held.fill(&mut client, 0);
    held.server.signal(Signal::KILL);
    held.server.wait(LONG);
    held.lengthen(8 * MIB);
    let serve = Serve::new(&held.scratch, held.device.path()).option("--format", "qcow2");
    held.server = serve.start();
    let mut client = Client::open(&held.server.address());
    for written in 0..number {
        assert_eq!(client.read(written * MIB, MIB), Ok(piece(written)), "{written}");
    }
    // A write without an answer may be on the disk completely, in part, or not at all.
    let bytes = client.read(number * MIB, MIB).expect("it can be read");
    let is_either = |byte: &u8| *byte == 0 || *byte == number as u8 + 1;
    assert!(bytes.iter().all(is_either));
    client.disconnect();
    held.stop();
}

#[test]
fn an_upgrade_beside_a_held_write_is_refused_and_disturbs_nothing() {
    let mut held = require!(Held::new(&[]));
    let socket = held.scratch.socket("control");
    let mut client = Client::open(&held.server.address());
    let number = held.fill(&mut client, 0);
    let refused = upgrade(&socket, &[]).failure("wait for room");
    assert!(refused.stderr.contains("make room"), "{}", refused.stderr);
    assert_eq!(held.held(), 1);
    held.lengthen(8 * MIB);
    assert_eq!(client.receive().expect("an answer").1.error, 0);
    upgrade_in_the_end(&socket, &[]);
    assert_eq!(client.read(number * MIB, MIB), Ok(piece(number)));
    client.disconnect();
    Servers(&held.scratch).stop();
    qemu_img(&["check", "-f", "qcow2", str(held.device.path())]).success();
}

#[test]
fn a_raw_file_waits_for_room_on_its_file_system() {
    require!(need::tools(&["nsenter"]));
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, 4 * MIB));
    let socket = scratch.socket("control");
    let serve = Serve::new(&scratch, &host.path("disk.img")).cache(Cache::Writeback);
    let serve = serve.option("--create", "64M").option("--control", &socket);
    let server = serve.option("--on-full", "hold").start();
    let (mut control, mut client) = (Control::connect(&socket), Client::open(&server.address()));
    assert_eq!(client.write(0, &piece(0), 0), 0);
    send(&mut client, command::WRITE, 0, 8 * MIB, &piece(8).repeat(4));
    assert!(eventually(LONG, || held(&mut control) == 1));
    let zeroes = Request {
        command: command::WRITE_ZEROES,
        flags: flag::NO_HOLE,
        offset: 20 * MIB,
        length: 2 * MIB,
    };
    client.send(zeroes).expect("it is taken");
    assert!(eventually(LONG, || held(&mut control) == 2));
    assert_eq!(Client::open(&server.address()).read(0, MIB), Ok(piece(0)));
    host.resize(16 * MIB);
    for _ in 0..2 {
        assert_eq!(client.receive().expect("an answer").1.error, 0);
    }
    assert_eq!(client.read(8 * MIB, 4 * MIB), Ok(piece(8).repeat(4)));
    assert_eq!(client.flush(), 0);
    client.disconnect();
    server.stop();
}

#[test]
fn what_makes_no_sense_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", MIB);
    let refused = |options: &[(&str, &str)], words: &[&str]| {
        let serve = Serve::new(&scratch, image.path());
        let serve = options.iter().fold(serve, |serve, (name, value)| serve.option(name, value));
        serve.refused().wrong_usage(words);
    };
    refused(&[("--on-full", "hold"), ("--hold-seconds", "0")], &["holds nothing"]);
    refused(&[("--hold-seconds", "5")], &["needs on-full hold"]);
    refused(&[("--on-full", "stop")], &["report", "hold"]);
}
