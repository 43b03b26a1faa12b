//! The image tools on qcow2, beside qemu-img on the same images: `create`, `check`, `info`, `map`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use blockhouse_tests::{
    LoopDevice, Outcome, Scratch,
    image_tool::{command, json, new_image, qemu_img, str},
    need, require, run, tool,
};
use serde_json::Value;

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

/// A new image with data, a zero cluster, a compressed cluster and gaps.
fn filled_by_qemu(scratch: &Scratch, options: &str) -> PathBuf {
    let image = scratch.path("filled.qcow2");
    let _ = std::fs::remove_file(&image);
    qemu_img(&["create", "-f", "qcow2", "-o", options, str(&image), "16M"]).success();
    fill(&image, options);
    image
}

/// Fills whole clusters of the largest size: the unwritten rest of a cluster may or may not be a
/// hole in QEMU's files.
fn fill(image: &Path, options: &str) {
    let steps = ["write -P 1 0 2M", "write -z 2M 2M", "write -P 2 8M 2M", "write -P 2 6M 2M"];
    let compressed = takes_compressed(options).then_some("write -c -P 3 12M 2M");
    for step in steps.into_iter().chain(compressed) {
        run(tool("qemu-io").args(["-f", "qcow2", "-c", step, str(image)])).success();
    }
}

/// Whether an image can have compressed clusters. They share host clusters, so they need refcounts
/// above 1; and QEMU writes them only to unallocated clusters.
fn takes_compressed(options: &str) -> bool {
    !options.contains("refcount_bits=1,") && !options.contains("preallocation=metadata")
}

fn checks(image: &Path) -> (Outcome, Outcome) {
    let theirs = qemu_img(&["check", "--output=json", "-f", "qcow2", str(image)]);
    (command(&["check", "--json", "-f", "qcow2", str(image)]), theirs)
}

#[track_caller]
fn assert_same_check(image: &Path, what: &str) -> Value {
    let (ours, theirs) = checks(image);
    assert_eq!(ours.status.code(), theirs.status.code(), "{}", ours.describe(what));
    let (ours, theirs) = (json(&ours), json(&theirs));
    assert_eq!(ours, theirs, "{what}");
    ours
}

#[test]
fn check_counts_as_qemu_img_does() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for options in OPTIONS {
        let report = assert_same_check(&filled_by_qemu(&scratch, options), options);
        let compressed = report["compressed-clusters"].as_u64() > Some(0);
        assert_eq!(compressed, takes_compressed(options), "{options}: {report}");
        let ours = scratch.path("ours.qcow2");
        command(&["create", "-o", options, str(&ours), "16M"]).success();
        assert_same_check(&ours, options);
        fill(&ours, options);
        assert_same_check(&ours, options);
        std::fs::remove_file(&ours).expect("it is there");
    }
}

/// Overwrites a 16-bit refcount in the first refcount block of an image with 64 KiB clusters.
fn set_refcount(image: &Path, cluster: u64, count: u16) {
    let file = File::options().read(true).write(true).open(image).expect("the image opens");
    let mut pointer = [0; 8];
    file.read_exact_at(&mut pointer, 1 << 16).expect("the refcount table");
    let place = u64::from_be_bytes(pointer) + cluster * 2;
    file.write_all_at(&count.to_be_bytes(), place).expect("the refcount");
}

#[test]
fn check_tells_leaks_and_corruption_by_its_exit_status() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let image = filled_by_qemu(&scratch, "cluster_size=64K");
    let end = image.metadata().expect("it is there").len().next_multiple_of(1 << 16);
    File::options().write(true).open(&image).expect("it opens").set_len(end + (1 << 16)).unwrap();
    set_refcount(&image, end >> 16, 1);
    let report = assert_same_check(&image, "a leak");
    assert_eq!(report["leaks"], 1);
    let outcome = command(&["check", str(&image)]);
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.describe("a leak"));
    assert!(outcome.stdout.contains("1 leaked clusters"), "{}", outcome.describe("a leak"));

    // The cluster of the L1 table or of the first L2 table gets refcount 0.
    set_refcount(&image, 3, 0);
    let outcome = command(&["check", "--json", str(&image)]);
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("a corruption"));
    assert!(json(&outcome)["corruptions"].as_u64() > Some(0));
    let offset = format!("offset {}", 3 << 16);
    assert!(outcome.stderr.contains(&offset), "{}", outcome.describe("names the cluster"));
    let theirs = qemu_img(&["check", str(&image)]);
    assert_eq!(theirs.status.code(), Some(2), "{}", theirs.describe("a corruption"));
}

#[test]
fn what_cannot_be_checked_has_an_exit_status_of_its_own() {
    let scratch = Scratch::new();
    let raw = scratch.image("disk.img", 1 << 20);
    let outcome = command(&["check", raw.str()]);
    assert_eq!(outcome.status.code(), Some(63), "{}", outcome.describe("raw"));
    assert!(outcome.stderr.contains("does not support checks"), "{}", outcome.describe("raw"));
    let missing = command(&["check", "missing.qcow2"]);
    assert_eq!(missing.status.code(), Some(1), "{}", missing.describe("missing"));
}

