//! Attempts to break out, for tests: in builds with debug assertions only.
//!
//! The environment variable `BLOCKHOUSE_SANDBOX_PROBE` has words with spaces between. Each names an
//! attempt, which a loop makes as soon as the sandbox is entered. The log has a line with the
//! outcome of each. `open`, `create`, `remove` and `set-user-id` have a path: `open=PATH`.
//!
//! With `BLOCKHOUSE_SANDBOX_PROBE_ASIDE` a separate thread makes the attempts. It blocks all
//! signals, as threads of Ceph's library do, and starts when those would start.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use blockhouse_engine::attempts;
use parking_lot::Mutex;

use crate::process::workers::Workers;

/// Tries what the environment asks for.
pub(super) fn run(workers: &Workers) {
    if let Ok(words) = std::env::var("BLOCKHOUSE_SANDBOX_PROBE") {
        workers.run(move || async move { attempt_all("", &words) });
    }
    if let Some((begin, thread)) = ASIDE.lock().take() {
        drop(begin);
        let _ = thread.join();
    }
}

/// The separate thread, which begins when the sender is dropped.
static ASIDE: Mutex<Option<(Sender<()>, JoinHandle<()>)>> = Mutex::new(None);

/// Starts the separate thread, if the environment asks for it.
pub(super) fn start_aside() {
    let Ok(words) = std::env::var("BLOCKHOUSE_SANDBOX_PROBE_ASIDE") else { return };
    let (begin, begun) = channel();
    let (block, blocked) = channel();
    let thread = std::thread::spawn(move || {
        attempts::block_signals().expect("it is allowed");
        drop(block);
        let _: Result<(), _> = begun.recv();
        attempt_all("aside ", &words);
    });
    let _: Result<(), _> = blocked.recv();
    *ASIDE.lock() = Some((begin, thread));
}

fn attempt_all(place: &str, words: &str) {
    for word in words.split(' ') {
        match attempt(word) {
            Ok(()) => tracing::warn!("sandbox probe {place}{word}: done"),
            Err(error) => tracing::warn!("sandbox probe {place}{word}: {error}"),
        }
    }
}

fn attempt(word: &str) -> io::Result<()> {
    let (what, path) = word.split_once('=').unwrap_or((word, ""));
    match what {
        "open" => fs::File::open(path).map(drop),
        "create" => fs::write(path, "x"),
        "remove" => fs::remove_file(path),
        // Only an error returns.
        "execute" => Err(Command::new("/bin/true").exec()),
        "start" => Command::new("/bin/true").spawn().map(drop),
        "socket" => TcpListener::bind("127.0.0.1:0").map(drop),
        "unix-socket" => UnixDatagram::unbound().map(drop),
        "datagrams" => UnixDatagram::pair().map(drop),
        "set-user-id" => fs::set_permissions(path, fs::Permissions::from_mode(0o4755)),
        "signal" => attempts::signal_another(),
        "connect-by-sending" => attempts::connect_by_sending(),
        "trace" => attempts::trace(),
        "executable-memory" => attempts::make_memory_executable(),
        "new-ring" => attempts::make_ring(),
        "ring-open" => attempts::open_by_ring(),
        "user" => attempts::change_user(),
        _ => Err(io::Error::other("there is no such attempt")),
    }
}
