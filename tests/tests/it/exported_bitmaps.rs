//! Bitmaps as NBD clients see them, compared with QEMU's server; and bitmaps that the control
//! socket changes while a disk is served.

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, new_image, qemu_img, str};
use blockhouse_tests::typed::{Folder, Serving, commands};
use blockhouse_tests::{Scratch, Serve, Server, need, require, run, tool};
use serde_json::{Value, json};

use crate::bitmaps::{check, dirty};

const FAILED: i64 = -32000;
const DEPTH: &str = "qemu:allocation-depth";

/// docs/backup.md up to the section "A moment".
fn page() -> &'static str {
    let page = include_str!("../../../docs/backup.md");
    page.split("## A moment").next().unwrap_or_default()
}

fn change(image: &str, format: &str, changes: &[&str]) {
    let mut qemu_io = tool("qemu-io");
    qemu_io.args(["-f", format, "-d", "unmap"]);
    changes.iter().for_each(|change| _ = qemu_io.args(["-c", change]));
    run(qemu_io.arg(image)).success();
}

/// nbdinfo's map of a bitmap or another metadata context of an export.
fn map(context: &str, server: &[&str]) -> Value {
    let context = format!("--map={context}");
    json(&run(tool("nbdinfo").args(["--json", &context, "--"]).args(server)).success())
}

/// Checks that both servers report the same bitmaps of an image, served read-only and for writing.
fn compare_servers(scratch: &Scratch, image: &str, names: &[&str]) {
    let contexts: Vec<_> = names.iter().map(|name| format!("qemu:dirty-bitmap:{name}")).collect();
    for access in ["--read-only", "--discard=unmap"] {
        let theirs = names.iter().zip(&contexts);
        let theirs = theirs.map(|(name, context)| {
            map(context, &["[", "qemu-nbd", access, "-f", "qcow2", "-B", name, image, "]"])
        });
        let theirs: Vec<_> = theirs.collect();
        let server = Serve::new(scratch, image.as_ref()).flag(access);
        let server = names.iter().fold(server, |server, name| server.option("--bitmap", name));
        let server = server.start();
        for (context, theirs) in contexts.iter().zip(&theirs) {
            assert_eq!(map(context, &[server.uri()]), *theirs, "{context}, {access}");
        }
        let told = json(&run(tool("nbdinfo").args(["--json", server.uri()])).success());
        let [first, last] = ["base:allocation", DEPTH].map(|name| [name.to_owned()]);
        let all = [&first, &contexts[..], &last].concat();
        assert_eq!(told["exports"][0]["contexts"], json!(all));
        server.stop();
    }
}

#[test]
fn clients_see_what_qemu_shows_them() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", "-o", "cluster_size=4K", image, "300M"]).success();
    change(image, "qcow2", &["write -P 1 0 8M"]);
    let fine = "fine: with spaces";
    for (name, granularity) in [("usual", "64K"), (fine, "512"), ("coarse", "2M")] {
        command(&["bitmap", "add", "-g", granularity, image, name]).success();
    }
    command(&["bitmap", "add", "--disabled", image, "idle"]).success();
    let scattered: Vec<_> = (0..900).map(|at| format!("write -q {} 512", at * 7 * 512)).collect();
    change(image, "qcow2", &scattered.iter().map(String::as_str).collect::<Vec<_>>());
    change(image, "qcow2", &["write -z 200M 70K", "discard 299M 1M"]);
    compare_servers(&scratch, image, &["usual", fine, "coarse", "idle"]);
    check(image);
}

#[test]
fn clients_see_which_image_of_a_chain_has_the_data() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    let [base, middle, over] = ["base", "middle", "over"].map(|name| scratch.path(name));
    let [base, middle, over] = [&base, &middle, &over].map(|path| str(path));
    command(&["create", "-f", "raw", base, "1M"]).success();
    command(&["create", "-f", "qcow2", "-F", "raw", "-b", base, middle, "3M"]).success();
    command(&["create", "-f", "qcow2", "-F", "qcow2", "-b", middle, over, "4M"]).success();
    change(middle, "qcow2", &["write -P 1 512K 128K", "write -z 2M 64K"]);
    change(over, "qcow2", &["write -P 2 0 64K", "write -z 576K 64K", "write -P 3 3584K 64K"]);
    for image in [over, middle] {
        let theirs = map(DEPTH, &["[", "qemu-nbd", "-r", "-A", "-f", "qcow2", image, "]"]);
        let server = Serve::new(&scratch, image.as_ref()).option("--format", "qcow2");
        let server = server.flag("--read-only").flag("-A").start();
        assert_eq!(map(DEPTH, &[server.uri()]), theirs, "{image}");
        server.stop();
    }
}

