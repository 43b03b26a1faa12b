//! QMP: transactions on several disks at one moment (overlays, bitmaps, backups), and disks that
//! are copied to other nodes.

use std::path::{Path, PathBuf};

use blockhouse_tests::image_tool::{json as json_of, qemu_img, qemu_io, str};
use blockhouse_tests::nbd::{Address, Client, Greeted};
use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::{Scratch, Serve, Server, need, require};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A server with a disk that the tests do not use, and clients of its two sockets.
pub(crate) struct Rig {
    scratch: Scratch,
    _server: Server,
    pub(crate) qmp: Qmp,
    nbd: PathBuf,
}

impl Rig {
    /// Starts a server with qcow2 images of 1 MiB with these names, whose first 64 KiB hold 7, as
    /// disks that NBD clients may write to.
    pub(crate) fn start(names: &[&str]) -> Result<Self, String> {
        need::tools(&["qemu-img", "qemu-io"])?;
        let scratch = Scratch::new();
        let (first, socket, nbd) =
            (scratch.image("first", MIB), scratch.socket("qmp"), scratch.socket("more"));
        let server = Serve::new(&scratch, first.path())
            .option("--qmp", &socket)
            .option("--sandbox-allow", scratch.path("."))
            .start();
        let mut qmp = Qmp::connect(&socket);
        let addr = json!({ "type": "unix", "data": { "path": nbd } });
        qmp.get("nbd-server-start", json!({ "addr": addr }));
        let mut rig = Self { scratch, _server: server, qmp, nbd };
        for name in names {
            rig.new_image(name);
            qemu_io("qcow2", &rig.path(name), &["write -P 7 0 64k"]);
            rig.add(name);
            rig.export(name, true);
        }
        Ok(rig)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    pub(crate) fn new_image(&self, name: &str) {
        qemu_img(&["create", "-q", "-f", "qcow2", str(&self.path(name)), "1M"]).success();
    }

    pub(crate) fn new_overlay(&self, name: &str, base: &str) {
        let path = self.path(name);
        let words = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, str(&path)];
        qemu_img(&words).success();
    }

    /// The description of a format node over the image of its name.
    pub(crate) fn node(&self, name: &str) -> Value {
        let file = json!({ "driver": "file", "node-name": format!("{name}f"), "filename": self.path(name) });
        json!({ "driver": "qcow2", "node-name": name, "file": file })
    }

    pub(crate) fn add(&mut self, name: &str) {
        let node = self.node(name);
        self.qmp.get("blockdev-add", node);
    }

    pub(crate) fn export(&mut self, node: &str, writable: bool) {
        let export = json!({ "type": "nbd", "id": node, "node-name": node, "writable": writable });
        self.qmp.get("block-export-add", export);
    }

    fn connect(&self, name: &str) -> Client {
        Client::at(&self.nbd, name)
    }

    fn transact(&mut self, actions: &[Value]) {
        self.qmp.get("transaction", json!({ "actions": actions }));
    }

    fn refused(&mut self, actions: &[Value]) -> String {
        self.qmp.refused("transaction", json!({ "actions": actions }))
    }

    /// The names of all nodes, also of file nodes.
    fn nodes(&mut self) -> Vec<String> {
        let nodes = self.qmp.get("query-named-block-nodes", json!({}));
        let nodes = nodes.as_array().expect("a list").iter();
        nodes.map(|node| node["node-name"].as_str().expect("a name").to_owned()).collect()
    }

    fn bitmaps(&mut self, node: &str) -> Vec<(String, u64)> {
        bitmaps(&mut self.qmp, node)
    }
}

/// The bitmaps of a node: their names and numbers of dirty bytes.
pub(crate) fn bitmaps(qmp: &mut Qmp, node: &str) -> Vec<(String, u64)> {
    let nodes = qmp.get("query-named-block-nodes", json!({}));
    let mut nodes = nodes.as_array().expect("a list").iter();
    let node = nodes.find(|one| one["node-name"] == node).expect("it is there");
    let told = node["dirty-bitmaps"].as_array().into_iter().flatten().map(|bitmap| {
        let name = bitmap["name"].as_str().expect("a name").to_owned();
        (name, bitmap["count"].as_u64().expect("a number"))
    });
    told.collect()
}

fn action(kind: &str, data: Value) -> Value {
    json!({ "type": kind, "data": data })
}

/// Checks bytes at some offsets of an image, as QEMU reads it.
fn check_bytes(image: &Path, bytes: &[(u64, u8)]) {
    let steps = bytes.iter().map(|(offset, byte)| format!("read -P {byte} {offset} 512"));
    let steps: Vec<_> = steps.collect();
    let mut words = vec!["-r"];
    words.extend(steps.iter().flat_map(|step| ["-c", step.as_str()]));
    let mut command = blockhouse_tests::tool("qemu-io");
    let output = command.args(["-f", "qcow2"]).args(words).arg(image).output().expect("it runs");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success() && !said.contains("failed"), "{}: {said}", image.display());
}

