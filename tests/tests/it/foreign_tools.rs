//! The main use: an image is served, and users' tools work with the export.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use blockhouse_tests::{
    Cache, Engine, Image, Scratch, Serve, Server, eventually, nbd_uri, need,
    on_every_engine_and_cache, random_bytes, require, run, seeded, tool, wait_for_exit,
};
use rustix::fs::FallocateFlags;
use rustix::process::Signal;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn serve_new(scratch: &Scratch, size: &str, engine: Engine, cache: Cache) -> Server {
    let image = scratch.path("disk.img");
    Serve::new(scratch, &image).engine(engine).cache(cache).option("--create", size).start()
}

fn nbdinfo(options: &[&str], uri: &str) -> Value {
    let outcome = run(tool("nbdinfo").args(options).arg("--json").arg(uri)).success();
    serde_json::from_str(&outcome.stdout).expect("nbdinfo writes JSON")
}

fn nbdcopy(from: &str, to: &str) {
    run(tool("nbdcopy").args([from, to])).success();
}

fn assert_same(left: &Path, right: &Path) {
    run(tool("cmp").args([left, right])).success();
}

#[test]
fn nbdinfo_sees_everything_that_is_offered() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let server = serve_new(&scratch, "1G", Engine::IoUring, Cache::None);
    let answer = nbdinfo(&[], server.uri());
    assert_eq!(answer["protocol"], "newstyle-fixed");
    assert_eq!(answer["structured"], true);
    assert_eq!(answer["TLS"], false);
    let export = &answer["exports"][0];
    assert_eq!(export["export-size"], 1 << 30);
    assert_eq!(export["is_read_only"], false);
    for offer in ["flush", "fua", "multi_conn", "zero", "trim", "fast_zero", "cache", "df"] {
        assert_eq!(export[format!("can_{offer}")], true, "{offer}: {export}");
    }
    assert_eq!(export["contexts"], json!(["base:allocation", "qemu:allocation-depth"]));
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["block_size_maximum"], 32 * MIB);
    let preferred = export["block_size_preferred"].as_u64().expect("a number");
    assert!(preferred.is_power_of_two() && (512..=MIB).contains(&preferred), "{preferred}");
    server.stop();
}

#[test]
fn nbdinfo_lists_the_export_under_its_name() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let uri = nbd_uri("a%20disk", scratch.socket("nbd"));
    let server = Serve::bare(&scratch, image.path()).export(&uri).start();
    let answer = nbdinfo(&["--list"], server.uri());
    let exports = answer["exports"].as_array().expect("a list");
    assert_eq!(exports.len(), 1, "{answer}");
    assert_eq!(exports[0]["export-name"], "a disk");
    assert_eq!(exports[0]["export-size"], MIB);
    server.stop();
}

/// One half of a session with a disk of 16 MiB: its changes, or the check of their result after the
/// server was killed.
const LIBNBD: &str = r#"
import nbd, sys
uri, half = sys.argv[1:]
MIB = 1 << 20
h = nbd.NBD()
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(uri)
assert h.get_size() == 16 * MIB and h.can_fua() and h.can_multi_conn() and h.can_zero() and h.can_trim()
if half == "change":
    h.pwrite(b"" * MIB, 0)
    h.pwrite(b"" * MIB, MIB, nbd.CMD_FLAG_FUA)
    h.pwrite(b"" * 2 * MIB, 2 * MIB)
    h.trim(65536, MIB)
    h.zero(65536, 2 * MIB, nbd.CMD_FLAG_FUA)
    h.zero(65536, 3 * MIB, nbd.CMD_FLAG_NO_HOLE)
    h.cache(MIB, 0)
    h.flush()
    h.pwrite(b"" * 512, 8 * MIB + 512)
expected = bytearray(b"" * MIB + b"" * MIB + b"" * 2 * MIB)
for at in (MIB, 2 * MIB, 3 * MIB):
    expected[at:at + 65536] = bytes(65536)
