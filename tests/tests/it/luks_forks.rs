//! Forks of encrypted disks: overlays and children are encrypted for the key that opened the disk.

use std::path::Path;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, qemu_img, str};
use blockhouse_tests::{Serve, nbd_uri, need, require, run, tool};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;

use crate::luks::{ENCRYPTED, Fixture, SIZE, node, secret};

/// An overlay gets the key that opened its disk, whichever was named first. The key file is not
/// read again: it may have been a pipe, or have another content now.
#[test]
fn an_overlay_has_the_key_that_opened_its_disk() {
    require!(need::tools(&["qemu-img"]));
    let fixture = Fixture::new();
    let path = |name: &str| fixture.scratch.path(name);
    let [other, pipe] = ["other-key", "pipe"].map(path);
    std::fs::write(&other, "of another disk").expect("a file");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
    let [image, over, next] = ["disk.qcow2", "over.qcow2", "next.qcow2"].map(path);
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    let files = [str(&fixture.key), fixture.disk.str(), str(&image)];
    command(&[&convert[..], &ENCRYPTED, &files].concat()).success();
    let (key, into) = (fixture.key.clone(), pipe.clone());
    let writing = std::thread::spawn(move || std::fs::write(into, std::fs::read(key)?));
    let control = fixture.scratch.socket("control");
    let serve = Serve::new(&fixture.scratch, &image).option("--name", "disk");
    let serve = serve.option("--key-file", &other).option("--key-file", &pipe);
    let server = serve.option("--control", &control).start();
    writing.join().expect("it ends").expect("the server reads it");
    let fork = |overlay: &Path| {
        let words = ["ctl", str(&control), "fork", "disk", "--overlay", str(overlay)];
        command(&words).success();
    };
    fork(&over);
    std::fs::write(&other, "something else").expect("a file");
    fork(&next);
    server.stop();
    for overlay in [over, next] {
        let expected = fixture.disk.str();
        let words = ["compare", "--key-file", str(&fixture.key), str(&overlay), expected];
        command(&words).success();
    }
}

/// The files of a fork are encrypted like the disk: its key opens them, in Blockhouse and in QEMU.
#[test]
fn a_fork_of_an_encrypted_disk_is_encrypted() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    for (driver, key) in [("luks", "key-secret"), ("qcow2", "encrypt.key-secret")] {
        let fixture = Fixture::new();
        let path = |name: &str| fixture.scratch.path(name);
        let (image, [over, kid, next]) = (path("disk"), ["over", "kid", "next"].map(path));
        if driver == "luks" {
            std::fs::rename(fixture.of_qemu("made", ""), &image).expect("one folder");
        } else {
            let convert = ["convert", "-f", "raw", "-O", "qcow2"];
            let files = [str(&fixture.key), fixture.disk.str(), str(&image)];
            command(&[&convert[..], &ENCRYPTED, &files].concat()).success();
        }
        let (control, sockets) = (fixture.scratch.socket("control"), fixture.scratch.socket("kid"));
        let start = |image: &Path, format: &str| {
            let serve = Serve::new(&fixture.scratch, image).option("--format", format);
            let serve = serve.option("--key-file", &fixture.key).option("--name", "disk");
            serve.option("--control", &control).start()
        };
        let ctl = |words: &[&str]| command(&[&["ctl", str(&control)], words].concat()).success();
        let write = |pattern: u8, target: &str| {
            let write = format!("write -P {pattern} 64k 64k");
            run(tool("qemu-io").args(["-f", "raw", "-c", &write, target])).success();
        };
        let holds = |pattern: u8, file: &Path| {
            let mut content = fixture.disk.content();
            content[64 << 10..128 << 10].fill(pattern);
            let expected = fixture.scratch.image_of("expected", &content);
            let below = format!("backing.driver={driver},backing.{key}=key");
            let node = node("qcow2", "encrypt.key-secret", file);
            let node = format!("{node},{below},backing.file.filename={}", image.display());
            let other = format!("driver=raw,file.filename={}", expected.str());
            let object = secret(&fixture.key);
            let words = ["compare", "--object", &object, "--image-opts", &node, &other];
            qemu_img(&words).success();
            command(&["check", str(file)]).success();
            let bytes = std::fs::read(file).expect("it is there");
            assert!(!bytes.windows(64).any(|part| part == [pattern; 64]), "it is in the clear");
        };
        let server = start(&image, driver);
        write(7, server.uri());
        let child = format!("kid={}", kid.display());
        ctl(&["fork", "disk", "--overlay", str(&over), "--child", &child]);
        write(8, server.uri());
        let uri = nbd_uri("kid", &sockets);
        ctl(&["export", "kid", &uri]);
        run(tool("qemu-io").args(["-f", "raw", "-c", "read -P 7 64k 64k", &uri])).success();
        write(9, &uri);
        server.stop();
        holds(8, &over);
        holds(9, &kid);
        // An overlay that the user makes must be encrypted, too.
        command(&["create", "-f", "qcow2", str(&next), &SIZE.to_string()]).success();
        let server = start(&over, "qcow2");
        let made = json!({ "disk": "disk", "overlay": next, "made": true });
        let why = ["is not encrypted, and the disk"];
        Control::connect(&control).refused("disk.fork", json!({ "disks": [made] }), -32000, &why);
        std::fs::remove_file(&kid).expect("it is there");
        ctl(&["rollback", "disk"]);
        run(tool("qemu-io").args(["-f", "raw", "-c", "read -P 7 64k 64k", server.uri()])).success();
        server.stop();
        // A fork of an image that is not open is encrypted, too.
        let snapshot = ["snapshot", "create", "-f", driver, "--key-file", str(&fixture.key)];
        command(&[&snapshot[..], &["--external", str(&over), str(&image)]].concat()).success();
        holds(7, &over);
    }
}
