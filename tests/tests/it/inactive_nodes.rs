//! Inactive nodes: two daemons, ours or QEMU's, hand an image to each other.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_tests::image_tool::{qemu_img, qemu_io, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::{Scratch, need, require, run, tool};
use serde_json::{Value, json};

use crate::storage_daemon::{Daemon, NAME, at_stdio, folder, ours, words};

const EPERM: u32 = 1;
const READ_ONLY_FLAG: u16 = 2;

#[test]
fn nodes_become_active_and_inactive_with_the_words_of_qemu() {
    require!(need::tools(&[NAME, "qemu-img"]));
    let scratch = Scratch::new();
    let folder = folder(&scratch, "images");
    let line = words(
        &[
            "--blockdev",
            "file,node-name=f,filename=DIR/d,active=off",
            "--blockdev",
            "file,node-name=r,filename=DIR/r,active=off,read-only=on",
            "--nbd-server",
            "addr.type=unix,addr.path=DIR/s",
        ],
        &folder,
    );
    let export = |id: &str, node: &str, more: &str| {
        format!(
            "{{'execute':'block-export-add','arguments':{{'type':'nbd','id':'{id}','name':'{id}','node-name':'{node}'{more}}}}}"
        )
    };
    let set = |given: &str| format!("{{'execute':'blockdev-set-active','arguments':{{{given}}}}}");
    let nodes = "{'execute':'query-named-block-nodes','arguments':{'flat':true}}".to_owned();
    let add = |more: &str| {
        format!(
            "{{'execute':'blockdev-add','arguments':{{'driver':'qcow2','node-name':'d','file':'f'{more}}}}}"
        )
    };
    let allowed = ",'writable':true,'allow-inactive':true";
    let lines = [
        "{'execute':'qmp_capabilities'}".to_owned(),
        add(""),
        add(",'active':false"),
        set("'node-name':'zz','active':true"),
        set("'node-name':'d'"),
        "{'execute':'block-export-add','arguments':{'type':'vhost-user-blk','id':'v','node-name':'d',\
         'addr':{'type':'unix','path':'/v'},'allow-inactive':true}}"
            .to_owned(),
        export("e", "d", allowed),
        set("'node-name':'f','active':false"),
        nodes.clone(),
        set("'node-name':'d','active':true"),
        set("'node-name':'d','active':true"),
        nodes.clone(),
        set("'node-name':'f','active':false"),
        export("w", "d", ",'writable':true"),
        set("'active':false"),
        set("'node-name':'d','active':false"),
        "{'execute':'block-export-del','arguments':{'id':'w'}}".to_owned(),
        set("'active':false"),
        nodes.clone(),
        // An export without `allow-inactive` needs an active node.
        export("x", "d", ""),
        nodes.clone(),
        set("'node-name':'r','active':true"),
        nodes,
        "{'execute':'block-export-del','arguments':{'id':'x'}}".to_owned(),
        "{'execute':'block-export-del','arguments':{'id':'e'}}".to_owned(),
        "{'execute':'quit'}".to_owned(),
    ];
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let [own, theirs] = [ours(&scratch), tool(NAME)].map(|program| {
        let mut answers = at_stdio(program, &line, &lines);
        for answer in &mut answers {
            let nodes = answer["return"].as_array().cloned().into_iter().flatten();
            let told = |node: Value| json!([node["node-name"], node["active"], node["ro"]]);
            let mut told: Vec<Value> = nodes.map(told).collect();
            told.sort_by_key(Value::to_string);
            if !told.is_empty() {
                answer["return"] = told.into();
            }
        }
        answers
    });
    assert_eq!(own, theirs);
}

/// A daemon with an image, and an export of it that allows an inactive node.
struct Side {
    daemon: Daemon,
    qmp: Qmp,
    nbd: PathBuf,
}

impl Side {
    fn start(scratch: &Scratch, program: Command, name: &str, active: &str, image: &Path) -> Self {
        let [qmp, nbd] = ["qmp", "nbd"].map(|socket| scratch.socket(&format!("{name}-{socket}")));
        let line = [
            "--blockdev",
            &format!("file,node-name=f,filename=DIR,active={active}"),
            "--blockdev",
            &format!("qcow2,node-name=d,file=f,active={active}"),
            "--nbd-server",
            &format!("addr.type=unix,addr.path={}", str(&nbd)),
            "--export",
            "nbd,id=e,node-name=d,writable=on,allow-inactive=on",
            "--chardev",
            &format!("socket,id=c,path={},server=on,wait=off", str(&qmp)),
            "--monitor",
            "c",
        ];
        let pid = scratch.path(&format!("{name}-pid"));
        let daemon = Daemon::start(program, &words(&line, image), &pid);
        Self { daemon, qmp: Qmp::connect(&qmp), nbd }
    }

