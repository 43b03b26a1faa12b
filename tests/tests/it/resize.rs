//! `blockhouse resize`, checked with QEMU's tools: what remains, what is freed, what is refused.

use std::path::Path;

use blockhouse_tests::{
    FileSystem, Scratch, SmallHost,
    image_tool::{command, json, qemu_img, qemu_io, str},
    need, require,
};

const OPTIONS: [&str; 6] = [
    "cluster_size=512",
    "cluster_size=64K",
    "compat=0.10",
    "cluster_size=2M,lazy_refcounts=on",
    "cluster_size=16K,extended_l2=on",
    "preallocation=metadata,refcount_bits=64",
];

#[test]
fn a_shorter_qcow2_image_keeps_what_is_before_its_end() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for options in OPTIONS {
        let image = scratch.path("disk.qcow2");
        let _ = std::fs::remove_file(&image);
        qemu_img(&["create", "-f", "qcow2", "-o", options, str(&image), "40M"]).success();
        qemu_io("qcow2", &image, &["write -P 1 0 12M", "write -P 2 30M 8M"]);
        let before = allocated(&image);
        // A size in the middle of a cluster, whatever the cluster size.
        let size = (8 << 20) + 512 * 3;
        command(&["resize", "--shrink", str(&image), &size.to_string()]).success();
        let outcome = qemu_img(&["check", "-f", "qcow2", str(&image)]);
        assert!(outcome.status.success(), "{}", outcome.describe(options));
        let rest = size - 1024;
        qemu_io("qcow2", &image, &["read -P 1 0 8M", &format!("read -P 1 {rest} 1024")]);
        assert!(allocated(&image) + (10 << 20) < before, "{options}: {before}");
        // The old bytes do not reappear, whichever tool makes the disk longer.
        for tool in [["qemu-img", "qcow2"], ["blockhouse", "qcow2"]] {
            let copy = scratch.path("copy.qcow2");
            std::fs::copy(&image, &copy).expect("a copy");
            match tool[0] {
                "qemu-img" => qemu_img(&["resize", "-f", "qcow2", str(&copy), "41M"]).success(),
                _ => command(&["resize", str(&copy), "41M"]).success(),
            };
            let zeros = format!("read -P 0 {size} {}", (41 << 20) - size);
            qemu_io("qcow2", &copy, &["read -P 1 0 8M", &zeros]);
            qemu_img(&["check", "-f", "qcow2", str(&copy)]).success();
        }
    }
}

fn allocated(image: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(image).expect("it is there").blocks() * 512
}

#[test]
fn a_shorter_raw_image_is_cut() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[7; 8192]);
    command(&["resize", image.str(), "512"]).failure("--shrink");
    assert_eq!(image.content().len(), 8192);
    command(&["resize", "--shrink", image.str(), "1024"]).success();
    assert_eq!(image.content(), [7; 1024]);
    command(&["resize", "--shrink", image.str(), "1000"]).failure("512");
    assert_eq!(image.content(), [7; 1024]);
}

#[test]
fn snapshots_keep_what_the_disk_loses_or_forbid_it() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for (name, compat) in [("two.qcow2", "compat=0.10"), ("three.qcow2", "compat=1.1")] {
        let image = scratch.path(name);
        qemu_img(&["create", "-f", "qcow2", "-o", compat, str(&image), "1100M"]).success();
        qemu_io("qcow2", &image, &["write -P 1 0 1M", "write -P 2 600M 1M", "write -P 3 1090M 1M"]);
        qemu_img(&["snapshot", "-c", "one", str(&image)]).success();
        qemu_io("qcow2", &image, &["write -P 4 600M 64k"]);
        let outcome = command(&["resize", "--shrink", str(&image), "512K"]);
        if name == "two.qcow2" {
            outcome.failure("version 2 snapshots");
            qemu_io("qcow2", &image, &["read -P 3 1090M 1M"]);
            continue;
        }
        outcome.success();
        qemu_img(&["check", "-f", "qcow2", str(&image)]).success();
        qemu_io("qcow2", &image, &["read -P 1 0 512k"]);
        qemu_img(&["snapshot", "-a", "one", str(&image)]).success();
        qemu_img(&["check", "-f", "qcow2", str(&image)]).success();
        qemu_io("qcow2", &image, &["read -P 1 0 1M", "read -P 2 600M 1M", "read -P 3 1090M 1M"]);
    }
}

