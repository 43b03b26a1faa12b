//! `serve --config`: many disks, and a reload that affects only what has changed.

use std::path::Path;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::command;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::pki::psk_file;
use blockhouse_tests::upgrade::{upgrade, upgrade_in_the_end};
use blockhouse_tests::{
    Scratch, Serve, Server, eventually, image_tool::str, nbd_uri, need, require, run, tool,
};
use rustix::process::Signal;
use serde_json::json;
use std::time::Duration;

use crate::jobs::{ctl, wait_for};

const MIB: u64 = 1 << 20;

/// A disk's table in the configuration: the disk is served under its name at a socket that all
/// disks share.
fn disk(scratch: &Scratch, name: &str, more: &str) -> String {
    let (path, socket) = (scratch.path(name), scratch.socket("nbd"));
    format!(
        "[[disk]]\npath = \"{}\"\ncreate = \"1M\"\nexports = [\"nbd+unix:///{name}?socket={}\"]\n{more}\n",
        path.display(),
        socket.display()
    )
}

fn server_table(scratch: &Scratch) -> String {
    format!("[server]\ncontrol = \"{}\"\n", scratch.socket("control").display())
}

fn write(path: &Path, parts: &[String]) {
    std::fs::write(path, parts.concat()).expect("a file");
}

fn start(scratch: &Scratch, config: &Path, exports: usize) -> Server {
    Serve::without_image(scratch).option("--config", config).ready_lines(exports).start()
}

fn open(scratch: &Scratch, name: &str) -> Client {
    Client::at(scratch.socket("nbd"), name)
}

