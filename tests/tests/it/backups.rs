//! Backups of disks that clients write to: each backup is the disk as it was at one moment, chains
//! of incremental backups restore each of these moments, and errors of a backup do not affect the
//! client.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, new_image, qemu_img, str};
use blockhouse_tests::nbd::{Address, Client};
use blockhouse_tests::typed::{Folder, Serving, commands};
use blockhouse_tests::{
    Outcome, Scratch, Serve, Server, eventually, nbd_uri, need, require, run, seeded, tool,
};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
const BLOCK: u64 = 4096;
const FAILED: i64 = -32000;
const LONG: Duration = Duration::from_secs(120);

/// A served disk, and a client that knows its content.
struct Bench {
    scratch: Scratch,
    /// The name as a disk.
    name: &'static str,
    image: PathBuf,
    server: Option<Server>,
    writer: Option<Writer>,
    random: Rng,
}

/// A client that writes blocks, and the content of the disk.
struct Writer {
    client: Client,
    random: Rng,
    bytes: Vec<u8>,
    next: u64,
}

impl Writer {
    fn new(address: &Address, random: Rng, bytes: Vec<u8>) -> Self {
        Self { client: Client::open(address), random, bytes, next: 1 }
    }

    /// Writes numbers, or zeros, to blocks that are near each other.
    fn write(&mut self) {
        let count = SIZE / BLOCK;
        let near = self.random.u64(..8) * count / 8;
        let block = (near + self.random.u64(..40)).min(count - 1);
        match self.random.u8(..8) {
            0 => self.put_bytes(block * BLOCK, &[0; BLOCK as usize]),
            _ => self.put(block),
        }
    }

    /// Writes a number to a block.
    fn put(&mut self, block: u64) {
        let bytes = self.next.to_be_bytes().repeat(BLOCK as usize / 8);
        self.next += 1;
        self.put_bytes(block * BLOCK, &bytes);
    }

    fn put_bytes(&mut self, offset: u64, bytes: &[u8]) {
        assert_eq!(self.client.write(offset, bytes, 0), 0, "a write must not fail");
        self.bytes[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// The content of the disk, as the client reads it.
    fn moment(&mut self) -> Vec<u8> {
        let parts = (0..SIZE / MIB).map(|at| self.client.read(at * MIB, MIB).expect("a read"));
        let found = parts.collect::<Vec<_>>().concat();
        assert!(found == self.bytes, "the disk has other bytes");
        found
    }
}

impl Bench {
    fn new(random: Rng) -> Self {
        Self::over("disk.qcow2", random)
    }

    fn over(name: &'static str, random: Rng) -> Self {
        let scratch = Scratch::new();
        let image = new_image(&scratch, name, "16M");
        // A raw image gets its side file for bitmaps with the first bitmap.
        command(&["bitmap", "add", str(&image), "first"]).success();
        command(&["bitmap", "remove", str(&image), "first"]).success();
        let mut bench = Self { scratch, name, image, server: None, writer: None, random };
        bench.start(vec![0; SIZE as usize]);
        bench
    }

    fn start(&mut self, bytes: Vec<u8>) {
        let socket = self.scratch.socket("control");
        let server = Serve::new(&self.scratch, &self.image).option("--control", socket).start();
        let address = server.address();
        self.server = Some(server);
        self.writer = Some(Writer::new(&address, self.random.fork(), bytes));
    }

    /// Kills the server, and starts another one. All writes of the client were answered before.
    fn kill(&mut self) {
        let mut server = self.server.take().expect("it runs");
        server.signal(Signal::KILL);
        server.wait(LONG);
        let bytes = self.writer.take().expect("a client").bytes;
        self.start(bytes);
    }

    fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("a client")
    }

    fn write(&mut self, count: usize) {
        (0..count).for_each(|_| self.writer().write());
    }

    fn ctl(&self, words: &[&str]) -> Outcome {
        command(&[&["ctl", str(&self.scratch.socket("control"))], words].concat())
    }

    fn control(&self) -> Control {
        Control::connect(&self.scratch.socket("control"))
    }

    /// The URI at which backups are served.
    fn export(&self) -> String {
        nbd_uri("", self.scratch.socket("backup"))
    }

    /// Begins a backup; returns the content of the disk, and the URI of the backup.
    fn begin(&mut self, bitmap: &str, since: Option<&str>) -> (Vec<u8>, String) {
        let moment = self.writer().moment();
        let export = self.export();
        let mut words = vec!["backup", "begin", self.name, "--backup", "b", "--bitmap", bitmap];
        words.extend(["--export", &export]);
        words.extend(since.iter().flat_map(|since| ["--since", since]));
        let began = self.ctl(&words).success();
        let uri = began.stdout.lines().find_map(|line| line.strip_prefix("ready "));
        (moment, uri.expect("an export").to_owned())
    }

    /// Runs `act` while the client writes, which continues for a while.
    fn beside<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
        let writer = self.writer.as_mut().expect("a client");
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    writer.write();
                    count.fetch_add(1, Ordering::SeqCst);
                }
            });
            assert!(eventually(LONG, || count.load(Ordering::SeqCst) > 50), "the client waits");
            let outcome = act();
            stop.store(true, Ordering::SeqCst);
            writing.join().expect("no error");
            outcome
        })
    }
}

