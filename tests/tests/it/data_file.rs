//! Images with an external data file, beside QEMU's tools: each program reads what the other
//! writes, finds no errors and maps it to the same offsets; and what is refused.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use blockhouse_tests::image_tool::{json, qemu_io_in};
use blockhouse_tests::{Outcome, Scratch, blockhouse, need, require, run, tool};
use serde_json::Value;

/// Runs our binary in the image's folder: QEMU resolves a data file relative to its working folder,
/// Blockhouse relative to the image.
fn command(folder: &Path, words: &[&str]) -> Outcome {
    run(Command::new(blockhouse()).current_dir(folder).args(words))
}

fn qemu_img(folder: &Path, words: &[&str]) -> Outcome {
    run(tool("qemu-img").current_dir(folder).args(words))
}

#[track_caller]
fn qemu_io(folder: &Path, image: &str, steps: &[&str]) {
    qemu_io_in(folder, "qcow2", Path::new(image), steps);
}

const SIZE: u64 = (3 << 20) + 512 * 5;
/// Where the source has data.
const WRITTEN: [(u64, u64); 3] = [(70_000, 200_000), (1 << 20, 2 << 20), (SIZE - 512, SIZE)];

/// A raw disk with some data, also in its last sector.
fn source(folder: &Path) -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    for ((start, end), value) in WRITTEN.into_iter().zip(1..) {
        content[start as usize..end as usize].fill(value);
    }
    fs::write(folder.join("source.raw"), &content).expect("a file");
    content
}

const OPTIONS: [&str; 4] = ["", ",cluster_size=512", ",lazy_refcounts=on", ",extended_l2=on"];
const RAW: [&str; 2] = ["", ",data_file_raw=on"];

/// The offsets and host offsets of data in a map, with adjacent parts merged.
fn places(map: &Value) -> Vec<(u64, u64)> {
    let mut places: Vec<(u64, u64)> = Vec::new();
    for part in map.as_array().expect("a list") {
        let number = |key: &str| part[key].as_u64().expect("a number");
        if part["data"] != true || part["zero"] == true {
            continue;
        }
        let (start, end) = (number("start"), number("start") + number("length"));
        assert_eq!(number("offset"), start, "the place in the data file is the guest's offset");
        match places.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => places.push((start, end)),
        }
    }
    places
}

fn both_find_it_good(folder: &Path, what: &str) {
    for outcome in [
        qemu_img(folder, &["check", "-f", "qcow2", "disk.qcow2"]),
        command(folder, &["check", "disk.qcow2"]),
        qemu_img(folder, &["compare", "-f", "qcow2", "-F", "raw", "disk.qcow2", "source.raw"]),
        command(folder, &["compare", "disk.qcow2", "source.raw"]),
    ] {
        assert!(outcome.status.success(), "{}", outcome.describe(what));
    }
}

#[test]
fn what_we_write_to_a_data_file_qemu_reads_and_the_reverse() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    for writer in ["blockhouse", "qemu-img"] {
        for (options, raw) in OPTIONS.iter().flat_map(|one| RAW.map(|raw| (one, raw))) {
            let what = format!("{writer} {options}{raw}");
            let scratch = Scratch::new();
            let path = scratch.path("disk.qcow2");
            let folder = path.parent().expect("a folder");
            let content = source(folder);
            let options = format!("data_file=disk.data{options}{raw}");
            let words = ["convert", "-o", &options, "source.raw", "disk.qcow2"];
            match writer {
                "blockhouse" => command(folder, &words).success(),
                _ => {
                    qemu_img(folder, &[&["convert", "-O", "qcow2"], &words[1..]].concat()).success()
                }
            };
            both_find_it_good(folder, &what);
            let data = fs::read(folder.join("disk.data")).expect("the data file");
            if !raw.is_empty() {
                // QEMU's data file ends with a whole cluster.
                let data =
                    data.get(..content.len()).filter(|_| writer == "qemu-img").unwrap_or(&data);
                assert!(data == content, "{what}: the data file is not the raw disk");
            }
            let info = json(&command(folder, &["info", "--json", "disk.qcow2"]).success());
            let theirs = qemu_img(folder, &["info", "--output=json", "disk.qcow2"]).success();
            let theirs = json(&theirs);
            assert_eq!(info["actual-size"], theirs["actual-size"], "{what}");
            for key in ["data-file", "data-file-raw", "compat", "lazy-refcounts", "extended-l2"] {
                let at = |value: &Value| value["format-specific"]["data"][key].clone();
                assert_eq!(at(&info), at(&theirs), "{what}: {key}");
            }
            let ours = json(&command(folder, &["map", "--json", "disk.qcow2"]).success());
            let text = command(folder, &["map", "disk.qcow2"]).success().stdout;
            let mut lines = text.lines().skip(1);
            assert!(lines.all(|line| line.ends_with("disk.data")), "{what}: {text}");
            let theirs = qemu_img(folder, &["map", "--output=json", "disk.qcow2"]).success();
            for (map, whose) in [(&ours, "ours"), (&json(&theirs), "theirs")] {
                for (start, end) in WRITTEN {
                    let covers = |&(from, to): &(u64, u64)| from <= start && end <= to;
                    let has_it = places(map).iter().any(covers);
                    assert!(has_it, "{what}: {whose} lacks {start} to {end}: {map}");
                }
            }
        }
    }
}