#[test]
fn overlays_of_several_disks_are_put_on_at_one_moment_or_none_is() {
    let mut rig = require!(Rig::start(&["a", "b"]));
    let mut clients = ["a", "b"].map(|name| rig.connect(name));
    clients.iter_mut().for_each(|client| assert_eq!(client.write(MIB / 2, &[1; 512], 0), 0));
    std::fs::write(rig.path("taken"), "not an image").expect("room");
    let sync = |node: &str, file: PathBuf, name: &str| {
        let data = json!({ "node-name": node, "snapshot-file": file, "snapshot-node-name": name });
        action("blockdev-snapshot-sync", data)
    };
    // If one overlay cannot be made, no disk changes.
    let failing = [sync("a", rig.path("a1"), "a1"), sync("b", rig.path("taken"), "b1")];
    assert!(rig.refused(&failing).contains("exists already"));
    assert!(!rig.path("a1").exists() && rig.nodes().iter().all(|node| node != "a1"));
    let doomed = [sync("a", rig.path("a1"), "a1"), action("abort", json!({}))];
    assert_eq!(rig.refused(&doomed), "Transaction aborted using Abort action");
    // The transaction makes one overlay; the other is a node already.
    rig.new_overlay("b1", "b");
    let mut overlay = rig.node("b1");
    overlay["backing"] = Value::Null;
    rig.qmp.get("blockdev-add", overlay);
    let existing = action("blockdev-snapshot", json!({ "node": "b", "overlay": "b1" }));
    rig.transact(&[sync("a", rig.path("a1"), "a1"), existing]);
    clients.iter_mut().for_each(|client| assert_eq!(client.write(0, &[2; 512], 0), 0));
    for (name, client) in ["a", "b"].iter().zip(&mut clients) {
        check_bytes(&rig.path(name), &[(0, 7), (MIB / 2, 1)]);
        assert_eq!(client.read(0, 512), Ok(vec![2; 512]));
        assert_eq!(client.read(MIB / 2, 512), Ok(vec![1; 512]));
    }
    let exports = rig.qmp.get("query-block-exports", json!({}));
    let nodes: Vec<_> =
        exports.as_array().expect("a list").iter().map(|export| &export["node-name"]).collect();
    assert!(nodes.contains(&&json!("a1")) && nodes.contains(&&json!("b1")), "{exports}");
    for name in ["a", "af", "a1", "b", "bf", "b1", "b1f"] {
        assert!(rig.nodes().iter().any(|node| node == name), "{name}");
    }
    let why = rig.qmp.refused("blockdev-del", json!({ "node-name": "b" }));
    assert_eq!(why, "Node 'b' is busy: node is used as backing hd of 'b1'");
    assert_eq!(rig.qmp.refused("blockdev-del", json!({ "node-name": "a1" })), "Node a1 is in use");
    // The overlay of a is committed into a.
    let commit = json!({ "job-id": "c", "device": "a1", "base-node": "a" });
    rig.qmp.get("block-commit", commit);
    rig.qmp.events_until("c", "ready");
    rig.qmp.get("job-complete", json!({ "id": "c" }));
    rig.qmp.events_until("c", "null");
    assert_eq!(clients[0].write(4096, &[3; 512], 0), 0);
    assert!(rig.nodes().iter().all(|node| node != "a1"));
    // When the overlay of b is removed, b is a separate disk again.
    drop(clients);
    for export in ["a", "b"] {
        rig.qmp.get("block-export-del", json!({ "id": export, "mode": "hard" }));
    }
    rig.qmp.get("blockdev-del", json!({ "node-name": "a" }));
    check_bytes(&rig.path("a"), &[(0, 2), (4096, 3), (MIB / 2, 1)]);
    rig.qmp.get("blockdev-del", json!({ "node-name": "b1" }));
    assert!(rig.nodes().iter().any(|node| node == "b"));
    rig.export("b", false);
    assert_eq!(rig.connect("b").read(0, 512), Ok(vec![7; 512]));
}

#[test]
fn an_overlay_with_data_is_refused() {
    let mut rig = require!(Rig::start(&["a"]));
    rig.new_image("used");
    qemu_io("qcow2", &rig.path("used"), &["write -P 9 64k 512"]);
    rig.add("used");
    let snapshot = json!({ "node": "a", "overlay": "used" });
    assert!(rig.qmp.refused("blockdev-snapshot", snapshot).contains("was written to"));
    // Both disks work as before.
    rig.export("used", true);
    assert_eq!(rig.connect("used").read(65_536, 512), Ok(vec![9; 512]));
    assert_eq!(rig.connect("a").write(0, &[1; 512], 0), 0);
}