fn names(control: &mut Control) -> Vec<String> {
    let disks = control.get("disk.list", json!({}));
    let disks = disks.as_array().expect("a list").iter();
    disks.map(|disk| disk["disk"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn a_reload_adds_and_removes_without_touching_the_rest() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let [a, b, c] = ["a.img", "b.qcow2", "c.img"].map(|name| disk(&scratch, name, ""));
    write(&config, &[table.clone(), a.clone(), b]);
    let server = start(&scratch, &config, 2);
    let mut control = Control::connect(&scratch.socket("control"));
    let (mut stays, mut leaves) = (open(&scratch, "a.img"), open(&scratch, "b.qcow2"));
    assert_eq!(leaves.write(0, &[7; 512], 0), 0);
    // The configuration file does not affect a disk that a request opened.
    let extra = scratch.image("extra", MIB);
    control.get("disk.open", json!({ "path": extra.path() }));
    write(&config, &[table.clone(), c, a.clone()]);
    let done = control.get("server.reload", json!({}));
    assert_eq!(done["opened"], json!(["c.img"]), "{done}");
    assert_eq!((&done["closed"], &done["failed"]), (&json!(["b.qcow2"]), &json!([])));
    assert_eq!(names(&mut control), ["c.img", "a.img", "extra"]);
    assert!(leaves.receive().is_err(), "its disk is closed");
    assert_eq!(stays.write(512, &[8; 512], 0), 0);
    open(&scratch, "c.img").disconnect();
    // A reload by SIGHUP: a disk with changed options is closed and opened again; an error is
    // logged and changes nothing.
    write(&config, &[table.clone(), disk(&scratch, "a.img", "read-only = true")]);
    server.signal(Signal::HUP);
    assert!(eventually(Duration::from_secs(30), || server.log().matches("reloaded").count() == 2));
    assert!(open(&scratch, "a.img").flags() & 2 != 0, "it is read-only now");
    write(&config, &[table, a, "[[disk]]\npth = 1\n".into()]);
    server.signal(Signal::HUP);
    let told = || server.log().contains("serve.toml:") && server.log().contains("everything stays");
    assert!(eventually(Duration::from_secs(30), told), "{}", server.log());
    assert_eq!(names(&mut control), ["a.img", "extra"]);
    server.stop();
    assert!(!scratch.socket("nbd").exists());
}

/// The main thread does not wait for the reload, so it refuses an upgrade after a few seconds.
#[test]
fn a_reload_that_waits_for_storage_keeps_no_request_from_its_answer() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let a = disk(&scratch, "a.img", "");
    write(&config, &[table.clone(), a.clone()]);
    let server = start(&scratch, &config, 1);
    let silent = scratch.socket("silent");
    let listener = std::os::unix::net::UnixListener::bind(&silent).expect("a socket");
    let remote = format!("[[disk]]\npath = \"{}\"\nname = \"far\"\n", nbd_uri("", &silent));
    write(&config, &[table, a, remote]);
    server.signal(Signal::HUP);
    let (stream, _) = listener.accept().expect("the reload connects");
    upgrade(&scratch.socket("control"), &[])
        .failure("a reload, or other work on disks is still being carried out");
    drop((stream, listener));
    let is_told = || server.log().contains("reloaded the configuration");
    assert!(eventually(Duration::from_secs(60), is_told), "{}", server.log());
    server.stop();
}

#[test]
fn a_reload_changes_limits_and_moves_exports() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let group = |iops: u32| format!("[groups.slow]\niops = {iops}\n");
    let [a, b] =
        ["a.img", "b.img"].map(|name| disk(&scratch, name, "limits = { group = \"slow\" }"));
    write(&config, &[table.clone(), a.clone(), b.clone(), group(100)]);
    let server = start(&scratch, &config, 2);
    let mut control = Control::connect(&scratch.socket("control"));
    let limits = |control: &mut Control, index: usize| {
        control.get("limit.get", json!({}))[index]["limits"].clone()
    };
    assert_eq!(limits(&mut control, 1), json!({ "group": "slow", "iops": 100 }));
    let mut client = open(&scratch, "b.img");
    assert_eq!(client.write(0, &[7; 512], 0), 0);
    // Changes the limits of the group and of a disk while the clients continue.
    let own = disk(&scratch, "a.img", "limits = { bps = \"1M\" }");
    write(&config, &[table.clone(), own.clone(), b.clone(), group(200)]);
    let done = control.get("server.reload", json!({}));
    assert_eq!(done["limited"], json!(["a.img", "b.img"]), "{done}");
    assert_eq!(limits(&mut control, 0), json!({ "bps": MIB }));
    assert_eq!(limits(&mut control, 1), json!({ "group": "slow", "iops": 200 }));
    // A change by a request stays until the file changes.
    control.get("limit.set", json!({ "disk": "b.img" }));
    let done = control.get("server.reload", json!({}));
    assert_eq!((&done["limited"], &done["failed"]), (&json!([]), &json!([])));
    assert_eq!(limits(&mut control, 1), json!({}));
    assert_eq!(client.read(0, 512), Ok(vec![7; 512]));
    // One disk gets the export name of the other.
    let (a, b) = (own.replace("/a.img?", "/c?"), b.replace("/b.img?", "/a.img?"));
    write(&config, &[table, a, b, group(200)]);
    let done = control.get("server.reload", json!({}));
    assert_eq!(done["failed"], json!([]), "{done}");
    assert_eq!(open(&scratch, "a.img").read(0, 512), Ok(vec![7; 512]));
    assert_eq!(open(&scratch, "c").read(0, 512), Ok(vec![0; 512]));
    server.stop();
}

