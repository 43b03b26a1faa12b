//! What newcomers try: wrong arguments, names and folders get a line that says what to do, and
//! interrupted work leaves no file that looks complete.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{
    Scratch, Serve, blockhouse, eventually,
    image_tool::{command, new_image, str},
    need, require, run, tool,
};
use serde_json::json;

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_wrong_command_line_of_check_is_no_corrupt_image() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "1M");
    for words in [
        &["check"][..],
        &["check", "--nope", str(&image)],
        &["-v", "--log-format", "json", "check", "--repair", "some", str(&image)],
        &["check", "-p", "--output=json", str(&image)],
    ] {
        let outcome = command(words);
        assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe("wrong usage"));
    }
    assert_eq!(command(&["info", "--nope", "check"]).status.code(), Some(2));
}

#[test]
fn the_version_names_the_commit_where_the_sources_are_in_git() {
    let said = command(&["--version"]).success().stdout;
    let (version, rest) = said.trim().split_once(" (").unwrap_or((said.trim(), ""));
    assert!(version.starts_with("blockhouse ") && version.contains('.'), "{said}");
    // A build from a package's sources has no commit.
    if let Some((commit, date)) = rest.split_once(", ") {
        assert!(commit.bytes().all(|digit| digit.is_ascii_hexdigit()), "{said}");
        assert!(date.ends_with(')') && date.split('-').count() == 3, "{said}");
    } else {
        assert_eq!(rest, "", "{said}");
    }
}

#[test]
fn a_message_says_what_to_do() {
    let scratch = Scratch::new();
    let at = |name: &str| scratch.path(name);
    let (qcow2, raw) = (at("disk.qcow2"), at("disk.img"));
    command(&["create", str(&qcow2), "1M"]).success();
    command(&["create", str(&raw), "1M"]).success();
    let bytes = fs::read(&qcow2).unwrap();
    let short = |length: usize| {
        let path = at(&format!("short{length}.qcow2"));
        fs::write(&path, &bytes[..length]).unwrap();
        path
    };
    let mut damaged = bytes.clone();
    // The header field with the offset of the L1 table.
    damaged[40..48].copy_from_slice(&(1u64 << 40).to_be_bytes());
    let l1 = at("l1.qcow2");
    fs::write(&l1, damaged).unwrap();
    let new = at("new.qcow2");
    let vmdk = ["info", "-f", "vmdk", str(&raw)];
    let vdi = ["info", "-f", "vdi", str(&raw)];
    let (ends_80, ends_100) = (short(80), short(100));
    for (words, said) in [
        (&["info", str(&ends_100)][..], "ends after 100 bytes, within the header"),
        (&["info", str(&ends_80)], "ends after 80 bytes, within the header"),
        (&["map", str(&l1)], "lies past the end of the file at offset 1099511627776"),
        (&vmdk, "say which format it has"),
        (&vdi, "say which format it has"),
        (&["info", "-f", "qcow2", str(&raw)], "say which format it has"),
        (&["serve", str(&at(""))], "is a folder, and no image"),
        (&["serve", str(&raw), "-k", str(&at("none/x.sock"))], "make its folder first"),
        (&["serve", str(&raw), "--nbd", "disk.sock"], "nbd+unix:///?socket=PATH"),
        (&["create", "-b", str(&raw), str(&new)], "-F raw"),
        (&["create", str(&new), "20GB"], "write G or GiB"),
        (&["start", str(&raw)], "blockhouse serve IMAGE"),
        (&["ctl", str(&at("none")), "disks"], "serve --control"),
    ] {
        command(words).failure(said);
    }
}