#[test]
fn qemu_goes_on_where_we_stopped_and_the_reverse() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    for raw in RAW {
        let scratch = Scratch::new();
        let path = scratch.path("disk.qcow2");
        let folder = path.parent().expect("a folder");
        let mut content = source(folder);
        let options = format!("data_file=disk.data{raw}");
        command(folder, &["convert", "-o", &options, "source.raw", "disk.qcow2"]).success();
        qemu_io(
            folder,
            "disk.qcow2",
            &["write -P 9 64k 10k", "write -z 1M 256k", "discard 1536k 64k"],
        );
        content[65_536..][..10 << 10].fill(9);
        content[1 << 20..][..256 << 10].fill(0);
        content[1536 << 10..][..64 << 10].fill(0);
        let longer = 4 << 20;
        command(folder, &["resize", "disk.qcow2", "4M"]).success();
        content.resize(longer, 0);
        fs::write(folder.join("source.raw"), &content).expect("a file");
        both_find_it_good(folder, raw);
        command(folder, &["resize", "--shrink", "disk.qcow2", "1M"]).success();
        content.truncate(1 << 20);
        fs::write(folder.join("source.raw"), &content).expect("a file");
        both_find_it_good(folder, raw);
        if !raw.is_empty() {
            let data = fs::read(folder.join("disk.data")).expect("the data file");
            assert!(data == content, "the data file is not the raw disk");
        }
        // Bytes that a shrink has cut off do not reappear.
        command(folder, &["resize", "disk.qcow2", "4M"]).success();
        content.resize(longer, 0);
        fs::write(folder.join("source.raw"), &content).expect("a file");
        both_find_it_good(folder, raw);
    }
}

#[test]
fn a_data_file_is_found_beside_its_image() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let folder = path.parent().expect("a folder");
    let image = path.to_str().expect("a plain name");
    source(folder);
    command(folder, &["convert", "-o", "data_file=disk.data", "source.raw", "disk.qcow2"])
        .success();
    let raw = folder.join("source.raw");
    command(Path::new("/"), &["compare", image, raw.to_str().expect("a plain name")]).success();
}

#[test]
fn a_data_file_gets_another_name_and_both_programs_find_it() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let folder = scratch.path("");
    let create = ["create", "-f", "qcow2", "-o", "data_file=first.raw,data_file_raw=on"];
    command(&folder, &[&create[..], &["disk.qcow2", "1M"]].concat()).success();
    qemu_io(&folder, "disk.qcow2", &["write -P 7 0 64k"]);
    let long = "l".repeat(600);
    for (name, said) in [(&*long, "no room"), ("", "1 to 1023")] {
        let option = format!("data_file={name}");
        command(&folder, &["amend", "-o", &option, "disk.qcow2"]).failure(said);
    }
    // A data file whose name has nothing in common with the image's is written to, too.
    command(&folder, &["amend", "-o", "data_file=second.raw", "disk.qcow2"]).success();
    fs::rename(folder.join("first.raw"), folder.join("second.raw")).expect("it is there");
    qemu_io(&folder, "disk.qcow2", &["read -P 7 0 64k", "write -P 8 64k 64k"]);
    let told = qemu_img(&folder, &["info", "disk.qcow2"]).success().stdout;
    assert!(told.contains("data file: second.raw"), "{told}");
    command(&folder, &["resize", "disk.qcow2", "2M"]).success();
    fs::copy(folder.join("second.raw"), folder.join("source.raw")).expect("a copy");
    both_find_it_good(&folder, "after another name");
    command(&folder, &["create", "-f", "qcow2", "plain.qcow2", "1M"]).success();
    command(&folder, &["amend", "-o", "data_file=x.raw", "plain.qcow2"]).failure("cannot change");
}