#[test]
fn a_disk_becomes_as_long_as_its_overlay_and_its_base_by_a_commit() {
    let mut rig = require!(Rig::start(&["a"]));
    let last = 2 * MIB - 512;
    for (name, size) in [("long", "2M"), ("short", "512k")] {
        qemu_img(&["create", "-q", "-f", "qcow2", str(&rig.path(name)), size]).success();
        rig.add(name);
    }
    let snapshot = |overlay: &str| json!({ "node": "a", "overlay": overlay });
    assert!(rig.qmp.refused("blockdev-snapshot", snapshot("short")).contains("has 524288 bytes"));
    // Bitmaps have the size of their disk.
    let bitmap = json!({ "node": "a", "name": "m" });
    rig.qmp.get("block-dirty-bitmap-add", bitmap.clone());
    assert!(rig.qmp.refused("blockdev-snapshot", snapshot("long")).contains("has 2097152 bytes"));
    rig.qmp.get("block-dirty-bitmap-remove", bitmap);
    let mut early = rig.connect("a");
    rig.qmp.get("blockdev-snapshot", snapshot("long"));
    assert_eq!(early.write(MIB - 512, &[8; 512], 0), 0);
    let mut client = rig.connect("a");
    assert_eq!(client.read(MIB, 512), Ok(vec![0; 512]));
    assert_eq!(client.write(last, &[9; 512], 0), 0);
    rig.qmp.get("block-commit", json!({ "device": "long", "job-id": "j" }));
    rig.qmp.events_until("j", "ready");
    rig.qmp.get("job-complete", json!({ "id": "j" }));
    rig.qmp.events_until("j", "null");
    assert_eq!(client.read(last, 512), Ok(vec![9; 512]));
    let Rig { scratch, _server: server, .. } = rig;
    server.stop();
    check_bytes(&scratch.path("a"), &[(0, 7), (MIB - 512, 8), (MIB, 0), (last, 9)]);
}

#[test]
fn an_overlay_whose_base_a_stream_took_out_is_removed() {
    let mut rig = require!(Rig::start(&[]));
    rig.new_image("base");
    rig.add("base");
    let file = rig.path("top");
    let data = json!({ "node-name": "base", "snapshot-file": file, "snapshot-node-name": "top" });
    rig.qmp.get("blockdev-snapshot-sync", data);
    let refused = rig.qmp.refused("blockdev-del", json!({ "node-name": "top" }));
    assert!(refused.contains("is not owned by the monitor"), "{refused}");
    rig.qmp.get("block-stream", json!({ "device": "top", "job-id": "j" }));
    crate::qmp::wait_until("the job ends", || rig.qmp.get("query-jobs", json!({})) == json!([]));
    rig.qmp.get("blockdev-del", json!({ "node-name": "top" }));
    // Nothing has it open.
    qemu_io("qcow2", &file, &["write -P 9 64k 512"]);
}

#[test]
fn nodes_that_jobs_take_out_of_a_chain_are_removed_by_their_clients() {
    let mut rig = require!(Rig::start(&[]));
    for name in ["a", "b", "c", "d"] {
        rig.new_image(name);
        rig.add(name);
    }
    for (node, overlay) in [("a", "b"), ("b", "c"), ("c", "d")] {
        rig.qmp.get("blockdev-snapshot", json!({ "node": node, "overlay": overlay }));
    }
    let commit = |top: &str, base: &str| json!({ "job-id": "j", "device": "d", "top-node": top, "base-node": base });
    rig.qmp.get("block-commit", commit("c", "b"));
    rig.qmp.events_until("j", "null");
    rig.qmp.get("block-commit", commit("d", "b"));
    rig.qmp.events_until("j", "ready");
    rig.qmp.get("job-complete", json!({ "id": "j" }));
    rig.qmp.events_until("j", "null");
    rig.qmp.get("block-stream", json!({ "job-id": "j", "device": "b" }));
    rig.qmp.events_until("j", "null");
    for name in ["c", "d", "a"] {
        // The name is not free before.
        rig.new_image("new");
        let node = json!({ "driver": "file", "node-name": name, "filename": rig.path("new") });
        assert!(rig.qmp.refused("blockdev-add", node.clone()).contains("Duplicate nodes"));
        rig.qmp.get("blockdev-del", json!({ "node-name": name }));
        rig.qmp.get("blockdev-add", node);
        rig.qmp.get("blockdev-del", json!({ "node-name": name }));
    }
}

#[test]
fn the_name_of_an_overlay_is_used_again_after_its_commit() {
    let mut rig = require!(Rig::start(&[]));
    rig.new_image("base");
    rig.add("base");
    let file = rig.path("top");
    let snapshot =
        json!({ "node-name": "base", "snapshot-file": file, "snapshot-node-name": "top" });
    rig.qmp.get("blockdev-snapshot-sync", snapshot.clone());
    rig.qmp.get("block-commit", json!({ "device": "top", "job-id": "j" }));
    rig.qmp.events_until("j", "ready");
    rig.qmp.get("job-complete", json!({ "id": "j" }));
    rig.qmp.events_until("j", "null");
    std::fs::remove_file(&file).expect("the disk is in the base");
    rig.qmp.get("blockdev-snapshot-sync", snapshot);
    let Rig { scratch, _server: server, .. } = rig;
    server.stop();
    Serve::new(&scratch, &file).flag("--format=qcow2").start().stop();
    Serve::new(&scratch, &scratch.path("base")).flag("--format=qcow2").refused().failed(&["top"]);
}