fn restored(scratch: &Scratch, image: &Path) -> Vec<u8> {
    let raw = scratch.path("restored.img");
    command(&["convert", "--force", str(image), str(&raw)]).success();
    let ours = std::fs::read(&raw).expect("it is there");
    qemu_img(&["convert", "-O", "raw", str(image), str(&raw)]).success();
    assert!(std::fs::read(&raw).expect("it is there") == ours, "QEMU reads other bytes");
    ours
}

#[test]
fn increments_restore_each_moment_whatever_was_killed() {
    require!(need::tools(&["qemu-img"]));
    restore_each_increment(Bench::new(seeded()));
}

#[test]
fn increments_of_a_raw_disk_restore_each_moment_whatever_was_killed() {
    require!(need::tools(&["qemu-img"]));
    restore_each_increment(Bench::over("disk.img", seeded()));
}

fn restore_each_increment(mut bench: Bench) {
    let mut moments = Vec::new();
    let name = |index: usize| format!("day{index}.qcow2");
    for index in 0..5 {
        bench.write(60);
        if index == 2 {
            bench.kill();
            bench.write(20);
        }
        let (bitmap, since) = (format!("b{index}"), format!("b{}", index.max(1) - 1));
        let since = (index > 0).then_some(&*since);
        if index == 3 {
            // A backup that a kill ends. Its bitmap remains, and is removed.
            bench.begin("lost", since);
            bench.write(20);
            bench.kill();
            bench.control().get("bitmap.remove", json!({ "disk": bench.name, "name": "lost" }));
        }
        let (moment, uri) = bench.begin(&bitmap, since);
        let target = bench.scratch.path(&name(index));
        let base = bench.scratch.path(&name(index.max(1) - 1));
        let mut words = vec!["backup", &uri, str(&target), "--verify"];
        if let Some(since) = since {
            words.extend(["--incremental", since, "--base", str(&base)]);
        }
        bench.beside(|| command(&words).success());
        bench.ctl(&["backup", "end", "b"]).success();
        moments.push((target, moment));
    }
    bench.write(20);
    bench.writer().moment();
    bench.server.take().expect("it runs").stop();
    if bench.name.ends_with(".qcow2") {
        command(&["check", str(&bench.image)]).success();
    }
    for (index, (target, moment)) in moments.iter().enumerate() {
        command(&["check", str(target)]).success();
        assert!(restored(&bench.scratch, target) == *moment, "day {index} is another");
    }
}

#[test]
fn increments_of_scattered_blocks_have_little_more_than_these() {
    require!(need::tools(&["qemu-img"]));
    for name in ["disk.qcow2", "disk.img"] {
        let mut bench = Bench::over(name, seeded());
        let (mut has, mut needs) = (0, 0);
        for index in 0..3_u64 {
            // One in 16 blocks, each with other data.
            let mut blocks: Vec<_> = (0..SIZE / BLOCK).collect();
            bench.random.shuffle(&mut blocks);
            let blocks = &blocks[..blocks.len() / 16];
            for block in blocks {
                bench.writer().put(*block);
            }
            let (bitmap, since) = (format!("b{index}"), format!("b{}", index.max(1) - 1));
            let (_, uri) = bench.begin(&bitmap, (index > 0).then_some(&*since));
            let point = |index| bench.scratch.path(&format!("point{index}.qcow2"));
            let (target, base) = (point(index), point(index.max(1) - 1));
            let mut words = vec!["backup", &uri, str(&target), "--verify"];
            if index > 0 {
                words.extend(["--incremental", &since, "--base", str(&base)]);
                needs += blocks.len() as u64 * BLOCK;
            }
            command(&words).success();
            if index > 0 {
                has += std::fs::metadata(&target).expect("it is there").len();
            }
            bench.ctl(&["backup", "end", "b"]).success();
        }
        eprintln!("{name}: increments have {has} bytes, and {needs} have changed");
        assert!(has <= needs * 6 / 5, "{name}: {has} bytes for {needs}");
        let moment = bench.writer().moment();
        assert!(restored(&bench.scratch, &bench.scratch.path("point2.qcow2")) == moment);
        bench.server.take().expect("it runs").stop();
    }
}

