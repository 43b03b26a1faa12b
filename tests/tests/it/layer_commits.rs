//! Commits of lower layers of disks that clients write to, and files that a chain no longer uses:
//! the clients notice nothing, every image of the chain reads as before, and after any kill the
//! next server serves the right content.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{check_after_kill, json, qemu_img, str};
use blockhouse_tests::upgrade::{Servers, upgrade_under_load};
use blockhouse_tests::{Scratch, Server, seeded};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::fork::{image, written};
use crate::jobs::{FAILED, Writer, beside, bytes_of, ctl, serve, wait_for};
use crate::streams::assert_holds;

/// A served disk over three layers, and their contents.
struct Layered {
    scratch: Scratch,
    name: &'static str,
    /// The images, from the lowest up; the last one is the disk's.
    images: Vec<PathBuf>,
    /// The blocks of all images but the last one.
    contents: Vec<Vec<u64>>,
    writer: Writer,
    control: Control,
    server: Server,
}

impl Layered {
    fn new(name: &'static str, random: Rng) -> Self {
        let scratch = Scratch::new();
        let base = image(&scratch, name);
        let (server, control, mut writer) = written(&scratch, &base, random);
        let mut images = vec![base];
        let mut contents = Vec::new();
        for overlay in ["low.qcow2", "mid.qcow2", "over.qcow2"] {
            beside(&mut writer, || ());
            contents.push(writer.blocks());
            let overlay = scratch.path(overlay);
            ctl(&scratch, &["fork", name, "--overlay", str(&overlay)]).success();
            images.push(overlay);
        }
        Self { scratch, name, images, contents, writer, control, server }
    }

    fn commit(&self, words: &[&str]) -> blockhouse_tests::Outcome {
        ctl(&self.scratch, &[&["commit", self.name, "--job", "c"], words].concat())
    }

    /// The file names of the disk's chain, from QEMU.
    fn chain(&self) -> Vec<String> {
        let top = &self.images[3];
        let words = ["info", "-U", "--backing-chain", "--output=json", str(top)];
        let info: Value = json(&qemu_img(&words).success());
        let name = |image: &Value| {
            let path = Path::new(image["filename"].as_str().expect("text"));
            path.file_name().expect("a name").to_str().expect("text").to_owned()
        };
        info.as_array().expect("a list").iter().map(name).collect()
    }
}

fn record(image: &Path) -> PathBuf {
    let mut name = image.to_owned().into_os_string();
    name.push(".moved");
    name.into()
}

#[test]
fn layers_behind_a_disk_become_one() {
    let mut random = seeded();
    for name in ["disk.img", "disk.qcow2"] {
        let mut disk = Layered::new(name, random.fork());
        let [base, low, mid, _] = [0, 1, 2, 3].map(|index| disk.images[index].clone());
        // Commits the second lowest image into the lowest; the image above them is a layer, too.
        let words = ["commit", name, "--job", "c", "--top", str(&low), "--base", str(&base)];
        beside(&mut disk.writer, || {
            ctl(&disk.scratch, &words).success();
            ctl(&disk.scratch, &["job", "c", "complete"]).success();
            wait_for(&mut disk.control, "c", "completed");
        });
        assert_eq!(disk.chain(), ["over.qcow2", "mid.qcow2", name]);
        for (image, blocks) in [(&base, 1), (&low, 1), (&mid, 2)] {
            assert_holds(image, &disk.contents[blocks]);
        }
        disk.writer.check();
        // Commits the layers directly below the disk's own image; their files are removed.
        let words = ["commit", name, "--job", "d", "--top", str(&mid), "--delete"];
        // The file of the earlier commit is still an overlay of this layer, so the commit is
        // refused.
        ctl(&disk.scratch, &words).failure("low.qcow2");
        [low.clone(), record(&low)].iter().for_each(|file| fs::remove_file(file).expect("a file"));
        beside(&mut disk.writer, || {
            ctl(&disk.scratch, &words).success();
            wait_for(&mut disk.control, "d", "completed");
        });
        assert_eq!(disk.chain(), ["over.qcow2", name]);
        assert!(!mid.exists() && !record(&mid).exists(), "the chain has left it");
        assert_holds(&base, &disk.contents[2]);
        disk.writer.check();
        // The chain works like any other: it is upgraded and rolled back, and the base is a disk
        // again.
        let Layered { scratch, mut writer, control, server, contents, .. } = disk;
        let servers = Servers(&scratch);
        drop(control);
        beside(&mut writer, || upgrade_under_load(&scratch.socket("control")));
        writer.check();
        drop(writer);
        ctl(&scratch, &["rollback", name, "--force"]).success();
        servers.stop();
        drop(server);
        assert_holds(&base, &contents[2]);
        assert!(!scratch.path("over.qcow2").exists() && !record(&base).exists());
    }
}

