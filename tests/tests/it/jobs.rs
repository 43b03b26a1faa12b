//! Mirrors of disks that clients write to: the clients notice nothing, the target equals the disk
//! byte for byte when the mirror completes, and after any kill or failure only an image with the
//! disk's content can be opened.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, new_image, qemu_img, str};
use blockhouse_tests::nbd::{Address, Client, Framing, Greeted};
use blockhouse_tests::{Outcome, Scratch, Serve, Server, eventually, nbd_uri, seeded, tool};
use fastrand::Rng;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
pub(crate) const SIZE: u64 = 32 * MIB;
pub(crate) const BLOCK: u64 = 4096;
/// The number of blocks that one request writes to a new disk.
const AT_ONCE: usize = 256;
pub(crate) const FAILED: i64 = -32000;
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A server with one disk at the socket `nbd`, and its control socket.
pub(crate) fn serve(scratch: &Scratch, image: &Path) -> (Server, Control) {
    Serve::new(scratch, image).start_with_control(scratch)
}

pub(crate) fn ctl(scratch: &Scratch, words: &[&str]) -> Outcome {
    command(&[&["ctl", str(&scratch.socket("control"))], words].concat())
}

/// A client that writes blocks all the time, and knows the disk's content.
pub(crate) struct Writer {
    pub(crate) client: Client,
    random: Rng,
    /// The number in each block; 0 for zeros.
    blocks: Vec<u64>,
    next: u64,
    history: Vec<(usize, u64)>,
}

pub(crate) fn content(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(BLOCK as usize / 8)
}

/// The bytes of blocks with these numbers.
pub(crate) fn bytes_of(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().map(|number| content(*number)).collect::<Vec<_>>().concat()
}

impl Writer {
    /// A writer on a disk of zeros, of which it first writes half.
    pub(crate) fn new(address: &Address, random: Rng) -> Self {
        let mut writer = Self::on(address, vec![0; (SIZE / BLOCK) as usize], random);
        for first in (0..writer.blocks.len() / 2).step_by(AT_ONCE) {
            writer.write_several(first, AT_ONCE);
        }
        writer
    }

    /// A writer on a disk that has these numbers in its blocks.
    pub(crate) fn on(address: &Address, blocks: Vec<u64>, random: Rng) -> Self {
        Self::on_export(address, "", blocks, random)
    }

    /// The same, on the export of this name.
    pub(crate) fn on_export(
        address: &Address,
        export: &str,
        blocks: Vec<u64>,
        random: Rng,
    ) -> Self {
        let next = blocks.iter().max().map_or(1, |last| last + 1);
        let client = Greeted::new(address).go(export, Framing::Simple);
        Self { client, random, blocks, next, history: Vec::new() }
    }

    pub(crate) fn write(&mut self, index: usize) {
        self.write_several(index, 1);
    }

    /// Writes `count` blocks from `first` on with one request.
    fn write_several(&mut self, first: usize, count: usize) {
        let numbers: Vec<u64> = (self.next..).take(count).collect();
        let error = self.client.write(first as u64 * BLOCK, &bytes_of(&numbers), 0);
        assert_eq!(error, 0, "a write must not fail");
        for (index, number) in (first..).zip(numbers) {
            self.blocks[index] = number;
            self.history.push((index, number));
        }
        self.next += count as u64;
    }