/// A disk whose export has copies of another disk's bitmaps stays open with its options.
#[test]
fn a_reload_does_not_drop_bitmaps_of_another_disk() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let marked = disk(&scratch, "m.qcow2", "read-only = true");
    let [before, after] = ["", "cache = \"writeback\"\n"]
        .map(|more| disk(&scratch, "a.img", &format!("read-only = true\n{more}")));
    scratch.image("a.img", MIB);
    command(&["create", str(&scratch.path("m.qcow2")), "1M"]).success();
    command(&["bitmap", "add", str(&scratch.path("m.qcow2")), "b"]).success();
    write(&config, &[table.clone(), marked.clone(), before]);
    let server = start(&scratch, &config, 2);
    let mut control = Control::connect(&scratch.socket("control"));
    let export = nbd_uri("copies", scratch.socket("bitmaps"));
    control.get(
        "export.add",
        json!({ "disk": "a.img", "export": export, "bitmaps": ["b"], "bitmaps-of": "m.qcow2" }),
    );
    let mut client = Client::at(scratch.socket("bitmaps"), "copies");
    write(&config, &[table, marked, after]);
    let done = control.get("server.reload", json!({}));
    let failed = done["failed"][0].as_str().unwrap_or_default();
    assert!(
        failed.contains("copies") && failed.contains("bitmaps that its disk was not opened with"),
        "{done}"
    );
    assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    client.disconnect();
    control.get("export.remove", json!({ "export": export }));
    assert_eq!(control.get("server.reload", json!({}))["opened"], json!(["a.img"]));
    server.stop();
}

