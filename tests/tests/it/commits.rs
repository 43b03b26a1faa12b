//! Commits of disks that clients write to: the clients notice nothing, the backing file equals the
//! disk byte for byte when the commit completes, and after any kill or failure the next server
//! serves the right content.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_tests::image_tool::{command, new_image, qemu_img, str};
use blockhouse_tests::{Scratch, Serve, Server, nbd_uri, need, require, seeded};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::json;

use crate::jobs::{
    BLOCK, FAILED, Foreign, SIZE, Writer, beside, bytes_of, ctl, job, serve, wait_for,
};

/// An overlay over a base, made by QEMU, and the content of its blocks.
pub(crate) struct Chain {
    pub(crate) overlay: PathBuf,
    pub(crate) base: PathBuf,
    format: &'static str,
    pub(crate) blocks: Vec<u64>,
}

impl Chain {
    /// Makes a chain whose base has `size` bytes, and a snapshot if its format has snapshots.
    pub(crate) fn new(scratch: &Scratch, base: &str, size: u64, options: &str) -> Self {
        let (path, overlay) = (scratch.path(base), scratch.path("over.qcow2"));
        let format = if base.ends_with("img") { "raw" } else { "qcow2" };
        let mut blocks = vec![0; (SIZE / BLOCK) as usize];
        let data = (size / BLOCK) as usize * 3 / 4;
        blocks[..data].iter_mut().zip(1..).for_each(|(block, number)| *block = number);
        let bytes = bytes_of(&blocks[..data]);
        let plain = scratch.image_of("plain", &bytes);
        let compress: &[&str] = if base.starts_with("small") { &["-c"] } else { &[] };
        let convert = ["convert", "-f", "raw", "-O", format, plain.str(), str(&path)];
        qemu_img(&[&convert[..1], compress, &convert[1..]].concat()).success();
        qemu_img(&["resize", "-f", format, str(&path), &size.to_string()]).success();
        if format == "qcow2" {
            qemu_img(&["snapshot", "-c", "older", str(&path)]).success();
        }
        let chain = Self { overlay, base: path, format, blocks };
        chain.make_overlay(&chain.overlay, options);
        chain
    }

    fn make_overlay(&self, path: &Path, options: &str) {
        let name = self.base.file_name().expect("a name").to_str().expect("text");
        let options = format!("{options},backing_file={name},backing_fmt={}", self.format);
        let size = SIZE.to_string();
        qemu_img(&["create", "-f", "qcow2", "-o", &options, str(path), &size]).success();
    }

    /// A client of a server of the overlay, after it has written some clusters.
    fn writer(&self, server: &Server, random: Rng) -> Writer {
        let mut writer = Writer::on(&server.address(), self.blocks.clone(), random);
        (0..self.blocks.len()).step_by(7).for_each(|index| writer.write(index));
        writer
    }

    /// Checks that the base alone holds these bytes and has no errors.
    fn check_base(&self, scratch: &Scratch, bytes: &[u8]) {
        let expected = scratch.image_of("expected", bytes);
        let words = ["compare", "-f", self.format, "-F", "raw", str(&self.base), expected.str()];
        qemu_img(&words).success();
        if self.format == "raw" {
            return;
        }
        qemu_img(&["check", "-f", "qcow2", str(&self.base)]).success();
        let older = scratch.path("older.raw");
        let convert = ["convert", "-f", "qcow2", "-l", "older", "-O", "raw"];
        qemu_img(&[&convert[..], &[str(&self.base), str(&older)]].concat()).success();
        let older = std::fs::read(older).expect("a file");
        let all = bytes_of(&self.blocks);
        assert!(older == all[..older.len()], "the base's snapshot is what it was");
    }
}