/// The extents of a metadata context, from nbdinfo: offset, length and type.
fn map(context: &str, uri: &str) -> Vec<(u64, u64, u64)> {
    let told = run(tool("nbdinfo").args(["--json", &format!("--map={context}"), uri])).success();
    let told = json(&told);
    let extents = told.as_array().expect("a list").iter();
    let number = |extent: &Value, key| extent[key].as_u64().expect("a number");
    extents.map(|one| (number(one, "offset"), number(one, "length"), number(one, "type"))).collect()
}

#[test]
fn other_programs_pull_a_moment_and_what_has_changed() {
    require!(need::tools(&["nbdinfo", "nbdcopy", "qemu-img"]));
    let mut bench = Bench::new(seeded());
    let put = |bench: &mut Bench, at: u64| {
        bench.writer().put_bytes(at, &[7; 64 << 10]);
    };
    put(&mut bench, MIB);
    let (first, uri) = bench.begin("a", None);
    let copy = bench.scratch.path("copy.img");
    bench.beside(|| run(tool("nbdcopy").args([&*uri, str(&copy)])).success());
    assert!(std::fs::read(&copy).expect("a copy") == first);
    let holes = map("base:allocation", &uri);
    assert!(holes.contains(&(0, MIB, 3)), "{holes:?}");
    bench.ctl(&["backup", "end", "b"]).success();
    assert!(!bench.scratch.socket("backup").exists());
    // Only this block changes after the backup.
    let (_, _) = bench.begin("b", None);
    bench.ctl(&["backup", "end", "b"]).success();
    put(&mut bench, 5 * MIB);
    let (second, uri) = bench.begin("c", Some("b"));
    put(&mut bench, 9 * MIB);
    let changed = map("qemu:dirty-bitmap:b", &uri);
    assert_eq!(
        changed.iter().filter(|one| one.2 == 1).collect::<Vec<_>>(),
        [&(5 * MIB, 64 << 10, 1)]
    );
    let raw = ["convert", "-f", "raw", "-O", "raw", &uri, str(&copy)];
    bench.beside(|| qemu_img(&raw).success());
    assert!(std::fs::read(&copy).expect("a copy") == second);
    bench.ctl(&["backup", "end", "b"]).success();
    bench.server.take().expect("it runs").stop();
}

#[test]
fn two_disks_are_cut_at_the_same_point() {
    let scratch = Scratch::new();
    let (raw, qcow2) = (scratch.path("a.img"), scratch.path("b.qcow2"));
    command(&["create", str(&raw), "1M"]).success();
    command(&["create", str(&qcow2), "1M"]).success();
    let (nbd, control) = (scratch.socket("nbd"), scratch.socket("control"));
    let server = Serve::bare(&scratch, &raw)
        .also(&qcow2)
        .export(&nbd_uri("", &nbd))
        .option("--control", &control)
        .start();
    let mut control = Control::connect(&control);
    let backup = scratch.socket("backup");
    let uri = nbd_uri("", &backup);
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut clients = ["a.img", "b.qcow2"].map(|name| Client::at(&nbd, name));
            for number in 1_u64.. {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                for client in &mut clients {
                    assert_eq!(client.write(0, &number.to_be_bytes().repeat(64), 0), 0);
                }
                count.store(number, Ordering::SeqCst);
            }
        });
        for round in 1..20 {
            let target = count.load(Ordering::SeqCst) + 5;
            assert!(eventually(LONG, || count.load(Ordering::SeqCst) >= target));
            let begin = json!({ "disks": ["a.img", "b.qcow2"], "export": uri, "backup": "both" });
            let began = control.get("backup.begin", begin);
            let read = |name: &str| {
                let bytes = Client::at(&backup, name).read(0, 512).expect("a read");
                u64::from_be_bytes(bytes[..8].try_into().expect("8 bytes"))
            };
            let (first, second) = (read("a.img"), read("b.qcow2"));
            assert!(
                first == second || first == second + 1,
                "{first} and {second} in round {round}"
            );
            assert!(first >= target - 5, "it is from before: {began}");
            control.get("backup.end", json!({ "backup": "both" }));
        }
        stop.store(true, Ordering::SeqCst);
        writing.join().expect("no error");
    });
    server.stop();
}