/// A disk with a backup or a job cannot be closed: the first reload after its end closes it.
#[test]
fn a_disk_in_use_is_changed_by_a_later_reload() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let [a, b] = ["a.img", "b.qcow2"].map(|name| disk(&scratch, name, ""));
    write(&config, &[table.clone(), a, b]);
    let server = start(&scratch, &config, 2);
    let mut control = Control::connect(&scratch.socket("control"));
    let export = nbd_uri("", scratch.socket("backup"));
    control.get("backup.begin", json!({ "disks": ["a.img"], "backup": "k", "export": export }));
    let target = scratch.path("copy.qcow2");
    let mirror = json!({ "kind": "mirror", "disk": "b.qcow2", "job": "m", "target": target });
    control.get("job.start", mirror);
    let mut clients = ["a.img", "b.qcow2"].map(|name| open(&scratch, name));
    write(&config, &[table, disk(&scratch, "a.img", "read-only = true")]);
    for _ in 0..2 {
        let outcome = ctl(&scratch, &["reload"]).failure("changes failed: 2");
        let lines: Vec<_> = outcome.stdout.lines().collect();
        assert_eq!(lines.len(), 2, "{}", outcome.stdout);
        assert!(lines[0].starts_with(r#"failed: a.img: the backup "k" uses"#), "{}", lines[0]);
        assert!(lines[1].starts_with(r#"failed: b.qcow2: the job "m" works"#), "{}", lines[1]);
    }
    for client in &mut clients {
        assert_eq!(client.write(0, &[7; 512], 0), 0);
    }
    control.get("backup.end", json!({ "backup": "k" }));
    control.get("job.cancel", json!({ "job": "m" }));
    wait_for(&mut control, "m", "cancelled");
    let done = control.get("server.reload", json!({}));
    assert_eq!((&done["opened"], &done["closed"]), (&json!(["a.img"]), &json!(["b.qcow2"])));
    assert_eq!(done["failed"], json!([]));
    assert!(open(&scratch, "a.img").flags() & 2 != 0, "it is read-only now");
    assert_eq!(names(&mut control), ["a.img"]);
    server.stop();
}

#[test]
fn a_disk_goes_on_with_its_old_options_if_the_new_ones_fail() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let a = |more: &str| disk(&scratch, "a.qcow2", more);
    let without_create = |more: &str| a(more).replace("create = \"1M\"\n", "");
    write(&config, &[table.clone(), a("")]);
    let server = start(&scratch, &config, 1);
    let mut control = Control::connect(&scratch.socket("control"));
    let other = nbd_uri("other", scratch.socket("nbd"));
    let added = json!({ "disk": "a.qcow2", "export": other, "read-only": true });
    control.get("export.add", added);
    assert_eq!(open(&scratch, "a.qcow2").write(0, &[7; 512], 0), 0);
    for wrong in [
        a("bitmaps = [\"nope\"]"),
        without_create("snapshot = \"nope\""),
        a("format = \"vhdx\""),
        a("cache = \"writeback\"").replace("\"1M\"", "\"2M\""),
    ] {
        write(&config, &[table.clone(), wrong]);
        let outcome = ctl(&scratch, &["reload"]).failure("; it goes on with the old options\n");
        assert_eq!(outcome.status.code(), Some(1));
        let said = &outcome.stdout;
        assert!(said.starts_with("failed: a.qcow2: ") && said.lines().count() == 1, "{said}");
        assert!(!said.contains('\\'), "{said}");
        assert_eq!(names(&mut control), ["a.qcow2"]);
        let mut client = open(&scratch, "a.qcow2");
        assert_eq!(client.read(0, 512), Ok(vec![7; 512]));
        assert_eq!(client.write(0, &[7; 512], 0), 0);
        assert!(open(&scratch, "other").flags() & 2 != 0, "its export is as read-only as before");
    }
    // The disk is open as the first file says.
    let mut stays = open(&scratch, "a.qcow2");
    write(&config, &[table.clone(), a("")]);
    assert_eq!(ctl(&scratch, &["reload"]).success().stdout, "");
    assert_eq!(stays.read(0, 512), Ok(vec![7; 512]));
    write(&config, &[table.clone(), a("cache = \"writeback\"")]);
    assert_eq!(ctl(&scratch, &["reload"]).success().stdout, "opened: a.qcow2\n");
    assert!(open(&scratch, "other").flags() & 2 != 0, "the export that a request has added stays");
    // Both openings fail.
    std::fs::remove_file(scratch.path("a.qcow2")).expect("an image");
    write(&config, &[table.clone(), without_create("read-only = true")]);
    ctl(&scratch, &["reload"]).failure("changes failed: 1");
    write(&config, &[table, a("")]);
    assert_eq!(ctl(&scratch, &["reload"]).success().stdout, "opened: a.qcow2\n");
    server.stop();
}

/// Limits and access that requests have set stay, and a group keeps its new limit, whether the disk
/// goes on with the old options or the new ones.
#[test]
fn a_disk_that_goes_on_keeps_its_limits_and_access() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let group = |iops: u32| format!("[groups.slow]\niops = {iops}\n");
    let base = str(&scratch.path("base.qcow2")).to_owned();
    command(&["create", &base, "1M"]).success();
    let overlay = str(&scratch.path("a.qcow2")).to_owned();
    command(&["create", "-b", &base, "-F", "qcow2", &overlay]).success();
    let fills = "prefetch = \"1M\"\ncopy-on-read = true\n";
    let a = disk(&scratch, "a.qcow2", fills).replace("create = \"1M\"\n", "");
    let b = disk(&scratch, "b.qcow2", "");
    let of_group = disk(&scratch, "c.qcow2", "limits = { group = \"slow\" }");
    write(&config, &[table.clone(), group(100), a.clone(), b.clone(), of_group.clone()]);
    let server = start(&scratch, &config, 3);
    ctl(&scratch, &["job", "stream1", "cancel"]);
    ctl(&scratch, &["limit", "a.qcow2", "iops=77"]).success();
    ctl(&scratch, &["limit", "b.qcow2", "group=slow"]).success();
    // The job may have been complete before it could be cancelled, or be about to end.
    let protect = || ctl(&scratch, &["read-only", "a.qcow2"]).status.success();
    assert!(eventually(Duration::from_secs(60), protect), "{}", server.log());
    let wrong = "bitmaps = [\"nope\"]\n";
    for (other, failures) in [(wrong, 2), ("cache = \"writeback\"\n", 0)] {
        let [a, b] = [&a, &b].map(|disk| format!("{disk}{other}"));
        write(&config, &[table.clone(), group(200), a, b, of_group.clone()]);
        let said = ctl(&scratch, &["reload"]).stdout;
        assert_eq!(said.matches("it goes on with the old options").count(), failures, "{said}");
        assert_eq!(said.matches("opened: ").count(), 2 - failures, "{said}");
        let limits = ctl(&scratch, &["limits"]).success().stdout;
        assert!(limits.contains("iops=77") && limits.matches("iops=200").count() >= 2, "{limits}");
        let disks = ctl(&scratch, &["disks"]).success().stdout;
        let first = disks.lines().find(|line| line.starts_with("a.qcow2")).expect("a line");
        assert!(first.contains("read-only"), "{disks}");
        assert!(open(&scratch, "a.qcow2").flags() & 2 != 0, "its export is there, and read-only");
    }
    // The file's word counts where it has changed.
    write(&config, &[table, group(200), disk(&scratch, "b.qcow2", "limits = { iops = 5 }")]);
    let said = ctl(&scratch, &["reload"]).success().stdout;
    assert!(said.contains("opened: b.qcow2"), "{said}");
    let limits = ctl(&scratch, &["limits"]).success().stdout;
    assert!(limits.contains("iops=5") && !limits.contains("iops=200"), "{limits}");
    server.stop();
}

#[test]
fn a_disk_that_was_forked_is_not_closed_for_other_options() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    write(&config, &[table.clone(), disk(&scratch, "a.qcow2", "")]);
    let server = start(&scratch, &config, 1);
    let mut client = open(&scratch, "a.qcow2");
    let overlay = scratch.path("o.qcow2");
    ctl(&scratch, &["fork", "a.qcow2", "--overlay", str(&overlay)]).success();
    write(&config, &[table.clone(), disk(&scratch, "a.qcow2", "cache = \"writeback\"")]);
    let outcome = ctl(&scratch, &["reload"]).failure("changes failed: 1");
    assert!(outcome.stdout.contains("the disk goes on in"), "{}", outcome.stdout);
    assert_eq!(client.write(0, &[7; 512], 0), 0);
    // The file may name the image that the disk goes on in.
    let moved = |more: &str| {
        let more = format!("name = \"a.qcow2\"\n{more}");
        disk(&scratch, "a.qcow2", &more).replace(str(&scratch.path("a.qcow2")), str(&overlay))
    };
    write(&config, &[table.clone(), moved("")]);
    assert_eq!(ctl(&scratch, &["reload"]).success().stdout, "");
    assert_eq!(client.read(0, 512), Ok(vec![7; 512]));
    // It is not closed for other options, and later reloads know it, also after another fork.
    let other = moved("cache = \"writeback\"");
    write(&config, &[table.clone(), other]);
    ctl(&scratch, &["reload"]).failure("changes failed: 1");
    write(&config, &[table.clone(), moved("")]);
    ctl(&scratch, &["fork", "a.qcow2", "--overlay", str(&scratch.path("p.qcow2"))]).success();
    write(&config, &[table.clone(), moved("limits = { iops = 7000 }")]);
    assert_eq!(ctl(&scratch, &["reload"]).success().stdout, "limited: a.qcow2\n");
    assert_eq!(client.read(0, 512), Ok(vec![7; 512]));
    write(&config, &[table]);
    assert_eq!(ctl(&scratch, &["reload"]).success().stdout, "closed: a.qcow2\n");
    server.stop();
}

