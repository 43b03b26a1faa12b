//! Disks over the same images: the server opens each image once, and keeps it locked as long as one
//! of the disks needs it, in whatever order the disks are closed.

use std::path::{Path, PathBuf};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{qemu_img, qemu_io, str};
use blockhouse_tests::nbd::{Framing, Greeted};
use blockhouse_tests::upgrade::{Servers, upgrade_under_load};
use blockhouse_tests::{Scratch, Server, eventually, nbd_uri, need, require, tool};
use rustix::process::Pid;
use serde_json::json;

use crate::jobs::{LONG, ctl, serve, wait_for};

const DISKS: usize = 5;
const SIZE: &str = "8M";

/// Overlays over an image with a backing file, made by QEMU; each overlay has its own cluster.
struct Overlays {
    scratch: Scratch,
    low: PathBuf,
    base: PathBuf,
    tops: Vec<PathBuf>,
}

impl Overlays {
    fn new() -> Self {
        require_tools();
        let scratch = Scratch::new();
        let [low, base] = ["low.img", "base.qcow2"].map(|name| scratch.path(name));
        qemu_img(&["create", "-f", "raw", str(&low), SIZE]).success();
        qemu_io("raw", &low, &["write -P 1 0 8M"]);
        let over = |image: &Path, format, below: &str| {
            let words = ["create", "-f", "qcow2", "-F", format, "-b", below, str(image)];
            qemu_img(&words).success();
        };
        over(&base, "raw", "low.img");
        qemu_io("qcow2", &base, &["write -P 2 1M 1M"]);
        let tops: Vec<_> =
            (0..DISKS).map(|number| scratch.path(&format!("top{number}.qcow2"))).collect();
        for (number, top) in tops.iter().enumerate() {
            over(top, "qcow2", "base.qcow2");
            qemu_io("qcow2", top, &[&format!("write -P {} 2M 1M", 10 + number)]);
        }
        Self { scratch, low, base, tops }
    }

    /// Starts a server of all overlays, which has no more descriptors of the backing images than
    /// with one overlay.
    fn serve(&self) -> (Server, Control) {
        let (server, mut control) = serve(&self.scratch, &self.tops[0]);
        let before = self.opened(server.pid());
        for number in 1..DISKS {
            self.open(&mut control, number);
        }
        assert_eq!(self.opened(server.pid()), before);
        (server, control)
    }

    /// The number of descriptors of the backing images in a process.
    fn opened(&self, process: Pid) -> usize {
        let folder = format!("/proc/{}/fd", process.as_raw_nonzero());
        let all = std::fs::read_dir(folder).expect("a process").flatten();
        let links = all.filter_map(|one| std::fs::read_link(one.path()).ok());
        links.filter(|link| *link == self.low || *link == self.base).count()
    }

    fn open(&self, control: &mut Control, number: usize) {
        control.get("disk.open", json!({ "path": self.tops[number] }));
        let uri = nbd_uri(&name(number), self.scratch.socket("nbd"));
        ctl(&self.scratch, &["export", &name(number), &uri]).success();
    }

    /// Checks that a disk has its own byte, and those of its backing images.
    fn check(&self, server: &Server, number: usize) {
        let export = if number == 0 { String::new() } else { name(number) };
        let mut client = Greeted::new(&server.address()).go(&export, Framing::Simple);
        for (offset, byte) in [(0, 1), (1 << 20, 2), (2 << 20, 10 + number as u8)] {
            assert_eq!(client.read(offset, 4096), Ok(vec![byte; 4096]), "{number} at {offset}");
        }
        client.disconnect();
    }

    fn check_all(&self, server: &Server) {
        (0..DISKS).for_each(|number| self.check(server, number));
    }

