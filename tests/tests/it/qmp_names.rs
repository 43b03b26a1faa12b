//! `serve --qmp`: nodes, jobs and exports have their names and their state also after changes that
//! other nodes, jobs or clients have made.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{qemu_img, qemu_io, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::{Scratch, Serve, Server, need, require};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use crate::qmp::wait_until;

const MIB: u64 = 1 << 20;

/// A server with a disk that the tests do not use, and clients of its two sockets.
struct Rig {
    scratch: Scratch,
    server: Server,
    qmp: Qmp,
    control: Control,
}

impl Rig {
    fn start() -> Result<Self, String> {
        need::tools(&["qemu-img", "qemu-io"])?;
        let scratch = Scratch::new();
        let first = scratch.image("first", MIB);
        let [socket, control] = ["qmp", "control"].map(|name| scratch.socket(name));
        let server = Serve::new(&scratch, first.path())
            .option("--qmp", &socket)
            .option("--control", &control)
            .option("--sandbox-allow", scratch.path("."))
            .start();
        let (qmp, control) = (Qmp::connect(&socket), Control::connect(&control));
        Ok(Self { scratch, server, qmp, control })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Makes an image of 1 MiB, over `base` if there is one.
    fn new_image(&self, name: &str, base: Option<&str>) -> PathBuf {
        let path = self.path(name);
        let mut words = vec!["create", "-q", "-f", "qcow2"];
        words.extend(base.iter().flat_map(|base| ["-F", "qcow2", "-b", base]));
        words.extend([str(&path), "1M"]);
        qemu_img(&words).success();
        path
    }

    fn add(&mut self, name: &str) {
        let file = json!({ "driver": "file", "filename": self.path(name) });
        self.qmp.get("blockdev-add", json!({ "driver": "qcow2", "node-name": name, "file": file }));
    }

    fn nodes(&mut self) -> Vec<String> {
        let nodes = self.qmp.get("query-named-block-nodes", json!({}));
        let nodes = nodes.as_array().expect("a list").iter();
        nodes.map(|node| node["node-name"].as_str().expect("a name").to_owned()).collect()
    }

    fn is_read_only(&mut self, name: &str) -> bool {
        let nodes = self.qmp.get("query-named-block-nodes", json!({}));
        let mut nodes = nodes.as_array().expect("a list").iter();
        nodes.find(|node| node["node-name"] == name).expect("it is there")["ro"] == true
    }

    /// The number of keys in the server's memory.
    fn key_count(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.server.pid());
        let files = std::fs::read_dir(folder).expect("a process").flatten();
        let links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        links.filter(|link| str(link).starts_with("/memfd:key")).count()
    }

    fn start_server(&mut self) -> PathBuf {
        let nbd = self.scratch.socket("more");
        let addr = json!({ "type": "unix", "data": { "path": nbd } });
        self.qmp.get("nbd-server-start", json!({ "addr": addr }));
        nbd
    }
}

fn bytes_of(image: &Path) -> Vec<u8> {
    std::fs::read(image).expect("it is there")
}

#[test]
fn an_image_is_not_committed_into_itself() {
    let mut rig = require!(Rig::start());
    let base = rig.new_image("b", None);
    let overlay = rig.new_image("o", Some("b"));
    qemu_io("qcow2", &overlay, &["write -P 7 0 64k"]);
    let before = bytes_of(&base);
    rig.add("o");
    for commit in [
        json!({ "job-id": "c", "device": "o", "base-node": "o" }),
        json!({ "job-id": "c", "device": "o", "base-node": "o", "top-node": "o" }),
    ] {
        let why = rig.qmp.refused("block-commit", commit);
        assert_eq!(why, "cannot commit an image into itself");
    }
    assert_eq!(bytes_of(&base), before);
}

#[test]
fn a_node_that_a_stream_took_out_of_its_chain_names_no_other_image() {
    let mut rig = require!(Rig::start());
    let base = rig.new_image("b", None);
    rig.new_image("o1", Some("b"));
    rig.add("o1");
    let snapshot =
        json!({ "node-name": "o1", "snapshot-file": rig.path("o2"), "snapshot-node-name": "o2" });
    rig.qmp.get("blockdev-snapshot-sync", snapshot);
    // The base has no node.
    let stream = json!({ "job-id": "s", "device": "o2", "base": base });
    rig.qmp.get("block-stream", stream);
    rig.qmp.events_until("s", "null");
    let commit = json!({ "job-id": "c", "device": "o2", "base-node": "o1" });
    let why = rig.qmp.refused("block-commit", commit);
    assert_eq!(why, "'o1' is not in this backing file chain");
    rig.qmp.get("blockdev-del", json!({ "node-name": "o1" }));
    assert!(rig.nodes().contains(&"o2".to_owned()));
}

