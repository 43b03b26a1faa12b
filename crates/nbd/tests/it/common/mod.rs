//! A server over a disk in memory, and clients for it.

pub mod client;
pub mod storage;

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockhouse_disk::{Access, Disk, Options};
use blockhouse_engine::{Engine, EngineChoice, EventLoop, Handle, Listener};
use blockhouse_nbd::proto::Framing;
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{Export, Exports, Limits, Server, SocketFile, bind};
pub use client::{Client, NONE, Outcome};
pub use storage::Memory;
use tempfile::TempDir;

/// All framings.
pub const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

/// The engines whose sockets differ: by ring and by readiness.
pub const ENGINES: [Engine; 2] = [Engine::IoUring, Engine::Threads];

/// A server in a thread of its own with the exports `disk` (the default one) and `frozen`, the
/// same bytes read-only.
pub struct Rig {
    pub path: PathBuf,
    pub storage: Memory,
    server: Server,
    pub exports: Exports<Memory>,
    remote: Handle,
    thread: Option<JoinHandle<()>>,
    _file: Option<SocketFile>,
    _folder: TempDir,
}

impl Rig {
    /// Starts it over `size` zero bytes. `None` where the host does not let us have the engine.
    pub fn start(engine: Engine, limits: Limits, size: usize) -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("socket");
        let bound = bind(&Address::Unix(path.clone())).unwrap();
        let storage = Memory::new(size);
        let (server, exports) = (Server::new(limits), Exports::new());
        for (name, access) in [("disk", Access::ReadWrite), ("frozen", Access::ReadOnly)] {
            let disk = Disk::raw(storage.clone(), Options { access, ..Options::default() });
            let disk = Arc::new(disk.unwrap());
            let (name, description, bitmaps) = (name.into(), String::new(), Vec::new());
            let (access, has_depth) = (Access::ReadWrite, true);
            exports.add(Export { name, description, disk, bitmaps, access, has_depth }).unwrap();
        }
        let (sender, receiver) = mpsc::channel();
        let (running, offered) = (server.clone(), exports.clone());
        let thread = thread::spawn(move || {
            let mut event_loop = match EventLoop::new(EngineChoice::Only(engine)) {
                Ok(event_loop) => event_loop,
                Err(error) => {
                    eprintln!("skipped on {engine}: {error}");
                    return;
                }
            };
            let handle = event_loop.handle();
            sender.send(handle.clone()).unwrap();
            let listener = Listener::new(bound.socket).unwrap();
            event_loop.block_on(async {
                running.serve(&listener, &offered, &[handle]).await.unwrap();
                running.drain().await;
            });
        });
        let remote = receiver.recv().ok()?;
        Some(Self {
            path,
            storage,
            server,
            exports,
            remote,
            thread: Some(thread),
            _file: bound.file,
            _folder: folder,
        })
    }

    /// A client of the default export.
    pub fn client(&self, framing: Framing) -> Client {
        Client::connect(&self.path, framing, "")
    }

    /// The server.
    pub fn server(&self) -> Server {
        self.server.clone()
    }

    /// Runs a future on the server's loop.
    pub fn run<F: Future<Output = T> + 'static, T: Send + 'static>(
        &self,
        make: impl FnOnce() -> F + Send + 'static,
    ) -> T {
        self.remote.spawn(make).wait().expect("the loop runs")
    }

    /// Starts the drain.
    pub fn drain(&self) {
        let server = self.server.clone();
        drop(self.remote.spawn(move || async move { server.drain().await }));
    }

    /// Waits until the server has ended, after a drain.
    pub fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }

    /// Waits until the storage has nothing to do.
    pub fn settle(&self) {
        wait_for("the storage to come to rest", || self.storage.running().0 == 0);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.drain();
            // After a failed assertion the clients are gone, so this ends as well.
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the server panicked");
        }
    }
}

/// Runs `test` on every engine, over a disk of `size` bytes.
pub fn on_every_engine(size: usize, test: impl Fn(&Rig) + Sync) {
    with_limits(Limits::default(), size, |rig| test(&rig));
}

/// Runs `test` on every engine with these limits, at the same time: most of these tests wait for a
/// limit of time.
pub fn with_limits(limits: Limits, size: usize, test: impl Fn(Rig) + Sync) {
    let on = &|engine| {
        if let Some(rig) = Rig::start(engine, limits, size) {
            test(rig);
        }
    };
    thread::scope(|scope| {
        for engine in ENGINES {
            scope.spawn(move || on(engine));
        }
    });
}

/// Waits until something is so.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited too long for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Random numbers for a test, and a line that replays them.
pub fn random(test: &str) -> fastrand::Rng {
    let given = std::env::var("NBD_SEED").ok().map(|seed| seed.parse().unwrap());
    let seed = given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.unwrap().as_nanos() as u64
    });
    eprintln!("seed {seed}; replay: NBD_SEED={seed} cargo test -p blockhouse-nbd {test}");
    fastrand::Rng::with_seed(seed)
}
