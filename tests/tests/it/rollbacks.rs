//! Rollbacks: a disk has its content at the fork again, its overlay is removed, and images that
//! others use are not changed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, qemu_img, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::upgrade::{Servers, upgrade_under_load};
use blockhouse_tests::{LoopDevice, Scratch, Serve, Server, need, require, seeded};
use rustix::process::Signal;
use serde_json::json;

use crate::fork::{check_file, image, path_of, written};
use crate::forks_bitmaps::dirty;
use crate::jobs::{FAILED, SIZE, Writer, beside, ctl, serve};

/// A forked disk with a server and a client, and the disk's content at the fork.
struct Forked {
    scratch: Scratch,
    layer: PathBuf,
    over: PathBuf,
    server: Server,
    control: Control,
    writer: Writer,
    before: Vec<u64>,
}

impl Forked {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new();
        let layer = image(&scratch, name);
        let (server, control, writer) = written(&scratch, &layer, seeded());
        let over = scratch.path("over.qcow2");
        let before = writer.blocks();
        ctl(&scratch, &["fork", name, "--overlay", str(&over)]).success();
        let mut forked = Self { scratch, layer, over, server, control, writer, before };
        beside(&mut forked.writer, || ());
        forked
    }

    fn record(&self) -> PathBuf {
        let mut path = self.layer.clone().into_os_string();
        path.push(".moved");
        path.into()
    }

    fn name(&self) -> &str {
        self.layer.file_name().and_then(|name| name.to_str()).expect("a name")
    }

    fn refused(&self, words: &[&str], why: &str) {
        let words = [&["rollback", self.name()], words].concat();
        ctl(&self.scratch, &words).failure(why);
        assert!(self.over.exists() && self.record().exists());
    }
}

#[test]
fn a_disk_is_what_it_was_and_can_be_forked_again() {
    for name in ["disk.img", "disk.qcow2"] {
        let forked = Forked::new(name);
        forked.refused(&[], "has clients (");
        let record = forked.record();
        let Forked { scratch, layer, over, server, mut control, writer, before } = forked;
        drop(writer);
        let said = ctl(&scratch, &["rollback", name]).success().stdout;
        assert!(said.contains("is ") && said.contains("again"), "{said}");
        assert!(!over.exists() && !record.exists());
        assert_eq!(path_of(&mut control, name), str(&layer));
        let mut writer = Writer::on(&server.address(), before, seeded());
        writer.check();
        beside(&mut writer, || ());
        writer.check();
        // The disk works like any other: it is forked again, upgraded, and rolled back again, now
        // with a client.
        ctl(&scratch, &["fork", name, "--overlay", str(&over)]).success();
        let at_fork = writer.blocks();
        beside(&mut writer, || ());
        drop(control);
        let servers = Servers(&scratch);
        beside(&mut writer, || upgrade_under_load(&scratch.socket("control")));
        ctl(&scratch, &["rollback", name, "--force"]).success();
        drop(writer);
        let mut writer = Writer::on(&server.address(), at_fork, seeded());
        writer.check();
        beside(&mut writer, || upgrade_under_load(&scratch.socket("control")));
        writer.check();
        let blocks = writer.blocks();
        drop(writer);
        servers.stop();
        drop(server);
        assert!(!over.exists() && !record.exists());
        let server = Serve::new(&scratch, &layer).start();
        Writer::on(&server.address(), blocks, seeded()).check();
        server.stop();
        if name == "disk.qcow2" {
            qemu_img(&["check", "-f", "qcow2", str(&layer)]).success();
        }
    }
}

#[test]
fn the_overlay_s_space_is_free_at_once() {
    let forked = Forked::new("disk.img");
    drop(forked.writer);
    ctl(&forked.scratch, &["rollback", "disk.img"]).success();
    let process = forked.server.pid().as_raw_nonzero();
    let all = std::fs::read_dir(format!("/proc/{process}/fd")).expect("a process").flatten();
    let gone = all.map(|one| one.path()).filter(|path| {
        let link = std::fs::read_link(path).unwrap_or_default();
        link.to_string_lossy().ends_with("over.qcow2 (deleted)")
    });
    for path in gone {
        assert_eq!(std::fs::metadata(path).expect("it is open").blocks(), 0);
    }
}

#[test]
fn another_name_of_the_overlay_keeps_what_it_has() {
    let forked = Forked::new("disk.img");
    drop(forked.writer);
    // Beside the layer it would be another overlay.
    let folder = forked.scratch.path("kept");
    std::fs::create_dir(&folder).expect("a folder");
    let kept = folder.join("over.qcow2");
    std::fs::hard_link(&forked.over, &kept).expect("a link");
    ctl(&forked.scratch, &["rollback", "disk.img"]).success();
    assert!(!forked.over.exists() && std::fs::metadata(&kept).expect("the link").len() > 0);
}

