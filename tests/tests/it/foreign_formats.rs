//! Images in other programs' formats, of all kinds that qemu-img makes: serving, converting,
//! comparing, mapping and checking them gives the same results as qemu-img. The images are never
//! written.

use std::path::{Path, PathBuf};

use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::{
    Cache, Engine, Image, Scratch, Serve, need, random_disk, require, run, seeded, tool,
};
use fastrand::Rng;
use serde_json::Value;

/// A kind of image.
struct Kind {
    /// qemu-img's name of the format.
    format: &'static str,
    /// The files have this suffix.
    suffix: &'static str,
    /// Options of `qemu-img convert`.
    options: &'static str,
}

const KINDS: &[Kind] = &[
    Kind { format: "vdi", suffix: "vdi", options: "static=off" },
    Kind { format: "vdi", suffix: "vdi", options: "static=on" },
    Kind { format: "vpc", suffix: "vhd", options: "subformat=dynamic" },
    Kind { format: "vpc", suffix: "vhd", options: "subformat=fixed" },
    Kind { format: "vpc", suffix: "vpc", options: "subformat=dynamic,force_size=on" },
    Kind { format: "vpc", suffix: "vhd", options: "subformat=fixed,force_size=on" },
    Kind { format: "vmdk", suffix: "vmdk", options: "subformat=monolithicSparse" },
    Kind { format: "vmdk", suffix: "vmdk", options: "subformat=monolithicSparse,zeroed_grain=on" },
    Kind { format: "vmdk", suffix: "vmdk", options: "subformat=monolithicFlat" },
    Kind { format: "vmdk", suffix: "vmdk", options: "subformat=twoGbMaxExtentSparse" },
    Kind { format: "vmdk", suffix: "vmdk", options: "subformat=twoGbMaxExtentFlat" },
    Kind { format: "vmdk", suffix: "vmdk", options: "subformat=streamOptimized" },
    Kind { format: "vhdx", suffix: "vhdx", options: "subformat=dynamic" },
    Kind { format: "vhdx", suffix: "vhdx", options: "subformat=dynamic,block_size=1M" },
    Kind { format: "vhdx", suffix: "vhdx", options: "subformat=dynamic,block_state_zero=off" },
    Kind { format: "vhdx", suffix: "vhdx", options: "subformat=fixed,block_size=2M,log_size=2M" },
];

/// Bytes of the disk, not a multiple of any block size.
const SIZE: usize = (9 << 20) + 512 * 7;

/// A disk with data of all lengths, and holes.
fn disk(scratch: &Scratch, random: &mut Rng) -> Image {
    scratch.image_of("disk.raw", &random_disk(random, SIZE, 24, 1_200_000))
}

/// An image of the kind with that disk, and a raw copy of what qemu-img reads from it, which may be
/// longer.
fn image(scratch: &Scratch, kind: &Kind, disk: &Image) -> (PathBuf, PathBuf) {
    // The name has the options, because messages have the name.
    let name = kind.options.replace(['=', ','], "-");
    let image = scratch.path(&format!("{name}.{}", kind.suffix));
    let mut words = vec!["convert", "-f", "raw", "-O", kind.format];
    if !kind.options.is_empty() {
        words.extend(["-o", kind.options]);
    }
    words.extend([disk.str(), str(&image)]);
    qemu_img(&words).success();
    let theirs = scratch.path("theirs.raw");
    qemu_img(&["convert", "-f", kind.format, "-O", "raw", str(&image), str(&theirs)]).success();
    (image, theirs)
}

/// Calls `act` with an image of each kind, its disk as qemu-img reads it, and a random number
/// generator.
fn with_each_kind(act: impl Fn(&Scratch, &Kind, &Path, &Path, &mut Rng)) {
    let mut random = seeded();
    for kind in KINDS {
        let scratch = Scratch::new();
        let disk = disk(&scratch, &mut random);
        let (image, theirs) = image(&scratch, kind, &disk);
        act(&scratch, kind, &image, &theirs, &mut random);
    }
}

fn assert_same(left: &Path, right: &Path) {
    run(tool("cmp").args([left, right])).success();
}

#[test]
fn they_convert_and_compare_equal() {
    require!(need::tools(&["qemu-img", "cmp"]));
    with_each_kind(|scratch, kind, image, theirs, _| {
        let raw = scratch.path("ours.raw");
        command(&["convert", str(image), str(&raw)]).success();
        assert_same(&raw, theirs);
        let qcow2 = scratch.path("ours.qcow2");
        command(&["convert", "-f", kind.format, str(image), str(&qcow2)]).success();
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", str(&qcow2), str(theirs)]).success();
        command(&["compare", str(image), str(theirs)]).success();
        let mut other = std::fs::read(theirs).expect("a disk");
        other[SIZE - 1] ^= 1;
        let other = scratch.image_of("other.raw", &other);
        let outcome = command(&["compare", str(image), other.str()]);
        assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe("one byte differs"));
    });
}

#[test]
fn they_are_served_for_reading_on_every_engine() {
    require!(need::tools(&["qemu-img", "qemu-io", "nbdcopy", "cmp"]));
    with_each_kind(|scratch, kind, image, theirs, random| {
        let before = std::fs::read(image).expect("an image");
        let serve = Serve::new(scratch, image);
        serve.refused().failed(&[kind.format, "can only be read", "--read-only", "convert"]);
        for engine in Engine::ALL {
            let cache = if random.bool() { Cache::None } else { Cache::Writeback };
            let serve = Serve::new(scratch, image).engine(engine).cache(cache);
            let server = serve.flag("--read-only").start();
            let copy = scratch.path("copy.raw");
            run(tool("nbdcopy").args([server.uri(), str(&copy)])).success();
            assert_same(&copy, theirs);
            // Unaligned ranges, which the host can read only as parts of whole blocks.
            let content = std::fs::read(theirs).expect("a disk");
            for _ in 0..20 {
                let start = random.usize(..content.len());
                let length = random.usize(1..=300_000).min(content.len() - start);
                let mut client = blockhouse_tests::nbd::Client::open(&server.address());
                let read = client.read(start as u64, length as u64).expect("a read");
                assert!(read == content[start..start + length], "{start}+{length} by {engine:?}");
                client.disconnect();
            }
            server.stop();
        }
        assert!(std::fs::read(image).expect("an image") == before, "it was changed");
    });
}