#[test]
fn info_and_check_warn_of_a_mirror_that_is_not_complete() {
    const MARK: &[u8] = b"blockhouse: mirror not complete\nthe disk is to become a mirror of x\n";
    let scratch = Scratch::new();
    let mut bytes = vec![0; 1 << 20];
    bytes[..MARK.len()].fill(7);
    let raw = scratch.image_of("disk.img", &bytes);
    let qcow2 = scratch.path("disk.qcow2");
    command(&["convert", raw.str(), str(&qcow2)]).success();
    for image in [raw.path(), &qcow2] {
        let mut bytes = std::fs::read(image).expect("the image");
        let start = bytes.windows(MARK.len()).position(|found| found.iter().all(|byte| *byte == 7));
        bytes[start.expect("the data")..][..MARK.len()].copy_from_slice(MARK);
        std::fs::write(image, bytes).expect("it is marked");
        let refusal = command(&["map", str(image)]).failure("a mirror that was not completed");
        let words = refusal.stderr.trim_start_matches("blockhouse: ");
        for what in ["info", "check"] {
            let said = command(&[what, str(image)]).stderr;
            assert!(said.contains(words), "{what}: {said}");
        }
        command(&["info", "--json", str(image)]).success();
    }
    command(&["check", str(&qcow2)]).success();
}

#[test]
fn an_image_without_errors_is_said_to_be_one() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "8M");
    let text = command(&["check", str(&image)]).success().stdout;
    assert!(text.contains("No errors were found"), "{text}");
}

/// Asserts that we report everything that qemu-img does about an image; about its file, everything
/// that does not depend on the file system.
#[track_caller]
fn assert_same_info(image: &Path, what: &str) -> Value {
    let theirs = qemu_img(&["info", "--output=json", "-f", "qcow2", str(image)]);
    let ours = command(&["info", "--json", "-f", "qcow2", str(image)]);
    let (mut theirs, mut ours) = (json(&theirs.success()), json(&ours.success()));
    let their_files = theirs.as_object_mut().expect("an object").remove("children");
    let our_files = ours.as_object_mut().expect("an object").remove("children");
    // QEMU before version 8 reports no children.
    if let Some(theirs) = their_files.filter(|_| !what.contains("data_file")) {
        let ours = our_files.expect("it is a file");
        assert_eq!(ours[0]["name"], theirs[0]["name"], "{what}");
        for key in ["filename", "format", "virtual-size", "children"] {
            assert_eq!(ours[0]["info"][key], theirs[0]["info"][key], "{what}: {key}");
        }
    }
    let engine = ours.as_object_mut().expect("an object").remove("blockhouse");
    assert!(engine.is_some(), "{what}");
    assert_eq!(ours, theirs, "{what}");
    ours
}

#[test]
fn info_of_qcow2_is_that_of_qemu_img() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let base = scratch.image("base.raw", 8 << 20);
    let image = scratch.path("disk.qcow2");
    for options in OPTIONS {
        assert_same_info(&filled_by_qemu(&scratch, options), options);
        command(&["create", "-o", options, str(&image), "8M"]).success();
        assert_same_info(&image, options);
        std::fs::remove_file(&image).expect("it is there");
    }
    for name in ["base.raw", base.str()] {
        let options = format!("backing_file={name},backing_fmt=raw");
        command(&["create", "-o", &options, str(&image), "8M"]).success();
        let info = assert_same_info(&image, &options);
        assert_eq!(info["backing-filename"], name);
        assert_eq!(info["full-backing-filename"], base.str());
        std::fs::remove_file(&image).expect("it is there");
    }
}

/// Sets bits in the lowest byte of the incompatible features.
fn set_features(image: &Path, bits: u8) {
    let file = File::options().read(true).write(true).open(image).expect("the image opens");
    let mut byte = [0];
    file.read_exact_at(&mut byte, 79).expect("the features");
    file.write_all_at(&[byte[0] | bits], 79).expect("the features");
}

#[test]
fn info_tells_what_was_not_closed_and_what_is_corrupt() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    command(&["create", "-o", "lazy_refcounts=on", str(&image), "8M"]).success();
    set_features(&image, 1);
    assert_eq!(assert_same_info(&image, "dirty")["dirty-flag"], true);
    set_features(&image, 2);
    let info = assert_same_info(&image, "corrupt");
    assert_eq!(info["format-specific"]["data"]["corrupt"], true);
    let text = command(&["info", str(&image)]).success().stdout;
    for line in ["compat: 1.1", "corrupt: true", "lazy refcounts: true", "refcount bits: 16"] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
}