#[test]
fn bitmaps_of_several_disks_change_together_or_not_at_all() {
    let mut rig = require!(Rig::start(&["a", "b"]));
    let add = |node: &str, name: &str| {
        action("block-dirty-bitmap-add", json!({ "node": node, "name": name, "persistent": true }))
    };
    let of = |kind: &str, node: &str, name: &str| {
        action(&format!("block-dirty-bitmap-{kind}"), json!({ "node": node, "name": name }))
    };
    rig.transact(&[add("a", "one"), add("b", "one")]);
    assert_eq!(rig.connect("a").write(0, &[1; 512], 0), 0);
    let expected = |list: &[(&str, u64)]| -> Vec<(String, u64)> {
        list.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    };
    assert_eq!(rig.bitmaps("a"), expected(&[("one", 65_536)]));
    // The second action fails: b has a bitmap of this name already.
    assert_eq!(rig.refused(&[add("a", "two"), add("b", "one")]), "Bitmap already exists: one");
    let failing = [add("a", "two"), of("remove", "b", "none")];
    assert_eq!(rig.refused(&failing), "Dirty bitmap 'none' not found");
    // A failure that is found only when the change is made.
    let long = "x".repeat(1024);
    assert!(rig.refused(&[of("clear", "a", "one"), add("b", &long)]).contains("1 to 1023 bytes"));
    assert_eq!(rig.bitmaps("a"), expected(&[("one", 65_536)]));
    assert_eq!(rig.bitmaps("b"), expected(&[("one", 0)]));
    // Each action sees the results of those before it.
    let merge = json!({ "node": "a", "target": "sum", "bitmaps": ["one"] });
    rig.transact(&[
        add("a", "sum"),
        of("disable", "a", "sum"),
        action("block-dirty-bitmap-merge", merge),
        of("clear", "a", "one"),
        of("remove", "b", "one"),
        add("b", "new"),
    ]);
    assert_eq!(rig.connect("a").write(MIB / 2, &[1; 512], 0), 0);
    assert_eq!(rig.bitmaps("a"), expected(&[("sum", 65_536), ("one", 65_536)]));
    assert_eq!(rig.bitmaps("b"), expected(&[("new", 0)]));
    ["a", "b"].iter().for_each(|name| {
        rig.qmp.get("block-export-del", json!({ "id": name, "mode": "hard" }));
        rig.qmp.get("blockdev-del", json!({ "node-name": name }));
        qemu_img(&["check", "-q", "-f", "qcow2", str(&rig.path(name))]).success();
    });
    let info = json_of(&qemu_img(&["info", "--output=json", str(&rig.path("a"))]).success());
    let bitmaps = &info["format-specific"]["data"]["bitmaps"];
    assert_eq!(bitmaps.as_array().map(Vec::len), Some(2), "{info}");
}

#[test]
fn backups_are_copies_of_disks_at_one_moment_and_bitmaps_say_what_follows() {
    let mut rig = require!(Rig::start(&["a", "b"]));
    for name in ["full-a", "full-b"] {
        rig.new_image(name);
        rig.add(name);
    }
    let backup = |device: &str, target: &str, more: Value| {
        let mut data =
            json!({ "job-id": target, "device": device, "target": target, "sync": "full" });
        let more = more.as_object().cloned().unwrap_or_default();
        data.as_object_mut().expect("an object").extend(more);
        data
    };
    let add = |node: &str| {
        action(
            "block-dirty-bitmap-add",
            json!({ "node": node, "name": "since", "persistent": true }),
        )
    };
    let slow = json!({ "speed": 1, "auto-dismiss": false });
    rig.transact(&[
        add("a"),
        action("blockdev-backup", backup("a", "full-a", slow)),
        add("b"),
        action("blockdev-backup", backup("b", "full-b", json!({}))),
    ]);
    let jobs = rig.qmp.get("query-jobs", json!({}));
    let mut jobs = jobs.as_array().expect("a list").iter();
    assert!(jobs.any(|job| job["id"] == "full-a" && job["type"] == "backup"));
    // The guest continues to write, and the target is in use.
    assert_eq!(rig.connect("a").write(0, &[1; 512], 0), 0);
    assert_eq!(rig.connect("a").write(MIB / 2, &[1; 512], 0), 0);
    let export = json!({ "type": "nbd", "id": "x", "node-name": "full-a" });
    assert!(rig.qmp.refused("block-export-add", export).contains("writes to"));
    rig.qmp.refused("blockdev-del", json!({ "node-name": "full-a" }));
    rig.qmp.get("block-job-set-speed", json!({ "device": "full-a", "speed": 0 }));
    let events = rig.qmp.events_until("full-a", "concluded");
    assert!(events.iter().all(|event| event["data"]["status"] != "ready"), "{events:?}");
    rig.qmp.get("job-dismiss", json!({ "id": "full-a" }));
    assert_eq!(rig.bitmaps("a"), [("since".to_owned(), 131_072)]);
    assert_eq!(rig.bitmaps("b"), [("since".to_owned(), 0)]);
    for name in ["full-a", "full-b"] {
        rig.qmp.get("blockdev-del", json!({ "node-name": name }));
        check_bytes(&rig.path(name), &[(0, 7), (65_536, 0), (MIB / 2, 0)]);
    }
    // An incremental backup over it; the bitmap then has only later changes.
    let increment = rig.path("inc");
    rig.new_overlay("inc", "full-a");
    rig.add("inc");
    let asked = json!({ "sync": "incremental", "bitmap": "since" });
    rig.qmp.get("blockdev-backup", backup("a", "inc", asked));
    rig.qmp.events_until("inc", "null");
    assert_eq!(rig.bitmaps("a"), [("since".to_owned(), 0)]);
    rig.qmp.get("blockdev-del", json!({ "node-name": "inc" }));
    check_bytes(&increment, &[(0, 1), (512, 7), (MIB / 2, 1)]);
    let map = json_of(&qemu_img(&["map", "--output=json", str(&increment)]).success());
    let own = map.as_array().expect("a list").iter().filter(|extent| extent["depth"] == 0);
    let own: u64 = own.filter_map(|extent| extent["length"].as_u64()).sum();
    assert_eq!(own, 131_072, "{map}");
    // A cancelled backup leaves the bitmap as it was.
    assert_eq!(rig.connect("a").write(65_536, &[3; 512], 0), 0);
    rig.add("inc");
    let asked =
        json!({ "sync": "bitmap", "bitmap": "since", "bitmap-mode": "on-success", "speed": 1 });
    rig.qmp.get("blockdev-backup", backup("a", "inc", asked));
    rig.qmp.get("job-cancel", json!({ "id": "inc" }));
    rig.qmp.events_until("inc", "null");
    assert_eq!(rig.bitmaps("a"), [("since".to_owned(), 65_536)]);
}

