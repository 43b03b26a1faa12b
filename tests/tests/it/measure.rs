//! `measure` reports the same sizes as `qemu-img measure`, and they are sufficient.

use std::path::Path;

use blockhouse_tests::image_tool::{command, json, qemu_img, qemu_io, str};
use blockhouse_tests::{Scratch, require};

/// Asserts that both tools give the same answer; returns it.
#[track_caller]
fn same(words: &[&str]) -> serde_json::Value {
    let words = [&["measure", "--output=json"], words].concat();
    let [ours, theirs] =
        [command(&words), qemu_img(&words)].map(|outcome| json(&outcome.success()));
    assert_eq!(ours, theirs, "{words:?}");
    ours
}

/// As [`same`], but our required size may be smaller: parts of clusters were never written, and
/// qemu-img does not detect that they are zeros.
#[track_caller]
fn no_more(words: &[&str]) -> serde_json::Value {
    let words = [&["measure", "--output=json"], words].concat();
    let [ours, mut theirs] =
        [command(&words), qemu_img(&words)].map(|outcome| json(&outcome.success()));
    assert!(ours["required"].as_u64() <= theirs["required"].as_u64(), "{ours} {theirs}");
    theirs["required"] = ours["required"].clone();
    assert_eq!(ours, theirs, "{words:?}");
    ours
}

#[test]
fn new_disks_are_measured_as_by_qemu() {
    require!(blockhouse_tests::need::tools(&["qemu-img"]));
    for size in ["512", "64K", "1000000", "1.5G", "20G", "5T"] {
        same(&["--size", size]);
        for options in [
            "cluster_size=64K",
            "cluster_size=512",
            "cluster_size=2M",
            "refcount_bits=64",
            "refcount_bits=1,cluster_size=4K",
            "extended_l2=on,cluster_size=128K",
            "compat=0.10",
            "preallocation=metadata",
            "preallocation=full",
        ] {
            // The L1 table of such a disk would be too long.
            if (size, options) != ("5T", "cluster_size=512") {
                same(&["-O", "qcow2", "-o", options, "--size", size]);
            }
        }
    }
}

#[test]
fn copies_are_measured_as_by_qemu_and_fit() {
    require!(blockhouse_tests::need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let [raw, qcow2, old, over, copy] =
        ["d.img", "d.qcow2", "old.qcow2", "over.qcow2", "copy.qcow2"]
            .map(|name| scratch.path(name));
    let writes = ["write -P 1 0 64k", "write -P 2 1000k 3k", "write -z 5M 1M", "write -P 3 20M 3M"];
    for (path, options) in [(&raw, "raw"), (&qcow2, "qcow2"), (&old, "qcow2")] {
        let compat = if path == &old { &["-o", "compat=0.10"][..] } else { &[] };
        qemu_img(&[&["create", "-f", options], compat, &[str(path), "64M"]].concat()).success();
        qemu_io(options, path, &writes);
    }
    qemu_img(&["create", "-f", "qcow2", "-b", "d.qcow2", "-F", "qcow2", str(&over)]).success();
    qemu_io("qcow2", &over, &["write -P 7 40M 100k"]);
    for name in ["week", "a-longer-name-of-a-bitmap"] {
        qemu_img(&["bitmap", "--add", str(&qcow2), name]).success();
    }
    for (path, format) in [(&raw, "raw"), (&qcow2, "qcow2"), (&old, "qcow2"), (&over, "qcow2")] {
        for options in ["cluster_size=64K", "cluster_size=4K", "preallocation=falloc"] {
            let words = ["-f", format, "-O", "qcow2", "-o", options, str(path)];
            let told = match options {
                "cluster_size=4K" => no_more(&words),
                _ => same(&words),
            };
            let fits = |path: &Path| {
                path.metadata().expect("a copy").len() <= told["required"].as_u64().expect("bytes")
            };
            if options != "preallocation=falloc" {
                let words = ["-f", format, "-O", "qcow2", "-o", options, str(path), str(&copy)];
                command(&[&["convert", "--force"], &words[..]].concat()).success();
                assert!(fits(&copy), "{words:?}");
            }
        }
        same(&["-f", format, str(path)]);
    }
    let text = command(&["measure", "-O", "qcow2", str(&qcow2)]).success().stdout;
    assert!(text.starts_with("required size: ") && text.contains("\nbitmaps size: "), "{text}");
}

#[test]
fn what_cannot_be_measured_is_wrong_usage() {
    for words in [
        &["-O", "vmdk", "--size", "1G"][..],
        &["-O", "qcow2"],
        &["-O", "qcow2", "--size", "5T", "-o", "cluster_size=512"],
        &["-O", "qcow2", "--size", "1G", "disk.img"],
        &["-O", "raw", "--size", "1G", "-o", "cluster_size=64K"],
    ] {
        let outcome = command(&[&["measure"], words].concat());
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
    }
}