#[test]
fn a_client_goes_on_with_the_base_that_is_equal_to_the_byte() {
    let mut random = seeded();
    for (base, size, options, mode) in [
        ("base.img", SIZE, "compat=1.1", "auto"),
        ("base.img", SIZE / 2, "compat=0.10", "background"),
        ("base.qcow2", SIZE, "extended_l2=on,cluster_size=16K", "write-blocking"),
        ("small.qcow2", SIZE / 2, "cluster_size=4K", "auto"),
    ] {
        let scratch = Scratch::new();
        let chain = Chain::new(&scratch, base, size, options);
        let (server, mut control) = serve(&scratch, &chain.overlay);
        let mut writer = chain.writer(&server, random.fork());
        let other = scratch.path("other.qcow2");
        chain.make_overlay(&other, "compat=1.1");
        beside(&mut writer, || {
            ctl(&scratch, &["commit", "over.qcow2", "--mode", mode, "--job", "c"]).success();
            // No other program may use the base, nor another image over it.
            command(&["serve", str(&other), "--nbd", "nbd://127.0.0.1:0"]).failure("locked");
            command(&["convert", str(&chain.base), str(&scratch.path("c"))]).failure("locked");
            wait_for(&mut control, "c", "ready");
            let twice = json!({ "kind": "commit", "disk": "over.qcow2" });
            control.refused("job.start", twice, FAILED, &["the job \"c\""]);
            let hand_over = json!({ "job": "c", "hand-over": true });
            control.refused("job.complete", hand_over, FAILED, &["only a mirror"]);
            let done = ctl(&scratch, &["job", "c", "complete"]).success();
            assert!(done.stdout.contains("writes were held off for"), "{}", done.stdout);
        });
        assert_eq!(job(&mut control, "c")["status"], "completed");
        let disk = control.get("disk.list", json!({}))[0].clone();
        assert_eq!(disk["path"], str(&chain.base), "the disk is its base");
        writer.check();
        // The base is still locked; the overlay is free, and no longer the disk.
        command(&["convert", str(&chain.base), str(&scratch.path("c"))]).failure("locked");
        command(&["serve", str(&chain.overlay)]).failure("was moved to");
        let bytes = writer.bytes();
        drop(writer);
        server.stop();
        chain.check_base(&scratch, &bytes);
    }
}

#[test]
fn a_commit_that_is_cancelled_leaves_the_disk_and_can_be_made_again() {
    let scratch = Scratch::new();
    let chain = Chain::new(&scratch, "base.qcow2", SIZE, "compat=1.1");
    let (server, mut control) = serve(&scratch, &chain.overlay);
    let mut writer = chain.writer(&server, seeded());
    let upgrade = || {
        let socket = scratch.socket("control");
        command(&["upgrade", "--control", str(&socket)])
    };
    beside(&mut writer, || {
        ctl(&scratch, &["commit", "over.qcow2", "--speed", "1M", "--job", "c"]).success();
        upgrade().failure("the job \"c\"");
        ctl(&scratch, &["job", "c", "cancel"]).success();
        wait_for(&mut control, "c", "cancelled");
        upgrade().failure("open for writing since a commit");
    });
    writer.check();
    // After a restart the old command line serves the disk.
    let blocks = writer.blocks();
    drop((writer, control));
    server.stop();
    let (server, mut control) = serve(&scratch, &chain.overlay);
    let mut writer = Writer::on(&server.address(), blocks, seeded());
    writer.check();
    beside(&mut writer, || {
        for (name, end) in [("d", "cancelled"), ("e", "completed")] {
            ctl(&scratch, &["commit", "over.qcow2", "--job", name]).success();
            wait_for(&mut control, name, "ready");
            let word = if end == "cancelled" { "cancel" } else { "complete" };
            ctl(&scratch, &["job", name, word]).success();
            wait_for(&mut control, name, end);
        }
    });
    writer.check();
    let bytes = writer.bytes();
    drop(writer);
    server.stop();
    chain.check_base(&scratch, &bytes);
}