#[track_caller]
fn assert_same_map(image: &Path, format: &str, what: &str) -> Value {
    let theirs = qemu_img(&["map", "--output=json", "-f", format, str(image)]);
    let ours = command(&["map", "--json", "-f", format, str(image)]);
    let (mut theirs, ours) = (json(&theirs.success()), json(&ours.success()));
    for (theirs, ours) in theirs.as_array_mut().into_iter().flatten().zip(ours.as_array().unwrap())
    {
        // QEMU before 8.2 does not report this key.
        if theirs["compressed"].is_null() {
            theirs["compressed"] = ours["compressed"].clone();
        }
    }
    assert_eq!(ours, theirs, "{what}");
    ours
}

#[test]
fn maps_of_qcow2_are_those_of_qemu_img() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let ours = scratch.path("ours.qcow2");
    for options in OPTIONS {
        let map = assert_same_map(&filled_by_qemu(&scratch, options), "qcow2", options);
        assert!(map.as_array().is_some_and(|parts| parts.len() >= 5), "{options}: {map}");
        command(&["create", "-o", options, str(&ours), "16M"]).success();
        assert_same_map(&ours, "qcow2", options);
        fill(&ours, options);
        assert_same_map(&ours, "qcow2", options);
        std::fs::remove_file(&ours).expect("it is there");
    }
}

#[test]
fn maps_of_raw_images_are_those_of_qemu_img() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 8 << 20);
    assert_same_map(image.path(), "raw", "empty");
    let file = File::options().write(true).open(image.path()).expect("the image opens");
    for offset in [1 << 20, 5 << 20] {
        file.write_all_at(&[1; 1 << 16], offset).expect("the image is written");
    }
    file.sync_all().expect("the image is flushed");
    let map = assert_same_map(image.path(), "raw", "with data");
    assert_eq!(map.as_array().map(Vec::len), Some(5), "{map}");
    let text = command(&["map", image.str()]).success().stdout;
    let lines: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    let words: [&str; 4] = ["0x500000", "0x10000", "0x500000", image.str()];
    assert_eq!(Vec::from(words), lines[2], "{text}");
}

#[test]
fn maps_of_chains_are_those_of_qemu_img() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let base = scratch.image("base.raw", 3 << 20);
    let file = File::options().write(true).open(base.path()).expect("the image opens");
    file.write_all_at(&[1; 1 << 18], 1 << 18).expect("the image is written");
    file.sync_all().expect("the image is flushed");
    // Each image is longer than its backing file, so that maps extend past the backing file's end.
    let layers = [
        ("first.qcow2", "base.raw", "raw", "cluster_size=4k", "4M"),
        ("second.qcow2", "first.qcow2", "qcow2", "extended_l2=on", "6M"),
        ("top.qcow2", "second.qcow2", "qcow2", "cluster_size=64k", "8M"),
    ];
    for (depth, (name, behind, format, options, size)) in layers.into_iter().enumerate() {
        let image = scratch.path(name);
        let chain = format!("backing_file={behind},backing_fmt={format},{options}");
        command(&["create", "-o", &chain, str(&image), size]).success();
        let start = depth * 900;
        let commands = [
            format!("write -P 5 {}k 96k", start + 512),
            format!("write -z {}k 128k", start + 300),
            format!("write -P 6 {}k 4k", start + 100),
            format!("write -z {}k 64k", start + 512),
            format!("write -P 7 {}k 2k", start + 960),
            format!("discard {}k 64k", start + 960),
        ];
        let mut qemu_io = tool("qemu-io");
        qemu_io.args(["-f", "qcow2"]);
        commands.iter().for_each(|one| {
            qemu_io.args(["-c", one]);
        });
        run(qemu_io.arg(&image)).success();
        let map = assert_same_map(&image, "qcow2", name);
        let depths = map.as_array().expect("a list").iter().map(|part| part["depth"].as_u64());
        assert_eq!(depths.max(), Some(Some(depth as u64 + 1)), "{map}");
    }
    let text = command(&["map", str(&scratch.path("top.qcow2"))]).success().stdout;
    for name in ["base.raw", "first.qcow2", "second.qcow2", "top.qcow2"] {
        assert!(text.contains(str(&scratch.path(name))), "{name}: {text}");
    }
}

#[test]
fn info_of_clusters_smaller_than_the_hosts_blocks() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    command(&["create", "-o", "cluster_size=512", str(&image), "1M"]).success();
    // The length of a loop device is that of its file in whole sectors, so the file gets a longer,
    // even size.
    let file = File::options().write(true).open(&image).expect("the image opens");
    file.set_len(1 << 20).expect("the image gets longer");
    let image = scratch.image_of("copy.qcow2", &std::fs::read(&image).expect("the image"));
    let device = require!(LoopDevice::over(&image, &["--sector-size", "4096"]));
    let info = ["info", "--json", "-f", "qcow2", str(device.path())];
    assert_eq!(json(&command(&info).success())["cluster-size"], 512);
}
