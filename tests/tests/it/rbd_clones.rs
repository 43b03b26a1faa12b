//! Forks of disks in Ceph: RBD clones, made while clients write.

use std::path::{Path, PathBuf};

use blockhouse_tests::ceph::{Ceph, ceph};
use blockhouse_tests::image_tool::{command, qemu_img, str};
use blockhouse_tests::nbd::Address;
use blockhouse_tests::{Scratch, Serve, Server, nbd_uri, require, seeded};

use crate::fork::{check_moment, check_one_moment, while_written_in_turns};
use crate::jobs::{self, Writer, beside, ctl};

/// An image with a name that no other test has.
fn image(ceph: &Ceph) -> String {
    let name = format!("disk{}", fastrand::u64(..));
    ceph.rbd(&["create", "--size", &format!("{}B", jobs::SIZE), &format!("rbd/{name}")]).success();
    name
}

fn location(name: &str) -> String {
    format!("rbd:rbd/{name}")
}

/// The list of the image's snapshots.
fn snapshots(ceph: &Ceph, name: &str) -> String {
    ceph.rbd(&["snap", "ls", &format!("rbd/{name}")]).success().stdout
}

fn bytes_in(ceph: &Ceph, scratch: &Scratch, name: &str) -> Vec<u8> {
    let copy = scratch.path("copy.raw");
    let source = ceph.qemu_location(name);
    qemu_img(&["convert", "-f", "raw", "-O", "raw", &source, str(&copy)]).success();
    std::fs::read(copy).expect("a file")
}

/// A server of the images at the socket `all`, under their names.
fn serve(ceph: &Ceph, scratch: &Scratch, names: &[String]) -> Server {
    let paths: Vec<_> = names.iter().map(|name| PathBuf::from(ceph.location(name))).collect();
    let mut serve = Serve::bare(scratch, &paths[0]);
    for path in &paths[1..] {
        serve = serve.also(path);
    }
    let uri = nbd_uri("", scratch.socket("all"));
    serve.export(&uri).option("--control", scratch.socket("control")).start()
}

#[test]
fn a_disk_in_ceph_is_cloned_while_its_client_writes() {
    let ceph = require!(ceph());
    let mut random = seeded();
    let (scratch, name) = (Scratch::new(), image(&ceph));
    let [kid, file, later] = ["kid", "file", "later"].map(|word| format!("{word}-{name}"));
    let server = serve(&ceph, &scratch, std::slice::from_ref(&name));
    let all = Address::Unix(scratch.socket("all"));
    let mut writer = Writer::new(&all, random.fork());
    let before = writer.blocks();
    let child = format!("kid={}", location(&kid));
    let said = ctl(&scratch, &["fork", &name, "--child", &child, "--child-file", &location(&file)]);
    assert!(said.success().stdout.contains("writes were held off for"));
    beside(&mut writer, || {
        ctl(&scratch, &["fork", &name, "--child-file", &location(&later)]).success();
    });
    assert_eq!(snapshots(&ceph, &name), "", "clones need no snapshot of theirs");
    // The child gets its own changes.
    ctl(&scratch, &["export", "kid", &nbd_uri("kid", scratch.socket("kid"))]).success();
    let mut other =
        Writer::on_export(&Address::Unix(scratch.socket("kid")), "kid", before.clone(), random);
    other.check();
    (0..200).for_each(|index| other.write(index * 7));
    other.check();
    writer.check();
    let (changed, history) = (other.bytes(), writer.history());
    drop((writer, other));
    server.stop();
    assert!(bytes_in(&ceph, &scratch, &kid) == changed);
    assert!(bytes_in(&ceph, &scratch, &file) == jobs::bytes_of(&before));
    check_moment(&bytes_in(&ceph, &scratch, &later), &history);
    // After the clones are removed, the cluster has nothing of them.
    for name in [&kid, &file, &later, &name] {
        ceph.rbd(&["rm", "--no-progress", &format!("rbd/{name}")]).success();
    }
}

#[test]
fn disks_in_ceph_are_cloned_at_one_moment() {
    let ceph = require!(ceph());
    let scratch = Scratch::new();
    let names = [image(&ceph), image(&ceph)];
    let server = serve(&ceph, &scratch, &names);
    let all = Address::Unix(scratch.socket("all"));
    let clones = names.each_ref().map(|name| format!("clone-{name}"));
    let words: Vec<_> = names
        .iter()
        .zip(&clones)
        .flat_map(|(name, clone)| {
            ["--child-file".to_owned(), format!("{name}={}", location(clone))]
        })
        .collect();
    let words: Vec<_> = ["fork", &names[0], &names[1]]
        .into_iter()
        .chain(words.iter().map(String::as_str))
        .collect();
    while_written_in_turns(&all, &names, || drop(ctl(&scratch, &words).success()));
    server.stop();
    check_one_moment(&clones.map(|clone| bytes_in(&ceph, &scratch, &clone)));
}

#[test]
fn a_clone_that_cannot_be_made_leaves_nothing() {
    let ceph = require!(ceph());
    let (scratch, name, taken) = (Scratch::new(), image(&ceph), image(&ceph));
    let server = serve(&ceph, &scratch, std::slice::from_ref(&name));
    let fresh = format!("fresh-{name}");
    let refused = |words: &[&str], why: &str| {
        ctl(&scratch, &[&["fork", &name], words].concat()).failure(why);
        assert_eq!(snapshots(&ceph, &name), "");
        command(&["info", &ceph.location(&fresh)]).failure("No such file or directory");
    };
    let (free, taken) = (format!("kid={}", location(&fresh)), location(&taken));
    refused(&["--child", &free, "--child-file", &taken], "choose another name");
    refused(&["--child-file", &taken, "--child", &free], "choose another name");
    refused(&["--child", &free, "--overlay", "over.qcow2"], "leave the overlay out");
    let file = scratch.socket("file.qcow2");
    refused(&["--child", &free, "--child-file", str(&file)], "rbd:POOL/IMAGE");
    refused(&["--child", &free, "--child-file", "rbd:other/file"], "rbd:POOL/IMAGE");
    refused(&[], "name children");
    ctl(&scratch, &["fork", &name, "--child", &free]).success();
    server.stop();
    Serve::new(&Scratch::new(), Path::new(&ceph.location(&fresh))).start().stop();
}
