//! Wrong command lines of each command, as people type them: the first line of the error names the
//! file or word, the cause, and what to do.

use std::fs;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use blockhouse_tests::typed::{Folder, Serving};
use blockhouse_tests::{Outcome, run_within};

const LIMIT: Duration = Duration::from_secs(60);

/// The arguments of `blockhouse`, and parts of the first line of the error: the file or word, the
/// cause, what to do.
type Line = (&'static str, [&'static str; 3]);

/// Failed operations: exit status 1, and one line.
const FAILURES: &[Line] = &[
    ("serve none.qcow2", ["none.qcow2", "No such file", "'blockhouse create'"]),
    ("serve folder", ["folder", "is a folder, and no image", "name the file or device in it"]),
    (
        "serve empty.qcow2",
        ["empty.qcow2", "is no qcow2 image in spite of its name", "--format raw"],
    ),
    (
        "serve raw.img --format qcow2",
        ["raw.img", "the magic bytes are missing", "say which format it has"],
    ),
    ("serve a.qcow2 --format vmdk", ["a.qcow2", "can only be read", "blockhouse convert"]),
    (
        "serve over.qcow2",
        ["over.qcow2", "cannot open what is behind", "'blockhouse rebase -u -b NAME"],
    ),
    ("serve a.qcow2 --snapshot none", ["a.qcow2", "has no snapshot 'none'", "'snapshot list'"]),
    ("serve a.qcow2 -k none/x.sock", ["none/x.sock", "No such file", "make its folder first"]),
    ("serve a.qcow2 -k text.txt", ["text.txt", "a file that is no socket", "choose another path"]),
    (
        "serve a.qcow2 --control folder",
        ["folder", "a file that is no socket", "choose another path"],
    ),
    (
        "serve a.qcow2 --nbd nbd://192.0.2.1:10809/",
        ["192.0.2.1", "cannot listen", "an address of this machine"],
    ),
    ("serve a.qcow2 --state text.txt", ["text.txt", "belongs to something else", "--state DIR"]),
    ("serve a.qcow2 --create 20G", ["a.qcow2", "exists with 1048576 bytes", "'blockhouse resize'"]),
    ("serve --config none.toml", ["none.toml", "No such file", "name a file that describes disks"]),
    ("serve --config folder", ["folder", "Is a directory", "name a file that describes disks"]),
    ("serve --config text.txt", ["text.txt:1:", "key with no value", "expected `=`"]),
    ("serve raw.img --key-file none", ["none", "cannot read the key: No such file", "name a file"]),
    ("create a.qcow2 1M", ["a.qcow2", "File exists", "choose another name"]),
    ("create none/x.img 1M", ["none/x.img", "there is no folder 'none'", "check the path"]),
    (
        "create -b text.txt -F qcow2 x.qcow2",
        ["text.txt", "not a qcow2 image", "of a backing file -F"],
    ),
    ("create -b none.img -F raw x.qcow2", ["none.img", "No such file", "check the path"]),
    ("convert none.qcow2 x.img", ["none.qcow2", "No such file", "check the path"]),
    ("convert a.qcow2 raw.img", ["raw.img", "exists and is left alone", "--force"]),
    ("convert --force --resume a.qcow2 raw.img", ["raw.img", "with --force", "without --resume"]),
    ("convert a.qcow2 none/x.img", ["none/x.img", "there is no folder 'none'", "check the path"]),
    (
        "convert http://example.org/disk.img x.img",
        ["http://example.org/disk.img", "by their URL", "download it first"],
    ),
    ("convert -f vdi a.qcow2 x.img", ["a.qcow2", "is no VDI image", "say which format it has"]),
    ("compare a.qcow2 none.img", ["none.img", "No such file", "check the path"]),
    ("check folder", ["folder", "no disk", "give the path of a disk image"]),
    (
        "info 'nbd+unix:///?socket=none.sock'",
        ["none.sock", "No such file", "start it, or check the path"],
    ),
    (
        "info nbd://127.0.0.1:1/x",
        ["nbd://127.0.0.1:1/x", "Connection refused", "start it, or check the address"],
    ),
    ("resize a.qcow2 512K", ["a.qcow2", "would become shorter", "--shrink"]),
    ("commit a.qcow2", ["a.qcow2", "has no backing file", "name an overlay"]),
    ("rebase -u -b raw.img a.qcow2", ["raw.img", "is not guessed", "-F raw"]),
    ("snapshot apply a.qcow2 none", ["a.qcow2", "has no snapshot 'none'", "'snapshot list'"]),
    (
        "snapshot create raw.img s",
        ["raw.img", "a raw image has no snapshots", "need a qcow2 image"],
    ),
    ("bitmap remove a.qcow2 none", ["a.qcow2", "has no bitmap 'none'", "'bitmap list'"]),
    ("bitmap add a.qcow2 b -g 3", ["a.qcow2", "is a power of two", "64K suits most disks"]),
    (
        "backup a.qcow2 over.qcow2",
        ["over.qcow2", "exists and is left alone", "choose another name"],
    ),
    ("ctl none.sock disks", ["none.sock", "there is none", "'serve --control none.sock'"]),
    ("ctl text.txt disks", ["text.txt", "that is no socket", "in --control"]),
    ("ctl 127.0.0.1:9618 disks", ["127.0.0.1:9618", "that is an address", "in --control"]),
    ("ctl dead.sock disks", ["dead.sock", "no server listens there any longer", "start it again"]),
    ("top none.sock", ["none.sock", "No such file", "in --metrics or --control"]),
    ("top http://127.0.0.1:1/", ["127.0.0.1:1", "Connection refused", "in --metrics or --control"]),
    ("upgrade --control text.txt", ["text.txt", "that is no socket", "in --control"]),
    ("vmstate load a.qcow2 none", ["a.qcow2", "has no snapshot 'none'", "'snapshot list'"]),
    ("bench fua --file none/x", ["none", "no place for a new file", "name a folder with --file"]),
    ("bench fua --html none/x.html", ["none/x.html", "there is no such folder", "make it first"]),
];

