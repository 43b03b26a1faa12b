//! The QMP commands of programs that use QEMU, sent to our qemu-storage-daemon: the overlay that
//! KubeVirt makes with that program, the pull backup that libvirt makes for KubeVirt and
//! virtnbdbackup, and the disk moves of Incus. The sequences are from their public code.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhouse_tests::guest::{BLOCK, Guest};
use blockhouse_tests::image_tool::{json as json_of, qemu_img, qemu_io, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::qmp::{Qmp, accept_from};
use blockhouse_tests::{Scratch, blockhouse, eventually, nbd_uri, need, require, tool};
use blockhouse_vhost_user::driver::Options;
use serde_json::{Value, json};

use crate::qmp_moments::bitmaps;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const GRANULE: u64 = 64 << 10;

/// The program under test, under QEMU's name.
fn storage_daemon(scratch: &Scratch) -> Command {
    let program = scratch.path("qemu-storage-daemon");
    if !program.exists() {
        std::os::unix::fs::symlink(blockhouse(), &program).expect("a link");
    }
    Command::new(program)
}

/// A daemon with a monitor at a socket; killed on drop.
struct Daemon {
    scratch: Scratch,
    child: Child,
    qmp: Qmp,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Daemon {
    fn start(scratch: Scratch) -> Self {
        Self::run(storage_daemon(&scratch), scratch)
    }

    fn run(mut command: Command, scratch: Scratch) -> Self {
        let socket = scratch.socket("monitor");
        let listener = UnixListener::bind(&socket).expect("a new socket");
        command.args(["--chardev", &format!("socket,id=c,path={}", str(&socket))]);
        command.args(["--monitor", "chardev=c"]).stdin(Stdio::null());
        let mut child = command.spawn().expect("it is there");
        let qmp = Qmp::over(accept_from(&listener, &mut child));
        Self { scratch, child, qmp }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Adds a file node, and a format node over it, with libvirt's names.
    fn add_both(&mut self, number: u32, file: &Path, backing: &Value) {
        let [storage, format] = nodes(number);
        self.add_storage(&storage, file);
        let mut node = json!({ "driver": "qcow2", "node-name": format, "read-only": false,
            "discard": "unmap", "file": storage });
        if !backing.is_null() {
            node["backing"] = backing.clone();
        }
        self.qmp.get("blockdev-add", node);
    }

    fn add_storage(&mut self, node: &str, file: &Path) {
        let cache = json!({ "direct": false, "no-flush": false });
        self.qmp.get(
            "blockdev-add",
            json!({ "driver": "file", "filename": file, "node-name": node, "cache": cache,
                "auto-read-only": true, "discard": "unmap" }),
        );
    }

    /// Runs blockdev-create, and waits until it has completed.
    fn create(&mut self, options: Value) {
        self.qmp.get("blockdev-create", json!({ "job-id": "create", "options": options }));
        self.qmp.events_until("create", "concluded");
        let jobs = self.qmp.get("query-jobs", json!({}));
        assert_eq!(jobs[0]["error"], Value::Null, "{jobs}");
        self.qmp.get("job-dismiss", json!({ "id": "create" }));
    }

    fn serve(&mut self, socket: &Path) {
        let addr = json!({ "type": "unix", "data": { "path": socket } });
        self.qmp.get("nbd-server-start", json!({ "addr": addr }));
    }

    fn export(&mut self, node: &str, name: &str, more: Value) {
        let mut export = json!({ "type": "nbd", "id": format!("export-{name}"), "node-name": node, "name": name });
        let more = more.as_object().cloned().unwrap_or_default();
        export.as_object_mut().expect("an object").extend(more);
        self.qmp.get("block-export-add", export);
    }
}

/// The names of the two nodes of an image.
fn nodes(number: u32) -> [String; 2] {
    ["storage", "format"].map(|kind| format!("libvirt-{number}-{kind}"))
}

/// The changed extents that an export reports: offsets and lengths.
fn changed(socket: &Path, name: &str, bitmap: &str) -> Vec<(u64, u64)> {
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},export={name},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}",
        str(socket)
    );
    let map = json_of(&qemu_img(&["map", "--output=json", "--image-opts", &image]).success());
    let dirty = map.as_array().expect("a list").iter().filter(|one| one["data"] == false);
    let number = |one: &Value, key: &str| one[key].as_u64().expect("a number");
    dirty.map(|one| (number(one, "start"), number(one, "length"))).collect()
}

