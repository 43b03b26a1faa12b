//! Disks whose backing file is on a server that stops answering: requests that wait for it get an
//! error, delay nothing else, and do not prevent our server's end.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, str};
use blockhouse_tests::nbd::{Client, Request, command as nbd};
use blockhouse_tests::{Scratch, Serve, Server, eventually, nbd_uri};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::jobs::{FAILED, Foreign, ctl, serve, wait_for};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 32 * MIB;
/// The longest time that guests' writes may wait.
const LIMIT: Duration = Duration::from_secs(6);
/// Longer than a busy machine takes.
const LONG: Duration = Duration::from_secs(25);

struct Stopped {
    scratch: Scratch,
    base: Foreign,
}

impl Stopped {
    fn new() -> Self {
        let scratch = Scratch::new();
        let (socket, file) = (scratch.socket("base"), scratch.path("base.img"));
        std::fs::write(&file, vec![7; SIZE as usize]).expect("a base");
        let backing = nbd_uri("", &socket);
        let base = Self::start_base(&scratch);
        let made = Self { scratch, base };
        let overlay = made.overlay();
        let words = ["create", "-b", &backing, "-F", "raw", "--allow-remote", str(&overlay)];
        command(&[&words[..], &[&SIZE.to_string()]].concat()).success();
        made
    }

    fn start_base(scratch: &Scratch) -> Foreign {
        let (socket, file) = (scratch.socket("base"), scratch.path("base.img"));
        let words = ["-f", "-r", "-U", str(&socket), "file", str(&file)];
        Foreign::start("nbdkit", &words, &socket)
    }

    /// Ends the base, whose clients have left, and starts it again. If it continued instead,
    /// nbdkit 1.32 could abort, because it replies to closed connections.
    fn start_base_again(&mut self) {
        self.base.signal(Signal::KILL);
        let _ = std::fs::remove_file(self.scratch.socket("base"));
        self.base = Self::start_base(&self.scratch);
    }

    fn overlay(&self) -> PathBuf {
        self.scratch.path("over.qcow2")
    }

    fn serve(&self) -> (Server, Control) {
        let serve = Serve::new(&self.scratch, &self.overlay());
        serve.flag("--allow-remote").start_with_control(&self.scratch)
    }

    /// Writes clusters to the image, then stops the base, and sends a read and a write that wait
    /// for it. Returns the waiting clients.
    fn stop_base(&self, server: &Server, control: &mut Control) -> [Client; 2] {
        let mut client = Client::open(&server.address());
        assert_eq!(client.write(0, &[1; 8 * CLUSTER as usize], 0), 0);
        let [mut reader, mut writer] = [(); 2].map(|()| Client::open(&server.address()));
        self.base.stop();
        read_that_waits(&mut reader, control, 20 * CLUSTER);
        let write =
            Request { command: nbd::WRITE, flags: 0, offset: 30 * CLUSTER + 512, length: 512 };
        writer.send_with(write, &[2; 512]).expect("it is taken");
        until_waits(control, "a change waits for");
        [reader, writer]
    }
}

/// What the server's list says about its disk's wait for a backing file.
fn told_wait(control: &mut Control) -> Option<String> {
    let disks: Value = control.get("disk.list", json!({}));
    disks[0]["waits"].as_str().map(ToOwned::to_owned)
}

#[track_caller]
fn until_waits(control: &mut Control, wait: &str) {
    let waits = || told_wait(control).is_some_and(|told| told.starts_with(wait));
    assert!(eventually(LONG, waits), "{wait}");
}

/// Sends a read of the stopped base, and returns when it waits there.
#[track_caller]
fn read_that_waits(client: &mut Client, control: &mut Control, offset: u64) {
    let read = Request { command: nbd::READ, flags: 0, offset, length: CLUSTER };
    client.send_with(read, &[]).expect("it is taken");
    until_waits(control, "a read waits for");
}

