//! Names of backing and data files in images from strangers, which may refer to any file of the
//! host.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blockhouse_tests::{
    Outcome, Scratch, Serve, blockhouse,
    image_tool::{command, qemu_img, str},
    need, require, run_within,
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

    /// Makes an image with `name` as its backing file.
    fn backed_by(&self, name: &str) -> PathBuf {
        let image = self.image();
        let _ = fs::remove_file(&image);
        // With -u, qemu-img does not check that the file exists.
        let words =
            ["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", str(&image), "1M"];
        qemu_img(&words).success();
        image
    }

    /// Makes an image with `name` as its data file.
    fn with_data_in(&self, name: &str) -> PathBuf {
        let image = self.image();
        let _ = fs::remove_file(&image);
        let first = "a".repeat(name.len());
        let data = self.scratch.path("own").join(&first);
        let options = format!("data_file={}", str(&data));
        command(&["create", "-o", &format!("data_file={first}"), str(&image), "1M"]).success();
        let _ = (fs::remove_file(&data), options);
        // Replaces the name in the image by another of the same length.
        let mut bytes = fs::read(&image).unwrap();
        let at = bytes.windows(first.len()).rposition(|part| part == first.as_bytes());
        let at = at.expect("the name is in the header");
        bytes[at..at + first.len()].copy_from_slice(name.as_bytes());
        fs::write(&image, bytes).unwrap();
        image
    }
}

/// Every command that opens the files that an image names, as its arguments.
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

/// The commands that open only the data file.
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

/// Asserts that all commands, and `serve`, refuse the image with one line that names the option.
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

/// Names that lead to files that a tenant must not access.
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
    // The backing file may be in another folder, but that does not allow the names in it.
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

/// For programs that call qemu-img and cannot pass the option.
#[test]
fn the_environment_allows_what_the_option_does() {
    require!(need::tools(&["qemu-img"]));
    let host = Host::new();
    let image = host.backed_by("../other/base.raw");
    let [other, own] = ["other", "own"].map(|name| host.scratch.path(name));
    let map = |allowed: &str, words: &[&str]| {
        let mut command = Command::new(blockhouse());
        blockhouse_tests::run(
            command.env("BLOCKHOUSE_ALLOW_PATH", allowed).arg("map").args(words).arg(&image),
        )
    };
    for allowed in [str(&other), &format!("/gone:{}:{}", str(&own), str(&other))] {
        map(allowed, &[]).success();
        map(allowed, &["--allow-path", str(&own)]).success();
        map(allowed, &["--no-references"]).failure("no name in it is followed");
        map(allowed, &["--no-references", "--allow-path", str(&other)]).success();
        map(allowed, &["--no-references", "--allow-path", str(&own)])
            .failure("none of the allowed");
    }
    for allowed in ["", "/gone", str(&own)] {
        map(allowed, &[]).failure(REASON);
    }
}

#[test]
fn the_environment_allows_servers_to_images_whose_format_is_given() {
    let scratch = Scratch::new();
    let image = scratch.path("over.qcow2");
    let base = "nbd+unix:///?socket=/missing/socket";
    let create = ["create", "-u", "-b", base, "-F", "raw", str(&image), "1M"];
    blockhouse_tests::run(Command::new(blockhouse()).args(create)).success();
    let qemu_img = scratch.path("qemu-img");
    symlink(std::path::absolute(blockhouse()).unwrap(), &qemu_img).unwrap();
    let map_by = |program: &Path, value: &str, words: &[&str]| {
        let mut command = Command::new(program);
        let command = command.env("BLOCKHOUSE_ALLOW_REMOTE", value).arg("map");
        blockhouse_tests::run(command.args(words).arg(&image))
    };
    let map = |value: &str, words: &[&str]| map_by(&qemu_img, value, words);
    map_by(blockhouse(), "1", &["-f", "qcow2"]).failure("--allow-remote");
    map("1", &["-f", "qcow2"]).failure("No such file or directory");
    let refused =
        [("0", &["-f", "qcow2"][..]), ("1", &[]), ("1", &["-f", "qcow2", "--no-references"])];
    for (value, words) in refused {
        let outcome = map(value, words);
        assert!(!outcome.status.success() && !outcome.stderr.contains("No such file"), "{words:?}");
    }
}