/// Wrong usage: exit status 2.
const WRONG_USAGE: &[Line] = &[
    ("start a.qcow2", ["'start'", "unrecognized subcommand", ""]),
    ("serve a.qcow2 --nbd disk.sock", ["disk.sock", "not a URI", "nbd+unix:///?socket=PATH"]),
    (
        "serve a.qcow2 --metrics 0.0.0.0:9618",
        ["0.0.0.0:9618", "for other machines", "use 127.0.0.1:PORT"],
    ),
    ("serve a.qcow2 --workers many", ["--workers", "'many'", "write a whole number"]),
    (
        "serve a.qcow2 --cache fast",
        ["--cache", "no cache mode 'fast'", "use one of none, writeback"],
    ),
    ("serve a.qcow2 --control c,methods=x", ["c,methods=x", "no method 'x'", "docs/control.md"]),
    ("serve a.qcow2 --limit clients=0", ["--limit", "clients=0", "a number from 1"]),
    ("serve x.img --create 20GB", ["20GB", "a power of 1000", "write G or GiB"]),
    ("serve a.qcow2 --user nosuchuser", ["--user", "no user \"nosuchuser\"", "'getent passwd'"]),
    ("create -b a.qcow2 x.qcow2", ["a.qcow2", "is not guessed", "-F raw or -F qcow2"]),
    (
        "create -o cluster_size=3K x.qcow2 1M",
        ["cluster_size", "cannot be '3K'", "a power of two from 512 to 2M"],
    ),
    ("convert -m many a.qcow2 x.img", ["-m", "'many'", "write a whole number"]),
    ("dd if=a.qcow2", ["if=", "both a source", "of="]),
    ("snapshot take a.qcow2", ["'take'", "there is no command", "'blockhouse snapshot --help'"]),
    ("ctl control lsit", ["'lsit'", "", ""]),
    (
        "ctl control job m finish",
        ["'finish'", "there is no command", "'blockhouse ctl job --help'"],
    ),
    ("detach text.txt", ["text.txt", "a block device", "/dev/ublkb0 or /dev/nbd0"]),
];

