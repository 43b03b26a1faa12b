//! Persistent dirty bitmaps, compared with QEMU's tools on the same images.

use std::path::Path;

use blockhouse_tests::{
    Scratch,
    image_tool::{command, json, qemu_img, str},
    need, require, run, tool,
};
use serde_json::Value;

/// `info` of both programs, which must agree about the image.
pub fn info(image: &str) -> Value {
    let ours = json(&command(&["info", "--json", "-f", "qcow2", image]).success());
    let theirs = json(&qemu_img(&["info", "--output=json", "-f", "qcow2", image]).success());
    assert_eq!(ours["format-specific"], theirs["format-specific"], "{ours:#}");
    let listed = json(&command(&["bitmap", "list", "--json", "-f", "qcow2", image]).success());
    let bitmaps = &theirs["format-specific"]["data"]["bitmaps"];
    assert_eq!(listed, if bitmaps.is_null() { Value::Array(Vec::new()) } else { bitmaps.clone() });
    listed
}

/// Checks that both programs find no errors and no leaks.
pub fn check(image: &str) {
    command(&["check", "-f", "qcow2", image]).success();
    qemu_img(&["check", "-f", "qcow2", image]).success();
}

fn write(image: &str, place: &str) {
    let write = format!("write -P 7 {place}");
    run(tool("qemu-io").args(["-f", "qcow2", "-c", &write, image])).success();
}

/// The extents of a bitmap that are dirty, as QEMU serves it: offset and length.
pub fn dirty(image: &str, name: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let server = ["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, image, "]"];
    let outcome = run(tool("nbdinfo").args(["--json", &map, "--"]).args(server)).success();
    let extents: Value = json(&outcome);
    let extents = extents.as_array().expect("a list").clone();
    let dirty = extents.iter().filter(|extent| extent["type"] == 1);
    dirty
        .map(|extent| ["offset", "length"].map(|key| extent[key].as_u64().expect("a number")))
        .map(|[offset, length]| (offset, length))
        .collect()
}

#[test]
fn a_bitmap_of_either_program_goes_on_in_the_other() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    for options in ["cluster_size=64K", "cluster_size=4K,extended_l2=off", "refcount_bits=1"] {
        let path = scratch.path("disk.qcow2");
        let image = str(&path);
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, image, "256M"]).success();
        command(&["bitmap", "add", image, "ours"]).success();
        qemu_img(&["bitmap", "--add", "-g", "1M", image, "theirs"]).success();
        command(&["bitmap", "add", "-g", "512", "--disabled", image, "fine"]).success();
        assert_eq!(info(image).as_array().map(Vec::len), Some(3), "{options}");
        check(image);
        write(image, "64K 64K");
        command(&["bitmap", "disable", image, "theirs"]).success();
        write(image, "200M 64K");
        assert_eq!(dirty(image, "ours"), [(64 << 10, 64 << 10), (200 << 20, 64 << 10)]);
        assert_eq!(dirty(image, "theirs"), [(0, 1 << 20)]);
        assert_eq!(dirty(image, "fine"), []);
        command(&["bitmap", "clear", image, "ours"]).success();
        assert_eq!(dirty(image, "ours"), []);
        qemu_img(&["bitmap", "--enable", image, "fine"]).success();
        write(image, "1536 512");
        assert_eq!(dirty(image, "fine"), [(1536, 512)]);
        qemu_img(&["bitmap", "--remove", image, "ours"]).success();
        info(image);
        check(image);
        command(&["bitmap", "remove", image, "fine"]).success();
        command(&["bitmap", "remove", image, "theirs"]).success();
        assert_eq!(info(image), Value::Array(Vec::new()));
        check(image);
        std::fs::remove_file(&path).expect("it is there");
    }
}

/// The backing file's name is where the header extension has to be.
#[test]
fn an_overlay_with_a_crowded_header_gets_a_bitmap() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let name = format!("{}.raw", "x".repeat(200));
    scratch.image_of(&name, &[7; 1 << 20]);
    let path = scratch.path("over.qcow2");
    let image = str(&path);
    command(&["create", "-b", &name, "-F", "raw", image]).success();
    command(&["bitmap", "add", image, "changes"]).success();
    check(image);
    let info = json(&qemu_img(&["info", "--output=json", image]).success());
    assert_eq!(info["backing-filename"], name);
    assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["name"], "changes");
    let name = format!("{}.raw", "y".repeat(100));
    scratch.image_of(&name, &[7; 1 << 20]);
    command(&["rebase", "-u", "-b", &name, "-F", "raw", image]).success();
    let info = json(&qemu_img(&["info", "--output=json", image]).success());
    assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["name"], "changes");
    check(image);
}

