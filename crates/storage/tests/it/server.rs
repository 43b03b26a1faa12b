//! A qemu-nbd that serves a raw file.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blockhouse_nbd_protocol::uri::{Address, ClientUri, NbdUri, Security};

/// How long a server may take to start.
const START_TIME: Duration = Duration::from_secs(30);

/// Whether the test can be run here; says so if not.
pub fn has_qemu_nbd() -> bool {
    let found = Command::new("qemu-nbd").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !found {
        let strict = std::env::var("BLOCKHOUSE_TESTS_SKIP").is_ok_and(|skip| skip == "never");
        assert!(!strict, "qemu-nbd is missing");
        eprintln!("skipped: qemu-nbd is missing");
    }
    found
}

/// The export named `disk` at a Unix socket.
pub fn uri(socket: &Path) -> ClientUri {
    let export = NbdUri {
        security: Security::Plain,
        address: Address::Unix(socket.to_owned()),
        export: "disk".into(),
    };
    export.into()
}

/// A server, which ends with this.
pub struct QemuNbd {
    child: Child,
    socket: PathBuf,
}

impl QemuNbd {
    /// Serves `image` at `socket`.
    pub fn start(image: &Path, socket: &Path) -> Self {
        let mut command = Command::new("qemu-nbd");
        command.args(["--format=raw", "--persistent", "--shared=4", "--discard=unmap"]);
        command.args(["--export-name=disk", "--cache=writeback"]).arg("--socket").arg(socket);
        let child = command.arg(image).stdin(Stdio::null()).spawn().expect("it starts");
        let deadline = Instant::now() + START_TIME;
        // The socket is there before it listens.
        while UnixStream::connect(socket).is_err() {
            assert!(Instant::now() < deadline, "qemu-nbd does not listen");
            sleep(Duration::from_millis(5));
        }
        Self { child, socket: socket.to_owned() }
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