/// Commands to a running server, whose NBD socket is nbd.sock, whose control socket is control, and
/// whose metrics socket is metrics.
const AT_A_SERVER: &[Line] = &[
    ("ctl nbd.sock disks", ["nbd.sock", "serves a disk by NBD", "name the socket of --control"]),
    ("ctl metrics disks", ["metrics", "serves metrics", "name the socket of --control"]),
    (
        "snapshot create --control nbd.sock raw.img s",
        ["nbd.sock", "serves a disk by NBD", "--control"],
    ),
    ("upgrade --control nbd.sock", ["nbd.sock", "serves a disk by NBD", "--control"]),
    ("top nbd.sock", ["nbd.sock", "is not JSON", "--metrics unix:PATH or --control PATH"]),
    (
        "serve a.qcow2 -k nbd.sock",
        ["nbd.sock", "a running server listens there", "choose another path"],
    ),
    ("ctl control resize none 5M", ["\"none\"", "there is \"raw.img\"", "'ctl SOCKET disks'"]),
    ("ctl control unexport none", ["none", "nothing is served", "'ctl SOCKET exports'"]),
    ("ctl control close raw.img", ["raw.img", "is served at", "remove its exports first"]),
    ("ctl control job none cancel", ["\"none\"", "no job is called", "'ctl SOCKET jobs'"]),
    ("ctl control stream raw.img", ["raw.img", "no backing file", ""]),
    ("ctl control call disk.close {}", ["`disk`", "missing field", "docs/control.md"]),
    ("serve raw.img", ["raw.img", "is locked", "stop"]),
];

/// The folder with the files that the lines name.
fn prepare() -> Folder {
    let folder = Folder::new();
    for line in [
        "blockhouse create -q a.qcow2 1M",
        "blockhouse create -q raw.img 1M",
        "blockhouse create -q base.qcow2 1M",
        "blockhouse create -q -b base.qcow2 -F qcow2 over.qcow2",
    ] {
        folder.run(line);
    }
    fs::remove_file(folder.path("base.qcow2")).unwrap();
    fs::create_dir(folder.path("folder")).unwrap();
    fs::write(folder.path("text.txt"), "some words\n").unwrap();
    fs::write(folder.path("empty.qcow2"), "").unwrap();
    // A socket whose server has ended.
    drop(UnixListener::bind(folder.path("dead.sock")).unwrap());
    folder
}

/// Runs a line, and checks the first line of its error.
fn type_wrong(folder: &Folder, (line, parts): &Line) -> Outcome {
    let outcome = run_within(LIMIT, &mut folder.shell(&format!("blockhouse {line}")));
    let first = outcome.stderr.lines().next().unwrap_or_default();
    for part in parts {
        assert!(first.contains(part), "{line}: {part:?} is not in {first:?}");
    }
    outcome
}

#[test]
fn what_fails_is_one_line_with_the_file_the_cause_and_what_to_do() {
    let folder = prepare();
    for line in FAILURES {
        let outcome = type_wrong(&folder, line);
        // For 'compare', 1 means "the disks differ".
        let status = if line.0.starts_with("compare") { 2 } else { 1 };
        assert_eq!(outcome.status.code(), Some(status), "{}", outcome.describe(line.0));
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe(line.0));
    }
}

#[test]
fn wrong_usage_names_the_word_and_what_to_write() {
    let folder = prepare();
    for line in WRONG_USAGE {
        let outcome = type_wrong(&folder, line);
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe(line.0));
    }
}

#[test]
fn a_running_server_s_sockets_and_names_are_told_apart() {
    let folder = prepare();
    let server = "blockhouse serve raw.img -k nbd.sock --control control --metrics unix:metrics";
    let server = Serving::start(&folder, server);
    for line in AT_A_SERVER {
        let outcome = type_wrong(&folder, line);
        assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe(line.0));
    }
    // The address is accepted in the form that the server logs.
    folder.run("blockhouse top unix:metrics");
    server.stop();
}
