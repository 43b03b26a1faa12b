//! `cargo xtask compare`: Blockhouse side by side with its peers, on this machine, by anyone.
//!
//! In each round every server is started, loaded and stopped in turn (A B C A B C ...), so that what
//! drifts in the machine drifts for all. Figures are medians over the rounds with their spread; ratios
//! are taken within a round. All servers get the same image in the same place, prefilled, and a server
//! counts against us only where it treats the page cache as we do.
//!
//! - [`rows`]: the loads
//! - [`qcow2`]: what is special to images that map: other loads, and tools
//! - [`vmstate`]: saving and loading a machine's state
//! - [`servers`], [`storage`]: what is loaded, and what is below it
//! - [`light`], [`fio`], [`vhost_user`]: the clients
//! - [`stats`], [`report`]: figures

mod caching;
mod fio;
mod interrupt;
pub mod light;
pub mod pattern;
mod qcow2;
mod report;
mod rows;
mod servers;
mod stats;
mod storage;
mod vhost_user;
mod vmstate;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use tempfile::TempDir;

use self::interrupt::Interrupt;
use self::light::Load;
pub use self::light::answerer;
use self::report::Environment;
use self::rows::{Client, Export, ROWS, Row};
use self::servers::{EXPORT, Format, Image, Kind, Programs, Server, Start};
use self::storage::Storage;
use crate::apt;
use crate::test::{Profile, build_binary};
use crate::workspace::Workspace;

/// What to compare, and how long.
#[derive(Args)]
pub struct Options {
    /// Format of the image that is compared
    #[arg(long, value_enum, default_value = "raw")]
    format: servers::Format,
    /// Compare saving and loading the state of a machine of --size instead, on --dir
    #[arg(long)]
    vmstate: bool,
    /// 3 rounds of 1 second instead of 5 rounds of 3 seconds
    #[arg(long)]
    quick: bool,
    /// Seconds that count in each measurement
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Measurements of each server in each row
    #[arg(long, value_name = "COUNT")]
    rounds: Option<usize>,
    /// Where the image lives
    #[arg(long, value_enum, num_args = 1.., default_values = ["tmpfs", "loop", "ext4"])]
    storage: Vec<storage::Kind>,
    /// Exports to compare
    #[arg(long, value_enum, num_args = 1.., default_values = ["nbd"])]
    export: Vec<Export>,
    /// Rows whose names contain one of these
    #[arg(long, num_args = 1.., value_name = "ROW")]
    rows: Vec<String>,
    /// Servers to start; without it, all
    #[arg(long, value_enum, num_args = 1..)]
    servers: Vec<Kind>,
    /// Microseconds for which the vhost-user client looks for replies before it sleeps
    #[arg(long, default_value_t = 0, value_name = "MICROSECONDS")]
    look: u64,
    /// Size of the image in MiB
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    size: u64,
    /// Folder for the image of storage ext4; without it, the target folder
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Our binary; without it, a release build of this checkout
    #[arg(long)]
    binary: Option<PathBuf>,
    /// Another build of our binary to compare it with, as server "baseline"; without --servers, these
    /// two alone
    #[arg(long, value_name = "BINARY")]
    baseline: Option<PathBuf>,
    /// Further arguments of our serve, as one string
    #[arg(long, default_value = "", value_name = "ARGS", allow_hyphen_values = true)]
    serve_args: String,
    /// Write the report as Markdown, too
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write all figures as JSON, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Times from handing a request over to its answer.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// Half are faster.
    pub median: Duration,
    /// One in a hundred is slower.
    pub p99: Duration,
}

/// What one measurement found.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Requests answered.
    pub requests: u64,
    /// Wall time.
    pub elapsed: Duration,
    /// Processor time of the server, all threads.
    pub server_cpu: Duration,
    /// Processor time of the client.
    pub client_cpu: Duration,
    /// Over all requests.
    pub latency: Latency,
    /// Requests whose data was checked; fio checks none.
    pub verified: u64,
}

/// One row on one storage: the rounds of each server.
pub struct RowResult {
    /// The load.
    pub row: Row,
    /// A server and one measurement per round; none if it does not know the client.
    pub servers: Vec<(Kind, Vec<Measured>)>,
}

/// All rows on one storage.
pub struct StorageResult {
    /// The storage.
    pub storage: Storage,
    /// In the order of [`ROWS`].
    pub rows: Vec<RowResult>,
}

/// The choices of [`Options`], resolved.
struct Plan {
    rows: Vec<Row>,
    servers: Vec<Kind>,
    rounds: usize,
    duration: Duration,
    programs: Programs,
    folder: TempDir,
    interrupt: Interrupt,
    /// For how long the vhost-user client looks for replies.
    look: Duration,
    /// Marks the writes of one measurement.
    generation: u64,
}