/// Runs `work` while a guest writes; its writes must wait for less than the limit. There are three
/// tries, because a busy machine may be slower once. The limit is not higher instead: operations
/// give up on their own after a few seconds, and writes that wait for them do so at each try.
#[track_caller]
fn beside_writes(server: &Server, mut work: impl FnMut()) {
    let mut times = (0..3).map(|_| slowest_write(server, &mut work));
    assert!(times.any(|slowest| slowest < LIMIT), "a write took longer than {LIMIT:?} at each try");
}

/// Runs `work` while a guest writes; returns the time of its slowest write with a flush.
fn slowest_write(server: &Server, work: impl FnOnce()) -> Duration {
    let address = server.address();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let (mut client, mut slowest) = (Client::open(&address), Duration::ZERO);
            while !is_over.load(Relaxed) {
                let began = Instant::now();
                assert_eq!(client.write(3 * CLUSTER, &[4; 4096], 0), 0);
                assert_eq!(client.flush(), 0);
                slowest = slowest.max(began.elapsed());
            }
            slowest
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        is_over.store(true, Relaxed);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        writing.join().expect("no panic")
    })
}

#[test]
fn a_stopped_backing_file_is_named_while_a_request_waits_for_it() {
    let stopped = Stopped::new();
    let (server, mut control) = stopped.serve();
    assert_eq!(told_wait(&mut control), None);
    let mut clients = stopped.stop_base(&server, &mut control);
    let socket = stopped.scratch.socket("base");
    let told = told_wait(&mut control).expect("two requests wait");
    assert!(told.contains(str(&socket)), "{told}");
    assert!(ctl(&stopped.scratch, &["disks"]).success().stdout.contains(&told[..20]));
    let seconds = |control: &mut Control| -> Option<u64> {
        let metrics: Value = control.get("stats.get", json!({}));
        let sample = &metrics["blockhouse_disk_wait_seconds"][0];
        let is_base = sample["labels"]["file"].as_str()?.contains(str(&socket));
        assert!(is_base && sample["labels"]["disk"] == "over.qcow2", "{sample}");
        sample["value"].as_u64()
    };
    assert!(eventually(LONG, || seconds(&mut control) >= Some(1)), "{:?}", seconds(&mut control));
    let top = command(&["top", str(&stopped.scratch.socket("control"))]).success().stdout;
    assert!(top.contains("over.qcow2: waits ") && top.contains(str(&socket)), "{top}");
    stopped.base.signal(Signal::CONT);
    for client in &mut clients {
        assert_eq!(client.receive().expect("an answer").1.error, 0);
    }
    assert_eq!((told_wait(&mut control), seconds(&mut control)), (None, None));
    server.stop();
}

#[test]
fn what_would_wait_for_a_stopped_backing_file_is_refused_and_says_so() {
    let stopped = Stopped::new();
    let (server, mut control) = stopped.serve();
    let mut clients = stopped.stop_base(&server, &mut control);
    let socket = stopped.scratch.socket("base");
    let told = ["a change waits for", str(&socket)];
    let disk = "over.qcow2";
    beside_writes(&server, || {
        control.refused("snapshot.create", json!({ "disk": disk, "name": "s" }), FAILED, &told);
        control.refused("bitmap.add", json!({ "disk": disk, "name": "b" }), FAILED, &told);
        control.refused("disk.set", json!({ "disk": disk, "read-only": true }), FAILED, &told);
        control.refused("job.start", json!({ "kind": "stream", "disk": disk }), FAILED, &told);
        let export = nbd_uri("", stopped.scratch.socket("backup"));
        let backup = json!({ "disks": [disk], "export": export });
        control.refused("backup.begin", backup, FAILED, &told);
        let target = stopped.scratch.path("target.qcow2");
        for cancel in [false, true] {
            ctl(&stopped.scratch, &["mirror", disk, str(&target), "--job", "m"]).success();
            if cancel {
                ctl(&stopped.scratch, &["job", "m", "cancel"]).success();
            }
            let end = wait_for(&mut control, "m", if cancel { "cancelled" } else { "failed" });
            let error = end["error"].as_str().unwrap_or_default();
            assert!(cancel || told.iter().all(|word| error.contains(word)), "{error}");
            control.get("job.dismiss", json!({ "job": "m" }));
            assert!(eventually(LONG, || !target.exists()), "a file that the job has made");
        }
    });
    stopped.base.signal(Signal::CONT);
    for client in &mut clients {
        assert_eq!(client.receive().expect("an answer").1.error, 0);
    }
    control.get("snapshot.create", json!({ "disk": disk, "name": "s" }));
    control.get("bitmap.add", json!({ "disk": disk, "name": "b" }));
    drop(clients);
    server.stop();
}