    fn set(&mut self, is_active: bool) {
        self.qmp.get("blockdev-set-active", json!({ "active": is_active }));
    }
}

#[test]
fn an_image_goes_from_one_daemon_to_another_and_back() {
    require!(need::tools(&[NAME, "qemu-img", "qemu-io"]));
    for (is_ours, name) in [([true, true], "both"), ([true, false], "to"), ([false, true], "from")]
    {
        let scratch = Scratch::new();
        let image = folder(&scratch, name).join("d");
        let program = |is_ours: bool| if is_ours { ours(&scratch) } else { tool(NAME) };
        let mut one = Side::start(&scratch, program(is_ours[0]), "one", "on", &image);
        let mut at_one = Client::at(&one.nbd, "d");
        assert_eq!(at_one.write(0, &[1; 512], 0), 0);
        let mut two = Side::start(&scratch, program(is_ours[1]), "two", "off", &image);
        // A client connects before the image is handed over, and has read the old data.
        let mut at_two = Client::at(&two.nbd, "d");
        assert_eq!(at_two.flags() & READ_ONLY_FLAG, 0, "{name}");
        assert!(at_two.read(0, 1 << 16).is_ok(), "{name}");
        assert_eq!(at_two.write(0, &[9; 512], 0), EPERM, "{name}");
        let taken = two.qmp.refused("blockdev-set-active", json!({ "active": true }));
        assert!(taken.contains("lock"), "{name}: {taken}");
        // Writes new clusters, which the other daemon's metadata does not have yet.
        assert_eq!(at_one.write(1 << 19, &[2; 512], 0), 0);
        one.set(false);
        assert_eq!(at_one.read(1 << 19, 512), Ok(vec![2; 512]), "{name}");
        assert_eq!(at_one.write(0, &[9; 512], 0), EPERM, "{name}");
        two.set(true);
        assert_eq!(at_two.read(0, 512), Ok(vec![1; 512]), "{name}");
        assert_eq!(at_two.read(1 << 19, 512), Ok(vec![2; 512]), "{name}");
        assert_eq!(at_two.write(0, &[3; 512], 0), 0, "{name}");
        assert_eq!(at_two.write(3 << 18, &[4; 512], 0), 0, "{name}");
        let taken = one.qmp.refused("blockdev-set-active", json!({ "active": true }));
        assert!(taken.contains("lock"), "{name}: {taken}");
        two.set(false);
        one.set(true);
        for (offset, byte) in [(0, 3), (3 << 18, 4), (1 << 19, 2)] {
            assert_eq!(at_one.read(offset, 512), Ok(vec![byte; 512]), "{name}");
        }
        assert_eq!(at_one.write(0, &[5; 512], 0), 0, "{name}");
        drop((at_one, at_two));
        [one, two].into_iter().for_each(|side| side.daemon.stop());
        qemu_img(&["check", "-q", "-f", "qcow2", str(&image)]).success();
        let reads = ["read -P 5 0 512", "read -P 2 512k 512", "read -P 4 768k 512"];
        qemu_io("qcow2", &image, &reads);
    }
}