/// The same changes set the same bits as in QEMU's own daemon, in memory and in the image.
#[test]
fn bitmaps_have_the_bits_of_qemu() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-storage-daemon"]));
    let digests = |mut daemon: Daemon| {
        let (disk, socket) = (daemon.path("disk.qcow2"), daemon.scratch.socket("nbd"));
        qemu_img(&["create", "-q", "-f", "qcow2", str(&disk), "8389632"]).success();
        daemon.add_both(1, &disk, &Value::Null);
        let [_, node] = nodes(1);
        let bitmaps = [("memory", false, 4096), ("image", true, 65_536), ("fine", false, 512)];
        for (name, persistent, granularity) in bitmaps {
            let bitmap = json!({ "node": node, "name": name, "persistent": persistent,
                "granularity": granularity });
            daemon.qmp.get("block-dirty-bitmap-add", bitmap);
        }
        daemon.serve(&socket);
        daemon.export(&node, "x", json!({ "writable": true }));
        let uri = nbd_uri("x", &socket);
        let steps = ["write 0 4k", "write 1M 100k", "discard 2M 64k", "write -z 3M 1M"];
        qemu_io("raw", Path::new(&uri), &steps);
        qemu_io("raw", Path::new(&uri), &["write 8389120 512"]);
        bitmaps.map(|(name, ..)| {
            let bitmap = json!({ "node": node, "name": name });
            daemon.qmp.get("x-debug-block-dirty-bitmap-sha256", bitmap)
        })
    };
    let ours = digests(Daemon::start(Scratch::new()));
    assert_eq!(ours, digests(Daemon::run(tool("qemu-storage-daemon"), Scratch::new())));
    assert!(ours[0] != ours[1] && ours[1] != ours[2], "{ours:?}");
}

/// KubeVirt sends the program all lines at once, and checks only its exit status.
#[test]
fn kubevirt_makes_an_overlay_whose_data_is_its_raw_image() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let (overlay, image) = (scratch.path("overlay.qcow2"), scratch.path("disk.img"));
    std::fs::write(&overlay, "").expect("room");
    std::fs::write(&image, vec![7; SIZE as usize]).expect("room");
    let files = [("file", &overlay), ("data-file", &image)];
    let mut command = storage_daemon(&scratch);
    command.args(["--chardev", "stdio,id=stdio", "--monitor", "stdio"]);
    for (node, path) in files {
        command.args(["--blockdev", &format!("file,node-name={node},filename={}", str(path))]);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it is there");
    let options = json!({ "driver": "qcow2", "file": "file", "data-file": "data-file",
        "data-file-raw": true, "size": SIZE });
    let lines = [
        json!({ "execute": "qmp_capabilities" }),
        json!({ "execute": "blockdev-create", "arguments": { "job-id": "create", "options": options } }),
        json!({ "execute": "job-dismiss", "arguments": { "id": "create" } }),
        json!({ "execute": "quit" }),
    ];
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "it tells nothing that goes well");
    let info = json_of(&qemu_img(&["info", "--output=json", str(&overlay)]).success());
    let data = &info["format-specific"]["data"];
    assert_eq!(
        (&data["data-file"], &data["data-file-raw"]),
        (&json!(image), &json!(true)),
        "{info}"
    );
    assert_eq!(info["virtual-size"], SIZE);
    qemu_io("qcow2", &overlay, &["read -P 7 0 8M", "write -P 9 4M 64k"]);
    qemu_img(&["check", "-q", "-f", "qcow2", str(&overlay)]).success();
    let bytes = std::fs::read(&image).expect("it is there");
    assert!(bytes.len() as u64 == SIZE && bytes[4 << 20] == 9 && bytes[0] == 7);
}

