//! `create`, `info` and `resize`; and failing standard output, for all commands that print.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use blockhouse_tests::nbd::Client;
use blockhouse_tests::{
    LoopDevice, Outcome, Scratch, Serve, blockhouse,
    image_tool::{command, json, new_image, qemu_img, str},
    need, require, run, tool,
};
use serde_json::Value;

/// Asserts a failure with one line that has all these words.
#[track_caller]
fn assert_failed(outcome: &Outcome, words: &[&str]) {
    let said = outcome.describe("one line is expected");
    assert_eq!(outcome.status.code(), Some(1), "{said}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{said}");
    for word in words {
        assert!(outcome.stderr.contains(word), "{word:?}: {said}");
    }
}

#[test]
fn a_new_image_has_its_size_and_takes_no_room() {
    let scratch = Scratch::new();
    for (size, bytes) in [("512", 512), ("64K", 65536), ("20G", 20 << 30), ("1T", 1 << 40)] {
        let image = scratch.path(size);
        command(&["create", str(&image), size]).success();
        let metadata = image.metadata().expect("it is there");
        assert_eq!(metadata.len(), bytes);
        assert!(metadata.blocks() <= 8, "{} blocks", metadata.blocks());
    }
}

#[test]
fn a_new_image_is_its_owners_alone() {
    let scratch = Scratch::new();
    let [raw, qcow2, outer, data, copy] =
        ["disk.img", "disk.qcow2", "outer.qcow2", "data.img", "copy.img"]
            .map(|name| scratch.path(name));
    command(&["create", str(&raw), "1M"]).success();
    command(&["create", str(&qcow2), "1M"]).success();
    command(&["create", "-o", "data_file=data.img", str(&outer), "1M"]).success();
    command(&["convert", str(&qcow2), str(&copy)]).success();
    let served = scratch.path("served.img");
    Serve::new(&scratch, &served).option("--create", "1M").start().stop();
    for image in [&raw, &qcow2, &outer, &data, &copy, &served] {
        let mode = image.metadata().expect("it is there").mode() & 0o777;
        assert_eq!(mode, 0o600, "{}: {mode:o}", image.display());
    }
}

/// Callers of qemu-img give images to programs of other users.
#[test]
fn under_qemu_imgs_name_a_new_image_has_the_mode_of_qemu_imgs() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let ours = scratch.path("qemu-img");
    std::os::unix::fs::symlink(blockhouse(), &ours).expect("a link");
    let modes_of = |program: &Path, folder: &Path, umask: &str| {
        std::fs::create_dir(folder).expect("a new folder");
        let script = "umask $2 && \"$1\" create -q -f raw raw 1M && \"$1\" create -q -f qcow2 \
            -o data_file=data qcow2 1M && \"$1\" convert -O qcow2 raw copy && \"$1\" convert -O vmdk raw \
            vmdk && \"$1\" create -q -f vmdk -o subformat=twoGbMaxExtentFlat split.vmdk 1M && \
            \"$1\" dd if=raw of=dd && stat -c '%n %a' *";
        let mut shell = tool("sh");
        shell.args(["-c", script, "sh"]).arg(program).arg(umask).current_dir(folder);
        run(&mut shell).success().stdout
    };
    for umask in ["022", "002", "077"] {
        let [mine, theirs] = ["ours", "theirs"].map(|name| scratch.path(&format!("{name}{umask}")));
        let expected = modes_of(Path::new("qemu-img"), &theirs, umask);
        assert_eq!(modes_of(&ours, &mine, umask), expected, "umask {umask}");
    }
}

#[test]
fn a_size_to_create_is_rounded_up_to_whole_sectors() {
    let scratch = Scratch::new();
    for name in ["new.qcow2", "new.img"] {
        let path = scratch.path(name);
        let outcome = command(&["create", str(&path), "1000"]).success();
        assert!(outcome.stderr.contains("1024 bytes"), "{}", outcome.describe("must say so"));
        let info = json(&command(&["info", "--json", str(&path)]).success());
        assert_eq!(info["virtual-size"], 1024, "{info}");
    }
}

