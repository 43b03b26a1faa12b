//! `cargo xtask compare --forks`: for how long a guest gets no answer while its disk is forked.
//!
//! A guest writes blocks of 4 KiB at random places of the part of the disk that was written just
//! before, 64 at a time, without a pause. A round is a new image and a hundred forks of it, one
//! every 50 ms; each fork lets the disk continue in a new overlay. The figures are the longest
//! times without a reply: in the 50 ms from the beginning of each fork, and in as many stretches of
//! 50 ms before the first fork. At the end, that part of the disk has to hold the writes that were
//! answered. Our server makes and opens the overlay during the fork; QEMU's overlay is made before,
//! and the fork only adds it and switches to it.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use lab_tools::control::Control;
use lab_tools::monitor::Monitor;
use lab_tools::process::stdout_of;
use lab_tools::workspace::Workspace;
use serde_json::json;

use crate::config::{Config, Options};
use crate::growth::layouts;
use crate::guest::{self, Content, Progress};
use crate::measurement::milliseconds;
use crate::report::{Environment, terminal};
use crate::rows::Export;
use crate::servers::{EXPORT, Format, Image, Kind, Server, Start};
use crate::storage::{self, Storage};

/// Bytes of the disk.
const DISK: u64 = 64 << 30;
const DEPTH: u16 = 64;
/// The name of the control socket, or of the socket of QEMU's monitor.
const DOOR: &str = "door";
/// Forks of a round. A chain has 200 files at most.
const FORKS: usize = 100;
/// From the beginning of a fork to the beginning of the next one.
const STRETCH: Duration = Duration::from_millis(50);
/// Bytes of the clusters of the image.
const CLUSTER: u64 = 64 << 10;

/// The servers that are measured.
const SERVERS: &[Kind] =
    &[Kind::Blockhouse, Kind::BlockhouseWriteback, Kind::QsdNative, Kind::QsdCached];

/// For each stretch: the longest time without a reply, and the number of writes that were answered.
#[derive(Default)]
struct Stretches {
    alone: Vec<(Duration, u64)>,
    forked: Vec<(Duration, u64)>,
}

/// A way to fork the one disk of a server.
enum Forker {
    Ours(Control),
    Qemu(Monitor),
}

/// Measures, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    options.refuse_files("--forks")?;
    let mut config = Config::of_qcow2(workspace, options, SERVERS)?;
    terminal::environment(&Environment::find(&config)?);
    let disk = options.dir.clone().unwrap_or_else(|| workspace.target().to_owned());
    let written = options.bytes()?;
    let door = config.folder.path().join(DOOR).display().to_string();
    let listen = format!("socket,id=door,path={door},server=on,wait=off");
    config.programs.serve_args.extend(["--control".into(), door]);
    config.programs.peer_args =
        ["--chardev", &listen, "--monitor", "chardev=door"].map(str::to_owned).to_vec();
    for &kind in options.storage.iter().filter(|kind| **kind != storage::Kind::Loop) {
        let place = || Storage::bare(kind, written, &disk);
        let (format, mebibytes) = (options.format, written >> 20);
        println!("\n{}, {mebibytes} MiB just written, {}", format.name(), place()?.description());
        let servers = config.servers.clone();
        let mut all: Vec<Stretches> = servers.iter().map(|_| Stretches::default()).collect();
        for _ in 0..config.rounds {
            for (server, stretches) in servers.iter().zip(&mut all) {
                let round = config.take_round(*server, format, &place()?, written, stretches);
                round.with_context(|| server.name())?;
            }
        }
        for (server, stretches) in servers.iter().zip(&mut all) {
            print(server.name(), stretches);
        }
    }
    Ok(())
}

fn print(name: &str, stretches: &mut Stretches) {
    for (what, times) in [("alone", &mut stretches.alone), ("forked", &mut stretches.forked)] {
        times.sort();
        let at = |part: f64| milliseconds(times[((times.len() - 1) as f64 * part) as usize].0);
        let answered: u64 = times.iter().map(|(_, answered)| answered).sum();
        let rate = answered as f64 / (STRETCH.as_secs_f64() * times.len() as f64) / 1e3;
        println!(
            "  {name:22} {what:8} {:5} times: median {:6.2}, 99 of 100 {:6.2}, longest {:6.2} ms; {rate:.1} k writes a second",
            times.len(),
            at(0.5),
            at(0.99),
            at(1.0),
        );
    }
}

