//! `cargo xtask compare --backup`: a guest's rate of writes while a bitmap records its changes, and
//! while a backup runs.
//!
//! A client writes blocks of 4 KiB at random places, at depth 64. In each round three ways take
//! turns on the same image: the disk alone, with a bitmap, and with a checkpoint of which a client
//! reads one block a second. Each turn begins with a run that is not counted, so that all extents
//! are warm; the checkpoint is taken after that run. Ratios are to the disk alone, of the same
//! round.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use blockhouse_figures::{Spread, median_interval};
use lab_nbd::{Client, Framing, handshake};
use lab_tools::process::stdout_of;
use lab_tools::workspace::Workspace;

use crate::caching::Caching;
use crate::config::{Config, Options};
use crate::growth::layouts;
use crate::light::{self, Load, Operation};
use crate::measurement::Measurement;
use crate::report::{Environment, cell, spread, terminal};
use crate::rows::{LIGHT, Row};
use crate::servers::{EXPORT, Format, Image, Kind, Server, Start, uri};
use crate::storage::{self, Storage};

/// The name of the checkpoint, and of the bitmap.
const NAME: &str = "measured";
/// Time between two reads of the checkpoint.
const READ_PAUSE: Duration = Duration::from_secs(1);
/// Bytes of such a read.
const BLOCK: u64 = 4096;

/// The work beside the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Alone,
    Bitmap,
    Checkpoint,
}

const WAYS: [(Way, &str); 3] = [
    (Way::Alone, "alone"),
    (Way::Bitmap, "with a bitmap"),
    (Way::Checkpoint, "beside a checkpoint"),
];

/// The figures of a way: thousands of requests a second, and microseconds of processor time for
/// each.
#[derive(Default)]
struct Figures {
    rates: Vec<f64>,
    cpu: Vec<f64>,
}

/// Measures, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let mut config = Config::of_blockhouse(workspace, options, "--backup")?;
    let control = config.folder.path().join("control");
    config.programs.serve_args.extend(["--control".to_owned(), control.display().to_string()]);
    terminal::environment(&Environment::find(&config)?);
    let size = options.bytes()?;
    let disk = options.dir.clone().unwrap_or_else(|| workspace.target().to_owned());
    for &kind in options.storage.iter().filter(|kind| **kind != storage::Kind::Loop) {
        if let Some(why) = Storage::unavailable(kind) {
            println!("\n{kind:?} is left out: {why}");
            continue;
        }
        let storage = layouts::filled(options.format, kind, size, &disk, &config.interrupt)?;
        println!("\n{} image, {}", options.format.name(), storage.description());
        let figures = config.measure_ways(options.format, &storage, &control)?;
        print(&figures);
    }
    Ok(())
}

fn print(figures: &[Figures]) {
    for ((_, name), one) in WAYS.iter().zip(figures) {
        let ratio = Spread::of_ratios(&one.rates, &figures[0].rates);
        let interval = median_interval(one.rates.iter().zip(&figures[0].rates).map(|(a, b)| a / b));
        let interval =
            interval.map_or_else(String::new, |(from, to)| format!(" (95 %: {from:.3}..{to:.3})"));
        let rate = spread(one.rates.iter().copied(), 1);
        let cpu = spread(one.cpu.iter().copied(), 2);
        let ratio = cell(ratio, 3);
        println!("  {name:20} {rate:28} k/s {cpu:28} us of CPU  {ratio}{interval} of alone");
    }
}

impl Config {
    /// All rounds: the figures of each way.
    fn measure_ways(
        &mut self,
        format: Format,
        storage: &Storage,
        control: &Path,
    ) -> Result<Vec<Figures>> {
        let mut all: Vec<Figures> = WAYS.map(|_| Figures::default()).into();
        for _ in 0..self.rounds {
            for ((way, name), figures) in WAYS.into_iter().zip(&mut all) {
                let measured = self.measure_way(way, format, storage, control).context(name)?;
                figures.rates.push(measured.requests_a_second() / 1e3);
                figures.cpu.push(measured.cpu_a_request());
            }
        }
        Ok(all)
    }

    fn measure_way(
        &mut self,
        way: Way,
        format: Format,
        storage: &Storage,
        control: &Path,
    ) -> Result<Measurement> {
        storage.prepare_cache(Caching::Direct)?;
        let row = Row { operation: Operation::Write, ..LIGHT };
        let start = Start { kind: Kind::Blockhouse, export: row.client.export(), queues: 1 };
        let folder = self.folder.path().to_owned();
        let image = Image { storage, format };
        let mut server = Server::start(start, &self.programs, image, &folder, &self.interrupt)?;
        server.wait_until_it_listens(control, &self.interrupt)?;
        let ctl = |words: &[&str]| {
            let mut command = Command::new(&self.programs.blockhouse);
            command.arg("ctl").arg(control).args(words);
            stdout_of(command)
        };
        let disk = storage.path().file_name().and_then(|name| name.to_str());
        let disk = disk.context("an image without a name")?;
        if way == Way::Bitmap {
            ctl(&["bitmap", "add", disk, NAME])?;
        }
        self.generation += 2;
        let load = |generation| Load { duration: self.duration, ..row.load(generation) };
        let cpu = || server.cpu();
        let load_for = |generation| {
            light::run(load(generation), server.socket(), EXPORT, &cpu, &self.interrupt)
        };
        load_for(self.generation)?;
        let measured = match way {
            Way::Alone | Way::Bitmap => load_for(self.generation + 1)?,
            Way::Checkpoint => {
                let socket = folder.join("backup.sock");
                let uri = uri(&socket);
                ctl(&["backup", "begin", disk, "--backup", NAME, "--export", &uri])?;
                let measured = beside_reader(&socket, || load_for(self.generation + 1))?;
                ctl(&["backup", "end", NAME])?;
                measured
            }
        };
        if way == Way::Bitmap {
            ctl(&["bitmap", "remove", disk, NAME])?;
        }
        server.stop()?;
        // The bitmaps of a raw image are in this side file; the next turn begins without it.
        let mut side_file = storage.path().as_os_str().to_owned();
        side_file.push(".bitmaps");
        let _ = std::fs::remove_file(PathBuf::from(side_file));
        Ok(measured)
    }
}

/// Runs a load while a client reads a block of the checkpoint at `socket` now and then.
fn beside_reader(socket: &Path, load: impl FnOnce() -> Result<Measurement>) -> Result<Measurement> {
    let (stream, export) = handshake::open(socket, EXPORT)?;
    let size = export.size;
    let mut client = Client::new(stream, Framing::Simple, export);
    let (stop, stopped): (Sender<()>, _) = channel();
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let blocks = size / BLOCK;
            for number in 0_u64.. {
                // Spread over the disk.
                let at = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks * BLOCK;
                let read = client.read(at, BLOCK);
                read.map_err(|errno| anyhow!("the checkpoint cannot be read: error {errno}"))?;
                if stopped.recv_timeout(READ_PAUSE) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            client.disconnect();
            Ok::<_, anyhow::Error>(())
        });
        let measured = load();
        drop(stop);
        reader.join().map_err(|_| anyhow!("the reader of the checkpoint panicked"))??;
        measured
    })
}