#[test]
fn an_image_that_cannot_be_made_costs_no_file() {
    let scratch = Scratch::new();
    let [image, data] = ["image", "data"].map(|name| scratch.path(name));
    std::fs::write(&image, "").expect("room");
    std::fs::write(&data, vec![7; MIB as usize]).expect("room");
    let mut daemon = Daemon::start(scratch);
    daemon.add_storage("image", &image);
    daemon.add_storage("data", &data);
    let create = |file: &str, size: u64| {
        let options = json!({ "driver": "qcow2", "file": file, "data-file": "data",
            "data-file-raw": true, "size": size });
        json!({ "job-id": "create", "options": options })
    };
    let why = daemon.qmp.refused("blockdev-create", create("data", MIB));
    assert!(why.contains("are two files"), "{why}");
    daemon.qmp.get("blockdev-create", create("image", 1000));
    daemon.qmp.events_until("create", "concluded");
    let jobs = daemon.qmp.get("query-jobs", json!({}));
    assert!(jobs[0]["error"].as_str().is_some_and(|why| why.contains("512")), "{jobs}");
    assert!(
        image.exists() && std::fs::read(&data).is_ok_and(|bytes| bytes == vec![7; MIB as usize])
    );
    for node in ["image", "data"] {
        daemon.qmp.get("blockdev-del", json!({ "node-name": node }));
    }
}

/// Two backups that a client pulls, the second one of the changes since the first.
#[test]
fn libvirt_has_clients_pull_a_backup_and_an_increment() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.path("disk.qcow2"), scratch.socket("nbd"));
    qemu_img(&["create", "-q", "-f", "qcow2", str(&disk), "8M"]).success();
    qemu_io("qcow2", &disk, &["write -P 7 0 8M"]);
    let mut daemon = Daemon::start(scratch);
    daemon.add_both(1, &disk, &Value::Null);
    let [_, source] = nodes(1);
    // The guest, which continues meanwhile.
    let device = daemon.scratch.socket("guest");
    let addr = json!({ "type": "unix", "path": device });
    let export = json!({ "type": "vhost-user-blk", "id": "guest", "node-name": source,
        "writable": true, "addr": addr });
    daemon.qmp.get("block-export-add", export);
    let mut guest = Guest::connect(&device, Options::default());
    for (number, checkpoint, since) in [(2, "check1", None), (3, "check2", Some("check1"))] {
        let [storage, target] = nodes(number);
        let file = daemon.path(&storage);
        daemon.create(json!({ "driver": "file", "filename": file, "size": 0 }));
        daemon.add_storage(&storage, &file);
        daemon.create(json!({ "driver": "qcow2", "file": storage, "size": SIZE,
            "backing-file": disk, "backing-fmt": "qcow2" }));
        daemon.qmp.get("blockdev-del", json!({ "node-name": storage }));
        daemon.add_both(number, &file, &json!(source));
        daemon.serve(&socket);
        let mut actions = Vec::new();
        let mut act = |kind: &str, data: Value| actions.push(json!({ "type": kind, "data": data }));
        if let Some(since) = since {
            act(
                "block-dirty-bitmap-add",
                json!({ "node": target, "name": "backup-vda", "persistent": false,
                    "disabled": true, "granularity": GRANULE }),
            );
            let bitmaps = json!([{ "node": source, "name": since }]);
            act(
                "block-dirty-bitmap-merge",
                json!({ "node": target, "target": "backup-vda", "bitmaps": bitmaps }),
            );
        }
        act(
            "block-dirty-bitmap-add",
            json!({ "node": source, "name": checkpoint, "persistent": true, "disabled": false }),
        );
        let job = format!("backup-vda-{target}");
        act(
            "blockdev-backup",
            json!({ "device": source, "job-id": job, "target": target, "sync": "none",
                "auto-finalize": true, "auto-dismiss": false }),
        );
        daemon.qmp.get("transaction", json!({ "actions": actions }));
        let bitmaps =
            if since.is_some() { json!({ "bitmaps": ["backup-vda"] }) } else { json!({}) };
        daemon.export(&target, "vda", bitmaps);
        let at = u64::from(number) * MIB;
        guest.write(0, at / BLOCK as u64, u64::from_ne_bytes([number as u8; 8]));
        let mut pulled = Client::at(&socket, "vda");
        assert_eq!(pulled.read(at, 512), Ok(vec![7; 512]), "as it was");
        if since.is_some() {
            assert_eq!(pulled.read(2 * MIB, 512), Ok(vec![2; 512]));
            assert_eq!(changed(&socket, "vda", "backup-vda"), [(2 * MIB, GRANULE)]);
        }
        pulled.disconnect();
        daemon.qmp.get("nbd-server-stop", json!({}));
        daemon.qmp.get("job-cancel", json!({ "id": job }));
        daemon.qmp.events_until(&job, "concluded");
        daemon.qmp.get("job-dismiss", json!({ "id": job }));
        for node in [target, storage] {
            daemon.qmp.get("blockdev-del", json!({ "node-name": node }));
        }
    }
    // The image has the bitmaps of checkpoints, and nothing else.
    drop(guest);
    daemon.qmp.get("block-export-del", json!({ "id": "guest", "mode": "hard" }));
    for node in [&source, &nodes(1)[0]] {
        daemon.qmp.get("blockdev-del", json!({ "node-name": node }));
    }
    let info = json_of(&qemu_img(&["info", "--output=json", str(&disk)]).success());
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().expect("a list").iter();
    let names: Vec<_> = bitmaps.filter_map(|bitmap| bitmap["name"].as_str()).collect();
    assert_eq!(names, ["check1", "check2"]);
    qemu_io("qcow2", &disk, &["read -P 2 2M 4k", "read -P 3 3M 4k", "read -P 7 4M 64k"]);
}

