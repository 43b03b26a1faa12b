//! Bitmaps of block devices, images in Ceph and exports of NBD servers, in a file that the user
//! names (`--bitmaps`): they survive kills and upgrades, and are refused if the volume is another
//! one or may have had another writer.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use blockhouse_tests::ceph::{Ceph, ceph};
use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::nbd::{Client, Request, command::WRITE, flag};
use blockhouse_tests::upgrade::{Servers, upgrade_in_the_end};
use blockhouse_tests::{
    FileSystem, Image, LoopDevice, Scratch, Serve, Server, SmallHost, blockhouse, nbd_uri, need,
    require, run, seeded, tool,
};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const BLOCK: usize = 64 << 10;
const LONG: Duration = Duration::from_secs(120);
const INCREMENTS: usize = 20;
/// The number for an image in Ceph, where the lock of a killed server is free only after half a
/// minute. `BLOCKHOUSE_INCREMENTS` sets another number.
const CEPH_INCREMENTS: usize = 2;

/// A volume and the folder of its bitmaps.
struct Volume {
    scratch: Scratch,
    /// The name of the volume on command lines.
    name: String,
    /// Whether the user vouches that no other program changes the volume, if nothing shows such
    /// changes.
    is_trusted: bool,
    /// Keeps the volume until this is dropped.
    _held: Vec<Box<dyn std::any::Any>>,
}

impl Volume {
    fn on_loop() -> Result<(Self, LoopDevice), String> {
        let scratch = Scratch::new();
        let file = scratch.image("volume", SIZE);
        let device = LoopDevice::over(&file, &[])?;
        let name = str(device.path()).to_owned();
        Ok((Self { scratch, name, is_trusted: false, _held: vec![Box::new(file)] }, device))
    }

    fn on_nbd() -> Self {
        let scratch = Scratch::new();
        let served = Scratch::new();
        let file = served.image("volume", SIZE);
        let server = Serve::new(&served, file.path()).start();
        let name = server.uri().to_owned();
        let held: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(server), Box::new(file), Box::new(served)];
        Self { scratch, name, is_trusted: true, _held: held }
    }

    /// A volume in Ceph, and the name of its image.
    fn in_ceph(ceph: &Ceph) -> (Self, String) {
        let image = format!("volume{}", fastrand::u64(..));
        ceph.rbd(&["create", "--size", "64M", &format!("rbd/{image}")]).success();
        let name = ceph.location(&image);
        (Self { scratch: Scratch::new(), name, is_trusted: true, _held: Vec::new() }, image)
    }

    fn side_file(&self) -> PathBuf {
        self.scratch.path("volume.bitmaps")
    }

    fn options(&self) -> Vec<&str> {
        let trust = self.is_trusted.then_some("--trust-bitmaps");
        trust.into_iter().collect()
    }

    /// `bitmap WORDS... VOLUME NAME`.
    fn bitmap(&self, words: &[&str], names: &[&str]) -> blockhouse_tests::Outcome {
        let side = self.side_file();
        let place = ["--bitmaps", str(&side)];
        let options = self.options();
        command(&[&["bitmap"], words, &[&self.name], names, &place, &options].concat())
    }

    fn listed(&self) -> Vec<String> {
        let listed = json(&self.bitmap(&["list", "--json"], &[]).success());
        let listed = listed.as_array().expect("a list").iter();
        listed.map(|one| one["name"].as_str().expect("a name").to_owned()).collect()
    }

    fn serve(&self) -> Server {
        self.start(LONG)
    }

    fn start(&self, limit: Duration) -> Server {
        let serve = Serve::new(&self.scratch, Path::new(&self.name));
        let serve = serve.option("--name", "disk").option("--bitmaps", self.side_file());
        let serve = serve.option("--control", self.scratch.socket("control"));
        let options = self.options();
        options.into_iter().fold(serve, |serve, option| serve.flag(option)).start_within(limit)
    }

    fn control(&self) -> Control {
        Control::connect(&self.scratch.socket("control"))
    }
}

fn write(server: &Server, at: u64, byte: u8) {
    assert_eq!(Client::open(&server.address()).write(at, &vec![byte; BLOCK], 0), 0);
}

