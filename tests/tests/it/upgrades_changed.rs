//! Upgrades of servers whose disks, exports and limits were changed while they ran: the new server
//! has what the old one had.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::guest::Guest;
use blockhouse_tests::image_tool::{command, new_image, qemu_img, str};
use blockhouse_tests::metrics::Metrics;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::upgrade::{Servers, upgrade, upgrade_in_the_end};
use blockhouse_tests::{Scratch, Serve, eventually, nbd_uri, need, require};
use blockhouse_vhost_user::driver::Options;
use serde_json::{Value, json};

use crate::storage_daemon::descriptions;

const MIB: u64 = 1 << 20;
const EPERM: u32 = 1;
const FAILED: i64 = -32000;
const VIRTIO_BLK_RO: u64 = 1 << 5;
const LONG: Duration = Duration::from_secs(60);

/// All lists of disks, exports and limits, without numbers of clients and free space, which change.
fn listed(control: &mut Control) -> Vec<Value> {
    let mut all: Vec<Value> = ["disk.list", "export.list", "limit.get"]
        .into_iter()
        .map(|method| control.get(method, json!({})))
        .collect();
    for entry in all.iter_mut().flat_map(|list| list.as_array_mut().expect("a list")) {
        entry
            .as_object_mut()
            .expect("an object")
            .retain(|key, _| !["clients", "room-left"].contains(&&**key));
    }
    all
}

/// Upgrades, and connects to the new server.
fn upgraded(scratch: &Scratch, servers: &Servers<'_>) -> Control {
    let socket = scratch.socket("control");
    upgrade_in_the_end(&socket, &[]);
    servers.wait_for(1);
    Control::connect(&socket)
}

/// Sockets are numbered in the order in which they were made. The first one is removed here, so
/// that no number equals an index.
#[test]
fn disks_exports_and_limits_are_handed_over_as_they_are() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let first = scratch.image("first", MIB);
    let (nbd, vu, tcp) = (scratch.socket("second"), scratch.socket("vu"), "nbd://127.0.0.1:0/t");
    let server = Serve::new(&scratch, first.path())
        .option("--control", scratch.socket("control"))
        .option("--metrics", format!("unix:{}", scratch.socket("metrics").display()))
        .start();
    let mut control = Control::connect(&scratch.socket("control"));
    for name in ["second.qcow2", "third.qcow2"] {
        command(&["create", str(&scratch.path(name)), "4M"]).success();
        let limits = json!({ "group": "g", "iops": 1_000_000, "burst": 2.5 });
        control.get("disk.open", json!({ "path": scratch.path(name), "limits": limits }));
    }
    control.get("export.add", json!({ "disk": "second.qcow2", "export": nbd_uri("s", &nbd) }));
    let (vu_ro, only) = (scratch.socket("vu-ro"), nbd_uri("ro", &nbd));
    let add_read_only = |control: &mut Control, export: &str| {
        let params = json!({ "disk": "second.qcow2", "export": export, "read-only": true });
        control.get("export.add", params);
    };
    add_read_only(&mut control, &only);
    control.get("export.add", json!({ "disk": "third.qcow2", "export": tcp }));
    control.get("export.add", json!({ "disk": "second.qcow2", "export": str(&vu) }));
    add_read_only(&mut control, str(&vu_ro));
    let mut reader = Client::at(&nbd, "ro");
    // The disk of the command line is closed.
    control.get("disk.close", json!({ "disk": "first", "force": true }));
    let mut client = Client::at(&nbd, "s");
    assert_eq!(client.write(0, &[7; 4096], 0), 0);
    let mut guest = Guest::connect(&vu, Options::default());
    guest.write(0, 8, 3);
    control.get("disk.set", json!({ "disk": "third.qcow2", "read-only": true }));
    control.get("limit.set", json!({ "group": "g", "limits": { "bps": "1G" } }));
    let before = listed(&mut control);
    for round in 1..=2 {
        control = upgraded(&scratch, &servers);
        // A front-end is listed only when its thread runs.
        eventually(LONG, || listed(&mut control) == before);
        assert_eq!(listed(&mut control), before, "upgrade {round}");
        assert_eq!(client.read(0, 4096), Ok(vec![7; 4096]), "the same connection");
        guest.write(0, 16, 4 + round);
        assert_eq!(reader.write(0, &[1; 512], 0), EPERM, "upgrade {round}");
        assert_eq!(Client::at(&nbd, "ro").write(0, &[1; 512], 0), EPERM, "upgrade {round}");
        let later = Guest::connect(&vu_ro, Options::default());
        assert_ne!(later.driver.features() & VIRTIO_BLK_RO, 0);
        assert_eq!(Client::at(&nbd, "s").read(0, 4096), Ok(vec![7; 4096]), "a new one");
    }
    // After upgrades a read-only disk can be made writable, and a limit group has all its members.
    control.get("disk.set", json!({ "disk": "third.qcow2", "read-only": false }));
    control.get("limit.set", json!({ "group": "g", "limits": { "iops": 5_000 } }));
    let limits = control.get("limit.get", json!({}));
    let of_group = json!({ "group": "g", "iops": 5000 });
    assert_eq!([&limits[0]["limits"], &limits[1]["limits"]], [&of_group, &of_group]);
    // A closed disk can be opened again, and an opened one closed.
    control.get("disk.open", json!({ "path": first.path() }));
    drop((client, reader));
    for export in [nbd_uri("s", &nbd), only] {
        control.get("export.remove", json!({ "export": export }));
    }
    assert!(!nbd.exists());
    servers.stop();
    drop(server);
    qemu_img(&["check", str(&scratch.path("second.qcow2"))]).success();
}

