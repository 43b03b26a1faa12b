//! Bitmaps of raw images, in a side file beside the image: they record while the image is served,
//! survive kills and upgrades, and are refused if the image was changed without them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, new_image, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::qmp::Qmp;
use blockhouse_tests::upgrade::{Servers, upgrade_in_the_end};
use blockhouse_tests::{
    FileSystem, Scratch, Serve, Server, SmallHost, nbd_uri, need, require, run, seeded, tool,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);
const FAILED: i64 = -32000;

fn image(scratch: &Scratch) -> PathBuf {
    let path = new_image(scratch, "disk.img", "64M");
    command(&["bitmap", "add", str(&path), "changes"]).success();
    path
}

fn side_file(image: &Path) -> PathBuf {
    image.with_extension("img.bitmaps")
}

fn serve(scratch: &Scratch, image: &Path) -> Server {
    Serve::new(scratch, image).option("--control", scratch.socket("control")).start()
}

fn write(server: &Server, at: u64) {
    assert_eq!(Client::open(&server.address()).write(at, &[7; 65_536], 0), 0);
}

fn list(image: &Path) -> Value {
    json(&command(&["bitmap", "list", "--json", str(image)]).success())
}

/// The dirty extents of a bitmap, as NBD clients see them.
fn served_dirty(scratch: &Scratch, image: &Path, name: &str) -> Vec<(u64, u64)> {
    let serve = Serve::new(scratch, image).flag("--read-only").option("--bitmap", name);
    let server = serve.start();
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let told = json(&run(tool("nbdinfo").args(["--json", &map, server.uri()])).success());
    server.stop();
    dirty_extents(&told)
}

/// The same, as QEMU reads it from the side file. QEMU looks for the data file in its working
/// folder.
fn qemu_dirty(image: &Path, name: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let server = ["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, "disk.img.bitmaps", "]"];
    let mut nbdinfo = tool("nbdinfo");
    nbdinfo.args(["--json", &map, "--"]).args(server);
    nbdinfo.current_dir(image.parent().expect("a folder"));
    dirty_extents(&json(&run(&mut nbdinfo).success()))
}

/// Offset and length of the dirty extents.
pub(crate) fn dirty_extents(told: &Value) -> Vec<(u64, u64)> {
    let number = |one: &Value, key| one[key].as_u64().expect("a number");
    let extents = told.as_array().expect("a list").iter().filter(|one| one["type"] == 1);
    extents.map(|one| (number(one, "offset"), number(one, "length"))).collect()
}

#[test]
fn changes_of_a_raw_image_are_recorded_and_survive_a_kill() {
    require!(need::tools(&["nbdinfo", "qemu-nbd", "qemu-img"]));
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server = serve(&scratch, &image);
    write(&server, 5 * MIB);
    server.stop();
    let changed = [(5 * MIB, 65_536)];
    assert_eq!(served_dirty(&scratch, &image, "changes"), changed);
    assert_eq!(qemu_dirty(&image, "changes"), changed, "QEMU reads the side file");
    let mut server = serve(&scratch, &image);
    let mut control = Control::connect(&scratch.socket("control"));
    control.get("bitmap.add", json!({ "disk": "disk.img", "name": "second" }));
    write(&server, 9 * MIB);
    server.signal(Signal::KILL);
    server.wait(LONG);
    let server = serve(&scratch, &image);
    let list = Control::connect(&scratch.socket("control"))
        .get("bitmap.list", json!({ "disk": "disk.img" }));
    assert_eq!(list.as_array().map(Vec::len), Some(2), "{list}");
    write(&server, 13 * MIB);
    server.stop();
    for (name, bytes) in [("changes", [5, 9, 13].as_slice()), ("second", &[9, 13])] {
        let found = served_dirty(&scratch, &image, name);
        for at in bytes {
            let is_there =
                |one: &&(u64, u64)| one.0 <= at * MIB && one.0 + one.1 >= at * MIB + 65_536;
            assert!(found.iter().any(|one| is_there(&one)), "{name}: {at} in {found:?}");
        }
    }
    let bytes = std::fs::read(&image).expect("a raw image");
    assert!(bytes[9 * MIB as usize..][..65_536].iter().all(|byte| *byte == 7));
    assert_eq!(bytes.len() as u64, 64 * MIB);
}

