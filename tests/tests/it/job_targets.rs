//! Mirror targets that misbehave or are not what they seem: the disk and its clients are not
//! affected.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{new_image, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, Server, eventually, nbd_uri, tool};
use serde_json::{Value, json};

use crate::jobs::listens;

const SIZE: u64 = 8 << 20;
const FAILED: i64 = -32000;
const LONG: Duration = Duration::from_secs(60);

fn serve(scratch: &Scratch, name: &str) -> (Server, Control) {
    let image = new_image(scratch, name, &SIZE.to_string());
    Serve::new(scratch, &image).start_with_control(scratch)
}

fn status(control: &mut Control) -> Value {
    let jobs = control.get("job.list", json!({}));
    jobs.as_array().and_then(|jobs| jobs.last().cloned()).expect("a job")
}

fn wait_for(control: &mut Control, wanted: &str) -> Value {
    assert!(eventually(LONG, || status(control)["status"] == wanted), "{}", status(control));
    status(control)
}

#[test]
fn a_target_that_is_the_disk_itself_is_refused_and_nothing_of_it_is_lost() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "a.img");
    let mut client = Client::open(&server.address());
    let bytes = [7; 4096];
    assert_eq!(client.write(0, &bytes, 0), 0);
    let start =
        json!({ "kind": "mirror", "disk": "a.img", "target": server.uri(), "overwrite": true });
    control.get("job.start", start);
    let failed = wait_for(&mut control, "failed");
    assert!(failed["error"].to_string().contains("is the disk itself"), "{failed}");
    assert!(client.read(0, 4096) == Ok(bytes.to_vec()), "the disk's first block is lost");
    drop(client);
    server.stop();
}

/// The refused target has no state file left, which would take memory.
#[test]
fn a_target_of_another_size_is_refused_without_a_trace() {
    let (scratch, memory) = (Scratch::new(), Scratch::in_memory());
    let state = memory.path("state");
    let (image, target) = ("a.qcow2", scratch.path("b.qcow2"));
    let [image, _] = [image, "b.qcow2"].map(|name| {
        let size = if name == image { SIZE } else { SIZE / 2 };
        new_image(&scratch, name, &size.to_string())
    });
    let serve = Serve::new(&scratch, &image).option("--state", &state);
    let (server, mut control) = serve.start_with_control(&scratch);
    let files = || std::fs::read_dir(&state).expect("the folder").count();
    let before = files();
    let start = json!({ "kind": "mirror", "disk": "a.qcow2", "target": target, "overwrite": true });
    control.refused("job.start", start, FAILED, &["a mirror is as long as its disk"]);
    assert_eq!(files(), before);
    server.stop();
}

#[test]
fn snapshots_wait_for_the_end_of_a_mirror_that_would_not_get_them() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "a.qcow2");
    let create = json!({ "disk": "a.qcow2", "name": "before" });
    control.get("snapshot.create", create);
    let start = json!({ "kind": "mirror", "disk": "a.qcow2", "target": scratch.path("b.qcow2") });
    control.get("job.start", start);
    wait_for(&mut control, "ready");
    for (method, more) in [
        ("snapshot.create", json!({ "disk": "a.qcow2", "name": "meanwhile" })),
        ("snapshot.delete", json!({ "disk": "a.qcow2", "name": "before" })),
    ] {
        control.refused(method, more, FAILED, &["a mirror of the disk"]);
    }
    let job = status(&mut control)["job"].clone();
    control.get("job.cancel", json!({ "job": job }));
    wait_for(&mut control, "cancelled");
    control.get("snapshot.create", json!({ "disk": "a.qcow2", "name": "after" }));
    server.stop();
}

/// A server of another project that can be paused.
struct Standing {
    child: Child,
    uri: String,
}

impl Standing {
    fn start(scratch: &Scratch) -> Self {
        let (socket, pause) = (scratch.socket("t"), scratch.socket("pause"));
        let words = ["-f", "-U", str(&socket), "--filter=pause", "memory", &SIZE.to_string()]
            .map(str::to_owned);
        let mut command = tool("nbdkit");
        command.args(&words).arg(format!("pause-control={}", pause.display()));
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.expect("it is installed");
        assert!(eventually(LONG, || listens(&socket) && listens(&pause)), "it does not listen");
        Self { child, uri: nbd_uri("", &socket) }
    }