#[test]
fn info_and_check_say_what_qemu_img_says() {
    require!(need::tools(&["qemu-img"]));
    with_each_kind(|_, kind, image, _, _| {
        let ours = json(&command(&["info", "--json", str(image)]).success());
        let words = ["info", "--output=json", "-f", kind.format, str(image)];
        let theirs = json(&qemu_img(&words).success());
        for key in ["virtual-size", "format", "cluster-size", "actual-size", "dirty-flag"] {
            assert_eq!(ours.get(key), theirs.get(key), "{key} of {ours}");
        }
        let text = command(&["info", str(image)]).success().stdout;
        assert!(text.contains(&format!("file format: {}", kind.format)), "{text}");
        let checked = command(&["check", "--json", str(image)]);
        assert!(matches!(checked.status.code(), Some(0 | 63)), "{}", checked.describe("sound"));
        let repair = command(&["check", "--repair", "all", str(image)]);
        if kind.format == "vhdx" {
            // A repair of VHDX may replay its log.
            repair.success();
            return;
        }
        assert_eq!(repair.status.code(), Some(1), "{}", repair.describe("no repair"));
        assert!(repair.stderr.contains("not repaired"), "{}", repair.stderr);
    });
}

#[test]
fn maps_name_the_same_data() {
    require!(need::tools(&["qemu-img"]));
    with_each_kind(|_, kind, image, _, _| {
        if kind.format == "vhdx" {
            // QEMU's driver does not report allocation from the block allocation table.
            return;
        }
        let ours = json(&command(&["map", "--json", str(image)]).success());
        let words = ["map", "--output=json", "-f", kind.format, str(image)];
        let theirs = json(&qemu_img(&words).success());
        assert_eq!(data_of(&ours), data_of(&theirs), "ours: {ours}\ntheirs: {theirs}");
    });
}

/// The ranges with data and their offsets in the file, with adjacent ranges merged.
fn data_of(map: &Value) -> Vec<(u64, u64, Option<u64>)> {
    let number = |entry: &Value, key: &str| entry[key].as_u64();
    let mut found: Vec<(u64, u64, Option<u64>)> = Vec::new();
    for entry in map.as_array().expect("a list") {
        let start = number(entry, "start").expect("a start");
        let end = start + number(entry, "length").expect("a length");
        if entry["data"] != true {
            continue;
        }
        let host = number(entry, "offset");
        match found.last_mut() {
            Some((first, last, from))
                if *last == start && from.map(|from| from + start - *first) == host =>
            {
                *last = end;
            }
            _ => found.push((start, end, host)),
        }
    }
    found
}

#[test]
fn they_stand_behind_an_overlay_and_are_not_written() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    with_each_kind(|scratch, kind, image, theirs, _| {
        let before = std::fs::read(image).expect("an image");
        let name = image.file_name().and_then(|name| name.to_str()).expect("a plain name");
        let over = scratch.path("over.qcow2");
        command(&["create", "-b", name, "-F", kind.format, str(&over)]).success();
        command(&["compare", str(&over), str(theirs)]).success();
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", str(&over), str(theirs)]).success();
        let step = ["-f", "qcow2", "-c", "write -P 9 1M 64K"];
        run(tool("qemu-io").args(step).arg(&over)).success();
        let commit = command(&["commit", str(&over)]);
        assert!(commit.stderr.contains("can only be read"), "{}", commit.describe("no commit"));
        let resize = ["resize", "--format", kind.format, str(image), "+1M"];
        let snapshot = ["snapshot", "create", "--format", kind.format, str(image), "one"];
        for words in [&resize[..], &snapshot] {
            let outcome = command(words);
            assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe("read-only"));
            assert!(outcome.stderr.contains("only be read"), "{}", outcome.describe("read-only"));
        }
        assert!(std::fs::read(image).expect("an image") == before, "it was changed");
    });
}

#[test]
fn none_is_written_to_and_none_is_guessed() {
    require!(need::tools(&["qemu-img"]));
    with_each_kind(|scratch, kind, image, theirs, _| {
        let before = std::fs::read(image).expect("an image");
        let convert = ["convert", "-n", "-O", kind.format, str(theirs), str(image)];
        let outcome = command(&convert);
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
        assert!(outcome.stderr.contains("never written to"), "{}", outcome.stderr);
        assert!(std::fs::read(image).expect("an image") == before, "it was changed");
        // A raw disk with the format's suffix, and an image without the suffix.
        let raw = scratch.path(&format!("raw.{}", kind.suffix));
        std::fs::copy(theirs, &raw).expect("a copy");
        let refused = command(&["info", str(&raw)]).failure("--format raw");
        assert!(refused.stderr.contains(kind.format), "{}", refused.stderr);
        let cut = std::fs::read(image).expect("an image");
        let cut = scratch.image_of("cut", &cut[..cut.len().min(1600) / 4]);
        let outcome = command(&["info", "-f", kind.format, cut.str()]).failure("offset");
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    });
}
