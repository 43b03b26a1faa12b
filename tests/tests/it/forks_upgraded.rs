//! Servers whose disks share layers after a fork are upgraded to another process under load: each
//! disk keeps its content, the new process opens a layer once, too, and the layer stays locked as
//! long as any disk uses it.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use blockhouse_engine::is_byte_locked;
use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, str};
use blockhouse_tests::nbd::Address;
use blockhouse_tests::upgrade::{Servers, upgrade_under_load};
use blockhouse_tests::{Scratch, Serve, nbd_uri, seeded};
use rustix::process::Pid;
use serde_json::json;

use crate::fork::{check_file, image, path_of, written};
use crate::jobs::{Writer, beside, bytes_of, ctl, serve};

/// The lock byte of readers of an image that allow no writer (QEMU, `block/file-posix.c`).
const NO_WRITERS: u64 = 201;

/// Descriptors of a file that is open once: its own, one for the last block, and one for flushes.
const OPEN_FILES: usize = 3;

/// How often a process has a file open.
fn opened(process: Pid, file: &Path) -> usize {
    let all = std::fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero()));
    let links = all.expect("a process").flatten();
    links.filter(|one| std::fs::read_link(one.path()).is_ok_and(|link| link == file)).count()
}

fn is_locked(file: &Path) -> bool {
    let file = std::fs::File::open(file).expect("the layer is there");
    is_byte_locked(file.as_fd(), NO_WRITERS).expect("locks")
}

/// The one process that serves.
fn process(servers: &Servers<'_>) -> Pid {
    servers.wait_for(1);
    servers.running()[0]
}

/// Exports a disk at a socket with the disk's name.
fn export(scratch: &Scratch, disk: &str) -> Address {
    let socket = scratch.socket(disk);
    let uri = nbd_uri(disk, &socket);
    ctl(scratch, &["export", disk, &uri]).success();
    Address::Unix(socket)
}

#[test]
fn disks_that_share_layers_go_on_in_another_process() {
    let mut random = seeded();
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let servers = Servers(&scratch);
        let path = image(&scratch, name);
        let (server, control, mut writer) = written(&scratch, &path, random.fork());
        drop(control);
        let socket = scratch.socket("control");
        let kid = |number: usize| scratch.path(&format!("k{number}.qcow2"));
        let mut kids = Vec::new();
        // A child of each of two layers, and a child of a child.
        for (number, of) in [(0, name), (1, name), (2, "k1")] {
            let child = format!("k{number}={}", kid(number).display());
            ctl(&scratch, &["fork", of, "--child", &child]).success();
            let address = export(&scratch, &format!("k{number}"));
            let blocks = if of == name { writer.blocks() } else { Writer::blocks(&kids[1]) };
            let export = format!("k{number}");
            kids.push(Writer::on_export(&address, &export, blocks, random.fork()));
            beside(&mut writer, || ());
        }
        for _ in 0..2 {
            let last = kids.last_mut().expect("a child");
            beside(&mut writer, || beside(last, || upgrade_under_load(&socket)));
            process(&servers);
            writer.check();
            kids.iter_mut().for_each(Writer::check);
        }
        assert!(opened(process(&servers), &path) <= OPEN_FILES, "the lowest layer is open once");
        // A discard of one disk does not affect the others.
        let mut control = Control::connect(&socket);
        for number in 0..2 {
            let blocks = kids.remove(0).blocks();
            control.get("disk.close", json!({ "disk": format!("k{number}"), "force": true }));
            assert!(is_locked(&path), "others stand on it");
            check_file(&scratch, &now_at(&kid(number)), &blocks);
        }
        // The disks can be forked and upgraded again.
        ctl(&scratch, &["fork", name]).success();
        beside(&mut writer, || upgrade_under_load(&socket));
        writer.check();
        kids[0].check();
        let mut control = Control::connect(&socket);
        let (disk, last) = (path_of(&mut control, name), path_of(&mut control, "k2"));
        let blocks = [writer.blocks(), kids[0].blocks()];
        drop((writer, kids, control));
        servers.stop();
        assert!(!is_locked(&path));
        check_file(&scratch, Path::new(&disk), &blocks[0]);
        check_file(&scratch, Path::new(&last), &blocks[1]);
        drop(server);
    }
}

/// The image that is the disk now: the last overlay over `image`.
fn now_at(image: &Path) -> PathBuf {
    let next = image.with_extension("1.qcow2");
    if next.exists() { next } else { image.to_owned() }
}

#[test]
fn children_of_a_read_only_disk_are_handed_over_with_it_and_without_it() {
    let mut random = seeded();
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let base = image(&scratch, "base.qcow2");
    let (server, control) = serve(&scratch, &base);
    let writer = Writer::new(&server.address(), random.fork());
    let blocks = writer.blocks();
    drop((writer, control));
    server.stop();
    let socket = scratch.socket("control");
    let server =
        Serve::new(&scratch, &base).flag("--read-only").option("--control", &socket).start();
    let mut words = vec!["fork".to_owned(), "base.qcow2".to_owned()];
    for number in 0..20 {
        let file = scratch.path(&format!("k{number}.qcow2"));
        words.extend(["--child".to_owned(), format!("k{number}={}", file.display())]);
    }
    ctl(&scratch, &words.iter().map(String::as_str).collect::<Vec<_>>()).success();
    let mut kids: Vec<_> = [0, 19]
        .map(|number| {
            let name = format!("k{number}");
            let address = export(&scratch, &name);
            Writer::on_export(&address, &name, blocks.clone(), random.fork())
        })
        .into();
    for is_open in [true, false] {
        let [first, last] = &mut kids[..] else { panic!("two") };
        beside(first, || beside(last, || upgrade_under_load(&socket)));
        kids.iter_mut().for_each(Writer::check);
        assert!(opened(process(&servers), &base) <= OPEN_FILES);
        if is_open {
            let mut control = Control::connect(&socket);
            control.get("disk.close", json!({ "disk": "base.qcow2", "force": true }));
        }
        assert!(is_locked(&base));
        command(&["serve", str(&base), "--nbd", "nbd://127.0.0.1:0"]).failure("lock");
    }
    drop(kids);
    servers.stop();
    let expected = scratch.image_of("raw", &bytes_of(&blocks));
    command(&["compare", str(&base), expected.str()]).success();
    drop(server);
}
