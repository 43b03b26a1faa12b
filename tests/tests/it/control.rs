//! Disks and exports that are added and removed while a server runs, by `blockhouse ctl` and by
//! JSON-RPC: other disks are not affected, a failed request changes nothing, and the lists are
//! true.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::generated::control_schema;
use blockhouse_tests::guest::{Guest, LONG, content};
use blockhouse_tests::nbd::{Address, Client};
use blockhouse_tests::schema::Schema;
use blockhouse_tests::{
    Outcome, Scratch, Serve, Server, eventually,
    image_tool::{command, new_image, qemu_img, str},
    nbd_uri,
};
use blockhouse_vhost_user::driver::Options;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const FAILED: i64 = -32000;
const INVALID_PARAMS: i64 = -32602;

/// A server with one raw disk, `first`, at the socket `nbd`.
fn serve(scratch: &Scratch) -> (Server, Control) {
    let image = scratch.image("first", MIB);
    Serve::new(scratch, image.path()).start_with_control(scratch)
}

fn ctl(scratch: &Scratch, words: &[&str]) -> Outcome {
    command(&[&["ctl", str(&scratch.socket("control"))], words].concat())
}

fn names(list: &Value, key: &str) -> Vec<String> {
    let list = list.as_array().expect("a list").iter();
    list.map(|one| one[key].as_str().expect("a name").to_owned()).collect()
}

/// Writes and reads back until `stop`, like a guest that must notice nothing. Returns how often.
fn go_on(address: &Address, stop: &AtomicBool) -> u64 {
    let mut client = Client::open(address);
    let mut count = 0_u64;
    while !stop.load(Ordering::SeqCst) || count == 0 {
        count += 1;
        let bytes = count.to_be_bytes().repeat(512);
        assert_eq!(client.write(count % 128 * 4096, &bytes, 0), 0);
        assert_eq!(client.read(count % 128 * 4096, 4096), Ok(bytes));
    }
    client.disconnect();
    count
}

#[test]
fn disks_and_exports_come_and_go_beside_one_that_notices_nothing() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let (nbd, vu) = (scratch.socket("second"), scratch.socket("vu"));
    let path = new_image(&scratch, "second.qcow2", "4M");
    let (stop, address) = (AtomicBool::new(false), server.address());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| go_on(&address, &stop));
        for round in 1..=5 {
            let exports = [nbd_uri("b", &nbd), str(&vu).to_owned()];
            let opened = control.get("disk.open", json!({ "path": path, "exports": exports }));
            assert_eq!(opened["disk"], "second.qcow2");
            let mut client = Client::at(&nbd, "b");
            let mut guest = Guest::connect(&vu, Options::default());
            guest.write(0, 1, round);
            assert_eq!(client.read(4096, 4096), Ok(content(round)));
            let listed = control.get("export.list", json!({}));
            assert_eq!(names(&listed, "export")[1..], exports);
            assert_eq!((&listed[1]["clients"], &listed[1]["disk"]), (&json!(1), &opened["disk"]));
            let close = json!({ "disk": "second.qcow2" });
            control.refused("disk.close", close, FAILED, &["is served at", "force"]);
            control.get("export.remove", json!({ "export": exports[0] }));
            assert!(client.receive().is_err(), "its clients end");
            assert!(!nbd.exists() && vu.exists(), "the socket of its last export is gone");
            guest.write(0, 2, round);
            control.get("disk.close", json!({ "disk": "second.qcow2", "force": true }));
            assert!(!vu.exists() && !guest.is_connected());
            // The image is closed, and holds the written bytes.
            qemu_img(&["check", str(&path)]).success();
        }
        stop.store(true, Ordering::SeqCst);
        assert!(first.join().expect("no error") > 5);
    });
    assert_eq!(names(&control.get("disk.list", json!({})), "disk"), ["first"]);
    assert_eq!(names(&control.get("export.list", json!({})), "disk"), ["first"]);
    server.stop();
}

