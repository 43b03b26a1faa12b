//! `cargo xtask compare --growth`: how figures change when something grows: the number of queues,
//! the disk, the chain of backing files, snapshots, or extents in a request.
//!
//! All steps of all servers take turns in each round, and a step's ratio is taken to the first step
//! of the same server in the same round. Images are on tmpfs, so that nothing but the programs
//! grows.
//!
//! - [`subjects`]: what grows, and in which steps
//! - [`layouts`]: the images of large steps
//! - [`report`]: the results

pub mod layouts;
mod report;
mod subjects;

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lab_tools::process::stdout_of;
use lab_tools::workspace::Workspace;

use self::report::{Cell, Outcome};
use self::subjects::{QUEUE_DEPTH, REQUEST, SUBJECTS, Subject, Work};
use crate::config::{Config, Options, chosen};
use crate::light::{self, Content, Load, Operation};
use crate::measurement::{Measurement, milliseconds};
use crate::report::{Environment, terminal};
use crate::rows::{Client, LIGHT, Row, SEQUENTIAL};
use crate::servers::{EXPORT, Format, Image, Kind, Server, Start};
use crate::storage::{self, Storage};
use crate::vhost_user;

/// The servers that are compared if the options name none.
const SERVERS: &[Kind] = &[Kind::Blockhouse, Kind::QsdNative, Kind::QsdIoUring];
/// Writes of a load on an empty disk.
const WRITES: u64 = 4000;
/// Space that is enough for the image of any step.
const ROOM: u64 = 2 << 30;

/// Measures, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let subjects = chosen(SUBJECTS, |subject| subject.name, &options.rows)?;
    let mut config = Config::of_qcow2(workspace, options, SERVERS)?;
    let size = options.bytes()?;
    let environment = Environment::find(&config)?;
    terminal::environment(&environment);
    let mut outcomes = Vec::new();
    for subject in subjects {
        let outcome = config.measure_growth(subject, size).context(subject.name)?;
        report::print(&outcome);
        outcomes.push(outcome);
    }
    options.write_files(
        || report::markdown(&environment, &outcomes),
        || report::json(&environment, &outcomes),
    )
}

impl Config {
    /// All rounds of a subject: the cells of each step.
    fn measure_growth(&mut self, subject: Subject, size: u64) -> Result<Outcome> {
        let mut images = Vec::new();
        for &point in subject.points {
            images.push(image(subject.work, point, size, &self.interrupt)?);
        }
        let mut cells = Vec::new();
        for &kind in &self.servers.clone() {
            cells.extend(subject.points.iter().map(|&point| Cell::new(kind, point)));
        }
        for _ in 0..self.rounds {
            for cell in &mut cells {
                let at = subject.points.iter().position(|&point| point == cell.point);
                let image = &images[at.context("a step without an image")?];
                let context = || format!("{} {}, {}", cell.point, subject.what, cell.kind.name());
                let measured = self.measure_step(subject.work, cell.kind, cell.point, image);
                cell.add(measured.with_context(context)?);
            }
        }
        Ok(Outcome { subject, cells })
    }

    /// The figure of one turn, and its processor time: microseconds a request, or milliseconds in
    /// all.
    fn measure_step(
        &mut self,
        work: Work,
        kind: Kind,
        point: u64,
        storage: &Storage,
    ) -> Result<(f64, f64)> {
        let format = match work {
            Work::Queues(format) => format,
            _ => Format::Qcow2,
        };
        match work {
            Work::Take => return self.take_snapshot(kind, storage.path()),
            Work::Size => layouts::create(storage.path(), point << 30, 64 << 10)?,
            _ => {}
        }
        let row = row(work, point);
        let start = Start { kind, export: row.client.export(), queues: row.connections };
        let image = Image { storage, format };
        let folder = self.folder.path();
        let server = Server::start(start, &self.programs, image, folder, &self.interrupt)?;
        if work == Work::Open {
            let (ready, cpu) = (server.ready(), server.cpu()?);
            server.stop()?;
            return Ok((milliseconds(ready), milliseconds(cpu)));
        }
        self.generation += 1;
        let load = self.load_of(work, &row);
        let cpu = || server.cpu();
        let measured = match row.client {
            Client::VhostUser => {
                vhost_user::run(load, self.poll_time, server.socket(), &cpu, &self.interrupt)?
            }
            _ => light::run(load, server.socket(), EXPORT, &cpu, &self.interrupt)?,
        };
        server.stop()?;
        figures(work, &row, &measured)
    }

    /// The load of a subject: a number of writes, or reads for a time, after reads for the same
    /// time that load the metadata into memory.
    fn load_of(&self, work: Work, row: &Row) -> Load {
        let load = row.load(self.generation);
        match work {
            Work::Size => Load { requests: WRITES, content: Content::Image, ..load },
            _ => Load { warm_up: self.duration, duration: self.duration, ..load },
        }
    }

    /// Takes a snapshot with the tool of the server's project, and deletes it.
    fn take_snapshot(&self, kind: Kind, image: &Path) -> Result<(f64, f64)> {
        const NAME: &str = "one more";
        let is_ours = kind.is_ours() || kind == Kind::Baseline;
        let tool = |ours, theirs| {
            let mut command = if is_ours {
                Command::new(kind.program(&self.programs))
            } else {
                Command::new("qemu-img")
            };
            command.arg("snapshot");
            if is_ours {
                command.args([ours, "--format", "qcow2"]).arg(image).arg(NAME)
            } else {
                command.args([theirs, NAME]).arg(image)
            };
            stdout_of(command)
        };
        let began = Instant::now();
        tool("create", "-c")?;
        let elapsed = milliseconds(began.elapsed());
        tool("delete", "-d")?;
        Ok((elapsed, elapsed))
    }
}

/// The image of a step, as it is before each turn.
fn image(
    work: Work,
    point: u64,
    size: u64,
    interrupt: &crate::interrupt::Interrupt,
) -> Result<Storage> {
    let (kind, folder) = (storage::Kind::Tmpfs, Path::new("/dev/shm"));
    let whole = || Storage::create(kind, size, folder, interrupt);
    if work == Work::Queues(Format::Raw) {
        return whole();
    }
    let storage = Storage::bare(kind, ROOM, folder)?;
    let path = storage.path();
    match work {
        Work::Queues(_) => layouts::copy(whole()?.path(), path)?,
        Work::Size => {}
        Work::Chain => layouts::chain(path, point, size)?,
        Work::Open | Work::Take => layouts::snapshots(path, point)?,
        Work::Extents => layouts::extents(path, point)?,
    }
    Ok(storage)
}

fn row(work: Work, point: u64) -> Row {
    match work {
        Work::Queues(_) => {
            let connections = point as u16;
            let depth = QUEUE_DEPTH * connections;
            Row { client: Client::VhostUser, depth, connections, ..LIGHT }
        }
        Work::Size => Row { operation: Operation::Write, depth: 32, ..LIGHT },
        Work::Extents => Row { block: REQUEST, depth: 1, ..SEQUENTIAL },
        Work::Chain | Work::Open | Work::Take => LIGHT,
    }
}

fn figures(work: Work, row: &Row, measured: &Measurement) -> Result<(f64, f64)> {
    ensure!(measured.requests > 0, "nothing was answered");
    let rate = match work {
        Work::Extents => measured.mebibytes_a_second(row.block),
        _ => measured.requests_a_second() / 1e3,
    };
    Ok((rate, measured.cpu_a_request()))
}