    /// Writes and reads until `stop` is set; `count` is the number of rounds.
    fn go_on(&mut self, stop: &AtomicBool, count: &AtomicU64) {
        while !stop.load(Ordering::SeqCst) {
            let index = self.random.usize(..self.blocks.len());
            self.write(index);
            let other = self.random.usize(..self.blocks.len());
            let read = self.client.read(other as u64 * BLOCK, BLOCK);
            assert!(read == Ok(content(self.blocks[other])), "block {other} has other bytes");
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        bytes_of(&self.blocks)
    }

    /// All writes so far, in order: the block and the number.
    pub(crate) fn history(&self) -> Vec<(usize, u64)> {
        self.history.clone()
    }

    /// The numbers in the disk's blocks.
    pub(crate) fn blocks(&self) -> Vec<u64> {
        self.blocks.clone()
    }

    /// Checks that the disk holds what was written.
    pub(crate) fn check(&mut self) {
        let expected = self.bytes();
        for (at, expected) in expected.chunks(MIB as usize).enumerate() {
            let read = self.client.read(at as u64 * MIB, MIB).expect("a read");
            assert!(read == expected, "MiB {at} has other bytes");
        }
    }
}

/// Runs `act` while a client writes; the client continues for a while afterwards.
pub(crate) fn beside<T>(writer: &mut Writer, act: impl FnOnce() -> T) -> T {
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| writer.go_on(&stop, &count));
        // If `act` panics, the client must still end, because the scope waits for it.
        let outcome = catch_unwind(AssertUnwindSafe(act));
        let before = count.load(Ordering::SeqCst);
        let goes_on = || count.load(Ordering::SeqCst) > before + 20 || writing.is_finished();
        let does_go_on = outcome.is_err() || eventually(LONG, goes_on);
        stop.store(true, Ordering::SeqCst);
        let outcome = outcome.and_then(|outcome| writing.join().map(|()| outcome));
        assert!(does_go_on, "the client waits");
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

pub(crate) fn job(control: &mut Control, name: &str) -> Value {
    let jobs = control.get("job.list", json!({}));
    let found = jobs.as_array().into_iter().flatten().find(|job| job["job"] == name).cloned();
    found.unwrap_or_else(|| panic!("no job {name}: {jobs}"))
}

pub(crate) fn wait_for(control: &mut Control, name: &str, status: &str) -> Value {
    let is_there = || job(control, name)["status"] == status;
    assert!(eventually(LONG, is_there), "{status} is expected");
    job(control, name)
}

/// A server of another project.
pub(crate) struct Foreign(Child);

impl Foreign {
    pub(crate) fn start(program: &str, words: &[&str], socket: &Path) -> Self {
        let mut command = tool(program);
        let child = command.args(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let server = Self(child.expect("it is installed"));
        assert!(eventually(LONG, || listens(socket)), "{program} does not listen");
        server
    }

    /// Sends it a signal: SIGSTOP pauses it, SIGCONT lets it continue.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it runs");
    }

    /// Sends SIGSTOP, and returns when all its threads have stopped, because signals are
    /// asynchronous.
    #[track_caller]
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let status = waitpid(Some(Pid::from_child(&self.0)), WaitOptions::UNTRACED);
        let (_, status) = status.expect("it runs").expect("it is waited for");
        assert!(status.stopped(), "{status:?}");
    }
}

/// Whether a server listens at this socket, without connecting to it. The socket's file exists a
/// little earlier.
pub(crate) fn listens(socket: &Path) -> bool {
    /// `__SO_ACCEPTCON` in `<linux/net.h>`, as proc_net(5) has it.
    const LISTENS: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("Unix sockets");
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(3);
        fields.next() == Some(LISTENS) && fields.last() == socket.to_str()
    })
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn image(scratch: &Scratch, name: &str) -> PathBuf {
    new_image(scratch, name, &SIZE.to_string())
}

#[test]
fn a_client_goes_on_with_a_mirror_that_is_equal_to_the_byte() {
    let mut random = seeded();
    for (from, to, mode) in [
        ("a.img", "b.qcow2", "auto"),
        ("a.qcow2", "b.img", "background"),
        ("a.qcow2", "b.qcow2", "write-blocking"),
    ] {
        let scratch = Scratch::new();
        let (source, target) = (image(&scratch, from), scratch.path(to));
        let (server, mut control) = serve(&scratch, &source);
        let mut writer = Writer::new(&server.address(), random.fork());
        beside(&mut writer, || {
            ctl(&scratch, &["mirror", from, str(&target), "--mode", mode, "--job", "m"]).success();
            let close = json!({ "disk": from, "force": true });
            control.refused("disk.close", close, FAILED, &["the job \"m\""]);
            // Other programs cannot open the target before the mirror is complete.
            command(&["convert", str(&target), str(&scratch.path("c.img"))]).failure("locked");
            wait_for(&mut control, "m", "ready");
            let done = ctl(&scratch, &["job", "m", "complete"]).success();
            assert!(done.stdout.contains("writes were held off for"), "{}", done.stdout);
        });
        let ended = job(&mut control, "m");
        assert_eq!(ended["status"], "completed", "{ended}");
        let disk = control.get("disk.list", json!({}))[0].clone();
        assert_eq!(disk["path"], str(&target), "the disk is at its new place");
        control.get("job.dismiss", json!({ "job": "m" }));
        writer.check();
        let expected = scratch.image_of("expected", &writer.bytes());
        drop(writer);
        // The old image is unlocked, but is no longer the disk.
        command(&["serve", str(&source)]).failure("was moved to");
        server.stop();
        let format = if to.ends_with("img") { "raw" } else { "qcow2" };
        let words = ["compare", "-f", format, "-F", "raw", str(&target), expected.str()];
        qemu_img(&words).success();
        if format == "qcow2" {
            qemu_img(&["check", str(&target)]).success();
        }
    }
}