    /// Checks that no other program can write to the two backing images.
    fn check_locked(&self) {
        for (format, image) in [("raw", &self.low), ("qcow2", &self.base)] {
            let words = ["-f", format, "-c", "write 0 512", str(image)];
            let outcome = tool("qemu-io").args(words).output().expect("it runs");
            let told = String::from_utf8_lossy(&outcome.stderr).into_owned();
            assert!(told.contains("lock"), "{told}");
        }
    }
}

fn require_tools() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
}

fn name(number: usize) -> String {
    format!("top{number}.qcow2")
}

#[test]
fn an_image_below_many_disks_is_open_once() {
    let overlays = Overlays::new();
    let (server, mut control) = overlays.serve();
    overlays.check_all(&server);
    let before = overlays.opened(server.pid());
    // The disk that has opened the images is closed first.
    control.get("disk.close", json!({ "disk": name(0), "force": true }));
    (1..DISKS).for_each(|number| overlays.check(&server, number));
    overlays.check_locked();
    // A disk that is opened later uses the open images.
    control.get("disk.close", json!({ "disk": name(1), "force": true }));
    overlays.open(&mut control, 1);
    overlays.check(&server, 1);
    assert_eq!(overlays.opened(server.pid()), before);
    for number in 1..DISKS {
        control.get("disk.close", json!({ "disk": name(number), "force": true }));
    }
    assert!(eventually(LONG, || overlays.opened(server.pid()) == 0));
    qemu_io("qcow2", &overlays.base, &["write -P 2 1M 64k"]);
    server.stop();
}

#[test]
fn a_disk_that_leaves_an_image_or_writes_to_it_changes_none_of_the_others() {
    let overlays = Overlays::new();
    let (server, mut control) = overlays.serve();
    let words = ["stream", &name(1), "--job", "s"];
    ctl(&overlays.scratch, &words).success();
    wait_for(&mut control, "s", "completed");
    overlays.check_all(&server);
    overlays.check_locked();
    let refused = json!({ "kind": "commit", "disk": name(2), "job": "c" });
    control.refused("job.start", refused, crate::jobs::FAILED, &["layer of other disks"]);
    overlays.check_all(&server);
    overlays.check_locked();
    // With only one disk left over the image, the disk can be committed into it.
    for number in [0, 3, 4] {
        control.get("disk.close", json!({ "disk": name(number), "force": true }));
        // The commit would corrupt these overlays, so it is refused while their files exist.
        std::fs::remove_file(&overlays.tops[number]).expect("a file");
    }
    ctl(&overlays.scratch, &["commit", &name(2), "--job", "c"]).success();
    wait_for(&mut control, "c", "ready");
    // A disk that is opened while the commit writes to the image cannot use it.
    let late = overlays.scratch.path("late.qcow2");
    let base = ["create", "-f", "qcow2", "-F", "qcow2", "-u", "-b", "base.qcow2"];
    qemu_img(&[&base[..], &[str(&late), SIZE]].concat()).success();
    control.refused("disk.open", json!({ "path": late }), crate::jobs::FAILED, &["base.qcow2"]);
    std::fs::remove_file(late).expect("a file");
    ctl(&overlays.scratch, &["job", "c", "complete"]).success();
    overlays.check(&server, 1);
    overlays.check(&server, 2);
    server.stop();
    qemu_img(&["check", "-f", "qcow2", str(&overlays.base)]).success();
}

#[test]
fn an_upgrade_hands_them_over_once() {
    let overlays = Overlays::new();
    let (server, control) = overlays.serve();
    let before = overlays.opened(server.pid());
    drop(control);
    let servers = Servers(&overlays.scratch);
    for _ in 0..2 {
        upgrade_under_load(&overlays.scratch.socket("control"));
        servers.wait_for(1);
        overlays.check_all(&server);
        overlays.check_locked();
        assert_eq!(overlays.opened(servers.running()[0]), before);
    }
    servers.stop();
    drop(server);
    qemu_io("qcow2", &overlays.base, &["write -P 2 1M 64k"]);
}