#[test]
fn a_full_scratch_file_fails_the_backup_and_not_the_client() {
    let mut bench = Bench::new(seeded());
    bench.write(200);
    let mut control = bench.control();
    let mut events = bench.control();
    events.get("event.subscribe", json!({ "events": ["backup.failed"] }));
    let export = bench.export();
    let params = json!({
        "disks": ["disk.qcow2"], "export": export, "backup": "small", "scratch-size": "128K", "bitmap": "kept",
    });
    control.get("backup.begin", params);
    for _ in 0..400 {
        bench.writer().write();
    }
    let failed = events.event();
    assert_eq!((&failed["backup"], &failed["disk"]), (&json!("small"), &json!("disk.qcow2")));
    let list = control.get("backup.list", json!({}));
    let error = list[0]["disks"][0]["error"].as_str().expect("it failed");
    assert!(error.contains("131072") && error.contains("scratch-size"), "{error}");
    let mut reader = Client::at(bench.scratch.socket("backup"), "disk.qcow2");
    assert!(reader.read(0, 4096).is_err(), "nothing newer is read");
    control.get("backup.end", json!({ "backup": "small" }));
    bench.write(20);
    bench.writer().moment();
    let list = control.get("bitmap.list", json!({ "disk": "disk.qcow2" }));
    assert_eq!(list[0]["name"], "kept");
    bench.server.take().expect("it runs").stop();
}

#[test]
fn a_backup_begins_with_all_disks_or_leaves_nothing() {
    let mut bench = Bench::new(seeded());
    let mut control = bench.control();
    let raw = bench.scratch.image("raw.img", MIB);
    control.get("disk.open", json!({ "path": raw.path() }));
    // A folder has the name of the side file.
    let side_file = raw.path().with_extension("img.bitmaps");
    std::fs::create_dir(&side_file).expect("a folder");
    let export = bench.export();
    let begin = |extra: Value| {
        let mut params = json!({ "disks": ["disk.qcow2", "raw.img"], "export": export });
        params.as_object_mut().expect("an object").extend(extra.as_object().expect("too").clone());
        params
    };
    let none = json!({ "disk": "disk.qcow2" });
    let before = control.get("disk.list", json!({}));
    for (extra, words) in [
        (json!({ "bitmap": "new" }), &["raw.img"][..]),
        (json!({ "since": "old" }), &["no bitmap \"old\""]),
        (json!({ "disks": ["disk.qcow2", "x"] }), &["no disk is called \"x\""]),
        (json!({ "disks": ["raw.img", "raw.img"] }), &["named twice"]),
        (json!({ "disks": [] }), &["one disk at least"]),
        (json!({ "scratch": "/nonexistent" }), &["nonexistent"]),
        (
            json!({ "bitmap": "new", "disks": ["disk.qcow2"], "export": bench.server.as_ref().expect("it runs").uri() }),
            &["exists"],
        ),
    ] {
        if extra["export"].is_string() {
            // The name is already in use at the disk's own socket.
            let own = json!({ "disk": "disk.qcow2", "export": nbd_uri("disk.qcow2", bench.scratch.socket("nbd")) });
            control.get("export.add", own);
        }
        control.refused("backup.begin", begin(extra), FAILED, words);
        assert_eq!(control.get("bitmap.list", none.clone()), json!([]));
        assert_eq!(control.get("backup.list", json!({})), json!([]));
        assert_eq!(
            control.get("disk.list", json!({})).as_array().map(Vec::len),
            before.as_array().map(Vec::len)
        );
    }
    std::fs::remove_dir(&side_file).expect("it is empty");
    bench.write(20);
    let began = control.get("backup.begin", begin(json!({ "backup": "b" })));
    assert_eq!(began["disks"].as_array().map(Vec::len), Some(2));
    for (method, params) in [
        ("disk.close", json!({ "disk": "raw.img", "force": true })),
        ("disk.close", json!({ "disk": "raw.img@b", "force": true })),
        ("disk.resize", json!({ "disk": "disk.qcow2", "size": 32 * MIB })),
        ("backup.begin", json!({ "disks": ["raw.img"], "export": export })),
    ] {
        control.refused(method, params, FAILED, &["the backup \"b\"", "end it first"]);
    }
    let guest = json!({ "disk": "raw.img@b", "export": bench.scratch.socket("guest") });
    control.refused("export.add", guest, FAILED, &["the backup \"b\" ends", "over NBD"]);
    control.refused("backup.end", json!({ "backup": "c" }), FAILED, &["backup.list"]);
    let upgrade = command(&["upgrade", "--control", str(&bench.scratch.socket("control"))]);
    upgrade.failure("the backup \"b\" goes on");
    control.get("backup.end", json!({ "backup": "b" }));
    control.get("disk.close", json!({ "disk": "raw.img" }));
    let folder = std::fs::read_dir(bench.scratch.path("")).expect("a folder");
    let left = folder.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let left: Vec<_> = left.filter(|name| name.ends_with(".scratch")).collect();
    assert!(left.is_empty(), "{left:?}");
    bench.server.take().expect("it runs").stop();
}

