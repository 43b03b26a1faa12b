//! Images in other programs' formats that `create` and `convert` make: QEMU's tools read the same
//! disk from them, and check them if they know how.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_tests::image_tool::{command, json, new_image, qemu_img, qemu_io, str};
use blockhouse_tests::{Outcome, Scratch, blockhouse, need, random_disk, require, run, seeded};

/// A kind of image that we make.
struct Kind {
    format: &'static str,
    /// The files have this suffix.
    suffix: &'static str,
    options: &'static str,
    /// Whether `qemu-img check` supports the format.
    is_checked: bool,
    /// Whether qemu-io writes to it.
    is_written: bool,
}

const fn kind(format: &'static str, suffix: &'static str, options: &'static str) -> Kind {
    Kind { format, suffix, options, is_checked: true, is_written: true }
}

const KINDS: &[Kind] = &[
    kind("vdi", "vdi", "static=off"),
    kind("vdi", "vdi", "static=on"),
    Kind { is_checked: false, ..kind("vpc", "vhd", "subformat=dynamic") },
    Kind { is_checked: false, ..kind("vpc", "vhd", "subformat=fixed,force_size=on") },
    kind("vmdk", "vmdk", "subformat=monolithicSparse,adapter_type=lsilogic"),
    Kind { is_written: false, ..kind("vmdk", "vmdk", "subformat=streamOptimized") },
    kind("vhdx", "vhdx", "subformat=dynamic"),
    kind("vhdx", "vhdx", "subformat=dynamic,block_size=1M,log_size=2M"),
    kind("vhdx", "vhdx", "subformat=fixed,block_size=2M"),
];

/// Bytes of the disk, not a multiple of any block or grain.
const SIZE: usize = (41 << 20) + 512 * 7;

/// A disk with data of all lengths, and holes; the last sector has data.
fn disk(scratch: &Scratch) -> PathBuf {
    let content = random_disk(&mut seeded(), SIZE, 30, 3_000_000);
    scratch.image_of("disk.raw", &content).path().to_owned()
}

/// Checks that both programs read this disk from the image, and find no error.
fn expect_disk(kind: &Kind, image: &Path, disk: &Path) {
    let what = format!("{} {}", kind.format, kind.options);
    let equal = ["compare", "-f", kind.format, "-F", "raw", str(image), str(disk)];
    for outcome in [qemu_img(&equal), command(&equal)] {
        assert!(outcome.status.success(), "{}", outcome.describe(&what));
        assert!(!outcome.stdout.contains("Warning"), "{}", outcome.describe(&what));
    }
    let check = ["check", "-f", kind.format, str(image)];
    if kind.is_checked {
        let outcome = qemu_img(&check);
        assert!(outcome.status.success(), "{}", outcome.describe(&what));
    }
    if kind.options != "subformat=fixed,force_size=on" {
        command(&check).success();
    }
}

#[test]
fn a_disk_is_copied_into_every_kind() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let disk = disk(&scratch);
    let compressed = scratch.path("compressed.qcow2");
    command(&["convert", "-c", str(&disk), str(&compressed)]).success();
    for (number, kind) in KINDS.iter().enumerate() {
        let image = scratch.path(&format!("image{number}.{}", kind.suffix));
        let convert = ["convert", "-O", kind.format, "-o", kind.options];
        let outcome = command(&[&convert[..], &[str(&compressed), str(&image)]].concat());
        outcome.success();
        expect_disk(kind, &image, &disk);
        let back = scratch.path("back.qcow2");
        qemu_img(&["convert", "-f", kind.format, "-O", "qcow2", str(&image), str(&back)]).success();
        // QEMU does not detect a fixed VHD by itself, so the format is given.
        let info = ["info", "--output=json", "-f", kind.format, str(&image)];
        let info = json(&qemu_img(&info).success());
        assert_eq!((&info["format"], &info["virtual-size"]), (&kind.format.into(), &SIZE.into()));
    }
}

#[test]
fn a_part_of_a_disk_is_copied_into_every_format() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let disk = disk(&scratch);
    // A part of the disk that does not end at a sector is padded with zeros.
    let content = std::fs::read(&disk).expect("the disk");
    let mut part = content[999 * 7..999 * 20_007].to_vec();
    part.resize(part.len().next_multiple_of(512), 0);
    let part = scratch.image_of("part.raw", &part).path().to_owned();
    for kind in [&KINDS[0], &KINDS[2], &KINDS[4], &KINDS[6]] {
        let image = scratch.path(&format!("part.{}", kind.suffix));
        let (from, to) = (format!("if={}", disk.display()), format!("of={}", image.display()));
        let dd = ["dd", "-O", kind.format, &from, &to, "bs=999", "skip=7", "count=20000"];
        command(&dd).success();
        expect_disk(kind, &image, &part);
        assert!(!command(&dd).status.success(), "{} exists", kind.format);
    }
}

