//! The programs that a launcher starts for a server that an attacker may control: the running
//! program, or one that the operator has named and that the server cannot write to by any path; and
//! no other one if the kernel cannot restrict files.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhouse_tests::need::{self, skip};
use blockhouse_tests::upgrade::{Servers, upgrade, upgrade_in_the_end};
use blockhouse_tests::{
    Scratch, Serve, blockhouse, copy_blockhouse, eventually, image_tool, require,
};
use serde_json::{Value, json};

/// The wrapper that makes system calls fail for the command that it executes.
const WITHOUT: &str = env!("CARGO_BIN_EXE_without_syscalls");
const LIMIT: Duration = Duration::from_secs(60);

fn serve(scratch: &Scratch) -> Serve {
    let image = scratch.path("disk.raw");
    std::fs::write(&image, vec![0; 1 << 20]).expect("room");
    Serve::new(scratch, &image).option("--control", scratch.socket("control"))
}

/// Replaces a program as a package manager does: by another file with the same name.
fn replace(program: &Path) {
    let new = program.with_extension("new");
    copy_blockhouse(&new);
    std::fs::rename(new, program).expect("our folder");
}

#[test]
fn a_program_that_was_replaced_is_started_where_the_operator_named_it() {
    require!(need::root_mount());
    let (scratch, programs) = (Scratch::new(), Scratch::new());
    let program = programs.path("blockhouse");
    replace(&program);
    let control = scratch.socket("control");
    let servers = Servers(&scratch);
    let server = serve(&scratch).binary(&program).start();
    // The upgrade starts the running program, as long as no other file has its name.
    upgrade_in_the_end(&control, &[]);
    servers.wait_for(1);
    replace(&program);
    upgrade(&control, &[]).failure("--upgrade-to");
    servers.stop();
    drop(server);
    let server = serve(&scratch).binary(&program).option("--upgrade-to", &program).start();
    replace(&program);
    for words in [&[][..], &["--binary", image_tool::str(&program)]] {
        upgrade_in_the_end(&control, words);
        servers.wait_for(1);
        let running = servers.running()[0].as_raw_nonzero();
        let executed = std::fs::canonicalize(format!("/proc/{running}/exe")).expect("it runs");
        assert_eq!(executed, program.canonicalize().expect("it is there"));
        replace(&program);
    }
    servers.stop();
    drop(server);
}

/// The folder of the images is also mounted at the folder of programs, or a folder of programs in
/// that of the images.
#[test]
fn a_program_below_another_mount_of_the_images_is_not_started() {
    for (from, to) in
        [("images", "programs"), ("images/below", "programs"), ("programs", "images/below")]
    {
        let (scratch, other) = (Scratch::new(), Scratch::new());
        for folder in ["images/below", "programs"] {
            std::fs::create_dir_all(other.path(folder)).expect("a folder");
        }
        let program = if from == "programs" { "programs/blockhouse" } else { "programs/program" };
        let source = other.path(if from == "programs" { "programs" } else { from });
        for name in ["blockhouse", "program"] {
            copy_blockhouse(&source.join(name));
        }
        let image = other.path("images/disk.raw");
        image_tool::command(&["create", image_tool::str(&image), "1M"]).success();
        let mount = "mount --bind \"$0\" \"$1\" && shift && exec \"$@\"";
        let (from, to) = (other.path(from), other.path(to));
        let wrapper = ["unshare", "--mount", "sh", "-c", mount];
        let wrapper = wrapper.into_iter().chain([image_tool::str(&from), image_tool::str(&to)]);
        let wrapper: Vec<_> = wrapper.collect();
        let probe = Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").status();
        if !probe.is_ok_and(|status| status.success()) {
            return skip("nothing can be mounted here");
        }
        let control = scratch.socket("control");
        let server = Serve::new(&scratch, &image)
            .option("--control", &control)
            .option("--upgrade-to", other.path(program))
            .under(&wrapper)
            .flag("-v")
            .start();
        if !server.details().contains("landlock") {
            return skip("this kernel has no Landlock");
        }
        upgrade(&control, &[]).failure("can write below");
        server.stop();
    }
}