#[test]
fn a_client_asks_for_several_contexts_at_once() {
    require!(need::tools(&["qemu-io"]));
    require!(need::python_module("nbd"));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "64M"]).success();
    command(&["bitmap", "add", image, "a"]).success();
    change(image, "qcow2", &["write -P 1 1M 64K"]);
    command(&["bitmap", "add", image, "b"]).success();
    change(image, "qcow2", &["write -P 2 2M 128K"]);
    let server = Serve::new(&scratch, &path).option("--bitmap", "b").option("-B", "a").start();
    let script = r#"
import nbd, sys, json
h = nbd.NBD()
for name in ["a", "b"]:
    h.add_meta_context("qemu:dirty-bitmap:" + name)
h.add_meta_context("base:allocation")
h.connect_uri(sys.argv[1])
told = {}
def extent(context, offset, entries, error):
    told.setdefault(context, []).append(entries)
for flags in [0, nbd.CMD_FLAG_REQ_ONE]:
    h.block_status(4 << 20, 512 << 10, extent, flags)
print(json.dumps(told))
"#;
    let mut python = std::process::Command::new("/usr/bin/python3");
    let told = json(&run(python.args(["-c", script, server.uri()])).success());
    let kib = |count: u64| count << 10;
    let expected = json!({
        "base:allocation": [
            [kib(512), 3, kib(64), 0, kib(1024 - 64), 3, kib(128), 0, kib(2560 - 128), 3],
            [kib(512), 3],
        ],
        "qemu:dirty-bitmap:a": [
            [kib(512), 0, kib(64), 1, kib(1024 - 64), 0, kib(128), 1, kib(2560 - 128), 0],
            [kib(512), 0],
        ],
        "qemu:dirty-bitmap:b": [[kib(1536), 0, kib(128), 1, kib(2560 - 128), 0], [kib(1536), 0]],
    });
    for context in ["qemu:dirty-bitmap:a", "qemu:dirty-bitmap:b", "base:allocation"] {
        assert_eq!(told[context], expected[context], "{context}");
    }
    server.stop();
}

#[test]
fn a_client_is_told_of_changes_that_were_answered_before_it_asked() {
    require!(need::tools(&["qemu-img", "qemu-io", "nbdinfo"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "64M"]).success();
    command(&["bitmap", "add", image, "live"]).success();
    let server = Serve::new(&scratch, &path).option("--bitmap", "live").start();
    let socket = scratch.socket("nbd");
    for (number, at) in ["0", "63M", "17M"].iter().enumerate() {
        change(server.uri(), "raw", &[&format!("write -P 5 {at} 64K")]);
        let told = map("qemu:dirty-bitmap:live", &[server.uri()]);
        let dirty = told.as_array().expect("a list").iter().filter(|extent| extent["type"] == 1);
        assert_eq!(dirty.count(), number + 1, "{told}");
    }
    // The bitmap as QEMU's client shows it.
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:live",
        socket.display()
    );
    let told = json(&qemu_img(&["map", "--output=json", "--image-opts", &options]).success());
    let dirty: Vec<_> =
        told.as_array().expect("a list").iter().filter(|one| one["data"] == false).collect();
    let starts: Vec<_> = dirty.iter().filter_map(|one| one["start"].as_u64()).collect();
    assert_eq!(starts, [0, 17 << 20, 63 << 20], "{told}");
    server.stop();
}

#[test]
fn what_cannot_be_offered_is_refused() {
    let scratch = Scratch::new();
    let (path, raw) = (scratch.path("disk.qcow2"), scratch.path("disk.img"));
    command(&["create", str(&path), "1M"]).success();
    command(&["create", str(&raw), "1M"]).success();
    command(&["bitmap", "add", str(&path), "a"]).success();
    let with = |image, name: &str| Serve::new(&scratch, image).option("--bitmap", name);
    with(&path, "b").refused().failed(&["disk.qcow2", "no bitmap 'b'", "bitmap list"]);
    with(&raw, "a").refused().failed(&["disk.img", "raw image has no bitmaps"]);
    with(&path, "a").option("-B", "a").refused().wrong_usage(&["'a' is named twice"]);
    with(&path, "a").option("--snapshot", "s").refused().wrong_usage(&["not of a snapshot"]);
}

/// A served disk and its control socket.
fn serve(scratch: &Scratch) -> (Server, Control) {
    let path = new_image(scratch, "disk.qcow2", "64M");
    command(&["bitmap", "add", str(&path), "old"]).success();
    Serve::new(scratch, &path).option("-B", "old").start_with_control(scratch)
}

