//! How much space the host has left for a disk, and the event before it runs out (`serve
//! --threshold`).

use std::path::Path;
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, str};
use blockhouse_tests::metrics::Metrics;
use blockhouse_tests::nbd::{Client, errno};
use blockhouse_tests::{
    FileSystem, LoopDevice, Scratch, Serve, Server, SmallHost, eventually, require,
};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const INVALID_PARAMS: i64 = -32602;
const FAILED: i64 = -32000;

fn serve(scratch: &Scratch, image: &Path, options: &[(&str, &str)]) -> (Server, Control, Control) {
    let (socket, metrics) = (scratch.socket("control"), scratch.socket("metrics"));
    let serve = Serve::new(scratch, image).option("--control", &socket).option("--name", "disk");
    let serve = serve.option("--metrics", format!("unix:{}", metrics.display()));
    let serve = options.iter().fold(serve, |serve, (name, value)| serve.option(name, value));
    let server = serve.start();
    let mut events = Control::connect(&socket);
    let wanted = ["disk.threshold", "disk.held", "disk.no-space"];
    events.get("event.subscribe", json!({ "events": wanted }));
    (server, Control::connect(&socket), events)
}

fn left(control: &mut Control) -> Option<u64> {
    control.get("disk.list", json!({}))[0]["room-left"].as_u64()
}

fn write(client: &mut Client, number: u64) -> u32 {
    client.write(number * MIB, &vec![1; MIB as usize], 0)
}

/// The next event, which must have this name.
#[track_caller]
fn next(events: &mut Control, name: &str) -> Value {
    let event = events.event();
    assert_eq!(event["event"], name, "{event}");
    event
}

#[test]
fn a_device_tells_before_it_is_full_once_for_each_crossing() {
    let scratch = Scratch::new();
    let file = scratch.image("backing", 32 * MIB);
    let device = require!(LoopDevice::over(&file, &[]));
    command(&["create", "-f", "qcow2", str(device.path()), "64G"]).success();
    let info = json(&command(&["info", "--json", "-f", "qcow2", str(device.path())]).success());
    let at_first = info["blockhouse"]["room-left"].as_u64().expect("a count");
    assert!((28 * MIB..32 * MIB).contains(&at_first), "{info}");
    let options = [("--format", "qcow2"), ("--threshold", "8M")];
    let (server, mut control, mut events) = serve(&scratch, device.path(), &options);
    let mut client = Client::open(&server.address());
    let mut number = 0;
    // The server has to read a table first.
    assert!(eventually(Duration::from_secs(30), || left(&mut control).is_some()));
    // Writes until the event must have come; no event came before, and soon there is no space.
    while left(&mut control).expect("a device tells") >= 8 * MIB {
        assert_eq!(write(&mut client, number), 0);
        number += 1;
    }
    assert!(number > 16, "{number}");
    let told = next(&mut events, "disk.threshold");
    assert!(told["left"].as_u64().is_some_and(|left| left < 8 * MIB), "{told}");
    assert_eq!((&told["disk"], &told["threshold"]), (&"disk".into(), &"8388608".into()));
    let metrics = Metrics::read(&scratch.socket("metrics"));
    let gauge = metrics.sum("blockhouse_room_left_bytes", &[("disk", "disk")]);
    assert!(gauge > 0 && gauge < 8 * MIB, "{gauge}");
    // The event comes once, whatever is written afterwards.
    assert_eq!(write(&mut client, number), 0);
    // More space, and then less again.
    device.lengthen(file.path(), &vec![0xaa; 16 * MIB as usize]);
    control.get("disk.refresh", json!({ "disk": "disk" }));
    assert!(left(&mut control).expect("a device tells") > 16 * MIB);
    // The server checks every half a second whether the threshold is in force again.
    std::thread::sleep(Duration::from_secs(5));
    let refused = loop {
        number += 1;
        match write(&mut client, number) {
            0 => {}
            error => break error,
        }
    };
    assert_eq!(refused, errno::ENOSPC);
    next(&mut events, "disk.threshold");
    next(&mut events, "disk.no-space");
    server.stop();
}

#[test]
fn a_full_device_has_told_before_it_holds_writes() {
    let scratch = Scratch::new();
    let file = scratch.image("backing", 8 * MIB);
    let device = require!(LoopDevice::over(&file, &[]));
    command(&["create", "-f", "qcow2", str(device.path()), "64G"]).success();
    let options = [
        ("--format", "qcow2"),
        ("--threshold", "1%"),
        ("--on-full", "hold"),
        ("--hold-seconds", "1"),
    ];
    let (server, _, mut events) = serve(&scratch, device.path(), &options);
    let mut client = Client::open(&server.address());
    // Writes without a pause.
    let refused = (0..16).map(|number| write(&mut client, number)).find(|&error| error != 0);
    assert_eq!(refused, Some(errno::ENOSPC));
    next(&mut events, "disk.threshold");
    next(&mut events, "disk.held");
    server.stop();
}

#[test]
fn a_file_tells_of_its_file_system_and_what_has_all_its_space_of_nothing() {
    let scratch = Scratch::new();
    let small = require!(SmallHost::new(&scratch, FileSystem::Tmpfs, 16 * MIB));
    let image = small.path("disk.img");
    command(&["create", str(&image), "1G"]).success();
    let (server, mut control, mut events) = serve(&scratch, &image, &[]);
    let mut client = Client::open(&server.address());
    assert_eq!(write(&mut client, 0), 0);
    let before = left(&mut control).expect("a file tells");
    assert!((12 * MIB..16 * MIB).contains(&before), "{before}");
    control.refused(
        "disk.set",
        json!({ "disk": "disk", "threshold": "200%" }),
        INVALID_PARAMS,
        &["1% to 99%"],
    );
    control.get("disk.set", json!({ "disk": "disk", "threshold": "50%" }));
    assert_eq!(control.get("disk.list", json!({}))[0]["threshold"], "50%");
    for number in 1..10 {
        assert_eq!(write(&mut client, number), 0);
    }
    next(&mut events, "disk.threshold");
    // With the threshold off, the same causes no event.
    control.get("disk.set", json!({ "disk": "disk", "threshold": "off" }));
    assert!(control.get("disk.list", json!({}))[0]["threshold"].is_null());
    let full = (10..20).map(|number| write(&mut client, number)).find(|&error| error != 0);
    assert_eq!(full, Some(errno::ENOSPC));
    next(&mut events, "disk.no-space");
    server.stop();
    // A raw device has all its space allocated.
    let file = scratch.image("backing", 8 * MIB);
    let device = require!(LoopDevice::over(&file, &[]));
    let (server, mut control, _) = serve(&scratch, device.path(), &[]);
    assert_eq!(left(&mut control), None);
    let set = json!({ "disk": "disk", "threshold": "1M" });
    control.refused("disk.set", set, FAILED, &["has all its space"]);
    let socket = scratch.socket("control");
    command(&["ctl", str(&socket), "threshold", "disk", "off"]).success();

    server.stop();
}
