//! What an image may name: images of strangers, whose names lead all over the host.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use blockhouse_tests::{
    Outcome, Scratch, Serve,
    image_tool::{command, qemu_img, str},
    need, require,
};

const REASON: &str = "--allow-path";

/// A tenant's folder with an overlay and an image with a data file, beside another tenant's folder.
struct Host {
    scratch: Scratch,
}

impl Host {
    fn new() -> Self {
        let scratch = Scratch::new();
        for folder in ["own/below", "other"] {
            fs::create_dir_all(scratch.path(folder)).unwrap();
        }
        for file in ["own/base.raw", "own/below/base.raw", "other/base.raw"] {
            fs::write(scratch.path(file), vec![7; 1 << 20]).unwrap();
        }
        Self { scratch }
    }

    fn image(&self) -> PathBuf {
        self.scratch.path("own/disk.qcow2")
    }

    /// Makes an image that names this as its backing file.
    fn backed_by(&self, name: &str) -> PathBuf {
        let image = self.image();
        let _ = fs::remove_file(&image);
        // QEMU's own tool asks for no proof that the file is there.
        let words =
            ["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", str(&image), "1M"];
        qemu_img(&words).success();
        image
    }

    /// Makes an image that names this as its data file.
    fn with_data_in(&self, name: &str) -> PathBuf {
        let image = self.image();
        let _ = fs::remove_file(&image);
        let first = "a".repeat(name.len());
        let data = self.scratch.path("own").join(&first);
        let options = format!("data_file={}", str(&data));
        command(&["create", "-o", &format!("data_file={first}"), str(&image), "1M"]).success();
        let _ = (fs::remove_file(&data), options);
        // The same image with another name of the same length.
        let mut bytes = fs::read(&image).unwrap();
        let at = bytes.windows(first.len()).rposition(|part| part == first.as_bytes());
        let at = at.expect("the name is in the header");
        bytes[at..at + first.len()].copy_from_slice(name.as_bytes());
        fs::write(&image, bytes).unwrap();
        image
    }
}

/// Every command that opens what an image names, each as its words.
fn commands(image: &str, target: &str) -> Vec<Vec<String>> {
    let words = [
        format!("map {image}"),
        format!("convert {image} {target}"),
        format!("compare {image} {image}.other"),
        format!("resize {image} 2M"),
        format!("commit {image}"),
        format!("rebase {image}"),
        format!("vmstate save {image} one"),
    ];
    words.iter().map(|words| words.split(' ').map(str::to_owned).collect()).collect()
}

/// Those that open a data file only.
fn commands_of_data(image: &str) -> Vec<Vec<String>> {
    let words = [
        format!("snapshot list {image}"),
        format!("snapshot create {image} one"),
        format!("rebase -u --no-backing {image}"),
    ];
    words.iter().map(|words| words.split(' ').map(str::to_owned).collect()).collect()
}

fn run(words: &[String]) -> Outcome {
    command(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// All commands refuse the image, in one line that names the option, and `serve` does.
#[track_caller]
fn assert_refused(host: &Host, words: Vec<Vec<String>>, image: &Path, name: &str) {
    for words in words {
        let outcome = run(&words).failure(REASON);
        assert!(outcome.stderr.contains(name), "{}", outcome.describe(name));
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe(name));
        assert!(!host.scratch.path("target.raw").exists(), "{words:?}");
    }
    Serve::new(&host.scratch, image).refused().failed(&[REASON, name]);
}

/// Names that lead to what a tenant has no business with.
fn hostile_names(host: &Host) -> Vec<String> {
    let own = |name: &str| host.scratch.path("own").join(name);
    symlink("/etc/shadow", own("shadow")).unwrap();
    symlink("../other/base.raw", own("neighbour.raw")).unwrap();
    symlink("../other", own("door")).unwrap();
    symlink("/dev/zero", own("device")).unwrap();
    let fifo = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, own("pipe"), fifo, mode, 0).unwrap();
    let elsewhere = host.scratch.path("other/base.raw");
    [
        "/etc/shadow",
        "../../../../../../../../etc/shadow",
        "../other/base.raw",
        "../gone.raw",
        "shadow",
        "neighbour.raw",
        "door/base.raw",
        "below/../../other/base.raw",
        "device",
        "/dev/zero",
        "/proc/self/environ",
        "/proc/self/fd/0",
        "pipe",
        "below",
        str(&elsewhere),
    ]
    .map(str::to_owned)
    .into()
}

#[test]
fn a_hostile_backing_file_is_refused_by_every_command() {
    require!(need::tools(&["qemu-img"]));
    let host = Host::new();
    for name in hostile_names(&host) {
        let image = host.backed_by(&name);
        let target = host.scratch.path("target.raw");
        assert_refused(&host, commands(str(&image), str(&target)), &image, &name);
    }
}