assert h.pread(4 * MIB, 0) == expected
assert h.pread(1024, 8 * MIB) == bytes(512) + b"" * 512
found = []
h.block_status(16 * MIB, 0, lambda context, offset, entries, error: found.extend(entries))
lengths, kinds = found[::2], found[1::2]
assert sum(lengths) <= 16 * MIB and 0 in kinds and nbd.STATE_HOLE | nbd.STATE_ZERO in kinds, found
try:
    h.pwrite(bytes(512), 16 * MIB)
except nbd.Error as error:
    assert error.errno in ("EINVAL", "ENOSPC"), error
else:
    raise AssertionError("a write past the end")
h.shutdown()
"#;

#[test]
fn libnbd_asks_for_everything_before_a_kill_and_after() {
    require!(need::python_module("nbd"));
    let scratch = Scratch::new();
    for name in ["disk.img", "disk.qcow2"] {
        let image = scratch.path(name);
        for half in ["change", "look"] {
            let server = Serve::new(&scratch, &image).option("--create", "16M").start();
            let mut python = std::process::Command::new("/usr/bin/python3");
            run(python.args(["-c", LIBNBD, server.uri(), half])).success();
            server.signal(Signal::KILL);
        }
    }
}

/// An export as a file, by nbdfuse; unmounted on drop.
struct Mounted {
    process: Child,
    folder: PathBuf,
}

impl Mounted {
    /// `None` if this machine does not allow the mount.
    fn new(scratch: &Scratch, uri: &str) -> Option<Self> {
        let folder = scratch.path("mounted");
        std::fs::create_dir(&folder).expect("a folder");
        let mut nbdfuse = tool("nbdfuse");
        nbdfuse.arg(folder.join("disk")).arg(uri).stdout(Stdio::null()).stderr(Stdio::null());
        let mut mounted = Self { process: nbdfuse.spawn().expect("it is installed"), folder };
        let is_there = || mounted.file().exists() || mounted.has_ended();
        assert!(eventually(Duration::from_secs(30), is_there), "neither a file nor an end");
        mounted.file().exists().then_some(mounted)
    }

    fn file(&self) -> PathBuf {
        self.folder.join("disk")
    }

