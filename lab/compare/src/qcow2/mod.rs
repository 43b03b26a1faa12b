//! `cargo xtask compare --format qcow2`: our qcow2 images beside QEMU's, and beside our raw images.
//!
//! As with raw images, every contender takes its turn in each round, and ratios are taken within a
//! round. The images are made by `qemu-img` (clusters of 64 KiB, everything else its default), so
//! all programs work on the same layout.
//!
//! - [`rows`]: the work
//! - [`images`]: the images
//! - [`tools`]: programs that run once and end
//! - [`report`]: the results

mod images;
mod report;
mod rows;
pub(crate) mod tools;

use anyhow::{Context, Result, ensure};

use self::images::Images;
use self::report::{Cell, Contender, Outcome, Part, Unit};
use self::rows::{Fill, Opening, TASKS, Task, Work};
use self::tools::Tool;
use super::config::{Config, Options, chosen};
use super::light::{self, Content};
use super::measurement::{Measurement, milliseconds};
use super::report::{Environment, terminal};
use super::rows::Export;
use super::servers::{EXPORT, Format, Image, Kind, Server, Start};
use super::storage::Storage;
use lab_tools::workspace::Workspace;

/// Bytes in a cluster: the default of `qemu-img create`.
pub const CLUSTER: u64 = 64 * 1024;

/// Compares, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let tasks = chosen(TASKS, |task| task.name, &options.rows)?;
    let mut config = Config::of_qcow2(workspace, options, Kind::QCOW2)?;
    let disk = options.dir.clone().unwrap_or_else(|| workspace.target().to_owned());
    let size = options.bytes()?;
    let environment = Environment::find(&config)?;
    terminal::environment(&environment);
    let mut results = Vec::new();
    for &kind in &options.storage {
        if let Some(why) = Storage::unavailable(kind) {
            println!("storage {kind:?} skipped: {why}");
            continue;
        }
        let mut images = Images::new(kind, size, &disk, &tasks, &config.interrupt)?;
        println!("\n{}, {} MiB", images.description(), size >> 20);
        let mut outcomes = Vec::new();
        for task in &tasks {
            if let Some(outcome) = config.do_task(*task, &mut images)? {
                report::print(&outcome);
                outcomes.push(outcome);
            }
        }
        results.push((images.description(), size, outcomes));
    }
    options.write_files(
        || Ok(report::markdown(&environment, &results)),
        || report::json(&environment, &results),
    )
}

impl Config {
    /// Measures all rounds of `task`; `None` if this storage cannot hold the images.
    fn do_task(&mut self, task: Task, images: &mut Images) -> Result<Option<Outcome>> {
        let one_tool = matches!(task.work, Work::Convert(_) | Work::Open(_));
        if one_tool && !images.are_files() {
            return Ok(None);
        }
        let unit = unit(task.work);
        let mut cells: Vec<Cell> = self
            .contenders(task.work)
            .into_iter()
            .map(|contender| Cell { contender, values: Vec::new(), cpu: Vec::new() })
            .collect();
        for _ in 0..self.rounds {
            for cell in &mut cells {
                let context = || format!("{}, {}", task.name, cell.contender.name());
                let (value, cpu) =
                    self.measure_task(task.work, cell.contender, images).with_context(context)?;
                cell.values.push(value);
                cell.cpu.push(cpu);
            }
        }
        let any_caching = images.any_caching();
        Ok(Some(Outcome { row: task.name, unit, any_caching, cells }))
    }

    /// The contenders, in the order of turns.
    fn contenders(&self, work: Work) -> Vec<Contender> {
        if let Work::Convert(_) | Work::Open(Opening::Info) = work {
            let tool = |part| Contender { part, kind: None };
            let mut contenders = vec![tool(Part::Ours), tool(Part::Peer)];
            match work {
                Work::Open(_) => contenders.insert(1, tool(Part::OurRaw)),
                _ => contenders.push(tool(Part::PeerDirect)),
            }
            return contenders;
        }
        let mut contenders = Vec::new();
        for &kind in &self.servers {
            let contender = |part| Contender { part, kind: Some(kind) };
            if kind.is_ours() {
                contenders.push(contender(Part::Ours));
                // A scattered write to a raw image allocates no clusters.
                if !matches!(work, Work::Empty(_, Fill::Scattered(_))) {
                    contenders.push(contender(Part::OurRaw));
                }
            } else {
                contenders.push(contender(Part::Peer));
            }
        }
        contenders
    }