#[test]
fn a_hostile_data_file_is_refused_by_every_command_and_not_written() {
    let host = Host::new();
    let before = fs::read(host.scratch.path("other/base.raw")).unwrap();
    for name in hostile_names(&host) {
        let image = host.with_data_in(&name);
        let target = host.scratch.path("target.raw");
        let words = [commands(str(&image), str(&target)), commands_of_data(str(&image))].concat();
        assert_refused(&host, words, &image, &name);
    }
    assert_eq!(fs::read(host.scratch.path("other/base.raw")).unwrap(), before);
}

#[test]
fn what_lies_below_the_folder_needs_no_option() {
    require!(need::tools(&["qemu-img"]));
    let host = Host::new();
    let own = host.scratch.path("own");
    symlink("below/base.raw", own.join("inside.raw")).unwrap();
    symlink(own.join("base.raw"), own.join("whole.raw")).unwrap();
    let whole = own.join("below/base.raw");
    for name in ["base.raw", "./below/base.raw", "inside.raw", "whole.raw", str(&whole)] {
        let image = host.backed_by(name);
        command(&["map", str(&image)]).success();
        Serve::new(&host.scratch, &image).start().stop();
    }
}

#[test]
fn the_option_allows_a_folder_or_a_file_and_nothing_else() {
    require!(need::tools(&["qemu-img"]));
    let host = Host::new();
    let other = host.scratch.path("other");
    let image = host.backed_by("../other/base.raw");
    for allowed in [other.clone(), other.join("base.raw"), "/".into()] {
        command(&["map", "--allow-path", str(&allowed), str(&image)]).success();
        Serve::new(&host.scratch, &image).option("--allow-path", &allowed).start().stop();
    }
    for allowed in [host.scratch.path("own"), "/etc".into()] {
        command(&["map", "--allow-path", str(&allowed), str(&image)]).failure(REASON);
    }
    command(&["map", "--allow-path", "/gone", str(&image)]).failure("/gone");
    // Not by a backing file whose own folder is another one.
    fs::remove_file(host.scratch.path("own/disk.qcow2")).unwrap();
    let middle = other.join("middle.qcow2");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-u",
        "-b",
        "/etc/shadow",
        "-F",
        "raw",
        str(&middle),
        "1M",
    ])
    .success();
    let image = host.image();
    let named = "../other/middle.qcow2";
    qemu_img(&["create", "-q", "-f", "qcow2", "-u", "-b", named, "-F", "qcow2", str(&image), "1M"])
        .success();
    let outcome = command(&["map", "--allow-path", str(&other), str(&image)]).failure(REASON);
    assert!(outcome.stderr.contains("middle.qcow2: names '/etc/shadow'"), "{}", outcome.stderr);
}

#[test]
fn whoever_makes_an_image_that_needs_the_option_is_told() {
    let host = Host::new();
    let image = host.image();
    let (image, other) = (str(&image), host.scratch.path("other/base.raw"));
    let told = command(&["create", "-b", str(&other), "-F", "raw", image]).success();
    let option = format!("--allow-path '{}'", str(&host.scratch.path("other")));
    assert!(told.stderr.contains(&option), "{}", told.stderr);
    command(&["map", image]).failure(REASON);
    let folder = host.scratch.path("other");
    command(&["map", "--allow-path", str(&folder), image]).success();
    // The same by rebase, from one that lies beside it.
    fs::remove_file(image).unwrap();
    let told = command(&["create", "-b", "base.raw", "-F", "raw", image]).success();
    assert_eq!(told.stderr, "");
    let told = command(&["rebase", "-b", "../other/base.raw", "-F", "raw", image]).success();
    assert!(told.stderr.contains(REASON), "{}", told.stderr);
    let told = command(&["rebase", "-u", "-b", "base.raw", "-F", "raw", image]).success();
    assert_eq!(told.stderr, "");
    // A data file that the user names elsewhere, made and converted to.
    for (verb, target) in [("create", "new.qcow2"), ("convert", "copy.qcow2")] {
        let data = format!("data_file=../other/{verb}.data");
        let target = host.scratch.path("own").join(target);
        let source = host.scratch.path("own/base.raw");
        let words = match verb {
            "create" => ["create", "-o", &data, str(&target), "1M"],
            _ => ["convert", "-o", &data, str(&source), str(&target)],
        };
        let told = command(&words).success();
        assert!(told.stderr.contains(REASON), "{}", told.stderr);
        command(&["map", str(&target)]).failure(REASON);
        command(&["map", "--allow-path", str(&folder), str(&target)]).success();
    }
}
