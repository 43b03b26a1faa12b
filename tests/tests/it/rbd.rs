//! Images in Ceph, on a cluster of one machine: commands read and write them, and servers export
//! them.

use std::path::Path;
use std::time::Duration;

use blockhouse_tests::ceph::{Ceph, ceph, ceph_alone};
use blockhouse_tests::control::Control;
use blockhouse_tests::guest::{BLOCK, Guest, content};
use blockhouse_tests::image_tool::{command, json, qemu_img, qemu_io, str};
use blockhouse_tests::nbd::{Client, Framing};
use blockhouse_tests::{
    Scratch, Serve, Server, eventually, random_bytes, require, run, seeded, tool,
};
use blockhouse_vhost_user::driver::Options;
use rustix::process::Signal;
use serde_json::json;

use crate::jobs::{self, Writer};

const MIB: usize = 1 << 20;

/// The longest time until the lock of a killed client is free: when its watch has expired, after 30
/// seconds on a cluster that is not busy.
const LOCK_EXPIRES: Duration = Duration::from_secs(180);

/// A name that no other test has.
fn new_image(ceph: &Ceph, size: &str) -> String {
    let name = format!("image{}", fastrand::u64(..));
    ceph.rbd(&["create", "--size", size, &format!("rbd/{name}")]).success();
    name
}

fn serve(scratch: &Scratch, location: &str) -> Server {
    Serve::new(scratch, Path::new(location)).start()
}

#[test]
fn an_image_in_ceph_is_written_and_read_as_a_file_is() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "64M"));
    let location = ceph.location(&name);
    let info = json(&command(&["info", "--json", &location]).success());
    assert_eq!((&info["format"], &info["virtual-size"]), (&"raw".into(), &(64 * MIB).into()));
    assert_eq!(info["blockhouse"]["fua"], "native");
    assert_eq!(info["blockhouse"]["write-cache"], "none");
    let mut content = vec![0; 64 * MIB];
    content[..3 * MIB].copy_from_slice(&random_bytes(&mut seeded(), 3 * MIB));
    content[40 * MIB..40 * MIB + 512].fill(7);
    let file = scratch.image_of("file.raw", &content);
    command(&["convert", "--force", file.str(), &location]).success();
    command(&["compare", file.str(), &location]).success();
    qemu_img(&["compare", "-f", "raw", "-F", "raw", file.str(), &ceph.qemu_location(&name)])
        .success();
    let parts = json(&command(&["map", "--json", &location]).success());
    let held: Vec<_> =
        parts.as_array().unwrap().iter().filter(|part| part["zero"] != true).collect();
    let range = |part: &serde_json::Value| (part["start"].as_u64(), part["length"].as_u64());
    let object = 4 * MIB as u64;
    let expected = [(Some(0), Some(object)), (Some(10 * object), Some(object))];
    assert_eq!(held.iter().map(|part| range(part)).collect::<Vec<_>>(), expected, "{parts}");
    let copy = scratch.path("copy.qcow2");
    command(&["convert", &location, str(&copy)]).success();
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", file.str(), str(&copy)]).success();
    let missing = ceph.location("missing");
    command(&["info", &missing]).failure("No such file or directory");
}

#[test]
fn a_served_image_is_durable_when_the_server_is_killed() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "64M"));
    let location = ceph.location(&name);
    let mut server = serve(&scratch, &location);
    let uri = Path::new(server.uri()).to_owned();
    let steps =
        ["write -P 5 0 64k", "write -f -P 6 4M 4k", "write -P 9 8M 4M", "write -z 8M 1M", "flush"];
    qemu_io("raw", &uri, &steps);
    qemu_io(
        "raw",
        &uri,
        &["read -P 5 0 64k", "read -P 0 8M 1M", "read -P 9 9M 3M", "discard 4M 4M"],
    );
    let map = run(tool("nbdinfo").args(["--map", str(&uri)])).success();
    assert!(map.stdout.contains("hole,zero"), "{}", map.stdout);
    server.signal(Signal::KILL);
    server.wait(Duration::from_secs(20));
    let theirs = ceph.qemu_location(&name);
    let steps = ["read -P 5 0 64k", "read -P 0 8M 1M", "read -P 9 9M 3M", "read -P 0 12M 52M"];
    qemu_io("raw", Path::new(&theirs), &steps);
    // The next server waits until the cluster has noticed.
    let server = Serve::new(&scratch, Path::new(&location)).start_within(LOCK_EXPIRES);
    qemu_io("raw", &uri, &["read -P 5 0 64k", "write -P 7 0 64k"]);
    server.stop();
    qemu_io("raw", Path::new(&theirs), &["read -P 7 0 64k"]);
}