/// A disk is copied to another image while its guest writes to an overlay, which is then merged.
#[test]
fn incus_moves_a_disk_through_an_overlay() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let socket = scratch.socket("nbd");
    let path = |name: &str| scratch.path(name);
    let (root, overlay, target) = (path("root"), path("overlay"), path("target"));
    for image in [&root, &overlay] {
        qemu_img(&["create", "-q", "-f", "qcow2", str(image), "8M"]).success();
    }
    qemu_io("qcow2", &root, &["write -P 7 0 8M"]);
    std::fs::write(&target, vec![7; SIZE as usize]).expect("room");
    let mut daemon = Daemon::start(scratch);
    let node = |driver: &str, name: &str, file: &Path| {
        json!({ "driver": driver, "node-name": name, "discard": "unmap",
            "cache": { "direct": false, "no-flush": false },
            "file": { "driver": "file", "filename": file } })
    };
    daemon.qmp.get("blockdev-add", node("qcow2", "root", &root));
    daemon.qmp.get("blockdev-add", node("qcow2", "snapshot", &overlay));
    daemon.qmp.get("blockdev-add", node("raw", "target", &target));
    // Only QEMU's machines accept files by descriptors; its storage daemon has no such command,
    // either. Abstract sockets are refused by name.
    for command in ["add-fd", "getfd", "query-fdsets"] {
        let answer = daemon.qmp.ask(&json!({ "execute": command }).to_string());
        assert_eq!(answer["error"]["class"], "CommandNotFound");
    }
    let addr = json!({ "type": "unix", "data": { "path": "abc", "abstract": true } });
    let server = json!({ "addr": addr, "max-connections": 1 });
    let why = daemon.qmp.refused("nbd-server-start", server);
    assert!(why.contains("'addr.data.abstract' is not possible here"), "{why}");
    daemon.serve(&socket);
    daemon.export("root", "root", json!({ "writable": true }));
    let mut guest = Client::at(&socket, "root");
    // Bitmaps continue in the overlay, and return with the disk.
    for (name, persistent) in [("kept", true), ("brief", false)] {
        let bitmap = json!({ "node": "root", "name": name, "persistent": persistent });
        daemon.qmp.get("block-dirty-bitmap-add", bitmap);
    }
    let snapshot = json!({ "node": "root", "overlay": "snapshot" });
    daemon.qmp.get("blockdev-snapshot", snapshot);
    let name = |file: &str| json!({ "device": "snapshot", "image-node-name": "snapshot", "backing-file": file });
    daemon.qmp.get("change-backing-file", name("./root"));
    let info = json_of(&qemu_img(&["info", "-U", "--output=json", str(&overlay)]).success());
    assert_eq!(
        (&info["backing-filename"], &info["backing-filename-format"]),
        (&json!("./root"), &json!("qcow2"))
    );
    assert_eq!(guest.write(MIB, &[1; 512], 0), 0);
    let brief = ("brief".to_owned(), GRANULE);
    assert_eq!(bitmaps(&mut daemon.qmp, "snapshot"), [brief, ("kept".to_owned(), GRANULE)]);
    let used = daemon.qmp.refused("blockdev-del", json!({ "node-name": "snapshot" }));
    assert!(used.contains("is in use"), "{used}");
    // The target has the content of the root, so only the overlay must be copied.
    let mirror = json!({ "device": "snapshot", "target": "target", "sync": "top",
        "job-id": "snapshot", "copy-mode": "write-blocking" });
    daemon.qmp.get("blockdev-mirror", mirror);
    wait_ready(&mut daemon.qmp);
    assert_eq!(guest.write(2 * MIB, &[2; 512], 0), 0);
    daemon.qmp.get("block-job-cancel", json!({ "device": "snapshot" }));
    daemon.qmp.events_until("snapshot", "null");
    daemon.qmp.get("block-commit", json!({ "device": "snapshot", "job-id": "snapshot" }));
    wait_ready(&mut daemon.qmp);
    daemon.qmp.get("block-job-complete", json!({ "device": "snapshot" }));
    daemon.qmp.events_until("snapshot", "null");
    assert_eq!(guest.write(3 * MIB, &[3; 512], 0), 0);
    let told = bitmaps(&mut daemon.qmp, "root");
    assert!(told.contains(&("brief".to_owned(), 3 * GRANULE)), "{told:?}");
    drop(guest);
    daemon.qmp.get("nbd-server-stop", json!({}));
    let gone = daemon.qmp.refused("blockdev-del", json!({ "node-name": "none" }));
    assert!(gone.contains("Failed to find"), "{gone}");
    for node in ["root", "target"] {
        daemon.qmp.get("blockdev-del", json!({ "node-name": node }));
    }
    let bytes = std::fs::read(&target).expect("it is there");
    let at = |offset: u64| bytes[offset as usize];
    assert_eq!([0, MIB, 2 * MIB, 3 * MIB].map(at), [7, 1, 2, 7]);
    let steps = ["read -P 1 1M 512", "read -P 2 2M 512", "read -P 3 3M 512", "read -P 7 4M 512"];
    qemu_io("qcow2", &root, &steps);
}

/// Waits until the job `snapshot` is ready.
fn wait_ready(qmp: &mut Qmp) {
    let is_ready = eventually(Duration::from_secs(60), || {
        let jobs = qmp.get("query-block-jobs", json!({}));
        let job = jobs.as_array().into_iter().flatten().find(|job| job["device"] == "snapshot");
        let job = job.expect("it goes on");
        assert_eq!(job["error"], Value::Null, "{job}");
        job["ready"] == true
    });
    assert!(is_ready, "it becomes ready");
}
