//! What users of `qemu-img` and `qemu-nbd` type by habit works, or is answered by the right spelling.

use blockhouse_tests::{
    Scratch, Serve,
    image_tool::{command, json, qemu_img, str},
    require,
};
use serde_json::Value;

/// The result of a command as JSON, as qemu-img's users ask for it.
fn output_json(words: &[&str]) -> Value {
    json(&command(&[words, &["--output=json"]].concat()).success())
}

#[test]
fn an_overlay_has_the_size_of_its_backing_file() {
    require!(blockhouse_tests::need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let [base, over, theirs] = ["base.img", "over.qcow2", "theirs.qcow2"].map(|n| scratch.path(n));
    command(&["create", str(&base), "1.5M"]).success();
    command(&["create", "-f", "qcow2", "-b", "base.img", "-F", "raw", str(&over)]).success();
    qemu_img(&["create", "-f", "qcow2", "-b", "base.img", "-F", "raw", str(&theirs)]).success();
    let keys = ["virtual-size", "backing-filename", "backing-filename-format", "cluster-size"];
    let (ours, theirs) = (output_json(&["info", str(&over)]), output_json(&["info", str(&theirs)]));
    for key in keys {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert_eq!(ours["virtual-size"], 3 << 19);
    for words in [&["create", "-b", "base.img"][..], &["create", "-F", "raw"], &["create"]] {
        let outcome = command(&[words, &[str(&scratch.path("none.qcow2"))]].concat());
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
        assert!(!outcome.stderr.contains("Usage: blockhouse\n"), "{}", outcome.stderr);
    }
    assert!(!scratch.path("none.qcow2").exists());
}

#[test]
fn a_disk_grows_and_shrinks_by_so_much() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    let size = || output_json(&["info", str(&image)])["virtual-size"].clone();
    command(&["create", str(&image), "10MiB"]).success();
    command(&["resize", str(&image), "+1.5M"]).success();
    assert_eq!(size(), (10 << 20) + (3 << 19));
    let refused = command(&["resize", str(&image), "-512K"]);
    assert!(refused.stderr.contains("--shrink"), "{}", refused.stderr);
    command(&["resize", "--shrink", str(&image), "-512K"]).success();
    assert_eq!(size(), 11 << 20);
    let refused = command(&["resize", "--shrink", str(&image), "-12M"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stderr.contains("cannot lose"), "{}", refused.stderr);
}

#[test]
fn options_of_an_image_are_explained() {
    for words in [&["create", "-o", "help"][..], &["convert", "-o", "?", "a", "b.qcow2"]] {
        let outcome = command(words).success();
        for name in ["cluster_size", "preallocation", "backing_fmt", "refcount_bits"] {
            assert!(outcome.stdout.contains(name), "{}", outcome.stdout);
        }
    }
}

#[test]
fn an_image_in_use_can_be_looked_at() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    command(&["create", str(&image), "1M"]).success();
    let server = Serve::new(&scratch, &image).start();
    for name in ["map", "check"] {
        let locked = command(&[name, str(&image)]);
        assert!(locked.stderr.contains("locked"), "{name}: {}", locked.stderr);
        output_json(&[name, "-U", str(&image)]);
    }
    let refused = command(&["check", "-U", "--repair", "all", str(&image)]);
    assert_eq!(refused.status.code(), Some(2), "{}", refused.describe("wrong usage"));
    server.stop();
}

#[test]
fn verbosity_may_be_asked_for_more_than_once() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    command(&["-vvv", "create", str(&image), "1M"]).success();
}