#[test]
fn an_empty_image_of_every_kind_can_be_written_by_qemu() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for (number, kind) in KINDS.iter().filter(|kind| kind.is_written).enumerate() {
        let image = scratch.path(&format!("empty{number}.{}", kind.suffix));
        let create = ["create", "-f", kind.format, "-o", kind.options, str(&image), "50M"];
        command(&create).success();
        let zeros = scratch.image(&format!("zeros{number}.raw"), 50 << 20);
        expect_disk(kind, &image, zeros.path());
        let steps = ["write -P 5 0 64k", "write -P 6 20M 3M", "write -P 7 52428288 512"];
        qemu_io(kind.format, &image, &steps);
        qemu_io("raw", zeros.path(), &steps);
        expect_disk(kind, &image, zeros.path());
    }
}

#[test]
fn a_stream_is_in_the_order_of_the_disk_and_ends_with_its_footer() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let disk = disk(&scratch);
    let image = scratch.path("stream.vmdk");
    let stream = ["convert", "-c", "-o", "subformat=streamOptimized", str(&disk), str(&image)];
    command(&stream).success();
    let bytes = std::fs::read(&image).expect("an image");
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let (mut at, mut last, mut grains) = (128 * 512, None, 0);
    loop {
        let (sector, size) = (number(at), number(at + 8) as u32 as usize);
        if size == 0 {
            let kind = number(at + 12) as u32;
            at += 512 * (1 + sector as usize);
            if kind == 0 {
                break;
            }
            continue;
        }
        assert!(last.is_none_or(|last| last < sector), "{last:?} {sector}");
        (last, grains) = (Some(sector), grains + 1);
        at = (at + 12 + size).next_multiple_of(512);
    }
    assert!(grains > 10 && at == bytes.len(), "{grains} grains, {at} of {}", bytes.len());
    // Disks in an appliance are read at their offset in the file.
    let both = [vec![9; 1536], bytes.clone(), vec![0; 1024]].concat();
    let ova = scratch.image_of("both.ova", &both);
    let name = format!(
        r#"json:{{"driver":"vmdk","file":{{"driver":"raw","offset":1536,"size":{},"file":{{"driver":"file","filename":"{}"}}}}}}"#,
        bytes.len(),
        ova.str()
    );
    command(&["compare", "-F", "raw", &name, str(&disk)]).success();
}

#[test]
fn what_such_an_image_cannot_be_is_refused_before_anything_is_made() {
    let scratch = Scratch::new();
    let disk = scratch.image("disk.raw", 1 << 20);
    let new = scratch.path("new.vmdk");
    let name = str(&new);
    for (words, said) in [
        (&["create", "-f", "vmdk", name][..], "the size is missing"),
        (&["create", "-f", "vmdk", "-o", "subformat=flat", name, "1M"], "monolithicFlat"),
        (
            &["create", "-f", "vmdk", "-o", "subformat=monolithicFlat,zeroed_grain", name, "1M"],
            "Flat image can't enable zeroed grain",
        ),
        (&["create", "-f", "vdi", "-o", "subformat=fixed", name, "1M"], "no option 'subformat'"),
        (&["create", "-f", "qcow2", "-o", "static=on", name, "1M"], "no option 'static'"),
        (&["create", "-f", "vpc", name, "3T"], "at most"),
        (&["convert", "-c", disk.str(), name], "streamOptimized"),
        (&["convert", "-O", "vhdx", "--resume", disk.str(), name], "made anew"),
        (&["convert", "-O", "vhdx", "-o", "block_size=3M", disk.str(), name], "power of two"),
    ] {
        let outcome = run(Command::new(blockhouse()).args(words));
        let failed = |outcome: &Outcome| !outcome.status.success();
        assert!(failed(&outcome), "{}", outcome.describe("refused"));
        assert!(outcome.stderr.contains(said), "{}", outcome.describe(said));
        assert!(!new.exists() && !scratch.path("new.vmdk.part").exists(), "{words:?}");
    }
    // An existing image is left alone, unless an option says to replace it.
    command(&["convert", disk.str(), name]).success();
    let first = std::fs::read(&new).expect("an image");
    assert!(!command(&["convert", disk.str(), name]).status.success());
    assert!(std::fs::read(&new).expect("an image") == first);
    command(&["convert", "--force", disk.str(), name]).success();
    command(&["compare", name, disk.str()]).success();
}