#[test]
fn errors_of_the_target_end_the_job_and_not_the_client() {
    let mut random = seeded();
    for filter in [&["error-pwrite-rate=0.2"][..], &["error-zero-rate=1"], &["error-rate=0.5"]] {
        let scratch = Scratch::new();
        let (source, socket) = (image(&scratch, "a.img"), scratch.socket("t"));
        let size = SIZE.to_string();
        let words = [&["-f", "-U", str(&socket), "--filter=error", "memory", &size], filter];
        let _foreign = Foreign::start("nbdkit", &words.concat(), &socket);
        let (server, mut control) = serve(&scratch, &source);
        let mut writer = Writer::new(&server.address(), random.fork());
        let target = nbd_uri("", &socket);
        let start = json!({ "kind": "mirror", "disk": "a.img", "target": target, "overwrite": true,
            "job": "m", "mode": "write-blocking" });
        beside(&mut writer, || {
            let failed = match control.call("job.start", start) {
                // The job fails at once if the target does not work at all.
                Err((_, why)) => why,
                Ok(_) => wait_for(&mut control, "m", "failed")["error"].to_string(),
            };
            assert!(!failed.contains('\n') && failed.len() > 10, "{failed}");
        });
        writer.check();
        server.stop();
    }
}

/// The connection to the other server belongs to the event loop of jobs, and the last flush needs
/// it.
#[test]
fn a_server_whose_disk_has_moved_to_another_one_ends_in_order() {
    let scratch = Scratch::new();
    let (source, socket) = (image(&scratch, "a.img"), scratch.socket("t"));
    let size = SIZE.to_string();
    let words = ["-f", "-U", str(&socket), "memory", &size];
    let _foreign = Foreign::start("nbdkit", &words, &socket);
    let (server, mut control) = serve(&scratch, &source);
    let mut writer = Writer::new(&server.address(), seeded());
    let target = nbd_uri("", &socket);
    beside(&mut writer, || {
        ctl(&scratch, &["mirror", "a.img", &target, "--overwrite", "--job", "m"]).success();
        wait_for(&mut control, "m", "ready");
        ctl(&scratch, &["job", "m", "complete"]).success();
    });
    writer.check();
    server.stop();
}

#[test]
fn a_slow_target_delays_its_job_and_a_cancelled_one_leaves_nothing() {
    let scratch = Scratch::new();
    let (source, socket) = (image(&scratch, "a.qcow2"), scratch.socket("t"));
    let size = SIZE.to_string();
    let words = ["-f", "-U", str(&socket), "--filter=delay", "memory", &size, "wdelay=100ms"];
    let _foreign = Foreign::start("nbdkit", &words, &socket);
    let (server, mut control) = serve(&scratch, &source);
    let mut writer = Writer::new(&server.address(), seeded());
    let target = nbd_uri("", &socket);
    beside(&mut writer, || {
        let start = json!({ "kind": "mirror", "disk": "a.qcow2", "target": target });
        control.refused("job.start", start, FAILED, &["overwrite"]);
        ctl(&scratch, &["mirror", "a.qcow2", &target, "--overwrite", "--job", "m"]).success();
        let other = json!({ "kind": "mirror", "disk": "a.qcow2", "target": scratch.path("b.img") });
        control.refused("job.start", other, FAILED, &["the job \"m\" works on"]);
        for words in [&["pause"][..], &["resume"], &["speed", "1M"], &["speed", "0"], &["cancel"]] {
            ctl(&scratch, &[&["job", "m"], words].concat()).success();
        }
        wait_for(&mut control, "m", "cancelled");
        // A file that a cancelled job has made is removed.
        let file = scratch.path("b.img");
        ctl(&scratch, &["mirror", "a.qcow2", str(&file), "--speed", "64K", "--job", "n"]).success();
        assert!(file.exists());
        ctl(&scratch, &["job", "n", "cancel"]).success();
        wait_for(&mut control, "n", "cancelled");
        assert!(!file.exists());
    });
    writer.check();
    let listed = ctl(&scratch, &["jobs"]).success();
    assert!(listed.stdout.starts_with("JOB"), "{}", listed.stdout);
    server.stop();
    command(&["check", str(&source)]).success();
}

