//! Streams of disks that clients write to: the clients notice nothing, the overlay needs no base in
//! the end, and after any kill the next server serves the right content.

use std::fs;
use std::path::Path;
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{check_after_kill, command, json, qemu_img, str};
use blockhouse_tests::upgrade::{Servers, upgrade_under_load};
use blockhouse_tests::{Scratch, Serve, Server, need, require, seeded};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::commits::Chain;
use crate::fork::{image, written};
use crate::jobs::{BLOCK, FAILED, LONG, SIZE, Writer, beside, bytes_of, ctl, serve, wait_for};

/// A client of a server of the overlay, after it has written some clusters; most are in the base.
fn writer_of(chain: &Chain, server: &Server, random: Rng) -> Writer {
    let mut writer = Writer::on(&server.address(), chain.blocks.clone(), random);
    (0..chain.blocks.len()).step_by(100).for_each(|index| writer.write(index));
    writer
}

#[test]
fn a_client_goes_on_with_an_overlay_that_needs_no_base() {
    let mut random = seeded();
    for (base, size, options) in [
        ("base.img", SIZE, "compat=1.1"),
        ("base.img", SIZE / 2, "compat=0.10"),
        ("base.qcow2", SIZE, "extended_l2=on,cluster_size=16K"),
        ("small.qcow2", SIZE / 2, "cluster_size=4K"),
    ] {
        let scratch = Scratch::new();
        let chain = Chain::new(&scratch, base, size, options);
        let (server, mut control) = serve(&scratch, &chain.overlay);
        let mut writer = writer_of(&chain, &server, random.fork());
        beside(&mut writer, || {
            ctl(&scratch, &["stream", "over.qcow2", "--job", "s"]).success();
            ctl(&scratch, &["job", "s", "complete"]).success();
            wait_for(&mut control, "s", "completed");
        });
        // The base is unlocked, and is no longer read.
        let bytes = vec![0xee; size as usize];
        std::fs::write(&chain.base, bytes).expect("the base");
        writer.check();
        let again = json!({ "kind": "stream", "disk": "over.qcow2" });
        control.refused("job.start", again, FAILED, &["has no backing file"]);
        let expected = scratch.image_of("expected", &writer.bytes());
        drop(writer);
        server.stop();
        std::fs::remove_file(&chain.base).expect("it was there");
        assert_stands_alone(&chain.overlay, expected.path());
    }
}

/// Asserts that an image has no backing file, has no errors, and has the content of a raw image.
#[track_caller]
fn assert_stands_alone(image: &Path, raw: &Path) {
    let info = qemu_img(&["info", "--output=json", "-f", "qcow2", str(image)]);
    assert!(json(&info.success())["backing-filename"].is_null());
    qemu_img(&["check", "-f", "qcow2", str(image)]).success();
    qemu_img(&["compare", "-f", "qcow2", "-F", "raw", str(image), str(raw)]).success();
}

#[test]
fn after_a_kill_or_a_cancel_another_stream_goes_on() {
    let mut random = seeded();
    for round in 0..4 {
        let scratch = Scratch::new();
        let base = ["base.img", "small.qcow2"][round % 2];
        let chain = Chain::new(&scratch, base, SIZE, "compat=1.1");
        let (server, mut control) = serve(&scratch, &chain.overlay);
        let mut writer = writer_of(&chain, &server, random.fork());
        // Slow in the last rounds, so that the job cannot complete before the kill.
        let speed = if round < 2 { 64 << 20 } else { 64 << 10 };
        let start = json!({ "kind": "stream", "disk": "over.qcow2", "job": "s", "speed": speed });
        control.get("job.start", start);
        (0..40).for_each(|index| writer.write(index * 150));
        std::thread::sleep(Duration::from_millis(random.u64(..400)));
        if round == 3 {
            let socket = scratch.socket("control");
            command(&["upgrade", "--control", str(&socket)]).failure("the job \"s\"");
            ctl(&scratch, &["job", "s", "cancel"]).success();
            wait_for(&mut control, "s", "cancelled");
        }
        server.signal(Signal::KILL);
        drop((server, control));
        let blocks = writer.blocks();
        drop(writer);
        let (server, mut control) = serve(&scratch, &chain.overlay);
        let mut writer = Writer::on(&server.address(), blocks, random.fork());
        writer.check();
        let start = json!({ "kind": "stream", "disk": "over.qcow2", "job": "t" });
        match control.call("job.start", start) {
            Ok(_) => _ = wait_for(&mut control, "t", "completed"),
            // The job was complete before the kill.
            Err((_, why)) => assert!(why.contains("has no backing file"), "{why}"),
        }
        writer.check();
        drop(writer);
        server.stop();
        check_after_kill(&chain.overlay);
    }
}

