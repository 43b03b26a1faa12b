//! A host without room under a qcow2 image: the client learns it by its errno and loses nothing
//! else; what it discards makes room for other writes, as does room that is made on the host.

use std::path::Path;
use std::process::Command;

use blockhouse_tests::image_tool::{command as command_line, json, qemu_img, str};
use blockhouse_tests::nbd::{Client, command, errno, flag};
use blockhouse_tests::{
    Cache, Engine, FileSystem, Scratch, Serve, SmallHost, blockhouse, need, on_every_engine,
    require, run, tool,
};

const MIB: u64 = 1 << 20;
/// What the file system has.
const ROOM: u64 = 16 * MIB;
/// What somebody else has of it at first.
const BALLAST: u64 = 4 * MIB;
const SIZE: u64 = 64 << 30;

/// Pieces of a MiB, `stride` bytes from each other, and which of them were written.
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
    /// Writes one more piece; the error.
    fn write(&mut self, flags: u16) -> u32 {
        let number = self.next;
        self.next += 1;
        let error = self.client.write(number * self.stride, &content(number), flags);
        if error == 0 {
            self.written.push(number);
        }
        error
    }

    /// Writes pieces until there is no room; how many there was room for.
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

/// On a host file system of this `kind`, with pieces in one L2 table or each in its own.
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
    // Nothing was flushed before: not a single table is on the disk.
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
    // Once more, with tables that are not on the disk yet.
    pieces.discard_first(3);
    assert_eq!(pieces.client.flush(), 0);
    assert_eq!(pieces.write(flag::FUA), 0);
    pieces.fill();

    std::fs::remove_file(&ballast).expect("it is there");
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

/// Takes all that a file system has.
fn fill_up(ballast: &Path) {
    let mut file = std::fs::File::create(ballast).expect("a file");
    for size in [1 << 20, 4096, 512] {
        while std::io::Write::write(&mut file, &vec![1; size]).is_ok_and(|count| count > 0) {}
    }
}

/// Who removes a bitmap there may do so to get space.
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
    fill_up(&host.path("ballast"));
    let dirty = |name: &str| {
        let told = command_line(&["bitmap", "list", "--json", str(&image)]).success();
        let list = json(&told);
        let list = list.as_array().expect("a list");
        list.iter().find(|one| one["name"] == name).cloned()
    };
    let before = names.map(dirty);
    for gone in ["second", "fourth", "first"] {
        command_line(&["bitmap", "remove", str(&image), gone]).success();
        run(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(&image)).success();
        assert_eq!(dirty(gone), None);
        // It is gone, and its space is taken.
        fill_up(&host.path(gone));
    }
    assert_eq!(dirty("third"), before[2]);
    command_line(&["bitmap", "remove", str(&image), "third"]).success();
    let left = qemu_img(&["info", str(&image)]).success();
    assert!(!left.stdout.contains("bitmaps"), "{}", left.stdout);
}
