//! Bitmaps of raw images, in the sidecar beside them: recorded while they are served, kept through kills and upgrades, and
//! refused where the image was changed without them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::upgrade::Servers;
use blockhouse_tests::{Scratch, Serve, Server, need, require, run, tool};
use rustix::process::Signal;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

fn image(scratch: &Scratch) -> PathBuf {
    let path = scratch.path("disk.img");
    command(&["create", str(&path), "64M"]).success();
    command(&["bitmap", "add", str(&path), "changes"]).success();
    path
}

fn sidecar(image: &Path) -> PathBuf {
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

/// What has changed, as NBD clients are told.
fn served_dirty(scratch: &Scratch, image: &Path, name: &str) -> Vec<(u64, u64)> {
    let serve = Serve::new(scratch, image).flag("--read-only").option("--bitmap", name);
    let server = serve.start();
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let told = json(&run(tool("nbdinfo").args(["--json", &map, server.uri()])).success());
    server.stop();
    dirty_extents(&told)
}

/// The same, as QEMU is told by the sidecar. It looks for the data file in the folder that it runs in.
fn qemu_dirty(image: &Path, name: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let server = ["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, "disk.img.bitmaps", "]"];
    let mut nbdinfo = tool("nbdinfo");
    nbdinfo.args(["--json", &map, "--"]).args(server);
    nbdinfo.current_dir(image.parent().expect("a folder"));
    dirty_extents(&json(&run(&mut nbdinfo).success()))
}

/// Offset and length of what is dirty.
fn dirty_extents(told: &Value) -> Vec<(u64, u64)> {
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
    assert_eq!(qemu_dirty(&image, "changes"), changed, "QEMU reads the sidecar");
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
fn a_sidecar_is_refused_where_the_image_was_changed_without_it() {
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
        // The guest goes on, without bitmaps.
        let server = serve(&scratch, &image);
        write(&server, MIB);
        server.stop();
        command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
        // As the hint says.
        std::fs::remove_file(sidecar(&image)).expect("it is there");
        command(&["bitmap", "add", str(&image), "new"]).success();
        assert_eq!(list(&image)[0]["name"], "new");
        for left in [sidecar(&image), image] {
            std::fs::remove_file(left).expect("it is there");
        }
    }
}

#[test]
fn a_killed_servers_sidecar_is_refused_where_another_program_wrote_since() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let mut server = serve(&scratch, &image);
    write(&server, MIB);
    server.signal(Signal::KILL);
    server.wait(LONG);
    assert_eq!(list(&image)[0]["name"], "changes");
    // Later than a write of the server that was late could land.
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
    command(&["upgrade", "--control", str(&control)]).success();
    write(&server, 3 * MIB);
    let export = format!("nbd+unix:///?socket={}", scratch.socket("backup").display());
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

/// A server that records changes is killed.
fn kill_one(scratch: &Scratch, image: &Path) {
    let mut server = serve(scratch, image);
    write(&server, MIB);
    server.signal(Signal::KILL);
    server.wait(LONG);
}

#[test]
fn a_refused_sidecar_stays_refused() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    kill_one(&scratch, &image);
    std::thread::sleep(Duration::from_secs(1));
    write_beside(&image);
    refuse(&image, &[]);
    // Attempts that fail vouch for nothing.
    let itself = sidecar(&image);
    let resize = ["resize", "--format", "qcow2", str(&itself), "96M"];
    command(&resize).failure("name the raw image instead");
    let serve_itself = Serve::new(&scratch, &itself).option("--format", "qcow2");
    drop(serve_itself.refused());
    refuse(&image, &[]);
    // Neither does a guest that goes on without bitmaps.
    let server = serve(&scratch, &image);
    write(&server, 2 * MIB);
    server.stop();
    refuse(&image, &[]);
}

/// As after a restart of the host: the state file is gone, and with it all that tells.
#[test]
fn a_killed_servers_sidecar_without_its_state_file_is_refused() {
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
fn a_sidecar_of_another_user_is_refused() {
    require!(need::root());
    let scratch = Scratch::new();
    let image = image(&scratch);
    std::os::unix::fs::chown(sidecar(&image), Some(65_534), None).expect("root may");
    let refused = command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
    assert!(refused.stderr.contains("owned by another user"), "{}", refused.stderr);
    // A link is none.
    let kept = scratch.path("kept");
    std::fs::rename(sidecar(&image), &kept).expect("the same folder");
    std::os::unix::fs::symlink(&kept, sidecar(&image)).expect("a link");
    command(&["bitmap", "list", str(&image)]).failure("raw image has no bitmaps");
}

#[test]
fn sizes_change_with_the_sidecar() {
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