#[test]
fn a_streamed_disk_is_handed_over_without_its_base_and_counts_on() {
    let scratch = Scratch::new();
    let chain = Chain::new(&scratch, "base.qcow2", SIZE, "compat=1.1");
    let socket = scratch.socket("control");
    let _servers = Servers(&scratch);
    let (mut server, mut control) = serve(&scratch, &chain.overlay);
    let mut writer = Writer::on(&server.address(), chain.blocks.clone(), seeded());
    writer.check();
    let reads = |control: &mut Control| {
        let all = control.get("stats.get", json!({}))["blockhouse_stage_bytes_total"].clone();
        let all = all.as_array().expect("a list").clone();
        let is_host = |one: &&Value| one["labels"]["stage"] == "host";
        all.iter().filter(is_host).filter_map(|one| one["value"].as_u64()).sum::<u64>()
    };
    let before = reads(&mut control);
    ctl(&scratch, &["stream", "over.qcow2", "--job", "s", "--speed", "1M"]).success();
    let snapshot = json!({ "disk": "over.qcow2", "name": "one" });
    control.refused("snapshot.create", snapshot.clone(), FAILED, &["about to be detached"]);
    ctl(&scratch, &["job", "s", "speed", "0"]).success();
    wait_for(&mut control, "s", "completed");
    control.get("snapshot.create", snapshot);
    assert!(before > 0 && reads(&mut control) >= before, "a counter goes backwards");
    drop(control);
    fs::remove_file(&chain.base).expect("nothing needs it");
    upgrade_under_load(&socket);
    assert!(server.wait(LONG).success());
    writer.check();
}

#[test]
fn a_stream_without_space_fails_and_the_client_goes_on() {
    const ROOM: u64 = SIZE / 4;
    let scratch = Scratch::in_memory();
    let folder = scratch.path("small");
    fs::create_dir(&folder).expect("a folder");
    let wrapper = require!(need::private_tmpfs(&folder, ROOM));
    let base = scratch.path("base.img");
    let blocks: Vec<u64> = (1..=SIZE / BLOCK).collect();
    let bytes = bytes_of(&blocks);
    fs::write(&base, bytes).expect("a base");
    // The overlay is copied to the server's own file system, which is mounted over the empty
    // folder.
    let template = scratch.path("over.qcow2");
    let options = format!("backing_file={},backing_fmt=raw", base.display());
    qemu_img(&["create", "-f", "qcow2", "-o", &options, str(&template), &SIZE.to_string()])
        .success();
    let overlay = folder.join("over.qcow2");
    let control = scratch.socket("control");
    let server = Serve::new(&scratch, &overlay).option("--control", &control);
    let server = server.option("--allow-path", scratch.path(""));
    let copied = format!("&& cp '{}' '{}' && exec", template.display(), overlay.display());
    let wrapper: Vec<String> =
        wrapper.iter().map(|word| word.replace("&& exec", &copied)).collect();
    let server = server.under(&wrapper).start();
    let mut control = Control::connect(&control);
    let mut writer = Writer::on(&server.address(), blocks, seeded());
    (0..16).for_each(|index| writer.write(index));
    beside(&mut writer, || ());
    ctl(&scratch, &["stream", "over.qcow2", "--job", "s"]).success();
    let failed = wait_for(&mut control, "s", "failed")["error"].to_string();
    assert!(failed.contains("No space left"), "{failed}");
    // Clusters that the image has can still be overwritten.
    (0..16).for_each(|index| writer.write(index));
    writer.check();
    drop((writer, control));
    server.stop();
}

