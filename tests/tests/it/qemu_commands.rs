//! Commands and image names of qemu-img: dd, amend, --image-opts, json:, info --backing-chain.

use std::path::Path;

use blockhouse_tests::{
    Scratch,
    image_tool::{command, json, qemu_img, qemu_io, str},
    need, random_bytes, require, seeded,
};
use serde_json::Value;

/// The JSON of `info` for an image.
fn info(image: &Path) -> Value {
    json(&command(&["info", "--output=json", str(image)]).success())
}

#[test]
fn dd_copies_what_qemu_imgs_copies() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let source = scratch.image_of("source.img", &random_bytes(&mut seeded(), 3 << 20));
    let from = format!("if={}", source.str());
    for (number, words) in [
        &["bs=4096", "count=10"][..],
        &["bs=1000", "skip=3"],
        &["bs=1M", "count=2"],
        &["bs=1M", "skip=9"],
        &["skip=6144"],
        &["bs=1", "skip=3145727"],
        &[],
    ]
    .into_iter()
    .enumerate()
    {
        let [ours, theirs] =
            ["ours", "theirs"].map(|name| scratch.path(&format!("{name}-{number}.img")));
        for format in ["raw", "qcow2"] {
            let [to, to_theirs] = [&ours, &theirs].map(|path| format!("of={}.{format}", str(path)));
            let head = ["dd", "-f", "raw", "-O", format, &from];
            command(&[&head[..], &[&to], words].concat()).success();
            qemu_img(&[&head[..], &[&to_theirs], words].concat()).success();
            let [ours, theirs] = [&to, &to_theirs].map(|word| &word["of=".len()..]);
            // Without -s: a strict comparison also compares allocation, and parallel copies
            // allocate clusters in any order.
            qemu_img(&["compare", "-f", format, "-F", format, ours, theirs]).success();
            let size = |image: &str| info(Path::new(image))["virtual-size"].clone();
            assert_eq!(size(ours), size(theirs), "{words:?}");
        }
    }
}

#[test]
fn dd_counts_after_it_has_skipped_and_replaces_only_when_told() {
    let scratch = Scratch::new();
    let content = random_bytes(&mut seeded(), 64 << 10);
    let source = scratch.image_of("source.img", &content);
    let target = scratch.path("target.img");
    let (from, to) = (format!("if={}", source.str()), format!("of={}", str(&target)));
    command(&["dd", &from, &to, "bs=4K", "skip=2", "count=3"]).success();
    assert_eq!(std::fs::read(&target).expect("the copy"), content[8 << 10..20 << 10]);
    command(&["dd", &from, &to]).failure("--force");
    command(&["dd", "--force", &from, &to, "isize=512", "skip=1"]).success();
    assert_eq!(std::fs::read(&target).expect("the copy"), content[512..1024]);
    for words in
        [&["dd", &from][..], &["dd", &from, &to, "conv=notrunc"], &["dd", &from, &to, "bs=0"]]
    {
        assert_eq!(command(words).status.code(), Some(2), "{words:?}");
    }
}

#[test]
fn options_are_changed_in_place_as_qemu_img_changes_them() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let [base, over] = ["base.qcow2", "over.qcow2"].map(|name| scratch.path(name));
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "compat=0.10", str(&base), "16M"]).success();
    qemu_io("qcow2", &base, &["write -P 5 0 8M"]);
    qemu_img(&["snapshot", "-c", "before", str(&base)]).success();
    qemu_io("qcow2", &base, &["write -P 6 1M 2M"]);
    let overlay = ["-o", "compat=0.10", "-b", "base.qcow2", "-F", "qcow2", str(&over)];
    qemu_img(&[&["create", "-q", "-f", "qcow2"][..], &overlay].concat()).success();
    for image in [&base, &over] {
        command(&["amend", "-q", "-f", "qcow2", "-o", "compat=1.1,lazy_refcounts=on", str(image)])
            .success();
        let data = &info(image)["format-specific"]["data"];
        assert_eq!(
            (data["compat"].as_str(), data["lazy-refcounts"].as_bool()),
            (Some("1.1"), Some(true))
        );
        qemu_img(&["check", str(image)]).success();
    }
    assert_eq!(info(&over)["backing-filename"], "base.qcow2");
    qemu_io("qcow2", &over, &["read -P 5 0 1M", "read -P 6 1M 2M", "read -P 5 3M 5M"]);
    qemu_img(&["snapshot", "-a", "before", str(&base)]).success();
    qemu_io("qcow2", &base, &["read -P 5 0 8M"]);
    command(&["amend", "-o", "lazy_refcounts=off,size=32M,cluster_size=64k", str(&base)]).success();
    assert_eq!(info(&base)["virtual-size"], 32 << 20);
    for (option, way) in [
        ("compat=0.10", "convert"),
        ("cluster_size=4K", "convert"),
        ("size=1M", "resize"),
        ("backing_file=x,backing_fmt=raw", "rebase"),
    ] {
        let refused = command(&["amend", "-o", option, str(&base)]).failure(way);
        assert_eq!(refused.status.code(), Some(1), "{option}");
        assert_eq!(refused.stderr.lines().count(), 1, "{}", refused.describe("one line"));
    }
    assert!(command(&["amend", "-o", "help"]).success().stdout.contains("lazy_refcounts"));
}

