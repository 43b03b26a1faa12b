//! Images in Ceph, on a cluster of one machine: what commands read and write there, and what is served from there.

use std::path::Path;
use std::time::Duration;

use blockhouse_tests::ceph::{Ceph, ceph};
use blockhouse_tests::image_tool::{command, json, qemu_img, qemu_io, str};
use blockhouse_tests::{Scratch, Serve, Server, random_bytes, require, run, seeded, tool};
use rustix::process::Signal;

const MIB: usize = 1 << 20;

/// The lock of a killed client is free when its watch has expired: 30 seconds, on a cluster that is not busy.
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
    // The next one waits until the cluster has noticed.
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
    // An image without such a lock cannot be guarded.
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
