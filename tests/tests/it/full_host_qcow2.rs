//! A qcow2 image on a host without free space: the client gets ENOSPC and loses nothing else. Its
//! discards make space for other writes, and so does space that is freed on the host.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command as command_line, json as printed, qemu_img, str};
use blockhouse_tests::nbd::{Client, command, errno, flag};
use blockhouse_tests::{
    Cache, Engine, FileSystem, Scratch, Serve, SmallHost, blockhouse, nbd_uri, need,
    on_every_engine, require, run, tool,
};
use rustix::process::Signal;
use serde_json::json;

use crate::jobs::ctl;

const MIB: u64 = 1 << 20;
/// The space of the file system.
const ROOM: u64 = 16 * MIB;
/// The part of it that another file takes at first.
const BALLAST: u64 = 4 * MIB;
const SIZE: u64 = 64 << 30;

/// A client that writes pieces of 1 MiB, `stride` bytes apart, and the numbers of those that were
/// written.
struct Pieces {
    client: Client,
    stride: u64,
    next: u64,
    written: Vec<u64>,
}

fn content(number: u64) -> Vec<u8> {
    [number + 1, !number].map(u64::to_le_bytes).concat().repeat(1 << 16)
}

impl Pieces {
    /// Writes one more piece; returns the error.
    fn write(&mut self, flags: u16) -> u32 {
        let number = self.next;
        self.next += 1;
        let error = self.client.write(number * self.stride, &content(number), flags);
        if error == 0 {
            self.written.push(number);
        }
        error
    }

    /// Writes pieces until ENOSPC; returns how many were written.
    fn fill(&mut self) -> u64 {
        for count in 0..=ROOM / MIB {
            match self.write(0) {
                0 => {}
                error => {
                    assert_eq!(error, errno::ENOSPC);
                    return count;
                }
            }
        }
        panic!("more was taken than there is room for");
    }

    fn discard_first(&mut self, count: usize) {
        for number in self.written.drain(..count) {
            let offset = number * self.stride;
            assert_eq!(self.client.simple(command::TRIM, offset, MIB, 0), 0, "piece {number}");
        }
    }

    fn verify(&mut self) {
        for &number in &self.written {
            let read = self.client.read(number * self.stride, MIB);
            assert!(read == Ok(content(number)), "piece {number} is not what was written");
        }
    }
}

fn create(image: &Path, options: &str) {
    let mut create = Command::new(blockhouse());
    create.args(["create", "-f", "qcow2", "-o", options]).arg(image).arg(SIZE.to_string());
    run(&mut create).success();
}

/// Fills and frees a host file system of this `kind`, with all pieces in one L2 table or each in
/// its own.
fn room_comes_and_goes(engine: Engine, kind: FileSystem, options: &str, stride: u64) {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, kind, ROOM));
    let (image, ballast) = (host.path("disk.qcow2"), host.path("ballast"));
    std::fs::write(&ballast, vec![1; BALLAST as usize]).expect("room");
    create(&image, options);
    let serve = Serve::new(&scratch, &image).option("--format", "qcow2").engine(engine);
    let server = serve.cache(Cache::Writeback).start();
    let client = Client::open(&server.address());
    let mut pieces = Pieces { client, stride, next: 0, written: Vec::new() };
    // Nothing was flushed before, so no table is on the disk.
    assert!(pieces.fill() >= 4, "{:?}", pieces.written);
    assert_eq!(pieces.write(flag::FUA), errno::ENOSPC);
    pieces.verify();
    assert_eq!(pieces.client.flush(), 0, "what was taken has its tables");
    let overwritten = pieces.written[0] * stride;
    assert_eq!(pieces.client.write(overwritten, &content(0), flag::FUA), 0, "it needs no room");

    pieces.discard_first(4);
    assert_eq!(pieces.client.flush(), 0);
    for flags in [0, flag::FUA] {
        assert_eq!(pieces.write(flags), 0, "there is room again");
    }
    pieces.fill();
    // Once more, with new tables that are not on the disk yet.
    pieces.discard_first(3);
    assert_eq!(pieces.client.flush(), 0);
    assert_eq!(pieces.write(flag::FUA), 0);
    pieces.fill();

    host.give_back("ballast");
    assert_eq!(pieces.write(flag::FUA), 0, "somebody else made room");
    assert!(pieces.fill() >= 1);
    pieces.verify();
    assert_eq!(pieces.client.flush(), 0);
    let Pieces { client, written, .. } = pieces;
    client.disconnect();
    server.stop();

    run(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(&image)).success();
    let serve = Serve::new(&scratch, &image).option("--format", "qcow2").engine(engine);
    let server = serve.cache(Cache::Writeback).start();
    let client = Client::open(&server.address());
    let mut pieces = Pieces { client, stride, next: 0, written };
    pieces.verify();
    pieces.client.disconnect();
    server.stop();
}

