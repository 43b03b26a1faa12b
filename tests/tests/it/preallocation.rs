//! `blockhouse create -o preallocation=...`: the space is allocated, the image equals QEMU's, and
//! an image that does not fit leaves no file.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use blockhouse_tests::{
    Outcome, Scratch,
    image_tool::{command, qemu_img, str},
    need, require, run, tool,
};
use serde_json::Value;

const SIZE: u64 = 8 << 20;

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).expect("it is there").blocks() * 512
}

/// Creates an image; `None` if the file system cannot preallocate space.
fn create(options: &str, format: &str, image: &Path) -> Option<Outcome> {
    let _ = std::fs::remove_file(image);
    let outcome = command(&["create", "-f", format, "-o", options, str(image), "8M"]);
    if options.contains("falloc") && outcome.stderr.contains("set space aside") {
        assert!(outcome.stderr.contains("preallocation=full") && !image.exists());
        eprintln!("SKIPPED: {options}: this file system sets no space aside");
        return None;
    }
    Some(outcome.success())
}

#[test]
fn the_space_of_qcow2_images_is_taken_at_once() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let (image, zeros) = (scratch.path("disk.qcow2"), scratch.image("zeros.raw", SIZE));
    for kind in ["falloc", "full"] {
        for other in ["cluster_size=64K", "cluster_size=512", "compat=0.10", "extended_l2=on"] {
            let options = format!("preallocation={kind},{other}");
            if create(&options, "qcow2", &image).is_none() {
                continue;
            }
            assert!(allocated(&image) >= SIZE, "{options}: {}", allocated(&image));
            let report =
                qemu_img(&["check", "--output=json", "-f", "qcow2", str(&image)]).success();
            let report: Value = serde_json::from_str(&report.stdout).expect("JSON");
            assert_eq!(report["allocated-clusters"], report["total-clusters"], "{options}");
            let compare = ["compare", "-f", "qcow2", "-F", "raw", str(&image), zeros.str()];
            qemu_img(&compare).success();
            let before = std::fs::metadata(&image).expect("it is there").len();
            let write = ["-f", "qcow2", "-c", "write -P 1 1M 6M", str(&image)];
            run(tool("qemu-io").args(write)).success();
            assert_eq!(std::fs::metadata(&image).expect("it is there").len(), before, "{options}");
            qemu_img(&["check", "-f", "qcow2", str(&image)]).success();
        }
    }
}

#[test]
fn the_space_of_raw_images_is_taken_at_once() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    for kind in ["falloc", "full"] {
        if create(&format!("preallocation={kind}"), "raw", &image).is_some() {
            assert!(allocated(&image) >= SIZE, "{kind}: {}", allocated(&image));
            assert!(std::fs::read(&image).expect("it is there") == vec![0; SIZE as usize]);
        }
    }
    create("preallocation=off", "raw", &image);
    assert_eq!(allocated(&image), 0);
    let _ = std::fs::remove_file(&image);
    for options in ["preallocation=metadata", "cluster_size=64K"] {
        let outcome = command(&["create", "-f", "raw", "-o", options, str(&image), "8M"]);
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("no such option"));
        assert!(!image.exists());
    }
}

#[test]
fn an_image_that_does_not_fit_leaves_no_file() {
    let scratch = Scratch::new();
    for (name, kind) in [("disk.qcow2", "falloc"), ("disk.img", "falloc")] {
        let image = scratch.path(name);
        let options = format!("preallocation={kind}");
        let outcome = command(&["create", "-o", &options, str(&image), "7P"]);
        assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe("no room"));
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
        assert!(!image.exists(), "{name}");
    }
}