/// Otherwise a guest could write the header that agrees with the name, and name files in it.
#[test]
fn a_raw_image_whose_name_says_a_format_is_only_read() {
    let scratch = Scratch::new();
    for name in ["qemu-img", "qemu-nbd"] {
        symlink(std::path::absolute(blockhouse()).unwrap(), scratch.path(name)).unwrap();
    }
    let (image, socket) = (scratch.path("disk.qcow2"), scratch.socket("s"));
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let run = |tool: &str, words: &[&str]| {
        let mut command = Command::new(scratch.path(tool));
        run_within(Duration::from_secs(20), command.args(words).arg(&image))
    };
    assert!(run("qemu-img", &["info"]).success().stdout.contains("file format: raw"));
    run("qemu-nbd", &["-t", "-k", str(&socket)]).failure("not in qcow2 format");
    run("qemu-img", &["bench", "-w", "-c", "1"]).failure("not in qcow2 format");
    assert!(fs::read(&image).unwrap().iter().all(|byte| *byte == 0));
}

/// A guest wrote the header of its raw disk, and a caller of QEMU's tools names no format.
#[test]
fn a_guest_names_no_file_that_is_written_to_or_read_elsewhere() {
    require!(need::tools(&["qemu-img", "qemu-nbd"]));
    let scratch = Scratch::new();
    let at = |name: &str| scratch.path(name);
    let folder = at("victim").parent().unwrap().to_owned();
    for name in ["qemu-img", "qemu-nbd"] {
        symlink(std::path::absolute(blockhouse()).unwrap(), at(name)).unwrap();
    }
    let victim = vec![b'v'; 1 << 20];
    let make = |image: &str, options: &str| {
        fs::write(at("victim"), &victim).unwrap();
        let words = ["create", "-q", "-f", "qcow2", "-o", options, image, "1M"];
        let made = run_in(&scratch, &words);
        assert!(made.status.success(), "{}", made.describe("makes the image"));
        fs::write(at("victim"), &victim).unwrap();
    };
    make("over", "backing_file=victim,backing_fmt=raw");
    make("data", "data_file=victim,data_file_raw=on");
    let call = |allowed: Option<&Path>, words: &[&str]| {
        let mut command = Command::new(folder.join(words[0]));
        command.args(&words[1..]).current_dir(&folder).env_remove("BLOCKHOUSE_ALLOW_PATH");
        blockhouse_tests::run(match allowed {
            Some(allowed) => command.env("BLOCKHOUSE_ALLOW_PATH", allowed),
            None => &mut command,
        })
    };
    let socket = scratch.socket("s");
    for words in [
        &["qemu-img", "convert", "-O", "raw", "over", "copy"][..],
        &["qemu-img", "convert", "-O", "raw", "data", "copy"],
        &["qemu-img", "resize", "over", "2M"],
        &["qemu-nbd", "-r", "-k", str(&socket), "over"],
        &["qemu-nbd", "-s", "-k", str(&socket), "over"],
        &["qemu-nbd", "-s", "-k", str(&socket), "data"],
    ] {
        call(None, words).failure("names 'victim' as its");
    }
    // Allowed files are read; no file that the image names is written to.
    call(Some(&folder), &["qemu-img", "convert", "-O", "raw", "over", "copy"]).success();
    assert_eq!(fs::read(at("copy")).unwrap(), victim);
    call(Some(&folder), &["qemu-img", "commit", "over"])
        .failure("its format was found in the file");
    for words in [
        &["qemu-img", "resize", "data", "2M"][..],
        &["qemu-img", "bench", "-w", "-c", "1", "data"],
        &["qemu-nbd", "-k", str(&socket), "data"],
    ] {
        call(Some(&folder), words).failure("nothing but its name says");
    }
    assert_eq!(fs::read(at("victim")).unwrap(), victim);
    // The caller names the file that is written to.
    call(None, &["qemu-img", "commit", "-b", "victim", "over"]).failure("names 'victim' as its");
    call(Some(&folder), &["qemu-img", "commit", "-b", "over", "over"]).failure("Did not find");
    call(Some(&folder), &["qemu-img", "commit", "-b", "victim", "over"]).success();
    // Under its own name this program takes no allowed path from the environment for such images.
    let mut own = Command::new(blockhouse());
    own.env("BLOCKHOUSE_ALLOW_PATH", &folder).args(["convert", "-O", "raw", "--force"]);
    let own = blockhouse_tests::run(own.arg(at("over")).arg(at("copy")));
    own.failure("no name in it is followed");
    // Evidence that a disk is raw counts.
    fs::copy(at("over"), at("disk.raw.1")).unwrap();
    for name in ["disk.raw.1", "disk"] {
        fs::copy(at("over"), at(name)).unwrap();
        fs::write(at(&format!("{name}.bitmaps")), "").unwrap();
        call(None, &["qemu-img", "resize", name, "2M"]).failure("");
        assert_eq!(fs::metadata(at(name)).unwrap().len(), fs::metadata(at("over")).unwrap().len());
    }
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
    // The same with rebase, of an image whose backing file is beside it.
    fs::remove_file(image).unwrap();
    let told = command(&["create", "-b", "base.raw", "-F", "raw", image]).success();
    assert_eq!(told.stderr, "");
    let told = command(&["rebase", "-b", "../other/base.raw", "-F", "raw", image]).success();
    assert!(told.stderr.contains(REASON), "{}", told.stderr);
    let told = command(&["rebase", "-u", "-b", "base.raw", "-F", "raw", image]).success();
    assert_eq!(told.stderr, "");
    // A data file elsewhere that the user named in create or convert needs no option, as long as
    // only that user can write to the image.
    for (verb, target) in [("create", "new.qcow2"), ("convert", "copy.qcow2")] {
        let data = format!("data_file=../other/{verb}.data");
        let target = host.scratch.path("own").join(target);
        let source = host.scratch.path("own/base.raw");
        let words = match verb {
            "create" => ["create", "-o", &data, str(&target), "1M"],
            _ => ["convert", "-o", &data, str(&source), str(&target)],
        };
        let told = command(&words).success();
        assert_eq!(told.stderr, "");
        command(&["map", str(&target)]).success();
        fs::set_permissions(&target, fs::Permissions::from_mode(0o666)).unwrap();
        command(&["map", str(&target)]).failure(REASON);
        command(&["map", "--allow-path", str(&folder), str(&target)]).success();
    }
}