impl Config {
    fn take_round(
        &mut self,
        kind: Kind,
        format: Format,
        storage: &Storage,
        written: u64,
        stretches: &mut Stretches,
    ) -> Result<()> {
        match format {
            Format::Raw => File::create(storage.path()).and_then(|file| file.set_len(DISK))?,
            Format::Qcow2 => layouts::create(storage.path(), DISK, CLUSTER)?,
        }
        let start = Start { kind, export: Export::Nbd, queues: 1 };
        let (image, folder) = (Image { storage, format }, self.folder.path());
        let server = Server::start(start, &self.programs, image, folder, &self.interrupt);
        let mut server = server?;
        let door = folder.join(DOOR);
        server.wait_until_it_listens(&door, &self.interrupt)?;
        let is_qemu = matches!(kind, Kind::QsdNative | Kind::QsdCached);
        let mut forker = if is_qemu {
            Forker::Qemu(Monitor::connect(&door)?)
        } else {
            Forker::Ours(Control::connect(&door)?)
        };
        let mut content = Content::new(written);
        content.fill(server.socket(), EXPORT)?;
        let (images, interrupt) = (Images { storage, format, kind }, &self.interrupt);
        let progress = &Progress::default();
        std::thread::scope(|scope| {
            let (content, socket) = (&mut content, server.socket());
            let guest = scope
                .spawn(move || guest::write((socket, EXPORT), DEPTH, content, progress, interrupt));
            let measured = forker.measure(&images, progress, stretches);
            progress.stop();
            let written = guest.join().map_err(|_| anyhow!("the guest panicked"))?;
            written.context("the guest").and(measured)
        })?;
        let verified = content.verify(server.socket(), EXPORT);
        verified.context("after the forks the disk is not what was answered")?;
        server.stop()
    }
}

/// Watches the guest for one stretch; calls `act` at the beginning of the stretch.
fn stretch(progress: &Progress, act: impl FnOnce() -> Result<()>) -> Result<(Duration, u64)> {
    let (before, began) = (progress.answered(), Instant::now());
    progress.take_gap();
    act()?;
    std::thread::sleep(STRETCH.saturating_sub(began.elapsed()));
    Ok((progress.take_gap(), progress.answered() - before))
}

/// The images of a round.
struct Images<'a> {
    storage: &'a Storage,
    format: Format,
    kind: Kind,
}

impl Images<'_> {
    /// The path of image `number`: 0 is the one that is served first.
    fn path(&self, number: usize) -> PathBuf {
        match number {
            0 => self.storage.path().to_owned(),
            _ => self.storage.path().with_extension(number.to_string()),
        }
    }

    /// Makes QEMU's overlay of this number.
    fn make(&self, number: usize) -> Result<()> {
        let below = if number == 1 { self.format.name() } else { "qcow2" };
        let mut create = std::process::Command::new("qemu-img");
        create.args(["create", "-q", "-u", "-f", "qcow2", "-F", below, "-b"]);
        create.arg(self.path(number - 1)).arg(self.path(number)).arg(DISK.to_string());
        stdout_of(create).map(drop)
    }
}

impl Forker {
    fn measure(
        &mut self,
        images: &Images<'_>,
        progress: &Progress,
        stretches: &mut Stretches,
    ) -> Result<()> {
        // The first one is not counted.
        for number in 0..=FORKS {
            let alone = stretch(progress, || Ok(()))?;
            stretches.alone.extend((number > 0).then_some(alone));
        }
        for number in 1..=FORKS {
            if let Self::Qemu(_) = self {
                images.make(number)?;
            }
            stretches.forked.push(stretch(progress, || self.fork(images, number))?);
        }
        Ok(())
    }

    fn fork(&mut self, images: &Images<'_>, number: usize) -> Result<()> {
        let overlay = images.path(number);
        match self {
            Self::Ours(control) => {
                let disk = control.call("disk.list", &json!({}))?;
                let disk = disk.map_err(|error| anyhow!("{error}"))?[0]["disk"].take();
                let forks = json!({ "disks": [{ "disk": disk, "overlay": overlay }] });
                let forked = control.call("disk.fork", &forks)?;
                forked.map_err(|error| anyhow!("disk.fork: {error}")).map(drop)
            }
            Self::Qemu(monitor) => {
                let (file, node) = (format!("file{number}"), format!("node{number}"));
                let below = match (number, images.format) {
                    (1, Format::Raw) => "file".to_owned(),
                    (1, Format::Qcow2) => "image".to_owned(),
                    _ => format!("node{}", number - 1),
                };
                let is_direct = images.kind == Kind::QsdNative;
                let aio = if is_direct { "native" } else { "threads" };
                let add = json!({ "driver": "file", "node-name": file, "filename": overlay,
                    "aio": aio, "cache": { "direct": is_direct } });
                monitor.command("blockdev-add", &add)?;
                let add = json!({ "driver": "qcow2", "node-name": node, "file": file,
                    "backing": null });
                monitor.command("blockdev-add", &add)?;
                let switch = json!({ "node": below, "overlay": node });
                monitor.command("blockdev-snapshot", &switch).map(drop)
            }
        }
    }
}