    /// Pauses the server: it completes the requests in flight, and holds all later ones.
    fn stand_still(control: &Path) {
        use std::io::{Read, Write};
        let mut stream = std::os::unix::net::UnixStream::connect(control).expect("it listens");
        stream.write_all(b"p").expect("it reads");
        let mut answer = [0];
        stream.read_exact(&mut answer).expect("it answers");
        assert_eq!(answer, *b"P", "it stands still");
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_target_that_stands_still_keeps_neither_a_client_nor_the_disk() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "a.img");
    let target = Standing::start(&scratch);
    let start = json!({ "kind": "mirror", "disk": "a.img", "target": target.uri, "overwrite": true,
        "mode": "write-blocking", "job": "m" });
    control.get("job.start", start);
    wait_for(&mut control, "ready");
    Standing::stand_still(&scratch.socket("pause"));
    let address = server.address();
    let writing = std::thread::spawn(move || {
        let mut client = Client::open(&address);
        (client.write(4096, &[9; 4096], 0), client)
    });
    // The cancelled job must release the client's write, whether the write waits already or not.
    control.get("job.cancel", json!({ "job": "m" }));
    let (error, client) = writing.join().expect("the client is answered");
    assert_eq!(error, 0);
    drop(client);
    wait_for(&mut control, "cancelled");
    close_and_open_again(&scratch, &mut control, "a.img");
    drop(target);
    server.stop();
}

/// Closes a disk whose job has ended, and checks that nothing holds the lock of its image.
fn close_and_open_again(scratch: &Scratch, control: &mut Control, name: &str) {
    control.get("disk.close", json!({ "disk": name, "force": true }));
    control.get("disk.open", json!({ "path": scratch.path(name), "name": "again" }));
}

/// Begins a slow backup `b` to the disk `target` of 4 MiB that the bitmap `old` of the disk
/// `a.qcow2` marks.
fn begin_backup(server: &Server, control: &mut Control, target: &str) -> Client {
    control.get("bitmap.add", json!({ "disk": "a.qcow2", "name": "old", "transient": true }));
    let mut guest = Client::open(&server.address());
    (0..4).for_each(|at| assert_eq!(guest.write(at << 20, &[1; 1 << 20], 0), 0));
    let backup = json!({ "disk": "a.qcow2", "name": "b", "target-disk": target, "bitmap": "old",
        "sync-bitmap": true, "speed": 1 });
    control.get("disk.transaction", json!({ "backups": [backup] }));
    guest
}

fn bitmaps(control: &mut Control) -> Value {
    let listed = control.get("bitmap.list", json!({ "disk": "a.qcow2" }));
    let name_and_bytes = |bitmap: &Value| json!([bitmap["name"], bitmap["count"]]);
    listed.as_array().expect("a list").iter().map(name_and_bytes).collect()
}

#[test]
fn a_backup_that_is_asked_to_complete_is_a_backup() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "a.qcow2", &SIZE.to_string());
    let target = new_image(&scratch, "b.qcow2", &SIZE.to_string());
    let (server, mut control) =
        Serve::new(&scratch, &image).option("--cache", "writeback").start_with_control(&scratch);
    control.get("disk.open", json!({ "path": target, "name": "target", "cache": "writeback" }));
    let guest = begin_backup(&server, &mut control, "target");
    control.refused("job.complete", json!({ "job": "b", "hand-over": true }), FAILED, &["backup"]);
    let socket = scratch.socket("control");
    let completing = std::thread::spawn(move || {
        Control::connect(&socket).call("job.complete", json!({ "job": "b" }))
    });
    // The request may arrive before or after the speed.
    control.get("job.set-speed", json!({ "job": "b" }));
    wait_for(&mut control, "completed");
    completing.join().expect("an answer").expect("it completes");
    control.get("job.complete", json!({ "job": "b" }));
    assert_eq!(bitmaps(&mut control), json!([["old", 0]]));
    drop(guest);
    server.stop();
}

#[test]
fn a_cancelled_backup_whose_target_stands_still_thaws_its_disk() {
    let scratch = Scratch::new();
    let (server, mut control) = serve(&scratch, "a.qcow2");
    let target = Standing::start(&scratch);
    control.get("disk.open", json!({ "path": target.uri, "name": "target" }));
    let guest = begin_backup(&server, &mut control, "target");
    Standing::stand_still(&scratch.socket("pause"));
    control.get("job.set-speed", json!({ "job": "b" }));
    let copied = |control: &mut Control| status(control)["copied"].as_u64();
    let before = copied(&mut control);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(copied(&mut control), before, "the target stands still");
    control.get("job.cancel", json!({ "job": "b" }));
    let is_thawed = || bitmaps(&mut control) == json!([["old", 4 << 20]]);
    assert!(eventually(LONG, is_thawed), "the backup's bitmap is left");
    wait_for(&mut control, "cancelled");
    drop(guest);
    close_and_open_again(&scratch, &mut control, "a.qcow2");
    // The server cannot close its disk `target`.
    drop((server, target));
}