#[test]
fn a_stopped_backing_file_keeps_no_server_from_its_end() {
    for with_mirror in [false, true] {
        let mut stopped = Stopped::new();
        let (mut server, mut control) = stopped.serve();
        // If only the mirror has requests in flight, its own read waits.
        let clients = if with_mirror {
            let mut client = Client::open(&server.address());
            assert_eq!(client.write(0, &[1; 8 * CLUSTER as usize], 0), 0);
            stopped.base.stop();
            let target = stopped.scratch.path("target.qcow2");
            let start = json!({ "kind": "mirror", "disk": "over.qcow2", "target": str(&target) });
            let _: Value = control.get("job.start", start);
            until_waits(&mut control, "a read waits for");
            vec![client]
        } else {
            stopped.stop_base(&server, &mut control).into()
        };
        let mut idle = Client::open(&server.address());
        assert_eq!(idle.write(CLUSTER, &[9; 4096], 0), 0);
        let began = Instant::now();
        server.signal(Signal::TERM);
        let status = server.wait(Duration::from_secs(40));
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        let (log, socket) = (server.log(), stopped.scratch.socket("base"));
        assert!(log.contains(str(&socket)) && log.contains("waits for"), "{log}");
        assert!(!log.contains("its target"), "{log}");
        if !with_mirror {
            assert_eq!(status.code(), Some(1), "requests were not answered: {log}");
            assert!(log.contains("2 requests in flight are given up"), "{log}");
        }
        drop((clients, idle, control));
        stopped.start_base_again();
        // Acknowledged writes are there.
        let (server, _control) = stopped.serve();
        let mut client = Client::open(&server.address());
        assert_eq!(client.read(CLUSTER, 4096), Ok(vec![9; 4096]));
        assert_eq!(client.read(2 * CLUSTER, CLUSTER), Ok(vec![1; CLUSTER as usize]));
        assert_eq!(client.read(20 * CLUSTER, CLUSTER), Ok(vec![7; CLUSTER as usize]));
        drop(client);
        server.stop();
        // A dropped request may have leaked a cluster.
        let check = command(&["check", str(&stopped.overlay())]).stdout;
        assert!(!check.contains("corrupt"), "{check}");
    }
}

#[test]
fn a_read_that_waits_at_the_source_keeps_no_mirror_from_its_end() {
    let stopped = Stopped::new();
    let (server, mut control) = stopped.serve();
    let target = stopped.scratch.path("target.qcow2");
    ctl(&stopped.scratch, &["mirror", "over.qcow2", str(&target), "--job", "m"]).success();
    wait_for(&mut control, "m", "ready");
    let [mut reader, writer] = stopped.stop_base(&server, &mut control);
    drop(writer);
    // The write completes at the target, so that the source has no requests in flight.
    stopped.base.signal(Signal::CONT);
    assert!(eventually(LONG, || told_wait(&mut control).is_none()));
    assert_eq!(reader.receive().expect("an answer").1.error, 0);
    stopped.base.stop();
    read_that_waits(&mut reader, &mut control, 25 * CLUSTER);
    let began = Instant::now();
    control.get("job.complete", json!({ "job": "m" }));
    wait_for(&mut control, "m", "completed");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    // The guest continues at the target, which has the data that the source waits for.
    let mut client = Client::open(&server.address());
    assert_eq!(client.read(20 * CLUSTER, CLUSTER), Ok(vec![7; CLUSTER as usize]));
    assert_eq!(client.write(0, &[9; 4096], 0), 0);
    assert_eq!(client.flush(), 0);
    stopped.base.signal(Signal::CONT);
    assert_eq!(reader.receive().expect("an answer").1.error, 0);
    drop((reader, client));
    server.stop();
}