#[test]
fn descriptions_of_exports_are_handed_over() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let image = scratch.image("disk", MIB);
    let control_socket = scratch.socket("control");
    let server = Serve::new(&scratch, image.path())
        .export(&nbd_uri("first", scratch.socket("first")))
        .option("-D", "of the command line")
        .option("--control", &control_socket)
        .start();
    let mut control = Control::connect(&control_socket);
    let socket = scratch.socket("second");
    for (name, text) in [("a", "of a request"), ("b", ""), ("c", "x".repeat(4096).as_str())] {
        let export = nbd_uri(name, &socket);
        control.get("export.add", json!({ "disk": "disk", "export": export, "description": text }));
    }
    let too_long =
        json!({ "disk": "disk", "export": nbd_uri("d", &socket), "description": "x".repeat(4097) });
    control.refused("export.add", too_long, FAILED, &["description", "more than 4096 bytes"]);
    for upgrade in 0..=2 {
        let first = descriptions(&scratch.socket("first"), "first");
        assert_eq!(first, ["of the command line"; 2], "upgrade {upgrade}");
        assert_eq!(descriptions(&socket, "a"), ["of a request"; 2], "upgrade {upgrade}");
        assert_eq!(descriptions(&socket, "b"), [Value::Null, Value::Null], "upgrade {upgrade}");
        assert_eq!(descriptions(&socket, "c"), ["x".repeat(4096), "x".repeat(4096)]);
        control = upgraded(&scratch, &servers);
    }
    servers.stop();
    drop((control, server));
}

#[test]
fn a_disk_that_is_read_only_refuses_writes_in_the_new_server() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let image = scratch.image("disk", MIB);
    let line = Serve::new(&scratch, image.path());
    let server = line.option("--control", scratch.socket("control")).start();
    let mut control = Control::connect(&scratch.socket("control"));
    let mut client = Client::open(&server.address());
    control.get("disk.set", json!({ "disk": "disk", "read-only": true }));
    let mut control = upgraded(&scratch, &servers);
    assert_eq!(client.write(0, &[1; 512], 0), EPERM);
    control.get("disk.set", json!({ "disk": "disk", "read-only": false }));
    assert_eq!(client.write(0, &[1; 512], 0), 0);
    servers.stop();
    drop(server);
}