#[test]
fn the_header_of_a_side_file_is_not_the_images() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let socket = scratch.socket("qmp");
    let server = Serve::new(&scratch, &image).option("--qmp", &socket).start();
    let nodes = Qmp::connect(&socket).get("query-named-block-nodes", json!({}));
    let of_format = |node: &&Value| node["drv"] == "raw";
    let node = nodes.as_array().and_then(|nodes| nodes.iter().find(of_format)).expect("a node");
    assert_eq!(node["dirty-bitmaps"][0]["name"], "changes");
    assert_eq!(node["image"].get("format-specific"), None, "{node}");
    server.stop();
}

#[test]
fn a_side_file_is_refused_where_the_image_was_changed_without_it() {
    let scratch = Scratch::new();
    let change = |image: &Path| {
        let mut bytes = std::fs::read(image).expect("it is there");
        bytes[0] ^= 1;
        std::fs::write(image, bytes).expect("it can be written");
    };
    let replace = |image: &Path| {
        let other = image.with_extension("other");
        std::fs::copy(image, &other).expect("a copy");
        std::fs::rename(other, image).expect("the same folder");
    };
    let cut = |image: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(image).expect("it is there");
        file.set_len(32 * MIB).expect("shorter");
    };
    let changes: [fn(&Path); 3] = [change, replace, cut];
    for (words, change) in ["may lack changes", "another file", "has 33554432"].iter().zip(changes)
    {
        let image = image(&scratch);
        assert_eq!(list(&image)[0]["name"], "changes");
        change(&image);
        let refused = command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
        assert!(refused.stderr.contains(*words), "{words}: {}", refused.stderr);
        command(&["bitmap", "add", str(&image), "new"]).failure("make a full backup");
        // The guest continues, without bitmaps.
        let server = serve(&scratch, &image);
        write(&server, MIB);
        server.stop();
        command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
        // Follows the hint of the error.
        std::fs::remove_file(side_file(&image)).expect("it is there");
        command(&["bitmap", "add", str(&image), "new"]).success();
        assert_eq!(list(&image)[0]["name"], "new");
        for left in [side_file(&image), image] {
            std::fs::remove_file(left).expect("it is there");
        }
    }
}

#[test]
fn a_killed_servers_side_file_is_refused_where_another_program_wrote_since() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let mut server = serve(&scratch, &image);
    write(&server, MIB);
    server.signal(Signal::KILL);
    server.wait(LONG);
    assert_eq!(list(&image)[0]["name"], "changes");
    // Later than a delayed write of the killed server could arrive.
    std::thread::sleep(Duration::from_secs(1));
    let mut bytes = std::fs::read(&image).expect("it is there");
    bytes[0] ^= 1;
    std::fs::write(&image, bytes).expect("it can be written");
    let refused = command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
    assert!(refused.stderr.contains("may lack changes"), "{}", refused.stderr);
}

#[test]
fn a_raw_disk_is_backed_up_in_increments_and_upgraded() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server = serve(&scratch, &image);
    write(&server, MIB);
    let control = scratch.socket("control");
    upgrade_in_the_end(&control, &[]);
    write(&server, 3 * MIB);
    let export = nbd_uri("", scratch.socket("backup"));
    let mut control = Control::connect(&control);
    let mut back_up = |bitmap: &str, since: Option<&str>, target: &Path, base: &Path| {
        let begin = json!({ "disks": ["disk.img"], "backup": "b", "bitmap": bitmap, "since": since, "export": export });
        let began = control.get("backup.begin", begin);
        let uri = began["disks"][0]["exports"][0].as_str().expect("an export").to_owned();
        let mut words = vec!["backup", &uri, str(target), "--verify"];
        if let Some(since) = since {
            words.extend(["--incremental", since, "--base", str(base)]);
        }
        command(&words).success();
        control.get("backup.end", json!({ "backup": "b" }));
    };
    let [first, second] = ["first.qcow2", "second.qcow2"].map(|name| scratch.path(name));
    back_up("one", None, &first, &first);
    write(&server, 5 * MIB);
    back_up("two", Some("one"), &second, &first);
    Servers(&scratch).stop();
    let restored = scratch.path("restored.img");
    command(&["convert", str(&second), str(&restored)]).success();
    assert!(std::fs::read(restored).expect("a copy") == std::fs::read(image).expect("the disk"));
}