#[test]
fn neither_direction_shows_what_the_backing_file_has_beyond_the_end() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let base = scratch.image_of("base.raw", &[9; 8 << 20]);
    for compat in ["compat=0.10", "compat=1.1", "extended_l2=on,cluster_size=16K"] {
        let image = scratch.path("over.qcow2");
        let _ = std::fs::remove_file(&image);
        let options = format!("{compat},backing_file={},backing_fmt=raw", base.str());
        qemu_img(&["create", "-f", "qcow2", "-o", &options, str(&image), "4M"]).success();
        qemu_io("qcow2", &image, &["write -P 1 3M 1M"]);
        command(&["resize", "--shrink", str(&image), "2049K"]).success();
        command(&["resize", str(&image), "10M"]).success();
        qemu_img(&["check", "-f", "qcow2", str(&image)]).success();
        let zeros = format!("read -P 0 2049k {}", (10 << 20) - (2049 << 10));
        qemu_io("qcow2", &image, &["read -P 9 0 2049k", &zeros]);
    }
}

#[test]
fn a_longer_disk_has_its_space_at_once_where_that_is_asked_for() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for (mode, name) in [("falloc", "raw"), ("full", "raw"), ("falloc", "qcow2"), ("full", "qcow2")]
    {
        let image = scratch.path(&format!("{mode}.{name}"));
        qemu_img(&["create", "-f", name, str(&image), "1536K"]).success();
        qemu_io(name, &image, &["write -P 7 0 1536K"]);
        let before = allocated(&image);
        command(&["resize", "--preallocation", mode, str(&image), "9M"]).success();
        assert!(allocated(&image) - before >= 7 << 20, "{mode} {name}: {}", allocated(&image));
        qemu_io(name, &image, &["read -P 7 0 1536K", "read -P 0 1536K 7680K"]);
        if name == "qcow2" {
            let outcome = qemu_img(&["check", "-f", name, str(&image)]);
            assert!(outcome.status.success(), "{}", outcome.describe(mode));
        }
    }
}

#[test]
fn a_longer_disk_has_its_tables_at_once_where_that_is_asked_for() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for (number, options) in OPTIONS.iter().enumerate() {
        let image = scratch.path(&format!("{number}.qcow2"));
        qemu_img(&["create", "-f", "qcow2", "-o", options, str(&image), "1599K"]).success();
        // Clusters that were in use are free now, with their old bytes.
        let used = ["write -P 7 0 1599K", "write -P 8 1M 512K", "discard 1M 512K"];
        qemu_io("qcow2", &image, &used);
        let before = allocated(&image);
        let longer = ["resize", "--preallocation", "metadata", str(&image), "65M"];
        command(&longer).success();
        let taken = allocated(&image) - before;
        assert!(taken < 16 << 20, "{options}: {taken} bytes were taken");
        let map = json(&qemu_img(&["map", "--output=json", "-f", "qcow2", str(&image)]).success());
        let added = |extent: &serde_json::Value| {
            let end = extent["start"].as_u64()? + extent["length"].as_u64()?;
            Some(end <= 2 << 20 || extent["offset"].is_u64())
        };
        let extents = map.as_array().expect("extents");
        assert!(extents.iter().all(|one| added(one) == Some(true)), "{options}: {map}");
        let zeros = format!("read -P 0 1599K {}K", 65 * 1024 - 1599);
        qemu_io("qcow2", &image, &["read -P 7 0 1M", &zeros]);
        qemu_img(&["check", "-f", "qcow2", str(&image)]).success();
    }
    let image = scratch.image("disk.img", 1 << 20);
    let longer = ["resize", "--preallocation", "metadata", image.str(), "2M"];
    command(&longer).failure("of a raw image, which has none");
}

#[test]
fn a_disk_without_space_for_more_keeps_its_size() {
    let scratch = Scratch::new();
    let host = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, 4 << 20));
    for name in ["disk.img", "disk.qcow2", "marked.qcow2", "marked.img"] {
        let image = host.path(name);
        command(&["create", str(&image), "1M"]).success();
        if name.starts_with("marked") {
            command(&["bitmap", "add", str(&image), "monday"]).success();
        }
        let longer = ["resize", "--preallocation", "full", str(&image), "20M"];
        command(&longer).failure("No space left");
        let size = command(&["info", "--json", str(&image)]).success().stdout;
        assert!(size.contains("\"virtual-size\": 1048576"), "{size}");
        command(&["resize", "--preallocation", "some", str(&image), "2M"]).failure("full");
    }
}