#[test]
fn a_write_threshold_and_an_added_socket_are_handed_over() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (image, own) = (scratch.path("disk.qcow2"), scratch.socket("own"));
    command(&["create", str(&image), "4M"]).success();
    let line = Serve::new(&scratch, &image).option("--control", scratch.socket("control"));
    let server = line.start();
    let mut control = Control::connect(&scratch.socket("control"));
    let threshold = json!({ "disk": "disk.qcow2", "write-threshold": MIB });
    control.get("disk.set", threshold);
    control.get("socket.add", json!({ "address": nbd_uri("", &own), "max-connections": 1 }));
    let export = nbd_uri("s", &own);
    control.get("export.add", json!({ "disk": "disk.qcow2", "export": export }));
    for _ in 0..2 {
        control = upgraded(&scratch, &servers);
    }
    control.get("event.subscribe", json!({ "events": ["disk.write-threshold"] }));
    let mut client = Client::at(&own, "s");
    let mut second = UnixStream::connect(&own).expect("it listens");
    second.set_read_timeout(Some(Duration::from_millis(300))).expect("a socket");
    assert!(second.read(&mut [0]).is_err(), "one client at a time");
    assert_eq!(client.write(0, &[1; 2 * MIB as usize], 0), 0);
    let event = control.event();
    assert_eq!((&event["disk"], &event["threshold"]), (&json!("disk.qcow2"), &json!(MIB)));
    drop((client, second));
    control.get("export.remove", json!({ "export": export }));
    assert!(own.exists(), "it listens while it has no exports");
    control.get("socket.remove", json!({ "address": nbd_uri("", &own) }));
    assert!(!own.exists());
    servers.stop();
    drop(server);
}

/// The image that the disk has moved to is handed over, more than once, and the image at the old
/// path is not touched.
#[test]
fn a_disk_that_a_mirror_has_moved_is_handed_over_at_its_new_place() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let image = scratch.image("disk.img", MIB);
    let line = Serve::new(&scratch, image.path());
    let server = line.option("--control", scratch.socket("control")).start();
    let mut control = Control::connect(&scratch.socket("control"));
    let mut client = Client::open(&server.address());
    let target = scratch.path("moved.qcow2");
    let job = json!({ "kind": "mirror", "disk": "disk.img", "target": target, "job": "m" });
    control.get("job.start", job);
    let refused = upgrade(&scratch.socket("control"), &[]);
    refused.failure("the job \"m\", a mirror of the disk \"disk.img\", goes on");
    let is_ready = || control.get("job.list", json!({}))[0]["status"] == "ready";
    assert!(eventually(LONG, is_ready), "the mirror is to be ready");
    control.get("job.complete", json!({ "job": "m" }));
    for round in 1..=2 {
        assert_eq!(client.write(0, &[round; 4096], 0), 0);
        control = upgraded(&scratch, &servers);
        let disks = control.get("disk.list", json!({}));
        assert_eq!((&disks[0]["path"], &disks[0]["format"]), (&json!(target), &json!("qcow2")));
        assert_eq!(client.read(0, 4096), Ok(vec![round; 4096]));
    }
    servers.stop();
    drop(server);
    let copy = scratch.path("copy.img");
    qemu_img(&["check", str(&target)]).success();
    qemu_img(&["convert", "-O", "raw", str(&target), str(&copy)]).success();
    assert_eq!(std::fs::read(copy).expect("a copy")[..4096], [2; 4096]);
}