#[test]
fn a_paused_mirror_is_cancelled_by_force_only() {
    let mut rig = require!(Rig::start());
    rig.new_image("a", None);
    rig.new_image("t", None);
    rig.add("a");
    rig.add("t");
    let mirror = json!({ "job-id": "m", "device": "a", "target": "t", "sync": "full" });
    rig.qmp.get("blockdev-mirror", mirror);
    rig.qmp.events_until("m", "BLOCK_JOB_READY");
    rig.qmp.get("block-job-pause", json!({ "device": "m" }));
    let why = rig.qmp.refused("block-job-cancel", json!({ "device": "m" }));
    assert_eq!(why, "The block job for device 'm' is currently paused");
    rig.qmp.get("block-job-resume", json!({ "device": "m" }));
    rig.qmp.get("block-job-cancel", json!({ "device": "m" }));
    let events = rig.qmp.events_until("m", "null");
    assert!(events.iter().any(|event| event["event"] == "BLOCK_JOB_COMPLETED"), "{events:?}");
}

#[test]
fn a_backup_that_the_control_socket_ends_is_a_job_that_has_ended() {
    let mut rig = require!(Rig::start());
    rig.new_image("a", None);
    rig.add("a");
    for dismisses in [false, true] {
        rig.new_image("t", None);
        let file = json!({ "driver": "file", "filename": rig.path("t") });
        let node = json!({ "driver": "qcow2", "node-name": "t", "file": file, "backing": "a" });
        rig.qmp.get("blockdev-add", node);
        let backup = json!({ "job-id": "p", "device": "a", "target": "t", "sync": "none", "auto-dismiss": dismisses });
        rig.qmp.get("blockdev-backup", backup);
        rig.control.get("backup.end", json!({ "backup": "p" }));
        if !dismisses {
            rig.qmp.events_until("p", "concluded");
            rig.qmp.get("job-dismiss", json!({ "id": "p" }));
        }
        rig.qmp.events_until("p", "null");
        assert_eq!(rig.qmp.get("query-jobs", json!({})), json!([]));
        rig.qmp.get("blockdev-del", json!({ "node-name": "t" }));
    }
}

#[test]
fn a_backup_that_cannot_keep_old_bytes_is_a_job_that_has_failed() {
    let mut rig = require!(Rig::start());
    let mut guest = Client::open(&rig.server.address());
    assert_eq!(guest.write(0, &[7; 65_536], 0), 0);
    rig.new_image("t", None);
    let file = json!({ "driver": "file", "filename": rig.path("t") });
    let node = json!({ "driver": "qcow2", "node-name": "t", "file": file, "backing": "first" });
    rig.qmp.get("blockdev-add", node);
    let backup = json!({ "job-id": "p", "device": "first", "target": "t", "sync": "none", "auto-dismiss": false });
    rig.qmp.get("blockdev-backup", backup);
    // Another program cuts the old bytes off.
    let image = OpenOptions::new().write(true).open(rig.path("first")).expect("it is there");
    image.set_len(0).expect("a length");
    let _ = guest.write(0, &[1; 512], 0);
    let events = rig.qmp.events_until("p", "concluded");
    let failed = events.iter().find(|event| event["event"] == "BLOCK_JOB_COMPLETED");
    assert!(failed.expect("an event")["data"]["error"].is_string(), "{events:?}");
    let jobs = rig.qmp.get("query-jobs", json!({}));
    assert!(jobs[0]["error"].is_string() && jobs[0]["status"] == "concluded", "{jobs}");
    rig.qmp.get("job-dismiss", json!({ "id": "p" }));
    wait_until("nothing of the backup is left", || {
        rig.control.get("backup.list", json!({})) == json!([])
    });
    rig.qmp.get("blockdev-del", json!({ "node-name": "t" }));
}

