//! Images on other servers: commands read and write NBD exports, servers export them, and they are
//! backing files.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, qemu_img, qemu_io, str};
use blockhouse_tests::{
    Scratch, Serve, Server, blockhouse, eventually, nbd_uri, need, require, run, tool,
};
use rustix::process::Signal;
use serde_json::json as value;

const SIZE: usize = 4 << 20;

/// A base image on a server of ours, and its content.
struct Base {
    scratch: Scratch,
    content: Vec<u8>,
}

impl Base {
    fn new() -> Self {
        let scratch = Scratch::new();
        let mut content = vec![0; SIZE];
        content[1 << 20..2 << 20].fill(1);
        content[3 << 20..(3 << 20) + 512].fill(2);
        // The file has holes for zeros.
        let file = fs::File::create(scratch.path("base.raw")).unwrap();
        file.set_len(SIZE as u64).unwrap();
        file.write_all_at(&content[1 << 20..2 << 20], 1 << 20).unwrap();
        file.write_all_at(&content[3 << 20..(3 << 20) + 512], 3 << 20).unwrap();
        Self { scratch, content }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    fn socket(&self) -> PathBuf {
        self.scratch.socket("base.sock")
    }

    fn uri(&self) -> String {
        nbd_uri("base", self.socket())
    }

    fn serve(&self) -> Server {
        Serve::bare(&self.scratch, &self.path("base.raw")).export(&self.uri()).start()
    }

    /// Checks that qemu-img reads the original content of the base from an image.
    fn assert_copy(&self, image: &Path, format: &str) {
        fs::write(self.path("model.raw"), &self.content).unwrap();
        let model = self.path("model.raw");
        qemu_img(&["compare", "-f", format, "-F", "raw", str(image), str(&model)]).success();
    }
}

#[test]
fn an_export_is_read_as_a_file_is() {
    let base = Base::new();
    let server = base.serve();
    let (uri, copy) = (base.uri(), base.path("copy.qcow2"));
    let info = json(&command(&["info", "--json", &uri]).success());
    assert_eq!((&info["format"], &info["virtual-size"]), (&"raw".into(), &SIZE.into()));
    assert!(info.get("actual-size").is_none());
    let parts = json(&command(&["map", "--json", &uri]).success());
    let zero = |part: &serde_json::Value| part["zero"] == true;
    assert!(parts.as_array().unwrap().iter().any(zero), "holes are kept: {parts}");
    command(&["convert", &uri, str(&copy)]).success();
    command(&["compare", &uri, str(&copy)]).success();
    drop(server);
    base.assert_copy(&copy, "qcow2");
    let refused = command(&["info", &uri]).failure("cannot connect");
    assert!(refused.stderr.contains("base.sock"), "{}", refused.describe("it names the socket"));
}

#[test]
fn an_export_is_written_only_if_that_is_said() {
    let base = Base::new();
    let other = base.path("other.raw");
    let content = vec![9; SIZE];
    fs::write(&other, &content).unwrap();
    let server = base.serve();
    let uri = base.uri();
    command(&["convert", str(&other), &uri]).failure("--force");
    command(&["convert", "--force", "--format", "raw", str(&other), &uri]).success();
    command(&["compare", str(&other), &uri]).success();
    command(&["resize", &uri, "8M"]).failure("cannot be changed");
    drop(server);
    assert_eq!(fs::read(base.path("base.raw")).unwrap(), content);
}

#[test]
fn an_export_is_served_again() {
    let base = Base::new();
    let origin = base.serve();
    let uri = base.uri();
    let again = nbd_uri("", base.scratch.socket("again.sock"));
    let control = base.scratch.socket("control");
    let server = Serve::bare(&base.scratch, Path::new(&uri)).export(&again);
    let server = server.option("--control", &control).start();
    // The disk's name is that of the export, without the rest of the URI.
    let disks = Control::connect(&control).get("disk.list", value!({}));
    assert_eq!(disks[0]["disk"], "base", "{disks}");
    let steps = ["read -P 1 1M 1M", "write -f -P 5 64k 4k", "write -z 1M 512k", "flush"];
    qemu_io("raw", Path::new(&again), &steps);
    drop((server, origin));
    let bytes = fs::read(base.path("base.raw")).unwrap();
    assert_eq!(bytes[64 << 10..][..4096], [5; 4096]);
    assert_eq!(bytes[1 << 20..][..512 << 10], [0; 512 << 10]);
    assert_eq!(bytes[(1 << 20) + (512 << 10)], 1);
}

#[test]
fn an_image_names_another_server_only_if_that_is_allowed() {
    let base = Base::new();
    let origin = base.serve();
    let uri = base.uri();
    let overlay = base.path("overlay.qcow2");
    let made = command(&["create", "-b", &uri, "-F", "raw", str(&overlay)]).success();
    assert!(made.stderr.contains("--allow-remote"), "{}", made.stderr);
    let info = json(&qemu_img(&["info", "--output=json", str(&overlay)]).success());
    assert_eq!(info["virtual-size"], SIZE);
    command(&["convert", str(&overlay), str(&base.path("no.raw"))]).failure("--allow-remote");
    Serve::bare(&base.scratch, &overlay).refused().failed(&["--allow-remote"]);
    let front = nbd_uri("", base.scratch.socket("front.sock"));
    let server = Serve::bare(&base.scratch, &overlay).export(&front).flag("--allow-remote").start();
    let steps = ["read -P 1 1M 1M", "write -P 7 1M 4k", "read -P 1 1028k 1020k", "flush"];
    qemu_io("raw", Path::new(&front), &steps);
    drop(server);
    let whole = base.path("whole.raw");
    command(&["convert", "--allow-remote", str(&overlay), str(&whole)]).success();
    drop(origin);
    let mut model = base.content.clone();
    model[1 << 20..(1 << 20) + 4096].fill(7);
    assert_eq!(fs::read(whole).unwrap(), model);
    assert_eq!(fs::read(base.path("base.raw")).unwrap(), base.content, "a base is only read");
}

#[test]
fn requests_wait_for_a_base_that_comes_back() {
    let base = Base::new();
    let origin = base.serve();
    let uri = format!("{}&reconnect=60", base.uri());
    let overlay = base.path("overlay.qcow2");
    command(&["create", "-b", &uri, "-F", "raw", str(&overlay)]).success();
    let front = nbd_uri("", base.scratch.socket("front.sock"));
    let server = Serve::bare(&base.scratch, &overlay).export(&front).flag("--allow-remote").start();
    origin.signal(Signal::KILL);
    drop(origin);
    let lost = || server.log().contains("connecting again");
    assert!(eventually(Duration::from_secs(60), lost), "{}", server.log());
    let reader = std::thread::spawn({
        let front = front.clone();
        move || qemu_io("raw", Path::new(&front), &["read -P 1 1M 1M"])
    });
    let origin = base.serve();
    reader.join().unwrap();
    drop((server, origin));
}

#[test]
fn an_export_is_opened_as_a_disk_of_a_server_that_runs() {
    let base = Base::new();
    let origin = base.serve();
    let control = base.scratch.socket("control");
    let other = base.scratch.image_of("other.raw", &[0; 4096]);
    let server = Serve::new(&base.scratch, other.path()).option("--control", &control).start();
    let again = nbd_uri("", base.scratch.socket("again"));
    command(&["ctl", str(&control), "open", &base.uri(), "--export", &again]).success();
    qemu_io("raw", Path::new(&again), &["read -P 1 1M 1M"]);
    server.stop();
    drop(origin);
}

#[test]
fn commands_tell_another_server_that_they_leave() {
    require!(need::tools(&["nbdkit"]));
    for words in ["info", "map -f raw", "convert -f raw"] {
        let scratch = Scratch::new();
        let copy = scratch.path("copy.raw");
        let target = if words.starts_with("convert") { str(&copy) } else { "" };
        let line = format!("{} {words} \"$uri\" {target}", str(blockhouse()));
        let kit = ["-v", "-U", "-", "memory", "4M", "--run", &line];
        let log = run(tool("nbdkit").args(kit)).success().stderr;
        assert!(log.contains("client sent NBD_CMD_DISC"), "{words}: {log}");
    }
}
