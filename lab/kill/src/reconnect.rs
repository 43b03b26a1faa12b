//! NBD clients that reconnect: QEMU's with `reconnect-delay`, and a client that uses libnbd. While
//! both write, their server is killed and started again. Neither client may see an error or wrong
//! data.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;

use crate::folders::{Finding, Folders, Setting};
use crate::server::{Serve, Server};
use crate::template::quiet;

/// The disk, of which each client has a half.
const SIZE: u64 = 32 << 20;
const HALF: u64 = SIZE / 2;
const BLOCK: u64 = 4096;
/// Number of kills if the listening socket stays open, so that clients can connect at once.
const KILLS: u32 = 10;
/// Number of kills if it does not: QEMU tries again only after a second.
const KILLS_WITHOUT_SOCKET: u32 = 2;
/// Writes that QEMU has in flight together.
const TOGETHER: u64 = 8;
/// The longest time until a client ends.
const END_LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
/// Seconds for which QEMU waits for the next server.
const RECONNECT_DELAY: u32 = 30;
/// The script of the libnbd client.
const LIBNBD_CLIENT: &str = include_str!("libnbd_client.py");

/// Kills the server some times while both clients run. Either the listening socket is kept from one
/// server to the next, or each server makes its own. Returns the number of kills.
pub fn run(setting: &Setting, is_held: bool, seed: u64) -> Result<(u32, Option<Finding>)> {
    let mut random = Rng::with_seed(seed);
    let folders = Folders::new(setting, false)?;
    let size = SIZE.to_string();
    quiet(folders.images(), "qemu-img", &["create", "-q", "-f", "qcow2", "image", &size])?;
    let socket = folders.in_memory("nbd");
    let mut options = folders.state_options(setting);
    options.extend(["--format".into(), "qcow2".into()]);
    let image = folders.images().join("image");
    let serve = Serve {
        listener: if is_held { Some(UnixListener::bind(&socket)?) } else { None },
        ..Serve::over_nbd(setting, &folders, image, options)
    };
    let kills = if is_held { KILLS } else { KILLS_WITHOUT_SOCKET };
    let outcome = run_clients(&folders, &serve, &socket, kills, &mut random);
    let finding = outcome
        .err()
        .map(|error| folders.finding(&format!("listening socket held: {is_held}: {error:#}")));
    Ok((kills, finding))
}

fn run_clients(
    folders: &Folders,
    serve: &Serve,
    socket: &Path,
    kills: u32,
    random: &mut Rng,
) -> Result<()> {
    let mut server = serve.start()?;
    let mut qemu = Client::qemu(folders, socket)?;
    let mut libnbd = Client::libnbd(folders, socket, random.u32(..))?;
    // QEMU reconnects only after it was connected once.
    qemu.say("read 0 512")?;
    for client in [&qemu, &libnbd] {
        client.wait_connected()?;
    }
    let is_over = AtomicBool::new(false);
    let numbers = random.fork();
    let server = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_with_qemu(&mut qemu, &is_over, numbers));
        let survive = || -> Result<Server> {
            for _ in 0..kills {
                std::thread::sleep(Duration::from_millis(random.u64(50..200)));
                server.kill()?;
                server = serve.start()?;
            }
            std::thread::sleep(Duration::from_millis(50));
            libnbd.finish().context("the client with libnbd")?;
            Ok(server)
        };
        let survived = survive();
        is_over.store(true, SeqCst);
        let written = writer.join().expect("it does not panic");
        survived.and_then(|server| written.map(|()| server))
    })?;
    qemu.finish().context("QEMU's client")?;
    server.stop()
}

/// Has qemu-io write blocks, some of them together, until `is_over`; then it compares all of them.
fn write_with_qemu(qemu: &mut Client, is_over: &AtomicBool, mut random: Rng) -> Result<()> {
    let mut expected = BTreeMap::new();
    while !is_over.load(SeqCst) {
        for _ in 0..TOGETHER {
            let (block, pattern) = (random.u64(..HALF / BLOCK), random.u8(1..));
            // After two concurrent writes of one block, the block may hold the data of either.
            if expected.insert(block, pattern).is_none() {
                qemu.say(&format!("aio_write -q -P {pattern} {} {BLOCK}", block * BLOCK))?;
            } else {
                qemu.say("aio_flush")?;
                qemu.say(&format!("write -q -P {pattern} {} {BLOCK}", block * BLOCK))?;
            }
        }
        qemu.say("aio_flush")?;
        std::thread::sleep(PAUSE);
    }
    for (block, pattern) in expected {
        qemu.say(&format!("read -q -P {pattern} {} {BLOCK}", block * BLOCK))?;
    }
    qemu.say("quit")
}

/// A client's process; killed when it is dropped.
struct Client {
    child: Child,
    output: PathBuf,
}

impl Client {
    fn qemu(folders: &Folders, socket: &Path) -> Result<Self> {
        let mut command = Command::new("qemu-io");
        let socket = socket.display();
        command.args(["-d", "unmap", "--image-opts"]).arg(format!(
            "driver=nbd,server.type=unix,server.path={socket},reconnect-delay={RECONNECT_DELAY}"
        ));
        Self::start(command, folders.in_memory("qemu-io"))
    }

    fn libnbd(folders: &Folders, socket: &Path, seed: u32) -> Result<Self> {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", LIBNBD_CLIENT]).arg(socket);
        command.args([HALF, SIZE, seed.into()].map(|number| number.to_string()));
        Self::start(command, folders.in_memory("libnbd"))
    }

    fn start(mut command: Command, output: PathBuf) -> Result<Self> {
        let file = File::create(&output)?;
        command.stdin(Stdio::piped()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("cannot start a client")?;
        Ok(Self { child, output })
    }

    fn say(&mut self, line: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().context("the client's input is closed")?;
        writeln!(input, "{line}").with_context(|| format!("the client has ended: {}", self.said()))
    }

    /// Waits until its output shows that it is connected.
    fn wait_connected(&self) -> Result<()> {
        let end = Instant::now() + END_LIMIT;
        while !(self.said().contains("connected") || self.said().contains("512")) {
            ensure!(Instant::now() < end, "not connected after {END_LIMIT:?}: {}", self.said());
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn said(&self) -> String {
        let text = std::fs::read_to_string(&self.output).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("; ")
    }

    /// Closes its input, and waits for its end.
    ///
    /// # Errors
    /// The client hangs, or has seen an error or wrong data.
    fn finish(&mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let end = Instant::now() + END_LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(Instant::now() < end, "not done after {END_LIMIT:?}: {}", self.said());
            std::thread::sleep(PAUSE);
        };
        let all = std::fs::read_to_string(&self.output)?;
        let is_right = status.success() && !all.contains("failed") && !all.contains("rror");
        ensure!(is_right, "{status}: {}", self.said());
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