#[test]
fn a_disk_moves_to_another_host_and_the_old_one_refuses_to_write() {
    let (here, there) = (Scratch::new(), Scratch::new());
    let (source, target) = (image(&here, "a.qcow2"), image(&there, "a.qcow2"));
    let (old, mut control) = serve(&here, &source);
    let new = Serve::new(&there, &target).start();
    let mut writer = Writer::new(&old.address(), seeded());
    beside(&mut writer, || {
        ctl(&here, &["mirror", "a.qcow2", new.uri(), "--overwrite", "--job", "m"]).success();
        wait_for(&mut control, "m", "ready");
    });
    ctl(&here, &["job", "m", "complete", "--hand-over"]).success();
    assert_ne!(writer.client.write(0, &[1; 512], 0), 0, "the old one refuses");
    writer.check();
    writer.client = Client::open(&new.address());
    writer.check();
    writer.write(7);
    writer.check();
    drop(writer);
    old.stop();
    // After a restart the old server cannot write to the old image, either.
    command(&["serve", str(&source)]).failure("was moved to");
    new.stop();
    qemu_img(&["check", str(&target)]).success();
}

#[test]
fn after_a_kill_what_can_be_opened_is_the_disk() {
    let mut random = seeded();
    for round in 0..6 {
        let scratch = Scratch::new();
        let (source, target) = (image(&scratch, "a.img"), scratch.path("b.img"));
        let (server, mut control) = serve(&scratch, &source);
        let mut writer = Writer::new(&server.address(), random.fork());
        assert_eq!(writer.client.flush(), 0);
        let start = json!({ "kind": "mirror", "disk": "a.img", "target": target, "job": "m" });
        control.get("job.start", start);
        if round > 0 {
            wait_for(&mut control, "m", "ready");
        }
        let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "job.complete", "params": { "job": "m" } });
        control.send(call.to_string().as_bytes()).expect("the server listens");
        std::thread::sleep(Duration::from_micros(random.u64(..40_000)));
        server.signal(Signal::KILL);
        drop(server);
        let expected = scratch.image_of("expected", &writer.bytes());
        let is_disk = |path: &Path| {
            let opened = command(&["compare", "--format", "raw", str(path), expected.str()]);
            opened.status.success()
        };
        // The target has either the mark or the complete disk.
        let bytes = std::fs::read(&target).expect("it was made");
        let is_marked = bytes.starts_with(b"blockhouse: mirror not complete\n");
        assert!(is_disk(&source), "nothing was written since the mirror");
        assert_eq!(is_disk(&target), !is_marked);
        let record = scratch.path("a.img.moved");
        assert!(is_marked || record.exists(), "the old image must not be served");
        if record.exists() {
            command(&["serve", str(&source)]).failure("was moved to");
        }
    }
}

/// The disk was mirrored to another image and is being mirrored back to the first, which has a
/// record by then. After a kill it is still clear which of the two is the disk.
#[test]
fn a_kill_on_the_way_back_leaves_no_two_records() {
    const MARK: &[u8] = b"blockhouse: mirror not complete\n";
    let mut random = seeded();
    let call = |method: &str, params: Value| {
        json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string()
    };
    for round in 0..6 {
        let scratch = Scratch::new();
        let (first, second) = (image(&scratch, "a.img"), scratch.path("b.img"));
        let (server, mut control) = serve(&scratch, &first);
        let mut writer = Writer::new(&server.address(), random.fork());
        ctl(&scratch, &["mirror", "a.img", str(&second), "--job", "there"]).success();
        wait_for(&mut control, "there", "ready");
        ctl(&scratch, &["job", "there", "complete"]).success();
        let records = ["a.img.moved", "b.img.moved"].map(|name| scratch.path(name));
        assert!(records[0].exists() && !records[1].exists());
        assert_eq!(writer.client.flush(), 0);
        let back = json!({ "kind": "mirror", "disk": "a.img", "target": first, "overwrite": true,
            "job": "back" });
        if round % 2 == 0 {
            let start = call("job.start", back);
            control.send(start.as_bytes()).expect("the server listens");
        } else {
            control.get("job.start", back);
            wait_for(&mut control, "back", "ready");
            let complete = call("job.complete", json!({ "job": "back" }));
            control.send(complete.as_bytes()).expect("the server listens");
        }
        std::thread::sleep(Duration::from_micros(random.u64(..60_000)));
        server.signal(Signal::KILL);
        drop(server);
        let is_marked = std::fs::read(&first).expect("it is there").starts_with(MARK);
        let [of_first, of_second] = records.each_ref().map(|record| record.exists());
        assert!(!(of_first && of_second), "each image names the other");
        // As docs/jobs.md says, with b.img as the source and a.img as the target.
        let disk = match (of_second, is_marked) {
            (true, false) => &first,
            _ => &second,
        };
        for record in &records {
            let _ = std::fs::remove_file(record);
        }
        let server = Serve::new(&scratch, disk).start();
        writer.client = Client::open(&server.address());
        writer.check();
        drop(writer);
        server.stop();
    }
}