#[test]
fn without_landlock_less_is_started() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let program = other.path("blockhouse-other");
    copy_blockhouse(&program);
    let control = scratch.socket("control");
    let servers = Servers(&scratch);
    let without = || serve(&scratch).under([WITHOUT, "landlock"]).flag("-v");
    let server = without().option("--upgrade-to", &program).start();
    assert!(!server.details().contains("landlock"), "{}", server.details());
    // This user owns the program, so the server could have written it.
    upgrade(&control, &[]).failure("does not keep the server from writing");
    upgrade(&control, &["--binary", "/bin/sh"]).failure("--upgrade-to");
    upgrade_in_the_end(&control, &["--binary", image_tool::str(blockhouse())]);
    servers.wait_for(1);
    servers.stop();
    drop(server);
    let server = without().start();
    upgrade(&control, &["--binary", image_tool::str(&program)]).failure("--upgrade-to");
    upgrade_in_the_end(&control, &[]);
    servers.wait_for(1);
    servers.stop();
    drop(server);
}

/// A launcher, and our end of its standard input: we are the server.
struct Launcher {
    process: std::process::Child,
    socket: UnixStream,
}

impl Launcher {
    fn start() -> Self {
        let (socket, theirs) = UnixStream::pair().expect("a socket pair");
        socket.set_read_timeout(Some(LIMIT)).expect("a limit");
        let mut command = Command::new(blockhouse());
        command.arg("__launch").stdin(OwnedFd::from(theirs)).stderr(Stdio::null());
        Self { process: command.spawn().expect("the binary"), socket }
    }

    fn send(&self, request: &Value) {
        let json = request.to_string();
        let length = (json.len() as u32).to_le_bytes();
        (&self.socket).write_all(&length).expect("it listens");
        (&self.socket).write_all(json.as_bytes()).expect("it listens");
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        let files = [self.socket.as_fd()];
        ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&files));
        let byte = [std::io::IoSlice::new(&[0])];
        let flags = rustix::net::SendFlags::NOSIGNAL;
        rustix::net::sendmsg(&self.socket, &byte, &mut ancillary, flags).expect("it listens");
    }

    fn ask(&self, request: &Value) -> Value {
        self.send(request);
        let mut length = [0; 4];
        (&self.socket).read_exact(&mut length).expect("an answer");
        let mut json = vec![0; u32::from_le_bytes(length) as usize + 1];
        (&self.socket).read_exact(&mut json).expect("an answer");
        json.pop();
        serde_json::from_slice(&json).expect("JSON")
    }

    fn tell_rules(&self, programs: &[&[u8]], capabilities: u64) {
        let arguments = [b"--version"];
        self.send(&json!({ "Rules": {
            "arguments": arguments, "programs": programs, "reach": "User",
            "capabilities": capabilities, "user": null,
        }}));
    }

    fn ends(mut self) {
        assert!(eventually(LIMIT, || self.process.try_wait().is_ok_and(|end| end.is_some())));
    }
}

#[test]
fn a_launcher_does_no_more_than_its_rules_say() {
    let launcher = Launcher::start();
    launcher.tell_rules(&[b"/dev/shm/blockhouse"], 0);
    for binary in ["/bin/sh", "/dev/shm/blockhouse", "/", ""] {
        let refused = launcher.ask(&json!({ "Start": { "binary": binary.as_bytes() } }));
        assert!(refused["Refused"]["why"].is_string(), "{binary}: {refused}");
    }
    // Nothing was started.
    assert_eq!(launcher.ask(&json!({ "Signal": { "signal": 9 } })), json!("Done"));
    let status = format!("/proc/{}/status", launcher.process.id());
    let status = std::fs::read_to_string(status).expect("it runs");
    assert!(status.contains("CapPrm:\t0000000000000000"), "{status}");
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    // Other rules end it.
    launcher.tell_rules(&[b"/bin/sh"], u64::MAX);
    launcher.ends();
    let launcher = Launcher::start();
    launcher.tell_rules(&[], 0);
    let started = launcher.ask(&json!({ "Start": { "binary": null } }));
    assert!(started["Started"]["process"].is_number(), "{started}");
    let ended = launcher.ask(&json!("Wait"));
    assert_eq!(ended["Ended"]["status"], "exit status: 0");
    launcher.socket.shutdown(std::net::Shutdown::Both).expect("a socket");
    launcher.ends();
    for nonsense in [json!({ "Start": {} }), json!(null), json!({ "Start": { "binary": null } })] {
        let launcher = Launcher::start();
        launcher.send(&nonsense);
        launcher.ends();
    }
}
