//! A host on which no more threads can be created for a while: requests and commands work without
//! them.

use std::os::unix::fs::PermissionsExt;
use std::process::Child;

use blockhouse_tests::image_tool::str;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, need, require, run, tool};

const MIB: u64 = 1 << 20;
/// Commands of NBD.
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
/// The id of a user without other processes.
const USER: &str = "64991";

/// The maximum number of tasks of the user.
const MAX_TASKS: usize = 24;

/// Processes of the user that sleep; killed on drop.
struct Sleepers(Vec<Child>);

impl Sleepers {
    fn start(count: usize) -> Self {
        let sleeper = |_| {
            let mut command = tool("setpriv");
            command.args(["--reuid", USER, "--regid", USER, "--clear-groups", "sleep", "600"]);
            command.spawn().expect("a process")
        };
        Self((0..count).map(sleeper).collect())
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        for sleeper in &mut self.0 {
            let ended = sleeper.kill().and_then(|()| sleeper.wait());
            ended.expect("it is ours");
        }
    }
}

#[test]
fn a_short_lack_of_processes_fails_no_request() {
    require!(need::root());
    require!(need::tools(&["setpriv", "prlimit", "sleep"]));
    for (format, cache) in [("raw", "writeback"), ("raw", "none"), ("qcow2", "writethrough")] {
        let scratch = Scratch::new();
        let (image, limited) = (scratch.path("disk"), scratch.path("limited"));
        let program = blockhouse_tests::blockhouse().display();
        let script = format!("#!/bin/sh\nexec prlimit --nproc={MAX_TASKS} '{program}' \"$@\"\n");
        std::fs::write(&limited, script).expect("a script");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&limited, mode).expect("it is ours");
        let serve = Serve::new(&scratch, &image).binary(&limited).option("--format", format);
        let serve = serve.option("--create", "64M").option("--cache", cache);
        let serve = serve.option("--user", USER).option("--group", USER);
        let server = serve.option("--state", "off").start();
        let mut client = Client::open(&server.address());
        for count in [MAX_TASKS, 0] {
            let _sleepers = Sleepers::start(count);
            for round in 0..8 {
                let offset = round * 4 * MIB;
                let what = format!("{format} {cache}, {count} other processes");
                assert_eq!(client.write(offset, &[7; 4096], 0), 0, "{what}");
                assert_eq!(client.simple(WRITE_ZEROES, offset + MIB, MIB, 0), 0, "{what}");
                assert_eq!(client.simple(TRIM, offset + 2 * MIB, MIB, 0), 0, "{what}");
                assert_eq!(client.flush(), 0, "{what}");
                assert_eq!(client.read(offset, 4096), Ok(vec![7; 4096]), "{what}");
            }
        }
        server.stop();
    }
}

#[test]
fn a_lack_of_processes_fails_no_conversion() {
    require!(need::root());
    require!(need::tools(&["setpriv", "prlimit"]));
    let scratch = Scratch::new();
    let content = blockhouse_tests::random_bytes(&mut blockhouse_tests::seeded(), 3 << 20);
    let image = scratch.image_of("disk.img", &content);
    // The command runs as another user, because root has no such limit; capabilities let it open
    // root's files.
    let rights = "+dac_override,+dac_read_search";
    for (processes, format) in [("1", "raw"), ("2", "raw"), ("2", "qcow2")] {
        let target = scratch.path(&format!("{processes}.{format}"));
        let mut command = tool("setpriv");
        command.args(["--reuid", USER, "--regid", USER, "--clear-groups"]);
        command.args(["--inh-caps", rights, "--ambient-caps", rights, "prlimit"]);
        command.arg(format!("--nproc={processes}")).arg(blockhouse_tests::blockhouse());
        run(command.args(["convert", "-O", format, image.str(), str(&target)])).success();
        run(tool("qemu-img")
            .args(["compare", "-f", "raw", "-F", format, image.str()])
            .arg(&target))
        .success();
    }
}
