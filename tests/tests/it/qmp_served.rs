//! `serve --qmp`: together with the control socket, for clients that only read, at the end of the
//! server and over an upgrade.

use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::str;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::{Scratch, Serve};
use serde_json::{Value, json};

use crate::qmp::{serve, wait_until};

const MIB: u64 = 1 << 20;
const EPERM: u32 = 1;

#[test]
fn what_qmp_adds_is_served_and_the_control_socket_knows_it() {
    let scratch = Scratch::new();
    let (image, second) = (scratch.image("first", MIB), scratch.image("second", MIB));
    let [socket, control, nbd, vu] =
        ["qmp", "control", "more", "vu"].map(|name| scratch.socket(name));
    let server = Serve::new(&scratch, image.path())
        .option("--qmp", &socket)
        .option("--control", &control)
        .start();
    let (mut qmp, mut control) = (Qmp::connect(&socket), Control::connect(&control));
    let cache = json!({ "direct": true });
    let node =
        json!({ "driver": "file", "node-name": "f", "filename": second.path(), "cache": cache });
    qmp.get("blockdev-add", node.clone());
    assert_eq!(qmp.get("blockdev-del", json!({ "node-name": "f" })), json!({}));
    qmp.get("blockdev-add", node);
    qmp.get("blockdev-add", json!({ "driver": "raw", "node-name": "s", "file": "f" }));
    let disks = control.get("disk.list", json!({}));
    assert_eq!((&disks[1]["disk"], &disks[1]["cache"]), (&json!("s"), &json!("none")));
    assert!(qmp.refused("blockdev-del", json!({ "node-name": "f" })).contains("f is in use"));
    let taken = json!({ "addr": { "type": "unix", "data": { "path": scratch.socket("nbd") } } });
    assert!(qmp.refused("nbd-server-start", taken).contains("Address already in use"));
    qmp.get("nbd-server-start", json!({ "addr": { "type": "unix", "data": { "path": nbd } } }));
    let export =
        json!({ "type": "nbd", "id": "e", "node-name": "s", "name": "x", "writable": true });
    qmp.get("block-export-add", export);
    let addr = json!({ "type": "unix", "path": vu });
    let export = json!({ "type": "vhost-user-blk", "id": "v", "node-name": "s", "addr": addr, "writable": true });
    qmp.get("block-export-add", export);
    let exports = control.get("export.list", json!({}));
    assert_eq!(exports.as_array().map(Vec::len), Some(3));
    assert_eq!(exports[1]["read-only"], Value::Null);
    let mut client = Client::at(&nbd, "x");
    assert_eq!(client.write(0, &[7; 512], 0), 0);
    let why = qmp.refused("block-export-del", json!({ "id": "e" }));
    assert_eq!(why, "export 'e' still in use");
    assert_eq!(qmp.refused("blockdev-del", json!({ "node-name": "s" })), "Node s is in use");
    let export = json!({ "type": "nbd", "id": "r", "node-name": "s", "name": "r" });
    qmp.get("block-export-add", export);
    let mut reader = Client::at(&nbd, "r");
    assert_eq!(reader.write(0, &[8; 512], 0), EPERM);
    reader.disconnect();
    let stats = qmp.get("query-blockstats", json!({ "query-nodes": true }));
    assert_eq!(stats[1]["stats"]["wr_bytes"], 512);
    qmp.get("block-export-del", json!({ "id": "e", "mode": "hard" }));
    assert!(client.receive().is_err(), "its client ends");
    // The removal of an export by the control socket is an event, too.
    control.get("export.remove", json!({ "export": vu }));
    let event = std::iter::from_fn(|| qmp.receive()).find(|event| event["data"]["id"] == "v");
    assert_eq!(event.expect("it is told")["event"], "BLOCK_EXPORT_DELETED");
    qmp.get("nbd-server-stop", json!({}));
    assert!(!nbd.exists());
    qmp.get("blockdev-del", json!({ "node-name": "s" }));
    // The file is a separate node again.
    let listed = qmp.get("query-named-block-nodes", json!({}));
    let names: Vec<_> =
        listed.as_array().expect("a list").iter().map(|node| &node["node-name"]).collect();
    assert_eq!(names, ["f", "first", "first-file"]);
    qmp.get("blockdev-del", json!({ "node-name": "f" }));
    assert_eq!(second.bytes(0, 512), [7; 512]);
    server.stop();
}

#[test]
fn a_read_only_socket_has_only_commands_that_ask() {
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("first", MIB), scratch.socket("qmp"));
    let option = format!("{},read-only", str(&socket));
    let server = Serve::new(&scratch, image.path()).option("--qmp", option).start();
    let mut qmp = Qmp::connect(&socket);
    let told = qmp.get("query-commands", json!({})).to_string();
    assert!(told.contains("query-named-block-nodes") && !told.contains("quit"), "{told}");
    for command in ["quit", "blockdev-add", "block_resize", "block-export-add"] {
        let answer = qmp.ask(&json!({ "execute": command }).to_string());
        assert_eq!(answer["error"]["class"], "CommandNotFound", "{command}");
    }
    qmp.get("query-named-block-nodes", json!({}));
    server.stop();
}

#[test]
fn quit_ends_the_server_as_a_signal_does() {
    let scratch = Scratch::new();
    let (mut server, mut qmp) = serve(&scratch);
    assert_eq!(qmp.get("quit", json!({})), json!({}));
    assert_eq!(qmp.receive(), None);
    assert!(server.wait(Duration::from_secs(30)).success());
    assert!(!scratch.socket("qmp").exists());
}

#[test]
fn an_upgrade_ends_clients_which_find_the_next_process_at_the_same_socket() {
    let scratch = Scratch::new();
    let image = scratch.image("first", MIB);
    let [socket, control] = ["qmp", "control"].map(|name| scratch.socket(name));
    let server = Serve::new(&scratch, image.path())
        .option("--qmp", &socket)
        .option("--control", &control)
        .start();
    let mut qmp = Qmp::connect(&socket);
    let mut guest = Client::open(&server.address());
    Control::connect(&control).get("server.upgrade", json!({}));
    assert_eq!(qmp.receive(), None, "it is the old process's client");
    assert_eq!(guest.write(0, &[7; 512], 0), 0);
    wait_until("the next process listens", || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    let mut qmp = Qmp::connect(&socket);
    assert_eq!(qmp.get("query-block-exports", json!({}))[0]["node-name"], "first");
    qmp.get("quit", json!({}));
    wait_until("it ends", || !socket.exists());
}