#[test]
fn clients_read_disks_as_they_were_with_what_has_changed() {
    let mut rig = require!(Rig::start(&["a"]));
    let add = json!({ "node": "a", "name": "check1", "persistent": true });
    rig.qmp.get("block-dirty-bitmap-add", add);
    assert_eq!(rig.connect("a").write(MIB / 2, &[1; 512], 0), 0);
    rig.new_image("scratch");
    let mut node = rig.node("scratch");
    node["backing"] = "a".into();
    rig.qmp.get("blockdev-add", node);
    let export = json!({ "type": "nbd", "id": "s", "node-name": "scratch", "name": "a-then",
        "bitmaps": [{ "node": "a", "name": "copied" }] });
    let why = rig.qmp.refused("block-export-add", export.clone());
    assert!(why.contains("stands on 'a'"), "{why}");
    assert!(rig.qmp.refused("blockdev-del", json!({ "node-name": "a" })).contains("in use"));
    // As libvirt begins a pull backup.
    let bitmap = |name: &str, disabled: bool| {
        let data = json!({ "node": "a", "name": name, "persistent": true, "disabled": disabled });
        action("block-dirty-bitmap-add", data)
    };
    let merge =
        json!({ "node": "a", "target": "copied", "bitmaps": [{ "node": "a", "name": "check1" }] });
    let backup = json!({ "job-id": "pull", "device": "a", "target": "scratch", "sync": "none", "auto-dismiss": false });
    rig.transact(&[
        bitmap("check2", false),
        bitmap("copied", true),
        action("block-dirty-bitmap-merge", merge),
        action("blockdev-backup", backup),
    ]);
    rig.qmp.get("block-export-add", export);
    assert_eq!(rig.connect("a").write(0, &[2; 512], 0), 0);
    let mut then = rig.connect("a-then");
    assert_eq!(then.read(0, 512), Ok(vec![7; 512]));
    assert_eq!(then.read(MIB / 2, 512), Ok(vec![1; 512]));
    then.disconnect();
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},export=a-then,x-dirty-bitmap=qemu:dirty-bitmap:copied",
        str(&rig.nbd)
    );
    let map = qemu_img(&["map", "--output=json", "--image-opts", &image]).success();
    let map = json_of(&map);
    let dirty: Vec<_> =
        map.as_array().expect("a list").iter().filter(|one| one["data"] == false).collect();
    assert!(dirty.len() == 1 && dirty[0]["start"] == MIB / 2, "{map}");
    let jobs = rig.qmp.get("query-block-jobs", json!({}));
    assert_eq!((&jobs[0]["device"], &jobs[0]["type"]), (&json!("pull"), &json!("backup")));
    let why = rig.qmp.refused("blockdev-del", json!({ "node-name": "scratch" }));
    assert!(why.contains("in use"), "{why}");
    rig.qmp.get("block-export-del", json!({ "id": "s", "mode": "hard" }));
    rig.qmp.get("job-cancel", json!({ "id": "pull" }));
    rig.qmp.events_until("pull", "BLOCK_JOB_CANCELLED");
    rig.qmp.get("job-dismiss", json!({ "id": "pull" }));
    assert_eq!(rig.qmp.get("query-jobs", json!({})), json!([]));
    rig.qmp.get("blockdev-del", json!({ "node-name": "scratch" }));
    let counts = rig.bitmaps("a");
    assert!(counts.contains(&("check2".into(), 65_536)), "{counts:?}");
    assert!(counts.contains(&("copied".into(), 65_536)), "{counts:?}");
}

