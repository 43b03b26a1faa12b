//! Overlays over a base on another server, which are filled while they are used: each block is
//! fetched once, an outage only delays requests, and in the end the base is not needed.

use std::fs;
use std::path::{Path, PathBuf};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::{Scratch, Serve, Server, eventually, nbd, need, require, seeded};
use serde_json::json;

use crate::jobs::{BLOCK, Foreign, LONG, SIZE, Writer, bytes_of, content, ctl, wait_for};

/// A base exported by nbdkit, and an overlay over it.
struct Remote {
    scratch: Scratch,
    base: Option<Foreign>,
    blocks: Vec<u64>,
}

impl Remote {
    fn new() -> Self {
        Self::with_patience(60)
    }

    /// A base whose outage is waited for this long.
    fn with_patience(seconds: u32) -> Self {
        let scratch = Scratch::new();
        let blocks: Vec<u64> = (0..SIZE / BLOCK).map(|block| block % 3 * (block + 1)).collect();
        let bytes = bytes_of(&blocks);
        fs::write(scratch.path("base.img"), bytes).expect("a base");
        let mut remote = Self { scratch, base: None, blocks };
        remote.start_base();
        let socket = remote.socket();
        let backing = format!("nbd+unix:///?socket={}&reconnect={seconds}", str(&socket));
        let words = ["create", "-b", &backing, "-F", "raw", "--allow-remote"];
        command(&[&words[..], &[str(&remote.overlay()), &SIZE.to_string()]].concat()).success();
        remote
    }

    fn socket(&self) -> PathBuf {
        self.scratch.socket("base")
    }

    fn overlay(&self) -> PathBuf {
        self.scratch.path("over.qcow2")
    }

    fn log(&self) -> PathBuf {
        self.scratch.path("log")
    }

    fn start_base(&mut self) {
        let (socket, file) = (self.socket(), self.scratch.path("base.img"));
        let log = format!("logfile={}", str(&self.log()));
        let words = ["-f", "-r", "-U", str(&socket), "--filter=log", "file", str(&file), &log];
        self.base = Some(Foreign::start("nbdkit", &words, &socket));
    }

    fn stop_base(&mut self) {
        self.base = None;
        // A server that was killed leaves its socket.
        let _ = fs::remove_file(self.socket());
    }

    fn serve(&self, options: &[(&str, &str)]) -> (Server, Control) {
        let control = self.scratch.socket("control");
        let serve = Serve::new(&self.scratch, &self.overlay()).option("--control", &control);
        let serve = serve.flag("--allow-remote").flag("--copy-on-read");
        let serve = options.iter().fold(serve, |serve, (name, value)| serve.option(name, value));
        (serve.start(), Control::connect(&control))
    }

    fn writer(&self, server: &Server) -> Writer {
        Writer::on(&server.address(), self.blocks.clone(), seeded())
    }

    /// The reads of the base: offsets and lengths, in order.
    fn fetched(&self) -> Vec<(u64, u64)> {
        let log = fs::read_to_string(self.log()).expect("nbdkit's log");
        let number = |line: &str, name: &str| {
            let rest = line.split(name).nth(1)?.strip_prefix("0x")?;
            let digits = rest.split(|c: char| !c.is_ascii_hexdigit()).next()?;
            u64::from_str_radix(digits, 16).ok()
        };
        let reads = log.lines().filter(|line| line.contains(" Read "));
        let mut all: Vec<_> = reads
            .filter_map(|line| Some((number(line, "offset=")?, number(line, "count=")?)))
            .collect();
        // Opening an image reads its first sector.
        all.retain(|(_, length)| *length > 512);
        all.sort_unstable();
        all
    }

    /// Asserts that no byte was fetched twice. With `all`, all bytes were fetched, except for some
    /// that were written before.
    #[track_caller]
    fn assert_fetched_once(&self, all: bool) {
        let fetched = self.fetched();
        for pair in fetched.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?} were fetched twice");
        }
        let bytes: u64 = fetched.iter().map(|(_, length)| length).sum();
        assert!(bytes > 0 && (!all || bytes > SIZE - 64 * BLOCK), "{bytes} bytes were fetched");
    }
}

#[track_caller]
fn assert_stands_alone(overlay: &Path) {
    let info = qemu_img(&["info", "--output=json", "-f", "qcow2", str(overlay)]);
    assert!(json(&info.success())["backing-filename"].is_null());
    qemu_img(&["check", "-f", "qcow2", str(overlay)]).success();
}

#[test]
fn each_block_is_fetched_once() {
    let remote = Remote::new();
    let (server, control) = remote.serve(&[]);
    let mut writer = remote.writer(&server);
    // A partial write of a cluster fetches the cluster.
    (0..remote.blocks.len()).step_by(300).for_each(|index| writer.write(index));
    let others: Vec<_> = (0..2).map(|_| writer.blocks()).collect();
    let address = &server.address();
    std::thread::scope(|scope| {
        for blocks in others {
            scope.spawn(move || Writer::on(address, blocks, fastrand::Rng::new()).check());
        }
        writer.check();
    });
    remote.assert_fetched_once(true);
    writer.check();
    remote.assert_fetched_once(true);
    drop((writer, control));
    server.stop();
    // Fetched clusters are there after a restart.
    let (server, _control) = remote.serve(&[]);
    let mut client = blockhouse_tests::nbd::Client::open(&server.address());
    assert_eq!(client.read(BLOCK, BLOCK), Ok(content(remote.blocks[1])));
    remote.assert_fetched_once(true);
    drop(client);
    server.stop();
}