#[test]
fn a_second_writer_is_refused_with_the_name_of_the_first() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "16M"));
    let location = ceph.location(&name);
    let server = serve(&scratch, &location);
    let other = Scratch::new();
    let image = Path::new(&location);
    Serve::new(&other, image).refused().failed(&["locked", "client.", "127.0.0.1"]);
    command(&["convert", &location, str(&scratch.path("copy.raw"))]).failure("client.");
    command(&["map", "-U", &location]).success();
    command(&["info", &location]).success();
    server.stop();
    serve(&other, &location).stop();
    // An image without the exclusive-lock feature is refused.
    ceph.rbd(&["feature", "disable", &name, "fast-diff", "object-map", "exclusive-lock"]).success();
    Serve::new(&other, image).refused().failed(&["rbd feature enable", "exclusive-lock"]);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "64M"));
    let server = serve(&scratch, &ceph.location(&name));
    let mut fio = tool("fio");
    fio.args([
        "--name=verify",
        "--thread",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--bsrange=512-64k",
    ]);
    fio.args([
        "--bs_unaligned=1",
        "--iodepth=16",
        "--size=32M",
        "--verify=crc32c",
        "--verify_fatal=1",
    ]);
    fio.args([&format!("--uri={}", server.uri()), "--output-format=json"]);
    run(fio.current_dir(scratch.short())).success();
    server.stop();
}

#[test]
fn images_are_made_copied_and_resized_in_ceph() {
    let ceph = require!(ceph());
    let scratch = Scratch::new();
    let name = |end: &str| format!("made{}{end}", fastrand::u64(..));
    let (raw, qcow2, copy) = (name(""), name(".qcow2"), name(".qcow2"));
    let at = |name: &str| ceph.location(name);
    command(&["create", &at(&raw), "32M"]).success();
    command(&["create", &at(&raw), "32M"]).failure("File exists");
    command(&["create", &at(&qcow2), "10G"]).success();
    let info = json(&command(&["info", "--json", &at(&qcow2)]).success());
    assert_eq!(
        (&info["format"], &info["virtual-size"]),
        (&"qcow2".into(), &(10 * 1024 * MIB).into())
    );
    // The image in Ceph grows as clusters are written.
    let server = serve(&scratch, &at(&qcow2));
    let steps = ["write -P 3 0 70M", "write -f -P 4 5G 1M", "read -P 3 0 70M", "flush"];
    qemu_io("raw", Path::new(server.uri()), &steps);
    server.stop();
    command(&["check", &at(&qcow2)]).success();
    command(&["check", "--repair", "all", &at(&qcow2)]).success();
    qemu_img(&["check", "-f", "qcow2", &ceph.qemu_location(&qcow2)]).success();
    command(&["convert", "--compress", &at(&qcow2), &at(&copy)]).success();
    command(&["compare", &at(&qcow2), &at(&copy)]).success();
    qemu_io(
        "qcow2",
        Path::new(&ceph.qemu_location(&copy)),
        &["read -P 3 0 70M", "read -P 4 5G 1M"],
    );
    let listed = ceph.rbd(&["ls", "rbd"]).success().stdout;
    assert!(!listed.contains(".part"), "what was not complete is gone: {listed}");
    command(&["resize", &at(&raw), "48M"]).success();
    let info = json(&ceph.rbd(&["info", "--format", "json", &raw]).success());
    assert_eq!(info["size"], 48 * MIB);
    command(&["resize", &at(&raw), "16M"]).failure("--shrink");
    command(&["resize", "--shrink", &at(&raw), "16M"]).success();
    // An overlay on this host, with its base in Ceph.
    let overlay = scratch.path("overlay.qcow2");
    command(&["create", "-b", &at(&qcow2), "-F", "qcow2", str(&overlay)]).success();
    command(&["map", str(&overlay)]).failure("--allow-remote");
    // An image may not choose the configuration file.
    command(&["map", "--allow-remote", str(&overlay)]).failure("--allow-path 'rbd:");
    let allow = ["compare", "--allow-remote", "--allow-path", &at(&qcow2)];
    command(&[&allow[..], &[str(&overlay), &at(&copy)]].concat()).success();
}

