//! Makes the committed corpus of the qcow2 targets: small images, some by qemu-img and qemu-io
//! (which must be installed), some by Blockhouse, and inputs of `qcow2_operations` over each of
//! them.
//!
//! `cargo run --manifest-path fuzz/Cargo.toml --example make_corpus`
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Fua, Request, Unmap};
use blockhouse_disk::{Disk, Image, ImageFormat, NewBitmap, Options};
use blockhouse_format::qcow2::{self, Backing, CreateOptions, Preallocation, Switch, Version};
use blockhouse_fuzz::case::{Case, Corruption, Step};
use blockhouse_fuzz::images::{NAMES, corpus};
use blockhouse_fuzz::memory::Memory;
use blockhouse_sim::{Rng, Sim};

/// Sizes of the guests' disks: a few L2 tables of the smallest clusters.
const SIZE: u64 = 96 << 10;
/// Most data that is in an image.
const DATA: u64 = 12 << 10;

fn main() {
    let images = corpus("qcow2_open");
    let scratch = tempfile::tempdir().expect("a folder");
    std::fs::write(scratch.path().join("base"), vec![7; 70 << 10]).expect("a backing file");
    for name in NAMES {
        let bytes = match name.strip_prefix("qemu-") {
            Some(kind) => by_qemu(scratch.path(), name, kind),
            None => by_ours(name.trim_start_matches("ours-")),
        };
        println!("{name}: {} bytes", bytes.len());
        std::fs::write(images.join(name), bytes).expect("a seed");
    }
    for (number, name) in NAMES.iter().enumerate() {
        for is_damaged in [false, true] {
            let case = case(number as u8, is_damaged);
            let state = if is_damaged { "damaged" } else { "whole" };
            let path = corpus("qcow2_operations").join(format!("{name}-{state}"));
            std::fs::write(path, case.to_bytes()).expect("a seed");
        }
    }
}

/// Some corruptions at all kinds of places, and some of all steps.
fn case(image: u8, is_damaged: bool) -> Case {
    let mut random = Rng::with_seed(image.into());
    let corruption = |place| Corruption {
        place,
        how: random.u8(..),
        index: random.u16(..128),
        value: random.u64(..),
    };
    let chosen = image % Corruption::PLACES..image % Corruption::PLACES + 3;
    let corruptions = if is_damaged { chosen.map(corruption).collect() } else { Vec::new() };
    let step = |kind| {
        let (offset, length) = (random.u16(..), random.u16(..8192));
        Step { kind, flags: random.u8(..), offset, length }
    };
    // Of these the last ones are about bitmaps.
    let steps = (0..32).chain(128..144).map(step).collect();
    Case { image, storage: image, seed: image, corruptions, steps }
}

/// An image by QEMU's tools.
fn by_qemu(folder: &Path, name: &str, kind: &str) -> Vec<u8> {
    let image = |arguments: &[&str]| {
        let size = if kind == "metadata" { SIZE / 2 } else { SIZE }.to_string();
        img(folder, &[&["create", "-q", "-f", "qcow2"], arguments, &[name, &size]].concat());
    };
    let of_512 = |option: &str| image(&["-o", &format!("cluster_size=512{option}")]);
    match kind {
        "plain" => of_512(""),
        "version-2" => of_512(",compat=0.10"),
        "refcounts-1" => of_512(",refcount_bits=1"),
        "refcounts-64" => of_512(",refcount_bits=64"),
        "lazy-dirty" => of_512(",lazy_refcounts=on"),
        "subclusters" => image(&["-o", "cluster_size=16k,extended_l2=on"]),
        "snapshots" | "bitmaps" => of_512(""),
        "backed" => image(&["-o", "cluster_size=512", "-b", "base", "-F", "raw"]),
        "metadata" => of_512(",preallocation=metadata"),
        "zlib" | "zstd" => {
            compressed(folder, name, kind);
            return std::fs::read(folder.join(name)).expect("the image");
        }
        _ => panic!("no image of QEMU's is called {kind}"),
    }
    scribble(folder, name, kind);
    if kind == "snapshots" {
        img(folder, &["snapshot", "-c", "one", name]);
        io(folder, name, &["write -P 9 0 3000"]);
        img(folder, &["snapshot", "-c", "two with a longer name", name]);
        io(folder, name, &["write -P 10 1000 5000"]);
    }
    if kind == "bitmaps" {
        img(folder, &["bitmap", "--add", "-g", "4096", name, "changes"]);
        io(folder, name, &["write -P 9 0 3000"]);
    }
    std::fs::read(folder.join(name)).expect("the image")
}