fn kill(mut server: Server) {
    server.signal(Signal::KILL);
    server.wait(LONG);
}

/// Writes to a device, as another program does.
fn write_strangely(device: &Path) {
    let file = OpenOptions::new().write(true).open(device).expect("a device");
    file.write_all_at(&[9; 4096], 48 * MIB).expect("it takes that");
    file.sync_all().expect("it can");
}

/// The number of dirty bytes of a bitmap.
fn changed(control: &mut Control, name: &str) -> u64 {
    let listed = control.get("bitmap.list", json!({ "disk": "disk" }));
    let listed = listed.as_array().expect("a list").iter();
    let of_name = listed.filter(|one| one["name"] == name);
    of_name.map(|one| one["count"].as_u64().expect("a count")).sum()
}

#[test]
fn bitmaps_of_a_device_survive_stops_kills_and_upgrades() {
    let (volume, _device) = require!(Volume::on_loop());
    let server = volume.serve();
    volume.control().get("bitmap.add", json!({ "disk": "disk", "name": "b" }));
    write(&server, 5 * MIB, 1);
    server.stop();
    assert_eq!(volume.listed(), ["b"]);
    let server = volume.serve();
    assert_eq!(changed(&mut volume.control(), "b"), BLOCK as u64);
    write(&server, 9 * MIB, 2);
    kill(server);
    assert_eq!(volume.listed(), ["b"]);
    let server = volume.serve();
    assert!(changed(&mut volume.control(), "b") >= 2 * BLOCK as u64);
    upgrade_in_the_end(&volume.scratch.socket("control"), &[]);
    write(&server, 13 * MIB, 3);
    assert!(changed(&mut volume.control(), "b") >= 3 * BLOCK as u64);
    Servers(&volume.scratch).stop();
    assert_eq!(volume.listed(), ["b"]);
    // Without `--bitmaps`, the device is an ordinary raw disk.
    command(&["info", &volume.name]).success();
    let refused = command(&["bitmap", "list", &volume.name]);
    refused.failure("--bitmaps");
}

#[test]
fn who_writes_to_a_device_without_its_bitmaps_makes_them_void() {
    let (volume, device) = require!(Volume::on_loop());
    let add = || {
        let _ = std::fs::remove_file(volume.side_file());
        volume.bitmap(&["add"], &["b"]).success();
        assert_eq!(volume.listed(), ["b"]);
    };
    let refused = || volume.bitmap(&["list"], &[]).failure("may lack changes");
    add();
    write_strangely(device.path());
    refused();
    add();
    let server = volume.serve();
    write(&server, 0, 1);
    kill(server);
    write_strangely(device.path());
    refused();
    // The guest is served nevertheless.
    let server = volume.serve();
    assert!(server.log().contains("may lack changes"), "{}", server.log());
    write(&server, 0, 2);
    server.stop();
    refused();
    // A server of the device without `--bitmaps`.
    add();
    let server = Serve::new(&volume.scratch, device.path()).start();
    write(&server, 0, 3);
    server.stop();
    refused();
    // A kill, after which the state file is lost.
    add();
    let server = volume.serve();
    write(&server, 0, 1);
    kill(server);
    let side = volume.side_file();
    let words = ["bitmap", "list", &volume.name, "--bitmaps", str(&side), "--state", "off"];
    command(&words).failure("nothing tells");
    command(&[&words[..], &["--trust-bitmaps"]].concat()).success();
}

/// The kernel counts writes of the page cache only at writeback. The unflushed writes of the server
/// itself are recognized, and writes of another program are noticed.
#[test]
fn writes_to_a_device_count_also_in_the_page_cache() {
    let (volume, device) = require!(Volume::on_loop());
    volume.bitmap(&["add"], &["b"]).success();
    // Another program has the device open, so the kernel does not write back its pages when the
    // server ends.
    let other = OpenOptions::new().read(true).write(true).open(device.path()).expect("a device");
    let side = volume.side_file();
    let server = Serve::new(&volume.scratch, device.path())
        .option("--bitmaps", &side)
        .option("--cache", "unsafe")
        .start();
    write(&server, 5 * MIB, 1);
    server.stop();
    assert_eq!(volume.listed(), ["b"]);
    other.sync_all().expect("it can");
    assert_eq!(volume.listed(), ["b"]);
    other.write_all_at(&[9; 4096], 48 * MIB).expect("it takes that");
    volume.bitmap(&["list"], &[]).failure("may lack changes");
}

