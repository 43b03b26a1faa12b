//! Backups as files: interrupted ones are resumed, and `restore` makes disks of backups without
//! changing existing files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhouse_tests::image_tool::{command, qemu_img, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{
    LoopDevice, Scratch, Serve, blockhouse, need, random_bytes, require, seeded, wait_for_exit,
};
use fastrand::Rng;
use rustix::fs::{Mode, OFlags};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(120);

/// A disk with a bitmap, its full backup, and the content of the disk after changes that the bitmap
/// has.
struct Bench {
    scratch: Scratch,
    disk: PathBuf,
    base: PathBuf,
    bytes: Vec<u8>,
    random: Rng,
}

impl Bench {
    fn new() -> Self {
        let scratch = Scratch::new();
        let [disk, base] = ["disk.qcow2", "base.qcow2"].map(|name| scratch.path(name));
        command(&["create", str(&disk), "32M"]).success();
        let bytes = vec![0; 32 << 20];
        let mut bench = Self { scratch, disk, base, bytes, random: seeded() };
        bench.write(0..12);
        command(&["bitmap", "add", str(&bench.disk), "since"]).success();
        command(&["backup", str(&bench.disk), str(&bench.base)]).success();
        bench.write(4..20);
        bench
    }

    /// Writes to these MiB of the disk.
    fn write(&mut self, mib: std::ops::Range<u64>) {
        let server = Serve::new(&self.scratch, &self.disk).start();
        let mut client = Client::open(&server.address());
        for at in mib {
            let bytes = random_bytes(&mut self.random, MIB as usize);
            assert_eq!(client.write(at * MIB, &bytes, 0), 0);
            self.bytes[(at * MIB) as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        drop(client);
        server.stop();
    }

    /// The arguments of a backup, full or incremental.
    fn backup(&self, target: &Path, is_increment: bool) -> Vec<String> {
        let mut words = vec!["backup", str(&self.disk), str(target)];
        if is_increment {
            words.extend(["--incremental", "since", "--base", str(&self.base)]);
        }
        words.into_iter().map(str::to_owned).collect()
    }

    /// The content of an image, as QEMU reads it.
    fn read(&self, image: &Path) -> Vec<u8> {
        let raw = self.scratch.path("read.img");
        qemu_img(&["check", str(image)]).success();
        qemu_img(&["convert", "-O", "raw", str(image), str(&raw)]).success();
        std::fs::read(raw).expect("a copy")
    }
}

fn part(target: &Path) -> PathBuf {
    target.with_extension("qcow2.part")
}

fn run(words: &[String], more: &[&str]) -> blockhouse_tests::Outcome {
    let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
    command(&words)
}

#[test]
fn a_backup_that_was_cut_goes_on() {
    require!(need::tools(&["qemu-img"]));
    let mut bench = Bench::new();
    let hint = "run the command again with --resume";
    for is_increment in [false, true] {
        let target = bench.scratch.path(if is_increment { "day.qcow2" } else { "all.qcow2" });
        let words = bench.backup(&target, is_increment);
        run(&words, &["--resume"]).failure("no backup to resume");
        // Cuts the file, so that the end of the disk's data cannot be read.
        let whole = std::fs::read(&bench.disk).expect("it is there");
        std::fs::write(&bench.disk, &whole[..whole.len() - (3 << 20)]).expect("shorter");
        run(&words, &[]).failure(hint);
        assert!(part(&target).exists() && !target.exists());
        run(&words, &["--resume"]).failure(hint);
        run(&words, &[]).failure("is left of an earlier command");
        std::fs::write(&bench.disk, &whole).expect("as it was");
        // The resumed backup has a later moment of the disk.
        bench.write(6..7);
        run(&words, &["--resume", "--verify"]).success();
        assert!(!part(&target).exists());
        assert!(bench.read(&target) == bench.bytes, "the backup is another");
    }
}

/// The bytes of a file in the host's page cache.
fn cached(file: &Path) -> u64 {
    let words = ["--bytes", "--noheadings", "--output", "RES", str(file)];
    let found = blockhouse_tests::run(blockhouse_tests::tool("fincore").args(words));
    found.stdout.trim().parse().expect("a number")
}

#[test]
fn a_backup_leaves_the_page_cache_to_others() {
    require!(need::tools(&["fincore"]));
    let bench = Bench::new();
    let direct = OFlags::RDONLY | OFlags::DIRECT;
    if rustix::fs::open(&bench.base, direct, Mode::empty()).is_err() {
        return eprintln!("skipped: the file system of the test's folder has no direct I/O");
    }
    for is_increment in [false, true] {
        let target = bench.scratch.path(if is_increment { "day.qcow2" } else { "all.qcow2" });
        run(&bench.backup(&target, is_increment), &["--verify"]).success();
        let (size, cached) = (target.metadata().expect("it is there").len(), cached(&target));
        assert!(size > 12 * MIB && cached < MIB, "{cached} of {size} bytes are in the page cache");
    }
}

#[test]
fn the_source_is_no_base_of_its_own_backup() {
    let bench = Bench::new();
    let [symbolic, hard, new] =
        ["link.qcow2", "hard.qcow2", "new.qcow2"].map(|name| bench.scratch.path(name));
    std::os::unix::fs::symlink(&bench.disk, &symbolic).expect("a link");
    std::fs::hard_link(&bench.disk, &hard).expect("a link");
    for base in [&bench.disk, &symbolic, &hard] {
        let words = ["backup", "--incremental", "since", "--base", str(base)];
        let refused = command(&[&words[..], &[str(&bench.disk), str(&new)]].concat());
        refused.failure("is the source itself");
        assert!(!new.exists() && !part(&new).exists());
    }
}

#[test]
fn another_image_is_not_gone_on_with() {
    let bench = Bench::new();
    let target = bench.scratch.path("day.qcow2");
    command(&["create", "--format", "qcow2", str(&part(&target)), "16M"]).success();
    run(&bench.backup(&target, false), &["--resume"]).failure("is no part of this backup");
    std::fs::remove_file(part(&target)).expect("it is there");
    command(&["create", "--format", "qcow2", str(&part(&target)), "32M"]).success();
    run(&bench.backup(&target, true), &["--resume"]).failure("is no part of this backup");
    std::fs::write(part(&target), [7; 4096]).expect("it is there");
    run(&bench.backup(&target, true), &["--resume"]).failure("cannot be resumed");
}

#[test]
fn a_backup_that_is_killed_again_and_again_goes_on() {
    require!(need::tools(&["qemu-img"]));
    let mut bench = Bench::new();
    for is_increment in [false, true] {
        let target = bench.scratch.path(if is_increment { "day.qcow2" } else { "all.qcow2" });
        let words = bench.backup(&target, is_increment);
        let resume = || part(&target).exists().then_some("--resume");
        for _ in 0..8 {
            if target.exists() {
                break;
            }
            let mut command = Command::new(blockhouse());
            command.args(&words).args(resume()).stderr(Stdio::null());
            let mut backup = command.spawn().expect("it starts");
            std::thread::sleep(Duration::from_millis(bench.random.u64(1..120)));
            backup.kill().expect("it can be killed");
            assert!(wait_for_exit(&mut backup, LONG).is_some(), "it goes on after a kill");
            // If the kill came while the target was created, it is not an image yet.
            if part(&target).exists() && !is_image(&part(&target)) {
                std::fs::remove_file(part(&target)).expect("it is there");
            }
        }
        if !target.exists() {
            run(&words, &resume().into_iter().collect::<Vec<_>>()).success();
        }
        assert!(bench.read(&target) == bench.bytes, "the backup is another");
    }
}

fn is_image(path: &Path) -> bool {
    let command = Command::new(blockhouse())
        .args(["info", "--format", "qcow2", str(path)])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    command.expect("it starts").success()
}

#[test]
fn a_chain_is_restored_and_what_exists_is_left_alone() {
    require!(need::tools(&["qemu-img"]));
    let bench = Bench::new();
    let day = bench.scratch.path("day.qcow2");
    run(&bench.backup(&day, true), &[]).success();
    let [raw, qcow2] = ["restored.img", "restored.qcow2"].map(|name| bench.scratch.path(name));
    command(&["restore", str(&day), str(&raw)]).success();
    assert!(std::fs::read(&raw).expect("a copy") == bench.bytes);
    command(&["restore", str(&day), str(&qcow2)]).success();
    assert!(bench.read(&qcow2) == bench.bytes);
    let info = qemu_img(&["info", str(&qcow2)]).success();
    assert!(!info.stdout.contains("backing file"), "it stands alone: {}", info.stdout);
    // An existing file is left alone unless an option says otherwise.
    std::fs::write(&raw, b"precious").expect("it can be written");
    command(&["restore", str(&day), str(&raw)]).failure("exists and is left alone");
    assert_eq!(std::fs::read(&raw).expect("it is there"), b"precious");
    command(&["restore", "--force", str(&day), str(&raw)]).success();
    assert!(std::fs::read(&raw).expect("a copy") == bench.bytes);
    // A restore fails without the base.
    std::fs::rename(&bench.base, bench.scratch.path("elsewhere.qcow2")).expect("the same folder");
    let lost = bench.scratch.path("lost.img");
    command(&["restore", str(&day), str(&lost)]).failure("base.qcow2");
    assert!(!lost.exists());
}

#[test]
fn a_device_is_restored_to_only_where_that_is_meant() {
    require!(need::root());
    let mut bench = Bench::new();
    let file = bench.scratch.image("device.img", 48 * MIB);
    let old = random_bytes(&mut bench.random, 48 << 20);
    std::fs::write(file.path(), &old).expect("it can be written");
    let device = require!(LoopDevice::over(&file, &[]));
    command(&["restore", str(&bench.disk), str(device.path())]).failure("say --force");
    assert!(std::fs::read(device.path()).expect("it is there") == old);
    command(&["restore", "--force", str(&bench.disk), str(device.path())]).success();
    let found = std::fs::read(device.path()).expect("it is there");
    assert!(found[..bench.bytes.len()] == bench.bytes, "the disk");
    assert!(found[bench.bytes.len()..] == old[bench.bytes.len()..], "what follows stays");
}
