//! `blockhouse commit` and `blockhouse rebase`, compared with QEMU's tools.

use std::path::{Path, PathBuf};

use blockhouse_tests::{
    Scratch, Serve, assert_same,
    image_tool::{command, new_image, qemu_img, qemu_io, str},
    need, require,
};
use serde_json::Value;

fn info(image: &Path) -> Value {
    let outcome = qemu_img(&["info", "--output=json", "-f", "qcow2", str(image)]).success();
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

/// The content of a disk, as QEMU reads it.
fn content(scratch: &Scratch, image: &Path) -> Vec<u8> {
    let flat = scratch.path("flat.raw");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", str(image), str(&flat)]).success();
    std::fs::read(flat).expect("a file")
}

fn check(image: &Path) {
    qemu_img(&["check", "-f", "qcow2", str(image)]).success();
}

/// Options of overlays.
const OVERLAYS: [&str; 5] = [
    "compat=1.1",
    "compat=0.10",
    "cluster_size=512",
    "extended_l2=on,cluster_size=16K",
    "cluster_size=2M,lazy_refcounts=on,refcount_bits=64",
];

/// An overlay over a base with the options `base`; if `None`, the base is raw.
fn overlay(scratch: &Scratch, base: Option<&str>, options: &str, size: &str) -> (PathBuf, PathBuf) {
    let (base_path, image) = (scratch.path("base"), scratch.path("over.qcow2"));
    for old in [&base_path, &image] {
        let _ = std::fs::remove_file(old);
    }
    let format = if base.is_some() { "qcow2" } else { "raw" };
    let mut create = vec!["create", "-f", format];
    if let Some(options) = base {
        create.extend(["-o", options]);
    }
    qemu_img(&[&create[..], &[str(&base_path), "12M"]].concat()).success();
    qemu_io(format, &base_path, &["write -P 1 0 4M", "write -P 2 7M 1M"]);
    let options = format!("{options},backing_file=base,backing_fmt={format}");
    qemu_img(&["create", "-f", "qcow2", "-o", &options, str(&image), size]).success();
    qemu_io("qcow2", &image, &["write -P 3 1000k 3000k", "write -P 4 9M 12345"]);
    if !options.contains("0.10") {
        qemu_io("qcow2", &image, &["write -z 7M 512k", "write -z -u 0 300k"]);
    }
    (base_path, image)
}

#[test]
fn a_commit_moves_everything_and_leaves_an_empty_overlay() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    for options in OVERLAYS {
        for base in [None, Some("compat=0.10")] {
            // The overlay is longer than the base, or shorter.
            for size in ["14M", "10M"] {
                let what = format!("{options} over {base:?}, {size}");
                let (base_path, image) = overlay(&scratch, base, options, size);
                let before = content(&scratch, &image);
                command(&["commit", str(&image)]).success();
                assert_same(&content(&scratch, &image), &before, &what);
                check(&image);
                let format = if base.is_some() { "qcow2" } else { "raw" };
                if base.is_some() {
                    check(&base_path);
                }
                let map = qemu_img(&["map", "--output=json", "-f", "qcow2", str(&image)]).success();
                let map: Value = serde_json::from_str(&map.stdout).expect("JSON");
                let parts = map.as_array().expect("a list");
                let own = |part: &&Value| part["depth"] == 0 && part["present"] == true;
                assert_eq!(parts.iter().find(own), None, "{what}");
                let flat = scratch.path("flat.raw");
                qemu_img(&["convert", "-f", format, "-O", "raw", str(&base_path), str(&flat)])
                    .success();
                let base_bytes = std::fs::read(flat).expect("a file");
                assert_same(&base_bytes[..before.len()], &before, &what);
                qemu_io("qcow2", &image, &["write -P 5 5M 1M", "read -P 5 5M 1M"]);
                check(&image);
            }
        }
    }
}

#[test]
fn a_commit_needs_a_backing_file_and_both_files_alone() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let alone = new_image(&scratch, "alone.qcow2", "1M");
    command(&["commit", str(&alone)]).failure("no backing file");
    let (base, image) = overlay(&scratch, None, "compat=1.1", "12M");
    for busy in [&base, &image] {
        let format = if busy == &base { "raw" } else { "qcow2" };
        let server =
            Serve::new(&scratch, busy).option("--format", format).flag("--read-only").start();
        command(&["commit", str(&image)]).failure("locked");
        server.stop();
    }
    command(&["commit", str(&image)]).success();
}