#[test]
fn what_cannot_be_a_data_file_is_refused() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let folder = path.parent().expect("a folder");
    let create = |options: &str| command(folder, &["create", "-o", options, "disk.qcow2", "1M"]);
    create("data_file=nbd://host/disk").failure("address");
    create("data_file_raw=on").failure("data_file_raw without data_file");
    create("data_file=disk.data,compat=0.10").failure("version 2");
    create("data_file=disk.qcow2").failure("disk.qcow2");
    assert!(!path.exists(), "a command that fails leaves no file");
    fs::write(folder.join("precious"), b"data").expect("a file");
    create("data_file=precious").failure("precious");
    assert_eq!(fs::read(folder.join("precious")).expect("still there"), b"data");
    assert!(!path.exists(), "a command that fails leaves no file");

    create("data_file=disk.data").success();
    let compressed = ["convert", "-c", "-o", "data_file=c.data", "disk.qcow2", "c.qcow2"];
    fs::write(folder.join("full.raw"), vec![7; 1 << 20]).expect("a file");
    let words = [&compressed[..4], &["full.raw", "c.qcow2"]].concat();
    command(folder, &words).failure("compressed");
    // The image itself cannot be its data file.
    fs::remove_file(folder.join("disk.data")).expect("it was there");
    command(folder, &["map", "disk.qcow2"]).failure("disk.data");
    fs::hard_link(&path, folder.join("disk.data")).expect("a link");
    command(folder, &["map", "disk.qcow2"]).failure("already in its chain");
}

#[test]
fn what_others_write_to_a_raw_data_file_is_read_also_where_the_disk_became_longer() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let folder = path.parent().expect("a folder");
    // The data file is longer than the disk, and has data after the disk's end.
    let options = "data_file=disk.data,data_file_raw=on";
    command(folder, &["create", "-o", options, "disk.qcow2", "1M"]).success();
    command(folder, &["resize", "--shrink", "disk.qcow2", "66048"]).success();
    let data = folder.join("disk.data");
    assert_eq!(fs::metadata(&data).expect("the data file").len(), 66_048);
    fs::write(&data, vec![7; 200_000]).expect("the data file");
    command(folder, &["resize", "disk.qcow2", "700M"]).success();
    let mut content = vec![7; 66_048];
    content.resize(700 << 20, 0);
    assert!(fs::read(&data).expect("the data file") == content);
    for start in [100_000, 599 << 20] {
        content[start..start + 5000].fill(8);
    }
    fs::write(&data, &content).expect("the data file");
    fs::rename(&data, folder.join("source.raw")).expect("another name");
    fs::write(&data, &content).expect("the data file");
    both_find_it_good(folder, "written by somebody else");
}

#[test]
fn the_space_of_a_data_file_is_taken_at_once() {
    require!(need::tools(&["qemu-img"]));
    let size = 8 << 20;
    for kind in ["metadata", "falloc", "full"] {
        let scratch = Scratch::new();
        let path = scratch.path("disk.qcow2");
        let folder = path.parent().expect("a folder");
        let options = format!("data_file=disk.data,preallocation={kind}");
        let outcome = command(folder, &["create", "-o", &options, "disk.qcow2", "8M"]);
        if kind == "falloc" && outcome.stderr.contains("set space aside") {
            assert!(!path.exists() && !folder.join("disk.data").exists());
            eprintln!("SKIPPED: {kind}: this file system sets no space aside");
            continue;
        }
        outcome.success();
        let taken = fs::metadata(folder.join("disk.data")).expect("the data file").blocks() * 512;
        assert_eq!(taken >= size, kind != "metadata", "{kind}: {taken}");
        let check = ["check", "--output=json", "-f", "qcow2", "disk.qcow2"];
        let report = json(&qemu_img(folder, &check).success());
        assert_eq!(report["allocated-clusters"], report["total-clusters"], "{kind}");
        fs::write(folder.join("source.raw"), vec![0; size as usize]).expect("a file");
        both_find_it_good(folder, kind);
    }
}

/// Makes an overlay whose data is in `disk.data`, over an image whose data is in `base.data`; QEMU
/// makes both.
fn overlay(folder: &Path, options: &str) {
    let create = |image: &str, options: &str| {
        qemu_img(folder, &["create", "-f", "qcow2", "-o", options, image, "3M"]).success();
    };
    create("base.qcow2", "data_file=base.data");
    qemu_io(folder, "base.qcow2", &["write -P 1 0 1M", "write -P 2 2M 300k"]);
    let over = "data_file=disk.data,backing_file=base.qcow2,backing_fmt=qcow2";
    create("disk.qcow2", &format!("{over}{options}"));
    let steps = ["write -P 3 1000k 500k", "write -z 2M 128k", "write -P 4 10k 3k"];
    qemu_io(folder, "disk.qcow2", &steps);
    qemu_img(folder, &["convert", "-O", "raw", "disk.qcow2", "source.raw"]).success();
}

