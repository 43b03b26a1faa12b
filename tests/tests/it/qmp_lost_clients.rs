//! `serve --qmp`: a command that has begun completes, although its client is gone or does not read.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockhouse_tests::Scratch;
use blockhouse_tests::nbd::Client;
use serde_json::json;

use crate::qmp::{serve, wait_until};

const MIB: u64 = 1 << 20;

/// Sends a command as a client that no longer receives.
fn command_of_a_lost_client(scratch: &Scratch, command: &str) {
    let mut client = UnixStream::connect(scratch.socket("qmp")).expect("the server listens");
    client.write_all(br#"{"execute":"qmp_capabilities"}"#).expect("the server listens");
    let lines = BufReader::new(client.try_clone().expect("a descriptor")).lines();
    let greeting_and_answer = lines.take(2).filter(Result::is_ok).count();
    assert_eq!(greeting_and_answer, 2);
    client.shutdown(Shutdown::Read).expect("a socket");
    client.write_all(command.as_bytes()).expect("the server listens");
}

#[test]
fn quit_ends_the_server_although_its_client_is_gone() {
    let scratch = Scratch::new();
    let (mut server, mut qmp) = serve(&scratch);
    let target = scratch.image("target", MIB);
    let file = json!({ "driver": "file", "filename": target.path() });
    qmp.get("blockdev-add", json!({ "driver": "raw", "node-name": "t", "file": file }));
    let mirror =
        json!({ "job-id": "m", "device": "first", "target": "t", "sync": "full", "speed": 1 });
    qmp.get("blockdev-mirror", mirror);
    command_of_a_lost_client(&scratch, r#"{"execute":"quit"}"#);
    assert!(server.wait(Duration::from_secs(30)).success());
}

#[test]
fn all_exports_of_a_stopped_server_end_although_its_client_is_gone() {
    let scratch = Scratch::new();
    let (server, mut qmp) = serve(&scratch);
    let addr = json!({ "type": "unix", "data": { "path": scratch.socket("more") } });
    qmp.get("nbd-server-start", json!({ "addr": addr }));
    let mut guests = Vec::new();
    for id in ["a", "b", "c", "d"] {
        let export = json!({ "type": "nbd", "id": id, "node-name": "first", "name": id });
        qmp.get("block-export-add", export);
        // The end of an export with a client takes a while.
        guests.push(Client::at(scratch.socket("more"), id));
    }
    command_of_a_lost_client(&scratch, r#"{"execute":"nbd-server-stop"}"#);
    wait_until("only the export of the command line is left", || {
        qmp.get("query-block-exports", json!({})).as_array().map(Vec::len) == Some(1)
    });
    wait_until("the socket is removed", || !scratch.socket("more").exists());
    server.stop();
}
