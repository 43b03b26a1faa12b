//! Bitmaps of forked disks: they are compared with those of a disk that gets the same changes and
//! is not forked.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::nbd::{Client, command as nbd};
use blockhouse_tests::upgrade::upgrade_under_load;
use blockhouse_tests::{Scratch, Serve, Server, nbd_uri, need, require, run, seeded, tool};
use fastrand::Rng;
use serde_json::json;

use crate::fork::{image, path_of};
use crate::jobs::{SIZE, ctl, serve};
use crate::raw_bitmaps::dirty_extents;

/// Names and granularities of the bitmaps.
const BITMAPS: [(&str, &str); 3] = [("fine", "512"), ("usual", "64K"), ("coarse", "2M")];

/// The changed ranges of an image that is not served.
pub(crate) fn dirty(scratch: &Scratch, image: &Path, name: &str) -> Vec<(u64, u64)> {
    let serve = Serve::bare(scratch, image).flag("--read-only").option("--bitmap", name);
    let socket = scratch.socket("look");
    let server = serve.export(&nbd_uri("", &socket)).start();
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let told = json(&run(tool("nbdinfo").args(["--json", &map, server.uri()])).success());
    server.stop();
    dirty_extents(&told)
}

/// A disk of a server that is forked, and one that gets the same changes and is not.
struct Twins {
    clients: [Client; 2],
    random: Rng,
}

impl Twins {
    fn change(&mut self) {
        let sectors = SIZE / 512;
        let offset = self.random.u64(..sectors - 64) * 512;
        let length = self.random.u64(1..=64) * 512;
        let (byte, kind) = (self.random.u8(1..), self.random.u8(..4));
        for client in &mut self.clients {
            let error = match kind {
                0 => client.simple(nbd::WRITE_ZEROES, offset, length, 0),
                _ => client.write(offset, &vec![byte; length as usize], 0),
            };
            assert_eq!(error, 0);
        }
    }

    /// Changes both disks while `act` runs, and a few times more.
    fn beside(&mut self, act: impl FnOnce()) {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    self.change();
                }
            });
            act();
            stop.store(true, Ordering::SeqCst);
            changing.join().expect("the clients go on");
        });
        (0..20).for_each(|_| self.change());
    }
}

fn bitmap(scratch: &Scratch, words: &[&str]) {
    ctl(scratch, &[&["bitmap"], words].concat()).success();
}

#[test]
fn an_increment_after_forks_is_that_of_a_disk_that_was_not_forked() {
    require!(need::tools(&["nbdinfo", "qemu-img"]));
    let mut random = seeded();
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let (path, twin) = (image(&scratch, name), image(&scratch, &format!("twin-{name}")));
        let (control, socket) = (scratch.socket("control"), scratch.socket("nbd"));
        let serve = Serve::bare(&scratch, &path).also(&twin).option("--control", &control);
        let server = serve.export(&nbd_uri("", &socket)).start();
        let disks = [name.to_owned(), format!("twin-{name}")];
        let clients = disks.each_ref().map(|disk| Client::at(&socket, disk));
        let mut twins = Twins { clients, random: random.fork() };
        (0..50).for_each(|_| twins.change());
        for disk in &disks {
            for (name, granularity) in BITMAPS {
                bitmap(&scratch, &["add", "-g", granularity, disk, name]);
            }
            bitmap(&scratch, &["add", "-g", "4K", disk, "idle"]);
        }
        (0..50).for_each(|_| twins.change());
        disks.iter().for_each(|disk| bitmap(&scratch, &["disable", disk, "idle"]));
        twins.beside(|| {
            for _ in 0..4 {
                ctl(&scratch, &["fork", name]).success();
            }
        });
        // One bitmap is cleared between forks.
        disks.iter().for_each(|disk| bitmap(&scratch, &["clear", disk, "usual"]));
        twins.beside(|| {
            ctl(&scratch, &["fork", name]).success();
            if name == "disk.qcow2" {
                upgrade_under_load(&control);
            }
            ctl(&scratch, &["fork", name]).success();
        });
        let mut control = Control::connect(&control);
        let overlay = path_of(&mut control, name);
        let listed = control.get("bitmap.list", json!({ "disk": name }));
        assert_eq!(listed.as_array().map(Vec::len), Some(BITMAPS.len() + 1), "{listed}");
        drop((twins, control));
        match name {
            "disk.qcow2" => blockhouse_tests::upgrade::Servers(&scratch).stop(),
            _ => server.stop(),
        }
        let overlay = PathBuf::from(overlay);
        assert_ne!(overlay, path);
        for name in BITMAPS.map(|(name, _)| name).into_iter().chain(["idle"]) {
            let (ours, theirs) = (dirty(&scratch, &overlay, name), dirty(&scratch, &twin, name));
            assert!(!theirs.is_empty() && ours == theirs, "{name}: {ours:?}, not {theirs:?}");
        }
        qemu_img(&["check", "-f", "qcow2", str(&overlay)]).success();
        command(&["compare", str(&overlay), str(&twin)]).success();
    }
}