#[test]
fn a_vmdk_image_has_what_its_parent_has() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let disk = disk(&scratch);
    let base = scratch.path("base.vmdk");
    command(&["convert", str(&disk), str(&base)]).success();
    let top = scratch.path("top.vmdk");
    command(&["create", "-f", "vmdk", "-b", "base.vmdk", "-F", "vmdk", str(&top)]).success();
    for equal in [qemu_img, command] {
        equal(&["compare", "-f", "vmdk", "-F", "raw", str(&top), str(&disk)]).success();
    }
    let steps = ["write -P 5 1M 200k"];
    qemu_io("vmdk", &top, &steps);
    qemu_io("raw", &disk, &steps);
    command(&["compare", "-f", "vmdk", "-F", "raw", str(&top), str(&disk)]).success();
    let raw = ["create", "-f", "vmdk", "-b", str(&disk), "-F", "raw", "other.vmdk"];
    let refused = command(&raw);
    assert!(
        refused.stderr.contains("the parent is a VMDK image"),
        "{}",
        refused.describe("refused")
    );
}

#[test]
fn a_vmdk_copy_with_a_parent_has_the_grains_that_differ() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let disk = disk(&scratch);
    let base = scratch.path("base.vmdk");
    command(&["convert", str(&disk), str(&base)]).success();
    // Data over zeros and over data, and zeros over data, in ranges smaller than a grain.
    qemu_io("raw", &disk, &["write -P 5 1000k 200k", "write -P 6 9M 512", "write -z 20M 3500k"]);
    let top = scratch.path("top.vmdk");
    let copy = ["convert", "-B", "base.vmdk", "-F", "vmdk", "-O", "vmdk", str(&disk)];
    command(&[&copy[..], &[str(&top)]].concat()).success();
    for equal in [qemu_img, command] {
        equal(&["compare", "-f", "vmdk", "-F", "raw", str(&top), str(&disk)]).success();
    }
    let length = |path: &Path| std::fs::metadata(path).expect("an image").len();
    assert!(length(&top) < 5 << 20, "{} bytes", length(&top));
    command(&["create", str(&scratch.path("short.vmdk")), "1M"]).success();
    let other = scratch.path("other.vmdk");
    let copy = ["convert", "-B", "short.vmdk", "-F", "vmdk", str(&disk), str(&other)];
    let refused = command(&copy);
    assert!(refused.stderr.contains("longer than its parent"), "{}", refused.describe("refused"));
    assert!(!other.exists());
}

#[test]
fn a_vmdk_disk_may_be_longer_than_its_file_can_be() {
    require!(need::tools(&["qemu-io"]));
    let scratch = Scratch::new();
    let far = new_image(&scratch, "far.vmdk", "2100G");
    qemu_io("vmdk", &far, &["write -P 7 2090G 64k", "read -P 0 1k 4k", "read -P 7 2090G 64k"]);
    let told = json(&command(&["info", "--json", str(&far)]).success());
    assert_eq!(told["virtual-size"], 2100_u64 << 30);
}

#[test]
fn a_disk_is_copied_into_vmdk_images_of_several_files() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let disk = scratch.image("disk.raw", 5 << 30);
    qemu_io(
        "raw",
        disk.path(),
        &["write -P 5 0 64k", "write -P 6 2047M 2M", "write -P 7 5100M 1M"],
    );
    for (subformat, first, last) in [
        ("monolithicFlat", "-flat", "-flat"),
        ("twoGbMaxExtentFlat", "-f001", "-f003"),
        ("twoGbMaxExtentSparse", "-s001", "-s003"),
    ] {
        let options = format!("subformat={subformat}");
        let (copy, empty) =
            (scratch.path(&format!("{subformat}.vmdk")), scratch.path("empty.vmdk"));
        let convert = ["convert", "-O", "vmdk", "-o", &options, disk.str(), str(&copy)];
        command(&convert).success();
        for equal in [qemu_img, command] {
            equal(&["compare", "-f", "vmdk", "-F", "raw", str(&copy), disk.str()]).success();
        }
        for part in [first, last] {
            let file = scratch.path(&format!("{subformat}{part}.vmdk"));
            assert!(file.is_file(), "{}", file.display());
        }
        let refused = command(&convert);
        assert!(refused.stderr.contains("exists"), "{}", refused.describe("refused"));
        command(&["create", "-f", "vmdk", "-o", &options, str(&empty), "3G"]).success();
        qemu_io("vmdk", &empty, &["write -P 8 2047M 2M", "read -P 8 2047M 2M", "read -P 0 0 1M"]);
        std::fs::remove_file(empty).expect("a descriptor");
    }
}
