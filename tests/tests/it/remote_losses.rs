//! Images on a server that returns without writes that it had answered: programs that rely on it
//! get an error, or lose nothing.

use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::nbd::transmission::{SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES};
use blockhouse_tests::nbd::{Client, VolatileServer, command as kind, errno, flag};
use blockhouse_tests::{Scratch, Serve, Server, eventually};
use serde_json::{Value, json};

const SIZE: usize = 8 << 20;
const ALL: u16 = SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES;
/// The longest time of an operation on a slow machine.
const LONG: Duration = Duration::from_secs(60);

/// A server with a volatile cache, and the name of its export.
fn origin(scratch: &Scratch) -> (VolatileServer, String) {
    let socket = scratch.socket("origin");
    let uri = format!("nbd+unix:///?socket={}&reconnect=600", socket.display());
    (VolatileServer::start(&socket, SIZE, ALL), uri)
}

fn wait_for_reconnect(server: &Server, count: usize) {
    let is_back = || server.log().matches("connected again").count() == count;
    assert!(eventually(LONG, is_back), "{}", server.log());
}

#[test]
fn a_client_s_flush_fails_where_its_writes_may_be_lost() {
    let scratch = Scratch::new();
    let (mut origin, uri) = origin(&scratch);
    let server = Serve::new(&scratch, uri.as_ref()).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 4096], 0), 0);
    assert_eq!(client.flush(), 0);
    // Everything was flushed, so nothing is lost.
    origin.lose_power();
    wait_for_reconnect(&server, 1);
    assert_eq!(client.read(0, 4096), Ok(vec![1; 4096]));
    assert_eq!(client.flush(), 0);
    assert!(!server.log().contains("not flushed"), "{}", server.log());
    assert_eq!(client.write(0, &[2; 4096], 0), 0);
    origin.lose_power();
    wait_for_reconnect(&server, 2);
    for _ in 0..2 {
        assert_eq!(client.read(0, 4096), Ok(vec![1; 4096]), "the write is lost");
        assert_eq!(client.write(8192, &[3; 4096], 0), 0, "requests go on");
        assert_eq!(client.flush(), errno::EIO);
        assert_eq!(client.write(8192, &[3; 4096], flag::FUA), errno::EIO);
    }
    let log = server.log();
    for words in ["answered writes were not flushed (1)", "every flush fails from now on"] {
        assert!(log.contains(words), "{log}");
    }
}

#[test]
fn a_disk_whose_writes_are_all_durable_loses_none() {
    let scratch = Scratch::new();
    let (mut origin, uri) = origin(&scratch);
    let server = Serve::new(&scratch, uri.as_ref()).option("--cache", "directsync").start();
    let mut client = Client::open(&server.address());
    for round in 1..=3 {
        assert_eq!(client.write(0, &[round; 8192], 0), 0);
        assert_eq!(client.simple(kind::WRITE_ZEROES, 4096, 4096, 0), 0);
        assert_eq!(client.simple(kind::TRIM, 16384, 4096, 0), 0);
        origin.lose_power();
        wait_for_reconnect(&server, round.into());
        let expected = [[round; 4096], [0; 4096]].concat();
        assert_eq!(client.read(0, 8192), Ok(expected));
        assert_eq!(client.flush(), 0);
    }
    drop(client);
    server.stop();
}

#[test]
fn a_mirror_to_a_server_that_lost_its_cache_fails() {
    let scratch = Scratch::new();
    let (mut origin, uri) = origin(&scratch);
    let source = scratch.image_of("a.img", &vec![7; SIZE]);
    let (server, mut control) = Serve::new(&scratch, source.path()).start_with_control(&scratch);
    let start =
        json!({ "kind": "mirror", "disk": "a.img", "target": uri, "overwrite": true, "job": "m" });
    control.get("job.start", start);
    wait_for_job(&mut control, "ready");
    assert_ne!(origin.content(), origin.stable(), "the copy is not flushed yet");
    origin.lose_power();
    wait_for_reconnect(&server, 1);
    let completed = control.call("job.complete", json!({ "job": "m" }));
    let job = wait_for_job(&mut control, "failed");
    let why = job["error"].to_string();
    assert!(why.contains("not flushed") && why.contains("may have lost"), "{completed:?}: {why}");
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[8; 4096], 0), 0, "the disk is where it was");
    drop(client);
    server.stop();
    // The target is marked as incomplete.
    let bytes = origin.content();
    assert!(bytes.starts_with(b"blockhouse: mirror not complete\n"), "{:?}", &bytes[..64]);
}

fn wait_for_job(control: &mut Control, status: &str) -> Value {
    let mut job = Value::Null;
    let is_so = || {
        job = control.get("job.list", json!({}))[0].clone();
        job["status"] == status
    };
    assert!(eventually(LONG, is_so), "{status} is expected: {job}");
    job
}
