//! Backups that are requested at the same time, that find files of a killed server, and whose
//! clients do not receive replies.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, Server, nbd_uri};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const FAILED: i64 = -32000;

fn serve(scratch: &Scratch, names: &[&str]) -> (Server, Control) {
    for name in names {
        command(&["create", str(&scratch.path(name)), "64M"]).success();
    }
    let (nbd, control) = (scratch.socket("nbd"), scratch.socket("control"));
    let mut serve = Serve::bare(scratch, &scratch.path(names[0]));
    for name in &names[1..] {
        serve = serve.also(&scratch.path(name));
    }
    let uri = nbd_uri("", &nbd);
    let server = serve.export(&uri).option("--control", &control).start();
    let control = Control::connect(&control);
    (server, control)
}

fn begin(scratch: &Scratch, disk: &str, socket: &str, extra: &Value) -> Value {
    let export = nbd_uri("", scratch.socket(socket));
    let mut params = json!({ "disks": [disk], "export": export });
    params.as_object_mut().expect("an object").extend(extra.as_object().expect("too").clone());
    params
}

#[test]
fn two_backups_never_have_one_name() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, &["a.img", "b.img"]);
    let path = scratch.socket("control");
    for _ in 0..10 {
        let ask = |disk: &'static str, socket: &'static str| {
            let params = begin(&scratch, disk, socket, &json!({ "backup": "twin" }));
            let mut control = Control::connect(&path);
            move || control.call("backup.begin", params).is_ok()
        };
        let (first, second) = (ask("a.img", "one"), ask("b.img", "two"));
        let began = std::thread::scope(|scope| {
            let threads = [scope.spawn(first), scope.spawn(second)];
            threads.map(|thread| thread.join().expect("an answer"))
        });
        let list = control.get("backup.list", json!({}));
        assert_eq!(began.iter().filter(|began| **began).count(), 1, "{list}");
        assert_eq!(list.as_array().map(Vec::len), Some(1));
        control.get("backup.end", json!({ "backup": "twin" }));
    }
    for name in ["", &"x".repeat(256)] {
        let params = begin(&scratch, "a.img", "one", &json!({ "backup": name }));
        control.refused("backup.begin", params, FAILED, &["1 to 255 bytes"]);
    }
    // A name that the server would have given to another backup.
    for name in ["backup40", "backup41"] {
        let disk = if name == "backup40" { "a.img" } else { "b.img" };
        control.get("backup.begin", begin(&scratch, disk, name, &json!({ "backup": name })));
        control.get("backup.end", json!({ "backup": name }));
    }
    server.stop();
}

#[test]
fn a_killed_servers_scratch_files_are_in_nobodys_way() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, &["a.img"]);
    for number in 0..20 {
        let left = scratch.path(&format!(".blockhouse-{}-{number}.scratch", server.pid()));
        std::fs::write(left, "of another one").expect("a file");
    }
    control.get("backup.begin", begin(&scratch, "a.img", "one", &json!({ "backup": "b" })));
    let mut guest = Client::at(scratch.socket("nbd"), "");
    assert_eq!(guest.write(0, &[1; 4096], 0), 0);
    let mut reader = Client::at(scratch.socket("one"), "a.img");
    assert_eq!(reader.read(0, 4096).expect("the old bytes"), [0; 4096]);
    let left = std::fs::read(scratch.path(&format!(".blockhouse-{}-3.scratch", server.pid())));
    assert_eq!(left.expect("it is left alone"), b"of another one");
    server.stop();
}

/// A client that requests much data, and receives none of it.
fn stalled(socket: &Path, name: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).expect("a server");
    stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a time");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("a greeting");
    // Client flags (fixed newstyle, no zeroes), then NBD_OPT_EXPORT_NAME.
    stream.write_all(&3_u32.to_be_bytes()).expect("flags");
    stream.write_all(b"IHAVEOPT").expect("an option");
    stream.write_all(&1_u32.to_be_bytes()).expect("an option");
    stream.write_all(&(name.len() as u32).to_be_bytes()).expect("an option");
    stream.write_all(name.as_bytes()).expect("an option");
    stream.read_exact(&mut [0; 10]).expect("an export");
    stream.set_nonblocking(true).expect("a stream");
    for index in 0..32_u64 {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0; 4]);
        request.extend(index.to_be_bytes());
        request.extend((index * 2 * MIB).to_be_bytes());
        request.extend(((2 * MIB) as u32).to_be_bytes());
        if stream.write_all(&request).is_err() {
            break;
        }
    }
    stream
}

#[test]
fn a_client_that_receives_nothing_holds_up_neither_the_guest_nor_the_end() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, &["a.img"]);
    let mut guest = Client::at(scratch.socket("nbd"), "");
    for at in 0..64 {
        assert_eq!(guest.write(at * MIB, &[1; MIB as usize], 0), 0);
    }
    control.get("backup.begin", begin(&scratch, "a.img", "one", &json!({ "backup": "b" })));
    let stalled = stalled(&scratch.socket("one"), "a.img");
    for at in 0..64 {
        assert_eq!(guest.write(at * MIB, &[2; MIB as usize], 0), 0);
    }
    let mut reader = Client::at(scratch.socket("one"), "a.img");
    for at in 0..64 {
        assert_eq!(reader.read(at * MIB, MIB).expect("the old bytes"), vec![1; MIB as usize]);
    }
    control.get("backup.end", json!({ "backup": "b" }));
    assert_eq!(control.get("backup.list", json!({})), json!([]));
    assert_eq!(guest.read(0, 4096).expect("a read"), [2; 4096]);
    drop(stalled);
    server.stop();
}