#[test]
fn bitmaps_belong_to_one_volume_of_one_size() {
    let (volume, device) = require!(Volume::on_loop());
    volume.bitmap(&["add"], &["b"]).success();
    let side = volume.side_file();
    let other = volume.scratch.image("other", SIZE);
    let other_device = require!(LoopDevice::over(&other, &[]));
    let list = |name: &Path| command(&["bitmap", "list", str(name), "--bitmaps", str(&side)]);
    list(other_device.path()).failure("belongs to another volume");
    list(other.path()).failure("belongs to another volume");
    // The device is attached again: the same file, but the kernel's write counts begin anew.
    let file = volume.scratch.path("volume");
    device.attach_again(&file);
    list(device.path()).failure("nothing tells");
    let trusted = ["bitmap", "list", &volume.name, "--bitmaps", str(&side), "--trust-bitmaps"];
    command(&trusted).success();
    OpenOptions::new().write(true).open(&file).expect("a file").set_len(2 * SIZE).expect("longer");
    device.attach_again(&file);
    command(&trusted).failure("is of a disk of 67108864 bytes");
    // An image format with its own bitmaps does not accept such a file.
    let own = volume.scratch.path("own.qcow2");
    command(&["create", str(&own), "1M"]).success();
    Serve::new(&volume.scratch, &own)
        .option("--bitmaps", volume.scratch.path("x"))
        .refused()
        .failed(&["only raw images", "leave --bitmaps out"]);
}

#[test]
fn a_folder_has_the_bitmaps_of_several_images() {
    let (volume, device) = require!(Volume::on_loop());
    let folder = volume.scratch.path("folder");
    std::fs::create_dir(&folder).expect("a new folder");
    let raw = volume.scratch.image("a.img", SIZE);
    let own = volume.scratch.path("own.qcow2");
    command(&["create", str(&own), "1M"]).success();
    let serve = Serve::new(&volume.scratch, device.path()).also(raw.path()).also(&own);
    let serve =
        serve.option("--bitmaps", &folder).option("--control", volume.scratch.socket("control"));
    let server = serve.export(&nbd_uri("", volume.scratch.socket("all")));
    let server = server.start();
    let mut control = volume.control();
    for disk in control.get("disk.list", json!({})).as_array().expect("a list") {
        control.get("bitmap.add", json!({ "disk": disk["disk"], "name": "b" }));
    }
    server.stop();
    let mut names: Vec<_> = std::fs::read_dir(&folder)
        .expect("a folder")
        .flatten()
        .map(|entry| entry.file_name().into_string().expect("UTF-8"))
        .collect();
    // Sorts the name of the device first, whatever the other path is.
    names.sort_by_key(|name| !name.starts_with("dev!loop"));
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names[0].starts_with("dev!loop"), "{names:?}");
    assert!(names[1].ends_with("!a.img.bitmaps"), "{names:?}");
    for name in [device.path(), raw.path()] {
        let list = command(&["bitmap", "list", str(name), "--bitmaps", str(&folder)]).success();
        assert!(list.stdout.contains("enabled"), "{}", list.stdout);
    }
    assert!(!raw.path().with_extension("img.bitmaps").exists(), "none beside the image");
}

