//! Rate limits (`--limit`): how much is served in a time, how disks share it, which requests never
//! wait, and that the end of a server does not wait.

use std::time::{Duration, Instant};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command as command_line, str};
use blockhouse_tests::nbd::{Client, Request, command};
use blockhouse_tests::shared_limit::FourDisks;
use blockhouse_tests::upgrade::{Servers, is_late, upgrade};
use blockhouse_tests::{Scratch, Serve, Server};
use rustix::process::Signal;
use serde_json::json;

/// Bytes of a read: so few that the replies to all reads fit into a socket's buffer.
const BLOCK: u64 = 512;

fn request(command: u16) -> Request {
    let length = if command == command::FLUSH { 0 } else { BLOCK };
    Request { command, flags: 0, offset: 0, length }
}

/// A server whose disk may transfer one block in a hundred seconds, and a client with 64 waiting
/// reads.
fn exhausted(serve: Serve) -> (Server, Client) {
    let server = serve.option("--limit", "bps=5").start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.read(0, BLOCK).map(|bytes| bytes.len()), Ok(BLOCK as usize));
    for _ in 0..64 {
        client.send(request(command::READ)).expect("the server takes requests");
    }
    // A flush is not limited. When it is answered, the server has received the reads before it.
    let flush = client.send(request(command::FLUSH)).expect("the server takes requests");
    let (cookie, reply) = client.receive().expect("an answer");
    assert_eq!((cookie, reply.error), (flush, 0), "the flush waits behind reads");
    (server, client)
}

#[test]
fn disks_of_a_group_share_a_limit_whatever_their_exports() {
    let scratch = Scratch::new();
    let disks = FourDisks::serve(&scratch, 2, Some("iops=400,group=all"));
    let done = disks.read(16, |done| done.sum() >= 1200);
    // A busy machine makes reads slower, never faster. The budget of a twentieth of a second may
    // have been saved before.
    let most = 400.0 * done.time.as_secs_f64() + 20.0;
    assert!(done.sum() as f64 <= most + 16.0, "{done:?}");
    assert!(done.jain() > 0.9, "{done:?}");
    disks.stop();
}

#[test]
fn without_a_group_each_disk_has_its_limit() {
    let scratch = Scratch::new();
    let disks = FourDisks::serve(&scratch, 1, Some("iops=200,disk=a,disk=c.img"));
    // The other disks are not limited.
    let done = disks.read(8, |done| done.reads[0] >= 200 && done.reads[2] >= 200);
    for limited in [0, 2] {
        let most = 200.0 * done.time.as_secs_f64() + 20.0;
        assert!(done.reads[limited] as f64 <= most, "{done:?}");
        assert!(done.reads[limited + 1] > 2 * done.reads[limited], "{done:?}");
    }
    disks.stop();
}

#[test]
fn operations_and_bytes_and_bursts_hold_at_once() {
    let scratch = Scratch::new();
    // 64 blocks a second by bytes, four times as many for a second: bytes bind before operations
    // do.
    let limit = "iops=1000,bps=256K,burst=4,burst-seconds=1,group=all";
    let disks = FourDisks::serve(&scratch, 1, Some(limit));
    let done = disks.read(4, |done| done.sum() >= 400);
    let seconds = done.time.as_secs_f64() + 0.05;
    let most = (64.0 * (seconds + 3.0)).min(256.0 * seconds);
    assert!(done.sum() as f64 <= most + 17.0, "{done:?}, {most}");
    disks.stop();
}

#[test]
fn a_flush_does_not_wait_behind_reads_that_wait() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (server, _client) = exhausted(Serve::new(&scratch, image.path()));
    server.stop();
}

#[test]
fn a_server_that_stops_answers_what_waits_at_once() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (mut server, mut client) = exhausted(Serve::new(&scratch, image.path()));
    server.signal(Signal::TERM);
    for _ in 0..64 {
        let (_, reply) = client.receive().expect("an answer");
        assert_eq!(reply.error, 0);
    }
    assert!(server.wait(Duration::from_secs(40)).success());
}

#[test]
fn an_upgrade_does_not_wait_for_what_waits_and_the_limits_stay() {
    // An upgrade that is late has let go of the reads, so each try has its own server.
    assert!((0..10).any(|_| is_upgraded_beside_reads()), "all upgrades are late");
}

/// Whether the upgrade was not late.
fn is_upgraded_beside_reads() -> bool {
    let scratch = Scratch::new();
    let _servers = Servers(&scratch);
    let image = scratch.image("disk.img", 1 << 20);
    let control = scratch.socket("control");
    let serve = Serve::new(&scratch, image.path()).option("--control", &control);
    let (mut server, mut client) = exhausted(serve);
    let outcome = upgrade(&control, &[]);
    if is_late(&outcome) {
        return false;
    }
    outcome.success();
    for _ in 0..64 {
        let (_, reply) = client.receive().expect("an answer");
        assert_eq!(reply.error, 0);
    }
    assert!(server.wait(Duration::from_secs(40)).success());
    // The new process has the same limits.
    client.send(request(command::READ)).expect("the server takes requests");
    assert_eq!(client.receive().expect("the first is let go").1.error, 0);
    client.send(request(command::READ)).expect("the server takes requests");
    let flush = client.send(request(command::FLUSH)).expect("the server takes requests");
    assert_eq!(client.receive().expect("an answer").0, flush, "the read waits");
    true
}

