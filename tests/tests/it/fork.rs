//! Forks of disks that clients write to: the clients notice nothing, each child has the content of
//! its disk at the fork, and after any kill the next server serves the right content.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{check_after_kill, command, new_image, qemu_img, str};
use blockhouse_tests::nbd::{Address, Framing, Greeted};
use blockhouse_tests::typed::{Folder, Serving, commands};
use blockhouse_tests::upgrade::{Servers, upgrade_under_load};
use blockhouse_tests::{Scratch, Serve, Server, nbd_uri, seeded};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::jobs::{BLOCK, FAILED, SIZE, Writer, beside, bytes_of, content, ctl, serve, wait_for};

const JOBS: &str = include_str!("../../../docs/jobs.md");

/// A new image of the usual size.
pub(crate) fn image(scratch: &Scratch, name: &str) -> PathBuf {
    new_image(scratch, name, &SIZE.to_string())
}

/// Checks that QEMU reads these blocks from an image, and finds no errors in it.
pub(crate) fn check_file(scratch: &Scratch, path: &Path, blocks: &[u64]) {
    let expected = scratch.image_of("expected", &bytes_of(blocks));
    let words = ["compare", "-f", "qcow2", "-F", "raw", str(path), expected.str()];
    qemu_img(&words).success();
    qemu_img(&["check", "-f", "qcow2", str(path)]).success();
}

/// QEMU's description of a chain: the paths from the top down, with their formats.
fn chain(path: &Path) -> Vec<(String, String)> {
    let info = qemu_img(&["info", "--backing-chain", "--output=json", str(path)]).success();
    let info: Value = serde_json::from_str(&info.stdout).expect("JSON");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let images = info.as_array().expect("a list").iter();
    images.map(|image| (text(&image["filename"]), text(&image["format"]))).collect()
}

pub(crate) fn path_of(control: &mut Control, disk: &str) -> String {
    let disks = control.get("disk.list", json!({}));
    let found = disks.as_array().into_iter().flatten().find(|one| one["disk"] == disk);
    found.expect("it is open")["path"].as_str().expect("text").to_owned()
}

/// A server of an image, with a client that has written to half of the disk.
pub(crate) fn written(scratch: &Scratch, image: &Path, random: Rng) -> (Server, Control, Writer) {
    let (server, control) = serve(scratch, image);
    let writer = Writer::new(&server.address(), random);
    (server, control, writer)
}

#[test]
fn a_disk_goes_on_in_an_overlay_and_children_are_what_it_was() {
    let mut random = seeded();
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let path = image(&scratch, name);
        let (server, mut control, mut writer) = written(&scratch, &path, random.fork());
        let before = writer.blocks();
        let [over, kid, file] =
            ["over.qcow2", "kid.qcow2", "file.qcow2"].map(|one| scratch.path(one));
        let child = format!("kid={}", kid.display());
        let words =
            ["fork", name, "--overlay", str(&over), "--child", &child, "--child-file", str(&file)];
        let said = ctl(&scratch, &words).success().stdout;
        assert!(said.contains("writes were held off for"), "{said}");
        assert_eq!(path_of(&mut control, name), str(&over));
        // QEMU reads the child that is a file while the disk is in use.
        beside(&mut writer, || check_file(&scratch, &file, &before));
        // The other child is a disk of this server, and gets its own changes.
        let uri = nbd_uri("kid", scratch.socket("kid"));
        ctl(&scratch, &["export", "kid", &uri]).success();
        let address = Address::Unix(scratch.socket("kid"));
        let mut other = Writer::on_export(&address, "kid", before.clone(), random.fork());
        other.check();
        beside(&mut writer, || (0..200).for_each(|index| other.write(index * 7)));
        other.check();
        writer.check();
        assert_eq!(other.client.flush(), 0);
        // After a second fork the first overlay is a layer, too; the server chooses the name of the
        // new overlay.
        ctl(&scratch, &["fork", name]).success();
        let second = PathBuf::from(path_of(&mut control, name));
        assert_eq!(second, scratch.path("over.1.qcow2"));
        beside(&mut writer, || ());
        writer.check();
        let (ours, others) = (writer.blocks(), other.blocks());
        drop((writer, other, control));
        server.stop();
        check_file(&scratch, &second, &ours);
        check_file(&scratch, &kid, &others);
        check_file(&scratch, &file, &before);
        let format = if name == "disk.img" { "raw" } else { "qcow2" };
        let formats: Vec<_> = chain(&second).into_iter().map(|(_, format)| format).collect();
        assert_eq!(formats, ["qcow2", "qcow2", format]);
        // The old command line refuses an image that is no longer the disk.
        command(&["serve", str(&path)]).failure("goes on in");
        command(&["serve", str(&over)]).failure("over.1.qcow2");
        let server = Serve::new(&scratch, &second).start();
        Writer::on(&server.address(), ours, random.fork()).check();
        server.stop();
    }
}