/// A folder where strangers put images: a neighbour's disk, and files of the folder's owner.
fn upload_folder() -> (Scratch, [PathBuf; 3]) {
    let scratch = Scratch::new();
    let victims = [".bashrc", ".ssh/authorized_keys", "victim.img"].map(|name| scratch.path(name));
    fs::create_dir(scratch.path(".ssh")).unwrap();
    for file in &victims {
        fs::write(file, vec![b'v'; 1 << 20]).unwrap();
    }
    (scratch, victims)
}

#[test]
fn no_file_is_written_to_because_an_image_says_so() {
    require!(need::tools(&["qemu-img"]));
    let (scratch, victims) = upload_folder();
    let image = scratch.path("upload.qcow2");
    for victim in &victims {
        let name = victim.strip_prefix(scratch.path("")).unwrap();
        for raw in ["", ",data_file_raw=on"] {
            // The command empties the file, whose content is restored.
            let options = format!("data_file={}{raw}", str(name));
            let make = ["create", "-q", "-f", "qcow2", "-o", &options, str(&image), "1M"];
            let made = run_in(&scratch, &make);
            assert!(made.status.success(), "{}", made.describe("makes the image"));
            fs::write(victim, vec![b'v'; 1 << 20]).unwrap();
            Serve::new(&scratch, &image).refused().failed(&[REASON, str(name)]);
            for words in [
                vec!["resize", str(&image), "2M"],
                vec!["snapshot", "create", str(&image), "one"],
                vec!["bitmap", "--add", str(&image), "b"],
            ] {
                command(&words).failure(REASON);
            }
            // A neighbour's disk can be read; a hidden file cannot.
            let is_hidden = str(name).starts_with('.');
            let read = command(&["map", str(&image)]);
            assert_eq!(read.status.success(), !is_hidden, "{}", read.describe("map"));
            let served = Serve::new(&scratch, &image).flag("--read-only");
            if is_hidden {
                served.refused().failed(&[REASON, "hidden"])
            } else {
                served.start().stop()
            }
            let refused = Serve::new(&scratch, &image).flag("--read-only").flag("--no-references");
            refused.refused().failed(&["no name in it is followed", "--no-references"]);
            assert!(fs::read(victim).unwrap().iter().all(|byte| *byte == b'v'), "{name:?}");
            // The caller may allow the file by an option.
            Serve::new(&scratch, &image).option("--allow-path", victim).start().stop();
            fs::remove_file(&image).unwrap();
        }
    }
}