#[test]
fn a_qcow2_size_with_a_part_of_a_sector_is_rounded_down_as_by_qemu() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = new_image(&scratch, "odd.qcow2", "1M");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("an image");
    file.write_all_at(&((1_u64 << 20) - 100).to_be_bytes(), 24).expect("it can be written");
    let ours = json(&command(&["info", "--json", str(&path)]).success());
    let theirs = json(&qemu_img(&["info", "--output=json", str(&path)]).success());
    assert_eq!(ours["virtual-size"], theirs["virtual-size"], "{ours}");
    let text = command(&["info", str(&path)]).success();
    assert!(text.stdout.contains("1048476 bytes"), "{}", text.describe("must say so"));
    command(&["check", str(&path)]).success();
    command(&["resize", str(&path), "2M"]).success();
    qemu_img(&["check", str(&path)]).success();
}

#[test]
fn an_existing_file_is_left_alone() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[1; 512]);
    let before = image.state();
    for size in ["512", "1M"] {
        let outcome = command(&["create", image.str(), size]);
        assert_failed(&outcome, &["disk.img", "exists", "another name"]);
        assert_eq!(image.state(), before);
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    for size in ["1.5", "1GB", "9E", "64k b", "", "x"] {
        let outcome = command(&["create", str(&image), size]);
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe(size));
    }
    assert!(!image.exists());
}

#[test]
fn formats_that_are_not_there_are_refused() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.hdd");
    let outcome = command(&["create", "--format", "parallels", str(&image), "1M"]);
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("parallels"));
    assert!(!image.exists());
}

#[test]
fn a_raw_image_does_not_get_the_name_of_another_format_silently() {
    let scratch = Scratch::in_memory();
    let source = scratch.image("source.img", 1 << 20);
    for name in ["a.qcow", "a.QCOW"] {
        let path = scratch.path(name);
        for words in [&["create", str(&path), "1M"], &["convert", source.str(), str(&path)]] {
            let outcome = command(words);
            assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe(name));
            assert!(outcome.stderr.contains("--format raw"), "{}", outcome.describe(name));
            assert!(!path.exists(), "{name} was made");
        }
        command(&["create", "--format", "raw", str(&path), "1M"]).success();
        std::fs::remove_file(&path).expect("it was made as it was asked for");
        command(&["convert", "--format", "raw", source.str(), str(&path)]).success();
    }
    let upper = new_image(&scratch, "a.QCOW2", "1M");
    assert_eq!(std::fs::read(&upper).expect("an image")[..4], *b"QFI\xfb");
    let other = new_image(&scratch, "a.VMDK", "1M");
    assert_eq!(std::fs::read(&other).expect("an image")[..4], *b"KDMV");
}

#[test]
fn an_image_of_another_format_is_called_by_its_name() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    for format in ["parallels", "qed"] {
        let image = scratch.path(&format!("{format}.img"));
        qemu_img(&["create", "-f", format, str(&image), "4M"]).success();
        let advice = format!("qemu-img convert -f {format} -O qcow2");
        assert_failed(
            &command(&["info", str(&image)]),
            &[&advice, "that you trust", "--format raw"],
        );
    }
    for format in ["vdi", "vpc", "vhdx", "vmdk"] {
        let image = scratch.path(&format!("{format}.img"));
        qemu_img(&["create", "-f", format, str(&image), "4M"]).success();
        let advice = format!("--format {format}");
        assert_failed(&command(&["info", str(&image)]), &[&advice, "--format raw"]);
    }
    let qcow2 = scratch.path("cloud.img");
    qemu_img(&["create", "-f", "qcow2", str(&qcow2), "4M"]).success();
    for words in [&["info", str(&qcow2)][..], &["resize", str(&qcow2), "8M"]] {
        assert_failed(&command(words), &["--format qcow2"]);
    }
    // Formats that are recognized by their last sector.
    for (name, end) in [("a.dmg", &b"koly"[..]), ("a.vhd", b"conectix"), ("a.img", b"koly")] {
        let mut content = vec![0; 8192];
        content[8192 - 512..][..end.len()].copy_from_slice(end);
        let image = scratch.image_of(name, &content);
        match name {
            "a.img" => drop(command(&["info", image.str()]).success()),
            "a.vhd" => assert_failed(&command(&["info", image.str()]), &["checksum"]),
            _ => assert_failed(&command(&["info", image.str()]), &["not supported"]),
        }
    }
}