fn in_memory(engine: Engine) {
    room_comes_and_goes(engine, FileSystem::Tmpfs, "cluster_size=64K", MIB);
}

fn in_memory_with_a_table_for_each_piece(engine: Engine) {
    room_comes_and_goes(engine, FileSystem::Tmpfs, "cluster_size=64K", 600 * MIB);
}

fn in_memory_with_many_tables(engine: Engine) {
    room_comes_and_goes(engine, FileSystem::Tmpfs, "cluster_size=4K,lazy_refcounts=on", 3 * MIB);
}

fn on_ext4(engine: Engine) {
    room_comes_and_goes(engine, FileSystem::Ext4, "cluster_size=64K", MIB);
}

fn on_ext4_with_a_table_for_each_piece(engine: Engine) {
    room_comes_and_goes(engine, FileSystem::Ext4, "cluster_size=64K,extended_l2=on", 600 * MIB);
}

on_every_engine! {
    in_memory
    in_memory_with_a_table_for_each_piece
    in_memory_with_many_tables
    on_ext4
    on_ext4_with_a_table_for_each_piece
}

/// A user may remove a bitmap to free space.
#[test]
fn bitmaps_are_removed_where_there_is_no_room() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, ROOM));
    let image = host.path("disk.qcow2");
    create(&image, "cluster_size=64K");
    let names = ["first", "second", "third", "fourth"];
    for name in names {
        command_line(&["bitmap", "add", str(&image), name]).success();
    }
    let server = Serve::new(&scratch, &image).option("--format", "qcow2").start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(MIB, &content(0), 0), 0);
    client.disconnect();
    server.stop();
    host.fill_up("ballast");
    let dirty = |name: &str| {
        let told = command_line(&["bitmap", "list", "--json", str(&image)]).success();
        let list = printed(&told);
        let list = list.as_array().expect("a list");
        list.iter().find(|one| one["name"] == name).cloned()
    };
    let before = names.map(dirty);
    for gone in ["second", "fourth", "first"] {
        command_line(&["bitmap", "remove", str(&image), gone]).success();
        run(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(&image)).success();
        assert_eq!(dirty(gone), None);
        // Fills the space that the removal has freed.
        host.fill_up(gone);
    }
    assert_eq!(dirty("third"), before[2]);
    command_line(&["bitmap", "remove", str(&image), "third"]).success();
    let left = qemu_img(&["info", str(&image)]).success();
    assert!(!left.stdout.contains("bitmaps"), "{}", left.stdout);
}

/// Writes to allocated clusters succeed even if bitmaps are lost, and every program can see which
/// are lost.
#[test]
fn a_client_does_not_pay_for_a_bitmap_without_room() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, ROOM));
    let image = host.path("disk.qcow2");
    create(&image, "cluster_size=64K");
    let start = || {
        let serve = Serve::new(&scratch, &image).option("--format", "qcow2");
        serve.option("--control", scratch.socket("control")).start()
    };
    let (server, stride) = (start(), 1 << 30);
    let mut client = Client::open(&server.address());
    for at in 0..8 {
        assert_eq!(client.write(at * stride, &[1; 4096], 0), 0);
    }
    assert_eq!(client.flush(), 0);
    let mut control = Control::connect(&scratch.socket("control"));
    for (name, granularity) in [("coarse", "1M"), ("fine", "512")] {
        let new = json!({ "disk": "disk.qcow2", "name": name, "granularity": granularity });
        control.get("bitmap.add", new);
    }
    // From here on, the coarse bitmap has its space.
    assert_eq!(client.write(0, &[2; 4096], 0), 0);
    control.get("event.subscribe", json!({ "events": ["bitmap.lost"] }));
    host.fill_up("ballast");
    // Not even the table of the fine bitmap has space.
    run(tool("fallocate").arg("--dig-holes").arg(&image)).success();
    host.fill_up("more");
    for at in 0..8 {
        assert_eq!(client.write(at * stride, &[3; 4096], flag::FUA), 0, "piece {at}");
    }
    let lost = control.event();
    assert_eq!((&lost["disk"], &lost["bitmap"]), (&json!("disk.qcow2"), &json!("fine")), "{lost}");
    let list = control.get("bitmap.list", json!({ "disk": "disk.qcow2" }));
    assert_eq!(list[0]["recording"], true, "{list}");
    assert_eq!(list[1]["inconsistent"], true, "{list}");
    assert!(list[1]["lacks-changes-since"].as_u64().is_some_and(|since| since > 0), "{list}");
    let uri = nbd_uri("", scratch.socket("backup"));
    let begin = json!({ "disks": ["disk.qcow2"], "export": &uri, "since": "fine" });
    control.refused("backup.begin", begin, -32001, &["lacks changes", "full backup"]);
    let begin = ["backup", "begin", "disk.qcow2", "--since", "fine", "--export", &uri];
    let outcome = ctl(&scratch, &begin).failure("lacks changes");
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.stderr);
    client.disconnect();
    server.stop();
    for name in ["ballast", "more"] {
        host.give_back(name);
    }
    run(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(&image)).success();

    let list = printed(&command_line(&["bitmap", "list", "--json", str(&image)]).success());
    assert_eq!(list[0]["flags"], json!(["auto"]), "{list}");
    assert_eq!(list[1]["flags"], json!(["in-use"]), "{list}");
    let (full, more) = (scratch.path("full.qcow2"), scratch.path("more.qcow2"));
    command_line(&["backup", str(&image), str(&full)]).success();
    let increment = |name: &str, image: &Path| {
        let words = ["--incremental", name, "--base", str(&full)];
        command_line(&[&["backup", str(image), str(&more)][..], &words].concat()).status.code()
    };
    assert_eq!(increment("fine", &image), Some(3), "a bitmap that lacks changes");
    assert_eq!(increment("none", &image), Some(1), "no such bitmap");
    assert_eq!(increment("fine", &host.path("none.qcow2")), Some(1), "no such image");
    assert_eq!(increment("coarse", &image), Some(0));
    // After a kill the bitmap is still lost, and can be removed.
    command_line(&["bitmap", "remove", str(&image), "fine"]).success();
    run(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(&image)).success();
}