#[test]
fn a_prefetched_disk_goes_on_without_its_base_and_starts_again() {
    let mut remote = Remote::new();
    let (server, mut control) = remote.serve(&[("--prefetch", "0")]);
    let mut writer = remote.writer(&server);
    writer.check();
    (0..remote.blocks.len()).step_by(200).for_each(|index| writer.write(index));
    wait_for(&mut control, "stream1", "completed");
    remote.assert_fetched_once(false);
    remote.stop_base();
    writer.check();
    let bytes = writer.bytes();
    drop((writer, control));
    server.stop();
    let expected = remote.scratch.image_of("expected", &bytes);
    assert_stands_alone(&remote.overlay());
    let overlay = remote.overlay();
    let words = ["compare", "-f", "qcow2", "-F", "raw", str(&overlay), expected.str()];
    qemu_img(&words).success();
    // The same command line still works.
    let (server, mut control) = remote.serve(&[("--prefetch", "0")]);
    assert_eq!(control.get("job.list", json!({})), json!([]));
    drop(control);
    server.stop();
}

#[test]
fn an_outage_of_the_base_is_waited_for() {
    let mut remote = Remote::new();
    let (server, mut control) = remote.serve(&[("--prefetch", "64K")]);
    let mut writer = remote.writer(&server);
    let read = |writer: &mut Writer, index: usize| {
        let expected = content(writer.blocks()[index]);
        assert_eq!(writer.client.read(index as u64 * BLOCK, BLOCK), Ok(expected));
    };
    read(&mut writer, 5000);
    remote.stop_base();
    // A read of clusters that were fetched needs no base.
    read(&mut writer, 5000);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&mut writer, 7000));
        remote.start_base();
        reading.join().expect("it goes on");
    });
    ctl(&remote.scratch, &["job", "stream1", "speed", "0"]).success();
    wait_for(&mut control, "stream1", "completed");
    remote.stop_base();
    writer.check();
    drop((writer, control));
    server.stop();
    assert_stands_alone(&remote.overlay());
}

#[test]
fn a_base_that_is_gone_for_long_is_tried_again() {
    let mut remote = Remote::with_patience(1);
    // Parts are paced if they were looked up before the base stopped: two of them begin a second.
    let (server, mut control) = remote.serve(&[("--prefetch", "2M")]);
    remote.stop_base();
    // The job pauses after thirty-two failures in a row, or at the end of the disk.
    let words = ["cannot be filled from its backing file", " again in "];
    let is_told = || words.iter().all(|words| server.log().contains(words));
    assert!(eventually(4 * LONG, is_told), "{}", server.log());
    ctl(&remote.scratch, &["job", "stream1", "speed", "0"]).success();
    remote.start_base();
    wait_for(&mut control, "stream1", "completed");
    remote.stop_base();
    let mut writer = remote.writer(&server);
    writer.check();
    drop((writer, control));
    server.stop();
    assert_stands_alone(&remote.overlay());
}

#[test]
fn what_a_client_announces_is_fetched() {
    let mut remote = Remote::new();
    let (server, _control) = remote.serve(&[]);
    let (mut writer, blocks) = (remote.writer(&server), remote.blocks.clone());
    // More than one part of a fetch, from the middle of a cluster to the middle of another.
    let (first, count) = (17, 1000);
    let (from, length) = (first as u64 * BLOCK, count as u64 * BLOCK);
    assert_eq!(writer.client.simple(nbd::command::CACHE, from, length, 0), 0);
    remote.assert_fetched_once(false);
    remote.stop_base();
    for (index, number) in blocks.iter().enumerate().skip(first).take(count) {
        let read = writer.client.read(index as u64 * BLOCK, BLOCK);
        assert_eq!(read, Ok(content(*number)));
    }
    drop(writer);
    server.stop();
}

#[test]
fn without_space_reads_go_on() {
    const ROOM: u64 = SIZE / 4;
    let scratch = Scratch::in_memory();
    let folder = scratch.path("small");
    fs::create_dir(&folder).expect("a folder");
    let wrapper = require!(need::private_tmpfs(&folder, ROOM));
    let (base, template) = (scratch.path("base.img"), scratch.path("over.qcow2"));
    let blocks: Vec<u64> = (1..=SIZE / BLOCK).collect();
    let bytes = bytes_of(&blocks);
    fs::write(&base, bytes).expect("a base");
    let options = format!("backing_file={},backing_fmt=raw", base.display());
    let size = SIZE.to_string();
    qemu_img(&["create", "-f", "qcow2", "-o", &options, str(&template), &size]).success();
    let overlay = folder.join("over.qcow2");
    // The overlay is copied to the server's own file system, which is mounted over the empty
    // folder.
    let copied = format!("&& cp '{}' '{}' && exec", template.display(), overlay.display());
    let wrapper: Vec<String> =
        wrapper.iter().map(|word| word.replace("&& exec", &copied)).collect();
    let serve = Serve::new(&scratch, &overlay).flag("--copy-on-read");
    let server = serve.option("--allow-path", scratch.path("")).under(&wrapper).start();
    let mut writer = Writer::on(&server.address(), blocks, seeded());
    (0..16).for_each(|index| writer.write(index));
    writer.check();
    writer.check();
    let words = ["cannot be kept", "No space left"];
    let is_told = || words.iter().all(|word| server.log().contains(word));
    assert!(eventually(std::time::Duration::from_secs(20), is_told), "{}", server.log());
    drop(writer);
    server.stop();
}

#[test]
fn a_disk_that_is_only_read_is_not_filled() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    for words in [["--copy-on-read", "--read-only"], ["--prefetch=1M", "--read-only"]] {
        let refused = command(&[&["serve", image.str()], &words[..]].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
        refused.failure("write to the image");
    }
}