    /// The figure of one turn, and its processor time: microseconds a request, or seconds in all.
    fn measure_task(
        &mut self,
        work: Work,
        contender: Contender,
        images: &mut Images,
    ) -> Result<(f64, f64)> {
        let format = match contender.part {
            Part::OurRaw => Format::Raw,
            Part::Ours | Part::Peer | Part::PeerDirect => Format::Qcow2,
        };
        let tool = match contender.part {
            Part::Peer => Tool::QemuImg,
            Part::PeerDirect => Tool::QemuImgDirect,
            Part::Ours | Part::OurRaw => Tool::Ours,
        };
        let folder = self.folder.path();
        match (work, contender.kind) {
            (Work::Convert(to), _) => {
                images.convert(to, tool, &self.programs).map(|spent| spent.in_seconds())
            }
            (Work::Open(_), None) => {
                images.tell(format, tool, &self.programs).map(|spent| spent.in_milliseconds())
            }
            (Work::Open(_), Some(kind)) => {
                let image = Image { storage: images.huge(format)?, format };
                let server =
                    Server::start(over_nbd(kind), &self.programs, image, folder, &self.interrupt)?;
                let (ready, cpu) = (server.ready(), server.cpu()?);
                server.stop()?;
                Ok((milliseconds(ready), milliseconds(cpu)))
            }
            (Work::Mapped(_) | Work::Empty(..), None) => unreachable!("a load needs a server"),
            (Work::Mapped(_) | Work::Empty(..), Some(kind)) => {
                self.measure_load(work, kind, format, images)
            }
        }
    }

    fn measure_load(
        &mut self,
        work: Work,
        kind: Kind,
        format: Format,
        images: &mut Images,
    ) -> Result<(f64, f64)> {
        self.generation += 1;
        let (row, storage, requests) = match work {
            Work::Mapped(row) => (row, images.mapped(format)?, u64::MAX),
            Work::Empty(row, fill) => {
                let requests = match fill {
                    Fill::Whole => images.size() / u64::from(row.block),
                    Fill::Scattered(part) => images.size() / CLUSTER / part,
                };
                (row, images.empty(format, fill)?, requests)
            }
            Work::Convert(_) | Work::Open(_) => unreachable!("no load"),
        };
        storage.prepare_cache(kind.caching())?;
        let mut load = row.load(self.generation);
        load.requests = requests;
        if let Work::Mapped(_) = work {
            load.content = Content::Image;
            (load.warm_up, load.duration) = (self.duration / 10, self.duration);
        } else if row.operation != light::Operation::Read {
            load.content = Content::Image;
        }
        let image = Image { storage, format };
        let folder = self.folder.path();
        let server = Server::start(over_nbd(kind), &self.programs, image, folder, &self.interrupt)?;
        let measured =
            light::run(load, server.socket(), EXPORT, &|| server.cpu(), &self.interrupt)?;
        server.stop()?;
        ensure!(measured.requests > 0, "nothing was answered");
        Ok(figures(unit(work), row.block, &measured))
    }
}

fn unit(work: Work) -> Unit {
    match work {
        Work::Mapped(row) | Work::Empty(row, _) if row.is_bandwidth() => Unit::MebibytesASecond,
        Work::Mapped(_) | Work::Empty(..) => Unit::ThousandsASecond,
        Work::Convert(_) => Unit::Seconds,
        Work::Open(_) => Unit::Milliseconds,
    }
}

fn figures(unit: Unit, block: u32, measured: &Measurement) -> (f64, f64) {
    let rate = match unit {
        Unit::MebibytesASecond => measured.mebibytes_a_second(block),
        _ => measured.requests_a_second() / 1e3,
    };
    (rate, measured.cpu_a_request())
}

fn over_nbd(kind: Kind) -> Start {
    Start { kind, export: Export::Nbd, queues: 1 }
}