#[test]
fn a_layer_that_others_stand_on_is_left_alone_and_they_are_named() {
    for name in ["disk.img", "disk.qcow2"] {
        let mut forked = Forked::new(name);
        let scratch = &forked.scratch;
        // Another disk of this server over the same layer, opened over the control socket.
        let kid = scratch.path("kid.qcow2");
        let format = if name == "disk.img" { "raw" } else { "qcow2" };
        command(&["create", "-b", str(&forked.layer), "-F", format, str(&kid)]).success();
        forked.refused(&["--force"], "kid.qcow2");
        forked.control.get("disk.open", json!({ "path": kid, "name": "kid" }));
        forked.refused(&["--force"], "\"kid\"");
        let commit = json!({ "kind": "commit", "disk": name, "job": "c" });
        forked.control.refused("job.start", commit, FAILED, &["\"kid\""]);
        forked.control.get("disk.close", json!({ "disk": "kid" }));
        // Another program uses the layer, by an overlay elsewhere.
        let elsewhere = Scratch::new();
        let other = elsewhere.path("other.qcow2");
        command(&["create", "-b", str(&forked.layer), "-F", format, str(&other)]).success();
        std::fs::remove_file(&kid).expect("it is there");
        let folder = forked.layer.parent().expect("a folder").to_owned();
        let server = Serve::new(&elsewhere, &other).option("--allow-path", &folder).start();
        forked.refused(&["--force"], "lock");
        server.stop();
        beside(&mut forked.writer, || ());
        forked.writer.check();
        let Forked { scratch, server, writer, control, over, .. } = forked;
        let blocks = writer.blocks();
        drop((writer, control));
        server.stop();
        check_file(&scratch, &over, &blocks);
    }
}

#[test]
fn what_is_no_fork_s_overlay_is_not_rolled_back() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.qcow2");
    let over = scratch.path("over.qcow2");
    command(&["create", "-b", str(&path), "-F", "qcow2", str(&over)]).success();
    let (server, mut control) = serve(&scratch, &over);
    ctl(&scratch, &["rollback", "over.qcow2"]).failure("no fork of");
    ctl(&scratch, &["rollback", "none"]).failure("no disk is called");
    let alone = image(&scratch, "alone.img");
    control.get("disk.open", json!({ "path": alone }));
    ctl(&scratch, &["rollback", "alone.img"]).failure("stands on no layer");
    ctl(&scratch, &["fork", "over.qcow2"]).success();
    let size = 64 << 20;
    control.get("disk.resize", json!({ "disk": "over.qcow2", "size": size }));
    ctl(&scratch, &["rollback", "over.qcow2"]).failure("bytes, and");
    let next = PathBuf::from(path_of(&mut control, "over.qcow2"));
    drop(control);
    server.stop();
    assert!(next.exists());
    command(&["serve", str(&over)]).failure("goes on in");
}

/// Other tests kill servers at each step of a rollback; here the server is killed right after it.
#[test]
fn after_a_kill_the_layer_is_the_disk() {
    for name in ["disk.img", "disk.qcow2"] {
        let Forked { scratch, layer, mut server, control, writer, before, .. } = Forked::new(name);
        drop((control, writer));
        ctl(&scratch, &["rollback", name]).success();
        let mut writer = Writer::on(&server.address(), before, seeded());
        beside(&mut writer, || ());
        let blocks = writer.blocks();
        server.signal(Signal::KILL);
        server.wait(crate::jobs::LONG);
        drop(writer);
        let server = Serve::new(&scratch, &layer).start();
        Writer::on(&server.address(), blocks, seeded()).check();
        server.stop();
    }
}

/// An incremental backup on a backup of any moment, also of one after the fork, has all
/// differences.
#[test]
fn bitmaps_of_the_layer_say_what_the_overlay_had_changed() {
    require!(need::tools(&["nbdinfo"]));
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let path = image(&scratch, name);
        command(&["bitmap", "add", str(&path), "changes"]).success();
        let (server, control) = serve(&scratch, &path);
        let write = |at: u64| {
            let mut client = Client::open(&server.address());
            assert_eq!(client.write(at << 20, &[1; 65_536], 0), 0);
        };
        write(1);
        ctl(&scratch, &["fork", name]).success();
        write(3);
        ctl(&scratch, &["bitmap", "clear", name, "changes"]).success();
        write(5);
        ctl(&scratch, &["rollback", name, "--force"]).success();
        write(7);
        drop(control);
        server.stop();
        let wanted = [1, 3, 5, 7].map(|at: u64| (at << 20, 65_536));
        assert_eq!(dirty(&scratch, Path::new(&path), "changes"), wanted, "{name}");
    }
}

/// Removes the record of a device, which is not in the test's folder, because the next device may
/// have the same name.
struct RemovedAtTheEnd(PathBuf);

impl Drop for RemovedAtTheEnd {
    fn drop(&mut self) {
        // The file may not exist.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_block_device_with_bitmaps_beside_it_is_forked() {
    let scratch = Scratch::new();
    let file = scratch.image("device", SIZE);
    let device = require!(LoopDevice::over(&file, &[]));
    let _record = RemovedAtTheEnd(PathBuf::from(format!("{}.moved", device.path().display())));
    let socket = scratch.socket("control");
    let serve = Serve::new(&scratch, device.path()).option("--name", "disk");
    // The record is beside the device, in a folder that the sandbox does not allow.
    let serve = serve.option("--bitmaps", scratch.path("disk.bitmaps")).option("--sandbox", "off");
    let server = serve.option("--control", &socket).start();
    let mut control = Control::connect(&socket);
    control.get("bitmap.add", json!({ "disk": "disk", "name": "changes" }));
    let mut writer = Writer::new(&server.address(), seeded());
    ctl(&scratch, &["fork", "disk"]).failure("name an overlay elsewhere");
    let over = scratch.path("over.qcow2");
    ctl(&scratch, &["fork", "disk", "--overlay", str(&over)]).success();
    beside(&mut writer, || ());
    writer.check();
    let bitmaps = |control: &mut Control| {
        control.get("bitmap.list", json!({ "disk": "disk" }))[0]["name"].clone()
    };
    assert_eq!(bitmaps(&mut control), "changes");
    // Opening the device for the rollback needs exclusive access.
    ctl(&scratch, &["rollback", "disk", "--force"]).failure("in use");
    assert!(over.exists() && bitmaps(&mut control) == "changes");
    beside(&mut writer, || ());
    writer.check();
    drop((writer, control));
    server.stop();
}