#[test]
fn a_layer_keeps_its_bitmaps_and_a_child_begins_without() {
    require!(need::tools(&["nbdinfo"]));
    let mut random = seeded();
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let path = image(&scratch, name);
        command(&["bitmap", "add", str(&path), "changes"]).success();
        let (server, mut control) = serve(&scratch, &path);
        let mut client = Client::open(&server.address());
        let block = |client: &mut Client, at: u64, byte: u8| {
            assert_eq!(client.write(at << 20, &[byte; 65_536], 0), 0);
        };
        block(&mut client, random.u64(1..2), 1);
        let kid = scratch.path("kid.qcow2");
        let child = format!("kid={}", kid.display());
        ctl(&scratch, &["fork", name, "--child", &child]).success();
        let none = control.get("bitmap.list", json!({ "disk": "kid" }));
        assert_eq!(none, json!([]));
        block(&mut client, 3, 2);
        let over = PathBuf::from(path_of(&mut control, name));
        drop((client, control));
        server.stop();
        let extent = |at: u64| (at << 20, 65_536);
        assert_eq!(dirty(&scratch, &path, "changes"), [extent(1)], "{name}");
        assert_eq!(dirty(&scratch, &over, "changes"), [extent(1), extent(3)], "{name}");
    }
}

#[test]
fn an_external_snapshot_of_an_image_has_its_bitmaps_go_on() {
    require!(need::tools(&["nbdinfo"]));
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let path = image(&scratch, name);
        command(&["bitmap", "add", str(&path), "changes"]).success();
        let write = |path: &Path, at: u64| {
            let (server, control) = serve(&scratch, path);
            let mut client = Client::open(&server.address());
            assert_eq!(client.write(at << 20, &[1; 65_536], 0), 0);
            drop((client, control));
            server.stop();
        };
        write(&path, 1);
        let over = scratch.path("over.qcow2");
        command(&["snapshot", "create", "--external", str(&over), str(&path)]).success();
        assert_eq!(dirty(&scratch, &over, "changes"), [(1 << 20, 65_536)], "{name}");
        write(&over, 3);
        let both = [(1 << 20, 65_536), (3 << 20, 65_536)];
        assert_eq!(dirty(&scratch, &over, "changes"), both, "{name}");
        assert_eq!(dirty(&scratch, &path, "changes"), both[..1], "{name}");
    }
}

/// The bitmaps of a raw layer, in its side file, record the data that a commit copies into it.
#[test]
fn the_bitmaps_of_a_layer_have_what_a_commit_brings_into_it() {
    require!(need::tools(&["nbdinfo"]));
    for (name, is_opened_anew) in [("disk.img", false), ("disk.img", true), ("disk.qcow2", false)] {
        let scratch = Scratch::new();
        let path = image(&scratch, name);
        command(&["bitmap", "add", str(&path), "changes"]).success();
        let (mut server, mut control) = serve(&scratch, &path);
        let write = |server: &Server, at: u64| {
            let mut client = Client::open(&server.address());
            assert_eq!(client.write(at << 20, &[1; 65_536], 0), 0);
        };
        write(&server, 1);
        ctl(&scratch, &["fork", name]).success();
        write(&server, 3);
        let mut disk = name.to_owned();
        if is_opened_anew {
            let over = PathBuf::from(path_of(&mut control, name));
            drop(control);
            server.stop();
            disk = over.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
            (server, control) = serve(&scratch, &over);
        }
        ctl(&scratch, &["commit", &disk, "--job", "merge"]).success();
        control.get("job.complete", json!({ "job": "merge" }));
        write(&server, 5);
        let listed = control.get("bitmap.list", json!({ "disk": disk }));
        assert_eq!(listed[0]["name"], "changes", "{listed}");
        drop(control);
        server.stop();
        let extents = [1, 3, 5].map(|at| (at << 20, 65_536));
        assert_eq!(dirty(&scratch, &path, "changes"), extents, "{name}");
    }
}