/// The content of an image: of its disk, and of its snapshot.
fn contents(scratch: &Scratch, image: &Path, snapshot: Option<&str>) -> Vec<Vec<u8>> {
    let raw = scratch.path("contents.raw");
    let read = |words: &[&str]| {
        let head = ["convert", "-f", "qcow2", "-O", "raw"];
        qemu_img(&[&head[..], words, &[str(image), str(&raw)]].concat()).success();
        std::fs::read(&raw).expect("the disk")
    };
    let of_snapshot = snapshot.map(|name| read(&["-l", name]));
    [Some(read(&[])), of_snapshot].into_iter().flatten().collect()
}

#[test]
fn images_become_ones_of_version_2_as_by_qemu_img() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let content = random_bytes(&mut seeded(), 4 << 20);
    let base = scratch.image_of("base.img", &content);
    for (name, options, snapshot) in [
        ("alone", "compat=1.1", Some("before")),
        ("lazy", "compat=1.1,lazy_refcounts=on", Some("before")),
        ("prepared", "compat=1.1,preallocation=metadata", None),
        ("over", "compat=1.1,backing_file=base.img,backing_fmt=raw", Some("before")),
        ("over-small", "compat=1.1,cluster_size=512,backing_file=base.img,backing_fmt=raw", None),
    ] {
        let image = scratch.path(&format!("{name}.qcow2"));
        let theirs = scratch.path(&format!("{name}-theirs.qcow2"));
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, str(&image), "8M"]).success();
        qemu_io("qcow2", &image, &["write -P 5 0 3M", "write -z 1M 1M", "write -z -u 3M 64k"]);
        if let Some(snapshot) = snapshot {
            qemu_img(&["snapshot", "-c", snapshot, str(&image)]).success();
        }
        qemu_io("qcow2", &image, &["write -z 2M 128k", "write -P 6 1M 64k", "write -z 7M 1M"]);
        let before = contents(&scratch, &image, snapshot);
        std::fs::copy(&image, &theirs).expect("a copy");
        command(&["amend", "-q", "-o", "compat=0.10", str(&image)]).success();
        qemu_img(&["amend", "-o", "compat=0.10", str(&theirs)]).success();
        // qemu-img 10.0 damages images whose snapshots share clusters that became zeros.
        let compared = if snapshot.is_some() { &[&image][..] } else { &[&image, &theirs] };
        for image in compared {
            let found = info(image);
            assert_eq!(found["format-specific"]["data"]["compat"], "0.10", "{name}");
            assert!(contents(&scratch, image, snapshot) == before, "{name}: other bytes");
            qemu_img(&["check", str(image)]).success();
            command(&["check", str(image)]).success();
        }
        // The image can be used like any other, and be amended back.
        qemu_io("qcow2", &image, &["write -P 7 0 64k", "read -P 7 0 64k"]);
        command(&["amend", "-o", "compat=1.1", str(&image)]).success();
        qemu_img(&["check", str(&image)]).success();
    }
    assert!(std::fs::read(base.path()).expect("the base") == content, "the base has changed");
}

#[test]
fn what_version_2_lacks_stays_as_it_is() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    for (name, options, words) in [
        ("narrow", "refcount_bits=8", "16 bits"),
        ("sub", "extended_l2=on", "subclusters"),
        ("zstd", "compression_type=zstd", "zstd"),
        ("data", "data_file=data.raw", "another file"),
        ("marked", "lazy_refcounts=off", "bitmaps"),
        ("grown", "lazy_refcounts=off", "another size"),
    ] {
        let image = scratch.path(&format!("{name}.qcow2"));
        command(&["create", "-q", "-f", "qcow2", "-o", options, str(&image), "8M"]).success();
        match name {
            "marked" => {
                command(&["bitmap", "add", str(&image), "changes"]).success();
            }
            "grown" => {
                command(&["snapshot", "create", str(&image), "before"]).success();
                command(&["resize", str(&image), "16M"]).success();
            }
            _ => {}
        }
        let refused = command(&["amend", "-o", "compat=0.10", str(&image)]).failure(words);
        assert_eq!(refused.status.code(), Some(1), "{name}");
        assert_eq!(refused.stderr.lines().count(), 1, "{}", refused.describe("one line"));
        assert_eq!(info(&image)["format-specific"]["data"]["compat"], "1.1", "{name}");
        command(&["check", str(&image)]).success();
    }
    let image = scratch.path("plain.qcow2");
    command(&["create", "-q", str(&image), "8M"]).success();
    command(&["amend", "-o", "compat=0.10,lazy_refcounts=on", str(&image)]).failure("version 2");
}