/// Incremental backups of a volume whose servers are killed while clients write. The backups are
/// killed and resumed, too. Each must equal the volume.
fn increments(volume: &Volume, count: usize) {
    let mut random = seeded();
    let mut disk = Answered { blocks: vec![0; SIZE as usize / BLOCK], last: None };
    let [before, after] = ["before.img", "after.img"].map(|name| volume.scratch.path(name));
    let backup = |number: usize| volume.scratch.path(&format!("{number}.qcow2"));
    let side = volume.side_file();
    let options = volume.options();
    let place = [&["--bitmaps", str(&side)], &options[..]].concat();
    let mut killed = 0;
    volume.bitmap(&["add"], &["b0"]).success();
    command(&[&["backup", &volume.name, str(&backup(0))], &place[..]].concat()).success();
    for number in 1..=count {
        let server = volume.start(LONG * 2);
        let time = Duration::from_millis(random.u64(..400));
        disk.write_until_end(server, time, random.bool(), &mut random);
        let [since, next] = [number - 1, number].map(|number| format!("b{number}"));
        let (copy, base) = (backup(number), backup(number - 1));
        let words = ["backup", &volume.name, str(&copy), "--incremental", &since];
        let words = [&words[..], &["--base", str(&base)], &place].concat();
        killed += usize::from(kill_command(&words, Duration::from_millis(random.u64(..60))));
        if !copy.exists() {
            let part = volume.scratch.path(&format!("{number}.qcow2.part"));
            let is_resumed = part.exists()
                && when_unlocked(&[&words[..], &["--resume"]].concat()).status.success();
            if !is_resumed {
                // The backup was killed before it had begun.
                let _ = std::fs::remove_file(part);
                when_unlocked(&words).success();
            }
        }
        volume.bitmap(&["add"], &[&next]).success();
        volume.bitmap(&["remove"], &[&since]).success();
        for (image, raw) in [(&*volume.name, &before), (str(&copy), &after)] {
            command(&["convert", "--force", "-O", "raw", image, str(raw)]).success();
        }
        let [found, restored] =
            [&before, &after].map(|path| std::fs::read(path).expect("it is there"));
        assert!(found == restored, "increment {number} is not what the volume was");
        disk.check(&found);
    }
    eprintln!("{count} increments, {killed} backups were killed");
}