#[test]
fn the_page_is_right() {
    require!(need::tools(&["nbdcopy", "qemu-img"]));
    let page = include_str!("../../../docs/backup.md").split("## A moment").nth(1);
    let lines = commands(page.expect("the section"), "");
    assert!(lines.len() > 8, "{lines:?}");
    let folder = Folder::new();
    folder.run("blockhouse create disk.qcow2 16M");
    folder.run("qemu-io -f qcow2 -c 'write -P 7 1M 2M' disk.qcow2");
    let serve =
        "blockhouse serve disk.qcow2 --control control --nbd 'nbd+unix:///?socket=disk.sock'";
    let serving = Serving::start(&folder, serve);
    for line in lines {
        folder.run(line);
        if line.contains("backup end first") {
            folder.run("qemu-io -f raw -c 'write -P 8 2M 4M' 'nbd+unix:///?socket=disk.sock'");
        }
    }
    folder.run("cmp -n 1M restored.img /dev/zero");
    folder.run("qemu-io -f raw -c 'read -P 7 1M 1M' -c 'read -P 8 2M 4M' restored.img");
    serving.stop();
}

/// A disk without a bitmap is backed up in full, while the others are backed up incrementally.
#[test]
fn a_new_disk_comes_in_full_beside_increments() {
    let scratch = Scratch::new();
    let images = ["a.qcow2", "b.qcow2", "c.img"].map(|name| scratch.path(name));
    for image in &images {
        command(&["create", str(image), "8M"]).success();
    }
    let serve = Serve::new(&scratch, &images[0]).option("--control", scratch.socket("control"));
    let server = serve.start();
    let mut control = Control::connect(&scratch.socket("control"));
    let export = nbd_uri("", scratch.socket("backup"));
    let first =
        json!({ "disks": ["a.qcow2"], "export": export, "bitmap": "day1", "backup": "one" });
    control.get("backup.begin", first);
    control.get("backup.end", json!({ "backup": "one" }));
    for (image, name) in images.iter().zip(["a.qcow2", "b.qcow2", "c.img"]).skip(1) {
        control.get("disk.open", json!({ "name": name, "path": image }));
    }
    let begin = |disks: &[&str], since: &str| json!({ "disks": disks, "export": export, "since": since, "bitmap": "day2", "backup": "two" });
    // No disk has this bitmap: a mistyped name.
    for disks in [&["b.qcow2"][..], &["a.qcow2", "b.qcow2"]] {
        control.refused("backup.begin", begin(disks, "dya1"), FAILED, &["has no bitmap"]);
    }
    let begun = control.get("backup.begin", begin(&["b.qcow2", "a.qcow2", "c.img"], "day1"));
    let since = |at: usize| begun["disks"][at]["since"].as_str();
    assert_eq!([since(0), since(1), since(2)], [None, Some("day1"), None], "{begun}");
    control.get("backup.end", json!({ "backup": "two" }));
    for disk in ["a.qcow2", "b.qcow2", "c.img"] {
        let list = control.get("bitmap.list", json!({ "disk": disk }));
        let names: Vec<_> =
            list.as_array().expect("a list").iter().map(|one| &one["name"]).collect();
        assert!(names.contains(&&json!("day2")), "{disk}: {list}");
    }
    server.stop();
}
