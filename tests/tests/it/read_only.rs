//! `disk.set`: a disk that becomes read-only while it is served, and writable again.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_tests::control::Control;
use blockhouse_tests::guest::{Guest, LONG, OUT};
use blockhouse_tests::image_tool::{command, qemu_img, str};
use blockhouse_tests::nbd::{Address, Client, Framing, Greeted};
use blockhouse_tests::{Scratch, Serve, Server, eventually, nbd_uri};
use blockhouse_vhost_user::driver::Options;
use serde_json::{Value, json};
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;

const MIB: u64 = 1 << 20;
const EPERM: u32 = 1;
const READ_ONLY_FLAG: u16 = 2;
const VIRTIO_BLK_RO: u64 = 1 << 5;
const VIRTIO_BLK_DISCARD: u64 = 1 << 13;
const VIRTIO_BLK_WRITE_ZEROES: u64 = 1 << 14;

fn serve(scratch: &Scratch, name: &str) -> (Server, Control) {
    let (image, socket) = (scratch.path(name), scratch.socket("control"));
    let serve = Serve::new(scratch, &image).option("--control", &socket);
    let server = serve.option("--create", "4M").start();
    (server, Control::connect(&socket))
}

fn set(control: &mut Control, disk: &str, is_read_only: bool) {
    control.get("disk.set", json!({ "disk": disk, "read-only": is_read_only }));
    assert_eq!(control.get("disk.list", json!({}))[0]["read-only"], is_read_only);
}

#[test]
fn writes_are_refused_until_it_is_writable_again() {
    for name in ["disk.img", "disk.qcow2"] {
        let scratch = Scratch::new();
        let (server, mut control) = serve(&scratch, name);
        let vu = scratch.socket("vu");
        control.get("export.add", json!({ "disk": name, "export": str(&vu) }));
        let mut guest = Guest::connect(&vu, Options::default());
        let mut client = Client::open(&server.address());
        assert_eq!(client.write(0, &[7; 4096], 0), 0);
        set(&mut control, name, true);
        set(&mut control, name, true);
        // Written data is in the image for all readers.
        let copy = scratch.path("copy.raw");
        qemu_img(&["convert", "-U", "-O", "raw", str(&scratch.path(name)), str(&copy)]).success();
        assert_eq!(std::fs::read(&copy).expect("a copy")[..4096], [7; 4096]);
        assert_eq!(client.write(0, &[8; 4096], 0), EPERM);
        assert_eq!(client.read(0, 4096), Ok(vec![7; 4096]));
        assert_eq!(client.flush(), 0);
        guest.post(0, 0, OUT, 0);
        assert_eq!(guest.outcome(0, LONG), Some((0, 1)), "VIRTIO_BLK_S_IOERR");
        control.refused(
            "disk.resize",
            json!({ "disk": name, "size": 8 * MIB }),
            -32000,
            &["reading only"],
        );
        let later = Client::open(&server.address());
        assert_eq!(later.flags() & READ_ONLY_FLAG, READ_ONLY_FLAG);
        later.disconnect();
        set(&mut control, name, false);
        assert_eq!(client.write(0, &[9; 4096], 0), 0);
        guest.write(0, 1, 5);
        assert_eq!(client.read(0, 4096), Ok(vec![9; 4096]));
        server.stop();
    }
}

#[test]
fn an_export_is_read_only_beside_one_that_is_not() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "disk.img");
    let (vu, nbd) = (scratch.socket("vu"), scratch.socket("nbd"));
    let uri = nbd_uri("ro", &nbd);
    for export in [uri.as_str(), str(&vu)] {
        let socket = scratch.socket("control");
        let added = ["ctl", str(&socket), "export", "--read-only", "disk.img"];
        command(&[&added[..], &[export]].concat()).success();
    }
    let mut writer = Client::open(&server.address());
    let mut reader = Greeted::new(&Address::Unix(nbd)).go("ro", Framing::Extended);
    let flags = writer.flags() & READ_ONLY_FLAG;
    assert_eq!((flags, reader.flags() & READ_ONLY_FLAG), (0, READ_ONLY_FLAG));
    assert_eq!(writer.write(0, &[7; 4096], 0), 0);
    assert_eq!(reader.write(0, &[8; 4096], 0), EPERM);
    assert_eq!(reader.flush(), 0);
    assert_eq!(reader.read(0, 4096), Ok(vec![7; 4096]));
    let mut guest = Guest::connect(&vu, Options::default());
    let features = guest.driver.features();
    assert_ne!(features & VIRTIO_BLK_RO, 0);
    assert_eq!(features & (VIRTIO_BLK_DISCARD | VIRTIO_BLK_WRITE_ZEROES), 0);
    guest.post(0, 0, OUT, 0);
    assert_eq!(guest.outcome(0, LONG), Some((0, 1)), "VIRTIO_BLK_S_IOERR");
    let exports = control.get("export.list", json!({}));
    let told: Vec<_> = (0..3).map(|index| exports[index]["read-only"] == true).collect();
    assert_eq!(told, [false, true, true]);
    let table = command(&["ctl", str(&scratch.socket("control")), "exports"]).success();
    assert_eq!(table.stdout.matches("(read-only)").count(), 2, "{}", table.stdout);
    server.stop();
}