fn write_beside(image: &Path) {
    let file = std::fs::OpenOptions::new().write(true).open(image).expect("it is there");
    std::os::unix::fs::FileExt::write_at(&file, &[3; 4096], 20 * MIB).expect("room");
}

fn refuse(image: &Path, options: &[&str]) {
    let listed = command(&[&["bitmap", "list", str(image)], options].concat());
    let refused = listed.failure("raw image has no bitmaps");
    assert!(refused.stderr.contains("may lack changes"), "{}", refused.stderr);
}

/// Starts a server that records changes, and kills it.
fn kill_one(scratch: &Scratch, image: &Path) {
    let mut server = serve(scratch, image);
    write(&server, MIB);
    server.signal(Signal::KILL);
    server.wait(LONG);
}

#[test]
fn a_refused_side_file_stays_refused() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    kill_one(&scratch, &image);
    std::thread::sleep(Duration::from_secs(1));
    write_beside(&image);
    refuse(&image, &[]);
    // Failed commands do not make the bitmaps valid.
    let itself = side_file(&image);
    let resize = ["resize", "--format", "qcow2", str(&itself), "96M"];
    command(&resize).failure("name the raw image instead");
    let serve_itself = Serve::new(&scratch, &itself).option("--format", "qcow2");
    drop(serve_itself.refused());
    refuse(&image, &[]);
    // Neither does a guest that continues without bitmaps.
    let server = serve(&scratch, &image);
    write(&server, 2 * MIB);
    server.stop();
    refuse(&image, &[]);
}

/// As after a reboot of the host: the state file is lost, and without it the changes are unknown.
#[test]
fn a_killed_servers_side_file_without_its_state_file_is_refused() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    kill_one(&scratch, &image);
    assert_eq!(list(&image)[0]["name"], "changes");
    refuse(&image, &["--state", "off"]);
}

#[test]
fn what_is_changed_beside_an_idle_server_is_not_hidden() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server = serve(&scratch, &image);
    write_beside(&image);
    server.stop();
    refuse(&image, &[]);
}

#[test]
fn a_side_file_of_another_user_is_refused() {
    require!(need::root());
    let scratch = Scratch::new();
    let image = image(&scratch);
    std::os::unix::fs::chown(side_file(&image), Some(65_534), None).expect("root may");
    let refused = command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
    assert!(refused.stderr.contains("owned by another user"), "{}", refused.stderr);
    // A symbolic link is not accepted as a side file.
    let kept = scratch.path("kept");
    std::fs::rename(side_file(&image), &kept).expect("the same folder");
    std::os::unix::fs::symlink(&kept, side_file(&image)).expect("a link");
    command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
    for _ in 0..2 {
        command(&["bitmap", "add", str(&image), "new"]).failure("is no regular file");
        // The link may also lead nowhere.
        let _ = std::fs::remove_file(&kept);
    }
}

#[test]
fn sizes_change_with_the_side_file() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    for size in ["96M", "128M"] {
        command(&["resize", str(&image), size]).success();
        assert_eq!(list(&image)[0]["name"], "changes");
    }
    command(&["resize", "--shrink", str(&image), "32M"]).success();
    assert_eq!(list(&image)[0]["name"], "changes");
    assert_eq!(std::fs::metadata(&image).expect("it is there").len(), 32 * MIB);
}

fn plain(scratch: &Scratch) -> PathBuf {
    new_image(scratch, "disk.img", "64M")
}

fn covers(found: &[(u64, u64)], at: u64, length: u64) -> bool {
    found.iter().any(|(start, dirty)| *start <= at && start + dirty >= at + length)
}