#[test]
fn a_control_socket_says_why_it_cannot_be_reached_and_which_disks_there_are() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let socket = scratch.socket("control");
    let guest = scratch.socket("vu");
    let serve = Serve::new(&scratch, image.path()).option("--control", &socket);
    let server = serve.start();
    let refused = command(&["ctl", str(&socket), "resize", "other", "2M"]);
    let refused = refused.failure("there is \"disk\"");
    assert!(refused.stderr.contains("ctl SOCKET disks"), "{}", refused.stderr);
    let version = command(&["ctl", str(&socket), "version"]).success();
    assert!(version.stdout.starts_with("version "), "{}", version.stdout);
    let added = command(&["ctl", str(&socket), "export", "disk", str(&guest)]).success();
    assert!(added.stderr.contains("vhost-user-blk"), "{}", added.stderr);
    assert!(added.stdout.starts_with("ready "), "{}", added.stdout);
    let clients = || {
        let exports = Control::connect(&socket).get("export.list", json!({}));
        let exports = exports.as_array().expect("a list").clone();
        let device = exports.iter().find(|export| export["kind"] == "vhost-user-blk").cloned();
        device.expect("it is there")["clients"].clone()
    };
    assert_eq!(clients(), 0);
    let frontend = std::os::unix::net::UnixStream::connect(&guest).unwrap();
    assert!(eventually(LONG, || clients() == 1));
    let client = Client::open(&server.address());
    let exports = command(&["ctl", str(&socket), "exports"]).success().stdout;
    let own = format!("process {}", std::process::id());
    let rows: Vec<_> = exports.lines().filter(|row| row.ends_with(&own)).collect();
    assert_eq!(rows.len(), 2, "a client of each kind is named: {exports}");
    client.disconnect();
    drop(frontend);
    assert!(eventually(LONG, || clients() == 0));
    if need::root().is_ok() && need::tools(&["setpriv"]).is_ok() {
        let mut other = tool("setpriv");
        other.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(blockhouse());
        let outcome = run(other.args(["ctl", str(&socket), "disks"]));
        // The other user may not be allowed to enter the folder of the program.
        let is_told = outcome.stderr.contains("run this as user 0");
        assert!(is_told || !outcome.stderr.contains("cannot reach"), "{}", outcome.stderr);
    }
    server.stop();
}

#[test]
fn space_that_is_not_there_is_not_begun_with() {
    let scratch = Scratch::new();
    for (name, options) in [
        ("a.img", "preallocation=full"),
        ("b.qcow2", "preallocation=full"),
        ("c.qcow2", "preallocation=falloc"),
        ("d.qcow2", "preallocation=full,data_file=d.raw"),
    ] {
        let image = scratch.path(name);
        let outcome =
            command(&["create", "-o", options, str(&image), "10T"]).failure("the file system has");
        assert!(outcome.stderr.contains("free some space"), "{}", outcome.stderr);
        let left: Vec<PathBuf> =
            fs::read_dir(scratch.path("")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn an_interrupted_creation_leaves_no_image_and_can_be_repeated() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    let part = scratch.path("disk.img.part");
    let mut create = tool(str(blockhouse()));
    create.args(["create", "-o", "preallocation=full", str(&image), "2G"]);
    let mut creating = create.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    assert!(eventually(LONG, || part.exists() || image.exists()));
    assert!(!image.exists(), "the name is there before the space");
    creating.kill().unwrap();
    creating.wait().unwrap();
    assert!(!image.exists());
    command(&["create", "-o", "preallocation=full", str(&image), "4M"]).success();
    let made = image.metadata().unwrap();
    assert_eq!((made.len(), part.exists()), (4 << 20, false));
    assert!(made.blocks() * 512 >= 4 << 20, "{}", made.blocks());
    command(&["create", "-o", "preallocation=full", str(&image), "4M"]).failure("disk.img: ");
}

#[test]
fn memory_sets_space_aside() {
    let scratch = Scratch::in_memory();
    for name in ["disk.img", "disk.qcow2"] {
        let image = scratch.path(name);
        command(&["create", "-o", "preallocation=falloc", str(&image), "4M"]).success();
        let blocks = image.metadata().unwrap().blocks();
        assert!(blocks * 512 >= 4 << 20, "{name}: {blocks}");
    }
}

#[test]
fn a_configuration_that_serves_nothing_says_so() {
    require!(need::tools(&["timeout"]));
    let scratch = Scratch::new();
    let file = scratch.path("disks.toml");
    fs::write(&file, "[server]\nstate = \"off\"\n").unwrap();
    let mut serve = tool("timeout");
    serve.args(["--preserve-status", "2"]).arg(blockhouse());
    let outcome = run(serve.args(["serve", "--config", str(&file)]));
    assert!(outcome.stderr.contains("nothing is served"), "{}", outcome.stderr);
    assert_eq!(outcome.stdout, "");
}

#[test]
fn long_names_are_served_and_names_that_are_no_text_are_listed() {
    let scratch = Scratch::new();
    let long = new_image(&scratch, &format!("{}.img", "n".repeat(251)), "1M");
    let strange = scratch.path("").join(std::ffi::OsStr::from_bytes(b"not \xff text.img"));
    fs::write(&strange, [0; 4096]).expect("a file");
    let control = scratch.socket("control");
    let server = Serve::new(&scratch, &long).option("--control", &control).start();
    let mut client = Control::connect(&control);
    let listed = client.get("disk.list", json!({}));
    assert_eq!(listed[0]["path"], str(&long));
    server.stop();
    let serve = Serve::new(&scratch, &strange).option("--name", "strange");
    let server = serve.option("--control", &control).start();
    let listed = Control::connect(&control).get("disk.list", json!({}));
    let path = listed[0]["path"].as_str().expect("a text");
    assert!(path.ends_with("not \u{fffd} text.img"), "{path}");
    server.stop();
}
