//! Bitmaps of images that change: while they are served, after kills, by a resize, by a return to a
//! snapshot; compared with QEMU's tools.

use std::time::Duration;

use blockhouse_tests::{
    Scratch, Serve,
    image_tool::{command, json, qemu_img, str},
    nbd::Client,
    need, require, run, tool,
};
use rustix::process::Signal;
use serde_json::Value;

use crate::bitmaps::{check, dirty, info};

/// Changes of all kinds.
const CHANGES: [&str; 5] = [
    "write -P 1 64K 64K",
    "write -P 2 200M 4K",
    "write -z 4M 1M",
    "write -z -u 6M 64K",
    "discard 8M 1M",
];

/// Changes an image, or a disk that is served.
fn change(image: &str, format: &str, changes: &[&str]) {
    let mut qemu_io = tool("qemu-io");
    qemu_io.args(["-f", format, "-d", "unmap"]);
    changes.iter().for_each(|change| _ = qemu_io.args(["-c", change]));
    run(qemu_io.arg(image)).success();
}

fn flags(image: &str) -> Value {
    let info = json(&qemu_img(&["info", "-U", "--output=json", "-f", "qcow2", image]).success());
    info["format-specific"]["data"]["bitmaps"][0]["flags"].clone()
}

#[test]
fn a_served_disk_records_changes_as_qemu_does() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    for options in ["cluster_size=64K", "cluster_size=4K", "extended_l2=on", "lazy_refcounts=on"] {
        let (path, theirs) = (scratch.path("disk.qcow2"), scratch.path("theirs.qcow2"));
        let image = str(&path);
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, image, "256M"]).success();
        change(image, "qcow2", &["write -P 9 0 16M"]);
        qemu_img(&["bitmap", "--add", image, "usual"]).success();
        qemu_img(&["bitmap", "--add", "-g", "512", image, "fine"]).success();
        qemu_img(&["bitmap", "--add", "--disable", image, "idle"]).success();
        std::fs::copy(&path, &theirs).expect("a copy");
        let server = Serve::new(&scratch, &path).start();
        change(server.uri(), "raw", &CHANGES);
        assert_eq!(flags(image), serde_json::json!(["in-use", "auto"]), "while it is served");
        server.stop();
        change(str(&theirs), "qcow2", &CHANGES);
        info(image);
        check(image);
        for name in ["usual", "fine", "idle"] {
            assert_eq!(dirty(image, name), dirty(str(&theirs), name), "{name}, {options}");
        }
        for image in [&path, &theirs] {
            std::fs::remove_file(image).expect("it is there");
        }
    }
}

/// The disk reads the same before and after; QEMU does not record this, either.
#[test]
fn what_is_fetched_from_a_base_is_no_change() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    for options in ["cluster_size=64K", "cluster_size=4K", "extended_l2=on"] {
        let paths = ["base.img", "disk.qcow2", "theirs.qcow2"].map(|name| scratch.path(name));
        let [base, image, theirs] = paths.each_ref().map(|path| str(path));
        qemu_img(&["create", "-q", "-f", "raw", base, "64M"]).success();
        change(base, "raw", &["write -P 9 0 9M", "write -P 8 20M 10M"]);
        for overlay in [image, theirs] {
            let words = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, "-o", options];
            qemu_img(&[&words[..], &[overlay]].concat()).success();
            qemu_img(&["bitmap", "--add", overlay, "changes"]).success();
        }
        let changes = ["write -P 1 24M 4K", "write -P 2 2M 4K", "write -z 60M 128K"];
        change(theirs, "qcow2", &changes);
        let control = scratch.socket("control");
        let serve = Serve::new(&scratch, &paths[1]).option("--control", &control);
        let server = serve.flag("--copy-on-read").start();
        change(server.uri(), "raw", &["read -P 9 1M 3M", "read -P 0 40M 3M"]);
        change(server.uri(), "raw", &changes[..1]);
        let ctl = |words: &[&str]| command(&[&["ctl", str(&control)], words].concat()).success();
        ctl(&["stream", "disk.qcow2", "--job", "s"]);
        ctl(&["job", "s", "complete"]);
        change(server.uri(), "raw", &changes[1..]);
        server.stop();
        assert!(info(image)["backing-filename"].is_null());
        check(image);
        assert_eq!(dirty(image, "changes"), dirty(theirs, "changes"), "{options}");
        qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", image, theirs]).success();
        paths.iter().for_each(|path| std::fs::remove_file(path).expect("it is there"));
    }
}