#[test]
fn an_export_of_another_disk_keeps_a_socket_open() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let (socket, second) = (scratch.socket("nbd"), scratch.image("second", MIB));
    let export = nbd_uri("second", &socket);
    control.get("disk.open", json!({ "path": second.path(), "exports": [&export] }));
    let mut client = Client::at(&socket, "second");
    assert_eq!(client.write(0, &[7; 512], 0), 0);
    control.get("export.remove", json!({ "export": nbd_uri("", &socket) }));
    assert_eq!(client.read(0, 512), Ok(vec![7; 512]), "only the clients of one export end");
    assert!(socket.exists());
    control.get("disk.close", json!({ "disk": "first" }));
    control.get("export.remove", json!({ "export": export }));
    assert!(!socket.exists());
    assert_eq!(second.bytes(0, 512), [7; 512]);
    // With port 0 the kernel chooses a port, which the answer names.
    let added = json!({ "disk": "second", "export": "nbd://127.0.0.1:0/x" });
    let added = control.get("export.add", added)["export"].as_str().map(str::to_owned);
    let added = added.expect("a URI");
    qemu_img(&["info", &added]).success();
    control.get("export.remove", json!({ "export": added }));
    server.stop();
}

#[test]
fn what_fails_leaves_all_as_it_was() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let (taken, free) = (scratch.socket("nbd"), scratch.socket("free"));
    let second = scratch.image("second", MIB);
    let before = control.get("disk.list", json!({}));
    let open = |extra: Value| {
        let mut params = json!({ "path": second.path() });
        params.as_object_mut().expect("an object").extend(extra.as_object().expect("too").clone());
        params
    };
    let missing = json!({ "path": scratch.path("missing") });
    control.refused("disk.open", missing, FAILED, &["missing", "No such file", "check the path"]);
    let again = json!({ "path": scratch.path("first"), "name": "again" });
    control.refused("disk.open", again, FAILED, &["locked"]);
    control.refused("disk.open", open(json!({ "name": "first" })), FAILED, &["already"]);
    control.refused("disk.open", json!({ "path": "second" }), INVALID_PARAMS, &["whole path"]);
    control.refused("disk.open", open(json!({ "cache": "x" })), INVALID_PARAMS, &["no cache mode"]);
    // The first of its exports is possible, the second is not.
    let exports = json!({ "exports": [nbd_uri("a", &free), str(&taken)] });
    control.refused("disk.open", open(exports), FAILED, &["running server listens there"]);
    assert!(!free.exists() && taken.exists());
    let same = json!({ "disk": "first", "export": nbd_uri("", &taken) });
    control.refused("export.add", same, FAILED, &["exists already"]);
    control.refused(
        "export.remove",
        json!({ "export": nbd_uri("x", &taken) }),
        FAILED,
        &["export.list"],
    );
    control.refused("disk.close", json!({ "disk": "x" }), FAILED, &["\"x\"", "disk.list"]);
    for (format, option) in [
        ("raw", json!({ "backing-format": "raw" })),
        ("raw", json!({ "data-file-raw": true })),
        ("qcow2", json!({ "backing-format": "raw" })),
        ("qcow2", json!({ "data-file-raw": true })),
    ] {
        let mut image = json!({ "path": scratch.path("new"), "format": format, "size": MIB });
        image.as_object_mut().expect("an object").extend(option.as_object().expect("too").clone());
        control.refused("image.create", image, INVALID_PARAMS, &[]);
    }
    let size = |size: u64| json!({ "disk": "first", "size": size });
    control.refused("disk.resize", size(512), FAILED, &["would be lost", "shrink"]);
    control.refused("disk.resize", size(MIB + 1), FAILED, &["512"]);
    let shrink = json!({ "disk": "first", "size": 512, "shrink": true });
    control.refused("disk.resize", shrink, FAILED, &["while it is served at", "exports"]);
    let nothing = json!({ "disk": "first", "name": "s" });
    control.refused("snapshot.create", nothing, FAILED, &["raw image has no snapshots"]);
    // Other programs write to the file system, so its free space is not compared.
    let without_room = |mut disks: Value| {
        disks[0]["room-left"].take();
        disks
    };
    let after = control.get("disk.list", json!({}));
    assert_eq!(without_room(after), without_room(before));
    server.assert_serves();
    // A disk that was opened and closed again can be opened.
    control.get("disk.open", open(json!({ "exports": [nbd_uri("a", &free)] })));
    server.stop();
    assert!(!free.exists() && !taken.exists());
}