#[test]
fn a_raw_file_that_ends_inside_a_sector_is_a_disk_of_whole_sectors() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.image_of("odd.img", &[3; 5000]);
    let info = json(&command(&["info", "--json", image.str()]).success());
    assert_eq!(info["virtual-size"], 5120);
    command(&["map", image.str()]).success();
    command(&["check", image.str()]);
    let copy = scratch.path("copy.qcow2");
    command(&["convert", image.str(), str(&copy)]).success();
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", image.str(), str(&copy)]).success();
    command(&["compare", image.str(), str(&copy)]).success();
    let over = scratch.path("over.qcow2");
    let options = format!("backing_file={},backing_fmt=raw", image.str());
    command(&["create", "-o", &options, str(&over), "5120"]).success();
    command(&["rebase", "--no-backing", str(&over)]).success();
    command(&["compare", image.str(), str(&over)]).success();
    assert_eq!(image.content(), [3; 5000], "looking at it makes no file longer");
    for cache in ["none", "writeback"] {
        let image = scratch.image_of(&format!("{cache}.img"), &[3; 5000]);
        let server = Serve::new(&scratch, image.path()).option("--cache", cache).start();
        let mut client = Client::open(&server.address());
        assert_eq!(client.size(), 5120);
        let mut expected = vec![3; 5000];
        expected.resize(5120, 0);
        assert_eq!(client.read(0, 5120), Ok(expected.clone()), "{cache}");
        assert_eq!(client.write(5100, &[7; 20], 0), 0, "{cache}");
        expected[5100..].fill(7);
        assert_eq!(client.read(0, 5120), Ok(expected.clone()), "{cache}");
        client.disconnect();
        server.stop();
        assert_eq!(image.content(), expected, "{cache}");
    }
    command(&["resize", image.str(), "8K"]).success();
    assert_eq!(image.content().len(), 8192);
}

#[test]
fn a_mistyped_device_does_not_become_a_file_among_the_devices() {
    let scratch = Scratch::new();
    let source = scratch.image("source.img", 1 << 20);
    let typo = format!("/dev/blockhouse-test-{}", std::process::id());
    let part = format!("{typo}.part");
    for words in [
        &["convert", source.str(), &typo][..],
        &["convert", "--force", source.str(), &typo],
        &["create", &typo, "1M"],
    ] {
        let outcome = command(words);
        let is_there = [&typo, &part].map(|name| std::fs::remove_file(name).is_ok());
        assert_eq!(is_there, [false, false], "{}", outcome.describe("a file was made"));
        assert_failed(&outcome, &[&typo, "no such device"]);
    }
}

#[test]
fn only_what_can_be_served_for_reading_is_advised_to_be() {
    let scratch = Scratch::new();
    let (wrapper, binary) = require!(need::nobody(scratch.short(), blockhouse()));
    let image = scratch.socket("disk.img");
    std::fs::write(&image, [1; 512]).expect("a file");
    let mode = std::fs::Permissions::from_mode(0o444);
    std::fs::set_permissions(&image, mode).expect("it is ours");
    let mut resize = Command::new(&wrapper[0]);
    resize.args(&wrapper[1..]).arg(&binary).args(["resize", str(&image), "1K"]);
    let outcome = run(&mut resize);
    assert_failed(&outcome, &["disk.img", "Permission denied", "check its permissions"]);
    assert!(!outcome.stderr.contains("--read-only"), "{}", outcome.describe("no such option"));
}

#[test]
fn a_raw_image_in_spite_of_its_name() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    command(&["create", "--format", "raw", str(&image), "1M"]).success();
    command(&["info", "--format", "raw", str(&image)]).success();
    assert_failed(&command(&["info", str(&image)]), &["disk.qcow2", "qcow2", "--format raw"]);
}

#[test]
fn info_has_the_keys_and_values_of_qemu_img() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    let info = |outcome: Outcome| -> Value {
        serde_json::from_str(&outcome.success().stdout).expect("JSON")
    };
    let ours = info(command(&["info", "--json", image.str()]));
    let theirs = ["info", "-f", "raw", "--output=json", image.str()];
    let theirs = info(run(tool("qemu-img").args(theirs)));
    for key in ["filename", "format", "virtual-size", "actual-size", "dirty-flag"] {
        assert!(!theirs[key].is_null(), "qemu-img has no {key}");
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert_eq!(ours["blockhouse"]["fua"], "native");
    let text = command(&["info", image.str()]).success().stdout;
    assert!(text.contains("virtual size: 1 MiB (1048576 bytes)"), "{text}");
}

#[test]
fn info_of_nothing_is_an_error() {
    let scratch = Scratch::new();
    let missing = scratch.path("missing.img");
    assert_failed(&command(&["info", str(&missing)]), &["missing.img", "No such file"]);
}