#[test]
fn counters_go_on() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let image = new_image(&scratch, "disk.qcow2", "4M");
    let metrics = scratch.socket("metrics");
    let server = Serve::new(&scratch, &image)
        .option("--control", scratch.socket("control"))
        .option("--metrics", format!("unix:{}", metrics.display()))
        .start();
    let vu = scratch.socket("vu");
    let mut control = Control::connect(&scratch.socket("control"));
    control.get("export.add", json!({ "disk": "disk.qcow2", "export": str(&vu) }));
    let mut guest = Guest::connect(&vu, Options::default());
    guest.write(0, 3, 3);
    let mut client = Client::open(&server.address());
    let mut last = Metrics::read(&metrics);
    for round in 0..3 {
        assert_eq!(client.write(round * MIB, &[1; 4096], 0), 0);
        assert_ne!(client.read(64 * MIB, 512), Ok(vec![0; 512]), "past the end");
        assert_eq!(client.flush(), 0);
        let before = Metrics::read(&metrics);
        assert!(not_less(&before, &last), "{round}");
        control = upgraded(&scratch, &servers);
        // The old server releases its metrics address when it ends.
        assert!(eventually(LONG, || std::os::unix::net::UnixStream::connect(&metrics).is_ok()));
        last = Metrics::read(&metrics);
        assert!(not_less(&last, &before), "{round}");
        let labels = [("export", "nbd"), ("operation", "write")];
        assert_eq!(last.sum("blockhouse_requests_total", &labels), round + 1);
        for kind in ["nbd", "vhost-user"] {
            let connections = "blockhouse_client_connections_total";
            assert_eq!(last.sum(connections, &[("export", kind)]), 1, "the same one: {kind}");
            let clients = || Metrics::read(&metrics).sum("blockhouse_clients", &[("export", kind)]);
            assert!(eventually(LONG, || clients() == 1), "{kind}");
        }
        let durations = "blockhouse_request_duration_seconds";
        assert_eq!(last.sum(durations, &labels), round + 1);
        let stats = control.get("disk.stats", json!({}));
        assert_eq!(stats[0]["writes"], round + 2, "one is the guest's");
        let start = "blockhouse_start_time_seconds";
        assert_eq!(last.sum(start, &[]), before.sum(start, &[]));
    }
    servers.stop();
    drop(server);
}

/// Whether each counter is at least its value before.
fn not_less(now: &Metrics, before: &Metrics) -> bool {
    before.counters().all(|(name, value)| {
        let is_kept = now.counters().any(|(other, now)| other == name && now >= value);
        if !is_kept {
            eprintln!("{name}: was {value}");
        }
        is_kept
    })
}

/// After an upgrade, the next reload compares the file with the configuration that the old server
/// had read.
#[test]
fn a_reload_after_an_upgrade_changes_what_the_file_has_changed() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let images = ["a", "b", "c", "d"].map(|name| scratch.image(name, MIB));
    let file = scratch.socket("server.toml");
    let disk = |index: usize| {
        let name = ["a", "b", "c", "d"][index];
        let export = nbd_uri(name, scratch.socket("disks"));
        format!("[[disk]]\npath = {:?}\nexports = [{export:?}]\n", images[index].str())
    };
    let write = |disks: &[usize]| {
        let control = scratch.socket("control");
        let disks: String = disks.iter().map(|index| disk(*index)).collect();
        let text = format!("[server]\ncontrol = {:?}\n{disks}", str(&control));
        std::fs::write(&file, text).expect("a file of ours");
    };
    write(&[0, 1]);
    let server = Serve::without_image(&scratch).option("--config", &file).ready_lines(2).start();
    let mut control = Control::connect(&scratch.socket("control"));
    control.get("disk.open", json!({ "path": images[3].path() }));
    // A change of the file has no effect before the reload.
    write(&[1, 2]);
    let mut control_of_new = upgraded(&scratch, &servers);
    let names = |control: &mut Control| {
        let disks = control.get("disk.list", json!({}));
        let disks = disks.as_array().expect("a list").iter();
        disks.map(|disk| disk["disk"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&mut control_of_new), ["a", "b", "d"]);
    let done = control_of_new.get("server.reload", json!({}));
    assert_eq!((&done["opened"], &done["closed"]), (&json!(["c"]), &json!(["a"])));
    assert_eq!(done["failed"], json!([]));
    assert_eq!(names(&mut control_of_new), ["b", "c", "d"]);
    servers.stop();
    drop(server);
}