#[test]
fn guests_and_new_clients_see_another_size() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let (nbd, vu) = (scratch.socket("second"), scratch.socket("vu"));
    for (format, name) in [("raw", "grow.img"), ("qcow2", "grow.qcow2")] {
        let path = scratch.path(name);
        let exports = [nbd_uri("", &nbd), str(&vu).to_owned()];
        let new = json!({ "path": path, "create": "1M", "exports": exports });
        assert_eq!(control.get("disk.open", new)["size"], MIB, "{format}");
        let mut guest = Guest::connect(&vu, Options::default());
        guest.write(0, 255, 1);
        let grown = control.get("disk.resize", json!({ "disk": name, "size": 4 * MIB }));
        assert_eq!(grown, json!({ "old-size": MIB, "size": 4 * MIB }));
        assert_eq!(guest.driver.capacity().expect("a size"), 4 * MIB);
        guest.write(0, 1023, 2);
        let mut client = Client::at(&nbd, "");
        assert_eq!(client.read(255 * 4096, 4096), Ok(content(1)));
        assert_eq!(client.read(1023 * 4096, 4096), Ok(content(2)));
        client.disconnect();
        for export in exports {
            control.get("export.remove", json!({ "export": export }));
        }
        let shrink = json!({ "disk": name, "size": 2 * MIB, "shrink": true });
        assert_eq!(control.get("disk.resize", shrink)["size"], 2 * MIB);
        control.get("disk.close", json!({ "disk": name }));
        let info = qemu_img(&["info", "--output=json", "-f", format, str(&path)]).success();
        let info: Value = serde_json::from_str(&info.stdout).expect("JSON");
        assert_eq!(info["virtual-size"], 2 * MIB);
        std::fs::remove_file(&path).expect("it is there");
    }
    server.stop();
}

#[test]
fn who_subscribes_is_told_in_order() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let mut all = Control::connect(&scratch.socket("control"));
    let mut closings = Control::connect(&scratch.socket("control"));
    all.get("event.subscribe", json!({}));
    closings.get("event.subscribe", json!({ "events": ["disk.closed"] }));
    let wrong = json!({ "events": ["disk.melted"] });
    control.refused("event.subscribe", wrong, INVALID_PARAMS, &["disk.melted", "disk.closed"]);
    let (socket, second) = (scratch.socket("second"), scratch.image("second", MIB));
    let export = nbd_uri("b", &socket);
    control.get("disk.open", json!({ "path": second.path(), "exports": [&export] }));
    let client = Client::at(&socket, "b");
    assert_eq!(all.event(), json!({ "event": "disk.opened", "disk": "second" }));
    let added = json!({ "event": "export.added", "disk": "second", "export": export });
    assert_eq!(all.event(), added);
    let came = all.event();
    assert_eq!((&came["event"], &came["export"]), (&json!("client.came"), &json!(export)));
    client.disconnect();
    assert_eq!(all.event()["event"], "client.left");
    control.get("disk.close", json!({ "disk": "second", "force": true }));
    assert_eq!(all.event()["event"], "export.removed");
    let closed = json!({ "event": "disk.closed", "disk": "second" });
    assert_eq!(all.event(), closed);
    assert_eq!(closings.event(), closed, "nothing else was told");
    all.get("event.unsubscribe", json!({}));
    server.stop();
    assert_eq!(all.receive(), None, "the end of the server is the end of the connection");
}

