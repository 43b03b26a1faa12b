//! `serve --qmp`: sessions of hostile clients.

use std::time::Duration;

use blockhouse_tests::Scratch;
use blockhouse_tests::qmp::Qmp;
use serde_json::json;

use crate::qmp::{serve, wait_until};

#[test]
fn hostile_clients_take_bounded_memory_and_time() {
    let scratch = Scratch::new();
    let (server, mut honest) = serve(&scratch);
    let socket = scratch.socket("qmp");
    let before = server.resident_memory();
    // An endless string, list and nesting; and a client that does not read the answers to its
    // commands.
    let piece = |text: &[u8]| text.repeat((1 << 20) / text.len());
    for (begin, text) in
        [(&b"'"[..], &b"x"[..]), (b"[", b"1,"), (b"", b"["), (b"", b"\xff"), (b"", b"{'a':")]
    {
        let mut qmp = Qmp::greet(&socket);
        let _ = qmp.send(begin);
        // The client may be disconnected; otherwise all its messages are refused.
        let mut reader = qmp.try_clone();
        let reading = std::thread::spawn(move || while reader.receive().is_some() {});
        // Each of these bytes causes an answer, except in a string.
        let is_answered = text != b"x";
        let pieces =
            if is_answered { piece(text)[..128 << 10].to_vec() } else { piece(text).repeat(8) };
        let _ = qmp.send(&pieces);
        qmp.hang_up();
        reading.join().expect("no panic");
    }
    let mut slow = Qmp::connect(&socket);
    let request = b"{'execute':'query-commands'}".repeat(1000);
    slow.set_write_timeout(Duration::from_secs(1));
    let _ = (0..100).try_for_each(|_| slow.send(&request));
    assert_eq!(honest.get("query-block", json!({})), json!([]));
    // Takes all connections that the server allows; after they are closed, a client can connect
    // again.
    let many: Vec<_> =
        (0..300).filter_map(|_| std::os::unix::net::UnixStream::connect(&socket).ok()).collect();
    assert_eq!(honest.get("query-block", json!({})), json!([]));
    drop((many, slow));
    wait_until("there is room", || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok_and(|stream| {
            use std::io::Read;
            let mut byte = [0];
            stream.set_read_timeout(Some(Duration::from_secs(5))).is_ok()
                && (&stream).read(&mut byte).is_ok_and(|count| count == 1)
        })
    });
    let after = server.resident_memory();
    assert!(after < before + (64 << 20), "{before} bytes, then {after}");
    server.stop();
}