#[test]
fn a_node_that_was_reopened_read_only_stays_so_until_it_is_reopened() {
    let mut rig = require!(Rig::start());
    let base = rig.new_image("b", None);
    let overlay = rig.new_image("o", Some("b"));
    let file = json!({ "driver": "file", "node-name": "f", "filename": base });
    rig.qmp.get("blockdev-add", file.clone());
    let reopened = |node: &Value, is_read_only: bool| {
        let mut node = node.clone();
        node["read-only"] = is_read_only.into();
        json!({ "options": [node] })
    };
    rig.qmp.get("blockdev-reopen", reopened(&file, true));
    let node = json!({ "driver": "qcow2", "node-name": "b", "file": "f" });
    rig.qmp.get("blockdev-add", node.clone());
    rig.qmp.get("blockdev-reopen", reopened(&node, true));
    let over = json!({ "driver": "file", "filename": overlay });
    let upper = json!({ "driver": "qcow2", "node-name": "o", "file": over, "backing": "b" });
    rig.qmp.get("blockdev-add", upper);
    rig.qmp.get("blockdev-del", json!({ "node-name": "o" }));
    assert!(rig.is_read_only("b"));
    rig.qmp.get("blockdev-reopen", reopened(&node, false));
    assert!(!rig.is_read_only("b"));
    rig.qmp.get("blockdev-del", json!({ "node-name": "b" }));
    assert!(rig.is_read_only("f"));
    rig.qmp.get("blockdev-reopen", reopened(&file, false));
    assert!(!rig.is_read_only("f"));
}

#[test]
fn an_inactive_node_whose_file_grew_is_refreshed_and_becomes_active() {
    let mut rig = require!(Rig::start());
    let path = rig.path("raw");
    let image = std::fs::File::create(&path).expect("a file");
    image.set_len(MIB).expect("a length");
    let file = json!({ "driver": "file", "node-name": "r", "filename": path, "active": false });
    rig.qmp.get("blockdev-add", file);
    // The server that has the disk makes it longer.
    image.set_len(2 * MIB).expect("a length");
    let refreshed = rig.control.get("disk.refresh", json!({ "disk": "r" }));
    assert_eq!(refreshed["size"], 2 * MIB);
    rig.qmp.get("blockdev-set-active", json!({ "node-name": "r", "active": true }));
}

#[test]
fn nodes_and_servers_that_the_control_socket_removes_are_free() {
    let mut rig = require!(Rig::start());
    let image = rig.new_image("n", None);
    for _ in 0..2 {
        let file = json!({ "driver": "file", "node-name": "f", "filename": image });
        rig.qmp.get("blockdev-add", file);
        rig.qmp.get("blockdev-add", json!({ "driver": "qcow2", "node-name": "n", "file": "f" }));
        rig.control.get("disk.close", json!({ "disk": "n" }));
    }
    let file = json!({ "driver": "file", "node-name": "f", "filename": image });
    rig.qmp.get("blockdev-add", file);
    rig.qmp.get("blockdev-del", json!({ "node-name": "f" }));
    // The node of a file that was added with its user is removed with its user.
    let file = json!({ "driver": "file", "node-name": "f", "filename": image });
    rig.qmp.get("blockdev-add", json!({ "driver": "qcow2", "node-name": "n", "file": file }));
    rig.control.get("disk.close", json!({ "disk": "n" }));
    let why = rig.qmp.refused("blockdev-del", json!({ "node-name": "f" }));
    assert!(why.contains("Failed to find node"), "{why}");
    // A later node of the name is not the one that another node stands on.
    rig.add("n");
    let file = json!({ "driver": "file", "filename": rig.new_image("t", None) });
    let over = json!({ "driver": "qcow2", "node-name": "t", "backing": "n", "file": file });
    rig.qmp.get("blockdev-add", over);
    rig.control.get("disk.close", json!({ "disk": "n" }));
    rig.add("n");
    rig.qmp.get("blockdev-del", json!({ "node-name": "n" }));
    let backup = json!({ "job-id": "j", "device": "t", "target": "first", "sync": "full" });
    let why = rig.qmp.refused("blockdev-backup", backup);
    assert!(why.contains("stands on 'n (closed)'"), "{why}");
    for _ in 0..2 {
        let nbd = rig.start_server();
        rig.control.get(
            "socket.remove",
            json!({ "address": format!("nbd+unix://?socket={}", str(&nbd)) }),
        );
        rig.qmp.get("nbd-server-stop", json!({}));
    }
}

