//! Bitmaps of block devices, images in Ceph and exports of NBD servers, in a file that the user
//! names (`--bitmaps`): kept through kills and upgrades, and refused where the volume is another
//! one or somebody else may have written to it.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_tests::ceph::ceph;
use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::upgrade::{Servers, upgrade};
use blockhouse_tests::{
    FileSystem, Image, LoopDevice, Scratch, Serve, Server, SmallHost, need, require, seeded,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const BLOCK: usize = 64 << 10;
const LONG: Duration = Duration::from_secs(120);
const INCREMENTS: usize = 20;

/// A volume, and where its bitmaps are.
struct Volume {
    scratch: Scratch,
    /// As commands name it.
    name: String,
    /// The user's word where nothing tells of other programs' changes.
    is_trusted: bool,
    /// Keeps it there.
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

/// Bytes that a bitmap says to have changed.
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
    upgrade(&volume.scratch.socket("control"), &[]).success();
    write(&server, 13 * MIB, 3);
    assert!(changed(&mut volume.control(), "b") >= 3 * BLOCK as u64);
    Servers(&volume.scratch).stop();
    assert_eq!(volume.listed(), ["b"]);
    // Without its bitmaps, the device is a raw disk like others.
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
    // The guest is served all the same.
    let server = volume.serve();
    assert!(server.log().contains("may lack changes"), "{}", server.log());
    write(&server, 0, 2);
    server.stop();
    refused();
    // A server of the device that knows nothing of its bitmaps.
    add();
    let server = Serve::new(&volume.scratch, device.path()).start();
    write(&server, 0, 3);
    server.stop();
    refused();
    // Of a kill without its state file nothing tells.
    add();
    let server = volume.serve();
    write(&server, 0, 1);
    kill(server);
    let side = volume.side_file();
    let words = ["bitmap", "list", &volume.name, "--bitmaps", str(&side), "--state", "off"];
    command(&words).failure("nothing tells");
    command(&[&words[..], &["--trust-bitmaps"]].concat()).success();
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
    // The device anew: the same file, whose writes nobody has counted.
    let file = volume.scratch.path("volume");
    device.attach_again(&file);
    list(device.path()).failure("nothing tells");
    let trusted = ["bitmap", "list", &volume.name, "--bitmaps", str(&side), "--trust-bitmaps"];
    command(&trusted).success();
    OpenOptions::new().write(true).open(&file).expect("a file").set_len(2 * SIZE).expect("longer");
    device.attach_again(&file);
    command(&trusted).failure("is of a disk of 67108864 bytes");
    // An image with bitmaps of its own has no use for such a file.
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
    let server =
        serve.export(&format!("nbd+unix:///?socket={}", volume.scratch.socket("all").display()));
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
    // The device's first, wherever the other path begins.
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

/// Increments of a volume whose server is killed in every round: each is what the disk was.
fn increments(volume: &Volume) {
    let mut random = seeded();
    let mut disk = vec![0; SIZE as usize];
    let expected = volume.scratch.path("expected.img");
    let backup = |number: usize| volume.scratch.path(&format!("{number}.qcow2"));
    let side = volume.side_file();
    let options = volume.options();
    let place = [&["--bitmaps", str(&side)], &options[..]].concat();
    volume.bitmap(&["add"], &["b0"]).success();
    command(&[&["backup", &volume.name, str(&backup(0))], &place[..]].concat()).success();
    for number in 1..=INCREMENTS {
        let server = volume.serve();
        for _ in 0..random.usize(1..20) {
            let (at, byte) = (random.usize(..SIZE as usize / BLOCK) * BLOCK, random.u8(1..));
            disk[at..at + BLOCK].fill(byte);
            write(&server, at as u64, byte);
        }
        match random.bool() {
            true => kill(server),
            false => server.stop(),
        }
        let [since, next] = [number - 1, number].map(|number| format!("b{number}"));
        let copy = backup(number);
        let words = ["backup", &volume.name, str(&copy), "--incremental", &since];
        let base = backup(number - 1);
        command(&[&words[..], &["--base", str(&base)], &place].concat()).success();
        volume.bitmap(&["add"], &[&next]).success();
        volume.bitmap(&["remove"], &[&since]).success();
        std::fs::write(&expected, &disk).expect("there is room");
        let compare = ["compare", "-f", "qcow2", "-F", "raw", str(&copy), str(&expected)];
        qemu_img(&compare).success();
    }
}

#[test]
fn increments_of_a_device_are_what_it_was() {
    require!(need::tools(&["qemu-img"]));
    let (volume, _device) = require!(Volume::on_loop());
    increments(&volume);
}

#[test]
fn increments_of_an_export_are_what_it_was() {
    require!(need::tools(&["qemu-img"]));
    increments(&Volume::on_nbd());
}

#[test]
fn increments_of_an_image_in_ceph_are_what_it_was() {
    let ceph = require!(ceph());
    let image = format!("volume{}", fastrand::u64(..));
    ceph.rbd(&["create", "--size", "64M", &format!("rbd/{image}")]).success();
    let name = ceph.location(&image);
    let volume = Volume { scratch: Scratch::new(), name, is_trusted: true, _held: Vec::new() };
    volume.bitmap(&["add"], &["first"]).success();
    let server = volume.serve();
    write(&server, 5 * MIB, 1);
    server.stop();
    let server = volume.serve();
    assert_eq!(changed(&mut volume.control(), "first"), BLOCK as u64);
    write(&server, 9 * MIB, 1);
    kill(server);
    // The lock of a killed client is free when its watch has expired.
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

/// Fine bitmaps of a large sparse disk whose place becomes full: no write fails, and what a bitmap
/// lacks is told.
#[test]
fn a_full_place_for_bitmaps_costs_no_guest_a_write() {
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
    events.get("event.subscribe", json!({ "events": ["bitmap.lost"] }));
    for number in 0..64 {
        let name = format!("b{number}");
        let new = json!({ "disk": "disk", "name": name, "granularity": 4096 });
        control.get("bitmap.add", new);
    }
    small.fill_up("filler");
    write_all_over(&server);
    assert_eq!(events.event()["event"], "bitmap.lost");
    let listed = control.get("bitmap.list", json!({ "disk": "disk" }));
    let listed: &Vec<Value> = listed.as_array().expect("a list");
    let lacks = |one: &&Value| one["inconsistent"] == true && one["lacks-changes-since"].is_u64();
    assert!(listed.iter().filter(lacks).count() > 0, "{listed:?}");
    server.stop();
    let backup = scratch.path("increment.qcow2");
    let base = scratch.image("base.img", 100 << 30);
    let words = ["backup", image.str(), str(&backup), "--incremental", "b0", "--base", base.str()];
    let failed = command(&[&words[..], &["--bitmaps", str(&side)]].concat());
    assert_eq!(failed.status.code(), Some(3), "{}", failed.stderr);
}

fn write_all_over(server: &Server) {
    let mut client = Client::open(&server.address());
    for number in 0..800 {
        assert_eq!(client.write(number * (128 * MIB), &[1; 4096], 0), 0, "write {number}");
    }
}

/// A host that has not even room for the file of the bitmaps.
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