/// Runs a command as soon as the lock of a killed server is free: Ceph keeps it for some time.
fn when_unlocked(words: &[&str]) -> blockhouse_tests::Outcome {
    let began = Instant::now();
    loop {
        let outcome = command(words);
        if !outcome.stderr.contains("is locked") || began.elapsed() > LONG {
            return outcome;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Starts a command and kills it after some time; returns whether it still ran.
fn kill_command(words: &[&str], time: Duration) -> bool {
    let mut command = Command::new(blockhouse());
    command.args(words).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().expect("it is there");
    std::thread::sleep(time);
    let has_ended = child.try_wait().expect("a child").is_some();
    child.kill().expect("a child");
    child.wait().expect("a child");
    !has_ended
}

/// The acknowledged writes of a client: the byte that each block is full of.
struct Answered {
    blocks: Vec<u8>,
    /// The block of a write that was not answered.
    last: Option<usize>,
}

impl Answered {
    /// Writes one block after the other, until the server is killed or stopped.
    fn write_until_end(
        &mut self,
        server: Server,
        time: Duration,
        is_killed: bool,
        random: &mut Rng,
    ) {
        let mut client = Client::open(&server.address());
        let mut random = random.fork();
        std::thread::scope(|scope| {
            let writing = scope.spawn(move || {
                loop {
                    let (block, byte) = (random.usize(..self.blocks.len()), random.u8(1..));
                    let data = vec![byte; BLOCK];
                    let flags = if random.bool() { flag::FUA } else { 0 };
                    let (offset, length) = ((block * BLOCK) as u64, BLOCK as u64);
                    let request = Request { command: WRITE, flags, offset, length };
                    self.last = Some(block);
                    if client.send_with(request, &data).is_err() {
                        return;
                    }
                    match client.receive() {
                        Ok((_, reply)) if reply.error == 0 => self.blocks[block] = byte,
                        _ => return,
                    }
                    self.last = None;
                }
            });
            std::thread::sleep(time);
            if is_killed {
                kill(server)
            } else {
                server.stop()
            }
            writing.join().expect("no panic");
        });
    }

    /// Checks that a disk has all acknowledged writes. The block of the unacknowledged write is
    /// taken as it is.
    fn check(&mut self, disk: &[u8]) {
        for (index, block) in disk.chunks(BLOCK).enumerate() {
            let is_there = *block == [self.blocks[index]; BLOCK];
            assert!(is_there || self.last == Some(index), "block {index} is not what was answered");
        }
        if let Some(index) = self.last.take() {
            let block = &disk[index * BLOCK..][..BLOCK];
            self.blocks[index] = block[0];
            // If the block is torn, it may differ until it is written again.
            self.last = block.iter().any(|byte| *byte != block[0]).then_some(index);
        }
    }
}

#[test]
fn increments_of_a_device_are_what_it_was() {
    require!(need::tools(&["qemu-img"]));
    let (volume, _device) = require!(Volume::on_loop());
    increments(&volume, INCREMENTS);
}

#[test]
fn increments_of_an_export_are_what_it_was() {
    require!(need::tools(&["qemu-img"]));
    increments(&Volume::on_nbd(), INCREMENTS);
}

#[test]
fn increments_of_an_image_in_ceph_are_what_it_was() {
    let ceph = require!(ceph());
    let (volume, _) = Volume::in_ceph(&ceph);
    let count = std::env::var("BLOCKHOUSE_INCREMENTS").ok();
    let count = count.map_or(CEPH_INCREMENTS, |count| count.parse().expect("a number"));
    increments(&volume, count);
}

#[test]
fn bitmaps_belong_to_one_image_in_ceph() {
    let ceph = require!(ceph());
    let (volume, image) = Volume::in_ceph(&ceph);
    volume.bitmap(&["add"], &["first"]).success();
    let server = volume.serve();
    write(&server, 5 * MIB, 1);
    server.stop();
    let server = volume.serve();
    assert_eq!(changed(&mut volume.control(), "first"), BLOCK as u64);
    write(&server, 9 * MIB, 1);
    kill(server);
    // The lock of a killed client is free only when its watch has expired.
    let server = volume.start(LONG * 2);
    assert!(changed(&mut volume.control(), "first") >= 2 * BLOCK as u64);
    server.stop();
    assert_eq!(volume.listed(), ["first"]);
    // Another image of the same name and size.
    ceph.rbd(&["remove", &format!("rbd/{image}")]).success();
    ceph.rbd(&["create", "--size", "64M", &format!("rbd/{image}")]).success();
    volume.bitmap(&["list"], &[]).failure("belongs to another volume");
}

#[test]
fn nothing_tells_of_an_export_unless_the_user_does() {
    let volume = Volume::on_nbd();
    volume.bitmap(&["add"], &["b"]).success();
    assert_eq!(volume.listed(), ["b"]);
    let untold = Volume { is_trusted: false, ..volume };
    untold.bitmap(&["list"], &[]).failure("--trust-bitmaps says that nobody else writes");
}

/// Fine bitmaps of a large sparse disk, whose file system runs full: no write fails, the bitmaps
/// become coarser, which is reported, and lack no change.
#[test]
fn a_full_place_for_bitmaps_costs_no_guest_a_write_and_no_bitmap_a_change() {
    let scratch = Scratch::new();
    let small = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, 512 * MIB));
    let image: Image = scratch.image("large.img", 100 << 30);
    let side = small.path("side");
    let serve = || {
        let serve = Serve::new(&scratch, image.path()).option("--name", "disk");
        let serve = serve.option("--bitmaps", &side);
        serve.option("--control", scratch.socket("control")).start()
    };
    let server = serve();
    let mut control = Control::connect(&scratch.socket("control"));
    let mut events = Control::connect(&scratch.socket("control"));
    events.get("event.subscribe", json!({ "events": ["bitmap.coarser", "bitmap.lost"] }));
    for number in 0..64 {
        let name = format!("b{number}");
        let new = json!({ "disk": "disk", "name": name, "granularity": 4096 });
        control.get("bitmap.add", new);
    }
    small.fill_up("filler");
    write_all_over(&server);
    for _ in 0..64 {
        let event = events.event();
        assert_eq!(event["event"], "bitmap.coarser", "{event}");
    }
    let count = |control: &mut Control| {
        let listed = control.get("bitmap.list", json!({ "disk": "disk" }));
        let listed: &Vec<Value> = listed.as_array().expect("a list");
        assert!(listed.iter().all(|one| one["inconsistent"] != true), "{listed:?}");
        listed[0]["count"].as_u64().expect("a count")
    };
    let told = count(&mut control);
    assert!((800 * 4096..=100 << 30).contains(&told), "{told}");
    kill(server);
    // The next server finds the same bitmaps, and continues without a warning.
    let server = serve();
    let mut control = Control::connect(&scratch.socket("control"));
    assert_eq!(count(&mut control), 100 << 30);
    write_all_over(&server);
    server.stop();
}

/// A bitmap that has space for some of its bits becomes coarser as a whole within that space, once,
/// and still marks little more than the changes.
#[test]
fn a_bitmap_that_has_a_place_becomes_coarser_in_it() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let small = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, 16 * MIB));
    let (size, stride) = (2 << 30, 61 * MIB);
    let image: Image = scratch.image("large.img", size);
    let side = small.path("side");
    let serve = || {
        let serve = Serve::new(&scratch, image.path()).option("--name", "disk");
        let serve = serve.option("--bitmaps", &side);
        serve.option("--control", scratch.socket("control")).start()
    };
    let server = serve();
    let connect = || Control::connect(&scratch.socket("control"));
    let (mut control, mut events) = (connect(), connect());
    let subscribed = json!({ "events": ["bitmap.coarser", "bitmap.lost", "client.left"] });
    events.get("event.subscribe", subscribed);
    let new = json!({ "disk": "disk", "name": "b", "granularity": 512 });
    control.get("bitmap.add", new);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 512], 0), 0, "256 MiB of the disk have their place now");
    small.fill_up("filler");
    for number in 1..33 {
        assert_eq!(client.write(number * stride, &[1; 512], 0), 0, "write {number}");
    }
    drop(client);
    assert_eq!(events.event()["event"], "bitmap.coarser");
    assert_eq!(events.event()["event"], "client.left", "it is told once");
    let listed = |control: &mut Control| {
        let listed = control.get("bitmap.list", json!({ "disk": "disk" }));
        let (granularity, count) = (listed[0]["granularity"].as_u64(), listed[0]["count"].as_u64());
        assert_eq!(listed[0]["recording"], true, "{listed}");
        (granularity.expect("a size"), count.expect("a count"))
    };
    assert_eq!(listed(&mut control), (4096, 33 * 4096));
    kill(server);
    let server = serve();
    let (granularity, count) = listed(&mut connect());
    assert!(granularity == 4096 && count < size / 8, "{count}");
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(size - 512, &[2; 512], 0), 0);
    drop(client);
    server.stop();
    // Space that the bitmap no longer needs is free, and the check finds no errors.
    run(tool("qemu-img").args(["check", "-f", "qcow2", str(&side)])).success();
    let backup = scratch.path("increment.qcow2");
    let base = scratch.image("base.img", size);
    let words = ["backup", image.str(), str(&backup), "--incremental", "b", "--base", base.str()];
    command(&[&words[..], &["--bitmaps", str(&side)]].concat()).success();
    let compare = ["compare", "-f", "qcow2", "-F", "raw", str(&backup), image.str()];
    qemu_img(&compare).success();
}

fn write_all_over(server: &Server) {
    let mut client = Client::open(&server.address());
    for number in 0..800 {
        assert_eq!(client.write(number * (128 * MIB), &[1; 4096], 0), 0, "write {number}");
    }
}

/// A host without space even for the file of the bitmaps.
#[test]
fn a_guest_is_served_where_there_is_no_room_for_its_bitmaps() {
    let scratch = Scratch::new();
    let small = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, MIB));
    let image: Image = scratch.image("large.img", 100 << 30);
    let side = small.path("side");
    let serve = Serve::new(&scratch, image.path()).option("--name", "disk");
    let serve = serve.option("--bitmaps", &side).option("--control", scratch.socket("control"));
    let server = serve.start();
    assert!(server.log().contains("changes are not recorded"), "{}", server.log());
    let mut control = Control::connect(&scratch.socket("control"));
    for number in 0..64 {
        let name = format!("b{number}");
        let new = json!({ "disk": "disk", "name": name, "granularity": 4096 });
        assert!(control.call("bitmap.add", new).is_err(), "{number}");
    }
    write_all_over(&server);
    server.stop();
    assert!(!side.exists());
}