    fn has_ended(&mut self) -> bool {
        self.process.try_wait().expect("our child").is_some()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // nbdfuse ends with its mount; if it has ended, nothing is mounted. A lazy unmount, because
        // a child of another test has copies of open files until it calls exec.
        run(tool("umount").arg("-l").arg(&self.folder));
        if wait_for_exit(&mut self.process, Duration::from_secs(30)).is_none() {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

#[test]
fn nbdfuse_shows_a_disk_as_a_file() {
    require!(need::root());
    require!(need::tools(&["nbdfuse", "umount"]));
    let scratch = Scratch::new();
    let bytes = random_bytes(&mut seeded(), 2 << 20);
    for name in ["disk.img", "disk.qcow2"] {
        let image = scratch.path(name);
        let serve = || Serve::new(&scratch, &image);
        let server = serve().option("--create", "16M").start();
        let Some(mounted) = Mounted::new(&scratch, server.uri()) else {
            return need::skip("nothing can be mounted here");
        };
        let file = std::fs::File::options().read(true).write(true).open(mounted.file());
        let file = file.expect("root may");
        assert_eq!(file.metadata().expect("a size").len(), 16 * MIB);
        file.write_all_at(&bytes, MIB + 17).expect("a write");
        file.sync_all().expect("a flush");
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, 2 * MIB, 64 << 10).expect("a discard");
        file.sync_all().expect("a flush");
        let mut read = vec![0; bytes.len()];
        file.read_exact_at(&mut read, MIB + 17).expect("a read");
        let (mut expected, start) = (bytes.clone(), MIB as usize - 17);
        expected[start..start + (64 << 10)].fill(0);
        assert!(read == expected, "{name}: other bytes");
        drop((file, mounted));
        std::fs::remove_dir(scratch.path("mounted")).expect("nothing is mounted");
        server.stop();
        let server = serve().start();
        let mut client = blockhouse_tests::nbd::Client::open(&server.address());
        assert!(client.read(MIB + 17, 2 << 20) == Ok(expected), "{name}: other bytes are kept");
        drop(client);
        server.stop();
    }
}

#[test]
fn nbdcopy_of_300_mib_comes_back_equal() {
    require!(need::tools(&["nbdcopy", "cmp"]));
    let scratch = Scratch::new();
    let mut random = seeded();
    let source = scratch.image_of("source", &random_bytes(&mut random, 300 << 20));
    let disk = scratch.path("disk.img");
    let server = Serve::new(&scratch, &disk).option("--create", "300M").start();
    nbdcopy(source.str(), server.uri());
    let back = scratch.path("back");
    nbdcopy(server.uri(), back.to_str().expect("a plain name"));
    assert_same(source.path(), &back);
    server.stop();
    assert_same(source.path(), &disk);
}

fn nbdcopy_comes_back_equal(engine: Engine, cache: Cache) {
    require!(need::tools(&["nbdcopy", "cmp"]));
    let scratch = Scratch::new();
    let mut random = seeded();
    let source = scratch.image_of("source", &random_bytes(&mut random, 32 << 20));
    let server = serve_new(&scratch, "32M", engine, cache);
    nbdcopy(source.str(), server.uri());
    let back = scratch.path("back");
    nbdcopy(server.uri(), back.to_str().expect("a plain name"));
    assert_same(source.path(), &back);
    server.stop();
    assert_same(source.path(), &scratch.path("disk.img"));
}

/// One run has mixed lengths at sector boundaries; the other has adjacent blocks of an odd length,
/// so that neighbours in flight share sectors. With odd offsets and mixed lengths together, fio
/// itself would write a block twice at the same time, and then any content is right.
fn fio_verifies_its_random_writes(engine: Engine, cache: Cache) {
    require!(need::tools(&["fio"]));
    let scratch = Scratch::new();
    let server = serve_new(&scratch, "32M", engine, cache);
    for shape in ["--bsrange=512-65536", "--bs=5003"] {
        let mut fio = tool("fio");
        fio.args(["--name=verify", "--thread", "--ioengine=nbd", "--rw=randwrite"]);
        fio.args([shape, "--bs_unaligned=1", "--iodepth=32", "--size=32M"]);
        fio.args(["--verify=crc32c", "--verify_fatal=1", "--output-format=json"]);
        fio.arg(format!("--uri={}", server.uri()));
        fio.arg(format!("--randseed={}", seeded().u32(..)));
        let outcome = run(fio.current_dir(scratch.short())).success();
        let start = outcome.stdout.find('{').expect("fio writes JSON");
        let report: Value = serde_json::from_str(&outcome.stdout[start..]).expect("JSON");
        let job = &report["jobs"][0];
        assert_eq!(job["error"], 0, "{report}");
        for direction in ["write", "read"] {
            assert!(job[direction]["total_ios"].as_u64() > Some(100), "{direction}: {report}");
        }
    }
    server.stop();
}

fn qemu_io_reads_the_patterns_that_it_wrote(engine: Engine, cache: Cache) {
    require!(need::tools(&["qemu-io"]));
    let scratch = Scratch::new();
    let server = serve_new(&scratch, "16M", engine, cache);
    qemu_io(
        server.uri(),
        &[
            "write -P 0x11 0 1M",
            "write -z 64k 128k",
            "read -P 0x11 0 64k",
            "read -P 0 64k 128k",
            "read -P 0x11 192k 832k",
            "write -z -u 256k 64k",
            "read -P 0 256k 64k",
            "discard 512k 128k",
            "read -P 0x11 640k 384k",
            "write -P 0x22 1234 567",
            "read -P 0x11 0 1234",
            "read -P 0x22 1234 567",
            "read -P 0x11 1801 4000",
            "write -f -P 0x33 4095 2",
            "write -z -f 8191 4098",
            "read -P 0x33 4095 2",
            "read -P 0x11 4097 4094",
            "read -P 0 8191 4098",
            "read -P 0x11 12289 1000",
            "writev -P 0x44 2M 4k 8k 512 100k",
            "readv -P 0x44 2M 64k 512",
            "aio_write -P 0x55 4M 2M",
            "aio_write -P 0x66 6M 2M",
            "aio_flush",
            "flush",
            "read -P 0x55 4M 2M",
            "read -P 0x66 6M 2M",
            "read -P 0 15M 1M",
        ],
    );
    server.stop();
}

fn qemu_io(uri: &str, commands: &[&str]) {
    let mut qemu_io = tool("qemu-io");
    qemu_io.args(["-f", "raw", uri]);
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    let outcome = run(&mut qemu_io).success();
    let complaint = outcome.stdout.contains("failed") || outcome.stdout.contains("not found");
    assert!(!complaint, "{}", outcome.describe("qemu-io complains"));
}

fn ext4_stays_whole_on_its_way_through_qemu_img(engine: Engine, cache: Cache) {
    require!(need::tools(&["mkfs.ext4", "e2fsck", "qemu-img", "cmp"]));
    let scratch = Scratch::new();
    let source = scratch.image("source", 48 * MIB);
    let content = env!("CARGO_MANIFEST_DIR");
    run(tool("mkfs.ext4").args(["-q", "-F", "-d", content]).arg(source.path())).success();
    let server = serve_new(&scratch, "48M", engine, cache);
    let convert = |options: &[&str], from: &str, to: &str| {
        let mut convert = tool("qemu-img");
        convert.arg("convert").args(options).args(["-f", "raw", "-O", "raw", from, to]);
        run(&mut convert).success();
    };
    convert(&["-n"], source.str(), server.uri());
    let back = scratch.path("back");
    convert(&[], server.uri(), back.to_str().expect("a plain name"));
    run(tool("e2fsck").arg("-fn").arg(&back)).success();
    assert_same(source.path(), &back);
    let same = ["compare", "-f", "raw", "-F", "raw", source.str(), server.uri()];
    run(tool("qemu-img").args(same)).success();
    server.stop();
    run(tool("e2fsck").arg("-fn").arg(scratch.path("disk.img"))).success();
}

on_every_engine_and_cache! {
    nbdcopy_comes_back_equal
    fio_verifies_its_random_writes
    qemu_io_reads_the_patterns_that_it_wrote
    ext4_stays_whole_on_its_way_through_qemu_img
}

#[test]
fn qemu_img_compare_finds_a_difference_of_one_byte() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let mut random = seeded();
    let copy = scratch.image_of("copy", &random_bytes(&mut random, 4 << 20));
    let disk = scratch.image_of("disk.img", &copy.content());
    let server = Serve::new(&scratch, disk.path()).start();
    let compare = || {
        let files = ["compare", "-f", "raw", "-F", "raw", copy.str(), server.uri()];
        run(tool("qemu-img").args(files))
    };
    compare().success();
    let other = copy.bytes(123_456, 1)[0].wrapping_add(1);
    qemu_io(server.uri(), &[&format!("write -P {other} 123456 1")]);
    compare().failure("Content mismatch");
    server.stop();
}

/// An image with data in the second of its four MiB, and holes elsewhere.
fn image_with_holes(scratch: &Scratch) -> Image {
    let image = scratch.image("disk.img", 4 * MIB);
    let path = format!("of={}", image.str());
    let mut dd = tool("dd");
    dd.args(["if=/dev/urandom", &path, "bs=1M", "seek=1", "count=1", "conv=notrunc"]);
    run(&mut dd).success();
    image
}

#[test]
fn qemu_img_map_shows_the_holes_of_the_file() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = image_with_holes(&scratch);
    let server = Serve::new(&scratch, image.path()).start();
    let map = ["map", "--output=json", "-f", "raw", server.uri()];
    let outcome = run(tool("qemu-img").args(map)).success();
    let map: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let seen: Vec<_> = map
        .as_array()
        .expect("a list")
        .iter()
        .map(|part| (part["start"].clone(), part["length"].clone(), part["zero"].clone()))
        .collect();
    let part = |start: u64, length: u64, zero: bool| (json!(start), json!(length), json!(zero));
    let expected = [part(0, MIB, true), part(MIB, MIB, false), part(2 * MIB, 2 * MIB, true)];
    assert_eq!(seen, expected);
    server.stop();
}