/// Checks that `found` is the content at one moment of a disk whose client made the writes of
/// `history`.
pub(crate) fn check_moment(found: &[u8], history: &[(usize, u64)]) {
    let number = |block: &[u8]| u64::from_be_bytes(block[..8].try_into().expect("8 bytes"));
    let numbers: Vec<_> = found.chunks(BLOCK as usize).map(number).collect();
    let last = *numbers.iter().max().expect("blocks");
    // The client writes one block after the other, so the highest number shows the moment.
    let mut expected = vec![0; numbers.len()];
    let until = history.iter().take_while(|(_, number)| *number <= last);
    until.for_each(|(index, number)| expected[*index] = *number);
    assert!(numbers == expected, "no moment of the disk");
    assert!(found == bytes_of(&expected), "a block is torn");
}

#[test]
fn a_child_is_what_the_disk_was_at_one_moment_of_its_writes() {
    let mut random = seeded();
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let path = image(&scratch, name);
        let (server, _control, mut writer) = written(&scratch, &path, random.fork());
        let files: Vec<_> =
            (0..8).map(|number| scratch.path(&format!("file{number}.qcow2"))).collect();
        beside(&mut writer, || {
            for file in &files {
                ctl(&scratch, &["fork", name, "--child-file", str(file)]).success();
            }
        });
        writer.check();
        let (history, _) = (writer.history(), drop(writer));
        server.stop();
        for file in &files {
            let found = scratch.path("found.raw");
            qemu_img(&["convert", "-f", "qcow2", "-O", "raw", str(file), str(&found)]).success();
            check_moment(&std::fs::read(&found).expect("a file"), &history);
        }
    }
}

/// A machine that rests can be branched any number of times.
#[test]
fn a_disk_that_was_not_written_to_goes_on_in_its_overlay() {
    let mut random = seeded();
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let path = image(&scratch, name);
        let (server, mut control, mut writer) = written(&scratch, &path, random.fork());
        let first = writer.blocks();
        let file = |number: usize| scratch.path(&format!("file{number}.qcow2"));
        let fork = |control: &mut Control, number: usize| {
            let named = (number % 50 == 1).then(|| format!("kid{number}"));
            let child = json!({ "path": file(number), "name": named });
            let disks = json!([{ "disk": name, "children": [child] }]);
            control.get("disk.fork", json!({ "disks": disks }))["disks"][0].clone()
        };
        let forked = fork(&mut control, 0);
        for number in 1..250 {
            assert_eq!(fork(&mut control, number)["overlay"], forked["overlay"]);
        }
        let overlay = PathBuf::from(path_of(&mut control, name));
        assert_eq!(str(&overlay), forked["overlay"].as_str().expect("text"));
        // A child has the layer also when the disk has changed, and changes of its own.
        ctl(&scratch, &["rollback", name, "--force"]).failure("kid");
        writer.write(0);
        writer.check();
        let uri = nbd_uri("kid201", scratch.socket("kid"));
        ctl(&scratch, &["export", "kid201", &uri]).success();
        let address = Address::Unix(scratch.socket("kid"));
        let mut other = Writer::on_export(&address, "kid201", first.clone(), random.fork());
        other.check();
        other.write(1);
        other.check();
        // The overlay has changes now, so that the next fork makes another.
        let again = fork(&mut control, 250);
        assert_eq!(again["layer"], forked["overlay"]);
        // So does a fork to roll back to, and one of an overlay with something of its own.
        ctl(&scratch, &["fork", name]).success();
        assert_eq!(path_of(&mut control, name), str(&scratch.path("disk.3.qcow2")));
        ctl(&scratch, &["snapshot", "create", name, "s"]).success();
        let apart = fork(&mut control, 251);
        assert_eq!(apart["layer"], str(&scratch.path("disk.3.qcow2")));
        let (ours, others) = (writer.blocks(), other.blocks());
        drop((writer, other, control));
        server.stop();
        assert_eq!(chain(&overlay).len(), 2);
        check_file(&scratch, &file(0), &first);
        check_file(&scratch, &file(249), &first);
        check_file(&scratch, &file(201), &others);
        check_file(&scratch, &file(250), &ours);
        assert_eq!(chain(&file(250)).len(), 3);
    }
}