#[test]
fn after_a_kill_what_is_served_again_is_the_disk() {
    let mut random = seeded();
    for round in 0..6 {
        let scratch = Scratch::new();
        let base = ["base.img", "base.qcow2", "small.qcow2"][round % 3];
        let chain = Chain::new(&scratch, base, SIZE, "compat=1.1");
        let (server, mut control) = serve(&scratch, &chain.overlay);
        let mut writer = chain.writer(&server, random.fork());
        control.get("job.start", json!({ "kind": "commit", "disk": "over.qcow2", "job": "c" }));
        if round % 4 > 0 {
            wait_for(&mut control, "c", "ready");
        }
        (0..40).for_each(|index| writer.write(index * 5));
        let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "job.complete", "params": { "job": "c" } });
        control.send(call.to_string().as_bytes()).expect("the server listens");
        std::thread::sleep(Duration::from_micros(random.u64(..30_000)));
        server.signal(Signal::KILL);
        drop(server);
        let bytes = writer.bytes();
        let (blocks, record) = (writer.blocks(), scratch.path("over.qcow2.moved"));
        drop(writer);
        let disk = if record.exists() {
            command(&["serve", str(&chain.overlay)]).failure("was moved to");
            &chain.base
        } else {
            &chain.overlay
        };
        let server = Serve::new(&scratch, disk).option("--format", format_of(disk)).start();
        Writer::on(&server.address(), blocks, random.fork()).check();
        server.stop();
        if record.exists() {
            chain.check_base(&scratch, &bytes);
        }
    }
}

fn format_of(image: &Path) -> &'static str {
    if image.extension().is_some_and(|end| end == "img") { "raw" } else { "qcow2" }
}

#[test]
fn a_commit_into_a_full_host_fails_and_the_client_goes_on() {
    let scratch = Scratch::in_memory();
    let folder = scratch.path("small");
    std::fs::create_dir(&folder).expect("a folder");
    let wrapper = require!(need::private_tmpfs(&folder, SIZE / 8));
    let (base, overlay) = (folder.join("base.img"), scratch.path("over.qcow2"));
    // The base is made in the server's own file system, which is mounted over the empty folder.
    let made = format!("&& truncate -s {SIZE} '{}' && exec", base.display());
    let wrapper: Vec<String> = wrapper.iter().map(|word| word.replace("&& exec", &made)).collect();
    let (options, size) =
        (format!("backing_file={},backing_fmt=raw", base.display()), SIZE.to_string());
    qemu_img(&["create", "-f", "qcow2", "-u", "-o", &options, str(&overlay), &size]).success();
    let serve = Serve::new(&scratch, &overlay);
    let (server, mut control) =
        serve.option("--allow-path", &folder).under(&wrapper).start_with_control(&scratch);
    let mut writer = Writer::on(&server.address(), vec![0; (SIZE / BLOCK) as usize], seeded());
    (0..writer.blocks().len() / 2).for_each(|index| writer.write(index));
    for name in ["c", "d"] {
        beside(&mut writer, || {
            let job = json!({ "kind": "commit", "disk": "over.qcow2", "job": name });
            control.get("job.start", job);
            let failed = wait_for(&mut control, name, "failed")["error"].to_string();
            assert!(failed.contains("No space left"), "{failed}");
        });
    }
    writer.check();
    assert_eq!(writer.client.flush(), 0);
    drop((writer, control));
    server.stop();
}

#[test]
fn errors_of_a_remote_base_end_the_commit_and_not_the_client() {
    let scratch = Scratch::new();
    let (socket, trigger) = (scratch.socket("t"), scratch.path("trigger"));
    let (size, file) = (SIZE.to_string(), format!("error-pwrite-file={}", trigger.display()));
    let words =
        ["-f", "-U", str(&socket), "--filter=error", "memory", &size, "error-pwrite=ENOSPC"];
    let _foreign =
        Foreign::start("nbdkit", &[&words[..], &["error-pwrite-rate=1", &file]].concat(), &socket);
    let overlay = scratch.path("over.qcow2");
    let options = format!("backing_file=nbd+unix:///?socket={},backing_fmt=raw", socket.display());
    qemu_img(&["create", "-f", "qcow2", "-o", &options, str(&overlay), &size]).success();
    let server = Serve::new(&scratch, &overlay);
    let (server, mut control) = server.flag("--allow-remote").start_with_control(&scratch);
    let blocks = vec![0; (SIZE / BLOCK) as usize];
    let mut writer = Writer::on(&server.address(), blocks, seeded());
    (0..500).for_each(|index| writer.write(index * 3));
    std::fs::write(&trigger, "").expect("a file");
    for mode in ["background", "write-blocking"] {
        beside(&mut writer, || {
            let job = json!({ "kind": "commit", "disk": "over.qcow2", "mode": mode, "job": mode });
            control.get("job.start", job);
            let failed = wait_for(&mut control, mode, "failed")["error"].to_string();
            assert!(failed.contains("No space left"), "{failed}");
        });
    }
    writer.check();
    std::fs::remove_file(&trigger).expect("it was made");
    beside(&mut writer, || {
        ctl(&scratch, &["commit", "over.qcow2", "--job", "c"]).success();
        wait_for(&mut control, "c", "ready");
        ctl(&scratch, &["job", "c", "complete"]).success();
    });
    writer.check();
    assert_eq!(writer.client.flush(), 0);
    let bytes = writer.bytes();
    drop(writer);
    server.stop();
    let expected = scratch.image_of("expected", &bytes);
    let uri = nbd_uri("", &socket);
    qemu_img(&["compare", "-f", "raw", "-F", "raw", &uri, expected.str()]).success();
}