/// Checks `map --since` on an image whose snapshot 'two' has 4 KiB at 32 KiB that 'one' does not
/// have.
fn changes_since_a_snapshot_are_told(ceph: &Ceph, name: &str) {
    let (location, two) = (ceph.location(name), ceph.location(&format!("{name}@two")));
    let told = |place: &str, since: &str, more: &[&str]| {
        let words = [&["map", "--json", place, "--since", since], more].concat();
        let changes = json(&command(&words).success());
        let as_tuple = |change: &serde_json::Value| {
            let number = |key: &str| change[key].as_u64().expect("a number");
            (number("start"), number("length"), change["data"].as_bool().expect("true or false"))
        };
        changes.as_array().expect("a list").iter().map(as_tuple).collect::<Vec<_>>()
    };
    assert_eq!(told(&two, "one", &[]), [(32 << 10, 4 << 10, true)]);
    assert_eq!(told(&location, "two", &[]), []);
    qemu_io("raw", Path::new(&ceph.qemu_location(name)), &["write -P 3 20M 512", "discard 0 64k"]);
    let rest = (20 << 20, 512, true);
    let since_one = told(&location, "one", &[]);
    assert_eq!(since_one.last(), Some(&rest), "{since_one:?}");
    let zeros: u64 = since_one.iter().filter(|change| !change.2).map(|change| change.1).sum();
    assert_eq!(zeros, 64 << 10, "{since_one:?}");
    assert_eq!(told(&location, "one", &["-s", "1M", "-l", "20M"]), [rest]);
    assert_eq!(told(&two, "one", &[]), [(32 << 10, 4 << 10, true)]);
    let text = command(&["map", &location, "--since", "two"]).success().stdout;
    assert!(text.contains("0x1400000       0x200           data"), "{text}");
    // Ceph's own tool reports the same extent.
    let theirs = ceph.rbd(&["diff", "--from-snap", "one", name]).success().stdout;
    assert!(theirs.contains("20971520"), "{theirs}");
    command(&["map", &location, "--since", "none"]).failure("has no snapshot 'none'");
    let one = ceph.location(&format!("{name}@one"));
    command(&["map", &one, "--since", "two"]).failure("has to be older");
}

#[test]
fn snapshots_of_a_raw_image_are_those_of_ceph() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "32M"));
    let (location, theirs) = (ceph.location(&name), ceph.qemu_location(&name));
    let snapshot = |snapshot: &str| ceph.location(&format!("{name}@{snapshot}"));
    qemu_io("raw", Path::new(&theirs), &["write -P 1 0 64k"]);
    command(&["snapshot", "create", &location, "one"]).success();
    command(&["snapshot", "create", &location, "one"]).failure("File exists");
    command(&["snapshot", "create", &location, "a@b"]).failure("'@'");
    command(&["compare", &snapshot("one"), &location]).success();
    qemu_io("raw", Path::new(&theirs), &["write -P 2 32k 4k"]);
    command(&["compare", &snapshot("one"), &location]).failure("at offset 32768");
    command(&["snapshot", "create", &location, "two"]).success();
    changes_since_a_snapshot_are_told(&ceph, &name);
    command(&["snapshot", "rename", &location, "two", "zwei"]).success();
    let listed = json(&command(&["snapshot", "list", "--json", &location]).success());
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["one", "zwei"]);
    let theirs_listed = ceph.rbd(&["snap", "ls", &name]).success().stdout;
    assert!(theirs_listed.contains("zwei"), "{theirs_listed}");
    let copy = scratch.path("one.raw");
    command(&["convert", "--snapshot", "one", &location, str(&copy)]).success();
    qemu_io("raw", &copy, &["read -P 1 0 64k"]);
    Serve::new(&scratch, Path::new(&snapshot("one"))).refused().failed(&["--read-only"]);
    let server = Serve::new(&scratch, Path::new(&snapshot("one"))).flag("--read-only").start();
    command(&["compare", server.uri(), str(&copy)]).success();
    server.stop();
    command(&["snapshot", "apply", &location, "one"]).success();
    command(&["compare", &snapshot("one"), &location]).success();
    command(&["snapshot", "delete", &location, "zwei"]).success();
    command(&["snapshot", "delete", &location, "zwei"]).failure("has no snapshot 'zwei'");
}

/// Writes over a new connection; returns the error.
fn write(server: &Server, offset: u64) -> u32 {
    let mut client = Client::open_with(&server.address(), Framing::Structured);
    let error = client.write(offset, &[5; 4096], 0);
    client.disconnect();
    error
}