#[test]
fn a_mirror_is_a_copy_or_the_image_in_which_its_disk_goes_on() {
    let mut rig = require!(Rig::start(&["a"]));
    let mut client = rig.connect("a");
    assert_eq!(client.write(0, &[7; MIB as usize], 0), 0);
    rig.new_image("slow");
    rig.add("slow");
    let mirror =
        json!({ "job-id": "j", "device": "a", "target": "slow", "sync": "full", "speed": 1 });
    rig.qmp.get("blockdev-mirror", mirror);
    for (command, key) in [("job-complete", "id"), ("block-job-complete", "device")] {
        let why = rig.qmp.refused(command, json!({ key: "j" }));
        assert_eq!(why, "Job 'j' in state 'running' cannot accept command verb 'complete'");
    }
    rig.qmp.get("job-cancel", json!({ "id": "j" }));
    rig.qmp.events_until("j", "null");
    rig.qmp.get("blockdev-del", json!({ "node-name": "slow" }));
    for (name, end, job) in [
        ("copy", "block-job-cancel", json!({ "device": "copy" })),
        ("next", "block-job-complete", json!({ "device": "next" })),
    ] {
        rig.new_image(name);
        rig.add(name);
        let mirror = json!({ "job-id": name, "device": "a", "target": name, "sync": "full" });
        rig.qmp.get("blockdev-mirror", mirror);
        rig.qmp.events_until(name, "BLOCK_JOB_READY");
        let jobs = rig.qmp.get("query-block-jobs", json!({}));
        assert_eq!(jobs[0]["actively-synced"], json!(false));
        rig.qmp.get(end, job);
        let events = rig.qmp.events_until(name, "null");
        let told: Vec<_> = events.iter().map(|event| event["event"].as_str()).collect();
        assert!(told.contains(&Some("BLOCK_JOB_COMPLETED")), "{events:?}");
        let byte = if name == "copy" { 1 } else { 2 };
        assert_eq!(client.write(0, &[byte; 512], 0), 0);
    }
    // The copy is a separate disk, and the disk continues in the other node.
    rig.qmp.get("blockdev-del", json!({ "node-name": "copy" }));
    check_bytes(&rig.path("copy"), &[(0, 7)]);
    assert_eq!(rig.qmp.get("query-block-exports", json!({}))[1]["node-name"], "next");
    assert_eq!(client.read(0, 512), Ok(vec![2; 512]));
    rig.qmp.get("blockdev-del", json!({ "node-name": "a" }));
    // The name can be used for another node.
    rig.new_image("a2");
    let mut node = rig.node("a2");
    node["node-name"] = "a".into();
    rig.qmp.get("blockdev-add", node);
    drop(client);
    rig.qmp.get("block-export-del", json!({ "id": "a", "mode": "hard" }));
    for name in ["next", "a"] {
        rig.qmp.get("blockdev-del", json!({ "node-name": name }));
    }
    check_bytes(&rig.path("next"), &[(0, 2), (512, 7)]);
    let nodes = rig.nodes();
    assert_eq!(nodes, ["first", "first-file"]);
}

#[test]
fn a_job_waits_for_its_finalization_if_its_client_says_so() {
    let mut rig = require!(Rig::start(&["a"]));
    for name in ["t", "u"] {
        rig.new_image(name);
        rig.add(name);
    }
    let mut client = rig.connect("a");
    let wait = |rig: &mut Rig, target: &str| {
        let mirror = json!({ "job-id": "j", "device": "a", "target": target, "sync": "full", "auto-finalize": false });
        rig.qmp.get("blockdev-mirror", mirror);
        rig.qmp.events_until("j", "ready");
        assert!(rig.qmp.refused("job-finalize", json!({ "id": "j" })).contains("state 'ready'"));
        rig.qmp.get("job-complete", json!({ "id": "j" }));
        let jobs = rig.qmp.get("query-block-jobs", json!({}));
        let told = (&jobs[0]["status"], &jobs[0]["auto-finalize"]);
        assert_eq!(told, (&json!("pending"), &json!(false)));
        assert!(rig.qmp.events.iter().any(|event| event["event"] == "BLOCK_JOB_PENDING"));
        assert!(rig.qmp.refused("job-complete", json!({ "id": "j" })).contains("state 'pending'"));
    };
    wait(&mut rig, "u");
    // The disk stays in its image.
    rig.qmp.get("job-cancel", json!({ "id": "j" }));
    rig.qmp.events_until("j", "null");
    wait(&mut rig, "t");
    // The guest goes on, and the mirror gets its changes.
    assert_eq!(client.write(0, &[8; 512], 0), 0);
    rig.qmp.get("job-finalize", json!({ "id": "j" }));
    let late = json!({ "id": "j" });
    ["job-cancel", "job-finalize"].iter().for_each(|verb| _ = rig.qmp.refused(verb, late.clone()));
    rig.qmp.events_until("j", "null");
    assert_eq!(client.write(65_536, &[9; 512], 0), 0);
    let stream = json!({ "job-id": "j", "device": "t", "auto-finalize": false });
    assert!(rig.qmp.refused("block-stream", stream).contains("finalizes itself"));
    let Rig { scratch, _server: server, .. } = rig;
    server.stop();
    check_bytes(&scratch.path("t"), &[(0, 8), (512, 7), (65_536, 9)]);
    check_bytes(&scratch.path("a"), &[(65_536, 0)]);
}