/// Recovery after a kill (refcounts, a bitmap that was in use) needs no space on a full host.
#[test]
fn a_server_begins_on_a_full_host_whose_last_one_was_killed() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, ROOM));
    let image = host.path("disk.qcow2");
    for (options, stride) in [
        ("cluster_size=64K", MIB),
        ("cluster_size=64K", 1 << 30),
        ("cluster_size=4K,lazy_refcounts=on", 1 << 30),
    ] {
        create(&image, options);
        command_line(&["bitmap", "add", str(&image), "changes"]).success();
        let start = || {
            let serve = Serve::new(&scratch, &image).option("--format", "qcow2");
            serve.cache(Cache::Writeback).start()
        };
        let mut server = start();
        let client = Client::open(&server.address());
        let mut pieces = Pieces { client, stride, next: 0, written: Vec::new() };
        pieces.fill();
        host.fill_up("ballast");
        server.signal(Signal::KILL);
        server.wait(Duration::from_secs(60));
        let server = start();
        pieces.client = Client::open(&server.address());
        pieces.verify();
        host.give_back("ballast");
        pieces.discard_first(1);
        assert_eq!(pieces.client.flush(), 0, "{options}");
        assert_eq!(pieces.write(flag::FUA), 0, "{options}: there is room");
        pieces.verify();
        pieces.client.disconnect();
        server.stop();
        run(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(&image)).success();
        std::fs::remove_file(&image).expect("it is there");
    }
}

/// Bytes that a write left in the file before it failed with ENOSPC are never read as data.
#[test]
fn bytes_of_a_failed_write_are_not_read() {
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, ROOM));
    for change in [None, Some("bitmap.add"), Some("disk.resize"), Some("snapshot.create")] {
        let image = host.path("disk.qcow2");
        create(&image, "cluster_size=64K");
        let serve = Serve::new(&scratch, &image).option("--format", "qcow2");
        let serve = serve.option("--control", scratch.socket("control")).cache(Cache::Writeback);
        let server = serve.start();
        let mut client = Client::open(&server.address());
        for at in 0..64 {
            assert_eq!(client.write(at * 65_536, &vec![1; 65_536], 0), 0);
        }
        assert_eq!(client.flush(), 0);
        let ballast = host.fill_up("ballast");
        assert_eq!(client.write(60 * MIB, &vec![2; 65_536], 0), errno::ENOSPC);
        let file = std::fs::OpenOptions::new().write(true).open(&ballast).expect("it is there");
        let length = file.metadata().expect("a file").len();
        file.set_len(length - 600 * 1024).expect("shorter");
        drop(file);
        // A part of the write reaches the file.
        assert_eq!(client.write(20 * MIB, &vec![0xaa; 1 << 20], 0), errno::ENOSPC);
        host.give_back("ballast");
        if let Some(method) = change {
            let params = match method {
                "disk.resize" => json!({ "disk": "disk.qcow2", "size": SIZE + MIB }),
                _ => json!({ "disk": "disk.qcow2", "name": "new" }),
            };
            Control::connect(&scratch.socket("control")).get(method, params);
        }
        for at in 30..40 {
            assert_eq!(client.write(at * MIB, &[3; 4096], 0), 0);
            let rest = client.read(at * MIB + 4096, 61_440);
            assert!(rest == Ok(vec![0; 61_440]), "{change:?}: at {at} MiB");
        }
        client.disconnect();
        server.stop();
        std::fs::remove_file(&image).expect("it is there");
    }
}
