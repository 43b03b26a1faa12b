//! Chains of many images that QEMU has made: Blockhouse reads the same as QEMU, at the first read
//! and later, while the disk changes and while its image is committed into its backing file.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use blockhouse_tests::image_tool::{command, qemu_img, qemu_io, str};
use blockhouse_tests::{Scratch, Server, assert_same, need, require, run, seeded, tool};
use fastrand::Rng;
use serde_json::json;

use crate::jobs::{ctl, job, serve, wait_for};

const IMAGES: usize = 65;
const SIZE: u64 = 24 << 20;
const UNIT: u64 = 512;

/// Options of images, in turn.
const OPTIONS: [&str; 5] = [
    "compat=1.1",
    "cluster_size=4k",
    "compat=1.1",
    "extended_l2=on,cluster_size=64k",
    "compat=0.10,cluster_size=256k",
];

/// Makes a chain of images that each have some clusters and different lengths; returns the last
/// one.
fn chain(scratch: &Scratch, random: &mut Rng) -> PathBuf {
    let base = scratch.image_of("base", &vec![0xba; SIZE as usize - 3 * 65536]);
    let mut below = base.path().to_owned();
    for number in 1..IMAGES {
        let image = path(scratch, number);
        let format = if number == 1 { "raw" } else { "qcow2" };
        let mut options = OPTIONS[number % OPTIONS.len()].to_owned();
        write!(options, ",backing_file={},backing_fmt={format}", str(&below)).expect("text");
        // The last image is not longer than its backing file.
        let size = if number + 2 >= IMAGES { SIZE } else { SIZE - random.u64(..200) * UNIT };
        let create = ["create", "-f", "qcow2", "-o", &options, str(&image), &size.to_string()];
        qemu_img(&create).success();
        let is_old = options.contains("0.10");
        let steps: Vec<String> = (0..6).map(|_| step(number, size, is_old, random)).collect();
        qemu_io("qcow2", &image, &steps.iter().map(String::as_str).collect::<Vec<_>>());
        below = image;
    }
    below
}

fn path(scratch: &Scratch, number: usize) -> PathBuf {
    scratch.path(&format!("{number}.qcow2"))
}

fn step(number: usize, size: u64, is_old: bool, random: &mut Rng) -> String {
    let length = [random.u64(1..40) * UNIT, 65536, 262_144][random.usize(..3)];
    let offset = random.u64(..(size - length) / UNIT) * UNIT;
    match random.u8(..5) {
        0 if !is_old => format!("write -z {offset} {length}"),
        _ => format!("write -P {number} {offset} {length}"),
    }
}

/// The content of an image, as QEMU reads it.
fn expected(scratch: &Scratch, image: &Path) -> Vec<u8> {
    let flat = scratch.path("expected");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", str(image), str(&flat)]).success();
    std::fs::read(flat).expect("a file")
}

/// The content of a served disk, as a client reads it.
fn served(scratch: &Scratch, server: &Server) -> Vec<u8> {
    let copy = scratch.path("copy");
    run(tool("nbdcopy").args([server.uri(), str(&copy)])).success();
    std::fs::read(copy).expect("a file")
}

#[test]
fn a_chain_of_64_overlays_reads_as_qemu_reads_it_the_first_time_and_later() {
    require!(need::tools(&["qemu-img", "qemu-io", "nbdcopy"]));
    let (scratch, mut random) = (Scratch::in_memory(), seeded());
    let top = chain(&scratch, &mut random);
    let content = expected(&scratch, &top);
    let copy = scratch.path("converted");
    command(&["convert", str(&top), str(&copy)]).success();
    assert_same(&std::fs::read(&copy).expect("a file"), &content, "converted");
    command(&["compare", str(&top), str(&copy)]).success();
    let (server, mut control) = serve(&scratch, &top);
    for time in ["first", "second"] {
        assert_same(&served(&scratch, &server), &content, time);
    }
    // The disk changes after the server has cached the mapping of the chain.
    let mut changed = content;
    for byte in 200..220 {
        let (offset, length) = (random.u64(..SIZE / UNIT - 200) * UNIT, random.u64(1..200) * UNIT);
        let step = format!("write -P {byte} {offset} {length}");
        run(tool("qemu-io").args(["-f", "raw", "-c", &step, server.uri()])).success();
        changed[offset as usize..][..length as usize].fill(byte);
    }
    assert_same(&served(&scratch, &server), &changed, "changed");
    let name = top.file_name().and_then(|name| name.to_str()).expect("text");
    ctl(&scratch, &["commit", name, "--job", "c"]).success();
    assert_same(&served(&scratch, &server), &changed, "beside a commit");
    wait_for(&mut control, "c", "ready");
    assert_same(&served(&scratch, &server), &changed, "copied into the base");
    ctl(&scratch, &["job", "c", "complete"]).success();
    assert_eq!(job(&mut control, "c")["status"], "completed");
    let base = path(&scratch, IMAGES - 2);
    assert_eq!(control.get("disk.list", json!({}))[0]["path"], str(&base), "the disk is its base");
    for time in ["first", "second"] {
        assert_same(&served(&scratch, &server), &changed, time);
    }
    server.stop();
    assert_same(&expected(&scratch, &base), &changed, "in the base");
    qemu_img(&["check", "-f", "qcow2", str(&base)]).success();
}