/// A guest writes all the time: the bitmap has the writes that begin after the answer, and not
/// those from long before.
#[test]
fn a_raw_image_gets_its_first_bitmap_while_a_guest_writes() {
    require!(need::tools(&["nbdinfo"]));
    for options in [&["--cache", "none"][..], &["--cache", "writeback", "--state", "off"]] {
        let scratch = Scratch::new();
        let image = plain(&scratch);
        let serve = Serve::new(&scratch, &image).option("--control", scratch.socket("control"));
        let server = options.chunks(2).fold(serve, |serve, pair| serve.option(pair[0], pair[1]));
        let server = server.start();
        write(&server, MIB);
        let (begun, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
        let address = server.address();
        let after = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut client = Client::open(&address);
                while !stopped.load(Ordering::SeqCst) {
                    let number = begun.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(client.write(place(number), &[9; 4096], 0), 0);
                }
            });
            let wait_for = |count| {
                while begun.load(Ordering::SeqCst) < count {
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            wait_for(20);
            let mut control = Control::connect(&scratch.socket("control"));
            control.get("bitmap.add", json!({ "disk": "disk.img", "name": "first" }));
            let after = begun.load(Ordering::SeqCst);
            wait_for(after + 20);
            stopped.store(true, Ordering::SeqCst);
            after
        });
        let disks = Control::connect(&scratch.socket("control")).get("disk.list", json!({}));
        assert_eq!(disks[0]["format"], "raw", "{disks}");
        assert_eq!(disks[0]["path"].as_str(), image.canonicalize().expect("a file").to_str());
        server.stop();
        let found = served_dirty(&scratch, &image, "first");
        for number in after..begun.load(Ordering::SeqCst) {
            assert!(covers(&found, place(number), 4096), "{number}, {after}: {found:?}");
        }
        assert!(!covers(&found, MIB, 4096), "{found:?}");
        let bytes = std::fs::read(&image).expect("a raw image");
        assert!(bytes[place(after) as usize..][..4096].iter().all(|byte| *byte == 9));
    }
}

/// The offset of a guest's write number `number`: a new granule each, until all are used.
fn place(number: u64) -> u64 {
    2 * MIB + number * 65_536 % (60 * MIB)
}

/// The bitmap survives a kill or an upgrade of the server that has begun it, and the image stays
/// locked.
#[test]
fn a_bitmap_that_was_begun_beside_a_guest_outlives_the_server() {
    require!(need::tools(&["nbdinfo"]));
    for end in ["kill", "upgrade"] {
        let scratch = Scratch::new();
        let image = plain(&scratch);
        let mut server = serve(&scratch, &image);
        write(&server, MIB);
        let mut control = Control::connect(&scratch.socket("control"));
        control.get("bitmap.add", json!({ "disk": "disk.img", "name": "first" }));
        command(&["bitmap", "list", str(&image)]).success();
        command(&["resize", str(&image), "96M"]).failure("the image is locked");
        if end == "kill" {
            // Nothing was written since the bitmap began.
            server.signal(Signal::KILL);
            server.wait(LONG);
            server = serve(&scratch, &image);
            assert!(!server.log().contains("not used"), "{}", server.log());
            write(&server, 9 * MIB);
            server.signal(Signal::KILL);
            server.wait(LONG);
        } else {
            write(&server, 9 * MIB);
            upgrade_in_the_end(&scratch.socket("control"), &[]);
            command(&["resize", str(&image), "96M"]).failure("the image is locked");
            write(&server, 17 * MIB);
            Servers(&scratch).stop();
            drop(server);
        }
        let found = served_dirty(&scratch, &image, "first");
        assert!(covers(&found, 9 * MIB, 65_536), "{end}: {found:?}");
        assert_eq!(covers(&found, 17 * MIB, 65_536), end == "upgrade", "{found:?}");
        assert!(!covers(&found, MIB, 65_536), "{end}: {found:?}");
    }
}

#[test]
fn the_first_backup_of_a_served_raw_image_begins_its_bitmap() {
    let scratch = Scratch::new();
    let image = plain(&scratch);
    let server = serve(&scratch, &image);
    write(&server, MIB);
    let mut control = Control::connect(&scratch.socket("control"));
    let export = nbd_uri("", scratch.socket("backup"));
    let begin = json!({ "disks": ["disk.img"], "backup": "b", "bitmap": "one", "export": export });
    let began = control.get("backup.begin", begin);
    write(&server, 3 * MIB);
    let uri = began["disks"][0]["exports"][0].as_str().expect("an export").to_owned();
    let first = scratch.path("first.qcow2");
    command(&["backup", &uri, str(&first), "--verify"]).success();
    control.get("backup.end", json!({ "backup": "b" }));
    let list = control.get("bitmap.list", json!({ "disk": "disk.img" }));
    assert_eq!((&list[0]["name"], &list[0]["count"]), (&json!("one"), &json!(65_536)), "{list}");
    server.stop();
    let copy = scratch.path("copy.img");
    command(&["convert", str(&first), str(&copy)]).success();
    let bytes = std::fs::read(copy).expect("a copy");
    assert!(bytes[MIB as usize] == 7 && bytes[3 * MIB as usize] == 0);
}