#[test]
fn each_write_before_is_kept_and_each_after_is_refused() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "disk.qcow2");
    let (stop, address) = (AtomicBool::new(false), server.address());
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3_u64)
            .map(|region| {
                let (address, stop) = (&address, &stop);
                scope.spawn(move || {
                    let mut client = Client::open(address);
                    let (mut written, mut refused) = (0_u64, 0_u64);
                    while !stop.load(Ordering::SeqCst) || refused == 0 {
                        let bytes = (written + 1).to_be_bytes().repeat(512);
                        match client.write(region * MIB, &bytes, 0) {
                            0 => written += 1,
                            errno => {
                                assert_eq!(errno, EPERM);
                                refused += 1;
                                // A refused write changes nothing.
                                let before = match written {
                                    0 => vec![0; 4096],
                                    _ => written.to_be_bytes().repeat(512),
                                };
                                assert_eq!(client.read(region * MIB, 4096), Ok(before));
                            }
                        }
                    }
                    client.disconnect();
                    written
                })
            })
            .collect();
        for _ in 0..10 {
            set(&mut control, "disk.qcow2", true);
            set(&mut control, "disk.qcow2", false);
        }
        set(&mut control, "disk.qcow2", true);
        stop.store(true, Ordering::SeqCst);
        assert!(
            writers.into_iter().map(|writer| writer.join().expect("no error")).sum::<u64>() > 0
        );
    });
    server.stop();
    qemu_img(&["check", str(&scratch.path("disk.qcow2"))]).success();
}

#[test]
fn what_was_opened_for_reading_stays_so() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", MIB);
    let serve = Serve::new(&scratch, image.path());
    let (server, mut control) = serve.flag("--read-only").start_with_control(&scratch);
    let writable = json!({ "disk": "disk", "read-only": false });
    control.refused("disk.set", writable, -32000, &["opened for reading only", "open it again"]);
    control.get("disk.set", json!({ "disk": "disk", "read-only": true }));
    let disks: Value = control.get("disk.list", json!({}));
    assert_eq!(disks[0]["read-only"], true);
    server.stop();
}

/// The disk moves to another image: it stays read-only during the mirror, and can be made writable
/// there afterwards.
#[test]
fn a_mirror_of_a_disk_that_is_read_only_stays_so() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "disk.qcow2");
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[7; 4096], 0), 0);
    set(&mut control, "disk.qcow2", true);
    mirror(&mut control, &scratch.path("copy.img"), "switch");
    assert_eq!(client.write(0, &[8; 4096], 0), EPERM);
    assert_eq!(client.read(0, 4096), Ok(vec![7; 4096]));
    set(&mut control, "disk.qcow2", false);
    assert_eq!(client.write(4096, &[9; 4096], 0), 0);
    assert_eq!(client.read(4096, 4096), Ok(vec![9; 4096]));
    client.disconnect();
    server.stop();
    let copy = std::fs::read(scratch.path("copy.img")).expect("a mirror");
    assert_eq!((&copy[..4096], &copy[4096..8192]), (&[7; 4096][..], &[9; 4096][..]));
}

/// Another host has the disk, so it cannot be made writable here again.
#[test]
fn a_disk_that_was_handed_over_stays_read_only() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "disk.qcow2");
    mirror(&mut control, &scratch.path("copy.img"), "hand-over");
    let disks: Value = control.get("disk.list", json!({}));
    assert_eq!(disks[0]["read-only"], true);
    let writable = json!({ "disk": "disk.qcow2", "read-only": false });
    control.refused("disk.set", writable, -32000, &["was moved to", "copy.img"]);
    let client = Client::open(&server.address());
    assert_eq!(client.flags() & READ_ONLY_FLAG, READ_ONLY_FLAG);
    client.disconnect();
    server.stop();
}

/// A front-end that reconnects with the features that its driver negotiated before is served, even
/// if the disk's access has changed.
#[test]
fn a_driver_that_goes_on_keeps_its_features() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "disk.qcow2");
    let vu = scratch.socket("vu");
    control.get("export.add", json!({ "disk": "disk.qcow2", "export": str(&vu) }));
    for (earlier, later) in [(false, true), (true, false)] {
        set(&mut control, "disk.qcow2", earlier);
        let offered = frontend(&vu).get_features().expect("features");
        assert_eq!(offered & VIRTIO_BLK_RO != 0, earlier);
        set(&mut control, "disk.qcow2", later);
        let again = frontend(&vu);
        let now = again.get_features().expect("features");
        assert_eq!(now & VIRTIO_BLK_RO != 0, later);
        // A read-only disk does not offer discards and zero writes.
        assert_eq!(now & (VIRTIO_BLK_DISCARD | VIRTIO_BLK_WRITE_ZEROES) != 0, !later);
        again.set_features(offered).expect("they are sent");
        // The answer shows that the connection still works.
        again.get_features().expect("the features were taken");
    }
    server.stop();
}

fn frontend(socket: &Path) -> Frontend {
    let frontend = Frontend::connect(socket, 1).expect("it listens");
    frontend.set_owner().expect("a session");
    frontend
}

/// Mirrors the disk, and completes the mirror.
fn mirror(control: &mut Control, target: &Path, completion: &str) {
    let target = str(target);
    let params = json!({ "kind": "mirror", "disk": "disk.qcow2", "target": target, "job": "m" });
    control.get("job.start", params);
    let is_ready = || {
        let jobs = control.get("job.list", json!({}));
        jobs[0]["status"] == "ready"
    };
    assert!(eventually(LONG, is_ready), "the mirror is to be ready");
    control.get("job.complete", json!({ "job": "m", "hand-over": completion == "hand-over" }));
}