#[test]
fn an_old_image_at_a_stopped_server_keeps_no_mirror_from_its_end() {
    let scratch = Scratch::new();
    let (socket, file) = (scratch.socket("old"), scratch.path("old.qcow2"));
    command(&["create", "-f", "qcow2", str(&file), &SIZE.to_string()]).success();
    // The file is longer, because the size of an export is fixed.
    let longer = OpenOptions::new().write(true).open(&file);
    longer.and_then(|file| file.set_len(2 * SIZE)).expect("room");
    let old = Foreign::start("nbdkit", &["-f", "-U", str(&socket), "file", str(&file)], &socket);
    let image = PathBuf::from(nbd_uri("", &socket));
    let serve = Serve::new(&scratch, &image).option("--control", scratch.socket("control"));
    let serve = serve.option("--sandbox-allow", scratch.path(""));
    let server = serve.flag("--allow-remote").option("--format", "qcow2").start();
    let mut control = Control::connect(&scratch.socket("control"));
    let disks: Value = control.get("disk.list", json!({}));
    let name = disks[0]["disk"].as_str().expect("a name").to_owned();
    let target = scratch.path("target.qcow2");
    ctl(&scratch, &["mirror", &name, str(&target), "--job", "m"]).success();
    wait_for(&mut control, "m", "ready");
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(CLUSTER, &[1; 4096], 0), 0);
    // The first sector is known to be zeros, so that completing the mirror reads nothing. The write
    // may have to be copied first.
    let (mut slowest, mut tries) = (Duration::ZERO, 0);
    let is_complete = || {
        tries += 1;
        old.signal(Signal::CONT);
        assert_eq!(client.read(CLUSTER, 4096), Ok(vec![1; 4096]));
        wait_for(&mut control, "m", "ready");
        old.stop();
        let began = Instant::now();
        let is_complete = control.call("job.complete", json!({ "job": "m" })).is_ok();
        slowest = slowest.max(began.elapsed());
        is_complete
    };
    assert!(eventually(Duration::from_secs(60), is_complete), "it is not copied");
    // Closing a disk waits for a server for up to 2 minutes.
    assert!(slowest < Duration::from_secs(60), "{slowest:?}");
    let log = server.log();
    // A slow try may already have flushed the old image.
    let is_told = log.contains("the image that the disk had before does not answer");
    assert!(is_told || tries > 1, "{log}");
    assert_eq!(client.write(2 * CLUSTER, &[2; 4096], 0), 0);
    assert_eq!(client.flush(), 0);
    assert_eq!(client.read(CLUSTER, 4096), Ok(vec![1; 4096]));
    old.signal(Signal::CONT);
    drop(client);
    server.stop();
}

#[test]
fn a_disk_that_a_stream_fills_stays_writable() {
    let scratch = Scratch::new();
    let base = scratch.path("base.img");
    std::fs::write(&base, vec![7; SIZE as usize]).expect("a base");
    let overlay = scratch.path("over.qcow2");
    command(&["create", "-b", str(&base), "-F", "raw", str(&overlay)]).success();
    let (server, mut control) = serve(&scratch, &overlay);
    ctl(&scratch, &["stream", "over.qcow2", "--speed", "64K", "--job", "s"]).success();
    let set = json!({ "disk": "over.qcow2", "read-only": true });
    control.refused("disk.set", set.clone(), FAILED, &["the job \"s\" fills the disk"]);
    ctl(&scratch, &["job", "s", "cancel"]).success();
    wait_for(&mut control, "s", "cancelled");
    control.get("disk.set", set);
    server.stop();
}