/// A backing file that the options leave out would be missing in the overlay of a fork.
#[test]
fn options_that_lose_the_layer_do_not_name_an_overlay() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let left_out = "without-backing = true\nname = \"a\"";
    let a = disk(&scratch, "a", left_out).replace("a\"\ncreate", "a.qcow2\"\ncreate");
    write(&config, &[table.clone(), a.clone()]);
    let server = start(&scratch, &config, 1);
    let mut client = open(&scratch, "a");
    assert_eq!(client.write(0, &[7; 512], 0), 0);
    ctl(&scratch, &["fork", "a"]).success();
    write(&config, &[table, a.replace("a.qcow2", "a.1.qcow2")]);
    ctl(&scratch, &["reload"]).failure("changes failed: 1");
    assert_eq!(client.read(0, 512), Ok(vec![7; 512]));
    server.stop();
}

/// Rights and access that requests have set outlive reloads with other options, and one that could
/// not open the disk at all; an address goes to the disk for which the file has it.
#[test]
fn rights_and_access_of_requests_stay() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let [a, b] = ["a", "b"].map(|name| disk(&scratch, name, ""));
    write(&config, &[table.clone(), a.clone(), b.clone()]);
    let server = start(&scratch, &config, 2);
    let mut control = Control::connect(&scratch.socket("control"));
    let [uri, other] = ["a", "other"].map(|name| nbd_uri(name, scratch.socket("nbd")));
    control.get("export.remove", json!({ "export": uri }));
    control.get("export.add", json!({ "disk": "a", "export": uri, "read-only": true }));
    control.get("export.add", json!({ "disk": "a", "export": other }));
    ctl(&scratch, &["read-only", "b"]).success();
    let cached = "cache = \"writeback\"\n";
    let more = format!("exports = [\"nbd+unix:///b?socket={}\", ", scratch.socket("nbd").display());
    let given =
        b.replace("exports = [", &format!("{more}\"{other}\", ")).replacen(&more, "exports = [", 1);
    write(&config, &[table.clone(), format!("{a}{cached}"), format!("{given}{cached}")]);
    let said = ctl(&scratch, &["reload"]).success().stdout;
    assert_eq!(said, "opened: a\nopened: b\n");
    let is_read_only = |name: &str| open(&scratch, name).flags() & 2 != 0;
    assert_eq!(["a", "b", "other"].map(is_read_only), [true; 3], "the address is of b now");
    assert_eq!(open(&scratch, "a").write(0, &[7; 512], 0), 1);
    // The disk is lost, because neither its old image nor the new one is there.
    let gone = scratch.path("gone");
    std::fs::rename(scratch.path("b"), &gone).expect("an image");
    let without_create = b.replace("create = \"1M\"\n", "");
    write(&config, &[table.clone(), a.clone(), without_create.clone()]);
    ctl(&scratch, &["reload"]).failure("changes failed: 1");
    assert_eq!(names(&mut control), ["a"]);
    std::fs::rename(&gone, scratch.path("b")).expect("an image");
    assert_eq!(ctl(&scratch, &["reload"]).success().stdout, "opened: b\n");
    assert!(is_read_only("b"), "a request has protected it");
    server.stop();
}