#[test]
fn overlays_with_data_files_are_committed_and_rebased() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    for options in ["", ",cluster_size=512", ",extended_l2=on"] {
        let scratch = Scratch::new();
        let path = scratch.path("disk.qcow2");
        let folder = path.parent().expect("a folder");
        overlay(folder, options);
        both_find_it_good(folder, "before");
        command(folder, &["commit", "disk.qcow2"]).success();
        both_find_it_good(folder, "committed");
        let compare = ["compare", "-F", "raw", "base.qcow2", "source.raw"];
        qemu_img(folder, &compare).success();
        qemu_img(folder, &["check", "base.qcow2"]).success();
        let map = json(&qemu_img(folder, &["map", "--output=json", "disk.qcow2"]).success());
        let own = |part: &Value| part["depth"] == 0 && part["data"] == true;
        assert!(!map.as_array().expect("a list").iter().any(own), "{map}");

        fs::write(folder.join("other.raw"), vec![9; 2 << 20]).expect("a file");
        command(folder, &["rebase", "-b", "other.raw", "-F", "raw", "disk.qcow2"]).success();
        both_find_it_good(folder, "rebased");
        command(folder, &["rebase", "disk.qcow2"]).success();
        both_find_it_good(folder, "standing alone");
    }
}

#[test]
fn an_image_with_a_raw_data_file_gets_no_backing_file() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let folder = path.parent().expect("a folder");
    let options = "data_file=disk.data,data_file_raw=on";
    command(folder, &["create", "-o", options, "disk.qcow2", "1M"]).success();
    fs::write(folder.join("base.raw"), vec![9; 1 << 20]).expect("a file");
    for way in [&["rebase"][..], &["rebase", "-u"]] {
        let words = [way, &["-b", "base.raw", "-F", "raw", "disk.qcow2"]].concat();
        command(folder, &words).failure("its data file is the raw disk");
    }
}

#[test]
fn snapshots_and_states_are_refused_as_qemu_does() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let folder = path.parent().expect("a folder");
    command(folder, &["create", "-o", "data_file=disk.data", "disk.qcow2", "1M"]).success();
    let before = fs::read(&path).expect("the image");
    qemu_img(folder, &["snapshot", "-c", "one", "disk.qcow2"]).failure("");
    for words in [
        &["snapshot", "create", "disk.qcow2", "one"][..],
        &["snapshot", "apply", "disk.qcow2", "one"],
        &["snapshot", "delete", "disk.qcow2", "one"],
        &["snapshot", "rename", "disk.qcow2", "one", "two"],
        &["vmstate", "save", "disk.qcow2", "one"],
    ] {
        let outcome = command(folder, words).failure("data file");
        assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe("refused"));
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
    }
    let listed = command(folder, &["snapshot", "list", "disk.qcow2"]).success();
    assert_eq!(listed.stdout, "");
    assert!(fs::read(&path).expect("the image") == before, "a refusal changes nothing");
}

#[test]
fn leaks_beside_a_data_file_are_repaired() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let folder = path.parent().expect("a folder");
    source(folder);
    let options = "data_file=disk.data,lazy_refcounts=on";
    command(folder, &["convert", "-o", options, "source.raw", "disk.qcow2"]).success();
    // Sets a refcount of 1 for a cluster after the last table.
    let mut image = fs::read(&path).expect("the image");
    let table = u64::from_be_bytes(image[48..56].try_into().expect("8 bytes")) as usize;
    let block = u64::from_be_bytes(image[table..table + 8].try_into().expect("8 bytes")) as usize;
    let count = image.len().div_ceil(65_536);
    image[block + 2 * count + 1] = 1;
    image.resize((count + 1) * 65_536, 0);
    fs::write(&path, image).expect("the image");
    let outcome = command(folder, &["check", "disk.qcow2"]);
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.describe("a leak"));
    let data = fs::read(folder.join("disk.data")).expect("the data file");
    command(folder, &["check", "--repair", "leaks", "disk.qcow2"]).success();
    both_find_it_good(folder, "repaired");
    assert!(fs::read(folder.join("disk.data")).expect("the data file") == data);
}