/// The server reads a key on the loop of QMP: a pipe keeps that loop from taking events.
#[test]
fn clients_receive_the_end_of_a_job_although_its_event_was_lost() {
    let mut rig = require!(Rig::start());
    for name in ["a", "t"] {
        rig.new_image(name, None);
        rig.add(name);
    }
    let mirror = json!({ "job-id": "m", "device": "a", "target": "t", "sync": "full" });
    rig.qmp.get("blockdev-mirror", mirror);
    rig.qmp.events_until("m", "BLOCK_JOB_READY");
    let pipe = rig.path("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
    let mut other = Qmp::connect(&rig.scratch.socket("qmp"));
    other.get("object-add", json!({ "qom-type": "secret", "id": "s", "file": pipe }));
    let file = json!({ "driver": "file", "filename": rig.new_image("e", None) });
    let node = json!({ "driver": "luks", "node-name": "e", "key-secret": "s", "file": file });
    let add = json!({ "execute": "blockdev-add", "arguments": node });
    other.send(add.to_string().as_bytes()).expect("the server listens");
    let mut key = OpenOptions::new().write(true).open(&pipe).expect("the server reads it");
    // More than the server keeps for a subscriber.
    (0..1100).for_each(|_| Client::open(&rig.server.address()).disconnect());
    rig.control.get("job.complete", json!({ "job": "m" }));
    key.write_all(b"k").expect("the server reads it");
    drop(key);
    let events: Vec<_> = std::iter::from_fn(|| rig.qmp.receive()).collect();
    for is_told in [
        |event: &Value| event["event"] == "BLOCK_JOB_COMPLETED" && event["data"]["device"] == "m",
        |event: &Value| event["data"] == json!({ "id": "m", "status": "null" }),
    ] {
        assert_eq!(events.iter().filter(|event| is_told(event)).count(), 1, "{events:?}");
    }
    let mut next = Qmp::connect(&rig.scratch.socket("qmp"));
    assert_eq!(next.get("query-jobs", json!({})), json!([]));
    // The node of the former image has left the chain.
    next.get("blockdev-del", json!({ "node-name": "a" }));
    next.get("blockdev-del", json!({ "node-name": "t" }));
}

#[test]
fn a_node_outlives_the_secret_it_was_opened_with() {
    let mut rig = require!(Rig::start());
    let image = rig.path("e");
    let options = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    let words = ["create", "-q", "-f", "qcow2", "--object", "secret,id=a,data=k", "-o", options];
    qemu_img(&[&words[..], &[str(&image), "1M"]].concat()).success();
    rig.new_image("a", None);
    rig.add("a");
    let nbd = rig.start_server();
    rig.qmp.get("object-add", json!({ "qom-type": "secret", "id": "s", "data": "k" }));
    let file = json!({ "driver": "file", "filename": image });
    let encrypt = json!({ "format": "luks", "key-secret": "s" });
    let node = json!({ "driver": "qcow2", "node-name": "e", "encrypt": encrypt, "file": file });
    rig.qmp.get("blockdev-add", node);
    rig.qmp.get("object-del", json!({ "id": "s" }));
    // The file of another secret may have the number of the first one's.
    rig.qmp.get("object-add", json!({ "qom-type": "secret", "id": "other", "data": "x" }));
    let export = json!({ "type": "nbd", "id": "e", "node-name": "e", "writable": true });
    rig.qmp.get("block-export-add", export.clone());
    assert_eq!(Client::at(&nbd, "e").write(0, &[7; 512], 0), 0);
    rig.qmp.get("block-export-del", json!({ "id": "e", "mode": "hard" }));
    // The node is closed for this command, and opened again because it has data.
    let why = rig.qmp.refused("blockdev-snapshot", json!({ "node": "a", "overlay": "e" }));
    assert!(why.contains("was written to"), "{why}");
    rig.qmp.get("block-export-add", export);
    assert_eq!(Client::at(&nbd, "e").read(0, 512), Ok(vec![7; 512]));
    rig.qmp.get("block-export-del", json!({ "id": "e", "mode": "hard" }));
    assert_eq!(rig.key_count(), 2);
    rig.qmp.get("blockdev-del", json!({ "node-name": "e" }));
    assert_eq!(rig.key_count(), 1);
}
