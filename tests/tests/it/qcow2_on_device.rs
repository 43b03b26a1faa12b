//! qcow2 images on block devices with stale data: they are created, copied to, served, resized and
//! checked.

use std::path::Path;

use blockhouse_tests::image_tool::{command, qemu_img, qemu_io, str};
use blockhouse_tests::nbd::{Client, command as request, errno, flag};
use blockhouse_tests::{LoopDevice, Scratch, Serve, need, random_bytes, require, seeded};

const MIB: u64 = 1 << 20;
/// Bytes of the device, not a multiple of a cluster.
const ROOM: u64 = 24 * MIB + 512;

/// Fills a device with bytes that must never be read again.
fn stale(device: &Path) {
    let fill = vec![0xaa; ROOM as usize];
    let mut file = std::fs::OpenOptions::new().write(true).open(device).expect("a device");
    std::io::Write::write_all(&mut file, &fill).expect("it has room");
    file.sync_all().expect("it can");
}

fn check(device: &Path) {
    qemu_img(&["check", "-f", "qcow2", str(device)]).success();
    command(&["check", "-f", "qcow2", str(device)]).success();
}

#[test]
fn images_are_made_on_devices_and_show_nothing_of_what_was_there() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let file = scratch.image("backing", ROOM);
    let device = require!(LoopDevice::over(&file, &[]));
    let name = str(device.path());
    for (options, size) in [
        ("cluster_size=64K", "1G"),
        ("cluster_size=2M,extended_l2=on", "1T"),
        ("cluster_size=512", "64M"),
        ("preallocation=metadata", "16M"),
        ("preallocation=falloc", "16M"),
        ("preallocation=full", "16M"),
    ] {
        stale(device.path());
        command(&["create", "-f", "qcow2", "-o", options, name, size]).success();
        check(device.path());
        qemu_io("qcow2", device.path(), &["read -P 0 0 16M", "write -P 7 5000 9"]);
        qemu_io("qcow2", device.path(), &["read -P 0 0 5000", "read -P 0 5009 1M"]);
        check(device.path());
    }
    // A disk that does not fit is refused, and the device is not changed.
    let before = file.content();
    let create = ["create", "-f", "qcow2", "-o", "preallocation=metadata", name, "64M"];
    command(&create).failure("and the image needs");
    assert!(file.content() == before && device.path().exists());
    let base = scratch.image_of("base.img", &random_bytes(&mut seeded(), 4 << 20));
    stale(device.path());
    command(&["create", "-f", "qcow2", "-b", base.str(), "-F", "raw", name]).success();
    qemu_img(&["compare", "-f", "qcow2", "-F", "raw", name, base.str()]).success();
    check(device.path());
}

#[test]
fn copies_go_to_devices() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let file = scratch.image("backing", ROOM);
    let device = require!(LoopDevice::over(&file, &[]));
    let name = str(device.path());
    let mut bytes = vec![0; 8 << 20];
    bytes[3 << 20..4 << 20].copy_from_slice(&random_bytes(&mut seeded(), 1 << 20));
    let source = scratch.image_of("source.img", &bytes);
    let same = || {
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", name, source.str()]).success();
        check(device.path());
    };
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    let with = |more: &[&str]| command(&[&convert[..], more, &[source.str(), name]].concat());
    stale(device.path());
    with(&[]).failure("say --force");
    for more in [&["--force"][..], &["--force", "-c"], &["--force", "-o", "cluster_size=4K"]] {
        stale(device.path());
        with(more).success();
        same();
    }
    // Converts into an existing image.
    command(&["create", "-f", "qcow2", name, "8M"]).success();
    with(&["-n"]).success();
    same();
    // A device that is its own source is not changed.
    let onto_itself = ["convert", "--force", "-f", "qcow2", "-O", "qcow2", name, name];
    command(&onto_itself).failure("locked");
    command(&["convert", "--force", "-f", "raw", "-O", "qcow2", file.str(), name])
        .failure("backing");
    same();
}

#[test]
fn a_served_image_on_a_device_ends_with_it() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let file = scratch.image("backing", ROOM);
    let device = require!(LoopDevice::over(&file, &[]));
    let name = str(device.path());
    stale(device.path());
    command(&["create", "-f", "qcow2", name, "1G"]).success();
    let server = Serve::new(&scratch, device.path()).option("--format", "qcow2").start();
    let mut client = Client::open(&server.address());
    let piece = vec![3; 1 << 20];
    let written =
        (0..40).take_while(|at| client.write(at * 2 * MIB, &piece, 0) == 0).count() as u64;
    assert!((18..24).contains(&written), "{written}");
    assert_eq!(client.write(900 * MIB, &piece, 0), errno::ENOSPC);
    // Discarded space is used again, and reads as zeros around new data.
    assert_eq!(client.simple(request::TRIM, 0, 8 * MIB, 0), 0);
    assert_eq!(client.flush(), 0);
    assert_eq!(client.write(950 * MIB + 1000, &[4; 24], flag::FUA), 0);
    assert_eq!(client.read(950 * MIB, 1000), Ok(vec![0; 1000]));
    assert_eq!(client.read(950 * MIB + 1024, 64_512), Ok(vec![0; 64_512]));
    client.disconnect();
    server.stop();
    check(device.path());
    command(&["snapshot", "-f", "qcow2", "-c", "one", name]).success();
    command(&["resize", "-f", "qcow2", name, "2G"]).success();
    command(&["snapshot", "-f", "qcow2", "-a", "one", name]).success();
    check(device.path());
}