#[test]
fn bitmaps_come_and_go_while_a_disk_is_written() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let write = |place: &str| change(server.uri(), "raw", &[&format!("write -P 1 {place} 64K")]);
    let disk = |name: &str| json!({ "disk": "disk.qcow2", "name": name });
    let count = |control: &mut Control, name: &str| {
        let list = control.get("bitmap.list", json!({ "disk": "disk.qcow2" }));
        let found = list.as_array().into_iter().flatten().find(|one| one["name"] == name);
        found.cloned().unwrap_or_default()
    };
    write("0");
    let added = control
        .get("bitmap.add", json!({ "disk": "disk.qcow2", "name": "new", "granularity": "4K" }));
    assert!(added["pause-us"].as_u64().is_some(), "{added}");
    write("1M");
    let expected = json!({
        "name": "new", "granularity": 4096, "recording": true, "persistent": true, "inconsistent": false, "busy": false,
        "count": 65536,
    });
    assert_eq!(count(&mut control, "new"), expected);
    assert_eq!(count(&mut control, "old")["count"], 131_072);
    assert_eq!(count(&mut control, "old")["busy"], true);
    control.get("bitmap.disable", disk("new"));
    write("2M");
    control.get("bitmap.enable", disk("new"));
    write("3M");
    assert_eq!(count(&mut control, "new")["count"], 131_072);
    control.get("bitmap.clear", disk("old"));
    write("4M");
    assert_eq!(count(&mut control, "old")["count"], 65536);
    control.get("bitmap.merge", json!({ "disk": "disk.qcow2", "name": "old", "source": "new" }));
    assert_eq!(count(&mut control, "old")["count"], 3 * 65536);
    control.get("bitmap.add", disk("gone"));
    control.get("bitmap.remove", disk("gone"));
    assert_eq!(count(&mut control, "gone"), Value::Null);
    for (method, name, words) in [
        ("bitmap.remove", "old", &["offers", "NBD clients"][..]),
        ("bitmap.remove", "x", &["no bitmap 'x'"]),
        ("bitmap.add", "old", &["is there already"]),
        ("bitmap.clear", "x", &["no bitmap 'x'", "bitmap list"]),
    ] {
        control.refused(method, disk(name), FAILED, words);
    }
    control.refused("bitmap.add", json!({ "disk": "none", "name": "a" }), FAILED, &["disk.list"]);
    server.stop();
    let image = scratch.path("disk.qcow2");
    check(str(&image));
    let kib = |at: u64| (at << 20, 64 << 10);
    assert_eq!(dirty(str(&image), "old"), [kib(1), kib(3), kib(4)]);
    assert_eq!(dirty(str(&image), "new"), [kib(1), kib(3), kib(4)]);
}

#[test]
fn disks_without_bitmaps_and_those_that_are_only_read_say_so() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch);
    let raw = scratch.image("raw.img", 1 << 20);
    control.get("disk.open", json!({ "path": raw.path() }));
    let other = new_image(&scratch, "other.qcow2", "1M");
    command(&["bitmap", "add", str(&other), "a"]).success();
    control.get("disk.open", json!({ "path": other, "read-only": true, "bitmaps": ["a"] }));
    let missing = json!({ "path": other, "name": "x", "read-only": true, "bitmaps": ["b"] });
    control.refused("disk.open", missing, FAILED, &["no bitmap 'b'"]);
    let add = |disk: &str| json!({ "disk": disk, "name": "new" });
    control.refused("bitmap.list", json!({ "disk": "raw.img" }), FAILED, &["has no bitmaps"]);
    control.get(
        "disk.open",
        json!({ "path": scratch.image("only.img", 1 << 20).path(), "read-only": true }),
    );
    control.refused("bitmap.add", add("only.img"), FAILED, &["for reading only"]);
    control.refused("bitmap.add", add("other.qcow2"), FAILED, &["for reading only"]);
    let listed = control.get("bitmap.list", json!({ "disk": "other.qcow2" }));
    assert_eq!(listed[0]["count"], 0);
    let socket = scratch.socket("control");
    let shown = command(&["ctl", str(&socket), "bitmap", "list", "disk.qcow2"]).success();
    assert!(shown.stdout.contains("old") && shown.stdout.contains("enabled"), "{}", shown.stdout);
    server.stop();
}

#[test]
fn the_page_is_right() {
    require!(need::tools(&["qemu-img", "nbdinfo"]));
    let folder = Folder::new();
    folder.run("blockhouse create disk.qcow2 64M");
    folder.run("blockhouse create disk.img 64M");
    commands(page(), "blockhouse bitmap ").iter().for_each(|line| _ = folder.run(line));
    let serve =
        "blockhouse serve disk.qcow2 --control control --nbd 'nbd+unix:///?socket=disk.sock'";
    let serving = Serving::start(&folder, serve);
    commands(page(), "blockhouse ctl ").iter().for_each(|line| _ = folder.run(line));
    serving.stop();
    for line in commands(page(), "blockhouse serve ") {
        let serving = Serving::start(&folder, line);
        for client in ["nbdinfo ", "qemu-img "].iter().flat_map(|word| commands(page(), word)) {
            folder.run(client);
        }
        serving.stop();
    }
}