#[test]
fn bitmaps_are_merged_as_qemu_does() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    let (path, other) = (scratch.path("disk.qcow2"), scratch.path("other.qcow2"));
    for (coarse, fine) in [("2M", "512"), ("64K", "64K"), ("512", "1M")] {
        for image in [&path, &other] {
            let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4K"];
            qemu_img(&[&create[..], &[str(image), "300M"]].concat()).success();
        }
        qemu_img(&["bitmap", "--add", "-g", coarse, str(&path), "into"]).success();
        qemu_img(&["bitmap", "--add", "-g", fine, str(&path), "from"]).success();
        qemu_img(&["bitmap", "--add", "-g", fine, str(&other), "from"]).success();
        ["0 512", "17M 3K", "299M 1M"].iter().for_each(|place| write(str(&path), place));
        qemu_img(&["bitmap", "--clear", str(&path), "into"]).success();
        ["5M 70K", "150M 64M", "299M 1M"].iter().for_each(|place| write(str(&other), place));
        merge_both(&path, None);
        merge_both(&path, Some(&other));
        for image in [&path, &other] {
            std::fs::remove_file(image).expect("it is there");
        }
    }
}

/// Merges `from` into `into` with both programs, each in its own copy of the image.
fn merge_both(image: &Path, source: Option<&Path>) {
    let theirs = image.with_extension("theirs");
    std::fs::copy(image, &theirs).expect("a copy");
    let merge = ["bitmap", "--merge", "from", "-f", "qcow2"];
    let file = source.map(|source| ["-b", str(source), "-F", "qcow2"]);
    let file = file.iter().flatten().copied();
    let names = [str(&theirs), "into"];
    qemu_img(&merge.into_iter().chain(file).chain(names).collect::<Vec<_>>()).success();
    let file = source.map(|source| ["-b", str(source)]);
    let merge = ["bitmap", "merge", str(image), "into", "from"].into_iter();
    command(&merge.chain(file.iter().flatten().copied()).collect::<Vec<_>>()).success();
    check(str(image));
    assert_eq!(dirty(str(image), "into"), dirty(str(&theirs), "into"));
    std::fs::remove_file(&theirs).expect("it is there");
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let (path, old, raw) = (scratch.path("a.qcow2"), scratch.path("b.qcow2"), scratch.path("raw"));
    let (image, old, raw) = (str(&path), str(&old), str(&raw));
    command(&["create", image, "1T"]).success();
    command(&["create", "-o", "compat=0.10", old, "1M"]).success();
    command(&["create", "-f", "raw", raw, "1M"]).success();
    command(&["bitmap", "add", image, "one"]).success();
    let long = "x".repeat(1024);
    let cases: [(&[&str], &str); 9] = [
        (&["add", image, "one"], "is there already"),
        (&["add", image, ""], "1 to 1023 bytes"),
        (&["add", image, &long], "1 to 1023 bytes"),
        (&["add", "-g", "3K", image, "two"], "power of two"),
        (&["add", "-g", "256", image, "two"], "power of two"),
        (&["add", "-g", "128", image, "two"], "power of two"),
        (&["remove", image, "two"], "has no bitmap 'two'"),
        (&["add", old, "one"], "version 2"),
        (&["remove", raw, "one"], "a raw image has no bitmaps"),
    ];
    for (arguments, wanted) in cases {
        let outcome = command(&[&["bitmap"], arguments].concat()).failure(wanted);
        assert_eq!(outcome.stderr.trim_end().lines().count(), 1, "{}", outcome.stderr);
    }
    check(image);
}

/// A bitmap that its writer did not save.
#[test]
fn an_inconsistent_bitmap_can_only_be_removed() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    qemu_img(&["create", "-q", "-f", "qcow2", image, "64M"]).success();
    qemu_img(&["bitmap", "--add", image, "lost"]).success();
    mark_in_use(&path);
    assert_eq!(info(image)[0]["flags"][0], "in-use");
    for action in ["clear", "enable", "disable"] {
        command(&["bitmap", action, image, "lost"]).failure("can only be removed");
    }
    let copy = scratch.path("copy.qcow2");
    let convert = ["convert", "--bitmaps", image, str(&copy)];
    command(&convert).failure("--skip-broken-bitmaps");
    command(&[&convert[..], &["--skip-broken-bitmaps"]].concat()).success();
    assert_eq!(info(str(&copy)), Value::Array(Vec::new()));
    check(image);
    command(&["bitmap", "remove", image, "lost"]).success();
    assert_eq!(info(image), Value::Array(Vec::new()));
    check(image);
}

/// Sets the in-use flag of the only bitmap, like a writer that died.
fn mark_in_use(image: &Path) {
    let mut bytes = std::fs::read(image).expect("it is there");
    let name = bytes.windows(4).rposition(|window| window == b"lost").expect("in the directory");
    bytes[name - 24 + 15] |= 1;
    std::fs::write(image, bytes).expect("it can be written");
}