#[test]
fn a_served_image_that_cannot_have_a_side_file_goes_on_without() {
    let scratch = Scratch::new();
    let image = plain(&scratch);
    let link = scratch.path("link.img");
    std::os::unix::fs::symlink(&image, &link).expect("a link");
    let refuse = |path: &Path, words: &[&str]| {
        let server = serve(&scratch, path);
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        let mut control = Control::connect(&scratch.socket("control"));
        if words.contains(&"another file") {
            std::fs::rename(&image, scratch.path("elsewhere")).expect("the same folder");
            std::fs::copy(scratch.path("elsewhere"), &image).expect("a copy");
        }
        let add = json!({ "disk": name, "name": "first" });
        control.refused("bitmap.add", add, -32_000, words);
        write(&server, MIB);
        server.stop();
        assert!(!side_file(&image).exists());
    };
    refuse(&link, &["named by its own path"]);
    refuse(&image, &["another file"]);
    // An image with bitmaps is not taken for a new one.
    let server = serve(&scratch, &image);
    let other = scratch.path("other");
    std::fs::create_dir(&other).expect("a folder");
    let beside = other.join("disk.img");
    command(&["create", str(&beside), "64M"]).success();
    command(&["bitmap", "add", str(&beside), "strange"]).success();
    std::fs::rename(side_file(&beside), side_file(&image)).expect("the same file system");
    let add = json!({ "disk": "disk.img", "name": "first" });
    let mut control = Control::connect(&scratch.socket("control"));
    control.refused("bitmap.add", add.clone(), -32_000, &["belongs to another file"]);
    std::fs::remove_file(side_file(&image)).expect("it is there");
    control.get("bitmap.add", add);
    server.stop();
    assert_eq!(list(&image)[0]["name"], "first");
}

/// The user has named the image, and the side file refers to no other file.
#[test]
fn a_side_file_needs_no_permission_to_lead_to_its_image() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, ".disk.img", "1M");
    for name in ["first", "second"] {
        command(&["bitmap", "add", "--no-references", str(&image), name]).success();
    }
    assert_eq!(list(&image)[1]["name"], "second");
}

#[test]
fn a_first_bitmap_that_cannot_be_had_leaves_no_side_file() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.img", "64M");
    let long = "n".repeat(2000);
    command(&["bitmap", "add", str(&image), &long]).failure("name");
    assert!(!side_file(&image).exists());
    let server = serve(&scratch, &image);
    let mut control = Control::connect(&scratch.socket("control"));
    let taken = nbd_uri("disk.img", scratch.socket("nbd"));
    control.get("export.add", json!({ "disk": "disk.img", "export": taken }));
    for at in 0..3 {
        let begin = json!({ "disks": ["disk.img"], "bitmap": "monday", "export": taken });
        control.refused("backup.begin", begin, FAILED, &["exists"]);
        assert!(!side_file(&image).exists(), "a backup that did not begin left it");
        write(&server, at * MIB);
        let add = json!({ "disk": "disk.img", "name": long });
        control.refused("bitmap.add", add, FAILED, &["name"]);
        assert!(!side_file(&image).exists(), "a bitmap that was not added left it");
        write(&server, at * MIB + 65_536);
    }
    // The disk is locked as before, and the next bitmap records.
    command(&["bitmap", "add", str(&image), "x"]).failure("locked");
    let export = nbd_uri("", scratch.socket("backup"));
    let begin = json!({ "disks": ["disk.img"], "bitmap": "monday", "export": export });
    control.get("backup.begin", begin);
    write(&server, 50 * MIB);
    drop(control);
    server.stop();
    assert_eq!(list(&image)[0]["name"], "monday");
    assert_eq!(served_dirty(&scratch, &image, "monday"), [(50 * MIB, 65_536)]);
    let bytes = std::fs::read(&image).expect("the image");
    assert!((0..3).all(|at| bytes[(at * MIB) as usize..][..131_072].iter().all(|&byte| byte == 7)));
}