/// Runs qemu-img in the folder, where it looks for data files.
fn run_in(scratch: &Scratch, words: &[&str]) -> Outcome {
    blockhouse_tests::run(
        blockhouse_tests::tool("qemu-img").current_dir(scratch.path("")).args(words),
    )
}

#[test]
fn a_data_file_that_the_user_named_is_written_to_whatever_it_is_called() {
    let scratch = Scratch::new();
    let source = scratch.path("source.raw");
    fs::write(&source, vec![3; 1 << 20]).unwrap();
    for (data, image) in [("store.img", "a.qcow2"), ("b.raw", "b.qcow2")] {
        let image = scratch.path(image);
        let option = format!("data_file={data}");
        let told = command(&["create", "-o", &option, str(&image), "1M"]).success();
        assert_eq!(told.stderr, "");
        Serve::new(&scratch, &image).start().stop();
        command(&["resize", str(&image), "2M"]).success();
    }
    let copy = scratch.path("copy.qcow2");
    command(&["convert", "-o", "data_file=copied", str(&source), str(&copy)]).success();
    Serve::new(&scratch, &copy).start().stop();
    // Neither a changed name in the image nor a copy of the image makes us write to another file.
    let bytes = fs::read(&copy).unwrap();
    let at = bytes.windows(6).rposition(|part| part == b"copied").unwrap();
    let named = [&bytes[..at], b"source", &bytes[at + 6..]].concat();
    fs::write(scratch.path("source"), vec![3; 1 << 20]).unwrap();
    fs::write(&copy, named).unwrap();
    Serve::new(&scratch, &copy).refused().failed(&[REASON, "'source'"]);
}

#[test]
fn hidden_backing_files_are_refused_and_chains_in_one_folder_go_on() {
    let (scratch, _) = upload_folder();
    let at = |name: &str| scratch.path(name);
    let base = at("base.raw");
    fs::write(&base, vec![1; 1 << 20]).unwrap();
    let chain = [("base.raw", "raw", "one.qcow2"), ("one.qcow2", "qcow2", "two.qcow2")];
    for (below, format, image) in chain {
        command(&["create", "-b", below, "-F", format, str(&at(image))]).success();
    }
    Serve::new(&scratch, &at("two.qcow2")).start().stop();
    let (two, copy) = (at("two.qcow2"), at("copy.raw"));
    command(&["convert", "--no-references", str(&two), str(&copy)]).failure("--no-references");
    for hidden in [".bashrc", ".ssh/authorized_keys"] {
        let image = at("hidden.qcow2");
        let told = command(&["create", "-b", hidden, "-F", "raw", str(&image)]).success();
        assert!(told.stderr.contains(REASON), "{}", told.stderr);
        command(&["convert", str(&image), str(&copy)]).failure("hidden");
        Serve::new(&scratch, &image).refused().failed(&[REASON, hidden]);
        fs::remove_file(&image).unwrap();
    }
}
