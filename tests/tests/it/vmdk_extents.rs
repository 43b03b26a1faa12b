//! VMDK images of many files: the files make one disk, and the names in an image of a stranger are
//! restricted.

use std::fs::File;
use std::os::unix::fs::FileExt;

use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::{Image, Scratch, need, random_bytes, require, run, seeded, tool};

const GIB: u64 = 1 << 30;
/// Bytes of the disk: three files of at most 2 GiB each.
const SIZE: u64 = 5 * GIB;

/// A disk with data in each file, and across a boundary of two files.
fn disk(scratch: &Scratch) -> Image {
    let disk = scratch.image("disk.raw", SIZE);
    let file = File::options().write(true).open(disk.path()).expect("a disk");
    let mut random = seeded();
    for offset in [0, 2 * GIB - (100 << 10), 3 * GIB + 512, SIZE - 4096] {
        let length = (200_u64 << 10).min(SIZE - offset) as usize;
        file.write_all_at(&random_bytes(&mut random, length), offset).expect("space");
    }
    disk
}

#[test]
fn many_files_are_one_disk() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let disk = disk(&scratch);
    for (kind, last) in [("twoGbMaxExtentSparse", "-s003"), ("twoGbMaxExtentFlat", "-f003")] {
        let image = scratch.path(&format!("{kind}.vmdk"));
        let option = format!("subformat={kind}");
        let words = ["convert", "-f", "raw", "-O", "vmdk", "-o", &option, disk.str(), str(&image)];
        qemu_img(&words).success();
        command(&["compare", disk.str(), str(&image)]).success();
        let ours = json(&command(&["info", "--json", str(&image)]).success());
        let theirs = json(&qemu_img(&["info", "--output=json", str(&image)]).success());
        for key in ["virtual-size", "actual-size", "cluster-size"] {
            assert_eq!(ours.get(key), theirs.get(key), "{key} of {ours}");
        }
        let map = command(&["map", str(&image)]).success().stdout;
        assert!(map.contains(&format!("{kind}{last}.vmdk")), "{map}");
        let map = json(&command(&["map", "--json", str(&image)]).success());
        let offsets =
            map.as_array().expect("a list").iter().filter_map(|one| one["offset"].as_u64());
        assert!(offsets.max() < Some(2 * GIB), "places in files of 2 GiB: {map}");
    }
}

#[test]
fn a_file_that_is_missing_or_cut_is_named() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let disk = disk(&scratch);
    let image = scratch.path("flat.vmdk");
    let option = "subformat=twoGbMaxExtentFlat";
    let words = ["convert", "-f", "raw", "-O", "vmdk", "-o", option, disk.str(), str(&image)];
    qemu_img(&words).success();
    let part = scratch.path("flat-f002.vmdk");
    let file = File::options().write(true).open(&part).expect("an extent");
    file.set_len(GIB).expect("a shorter file");
    command(&["info", str(&image)]).failure("and its file 1073741824");
    std::fs::remove_file(&part).expect("an extent");
    let outcome = command(&["info", str(&image)]).failure("flat-f002.vmdk");
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
}

#[test]
fn extents_lie_below_the_folder_of_their_descriptor() {
    let scratch = Scratch::new();
    let folder = scratch.path("images");
    std::fs::create_dir(&folder).expect("a folder");
    let secret = scratch.image_of("secret", &[7; 4096]);
    let image = folder.join("disk.vmdk");
    for name in ["../secret", secret.str()] {
        let text = format!("# Disk DescriptorFile\nparentCID=ffffffff\nRW 8 FLAT \"{name}\" 0\n");
        std::fs::write(&image, text).expect("a descriptor");
        let raw = scratch.path("out.raw");
        for words in [&["info", str(&image)][..], &["convert", str(&image), str(&raw)]] {
            let outcome = command(words).failure("--allow-path");
            assert!(outcome.stderr.contains("extent"), "{}", outcome.stderr);
        }
        assert!(!raw.exists());
        let allowed = ["compare", "--allow-path", secret.str(), str(&image), secret.str()];
        command(&allowed).success();
    }
    for name in ["nbd://host/disk", "json:{}"] {
        let text = format!("# Disk DescriptorFile\nRW 8 FLAT \"{name}\" 0\n");
        std::fs::write(&image, text).expect("a descriptor");
        command(&["info", str(&image)]).failure("only files");
    }
}

