//! Chains of incremental backups of a disk that a guest and fio write to all the time, and whose
//! server is killed between and during backups: each restored point equals what another program
//! read of that moment, and an incremental backup has little more than the changes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::guest::Guest;
use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::{
    Scratch, Serve, Server, blockhouse, eventually, nbd_uri, need, require, run, seeded, tool,
    wait_for_exit,
};
use blockhouse_vhost_user::driver::Options;
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::json;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;
/// Bytes of a zone: a part of the disk that is written as a whole in a round.
const ZONE: u64 = 4 * MIB;
/// The granularity of the bitmaps, in bytes.
const GRANULE: usize = 64 << 10;
const INCREMENTS: usize = 20;
const LONG: Duration = Duration::from_secs(120);
const DISK: &str = "disk.qcow2";

/// A served disk.
struct Bench {
    scratch: Scratch,
    server: Option<Server>,
    random: Rng,
}

impl Bench {
    fn new() -> Self {
        let scratch = Scratch::new();
        command(&["create", str(&scratch.path(DISK)), "128M"]).success();
        let mut bench = Self { scratch, server: None, random: seeded() };
        bench.start();
        bench
    }

    fn start(&mut self) {
        let (control, guest) = (self.scratch.socket("control"), self.scratch.socket("guest"));
        let image = self.scratch.path(DISK);
        let serve = Serve::new(&self.scratch, &image).option("--control", control);
        let server = serve.option("--vhost-user-blk", guest).ready_lines(2).start();
        self.server = Some(server);
    }

    fn kill(&mut self) {
        let mut server = self.server.take().expect("it runs");
        server.signal(Signal::KILL);
        server.wait(LONG);
    }

    fn control(&self) -> Control {
        Control::connect(&self.scratch.socket("control"))
    }

    /// Starts fio over NBD, which writes each block of a zone.
    fn fio(&self, zone: u64) -> Child {
        let uri = self.server.as_ref().expect("it runs").uri();
        let words = format!(
            "--name=load --thread --ioengine=nbd --rw=randwrite --bs=64k --iodepth=8 --size={ZONE} \
             --offset={} --randrepeat=0 --refill_buffers",
            zone * ZONE
        );
        let mut fio = tool("fio");
        fio.args(words.split_whitespace()).arg(format!("--uri={uri}"));
        fio.current_dir(self.scratch.short());
        fio.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        fio.spawn().expect("fio starts")
    }

    fn run_fio(&self, zone: u64) {
        let mut fio = self.fio(zone);
        assert!(wait_for_exit(&mut fio, LONG).is_some_and(|status| status.success()), "fio");
    }

    /// Two different zones.
    fn zones(&mut self) -> [u64; 2] {
        let half = SIZE / ZONE / 2;
        [self.random.u64(..half), half + self.random.u64(..half)]
    }

    fn begin(&self, bitmap: &str, since: Option<&str>) -> String {
        let export = nbd_uri("", self.scratch.socket("backup"));
        let begin = json!({ "disks": [DISK], "backup": "b", "bitmap": bitmap, "since": since, "export": export });
        let began = self.control().get("backup.begin", begin);
        began["disks"][0]["exports"][0].as_str().expect("an export").to_owned()
    }

    fn point(&self, number: usize) -> PathBuf {
        self.scratch.path(&format!("point{number}.qcow2"))
    }

    /// Removes a bitmap that a backup began whose server was killed.
    fn forget(&self, bitmap: &str) {
        self.control().get("bitmap.remove", json!({ "disk": DISK, "name": bitmap }));
    }
}

/// Writes to each granule of a zone, over vhost-user, repeatedly until `stop` or until the server
/// ends.
fn write_as_guest(socket: &Path, (zone, salt): (u64, u64), passes: &AtomicU64, stop: &AtomicBool) {
    let mut guest = Guest::connect(socket, Options::default());
    let in_granule = GRANULE as u64 / 4096;
    for number in 1.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        for granule in 0..ZONE / GRANULE as u64 {
            let block = zone * ZONE / 4096 + granule * in_granule + number % in_granule;
            guest.fill(0, 0, salt << 40 | number << 16 | granule);
            guest.post(0, 0, blockhouse_tests::guest::OUT, block);
            if guest.finish(0, LONG).is_none() {
                assert!(!guest.is_connected(), "a write has no answer");
                return;
            }
        }
        passes.store(number, Ordering::SeqCst);
    }
}