#[test]
fn a_killed_server_leaves_all_changes_in_a_bitmap() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "256M"]).success();
    command(&["bitmap", "add", image, "changes"]).success();
    for place in ["9M", "100M"] {
        let mut server = Serve::new(&scratch, &path).start();
        change(server.uri(), "raw", &[&format!("write -P 3 {place} 64K")]);
        server.signal(Signal::KILL);
        server.wait(Duration::from_secs(60));
        assert_eq!(flags(image), serde_json::json!(["in-use", "auto"]), "QEMU does not use it");
        let listed = command(&["bitmap", "list", image]).success();
        assert!(listed.stdout.contains("enabled"), "we do: {}", listed.stdout);
    }
    let server = Serve::new(&scratch, &path).start();
    assert!(server.log().contains("its last writer died"), "{}", server.log());
    server.stop();
    // The whole extent that contains a change is marked.
    assert_eq!(dirty(image, "changes"), [(8 << 20, 4 << 20), (100 << 20, 4 << 20)]);
    assert_eq!(flags(image), serde_json::json!(["auto"]));
    check(image);
}

#[test]
fn a_bitmap_lacks_what_others_changed_after_a_kill() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "64M"]).success();
    command(&["bitmap", "add", image, "lost"]).success();
    let mut server = Serve::new(&scratch, &path).start();
    change(server.uri(), "raw", &["write -f -P 3 0 64K"]);
    server.signal(Signal::KILL);
    server.wait(Duration::from_secs(60));
    // QEMU keeps an inconsistent bitmap, and records nothing in it.
    change(image, "qcow2", &["write -P 4 32M 64K"]);
    command(&["bitmap", "add", image, "new"]).success();
    let mut server = Serve::new(&scratch, &path).start();
    change(server.uri(), "raw", &["write -f -P 3 48M 64K"]);
    server.signal(Signal::KILL);
    server.wait(Duration::from_secs(60));
    let server = Serve::new(&scratch, &path).start();
    server.stop();
    command(&["bitmap", "clear", image, "lost"]).failure("can only be removed");
    command(&["bitmap", "remove", image, "lost"]).success();
    assert_eq!(dirty(image, "new"), [(48 << 20, 4 << 20)]);
    check(image);
}

#[test]
fn sizes_and_snapshots_take_bitmaps_along() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    const MIB: u64 = 1 << 20;
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4K", image, "200M"]).success();
    command(&["bitmap", "add", "-g", "4K", image, "changes"]).success();
    command(&["bitmap", "add", "--disabled", image, "idle"]).success();
    change(image, "qcow2", &["write -P 1 64K 64K"]);
    let checked = |wanted: &[(u64, u64)]| {
        info(image);
        check(image);
        assert_eq!(dirty(image, "changes"), wanted);
        assert_eq!(dirty(image, "idle"), []);
    };
    command(&["resize", image, "301M"]).success();
    checked(&[(64 << 10, 64 << 10), (200 * MIB, 101 * MIB)]);
    command(&["resize", "--shrink", image, "100M"]).success();
    checked(&[(64 << 10, 64 << 10)]);
    command(&["snapshot", "create", image, "before"]).success();
    command(&["bitmap", "clear", image, "changes"]).success();
    checked(&[]);
    command(&["snapshot", "apply", image, "before"]).success();
    checked(&[(0, 100 * MIB)]);
    command(&["resize", image, "128M"]).success();
    command(&["snapshot", "apply", image, "before"]).failure("remove the bitmaps first");
    checked(&[(0, 128 * MIB)]);
}

/// Changes that only the redo log of a killed server has are in the next incremental backup, or the
/// backup is refused.
#[test]
fn an_increment_after_a_kill_has_what_was_answered_or_is_refused() {
    const MIB: u64 = 1 << 20;
    let scratch = Scratch::new();
    let paths = ["disk.qcow2", "full.qcow2", "increment.qcow2", "restored.img"];
    let paths = paths.map(|name| scratch.path(name));
    let [image, full, increment, restored] = paths.each_ref().map(|path| str(path));
    command(&["create", image, "16M"]).success();
    command(&["bitmap", "add", image, "changes"]).success();
    command(&["backup", image, full]).success();
    let mut server = Serve::new(&scratch, &paths[0]).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(MIB, &[5; 65_536], 0), 0);
    assert_eq!(client.flush(), 0);
    assert_eq!(client.write(4 * MIB, &[9; 65_536], 0), 0);
    server.signal(Signal::KILL);
    server.wait(Duration::from_secs(60));
    let words = ["backup", "--incremental", "changes", "--base", full, image, increment];
    command(&words).failure("check --repair leaks");
    assert!(!paths[2].exists());
    let serve = Serve::new(&scratch, &paths[0]).flag("--read-only").option("--bitmap", "changes");
    serve.refused().failed(&["check --repair leaks"]);
    command(&["check", "--repair", "leaks", image]).success();
    command(&words).success();
    command(&["restore", increment, restored]).success();
    let bytes = std::fs::read(&paths[3]).expect("a disk");
    let mut expected = vec![0; 16 << 20];
    expected[1 << 20..][..65_536].fill(5);
    expected[4 << 20..][..65_536].fill(9);
    assert!(bytes == expected, "an answered write is in no backup");
}