#[test]
fn layers_that_others_stand_on_are_refused_by_name() {
    let mut disk = Layered::new("disk.qcow2", seeded());
    let [base, low, mid, over] = [0, 1, 2, 3].map(|index| disk.images[index].clone());
    let [base, low, mid, over] = [&base, &low, &mid, &over].map(|path| str(path));
    disk.commit(&["--top", low, "--base", mid]).failure("is not below");
    disk.commit(&["--top", low, "--base", low]).failure("is not below");
    disk.commit(&["--top", base]).failure("is not below");
    disk.commit(&["--top", "other.qcow2"]).failure("is none of its backing files");
    disk.commit(&["--base", low]).failure("is not the backing file of the disk's image");
    disk.commit(&["--top", mid, "--mode", "background"]).failure("leave mode out");
    let child = disk.scratch.path("child.qcow2");
    for layer in [low, base] {
        let words = ["create", "-f", "qcow2", "-F", "qcow2", "-b", layer, str(&child)];
        qemu_img(&words).success();
        disk.commit(&["--top", low, "--base", base]).failure("child.qcow2");
        fs::remove_file(&child).expect("a child");
    }
    let words = ["create", "-f", "qcow2", "-F", "qcow2", "-b", low, str(&child)];
    qemu_img(&words).success();
    disk.control.get("disk.open", json!({ "path": child, "name": "kid" }));
    for top in [mid, low] {
        disk.commit(&["--top", top, "--base", base]).failure("\"kid\"");
    }
    let stream = json!({ "kind": "stream", "disk": "disk.qcow2", "base": base, "delete": true });
    disk.control.refused("job.start", stream, FAILED, &["\"kid\""]);
    disk.control.get("disk.close", json!({ "disk": "kid" }));
    let stream = json!({ "kind": "stream", "disk": "disk.qcow2", "base": base, "delete": true });
    disk.control.refused("job.start", stream, FAILED, &["child.qcow2"]);
    let whole = json!({ "kind": "stream", "disk": "disk.qcow2", "delete": true });
    disk.control.refused("job.start", whole, FAILED, &["say base"]);
    let own = json!({ "kind": "commit", "disk": "disk.qcow2", "top": over, "backing-file": "x" });
    disk.control.refused("job.start", own, FAILED, &["leave backing-file out"]);
    fs::remove_file(&child).expect("a child");
    let words = ["create", "-f", "qcow2", "-F", "qcow2", "-b", over, str(&child)];
    qemu_img(&[&words[..1], &["-u"], &words[1..], &["32M"]].concat()).success();
    disk.commit(&["--delete"]).failure("child.qcow2");
    fs::remove_file(&child).expect("a child");
    beside(&mut disk.writer, || ());
    disk.writer.check();
    // None of these refusals has changed the chain.
    assert_eq!(disk.chain(), ["over.qcow2", "mid.qcow2", "low.qcow2", "disk.qcow2"]);
    (0..3).for_each(|index| assert_holds(&disk.images[index], &disk.contents[index]));
}

#[test]
fn a_stream_to_a_base_removes_the_files_of_what_is_between() {
    let mut disk = Layered::new("disk.img", seeded());
    let base = disk.images[0].clone();
    let words = ["stream", "disk.img", "--job", "s", "--base", str(&base), "--delete"];
    beside(&mut disk.writer, || {
        ctl(&disk.scratch, &words).success();
        wait_for(&mut disk.control, "s", "completed");
    });
    assert_eq!(disk.chain(), ["over.qcow2", "disk.img"]);
    for gone in &disk.images[1..3] {
        assert!(!gone.exists() && !record(gone).exists(), "{}", gone.display());
    }
    disk.writer.check();
    assert_holds(&base, &disk.contents[0]);
    let blocks = disk.writer.blocks();
    drop((disk.writer, disk.control));
    disk.server.stop();
    assert_holds(&disk.images[3], &blocks);
}