/// A disk keeps its image if its new one cannot be opened, although another disk was to have it.
#[test]
fn an_image_that_another_disk_takes_is_not_lost_to_its_own() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let at = |name: &str, image: &str| {
        let [from, to] = [name, image].map(|name| format!("{:?}", scratch.path(name)));
        disk(&scratch, name, &format!("name = \"{name}\"")).replace(&from, &to)
    };
    write(&config, &[table.clone(), at("a", "1.img"), at("b", "2.img")]);
    let server = start(&scratch, &config, 2);
    for name in ["a", "b"] {
        assert_eq!(open(&scratch, name).write(0, name.repeat(512).as_bytes(), 0), 0);
    }
    let lost = at("b", "3.img").replace("create = \"1M\"\n", "");
    write(&config, &[table.clone(), at("a", "2.img"), lost]);
    let said = ctl(&scratch, &["reload"]).failure("changes failed: 2").stdout;
    assert_eq!(said.matches("it goes on with the old options").count(), 2, "{said}");
    for name in ["a", "b"] {
        assert_eq!(open(&scratch, name).read(0, 512), Ok(name.repeat(512).into_bytes()));
    }
    // Two disks exchange their images, then one takes the other's.
    write(&config, &[table.clone(), at("a", "2.img"), at("b", "1.img")]);
    ctl(&scratch, &["reload"]).success();
    assert_eq!(open(&scratch, "a").read(0, 512), Ok(vec![b'b'; 512]));
    write(&config, &[table, at("a", "1.img"), at("b", "3.img")]);
    ctl(&scratch, &["reload"]).success();
    assert_eq!(open(&scratch, "a").read(0, 512), Ok(vec![b'a'; 512]));
    assert_eq!(open(&scratch, "b").read(0, 512), Ok(vec![0; 512]));
    server.stop();
}

