//! `snapshot` and `serve --snapshot`, compared with qemu-img on the same images.

use blockhouse_tests::{
    Scratch, Serve,
    image_tool::{command, qemu_img, qemu_io, str},
    need, require, run, tool,
};
use serde_json::Value;

fn write(image: &str, pattern: u8, place: &str) {
    let command = format!("write -P {pattern} {place}");
    run(tool("qemu-io").args(["-f", "qcow2", "-c", &command, image])).success();
}

fn names(image: &str) -> Vec<String> {
    let listed = command(&["snapshot", "list", "--json", image]).success().stdout;
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let name = |one: &Value| one["name"].as_str().expect("a name").to_owned();
    listed.as_array().expect("a list").iter().map(name).collect()
}

#[test]
fn snapshots_of_both_programs_are_snapshots_of_the_other() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "64M"]).success();
    write(image, 1, "0 8M");
    command(&["snapshot", "create", image, "ours"]).success();
    write(image, 2, "4M 8M");
    qemu_img(&["snapshot", "-c", "theirs", image]).success();
    write(image, 3, "1M 12M");
    assert_eq!(names(image), ["ours", "theirs"]);
    qemu_img(&["check", image]).success();

    let seen = scratch.path("seen.qcow2");
    std::fs::copy(&path, &seen).expect("a copy");
    command(&["snapshot", "apply", image, "theirs"]).success();
    qemu_img(&["snapshot", "-a", "theirs", str(&seen)]).success();
    qemu_img(&["compare", image, str(&seen)]).success();
    qemu_img(&["snapshot", "-a", "ours", image]).success();
    command(&["snapshot", "apply", str(&seen), "ours"]).success();
    qemu_img(&["compare", image, str(&seen)]).success();
    command(&["snapshot", "rename", image, "theirs", "kept"]).success();
    command(&["snapshot", "delete", image, "ours"]).success();
    assert_eq!(names(image), ["kept"]);
    for image in [image, str(&seen)] {
        qemu_img(&["check", image]).success();
        command(&["check", image]).success();
    }
}

#[test]
fn what_lies_after_the_disk_goes_into_a_snapshot_and_never_to_a_guest() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "64M"]).success();
    qemu_io("qcow2", &path, &["write -b -P 17 1T 64k", "write -b -P 18 0 64k"]);
    command(&["snapshot", "create", image, "one"]).success();
    qemu_io("qcow2", &path, &["write -b -P 19 1T 64k", "write -P 20 0 64k"]);
    command(&["snapshot", "apply", image, "one"]).success();
    qemu_io("qcow2", &path, &["read -b -P 17 1T 64k", "read -b -P 18 0 64k", "read -P 0 0 64k"]);
    command(&["resize", image, "1G"]).success();
    qemu_io("qcow2", &path, &["read -P 0 512M 512M"]);
    command(&["snapshot", "apply", image, "one"]).success();
    qemu_io("qcow2", &path, &["read -b -P 17 1T 64k"]);
    command(&["snapshot", "delete", image, "one"]).success();
    qemu_img(&["check", image]).success();
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "1M"]).success();
    command(&["snapshot", "create", image, "one"]).success();
    let raw = scratch.image("disk.img", 1 << 20);
    let cases: [(&[&str], &[&str]); 4] = [
        (&["create", image, "one"], &["disk.qcow2", "'one'", "already", "another name"]),
        (&["delete", image, "two"], &["disk.qcow2", "no snapshot 'two'", "snapshot list"]),
        (&["create", image, ""], &["disk.qcow2", "1 to 255"]),
        (&["create", raw.str(), "one"], &["disk.img", "raw image has no snapshots"]),
    ];
    for (words, expected) in cases {
        let outcome = command(&[&["snapshot"], words].concat());
        let said = outcome.describe("one line is expected");
        assert_eq!(outcome.status.code(), Some(1), "{said}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{said}");
        for word in expected {
            assert!(outcome.stderr.contains(word), "{word:?}: {said}");
        }
    }
}

#[test]
fn a_snapshot_is_served_for_reading() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "16M"]).success();
    write(image, 1, "0 8M");
    let before = scratch.path("before.raw");
    qemu_img(&["convert", "-O", "raw", image, str(&before)]).success();
    command(&["snapshot", "create", image, "one"]).success();
    write(image, 2, "4M 8M");
    let server = Serve::new(&scratch, &path).option("--snapshot", "one").start();
    let uri = server.uri().to_owned();
    qemu_img(&["compare", "-f", "raw", "-F", "raw", str(&before), &uri]).success();
    let refused = run(tool("qemu-io").args(["-f", "raw", "-c", "write 0 4k", &uri]));
    assert!(!refused.status.success(), "{}", refused.describe("it is read-only"));
    server.stop();
    let refusal = Serve::new(&scratch, &path).option("--snapshot", "two").refused();
    refusal.failed(&["disk.qcow2", "no snapshot 'two'"]);
}