#[test]
fn a_commit_of_the_disk_removes_the_file_of_its_overlay() {
    let mut disk = Layered::new("disk.qcow2", seeded());
    let over = &disk.images[3];
    beside(&mut disk.writer, || {
        ctl(&disk.scratch, &["commit", "disk.qcow2", "--job", "c", "--delete"]).success();
        ctl(&disk.scratch, &["job", "c", "complete"]).success();
    });
    wait_for(&mut disk.control, "c", "completed");
    assert!(!over.exists() && !record(over).exists(), "the disk has left it");
    disk.writer.check();
    let blocks = disk.writer.blocks();
    drop((disk.writer, disk.control));
    disk.server.stop();
    assert_holds(&disk.images[2], &blocks);
}

#[test]
fn after_a_kill_the_disk_is_one_chain_or_the_other() {
    let mut random = seeded();
    for round in 0..6 {
        let name = ["disk.img", "disk.qcow2"][round % 2];
        let mut disk = Layered::new(name, random.fork());
        let top = [1, 2, 2][round % 3];
        let above = top + 1;
        let start = json!({
            "kind": "commit", "disk": name, "job": "c", "top": disk.images[top], "base": disk.images[0],
            "delete": round >= 3,
        });
        disk.control.get("job.start", start.clone());
        (0..random.usize(..200)).for_each(|index| disk.writer.write(index * 11));
        std::thread::sleep(Duration::from_micros(random.u64(..60_000)));
        disk.server.signal(Signal::KILL);
        let blocks = disk.writer.blocks();
        let chain = disk.chain();
        let is_done = chain.len() < 4;
        let Layered { scratch, images, contents, writer, control, server, .. } = disk;
        drop((writer, control, server));
        assert!(!is_done || chain.len() == 4 - top, "{chain:?}");
        assert!(is_done || images.iter().all(|image| image.exists()), "{chain:?}");
        let (server, mut control) = serve(&scratch, &images[3]);
        let mut writer = Writer::on(&server.address(), blocks, random.fork());
        writer.check();
        if !is_done {
            let again = json!({
                "kind": "commit", "disk": "over.qcow2", "job": "d", "top": images[top], "base": images[0],
            });
            beside(&mut writer, || {
                control.get("job.start", again);
                wait_for(&mut control, "d", "completed");
            });
        }
        writer.check();
        drop((writer, control));
        server.stop();
        assert_holds(&images[0], &contents[top]);
        if let Some(blocks) = contents.get(above) {
            assert_holds(&images[above], blocks);
        }
        for image in &images[above..] {
            check_after_kill(image);
        }
    }
}

#[test]
fn qemu_goes_on_with_what_was_committed_and_the_other_way_round() {
    let scratch = Scratch::new();
    let chain = ["a.qcow2", "b.qcow2", "c.qcow2", "d.qcow2"].map(|name| scratch.path(name));
    let blocks: Vec<u64> = (1..=crate::jobs::SIZE / crate::jobs::BLOCK).collect();
    let raw = scratch.image_of("raw", &bytes_of(&blocks));
    let words = ["convert", "-f", "raw", "-O", "qcow2", raw.str(), str(&chain[0])];
    qemu_img(&words).success();
    for pair in chain.windows(2) {
        let name = pair[0].file_name().expect("a name").to_str().expect("text");
        qemu_img(&["create", "-f", "qcow2", "-F", "qcow2", "-b", name, str(&pair[1])]).success();
    }
    let (server, mut control) = serve(&scratch, &chain[3]);
    let mut writer = Writer::on(&server.address(), blocks, seeded());
    // Commits an empty layer into an image that is not the lowest.
    let start = json!({
        "kind": "commit", "disk": "d.qcow2", "job": "c", "top": chain[2], "base": chain[1],
        "backing-file": "./b.qcow2",
    });
    control.get("job.start", start);
    beside(&mut writer, || wait_for(&mut control, "c", "completed"));
    let info = qemu_img(&["info", "-U", "--output=json", str(&chain[3])]);
    assert_eq!(json(&info.success())["backing-filename"], "./b.qcow2");
    let blocks = writer.blocks();
    drop((writer, control));
    server.stop();
    qemu_img(&["commit", "-f", "qcow2", str(&chain[3])]).success();
    assert_holds(&chain[1], &blocks);
    qemu_img(&["check", "-f", "qcow2", str(&chain[1])]).success();
}