#[test]
fn a_node_stands_on_another_one() {
    let mut rig = require!(Rig::start(&[]));
    rig.new_image("base");
    qemu_io("qcow2", &rig.path("base"), &["write -P 7 0 64k"]);
    rig.new_overlay("top", "base");
    rig.add("base");
    let mut node = rig.node("top");
    node["backing"] = "base".into();
    rig.qmp.get("blockdev-add", node.clone());
    rig.export("top", true);
    assert_eq!(rig.connect("top").read(0, 512), Ok(vec![7; 512]));
    let nodes = rig.nodes();
    assert!(
        ["top", "topf", "base", "basef"].iter().all(|name| nodes.iter().any(|node| node == name))
    );
    let export = json!({ "type": "nbd", "id": "x", "node-name": "base" });
    assert!(rig.qmp.refused("block-export-add", export).contains("use 'top'"));
    rig.qmp.get("block-export-del", json!({ "id": "top", "mode": "hard" }));
    rig.qmp.get("blockdev-del", json!({ "node-name": "top" }));
    // The disk works as before and can be written to.
    rig.export("base", true);
    assert_eq!(rig.connect("base").write(0, &[1; 512], 0), 0);
    // An image whose header names another backing file.
    rig.new_image("other");
    rig.add("other");
    node["backing"] = "other".into();
    node["file"]["node-name"] = "again".into();
    assert!(rig.qmp.refused("blockdev-add", node).contains("is another one"));
}

#[test]
fn a_node_that_cannot_stand_on_another_one_leaves_nothing() {
    let mut rig = require!(Rig::start(&[]));
    for name in ["low", "base"] {
        rig.new_image(name);
    }
    std::fs::create_dir(rig.path("sub")).expect("a folder");
    rig.new_overlay("base", "low");
    rig.new_overlay("sub/over", "../base");
    rig.add("low");
    let over = |name: &str, backing: &str, file: Value| json!({ "driver": "qcow2", "node-name": name, "backing": backing, "file": file });
    let file = |name: &str, path: &str| json!({ "driver": "file", "node-name": name, "filename": rig.scratch.path(path) });
    let (base, top) = (file("basef", "base"), file("overf", "sub/over"));
    rig.qmp.get("blockdev-add", over("base", "low", base));
    let nodes = rig.nodes();
    // An image names files below its own folder only.
    for _ in 0..2 {
        let why = rig.qmp.refused("blockdev-add", over("over", "base", top.clone()));
        assert!(why.contains("not below the image's own folder"), "{why}");
        assert_eq!(rig.nodes(), nodes);
    }
    rig.qmp.get("blockdev-add", top);
    rig.qmp.refused("blockdev-add", over("over", "base", json!("overf")));
    rig.qmp.get("blockdev-del", json!({ "node-name": "overf" }));
    rig.qmp.get("blockdev-del", json!({ "node-name": "base" }));
    rig.qmp.get("blockdev-del", json!({ "node-name": "low" }));
}