/// The number of granules that differ.
fn changed(before: &[u8], after: &[u8]) -> usize {
    before.chunks(GRANULE).zip(after.chunks(GRANULE)).filter(|(a, b)| a != b).count()
}

/// Bytes of data in an image without its backing files.
fn own_data(image: &Path) -> u64 {
    let map = json(&qemu_img(&["map", "--output=json", str(image)]).success());
    let own = map.as_array().expect("a list").iter().filter(|one| one["depth"] == 0);
    own.filter(|one| one["data"] == true).map(|one| one["length"].as_u64().expect("a number")).sum()
}

/// Makes one backup; if `kills_during`, the server is killed before or during the copy at first.
/// Returns what another program has read of that moment.
fn back_up(bench: &mut Bench, number: usize, kills_during: bool) -> Vec<u8> {
    let (bitmap, before) = (format!("b{number}"), format!("b{}", number.max(1) - 1));
    let since = (number > 0).then_some(&*before);
    let (target, base) = (bench.point(number), bench.point(number.max(1) - 1));
    let backup = |uri: &str, target: &Path| {
        let mut backup = Command::new(blockhouse());
        backup.args(["backup", uri, str(target)]);
        if let Some(since) = since {
            backup.args(["--incremental", since, "--base", str(&base)]);
        }
        backup
    };
    if kills_during {
        let uri = bench.begin("lost", since);
        let lost = bench.scratch.path("lost.qcow2");
        let mut copying = backup(&uri, &lost).stderr(Stdio::null()).spawn().expect("it starts");
        bench.kill();
        // The backup may have been complete before the kill.
        assert!(wait_for_exit(&mut copying, LONG).is_some(), "it waits for a server that is gone");
        for left in [lost, bench.scratch.path("lost.qcow2.part")] {
            let _ = std::fs::remove_file(left);
        }
        bench.start();
        bench.forget("lost");
    }
    let uri = bench.begin(&bitmap, since);
    let [copy, socket] = [bench.scratch.path("copy.img"), bench.scratch.socket("guest")];
    let zone = bench.random.u64(..SIZE / ZONE);
    let (passes, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| write_as_guest(&socket, (zone, number as u64), &passes, &stop));
        assert!(eventually(LONG, || passes.load(Ordering::SeqCst) > 0), "the guest waits");
        run(&mut backup(&uri, &target)).success();
        run(tool("nbdcopy").args([&*uri, str(&copy)])).success();
        stop.store(true, Ordering::SeqCst);
    });
    bench.control().get("backup.end", json!({ "backup": "b" }));
    if let Some(since) = since {
        bench.forget(since);
    }
    std::fs::read(copy).expect("a copy")
}

#[test]
fn twenty_increments_restore_each_point_whatever_was_killed() {
    require!(need::tools(&["fio", "nbdcopy", "qemu-img"]));
    let mut bench = Bench::new();
    let mut copies: Vec<Vec<u8>> = Vec::new();
    for number in 0..=INCREMENTS {
        let [first, second] = bench.zones();
        let mut fio = bench.fio(first);
        if number % 4 == 1 {
            bench.kill();
        }
        assert!(wait_for_exit(&mut fio, LONG).is_some(), "fio waits");
        if number % 4 == 1 {
            bench.start();
        }
        bench.run_fio(first);
        let mut beside = bench.fio(second);
        copies.push(back_up(&mut bench, number, number % 4 == 3));
        assert!(wait_for_exit(&mut beside, LONG).is_some(), "fio waits");
        // fio runs again, because the kill has interrupted its writes.
        bench.run_fio(second);
    }
    bench.server.take().expect("it runs").stop();
    let (mut has, mut needs) = (0, 0);
    for (number, copy) in copies.iter().enumerate() {
        let (point, raw) = (bench.point(number), bench.scratch.path("restored.img"));
        command(&["check", str(&point)]).success();
        qemu_img(&["convert", "-O", "raw", str(&point), str(&raw)]).success();
        assert!(std::fs::read(&raw).expect("it is there") == *copy, "point {number} is another");
        if number > 0 {
            has += own_data(&point);
            needs += changed(&copies[number - 1], copy) * GRANULE;
        }
    }
    eprintln!("increments have {has} bytes, and {needs} have changed");
    assert!(has <= needs as u64 * 6 / 5, "{has} bytes for {needs}");
}