fn compressed(folder: &Path, name: &str, kind: &str) {
    let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 100 % 251) as u8).collect();
    std::fs::write(folder.join("raw"), bytes).expect("a raw image");
    let options = format!("cluster_size=4k,compression_type={kind}");
    img(folder, &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "raw", name]);
    io(folder, name, &["write -P 3 9000 5000"]);
}

fn scribble(folder: &Path, name: &str, kind: &str) {
    let mut commands = vec!["write -P 1 0 6000", "write -P 2 40000 5000", "discard 1024 1024"];
    if kind != "version-2" {
        commands.push("write -z 2048 4096");
    }
    if kind == "lazy-dirty" {
        // As if it had been killed: refcounts are behind.
        commands.push("abort");
    }
    io(folder, name, &commands);
}

fn img(folder: &Path, arguments: &[&str]) {
    let status = Command::new("qemu-img").args(arguments).current_dir(folder).status();
    assert!(status.expect("qemu-img").success(), "qemu-img {arguments:?}");
}

fn io(folder: &Path, name: &str, commands: &[&str]) {
    let mut io = Command::new("qemu-io");
    io.current_dir(folder).args(["-f", "qcow2"]);
    for command in commands {
        io.args(["-c", command]);
    }
    let status = io.arg(name).output().expect("qemu-io").status;
    assert!(status.success() || commands.contains(&"abort"), "qemu-io {commands:?}: {status}");
}

/// An image by Blockhouse.
fn by_ours(kind: &str) -> Vec<u8> {
    let mut options = CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) };
    match kind {
        "plain" => {}
        "4k" => options.cluster_size = 4096,
        "version-2" => options.version = Version::V2,
        "refcounts-2" => options.refcount_bits = 2,
        "lazy" => options.lazy_refcounts = Switch::On,
        "subclusters" => {
            options.cluster_size = 16 << 10;
            options.extended_l2 = Switch::On;
        }
        "backed" => {
            options.backing = Some(Backing { name: b"base".to_vec(), format: Some("raw".into()) });
        }
        "metadata" => {
            options.preallocation = Preallocation::Metadata;
            options.size = SIZE / 2;
        }
        "grown" => options.size = 4096,
        "bitmaps" | "bitmaps-killed" => {}
        _ => panic!("no image of ours is called {kind}"),
    }
    let (has_bitmaps, is_killed) = (kind.starts_with("bitmaps"), kind == "bitmaps-killed");
    let sim = Sim::new(0);
    let storage = Memory::new(&sim, 1, Fua::Native, Vec::new());
    let base = Memory::new(&sim, 1, Fua::Native, vec![7; 70 << 10]);
    let made = storage.clone();
    sim.block_on(async move {
        qcow2::create(&made, &options).await.expect("a new image");
        let mut image =
            Image::open(made, ImageFormat::Qcow2, Options::default()).await.expect("it opens");
        if options.backing.is_some() {
            image =
                image.with_backing(&Image::raw(base, Options::default()).expect("whole sectors"));
        }
        let disk = Disk::new(image);
        disk.resize(disk.size().max(SIZE / 2)).await.expect("room");
        if has_bitmaps {
            add_bitmaps(&disk).await;
        }
        fill(&disk).await;
        if is_killed {
            disk.flush().await.expect("room")
        } else {
            disk.close().await.expect("room")
        }
    });
    storage.content()
}

/// Two that record changes, and one that does not.
async fn add_bitmaps(disk: &Disk<Memory>) {
    for (name, granularity, is_enabled) in
        [("changes", 512, true), ("two", 4096, true), ("three", 1024, false)]
    {
        let new = NewBitmap { name: name.into(), granularity: Some(granularity), is_enabled };
        disk.bitmaps().add(&new).await.expect("room");
    }
}

async fn fill(disk: &Disk<Memory>) {
    for (offset, length, byte) in [(0, DATA / 2, 1), (40_000, DATA / 3, 2), (700, 100, 3)] {
        let mut buffer = Buffer::new(length as usize);
        buffer.bytes_mut().fill(byte);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset, from, durability }).await.expect("room");
    }
    let (range, durability) = (ByteRange::between(2048, 4096), Durability::None);
    let (unmap, fallback) = (Unmap::Forbidden, Fallback::Allowed);
    let zeroes = Request::WriteZeroes { range, unmap, fallback, durability };
    disk.submit(zeroes).await.expect("zeros");
    let discard = Request::Discard { range: ByteRange::between(1024, 2048), durability };
    disk.submit(discard).await.expect("a discard");
}