#[test]
fn a_stream_that_was_cut_off_or_damaged_reads_as_an_error() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let disk = scratch.image_of("disk.raw", &random_bytes(&mut seeded(), 1 << 20));
    let image = scratch.path("stream.vmdk");
    let option = "subformat=streamOptimized";
    let words = ["convert", "-f", "raw", "-O", "vmdk", "-o", option, disk.str(), str(&image)];
    qemu_img(&words).success();
    let whole = std::fs::read(&image).expect("an image");
    let cut = scratch.image_of("cut.vmdk", &whole[..whole.len() / 2]);
    command(&["convert", cut.str(), str(&scratch.path("out.raw"))]).failure("offset");
    let checked = command(&["check", cut.str()]).failure("past the end of the file");
    assert_eq!(checked.status.code(), Some(2), "{}", checked.describe("corrupt"));
    // If compressed data of a grain is damaged, only this grain fails.
    let mut damaged = whole;
    let grain = 128 * 512;
    damaged[grain + 3000] ^= 0xff;
    let damaged = scratch.image_of("damaged.vmdk", &damaged);
    let outcome = command(&["compare", disk.str(), damaged.str()]);
    assert_ne!(outcome.status.code(), Some(0), "{}", outcome.describe("a damaged grain"));
}

#[test]
fn an_image_reads_what_it_has_not_from_its_parent() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let write = |image: &str, change: &str| {
        run(tool("qemu-io").args(["-f", "vmdk", "-c", change, image])).success();
    };
    let [base, middle, over] =
        ["base.vmdk", "middle.vmdk", "over.vmdk"].map(|name| scratch.path(name));
    let [base, middle, over] = [&base, &middle, &over].map(|path| str(path));
    qemu_img(&["create", "-f", "vmdk", base, "8M"]).success();
    write(base, "write -P 1 0 4M");
    // Each image is written to before another image names it as its parent, because a write changes
    // its CID.
    for (image, parent, kind, change) in [
        (middle, base, "monolithicSparse", "write -P 2 1M 128k"),
        (over, middle, "twoGbMaxExtentSparse", "write -P 3 5M 64k"),
    ] {
        let kind = format!("subformat={kind}");
        let words = ["create", "-f", "vmdk", "-o", &kind, "-F", "vmdk", "-b", parent, image];
        qemu_img(&words).success();
        write(image, change);
    }
    let raw = scratch.path("theirs.raw");
    qemu_img(&["convert", "-f", "vmdk", "-O", "raw", over, str(&raw)]).success();
    command(&["compare", over, str(&raw)]).success();
    command(&["check", over]).success();
    let told = |info: &str, image: &str| {
        let ours = json(&command(&["info", info, image]).success());
        let theirs = json(&qemu_img(&["info", "--output=json", image]).success());
        assert_eq!(ours["format-specific"], theirs["format-specific"]);
        ours
    };
    assert_eq!(told("--json", over)["backing-filename"], middle);
    assert_eq!(told("--json", middle)["backing-filename-format"], "vmdk");
    let chain = json(&command(&["info", "--json", "--backing-chain", over]).success());
    assert_eq!(chain.as_array().map(Vec::len), Some(3), "{chain}");
    command(&["info", "--no-references", over]).success();
    command(&["compare", "--no-references", over, str(&raw)]).failure("--no-references");
    // A later write to the parent makes the images above it invalid.
    write(base, "write -P 9 4M 64k");
    command(&["compare", over, str(&raw)]).failure("its parent was changed");
}

#[test]
fn a_descriptor_may_begin_with_other_comments() {
    let scratch = Scratch::new();
    let disk = scratch.image_of("flat", &random_bytes(&mut seeded(), 8 * 512));
    let image = scratch.path("odd.vmdk");
    for first in ["#!/usr/bin/vmware\n\n# x\nversion=1", "version=1\r", "# disk descriptorfile"] {
        let text = format!("{first}\nCID=1\ncreateType=\"monolithicFlat\"\nRW 8 FLAT \"flat\" 0\n");
        std::fs::write(&image, text).expect("a descriptor");
        command(&["compare", str(&image), disk.str()]).success();
        command(&["check", str(&image)]).success();
    }
}