#[test]
fn messages_are_those_of_json_rpc() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let version = control.get("server.version", json!({}));
    assert_eq!(version["protocol"], 1);
    control.refused("disk.read-only", json!({}), -32601, &["disk.read-only", "server.version"]);
    control.refused("disk.close", json!({}), INVALID_PARAMS, &["missing field `disk`"]);
    control.refused("disk.list", json!({ "x": 1 }), INVALID_PARAMS, &["unknown field `x`"]);
    for (line, id, code) in [
        ("{", Value::Null, -32700),
        ("[]", Value::Null, -32600),
        (r#"{"jsonrpc":"2.0","id":"a","method":7}"#, json!("a"), -32600),
        (r#"{"jsonrpc":"2.0","id":[1],"method":"disk.list"}"#, Value::Null, -32600),
        (r#"{"jsonrpc":"2.0","id":9,"method":"disk.list","params":[1]}"#, json!(9), -32600),
    ] {
        control.send(line.as_bytes()).expect("it listens");
        let answer = control.receive().expect("an answer");
        assert_eq!((&answer["id"], answer["error"]["code"].as_i64()), (&id, Some(code)), "{line}");
    }
    // A request without an id gets no answer: the next answer is for the next request.
    control.send(br#"{"jsonrpc":"2.0","method":"disk.list"}"#).expect("it listens");
    assert_eq!(control.get("server.version", json!({})), version);
    server.stop();
}

#[test]
fn the_schema_is_what_the_server_speaks() {
    let schema = control_schema();
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let version = control.get("server.version", json!({}));
    let methods = version["methods"].as_array().expect("methods");
    let written = schema["methods"].as_object().expect("methods");
    assert!(methods.iter().all(|name| written.contains_key(name.as_str().expect("a name"))));
    assert_eq!(methods.len(), written.len());
    let path = scratch.path("second.qcow2");
    let mut check = |method: &str, params: Value| {
        let part = |part| Schema::of(schema, &format!("/methods/{method}/{part}"));
        assert_eq!(part("params").misfit(&params), None, "{method}");
        let result = control.get(method, params);
        assert_eq!(part("result").misfit(&result), None, "{method}: {result}");
    };
    let disk = json!({ "disk": "d" });
    let snapshot = json!({ "disk": "d", "name": "s" });
    let rename = json!({ "disk": "d", "name": "s", "new-name": "t" });
    let add = json!({ "disk": "d", "export": nbd_uri("d", scratch.socket("d")) });
    check("server.version", json!({}));
    check("disk.open", json!({ "path": path, "name": "d", "create": 1 << 20 }));
    check("export.add", add.clone());
    for list in ["disk.list", "export.list", "disk.stats", "stats.get"] {
        check(list, json!({}));
    }
    let limits = json!({ "group": "g", "iops": 9000, "bps": "1G", "burst": 1.5 });
    check("limit.set", json!({ "disk": "d", "limits": limits }));
    check("limit.set", json!({ "group": "g", "limits": { "bps-read": 1 << 30 } }));
    check("limit.get", disk.clone());
    check("snapshot.create", snapshot.clone());
    check("snapshot.list", disk.clone());
    check("snapshot.rename", rename);
    check("snapshot.delete", json!({ "disk": "d", "name": "t" }));
    check("disk.resize", json!({ "disk": "d", "size": 2 << 20 }));
    let child = json!({ "path": scratch.path("child.qcow2"), "name": "child" });
    check("disk.fork", json!({ "disks": [{ "disk": "d", "children": [child] }] }));
    let bitmap = json!({ "add": { "disk": "child", "name": "b" } });
    let backup = json!({ "disk": "child", "name": "then" });
    check("disk.transaction", json!({ "bitmaps": [bitmap], "backups": [backup] }));
    check("backup.end", json!({ "backup": "then" }));
    let image = json!({ "path": scratch.path("new.qcow2"), "format": "qcow2", "size": 1 << 20, "cluster-size": "4K" });
    check("image.create", image);
    let socket = nbd_uri("", scratch.socket("own"));
    check("socket.add", json!({ "address": socket }));
    check("socket.remove", json!({ "address": socket }));
    check("disk.fork", json!({ "disks": [{ "disk": "d" }] }));
    check("disk.rollback", json!({ "disk": "d", "force": true }));
    check("export.remove", json!({ "export": add["export"] }));
    check("disk.close", disk);
    server.stop();
}

#[test]
fn a_person_asks_in_short_commands() {
    let scratch = Scratch::new();
    let (server, _control) = serve(&scratch);
    let (socket, path) = (scratch.socket("second"), scratch.path("second.qcow2"));
    let export = nbd_uri("b", &socket);
    let said = ctl(&scratch, &["open", str(&path), "--create", "1M", "--export", &export]);
    assert_eq!(said.success().stdout.trim(), format!("ready {export}"));
    let disks = ctl(&scratch, &["disks"]).success().stdout;
    let second = disks.lines().find(|line| line.starts_with("second.qcow2")).expect("a row");
    assert!(second.contains("qcow2") && second.contains("1 MiB"), "{disks}");
    let list: Value = serde_json::from_str(&ctl(&scratch, &["disks", "--json"]).success().stdout)
        .expect("--json is JSON");
    assert_eq!(names(&list, "disk"), ["first", "second.qcow2"]);
    assert!(ctl(&scratch, &["exports"]).success().stdout.contains(&export));
    let resized = ctl(&scratch, &["resize", "second.qcow2", "+1M"]).success().stdout;
    assert_eq!(resized.trim(), "1 MiB -> 2 MiB");
    ctl(&scratch, &["snapshot", "create", "second.qcow2", "s"]).success();
    let snapshots = ctl(&scratch, &["snapshot", "list", "second.qcow2"]).success().stdout;
    assert!(snapshots.lines().count() == 2 && snapshots.contains(" s "), "{snapshots}");
    ctl(&scratch, &["snapshot", "rename", "second.qcow2", "s", "t"]).success();
    ctl(&scratch, &["snapshot", "delete", "second.qcow2", "t"]).success();
    let vu = scratch.socket("vu");
    ctl(&scratch, &["export", "second.qcow2", str(&vu)]).success();
    ctl(&scratch, &["unexport", str(&vu)]).success();
    let stats = ctl(&scratch, &["stats", "first"]).success().stdout;
    assert!(stats.starts_with("DISK") && stats.lines().count() == 2, "{stats}");
    let called = ctl(&scratch, &["call", "disk.stats", r#"{"disk":"first"}"#]).success().stdout;
    let called: Value = serde_json::from_str(&called).expect("JSON");
    assert_eq!(called[0]["writes"], 0);
    let refused = ctl(&scratch, &["close", "second.qcow2"]);
    assert!(refused.stderr.contains("force") && refused.status.code() == Some(1));
    ctl(&scratch, &["close", "second.qcow2", "--force"]).success();
    assert!(eventually(LONG, || !socket.exists()));
    server.stop();
}

#[test]
fn clients_that_do_not_listen_keep_nobody_waiting() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let mut deaf = Control::connect(&scratch.socket("control"));
    deaf.get("event.subscribe", json!({}));
    let second = scratch.image("second", MIB);
    // More events than fit into the socket and the queue.
    for _ in 0..1000 {
        control.get("disk.open", json!({ "path": second.path() }));
        control.get("disk.close", json!({ "disk": "second" }));
    }
    server.assert_serves();
    let lost = eventually(Duration::from_secs(60), || {
        deaf.receive().is_none_or(|message| message["params"]["event"] == "event.lost")
    });
    assert!(lost, "it is told what it has lost, or cut off");
    server.stop();
}