/// A second base, longer and partly different.
fn other_base(scratch: &Scratch, format: &str) -> PathBuf {
    let path = scratch.path("other");
    let _ = std::fs::remove_file(&path);
    qemu_img(&["create", "-f", format, str(&path), "13M"]).success();
    qemu_io(format, &path, &["write -P 1 0 2M", "write -P 6 3500k 3M", "write -P 7 12M 1M"]);
    path
}

#[test]
fn a_safe_rebase_keeps_the_content() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    for options in OVERLAYS {
        for (base, new) in [(None, Some("qcow2")), (Some("compat=1.1"), Some("raw")), (None, None)]
        {
            let what = format!("{options} over {base:?}, then {new:?}");
            let (_, image) = overlay(&scratch, base, options, "14M");
            let before = content(&scratch, &image);
            match new {
                Some(format) => {
                    other_base(&scratch, format);
                    command(&["rebase", "-b", "other", "-F", format, str(&image)]).success();
                    let info = info(&image);
                    assert_eq!(info["backing-filename"], "other", "{what}");
                    assert_eq!(info["backing-filename-format"], format, "{what}");
                }
                None => {
                    command(&["rebase", str(&image)]).success();
                    assert_eq!(info(&image).get("backing-filename"), None, "{what}");
                }
            }
            assert_same(&content(&scratch, &image), &before, &what);
            check(&image);
            qemu_io("qcow2", &image, &["write -P 5 5M 1M", "read -P 5 5M 1M"]);
            check(&image);
        }
    }
}

#[test]
fn an_image_that_stood_alone_keeps_its_zeros_over_a_backing_file() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    for options in OVERLAYS {
        for format in ["raw", "qcow2"] {
            let what = format!("{options} over {format}");
            let image = scratch.path("alone.qcow2");
            let _ = std::fs::remove_file(&image);
            qemu_img(&["create", "-f", "qcow2", "-o", options, str(&image), "14M"]).success();
            qemu_io("qcow2", &image, &["write -P 3 1000k 3000k", "write -P 8 4M 1M"]);
            qemu_io("qcow2", &image, &["discard 4M 512k", "write -P 4 12500k 12345"]);
            let before = content(&scratch, &image);
            other_base(&scratch, format);
            command(&["rebase", "-b", "other", "-F", format, str(&image)]).success();
            assert_same(&content(&scratch, &image), &before, &what);
            check(&image);
        }
    }
}

#[test]
fn an_unsafe_rebase_changes_the_name_only() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    for options in OVERLAYS {
        let (base, image) = overlay(&scratch, None, options, "12M");
        let before = content(&scratch, &image);
        let longest = format!("./{}moved", "./".repeat(150));
        for name in ["moved", &longest, "m", "./moved"] {
            let moved = scratch.path("moved");
            command(&["rebase", "-u", "-b", name, "-F", "raw", str(&image)]).success();
            let info = info(&image);
            assert_eq!(info["backing-filename"], name, "{options}");
            assert_eq!(info["backing-filename-format"], "raw", "{options}");
            assert_eq!(info["virtual-size"], 12 << 20);
            if name != "m" {
                std::fs::copy(&base, &moved).expect("a copy");
                assert_same(&content(&scratch, &image), &before, options);
                check(&image);
            }
        }
        let unsaid = command(&["rebase", "-u", str(&image)]);
        assert_eq!(unsaid.status.code(), Some(2), "{}", unsaid.describe("it would lose data"));
        assert!(unsaid.stderr.contains("--no-backing"), "{}", unsaid.describe("how to say it"));
        assert_ne!(info(&image).get("backing-filename"), None, "{options}");
        command(&["rebase", "-u", "--no-backing", str(&image)]).success();
        assert_eq!(info(&image).get("backing-filename"), None, "{options}");
        check(&image);
    }
}

#[test]
fn an_empty_name_is_qemu_imgs_way_to_say_no_backing_file() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    let (_, image) = overlay(&scratch, None, "compat=1.1", "12M");
    command(&["rebase", "-u", "-b", "", str(&image)]).success();
    assert_eq!(info(&image).get("backing-filename"), None);
}