/// Waits for words in the log, which a separate thread may write after the answer.
fn assert_logs(server: &Server, words: &str) {
    let is_there = || server.log().contains(words);
    assert!(eventually(Duration::from_secs(60), is_there), "{words}: {}", server.log());
}

#[test]
fn a_cluster_that_does_not_answer_fails_requests_and_is_used_again() {
    let mut ceph = require!(ceph_alone());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "16M"));
    let lines = "rados osd op timeout = 3\nrados mon op timeout = 3";
    let configuration = ceph.configuration_with("short.conf", lines);
    let location = format!("rbd:rbd/{name}?conf={}", configuration.display());
    let server = serve(&scratch, &location);
    assert_eq!(write(&server, 0), 0);
    const EIO: u32 = 5;
    ceph.freeze_osd();
    assert_eq!(write(&server, 4096), EIO);
    assert_logs(&server, "Connection timed out");
    ceph.restore();
    // The RBD client notices by itself.
    let answers = || write(&server, 4096) == 0;
    assert!(eventually(Duration::from_secs(120), answers), "{}", server.log());
    ceph.stop_osd();
    assert_eq!(write(&server, 8192), EIO);
    ceph.restore();
    assert!(eventually(Duration::from_secs(120), || write(&server, 8192) == 0), "{}", server.log());
    qemu_io("raw", Path::new(server.uri()), &["read -P 5 0 12k", "write -f -P 6 0 4k", "flush"]);
    server.stop();
    qemu_io("raw", Path::new(&ceph.qemu_location(&name)), &["read -P 6 0 4k", "read -P 5 4k 8k"]);
}

#[test]
fn a_cluster_that_is_started_again_has_what_was_answered() {
    let mut ceph = require!(ceph_alone());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "16M"));
    let lines = "rados osd op timeout = 3\nrados mon op timeout = 3\nclient mount timeout = 3";
    let configuration = ceph.configuration_with("restarted.conf", lines);
    let location = format!("rbd:rbd/{name}?conf={}", configuration.display());
    let server = serve(&scratch, &location);
    assert_eq!(write(&server, 0), 0);
    ceph.stop_cluster();
    const EIO: u32 = 5;
    assert_eq!(write(&server, 4096), EIO);
    command(&["info", &location]).failure("Connection timed out");
    ceph.restore();
    let answers = || write(&server, 4096) == 0;
    assert!(eventually(Duration::from_secs(120), answers), "{}", server.log());
    qemu_io("raw", Path::new(server.uri()), &["read -P 5 0 8k", "read -P 0 8k 8k"]);
    server.stop();
    qemu_io("raw", Path::new(&ceph.qemu_location(&name)), &["read -P 5 0 8k"]);
}

#[test]
fn a_fenced_server_fails_every_write_until_it_is_started_again() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "16M"));
    let location = ceph.location(&name);
    let server = serve(&scratch, &location);
    assert_eq!(write(&server, 0), 0);
    let status = json(&ceph.rbd(&["status", "--format", "json", &name]).success());
    let client = status["watchers"][0]["address"].as_str().unwrap().to_owned();
    ceph.ceph(&["osd", "blocklist", "add", &client]).success();
    const ESHUTDOWN: u32 = 108;
    // The OSD learns of the blocklist a little later, from the monitor or from a client.
    let is_refused = || {
        ceph.rbd(&["status", &name]).success();
        write(&server, 0) == ESHUTDOWN
    };
    assert!(eventually(Duration::from_secs(60), is_refused), "{client}: {}", server.log());
    assert_logs(&server, "fenced");
    ceph.ceph(&["osd", "blocklist", "rm", &client]).success();
    assert_eq!(write(&server, 0), ESHUTDOWN, "another client may have used the image meanwhile");
    drop(server);
    let server = Serve::new(&scratch, Path::new(&location)).start_within(LOCK_EXPIRES);
    assert_eq!(write(&server, 0), 0);
    server.stop();
}

