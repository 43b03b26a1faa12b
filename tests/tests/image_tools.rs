//! The image tools on qcow2, beside qemu-img on the same images: `create`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

use blockhouse_tests::{Outcome, Scratch, blockhouse, need, require, run, tool};
use serde_json::Value;

fn command(words: &[&str]) -> Outcome {
    run(Command::new(blockhouse()).args(words))
}

fn qemu_img(words: &[&str]) -> Outcome {
    run(tool("qemu-img").args(words))
}

fn str(path: &Path) -> &str {
    path.to_str().expect("a plain name")
}

fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| {
        panic!("{}", outcome.describe(&format!("must be JSON ({error})")));
    })
}

/// Option lists for images that both `blockhouse create` and `qemu-img create` make.
const OPTIONS: [&str; 8] = [
    "cluster_size=64K",
    "cluster_size=512",
    "cluster_size=2M,lazy_refcounts=on",
    "compat=0.10",
    "refcount_bits=1,cluster_size=4K",
    "refcount_bits=64,extended_l2=on",
    "compression_type=zstd",
    "preallocation=metadata,lazy_refcounts=off",
];

#[test]
fn qemu_img_finds_new_images_as_they_were_asked_for() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let (ours, theirs) = (scratch.path("ours.img"), scratch.path("theirs.img"));
    for options in OPTIONS {
        let create = |image| ["create", "-f", "qcow2", "-o", options, str(image), "8M"];
        command(&create(&ours)).success();
        qemu_img(&create(&theirs)).success();
        qemu_img(&["check", "-f", "qcow2", str(&ours)]).success();
        let facts = |image| {
            let outcome = qemu_img(&["info", "--output=json", "-f", "qcow2", str(image)]);
            let info = json(&outcome.success());
            ["virtual-size", "cluster-size", "format-specific", "dirty-flag"]
                .map(|key| info[key].clone())
        };
        assert_eq!(facts(&ours), facts(&theirs), "{options}");
        for image in [&ours, &theirs] {
            std::fs::remove_file(image).expect("it is there");
        }
    }
}

#[test]
fn the_name_decides_that_an_image_is_qcow2() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    command(&["create", "-o", "refcount_bits=8", str(&image), "1G"]).success();
    let info = json(&qemu_img(&["info", "--output=json", str(&image)]).success());
    assert_eq!(info["format"], "qcow2");
    assert_eq!(info["format-specific"]["data"]["refcount-bits"], 8);
}

#[test]
fn a_new_image_over_a_backing_file_reads_as_it() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let base = scratch.image_of("a,b.raw", &[7; 4 << 20]);
    let image = scratch.path("top.qcow2");
    let options = "backing_file=a,,b.raw,backing_fmt=raw";
    command(&["create", "-o", options, str(&image), "4M"]).success();
    let info = json(&qemu_img(&["info", "--output=json", str(&image)]).success());
    assert_eq!(info["backing-filename"], "a,b.raw");
    assert_eq!(info["backing-filename-format"], "raw");
    let compare = ["compare", "-f", "qcow2", "-F", "raw", str(&image), base.str()];
    qemu_img(&compare).success();
}

#[test]
fn options_that_cannot_be_are_wrong_usage() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    for (options, known) in [
        ("clustersize=4K", "cluster_size"),
        ("cluster_size=3K", "2M"),
        ("preallocation=lots", "metadata"),
        ("backing_file=base.raw", "backing_fmt"),
        ("backing_fmt=raw", "backing_file"),
    ] {
        let outcome = command(&["create", "-o", options, str(&image), "1M"]);
        let said = outcome.describe(options);
        assert_eq!(outcome.status.code(), Some(2), "{said}");
        assert!(outcome.stderr.contains(known), "{said}");
    }
    let outcome = command(&["create", "-f", "raw", "-o", "compat=1.1", str(&image), "1M"]);
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("raw has no options"));
    assert!(!image.exists());
}

#[test]
fn a_create_that_fails_leaves_no_file() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    for (options, word) in [
        ("compat=0.10,lazy_refcounts=on", "version 2"),
        ("cluster_size=4K,extended_l2=on", "16 KiB"),
        ("cluster_size=512", "too large"),
        ("backing_file=missing.raw,backing_fmt=raw", "missing.raw"),
    ] {
        let outcome = command(&["create", "-o", options, str(&image), "1T"]);
        let said = outcome.describe(options);
        assert_eq!(outcome.status.code(), Some(1), "{said}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{said}");
        assert!(outcome.stderr.contains(word), "{said}");
        assert!(!image.exists(), "{said}");
    }
}

#[test]
fn an_existing_file_is_not_made_an_image() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.qcow2", &[1; 512]);
    let before = image.state();
    command(&["create", image.str(), "1M"]).failure("exists");
    assert_eq!(image.state(), before);
}