#[test]
fn a_longer_image_keeps_its_content_and_ends_with_zeros() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[3; 1024]);
    command(&["resize", image.str(), "8K"]).success();
    let content = image.content();
    assert_eq!(content.len(), 8192);
    assert_eq!(content[..1024], [3; 1024]);
    assert!(content[1024..].iter().all(|byte| *byte == 0));
}

#[test]
fn an_image_is_not_made_shorter() {
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[3; 8192]);
    let before = image.state();
    let outcome = command(&["resize", image.str(), "4K"]);
    assert_failed(&outcome, &["disk.img", "8192", "shorter", "--shrink"]);
    assert_failed(&command(&["resize", image.str(), "9000"]), &["disk.img", "512"]);
    assert_eq!(image.state(), before);
}

#[test]
fn a_device_cannot_be_resized() {
    let scratch = Scratch::new();
    let image = scratch.image("backing", 1 << 20);
    let device = require!(LoopDevice::over(&image, &[]));
    let outcome = command(&["resize", str(device.path()), "2M"]);
    assert_failed(&outcome, &[str(device.path())]);
}

/// Commands that print, each as text and, if possible, as JSON, with the exit status if the output
/// fails.
fn printing(image: &str) -> Vec<(Vec<&str>, i32)> {
    let mut lines = Vec::new();
    for (words, status) in [
        (vec!["info", image], 1),
        (vec!["map", image], 1),
        (vec!["check", image], 1),
        (vec!["snapshot", "list", image], 1),
        // The status is 2, because 1 means that the images differ.
        (vec!["compare", image, image], 2),
    ] {
        lines.push(([&words[..], &["--json"]].concat(), status));
        lines.push((words, status));
    }
    lines.push((vec!["--help"], 1));
    lines.push((vec!["serve", "--help"], 1));
    lines
}

fn printed_to(words: &[&str], output: impl Into<Stdio>) -> Output {
    let mut command = Command::new(blockhouse());
    command.args(words).stdin(Stdio::null()).stdout(output).output().expect("it starts")
}

#[test]
fn a_result_that_cannot_be_printed_is_an_error() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "1M");
    command(&["snapshot", "create", str(&image), "one"]).success();
    for (words, status) in printing(str(&image)) {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("it is always there");
        let outcome = printed_to(&words, full);
        let error = String::from_utf8_lossy(&outcome.stderr);
        assert_eq!(outcome.status.code(), Some(status), "{words:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{words:?}: {error}");
        assert!(error.contains("standard output: ") && error.contains("No space"), "{error}");
    }
}

#[test]
fn a_reader_that_is_gone_ends_a_command_without_a_word() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "1M");
    command(&["snapshot", "create", str(&image), "one"]).success();
    for (words, _) in printing(str(&image)) {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let outcome = printed_to(&words, writer);
        assert_eq!(outcome.status.code(), Some(0), "{words:?}: {:?}", outcome.status);
        assert_eq!(String::from_utf8_lossy(&outcome.stderr), "", "{words:?}");
    }
}

#[test]
fn errors_that_cannot_be_printed_leave_the_status_as_it_is() {
    let scratch = Scratch::new();
    let missing = scratch.path("missing.qcow2");
    let full = OpenOptions::new().write(true).open("/dev/full").expect("it is always there");
    let mut command = Command::new(blockhouse());
    command.args(["info", str(&missing)]).stdout(Stdio::null()).stderr(full);
    let status = command.status().expect("it starts");
    assert_eq!(status.code(), Some(1), "{status}");
}

#[test]
fn images_open_without_proc() {
    let wrapper = require!(need::without_proc());
    let scratch = Scratch::new();
    for name in ["disk.img", "disk.qcow2"] {
        let image = scratch.path(name);
        let copy = scratch.path(&format!("copy-{name}"));
        let lines = [
            vec!["create", str(&image), "1M"],
            vec!["info", str(&image)],
            vec!["map", str(&image)],
            vec!["resize", str(&image), "2M"],
            vec!["convert", str(&image), str(&copy)],
            vec!["compare", str(&image), str(&copy)],
        ];
        for words in lines {
            let mut command = Command::new(&wrapper[0]);
            run(command.args(&wrapper[1..]).arg(blockhouse()).args(words)).success();
        }
        let server = Serve::new(&scratch, &image).under(&wrapper).start();
        let mut client = Client::open(&server.address());
        assert_eq!(client.write(1000, &[7; 5000], 0), 0);
        assert_eq!(client.read(1000, 5000), Ok(vec![7; 5000]));
        client.disconnect();
        server.stop();
    }
}