#[test]
fn several_disks_are_forked_at_one_moment() {
    let scratch = Scratch::new();
    let names = ["a.img", "b.qcow2"];
    let paths = names.map(|name| image(&scratch, name));
    let control = scratch.socket("control");
    let socket = scratch.socket("all");
    let serve = Serve::bare(&scratch, &paths[0]).also(&paths[1]);
    let server = serve.export(&nbd_uri("", &socket)).option("--control", &control).start();
    let address = Address::Unix(socket);
    let mut control = Control::connect(&control);
    let disks: Vec<_> = control
        .get("disk.list", json!({}))
        .as_array()
        .expect("a list")
        .iter()
        .map(|disk| disk["disk"].as_str().expect("text").to_owned())
        .collect();
    let files = [scratch.path("fa.qcow2"), scratch.path("fb.qcow2")];
    while_written_in_turns(&address, &disks, || {
        for round in 0..5 {
            let fork = |index: usize| {
                let file = format!("{}.{round}", files[index].display());
                json!({ "disk": disks[index], "children": [{ "path": file }] })
            };
            control.get("disk.fork", json!({ "disks": [fork(1), fork(0)] }));
        }
    });
    drop(control);
    server.stop();
    for round in 0..5 {
        let forked = files.each_ref().map(|file| {
            let (file, raw) = (format!("{}.{round}", file.display()), scratch.path("raw"));
            qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &file, str(&raw)]).success();
            std::fs::read(&raw).expect("a file")
        });
        check_one_moment(&forked);
    }
}

/// Writes the same number to the first block of one disk, then of the other, and so on with the
/// next numbers, while `act` runs.
pub(crate) fn while_written_in_turns(address: &Address, disks: &[String], act: impl FnOnce()) {
    let mut clients = disks
        .iter()
        .map(|disk| Greeted::new(address).go(disk, Framing::Simple))
        .collect::<Vec<_>>();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut number = 0;
            while !stop.load(Ordering::SeqCst) {
                number += 1;
                for client in &mut clients {
                    assert_eq!(client.write(0, &content(number), 0), 0);
                }
            }
            number
        });
        std::thread::sleep(Duration::from_millis(100));
        act();
        stop.store(true, Ordering::SeqCst);
        assert!(writing.join().expect("the clients go on") > 5);
    });
}

/// Checks that two disks that were [written in turns](while_written_in_turns) were forked at one
/// moment: the second disk is never ahead of the first.
pub(crate) fn check_one_moment(forked: &[Vec<u8>; 2]) {
    let [a, b] =
        forked.each_ref().map(|disk| u64::from_be_bytes(disk[..8].try_into().expect("8 bytes")));
    assert!(a > 0 && (a == b || a == b + 1), "{a} and {b}");
}

#[test]
fn after_a_kill_what_is_served_again_is_the_disk() {
    let mut random = seeded();
    let mut forked = 0;
    for round in 0..24 {
        let scratch = Scratch::new();
        let name = ["disk.img", "disk.qcow2"][round % 2];
        let path = image(&scratch, name);
        let (server, mut control, mut writer) = written(&scratch, &path, random.fork());
        let (over, file) = (scratch.path("over.qcow2"), scratch.path("file.qcow2"));
        let params =
            json!({ "disks": [{ "disk": name, "overlay": over, "children": [{ "path": file }] }] });
        let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "disk.fork", "params": params });
        control.send(call.to_string().as_bytes()).expect("the server listens");
        let began = std::time::Instant::now();
        let until = Duration::from_micros(random.u64(..60_000));
        // Without flushes: answered writes survive the kill of the process in any case.
        while began.elapsed() < until {
            writer.write(random.usize(..(SIZE / BLOCK) as usize));
        }
        server.signal(Signal::KILL);
        drop((server, control));
        let blocks = writer.blocks();
        drop(writer);
        let disk = if scratch.path(&format!("{name}.moved")).exists() {
            command(&["serve", str(&path)]).failure("goes on in");
            forked += 1;
            &over
        } else {
            &path
        };
        let server = Serve::new(&scratch, disk).start();
        let mut writer = Writer::on(&server.address(), blocks, random.fork());
        writer.check();
        beside(&mut writer, || ());
        writer.check();
        drop(writer);
        server.stop();
        if file.exists() && disk == &over {
            check_after_kill(&file);
        }
    }
    eprintln!("{forked} of 24 were killed after the record");
}

