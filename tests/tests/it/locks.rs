//! The locks that keep programs away from an image: QEMU and Blockhouse use the same byte-range
//! locks; servers exclude each other by these and by their sockets.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhouse_tests::nbd::Client;
use blockhouse_tests::{
    Engine, Image, Scratch, Serve, blockhouse, eventually, nbd_uri, need, on_every_engine, require,
    run, tool,
};

const MIB: u64 = 1 << 20;

/// A QEMU program that has an image open.
struct QemuIo(Child);

impl QemuIo {
    fn holding(image: &Image, options: &[&str]) -> Self {
        let mut command = tool("qemu-io");
        command.args(["-f", "raw"]).args(options).arg(image.path());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("qemu-io starts");
        let commands = child.stdin.as_mut().expect("a pipe");
        commands.write_all(b"read 0 512\n").expect("it listens");
        let info = format!("/proc/{}/fdinfo", child.id());
        let locks = || {
            let files = std::fs::read_dir(&info).expect("it runs").flatten();
            files.filter_map(|file| std::fs::read_to_string(file.path()).ok()).collect::<String>()
        };
        assert!(eventually(Duration::from_secs(10), || locks().contains("OFDLCK")), "no lock");
        Self(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_image_that_qemu_writes_is_refused_and_the_line_names_the_process() {
    require!(need::tools(&["qemu-io"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let qemu = QemuIo::holding(&image, &[]);
    let before = image.state();
    let words = ["disk.img", "locked", &qemu.pid(), "qemu-io"];
    Serve::new(&scratch, image.path()).refused().failed(&words);
    Serve::new(&scratch, image.path()).flag("--read-only").refused().failed(&words);
    assert_eq!(image.state(), before);
    drop(qemu);
    Serve::new(&scratch, image.path()).start().stop();
}

#[test]
fn an_image_that_qemu_only_reads_is_served() {
    require!(need::tools(&["qemu-io"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let _qemu = QemuIo::holding(&image, &["-r"]);
    Serve::new(&scratch, image.path()).flag("--read-only").start().stop();
}

#[test]
fn qemu_cannot_write_to_a_served_image_but_may_look_at_it() {
    require!(need::tools(&["qemu-io", "qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let write = || run(tool("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(image.path()));
    for option in [&[][..], &["--read-only"]] {
        let mut serve = Serve::new(&scratch, image.path());
        for word in option {
            serve = serve.flag(word);
        }
        let server = serve.start();
        write().failure("lock");
        let resize = ["resize", "-f", "raw", image.str(), "2M"];
        run(tool("qemu-img").args(resize)).failure("lock");
        let info = ["info", "-U", "-f", "raw", image.str()];
        run(tool("qemu-img").args(info)).success();
        let read = ["-r", "-U", "-f", "raw", "-c", "read 0 512", image.str()];
        run(tool("qemu-io").args(read)).success();
        server.stop();
        write().success();
    }
}

#[test]
fn two_servers_do_not_write_to_one_image() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).start();
    let pid = server.pid().as_raw_nonzero().to_string();
    let second = || {
        let uri = nbd_uri("", scratch.socket("second"));
        Serve::bare(&scratch, image.path()).export(&uri)
    };
    second().refused().failed(&["disk.img", "locked", &pid, "a copy made while it runs"]);
    second().flag("--read-only").refused().failed(&["disk.img", "locked", &pid]);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 512], 0), 0);
    client.disconnect();
    server.stop();
    second().start().stop();
}

#[test]
fn a_command_in_conflict_with_itself_is_not_told_to_stop_itself() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let base = scratch.image("base.img", MIB);
    let over = scratch.path("over.qcow2");
    let over = over.to_str().expect("a plain name");
    let create = ["create", "-f", "qcow2", "-b", "base.img", "-F", "raw", over];
    run(tool("qemu-img").args(create)).success();
    let mut convert = Command::new(blockhouse());
    let outcome = run(convert.args(["convert", "--force", over, base.str()])).failure("base.img");
    assert!(outcome.stderr.contains("this command has it open"), "{}", outcome.describe("who"));
    assert!(!outcome.stderr.contains("process"), "{}", outcome.describe("it is itself"));
}

#[test]
fn a_reader_keeps_writers_away_and_lets_readers_in() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let reader = Serve::new(&scratch, image.path()).flag("--read-only").start();
    let second = || {
        let uri = nbd_uri("", scratch.socket("second"));
        Serve::bare(&scratch, image.path()).export(&uri)
    };
    second().refused().failed(&["disk.img", "locked"]);
    let other = second().flag("--read-only").start();
    assert_eq!(Client::open(&other.address()).read(0, 512), Ok(vec![0; 512]));
    other.stop();
    reader.stop();
}

#[test]
fn info_of_a_locked_image_is_told() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).start();
    let mut info = std::process::Command::new(blockhouse());
    let outcome = run(info.args(["info", "--json"]).arg(image.path())).success();
    let info: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    assert_eq!(info["virtual-size"], MIB);
    assert_eq!(info["format"], "raw");
    server.stop();
}

#[test]
fn an_image_in_use_cannot_be_resized() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).start();
    let resize = || {
        let mut resize = std::process::Command::new(blockhouse());
        run(resize.arg("resize").arg(image.path()).arg("2M"))
    };
    resize().failure("locked");
    assert_eq!(image.content().len() as u64, MIB);
    server.stop();
    resize().success();
    assert_eq!(image.content().len() as u64, 2 * MIB);
}

/// An upgrade or a watchdog may kill the server and start it again. The locks of the killed
/// process, which the kernel may release late, must not prevent the start.
fn a_killed_server_can_be_started_again_at_once(engine: Engine) {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    for round in 0..5u8 {
        let server = Serve::new(&scratch, image.path()).engine(engine).start();
        let mut client = Client::open(&server.address());
        assert_eq!(client.read(0, 512), Ok(vec![round; 512]));
        assert_eq!(client.write(0, &[round + 1; 512], 0), 0);
        assert!(scratch.socket("nbd").exists());
        // SIGKILL, with the client still connected.
        drop(server);
        assert!(scratch.socket("nbd").exists(), "a killed server leaves its socket's file");
    }
}

on_every_engine! {
    a_killed_server_can_be_started_again_at_once
}