/// Compares.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    if options.vmstate {
        return vmstate::run(workspace, options);
    }
    apt::require(apt::FOR_COMPARISON)?;
    if options.format == Format::Qcow2 {
        return qcow2::run(workspace, options);
    }
    let mut rows = chosen(ROWS, |row| row.name, &options.rows)?;
    rows.retain(|row| options.export.contains(&row.client.export()));
    ensure!(!rows.is_empty(), "none of these rows is one of the chosen exports");
    let mut plan = plan(workspace, options, rows, Kind::ALL)?;
    let disk = options.dir.clone().unwrap_or_else(|| workspace.target().to_owned());
    let environment = Environment::find(&plan)?;
    report::terminal::environment(&environment);
    let mut results = Vec::new();
    for &kind in &options.storage {
        if let Some(why) = Storage::unavailable(kind) {
            println!("storage {kind:?} skipped: {why}");
            continue;
        }
        let size = options.size.checked_mul(1 << 20).context("--size is beyond 64 bits")?;
        let storage = Storage::create(kind, size, &disk, &plan.interrupt)?;
        results.push(plan.measure_storage(storage)?);
    }
    if let Some(file) = &options.markdown {
        write(file, &report::markdown::render(&environment, &results))?;
    }
    if let Some(file) = &options.json {
        write(file, &report::json::render(&environment, &results)?)?;
    }
    Ok(())
}

fn write(file: &PathBuf, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// The rows whose names contain one of the `wanted`, or all.
fn chosen<R: Copy>(rows: &[R], name: fn(&R) -> &'static str, wanted: &[String]) -> Result<Vec<R>> {
    let is_wanted =
        |row: &&R| wanted.is_empty() || wanted.iter().any(|part| name(row).contains(part));
    let chosen: Vec<R> = rows.iter().filter(is_wanted).copied().collect();
    let names = || rows.iter().map(name).collect::<Vec<_>>().join(" ");
    ensure!(!chosen.is_empty(), "no row is called {}; there are: {}", wanted.join(" "), names());
    Ok(chosen)
}

fn plan(workspace: &Workspace, options: &Options, rows: Vec<Row>, all: &[Kind]) -> Result<Plan> {
    let (rounds, seconds) = if options.quick { (3, 1.0) } else { (5, 3.0) };
    let rounds = options.rounds.unwrap_or(rounds);
    let seconds = options.seconds.unwrap_or(seconds);
    ensure!(rounds > 0 && seconds > 0.0, "no rounds or no seconds measure nothing");
    let servers = match (options.servers.as_slice(), &options.baseline) {
        ([], None) => all.to_vec(),
        ([], Some(_)) => vec![Kind::Blockhouse, Kind::Baseline],
        (chosen, _) => chosen.to_vec(),
    };
    let takes_part = servers.contains(&Kind::Baseline);
    ensure!(
        takes_part == options.baseline.is_some(),
        "--baseline names the binary of the server \"baseline\": give both, or --baseline alone"
    );
    let ours = servers.iter().any(|kind| kind.is_ours());
    let blockhouse = match &options.binary {
        Some(binary) => binary.clone(),
        None if ours => build_binary(workspace, Profile::Release)?,
        None => PathBuf::new(),
    };
    let serve_args = options.serve_args.split_whitespace().map(str::to_owned).collect();
    Ok(Plan {
        rows,
        servers,
        rounds,
        duration: Duration::try_from_secs_f64(seconds).context("bad --seconds")?,
        programs: Programs {
            blockhouse,
            baseline: options.baseline.clone().unwrap_or_default(),
            serve_args,
            xtask: std::env::current_exe().context("cannot find this program")?,
        },
        folder: tempfile::Builder::new()
            .prefix("blockhouse-compare-")
            .tempdir()
            .context("cannot make a temporary folder")?,
        interrupt: Interrupt::install()?,
        look: Duration::from_micros(options.look),
        generation: 0,
    })
}

impl Plan {
    fn measure_storage(&mut self, storage: Storage) -> Result<StorageResult> {
        report::terminal::storage(&storage);
        let mut rows = Vec::new();
        for row in self.rows.clone() {
            let result = self.measure_row(row, &storage)?;
            report::terminal::row(&storage, &result);
            rows.push(result);
        }
        Ok(StorageResult { storage, rows })
    }

    fn measure_row(&mut self, row: Row, storage: &Storage) -> Result<RowResult> {
        let mut servers: Vec<(Kind, Vec<Measured>)> =
            self.servers.iter().map(|&kind| (kind, Vec::new())).collect();
        for _ in 0..self.rounds {
            for (kind, rounds) in servers.iter_mut().filter(|(kind, _)| kind.takes(row.client)) {
                let measured = self
                    .measure(row, *kind, storage)
                    .with_context(|| format!("{} on {}", row.name, kind.name()))?;
                rounds.push(measured);
            }
        }
        Ok(RowResult { row, servers })
    }

    fn measure(&mut self, row: Row, kind: Kind, storage: &Storage) -> Result<Measured> {
        storage.settle(kind.caching())?;
        let folder = self.folder.path();
        let start = Start { kind, export: row.client.export(), queues: row.connections };
        let image = Image { storage, format: Format::Raw };
        let server = Server::start(start, &self.programs, image, folder, &self.interrupt)?;
        self.generation += 1;
        let load = Load {
            warm_up: self.duration / 10,
            duration: self.duration,
            content: kind.content(),
            ..row.load(self.generation)
        };
        let cpu = || server.cpu();
        let measured = match row.client {
            Client::Fio => fio::run(&row, &server, self.duration, folder, &self.interrupt)?,
            Client::Light => light::run(load, server.socket(), EXPORT, &cpu, &self.interrupt)?,
            Client::VhostUser => {
                vhost_user::run(load, self.look, server.socket(), &cpu, &self.interrupt)?
            }
        };
        server.stop()?;
        ensure!(measured.requests > 0, "nothing was answered");
        Ok(measured)
    }
}