#[test]
fn a_raw_backing_file_that_looks_like_qcow2_is_noticed() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    let (base, image) = overlay(&scratch, Some("compat=1.1"), "compat=1.1", "12M");
    let new = scratch.path("new.qcow2");
    let options = "backing_file=base,backing_fmt=raw";
    command(&["create", "-o", options, str(&new), "12M"]).failure("looks like qcow2");
    assert!(!new.exists());
    command(&["rebase", "-b", "base", "-F", "raw", str(&image)]).failure("looks like qcow2");
    assert_eq!(info(&image)["backing-filename-format"], "qcow2");
    // With an explicit format the command obeys, and each command warns.
    let outcome = command(&["rebase", "-u", "-b", "base", "-F", "raw", str(&image)]).success();
    assert!(outcome.stderr.contains("looks like qcow2"), "{}", outcome.describe("a warning"));
    let outcome = command(&["map", str(&image)]).success();
    assert!(outcome.stderr.contains("looks like qcow2"), "{}", outcome.describe("a warning"));
    let outcome = command(&["map", "--format", "raw", str(&base)]).success();
    assert_eq!(outcome.stderr, "", "{}", outcome.describe("it was said to be raw"));
}

#[test]
fn what_is_missing_behind_an_image_is_not_to_be_made_anew() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    let (base, image) = overlay(&scratch, None, "compat=1.1", "12M");
    std::fs::remove_file(&base).expect("it was there");
    let outcome = command(&["map", str(&image)]).failure("put the file back");
    assert!(!outcome.stderr.contains("blockhouse create"), "{}", outcome.describe("a bad hint"));
    let outer = scratch.path("outer.qcow2");
    command(&["create", "-o", "data_file=data.img", str(&outer), "1M"]).success();
    std::fs::remove_file(scratch.path("data.img")).expect("it was there");
    command(&["map", str(&outer)]).failure("put the file back");
}

#[test]
fn a_rebase_that_cannot_be_leaves_the_image_as_it_was() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let (_, image) = overlay(&scratch, None, "compat=1.1", "12M");
    let before = std::fs::read(&image).expect("an image");
    command(&["rebase", "-b", "missing", "-F", "raw", str(&image)]).failure("missing");
    command(&["rebase", "-b", "base", str(&image)]).failure("-F");
    command(&["rebase", "-b", "nbd://host/x", "-F", "raw", str(&image)]).failure("address");
    command(&["rebase", "-b", "over.qcow2", "-F", "qcow2", str(&image)]).failure("over.qcow2");
    let raw = scratch.image("disk.img", 1 << 20);
    command(&["rebase", "-u", "-b", "base", "-F", "raw", raw.str()]).failure("raw");
    assert!(std::fs::read(&image).expect("an image") == before);
}

#[test]
fn a_commit_into_a_deeper_base_leaves_the_disk_as_it_is() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::in_memory();
    for (base_size, options) in [("12M", ""), ("8M", ",extended_l2=on"), ("16M", "")] {
        let images = ["base.qcow2", "mid.qcow2", "top.qcow2"].map(|name| scratch.path(name));
        images.iter().for_each(|image| drop(std::fs::remove_file(image)));
        let [base, mid, top] = &images;
        qemu_img(&["create", "-f", "qcow2", str(base), base_size]).success();
        qemu_io("qcow2", base, &["write -P 1 0 6M"]);
        for (image, behind) in [(mid, "base.qcow2"), (top, "mid.qcow2")] {
            let options = format!("backing_file={behind},backing_fmt=qcow2{options}");
            qemu_img(&["create", "-f", "qcow2", "-o", &options, str(image), "12M"]).success();
        }
        qemu_io("qcow2", mid, &["write -P 2 1M 1234", "write -z 3M 500k", "write -P 3 10M 1M"]);
        qemu_io("qcow2", top, &["write -P 4 2M 100k", "write -P 1 3M 64k", "write -z 10M 4k"]);
        let before = content(&scratch, top);
        let refused =
            command(&["commit", "-b", str(top), str(top)]).failure("no backing file of this name");
        assert!(refused.stderr.contains("mid.qcow2 -> "), "{}", refused.stderr);
        let said = command(&["commit", "-p", "-b", str(base), str(top)]).success().stderr;
        assert!(said.contains("mid.qcow2: its backing file has changed"), "{said}");
        images.iter().for_each(|image| check(image));
        assert_same(&content(&scratch, top), &before, base_size);
        let mut whole = content(&scratch, base);
        whole.truncate(before.len());
        assert_same(&whole, &before, base_size);
        // The base alone now has all data.
        command(&["rebase", "-b", "base.qcow2", "-F", "qcow2", str(top)]).success();
        assert_same(&content(&scratch, top), &before, base_size);
    }
}