#[test]
fn nbdinfo_map_shows_the_holes_of_the_file() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = image_with_holes(&scratch);
    let server = Serve::new(&scratch, image.path()).start();
    let map = nbdinfo(&["--map"], server.uri());
    let seen: Vec<_> = map
        .as_array()
        .expect("a list")
        .iter()
        .map(|part| [&part["offset"], &part["length"], &part["type"]].map(|v| v.as_u64()))
        .collect();
    let part = |offset: u64, length: u64, kind: u64| [offset, length, kind].map(Some);
    assert_eq!(seen, [part(0, MIB, 3), part(MIB, MIB, 0), part(2 * MIB, 2 * MIB, 3)]);
    server.stop();
}

#[test]
fn discarded_and_zeroed_space_goes_back_to_the_host() {
    require!(need::tools(&["qemu-io"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 8 * MIB);
    let server = Serve::new(&scratch, image.path()).start();
    qemu_io(server.uri(), &["write -P 1 0 8M", "flush"]);
    let full = image.allocated();
    assert!(full >= 8 * MIB, "{full}");
    qemu_io(server.uri(), &["discard 0 4M", "flush"]);
    let after_discard = image.allocated();
    assert!(after_discard <= full - 4 * MIB, "{after_discard} of {full}");
    qemu_io(server.uri(), &["write -z -u 4M 2M", "flush"]);
    let after_zeroes = image.allocated();
    assert!(after_zeroes <= full - 6 * MIB, "{after_zeroes} of {full}");
    // Without the permission to unmap, zeros keep their space allocated.
    qemu_io(server.uri(), &["write -z 6M 1M", "flush", "read -P 0 0 7M", "read -P 1 7M 1M"]);
    assert!(image.allocated() >= 2 * MIB, "{}", image.allocated());
    server.stop();
}

#[test]
fn ignored_discards_keep_the_space() {
    require!(need::tools(&["qemu-io"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 8 * MIB);
    let server = Serve::new(&scratch, image.path()).option("--discard", "ignore").start();
    qemu_io(server.uri(), &["write -P 1 0 8M", "discard 0 8M", "write -z -u 4M 1M", "flush"]);
    assert!(image.allocated() >= 8 * MIB, "{}", image.allocated());
    qemu_io(server.uri(), &["read -P 0 4M 1M"]);
    server.stop();
}

#[test]
fn a_qcow2_image_over_another_is_read_as_qemu_reads_it() {
    require!(need::tools(&["qemu-img", "qemu-io", "nbdcopy"]));
    let scratch = Scratch::new();
    let (base, top) = (scratch.path("base.qcow2"), scratch.path("top.qcow2"));
    let (expected, copy) = (scratch.path("expected"), scratch.path("copy"));
    run(tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&base).arg("8M")).success();
    let write = |image: &Path, what: &str| {
        run(tool("qemu-io").args(["-f", "qcow2", "-c", what]).arg(image)).success();
    };
    write(&base, "write -c -P 1 1M 64k");
    write(&base, "write -P 2 3M 100k");
    let backing = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2"];
    run(tool("qemu-img").args(backing).arg(&top).arg("10M")).success();
    write(&top, "write -P 3 3100k 10k");
    write(&top, "write -z 1050k 64k");
    run(tool("qemu-img").args(["convert", "-O", "raw"]).arg(&top).arg(&expected)).success();
    for cache in [Cache::None, Cache::Writeback] {
        let server = Serve::new(&scratch, &top).cache(cache).flag("--read-only").start();
        nbdcopy(server.uri(), copy.to_str().expect("a plain name"));
        assert_same(&copy, &expected);
        server.stop();
    }
}

#[test]
fn a_qcow2_image_is_made_and_written() {
    require!(need::tools(&["qemu-img", "nbdcopy"]));
    let scratch = Scratch::new();
    let content = scratch.image_of("content", &random_bytes(&mut seeded(), 8 << 20));
    for cache in [Cache::None, Cache::Writeback] {
        let image = scratch.path(&format!("{}.qcow2", cache.as_str()));
        let server = Serve::new(&scratch, &image).cache(cache).option("--create", "8M").start();
        nbdcopy(content.str(), server.uri());
        server.stop();
        run(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(&image)).success();
        let compare = ["compare", "-f", "raw", "-F", "qcow2"];
        run(tool("qemu-img").args(compare).arg(content.path()).arg(&image)).success();
    }
}