#[test]
fn what_cannot_be_committed_is_refused_with_a_reason() {
    let scratch = Scratch::new();
    let chain = Chain::new(&scratch, "base.qcow2", SIZE, "compat=1.1");
    let alone = new_image(&scratch, "alone.qcow2", "1M");
    let short = scratch.path("short.qcow2");
    let options = "backing_file=base.qcow2,backing_fmt=qcow2";
    qemu_img(&["create", "-f", "qcow2", "-o", options, str(&short), "1M"]).success();
    let (server, mut control) = serve(&scratch, &chain.overlay);
    for path in [&alone, &short] {
        control.get("disk.open", json!({ "path": path }));
    }
    let mut refused = |given, words: &[&str]| control.refused("job.start", given, FAILED, words);
    refused(json!({ "kind": "commit", "disk": "none" }), &["no disk is called"]);
    refused(json!({ "kind": "commit", "disk": "alone.qcow2" }), &["has no backing file"]);
    refused(json!({ "kind": "commit", "disk": "short.qcow2" }), &["more than the disk"]);
    // Another disk of this server has the same base.
    refused(
        json!({ "kind": "commit", "disk": "over.qcow2" }),
        &["layer of other disks", "short.qcow2"],
    );
    control.get("disk.close", json!({ "disk": "short.qcow2" }));
    // After the refusal the base is still locked.
    let outcome = blockhouse_tests::tool("qemu-io")
        .args(["-f", "qcow2", "-c", "write 0 512", str(&chain.base)])
        .output()
        .expect("it runs");
    let told = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert!(told.contains("lock"), "{told}");
    // A commit whose name is taken has not opened the base for writing.
    let target = scratch.path("mirror.img");
    let mirror = json!({ "kind": "mirror", "disk": "over.qcow2", "target": target, "job": "m" });
    control.get("job.start", mirror);
    control.get("job.cancel", json!({ "job": "m" }));
    wait_for(&mut control, "m", "cancelled");
    let mut refused = |given, words: &[&str]| control.refused("job.start", given, FAILED, words);
    refused(json!({ "kind": "commit", "disk": "over.qcow2", "job": "m" }), &["is called \"m\""]);
    refused(
        json!({ "kind": "stream", "disk": "over.qcow2", "base": "/none" }),
        &["none of its backing files"],
    );
    let invalid = json!({ "kind": "commit", "disk": "over.qcow2", "target": "/x" });
    control.refused("job.start", invalid, -32602, &["leave target"]);
    control.refused(
        "job.start",
        json!({ "kind": "mirror", "disk": "over.qcow2" }),
        -32602,
        &["target"],
    );
    control.get("job.start", json!({ "kind": "commit", "disk": "over.qcow2", "job": "c" }));
    wait_for(&mut control, "c", "ready");
    ctl(&scratch, &["job", "c", "complete"]).success();
    drop(control);
    server.stop();
    let bytes = bytes_of(&chain.blocks);
    chain.check_base(&scratch, &bytes);
}