#[test]
fn an_inactive_disk_is_neither_changed_nor_handed_to_a_job() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let image = folder(&scratch, "images").join("d");
    let before = std::fs::read(&image).expect("an image");
    let mut side = Side::start(&scratch, ours(&scratch), "one", "off", &image);
    let overlay = scratch.path("overlay");
    for (command, arguments) in [
        ("block_resize", json!({ "node-name": "d", "size": 2 << 20 })),
        ("block-stream", json!({ "device": "d", "job-id": "j" })),
        (
            "blockdev-snapshot-sync",
            json!({ "node-name": "d", "snapshot-file": overlay, "snapshot-node-name": "o" }),
        ),
        ("blockdev-snapshot-internal-sync", json!({ "device": "d", "name": "s" })),
        (
            "block-dirty-bitmap-add",
            json!({ "node": "d", "name": "b", "persistent": true, "granularity": 65536 }),
        ),
    ] {
        let why = side.qmp.refused(command, arguments);
        assert!(why.contains("inactive"), "{command}: {why}");
    }
    let file = json!({ "driver": "qcow2", "node-name": "d", "file": "f", "active": false, "read-only": true });
    let why = side.qmp.refused("blockdev-reopen", json!({ "options": [file] }));
    assert!(why.contains("inactive"), "{why}");
    let file = json!({ "driver": "qcow2", "node-name": "d", "file": "f" });
    let why = side.qmp.refused("blockdev-reopen", json!({ "options": [file] }));
    assert!(why.contains("blockdev-set-active"), "{why}");
    assert!(std::fs::read(&image).expect("an image") == before, "it was changed");
    // A transient bitmap misses changes that another program makes meanwhile, so the whole disk
    // counts as changed.
    side.set(true);
    side.qmp.get("block-dirty-bitmap-add", json!({ "node": "d", "name": "b" }));
    side.set(false);
    side.set(true);
    let nodes = side.qmp.get("query-named-block-nodes", json!({ "flat": true }));
    assert_eq!(nodes[0]["dirty-bitmaps"][0]["count"], 1 << 20);
    // An overlay of the active disk is locked, too.
    let snapshot = json!({ "node-name": "d", "snapshot-file": overlay, "snapshot-node-name": "o" });
    side.qmp.get("blockdev-snapshot-sync", snapshot);
    run(tool("qemu-io").args(["-f", "qcow2", "-c", "write 0 512", str(&overlay)])).failure("lock");
    side.daemon.stop();
}

/// Acknowledged writes of a killed daemon are there when the same command line is started again,
/// although it opens the file as a raw node first.
#[test]
fn a_daemon_that_was_killed_is_started_again_by_the_same_line() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let image = folder(&scratch, "images").join("d");
    let side = Side::start(&scratch, ours(&scratch), "one", "on", &image);
    let mut client = Client::at(&side.nbd, "d");
    let places = || (0..16_u64).map(|index| index << 16);
    for at in places() {
        assert_eq!(client.write(at, &[7; 512], 0), 0);
    }
    // The daemon is killed.
    drop(side.daemon);
    for name in ["one-pid", "one-nbd", "one-qmp"] {
        let _ = std::fs::remove_file(scratch.path(name));
    }
    let side = Side::start(&scratch, ours(&scratch), "one", "on", &image);
    let mut client = Client::at(&side.nbd, "d");
    for at in places() {
        assert_eq!(client.read(at, 512), Ok(vec![7; 512]), "at {at}");
    }
    side.daemon.stop();
    qemu_img(&["check", "-q", "-f", "qcow2", str(&image)]).success();
}

/// A disk does not become active if another file has its name now.
#[test]
fn another_image_under_the_name_of_an_inactive_one_is_refused() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = folder(&scratch, "images").join("d");
    let mut side = Side::start(&scratch, ours(&scratch), "one", "on", &image);
    side.set(false);
    let aside = image.with_file_name("aside");
    std::fs::rename(&image, &aside).expect("one folder");
    std::fs::copy(&aside, &image).expect("a copy");
    let why = side.qmp.refused("blockdev-set-active", json!({ "active": true }));
    assert!(why.contains("is another file"), "{why}");
    std::fs::rename(&aside, &image).expect("one folder");
    side.set(true);
    side.daemon.stop();
}

/// A backing node of an inactive disk stays inactive when the node above it is removed: another
/// daemon can use its image.
#[test]
fn the_nodes_below_an_inactive_one_stay_inactive() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = folder(&scratch, "images").join("d");
    let overlay = image.with_file_name("over");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "d", "-F", "qcow2", str(&overlay)]).success();
    let mut side = Side::start(&scratch, ours(&scratch), "one", "on", &image);
    side.qmp.get("block-export-del", json!({ "id": "e" }));
    side.qmp
        .get("blockdev-add", json!({ "driver": "file", "node-name": "of", "filename": overlay }));
    side.qmp.get(
        "blockdev-add",
        json!({ "driver": "qcow2", "node-name": "o", "file": "of", "backing": "d" }),
    );
    side.set(false);
    side.qmp.get("blockdev-del", json!({ "node-name": "o" }));
    let nodes = side.qmp.get("query-named-block-nodes", json!({ "flat": true }));
    let active = nodes.as_array().expect("a list").iter().filter(|node| node["active"] == true);
    assert_eq!(active.count(), 0, "{nodes}");
    run(tool("qemu-io").args(["-f", "qcow2", "-c", "write 0 512", str(&image)])).success();
    side.daemon.stop();
}