#[test]
fn an_overlay_with_snapshots_is_refused() {
    let scratch = Scratch::new();
    let chain = Chain::new(&scratch, "base.img", SIZE, "compat=1.1");
    qemu_img(&["snapshot", "-c", "one", str(&chain.overlay)]).success();
    let (server, mut control) = serve(&scratch, &chain.overlay);
    let start = json!({ "kind": "stream", "disk": "over.qcow2" });
    control.refused("job.start", start, FAILED, &["has snapshots", "snapshot delete"]);
    Writer::on(&server.address(), chain.blocks.clone(), seeded()).check();
    let invalid = json!({ "kind": "stream", "disk": "over.qcow2", "target": "/x" });
    control.refused("job.start", invalid, -32602, &["leave target"]);
    drop(control);
    server.stop();
}

#[test]
fn what_is_between_an_overlay_and_its_base_is_left_out() {
    for (name, is_read_by_another) in [("disk.img", false), ("disk.qcow2", true)] {
        let scratch = Scratch::new();
        let base = image(&scratch, name);
        let (server, mut control, mut writer) = written(&scratch, &base, seeded());
        let [between, over, child] = ["between.qcow2", "over.qcow2", "child.qcow2"];
        let [at_base, at_between] = [between, over].map(|overlay| {
            beside(&mut writer, || ());
            ctl(&scratch, &["fork", name, "--overlay", str(&scratch.path(overlay))]).success();
            writer.blocks()
        });
        if is_read_by_another {
            let child = scratch.path(child);
            let options = ["-f", "qcow2", "-F", "qcow2", "-b", between];
            qemu_img(&[&["create"][..], &options, &[str(&child)]].concat()).success();
        }
        let stream =
            |base: &Path| ctl(&scratch, &["stream", name, "--job", "s", "--base", str(base)]);
        stream(&scratch.path(between)).failure("is its backing file already");
        stream(&scratch.path("other")).failure("is none of its backing files");
        beside(&mut writer, || {
            stream(&base).success();
            ctl(&scratch, &["job", "s", "complete"]).success();
            wait_for(&mut control, "s", "completed");
        });
        let info = qemu_img(&["info", "-U", "--output=json", str(&scratch.path(over))]);
        assert_eq!(json(&info.success())["backing-filename"], name);
        assert_holds(&base, &at_base);
        if is_read_by_another {
            let said = ctl(&scratch, &["rollback", name, "--force"]);
            said.failure("between.qcow2");
            assert_holds(&scratch.path(child), &at_between);
            fs::remove_file(scratch.path(child)).expect("a child");
        }
        for gone in [between, "between.qcow2.moved"] {
            fs::remove_file(scratch.path(gone)).expect("nothing needs it");
        }
        writer.check();
        // The chain works like any other: it is upgraded, and committed into the base.
        let servers = Servers(&scratch);
        drop(control);
        beside(&mut writer, || upgrade_under_load(&scratch.socket("control")));
        ctl(&scratch, &["commit", name, "--job", "c"]).success();
        beside(&mut writer, || ctl(&scratch, &["job", "c", "complete"]).success());
        writer.check();
        let blocks = writer.blocks();
        drop(writer);
        servers.stop();
        drop(server);
        assert_holds(&base, &blocks);
    }
}

/// Asserts that QEMU reads these blocks from an image.
#[track_caller]
pub(crate) fn assert_holds(image: &Path, blocks: &[u64]) {
    let expected = image.with_extension("expected");
    fs::write(&expected, bytes_of(blocks)).expect("a raw image");
    let format = if image.extension().is_some_and(|end| end == "img") { "raw" } else { "qcow2" };
    let words = ["compare", "-U", "-f", format, "-F", "raw", str(image), str(&expected)];
    qemu_img(&words).success();
}