#[test]
fn images_are_named_by_qemus_options() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    command(&["create", "-f", "qcow2", str(&image), "1M"]).success();
    let options = format!("driver=qcow2,file.driver=file,file.filename={}", str(&image));
    let object = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{}"}}}}"#,
        str(&image)
    );
    for words in [&["info", "--image-opts", &options][..], &["info", &object]] {
        let json_words = [words, &["--output=json"]].concat();
        let ours = json(&command(&json_words).success());
        let theirs = json(&qemu_img(&json_words).success());
        for key in ["format", "virtual-size", "cluster-size"] {
            assert_eq!(ours[key], theirs[key], "{words:?} {key}");
        }
    }
    let copy = scratch.path("copy.img");
    command(&["convert", "--image-opts", "-O", "raw", &options, str(&copy)]).success();
    command(&["snapshot", "--image-opts", "-c", "now", &options]).success();
    command(&["resize", "--image-opts", &options, "2M"]).success();
    assert_eq!(json(&command(&["info", "--json", &object]).success())["virtual-size"], 2 << 20);
    let read_only = format!("{options},read-only=on");
    command(&["resize", "--image-opts", &read_only, "3M"]).failure("read-only");
    command(&["info", "--image-opts", "driver=quorum,file.filename=a"]).failure("quorum");
}

#[test]
fn a_chain_is_told_as_qemu_img_tells_it() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let [base, middle, top] =
        ["base.img", "middle.qcow2", "top.qcow2"].map(|name| scratch.path(name));
    command(&["create", str(&base), "1M"]).success();
    command(&["create", "-b", "base.img", "-F", "raw", str(&middle)]).success();
    command(&["snapshot", "-c", "now", str(&middle)]).success();
    command(&["create", "-b", "middle.qcow2", "-F", "qcow2", str(&top)]).success();
    let words = ["info", "--backing-chain", "--output=json", str(&top)];
    let [ours, theirs] =
        [command(&words), qemu_img(&words)].map(|outcome| json(&outcome.success()));
    let [ours, theirs] = [&ours, &theirs].map(|chain| chain.as_array().expect("a list").clone());
    assert_eq!(ours.len(), 3);
    for (ours, theirs) in ours.iter().zip(&theirs) {
        for (key, value) in theirs.as_object().expect("an image") {
            match key.as_str() {
                // Only the type is compared, because the programs report different details.
                "format-specific" => assert_eq!(ours[key]["type"], value["type"]),
                "snapshots" => assert_eq!(ours[key][0]["name"], value[0]["name"]),
                _ => assert_eq!(&ours[key], value, "{key}"),
            }
        }
    }
    let text = command(&["info", "--backing-chain", str(&top)]).success().stdout;
    assert_eq!(text.matches("\nfile format: ").count(), 3, "{text}");
    // A file that the policy refuses is not opened.
    let elsewhere = scratch.path("elsewhere");
    std::fs::create_dir(&elsewhere).expect("a folder");
    let outside = elsewhere.join("outside.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "../base.img", "-F", "raw", str(&outside)])
        .success();
    command(&["info", "--backing-chain", str(&outside)]).failure("--allow-path");
    command(&["info", str(&outside)]).success();
}

#[test]
fn a_map_of_a_part_is_qemu_imgs() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", str(&image), "8M"]).success();
    qemu_io("qcow2", &image, &["write -P 5 1M 1M", "write -P 5 3M 64k"]);
    for (start, length) in [("1536K", "1M"), ("0", "8M"), ("3M", "64K"), ("7M", "2M")] {
        let words = [
            &format!("--start-offset={start}"),
            &format!("--max-length={length}"),
            "--output=json",
            str(&image),
        ];
        let words = [&["map"][..], &words].concat();
        let [ours, theirs] =
            [command(&words), qemu_img(&words)].map(|outcome| json(&outcome.success()));
        let [ours, theirs] = [&ours, &theirs].map(|map| map.as_array().expect("extents").clone());
        assert_eq!(ours.len(), theirs.len(), "{start} {length}: {ours:?} {theirs:?}");
        for (ours, theirs) in ours.iter().zip(&theirs) {
            for key in ["start", "length", "depth", "zero", "data", "offset"] {
                assert_eq!(ours[key], theirs[key], "{start} {length} {key}");
            }
        }
    }
}