#[test]
fn clients_of_a_configuration_use_tls() {
    require!(need::tools(&["psktool", "nbdinfo"]));
    let scratch = Scratch::new();
    let (config, keys) = (scratch.path("serve.toml"), scratch.path("keys.psk"));
    psk_file(&keys, &["alice"]);
    let table = format!("{}tls-psk = \"{}\"\n", server_table(&scratch), keys.display());
    let [a, b] = ["a.img", "b.img"].map(|name| disk(&scratch, name, ""));
    write(&config, &[table.clone(), a.clone()]);
    let server = start(&scratch, &config, 1);
    let mut control = Control::connect(&scratch.socket("control"));
    write(&config, &[table, a, b]);
    let done = control.get("server.reload", json!({}));
    assert_eq!((&done["opened"], &done["removed"]), (&json!(["b.img"]), &json!([])), "{done}");
    for name in ["a.img", "b.img"] {
        let (socket, keys) = (scratch.socket("nbd"), str(&keys));
        let uri =
            format!("nbds+unix://alice@/{name}?socket={}&tls-psk-file={keys}", socket.display());
        assert_eq!(run(tool("nbdinfo").args(["--size", &uri])).success().stdout.trim(), "1048576");
    }
    server.stop();
}

#[test]
fn what_is_wrong_is_told_with_its_place_and_nothing_is_served() {
    let scratch = Scratch::new();
    let config = scratch.path("serve.toml");
    let refused = || Serve::without_image(&scratch).option("--config", &config).refused();
    write(&config, &["[server]\nworkers = \"two\"\n".into()]);
    refused().failed(&["serve.toml:2:11", "expected u16"]);
    let twice = disk(&scratch, "a.img", "");
    write(&config, &[twice.clone(), twice]);
    refused().failed(&["serve.toml:6:1", "two disks are called \"a.img\""]);
    assert!(!scratch.path("a.img").exists());
    let other =
        Serve::without_image(&scratch).option("--config", &config).option("--cache", "none");
    other.refused().wrong_usage(&["--config", "--cache"]);
    let missing = scratch.path("none.toml");
    let missing = Serve::without_image(&scratch).option("--config", &missing);
    missing.refused().failed(&["none.toml", "cannot read"]);
}

#[test]
fn a_server_with_a_configuration_is_upgraded() {
    let scratch = Scratch::new();
    let (config, table) = (scratch.path("serve.toml"), server_table(&scratch));
    let [a, b] = ["a.img", "b.qcow2"].map(|name| disk(&scratch, name, ""));
    write(&config, &[table.clone(), a.clone(), b.clone()]);
    let server = start(&scratch, &config, 2);
    let mut client = open(&scratch, "b.qcow2");
    assert_eq!(client.write(0, &[7; 4096], 0), 0);
    write(&config, &[table, b, a]);
    let control = scratch.socket("control");
    Control::connect(&control).get("server.reload", json!({}));
    let upgraded = upgrade_in_the_end(&control, &[]).stdout;
    assert_eq!(client.read(0, 4096), Ok(vec![7; 4096]), "{upgraded}");
    assert_eq!(names(&mut Control::connect(&control)), ["b.qcow2", "a.img"]);
    let process = upgraded.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("an id");
    let process = rustix::process::Pid::from_raw(process).expect("an id");
    rustix::process::kill_process(process, Signal::TERM).expect("it runs");
    assert!(eventually(Duration::from_secs(60), || !control.exists()));
    drop(server);
}