#[test]
fn images_are_made_and_nodes_reopened_as_tools_do_it() {
    let mut rig = require!(Rig::start(&["a"]));
    // As libvirt prepares an overlay.
    let path = rig.path("made");
    let file = json!({ "driver": "file", "filename": path, "size": 0 });
    rig.qmp.get("blockdev-create", json!({ "job-id": "c1", "options": file }));
    rig.qmp.events_until("c1", "concluded");
    rig.qmp.get("job-dismiss", json!({ "id": "c1" }));
    let file = json!({ "driver": "file", "node-name": "madef", "filename": path });
    rig.qmp.get("blockdev-add", file);
    let image = json!({ "driver": "qcow2", "file": "madef", "size": MIB, "cluster-size": 4096,
        "backing-file": rig.path("a"), "backing-fmt": "qcow2" });
    rig.qmp.get("blockdev-create", json!({ "job-id": "c2", "options": image.clone() }));
    let taken = json!({ "job-id": "c2", "options": image });
    assert_eq!(rig.qmp.refused("blockdev-create", taken), "Job ID 'c2' already in use");
    rig.qmp.events_until("c2", "concluded");
    let jobs = rig.qmp.get("query-jobs", json!({}));
    assert_eq!(jobs[0]["error"], Value::Null, "{jobs}");
    rig.qmp.get("job-dismiss", json!({ "id": "c2" }));
    let node = json!({ "driver": "qcow2", "node-name": "made", "file": "madef", "backing": null });
    rig.qmp.get("blockdev-add", node);
    let snapshot = action("blockdev-snapshot", json!({ "node": "a", "overlay": "made" }));
    rig.transact(&[snapshot]);
    assert_eq!(rig.connect("a").read(0, 512), Ok(vec![7; 512]));
    let info = json_of(&qemu_img(&["info", "-U", "--output=json", str(&path)]).success());
    assert_eq!(info["cluster-size"], 4096);
    // A creation that fails.
    let image = json!({ "driver": "qcow2", "file": "none", "size": MIB });
    rig.qmp.get("blockdev-create", json!({ "job-id": "c3", "options": image }));
    rig.qmp.events_until("c3", "concluded");
    let jobs = rig.qmp.get("query-jobs", json!({}));
    assert_eq!(jobs[0]["error"], "Cannot find device='none' nor node-name='none'");
    assert_eq!(rig.qmp.get("query-block-jobs", json!({})), json!([]));
    // A disk with a writable export stays writable.
    let reopen = |read_only: bool| {
        let options = json!({ "driver": "qcow2", "node-name": "made", "file": "madef", "read-only": read_only });
        json!({ "options": [options] })
    };
    let why = rig.qmp.refused("blockdev-reopen", reopen(true));
    assert_eq!(why, "Read-only block node 'made' cannot support read-write users");
    assert_eq!(rig.connect("a").write(0, &[1; 512], 0), 0);
    rig.qmp.get("block-export-del", json!({ "id": "a", "mode": "hard" }));
    rig.qmp.get("blockdev-reopen", reopen(true));
    let export = json!({ "type": "nbd", "id": "a", "node-name": "made", "writable": true });
    let why = rig.qmp.refused("block-export-add", export.clone());
    assert_eq!(why, "Cannot export read-only node as writable");
    rig.qmp.get("blockdev-reopen", reopen(false));
    rig.qmp.get("block-export-add", export);
    assert_eq!(rig.connect("made").write(0, &[1; 512], 0), 0);
    let options =
        json!({ "driver": "qcow2", "node-name": "made", "file": "madef", "discard": "unmap" });
    let why = rig.qmp.refused("blockdev-reopen", json!({ "options": [options] }));
    assert!(why.contains("'discard'"), "{why}");
}

#[test]
fn the_nbd_server_listens_before_and_after_it_has_exports() {
    let mut rig = require!(Rig::start(&[]));
    rig.new_image("a");
    rig.add("a");
    let greet = |rig: &Rig| drop(Greeted::new(&Address::Unix(rig.nbd.clone())));
    greet(&rig);
    rig.export("a", false);
    rig.qmp.get("block-export-del", json!({ "id": "a" }));
    greet(&rig);
    rig.qmp.get("nbd-server-stop", json!({}));
    assert!(!rig.nbd.exists());
}

#[test]
fn a_write_threshold_is_told_once_when_an_image_uses_more() {
    let mut rig = require!(Rig::start(&["a"]));
    let set =
        |node: &str, threshold: u64| json!({ "node-name": node, "write-threshold": threshold });
    let told = |rig: &mut Rig, node: &str| {
        let nodes = rig.qmp.get("query-named-block-nodes", json!({}));
        let mut nodes = nodes.as_array().expect("a list").iter();
        let node = nodes.find(|one| one["node-name"] == node).expect("it is there");
        node["write_threshold"].as_u64().expect("a number")
    };
    // The image has six clusters: its metadata, and the data cluster with 7.
    let threshold = 8 << 16;
    rig.qmp.get("block-set-write-threshold", set("af", threshold));
    assert_eq!((told(&mut rig, "af"), told(&mut rig, "a")), (threshold, 0));
    let mut client = rig.connect("a");
    assert_eq!(client.write(0, &[1; 1 << 16], 0), 0, "in place");
    rig.qmp.events.clear();
    assert_eq!(client.write(1 << 17, &[1; 4 << 16], 0), 0);
    while rig.qmp.events.is_empty() {
        let event = rig.qmp.receive().expect("an event");
        rig.qmp.events.push(event);
    }
    let event = &rig.qmp.events[0];
    assert_eq!(event["event"], "BLOCK_WRITE_THRESHOLD");
    let data =
        json!({ "node-name": "af", "amount-exceeded": 2 << 16, "write-threshold": threshold });
    assert_eq!(event["data"], data);
    assert_eq!(told(&mut rig, "af"), 0, "it is told once");
    rig.qmp.get("block-set-write-threshold", set("af", 64 * MIB));
    rig.qmp.get("block-set-write-threshold", set("af", 0));
    assert_eq!(told(&mut rig, "af"), 0);
    assert!(rig.qmp.refused("block-set-write-threshold", set("a", 1)).contains("below the image"));
    assert!(rig.qmp.refused("block-set-write-threshold", set("first-file", 1)).contains("qcow2"));
}