#[test]
fn a_server_is_upgraded_after_a_fork() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.qcow2");
    let (server, mut control, mut writer) = written(&scratch, &path, seeded());
    ctl(&scratch, &["fork", "disk.qcow2"]).success();
    beside(&mut writer, || ());
    ctl(
        &scratch,
        &["fork", "disk.qcow2", "--child", &format!("kid={}", scratch.path("kid.qcow2").display())],
    )
    .success();
    let socket = scratch.socket("control");
    control.get("disk.close", json!({ "disk": "kid" }));
    drop(control);
    let servers = Servers(&scratch);
    beside(&mut writer, || upgrade_under_load(&socket));
    writer.check();
    let mut control = Control::connect(&socket);
    assert_eq!(path_of(&mut control, "disk.qcow2"), str(&scratch.path("disk.2.qcow2")));
    // The disk can be forked again.
    ctl(&scratch, &["fork", "disk.qcow2"]).success();
    beside(&mut writer, || ());
    writer.check();
    drop((writer, control, server));
    servers.stop();
}

#[test]
fn a_commit_makes_the_layer_the_disk_again() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.img");
    let (server, mut control, mut writer) = written(&scratch, &path, seeded());
    let over = scratch.path("over.qcow2");
    let child = format!("kid={}", scratch.path("kid.qcow2").display());
    ctl(&scratch, &["fork", "disk.img", "--overlay", str(&over), "--child", &child]).success();
    beside(&mut writer, || ());
    let commit = json!({ "kind": "commit", "disk": "disk.img", "job": "c" });
    control.refused("job.start", commit.clone(), FAILED, &["layer of other disks"]);
    control.get("disk.close", json!({ "disk": "kid" }));
    beside(&mut writer, || {
        control.get("job.start", commit);
        wait_for(&mut control, "c", "ready");
        command(&["serve", str(&path), "--nbd", "nbd://127.0.0.1:0"]).failure("goes on in");
        ctl(&scratch, &["job", "c", "complete"]).success();
    });
    writer.check();
    assert_eq!(path_of(&mut control, "disk.img"), str(&path));
    let blocks = writer.blocks();
    drop((writer, control));
    server.stop();
    command(&["serve", str(&over)]).failure("was moved to");
    let server = Serve::new(&scratch, &path).start();
    Writer::on(&server.address(), blocks, seeded()).check();
    server.stop();
}

#[test]
fn an_external_snapshot_is_taken_of_an_image_and_of_a_served_one() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.img");
    let (over, second) = (scratch.path("over.qcow2"), scratch.path("second.qcow2"));
    let snapshot = |more: &[&str]| command(&[&["snapshot", "create"], more].concat());
    snapshot(&["--external", str(&over), str(&path)]).success();
    command(&["serve", str(&path)]).failure("goes on in");
    let (server, mut control) = serve(&scratch, &over);
    let mut writer = Writer::new(&server.address(), seeded());
    let before = writer.blocks();
    let socket = scratch.socket("control");
    snapshot(&["--control", str(&socket), "--external", str(&second), str(&over)]).success();
    assert_eq!(path_of(&mut control, "over.qcow2"), str(&second));
    beside(&mut writer, || ());
    let blocks = writer.blocks();
    drop((writer, control));
    server.stop();
    check_file(&scratch, &over, &before);
    check_file(&scratch, &second, &blocks);
    snapshot(&["--external", str(&scratch.path("third.qcow2")), str(&over)]).failure("goes on in");
    snapshot(&[str(&path)]).failure("NAME");
}