/// If there is no space for the bitmaps, the raw image is not changed.
#[test]
fn a_resize_that_finds_no_room_for_its_bitmaps_changes_nothing() {
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, 4 * MIB));
    let image = host.path("disk.img");
    command(&["create", str(&image), "1G"]).success();
    command(&["bitmap", "add", str(&image), "changes"]).success();
    for more in [1_u64 << 40, 64 << 30] {
        let server = serve(&scratch, &image);
        let control = || Control::connect(&scratch.socket("control"));
        host.fill_up("ballast");
        let resize = json!({ "disk": "disk.img", "size": more });
        control().refused("disk.resize", resize, -32000, &["No space left"]);
        host.give_back("ballast");
        assert_eq!(image.metadata().expect("it is there").len(), 1 << 30);
        server.stop();
        let server = serve(&scratch, &image);
        write(&server, 5 * MIB);
        let list = control().get("bitmap.list", json!({ "disk": "disk.img" }));
        assert_eq!((&list[0]["name"], &list[0]["recording"]), (&json!("changes"), &json!(true)));
        server.stop();
    }
}

/// Clients can write during the long preparations.
#[test]
fn clients_go_on_while_a_raw_image_with_a_bitmap_becomes_much_longer() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server = serve(&scratch, &image);
    let (done, address) = (AtomicBool::new(false), server.address());
    let (longest, resized) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = Client::open(&address);
            let mut longest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let began = std::time::Instant::now();
                assert_eq!(client.write(MIB, &[7; 4096], 0), 0);
                longest = longest.max(began.elapsed());
            }
            longest
        });
        let began = std::time::Instant::now();
        let resize = json!({ "disk": "disk.img", "size": 128_u64 << 30 });
        Control::connect(&scratch.socket("control")).get("disk.resize", resize);
        let resized = began.elapsed();
        done.store(true, Ordering::Relaxed);
        (writer.join().expect("no failure"), resized)
    });
    assert!(longest < resized, "held off for {longest:?} of {resized:?}");
    server.stop();
    command(&["check", "-f", "qcow2", str(&side_file(&image))]).success();
    let list = list(&image);
    assert_eq!(list[0]["name"], "changes", "{list}");
}

/// After a kill the image has the old or the new size, and the bitmap has all recorded changes.
#[test]
fn a_resize_that_a_kill_ends_leaves_the_bitmap_as_it_was() {
    require!(need::tools(&["nbdinfo"]));
    const LONGER: u64 = 32 << 30;
    let mut random = seeded();
    for _ in 0..6 {
        let scratch = Scratch::new();
        let image = image(&scratch);
        let mut server = serve(&scratch, &image);
        write(&server, 5 * MIB);
        let params = json!({ "disk": "disk.img", "size": LONGER });
        let resize =
            json!({ "jsonrpc": "2.0", "id": 1, "method": "disk.resize", "params": params });
        let mut control = Control::connect(&scratch.socket("control"));
        control.send(resize.to_string().as_bytes()).expect("the server listens");
        std::thread::sleep(Duration::from_millis(random.u64(..400)));
        server.signal(Signal::KILL);
        server.wait(LONG);
        let server = serve(&scratch, &image);
        let size = Client::open(&server.address()).size();
        assert!(size == 64 * MIB || size == LONGER, "{size}");
        write(&server, 6 * MIB);
        let mut control = Control::connect(&scratch.socket("control"));
        let list = control.get("bitmap.list", json!({ "disk": "disk.img" }));
        assert_eq!((&list[0]["name"], &list[0]["recording"]), (&json!("changes"), &json!(true)));
        drop(control);
        server.stop();
        assert_eq!(image.metadata().expect("it is there").len(), size);
        let found = served_dirty(&scratch, &image, "changes");
        assert!(covers(&found, 5 * MIB, 65_536) && covers(&found, 6 * MIB, 65_536), "{found:?}");
    }
}