#[test]
fn a_guest_writes_what_clients_and_ceph_read() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "16M"));
    let (image, socket) = (ceph.location(&name), scratch.socket("vu"));
    let server = Serve::new(&scratch, Path::new(&image)).option("--vhost-user-blk", &socket);
    let server = server.ready_lines(2).start();
    let mut guest = Guest::connect(&socket, Options::default());
    let mut client = Client::open(&server.address());
    for number in 1..50 {
        guest.write(0, number, number);
        let offset = number * BLOCK as u64;
        assert_eq!(client.read(offset, BLOCK as u64), Ok(content(number)));
        assert_eq!(client.write(offset, &content(number + 1000), 0), 0);
        assert_eq!(guest.read(0, number), content(number + 1000));
    }
    // Another client of Ceph requests a resize, which the server executes as the owner of the lock.
    ceph.rbd(&["resize", "--size", "32M", &name]).success();
    server.signal(Signal::HUP);
    let size = || run(tool("nbdinfo").args(["--size", server.uri()])).success().stdout;
    let is_told = || size().trim() == (32 * MIB).to_string();
    assert!(eventually(Duration::from_secs(60), is_told), "{}: {}", size(), server.log());
    guest.write(0, 7, 7);
    drop((guest, client));
    server.stop();
    let copy = scratch.path("copy.raw");
    qemu_img(&["convert", "-f", "raw", "-O", "raw", &ceph.qemu_location(&name), str(&copy)])
        .success();
    let bytes = std::fs::read(copy).unwrap();
    assert_eq!((bytes.len(), &bytes[7 * BLOCK..8 * BLOCK]), (32 * MIB, &*content(7)));
    assert_eq!(bytes[49 * BLOCK..50 * BLOCK], content(1049));
}

#[test]
fn a_disk_moves_to_ceph_and_back_while_its_client_writes() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, &format!("{}B", jobs::SIZE)));
    let source = scratch.path("a.img");
    command(&["create", str(&source), &jobs::SIZE.to_string()]).success();
    let control = scratch.socket("control");
    let server = Serve::new(&scratch, &source).option("--control", &control);
    // Without a write cache, because the image in Ceph has none, either.
    let server = server.option("--cache", "writethrough").option("--sandbox", "off").start();
    let mut control = Control::connect(&control);
    let mut writer = Writer::new(&server.address(), seeded());
    let (there, back) = (ceph.location(&name), scratch.path("b.img"));
    for (target, job) in [(&*there, "there"), (str(&back), "back")] {
        jobs::beside(&mut writer, || {
            let words = ["mirror", "a.img", target, "--overwrite", "--job", job];
            jobs::ctl(&scratch, &words).success();
            jobs::wait_for(&mut control, job, "ready");
            jobs::ctl(&scratch, &["job", job, "complete"]).success();
        });
        writer.check();
        if job == "there" {
            let image = Path::new(&there);
            Serve::new(&Scratch::new(), image).refused().failed(&["locked", "client."]);
        }
    }
    // The image in Ceph is unlocked, although the server still runs.
    let other = Scratch::new();
    serve(&other, &there).stop();
    server.stop();
}

/// A server in the sandbox cannot load a library, so Ceph's is loaded before. Threads of that
/// library keep the capabilities that they started with.
#[test]
fn a_server_of_an_image_in_ceph_keeps_few_capabilities() {
    let ceph = require!(ceph());
    let (scratch, name) = (Scratch::new(), new_image(&ceph, "8M"));
    let location = ceph.location(&name);
    let server = serve(&scratch, &location);
    crate::sandbox::assert_few_capabilities(&server);
    server.assert_serves();
    server.stop();
    // The image as the base of a file.
    let overlay = scratch.path("overlay.qcow2");
    let allowed = ["--allow-remote", "--allow-path", &location];
    let words = ["create", "-b", &location, "-F", "raw", str(&overlay), "8M"];
    command(&[&words[..], &allowed].concat()).success();
    let serve = Serve::new(&scratch, &overlay).flag("--allow-remote");
    let server = serve.option("--allow-path", &location).start();
    crate::sandbox::assert_few_capabilities(&server);
    assert!(Client::open(&server.address()).read(0, 4096).is_ok());
    let words = "the sandbox restricts only where files are written";
    assert!(server.log().contains(words), "{}", server.log());
    server.stop();
}

#[test]
fn a_server_in_its_sandbox_says_why_it_opens_no_image_in_ceph_later() {
    let scratch = Scratch::new();
    let (image, control) = (scratch.image("disk", 1 << 20), scratch.socket("control"));
    let server = Serve::new(&scratch, image.path()).option("--control", &control).start();
    let open = json!({ "path": "rbd:pool/image", "name": "c" });
    Control::connect(&control).refused("disk.open", open, -32000, &["sandbox", "--sandbox off"]);
    server.assert_serves();
    server.stop();
}