#[test]
fn many_disks_are_over_one_read_only_image_that_is_open_once() {
    const CHILDREN: usize = 100;
    let scratch = Scratch::new();
    let path = image(&scratch, "base.qcow2");
    let (server, control) = serve(&scratch, &path);
    let writer = Writer::new(&server.address(), seeded());
    let blocks = writer.blocks();
    drop((writer, control));
    server.stop();
    let socket = scratch.socket("control");
    let server =
        Serve::new(&scratch, &path).flag("--read-only").option("--control", &socket).start();
    let mut control = Control::connect(&socket);
    let open_files = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", server.pid().as_raw_nonzero()))
            .expect("a process");
        all.filter_map(|one| std::fs::read_link(one.expect("a descriptor").path()).ok())
            .collect::<Vec<_>>()
    };
    let of_base = |files: &[PathBuf]| files.iter().filter(|file| **file == path).count();
    let (before, memory) = (open_files(), server.resident_memory());
    let child = |number: usize| json!({ "name": format!("k{number}"), "path": scratch.path(&format!("k{number}.qcow2")) });
    let children: Vec<_> = (0..CHILDREN).map(child).collect();
    let began = std::time::Instant::now();
    let done = control
        .get("disk.fork", json!({ "disks": [{ "disk": "base.qcow2", "children": children }] }));
    let files = open_files();
    eprintln!(
        "{CHILDREN} children in {:?}, {} descriptors and {} KiB more",
        began.elapsed(),
        files.len() - before.len(),
        (server.resident_memory() - memory) >> 10
    );
    assert_eq!(done["disks"][0].get("overlay"), None);
    assert_eq!(of_base(&files), of_base(&before), "the base is opened once");
    let more = files.len() - before.len();
    assert!(more <= 3 * CHILDREN + 8, "{more} descriptors");
    for number in [0, CHILDREN - 1] {
        let (name, place) = (format!("k{number}"), scratch.socket(&format!("k{number}")));
        let uri = nbd_uri(&name, &place);
        control.get("export.add", json!({ "disk": name, "export": uri }));
        let mut writer = Writer::on_export(&Address::Unix(place), &name, blocks.clone(), seeded());
        writer.check();
        (0..200).for_each(|index| writer.write(index * 3));
        writer.check();
    }
    let refused = json!({ "disks": [{ "disk": "base.qcow2", "overlay": scratch.path("o"), "children": [] }] });
    control.refused("disk.fork", refused, FAILED, &["read-only"]);
    drop(control);
    server.stop();
    check_file(&scratch, &scratch.path("k1.qcow2"), &blocks);
    check_file(&scratch, &path, &blocks);
}

#[test]
fn what_cannot_be_forked_is_refused_and_leaves_nothing() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.qcow2");
    let (server, mut control) = serve(&scratch, &path);
    let mut writer = Writer::new(&server.address(), seeded());
    let files = || {
        let entries = std::fs::read_dir(path.parent().expect("a folder")).expect("a folder");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("a file").file_name()).collect();
        names.sort();
        names
    };
    let taken = image(&scratch, "taken.qcow2");
    let read_only = image(&scratch, "read-only.img");
    control.get("disk.open", json!({ "path": read_only, "read-only": true }));
    let before = files();
    let new = scratch.path("new.qcow2");
    let of = |disk: &str, overlay: &Path, children: Value| json!({ "disks": [{ "disk": disk, "overlay": overlay, "children": children }] });
    let child = json!([{ "path": taken }]);
    for (params, words) in [
        (of("none", &new, json!([])), "no disk is called"),
        (of("disk.qcow2", &taken, json!([])), "exists already"),
        (of("disk.qcow2", &new, child), "exists already"),
        (of("disk.qcow2", &new, json!([{ "path": new }])), "exists already"),
        (
            of("disk.qcow2", &new, json!([{ "path": scratch.path("k"), "name": "disk.qcow2" }])),
            "named twice",
        ),
        (
            of("disk.qcow2", &new, json!([{ "path": scratch.path("k"), "name": "read-only.img" }])),
            "is called",
        ),
        (of("disk.qcow2", &scratch.path("no/such/file"), json!([])), "folder"),
        (of("read-only.img", &new, json!([])), "read-only"),
    ] {
        beside(&mut writer, || control.refused("disk.fork", params, FAILED, &[words]));
        assert_eq!(files(), before, "{words}");
    }
    let target = scratch.path("target.img");
    control.get(
        "job.start",
        json!({ "kind": "mirror", "disk": "disk.qcow2", "target": target, "job": "m" }),
    );
    control.refused("disk.fork", of("disk.qcow2", &new, json!([])), FAILED, &["the job"]);
    control.get("job.cancel", json!({ "job": "m" }));
    wait_for(&mut control, "m", "cancelled");
    assert_eq!(path_of(&mut control, "disk.qcow2"), str(&path));
    beside(&mut writer, || ());
    writer.check();
    drop((writer, control));
    server.stop();
    assert_eq!(files(), before);
}

#[test]
fn a_second_machine_gets_its_disk_as_typed() {
    let (_, section) = JOBS.split_once("## Forks").expect("a section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let folder = Folder::new();
    let mut serving = None;
    let lines = commands(section, "");
    assert!(lines.len() > 5, "{lines:?}");
    for line in lines {
        if line.starts_with("blockhouse serve") {
            serving = Some(Serving::start(&folder, line))
        } else {
            _ = folder.run(line)
        }
        if line.contains(" export ") {
            assert!(folder.path("try.sock").exists(), "a second machine can start");
        }
    }
    serving.expect("a server").stop();
    assert!(folder.path("disk.1.qcow2").exists() && !folder.path("try.qcow2").exists());
    Serving::start(&folder, "blockhouse serve disk.1.qcow2 --nbd 'nbd+unix:///?socket=again.sock'")
        .stop();
}