#[test]
fn who_waits_costs_no_processor_time() {
    let scratch = Scratch::new();
    let disks = FourDisks::serve(&scratch, 1, Some("iops=20,group=all"));
    let ticks = || {
        let path = format!("/proc/{}/stat", disks.pid().as_raw_nonzero());
        let stat = std::fs::read_to_string(path).expect("the process runs");
        let fields: Vec<_> = stat.rsplit(')').next().expect("fields").split(' ').collect();
        let number = |index: usize| fields[index].parse::<u64>().expect("a number");
        // utime and stime, fields 14 and 15 of proc(5), in hundredths of a second.
        number(12) + number(13)
    };
    let begin = Instant::now();
    let before = ticks();
    disks.read(16, |done| done.sum() >= 40);
    let (used, most) = (ticks() - before, begin.elapsed().as_millis() as u64 / 10 / 4);
    assert!(used <= most, "{used} hundredths of a second in {:?}", begin.elapsed());
    disks.stop();
}

#[test]
fn limits_are_changed_while_requests_wait() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let socket = scratch.socket("control");
    let (server, mut client) =
        exhausted(Serve::new(&scratch, image.path()).option("--control", &socket));
    let mut control = Control::connect(&socket);
    let limits = &control.get("limit.get", json!({}))[0];
    assert_eq!((&limits["waiting"], &limits["limits"]), (&json!(64), &json!({ "bps": 5 })));
    let ctl = |words: &[&str]| command_line(&[&["ctl", str(&socket)], words].concat()).success();
    assert!(ctl(&["limits"]).stdout.contains("disk.img  bps=5   64       64"));
    ctl(&["limit", "disk.img", "bps=1G,iops=100000"]);
    for _ in 0..64 {
        assert_eq!(client.receive().expect("an answer").1.error, 0);
    }
    // A new limit starts without saved budget and without debt.
    ctl(&["limit", "disk.img", "iops-read=1,burst=1.5"]);
    let limits = control.get("limit.get", json!({ "disk": "disk.img" }));
    let expected = json!({ "iops-read": 1, "burst": 1.5, "burst-seconds": 1.0 });
    assert_eq!(limits[0]["limits"], expected);
    for _ in 0..64 {
        client.send(request(command::READ)).expect("the server takes requests");
    }
    ctl(&["limit", "disk.img", "off"]);
    for _ in 0..64 {
        assert_eq!(client.receive().expect("an answer").1.error, 0);
    }
    assert_eq!(control.get("limit.get", json!({}))[0]["limits"], json!({}));
    server.stop();
}

#[test]
fn disks_join_and_leave_groups_while_they_are_served() {
    let scratch = Scratch::new();
    let [first, second] = ["first", "second"].map(|name| scratch.image(name, 1 << 20));
    let (server, mut control) = Serve::new(&scratch, first.path()).start_with_control(&scratch);
    let limits = |control: &mut Control, disk| {
        control.get("limit.get", json!({ "disk": disk }))[0]["limits"].clone()
    };
    let open = |limits| json!({ "path": second.path(), "limits": limits });
    let words = &["\"g\" yet", "iops=1000"];
    control.refused("disk.open", open(json!({ "group": "g" })), -32000, words);
    let join = json!({ "disk": "first", "limits": { "group": "g" } });
    control.refused("limit.set", join.clone(), -32000, words);
    let zero = json!({ "disk": "first", "limits": { "iops": 0 } });
    control.refused("limit.set", zero, -32602, &["iops cannot be 0"]);
    control.refused("limit.set", json!({}), -32602, &["disk or group"]);
    let unknown = json!({ "group": "g", "limits": { "iops": 5 } });
    control.refused("limit.set", unknown, -32000, &["limit.get"]);
    control.get("disk.open", open(json!({ "group": "g", "iops": 300, "bps": "1M" })));
    control.get("limit.set", join);
    let of_group = json!({ "group": "g", "iops": 300, "bps": 1 << 20 });
    assert_eq!(
        [limits(&mut control, "first"), limits(&mut control, "second")],
        [(); 2].map(|()| of_group.clone())
    );
    control.get("limit.set", json!({ "group": "g", "limits": { "iops": 900 } }));
    assert_eq!(limits(&mut control, "first"), json!({ "group": "g", "iops": 900 }));
    control.get("limit.set", json!({ "disk": "second", "limits": { "iops": 7 } }));
    assert_eq!(limits(&mut control, "second"), json!({ "iops": 7 }));
    control.get("disk.close", json!({ "disk": "second" }));
    control.get("limit.set", json!({ "disk": "first" }));
    assert_eq!(limits(&mut control, "first"), json!({}));
    server.stop();
}

#[test]
fn limits_that_make_no_sense_are_wrong_usage() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    for (limit, words) in [
        ("iops=0", "cannot be 0"),
        ("iops=many", "a number of operations a second"),
        ("bps=1,burst=9999", "from 1 to 1000"),
        ("iops=1,disk=other", "there is 'disk.img'"),
        ("disk=disk.img,group=g", "group=g has a rate"),
        ("iopss=1", "burst-seconds, group, disk"),
    ] {
        let serve = Serve::new(&scratch, image.path()).option("--limit", limit);
        serve.refused().wrong_usage(&[words]);
    }
}
